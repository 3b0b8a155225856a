//! The tool calls of one answer: the state of each, which may be sent next, and in which order their results join the
//! transcript. Pure; the engine sends and journals.
//!
//! Up to four read-only runs are concurrent; a run with side effects is alone, after all before it. Results join
//! strictly in the order of the calls. Example: of `read, read, write, read` the first two run together, then the write
//! alone, then the last read; the result of the second read waits for that of the first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::GateCause;
use crate::approvals::{RunApproval, RunGate};
use crate::loop_detection::ToolCallEnding;
use crate::message::ToolCall;
use crate::modes::{LoopPace, ModeCallDecision};
use crate::tool::{ResultArtifacts, ToolEffect, ToolRun, ToolRunId, UnknownOutcomePolicy};
use agentloop_api::status::GateKind;

/// Concurrent read-only runs.
pub const MAX_READS: usize = 4;
/// How many calls after the first one without a result may run meanwhile. Their results wait for it in the snapshot,
/// which is written with each step: without a bound, one slow read before 127 quick ones would cost 25 MB.
pub const MAX_AHEAD: usize = 8;

/// The [`ToolCall`]s of the turn's last answer.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct ToolBatch {
    /// How many calls, from the first, have their results in the transcript.
    joined: usize,
    /// The state of the calls after those.
    slots: VecDeque<ToolSlot>,
    /// The pace requested by the last valid call of a tool of the mode, such as `yield`.
    pace: Option<LoopPace>,
    /// How calls ended whose results have not joined yet, by their position among all calls. Calls of the
    /// mode's tools are not in it.
    #[serde(default)]
    endings: BTreeMap<usize, ToolCallEnding>,
    /// What is stored of results that have not joined yet, by the same positions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    artifacts: BTreeMap<usize, ResultArtifacts>,
    /// The calls of `memory` that have had no effect yet, by the same positions.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    memory_calls: BTreeSet<usize>,
    /// A call was not run, failed, or has an unknown outcome: a call beside it that ends the turn has to wait until
    /// the model has seen that.
    #[serde(default)]
    failed: bool,
    /// When the model requested them, or the last of their runs ended: only pauses can have delayed the rest since
    /// then.
    #[serde(default)]
    fresh_at: Option<Timestamp>,
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
    /// What it reaches, as the model requested it.
    #[serde(default)]
    pub target: String,
    /// Hash of the definition that the model was shown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub definition: String,
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
    /// Whether a person must approve it before it is sent.
    #[serde(default)]
    pub approval: RunApproval,
    /// The source of the untrusted content because of which it needs that approval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because_of: Option<String>,
    /// The rule because of which it needs that approval.
    #[serde(default, skip_serializing_if = "GateCause::is_policy")]
    pub asked_by: GateCause,
    /// Whether its server is trusted.
    #[serde(default)]
    pub trusted: bool,
}

impl ToolRunPlan {
    pub fn only_looks(&self) -> bool {
        self.effect == ToolEffect::Read
    }

    /// Whether the same run may be sent again without asking if its outcome is unknown. An approval is for one try.
    pub fn may_be_repeated(&self) -> bool {
        self.allows_repeats() && !self.needs_decision_after_unknown()
    }

    pub fn retries(&self) -> bool {
        self.on_unknown == UnknownOutcomePolicy::Retry && !self.is_gated()
    }

    /// Whether a person decides if it is repeated after an unknown outcome.
    pub fn needs_decision_after_unknown(&self) -> bool {
        self.on_unknown == UnknownOutcomePolicy::Ask || (self.allows_repeats() && self.is_gated())
    }

    /// Whether the rules of the tool allow a repetition, apart from approvals.
    fn allows_repeats(&self) -> bool {
        self.only_looks() || self.idempotent || self.on_unknown == UnknownOutcomePolicy::Retry
    }

    /// Whether a person had to approve it.
    pub fn is_gated(&self) -> bool {
        self.approval != RunApproval::NotNeeded
    }

    /// Its gate, if one is open.
    pub fn open_gate(&self) -> Option<&RunGate> {
        match &self.approval {
            RunApproval::Pending(gate) => Some(gate),
            RunApproval::Needed(_) | RunApproval::Granted(_) | RunApproval::Used | RunApproval::NotNeeded => None,
        }
    }

    /// Whether an answer to this gate, for these arguments, is one for this run.
    pub fn is_asked(&self, gate: &str, arguments: &str) -> bool {
        self.arguments == arguments && self.open_gate().is_some_and(|open| open.id == gate)
    }

