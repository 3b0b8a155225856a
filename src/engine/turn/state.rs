//! The turn under way, and what holds of it. Plain rules of one turn: what they lead to is up to the engine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::kind::{TurnKind, TurnRules};
use crate::notifications::ShownNotifications;
use crate::snapshot::TurnBriefing;
use crate::tools::batch::ToolBatch;
use agentloop_api::task::TaskLimit;

/// Summaries in one turn; each covers as much as fits into one call.
pub const MAX_SUMMARIES: u32 = 4;

/// A turn under way.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Turn {
    /// Its number, from 1.
    number: i64,
    /// Number of its latest call, from 1.
    call: u32,
    /// How many messages at the end of the transcript belong to this turn.
    messages: usize,
    /// How often the worker ended during it.
    crashes: u32,
    /// Tool calls of its last answer that have no result yet; the call slot is then free.
    #[serde(default)]
    work: Option<ToolBatch>,
    /// How many of its calls were for a summary.
    #[serde(default)]
    compactions: u32,
    /// A summary was requested in it and could not be had.
    #[serde(default)]
    unsummed: bool,
    /// Prompts in a row that the server refused as too long.
    #[serde(default)]
    refusals: u32,
    /// Of how many of its messages the results are cleared; used only by turns with their own conversation.
    #[serde(default)]
    cleared: usize,
    /// How often each tool was denied in it.
    #[serde(default)]
    denials: BTreeMap<String, u32>,
    /// A tool with side effects ran in it: its messages stay, however it ends.
    #[serde(default)]
    acted: bool,
    /// Notifications that it has shown.
    #[serde(default)]
    shown: ShownNotifications,
    /// What arrived after the attempt last sent, which did not show it.
    #[serde(default)]
    unseen: UnseenEvents,
    /// How often its first call had an empty answer.
    #[serde(default)]
    silent: u32,
    /// Why tool calls with side effects in the answer to its open call are not run: the answer may be older than later
    /// changes.
    #[serde(default)]
    outdated: Option<String>,
    /// What its calls have used.
    #[serde(default)]
    used: CountedUsage,
    /// The limit that has ended it; only results of tool runs are awaited.
    #[serde(default)]
    limit: Option<TaskLimit>,
    /// What it is for.
    #[serde(default, rename = "heartbeat")]
    kind: TurnKind,
    /// The content of its first message; the next turn repeats it if this one fails.
    briefing: TurnBriefing,
}

impl Turn {
    /// A turn whose first message has joined the transcript, and whose first call is next.
    pub(super) fn new(number: i64, kind: TurnKind, briefing: TurnBriefing) -> Self {
        Self {
            number,
            call: 1,
            messages: 1,
            crashes: 0,
            work: None,
            compactions: 0,
            unsummed: false,
            refusals: 0,
            cleared: 0,
            denials: BTreeMap::new(),
            acted: false,
            shown: ShownNotifications::default(),
            unseen: UnseenEvents::default(),
            silent: 0,
            outdated: None,
            used: CountedUsage::default(),
            limit: None,
            kind,
            briefing,
        }
    }

    pub fn number(&self) -> i64 {
        self.number
    }

    pub fn kind(&self) -> TurnKind {
        self.kind
    }

    pub fn rules(&self) -> TurnRules {
        self.kind.rules()
    }

    /// Number of its latest call, of whatever purpose.
    pub fn call(&self) -> u32 {
        self.call
    }

    /// Number of its latest call among those that are not for a summary and had a non-empty answer.
    pub fn own_call(&self) -> u32 {
        self.call.saturating_sub(self.compactions).saturating_sub(self.silent)
    }

    /// How many calls were made for it, without those for a summary: what limits of calls count.
    pub fn counted_calls(&self) -> u32 {
        self.call.saturating_sub(self.compactions)
    }

    /// Its next call is planned. Returns the number of that call.
    pub(super) fn begin_call(&mut self) -> u32 {
        self.call = self.call.saturating_add(1);
        self.call
    }

    /// How many messages at the end of the transcript belong to it.
    pub fn messages(&self) -> usize {
        self.messages
    }

    pub(super) fn add_messages(&mut self, more: usize) {
        self.messages = self.messages.saturating_add(more);
    }

    /// Messages left the transcript, of which this many remain.
    pub fn limit_messages(&mut self, transcript: usize) {
        self.messages = self.messages.min(transcript);
    }

    /// The worker ended during it. Returns how often it has.
    pub fn count_crash(&mut self) -> u32 {
        self.crashes = self.crashes.saturating_add(1);
        self.crashes
    }

    pub fn reset_crashes(&mut self) {
        self.crashes = 0;
    }

    /// The tool calls of its last answer.
    pub fn batch(&self) -> Option<&ToolBatch> {
        self.work.as_ref()
    }

