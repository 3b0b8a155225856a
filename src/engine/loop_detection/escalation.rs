//! The ladder that a detected loop climbs: the model is told once, then such calls are denied until the turn ends, then
//! the loop pauses, each time for longer, and in the end it has failed. Pure.
//!
//! Within an episode it only goes up. Something new ends the episode, and so does a sleep of the agent's own choice; a
//! person's `resume` ends a pause and nothing else.

use serde::{Deserialize, Serialize};

use super::signals::LoopSignal;
use super::signature::{CallSignature, ShortHash};
use crate::api::agent::DetectionMode;
use crate::api::condition::LoopSign;

/// Pauses in a row after which the next one is the end.
pub const MOST_PAUSES: u32 = 4;
/// Prints that are denied at most, the newest.
const MOST_DENIED: usize = 16;
/// Prints that are shown as evidence.
const MOST_SHOWN: usize = 5;

/// How far an episode has gone.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::AsRefStr)]
pub enum EscalationStep {
    /// The model was told.
    Nudged,
    /// The calls of the repetition are denied until the turn ends.
    Denied,
    /// The loop was made to sleep.
    Paused,
    /// The loop has ended.
    Failed,
}

/// A model call: the turn, and the call within it.
pub type CallPosition = (i64, u32);

/// A repetition, from its first signal to something new.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LoopEpisode {
    /// What showed it last.
    pub sign: LoopSign,
    /// What was seen when the last step was taken. No text of a model or a tool.
    pub words: String,
    /// The tool of the last call, where it is one that a source offers; no call at all: `None`.
    pub tool: Option<String>,
    /// How far it has gone.
    pub step: EscalationStep,
    shown: Vec<ShortHash>,
    denied: Vec<ShortHash>,
    /// A denied call was wanted since the last step.
    attempted: bool,
    /// Signals since the last step.
    waited: u32,
    /// The model call whose answer led to the last step: one answer leads to one step, however many calls it wants.
    at: CallPosition,
}

/// What a step depends on beside the signal.
#[derive(Clone, Copy, Debug)]
pub struct EscalationRules {
    /// `guardrails.loopDetection.mode`.
    pub mode: DetectionMode,
    /// Pauses in a row so far.
    pub pauses: u32,
    /// Now.
    pub at: CallPosition,
}

impl LoopEpisode {
    /// The first signal: the model is told.
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

    /// A further signal. The step that it leads to, if it does.
    pub fn on_signal(
        &mut self,
        signal: LoopSignal,
        tool: Option<String>,
        rules: EscalationRules,
    ) -> Option<EscalationStep> {
        self.waited = self.waited.saturating_add(1);
        if rules.mode != DetectionMode::Enforce || self.at == rules.at || self.waited < signal.patience {
            return None;
        }
        // Words without a tool cannot be denied.
        let step = if self.step == EscalationStep::Nudged && tool.is_some() {
            EscalationStep::Denied
        } else {
            pause(rules)
        };
        self.take_step(step, Some((signal, tool)), rules.at);
        Some(step)
    }

    /// A denied call was wanted. The denial alone is the answer the first time.
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
            let surplus = self.denied.len().saturating_sub(MOST_DENIED);
            self.denied.drain(..surplus);
        }
        self.sign = signal.sign;
        self.words = signal.words;
        self.tool = tool;
        self.shown = signal.calls;
        self.shown.truncate(MOST_SHOWN);
    }

    /// Whether a call is denied now.
    pub fn denies(&self, call: CallSignature) -> bool {
        self.denied.contains(&call.raw) || self.denied.contains(&call.masked)
    }

    /// The turn is over: what was denied in it is allowed again.
    pub fn turn_ends(&mut self) {
        self.denied.clear();
        self.attempted = false;
    }

    /// What was seen, with its evidence, for people: names of tools, counts and hashes only.
    pub fn evidence(&self) -> String {
        let shown: Vec<String> = self.shown.iter().map(|print| format!("{print:08x}")).collect();
        let tool = self.tool.as_ref().map_or_else(String::new, |tool| format!("{tool}, "));
        format!("{} ({tool}hash {})", self.words, shown.join(", "))
    }
}

fn pause(rules: EscalationRules) -> EscalationStep {
    if rules.pauses < MOST_PAUSES {
        EscalationStep::Paused
    } else {
        EscalationStep::Failed
    }
}
