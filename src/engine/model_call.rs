//! The model call of a loop: what it is for, its attempts, and whether the next attempt is due or an outcome is awaited.
//!
//! A loop has at most one call at a time, whatever its purpose, so there is one slot. Who fills it keeps only its question
//! and what follows from the answer. Two rules make a crash harmless:
//!
//! - An attempt is numbered when it is sent, and the number is committed before the request leaves. After a restart an
//!   open attempt is sent again under the same id, so that the gateway can return the answer that it kept.
//! - A call of a turn stays in the slot until it is answered or its turn ends. A call before a turn leaves the slot with
//!   its outcome, since the turn may come first: after a failed score at 12:00 that is due again at 12:05, a turn that is
//!   due at 12:01 begins.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::context::compaction::Compaction;
use super::turn::kind::TurnRules;
use super::{CallId, CallPurpose, ids};

/// What a call is for.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum CallTask {
    /// The next step of the turn under way.
    Turn,
    /// A summary that the turn under way needs before its next step.
    Summary(Compaction),
    /// Whether the next turn is worth it: the task and the data for the light model.
    PreCheck([String; 2]),
    /// The score of the signal that is asked for.
    Score,
    /// The question of the mode: its purpose, the task and the data.
    Question(CallPurpose, [String; 2]),
}

impl CallTask {
    /// Its purpose in a turn with these rules.
    pub fn purpose(&self, rules: TurnRules) -> CallPurpose {
        match self {
            Self::Turn => rules.purpose,
            Self::Summary(_) => CallPurpose::Compaction,
            Self::PreCheck(_) => CallPurpose::Precheck,
            Self::Score => CallPurpose::Signal,
            Self::Question(purpose, _) => *purpose,
        }
    }

    pub const fn is_of_turn(&self) -> bool {
        matches!(self, Self::Turn | Self::Summary(_))
    }
}

/// The state of a call.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallStep {
    /// The next attempt is due at this time.
    Due(Timestamp),
    /// An attempt was sent, and its outcome is not known.
    Open,
}

/// A call that is due or open.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
struct PlannedCall {
    /// The attempt last sent; attempt 0 if there was none.
    id: CallId,
    task: CallTask,
    /// Attempts that failed and count against the limit of attempts.
    failures: u32,
    step: CallStep,
    /// [`BudgetState::revision`](super::pauses::budget::BudgetState::revision) when the last attempt was sent.
    asked_under: u64,
}

/// An attempt that ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedAttempt {
    pub task: CallTask,
    /// The revision of the budget under which it was sent.
    pub asked_under: u64,
}

/// The slot for the one call of a loop.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct CallSlot {
    current: Option<PlannedCall>,
    /// Calls that were sent before the agent's next own turn. They share the call number 0, so each is an attempt of it.
    before_turn: u32,
}

impl CallSlot {
    pub fn step(&self) -> Option<CallStep> {
        self.current.as_ref().map(|call| call.step)
    }

    pub fn is_open(&self) -> bool {
        self.step() == Some(CallStep::Open)
    }

    pub fn task(&self) -> Option<&CallTask> {
        self.current.as_ref().map(|call| &call.task)
    }

    /// The attempt that was sent and has no outcome.
    pub fn open_id(&self) -> Option<CallId> {
        self.current
            .as_ref()
            .filter(|call| call.step == CallStep::Open)
            .map(|call| call.id)
    }

    /// The summary that the current call is for.
    pub fn compaction(&self) -> Option<Compaction> {
        match self.task()? {
            CallTask::Summary(compaction) => Some(*compaction),
            CallTask::Turn | CallTask::PreCheck(_) | CallTask::Score | CallTask::Question(..) => None,
        }
    }

    /// The turn makes its next call, the `number`-th from 1.
    pub fn plan(&mut self, turn: i64, number: u32, now: Timestamp) {
        self.current = Some(PlannedCall {
            id: CallId {
                member: ids::MAIN,
                turn,
                call: number,
                attempt: 0,
            },
            task: CallTask::Turn,
            failures: 0,
            step: CallStep::Due(now),
            asked_under: 0,
        });
    }

    /// The turn's call is for a summary; an attempt that was sent for something else stays counted.
    pub fn summarize(&mut self, compaction: Compaction) {
        if let Some(call) = &mut self.current {
            call.task = CallTask::Summary(compaction);
        }
    }

    /// A call before the turn of this number, to be sent at once.
    pub fn plan_before(&mut self, turn: i64, task: CallTask, now: Timestamp) {
        self.current = Some(PlannedCall {
            id: CallId {
                member: ids::MAIN,
                turn,
                call: 0,
                attempt: self.before_turn,
            },
            task,
            failures: 0,
            step: CallStep::Due(now),
            asked_under: 0,
        });
        self.before_turn = self.before_turn.saturating_add(1);
    }

    /// The agent's own turn begins: calls before the next one are counted from the start.
    pub fn own_turn_begins(&mut self) {
        self.before_turn = 0;
    }

    /// The next attempt is sent under this revision of the budget. Returns its id.
    pub fn send(&mut self, revision: u64) -> Option<CallId> {
        let call = self.current.as_mut()?;
        call.id.attempt = call.id.attempt.saturating_add(1);
        call.step = CallStep::Open;
        call.asked_under = revision;
        Some(call.id)
    }

    /// The call was answered, and leaves the slot. Returns what it was for.
    pub fn answered(&mut self) -> Option<CallTask> {
        self.current.take().map(|call| call.task)
    }

    /// The attempt has no answer. A call of a turn is due again at once, unless [`Self::retry_at`] delays it; any other
    /// leaves the slot.
    pub fn failed(&mut self, now: Timestamp) -> Option<FailedAttempt> {
        let call = self.current.as_mut()?;
        call.step = CallStep::Due(now);
        let failed = FailedAttempt {
            task: call.task.clone(),
            asked_under: call.asked_under,
        };
        self.current.take_if(|call| !call.task.is_of_turn());
        Some(failed)
    }

    /// The failure of the last attempt counts. Returns how many do.
    pub fn count_failure(&mut self) -> u32 {
        let Some(call) = &mut self.current else {
            return 0;
        };
        call.failures = call.failures.saturating_add(1);
        call.failures
    }

    /// Failures of this call that count.
    pub fn failures(&self) -> u32 {
        self.current.as_ref().map_or(0, |call| call.failures)
    }

    /// The next attempt is made at this time.
    pub fn retry_at(&mut self, at: Timestamp) {
        if let Some(call) = &mut self.current {
            call.step = CallStep::Due(at);
        }
    }

    /// The turn has ended: its call is not made.
    pub fn clear(&mut self) {
        self.current = None;
    }

    /// The clock was set back.
    pub fn moved(&mut self, moved: impl Fn(Timestamp) -> Timestamp) {
        if let Some(call) = &mut self.current
            && let CallStep::Due(at) = call.step
        {
            call.step = CallStep::Due(moved(at));
        }
    }
}
