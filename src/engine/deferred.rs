//! Deferred calls: with `spec.tools.approval.whilePending: Continue`, tool calls that wait for an approval while the loop
//! continues.
//!
//! Owns the runs of such calls from the moment in which their gates open: the answer to the gate, the run, and how the model
//! learns of its end. The call itself has a result at once, which says that it waits. Its end is a notification of high
//! priority: shortened, shown in one turn, and the end of a sleep. What is shown to a person, approved and sent is the same as
//! for a call that the loop waits for, see [`approvals`].
//!
//! A deferred run is sent when nothing else runs, and nothing else is sent while it runs, so it is never concurrent with a run
//! of the turn. A crash leaves its outcome unknown; nothing is repeated without another approval.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::approvals::{self, EngineGateAnswer, GATE_REASONS, RunApproval, RunGate, denied_by_person, expired_gate};
use super::effects::EffectBuffer;
use super::guardrails::EndedToolRun;
use super::machine::Engine;
use super::message::{self, ToolCall};
use super::notifications::{Notification, NotificationOrigin, NotificationPriority};
use super::tool::{ResultArtifacts, ToolOutcome, ToolRunId};
use super::tools::admission::{DenialReason, DeniedCall};
use super::tools::batch::{ToolBatch, ToolRunPlan, ToolSlot};
use super::tools::expiry::{MAX_PAUSE, expired, expired_text};
use super::tools::results::{render_outcome, shortened};
use super::tools::{MAX_TRIES, plan_line};
use super::untrusted::server_source;
use super::{OutcomeKind, RecordKind, time_math};
use agentloop_api::status::GateKind;

/// Maximum number of deferred calls. With more, the loop waits.
pub const MAX_DEFERRED: usize = 8;
/// Maximum number of bytes of the arguments of all deferred calls, since they are written with each step of the loop.
pub const MAX_DEFERRED_BYTES: usize = 64 * 1024;

/// Maximum bytes of a result in the notification. A longer one is stored as an artifact.
const MAX_TOLD: usize = 1536;
/// Maximum bytes of the arguments in the notification, which identify the call.
const MAX_TOLD_ARGUMENTS: usize = 256;

/// The deferred calls, oldest first.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(transparent)]
pub struct DeferredCalls {
    calls: Vec<DeferredCall>,
}

/// A call whose run waits for an approval, or for its outcome.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct DeferredCall {
    pub run: ToolRunId,
    pub wanted: ToolCall,
    pub plan: ToolRunPlan,
    /// It was sent, and its outcome is not known.
    pub is_open: bool,
}

impl DeferredCalls {
    /// The open gates.
    pub fn gates(&self) -> impl Iterator<Item = (&ToolRunPlan, &RunGate)> {
        self.calls
            .iter()
            .filter_map(|call| Some((&call.plan, call.plan.open_gate()?)))
    }

    pub fn find(&self, run: ToolRunId) -> Option<&DeferredCall> {
        self.calls.iter().find(|call| call.run == run)
    }

    /// The call with this open gate, for these arguments.
    pub fn find_gated(&self, gate: &str, arguments: &str) -> Option<ToolRunId> {
        let mut calls = self.calls.iter();
        let asked = calls.find(|call| call.plan.is_asked(gate, arguments))?;
        Some(asked.run)
    }

    /// Whether the same call waits or runs already.
    fn has(&self, plan: &ToolRunPlan) -> bool {
        let is_same = |call: &DeferredCall| call.plan.tool == plan.tool && call.plan.arguments == plan.arguments;
        self.calls.iter().any(is_same)
    }

    fn has_room_for(&self, wanted: &ToolCall) -> bool {
        let bytes: usize = self.calls.iter().map(|call| call.wanted.arguments.len()).sum();
        self.calls.len() < MAX_DEFERRED && bytes.saturating_add(wanted.arguments.len()) <= MAX_DEFERRED_BYTES
    }

    fn find_mut(&mut self, run: ToolRunId) -> Option<&mut DeferredCall> {
        self.calls.iter_mut().find(|call| call.run == run)
    }

    /// Changes the open gates.
    pub fn for_each_gate(&mut self, change: impl Fn(&mut RunGate)) {
        for call in &mut self.calls {
            if let RunApproval::Pending(gate) = &mut call.plan.approval {
                change(gate);
            }
        }
    }

    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// What was approved has waited for other runs or gates, and not under a pause.
    pub fn renew_approvals(&mut self, now: Timestamp) {
        for call in &mut self.calls {
            if call.plan.is_granted() {
                call.plan.approval = RunApproval::Granted(now);
            }
        }
    }