    pub fn batch_mut(&mut self) -> Option<&mut ToolBatch> {
        self.work.as_mut()
    }

    pub fn begin_batch(&mut self, batch: ToolBatch) {
        self.work = Some(batch);
    }

    /// The batch, if all its results have joined the transcript.
    pub fn take_finished_batch(&mut self) -> Option<ToolBatch> {
        self.work.take_if(|batch| batch.is_joined())
    }

    /// Whether a summary may be requested in it.
    pub fn may_summarize(&self) -> bool {
        self.rules().summarizes && !self.unsummed && self.compactions < MAX_SUMMARIES
    }

    /// A summary was made, or failed.
    pub fn summary_ended(&mut self, summed_up: bool) {
        self.compactions = self.compactions.saturating_add(1);
        self.unsummed |= !summed_up;
    }

    /// The server refused a prompt as too long. Returns how many in a row it has.
    pub fn count_refused_prompt(&mut self) -> u32 {
        self.refusals = self.refusals.saturating_add(1);
        self.refusals
    }

    pub fn prompt_accepted(&mut self) {
        self.refusals = 0;
    }

    /// Of how many messages of its own conversation the results are cleared.
    pub fn cleared(&self) -> usize {
        self.cleared
    }

    pub fn set_cleared(&mut self, messages: usize) {
        self.cleared = messages;
    }

    /// How often each tool was denied in it.
    pub fn denials(&self) -> &BTreeMap<String, u32> {
        &self.denials
    }

    pub fn count_denial(&mut self, tool: &str) {
        let denials = self.denials.entry(tool.to_owned()).or_default();
        *denials = denials.saturating_add(1);
    }

    /// Whether a tool with side effects ran in it.
    pub fn has_acted(&self) -> bool {
        self.acted
    }

    pub fn set_acted(&mut self) {
        self.acted = true;
    }

    /// Notifications that it has shown.
    pub fn shown(&self) -> &ShownNotifications {
        &self.shown
    }

    pub fn shown_mut(&mut self) -> &mut ShownNotifications {
        &mut self.shown
    }

    /// The next attempt shows all that has arrived.
    pub(super) fn prompt_is_current(&mut self) {
        self.unseen = UnseenEvents::default();
    }

    /// An event arrived that the open attempt does not show.
    pub fn miss_event(&mut self, name: &str) {
        if !self.unseen.events.iter().any(|known| known == name) {
            self.unseen.events.push(name.to_owned());
        }
    }

    /// The same for a notification of high priority.
    pub fn miss_urgent(&mut self) {
        self.unseen.urgent = true;
    }

    /// Its first answer was empty. Whether that is the first time.
    pub(super) fn is_first_silence(&mut self) -> bool {
        std::mem::replace(&mut self.silent, 1) == 0
    }

    /// The answer to its open call may be older than this change.
    pub fn outdate(&mut self, why: String) {
        self.outdated = Some(why);
    }

    pub fn take_outdated(&mut self) -> Option<String> {
        self.outdated.take()
    }

    /// One of its calls was answered. `bound`: the tokens that it can have used at most.
    pub fn count_usage(&mut self, tokens: Option<u64>, bound: u64, cost: i64) {
        self.used.tokens = self.used.tokens.saturating_add(tokens.unwrap_or(0));
        self.used.bound = self.used.bound.saturating_add(bound);
        self.used.cost = self.used.cost.saturating_add(cost);
    }

    /// Tokens of its answered calls, as far as the server reported them.
    pub fn tokens(&self) -> u64 {
        self.used.tokens
    }

    /// Tokens of its answered calls; a call without a report counts as the largest possible one.
    pub fn most_tokens(&self) -> u64 {
        self.used.bound
    }

    /// Cost of its answered calls in micro-dollars, as far as it is known.
    pub fn cost(&self) -> i64 {
        self.used.cost
    }

    /// A limit has ended it.
    pub fn limited(&mut self, limit: TaskLimit) {
        self.limit.get_or_insert(limit);
    }

    pub fn limit(&self) -> Option<TaskLimit> {
        self.limit
    }

    /// It has ended: what its last prompt did not show.
    pub(super) fn into_unseen(self) -> UnseenEvents {
        self.unseen
    }

    /// It has failed: the content of its first message.
    pub(super) fn into_briefing(self) -> TurnBriefing {
        self.briefing
    }
}

/// What the calls of a turn have used.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
struct CountedUsage {
    tokens: u64,
    bound: u64,
    cost: i64,
}

/// Input that would end a sleep and that no prompt has shown.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct UnseenEvents {
    /// Names of events, without duplicates.
    pub events: Vec<String>,
    /// Whether it includes a notification of high priority.
    pub urgent: bool,
}
