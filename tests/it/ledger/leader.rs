//! The glue around an [`Account`], in the order that the promise rests on, without clock and network:
//!
//! 1. **plan**: [`Book::request`] hears and asks. What it grants is in memory only, and nobody is told.
//! 2. **write**: [`Book::plan`] gives the record that is to be written over exactly the epoch before; one at a time.
//! 3. **written**: [`Book::written`], once the API server has said so. Only now the grants of that record count as
//!    said: the answers that waited for it speak of what is written and no more.
//! 4. **answer**: an [`Answer`]. A request that was granted nothing new is answered at once, from what is written.
//!
//! A conflict is the end: another leader wrote. Whoever leads next reads the record and knows nothing else.

use agentloop::api::budget::LedgerRecord;
use agentloop::ledger::account::{Account, Ask, Granted, LeaseId, Refused, Statement, Terms, Who};
use jiff::Timestamp;

use super::mutation::Mutation;

/// A gateway's request about one account.
#[derive(Clone, Debug)]
pub struct Request {
    /// Who asks.
    pub who: Who,
    /// Where the answer goes.
    pub gateway: usize,
    /// What became of each lease.
    pub statements: Vec<Statement>,
    /// What it needs.
    pub ask: Option<Ask>,
    /// When it was sent, by the gateway's boot-time clock; comes back with the answer, as with an HTTP request.
    pub sent: i64,
}

/// The leader's word to one gateway about one account.
#[derive(Clone, Debug)]
pub struct Answer {
    /// To whom.
    pub gateway: usize,
    /// To which record of it.
    pub record: String,
    /// From which record it speaks.
    pub epoch: i64,
    /// All leases, each with the milliseconds for which it may be used.
    pub leases: Vec<(Granted, Option<i64>)>,
    /// Leases that the leader knows nothing of (any more).
    pub forgotten: Vec<LeaseId>,
    /// When the request was sent.
    pub sent: i64,
    /// Why it gets no more.
    pub refused: Option<Refused>,
}

#[derive(Clone, Debug)]
struct Parked {
    request: Request,
    forgotten: Vec<LeaseId>,
}

/// One account of a leader.
#[derive(Clone, Debug)]
pub struct Book {
    /// The account.
    pub account: Account,
    /// The record that is under way to the API server.
    in_flight: Option<LedgerRecord>,
    /// Requests that wait for what they planned to be written: for the record under way, and for the next one.
    waiting: Vec<Parked>,
    next: Vec<Parked>,
}

impl Book {
    /// A leader takes over what the last one wrote.
    pub fn take_over(terms: Terms, record: Option<&LedgerRecord>, now: Timestamp) -> Self {
        Self {
            account: Account::restore(terms, record.unwrap_or(&LedgerRecord::default()), now),
            in_flight: None,
            waiting: Vec::new(),
            next: Vec::new(),
        }
    }

    /// Plans. The answer comes at once when it needs no write.
    pub fn request(&mut self, request: &Request, now: Timestamp, mutation: Mutation) -> Option<Answer> {
        let mut forgotten = Vec::new();
        for statement in &request.statements {
            let known = self.account.hear(&request.who, statement, now);
            // Known, but closed: whoever breaks the rule forgets it before that is written.
            if !known || (statement.closed && mutation == Mutation::ForgetClosedEarly) {
                forgotten.push(statement.lease);
            }
        }
        let before = self.account.is_urgent();
        let asked = request.ask.as_ref().map(|ask| self.account.ask(&request.who, ask, now));
        let refused = asked.and_then(Result::err);
        if refused.is_none() && request.ask.is_some() && (before || self.account.is_urgent()) {
            self.next.push(Parked {
                request: request.clone(),
                forgotten,
            });
            return None;
        }
        Some(self.answer(request, forgotten, refused, now))
    }

    /// What is to be written now over [`Account::epoch`]. `None`: nothing changed, or a write is under way.
    pub fn plan(&mut self, now: Timestamp) -> Option<LedgerRecord> {
        if self.in_flight.is_some() || !self.account.is_changed() {
            return None;
        }
        self.account.advance(now);
        let record = self.account.record();
        self.in_flight = Some(record.clone());
        self.waiting.append(&mut self.next);
        Some(record)
    }

    /// The record under way.
    pub fn in_flight(&self) -> Option<&LedgerRecord> {
        self.in_flight.as_ref()
    }

    /// No word of the write: another is tried, over the same epoch. One of them at most can be written.
    pub fn give_up_waiting(&mut self) {
        self.in_flight = None;
    }

    /// The API server has the record under way. The answers that may be given now.
    pub fn written(&mut self, now: Timestamp) -> Vec<Answer> {
        let Some(record) = self.in_flight.take() else {
            return Vec::new();
        };
        self.account.written(&record);
        self.answer_all(now)
    }

    /// Tells what is planned before it is written. Wrong; the simulation must notice.
    pub fn tell_early(&mut self, mutation: Mutation, record: &LedgerRecord, now: Timestamp) -> Vec<Answer> {
        assert_eq!(mutation, Mutation::TellBeforeWrite);
        let mut imagined = self.clone();
        imagined.account.written(record);
        self.waiting.clear();
        imagined.answer_all(now)
    }

    fn answer_all(&mut self, now: Timestamp) -> Vec<Answer> {
        let waiting = std::mem::take(&mut self.waiting);
        let answer = |parked: Parked| self.answer(&parked.request, parked.forgotten, None, now);
        waiting.into_iter().map(answer).collect()
    }

    /// What is written of a gateway's leases.
    fn answer(
        &self,
        request: &Request,
        forgotten: Vec<LeaseId>,
        refused: Option<Refused>,
        now: Timestamp,
    ) -> Answer {
        let time = self.account.time().max(now);
        let valid = |granted: Granted| {
            let left = granted
                .ends
                .map(|end| (end.as_millisecond() - time.as_millisecond()).max(0));
            (granted, left)
        };
        let leases = self.account.leases_of(&request.who.record);
        Answer {
            gateway: request.gateway,
            record: request.who.record.clone(),
            epoch: self.account.epoch(),
            leases: leases.into_iter().map(valid).collect(),
            forgotten,
            sent: request.sent,
            refused,
        }
    }
}
