//! The tool calls of one answer, from admission to their results: which run now, what a restart does with interrupted
//! runs, and when results join the transcript.
//!
//! Each run is journalled before it is sent. Up to four read-only runs are concurrent; all others run alone and in
//! order. Results join in the order of the calls. A stop of the loop cancels read-only runs and awaits the rest.

pub mod admission;
pub mod batch;
pub mod expiry;
mod lines;
pub mod offer;
pub mod results;

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use self::admission::{AdmissionContext, DenialReason, DeniedCall};
use self::batch::{JoinedResult, NextRun, ToolBatch, ToolRunPlan, ToolSlot};
use self::expiry::{MAX_CALL, MAX_PAUSE, expired, expired_text};
pub(crate) use self::lines::{plan_line, tool_line};
use crate::approvals::RunApproval;
use crate::effects::{EffectBuffer, journal_line};
use crate::guardrails::EndedToolRun;
use crate::loop_detection::ToolCallEnding;
use crate::machine::Engine;
use crate::message::{self, FinishReason, Message, ModelAnswer, ToolCall};
use crate::modes::LoopPace;
use crate::tool::{ResultArtifacts, ToolOutcome, ToolRun, ToolRunId};
use crate::tools::results::render_outcome;
use crate::turn::Turn;
use crate::{CallId, EngineEffect, JournalRecord, OutcomeKind, RecordKind, ids, time_math};
use agentloop_api::agent::LimitedResource;
use agentloop_api::status::GateKind;

/// How often one run is sent if its outcome stays unknown and its tool's policy is `Retry`.
pub const MAX_TRIES: u32 = 3;
/// Maximum number of characters of the reasoning that the journal keeps with a call.
const MAX_REASONING: usize = 1_000;

impl Engine {
    /// Admits or denies the [`ToolCall`]s of an answer, and starts them.
    pub(crate) fn begin_tool_batch(&mut self, call: CallId, answer: &ModelAnswer, out: &mut EffectBuffer) {
        let mut work = ToolBatch::begun(out.now);
        let mut decisions = Vec::new();
        // The last call of a truncated answer may lack arguments and still fit the tool's schema.
        let cut = answer.tool_calls.len().checked_sub(1);
        let cut = cut.filter(|_| answer.finish == FinishReason::Length);
        for (place, wanted) in answer.tool_calls.iter().enumerate() {
            let id = run_id(call.turn, call.call, place);
            let admitted = if cut == Some(place) {
                let denied = admission::truncated_call(self.settings.max_output_tokens);
                Err(self.deny(id, wanted, denied, out))
            } else if self.is_memory_call(wanted) {
                work.add_memory_call();
                continue;
            } else if let Some(decision) = self.mode_decision(wanted, out.now) {
                work.add_mode_call();
                decisions.push((place, decision));
                continue;
            } else {
                self.admit_call(id, wanted, out)
            };
            match admitted {
                Ok(plan) => work.add_run(plan),
                Err(text) => {
                    self.state.totals.count_denied_call();
                    work.add_denied(text);
                }
            }
        }
        work.apply_decisions(decisions, &answer.tool_calls);
        if let Some(turn) = &mut self.state.turn {
            turn.begin_batch(work);
        }
        self.run_memory_calls(out);
        if self.turn_rules().counts_as_turn {
            self.state.counters.rest.end_text_turns();
        }
        self.expire_outdated(out);
        self.advance_tools(out);
    }

    /// The run for a call, or the result of a call that is not run.
    fn admit_call(&mut self, id: ToolRunId, wanted: &ToolCall, out: &mut EffectBuffer) -> Result<ToolRunPlan, String> {
        let of = admission::run_identity(&self.agent, self.state.life.epoch(), id);
        let by_mode = self.denied_by_mode(wanted);
        let Some(turn) = &mut self.state.turn else {
            return Err(String::new());
        };
        let context = AdmissionContext {
            denials: turn.denials(),
            untrusted: self.state.trust.untrusted().map(|content| &*content.source),
        };
        let admitted = match by_mode.or_else(|| self.offer.changed(&wanted.name)) {
            Some(denied) => Err(denied),
            None => self.offer.toolbox().admit(wanted, context),
        };
        let denied = match admitted {
            Ok((known, arguments)) => return Ok(known.plan(&of, &arguments, context.untrusted)),
            Err(denied) => denied,
        };
        if self.offer.knows(&wanted.name) {
            turn.count_denial(&wanted.name);
        }
        Err(self.deny(id, wanted, denied, out))
    }

