//! Approvals: tool runs that are sent only once a person has approved them.
//!
//! Owns the gates of a batch: when they open, how an answer or their expiry settles them, and the pause meanwhile. Whether a
//! call needs an approval is decided with its admission, by the rules of that moment, so that a later edit of the spec
//! neither weakens nor removes an open gate. What runs is the call that was shown: the answer names the hash of its
//! arguments, and the arguments are in the transcript, where nothing changes them.
//!
//! All gates of an answer open together, so that one visit of a person can answer them all. The runs keep their order: a run
//! that waits for its answer holds those after it. A gate outlives restarts, pauses, suspensions and edits, and ends with an
//! answer or at its expiry, which denies. Example: of `read, delete (gate), write` the read runs at once; the loop is paused
//! until the gate is answered; then the deletion runs, or is denied, and the write follows.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::GateCause;
use crate::effects::EffectBuffer;
use crate::loop_detection::ToolCallEnding;
use crate::machine::Engine;
use crate::time_math;
use crate::tool::{ToolOutcome, ToolRunId};
use crate::tools::admission::{DenialReason, DeniedCall};
use crate::tools::batch::{NextRun, ToolBatch, ToolRunPlan, ToolSlot};
use crate::tools::{MAX_TRIES, tool_line};
use crate::{JournalRecord, RecordKind};
use agentloop_api::pause::PauseReason;
use agentloop_api::status::{GateKind, MAX_GATES};

/// How long a gate stays open at least after the start of a process.
const ANSWER_GRACE: SignedDuration = SignedDuration::from_secs(60);
/// The reasons of a pause for an approval.
pub(crate) const APPROVAL_REASONS: [PauseReason; 2] = [PauseReason::ToolCallNeedsApproval, PauseReason::UnknownOutcome];
/// Why a loop waits for a person.
pub(crate) const GATE_REASONS: [PauseReason; 4] = [
    PauseReason::ToolCallNeedsApproval,
    PauseReason::UnknownOutcome,
    PauseReason::LowConfidence,
    PauseReason::Escalated,
];

/// Whether a person must approve a run before it is sent.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub enum RunApproval {
    /// No.
    #[default]
    NotNeeded,
    /// Yes; its gate is not open yet.
    Needed(GateKind),
    /// Its gate is open.
    Pending(RunGate),
    /// It was approved at this time, for one try.
    Granted(Timestamp),
    /// It was sent after its approval.
    Used,
}

/// The open gate of a run.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct RunGate {
    /// Never reused, even by another pod of the Agent.
    pub id: String,
    pub kind: GateKind,
    pub opened_at: Timestamp,
    /// When it is denied, if it was not answered.
    pub expires_at: Timestamp,
}

/// An open gate as reported.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenGate {
    pub gate: GateTerms,
    /// The tool, as the model calls it; the server, if it is for definitions.
    pub tool: String,
    /// Hash of the arguments, or of the definitions.
    pub arguments: String,
    /// The source of the untrusted content because of which it needs the approval.
    pub because_of: Option<String>,
}

/// What an open gate is, and until when.
#[derive(Clone, Debug, PartialEq)]
pub struct GateTerms {
    pub id: String,
    pub kind: GateKind,
    pub opened_at: Timestamp,
    /// When it is denied, if it was not answered; `None`: it does not expire.
    pub expires_at: Option<Timestamp>,
}

impl From<&RunGate> for GateTerms {
    fn from(gate: &RunGate) -> Self {
        Self {
            id: gate.id.clone(),
            kind: gate.kind,
            opened_at: gate.opened_at,
            expires_at: Some(gate.expires_at),
        }
    }
}

/// A person's answer to a gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineGateAnswer {
    /// Id of the gate.
    pub gate: String,
    /// Hash of the arguments that the person saw, or of the definitions.
    pub arguments: String,
    pub approved: bool,
    /// The name of the user who answered, if it is known.
    pub by: Option<String>,
}