    fn runs(&self) -> Vec<ToolRunId> {
        self.calls.iter().map(|call| call.run).collect()
    }
}

impl Engine {
    /// Takes the runs whose gates are open out of the batch, as far as there is room: the turn continues without them.
    /// Returns whether there were any.
    pub(crate) fn defer_gated_runs(&mut self) -> bool {
        // The result of a deferred call goes to the main loop, which does not see the calls of a request.
        if !self.settings.defers_approvals || !self.turn_rules().is_of_mode {
            return false;
        }
        let before = self.state.deferred.len();
        let gates = self.tool_batch().into_iter().flat_map(ToolBatch::gates);
        let places: Vec<usize> = gates.map(|(place, ..)| place).collect();
        for place in places {
            self.defer(place);
        }
        self.state.deferred.len() > before
    }

    /// Denies repetitions of calls that already wait for an approval.
    pub(crate) fn deny_deferred_repetitions(&mut self, out: &mut EffectBuffer) {
        let Some(batch) = self.tool_batch() else {
            return;
        };
        let waiting = (0..batch.places()).filter(|place| match batch.slot(*place) {
            Some(ToolSlot::Waiting(plan)) => self.state.deferred.has(plan),
            Some(ToolSlot::Open(_) | ToolSlot::Result(_) | ToolSlot::Yield(_)) | None => false,
        });
        let repeated: Vec<usize> = waiting.collect();
        for place in repeated {
            self.close_gate(place, "superseded", out);
            self.reject(place, waits_already(), out);
        }
    }

    fn defer(&mut self, place: usize) {
        let (Some(run), Some(wanted)) = (self.run_id(place), self.wanted_call(place).cloned()) else {
            return;
        };
        let Some(plan) = self.tool_batch().and_then(|batch| batch.plan(place)).cloned() else {
            return;
        };
        // One like it was deferred just before: it is denied next.
        if self.state.deferred.has(&plan) || !self.state.deferred.has_room_for(&wanted) {
            return;
        }
        let is_first = matches!(
            self.tool_batch().and_then(|batch| batch.slot(place)),
            Some(ToolSlot::Waiting(_))
        );
        let text = if is_first { waits() } else { repetition_waits() };
        if let Some(batch) = self.batch_mut() {
            batch.defer(place, text);
        }
        self.state.deferred.calls.push(DeferredCall {
            run,
            wanted,
            plan,
            is_open: !is_first,
        });
    }

    /// A person answered the gate of a deferred call.
    pub(crate) fn answer_deferred(&mut self, run: ToolRunId, answer: &EngineGateAnswer, out: &mut EffectBuffer) {
        let how = answer.how();
        if answer.approved {
            self.close_deferred_gate(run, &how, out);
            if let Some(call) = self.state.deferred.find_mut(run) {
                call.plan.approval = RunApproval::Granted(out.now);
            }
        } else {
            self.reject_deferred(run, &how, denied_by_person(), out);
        }
    }

    /// Denies the deferred calls whose gates have expired.
    pub(crate) fn expire_deferred_gates(&mut self, out: &mut EffectBuffer) {
        for run in self.state.deferred.runs() {
            let gate = self.state.deferred.find(run).and_then(|call| call.plan.open_gate());
            if gate.is_some_and(|gate| gate.expires_at <= out.now) {
                self.reject_deferred(run, "expired", expired_gate(), out);
            }
        }
    }

    fn close_deferred_gate(&mut self, run: ToolRunId, how: &str, out: &mut EffectBuffer) {
        let Some(call) = self.state.deferred.find_mut(run) else {
            return;
        };
        if let Some(line) = approvals::closed(&mut call.plan, run, how) {
            out.record(line);
        }
    }

    /// The run was not approved: a first one is denied, and one with an unknown outcome is not repeated.
    fn reject_deferred(&mut self, run: ToolRunId, how: &str, denied: DeniedCall, out: &mut EffectBuffer) {
        self.close_deferred_gate(run, how, out);
        let Some(call) = self.state.deferred.find_mut(run) else {
            return;
        };
        if call.is_open {
            call.plan.tries = MAX_TRIES;
            let message = "it was sent, its outcome is unknown, and a repetition was not approved".to_owned();
            self.give_up_deferred(run, message, out);
        } else {
            self.deny_deferred(run, denied, out);
        }
    }

