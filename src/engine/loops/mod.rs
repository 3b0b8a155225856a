//! Loop detection, as the engine sees it: what each tool call and each silent turn repeats, and what follows. Here: what is
//! remembered, and where it acts on the loop. Signals and steps are in files of their own.
//!
//! Keeps hashes only, and a bounded number of them. What a controller sees from outside is not its business.

mod ladder;
mod signals;
mod signature;

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use serde_json::json;

use ladder::{Episode, MOST_PAUSES, Rules, Step};
pub use signals::Ending;
use signals::{Recent, Signal};
use signature::Print;

use super::gate::Denial;
use super::machine::Engine;
use super::message::{Message, ToolCall};
use super::outbox::{Outbox, line};
use super::view::Detected;
use super::work::{Slot, tool_line};
use super::yield_tool::Pace;
use super::{RecordKind, clock};
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
pub struct Watch {
    recent: Recent,
    /// What the last turn without a tool said, and how often in a row.
    said: (Print, u32),
    episode: Option<Episode>,
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

impl Watch {
    /// Whether the ladder has come to its end.
    pub(super) fn has_failed(&self) -> bool {
        self.episode
            .as_ref()
            .is_some_and(|episode| episode.step == Step::Failed)
    }

    /// The model has lost what it saw: seeing it again is no repetition.
    pub(super) fn forgets(&mut self) {
        self.recent = Recent::default();
    }

    /// The turn was given up, and will be tried again.
    pub(super) fn turn_failed(&mut self) {
        self.recent.sleeps();
        self.turn_ends();
    }

    fn turn_ends(&mut self) {
        (self.progress, self.stepped, self.called) = (false, false, false);
        if let Some(episode) = &mut self.episode {
            episode.turn_ends();
        }
    }

    /// The agent sleeps of its own choice for so long. Who polls each second does not wait.
    fn naps(&mut self, wait: SignedDuration) {
        self.napped = self.napped.saturating_add(wait);
        if self.napped >= LEAST_WAIT {
            self.napped = SignedDuration::ZERO;
            self.sleeps();
        }
    }

    /// The agent sleeps of its own choice: who waits like that may ask again.
    fn sleeps(&mut self) {
        if self.progress || !self.stepped {
            self.pauses = 0;
        }
        self.recent.sleeps();
        self.said = (0, 0);
        self.episode = None;
    }

    /// A turn without a tool said this. The signal that it gives.
    fn hears(&mut self, said: Print) -> Option<Signal> {
        let (before, times) = self.said;
        self.said = if before == said {
            (said, times.saturating_add(1))
        } else {
            (said, 1)
        };
        let of_words = |episode: &Episode| episode.tool.is_none();
        if before != said && self.episode.as_ref().is_some_and(of_words) {
            self.episode = None;
        }
        let (_, times) = self.said;
        (times >= EQUAL_TEXTS).then(|| Signal {
            sign: LoopSign::NoProgress,
            words: format!("the same answer without a tool {times} turns in a row"),
            calls: vec![said],
            patience: 1,
        })
    }
}

impl Engine {
    /// A process starts: what the settings no longer want is dropped, and a loop that ended begins anew.
    pub(super) fn start_watch(&mut self, anew: bool) {
        let mode = self.settings.loop_detection.mode;
        if anew || mode == DetectionMode::Disabled {
            self.state.watch = Watch::default();
        }
        let own = |until: &Option<_>| until.is_some();
        let hold = self.state.reasons.get(&PauseReason::LoopDetected);
        if mode != DetectionMode::Enforce && hold.is_some_and(|hold| own(&hold.until)) {
            self.clear(PauseReason::LoopDetected);
        }
    }

    /// Looks at a tool call that has its result. What the model is to be told beside it.
    pub(super) fn look_at(
        &mut self,
        wanted: &ToolCall,
        text: &str,
        ending: Ending,
        out: &mut Outbox,
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
        self.climb(signal, Some(tool.to_owned()), out)
    }

