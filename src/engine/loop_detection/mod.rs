//! Loop detection inside the engine: what each tool call and each turn without one repeats, and what follows. Owns what
//! is remembered, and how it acts on the loop. Signals and escalation steps are in their own files.
//!
//! Keeps only hashes, and a bounded number of them. What the controller detects from outside is not handled here.

mod escalation;
mod signals;
pub(crate) mod signature;

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use serde_json::json;

use escalation::{EscalationRules, EscalationStep, LoopEpisode, MAX_PAUSES};
pub use signals::ToolCallEnding;
use signals::{LoopSignal, RecentCalls};
pub(crate) use signature::{CallSignature, ShortHash};

use super::effects::{EffectBuffer, journal_line};
use super::machine::Engine;
use super::message::{Message, ToolCall};
use super::modes::LoopPace;
use super::tools::admission::DenialReason;
use super::tools::batch::{ToolBatch, ToolSlot};
use super::view::DetectedRepetition;
use super::{JournalRecord, RecordDetail, RecordKind, time_math};
use agentloop_api::agent::DetectionMode;
use agentloop_api::condition::LoopSign;
use agentloop_api::status::PauseReason;
use agentloop_api::usage_counts::GuardrailTrip;

/// Turns in a row without a [`ToolCall`] that say the same, which are a loop.
pub const EQUAL_TEXTS: u32 = 3;
/// Sleeps that add up to this much count as waiting.
const MIN_WAIT: SignedDuration = SignedDuration::from_secs(10);
/// The first forced sleep; each further one in a row doubles it.
const FIRST_SLEEP: SignedDuration = SignedDuration::from_secs(60);

/// What is remembered of the past.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct LoopDetector {
    recent: RecentCalls,
    /// Text of the last turn without a [`ToolCall`], and how often in a row.
    #[serde(rename = "said")]
    last_text: (ShortHash, u32),
    episode: Option<LoopEpisode>,
    /// Pauses in a row.
    pauses: u32,
    /// The current turn made progress.
    progress: bool,
    /// The current turn led to an [`EscalationStep`].
    stepped: bool,
    /// A [`ToolCall`] of the current turn has its result.
    called: bool,
    /// Naps since the last sleep.
    napped: SignedDuration,
}

impl LoopDetector {
    /// Whether the escalation has reached its last step.
    pub(super) fn has_failed(&self) -> bool {
        self.episode
            .as_ref()
            .is_some_and(|episode| episode.step == EscalationStep::Failed)
    }

    /// The model has lost what it saw: seeing it again is not a repetition.
    pub(super) fn forget_calls(&mut self) {
        self.recent = RecentCalls::default();
    }

    /// Another task begins.
    fn another_task(&mut self) {
        self.forget_calls();
        self.reset_after_sleep();
        self.pauses = 0;
        self.turn_ends();
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

    /// The agent chose to sleep for this long. Polling every second is not waiting.
    fn record_sleep(&mut self, wait: SignedDuration) {
        self.napped = self.napped.saturating_add(wait);
        if self.napped >= MIN_WAIT {
            self.napped = SignedDuration::ZERO;
            self.reset_after_sleep();
        }
    }

    /// The agent waited by its own choice, so it may repeat its calls.
    fn reset_after_sleep(&mut self) {
        if self.progress || !self.stepped {
            self.pauses = 0;
        }
        self.recent.reset_after_sleep();
        self.last_text = (0, 0);
        self.episode = None;
    }

    /// Records the text of a turn without a [`ToolCall`]. Returns the signal that it gives, if any.
    fn observe_text(&mut self, text: ShortHash) -> Option<LoopSignal> {
        let (before, times) = self.last_text;
        self.last_text = if before == text {
            (text, times.saturating_add(1))
        } else {
            (text, 1)
        };
        let of_words = |episode: &LoopEpisode| episode.tool.is_none();
        if before != text && self.episode.as_ref().is_some_and(of_words) {
            self.episode = None;
        }
        let (_, times) = self.last_text;
        (times >= EQUAL_TEXTS).then(|| LoopSignal {
            sign: LoopSign::NoProgress,
            words: format!("the same answer without a tool call {times} turns in a row"),
            calls: vec![text],
            patience: 1,
        })
    }
}

impl Engine {
    /// Another task begins, which may repeat what was done for the one before.
    pub(super) fn watch_another_task(&mut self) {
        self.state.watch.another_task();
    }

