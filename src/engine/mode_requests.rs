//! What a mode requests between two turns: a model call, a tool run, or the approval of a person.
//!
//! Owns how each is made: the call is journalled, limited and retried like any other; the run is journalled with its intent
//! and its outcome, and a run that a restart finds open is sent again under its id; the gate is one of the gates of the loop.
//! What to request and what follows is up to the mode.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

use super::approvals::{EngineGateAnswer, OpenGate, RunGate, pause_reason};
use super::effects::{EffectBuffer, answer_line, journal_line};
use super::machine::Engine;
use super::message::{FinishReason, ModelAnswer, ToolCall};
use super::model_call::CallTask;
use super::modes::{CheckEnd, ModeApproval, ModeCheck, ModeQuestion};
use super::retry::{self, RetryDecision};
use super::tool::{ToolOutcome, ToolRunId};
use super::tools::admission::{self, AdmissionContext, DenialReason};
use super::tools::batch::ToolRunPlan;
use super::tools::plan_line;
use super::untrusted::server_source;
use super::{CallId, CallPurpose, EngineEffect, JournalRecord, OutcomeKind, RecordDetail, RecordKind, time_math};
use crate::approvals::RunApproval;
use crate::context::prompt_size;
use agentloop_api::failure::CallFailure;
use agentloop_support::hash::sha256_hex;

/// What such a gate shows instead of a tool.
const GATE: &str = "goal";
const UNREADABLE: &str = "Unreadable";
const OUTDATED: &str = "Outdated";
/// How often in a row a check whose tool cannot be reached is tried again, before it counts as one without an answer.
pub const MAX_CHECK_RETRIES: u32 = 5;
/// The first wait for such a tool; each further one doubles it.
const FIRST_CHECK_WAIT: SignedDuration = SignedDuration::from_secs(15);
const MAX_CHECK_WAIT: SignedDuration = SignedDuration::from_mins(5);

/// What is requested now.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct ModeRequests {
    /// Failed calls for the present question.
    failures: u32,
    /// When the next one may be made.
    ask_at: Option<Timestamp>,
    /// The loop was paused for the model of the question, or waits for the tool of a check: a request may be answered before the
    /// next attempt.
    lets_request_in: bool,
    run: Option<RequestedRun>,
    /// How often in a row a tool could not be reached in the check of this turn, whatever its criterion.
    check_failures: u32,
    /// When the next try may be made.
    check_at: Option<Timestamp>,
    gate: Option<RequestedGate>,
    /// How many gates were opened.
    gates: u64,
    /// The source of outputs of runs that the first messages of turns show, if it is not trusted.
    untrusted: Option<String>,
}

/// A run that has no outcome.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
struct RequestedRun {
    id: ToolRunId,
    arguments: Map<String, Value>,
    plan: ToolRunPlan,
}

/// Why a check is not run.
struct UnplannedCheck {
    why: String,
    /// The server of its tool has not answered yet.
    is_silent: bool,
}

impl UnplannedCheck {
    fn because(why: String) -> Self {
        Self { why, is_silent: false }
    }
}

/// The open gate.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
struct RequestedGate {
    gate: RunGate,
    /// Hash of the message.
    arguments: String,
    /// Why the loop waits.
    message: String,
}

impl ModeRequests {
    /// Whether a request may be answered before the question is asked again. Otherwise requests would wait for as long as its
    /// model is unavailable.
    pub fn lets_request_in(&self) -> bool {
        self.lets_request_in
    }

    /// A request is answered: the next attempt at the question comes before another one.
    pub fn request_begins(&mut self) {
        self.lets_request_in = false;
    }

    /// Another turn of the mode begins: its check has all of its retries.
    pub fn own_turn_begins(&mut self) {
        self.check_failures = 0;
    }

    /// A wait for the tool of a check is over. Its failures still count: a check of several criteria, or one that a request
    /// makes start over, waits no longer than one of a single criterion.
    fn end_check_wait(&mut self) {
        if self.check_at.take().is_some() {
            self.lets_request_in = false;
        }
    }

    /// The loop runs in another pod, with another toolbox.
    pub fn pod_changed(&mut self) {
        self.end_check_wait();
        self.check_failures = 0;
    }

    pub fn open_gate(&self) -> Option<&RunGate> {
        self.gate.as_ref().map(|open| &open.gate)
    }

    pub fn reported_gate(&self) -> Option<OpenGate> {
        let open = self.gate.as_ref()?;
        Some(OpenGate {
            gate: (&open.gate).into(),
            tool: GATE.to_owned(),
            arguments: open.arguments.clone(),
            because_of: None,
        })
    }

    pub fn for_each_gate(&mut self, change: impl Fn(&mut RunGate)) {
        if let Some(open) = &mut self.gate {
            change(&mut open.gate);
        }
    }