    /// Journals that a call is not run. Returns its result.
    pub(crate) fn deny(
        &mut self,
        id: ToolRunId,
        wanted: &ToolCall,
        denied: DeniedCall,
        out: &mut EffectBuffer,
    ) -> String {
        out.record(self.denied_line(id, wanted, denied.why));
        self.mode_call_denied(wanted, denied.why, out.now);
        denied.text
    }

    /// The record of a call that is not run.
    pub(crate) fn denied_line(&self, id: ToolRunId, wanted: &ToolCall, why: DenialReason) -> JournalRecord {
        tool_line(RecordKind::ToolDenied, id, why.as_ref(), |line| {
            // A name that no source declares is the model's text.
            line.tool = self.offer.knows(&wanted.name).then(|| wanted.name.clone());
            line.effect = self.offer.toolbox().effect(&wanted.name);
            let arguments = message::arguments(&wanted.arguments);
            line.arguments = arguments.as_ref().map(admission::arguments_hash);
        })
    }

    /// Advances the [`ToolCall`]s as far as possible now.
    pub(crate) fn advance_tools(&mut self, out: &mut EffectBuffer) {
        // Join first: what has just ended may be part of a loop, which denies what waits.
        self.join_all_results(out);
        self.deny_repetitions(out);
        self.expire_held(out);
        self.deny_deferred_repetitions(out);
        self.open_gates(out);
        if self.defer_gated_runs() {
            self.deny_deferred_repetitions(out);
        }
        while let Some(place) = self.next_run(out) {
            self.send_run(place, out);
        }
        self.join_all_results(out);
        self.finish_tool_batch(out);
    }

    /// The next run that may be sent. Pauses the loop if a guardrail trips.
    fn next_run(&mut self, out: &mut EffectBuffer) -> Option<usize> {
        let free = self.state.reasons.are_free(out.now);
        if self.fenced
            || !free
            || !self.state.life.is_active()
            || self.is_deferred_under_way()
            || self.is_deferred_due()
        {
            return None;
        }
        match self.next_of_batch()? {
            NextRun::Send(place) => Some(place),
            NextRun::SendIfAllowed(place) => (!self.is_held_by_guardrail(out)).then_some(place),
            NextRun::AwaitApproval(place) => {
                self.pause_for_approval(place);
                None
            }
            NextRun::Wait => None,
        }
    }

    pub(crate) fn next_of_batch(&self) -> Option<NextRun> {
        let may_act = self.state.reasons.allow_actions();
        let batch = self.tool_batch()?;
        Some(batch.next_run(|place| self.is_under_way(place), may_act))
    }

    pub(crate) fn is_held_by_guardrail(&mut self, out: &EffectBuffer) -> bool {
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
        // The intent is committed before the run is sent: after a crash it shows that the run may have happened.
        let Some((plan, is_new)) = self.batch_mut().and_then(|batch| batch.send(place)) else {
            return;
        };
        let run = plan.run(id, arguments, self.max_result_bytes());
        self.start_run(run, &plan, is_new, out);
    }

    /// Records that a run is sent, and sends it. `is_new`: for the first time.
    pub(crate) fn start_run(&mut self, run: ToolRun, plan: &ToolRunPlan, is_new: bool, out: &mut EffectBuffer) {
        if is_new {
            self.count_run(plan, out);
        }
        let note = if is_new { "" } else { "repeated" };
        out.record(plan_line(RecordKind::ToolIntent, run.id, note, plan, None));
        self.running.insert(run.id, out.now);
        out.push(EngineEffect::RunTool(run, plan.timeout));
    }

    fn count_run(&mut self, plan: &ToolRunPlan, out: &EffectBuffer) {
        self.state.totals.count_run(!plan.only_looks());
        if plan.only_looks() {
            return;
        }
        self.count_use(LimitedResource::Actions, 1, out);
        if let Some(turn) = &mut self.state.turn {
            turn.set_acted();
        }
    }

