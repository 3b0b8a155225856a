//! Accounts and assignments under one lock: serves link, reconciler and watches, and updates the terms of gateways.
//!
//! Every change that a gateway must know is put into its directives before the lock is released, so that directives
//! never go back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use serde_json::{Map, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};

use super::accounts::{AccountBook, DocumentId, DocumentKind, DocumentPart};
use super::assignment::{AccountAssignments, LimitDecision, WindowedLimit};
use super::clock::LeaderClock;
use super::entry::AccountEntry;
use super::facts::{AgentFacts, BudgetFacts, document};
use super::forfeit::{CurrentRecord, HolderLiveness, PodFacts};
use super::record_writer::{StatusDocument, WriteTurns};
use super::refusals::{foreign_record, try_later};
use super::view::{BudgetHold, BudgetPresentation, BudgetView};
use crate::api::failure::{CallFailure, FailureKind};
use crate::api::{Agent, AgentBudget, NamespacedName};
use crate::controller::pod_sessions::PodSessions;
use crate::controller::policy::PlatformPolicy;
use crate::ledger::account::LeaseHolder;
use crate::link::messages::{
    AccountTerms, BudgetTerms, LeaseRequest, LeaseResponse, LimitName, PodRefusal, PricedModel,
};
use crate::telemetry::metrics::Metrics;

/// How long a [`LeaseRequest`] waits for its record to be written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

pub struct LedgerSetup {
    /// Client of the API server.
    pub client: Client,
    /// Prices and rules of the platform.
    pub policy: PlatformPolicy,
    /// The controller's own namespace.
    pub namespace: String,
    /// Namespaces whose Agents are served; empty: all.
    pub watch_namespaces: Vec<String>,
    /// Passes directives to gateways.
    pub loops: Arc<PodSessions>,
    /// Computes the status of budgets.
    pub presentation: Arc<dyn BudgetPresentation>,
    pub metrics: Arc<Metrics>,
    /// The wall clock at the start of the term.
    pub wall: Timestamp,
}

/// The ledger of one leader.
pub struct BudgetLedger {
    pub(super) client: Client,
    pub(super) watch_namespaces: Vec<String>,
    pub(super) namespace: String,
    pub(super) clock: LeaderClock,
    pub(super) presentation: Arc<dyn BudgetPresentation>,
    /// Wakes the record writer.
    pub(super) wake_writer: Notify,
    loops: Arc<PodSessions>,
    pub(super) metrics: Arc<Metrics>,
    writes: watch::Sender<u64>,
    decided: watch::Sender<bool>,
    state: Mutex<LedgerState>,
}

#[derive(Default)]
pub struct LedgerState {
    pub book: AccountBook,
    pub assignments: AccountAssignments,
    pub(super) status_documents: BTreeMap<DocumentId, StatusDocument>,
    pub(super) holders: HolderLiveness,
    pub(super) listed: ListedWatches,
    pub(super) write_turns: WriteTurns,
    /// Agents whose calls the controller blocks, for example because of a detected loop.
    blocks: BTreeMap<NamespacedName, CallFailure>,
}

/// The scopes of each watch that have been listed completely.
#[derive(Debug, Default)]
pub(super) struct ListedWatches {
    pub(super) budgets: BTreeSet<Option<String>>,
    pub(super) agents: BTreeSet<Option<String>>,
    pub(super) pods: BTreeSet<Option<String>>,
    pub(super) namespaces: bool,
}

impl BudgetLedger {
    #[must_use]
    pub fn new(setup: LedgerSetup) -> Self {
        let state = LedgerState {
            assignments: AccountAssignments::new(setup.policy, &setup.namespace),
            ..LedgerState::default()
        };
        Self {
            client: setup.client,
            watch_namespaces: setup.watch_namespaces,
            namespace: setup.namespace,
            clock: LeaderClock::new(setup.wall),
            presentation: setup.presentation,
            wake_writer: Notify::new(),
            loops: setup.loops,
            metrics: setup.metrics,
            writes: watch::Sender::new(0),
            decided: watch::Sender::new(false),
            state: Mutex::new(state),
        }
    }

    /// Reads the state under the lock.
    pub fn inspect<T>(&self, look: impl FnOnce(&LedgerState) -> T) -> T {
        look(&self.lock())
    }

    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The limits of an Agent; `None` until budgets and namespaces are listed, since partial lists give no valid
    /// decision.
    #[must_use]
    pub fn decision(&self, agent: &NamespacedName) -> Option<LimitDecision> {
        let state = self.lock();
        self.can_decide(&state)
            .then(|| state.assignments.decision(agent).cloned())?
    }

