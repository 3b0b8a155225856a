//! The tool calls of one answer, from admission to their results: which run now, what a restart does with interrupted
//! runs, and when results join the transcript.
//!
//! Each run is journalled before it is sent. Up to four read-only runs are concurrent; all others run alone and in
//! order. Results join in the order of the calls. A stop of the loop cancels read-only runs and awaits the rest.

pub mod admission;
pub mod expiry;
mod offer;
mod results;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use self::admission::DeniedCall;
use crate::effects::{EffectBuffer, journal_line};
use crate::loop_detection::ToolCallEnding;
use crate::machine::Engine;
use crate::message::{self, FinishReason, Message, ModelAnswer, ToolCall};
use crate::modes::LoopPace;
use crate::snapshot::LifecyclePhase;
use crate::tool::{ToolEffect, ToolOutcome, ToolRun, ToolRunId, UnknownOutcomePolicy};
use crate::tools::results::render_outcome;
use crate::{CallId, EngineEffect, JournalRecord, OutcomeKind, RecordKind, ToolLine, ids};
use agentloop_api::agent::LimitedResource;

/// Concurrent read-only runs.
pub const MOST_READS: usize = 4;
/// How many calls after the first one without a result may run meanwhile. Their results wait for it in the snapshot, which is
/// written with each step: without a bound, one slow read before 127 quick ones would cost 25 MB.
pub const MOST_AHEAD: usize = 8;
/// How often one run is sent if its outcome stays unknown and its tool's policy is `Retry`.
pub const MAX_TRIES: u32 = 3;
/// Most characters of the reasoning that the journal keeps with a call.
const MAX_REASONING: usize = 1_000;

/// The tool calls of the turn's last answer.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct ToolBatch {
    /// How many calls, from the first, have their results in the transcript.
    pub joined: usize,
    /// The state of the calls after those.
    pub slots: VecDeque<ToolSlot>,
    /// The pace requested by the last valid call of a tool of the mode, such as `yield`.
    pub pace: Option<LoopPace>,
    /// How calls ended whose results have not joined yet, by their position among all calls. Calls of the
    /// mode's tools are not in it.
    #[serde(default)]
    pub endings: BTreeMap<usize, ToolCallEnding>,
    /// A call was not run, failed, or has an unknown outcome: a call beside it that ends the turn has to wait until
    /// the model has seen that.
    #[serde(default)]
    pub failed: bool,
    /// When the model requested them, or the last of their runs ended: only pauses can have delayed the rest since
    /// then.
    #[serde(default)]
    pub fresh_at: Option<Timestamp>,
}

impl ToolBatch {
    /// Ends the call at this position, counted among those that have not joined.
    pub(crate) fn end(&mut self, place: usize, ending: ToolCallEnding, text: String) {
        self.endings.insert(self.joined + place, ending);
        self.failed |= ending == ToolCallEnding::Failed;
        if let Some(slot) = self.slots.get_mut(place) {
            *slot = ToolSlot::Result(text);
        }
    }

    /// Whether every call has its result.
    fn all_done(&self) -> bool {
        let is_done = |slot: &ToolSlot| matches!(slot, ToolSlot::Result(_) | ToolSlot::Yield(_));
        self.slots.iter().all(is_done)
    }
}

/// The state of one call.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum ToolSlot {
    /// Admitted, and not sent.
    Waiting(ToolRunPlan),
    /// Sent, and its outcome is not known.
    Open(ToolRunPlan),
    /// Its result; it waits for those before it.
    Result(String),
    /// The call that ends the turn, such as `yield`, with its result if all others succeed; it waits for them.
    Yield(String),
}

/// A run, with the rules at the time of the model's request: an edit of the spec affects only later runs.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct ToolRunPlan {
    pub tool: String,
    pub effect: ToolEffect,
    /// A repeat with the same key has no further effect.
    pub idempotent: bool,
    pub on_unknown: UnknownOutcomePolicy,
    /// The longest that it may take.
    pub timeout: SignedDuration,
    /// Shared by its repeats.
    pub key: String,
    /// Hash of its arguments.
    pub arguments: String,
    /// How often it was sent.
    pub tries: u32,
}

impl ToolRunPlan {
    pub(crate) fn only_looks(&self) -> bool {
        self.effect == ToolEffect::Read
    }

    /// Whether the same run may be sent again if its outcome is unknown.
    fn may_be_repeated(&self) -> bool {
        self.only_looks() || self.idempotent || self.retries()
    }

