//! Loop detection, as the engine sees it: what each tool call and each silent turn repeats, and what follows. Here: what is
//! remembered, and where it acts on the loop. Signals and steps are in files of their own.
//!
//! Keeps hashes only, and a bounded number of them. What a controller sees from outside is not its business.

mod escalation;
mod signals;
mod signature;

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use serde_json::json;

use escalation::{EscalationRules, EscalationStep, LoopEpisode, MOST_PAUSES};
pub use signals::ToolCallEnding;
use signals::{LoopSignal, RecentCalls};
use signature::ShortHash;

use super::effects::{EffectBuffer, journal_line};
use super::machine::Engine;
use super::message::{Message, ToolCall};
use super::tool_admission::DenialReason;
use super::tool_batch::{ToolSlot, tool_line};
use super::view::DetectedRepetition;
use super::yield_tool::LoopPace;
use super::{RecordKind, time_math};
use crate::api::agent::DetectionMode;
use crate::api::condition::LoopSign;
use crate::api::status::PauseReason;

/// Turns in a row that say the same without a tool, which are a loop.
pub const EQUAL_TEXTS: u32 = 3;
/// Sleeps that come to so much together are a wait.
const LEAST_WAIT: SignedDuration = SignedDuration::from_secs(10);
/// The first forced sleep; each further one in a row is twice as long.
const FIRST_SLEEP: SignedDuration = SignedDuration::from_secs(60);

/// What is remembered of the past.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct LoopDetector {
    recent: RecentCalls,
    /// What the last turn without a tool said, and how often in a row.
    said: (ShortHash, u32),
    episode: Option<LoopEpisode>,
    /// Pauses in a row.
    pauses: u32,
    /// Something came of the present turn.
    progress: bool,
    /// The present turn led to a step.
    stepped: bool,
    /// A tool call of the present turn has its result.
    called: bool,
    /// Naps since the last sleep.
    napped: SignedDuration,
}

impl LoopDetector {
    /// Whether the ladder has come to its end.
    pub(super) fn has_failed(&self) -> bool {
        self.episode
            .as_ref()
            .is_some_and(|episode| episode.step == EscalationStep::Failed)
    }

    /// The model has lost what it saw: seeing it again is no repetition.
    pub(super) fn forget_calls(&mut self) {
        self.recent = RecentCalls::default();
    }

    /// The turn was given up, and will be tried again.
    pub(super) fn turn_failed(&mut self) {
        self.recent.reset_after_sleep();
        self.turn_ends();
    }

    fn turn_ends(&mut self) {
        (self.progress, self.stepped, self.called) = (false, false, false);
        if let Some(episode) = &mut self.episode {
            episode.turn_ends();
        }
    }

    /// The agent sleeps of its own choice for so long. Who polls each second does not wait.
    fn record_sleep(&mut self, wait: SignedDuration) {
        self.napped = self.napped.saturating_add(wait);
        if self.napped >= LEAST_WAIT {
            self.napped = SignedDuration::ZERO;
            self.reset_after_sleep();
        }
    }

    /// The agent sleeps of its own choice: who waits like that may ask again.
    fn reset_after_sleep(&mut self) {
        if self.progress || !self.stepped {
            self.pauses = 0;
        }
        self.recent.reset_after_sleep();
        self.said = (0, 0);
        self.episode = None;
    }

    /// A turn without a tool said this. The signal that it gives.
    fn observe_text(&mut self, said: ShortHash) -> Option<LoopSignal> {
        let (before, times) = self.said;
        self.said = if before == said {
            (said, times.saturating_add(1))
        } else {
            (said, 1)
        };
        let of_words = |episode: &LoopEpisode| episode.tool.is_none();
        if before != said && self.episode.as_ref().is_some_and(of_words) {
            self.episode = None;
        }
        let (_, times) = self.said;
        (times >= EQUAL_TEXTS).then(|| LoopSignal {
            sign: LoopSign::NoProgress,
            words: format!("the same answer without a tool {times} turns in a row"),
            calls: vec![said],
            patience: 1,
        })
    }
}