    /// At the start of a process: drops what the settings no longer enable, and starts from scratch if the loop had
    /// ended.
    pub(super) fn start_loop_detection(&mut self, restarted: bool) {
        let mode = self.settings.loop_detection.mode;
        if restarted || mode == DetectionMode::Disabled {
            self.state.watch = LoopDetector::default();
        }
        if mode != DetectionMode::Enforce && self.state.reasons.has_end(PauseReason::LoopDetected) {
            self.clear_pause(PauseReason::LoopDetected);
        }
    }

    /// Inspects a [`ToolCall`] that has its result. Returns a note for the model.
    pub(super) fn inspect_call(
        &mut self,
        wanted: &ToolCall,
        text: &str,
        ending: ToolCallEnding,
        out: &mut EffectBuffer,
    ) -> Option<String> {
        if self.settings.loop_detection.mode == DetectionMode::Disabled || !self.turn_rules().detects_loops {
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
        // A name that no source declares is the model's text.
        let toolbox = self.offer.toolbox();
        let known = toolbox.knows(&wanted.name) || toolbox.is_own(&wanted.name);
        let tool = if known { wanted.name.as_str() } else { "an unknown tool" };
        self.escalate(signal, Some(tool.to_owned()), out)
    }

    /// Inspects a completed turn: its text, if it called no tool, and how it ended.
    pub(super) fn inspect_turn(&mut self, pace: &LoopPace, out: &mut EffectBuffer) {
        if self.settings.loop_detection.mode == DetectionMode::Disabled {
            return;
        }
        let news = self.state.turn.as_ref().is_some_and(|turn| turn.shown().is_seen());
        if let LoopPace::Sleep { wait, .. } = pace {
            self.state.watch.record_sleep(*wait);
        } else if news {
            // Repeated news may well get the same answer.
            self.state.watch.recent.reset_after_sleep();
            self.state.watch.last_text = (0, 0);
        } else if self.state.watch.called {
            self.state.watch.last_text = (0, 0);
        } else {
            let text = match pace {
                // Results may differ in numbers alone.
                LoopPace::Finish { result: handed_in } => signature::exact(&handed_in.to_string()),
                LoopPace::CheckConfidence { reason } => signature::text(reason),
                LoopPace::Continue | LoopPace::Sleep { .. } | LoopPace::Shutdown => signature::text(self.last_words()),
            };
            if let Some(signal) = self.state.watch.observe_text(text)
                && let Some(warning) = self.escalate(signal, None, out)
            {
                self.add_note(&warning);
            }
        }
        let watch = &mut self.state.watch;
        if watch.progress && watch.episode.is_none() {
            watch.pauses = 0;
        }
        watch.turn_ends();
    }

    pub(super) fn last_words(&self) -> &str {
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
            at: self
                .state
                .turn
                .as_ref()
                .map_or((0, 0), |turn| (turn.number(), turn.call())),
        }
    }

    /// Takes the next [`EscalationStep`] for a signal, if it is due. `tool`: of the call that gave it. Returns a note
    /// for the model.
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

    /// Acts on a step. Returns a note for the model.
    fn act_on(&mut self, step: EscalationStep, out: &mut EffectBuffer) -> String {
        let Some(episode) = &self.state.watch.episode else {
            return String::new();
        };
        let (words, sign) = (episode.words.clone(), episode.sign);
        self.state.watch.stepped = true;
        let note = format!("{}: {}", sign.as_ref(), step.as_ref());
        out.record(JournalRecord {
            detail: RecordDetail::Trip(GuardrailTrip::LoopDetected(step.action())),
            ..journal_line(RecordKind::LoopDetected, self.turn_number(), note)
        });
        let enforced = self.settings.loop_detection.mode == DetectionMode::Enforce;
        let tool = self.settings.mode.sleep_tool();
        let instead = match tool {
            Some(tool) => format!("do something else, or sleep with {tool} for 10 s or more"),
            None => "do something else".to_owned(),
        };
        let then = match step {
            EscalationStep::Nudged if enforced => format!("{instead}; otherwise it will be stopped"),
            EscalationStep::Nudged => instead,
            EscalationStep::Denied => format!(
                "such calls are denied for the rest of this turn; do something else{}",
                if tool.is_some() { ", or sleep" } else { "" }
            ),
            EscalationStep::Paused if self.mode().escalates_loops() => {
                self.ask_mode(out.now, |mode, _| mode.loop_detected());
                "a person decides after this step whether you continue".to_owned()
            }
            EscalationStep::Paused => format!(
                "the loop is forced to sleep for {} s",
                self.pause_for_loop(out).as_secs()
            ),
            EscalationStep::Failed => "the loop ends".to_owned(),
        };
        format!("the runtime saw {words}: {then}")
    }

