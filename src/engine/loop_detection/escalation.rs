//! The escalation of a detected loop: the model is warned once, then such calls are denied until the turn ends, then the
//! loop pauses, each time for longer, and finally it fails. Pure.
//!
//! Within an episode it only goes up. Progress ends the episode, and so does a sleep that the agent chose; a person's
//! `resume` only ends a pause.

use serde::{Deserialize, Serialize};

use super::signals::LoopSignal;
use super::signature::{CallSignature, ShortHash};
use agentloop_api::agent::DetectionMode;
use agentloop_api::condition::LoopSign;
use agentloop_api::usage_counts::TripAction;

/// Pauses in a row after which the next step is the last.
pub const MAX_PAUSES: u32 = 4;
/// Maximum number of hashes that are denied, the newest ones.
const MAX_DENIED: usize = 16;
/// Hashes that are shown as evidence.
const MAX_SHOWN: usize = 5;

/// How far an episode has escalated.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::AsRefStr)]
pub enum EscalationStep {
    /// The model was warned.
    Nudged,
    /// The calls of the repetition are denied until the turn ends.
    Denied,
    /// The loop was forced to sleep.
    Paused,
    /// The loop has ended.
    Failed,
}

impl EscalationStep {
    /// As which it is counted.
    pub const fn action(self) -> TripAction {
        match self {
            Self::Nudged => TripAction::Warn,
            Self::Denied => TripAction::Deny,
            Self::Paused => TripAction::Pause,
            Self::Failed => TripAction::Kill,
        }
    }
}

/// A model call: the turn, and the call within it.
pub type CallPosition = (i64, u32);

/// A repetition, from its first signal until progress.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LoopEpisode {
    /// The latest sign.
    pub sign: LoopSign,
    /// What was detected when the last step was taken. Never text of a model or a tool.
    pub words: String,
    /// The tool of the last call, if a source offers it; `None`: there was no call.
    pub tool: Option<String>,
    /// How far it has escalated.
    pub step: EscalationStep,
    shown: Vec<ShortHash>,
    denied: Vec<ShortHash>,
    /// A denied call was requested since the last step.
    attempted: bool,
    /// Signals since the last step.
    waited: u32,
    /// The model call whose answer led to the last step: one answer leads to one step, however many calls it requests.
    at: CallPosition,
}

/// What a step depends on besides the signal.
#[derive(Clone, Copy, Debug)]
pub struct EscalationRules {
    /// `guardrails.loopDetection.mode`.
    pub mode: DetectionMode,
    /// Pauses in a row so far.
    pub pauses: u32,
    /// The current position.
    pub at: CallPosition,
}

impl LoopEpisode {
    /// The first signal: the model is warned.
    pub fn begin(signal: LoopSignal, tool: Option<String>, at: CallPosition) -> Self {
        let mut episode = Self {
            sign: signal.sign,
            words: String::new(),
            tool: None,
            step: EscalationStep::Nudged,
            shown: Vec::new(),
            denied: Vec::new(),
            attempted: false,
            waited: 0,
            at,
        };
        episode.take_step(EscalationStep::Nudged, Some((signal, tool)), at);
        episode
    }

    /// A further signal. Returns the step that it leads to, if any.
    pub fn on_signal(
        &mut self,
        signal: LoopSignal,
        tool: Option<String>,
        rules: EscalationRules,
    ) -> Option<EscalationStep> {
        self.waited = self.waited.saturating_add(1);
        // However many repeating calls one answer contains, it leads to one step only.
        if rules.mode != DetectionMode::Enforce || self.at == rules.at || self.waited < signal.patience {
            return None;
        }
        // Text without a tool call cannot be denied.
        let step = if self.step == EscalationStep::Nudged && tool.is_some() {
            EscalationStep::Denied
        } else {
            pause(rules)
        };
        self.take_step(step, Some((signal, tool)), rules.at);
        Some(step)
    }

    /// A denied call was requested. The first time, the denial is the only answer.
    pub fn on_denied_attempt(&mut self, rules: EscalationRules) -> Option<EscalationStep> {
        if self.at == rules.at {
            return None;
        }
        if !self.attempted {
            self.attempted = true;
            self.at = rules.at;
            return None;
        }
        let step = pause(rules);
        self.take_step(step, None, rules.at);
        Some(step)
    }

    fn take_step(&mut self, step: EscalationStep, signal: Option<(LoopSignal, Option<String>)>, at: CallPosition) {
        self.step = step;
        self.waited = 0;
        self.at = at;
        let Some((signal, tool)) = signal else {
            return;
        };
        if step == EscalationStep::Denied {
            self.denied.extend(&signal.calls);
            let surplus = self.denied.len().saturating_sub(MAX_DENIED);
            self.denied.drain(..surplus);
        }
        self.sign = signal.sign;
        self.words = signal.words;
        self.tool = tool;
        self.shown = signal.calls;
        self.shown.truncate(MAX_SHOWN);
    }

    /// Whether a call is denied now.
    pub fn denies(&self, call: CallSignature) -> bool {
        self.denied.contains(&call.raw) || self.denied.contains(&call.masked)
    }

    /// The turn is over: its denials end.
    pub fn turn_ends(&mut self) {
        self.denied.clear();
        self.attempted = false;
    }

    /// What was detected, with its evidence, for people: only names of tools, counts and hashes.
    pub fn evidence(&self) -> String {
        let shown: Vec<String> = self.shown.iter().map(|print| format!("{print:08x}")).collect();
        let tool = self.tool.as_ref().map_or_else(String::new, |tool| format!("{tool}, "));
        format!("{} ({tool}hash {})", self.words, shown.join(", "))
    }
}

fn pause(rules: EscalationRules) -> EscalationStep {
    if rules.pauses < MAX_PAUSES {
        EscalationStep::Paused
    } else {
        EscalationStep::Failed
    }
}
