//! Budget enforcement: reserves the worst case of each call from the gateway's leases, requests more from the leader,
//! and settles the bill.
//!
//! Owns the decision whether a call may be paid for, and the exchange of leases with the leader. Leases and open calls
//! belong to the record ([`CallStore`]): they are on disk before they are reported or spent. Fails closed: without
//! known terms, or beyond its leases, the gateway makes no call.

mod call_bound;
mod lease_clock;
mod lease_keeper;
mod refusals;
mod request_window;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::{Mutex as Turn, watch};
use tokio::time::{Instant, timeout, timeout_at};

use self::call_bound::{CallBound, PricedField, draws};
use self::lease_clock::LeaseClock;
use self::lease_keeper::{LeaseActivity, LeaseDemand};
use self::request_window::RequestWindow;
use super::calls::not_recorded;
use super::link_state::LinkState;
use super::model_field::ModelField;
use super::store::{BeginOutcome, BoundBasis, BoundViolation, CallStore, CallUsage, ModelNames, StoredCallKey};
use super::upstream::PreparedRequest;
use crate::api::amount::Amount;
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::CallPurpose;
use crate::ledger::bound::{PreviousRequest, RequestPart};
use crate::ledger::price::ModelRates;
use crate::ledger::wallet::{Reservation, Wallet};
use crate::link::client::{LinkClient, LinkError};
use crate::link::messages::{BudgetTerms, LeaseResponse, RequestStats};

/// How long a call waits for room that other gateways may return, or for a leader that does not answer.
const RESERVATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of lease requests while a call waits.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// When to retry a call that failed because the leader did not answer.
const TRY_AGAIN: jiff::SignedDuration = jiff::SignedDuration::from_secs(15);

/// Enforces the limits of one gateway's calls.
pub struct GatewayBudget {
    store: Arc<CallStore>,
    contact: Arc<LinkState>,
    client: Arc<LinkClient>,
    epoch: i64,
    models: ModelNames,
    clock: LeaseClock,
    /// Serializes lease requests.
    turn: Turn<()>,
    pace: Mutex<LeaseActivity>,
    stirred: watch::Sender<()>,
    request_window: Mutex<RequestWindow>,
}

/// What a call holds until it is settled.
pub struct CallReservation {
    /// The reservation in the [`Wallet`].
    pub reservation: Reservation,
    rates: Option<ModelRates>,
    /// The bound of the call by its bytes alone; `None` if the reservation is already based on bytes alone.
    bound_by_bytes: Option<Amount>,
    parts: Vec<RequestPart>,
    exact: bool,
    purpose: CallPurpose,
}

/// State of a call that waits for room.
struct LeaseWait {
    deadline: Instant,
    /// The leader was asked at least once.
    asked: bool,
    /// Why the last request brought nothing.
    failure: Option<String>,
}

/// The result of charging a call.
pub struct CallCharge {
    /// The amount that counts towards the limits.
    pub amount: Amount,
    /// Cost of the server's bill in micro-dollars; `None`: no bill, or no price.
    pub cost: Option<i64>,
    /// Set if the bill exceeds the [`CallBound`].
    pub violation: Option<BoundViolation>,
    /// The new basis of the next bound; `None`: unchanged.
    pub basis: Option<BoundBasis>,
}

/// Marks a call as active, from its request for room until it is settled.
pub struct ActiveCallGuard(Arc<GatewayBudget>);

impl Drop for ActiveCallGuard {
    fn drop(&mut self) {
        self.0.lease_activity().call_ended();
        self.0.stirred.send_replace(());
    }
}

impl GatewayBudget {
    pub fn new(
        store: Arc<CallStore>,
        contact: Arc<LinkState>,
        client: Arc<LinkClient>,
        epoch: i64,
        models: ModelNames,
    ) -> Self {
        let pace = Mutex::new(LeaseActivity::new(store.is_restored()));
        Self {
            store,
            contact,
            client,
            epoch,
            models,
            clock: LeaseClock::start(),
            turn: Turn::new(()),
            pace,
            stirred: watch::Sender::default(),
            request_window: Mutex::default(),
        }
    }

    /// Registers an active call.
    pub fn track_call(self: &Arc<Self>) -> ActiveCallGuard {
        self.lease_activity().call_started();
        ActiveCallGuard(Arc::clone(self))
    }

    /// Reserves the bound of the call and records it as open. Lowers its output limit to the room available. May be
    /// dropped at any await: nothing stays reserved then.
    pub async fn reserve_call(
        &self,
        call: StoredCallKey,
        request: &mut PreparedRequest,
    ) -> Result<CallReservation, CallFailure> {
        self.lease_activity().wait_started();
        let held = self.reserve_room(call, request).await;
        self.lease_activity()
            .wait_ended(held.as_ref().ok().map(|(_, full)| *full));
        if let Err(failure) = &held
            && failure.kind.refused_by().is_some()
        {
            self.store.count(|budget| budget.refused_calls += 1);
        }
        held.map(|(hold, _)| hold)
    }