    /// A try is sent, which uses the approval.
    pub fn sent(&mut self) {
        self.tries = self.tries.saturating_add(1);
        if self.is_granted() {
            self.approval = RunApproval::Used;
        }
    }

    /// The run as the worker executes it. `max_result_bytes`: see [`ToolRun`].
    pub fn run(&self, id: ToolRunId, arguments: Map<String, Value>, max_result_bytes: usize) -> ToolRun {
        ToolRun {
            id,
            name: self.tool.clone(),
            target: self.target.clone(),
            definition: self.definition.clone(),
            arguments,
            idempotency_key: self.key.clone(),
            max_result_bytes,
        }
    }

    /// Whether an approval is there that no try has used.
    pub fn is_granted(&self) -> bool {
        matches!(self.approval, RunApproval::Granted(_))
    }

    /// Whether a person must still approve it.
    pub fn awaits_approval(&self) -> bool {
        matches!(self.approval, RunApproval::Needed(_) | RunApproval::Pending(_))
    }

    /// Whether a person approved it since this time.
    pub fn approved_since(&self, moment: Timestamp) -> bool {
        matches!(self.approval, RunApproval::Granted(at) if at >= moment)
    }
}

/// The next step of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextRun {
    /// This slot can be sent.
    Send(usize),
    /// This slot can be sent if no guardrail holds it: it has side effects and is sent for the first time.
    SendIfAllowed(usize),
    /// This slot is the next one, and waits for the approval of a person.
    AwaitApproval(usize),
    /// Nothing can be sent until another input arrives.
    Wait,
}

/// A result that joins the transcript.
pub struct JoinedResult {
    pub text: String,
    /// `None`: a call of a tool of the mode, or one that was denied as a repetition.
    pub ending: Option<ToolCallEnding>,
    pub artifacts: ResultArtifacts,
}

impl ToolBatch {
    /// The calls of an answer that arrived at this time, added one after the other.
    pub fn begun(now: Timestamp) -> Self {
        Self {
            fresh_at: Some(now),
            ..Self::default()
        }
    }

    /// The next call was admitted.
    pub fn add_run(&mut self, plan: ToolRunPlan) {
        self.slots.push_back(ToolSlot::Waiting(plan));
    }

    /// The next call is not run. `text`: its result.
    pub fn add_denied(&mut self, text: String) {
        self.slots.push_back(ToolSlot::Result(String::new()));
        self.end(self.slots.len() - 1, ToolCallEnding::Failed, text);
    }

    /// The next call is of a tool of the mode: its result follows, see [`Self::apply_decisions`].
    pub fn add_mode_call(&mut self) {
        self.slots.push_back(ToolSlot::Result(String::new()));
    }

    /// The next call is of `memory`: its result follows, see [`Self::next_memory_call`] and [`Self::end`].
    pub fn add_memory_call(&mut self) {
        self.memory_calls.insert(self.joined + self.slots.len());
        // What an older agentloop, which does not know that it waits, reports to the model.
        let text = r#"{"error": "not run", "fix": "call it again"}"#;
        self.slots.push_back(ToolSlot::Result(text.to_owned()));
    }

    /// The position of the call of `memory` that takes effect next, if its result does not wait behind too many. Where no run
    /// is left, nothing waits beyond this step.
    pub fn next_memory_call(&self) -> Option<usize> {
        let place = self.memory_calls.first()?.checked_sub(self.joined)?;
        (place <= MAX_AHEAD || self.plans().next().is_none()).then_some(place)
    }

    /// Applies the decisions of the mode, each with the position of its call. Of the calls that end the turn, the last
    /// one counts, and the model sees that.
    pub fn apply_decisions(&mut self, decisions: Vec<(usize, ModeCallDecision)>, calls: &[ToolCall]) {
        let has_runs = self.slots.iter().any(|slot| matches!(slot, ToolSlot::Waiting(_)));
        let ends = |(_, decision): &&(usize, ModeCallDecision)| matches!(decision, ModeCallDecision::EndsTurn { .. });
        let last = decisions.iter().rfind(ends).map(|(place, _)| *place);
        let name = last.and_then(|last| calls.get(last)).map_or("", |call| &call.name);
        let replaced = format!("Replaced by a later {name} in the same answer.");
        for (place, decision) in decisions {
            let result = match decision {
                ModeCallDecision::Rejected(text) => ToolSlot::Result(text),
                ModeCallDecision::EndsTurn { .. } if last != Some(place) => ToolSlot::Result(replaced.clone()),
                ModeCallDecision::EndsTurn {
                    pace,
                    result,
                    result_after_runs,
                } => {
                    self.pace = Some(pace);
                    ToolSlot::Yield(result_after_runs.filter(|_| has_runs).unwrap_or(result))
                }
            };
            if let Some(slot) = self.slots.get_mut(place) {
                *slot = result;
            }
        }
    }