    /// A run ended. The outcome of a run that was cancelled, or that another process sent, is ignored.
    pub(crate) fn handle_tool_outcome(
        &mut self,
        id: ToolRunId,
        (outcome, artifacts): (ToolOutcome, ResultArtifacts),
        out: &mut EffectBuffer,
    ) {
        let Some(sent) = self.running.remove(&id) else {
            return;
        };
        if !matches!(outcome, ToolOutcome::Unavailable { .. })
            && let Some(tool) = self.tool_of(id).map(str::to_owned)
        {
            self.state.totals.count_run_time(&tool, out.now.duration_since(sent));
        }
        if id.is_refresh() {
            self.refresh_finished(id, outcome, out);
            return;
        }
        if self.state.deferred.find(id).is_some() {
            self.end_deferred(id, (outcome, artifacts), out);
            self.run_ended(out.now);
            return;
        }
        let Some(place) = self.place_of(id) else {
            return;
        };
        self.record_result(place, id, (outcome, artifacts), out);
        self.run_ended(out.now);
        self.advance_tools(out);
    }

    /// What waits has waited for this run, and not under a pause.
    fn run_ended(&mut self, now: Timestamp) {
        self.state.deferred.renew_approvals(now);
        if let Some(batch) = self.batch_mut() {
            batch.refresh(now);
            batch.renew_approvals(now);
        }
    }

    /// Records an outcome of which nothing is stored.
    pub(crate) fn record_outcome(&mut self, place: usize, id: ToolRunId, outcome: ToolOutcome, out: &mut EffectBuffer) {
        self.record_result(place, id, (outcome, ResultArtifacts::default()), out);
    }

    fn record_result(
        &mut self,
        place: usize,
        id: ToolRunId,
        (outcome, mut artifacts): (ToolOutcome, ResultArtifacts),
        out: &mut EffectBuffer,
    ) {
        let max = self.max_result_bytes();
        let rules = self.turn_rules();
        let Some(plan) = self.tool_batch().and_then(|batch| batch.open(place)).cloned() else {
            return;
        };
        let plan = &plan;
        let (kind, text) = render_outcome(outcome, plan, max, &mut artifacts);
        let ended = EndedToolRun {
            tool: &plan.tool,
            outcome: kind,
            result: &text,
            in_counted_turn: rules.counts_as_turn,
            of_mode: rules.is_of_mode,
            at: out.now,
        };
        let ending = match plan.only_looks() {
            _ if ended.has_failed() => ToolCallEnding::Failed,
            true => ToolCallEnding::Looked,
            false => ToolCallEnding::Acted,
        };
        if kind == OutcomeKind::Unknown && plan.retries() && plan.tries < MAX_TRIES {
            // It stays open, and is sent again.
            let note = "will be repeated";
            out.record(plan_line(RecordKind::ToolOutcome, id, note, plan, Some(kind)));
            return;
        }
        if kind == OutcomeKind::Unknown && plan.needs_decision_after_unknown() && plan.tries < MAX_TRIES {
            // It stays open until a person has answered.
            let note = "will be repeated if approved";
            out.record(plan_line(RecordKind::ToolOutcome, id, note, plan, Some(kind)));
            if let Some(plan) = self.batch_mut().and_then(|batch| batch.plan_mut(place)) {
                plan.approval = RunApproval::Needed(GateKind::UnknownOutcome);
            }
            return;
        }
        out.record(plan_line(RecordKind::ToolOutcome, id, "", plan, Some(kind)));
        self.check_ended_run(&ended, out);
        self.note_result_source(place, plan, out.now);
        if let Some(batch) = self.batch_mut() {
            batch.keep_artifacts(place, artifacts);
            batch.end(place, ending, text);
        }
    }

    /// Settles the runs that an earlier process left open, or that were cancelled: those that must not be repeated have an
    /// unknown outcome. `outdated`: why none with side effects is repeated, and no waiting one is sent.
    pub(crate) fn settle_interrupted_runs(&mut self, outdated: Option<&str>, out: &mut EffectBuffer) {
        let places = self.tool_batch().map_or(0, ToolBatch::places);
        for place in 0..places {
            let open = self.tool_batch().and_then(|batch| batch.open(place));
            // One that waits for an approval, or for its next try after it, has been settled before.
            let cut = open.is_some_and(|plan| !plan.may_be_repeated() && !plan.awaits_approval() && !plan.is_granted());
            if let (true, Some(id)) = (cut && !self.is_under_way(place), self.run_id(place)) {
                let message = "it was interrupted before its outcome was known".to_owned();
                self.record_outcome(place, id, ToolOutcome::Unknown { message }, out);
            }
        }
        self.settle_deferred_runs(outdated, out);
        if let Some(why) = outdated {
            self.expire(why, ExpiryScope::All, out);
        }
        if places > 0 {
            self.advance_tools(out);
        }
    }

