//! A mode for tests: it runs a given number of turns with its own message and ends. Its tool `finish` ends it at once.
//!
//! It shows what a mode needs, and that the rest of the engine serves any mode.

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{LoopMode, LoopPace, ModeCallDecision, ModeContext, NextStep, TurnEnd, TurnOpening};
use crate::message::{self, ToolCall, ToolDefinition};
use crate::settings::{EngineSettings, ModeSettings};
use crate::turn::kind::{ModeTurnKind, TurnKind};
use agentloop_api::status::LoopOutcome;

pub const RUNTIME: &str = "You count down. The tool `finish` ends the countdown.";

/// The state between the turns.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct CountdownState {
    completed: u32,
    failed: u32,
    finished: bool,
}

fn turns(context: &ModeContext<'_>) -> u32 {
    match context.settings.mode {
        ModeSettings::Countdown { turns } => turns,
        ModeSettings::Continuous | ModeSettings::Goal(_) | ModeSettings::Task(_) => 0,
    }
}

impl LoopMode for CountdownState {
    fn runtime_text(&self) -> &'static str {
        RUNTIME
    }

    fn started(&mut self, restarted: bool, _context: &ModeContext<'_>) {
        if restarted {
            *self = Self::default();
        }
    }

    fn next(&self, context: &ModeContext<'_>) -> NextStep {
        if self.finished || self.completed >= turns(context) {
            return NextStep::Stop(LoopOutcome::Completed);
        }
        NextStep::Begin {
            kind: TurnKind::Own,
            at: context.next_turn.unwrap_or(context.now),
        }
    }

    fn begin_turn(&mut self, _kind: ModeTurnKind, opening: &TurnOpening<'_>, context: &ModeContext<'_>) -> String {
        let left = turns(context).saturating_sub(self.completed);
        format!(
            "Turn {}: {left} to go. {}",
            opening.number,
            opening.briefing.notes().join(" ")
        )
    }

    fn turn_ended(&mut self, _kind: ModeTurnKind, end: &TurnEnd<'_>, context: &ModeContext<'_>) -> NextStep {
        match end {
            TurnEnd::Completed { pace, .. } => {
                self.completed += 1;
                self.finished |= **pace == LoopPace::Shutdown;
            }
            TurnEnd::Failed { .. } => self.failed += 1,
        }
        self.next(context)
    }

    fn tools(&self, _settings: &EngineSettings, _events: Option<&[String]>) -> Vec<ToolDefinition> {
        vec![ToolDefinition {
            name: "finish".into(),
            description: "Ends the countdown.".into(),
            parameters: json!({"type": "object", "additionalProperties": false}),
        }]
    }

    fn decide_call(
        &self,
        _kind: ModeTurnKind,
        call: &ToolCall,
        _context: &ModeContext<'_>,
    ) -> Option<ModeCallDecision> {
        if call.name != "finish" {
            return None;
        }
        Some(match message::arguments(&call.arguments) {
            Some(arguments) if arguments.is_empty() => ModeCallDecision::EndsTurn {
                pace: LoopPace::Shutdown,
                result: "Finished.".to_owned(),
                result_after_runs: None,
            },
            _ => ModeCallDecision::Rejected("finish takes no arguments".to_owned()),
        })
    }
}
