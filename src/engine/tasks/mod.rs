//! Tasks: requests to the agent, each worked on and answered once. Those of one origin are begun in the order of their arrival,
//! and the origins take turns.
//!
//! Owns which tasks wait, which one is under way, its limits, and the response to it. When the next task begins is up to
//! the mode. A waiting task is a row of the journal and not part of the snapshot, so that a long queue does not make each
//! commit larger: every change is a [`TaskChange`] of the record that it is committed with.

mod clock;
mod limits;
mod queue;
pub(crate) mod requests;
pub mod response;
mod scale_down;
mod served;

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use agentloop_api::status::{LoopState, PauseReason};
use agentloop_api::task::{MAX_RECENT, TaskKind, TaskLimit, TaskOutcome};

use crate::effects::{EffectBuffer, journal_line};
use crate::machine::Engine;
use crate::turn::Turn;
use crate::{JournalRecord, RecordKind, time_math};
use clock::TaskClock;
pub(crate) use queue::TaskQueue;
pub use response::{TaskEnding, TaskResponse};
use served::ServedOrigins;

/// A task that is offered to the loop.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TaskOffer {
    /// Unique to the task: an offer with a known id is a repetition.
    pub id: String,
    pub origin: TaskOrigin,
    /// The text of the task. May contain data from outside.
    pub prompt: String,
    /// Source of untrusted content in the text, if its sender says that it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untrusted: Option<String>,
}

/// Where a task came from.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum TaskOrigin {
    /// `spec.task.prompt`.
    Spec,
    /// An event of the Sensor with this name.
    Sensor(String),
    /// A request of the user with this name.
    Request(String),
}

impl TaskOrigin {
    #[must_use]
    pub const fn kind(&self) -> TaskKind {
        match self {
            Self::Spec => TaskKind::Spec,
            Self::Sensor(_) => TaskKind::Sensor,
            Self::Request(_) => TaskKind::Request,
        }
    }
}

/// A change of the journal's table of tasks.
#[derive(Clone, Debug, PartialEq)]
pub enum TaskChange {
    /// The task waits.
    Accepted(TaskOffer),
    /// The task of this id is under way.
    Started(String),
    /// The task has its response.
    Ended(TaskResponse),
}

/// What is kept of tasks in the snapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct TaskLog {
    current: Option<CurrentTask>,
    /// The tasks that ended last, the newest first.
    recent: VecDeque<EndedTask>,
    /// The spec whose task was accepted last.
    own: Option<u64>,
    /// A request was answered since the last turn of the mode.
    own_turn_first: bool,
    /// When the last task of a spec ended.
    own_ended_at: Option<Timestamp>,
    /// Whose tasks were started: the next one is of an origin that waits longer.
    #[serde(skip_serializing_if = "ServedOrigins::is_empty")]
    served: ServedOrigins,
}

/// The task under way.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct CurrentTask {
    id: String,
    origin: TaskOrigin,
    started_at: Timestamp,
    #[serde(default)]
    clock: TaskClock,
}

/// A task that has ended, without its texts.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct EndedTask {
    pub id: String,
    pub kind: TaskKind,
    pub started_at: Timestamp,
    pub completed_at: Timestamp,
    pub outcome: TaskOutcome,
    /// Set only with [`TaskOutcome::LimitReached`].
    pub reason: Option<TaskLimit>,
    /// Model calls.
    pub iterations: u32,
    /// Tokens, as far as the server reported them.
    pub tokens: u64,
    /// Micro-dollars, as far as prices are known.
    pub cost: i64,
}

impl TaskLog {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a turn of the mode that is due comes before the next request.
    #[must_use]
    pub fn is_own_turn_first(&self) -> bool {
        self.own_turn_first
    }

    /// A turn of the mode has begun.
    pub fn own_turn_begins(&mut self) {
        self.own_turn_first = false;
    }

    pub fn recent(&self) -> impl Iterator<Item = &EndedTask> {
        self.recent.iter()
    }

    /// The same for an Agent that was recreated: the task of its spec is a new one.
    pub(crate) fn inherited(self) -> Self {
        Self {
            own: None,
            own_ended_at: None,
            ..self
        }
    }

    fn ended(&mut self, task: EndedTask) {
        self.recent.push_front(task);
        self.recent.truncate(MAX_RECENT);
    }
}

impl Engine {
    /// The tasks that wait, in the order of their arrival, as the journal has them; feed [`EngineInput::Started`](crate::EngineInput::Started) next.
    pub fn restore_tasks(&mut self, waiting: Vec<TaskOffer>) {
        self.tasks = TaskQueue::restored(waiting, &self.state.tasks.served);
    }

    /// The task that is next, if one waits.
    pub(crate) fn next_task(&self) -> Option<&TaskOffer> {
        self.tasks.first(&self.state.tasks.served)
    }

    /// Whether a task of this origin would be accepted now: the queue has room for it. In a mode other than Task it is
    /// answered in a turn beside the agent's own work.
    #[must_use]
    pub fn accepts_task_of(&self, origin: &TaskOrigin) -> bool {
        self.may_accept_tasks() && self.tasks.has_room_for(origin)
    }

    /// Whether a task would be accepted now that is the only one of its origin.
    pub(crate) fn accepts_tasks_beyond(&self) -> bool {
        self.may_accept_tasks() && (self.tasks.has_room() || self.tasks.has_room_beyond())
    }

    fn may_accept_tasks(&self) -> bool {
        self.accepts_input() && self.state.life.outcome().is_none()
    }

