//! A leader without clock and network: the controller's own [`AccountBook`], driven in the order on which the guarantee rests.
//!
//! 1. **plan**: [`Leader::request`] applies a request. What it grants is in memory only, and is not sent yet.
//! 2. **write**: [`Leader::compose`] returns a record that must replace exactly the previous epoch; one at a time.
//! 3. **written**: [`Leader::written`], once the API server has confirmed the record.
//! 4. **answer**: each request that waited for that record gets an [`LeaderResponse`], which contains only what is written. A
//!    request that was granted nothing new is answered at once.
//!
//! A conflict, or a write without a confirmation, ends the leader. The next leader starts from the records alone.

use std::collections::{BTreeMap, BTreeSet};

use agentloop::api::NamespacedName;
use agentloop::api::amount::{Amount, AmountKind, LimitAmounts};
use agentloop::api::budget::LedgerRecord;
use agentloop::controller::budget::accounts::{
    AccountBook, DocumentId, DocumentKind, DocumentPart, PendingLeaseResponse, RecordWrite,
};
use agentloop::ledger::account::{Account, LeaseHolder, LedgerTerms};
use agentloop::link::messages::{LeaseRequest, LeaseResponse};
use jiff::Timestamp;

use super::gateway::{account_id, account_index};
use super::mutation::Mutation;

/// A gateway's request.
#[derive(Clone, Debug)]
pub struct LeaderRequest {
    /// Who asks.
    pub who: LeaseHolder,
    /// Where the answer goes.
    pub gateway: usize,
    /// Its statements and what it asks for.
    pub body: LeaseRequest,
    /// When it was sent, by the gateway's boot-time clock; comes back with the answer, as with an HTTP request.
    pub sent: i64,
    /// How often the gateway's disk had gone back; comes back with the answer.
    pub went_back: u32,
    /// The Agent is deleted: its pod may not ask any more.
    pub last: bool,
}

/// The leader's answer to one gateway.
#[derive(Clone, Debug)]
pub struct LeaderResponse {
    /// The receiver.
    pub gateway: usize,
    /// The record of the gateway that it refers to.
    pub record: String,
    /// Its content.
    pub body: LeaseResponse,
    /// When the request was sent.
    pub sent: i64,
    /// See [`LeaderRequest::went_back`].
    pub went_back: u32,
}

/// One leader.
#[derive(Clone, Debug)]
pub struct Leader {
    book: AccountBook,
    /// Accounts that it has seen and that exist, as far as it knows.
    documents: BTreeMap<usize, DocumentId>,
    /// Records under way to the API server.
    writes: BTreeMap<usize, Vec<RecordWrite>>,
    waiting: Vec<(LeaderRequest, PendingLeaseResponse)>,
    mutation: Mutation,
}

impl Leader {
    /// A leader that continues from the records of the previous one.
    pub fn take_over<'a>(
        accounts: impl Iterator<Item = (usize, LedgerTerms, Option<&'a LedgerRecord>)>,
        now: Timestamp,
        mutation: Mutation,
    ) -> Self {
        let mut leader = Self {
            book: AccountBook::default(),
            documents: BTreeMap::new(),
            writes: BTreeMap::new(),
            waiting: Vec::new(),
            mutation,
        };
        for (account, terms, record) in accounts {
            leader.add(account, terms, record, now);
        }
        leader
    }

    /// A budget exists.
    pub fn add(&mut self, account: usize, terms: LedgerTerms, record: Option<&LedgerRecord>, now: Timestamp) {
        let document = DocumentId {
            kind: DocumentKind::Budget,
            object: NamespacedName::new("n", "b"),
            uid: account_id(account).into(),
        };
        self.book.load(&document, DocumentPart::Budget, terms, record, now);
        self.documents.insert(account, document);
    }

    /// A budget was deleted.
    pub fn remove(&mut self, account: usize) {
        if let Some(document) = self.documents.remove(&account) {
            self.book.remove(&document);
        }
        self.writes.remove(&account);
    }

    /// Whether it has seen this budget.
    pub fn knows(&self, account: usize) -> bool {
        self.documents.contains_key(&account)
    }

    /// An account.
    pub fn account(&self, account: usize) -> &Account {
        self.book.entry(account_id(account)).unwrap().1.account()
    }

    /// Its limits.
    pub fn limits(&self, account: usize) -> LimitAmounts {
        self.account(account).limits()
    }

    /// The kind of which a budget with this many Agents is exhausted, and the Agents that hold leases or wait.
    pub fn exhausted(&self, account: usize, agents: usize) -> Option<(AmountKind, BTreeSet<NamespacedName>)> {
        let (_, entry) = self.book.entry(account_id(account)).unwrap();
        let shown = if self.mutation == Mutation::OneRefusalExhausts {
            let mut blocked = entry.blocked().iter();
            blocked.find(|(_, blocked)| {
                let refused = &blocked.refused;
                !refused.per_agent && !refused.never && !refused.contended
            })
        } else {
            entry.exhausted(agents)
        };
        let (_, blocked) = shown?;
        let awake = entry.account().holders().map(|who| who.agent.clone());
        let awake = awake.chain(entry.blocked().keys().cloned()).collect();
        Some((blocked.refused.kind, awake))
    }