impl Engine {
    /// A process starts: what the settings no longer want is dropped, and a loop that ended begins anew.
    pub(super) fn start_loop_detection(&mut self, anew: bool) {
        let mode = self.settings.loop_detection.mode;
        if anew || mode == DetectionMode::Disabled {
            self.state.watch = LoopDetector::default();
        }
        let own = |until: &Option<_>| until.is_some();
        let hold = self.state.reasons.get(&PauseReason::LoopDetected);
        if mode != DetectionMode::Enforce && hold.is_some_and(|hold| own(&hold.until)) {
            self.clear_pause(PauseReason::LoopDetected);
        }
    }

    /// Looks at a tool call that has its result. What the model is to be told beside it.
    pub(super) fn inspect_call(
        &mut self,
        wanted: &ToolCall,
        text: &str,
        ending: ToolCallEnding,
        out: &mut EffectBuffer,
    ) -> Option<String> {
        // A heartbeat looks at the same again and again, as it is to.
        if self.settings.loop_detection.mode == DetectionMode::Disabled || self.is_heartbeat() {
            return None;
        }
        let call = signature::call(&wanted.name, &wanted.arguments);
        let result = signature::result(&wanted.name, text);
        let exempt = self.settings.loop_detection.exempts(&wanted.name);
        let watch = &mut self.state.watch;
        watch.called = true;
        if watch.recent.add(call, result, ending, exempt) {
            watch.progress = true;
            watch.episode = None;
            return None;
        }
        let signal = watch.recent.signal()?;
        // A name that nobody declared is the model's text.
        let known = self.toolbox.knows(&wanted.name);
        let tool = if known { wanted.name.as_str() } else { "an unknown tool" };
        self.escalate(signal, Some(tool.to_owned()), out)
    }

    /// A turn is complete: what it said counts when it did nothing else, and how it ended.
    pub(super) fn inspect_turn(&mut self, pace: &LoopPace, out: &mut EffectBuffer) {
        if self.settings.loop_detection.mode == DetectionMode::Disabled {
            return;
        }
        let news = self.state.turn.as_ref().is_some_and(|turn| turn.shown.is_seen());
        if let LoopPace::Sleep { wait, .. } = pace {
            self.state.watch.record_sleep(*wait);
        } else if news {
            // Whoever hears of the same thing twice may well answer the same.
            self.state.watch.recent.reset_after_sleep();
            self.state.watch.said = (0, 0);
        } else if self.state.watch.called {
            self.state.watch.said = (0, 0);
        } else {
            let said = signature::text(self.last_words());
            if let Some(signal) = self.state.watch.observe_text(said)
                && let Some(told) = self.escalate(signal, None, out)
            {
                self.add_note(&told);
            }
        }
        let watch = &mut self.state.watch;
        if watch.progress && watch.episode.is_none() {
            watch.pauses = 0;
        }
        watch.turn_ends();
    }

    fn last_words(&self) -> &str {
        let answer = self.transcript.iter().rev().find_map(|message| match &**message {
            Message::Assistant { text, .. } => Some(text.as_deref().unwrap_or_default()),
            Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
        });
        answer.unwrap_or_default()
    }

    fn rules(&self) -> EscalationRules {
        EscalationRules {
            mode: self.settings.loop_detection.mode,
            pauses: self.state.watch.pauses,
            at: self.state.turn.as_ref().map_or((0, 0), |turn| (turn.number, turn.call)),
        }
    }

    /// A signal: the ladder's next step, when it is due. `tool`: of the call that gave it. What the model is to be told.
    fn escalate(&mut self, signal: LoopSignal, tool: Option<String>, out: &mut EffectBuffer) -> Option<String> {
        let rules = self.rules();
        let step = match &mut self.state.watch.episode {
            Some(episode) => episode.on_signal(signal, tool, rules)?,
            none => {
                *none = Some(LoopEpisode::begin(signal, tool, rules.at));
                EscalationStep::Nudged
            }
        };
        Some(self.act_on(step, out))
    }

    /// Does what a step promises. What the model is told of it.
    fn act_on(&mut self, step: EscalationStep, out: &mut EffectBuffer) -> String {
        let Some(episode) = &self.state.watch.episode else {
            return String::new();
        };
        let (words, sign) = (episode.words.clone(), episode.sign);
        self.state.watch.stepped = true;
        let note = format!("{}: {}", sign.as_ref(), step.as_ref());
        out.record(journal_line(RecordKind::LoopDetected, self.turn_number(), note));
        let enforced = self.settings.loop_detection.mode == DetectionMode::Enforce;
        let then = match step {
            EscalationStep::Nudged if enforced => {
                "do something else, or sleep with yield for 10 s or more; else it will be stopped".to_owned()
            }
            EscalationStep::Nudged => "do something else, or sleep with yield for 10 s or more".to_owned(),
            EscalationStep::Denied => {
                "such calls are denied for the rest of this turn; do something else, or sleep".to_owned()
            }
            EscalationStep::Paused => format!("the loop is made to sleep for {} s", self.pause_for_loop(out).as_secs()),
            EscalationStep::Failed => "the loop ends".to_owned(),
        };
        format!("the runtime saw {words}: {then}")
    }