    fn deny_deferred(&mut self, run: ToolRunId, denied: DeniedCall, out: &mut EffectBuffer) {
        let Some(call) = self.state.deferred.find(run).cloned() else {
            return;
        };
        self.state.totals.count_denied_call();
        let text = self.deny(run, &call.wanted, denied, out);
        self.tell_end(&call, &text, out);
    }

    /// Sends the next approved run, if nothing else runs, and opens the gates of those with an unknown outcome.
    pub(crate) fn advance_deferred(&mut self, out: &mut EffectBuffer) {
        self.open_deferred_gates(out);
        // A deferred call has ended, and there is room for one that the loop waits for.
        if self.defer_gated_runs() {
            self.gates_closed(out);
        }
        if !self.may_send_deferred(out.now) {
            return;
        }
        for run in self.state.deferred.runs() {
            let Some(call) = self.state.deferred.find(run) else {
                continue;
            };
            let RunApproval::Granted(at) = call.plan.approval else {
                continue;
            };
            let held = out.now.duration_since(at);
            if held > MAX_PAUSE {
                self.outdate_deferred(run, &expired_text(held), out);
                continue;
            }
            let acts = !call.plan.only_looks();
            if acts && (!self.state.reasons.allow_actions() || self.is_held_by_guardrail(out)) {
                return;
            }
            self.send_deferred(run, out);
            return;
        }
    }

    /// A pause for another answer does not hold a deferred run: it was approved separately, and the loop may be waiting for the
    /// room that it has.
    fn may_send_deferred(&self, now: Timestamp) -> bool {
        let free = self.state.reasons.are_free_apart_from(&GATE_REASONS, now);
        free && self.state.life.is_active() && !self.fenced && self.running.is_empty()
    }

    /// Whether a deferred run is the next one to be sent, before those of the turn.
    pub(crate) fn is_deferred_due(&self) -> bool {
        let acts = self.state.reasons.allow_actions();
        let mut calls = self.state.deferred.calls.iter();
        self.running.is_empty() && calls.any(|call| call.plan.is_granted() && (acts || call.plan.only_looks()))
    }

    fn open_deferred_gates(&mut self, out: &mut EffectBuffer) {
        let epoch = self.state.life.epoch();
        let expires_at = time_math::after(out.now, self.settings.approval_timeout);
        for call in &mut self.state.deferred.calls {
            if let RunApproval::Needed(kind) = call.plan.approval {
                let times = (out.now, expires_at);
                out.record(approvals::opened(&mut call.plan, (epoch, call.run), kind, times));
            }
        }
    }

    fn send_deferred(&mut self, run: ToolRunId, out: &mut EffectBuffer) {
        let Some(call) = self.state.deferred.find_mut(run) else {
            return;
        };
        let arguments = message::arguments(&call.wanted.arguments).unwrap_or_default();
        let is_new = !call.is_open;
        call.is_open = true;
        call.plan.sent();
        let plan = call.plan.clone();
        if !plan.only_looks() {
            // Not only once it has ended: the judge of a check may answer before. Commands wait for its end.
            self.ask_mode(out.now, |mode, context| mode.environment_changed(context));
        }
        self.start_run(plan.run(run, arguments, MAX_TOLD), &plan, is_new, out);
    }

    /// Whether a deferred run is under way, beside which no other is sent.
    pub(crate) fn is_deferred_under_way(&self) -> bool {
        self.running.keys().any(|run| self.state.deferred.find(*run).is_some())
    }

    /// A deferred run has no outcome, and no other try.
    fn give_up_deferred(&mut self, run: ToolRunId, message: String, out: &mut EffectBuffer) {
        let outcome = ToolOutcome::Unknown { message };
        self.end_deferred(run, (outcome, ResultArtifacts::default()), out);
    }