    /// Whether this is the run.
    pub fn runs(&self, id: ToolRunId) -> bool {
        self.run.as_ref().is_some_and(|run| run.id == id)
    }

    /// Name of the tool of the run.
    pub fn tool(&self) -> Option<&str> {
        self.run.as_ref().map(|run| &*run.plan.tool)
    }

    /// The clock was set back.
    pub fn moved(&mut self, moved: impl Fn(Timestamp) -> Timestamp) {
        self.ask_at = self.ask_at.map(&moved);
        self.check_at = self.check_at.map(moved);
    }
}

impl Engine {
    /// A turn begins: its first message shows what runs have printed, now or earlier.
    pub(super) fn note_shown_outputs(&mut self, now: Timestamp) {
        if let Some(source) = self.state.requests.untrusted.clone() {
            self.state.trust.add(self.transcript.len(), source, now);
        }
    }

    /// When the question of the mode may be asked.
    pub(super) fn mode_question_due(&self) -> Timestamp {
        self.state.requests.ask_at.unwrap_or(Timestamp::MIN)
    }

    /// When the tool run of the mode may be sent.
    pub(super) fn mode_check_due(&self) -> Timestamp {
        self.state.requests.check_at.unwrap_or(Timestamp::MIN)
    }

    /// The tool of the check could not be reached. Whether the check is tried again, later; otherwise that was tried often enough.
    fn retry_check(&mut self, now: Timestamp) -> bool {
        let requests = &mut self.state.requests;
        if requests.check_failures >= MAX_CHECK_RETRIES {
            return false;
        }
        let wait = time_math::doubled(FIRST_CHECK_WAIT, requests.check_failures, MAX_CHECK_WAIT);
        requests.check_failures += 1;
        requests.check_at = Some(time_math::after(now, wait));
        requests.lets_request_in = true;
        true
    }

    /// Sends the question of the mode, unless a limit holds it.
    pub(super) fn ask_mode_question(&mut self, out: &mut EffectBuffer) {
        if self.mode_question_due() > out.now || !self.may_attempt(out) {
            return;
        }
        if let Some(question) = self.mode().question(&self.mode_context(out.now)) {
            let task = CallTask::Question(question.purpose, [question.text, question.data]);
            self.send_call_before_turn(task, out);
        }
    }

    /// Estimated tokens of the largest possible call with this question.
    pub(super) fn largest_question(&self, purpose: CallPurpose, question: &[String; 2]) -> u64 {
        let light = self.settings.light_output_tokens.filter(|_| purpose.uses_light_model());
        let max = light.unwrap_or(self.settings.max_output_tokens).into();
        prompt_size::message_size(&json!(question).to_string()).saturating_add(max)
    }

    pub(super) fn handle_mode_answer(
        &mut self,
        call: CallId,
        question: ModeQuestion,
        answer: &ModelAnswer,
        out: &mut EffectBuffer,
    ) {
        let note = format!("{:?}", answer.finish);
        out.record(answer_line((call, question.purpose), answer, note, Vec::new()));
        let is_complete = matches!(answer.finish, FinishReason::Stop | FinishReason::ToolCalls);
        let text = answer.text.as_deref().map(|text| if is_complete { text } else { "" });
        self.question_ended(question, text, UNREADABLE, out);
    }

    /// The call for the question failed, and no limit had refused it.
    pub(super) fn mode_question_failed(
        &mut self,
        call: CallId,
        question: ModeQuestion,
        failure: &CallFailure,
        out: &mut EffectBuffer,
    ) {
        let requests = &mut self.state.requests;
        let counts = failure.kind != agentloop_api::failure::FailureKind::LinkLost;
        requests.failures = requests.failures.saturating_add(u32::from(counts));
        let next = retry::decide(failure, call, requests.failures, out.now);
        self.state.last_error = Some((out.now, failure.clone()));
        if question.purpose.uses_light_model() {
            self.note_light_failure(failure, out.now);
        }
        match next {
            RetryDecision::Retry(wait) => self.state.requests.ask_at = Some(time_math::after(out.now, wait)),
            RetryDecision::Pause(reason, wait) => {
                let message = format!(
                    "{failure}. The check of the goal waits and the call is retried; the annotation agentloop.dev/resume \
                     retries it at once"
                );
                self.state.requests.lets_request_in = true;
                self.raise_pause(reason, Some(time_math::after(out.now, wait)), message);
            }
            RetryDecision::AwaitLink => self.link_refused(out),
            RetryDecision::GiveUp => self.question_ended(question, None, failure.kind.as_ref(), out),
        }
    }