    /// The spec of an object changed.
    pub fn set_terms(&mut self, account: usize, terms: &LedgerTerms, top_ups: &[(String, Amount)], now: Timestamp) {
        self.book.set_terms(account_id(account), terms.clone(), now);
        for (id, amount) in top_ups.iter().filter(|(_, amount)| !amount.is_zero()) {
            self.book.top_up(account_id(account), id, *amount, now);
        }
    }

    /// This gateway is certain to be dead.
    pub fn bury(&mut self, account: usize, record: &str, now: Timestamp) {
        self.book.forfeit(account_id(account), record, now);
    }

    /// Time passes.
    pub fn tick(&mut self, now: Timestamp) {
        self.book.tick(now);
    }

    /// Plans a grant. The answer comes at once if it needs no write. `draws`: the accounts that apply to its Agent.
    pub fn request(&mut self, request: &LeaderRequest, draws: &[usize], now: Timestamp) -> Option<LeaderResponse> {
        if request.last {
            let last = self.book.final_statements(&request.who, &request.body);
            let last = last.filter(|_| self.mutation != Mutation::RefuseLastWords)?;
            let heard = self.book.apply_request(&request.who, |_| false, &last, now);
            return Some(self.answer(request, &heard));
        }
        let applies = |account: &str| draws.contains(&account_index(account));
        if self.mutation != Mutation::NeverMiss {
            let documents = &self.documents;
            let is_there = |account: &str| documents.contains_key(&account_index(account));
            self.book
                .track_missing(&request.who.agent, &request.body, is_there, now);
        }
        let heard = self.book.apply_request(&request.who, applies, &request.body, now);
        if self.book.must_wait(&request.who, &request.body, &heard).is_empty() {
            return Some(self.answer(request, &heard));
        }
        self.waiting.push((request.clone(), heard));
        None
    }

    /// The record to write now: of any change, or with `only_due` only if a request waits for it or it is due.
    pub fn compose(&mut self, account: usize, only_due: bool, now: Timestamp) -> Option<LedgerRecord> {
        let document = self.documents.get(&account)?;
        let wanted = if only_due {
            self.book.due(now).contains(document)
        } else {
            self.account(account).is_changed()
        };
        if !wanted || self.writes.contains_key(&account) {
            return None;
        }
        let writes = self.book.compose(document, now);
        let record = writes[0].record.clone();
        self.writes.insert(account, writes);
        Some(record)
    }

    /// Whether a record is under way.
    pub fn is_writing(&self, account: usize) -> bool {
        self.writes.contains_key(&account)
    }

    /// The API server has confirmed the record under way. Returns the answers that may be sent now.
    pub fn written(&mut self, account: usize, now: Timestamp) -> Vec<LeaderResponse> {
        let Some(writes) = self.writes.remove(&account) else {
            return Vec::new();
        };
        self.book.written(&self.documents[&account], &writes, now);
        let waiting = std::mem::take(&mut self.waiting);
        let (wait, ready): (Vec<_>, Vec<_>) = waiting
            .into_iter()
            .partition(|(request, heard)| !self.book.must_wait(&request.who, &request.body, heard).is_empty());
        self.waiting = wait;
        ready
            .iter()
            .map(|(request, heard)| self.answer(request, heard))
            .collect()
    }

    /// The API server rejected the record under way for good.
    pub fn denied(&mut self, account: usize) {
        if self.writes.remove(&account).is_some() {
            self.book.not_written(&self.documents[&account]);
        }
    }

    /// The API server reports that the budget does not exist. Requests that wait for its record stay without an answer.
    pub fn lost(&mut self, account: usize, now: Timestamp) {
        if self.writes.remove(&account).is_some() {
            self.book.written(&self.documents[&account], &[], now);
        }
    }

    fn answer(&self, request: &LeaderRequest, heard: &PendingLeaseResponse) -> LeaderResponse {
        let mut body = self.book.response(&request.who, &request.body, heard.clone());
        if self.mutation == Mutation::ForgetClosedEarly {
            // Closed, but that is not written.
            for (asked, answered) in request.body.accounts.iter().zip(&mut body.accounts) {
                let closed = asked.statements.iter().filter(|statement| statement.closed);
                answered.forgotten.extend(closed.map(|statement| statement.lease));
            }
        }
        if self.mutation == Mutation::AnswerOnlyWhatIsAsked {
            body.accounts.truncate(request.body.accounts.len());
        }
        LeaderResponse {
            gateway: request.gateway,
            record: request.who.record.clone(),
            body,
            sent: request.sent,
            went_back: request.went_back,
        }
    }
}