    /// The reservation, and the full amount that the call was meant to have.
    async fn reserve_room(
        &self,
        call: StoredCallKey,
        request: &mut PreparedRequest,
    ) -> Result<(CallReservation, Amount), CallFailure> {
        let mut wait = LeaseWait {
            deadline: Instant::now() + RESERVATION_TIMEOUT,
            asked: false,
            failure: None,
        };
        let parts = call_bound::parts(request);
        loop {
            let terms = self.terms(wait.deadline).await?;
            self.check(&terms)?;
            // Requests to the light model do not continue each other, so their bound is based on bytes alone.
            let is_light = call.purpose.uses_light_model();
            let previous = self.store.basis().previous.filter(|_| !is_light);
            let name = self.models.of(call.purpose);
            let model = PricedField {
                field: ModelField::of(call.purpose),
                name,
                price: terms.prices.get(name),
            };
            let plan = CallBound::new(&terms, &model, request, &parts, previous.as_deref())?;
            let draws = draws(&terms);
            let now = self.clock.now();
            let mut amount = plan.full;
            let short = |wallet: &Wallet| draws.iter().any(|draw| wallet.lacking(draw, &plan.full, now).is_some());
            if wait.asked && self.store.with_wallet(short) {
                // No more room is available: shorten the answer, if enough of it remains.
                if let Some((output, clipped)) = self.store.with_wallet(|wallet| plan.fitting(&draws, wallet, now)) {
                    request.limit_output(output);
                    amount = clipped;
                }
            }
            let begun = self.store.begin(call, (&draws, &amount), now, Timestamp::now());
            match begun.map_err(|error| not_recorded(&error))? {
                BeginOutcome::Held(reservation) => {
                    let hold = CallReservation {
                        reservation,
                        rates: plan.rates,
                        bound_by_bytes: previous.and_then(|_| plan.bound_by_bytes(request.max_output())),
                        parts,
                        exact: request.exact_bill().is_some(),
                        purpose: call.purpose,
                    };
                    return Ok((hold, plan.full));
                }
                BeginOutcome::Short(_) => self.request_more(&terms, &plan, &mut wait).await?,
            }
        }
    }

    /// Requests more from the leader, or waits for it; `Err` if no more is available.
    async fn request_more(
        &self,
        terms: &BudgetTerms,
        plan: &CallBound,
        wait: &mut LeaseWait,
    ) -> Result<(), CallFailure> {
        let late = Instant::now() >= wait.deadline;
        if let Some(failure) = wait.failure.as_ref().filter(|_| late) {
            return Err(CallFailure {
                resumes_at: Timestamp::now().checked_add(TRY_AGAIN).ok(),
                ..refusals::no_answer(failure)
            });
        }
        let mut news = self.contact.subscribe();
        let wish = LeaseDemand {
            least: plan.least,
            full: plan.full,
        };
        let again = std::mem::replace(&mut wait.asked, true);
        let limit = wait.deadline.max(Instant::now() + ASK_AGAIN);
        let answer = timeout_at(limit, self.exchange_leases(Some(wish))).await;
        let answer = answer.unwrap_or_else(|_| Err(LinkError::Transport("no answer in time".into())));
        let waits = match answer {
            Ok(answer) => match self.refusal(terms, &answer, plan) {
                Some((failure, contended)) if late || !contended => return Err(failure),
                // Contended: the leader recalls what others hold, and announces the room by a new revision.
                Some(_) => true,
                // Granted, and again too little: a recall or another call came first.
                None => {
                    wait.failure = again.then(|| "its grants did not cover the call".into());
                    again
                }
            },
            Err(error) => {
                tracing::info!(%error, "failed to request leases from the leader; retrying");
                wait.failure = Some(error.to_string());
                again
            }
        };
        if waits {
            let _ = timeout(ASK_AGAIN, news.changed()).await;
        }
        Ok(())
    }

    /// The decisive refusal of an answer, and whether waiting may help.
    fn refusal(&self, terms: &BudgetTerms, answer: &LeaseResponse, plan: &CallBound) -> Option<(CallFailure, bool)> {
        let now = self.clock.now();
        let refused = answer
            .accounts
            .iter()
            .filter_map(|account| Some((&account.account, account.refused.as_ref()?)));
        let mut all: Vec<(CallFailure, bool)> = refused
            .filter_map(|(id, refused)| {
                let account = terms.accounts.iter().find(|account| account.account == *id)?;
                let held = self.store.with_wallet(|wallet| wallet.available(id, now));
                let failure = refusals::refused(account, refused, &plan.needs(), &held);
                Some((failure, refused.contended))
            })
            .collect();
        // A refusal that waiting does not resolve decides.
        all.sort_by_key(|(_, contended)| *contended);
        all.into_iter().next()
    }

