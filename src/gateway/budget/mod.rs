//! No call without room: reserves each call's worst case in what the gateway holds, asks the leader for more, and
//! settles to the bill.
//!
//! Owns the decision whether a call may be paid for, and the conversation about leases. What is held and what is open
//! is the record's ([`Store`]): it is on disk before it is said or spent. Closed, not open: terms that are not known
//! are no terms, and what the gateway does not hold it does not spend.

mod clock;
mod keep;
mod plan;
mod pulse;
mod words;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::{Mutex as Turn, watch};
use tokio::time::{Instant, timeout, timeout_at};

use self::clock::Clock;
use self::keep::{Pace, Wish};
use self::plan::{Plan, draws};
use self::pulse::Beats;
use super::calls::not_recorded;
use super::contact::Contact;
use super::failures::{failure, of_purpose};
use super::store::{Basis, Begun, Call, Metered, Models, Store, Violation};
use super::upstream::Prepared;
use crate::api::amount::Amount;
use crate::api::failure::{Failure, FailureKind};
use crate::engine::Purpose;
use crate::ledger::bound::{Part, Previous};
use crate::ledger::price::Rates;
use crate::ledger::wallet::{Reservation, Wallet};
use crate::link::client::{LinkClient, LinkError};
use crate::link::messages::{BudgetTerms, LeaseAnswer, Pulse};

/// How long a call waits for room that others may give back, or for a leader that does not answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two questions while it waits.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// When a call that the leader left without an answer is worth another try.
const TRY_AGAIN: jiff::SignedDuration = jiff::SignedDuration::from_secs(15);

/// What pays for the calls of this gateway.
pub struct Budget {
    store: Arc<Store>,
    contact: Arc<Contact>,
    client: Arc<LinkClient>,
    epoch: i64,
    models: Models,
    clock: Clock,
    /// One question to the leader at a time.
    turn: Turn<()>,
    pace: Mutex<Pace>,
    stirred: watch::Sender<()>,
    beats: Mutex<Beats>,
}

/// What a call holds until it is settled.
pub struct Hold {
    /// Of the wallet.
    pub reservation: Reservation,
    rates: Option<Rates>,
    /// What the call can cost at most by its bytes alone; `None`: its reservation rests on nothing else.
    afresh: Option<Amount>,
    parts: Vec<Part>,
    exact: bool,
    purpose: Purpose,
}

/// How a call waits for room.
struct Wait {
    deadline: Instant,
    /// The leader was asked at least once.
    asked: bool,
    /// What went wrong when it was asked last.
    trouble: Option<String>,
}

/// What a call came to.
pub struct Charge {
    /// What it counts in the limits.
    pub amount: Amount,
    /// What it cost in micro-dollars by the server's bill; `None`: there is no bill, or no price.
    pub cost: Option<i64>,
    /// Set when it is above the bound.
    pub violation: Option<Violation>,
    /// What the next bound rests on; `None`: as before.
    pub basis: Option<Basis>,
}

/// A call is under way, from its wish for room until it is settled.
pub struct Busy(Arc<Budget>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.pace().rest();
        self.0.stirred.send_replace(());
    }
}

impl Budget {
    /// Of this record, for calls of these models.
    pub fn new(store: Arc<Store>, contact: Arc<Contact>, client: Arc<LinkClient>, epoch: i64, models: Models) -> Self {
        let pace = Mutex::new(Pace::new(store.is_restored()));
        Self {
            store,
            contact,
            client,
            epoch,
            models,
            clock: Clock::start(),
            turn: Turn::new(()),
            pace,
            stirred: watch::Sender::default(),
            beats: Mutex::default(),
        }
    }

    /// Notes that a call is under way.
    pub fn busy(self: &Arc<Self>) -> Busy {
        self.pace().work();
        Busy(Arc::clone(self))
    }

    /// Reserves what the call may cost, and records it as open. Lowers its output limit to what there is room for. May
    /// be dropped at any await: nothing is held then.
    pub async fn hold(&self, call: Call, request: &mut Prepared) -> Result<Hold, Failure> {
        self.pace().wait();
        let held = self.reserve(call, request).await;
        self.pace().waited(held.as_ref().ok().map(|(_, full)| *full));
        if let Err(failure) = &held
            && failure.kind.is_of_a_budget()
        {
            self.store.count(|budget| budget.refused_calls += 1);
        }
        held.map(|(hold, _)| hold)
    }

