//! What time alone does to the ledger: windows move, lost gateways are forfeited, and refusals of Agents that no longer
//! wait are withdrawn. Decides nothing on partial knowledge: only once all watches have listed.

use std::collections::BTreeMap;

use jiff::SignedDuration;

use super::assignment::LimitDecision;
use super::entry::BlockedAgent;
use super::forfeit::{HolderFate, RecordPersistence};
use super::ledger::{BudgetLedger, LedgerState};
use crate::api::NamespacedName;
use crate::api::budget::OnExhausted;
use crate::ledger::account::LeaseHolder;

/// A refused Agent that would retry without being woken, and has not done so for this long, no longer waits: twice the
/// interval between the attempts of a loop.
const SILENCE: SignedDuration = SignedDuration::from_secs(30);

impl LedgerState {
    /// Whether an Agent may make calls that this account limits.
    fn draws(&self, account: &str, agent: &NamespacedName) -> bool {
        let draws = |decision: &LimitDecision| decision.accounts.iter().any(|(drawn, _)| drawn == account);
        self.scope.decision(agent).is_some_and(draws) && self.scope.agent(agent).is_some_and(|facts| !facts.suspended)
    }

    fn is_in_pod(&self, agent: &NamespacedName, uid: &str) -> bool {
        let pod = self.witness.pods.get(agent);
        pod.is_some_and(|pod| pod.uid == uid && !pod.ended)
    }
}

impl BudgetLedger {
    /// Advances the time of all accounts, and forfeits what lost gateways hold.
    pub(super) fn tick(&self) {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.book.tick(self.now());
        if self.can_judge_holders(state) {
            self.forfeit_lost(state);
            self.withdraw_absent(state);
        }
        self.send_terms(state, []);
    }

    /// A refusal keeps a budget exhausted only while its Agent waits: not if the Agent no longer draws on the budget,
    /// is suspended, runs in another pod, or went silent although it would have retried.
    fn withdraw_absent(&self, state: &mut LedgerState) {
        let mut absent = Vec::new();
        for (id, document) in state.book.documents() {
            let waited_for = document
                .accounts()
                .iter()
                .filter(|(_, entry)| !entry.blocked().is_empty());
            for (part, entry) in waited_for {
                let account = id.account(*part);
                let pauses = state
                    .scope
                    .budget(&id.uid)
                    .is_some_and(|facts| facts.object.spec.on_exhausted == OnExhausted::Pause);
                let silent = |blocked: &BlockedAgent| {
                    let refused = &blocked.refused;
                    let probes = pauses && !refused.never && refused.resets_at.is_none();
                    probes && entry.account().time().duration_since(blocked.at) >= SILENCE
                };
                let waits = |name: &NamespacedName| match entry.blocked().get(name) {
                    Some(blocked) => !silent(blocked) && state.is_in_pod(name, &blocked.who.pod_uid),
                    None => true,
                };
                let names = entry.asks.keys().chain(entry.blocked().keys());
                let gone = names.filter(|name| !state.draws(&account, name) || !waits(name));
                absent.extend(gone.map(|name| (account.clone(), name.clone())));
            }
        }
        for (account, agent) in absent {
            state.book.withdraw(&account, &agent, self.now());
        }
    }

    fn forfeit_lost(&self, state: &mut LedgerState) {
        let now = self.now();
        let mut dead: Vec<(String, LeaseHolder)> = Vec::new();
        let mut live = BTreeMap::new();
        for (id, document) in state.book.documents() {
            for (part, entry) in document.accounts() {
                for who in entry.account().holders() {
                    let agent = &who.agent;
                    let hope = match state.scope.agent(agent) {
                        None => RecordPersistence::Gone,
                        Some(facts) if facts.ephemeral => RecordPersistence::Ephemeral,
                        Some(_) => RecordPersistence::Volume,
                    };
                    let buries = match state.witness.holder_fate(who, agent, hope, now) {
                        HolderFate::Lives => false,
                        HolderFate::Silent(missing) => {
                            let wait = entry.account().forfeit_after(&who.record);
                            wait.is_some_and(|wait| missing >= wait)
                        }
                        HolderFate::Lost => true,
                    };
                    if buries {
                        dead.push((id.account(*part), who.clone()));
                    }
                    live.insert(who.record.clone(), (agent.clone(), who.pod_uid.clone()));
                }
            }
        }
        let scope = &state.scope;
        state.witness.retain(&live, |agent| scope.agent(agent).is_some());
        for (account, who) in dead {
            let lost = state.book.forfeit(&account, &who.record, now);
            self.metrics.forfeit(&lost);
            tracing::warn!(
                account,
                namespace = who.agent.namespace,
                agent = who.agent.name,
                tokens = lost.tokens,
                cost_micro_usd = lost.cost,
                "a gateway is gone for good: what it held counts as spent"
            );
        }
    }
}