    /// The question has its answer, or none. `problem`: why it would not be clear.
    fn question_ended(&mut self, question: ModeQuestion, answer: Option<&str>, problem: &str, out: &mut EffectBuffer) {
        let requests = &mut self.state.requests;
        (requests.failures, requests.ask_at, requests.lets_request_in) = (0, None, false);
        // The time of the call is not time without an action.
        self.state.counters.idle.skip(out.now);
        let purpose = question.purpose;
        if self.mode().question(&self.mode_context(out.now)) != Some(question) {
            // The spec was edited while the call was open.
            let note = format!("{}: {OUTDATED}", purpose.as_ref());
            out.record(journal_line(RecordKind::QuestionFailed, self.turn_number(), note));
            return;
        }
        if !self.ask_mode(out.now, |mode, context| mode.answered(answer, context)) {
            let note = format!("{}: {problem}", purpose.as_ref());
            let detail = match answer {
                Some(_) => RecordDetail::UselessAnswer,
                None => RecordDetail::None,
            };
            out.record(JournalRecord {
                detail,
                ..journal_line(RecordKind::QuestionFailed, self.turn_number(), note)
            });
        }
        self.end_after_check(out);
    }

    /// A part of the check of a step is over: a guardrail that waited for the check may end the loop.
    fn end_after_check(&mut self, out: &mut EffectBuffer) {
        self.record_validation(out);
        let next = self.mode().next(&self.mode_context(out.now));
        self.end_by_guardrail(next, out);
    }

    /// Sends the tool run of the mode; after a restart again, under the same id.
    pub(super) fn run_mode_check(&mut self, out: &mut EffectBuffer) {
        if self.mode_check_due() > out.now {
            return;
        }
        let Some(check) = self.mode().check(&self.mode_context(out.now)) else {
            return;
        };
        let is_same = |run: &RequestedRun| run.plan.tool == check.tool && run.arguments == check.arguments;
        if !self.state.requests.run.as_ref().is_some_and(is_same) {
            if let Some(RequestedRun { id, plan, .. }) = self.state.requests.run.take() {
                // The spec was edited while it was under way.
                out.record(plan_line(
                    RecordKind::ToolOutcome,
                    id,
                    OUTDATED,
                    &plan,
                    Some(OutcomeKind::Unknown),
                ));
            }
            match self.plan_check(&check) {
                Ok(run) => self.state.requests.run = Some(run),
                Err(UnplannedCheck { why, is_silent }) => {
                    if !is_silent || !self.retry_check(out.now) {
                        self.state.requests.end_check_wait();
                        self.ask_mode(out.now, |mode, context| mode.checked(CheckEnd::NotRun(&why), context));
                    }
                    out.record(journal_line(RecordKind::QuestionFailed, self.turn_number(), "not run"));
                    self.record_validation(out);
                    return;
                }
            }
        }
        let Some(run) = self.state.requests.run.as_mut() else {
            return;
        };
        run.plan.tries = run.plan.tries.saturating_add(1);
        let run = run.clone();
        let is_new = run.plan.tries == 1;
        if is_new {
            self.state.totals.count_run(false);
        }
        let note = if is_new { "" } else { "repeated" };
        out.record(plan_line(RecordKind::ToolIntent, run.id, note, &run.plan, None));
        self.running.insert(run.id, out.now);
        let timeout = run.plan.timeout;
        out.push(EngineEffect::RunTool(run.plan.run(run.id, run.arguments, 0), timeout));
    }

    fn plan_check(&mut self, check: &ModeCheck) -> Result<RequestedRun, UnplannedCheck> {
        let call = ToolCall {
            id: String::new(),
            name: check.tool.to_owned(),
            arguments: Value::Object(check.arguments.clone()).to_string(),
        };
        // The model does not request it, so what the model has read does not matter.
        let context = AdmissionContext {
            denials: &BTreeMap::new(),
            untrusted: None,
        };
        if self.offer.changed(&call.name).is_some() {
            let why = "not run: the definition of its tool has changed";
            return Err(UnplannedCheck::because(why.to_owned()));
        }
        let unknown = self.offer.toolbox().unknown_argument(&call.name, &check.arguments);
        if let Some(argument) = unknown {
            let tool = check.tool.rsplit_once("__").map_or(check.tool, |(_, tool)| tool);
            return Err(UnplannedCheck::because(format!(
                "not run: {} is of an older version, whose {tool} has no argument {argument}: recreate the pod with one version \
                 for all of its containers",
                self.settings.toolbox_name()
            )));
        }
        let admitted = self.offer.toolbox().admit(&call, context);
        let (known, arguments) = admitted.map_err(|denied| UnplannedCheck {
            is_silent: denied.why == DenialReason::ServerSilent,
            why: denied.text,
        })?;
        let id = self.id_before_turn();
        let of = admission::run_identity(&self.agent, self.state.life.epoch(), id);
        let plan = ToolRunPlan {
            // The user has written it into the spec.
            approval: RunApproval::NotNeeded,
            ..known.plan(&of, &arguments, None)
        };
        Ok(RequestedRun { id, arguments, plan })
    }