    pub(crate) fn retries(&self) -> bool {
        self.on_unknown == UnknownOutcomePolicy::Retry
    }
}

/// The next step of a batch.
enum NextRun {
    /// This slot can be sent.
    Send(usize),
    /// Nothing can be sent until another input arrives.
    Wait,
}

impl Engine {
    /// Admits or denies the tool calls of an answer, and starts them.
    pub(crate) fn begin_tool_batch(&mut self, call: CallId, answer: &ModelAnswer, out: &mut EffectBuffer) {
        let mut work = ToolBatch {
            fresh_at: Some(out.now),
            ..ToolBatch::default()
        };
        let mut decisions = Vec::new();
        // The last call of a truncated answer may lack arguments and still fit the tool's schema.
        let cut = answer.tool_calls.len().checked_sub(1);
        let cut = cut.filter(|_| answer.finish == FinishReason::Length);
        for (place, wanted) in answer.tool_calls.iter().enumerate() {
            if cut == Some(place) {
                let denied = admission::truncated_call(self.settings.max_output_tokens);
                let text = self.deny(run_id(call.turn, call.call, place), wanted, denied, out);
                work.slots.push_back(ToolSlot::Result(String::new()));
                work.end(place, ToolCallEnding::Failed, text);
                continue;
            }
            if let Some(decision) = self.mode_decision(wanted, out.now) {
                work.slots.push_back(ToolSlot::Result(String::new()));
                decisions.push((place, decision));
            } else {
                let slot = self.admit_call(run_id(call.turn, call.call, place), wanted, out);
                if matches!(slot, ToolSlot::Result(_)) {
                    work.endings.insert(place, ToolCallEnding::Failed);
                    work.failed = true;
                }
                work.slots.push_back(slot);
            }
        }
        work.apply_decisions(decisions, &answer.tool_calls);
        if let Some(turn) = &mut self.state.turn {
            turn.work = Some(work);
        }
        if self.turn_rules().counts_as_turn {
            self.state.counters.rest.end_text_turns();
        }
        self.expire_outdated(out);
        self.advance_tools(out);
    }

    fn admit_call(&mut self, id: ToolRunId, wanted: &ToolCall, out: &mut EffectBuffer) -> ToolSlot {
        let of = admission::run_identity(&self.agent, self.state.epoch, id);
        let Some(turn) = &mut self.state.turn else {
            return ToolSlot::Result(String::new());
        };
        match self.toolbox.admit(wanted, &turn.denials) {
            Ok((known, arguments)) => ToolSlot::Waiting(ToolRunPlan {
                tool: known.spec.name.clone(),
                effect: known.spec.effect,
                idempotent: known.spec.idempotent,
                on_unknown: known.spec.on_unknown,
                timeout: known.spec.timeout,
                key: admission::idempotency_key(&of, &known.spec.name, &arguments),
                arguments: admission::arguments_hash(&arguments),
                tries: 0,
            }),
            Err(denied) => {
                if self.toolbox.knows(&wanted.name) {
                    let denials = turn.denials.entry(wanted.name.clone()).or_default();
                    *denials = denials.saturating_add(1);
                }
                ToolSlot::Result(self.deny(id, wanted, denied, out))
            }
        }
    }

    /// Journals that a call is not run. Returns its result.
    pub(crate) fn deny(&self, id: ToolRunId, wanted: &ToolCall, denied: DeniedCall, out: &mut EffectBuffer) -> String {
        // A name that no source declares is the model's text.
        let tool = self.toolbox.knows(&wanted.name).then(|| wanted.name.clone());
        out.record(tool_line(RecordKind::ToolDenied, id, denied.why.as_ref(), |line| {
            line.tool = tool;
        }));
        denied.text
    }

    /// Advances the tool calls as far as possible now.
    pub(crate) fn advance_tools(&mut self, out: &mut EffectBuffer) {
        // Join first: what has just ended may be part of a loop, which denies what waits.
        self.join_results(out);
        self.deny_repetitions(out);
        self.expire_held(out);
        while let NextRun::Send(place) = self.next_run(out) {
            self.send_run(place, out);
        }
        self.join_results(out);
        self.finish_tool_batch(out);
    }

