//! All accounts of a leader, in memory: applies gateways' requests, composes the records to write, and answers.
//!
//! Pure: no clock, no I/O. Accounts are grouped into documents, the objects whose status contains their records. The
//! guarantee rests on this order: [`AccountBook::apply_request`]; [`AccountBook::compose`] and the write over exactly
//! the previous epochs; [`AccountBook::written`]; and only then [`AccountBook::response`] to requests for which
//! [`AccountBook::must_wait`] names documents.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use super::entry::AccountEntry;
use crate::api::NamespacedName;
use crate::api::amount::{Amount, LimitAmounts};
use crate::api::budget::LedgerRecord;
use crate::ledger::account::{Account, GrantRefusal, LeaseHolder, LedgerTerms};
use crate::ledger::wallet::AccountId;
use crate::ledger::window::WindowRule;
use crate::link::messages::{AccountRequest, AccountResponse, LeaseGrant, LeaseRequest, LeaseResponse};

/// Interval between [`RecordWrite`]s of a document for which nothing waits.
pub const WRITE_INTERVAL: SignedDuration = SignedDuration::from_secs(15);
/// How long an account must be missing before it counts as deleted, since watches may lag behind.
const DELETION_DELAY: SignedDuration = SignedDuration::from_mins(1);
/// Most missing accounts that are tracked for one Agent: few budgets are deleted without a leader.
const MAX_MISSING: usize = 64;
/// The epoch of answers about a deleted account: no later answer contradicts it.
const DELETED_EPOCH: i64 = i64::MAX;

/// The kind of an object that contains [`LedgerRecord`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DocumentKind {
    /// An AgentBudget: `status.ledger`.
    Budget,
    /// An Agent with its own limits: `status.ledger.tokensPerHour` and `status.ledger.total`.
    Agent,
}

/// Identifies an object with [`LedgerRecord`]s.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DocumentId {
    pub kind: DocumentKind,
    pub object: NamespacedName,
    /// A recreated object has another uid, so it is another document.
    pub uid: String,
}

/// Identifies an [`AccountEntry`] within its document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DocumentPart {
    /// The only [`AccountEntry`] of an AgentBudget.
    Budget,
    /// `guardrails.tokensPerHour`.
    TokensPerHour,
    /// `guardrails.total`.
    Total,
}

impl DocumentId {
    /// The id of the account of this part.
    #[must_use]
    pub fn account(&self, part: DocumentPart) -> AccountId {
        match part {
            DocumentPart::Budget => self.uid.clone(),
            DocumentPart::TokensPerHour => format!("{}/tokensPerHour", self.uid),
            DocumentPart::Total => format!("{}/total", self.uid),
        }
    }
}

/// An object with [`LedgerRecord`]s, and its accounts.
#[derive(Clone, Debug)]
pub struct LedgerDocument {
    accounts: BTreeMap<DocumentPart, AccountEntry>,
    /// Time of the last write, or of the load: a new leader does not write at once.
    wrote: Timestamp,
    urgent: bool,
    writing: bool,
}

impl LedgerDocument {
    #[must_use]
    pub fn accounts(&self) -> &BTreeMap<DocumentPart, AccountEntry> {
        &self.accounts
    }

    #[must_use]
    pub fn part(&self, part: DocumentPart) -> Option<&AccountEntry> {
        self.accounts.get(&part)
    }

    /// Time of the last write, or of the load.
    #[must_use]
    pub fn wrote(&self) -> Timestamp {
        self.wrote
    }

    fn is_changed(&self) -> bool {
        self.accounts.values().any(|entry| entry.account.is_changed())
    }
}

/// A [`LedgerRecord`] to be written over exactly its predecessor.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordWrite {
    pub part: DocumentPart,
    /// Epoch of the [`LedgerRecord`] that must be there; 0: no record.
    pub over: i64,
    /// The new [`LedgerRecord`].
    pub record: LedgerRecord,
}

/// The result of a [`LeaseRequest`], until it is answered.
#[derive(Clone, Debug, Default)]
pub struct PendingLeaseResponse {
    refused: BTreeMap<AccountId, GrantRefusal>,
    forgotten: BTreeMap<AccountId, Vec<i64>>,
}

/// An account that a gateway states, and that nothing else knows.
#[derive(Clone, Copy, Debug)]
struct MissingAccount {
    since: Timestamp,
    /// It was missing for long enough.
    is_deleted: bool,
}

#[derive(Clone, Debug, Default)]
pub struct AccountBook {
    documents: BTreeMap<DocumentId, LedgerDocument>,
    index: BTreeMap<AccountId, (DocumentId, DocumentPart)>,
    /// Accounts of deleted budgets, which are completely accounted for.
    gone: BTreeSet<AccountId>,
    /// Accounts with changes that gateways must learn about: limits, recall or revision.
    changed: BTreeSet<AccountId>,
    /// Unknown [`AccountEntry`]s in the last statements of each Agent's gateway: none decides about those of another one.
    missing: BTreeMap<NamespacedName, BTreeMap<AccountId, MissingAccount>>,
    /// Accounts in which each gateway's record has leases, or had some.
    holdings: BTreeMap<String, BTreeSet<AccountId>>,
}