    /// Id of the task under way, if a user requested it.
    #[must_use]
    pub fn requested_task(&self) -> Option<&str> {
        let current = self.state.tasks.current.as_ref();
        let requested = current.filter(|task| task.origin.kind() == TaskKind::Request);
        requested.map(|task| task.id.as_str())
    }

    pub(crate) fn runs_tasks(&self) -> bool {
        self.settings.task().is_some()
    }

    /// A process has started: a new version of the spec brings its own task.
    pub(crate) fn offer_own_task(&mut self, out: &mut EffectBuffer) {
        if self.state.tasks.own != Some(self.settings.spec) {
            self.accept_own_task(out);
        }
    }

    /// When the task of the spec is one again, if no other task waits then.
    pub(crate) fn own_task_due(&self) -> Option<Timestamp> {
        let interval = self.settings.task()?.min_interval?;
        let ended_at = self.state.tasks.own_ended_at.filter(|_| self.waits_for_task())?;
        Some(time_math::after(ended_at, interval))
    }

    /// Offers the task of the spec again once its interval is over.
    pub(crate) fn repeat_own_task(&mut self, out: &mut EffectBuffer) {
        if self.own_task_due().is_some_and(|due| due <= out.now) {
            self.accept_own_task(out);
        }
    }

    fn accept_own_task(&mut self, out: &mut EffectBuffer) {
        let Some(prompt) = self.settings.task().and_then(|task| task.prompt.clone()) else {
            return;
        };
        let spec = self.settings.spec;
        self.state.tasks.own = Some(spec);
        // An earlier spec may return, and its task with it: with the turn, the id is not that of the first time.
        let id = format!("spec-{spec:016x}-{}", self.state.totals.next_turn());
        let origin = TaskOrigin::Spec;
        let offer = TaskOffer {
            id,
            origin,
            prompt,
            untrusted: None,
        };
        self.accept_task(offer, out);
    }

    /// Whether the loop has nothing to do until a task arrives.
    pub(crate) fn waits_for_task(&self) -> bool {
        self.runs_tasks() && self.state.turn.is_none() && self.tasks.is_empty()
    }

    /// A task was offered, for the first time or again.
    pub(crate) fn accept_task(&mut self, offer: TaskOffer, out: &mut EffectBuffer) {
        let current = self.state.tasks.current.as_ref();
        // An ended loop answers no tasks.
        if self.state.life.outcome().is_some()
            || self.tasks.has(&offer.id)
            || current.is_some_and(|task| task.id == offer.id)
        {
            return;
        }
        out.record(JournalRecord {
            task: Some(Box::new(TaskChange::Accepted(offer.clone()))),
            ..journal_line(RecordKind::TaskAccepted, self.turn_number(), offer.id.clone())
        });
        self.tasks.push(offer, &self.state.tasks.served);
    }

    /// The turn of the next task has begun: the task is under way.
    pub(crate) fn begin_task(&mut self, out: &mut EffectBuffer) {
        let Some(TaskOffer {
            id, origin, untrusted, ..
        }) = self.tasks.pop(&mut self.state.tasks.served)
        else {
            return;
        };
        let source = match &origin {
            TaskOrigin::Sensor(sensor) => Some(format!("sensor/{sensor}")),
            TaskOrigin::Spec | TaskOrigin::Request(_) => untrusted,
        };
        if let Some(source) = source {
            self.note_untrusted_task(source, out.now);
        }
        let mut clock = TaskClock::default();
        // Under a pause, this turn only asks whether there is room again.
        if self.public_state().state == LoopState::Running {
            clock.runs(out.now);
        }
        out.record(JournalRecord {
            task: Some(Box::new(TaskChange::Started(id.clone()))),
            ..journal_line(RecordKind::TaskStarted, self.turn_number(), id.clone())
        });
        self.state.tasks.current = Some(CurrentTask {
            id,
            origin,
            started_at: out.now,
            clock,
        });
    }

    /// The turn of the current task has ended.
    pub(crate) fn end_task(
        &mut self,
        turn: &Turn,
        ending: TaskEnding,
        untrusted: Option<String>,
        out: &mut EffectBuffer,
    ) {
        let Some(CurrentTask {
            id, origin, started_at, ..
        }) = self.state.tasks.current.take()
        else {
            return;
        };
        let ended = EndedTask {
            id,
            kind: origin.kind(),
            started_at,
            completed_at: out.now,
            outcome: ending.outcome(),
            reason: ending.limit(),
            iterations: turn.counted_calls(),
            tokens: turn.tokens(),
            cost: turn.cost(),
        };
        let note = match ended.reason {
            Some(limit) => format!("{}: {} ({limit})", ended.id, ended.outcome),
            None => format!("{}: {}", ended.id, ended.outcome),
        };
        if ended.kind == TaskKind::Spec {
            self.state.tasks.own_ended_at = Some(out.now);
        }
        let response = TaskResponse::new(&ended, ending, untrusted);
        out.record(JournalRecord {
            task: Some(Box::new(TaskChange::Ended(response))),
            ..journal_line(RecordKind::TaskEnded, turn.number(), note)
        });
        self.state.tasks.ended(ended);
        if !turn.rules().is_of_mode {
            self.state.tasks.own_turn_first = true;
            let time = out.now.duration_since(started_at).max(SignedDuration::ZERO);
            self.ask_mode(out.now, |mode, context| mode.interrupted(time, context));
        }
        if turn.rules().detects_loops {
            // The next task is not held for what this one repeated.
            self.watch_another_task();
            self.clear_pause(PauseReason::LoopDetected);
        }
    }
}