    /// The next run that may be sent. Pauses the loop if a guardrail trips.
    fn next_run(&mut self, out: &mut EffectBuffer) -> NextRun {
        if self.fenced || !self.state.reasons.are_free(out.now) || self.state.lifecycle != LifecyclePhase::Active {
            return NextRun::Wait;
        }
        let Some(work) = self.tool_batch() else {
            return NextRun::Wait;
        };
        // In order: a read-only run may join read-only runs under way, any other run waits until none is.
        let mut under_way = 0;
        for (place, slot) in work.slots.iter().enumerate() {
            let (plan, is_new) = match slot {
                ToolSlot::Result(_) | ToolSlot::Yield(_) => continue,
                ToolSlot::Waiting(plan) => (plan, true),
                ToolSlot::Open(plan) if self.is_under_way(place) => {
                    under_way += 1;
                    if plan.only_looks() {
                        continue;
                    }
                    return NextRun::Wait;
                }
                ToolSlot::Open(plan) => (plan, false),
            };
            if plan.only_looks() {
                return if under_way == 0 || (under_way < MOST_READS && place <= MOST_AHEAD) {
                    NextRun::Send(place)
                } else {
                    NextRun::Wait
                };
            }
            if under_way > 0 || !self.state.reasons.allow_actions() {
                return NextRun::Wait;
            }
            return if is_new && self.is_held_by_guardrail(out) {
                NextRun::Wait
            } else {
                NextRun::Send(place)
            };
        }
        NextRun::Wait
    }

    fn is_held_by_guardrail(&mut self, out: &EffectBuffer) -> bool {
        let Some(trip) = self.trips_before_action(out.now).next() else {
            return false;
        };
        self.raise_guardrail_pause(trip, out);
        true
    }

    fn send_run(&mut self, place: usize, out: &mut EffectBuffer) {
        let (Some(id), Some(wanted)) = (self.run_id(place), self.wanted_call(place)) else {
            return;
        };
        let arguments = message::arguments(&wanted.arguments).unwrap_or_default();
        let Some(slot) = self.slot(place) else {
            return;
        };
        let (mut plan, is_new) = match std::mem::replace(slot, ToolSlot::Result(String::new())) {
            ToolSlot::Waiting(plan) => (plan, true),
            ToolSlot::Open(plan) => (plan, false),
            done @ (ToolSlot::Result(_) | ToolSlot::Yield(_)) => {
                *slot = done;
                return;
            }
        };
        // The intent is committed before the run is sent: after a crash it shows that the run may have happened.
        plan.tries = plan.tries.saturating_add(1);
        *slot = ToolSlot::Open(plan.clone());
        if is_new {
            self.count_run(&plan, out);
        }
        let note = if is_new { "" } else { "repeated" };
        out.record(plan_line(RecordKind::ToolIntent, id, note, &plan, None));
        self.running.insert(id, out.now);
        let run = ToolRun {
            id,
            name: plan.tool,
            arguments,
            idempotency_key: plan.key,
        };
        out.push(EngineEffect::RunTool(run, plan.timeout));
    }

    fn count_run(&mut self, plan: &ToolRunPlan, out: &EffectBuffer) {
        self.state.tool_calls = self.state.tool_calls.saturating_add(1);
        if plan.only_looks() {
            return;
        }
        self.state.actions = self.state.actions.saturating_add(1);
        self.count_use(LimitedResource::Actions, 1, out);
        if let Some(turn) = &mut self.state.turn {
            turn.acted = true;
        }
    }

    /// A run ended. The outcome of a run that was cancelled, or that another process sent, is ignored.
    pub(crate) fn handle_tool_outcome(&mut self, id: ToolRunId, outcome: ToolOutcome, out: &mut EffectBuffer) {
        let Some(sent) = self.running.remove(&id) else {
            return;
        };
        self.record_run_time(id, sent, &outcome, out);
        if id.is_refresh() {
            self.refresh_finished(id, outcome, out);
            return;
        }
        let Some(place) = self.place_of(id) else {
            return;
        };
        self.record_outcome(place, id, outcome, out);
        if let Some(work) = self.state.turn.as_mut().and_then(|turn| turn.work.as_mut()) {
            work.fresh_at = Some(out.now);
        }
        self.advance_tools(out);
    }