impl AccountBook {
    /// Loads an [`AccountEntry`]. One that is already loaded keeps its state and gets the new terms.
    pub fn load(
        &mut self,
        document: &DocumentId,
        part: DocumentPart,
        terms: LedgerTerms,
        record: Option<&LedgerRecord>,
        now: Timestamp,
    ) {
        let account = document.account(part);
        if self.index.contains_key(&account) {
            self.set_terms(&account, terms, now);
            return;
        }
        let empty = LedgerRecord::default();
        let restored = Account::restore(terms, record.unwrap_or(&empty), now);
        for holder in restored.holders() {
            let held = self.holdings.entry(holder.record.clone()).or_default();
            held.insert(account.clone());
        }
        let entry = AccountEntry {
            loaded_at: restored.time(),
            account: restored,
            blocked: BTreeMap::new(),
            smallest_requests: BTreeMap::new(),
            checked_availability: None,
            released: false,
            revision: 0,
        };
        let owner = self
            .documents
            .entry(document.clone())
            .or_insert_with(|| LedgerDocument {
                accounts: BTreeMap::new(),
                wrote: now,
                urgent: false,
                writing: false,
            });
        owner.accounts.insert(part, entry);
        self.index.insert(account.clone(), (document.clone(), part));
        self.changed.insert(account);
    }

    /// Changes limits or window.
    pub fn set_terms(&mut self, account: &str, terms: LedgerTerms, now: Timestamp) {
        self.update_entry(account, now, |entry| entry.account.set_terms(terms, now));
    }

    /// Ensures that at least `used` is counted in all: what is neither settled nor held counts now.
    pub fn raise_used(&mut self, account: &str, agent: &NamespacedName, used: &Amount, now: Timestamp) {
        self.update_entry(account, now, |entry| entry.account.charge_at_least(agent, used, now));
    }

    /// Removes all limits; what was counted stays.
    pub fn unlimit(&mut self, account: &str, now: Timestamp) {
        self.update_entry(account, now, |entry| {
            let terms = LedgerTerms {
                limits: LimitAmounts::default(),
                ..entry.account.terms().clone()
            };
            entry.account.set_terms(terms, now);
        });
    }

    /// Adds to the limits of the current window, once per id. `false`: it was counted before, or does not fit.
    pub fn top_up(&mut self, account: &str, id: &str, amount: Amount, now: Timestamp) -> bool {
        let counted = self.update_entry(account, now, |entry| entry.account.top_up(id, amount, now));
        let counted = counted == Some(true);
        if counted {
            self.mark_urgent(account);
        }
        counted
    }

    /// Tracks accounts that only gateways know. The leases of a budget that was deleted between terms would otherwise
    /// be reported forever: an account that is unknown for a minute counts as deleted.
    /// A request names all that a gateway has to state; of more than [`MAX_MISSING`], the others follow once these are forgotten.
    pub fn track_missing(
        &mut self,
        agent: &NamespacedName,
        request: &LeaseRequest,
        is_there: impl Fn(&str) -> bool,
        now: Timestamp,
    ) {
        let before = self.missing.remove(agent).unwrap_or_default();
        let stated = request.accounts.iter().filter(|part| !part.statements.is_empty());
        let mut stated: Vec<_> = stated
            .map(|part| &part.account)
            .filter(|account| !(self.index.contains_key(*account) || self.gone.contains(*account) || is_there(account)))
            .collect();
        // Those that are tracked already keep their places.
        stated.sort_by_key(|account| !before.contains_key(*account));
        let mut missing = BTreeMap::new();
        for account in stated.into_iter().take(MAX_MISSING) {
            let since = before.get(account).map_or(now, |before| before.since);
            let is_deleted = now.duration_since(since) >= DELETION_DELAY;
            missing.insert(account.clone(), MissingAccount { since, is_deleted });
        }
        if !missing.is_empty() {
            self.missing.insert(agent.clone(), missing);
        }
    }

    /// Whether an account that this Agent's gateway states belongs to a deleted budget.
    fn is_gone(&self, agent: &NamespacedName, account: &str) -> bool {
        let missing = self.missing.get(agent).and_then(|missing| missing.get(account));
        self.gone.contains(account) || missing.is_some_and(|missing| missing.is_deleted)
    }

    /// Removes the accounts of a deleted object.
    pub fn remove(&mut self, document: &DocumentId) {
        if document.kind == DocumentKind::Agent {
            self.missing.remove(&document.object);
        }
        let Some(removed) = self.documents.remove(document) else {
            return;
        };
        for part in removed.accounts.into_keys() {
            let account = document.account(part);
            self.index.remove(&account);
            self.changed.insert(account.clone());
            if document.kind == DocumentKind::Budget {
                self.gone.insert(account);
            }
        }
    }

    /// Applies a gateway's statements, and its requests for the [`AccountEntry`]s that apply to its Agent.
    pub fn apply_request(
        &mut self,
        holder: &LeaseHolder,
        applies: impl Fn(&str) -> bool,
        request: &LeaseRequest,
        now: Timestamp,
    ) -> PendingLeaseResponse {
        let mut pending = PendingLeaseResponse::default();
        // The answer covers everything the gateway holds, with the remaining validity of each lease, so these accounts
        // must be current.
        let held = self.holdings.get(&holder.record).cloned().unwrap_or_default();
        for account in &held {
            self.update_entry(account, now, |_| ());
        }
        // All statements first: what one lease returns may be what is requested.
        for part in &request.accounts {
            let known = self.update_entry(&part.account, now, |entry| {
                let unknown = part
                    .statements
                    .iter()
                    .filter(|statement| !entry.account.apply_statement(holder, statement, now));
                unknown.map(|statement| statement.lease).collect::<Vec<_>>()
            });
            let forgotten = known.or_else(|| {
                let gone = self.is_gone(&holder.agent, &part.account);
                gone.then(|| part.statements.iter().map(|statement| statement.lease).collect())
            });
            pending
                .forgotten
                .insert(part.account.clone(), forgotten.unwrap_or_default());
        }
        for part in request.accounts.iter().filter(|part| applies(&part.account)) {
            let Some(grant) = &part.ask else { continue };
            let refused = self.update_entry(&part.account, now, |entry| {
                let refused = entry.account.request_grant(holder, grant, now).err();
                entry.record_request(holder, grant, refused.as_ref());
                (refused, entry.account.must_wait(&holder.record, grant))
            });
            let Some((refused, waits)) = refused else { continue };
            if let Some(refused) = refused {
                pending.refused.insert(part.account.clone(), refused);
                continue;
            }
            if waits {
                self.mark_urgent(&part.account);
            }
            let held = self.holdings.entry(holder.record.clone()).or_default();
            held.insert(part.account.clone());
        }
        self.forget_holdings(&holder.record);
        pending
    }