    /// Waits until budgets and namespaces are listed, so that assignments are known. An Agent reconciled earlier would
    /// lose the budgets in its status.
    pub async fn decided(&self) {
        // The sender lives as long as this ledger.
        let _ = self.decided.subscribe().wait_for(|decided| *decided).await;
    }

    /// The terms of the Agent's gateway.
    #[must_use]
    pub fn terms(&self, agent: &NamespacedName) -> Option<BudgetTerms> {
        self.terms_in(&self.lock(), agent)
    }

    /// The token limits of an Agent that are fully available again after a window.
    #[must_use]
    pub fn windows(&self, agent: &NamespacedName) -> Vec<WindowedLimit> {
        let state = self.lock();
        let accounts = state
            .assignments
            .decision(agent)
            .map_or(&[][..], |decision| &decision.accounts);
        let entries = accounts.iter().filter_map(|(account, _)| state.book.entry(account));
        entries
            .filter_map(|(_, entry)| {
                let account = entry.account();
                let tokens = [account.limits().tokens, account.per_agent().tokens]
                    .into_iter()
                    .flatten()
                    .min()?;
                let seconds = account.terms().window.seconds(self.now())?;
                Some(WindowedLimit { tokens, seconds })
            })
            .collect()
    }

    /// Blocks the calls of an Agent, or releases them with `None`.
    pub fn block(&self, agent: &NamespacedName, why: Option<CallFailure>) {
        let mut state = self.lock();
        if state.blocks.get(agent) == why.as_ref() {
            return;
        }
        match why {
            Some(why) => state.blocks.insert(agent.clone(), why),
            None => state.blocks.remove(agent),
        };
        self.send_terms(&mut state, [agent.clone()]);
    }