    /// Makes the loop sleep, for how long.
    fn pause_for_loop(&mut self, out: &EffectBuffer) -> SignedDuration {
        let watch = &mut self.state.watch;
        let wait = time_math::doubled(FIRST_SLEEP, watch.pauses, self.settings.max_sleep);
        watch.pauses = watch.pauses.saturating_add(1);
        let message = self.detected().map_or_else(String::new, |detected| detected.message);
        // What a person must look at stays theirs.
        if !self.state.reasons.contains_key(&PauseReason::LoopDetected) {
            let until = time_math::after(out.now, wait);
            self.raise_pause(PauseReason::LoopDetected, Some(until), message);
        }
        wait
    }

    /// Denies what waits and repeats: it is not run.
    pub(super) fn deny_repetitions(&mut self, out: &mut EffectBuffer) {
        if self.is_heartbeat() {
            return;
        }
        let places = self.tool_batch().map_or(0, |work| work.slots.len());
        for place in 0..places {
            if self.is_repetition(place) {
                self.deny_repetition(place, out);
            }
        }
    }

    fn is_repetition(&self, place: usize) -> bool {
        let waits = matches!(
            self.tool_batch().and_then(|work| work.slots.get(place)),
            Some(ToolSlot::Waiting(_))
        );
        let (true, Some(episode), Some(wanted)) = (waits, &self.state.watch.episode, self.wanted_call(place)) else {
            return false;
        };
        episode.denies(signature::call(&wanted.name, &wanted.arguments))
    }

    fn deny_repetition(&mut self, place: usize, out: &mut EffectBuffer) {
        let rules = self.rules();
        let (Some(id), Some(tool)) = (
            self.run_id(place),
            self.wanted_call(place).map(|wanted| wanted.name.clone()),
        ) else {
            return;
        };
        let Some(episode) = &mut self.state.watch.episode else {
            return;
        };
        let detail = format!("the runtime saw {}", episode.words);
        let step = episode.on_denied_attempt(rules);
        let told = step.map(|step| self.act_on(step, out));
        let error = json!({
            "error": "denied",
            "detail": told.unwrap_or(detail),
            "fix": "this call is denied for the rest of this turn: do something else, or sleep with yield",
        });
        // It does not count against the tool: other calls of it are welcome.
        out.record(tool_line(
            RecordKind::ToolDenied,
            id,
            DenialReason::Repeated.as_ref(),
            |line| {
                line.tool = Some(tool);
            },
        ));
        if let Some(slot) = self.slot(place) {
            *slot = ToolSlot::Result(error.to_string());
        }
        // A `yield` beside it waits until the model has seen this.
        if let Some(work) = self.state.turn.as_mut().and_then(|turn| turn.work.as_mut()) {
            work.failed = true;
        }
    }

    /// The repetition that the loop is in, for people.
    pub(super) fn detected(&self) -> Option<DetectedRepetition> {
        let episode = self.state.watch.episode.as_ref()?;
        let then = match episode.step {
            EscalationStep::Nudged => "the model was told".to_owned(),
            EscalationStep::Denied => "the model was told, and such calls are denied until its turn ends".to_owned(),
            EscalationStep::Paused => format!(
                "the loop is made to sleep, {} of {MOST_PAUSES} times in a row; agentloop.dev/resume ends the sleep, and \
                 something new ends the count",
                self.state.watch.pauses
            ),
            EscalationStep::Failed => format!(
                "after {MOST_PAUSES} forced sleeps in a row the loop has ended. Look at its instructions and tools; a \
                 changed spec or the annotation agentloop.dev/wake starts it again"
            ),
        };
        Some(DetectedRepetition {
            sign: episode.sign,
            message: format!("{}: {then}", episode.evidence()),
        })
    }
}