impl Engine {
    /// Opens the gates of the runs that need one, up to [`MAX_GATES`]; the others follow as gates close. One place is kept
    /// for the next run, which must not wait unseen for those after it.
    pub(crate) fn open_gates(&mut self, out: &mut EffectBuffer) {
        let Some(batch) = self.tool_batch() else {
            return;
        };
        let next = match self.next_of_batch() {
            Some(NextRun::AwaitApproval(place)) => Some(place),
            Some(NextRun::Send(_) | NextRun::SendIfAllowed(_) | NextRun::Wait) | None => None,
        };
        let definitions = self.state.definitions.open_gates();
        let open = batch.gates().count() + self.state.deferred.len() + definitions;
        let free = (MAX_GATES - 1).saturating_sub(open);
        let needed = batch.approvals_needed().enumerate();
        let due = needed.filter(|(number, (place, _))| *number < free || next == Some(*place));
        let due: Vec<(usize, GateKind)> = due.map(|(_, due)| due).collect();
        for (place, kind) in due {
            self.open_gate(place, kind, out);
        }
    }

    fn open_gate(&mut self, place: usize, kind: GateKind, out: &mut EffectBuffer) {
        let (Some(run), epoch) = (self.run_id(place), self.state.life.epoch()) else {
            return;
        };
        let expires_at = time_math::after(out.now, self.settings.approval_timeout);
        let Some(plan) = self.batch_mut().and_then(|batch| batch.plan_mut(place)) else {
            return;
        };
        out.record(opened(plan, (epoch, run), kind, (out.now, expires_at)));
    }

    /// A person answered a gate. An answer to a gate that is not open, or with the hash of other arguments, has no effect.
    pub(crate) fn gate_answered(&mut self, answer: &EngineGateAnswer, out: &mut EffectBuffer) {
        if let Some(run) = self.state.deferred.find_gated(&answer.gate, &answer.arguments) {
            self.answer_deferred(run, answer, out);
            return;
        }
        let is_asked = |(_, plan, _): &(usize, &ToolRunPlan, &RunGate)| plan.is_asked(&answer.gate, &answer.arguments);
        let gates = self.tool_batch().into_iter().flat_map(ToolBatch::gates);
        let Some(place) = gates.into_iter().find(is_asked).map(|(place, ..)| place) else {
            return;
        };
        let how = answer.how();
        if answer.approved {
            self.close_gate(place, &how, out);
            if let Some(plan) = self.batch_mut().and_then(|batch| batch.plan_mut(place)) {
                plan.approval = RunApproval::Granted(out.now);
            }
        } else {
            self.close_gate(place, &how, out);
            self.reject(place, denied_by_person(), out);
        }
        self.gates_closed(out);
    }

    /// Denies the runs whose gates have expired.
    pub(crate) fn expire_gates(&mut self, out: &mut EffectBuffer) {
        self.expire_deferred_gates(out);
        let gates = self.tool_batch().into_iter().flat_map(ToolBatch::gates);
        let expired: Vec<usize> = gates
            .filter(|(_, _, gate)| gate.expires_at <= out.now)
            .map(|(place, ..)| place)
            .collect();
        if expired.is_empty() {
            self.settle_approval_pause();
            return;
        }
        for place in expired {
            self.close_gate(place, "expired", out);
            self.reject(place, expired_gate(), out);
        }
        self.gates_closed(out);
    }

    /// Gates have closed: the runs that waited for them continue.
    pub(crate) fn gates_closed(&mut self, out: &mut EffectBuffer) {
        if let Some(batch) = self.batch_mut() {
            batch.renew_approvals(out.now);
        }
        self.state.deferred.renew_approvals(out.now);
        self.settle_approval_pause();
        self.advance_tools(out);
    }

    /// When the first open gate expires.
    pub(crate) fn first_gate_expiry(&self) -> Option<Timestamp> {
        let gates = self.tool_batch().into_iter().flat_map(ToolBatch::gates);
        let deferred = self.state.deferred.gates().map(|(_, gate)| gate.expires_at);
        let of_mode = self.state.requests.open_gate().map(|gate| gate.expires_at);
        gates
            .map(|(_, _, gate)| gate.expires_at)
            .chain(deferred)
            .chain(of_mode)
            .min()
    }

    /// The gate of this position closes, if one is open.
    pub(crate) fn close_gate(&mut self, place: usize, how: &str, out: &mut EffectBuffer) {
        let Some(run) = self.run_id(place) else {
            return;
        };
        let Some(plan) = self.batch_mut().and_then(|batch| batch.plan_mut(place)) else {
            return;
        };
        if let Some(line) = closed(plan, run, how) {
            out.record(line);
        }
    }