    /// A deferred run has an outcome. Its images are named in the text of the result, and not shown.
    pub(crate) fn end_deferred(
        &mut self,
        run: ToolRunId,
        (outcome, mut artifacts): (ToolOutcome, ResultArtifacts),
        out: &mut EffectBuffer,
    ) {
        let Some(call) = self.state.deferred.find(run).cloned() else {
            return;
        };
        let (kind, text) = render_outcome(outcome, &call.plan, MAX_TOLD, &mut artifacts);
        if kind == OutcomeKind::Unknown && call.plan.needs_decision_after_unknown() && call.plan.tries < MAX_TRIES {
            let note = "will be repeated if approved";
            out.record(plan_line(RecordKind::ToolOutcome, run, note, &call.plan, Some(kind)));
            if let Some(call) = self.state.deferred.find_mut(run) {
                call.plan.approval = RunApproval::Needed(GateKind::UnknownOutcome);
            }
            return;
        }
        out.record(plan_line(RecordKind::ToolOutcome, run, "", &call.plan, Some(kind)));
        self.check_ended_run(
            &EndedToolRun {
                tool: &call.plan.tool,
                outcome: kind,
                result: &text,
                in_counted_turn: true,
                of_mode: true,
                at: out.now,
            },
            out,
        );
        self.tell_end(&call, &text, out);
    }

    /// The call is over. A notification with its result ends a sleep.
    fn tell_end(&mut self, call: &DeferredCall, text: &str, out: &mut EffectBuffer) {
        self.state.deferred.calls.retain(|other| other.run != call.run);
        let tool = &call.wanted.name;
        let arguments = shortened(call.wanted.arguments.clone(), MAX_TOLD_ARGUMENTS, None);
        let notification = Notification {
            id: format!("deferred/{}/{}", self.state.life.epoch(), call.run),
            source: server_source(tool),
            priority: NotificationPriority::High,
            text: format!(
                "your call of {tool} that waited for an approval has ended; arguments: {arguments}; result: {text}"
            ),
            at: out.now,
        };
        let origin = NotificationOrigin::DeferredCall {
            trusted: call.plan.trusted,
        };
        self.receive_notification(&notification, origin, out);
    }

    /// A process has started, or the runs were cancelled: settles the deferred runs that were under way. `outdated`: why an
    /// approved one is not sent any more.
    pub(crate) fn settle_deferred_runs(&mut self, outdated: Option<&str>, out: &mut EffectBuffer) {
        for run in self.state.deferred.runs() {
            let Some(call) = self.state.deferred.find(run) else {
                continue;
            };
            if call.plan.approval == RunApproval::Used && !self.running.contains_key(&run) {
                let message = "it was interrupted before its outcome was known".to_owned();
                self.give_up_deferred(run, message, out);
            } else if let (Some(why), true) = (outdated, call.plan.is_granted()) {
                self.outdate_deferred(run, why, out);
            }
        }
    }

    /// An approved run was not sent in time.
    fn outdate_deferred(&mut self, run: ToolRunId, why: &str, out: &mut EffectBuffer) {
        let Some(call) = self.state.deferred.find_mut(run) else {
            return;
        };
        if call.is_open {
            call.plan.tries = MAX_TRIES;
            let message = format!("it was sent, its outcome is unknown, and it is not repeated, since {why}");
            self.give_up_deferred(run, message, out);
        } else {
            self.deny_deferred(run, expired(why), out);
        }
    }

    /// The loop has ended: what waits for an approval is not run any more.
    pub(crate) fn drop_deferred(&mut self, out: &mut EffectBuffer) {
        for run in self.state.deferred.runs() {
            if self.running.contains_key(&run) {
                continue;
            }
            self.close_deferred_gate(run, "superseded", out);
            self.outdate_deferred(run, "the loop has ended", out);
        }
    }
}

/// The result of a call that is deferred. Without the id of its gate, so that repeated calls have equal results, which loop
/// detection compares.
fn waits() -> String {
    let waits = json!({
        "status": "waiting for an approval",
        "detail": "a person must approve this call; it runs then, and you are told its result at the beginning of a later turn",
        "fix": "continue with other work, or sleep: its end wakes you; do not request the same call again",
    });
    waits.to_string()
}

/// Whether this is the result that a deferred call has at once, and not that of its run.
#[must_use]
pub fn is_deferred_result(text: &str) -> bool {
    text.starts_with(&waits()) || text.starts_with(&repetition_waits())
}

fn repetition_waits() -> String {
    let waits = json!({
        "status": "outcome unknown",
        "detail": "it may or may not have happened; a person decides whether it is repeated, and you are told the result at \
                   the beginning of a later turn",
        "fix": "continue with other work, or sleep: its end wakes you; do not request the same call again",
    });
    waits.to_string()
}

fn waits_already() -> DeniedCall {
    DeniedCall::not_run(
        DenialReason::AlreadyDeferred,
        "the same call waits for an approval already, or runs",
        "continue with other work, or sleep: its end wakes you",
    )
}