    /// The tool run of the mode ended.
    pub(super) fn mode_check_ended(&mut self, outcome: &ToolOutcome, out: &mut EffectBuffer) {
        let Some(RequestedRun { id, plan, .. }) = self.state.requests.run.take() else {
            return;
        };
        let (kind, end) = match outcome {
            ToolOutcome::Done { text } => (OutcomeKind::Ok, CheckEnd::Ran(text)),
            ToolOutcome::Failed { text } => (OutcomeKind::Error, CheckEnd::NotRun(text)),
            ToolOutcome::Unavailable { message } => (OutcomeKind::Unavailable, CheckEnd::NotRun(message)),
            ToolOutcome::Unknown { message } => (OutcomeKind::Unknown, CheckEnd::NotRun(message)),
        };
        out.record(plan_line(RecordKind::ToolOutcome, id, "", &plan, Some(kind)));
        if !plan.trusted {
            self.state.requests.untrusted = Some(server_source(&plan.tool));
        }
        self.state.counters.idle.skip(out.now);
        if kind != OutcomeKind::Unavailable {
            self.state.requests.check_failures = 0;
        } else if self.retry_check(out.now) {
            return;
        }
        self.state.requests.end_check_wait();
        self.ask_mode(out.now, |mode, context| mode.checked(end, context));
        self.end_after_check(out);
    }

    /// Opens the gate of the mode, and pauses the loop.
    pub(super) fn open_mode_gate(&mut self, out: &mut EffectBuffer) {
        let Some(ModeApproval { kind, cause, message }) = self.mode().approval(&self.mode_context(out.now)) else {
            return;
        };
        if self.state.requests.gate.is_some() {
            return;
        }
        let (epoch, requests) = (self.state.life.epoch(), &mut self.state.requests);
        requests.gates = requests.gates.saturating_add(1);
        let gate = RunGate {
            id: format!("{GATE}-e{epoch}-{}", requests.gates),
            kind,
            opened_at: out.now,
            expires_at: time_math::after(out.now, self.settings.approval_timeout),
        };
        let note = cause.note(&gate.id);
        requests.gate = Some(RequestedGate {
            arguments: sha256_hex(format!("{} {message}", gate.id), 16),
            gate,
            message,
        });
        out.record(JournalRecord {
            detail: RecordDetail::Escalated(kind),
            ..journal_line(RecordKind::GateOpened, self.turn_number(), note)
        });
        self.settle_mode_gate(out);
    }

    /// The loop is paused while the gate is open. It closes when it expires, or when the mode no longer needs it.
    pub(super) fn settle_mode_gate(&mut self, out: &mut EffectBuffer) {
        let Some(open) = &self.state.requests.gate else {
            return;
        };
        let (kind, expires_at) = (open.gate.kind, open.gate.expires_at);
        let message = format!("{} (gate {})", open.message, open.gate.id);
        let needed = self.mode().approval(&self.mode_context(out.now));
        if needed.is_none_or(|needed| needed.kind != kind) {
            self.close_mode_gate("withdrawn", None, out);
        } else if expires_at <= out.now {
            self.mode_gate_ended(false, "expired", out);
        } else {
            self.raise_pause(pause_reason(kind), Some(expires_at), message);
        }
    }

    fn close_mode_gate(&mut self, how: &str, approved: Option<bool>, out: &mut EffectBuffer) -> Option<RunGate> {
        let RequestedGate { gate, .. } = self.state.requests.gate.take()?;
        let note = format!("{} {how}", gate.id);
        let detail = match approved {
            Some(false) => RecordDetail::NotApproved(gate.kind),
            Some(true) | None => RecordDetail::None,
        };
        out.record(JournalRecord {
            detail,
            ..journal_line(RecordKind::GateResolved, self.turn_number(), note)
        });
        self.clear_pause(pause_reason(gate.kind));
        Some(gate)
    }

    fn mode_gate_ended(&mut self, approved: bool, how: &str, out: &mut EffectBuffer) {
        if let Some(gate) = self.close_mode_gate(how, Some(approved), out) {
            let waited = out.now.duration_since(gate.opened_at);
            self.ask_mode(out.now, |mode, _| {
                mode.approval_answered(approved, waited.max(SignedDuration::ZERO));
            });
        }
    }

    /// A person answered a gate. Without effect if it is not this one, or with another hash.
    pub(super) fn mode_gate_answered(&mut self, answer: &EngineGateAnswer, out: &mut EffectBuffer) {
        let asked = |open: &RequestedGate| open.gate.id == answer.gate && open.arguments == answer.arguments;
        if self.state.requests.gate.as_ref().is_some_and(asked) {
            self.mode_gate_ended(answer.approved, &answer.how(), out);
        }
    }
}