    /// A run was not approved: a first run is denied, and one with an unknown outcome is not repeated.
    pub(crate) fn reject(&mut self, place: usize, denied: DeniedCall, out: &mut EffectBuffer) {
        let (Some(run), Some(wanted)) = (self.run_id(place), self.wanted_call(place).cloned()) else {
            return;
        };
        match self.tool_batch().and_then(|batch| batch.slot(place)) {
            Some(ToolSlot::Waiting(_)) => {
                let text = self.deny(run, &wanted, denied, out);
                if let Some(turn) = &mut self.state.turn {
                    turn.count_denial(&wanted.name);
                }
                if let Some(batch) = self.batch_mut() {
                    batch.end(place, ToolCallEnding::Failed, text);
                }
            }
            Some(ToolSlot::Open(_)) => {
                if let Some(batch) = self.batch_mut() {
                    batch.set_last_try(place, MAX_TRIES);
                }
                let message = "it was sent, its outcome is unknown, and a repetition was not approved".to_owned();
                self.record_outcome(place, run, ToolOutcome::Unknown { message }, out);
            }
            Some(ToolSlot::Result(_) | ToolSlot::Yield(_)) | None => {}
        }
    }

    /// The run at this position is the next one, and waits for its answer: nothing else happens until then.
    pub(crate) fn pause_for_approval(&mut self, place: usize) {
        let Some(plan) = self.tool_batch().and_then(|batch| batch.plan(place)) else {
            return;
        };
        let RunApproval::Pending(gate) = &plan.approval else {
            return;
        };
        let (id, until) = (&gate.id, gate.expires_at);
        let message = match gate.kind {
            GateKind::ToolCallNeedsApproval
            | GateKind::ToolDefinitionsChanged
            | GateKind::LowConfidence
            | GateKind::Escalated => {
                let tool = &plan.tool;
                let because_of = plan.because_of.as_deref().map(because_of).unwrap_or_default();
                format!("the call of {tool} waits for an approval{because_of} (gate {id})")
            }
            GateKind::UnknownOutcome => format!(
                "the outcome of a call of {} is unknown; repeating it waits for an approval (gate {id})",
                plan.tool
            ),
        };
        let reason = pause_reason(gate.kind);
        for other in APPROVAL_REASONS.into_iter().filter(|other| *other != reason) {
            self.state.reasons.remove(other);
        }
        self.raise_pause(reason, Some(until), message);
    }

    /// The loop is paused while the next run waits for its gate, whatever else holds the loop.
    fn settle_approval_pause(&mut self) {
        match self.next_of_batch() {
            Some(NextRun::AwaitApproval(place)) => self.pause_for_approval(place),
            Some(NextRun::Send(_) | NextRun::SendIfAllowed(_) | NextRun::Wait) | None => {
                for reason in APPROVAL_REASONS {
                    self.clear_pause(reason);
                }
            }
        }
    }

    /// All open gates: those of runs in their order, and those for definitions.
    pub(crate) fn view_gates(&self) -> Vec<OpenGate> {
        let of_mode = self.state.requests.reported_gate();
        self.gates()
            .into_iter()
            .chain(of_mode)
            .chain(self.definition_gates())
            .collect()
    }

    /// The open gates, in the order of their runs.
    fn gates(&self) -> Vec<OpenGate> {
        let gates = self.tool_batch().into_iter().flat_map(ToolBatch::gates);
        let gates = gates.map(|(_, plan, gate)| (plan, gate));
        let open = self.state.deferred.gates().chain(gates).map(|(plan, gate)| OpenGate {
            gate: gate.into(),
            tool: plan.tool.clone(),
            arguments: plan.arguments.clone(),
            because_of: plan.because_of.clone(),
        });
        open.collect()
    }

    /// A process has started: an answer that was given while there was none arrives within this time.
    pub(crate) fn keep_gates_after_start(&mut self, now: Timestamp) {
        let earliest = time_math::after(now, ANSWER_GRACE);
        let keep = |gate: &mut RunGate| gate.expires_at = gate.expires_at.max(earliest);
        self.for_each_gate(keep);
    }