    /// The statements of a request about leases that this very pod was the last to hold; `None`: there are none. A
    /// lease that another pod of the same [`LedgerRecord`] holds by now must not be closed by this one.
    #[must_use]
    pub fn final_statements(&self, holder: &LeaseHolder, request: &LeaseRequest) -> Option<LeaseRequest> {
        let holds = |account: &str, lease: i64| {
            self.entry(account)
                .is_some_and(|(_, entry)| entry.account.is_held_by(lease, holder))
        };
        let accounts = request.accounts.iter().map(|part| {
            let statements = part.statements.iter();
            let mine = statements.filter(|statement| holds(&part.account, statement.lease));
            AccountRequest {
                account: part.account.clone(),
                statements: mine.cloned().collect(),
                ask: None,
            }
        });
        let accounts: Vec<_> = accounts.filter(|part| !part.statements.is_empty()).collect();
        (!accounts.is_empty()).then(|| LeaseRequest {
            accounts,
            ..request.clone()
        })
    }

    fn forget_holdings(&mut self, record: &str) {
        let Some(mut held) = self.holdings.remove(record) else {
            return;
        };
        held.retain(|account| {
            self.entry(account)
                .is_some_and(|(_, entry)| entry.account.is_holder(record))
        });
        if !held.is_empty() {
            self.holdings.insert(record.to_owned(), held);
        }
    }

    /// The documents that must be written before this [`LeaseRequest`] is answered; empty: it may be answered now.
    #[must_use]
    pub fn must_wait(
        &self,
        holder: &LeaseHolder,
        request: &LeaseRequest,
        pending: &PendingLeaseResponse,
    ) -> BTreeSet<DocumentId> {
        let asked = request
            .accounts
            .iter()
            .filter(|part| !pending.refused.contains_key(&part.account));
        asked
            .filter_map(|part| {
                let (document, entry) = self.entry(&part.account)?;
                let waits = entry.account.must_wait(&holder.record, part.ask.as_ref()?);
                waits.then(|| document.clone())
            })
            .collect()
    }

    /// Whether the gateway's record belongs to another Agent.
    #[must_use]
    pub fn names_foreign_record(&self, holder: &LeaseHolder, request: &LeaseRequest) -> bool {
        let held = self.holdings.get(&holder.record).into_iter().flatten();
        let accounts = request.accounts.iter().map(|part| &part.account).chain(held);
        let mut entries = accounts.filter_map(|account| self.entry(account));
        entries.any(|(_, entry)| entry.account.is_of_another(holder))
    }

    /// Builds the [`LeaseResponse`] from durable state only. Includes accounts that the request omitted if the gateway
    /// has leases there: it may not know of them, and only it can return them.
    #[must_use]
    pub fn response(
        &self,
        holder: &LeaseHolder,
        request: &LeaseRequest,
        mut pending: PendingLeaseResponse,
    ) -> LeaseResponse {
        let named: BTreeSet<&AccountId> = request.accounts.iter().map(|part| &part.account).collect();
        let held = self.holdings.get(&holder.record).into_iter().flatten();
        let unnamed = held.filter(|account| !named.contains(account)).cloned();
        let asked = request.accounts.iter().map(|part| part.account.clone());
        let accounts = asked.chain(unnamed).map(|account| {
            // Taken, not cloned: an account that is named twice has its leases in one of the answers.
            let forgotten = pending.forgotten.remove(&account).unwrap_or_default();
            let refused = pending.refused.remove(&account);
            let Some((_, entry)) = self.entry(&account) else {
                let is_gone = self.is_gone(&holder.agent, &account);
                let epoch = if is_gone { DELETED_EPOCH } else { 0 };
                return AccountResponse {
                    account,
                    epoch,
                    forgotten,
                    ..AccountResponse::default()
                };
            };
            let time = entry.account.time();
            let leases = entry.account.durable_grants(&holder.record);
            AccountResponse {
                account,
                epoch: entry.account.epoch(),
                leases: leases
                    .into_iter()
                    .map(|lease| LeaseGrant {
                        lease: lease.lease,
                        granted: lease.granted,
                        spent: lease.spent,
                        returned: lease.returned,
                        valid_milliseconds: lease.ends.map(|end| milliseconds(time, end)),
                    })
                    .collect(),
                forgotten,
                refused,
            }
        });
        LeaseResponse {
            accounts: accounts.collect(),
        }
    }

    /// The documents to write now: something waits for the write, or there are changes and the last write was long
    /// enough ago.
    #[must_use]
    pub fn due(&self, now: Timestamp) -> Vec<DocumentId> {
        let due = self
            .documents
            .iter()
            .filter(|(_, document)| !document.writing && is_due(document, now));
        due.map(|(id, _)| id.clone()).collect()
    }