    /// A turn is complete: what it said counts when it did nothing else, and how it ended.
    pub(super) fn look_at_turn(&mut self, pace: &Pace, out: &mut Outbox) {
        if self.settings.loop_detection.mode == DetectionMode::Disabled {
            return;
        }
        let news = self.state.turn.as_ref().is_some_and(|turn| turn.shown.is_seen());
        if let Pace::Sleep { wait, .. } = pace {
            self.state.watch.naps(*wait);
        } else if news {
            // Whoever hears of the same thing twice may well answer the same.
            self.state.watch.recent.sleeps();
            self.state.watch.said = (0, 0);
        } else if self.state.watch.called {
            self.state.watch.said = (0, 0);
        } else {
            let said = signature::text(self.last_words());
            if let Some(signal) = self.state.watch.hears(said)
                && let Some(told) = self.climb(signal, None, out)
            {
                self.note(&told);
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

    fn rules(&self) -> Rules {
        Rules {
            mode: self.settings.loop_detection.mode,
            pauses: self.state.watch.pauses,
            at: self.state.turn.as_ref().map_or((0, 0), |turn| (turn.number, turn.call)),
        }
    }

    /// A signal: the ladder's next step, when it is due. `tool`: of the call that gave it. What the model is to be told.
    fn climb(&mut self, signal: Signal, tool: Option<String>, out: &mut Outbox) -> Option<String> {
        let rules = self.rules();
        let step = match &mut self.state.watch.episode {
            Some(episode) => episode.goes_on(signal, tool, rules)?,
            none => {
                *none = Some(Episode::begin(signal, tool, rules.at));
                Step::Nudged
            }
        };
        Some(self.act_on(step, out))
    }

    /// Does what a step promises. What the model is told of it.
    fn act_on(&mut self, step: Step, out: &mut Outbox) -> String {
        let Some(episode) = &self.state.watch.episode else {
            return String::new();
        };
        let (words, sign) = (episode.words.clone(), episode.sign);
        self.state.watch.stepped = true;
        let note = format!("{}: {}", sign.as_ref(), step.as_ref());
        out.record(line(RecordKind::LoopDetected, self.turn_number(), note));
        let enforced = self.settings.loop_detection.mode == DetectionMode::Enforce;
        let then = match step {
            Step::Nudged if enforced => {
                "do something else, or sleep with yield for 10 s or more; else it will be stopped".to_owned()
            }
            Step::Nudged => "do something else, or sleep with yield for 10 s or more".to_owned(),
            Step::Denied => "such calls are denied for the rest of this turn; do something else, or sleep".to_owned(),
            Step::Paused => format!("the loop is made to sleep for {} s", self.pause_for_loop(out).as_secs()),
            Step::Failed => "the loop ends".to_owned(),
        };
        format!("the runtime saw {words}: {then}")
    }

    /// Makes the loop sleep, for how long.
    fn pause_for_loop(&mut self, out: &Outbox) -> SignedDuration {
        let watch = &mut self.state.watch;
        let wait = clock::doubled(FIRST_SLEEP, watch.pauses, self.settings.max_sleep);
        watch.pauses = watch.pauses.saturating_add(1);
        let message = self.detected().map_or_else(String::new, |detected| detected.message);
        // What a person must look at stays theirs.
        if !self.state.reasons.contains_key(&PauseReason::LoopDetected) {
            let until = clock::after(out.now, wait);
            self.hold(PauseReason::LoopDetected, Some(until), message);
        }
        wait
    }

    /// Denies what waits and repeats: it is not run.
    pub(super) fn deny_repetitions(&mut self, out: &mut Outbox) {
        if self.is_heartbeat() {
            return;
        }
        let places = self.work().map_or(0, |work| work.slots.len());
        for place in 0..places {
            if self.is_repetition(place) {
                self.deny_repetition(place, out);
            }
        }
    }

    fn is_repetition(&self, place: usize) -> bool {
        let waits = matches!(
            self.work().and_then(|work| work.slots.get(place)),
            Some(Slot::Waiting(_))
        );
        let (true, Some(episode), Some(wanted)) = (waits, &self.state.watch.episode, self.wanted(place)) else {
            return false;
        };
        episode.denies(signature::call(&wanted.name, &wanted.arguments))
    }

    fn deny_repetition(&mut self, place: usize, out: &mut Outbox) {
        let rules = self.rules();
        let (Some(id), Some(tool)) = (self.run_id(place), self.wanted(place).map(|wanted| wanted.name.clone())) else {
            return;
        };
        let Some(episode) = &mut self.state.watch.episode else {
            return;
        };
        let detail = format!("the runtime saw {}", episode.words);
        let step = episode.is_attempted(rules);
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
            Denial::Repeated.as_ref(),
            |line| {
                line.tool = Some(tool);
            },
        ));
        if let Some(slot) = self.slot(place) {
            *slot = Slot::Result(error.to_string());
        }
        // A `yield` beside it waits until the model has seen this.
        if let Some(work) = self.state.turn.as_mut().and_then(|turn| turn.work.as_mut()) {
            work.failed = true;
        }
    }

    /// The repetition that the loop is in, for people.
    pub(super) fn detected(&self) -> Option<Detected> {
        let episode = self.state.watch.episode.as_ref()?;
        let then = match episode.step {
            Step::Nudged => "the model was told".to_owned(),
            Step::Denied => "the model was told, and such calls are denied until its turn ends".to_owned(),
            Step::Paused => format!(
                "the loop is made to sleep, {} of {MOST_PAUSES} times in a row; agentloop.dev/resume ends the sleep, and \
                 something new ends the count",
                self.state.watch.pauses
            ),
            Step::Failed => format!(
                "after {MOST_PAUSES} forced sleeps in a row the loop has ended. Look at its instructions and tools; a \
                 changed spec or the annotation agentloop.dev/wake starts it again"
            ),
        };
        Some(Detected {
            sign: episode.sign,
            message: format!("{}: {then}", episode.evidence()),
        })
    }
}