    /// Changes accounts from outside the link, for example by an approved top-up, and updates gateways.
    #[cfg(test)]
    pub fn update_accounts<T>(&self, change: impl FnOnce(&mut AccountBook, Timestamp) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state.book, self.now());
        self.send_terms(&mut state, []);
        result
    }

    /// An Agent was created or changed.
    pub fn agent_seen(&self, agent: &Agent) {
        let facts = AgentFacts::of(agent);
        let key = facts.document.object.clone();
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(old) = state.assignments.agent(&key)
            && old.document != facts.document
        {
            let old = old.document.clone();
            self.drop_agent(state, &key, &old);
        }
        let now = self.now();
        for own in facts.own.iter().flatten() {
            let (terms, record) = (own.terms.clone(), own.record.as_ref());
            if !state.status_documents.contains_key(&facts.document) {
                let document = StatusDocument::of_agent(agent.status.as_ref());
                state.status_documents.insert(facts.document.clone(), document);
            }
            let account = facts.document.account(own.part);
            let limits = |entry: &AccountEntry| !entry.account().terms().limits.is_empty();
            let limited = state.book.entry(&account).is_some_and(|(_, entry)| limits(entry));
            state.book.load(&facts.document, own.part, terms, record, now);
            // Usage before the limit was set counts too: the limit is for the Agent's whole life.
            if !limited && !own.terms.limits.is_empty() {
                state.book.raise_used(&account, &key, &own.used, now);
            }
        }
        state.holders.calls.insert(key.clone(), facts.longest_call);
        // Own limits that are no longer set limit nothing; their records stay.
        for account in facts.unset() {
            state.book.unlimit(&account, now);
        }
        let known = state.assignments.agent(&key).is_some();
        let changed = state.assignments.put_agent(&key, facts);
        self.send_terms(state, changed.then_some(key.clone()));
        // A new Agent is reconciled anyway.
        if changed && known {
            self.loops.request_reconcile(&key);
        }
    }

    /// The pod of an Agent calls these models, whatever its spec now names.
    pub fn models_seen(&self, agent: &NamespacedName, models: &[PricedModel]) {
        let mut state = self.lock();
        if state.assignments.put_running(agent, models) {
            self.send_terms(&mut state, [agent.clone()]);
        }
    }

    pub fn agent_gone(&self, agent: &NamespacedName) {
        let mut state = self.lock();
        let document = state.assignments.agent(agent).map(|facts| facts.document.clone());
        if let Some(document) = document {
            self.drop_agent(&mut state, agent, &document);
            self.send_terms(&mut state, []);
        }
    }

    fn drop_agent(&self, state: &mut LedgerState, agent: &NamespacedName, document: &DocumentId) {
        let accounts = state
            .assignments
            .decision(agent)
            .map(|decision| decision.accounts.clone());
        for (account, _) in accounts.unwrap_or_default() {
            state.book.withdraw(&account, agent, self.now());
        }
        state.book.remove(document);
        state.status_documents.remove(document);
        state.assignments.remove_agent(agent);
        state.blocks.remove(agent);
        state.holders.current_records.remove(agent);
        self.loops.set_budget_terms(agent, None);
    }

    /// These are all Agents of a scope.
    pub fn agents_listed(&self, namespace: Option<&str>, present: &BTreeSet<NamespacedName>) {
        let gone: Vec<NamespacedName> = self.inspect(|state| {
            let known = state.assignments.agents(namespace);
            known.into_iter().filter(|agent| !present.contains(agent)).collect()
        });
        for agent in &gone {
            self.agent_gone(agent);
        }
        self.lock().listed.agents.insert(namespace.map(Into::into));
    }

    /// The pod of an Agent was created or changed.
    pub fn pod_seen(&self, agent: &NamespacedName, pod: &Pod) {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let fact = PodFacts {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            ended: matches!(phase, Some("Failed" | "Succeeded")),
        };
        self.lock().holders.pod_seen(agent, fact);
    }

    pub fn pod_gone(&self, agent: &NamespacedName) {
        self.lock().holders.pods.remove(agent);
    }

    /// These are all pods of a scope.
    pub fn pods_listed(&self, namespace: Option<&str>, present: &BTreeSet<NamespacedName>) {
        let mut state = self.lock();
        let elsewhere = |agent: &NamespacedName| namespace.is_some_and(|namespace| namespace != agent.namespace);
        state
            .holders
            .pods
            .retain(|agent, _| elsewhere(agent) || present.contains(agent));
        state.listed.pods.insert(namespace.map(Into::into));
    }

    /// A budget was created or changed.
    pub(super) fn budget_seen(&self, budget: AgentBudget) {
        let id = document(DocumentKind::Budget, &budget);
        let budget = Arc::new(budget);
        let facts = BudgetFacts::of(&budget);
        let mut guard = self.lock();
        let state = &mut *guard;
        let now = self.now();
        let known = state.assignments.budget(&id.uid);
        let edited = known.is_some_and(|known| known.object.metadata.generation != budget.metadata.generation);
        let document = state.status_documents.entry(id.clone());
        let document = document.or_insert_with(|| StatusDocument::of_budget(budget.status.as_ref()));
        document.urgent |= edited;
        if let Ok((terms, top_ups)) = &facts.terms {
            let record = budget.status.as_ref().and_then(|status| status.ledger.as_ref());
            state.book.load(&id, DocumentPart::Budget, terms.clone(), record, now);
            for (top_up, amount) in top_ups {
                state.book.top_up(&id.uid, top_up, *amount, now);
            }
        }
        let changed = state.assignments.put_budget(facts);
        self.answer_gate(state, &id);
        self.send_changed_terms(state, changed);
    }

    /// Adds the top-up of an approved gate; counted once, since the account remembers the gate.
    fn answer_gate(&self, state: &mut LedgerState, id: &DocumentId) {
        let Some(facts) = state.assignments.budget(&id.uid) else {
            return;
        };
        if let Some((top_up, amount)) = self.presentation.approved(&self.view(state, facts)) {
            state.book.top_up(&id.uid, &top_up, amount, self.now());
        }
    }

    /// A budget cannot be parsed.
    pub(super) fn budget_unreadable(&self, id: &DocumentId, problem: &str) {
        tracing::error!(
            namespace = id.object.namespace,
            budget = id.object.name,
            problem,
            "failed to parse an AgentBudget"
        );
        let mut state = self.lock();
        let changed = state.assignments.put_unreadable(id, problem);
        self.send_changed_terms(&mut state, changed);
    }

    pub(super) fn budget_gone(&self, id: &DocumentId) {
        let mut state = self.lock();
        state.book.remove(id);
        state.status_documents.remove(id);
        let changed = state.assignments.remove_budget(&id.uid);
        self.send_changed_terms(&mut state, changed);
    }

    /// These are all budgets of a scope.
    pub(super) fn budgets_listed(&self, namespace: Option<&str>, present: &BTreeSet<String>) {
        let gone: Vec<DocumentId> = self.inspect(|state| {
            let of = |id: &&DocumentId| namespace.is_none_or(|namespace| id.object.namespace == namespace);
            let known = state.assignments.budgets().values().map(|facts| &facts.document);
            known
                .filter(of)
                .filter(|id| !present.contains(&id.uid))
                .cloned()
                .collect()
        });
        for id in &gone {
            self.budget_gone(id);
        }
        self.note_listed(|listed| {
            listed.budgets.insert(namespace.map(Into::into));
        });
    }

    /// These are all namespaces; `None`: they may not be read.
    pub(super) fn namespaces_listed(&self, all: Option<BTreeMap<String, BTreeMap<String, String>>>) {
        if let Some(all) = all {
            let mut state = self.lock();
            let changed = state.assignments.put_namespaces(all);
            self.send_changed_terms(&mut state, changed);
        }
        self.note_listed(|listed| listed.namespaces = true);
    }

    /// A namespace has these labels; `None`: it was deleted.
    pub(super) fn namespace_seen(&self, name: &str, labels: Option<BTreeMap<String, String>>) {
        let mut state = self.lock();
        let changed = state.assignments.put_namespace(name, labels);
        self.send_changed_terms(&mut state, changed);
    }

    /// Once everything that decides is listed, all gateways get their terms.
    fn note_listed(&self, note: impl FnOnce(&mut ListedWatches)) {
        let mut state = self.lock();
        let before = self.can_decide(&state);
        note(&mut state.listed);
        if !before && self.can_decide(&state) {
            self.decided.send_replace(true);
            let all = state.assignments.agents(None);
            self.send_changed_terms(&mut state, all);
        }
    }

    /// Whether everything is listed that determines assignments.
    pub(super) fn can_decide(&self, state: &LedgerState) -> bool {
        state.listed.namespaces && state.listed.budgets.len() >= self.budget_scopes().len()
    }

    /// Whether everything is listed that determines which holders are lost.
    pub(super) fn can_assess_holders(&self, state: &LedgerState) -> bool {
        let scopes = self.watch_namespaces.len().max(1);
        self.can_decide(state) && state.listed.agents.len() >= scopes && state.listed.pods.len() >= scopes
    }

    /// The namespaces whose budgets are watched; `None`: all.
    pub(super) fn budget_scopes(&self) -> Vec<Option<String>> {
        if self.watch_namespaces.is_empty() {
            return vec![None];
        }
        let own = [self.namespace.clone()];
        let all: BTreeSet<String> = self.watch_namespaces.iter().cloned().chain(own).collect();
        all.into_iter().map(Some).collect()
    }

    /// A gateway's statements and [`LeaseRequest`]s. Answered once everything that it grants is written.
    pub async fn lease(&self, holder: &LeaseHolder, request: &LeaseRequest) -> Result<LeaseResponse, PodRefusal> {
        let agent = holder.agent.clone();
        // Subscribed before the request is applied, so that a write in between is not missed.
        let mut writes = self.writes.subscribe();
        let deadline = Instant::now() + WRITE_TIMEOUT;
        let pending = {
            let mut guard = self.lock();
            let state = &mut *guard;
            if !self.can_decide(state) || state.assignments.decision(&agent).is_none() {
                return Err(try_later(
                    "the controller has not evaluated this Agent's budgets yet; retry later",
                ));
            }
            if state.book.names_foreign_record(holder, request) {
                return Err(foreign_record());
            }
            let applies = self.drawn_on(state, &agent);
            let is_there = |account: &str| state.assignments.knows(account);
            state.book.track_missing(&agent, request, is_there, self.now());
            let current = CurrentRecord {
                record: holder.record.clone(),
                pod_uid: holder.pod_uid.clone(),
            };
            state.holders.current_records.insert(agent.clone(), current);
            let pending = state
                .book
                .apply_request(holder, |account| applies.contains(account), request, self.now());
            // What is left for the Agent has changed.
            self.send_terms(state, [agent.clone()]);
            pending
        };
        loop {
            {
                let state = self.lock();
                if state.book.must_wait(holder, request, &pending).is_empty() {
                    return Ok(state.book.response(holder, request, pending));
                }
            }
            self.wake_writer.notify_one();
            if timeout_at(deadline, writes.changed()).await.is_err() {
                return Err(try_later("the ledger record could not be written in time; retry later"));
            }
        }
    }

    /// Final statements of a pod that may no longer request leases, because its Agent was deleted or has another pod,
    /// about the leases that it was the last to hold: its token proves the pod, and the record confirms the rest.
    /// `None`: it holds nothing, or requests leases.
    pub fn accept_returns(&self, holder: &LeaseHolder, request: &LeaseRequest) -> Option<LeaseResponse> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if !self.can_decide(state) || request.accounts.iter().any(|part| part.ask.is_some()) {
            return None;
        }
        let request = state.book.final_statements(holder, request)?;
        let pending = state.book.apply_request(holder, |_| false, &request, self.now());
        self.send_terms(state, []);
        Some(state.book.response(holder, &request, pending))
    }

    /// Accounts of which the Agent may be granted more now.
    fn drawn_on(&self, state: &LedgerState, agent: &NamespacedName) -> BTreeSet<String> {
        let Some(decision) = state.assignments.decision(agent) else {
            return BTreeSet::new();
        };
        if decision.obstacle.is_some() || state.blocks.contains_key(agent) {
            return BTreeSet::new();
        }
        let accounts = decision.accounts.iter();
        let free = accounts.filter(|(account, name)| self.budget_hold(state, account, name).is_none());
        free.map(|(account, _)| account.clone()).collect()
    }

    /// Wakes the [`LeaseRequest`]s that wait for a record.
    pub(super) fn note_written(&self) {
        self.writes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn send_changed_terms(&self, state: &mut LedgerState, agents: Vec<NamespacedName>) {
        for agent in &agents {
            self.loops.request_reconcile(agent);
        }
        self.send_terms(state, agents);
    }

    /// Updates the gateways of these Agents and of all with changed [`AccountEntry`]s, and wakes the record writer.
    pub(super) fn send_terms(&self, state: &mut LedgerState, agents: impl IntoIterator<Item = NamespacedName>) {
        let mut agents: BTreeSet<NamespacedName> = agents.into_iter().collect();
        for account in state.book.take_changed() {
            agents.extend(state.assignments.members(&account).cloned());
        }
        for agent in agents {
            self.loops.set_budget_terms(&agent, self.terms_in(state, &agent));
        }
        self.wake_writer.notify_one();
    }

    fn terms_in(&self, state: &LedgerState, agent: &NamespacedName) -> Option<BudgetTerms> {
        if !self.can_decide(state) {
            return None;
        }
        let decision = state.assignments.decision(agent)?;
        let [price, light_price] = decision.unnamed_prices.clone();
        let mut terms = BudgetTerms {
            prices: decision.prices.clone(),
            price,
            light_price,
            min_output_tokens: state.assignments.policy().min_output_tokens,
            blocked: state.blocks.get(agent).cloned(),
            ..BudgetTerms::default()
        };
        if let Some(obstacle) = &decision.obstacle {
            terms.blocked = Some(CallFailure::new(FailureKind::BudgetUnavailable, &obstacle.message));
        }
        for (account, limit) in &decision.accounts {
            let (_, entry) = state.book.entry(account)?;
            let held = self.budget_hold(state, account, limit);
            terms.cut |= held.as_ref().is_some_and(|held| held.cut);
            terms.accounts.push(AccountTerms {
                account: account.clone(),
                limit: limit.clone(),
                limits: entry.account().limits(),
                per_agent: entry.account().per_agent(),
                recall: entry.account().recalls(),
                held: held.map(|held| held.failure),
                revision: entry.revision(),
                left: super::shares::left(entry, agent),
            });
        }
        Some(terms)
    }

    fn budget_hold(&self, state: &LedgerState, account: &str, name: &LimitName) -> Option<BudgetHold> {
        let facts = state.assignments.budget(account)?;
        self.presentation.hold(&self.view(state, facts), name)
    }

    pub(super) fn view<'a>(&self, state: &'a LedgerState, facts: &'a BudgetFacts) -> BudgetView<'a> {
        let account = facts.document.account(DocumentPart::Budget);
        let entry = state.book.entry(&account).map(|(_, entry)| entry);
        BudgetView {
            budget: &facts.object,
            shown: state
                .status_documents
                .get(&facts.document)
                .map_or_else(|| &*NOTHING, |document| &document.shown),
            entry: match (facts.problem(), entry) {
                (Some(problem), _) => Err(problem),
                (None, Some(entry)) => Ok(entry),
                (None, None) => Err("its account is not loaded yet"),
            },
            agents: state.assignments.members_of(&account),
            problem: None,
            now: self.now(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LedgerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static NOTHING: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