    /// The records to write. Nothing else is written to this document until [`AccountBook::written`] or
    /// [`AccountBook::not_written`].
    pub fn compose(&mut self, document: &DocumentId, now: Timestamp) -> Vec<RecordWrite> {
        let Some(owner) = self.documents.get_mut(document) else {
            return Vec::new();
        };
        (owner.writing, owner.urgent) = (true, false);
        let write = |(part, entry): (&DocumentPart, &mut AccountEntry)| {
            entry.account.advance(now);
            RecordWrite {
                part: *part,
                over: entry.account.epoch(),
                record: entry.account.compose(),
            }
        };
        owner.accounts.iter_mut().map(write).collect()
    }

    /// The [`LedgerRecord`]s are written: their grants may be sent to gateways.
    pub fn written(&mut self, document: &DocumentId, writes: &[RecordWrite], now: Timestamp) {
        let Some(owner) = self.documents.get_mut(document) else {
            return;
        };
        for write in writes {
            if let Some(entry) = owner.accounts.get_mut(&write.part) {
                entry.account.confirm_record(&write.record);
            }
        }
        (owner.writing, owner.wrote) = (false, now);
        owner.urgent &= owner.is_changed();
    }

    /// The [`LedgerRecord`]s are certainly not written, and will not be.
    pub fn not_written(&mut self, document: &DocumentId) {
        if let Some(owner) = self.documents.get_mut(document) {
            (owner.writing, owner.urgent) = (false, true);
            for entry in owner.accounts.values_mut() {
                entry.account.discard_record();
            }
        }
    }

    /// Counts everything that the gateways of a lost record hold as spent. Returns the amount lost.
    pub fn forfeit(&mut self, account: &str, record: &str, now: Timestamp) -> Amount {
        let lost = self.update_entry(account, now, |entry| entry.account.forfeit(record, now));
        lost.unwrap_or_default()
    }

    /// The Agent no longer draws on this account, so it no longer waits there.
    pub fn withdraw(&mut self, account: &str, agent: &NamespacedName, now: Timestamp) {
        self.update_entry(account, now, |entry| entry.withdraw(agent));
    }

    /// Advances the time of [`AccountEntry`]s that have waiters, that recall leases, or that count usage that may
    /// expire.
    pub fn tick(&mut self, now: Timestamp) {
        let changes_with_time = |entry: &AccountEntry| {
            let account = &entry.account;
            let moves = !matches!(account.terms().window, WindowRule::Lifetime) && !account.used().is_zero();
            moves || !entry.blocked.is_empty() || account.recalls()
        };
        let accounts: Vec<AccountId> = self
            .index
            .iter()
            .filter(|(_, (document, part))| {
                let owner = self.documents.get(document);
                owner
                    .and_then(|owner| owner.accounts.get(part))
                    .is_some_and(changes_with_time)
            })
            .map(|(account, _)| account.clone())
            .collect();
        for account in accounts {
            self.update_entry(&account, now, |_| ());
        }
    }

    /// The [`AccountEntry`]s with changes for gateways since the last call.
    pub fn take_changed(&mut self) -> BTreeSet<AccountId> {
        std::mem::take(&mut self.changed)
    }

    /// An [`AccountEntry`] and its document.
    #[must_use]
    pub fn entry(&self, account: &str) -> Option<(&DocumentId, &AccountEntry)> {
        let (document, part) = self.index.get(account)?;
        Some((document, self.documents.get(document)?.accounts.get(part)?))
    }

    #[must_use]
    pub fn document(&self, id: &DocumentId) -> Option<&LedgerDocument> {
        self.documents.get(id)
    }

    #[must_use]
    pub fn documents(&self) -> &BTreeMap<DocumentId, LedgerDocument> {
        &self.documents
    }

    /// Marks a document for an immediate write, because a person or a call waits for it.
    fn mark_urgent(&mut self, account: &str) {
        if let Some((document, _)) = self.index.get(account)
            && let Some(owner) = self.documents.get_mut(document)
        {
            owner.urgent = true;
        }
    }

    /// Changes an [`AccountEntry`], and notes whether gateways must learn about it.
    fn update_entry<T>(
        &mut self,
        account: &str,
        now: Timestamp,
        change: impl FnOnce(&mut AccountEntry) -> T,
    ) -> Option<T> {
        let (document, part) = self.index.get(account)?;
        let entry = self.documents.get_mut(document)?.accounts.get_mut(part)?;
        let shown = |entry: &AccountEntry| {
            (
                entry.account.limits(),
                entry.account.per_agent(),
                entry.account.recalls(),
            )
        };
        let before = (shown(entry), entry.revision);
        // Time first, so that the change is made in the current window; then waiters are released, which changes the
        // revision and makes their gateways retry.
        entry.account.advance(now);
        let result = change(entry);
        entry.release_blocked();
        if before != (shown(entry), entry.revision) {
            self.changed.insert(account.to_owned());
        }
        Some(result)
    }
}

fn is_due(document: &LedgerDocument, now: Timestamp) -> bool {
    document.is_changed() && (document.urgent || now.duration_since(document.wrote) >= WRITE_INTERVAL)
}