    /// Cancels the runs under way, all or only the read-only ones. They stay open: the next process applies the restart
    /// rule.
    pub(crate) fn cancel_runs(&mut self, all: bool, out: &mut EffectBuffer) {
        let looks = |engine: &Self, id: &ToolRunId| {
            let open = engine.place_of(*id).and_then(|place| engine.tool_batch()?.open(place));
            id.is_refresh() || open.is_some_and(ToolRunPlan::only_looks)
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

    /// Joins the results that can, and those of the calls of `memory` that take effect when others have joined.
    fn join_all_results(&mut self, out: &mut EffectBuffer) {
        self.join_results(out);
        while self.run_memory_calls(out) {
            self.join_results(out);
        }
    }

    /// Appends results to the transcript once all results before them are there.
    fn join_results(&mut self, out: &mut EffectBuffer) {
        let mut messages = Vec::new();
        while self.tool_batch().is_some_and(ToolBatch::can_join) {
            let Some(wanted) = self.wanted_call(0).cloned() else {
                return;
            };
            let reasoning = self.reasoning(&wanted);
            let joined = self.batch_mut().and_then(|batch| batch.join(&wanted.name));
            let Some(JoinedResult {
                mut text,
                ending,
                artifacts,
            }) = joined
            else {
                return;
            };
            if let Some(told) = ending.and_then(|ending| self.inspect_call(&wanted, &text, ending, out)) {
                text = format!("{text}\n[{told}]");
            }
            let (was_admitted, has_failed) = (ending.is_some(), ending.is_none_or(|end| end == ToolCallEnding::Failed));
            if !self.is_memory_call(&wanted) {
                self.mode_call_ended(&wanted, &text, was_admitted, has_failed, out.now);
            }
            let id = wanted.id;
            let message = Arc::new(Message::Tool {
                id,
                text,
                failed: ending == Some(ToolCallEnding::Failed),
                reasoning,
                artifacts,
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
        let calls = turn.counted_calls();
        let Some(batch) = turn.take_finished_batch() else {
            return;
        };
        self.state.counters.idle.skip(out.now);
        let pace = batch.into_pace();
        if pace.is_none() && !self.ended_by_guardrail(calls, out) {
            self.next_call(out);
        } else {
            self.complete_turn(&pace.unwrap_or(LoopPace::Continue), out);
        }
    }

    pub(crate) fn tool_batch(&self) -> Option<&ToolBatch> {
        self.state.turn.as_ref()?.batch()
    }

    pub(crate) fn batch_mut(&mut self) -> Option<&mut ToolBatch> {
        self.state.turn.as_mut()?.batch_mut()
    }

    /// The call behind a slot. The answer is in the transcript, before the results that have joined.
    pub(crate) fn wanted_call(&self, place: usize) -> Option<&ToolCall> {
        let (calls, _) = self.last_answer()?;
        calls.get(self.tool_batch()?.joined() + place)
    }

    fn last_answer(&self) -> Option<(&[ToolCall], Option<&str>)> {
        let joined = self.tool_batch()?.joined();
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
        let reasoning = own.or_else(|| Some(self.last_answer()?.1?.to_owned()))?;
        Some(reasoning.chars().take(MAX_REASONING).collect())
    }

    pub(crate) fn run_id(&self, place: usize) -> Option<ToolRunId> {
        let turn = self.state.turn.as_ref()?;
        Some(run_id(turn.number(), turn.call(), turn.batch()?.joined() + place))
    }

    pub(crate) fn place_of(&self, id: ToolRunId) -> Option<usize> {
        let places = self.tool_batch()?.places();
        (0..places).find(|place| self.run_id(*place) == Some(id))
    }

    fn is_under_way(&self, place: usize) -> bool {
        self.run_id(place).is_some_and(|id| self.running.contains_key(&id))
    }

    /// Name of the tool of an open run.
    fn tool_of(&self, id: ToolRunId) -> Option<&str> {
        if id.is_refresh() {
            return self.refresh_tool(id);
        }
        if let Some(call) = self.state.deferred.find(id) {
            return Some(&call.plan.tool);
        }
        Some(&self.tool_batch()?.open(self.place_of(id)?)?.tool)
    }

    /// At the start of a process: why an answer, or its [`ToolCall`]s, may be out of date.
    pub(crate) fn outdated_since_start(&mut self, before: Option<Timestamp>, now: Timestamp) -> Option<String> {
        let spec = self.settings.spec;
        let edited = self.state.life.set_spec(spec);
        let asleep = before.map_or(SignedDuration::ZERO, |before| now.duration_since(before));
        let why = if self.state.life.is_suspended() {
            "the loop was suspended after you requested it".to_owned()
        } else if edited {
            "the spec of this agent was changed after you requested it".to_owned()
        } else if asleep > MAX_CALL + MAX_PAUSE {
            expired_text(asleep)
        } else {
            return None;
        };
        if let Some(turn) = self.state.turn.as_mut().filter(|_| self.state.call.is_open()) {
            turn.outdate(why.clone());
        }
        Some(why)
    }

    /// An answer arrived. Its calls are not run if things have changed since its call was sent.
    pub(crate) fn expire_outdated(&mut self, out: &mut EffectBuffer) {
        if let Some(why) = self.state.turn.as_mut().and_then(Turn::take_outdated) {
            self.expire(&why, ExpiryScope::Waiting, out);
        }
    }

    /// Calls that a pause has delayed for too long are not run when the loop resumes.
    pub(crate) fn expire_held(&mut self, out: &mut EffectBuffer) {
        let free = self.state.reasons.are_free(out.now);
        if self.fenced || !free || !self.state.life.is_active() || !self.running.is_empty() {
            return;
        }
        let held = self
            .tool_batch()
            .map_or(SignedDuration::ZERO, |batch| batch.held_for(out.now));
        if held > MAX_PAUSE {
            self.expire(&expired_text(held), ExpiryScope::NotJustApproved, out);
        }
    }

    /// Denies waiting calls with side effects, except for those with an open gate: a person decides about them, and sees
    /// how things are now.
    fn expire(&mut self, why: &str, scope: ExpiryScope, out: &mut EffectBuffer) {
        let just_now = time_math::before(out.now, MAX_PAUSE);
        let places = self.tool_batch().map_or(0, ToolBatch::places);
        for place in 0..places {
            let (Some(id), Some(wanted)) = (self.run_id(place), self.wanted_call(place).cloned()) else {
                continue;
            };
            let runs = self.running.contains_key(&id);
            match self.tool_batch().and_then(|batch| batch.slot(place)) {
                Some(ToolSlot::Waiting(plan) | ToolSlot::Open(plan))
                    if matches!(plan.approval, RunApproval::Pending(_))
                        || matches!(plan.approval, RunApproval::Needed(GateKind::UnknownOutcome))
                        || (scope == ExpiryScope::NotJustApproved && plan.approved_since(just_now)) => {}
                Some(ToolSlot::Waiting(plan)) if !plan.only_looks() || plan.is_gated() => {
                    let text = self.deny(id, &wanted, expired(why), out);
                    if let Some(batch) = self.batch_mut() {
                        batch.end(place, ToolCallEnding::Failed, text);
                    }
                }
                Some(ToolSlot::Open(plan)) if scope != ExpiryScope::Waiting && !plan.only_looks() && !runs => {
                    if let Some(batch) = self.batch_mut() {
                        batch.set_last_try(place, MAX_TRIES);
                    }
                    let message = format!("it was sent, its outcome is unknown, and it is not repeated, since {why}");
                    self.record_outcome(place, id, ToolOutcome::Unknown { message }, out);
                }
                Some(ToolSlot::Waiting(_) | ToolSlot::Open(_) | ToolSlot::Result(_) | ToolSlot::Yield(_)) | None => {}
            }
        }
    }
}

/// Which calls expire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpiryScope {
    /// Those that were never sent.
    Waiting,
    /// Also runs that would be repeated.
    All,
    /// The same, except for those that a person has just approved.
    NotJustApproved,
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