    /// Ends the call at this position, counted among those that have not joined.
    pub fn end(&mut self, place: usize, ending: ToolCallEnding, text: String) {
        self.memory_calls.remove(&(self.joined + place));
        self.endings.insert(self.joined + place, ending);
        self.failed |= ending == ToolCallEnding::Failed;
        if let Some(slot) = self.slots.get_mut(place) {
            *slot = ToolSlot::Result(text);
        }
    }

    /// This is stored of the result of the call at this position.
    pub fn keep_artifacts(&mut self, place: usize, artifacts: ResultArtifacts) {
        if !artifacts.is_empty() {
            self.artifacts.insert(self.joined + place, artifacts);
        }
    }

    /// The call at this position repeats a loop and is not run. It is no call whose ending could be part of a loop
    /// again, but a call that ends the turn waits until the model has seen this.
    pub fn deny_repetition(&mut self, place: usize, text: String) {
        if let Some(slot) = self.slots.get_mut(place) {
            *slot = ToolSlot::Result(text);
        }
        self.failed = true;
    }

    /// How many calls have no result in the transcript.
    pub fn places(&self) -> usize {
        self.slots.len()
    }

    /// How many calls have one.
    pub fn joined(&self) -> usize {
        self.joined
    }

    pub fn slot(&self, place: usize) -> Option<&ToolSlot> {
        self.slots.get(place)
    }

    /// The run of the call at this position, if its outcome is awaited.
    pub fn open(&self, place: usize) -> Option<&ToolRunPlan> {
        match self.slots.get(place)? {
            ToolSlot::Open(plan) => Some(plan),
            ToolSlot::Waiting(_) | ToolSlot::Result(_) | ToolSlot::Yield(_) => None,
        }
    }

    /// The run of the call at this position, if it has no outcome.
    pub fn plan(&self, place: usize) -> Option<&ToolRunPlan> {
        match self.slots.get(place)? {
            ToolSlot::Waiting(plan) | ToolSlot::Open(plan) => Some(plan),
            ToolSlot::Result(_) | ToolSlot::Yield(_) => None,
        }
    }

    pub fn plan_mut(&mut self, place: usize) -> Option<&mut ToolRunPlan> {
        match self.slots.get_mut(place)? {
            ToolSlot::Waiting(plan) | ToolSlot::Open(plan) => Some(plan),
            ToolSlot::Result(_) | ToolSlot::Yield(_) => None,
        }
    }

    fn plans(&self) -> impl Iterator<Item = (usize, &ToolRunPlan)> {
        (0..self.slots.len()).filter_map(|place| Some((place, self.plan(place)?)))
    }

    /// The runs whose gates are open, with their positions.
    pub fn gates(&self) -> impl Iterator<Item = (usize, &ToolRunPlan, &RunGate)> {
        self.plans()
            .filter_map(|(place, plan)| Some((place, plan, plan.open_gate()?)))
    }

    /// The positions of runs that need a gate.
    pub fn approvals_needed(&self) -> impl Iterator<Item = (usize, GateKind)> {
        self.plans().filter_map(|(place, plan)| match plan.approval {
            RunApproval::Needed(kind) => Some((place, kind)),
            RunApproval::Pending(_) | RunApproval::Granted(_) | RunApproval::Used | RunApproval::NotNeeded => None,
        })
    }

    /// The run at this position is taken out: the turn continues with this result of its call. One that was sent has an
    /// unknown outcome, which the model has to see before it ends the turn.
    pub fn defer(&mut self, place: usize, text: String) {
        let ending = match self.slots.get(place) {
            Some(ToolSlot::Open(_)) => ToolCallEnding::Failed,
            Some(ToolSlot::Waiting(_) | ToolSlot::Result(_) | ToolSlot::Yield(_)) | None => ToolCallEnding::Looked,
        };
        self.end(place, ending, text);
    }

    /// A gate has closed: what was approved meanwhile waited for it, and not under a pause.
    pub fn renew_approvals(&mut self, now: Timestamp) {
        for slot in &mut self.slots {
            if let ToolSlot::Waiting(plan) | ToolSlot::Open(plan) = slot
                && plan.is_granted()
            {
                plan.approval = RunApproval::Granted(now);
            }
        }
    }

    /// Changes the open gates.
    pub fn for_each_gate(&mut self, change: impl Fn(&mut RunGate)) {
        for slot in &mut self.slots {
            if let ToolSlot::Waiting(plan) | ToolSlot::Open(plan) = slot
                && let RunApproval::Pending(gate) = &mut plan.approval
            {
                change(gate);
            }
        }
    }

