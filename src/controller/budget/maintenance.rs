//! What time alone does to the ledger: windows move, lost gateways are forfeited, and refusals of Agents that no longer
//! wait are withdrawn. Decides nothing on partial knowledge: only once all watches have listed.

use std::collections::BTreeMap;

use jiff::SignedDuration;

use super::assignment::LimitDecision;
use super::entry::BlockedAgent;
use super::forfeit::{HolderState, RecordPersistence};
use super::ledger::{BudgetLedger, LedgerState};
use crate::api::NamespacedName;
use crate::api::budget::OnExhausted;
use crate::ledger::account::LeaseHolder;

/// A refused Agent that would retry without being woken, and has not done so for this long, no longer waits: twice the
/// interval between the attempts of a loop.
const RETRY_TIMEOUT: SignedDuration = SignedDuration::from_secs(30);

impl LedgerState {
    /// Whether an Agent may make calls that this account limits.
    fn draws(&self, account: &str, agent: &NamespacedName) -> bool {
        let draws = |decision: &LimitDecision| decision.accounts.iter().any(|(drawn, _)| drawn == account);
        self.assignments.decision(agent).is_some_and(draws)
            && self.assignments.agent(agent).is_some_and(|facts| !facts.suspended)
    }

    fn is_in_pod(&self, agent: &NamespacedName, uid: &str) -> bool {
        let pod = self.holders.pods.get(agent);
        pod.is_some_and(|pod| pod.uid == uid && !pod.ended)
    }
}

impl BudgetLedger {
    /// Advances the time of all accounts, and forfeits what lost gateways hold.
    pub(super) fn tick(&self) {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.book.tick(self.now());
        if self.can_assess_holders(state) {
            self.forfeit_lost(state);
            self.withdraw_absent(state);
        }
        self.send_terms(state, []);
    }

    /// A refusal keeps a budget exhausted only while its Agent waits: not if the Agent no longer draws on the budget,
    /// is suspended, runs in another pod, or did not retry in time.
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
                    .assignments
                    .budget(&id.uid)
                    .is_some_and(|facts| facts.object.spec.on_exhausted == OnExhausted::Pause);
                let silent = |blocked: &BlockedAgent| {
                    let refused = &blocked.refused;
                    let probes = pauses && !refused.never && refused.resets_at.is_none();
                    probes && entry.account().time().duration_since(blocked.at) >= RETRY_TIMEOUT
                };
                let waits = |name: &NamespacedName| match entry.blocked().get(name) {
                    Some(blocked) => !silent(blocked) && state.is_in_pod(name, &blocked.holder.pod_uid),
                    None => true,
                };
                let names = entry.smallest_requests.keys().chain(entry.blocked().keys());
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
        let mut lost_holders: Vec<(String, LeaseHolder)> = Vec::new();
        let mut open_records = BTreeMap::new();
        for (id, document) in state.book.documents() {
            for (part, entry) in document.accounts() {
                for holder in entry.account().holders() {
                    let agent = &holder.agent;
                    let persistence = match state.assignments.agent(agent) {
                        None => RecordPersistence::Gone,
                        Some(facts) if facts.ephemeral => RecordPersistence::Ephemeral,
                        Some(_) => RecordPersistence::Volume,
                    };
                    let is_lost = match state.holders.holder_state(holder, agent, persistence, now) {
                        HolderState::MayCall => false,
                        HolderState::Missing(missing) => {
                            let wait = entry.account().forfeit_after(&holder.record);
                            wait.is_some_and(|wait| missing >= wait)
                        }
                        HolderState::Lost => true,
                    };
                    if is_lost {
                        lost_holders.push((id.account(*part), holder.clone()));
                    }
                    open_records.insert(holder.record.clone(), (agent.clone(), holder.pod_uid.clone()));
                }
            }
        }
        let assignments = &state.assignments;
        state
            .holders
            .retain(&open_records, |agent| assignments.agent(agent).is_some());
        for (account, holder) in lost_holders {
            let lost = state.book.forfeit(&account, &holder.record, now);
            self.metrics.forfeit(&lost);
            tracing::warn!(
                account,
                namespace = holder.agent.namespace,
                agent = holder.agent.name,
                tokens = lost.tokens,
                cost_micro_usd = lost.cost,
                "a gateway is gone for good: what it held counts as spent"
            );
        }
    }
}