    /// The clock was set back: no gate is open for longer than its whole time.
    pub(crate) fn limit_gates(&mut self, back: SignedDuration, now: Timestamp) {
        let latest = time_math::after(now, self.settings.approval_timeout);
        let limit = |gate: &mut RunGate| {
            gate.opened_at = time_math::before(gate.opened_at, back);
            gate.expires_at = gate.expires_at.min(latest);
        };
        self.for_each_gate(limit);
    }

    fn for_each_gate(&mut self, change: impl Fn(&mut RunGate)) {
        self.state.deferred.for_each_gate(&change);
        self.state.requests.for_each_gate(&change);
        if let Some(batch) = self.batch_mut() {
            batch.for_each_gate(change);
        }
    }
}

impl EngineGateAnswer {
    /// How it closes its gate.
    pub(crate) fn how(&self) -> String {
        match (&self.by, self.approved) {
            (Some(by), true) => format!("approved by {by}"),
            (None, true) => "approved by an unknown user".to_owned(),
            (Some(by), false) => format!("denied by {by}"),
            (None, false) => "denied".to_owned(),
        }
    }
}

/// Opens the gate of a run of this epoch, from and until these times. Returns the line for the journal.
pub(crate) fn opened(
    plan: &mut ToolRunPlan,
    (epoch, run): (i64, ToolRunId),
    kind: GateKind,
    (opened_at, expires_at): (Timestamp, Timestamp),
) -> JournalRecord {
    let gate = RunGate {
        id: gate_id(epoch, run, plan.tries),
        kind,
        opened_at,
        expires_at,
    };
    let cause = match kind {
        GateKind::UnknownOutcome => GateCause::UnknownOutcome,
        GateKind::ToolCallNeedsApproval
        | GateKind::ToolDefinitionsChanged
        | GateKind::LowConfidence
        | GateKind::Escalated => plan.asked_by,
    };
    let line = gate_line(RecordKind::GateOpened, run, &cause.note(&gate.id), plan);
    plan.approval = RunApproval::Pending(gate);
    line
}

/// Closes the gate of a run, if one is open. Returns the line for the journal.
pub(crate) fn closed(plan: &mut ToolRunPlan, run: ToolRunId, how: &str) -> Option<JournalRecord> {
    let note = format!("{} {how}", plan.open_gate()?.id);
    plan.approval = RunApproval::NotNeeded;
    Some(gate_line(RecordKind::GateResolved, run, &note, plan))
}

/// Why a call needs an approval that it would not need otherwise.
fn because_of(source: &str) -> String {
    format!(", since the model has been shown untrusted content of {source}")
}

pub(crate) fn pause_reason(kind: GateKind) -> PauseReason {
    match kind {
        // The last one is never the gate of a run.
        GateKind::ToolCallNeedsApproval | GateKind::ToolDefinitionsChanged => PauseReason::ToolCallNeedsApproval,
        GateKind::UnknownOutcome => PauseReason::UnknownOutcome,
        GateKind::LowConfidence => PauseReason::LowConfidence,
        GateKind::Escalated => PauseReason::Escalated,
    }
}

/// The run identifies the gate within one epoch; after a try with an unknown outcome, the number of the next try.
fn gate_id(epoch: i64, run: ToolRunId, tries: u32) -> String {
    match tries {
        0 => format!("e{epoch}-{run}"),
        tries => format!("e{epoch}-{run}-try{}", tries.saturating_add(1)),
    }
}

fn gate_line(kind: RecordKind, run: ToolRunId, note: &str, plan: &ToolRunPlan) -> JournalRecord {
    tool_line(kind, run, note, |line| {
        line.tool = Some(plan.tool.clone());
        line.effect = Some(plan.effect);
        line.key = Some(plan.key.clone());
        line.arguments = Some(plan.arguments.clone());
    })
}

pub(crate) fn denied_by_person() -> DeniedCall {
    DeniedCall::not_run(
        DenialReason::NotApproved,
        "a person denied this call",
        "continue without it; do not request the same call again",
    )
}

pub(crate) fn expired_gate() -> DeniedCall {
    DeniedCall::not_run(
        DenialReason::ApprovalExpired,
        "this call was not approved in time",
        "continue without it; request it again later if it is still right",
    )
}