    pub(crate) fn record_outcome(&mut self, place: usize, id: ToolRunId, outcome: ToolOutcome, out: &mut EffectBuffer) {
        let most = self.most_result_bytes();
        let counts = self.turn_rules().counts_as_turn;
        let Some(ToolSlot::Open(plan)) = self.slot(place) else {
            return;
        };
        let (kind, text) = render_outcome(outcome, plan, most);
        let ending = match kind {
            OutcomeKind::Ok if plan.only_looks() => ToolCallEnding::Looked,
            OutcomeKind::Ok => ToolCallEnding::Acted,
            OutcomeKind::Error | OutcomeKind::Unavailable | OutcomeKind::Unknown => ToolCallEnding::Failed,
        };
        if kind == OutcomeKind::Unknown && plan.retries() && plan.tries < MAX_TRIES {
            // It stays open, and is sent again.
            out.record(plan_line(
                RecordKind::ToolOutcome,
                id,
                "will be repeated",
                plan,
                Some(kind),
            ));
            return;
        }
        out.record(plan_line(RecordKind::ToolOutcome, id, "", plan, Some(kind)));
        if counts {
            let tool = plan.tool.clone();
            self.state.counters.idle.observe_result(&tool, &text, out.now);
        }
        if let Some(work) = self.state.turn.as_mut().and_then(|turn| turn.work.as_mut()) {
            work.end(place, ending, text);
        }
    }

    /// Settles the runs that an earlier process left open: those that must not be repeated have an unknown outcome.
    /// `outdated`: why none with side effects is repeated, and no waiting one is sent.
    pub(crate) fn settle_interrupted_runs(&mut self, outdated: Option<&str>, out: &mut EffectBuffer) {
        let places = self.tool_batch().map_or(0, |work| work.slots.len());
        for place in 0..places {
            let cut = matches!(self.slot(place), Some(ToolSlot::Open(plan)) if !plan.may_be_repeated());
            if let (true, Some(id)) = (cut, self.run_id(place)) {
                let message = "the runtime was restarted before its outcome was known".to_owned();
                self.record_outcome(place, id, ToolOutcome::Unknown { message }, out);
            }
        }
        if let Some(why) = outdated {
            self.expire(why, true, out);
        }
        if places > 0 {
            self.advance_tools(out);
        }
    }

    /// Cancels the runs under way, all or only the read-only ones. They stay open: the next process applies the restart
    /// rule.
    pub(crate) fn cancel_runs(&mut self, all: bool, out: &mut EffectBuffer) {
        let looks = |engine: &Self, id: &ToolRunId| {
            let slot = engine
                .place_of(*id)
                .and_then(|place| engine.tool_batch()?.slots.get(place));
            id.is_refresh() || matches!(slot, Some(ToolSlot::Open(plan)) if plan.only_looks())
        };
        let ids: Vec<ToolRunId> = self
            .running
            .keys()
            .filter(|id| all || looks(self, id))
            .copied()
            .collect();
        for id in ids {
            self.running.remove(&id);
            out.push(EngineEffect::CancelTool(id));
        }
    }

    /// Appends results to the transcript once all results before them are there.
    fn join_results(&mut self, out: &mut EffectBuffer) {
        let mut messages = Vec::new();
        // Strictly in the order of the calls. A call that ends the turn waits for all others, since a failed one
        // rejects it.
        while self.tool_batch().is_some_and(|work| match work.slots.front() {
            Some(ToolSlot::Result(_)) => true,
            Some(ToolSlot::Yield(_)) => work.all_done(),
            Some(ToolSlot::Waiting(_) | ToolSlot::Open(_)) | None => false,
        }) {
            let Some(wanted) = self.wanted_call(0) else {
                return;
            };
            let wanted = wanted.clone();
            let reasoning = self.reasoning(&wanted);
            let Some(work) = self.state.turn.as_mut().and_then(|turn| turn.work.as_mut()) else {
                return;
            };
            let mut text = match work.slots.pop_front() {
                Some(ToolSlot::Yield(_)) if work.failed => format!(
                    "Not yet: another call of this answer failed. Look at its result first, then {} again.",
                    wanted.name
                ),
                Some(ToolSlot::Result(text) | ToolSlot::Yield(text)) => text,
                Some(ToolSlot::Waiting(_) | ToolSlot::Open(_)) | None => return,
            };
            let ending = work.endings.remove(&work.joined);
            work.joined += 1;
            if let Some(told) = ending.and_then(|ending| self.inspect_call(&wanted, &text, ending, out)) {
                text = format!("{text}\n[{told}]");
            }
            let id = wanted.id;
            let message = Arc::new(Message::Tool {
                id,
                text,
                failed: ending == Some(ToolCallEnding::Failed),
                reasoning,
            });
            self.append(std::slice::from_ref(&message));
            messages.push(message);
        }
        if !messages.is_empty() {
            out.attach(messages, || {
                journal_line(RecordKind::ToolOutcome, self.turn_number(), "")
            });
        }
    }