    /// The hold, and what the call was to have at most.
    async fn reserve(&self, call: Call, request: &mut Prepared) -> Result<(Hold, Amount), Failure> {
        let mut wait = Wait {
            deadline: Instant::now() + PATIENCE,
            asked: false,
            trouble: None,
        };
        let parts = plan::parts(request);
        loop {
            let terms = self.terms(wait.deadline).await?;
            self.check(&terms)?;
            // Requests to a light model do not go on from each other: their bound rests on their bytes alone.
            let is_light = call.purpose.uses_light_model();
            let previous = self.store.basis().previous.filter(|_| !is_light);
            let model = self.models.of(call.purpose);
            let priced = (model, terms.prices.get(model));
            let plan = Plan::new(&terms, priced, request, &parts, previous.as_deref())?;
            let draws = draws(&terms);
            let now = self.clock.now();
            let mut amount = plan.full;
            let short = |wallet: &Wallet| draws.iter().any(|draw| wallet.lacking(draw, &plan.full, now).is_some());
            if wait.asked && self.store.look(short) {
                // More is not to be had: a shorter answer, where that is still one.
                if let Some((output, clipped)) = self.store.look(|wallet| plan.fitting(&draws, wallet, now)) {
                    request.limit_output(output);
                    amount = clipped;
                }
            }
            let begun = self.store.begin(call, (&draws, &amount), now, Timestamp::now());
            match begun.map_err(|error| not_recorded(&error))? {
                Begun::Held(reservation) => {
                    let hold = Hold {
                        reservation,
                        rates: plan.rates,
                        afresh: previous.and_then(|_| plan.afresh(request.max_output())),
                        parts,
                        exact: request.exact_bill().is_some(),
                        purpose: call.purpose,
                    };
                    return Ok((hold, plan.full));
                }
                Begun::Short(_) => self.more(&terms, &plan, &mut wait).await?,
            }
        }
    }

    /// Asks for more, or waits for it; an error when none is to be had.
    async fn more(&self, terms: &BudgetTerms, plan: &Plan, wait: &mut Wait) -> Result<(), Failure> {
        let late = Instant::now() >= wait.deadline;
        if let Some(trouble) = wait.trouble.as_ref().filter(|_| late) {
            return Err(Failure {
                resumes_at: Timestamp::now().checked_add(TRY_AGAIN).ok(),
                ..words::no_answer(trouble)
            });
        }
        let mut news = self.contact.subscribe();
        let wish = Wish {
            least: plan.least,
            full: plan.full,
        };
        let again = std::mem::replace(&mut wait.asked, true);
        let limit = wait.deadline.max(Instant::now() + ASK_AGAIN);
        let answer = timeout_at(limit, self.exchange(Some(wish))).await;
        let answer = answer.unwrap_or_else(|_| Err(LinkError::Transport("no answer in time".into())));
        let waits = match answer {
            Ok(answer) => match self.refusal(terms, &answer, plan) {
                Some((failure, contended)) if late || !contended => return Err(failure),
                // The leader recalls what others hold, and says so when there is room.
                Some(_) => true,
                // Granted, and again not enough: a recall or another call was faster.
                None => {
                    wait.trouble = again.then(|| "nothing came of what it granted".into());
                    again
                }
            },
            Err(error) => {
                tracing::info!(%error, "the leader was not asked for more");
                wait.trouble = Some(error.to_string());
                again
            }
        };
        if waits {
            let _ = timeout(ASK_AGAIN, news.changed()).await;
        }
        Ok(())
    }

    /// The first refusal of an answer, and whether waiting may help.
    fn refusal(&self, terms: &BudgetTerms, answer: &LeaseAnswer, plan: &Plan) -> Option<(Failure, bool)> {
        let now = self.clock.now();
        let refused = answer
            .accounts
            .iter()
            .filter_map(|said| Some((&said.account, said.refused.as_ref()?)));
        let mut all: Vec<(Failure, bool)> = refused
            .filter_map(|(id, refused)| {
                let account = terms.accounts.iter().find(|account| account.account == *id)?;
                let held = self.store.look(|wallet| wallet.available(id, now));
                let failure = words::refused(account, refused, &plan.least, &held);
                Some((failure, refused.contended))
            })
            .collect();
        // One that waiting does not help decides.
        all.sort_by_key(|(_, contended)| *contended);
        all.into_iter().next()
    }