    /// The [`BudgetTerms`] of the calls; waits up to `deadline` for the controller to send them.
    async fn terms(&self, deadline: Instant) -> Result<BudgetTerms, CallFailure> {
        let mut view = self.contact.subscribe();
        let known = view.wait_for(|view| view.directives.budget.is_some());
        let view = timeout_at(deadline, known).await.map_err(|_| refusals::undecided())?;
        let terms = view.ok().and_then(|view| view.directives.budget.clone());
        terms.ok_or_else(refusals::undecided)
    }

    /// Why no call may be made at all.
    fn check(&self, terms: &BudgetTerms) -> Result<(), CallFailure> {
        if let Some(violation) = self.store.violation() {
            let resume = self.contact.subscribe().borrow().directives.resume.clone();
            if resume.is_none() || resume == violation.resume {
                return Err(violation.failure);
            }
            self.store.clear_violation().map_err(|error| not_recorded(&error))?;
        }
        let held = terms.accounts.iter().find_map(|account| account.held.clone());
        terms.blocked.clone().or(held).map_or(Ok(()), Err)
    }

    /// Computes what a call is charged. Unknown usage is charged with the whole reservation. `answered`: the model that
    /// answered.
    pub fn charge(&self, hold: &CallReservation, metered: &CallUsage, answered: &str) -> CallCharge {
        let reserved = hold.reservation.amount;
        let is_light = hold.purpose.uses_light_model();
        let mut charge = CallCharge {
            amount: reserved,
            cost: None,
            violation: None,
            basis: None,
        };
        match metered {
            CallUsage::NotSent => charge.amount = Amount::ZERO,
            CallUsage::Free => {
                charge.amount = Amount {
                    calls: 1,
                    ..Amount::ZERO
                }
            }
            CallUsage::Unknown => {}
            CallUsage::Billed(bill, _) => {
                charge.amount = bill.amount(hold.rates.as_ref()).unwrap_or(reserved);
                charge.cost = hold.rates.as_ref().and_then(|rates| rates.cost(bill));
                let basis = self.store.basis();
                if let (false, Some(billed_input)) = (hold.exact || is_light, bill.all_input()) {
                    let parts = hold.parts.clone();
                    charge.basis = Some(basis.after(answered, PreviousRequest { parts, billed_input }));
                }
                let limited = !hold.reservation.leases.is_empty();
                if limited && !reserved.covers(&charge.amount) {
                    if hold
                        .bound_by_bytes
                        .is_some_and(|bound_by_bytes| bound_by_bytes.covers(&charge.amount))
                    {
                        tracing::warn!(
                            answered,
                            reserved = reserved.input_tokens,
                            billed = charge.amount.input_tokens,
                            "the last bill does not predict this one, for example because the name now means another \
                             model; from now on calls are bounded by their length, which reserves more"
                        );
                        charge.basis = Some(BoundBasis::misled(answered));
                    } else {
                        charge.violation = Some(BoundViolation {
                            failure: refusals::violated(ModelField::of(hold.purpose), &reserved, &charge.amount),
                            resume: self.contact.subscribe().borrow().directives.resume.clone(),
                        });
                    }
                }
            }
        }
        // A light model may get the same small question repeatedly; that is not a repetition of the loop.
        let answered = matches!(metered, CallUsage::Billed(..)) && !is_light;
        let hash = answered.then(|| call_bound::messages_hash(&hold.parts));
        self.request_window()
            .add(hash, charge.amount.tokens, std::time::Instant::now());
        charge
    }

    /// Statistics of the last requests, for loop detection.
    pub fn request_stats(&self) -> Option<RequestStats> {
        let resume = self.contact.subscribe().borrow().directives.resume.clone();
        let mut request_window = self.request_window();
        request_window.resumed(resume.as_deref());
        request_window.stats(std::time::Instant::now())
    }

    fn lease_activity(&self) -> MutexGuard<'_, LeaseActivity> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request_window(&self) -> MutexGuard<'_, RequestWindow> {
        self.request_window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a call in flight is cut by an exhausted budget, if it is.
pub fn cut_reason(terms: &BudgetTerms) -> Option<CallFailure> {
    let held = || terms.accounts.iter().find_map(|account| account.held.clone());
    let spent = || {
        CallFailure::new(
            FailureKind::BudgetExhausted,
            "an AgentBudget with onExhausted: Stop is exhausted: raise its spec.limits or append to its spec.topUps",
        )
    };
    terms.cut.then(|| held().unwrap_or_else(spent))
}