    /// The run at this position is not sent again, whatever its outcome.
    pub fn set_last_try(&mut self, place: usize, tries: u32) {
        if let Some(ToolSlot::Open(plan)) = self.slots.get_mut(place) {
            plan.tries = tries;
        }
    }

    /// The next run that may be sent. `is_under_way`: whether this process awaits the run at a position; `may_act`:
    /// whether runs with side effects may start.
    pub fn next_run(&self, is_under_way: impl Fn(usize) -> bool, may_act: bool) -> NextRun {
        // In order: a read-only run may join read-only runs under way, any other run waits until none is.
        let mut under_way = 0;
        for (place, slot) in self.slots.iter().enumerate() {
            let (plan, is_new) = match slot {
                ToolSlot::Result(_) | ToolSlot::Yield(_) => continue,
                ToolSlot::Waiting(plan) => (plan, true),
                ToolSlot::Open(plan) if is_under_way(place) => {
                    under_way += 1;
                    if plan.only_looks() {
                        continue;
                    }
                    return NextRun::Wait;
                }
                ToolSlot::Open(plan) => (plan, false),
            };
            let is_free = under_way == 0;
            if plan.awaits_approval() {
                return if is_free {
                    NextRun::AwaitApproval(place)
                } else {
                    NextRun::Wait
                };
            }
            return match plan.only_looks() {
                true if is_free || (under_way < MAX_READS && place <= MAX_AHEAD) => NextRun::Send(place),
                false if is_free && may_act && is_new => NextRun::SendIfAllowed(place),
                false if is_free && may_act => NextRun::Send(place),
                true | false => NextRun::Wait,
            };
        }
        NextRun::Wait
    }

    /// The run at this position is sent. Returns it, and whether this is the first time.
    pub fn send(&mut self, place: usize) -> Option<(ToolRunPlan, bool)> {
        let slot = self.slots.get_mut(place)?;
        let (mut plan, is_new) = match slot {
            ToolSlot::Waiting(plan) => (plan.clone(), true),
            ToolSlot::Open(plan) => (plan.clone(), false),
            ToolSlot::Result(_) | ToolSlot::Yield(_) => return None,
        };
        plan.sent();
        *slot = ToolSlot::Open(plan.clone());
        Some((plan, is_new))
    }

    /// A run ended: from now on only pauses can delay the rest.
    pub fn refresh(&mut self, now: Timestamp) {
        self.fresh_at = Some(now);
    }

    /// For how long pauses have delayed what waits.
    pub fn held_for(&self, now: Timestamp) -> SignedDuration {
        self.fresh_at.map_or(SignedDuration::ZERO, |at| now.duration_since(at))
    }

    /// Whether the next result can join the transcript. A call that ends the turn waits for all others, since a failed
    /// one rejects it.
    pub fn can_join(&self) -> bool {
        match self.slots.front() {
            Some(ToolSlot::Result(_)) => !self.memory_calls.contains(&self.joined),
            Some(ToolSlot::Yield(_)) => self.all_done(),
            Some(ToolSlot::Waiting(_) | ToolSlot::Open(_)) | None => false,
        }
    }

    /// The next result, which joins now. `tool`: the name in its call.
    pub fn join(&mut self, tool: &str) -> Option<JoinedResult> {
        if !self.can_join() {
            return None;
        }
        let text = match self.slots.pop_front()? {
            ToolSlot::Yield(_) if self.failed => {
                format!("Not yet: another call of this answer failed. Look at its result first, then {tool} again.")
            }
            ToolSlot::Result(text) | ToolSlot::Yield(text) => text,
            ToolSlot::Waiting(_) | ToolSlot::Open(_) => return None,
        };
        let ending = self.endings.remove(&self.joined);
        let artifacts = self.artifacts.remove(&self.joined).unwrap_or_default();
        self.joined += 1;
        Some(JoinedResult {
            text,
            ending,
            artifacts,
        })
    }

    /// Whether every call has its result.
    fn all_done(&self) -> bool {
        let is_done = |slot: &ToolSlot| matches!(slot, ToolSlot::Result(_) | ToolSlot::Yield(_));
        self.memory_calls.is_empty() && self.slots.iter().all(is_done)
    }

    /// Whether every result has joined.
    pub fn is_joined(&self) -> bool {
        self.slots.is_empty()
    }

    /// How the turn ends after it, if a call requested that and all others succeeded.
    pub fn into_pace(self) -> Option<LoopPace> {
        self.pace.filter(|_| !self.failed)
    }
}