fn milliseconds(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.duration_since(from).as_millis()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;

    use super::*;
    use crate::api::amount::AmountKind;
    use crate::api::budget::CalendarPeriod;
    use crate::ledger::account::{GrantRequest, LeaseStatement};

    const START: Timestamp = Timestamp::constant(1_800_000_000, 0);

    fn at(seconds: i64) -> Timestamp {
        START + SignedDuration::from_secs(seconds)
    }

    fn tokens(tokens: i64) -> Amount {
        Amount { tokens, ..Amount::ZERO }
    }

    fn terms(limit: i64) -> LedgerTerms {
        LedgerTerms {
            limits: LimitAmounts {
                tokens: Some(limit),
                ..LimitAmounts::default()
            },
            per_agent: LimitAmounts::default(),
            window: WindowRule::Rolling(SignedDuration::from_hours(1)),
        }
    }

    fn budget(uid: &str) -> DocumentId {
        DocumentId {
            kind: DocumentKind::Budget,
            object: NamespacedName::new("ns", "team"),
            uid: uid.into(),
        }
    }

    fn holder(agent: &str) -> LeaseHolder {
        LeaseHolder {
            record: format!("record-of-{agent}"),
            agent: NamespacedName::new("ns", agent),
            pod_uid: format!("pod-of-{agent}"),
            epoch: 1,
        }
    }

    fn asking(account: &str, least: i64, statements: Vec<LeaseStatement>) -> LeaseRequest {
        let ask = GrantRequest {
            lease: statements.first().map(|statement| statement.lease),
            open: Amount::ZERO,
            least: tokens(least),
            full: tokens(least.max(100)),
        };
        LeaseRequest {
            accounts: vec![AccountRequest {
                account: account.into(),
                statements,
                ask: Some(ask),
            }],
            ..LeaseRequest::default()
        }
    }

    fn saying(account: &str, lease: i64, spent: i64, returned: i64) -> LeaseRequest {
        LeaseRequest {
            accounts: vec![AccountRequest {
                account: account.into(),
                statements: vec![LeaseStatement {
                    lease,
                    spent: tokens(spent),
                    returned: tokens(returned),
                    closed: true,
                }],
                ask: None,
            }],
            ..LeaseRequest::default()
        }
    }

    fn book(limit: i64) -> AccountBook {
        let mut book = AccountBook::default();
        book.load(&budget("b"), DocumentPart::Budget, terms(limit), None, START);
        book.take_changed();
        book
    }

    fn write(book: &mut AccountBook, seconds: i64) -> Vec<RecordWrite> {
        let writes = book.compose(&budget("b"), at(seconds));
        book.written(&budget("b"), &writes, at(seconds));
        writes
    }

    #[test]
    fn a_grant_is_returned_only_once_it_is_written() {
        let mut book = book(1000);
        let (holder, request) = (holder("a"), asking("b", 100, vec![]));
        let pending = book.apply_request(&holder, |_| true, &request, at(1));
        assert_eq!(
            book.must_wait(&holder, &request, &pending),
            BTreeSet::from([budget("b")])
        );
        let granted = |book: &AccountBook| book.response(&holder, &request, pending.clone()).accounts[0].clone();
        assert_eq!(granted(&book).leases, [], "nothing is granted before the write");
        assert_eq!(book.due(at(1)), [budget("b")], "a call waits");
        let writes = book.compose(&budget("b"), at(1));
        assert_eq!(book.due(at(1)), [], "one write at a time");
        assert_eq!((writes[0].over, writes[0].record.epoch), (0, 1));
        book.written(&budget("b"), &writes, at(1));
        assert!(book.must_wait(&holder, &request, &pending).is_empty());
        let told = granted(&book);
        assert!(told.leases[0].granted.covers(&tokens(100)), "{told:?}");
        assert_eq!((told.epoch, told.leases[0].valid_milliseconds), (1, None));
        assert_eq!(book.due(at(1000)), [], "nothing changed since");
    }

    #[test]
    fn a_lease_that_its_gateway_did_not_report_ends_with_its_window_too() {
        let mut book = AccountBook::default();
        let daily = LedgerTerms {
            window: WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::UTC),
            ..terms(1000)
        };
        book.load(&budget("b"), DocumentPart::Budget, daily, None, START);
        let (holder, nothing) = (holder("a"), LeaseRequest::default());
        book.apply_request(&holder, |_| true, &asking("b", 100, vec![]), at(1));
        write(&mut book, 1);
        let pending = book.apply_request(&holder, |_| true, &nothing, at(100));
        let lease = &book.response(&holder, &nothing, pending.clone()).accounts[0].leases[0];
        // It is eight in the morning.
        assert_eq!(lease.valid_milliseconds, Some((16 * 3600 - 100) * 1000));
    }

    #[test]
    fn unawaited_changes_are_written_every_fifteen_seconds_and_an_idle_account_never() {
        let mut book = book(1000);
        book.apply_request(&holder("a"), |_| true, &asking("b", 100, vec![]), at(1));
        write(&mut book, 1);
        book.apply_request(&holder("a"), |_| true, &saying("b", 1, 50, 0), at(2));
        assert_eq!(book.due(at(15)), []);
        assert_eq!(book.due(at(16)), [budget("b")]);
        write(&mut book, 16);
        assert_eq!(book.due(at(10_000)), []);
    }

    #[test]
    fn a_request_in_advance_does_not_wait_and_causes_no_write_of_its_own() {
        let mut book = book(1000);
        let (holder, request) = (holder("a"), asking("b", 0, vec![]));
        let pending = book.apply_request(&holder, |_| true, &request, at(1));
        assert!(book.must_wait(&holder, &request, &pending).is_empty());
        assert_eq!((book.due(at(14)).len(), book.due(at(15)).len()), (0, 1));
        write(&mut book, 15);
        let lease = &book.response(&holder, &request, pending.clone()).accounts[0].leases[0];
        assert!(lease.granted.covers(&tokens(100)));
    }

    #[test]
    fn a_write_that_certainly_failed_is_made_again_at_once() {
        let mut book = book(1000);
        book.apply_request(&holder("a"), |_| true, &asking("b", 100, vec![]), at(1));
        book.compose(&budget("b"), at(1));
        book.not_written(&budget("b"));
        assert_eq!(book.due(at(1)), [budget("b")]);
        assert_eq!(book.compose(&budget("b"), at(1))[0].over, 0);
    }

    #[test]
    fn a_returned_lease_notifies_the_refused_agent() {
        let mut book = book(150);
        let (a, b) = (holder("a"), holder("b"));
        book.apply_request(&a, |_| true, &asking("b", 100, vec![]), at(1));
        write(&mut book, 1);
        let request = asking("b", 100, vec![]);
        let pending = book.apply_request(&b, |_| true, &request, at(2));
        let refused = book.response(&b, &request, pending.clone()).accounts[0]
            .refused
            .clone()
            .unwrap();
        assert!(refused.contended);
        let entry = |book: &AccountBook| book.entry("b").unwrap().1.clone();
        assert!(entry(&book).account().recalls(), "a must return what it does not need");
        assert_eq!(
            entry(&book).exhausted(2),
            None,
            "not exhausted while others hold enough"
        );
        let before = entry(&book).revision();
        book.take_changed();
        book.apply_request(&a, |_| true, &saying("b", 1, 10, 140), at(3));
        assert_eq!(entry(&book).revision(), before + 1);
        assert_eq!(book.take_changed(), BTreeSet::from(["b".to_owned()]));
        assert!(entry(&book).blocked().is_empty());
        book.apply_request(&a, |_| true, &saying("b", 1, 10, 140), at(4));
        assert_eq!(
            entry(&book).revision(),
            before + 1,
            "a repeated statement changes nothing"
        );
    }

    #[test]
    fn a_spent_account_names_the_refused_agent_and_the_time_of_its_reset() {
        let mut book = book(100);
        book.apply_request(&holder("a"), |_| true, &asking("b", 100, vec![]), at(1));
        write(&mut book, 1);
        book.apply_request(&holder("a"), |_| true, &saying("b", 1, 100, 0), at(2));
        book.apply_request(&holder("b"), |_| true, &asking("b", 10, vec![]), at(3));
        let entry = book.entry("b").unwrap().1.clone();
        let (agent, blocked) = entry.exhausted(2).unwrap();
        assert_eq!((agent.name.as_str(), blocked.refused.kind), ("b", AmountKind::Tokens));
        let resets = blocked.refused.resets_at.unwrap();
        assert!(resets > at(3600) && resets <= at(3600 + 62), "{resets}");
        book.tick(resets - SignedDuration::from_nanos(1));
        assert!(book.entry("b").unwrap().1.exhausted(2).is_some());
        book.tick(resets);
        assert_eq!(book.entry("b").unwrap().1.exhausted(2), None);
    }

    #[test]
    fn a_budget_is_not_exhausted_because_a_single_large_call_was_refused() {
        let mut book = book(1000);
        book.apply_request(&holder("a"), |_| true, &asking("b", 600, vec![]), at(1));
        write(&mut book, 1);
        book.apply_request(&holder("a"), |_| true, &saying("b", 1, 600, 400), at(2));
        write(&mut book, 2);
        let refused = |book: &mut AccountBook, name: &str, least: i64, seconds: i64| {
            let request = asking("b", least, vec![]);
            let pending = book.apply_request(&holder(name), |_| true, &request, at(seconds));
            book.response(&holder(name), &request, pending.clone()).accounts[0]
                .refused
                .is_some()
        };
        let exhausted = |book: &AccountBook, agents| book.entry("b").unwrap().1.exhausted(agents).is_some();
        assert!(refused(&mut book, "large", 450, 3));
        assert!(
            !exhausted(&book, 50),
            "40 % are left, and only two of fifty have requested"
        );
        assert!(exhausted(&book, 2), "no Agent that draws on it has room");
        assert!(!refused(&mut book, "small", 100, 4));
        assert!(!exhausted(&book, 3), "the small call has room");
        assert!(!exhausted(&book, 50));
        // The small one spends until its own calls no longer fit: less than a quarter is left, and less than any call
        // needs.
        write(&mut book, 4);
        book.apply_request(&holder("small"), |_| true, &saying("b", 2, 310, 1000), at(35));
        assert!(
            exhausted(&book, 50),
            "90 are left, and every request was for at least 100"
        );
        book.withdraw("b", &holder("small").agent, at(37));
        book.withdraw("b", &holder("large").agent, at(37));
        assert!(!exhausted(&book, 50));
    }

    /// A budget of which 10 % are left, with a request for `least` refused at this time.
    fn nearly_spent(least: i64, seconds: i64) -> AccountBook {
        let mut book = book(1000);
        book.apply_request(&holder("a"), |_| true, &asking("b", 900, vec![]), at(1));
        write(&mut book, 1);
        book.apply_request(&holder("a"), |_| true, &saying("b", 1, 900, 100), at(2));
        write(&mut book, 2);
        book.apply_request(&holder("large"), |_| true, &asking("b", least, vec![]), at(seconds));
        book
    }

    #[test]
    fn in_the_first_half_minute_of_a_leader_a_budget_is_exhausted_only_if_all_have_requested() {
        for (seconds, spent) in [(29, false), (30, true)] {
            let book = nearly_spent(150, seconds);
            let entry = book.entry("b").unwrap().1;
            assert_eq!(entry.exhausted(50).is_some(), spent, "after {seconds} s");
            assert!(entry.exhausted(2).is_some(), "both have requested");
        }
    }

    #[test]
    fn a_sleeping_agent_with_a_small_request_does_not_hide_an_exhausted_budget() {
        let mut book = nearly_spent(150, 40);
        book.apply_request(&holder("small"), |_| true, &asking("b", 30, vec![]), at(41));
        write(&mut book, 41);
        let exhausted = |book: &AccountBook| book.entry("b").unwrap().1.exhausted(50).is_some();
        assert!(!exhausted(&book), "the small one holds a lease and continues");
        book.apply_request(&holder("small"), |_| true, &saying("b", 2, 10, 20), at(42));
        assert!(exhausted(&book), "no Agent that is awake has room");
    }

    #[test]
    fn accounts_that_no_longer_apply_accept_statements_and_grant_nothing() {
        let mut book = book(1000);
        let holder = holder("a");
        book.apply_request(&holder, |_| true, &asking("b", 100, vec![]), at(1));
        write(&mut book, 1);
        let mut request = saying("b", 1, 40, 60);
        request.accounts[0].ask = asking("b", 100, vec![]).accounts[0].ask.clone();
        let pending = book.apply_request(&holder, |_| false, &request, at(2));
        assert!(book.must_wait(&holder, &request, &pending).is_empty());
        let account = book.entry("b").unwrap().1.account().clone();
        assert_eq!((account.used(), account.reserved()), (tokens(40), Amount::ZERO));
    }

    #[test]
    fn the_gateway_of_another_agent_cannot_report_a_lease() {
        let mut book = book(1000);
        book.apply_request(&holder("a"), |_| true, &asking("b", 100, vec![]), at(1));
        write(&mut book, 1);
        let thief = LeaseHolder {
            record: "record-of-a".into(),
            ..holder("thief")
        };
        book.apply_request(&thief, |_| true, &saying("b", 1, 0, 1000), at(2));
        let account = book.entry("b").unwrap().1.account().clone();
        assert!(account.reserved().covers(&tokens(100)));
    }

    #[test]
    fn a_deleted_budget_answers_with_the_final_epoch_and_an_unknown_account_with_none() {
        let mut book = book(1000);
        let holder = holder("a");
        book.apply_request(&holder, |_| true, &asking("b", 100, vec![]), at(1));
        write(&mut book, 1);
        book.remove(&budget("b"));
        assert_eq!(book.take_changed(), BTreeSet::from(["b".to_owned()]));
        for (account, word, forgotten) in [("b", DELETED_EPOCH, vec![1]), ("unknown", 0, vec![])] {
            let request = saying(account, 1, 40, 0);
            let pending = book.apply_request(&holder, |_| false, &request, at(2));
            let answer = book.response(&holder, &request, pending.clone()).accounts[0].clone();
            assert_eq!((answer.epoch, answer.forgotten), (word, forgotten), "{account}");
        }
        book.load(&budget("b2"), DocumentPart::Budget, terms(1000), None, at(3));
        assert_eq!(book.entry("b2").unwrap().1.account().used(), Amount::ZERO);
    }

    #[test]
    fn a_gateway_receives_every_lease_it_holds_whatever_it_reports() {
        let mut book = book(1000);
        let other = DocumentId {
            object: NamespacedName::new("ns", "other"),
            ..budget("o")
        };
        book.load(&other, DocumentPart::Budget, terms(1000), None, START);
        let holder = holder("a");
        // The answer is lost, and the Agent no longer draws on the account.
        book.apply_request(&holder, |_| true, &asking("b", 100, vec![]), at(1));
        write(&mut book, 1);
        let next = |book: &mut AccountBook, request: &LeaseRequest| {
            let pending = book.apply_request(&holder, |account| account == "o", request, at(2));
            book.response(&holder, request, pending.clone())
        };
        for request in [LeaseRequest::default(), saying("o", 7, 0, 0)] {
            let answer = next(&mut book, &request);
            let told = answer.accounts.iter().find(|told| told.account == "b").unwrap();
            assert_eq!((told.leases[0].lease, told.epoch), (1, 1));
        }
        assert_eq!(next(&mut book, &saying("b", 1, 0, 1000)).accounts.len(), 1);
        assert_eq!(next(&mut book, &LeaseRequest::default()).accounts, [], "returned");
        assert_eq!(book.entry("b").unwrap().1.account().reserved(), Amount::ZERO);
    }

    #[test]
    fn the_next_leader_informs_a_gateway_of_leases_it_does_not_know() {
        let mut old = book(1000);
        old.apply_request(&holder("a"), |_| true, &asking("b", 100, vec![]), at(1));
        let record = write(&mut old, 1).remove(0).record;
        let mut new = AccountBook::default();
        new.load(&budget("b"), DocumentPart::Budget, terms(1000), Some(&record), at(5));
        let request = LeaseRequest::default();
        let pending = new.apply_request(&holder("a"), |_| false, &request, at(6));
        assert_eq!(
            new.response(&holder("a"), &request, pending.clone()).accounts[0].leases[0].lease,
            1
        );
        let pending = new.apply_request(&holder("b"), |_| false, &request, at(6));
        assert_eq!(new.response(&holder("b"), &request, pending.clone()).accounts, []);
    }

    #[test]
    fn a_budget_deleted_without_a_leader_is_forgotten_after_it_was_missing_for_a_minute() {
        let mut book = AccountBook::default();
        let (holder, request) = (holder("a"), saying("b", 1, 40, 0));
        let mut speak = |there: bool, seconds: i64| {
            book.track_missing(&holder.agent, &request, |_| there, at(seconds));
            let pending = book.apply_request(&holder, |_| false, &request, at(seconds));
            book.response(&holder, &request, pending.clone()).accounts[0]
                .forgotten
                .len()
        };
        assert_eq!((speak(false, 0), speak(false, 59)), (0, 0));
        // Seen meanwhile: the wait starts over from then on.
        assert_eq!((speak(true, 60), speak(false, 61), speak(false, 120)), (0, 0, 0));
        assert_eq!((speak(false, 121), speak(false, 122)), (1, 1));
        let told = |book: &AccountBook| {
            book.response(&holder, &request, PendingLeaseResponse::default())
                .accounts[0]
                .epoch
        };
        assert_eq!(told(&book), DELETED_EPOCH);
    }

    #[test]
    fn what_a_gateway_states_of_missing_accounts_takes_no_room_of_others() {
        let mut book = AccountBook::default();
        let other = NamespacedName::new("other", "flood");
        book.track_missing(&holder("a").agent, &saying("b", 1, 40, 0), |_| false, at(0));
        for number in 0..20_000 {
            book.track_missing(
                &other,
                &saying(&format!("made-up-{number}"), 1, 40, 0),
                |_| false,
                at(1),
            );
        }
        book.track_missing(&other, &saying("b", 1, 40, 0), |_| false, at(2));
        assert_eq!(
            (book.missing.len(), book.missing[&other].len(), book.gone.len()),
            (2, 1, 0)
        );
        book.track_missing(&holder("a").agent, &saying("b", 1, 40, 0), |_| false, at(60));
        book.track_missing(&other, &saying("b", 1, 40, 0), |_| false, at(61));
        assert!(book.is_gone(&holder("a").agent, "b") && !book.is_gone(&other, "b"));
        book.remove(&DocumentId {
            kind: DocumentKind::Agent,
            object: other.clone(),
            uid: "uid".into(),
        });
        assert!(!book.missing.contains_key(&other));
    }

    #[test]
    fn the_missing_accounts_of_an_agent_are_limited_and_the_others_follow() {
        let mut book = AccountBook::default();
        let agent = holder("a").agent;
        let stating = |numbers: std::ops::Range<usize>| {
            let parts = numbers.flat_map(|number| saying(&format!("{number:03}"), 1, 40, 0).accounts);
            LeaseRequest {
                accounts: parts.collect(),
                ..saying("b", 1, 40, 0)
            }
        };
        let count = |book: &AccountBook| book.missing[&agent].len();
        book.track_missing(&agent, &stating(1..64), |_| false, at(0));
        assert_eq!(count(&book), 63);
        book.track_missing(&agent, &stating(1..65), |_| false, at(0));
        assert_eq!(count(&book), 64);
        // Those that are known keep their place, whatever the request names first.
        book.track_missing(&agent, &stating(0..200), |_| false, at(60));
        assert_eq!(count(&book), 64);
        assert!(book.is_gone(&agent, "001") && book.is_gone(&agent, "064") && !book.is_gone(&agent, "000"));
        // The gateway states those that are gone no more.
        book.track_missing(&agent, &stating(65..200), |_| false, at(61));
        book.track_missing(&agent, &stating(65..200), |_| false, at(121));
        assert!(book.is_gone(&agent, "065") && book.is_gone(&agent, "128") && !book.is_gone(&agent, "129"));
    }

    #[test]
    fn leases_that_are_unknown_are_forgotten_once_however_often_their_account_is_named() {
        let mut book = book(1000);
        let part = |statements: Vec<LeaseStatement>| AccountRequest {
            account: "b".into(),
            statements,
            ask: None,
        };
        let unknown = (1..=1_000).map(|lease| LeaseStatement {
            lease,
            spent: Amount::ZERO,
            returned: Amount::ZERO,
            closed: true,
        });
        let mut accounts = vec![part(vec![]); 1_000];
        accounts.push(part(unknown.collect()));
        let request = LeaseRequest {
            accounts,
            ..LeaseRequest::default()
        };
        let pending = book.apply_request(&holder("a"), |_| true, &request, at(1));
        let answer = book.response(&holder("a"), &request, pending);
        let forgotten = answer.accounts.iter().map(|account| account.forgotten.len());
        assert_eq!(forgotten.sum::<usize>(), 1_000);
    }

    #[test]
    fn the_next_leader_counts_every_holder_until_its_gateway_reports() {
        let mut old = book(1000);
        let holder = holder("a");
        old.apply_request(&holder, |_| true, &asking("b", 100, vec![]), at(1));
        let record = write(&mut old, 1).remove(0).record;
        let held = old.entry("b").unwrap().1.account().reserved();
        let mut new = AccountBook::default();
        new.load(&budget("b"), DocumentPart::Budget, terms(1000), Some(&record), at(5));
        assert_eq!(new.due(at(1000)), [], "taking over writes nothing");
        let entry = |book: &AccountBook| book.entry("b").unwrap().1.clone();
        assert_eq!(entry(&new).account().reserved(), held);
        assert_eq!(entry(&new).remaining().tokens, Some(1000 - held.tokens));
        new.apply_request(&holder, |_| true, &saying("b", 1, 30, 0), at(6));
        assert_eq!(
            (entry(&new).account().used(), entry(&new).account().reserved()),
            (tokens(30), Amount::ZERO)
        );
        assert_eq!(new.compose(&budget("b"), at(6))[0].over, 1);
    }

    #[test]
    fn an_agents_two_accounts_are_one_document() {
        let agent = DocumentId {
            kind: DocumentKind::Agent,
            ..budget("agent")
        };
        let mut book = AccountBook::default();
        book.load(&agent, DocumentPart::TokensPerHour, terms(1000), None, START);
        book.load(&agent, DocumentPart::Total, terms(1000), None, START);
        book.apply_request(&holder("a"), |_| true, &asking("agent/total", 100, vec![]), at(1));
        assert_eq!(book.due(at(1)), std::slice::from_ref(&agent));
        let parts: Vec<DocumentPart> = book.compose(&agent, at(1)).iter().map(|write| write.part).collect();
        assert_eq!(parts, [DocumentPart::TokensPerHour, DocumentPart::Total]);
    }
}