    /// All calls have their results: the turn continues, or ends as one of them requests, if all others succeeded.
    fn finish_tool_batch(&mut self, out: &mut EffectBuffer) {
        let Some(turn) = &mut self.state.turn else {
            return;
        };
        let calls = turn.own_call();
        let Some(work) = turn.work.take_if(|work| work.slots.is_empty()) else {
            return;
        };
        self.state.counters.idle.skip(out.now);
        let pace = work.pace.filter(|_| !work.failed);
        if pace.is_none() && !self.ended_by_guardrail(calls, out) {
            self.next_call(out);
        } else {
            self.complete_turn(&pace.unwrap_or(LoopPace::Continue), out);
        }
    }

    pub(crate) fn tool_batch(&self) -> Option<&ToolBatch> {
        self.state.turn.as_ref()?.work.as_ref()
    }

    pub(crate) fn slot(&mut self, place: usize) -> Option<&mut ToolSlot> {
        self.state.turn.as_mut()?.work.as_mut()?.slots.get_mut(place)
    }

    /// The call behind a slot. The answer is in the transcript, before the results that have joined.
    pub(crate) fn wanted_call(&self, place: usize) -> Option<&ToolCall> {
        let (calls, _) = self.last_answer()?;
        calls.get(self.tool_batch()?.joined + place)
    }

    fn last_answer(&self) -> Option<(&[ToolCall], Option<&str>)> {
        let joined = self.tool_batch()?.joined;
        let place = self.transcript.len().checked_sub(joined + 1)?;
        match &**self.transcript.get(place)? {
            Message::Assistant { text, tool_calls, .. } => Some((tool_calls, text.as_deref())),
            Message::System { .. } | Message::User { .. } | Message::Tool { .. } => None,
        }
    }

    /// Why the model requests a call: from the call's own arguments, or else the text of the answer.
    fn reasoning(&self, wanted: &ToolCall) -> Option<String> {
        let own = message::arguments(&wanted.arguments)
            .and_then(|arguments| Some(arguments.get("reasoning")?.as_str()?.to_owned()));
        let said = own.or_else(|| Some(self.last_answer()?.1?.to_owned()))?;
        Some(said.chars().take(MAX_REASONING).collect())
    }

    pub(crate) fn run_id(&self, place: usize) -> Option<ToolRunId> {
        let turn = self.state.turn.as_ref()?;
        Some(run_id(turn.number, turn.call, turn.work.as_ref()?.joined + place))
    }

    pub(crate) fn place_of(&self, id: ToolRunId) -> Option<usize> {
        let places = self.tool_batch()?.slots.len();
        (0..places).find(|place| self.run_id(*place) == Some(id))
    }

    fn is_under_way(&self, place: usize) -> bool {
        self.run_id(place).is_some_and(|id| self.running.contains_key(&id))
    }
}

/// The run of a call of an answer; `place` counts from 0.
fn run_id(turn: i64, call: u32, place: usize) -> ToolRunId {
    ToolRunId {
        member: ids::MAIN,
        turn,
        call,
        index: u32::try_from(place).unwrap_or(u32::MAX).saturating_add(1),
    }
}

pub(crate) fn tool_line(
    kind: RecordKind,
    id: ToolRunId,
    note: &str,
    fill: impl FnOnce(&mut ToolLine),
) -> JournalRecord {
    let mut tool = ToolLine {
        run: id,
        tool: None,
        effect: None,
        key: None,
        arguments: None,
        outcome: None,
    };
    fill(&mut tool);
    JournalRecord {
        member: id.member,
        tool: Some(tool),
        ..journal_line(kind, id.turn, note)
    }
}

fn plan_line(
    kind: RecordKind,
    id: ToolRunId,
    note: &str,
    plan: &ToolRunPlan,
    outcome: Option<OutcomeKind>,
) -> JournalRecord {
    tool_line(kind, id, note, |line| {
        line.tool = Some(plan.tool.clone());
        line.effect = Some(plan.effect);
        line.key = Some(plan.key.clone());
        line.arguments = Some(plan.arguments.clone());
        line.outcome = outcome;
    })
}