    /// Forces the loop to sleep, and returns for how long.
    fn pause_for_loop(&mut self, out: &EffectBuffer) -> SignedDuration {
        let watch = &mut self.state.watch;
        let wait = time_math::doubled(FIRST_SLEEP, watch.pauses, self.settings.max_sleep);
        watch.pauses = watch.pauses.saturating_add(1);
        let message = self.detected().map_or_else(String::new, |detected| detected.message);
        // A pause that needs a person stays.
        if !self.state.reasons.has(PauseReason::LoopDetected) {
            let until = time_math::after(out.now, wait);
            self.raise_pause(PauseReason::LoopDetected, Some(until), message);
        }
        wait
    }

    /// Denies the waiting calls that repeat the loop.
    pub(super) fn deny_repetitions(&mut self, out: &mut EffectBuffer) {
        if !self.turn_rules().detects_loops {
            return;
        }
        let places = self.tool_batch().map_or(0, ToolBatch::places);
        for place in 0..places {
            if self.is_repetition(place) {
                self.deny_repetition(place, out);
            }
        }
    }

    fn is_repetition(&self, place: usize) -> bool {
        let waits = matches!(
            self.tool_batch().and_then(|batch| batch.slot(place)),
            Some(ToolSlot::Waiting(_))
        );
        let (true, Some(episode), Some(wanted)) = (waits, &self.state.watch.episode, self.wanted_call(place)) else {
            return false;
        };
        episode.denies(signature::call(&wanted.name, &wanted.arguments))
    }

    fn deny_repetition(&mut self, place: usize, out: &mut EffectBuffer) {
        let rules = self.rules();
        let (Some(id), Some(wanted)) = (self.run_id(place), self.wanted_call(place).cloned()) else {
            return;
        };
        self.close_gate(place, "withdrawn: the call repeats a loop", out);
        let Some(episode) = &mut self.state.watch.episode else {
            return;
        };
        let detail = format!("the runtime saw {}", episode.words);
        let step = episode.on_denied_attempt(rules);
        let warning = step.map(|step| self.act_on(step, out));
        let sleep = self
            .settings
            .mode
            .sleep_tool()
            .map(|tool| format!(", or sleep with {tool}"));
        let sleep = sleep.unwrap_or_default();
        let error = json!({
            "error": "denied",
            "detail": warning.unwrap_or(detail),
            "fix": format!("this call is denied for the rest of this turn: do something else{sleep}"),
        });
        // It does not count against the tool in this turn: its other calls are allowed.
        out.record(self.denied_line(id, &wanted, DenialReason::Repeated));
        self.mode_call_denied(&wanted, DenialReason::Repeated, out.now);
        // A `yield` beside it waits until the model has seen this.
        if let Some(batch) = self.batch_mut() {
            batch.deny_repetition(place, error.to_string());
        }
    }

    /// The repetition that the loop is in, for people.
    pub(super) fn detected(&self) -> Option<DetectedRepetition> {
        let episode = self.state.watch.episode.as_ref()?;
        let then = match episode.step {
            EscalationStep::Nudged => "the model was warned".to_owned(),
            EscalationStep::Denied => "the model was warned, and such calls are denied until its turn ends".to_owned(),
            EscalationStep::Paused if self.mode().escalates_loops() => {
                "a person decides after the current step whether the loop continues".to_owned()
            }
            EscalationStep::Paused => format!(
                "the loop is forced to sleep, {} of {MAX_PAUSES} times in a row; the annotation agentloop.dev/resume ends \
                 the sleep, and progress resets the count",
                self.state.watch.pauses
            ),
            EscalationStep::Failed => format!(
                "after {MAX_PAUSES} forced sleeps in a row the loop has ended. Check its instructions and tools; a \
                 changed spec or the annotation agentloop.dev/wake restarts it"
            ),
        };
        Some(DetectedRepetition {
            sign: episode.sign,
            message: format!("{}: {then}", episode.evidence()),
        })
    }
}