    /// What limits the calls; waits a little for the controller to say it.
    async fn terms(&self, deadline: Instant) -> Result<BudgetTerms, Failure> {
        let mut view = self.contact.subscribe();
        let known = view.wait_for(|view| view.directives.budget.is_some());
        let view = timeout_at(deadline, known).await.map_err(|_| words::undecided())?;
        let terms = view.ok().and_then(|view| view.directives.budget.clone());
        terms.ok_or_else(words::undecided)
    }

    /// Why no call may be made at all.
    fn check(&self, terms: &BudgetTerms) -> Result<(), Failure> {
        if let Some(violation) = self.store.violation() {
            let resume = self.contact.subscribe().borrow().directives.resume.clone();
            if resume.is_none() || resume == violation.resume {
                return Err(violation.failure);
            }
            self.store.forgive().map_err(|error| not_recorded(&error))?;
        }
        let held = terms.accounts.iter().find_map(|account| account.held.clone());
        terms.blocked.clone().or(held).map_or(Ok(()), Err)
    }

    /// What a call came to. What nobody knows counts as all that was reserved. `answered`: the model that answered.
    pub fn charge(&self, hold: &Hold, metered: &Metered, answered: &str) -> Charge {
        let reserved = hold.reservation.amount;
        let is_light = hold.purpose.uses_light_model();
        let mut charge = Charge {
            amount: reserved,
            cost: None,
            violation: None,
            basis: None,
        };
        match metered {
            Metered::NotSent => charge.amount = Amount::ZERO,
            Metered::Free => {
                charge.amount = Amount {
                    calls: 1,
                    ..Amount::ZERO
                }
            }
            Metered::Unknown => {}
            Metered::Billed(bill, _) => {
                charge.amount = bill.amount(hold.rates.as_ref()).unwrap_or(reserved);
                charge.cost = hold.rates.as_ref().and_then(|rates| rates.cost(bill));
                let basis = self.store.basis();
                if let (false, Some(billed_input)) = (hold.exact || is_light, bill.all_input()) {
                    let parts = hold.parts.clone();
                    charge.basis = Some(basis.after(answered, Previous { parts, billed_input }));
                }
                let limited = !hold.reservation.leases.is_empty();
                if limited && !reserved.covers(&charge.amount) {
                    if hold.afresh.is_some_and(|afresh| afresh.covers(&charge.amount)) {
                        tracing::warn!(
                            answered,
                            reserved = reserved.input_tokens,
                            billed = charge.amount.input_tokens,
                            "the bill of the request before is no measure of this one, as when a name stands for \
                             another model now: calls reserve by their length from now on, which is more"
                        );
                        charge.basis = Some(Basis::misled(answered));
                    } else {
                        charge.violation = Some(Violation {
                            failure: of_purpose(hold.purpose, words::violated(&reserved, &charge.amount)),
                            resume: self.contact.subscribe().borrow().directives.resume.clone(),
                        });
                    }
                }
            }
        }
        // The same small question again and again is no loop that repeats itself.
        let answered = matches!(metered, Metered::Billed(..)) && !is_light;
        let hash = answered.then(|| plan::messages_hash(&hold.parts));
        self.beats().add(hash, charge.amount.tokens, std::time::Instant::now());
        charge
    }

    /// What the last requests looked like.
    pub fn pulse(&self) -> Option<Pulse> {
        let resume = self.contact.subscribe().borrow().directives.resume.clone();
        let mut beats = self.beats();
        beats.resumed(resume.as_deref());
        beats.pulse(std::time::Instant::now())
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beats(&self) -> MutexGuard<'_, Beats> {
        self.beats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a budget that is spent cuts the call in flight.
pub fn cut(terms: &BudgetTerms) -> Option<Failure> {
    let held = || terms.accounts.iter().find_map(|account| account.held.clone());
    let spent = || failure(FailureKind::BudgetExhausted, "a budget with onExhausted: Stop is spent");
    terms.cut.then(|| held().unwrap_or_else(spent))
}
