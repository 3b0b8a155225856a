//! Whether a loop is up, for which pod, and how it is seen from outside. Independent of what it does in a turn.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::time_math;
use agentloop_api::status::{LoopOutcome, LoopState, PauseReason};

/// Whether the loop is up. Independent of pauses and sleeps.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LifecyclePhase {
    /// Not running.
    #[default]
    Stopped,
    /// Coming up.
    Starting,
    /// Up: running, sleeping or paused.
    Active,
    /// Finishing what is under way.
    Stopping,
}

/// How soon a user wants the loop to end.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopRequest {
    /// After the turn that runs.
    AfterTurn,
    /// Without waiting for anything.
    AtOnce,
}

/// A public state and its reasons, as people see them.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PublicState {
    /// One of the six.
    pub state: LoopState,
    /// In order, each once.
    pub reasons: Vec<PauseReason>,
}

impl std::fmt::Display for PublicState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.state)?;
        if self.reasons.is_empty() {
            return Ok(());
        }
        let reasons: Vec<&str> = self.reasons.iter().map(AsRef::as_ref).collect();
        write!(f, " ({})", reasons.join(", "))
    }
}

/// The life of a loop, over pods and processes.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct Lifecycle {
    /// Of the newest pod that ran the loop.
    epoch: i64,
    #[serde(rename = "lifecycle")]
    phase: LifecyclePhase,
    /// The public state as last journalled; if the current one differs, that is a transition.
    public: PublicState,
    /// When that state began.
    since: Option<Timestamp>,
    /// The latest `now`, to detect a clock that was set back.
    last_now: Option<Timestamp>,
    outcome: Option<LoopOutcome>,
    /// A user wants the loop to end; kept until the loop starts again.
    stop_request: Option<StopRequest>,
    /// Stopped because of `spec.suspend`.
    suspended: bool,
    /// [`EngineSettings::spec`](super::settings::EngineSettings::spec) of the previous process.
    spec: Option<u64>,
}

impl Lifecycle {
    /// The same for an Agent that was recreated and keeps the volume of the previous one: its epochs start at zero,
    /// and no stop is requested. A stop in progress belonged to the previous Agent.
    pub fn inherited(self) -> Self {
        let was_ending = self.phase == LifecyclePhase::Stopping && self.outcome.is_some();
        Self {
            epoch: 0,
            stop_request: None,
            phase: if was_ending {
                LifecyclePhase::Stopped
            } else {
                self.phase
            },
            ..self
        }
    }

    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    pub fn phase(&self) -> LifecyclePhase {
        self.phase
    }

    /// Whether the loop is up and not about to stop.
    pub fn is_active(&self) -> bool {
        self.phase == LifecyclePhase::Active
    }

    /// Whether it finishes what is under way.
    pub fn is_stopping(&self) -> bool {
        self.phase == LifecyclePhase::Stopping
    }

    pub fn is_stopped(&self) -> bool {
        self.phase == LifecyclePhase::Stopped
    }

    pub fn outcome(&self) -> Option<LoopOutcome> {
        self.outcome
    }

    pub fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// The public state as last journalled.
    pub fn public(&self) -> &PublicState {
        &self.public
    }

    /// When the public state began.
    pub fn since(&self) -> Option<Timestamp> {
        self.since
    }

    /// The time of the latest input.
    pub fn last_now(&self) -> Option<Timestamp> {
        self.last_now
    }

    /// An input arrived. Returns by how much the clock was set back since the one before: the start of the public state has
    /// moved with it.
    pub fn input_at(&mut self, now: Timestamp) -> SignedDuration {
        let last = self.last_now.replace(now);
        let back = last.map_or(SignedDuration::ZERO, |last| last.duration_since(now));
        let back = back.max(SignedDuration::ZERO);
        self.since = self.since.map(|since| time_math::before(since, back));
        back
    }

    /// A process of this pod runs the loop. Returns whether it is the same pod as before.
    pub fn taken_over(&mut self, epoch: i64) -> bool {
        std::mem::replace(&mut self.epoch, epoch) == epoch
    }

    /// The loop comes up. Returns whether it had ended, and begins from the start.
    pub fn starting(&mut self) -> bool {
        self.phase = LifecyclePhase::Starting;
        self.suspended = false;
        let has_ended = self.outcome.take().is_some();
        if has_ended {
            self.stop_request = None;
        }
        has_ended
    }

    pub fn active(&mut self) {
        self.phase = LifecyclePhase::Active;
    }

    pub fn stopping(&mut self) {
        self.phase = LifecyclePhase::Stopping;
    }

    pub fn stopped(&mut self) {
        self.phase = LifecyclePhase::Stopped;
    }

    pub fn suspend(&mut self) {
        self.suspended = true;
    }

    /// A user wants the loop to end. A later request does not make it wait longer.
    pub fn request_stop(&mut self, request: StopRequest) {
        if self.outcome.is_none() {
            self.stop_request = self.stop_request.max(Some(request));
        }
    }

    /// Whether a user wants the loop to end, and how soon.
    pub fn stop_request(&self) -> Option<StopRequest> {
        self.stop_request
    }

    /// A user wants the loop to continue after all.
    pub fn withdraw_stop_request(&mut self) {
        self.stop_request = None;
    }

    /// The loop ends for good.
    pub fn end(&mut self, outcome: LoopOutcome) {
        self.outcome = Some(outcome);
        self.stopping();
    }

    /// The spec of this process. Whether it differs from that of the previous one.
    pub fn set_spec(&mut self, spec: u64) -> bool {
        self.spec.replace(spec).is_some_and(|before| before != spec)
    }

    /// The public state has changed. Returns the one before.
    pub fn set_public(&mut self, public: PublicState, now: Timestamp) -> PublicState {
        if public.state != self.public.state {
            self.since = Some(now);
        }
        std::mem::replace(&mut self.public, public)
    }
}
