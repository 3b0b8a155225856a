//! Model calls: each id reaches the upstream at most once, whatever happens to worker or gateway.
//!
//! A new call is paid for, recorded, sent, and settled in a task of its own: a worker that goes away does not end it. A repeat
//! joins the call in flight or gets what is kept. Only a cancel, a stop from outside or a deadline cuts it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;

use super::budget::{self, Budget, Hold};
use super::contact::{Contact, Refusal};
use super::failures::{failure, of_purpose};
use super::flight::Flight;
use super::store::{Call, End, Metered, Recorded, Settlement, Store, StoreError};
use super::upstream::{Complete, Prepared, Upstream, Upstreams};
use crate::api::failure::{Failure, FailureKind};
use crate::clock::Clocks;
use crate::engine::CallId;
use crate::link::messages::ModelReport;

/// Time between two tries to record an outcome.
const SETTLE_AGAIN: Duration = Duration::from_secs(1);

/// What a worker gets for a call.
pub enum Reply {
    /// The call in flight.
    Live(Arc<Flight>),
    /// What is kept of one that ended.
    Ended(End),
    /// The worker said that it has the outcome; nothing is kept.
    Acknowledged,
    /// Not now; ask again.
    NotYet,
}

/// All calls of this gateway.
pub struct Calls {
    store: Arc<Store>,
    budget: Arc<Budget>,
    contact: Arc<Contact>,
    upstreams: Upstreams,
    flights: Mutex<HashMap<CallId, Arc<Flight>>>,
    /// Number of calls that ended here, and how the last one spoke of the model.
    ended: watch::Sender<(u64, Option<ModelReport>)>,
    end: watch::Sender<Ending>,
}

/// How far the end of the pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    /// It is not.
    No,
    /// No new call is made.
    Closed,
    /// Nothing is waited for any more.
    Now,
}

impl Calls {
    /// No call in flight.
    pub fn new(store: Arc<Store>, budget: Arc<Budget>, contact: Arc<Contact>, upstreams: Upstreams) -> Self {
        let violated = store.violation().map(|violation| report(&violation.failure));
        Self {
            store,
            budget,
            contact,
            upstreams,
            flights: Mutex::default(),
            ended: watch::Sender::new((0, violated)),
            end: watch::Sender::new(Ending::No),
        }
    }

    /// The record.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Follows the ends of calls.
    pub fn subscribe(&self) -> watch::Receiver<(u64, Option<ModelReport>)> {
        self.ended.subscribe()
    }

    /// A call, or the repeat of one.
    pub fn submit(self: &Arc<Self>, call: Call, body: &[u8]) -> Reply {
        // Held until the call is in the table or is not made: of two repeats at the same time the second joins the first.
        let mut flights = self.flights();
        match flights.get(&call.id) {
            Some(flight) if flight.is_unrecorded() => return Reply::NotYet,
            Some(flight) => return Reply::Live(Arc::clone(flight)),
            None => {}
        }
        match self.store.find(call.id) {
            Ok(None) => self
                .begin(call, body, &mut flights)
                .unwrap_or_else(|failure| Reply::Ended(End::Failed(failure))),
            Ok(Some(Recorded::Ended(end))) => Reply::Ended(end),
            Ok(Some(Recorded::Acknowledged)) => Reply::Acknowledged,
            // Between its record and its flight there is no await: it cannot be seen open without one.
            Ok(Some(Recorded::Open)) => Reply::NotYet,
            Err(error) => Reply::Ended(End::Failed(not_recorded(&error))),
        }
    }

    fn begin(
        self: &Arc<Self>,
        call: Call,
        body: &[u8],
        flights: &mut HashMap<CallId, Arc<Flight>>,
    ) -> Result<Reply, Failure> {
        match self.contact.refusal(Clocks::now()) {
            None if *self.end.borrow() > Ending::No => return Err(ending()),
            None => {}
            Some(Refusal::NotAttached) => return Ok(Reply::NotYet),
            Some(Refusal::Stopped(failure) | Refusal::LinkLost(failure)) => return Err(failure),
        }
        let request = self
            .upstreams
            .of(call.purpose)
            .and_then(|upstream| upstream.prepare(call.id, body, self.store.scripted_turns(call.purpose)))
            .map_err(|failure| of_purpose(call.purpose, failure))
            .inspect_err(|failure| self.note_end(call, Some(failure)))?;
        let flight = Arc::new(Flight::new());
        // Before any await, so that a repeat joins it also while it waits for room.
        flights.insert(call.id, Arc::clone(&flight));
        tokio::spawn(Arc::clone(self).fly(call, request, Arc::clone(&flight)));
        Ok(Reply::Live(flight))
    }

    async fn fly(self: Arc<Self>, call: Call, mut request: Prepared, flight: Arc<Flight>) {
        let _busy = self.budget.busy();
        let paid = tokio::select! {
            biased;
            why = flight.until_cut() => Err(why),
            hold = self.budget.hold(call, &mut request) => hold.map_err(|failure| of_purpose(call.purpose, failure)),
        };
        let failure = match paid {
            Ok(hold) => self.spend(call, request, hold, &flight).await,
            Err(failure) => {
                tracing::info!(call = %call.id, purpose = %call.purpose, kind = %failure.kind, message = failure.message, "no call is made");
                Some(failure)
            }
        };
        flight.end(failure.clone().map_or(Ok(()), Err));
        self.flights().remove(&call.id);
        self.note_end(call, failure.as_ref());
    }

    async fn run(&self, call: Call, request: Prepared, flight: &Flight) -> Result<Complete, Failure> {
        let ran = self.upstreams.of(call.purpose)?.run(request, flight).await;
        ran.map_err(|failure| of_purpose(call.purpose, failure))
    }

    /// Sends the call and settles it; why there is no answer, when there is none.
    async fn spend(&self, call: Call, request: Prepared, hold: Hold, flight: &Flight) -> Option<Failure> {
        let result = tokio::select! {
            biased;
            why = flight.until_cut() => Err((why, true)),
            result = self.run(call, request, flight) => result.map_err(|failure| (failure, false)),
        };
        let was_cut = matches!(&result, Err((_, true)));
        let metered = flight.metered();
        let charge = self.budget.charge(&hold, &metered, &flight.answered());
        let end = match &result {
            Ok(complete) => End::Answered {
                content_type: complete.content_type.into(),
                body: flight.body_with(&complete.rest),
                cost: charge.cost,
            },
            Err((failure, _)) => End::Failed(failure.clone()),
        };
        log(call, &end, &metered);
        let (cost, violation) = (charge.cost, charge.violation.clone());
        let settlement = Settlement {
            call,
            end,
            // A turn of the script that ran out of time was not given.
            scripted_turn: self.upstreams.of(call.purpose).is_ok_and(Upstream::is_scripted)
                && !was_cut
                && metered != Metered::Unknown,
            metered,
            reservation: hold.reservation,
            charge: charge.amount,
            violation: charge.violation,
            basis: charge.basis,
            at: Timestamp::now(),
        };
        let settled = self.settle(settlement, flight).await;
        if let Some(violation) = violation {
            tracing::error!(call = %call.id, message = violation.failure.message, "a bill is above its bound");
        }
        match (settled, result) {
            (Err(error), _) => Some(not_recorded(&error)),
            (Ok(()), Err((failure, _))) => Some(failure),
            (Ok(()), Ok(complete)) => {
                flight.note_cost(cost);
                flight.push(complete.content_type, complete.rest);
                None
            }
        }
    }

    /// Records the outcome. While that cannot be done, because the disk is full, the call is not over: its answer is in
    /// memory, is paid for, and must neither be given up nor be acknowledged. It ends with the pod at the latest.
    async fn settle(&self, settlement: Settlement, flight: &Flight) -> Result<(), StoreError> {
        let mut end = self.end.subscribe();
        let mut settled = self.store.settle(settlement);
        while let Err(error) = settled {
            if *end.borrow_and_update() == Ending::Now {
                return Err(error);
            }
            tracing::error!(%error, "an outcome cannot be recorded; trying again until it can be");
            flight.note_unrecorded(true);
            tokio::select! {
                () = tokio::time::sleep(SETTLE_AGAIN) => {}
                // The sender is ours: it cannot be gone.
                _ = end.changed() => {}
            }
            settled = self.store.settle_rest();
        }
        flight.note_unrecorded(false);
        Ok(())
    }

    /// The worker has the outcome. `false`: the call is still in flight.
    pub fn acknowledge(&self, id: CallId) -> Result<bool, StoreError> {
        if self.flights().keys().any(|flying| *flying <= id) {
            return Ok(false);
        }
        self.store.acknowledge(id).map(|()| true)
    }

    /// Cuts one call; nothing happens when it is not in flight.
    pub fn cancel(&self, id: CallId) {
        if let Some(flight) = self.flights().get(&id) {
            flight.cut(failure(FailureKind::Cancelled, "the worker cut the call"));
        }
    }

    /// Cuts every call in flight whenever the controller says so. Never ends.
    pub async fn obey(&self) {
        let mut view = self.contact.subscribe();
        loop {
            let stop = {
                let view = view.borrow_and_update();
                view.stop()
                    .or_else(|| view.directives.budget.as_ref().and_then(budget::cut))
            };
            if let Some(why) = stop {
                self.cut_all(&why);
            }
            if view.changed().await.is_err() {
                return;
            }
        }
    }

    /// Refuses new calls, gives those in flight `grace` to finish, then cuts them; returns when all are settled.
    pub async fn close(&self, grace: Duration) {
        self.end.send_replace(Ending::Closed);
        let mut ended = self.ended.subscribe();
        let landed = async {
            while !self.flights().is_empty() {
                // A flight has left the table when its end is told; the sender is ours and cannot be gone.
                let _ = ended.changed().await;
            }
        };
        tokio::pin!(landed);
        if tokio::time::timeout(grace, &mut landed).await.is_err() {
            self.end.send_replace(Ending::Now);
            self.cut_all(&ending());
            landed.await;
        }
    }

    fn cut_all(&self, why: &Failure) {
        for flight in self.flights().values() {
            flight.cut(why.clone());
        }
    }

    /// Tells the reports how the call ended. Ends that say nothing of `spec.model` leave its state as it was.
    fn note_end(&self, call: Call, failure: Option<&Failure>) {
        // An answer whose bill was above its bound says nothing good of the model.
        let violated = self.store.violation();
        match violated.as_ref().map(|violation| &violation.failure).or(failure) {
            None if call.purpose.uses_light_model() => {
                self.ended.send_modify(|(count, _)| *count += 1);
            }
            Some(failure) if !speaks_of_the_model(call, failure.kind) => {
                self.ended.send_modify(|(count, _)| *count += 1);
            }
            spoken => self.note_model(spoken),
        }
    }

    fn note_model(&self, failure: Option<&Failure>) {
        let good = || ModelReport {
            failure: None,
            message: String::new(),
        };
        let model = failure.map_or_else(good, report);
        self.ended.send_modify(|(count, last)| {
            *count += 1;
            *last = Some(model);
        });
    }

    fn flights(&self) -> MutexGuard<'_, HashMap<CallId, Arc<Flight>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn report(failure: &Failure) -> ModelReport {
    ModelReport {
        failure: Some(failure.kind),
        message: failure.message.clone(),
    }
}

fn ending() -> Failure {
    failure(FailureKind::Cancelled, "the gateway ends with its pod")
}

/// The record cannot be written: no call.
pub fn not_recorded(error: &StoreError) -> Failure {
    tracing::error!(%error, "the record of calls cannot be written");
    failure(
        FailureKind::RecordFailed,
        format!("{error}; no new call is made until it can: raise spec.storage.size or make room"),
    )
}

fn speaks_of_the_model(call: Call, kind: FailureKind) -> bool {
    match kind {
        // Without its answer the turns go on.
        _ if call.purpose.uses_light_model() => kind == FailureKind::BoundViolated,
        FailureKind::Unreachable
        | FailureKind::Timeout
        | FailureKind::RateLimited
        | FailureKind::QuotaExceeded
        | FailureKind::AuthenticationFailed
        | FailureKind::BadResponse
        | FailureKind::ContextExceeded
        | FailureKind::BoundViolated => true,
        FailureKind::Cancelled
        | FailureKind::LinkLost
        | FailureKind::Fenced
        | FailureKind::Interrupted
        | FailureKind::RecordFailed
        | FailureKind::BudgetExhausted
        | FailureKind::TokensPerHour
        | FailureKind::TotalTokens
        | FailureKind::TotalCost
        | FailureKind::CallExceedsLimit
        | FailureKind::BudgetAsk
        | FailureKind::BudgetUnavailable
        | FailureKind::LoopDetected => false,
    }
}

fn log(call: Call, end: &End, metered: &Metered) {
    let bill = match metered {
        Metered::Billed(bill, _) => Some(bill),
        Metered::NotSent | Metered::Free | Metered::Unknown => None,
    };
    match end {
        End::Answered { body, .. } => tracing::info!(
            call = %call.id,
            purpose = %call.purpose,
            bytes = body.len(),
            input = bill.map(|bill| bill.input + bill.cache_read + bill.cache_write + bill.cache_write_1h),
            output = bill.map(|bill| bill.output),
            "call answered"
        ),
        End::Failed(failure) => {
            tracing::warn!(call = %call.id, purpose = %call.purpose, kind = %failure.kind, message = failure.message, "call failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tempfile::TempDir;

    use super::*;
    use crate::engine::Purpose;
    use crate::gateway::flight::Next;
    use crate::gateway::store::Models;
    use crate::gateway::upstream::Caller;
    use crate::link::client::LinkClient;
    use crate::link::messages::{BudgetTerms, Directives, Known};
    use crate::link::socket::Session;
    use crate::sensing::address::AddressPolicy;

    /// A gateway's calls to a script, without a controller: nothing limits them.
    fn calls(directory: &TempDir) -> Arc<Calls> {
        let path = |name: &str| directory.path().join(name);
        // So long that its outcome needs room of its own.
        let text = "one ".repeat(16_000);
        let script = format!("turns: [{{text: '{text}', delayMilliseconds: 200}}, {{text: two}}]");
        std::fs::write(path("script"), script).unwrap();
        let now = Clocks::now();
        let contact = Arc::new(Contact::new(Duration::from_mins(1), now));
        let session = Session {
            epoch: 1,
            known: Known::default(),
        };
        let directives = Directives {
            budget: Some(BudgetTerms::default()),
            ..Directives::default()
        };
        contact.attached(session, directives, (now, now));
        let store = Arc::new(Store::open(directory.path(), "m".into(), Timestamp::UNIX_EPOCH).unwrap());
        let client = Arc::new(LinkClient::new("https://nowhere", path("ca"), path("token")));
        let budget = Budget::new(Arc::clone(&store), Arc::clone(&contact), client, 1, Models::from("m"));
        let model = serde_json::from_value(json!({"api": "Scripted", "name": "m"})).unwrap();
        let main = Upstream::new(&Caller {
            agent_uid: "uid",
            model: &model,
            key_file: &path("key"),
            script_file: &path("script"),
            policy: &Arc::new(AddressPolicy::of_agents(vec![], vec![], true)),
        });
        let upstreams = Upstreams { main, light: None };
        Arc::new(Calls::new(store, Arc::new(budget), contact, upstreams))
    }

    fn submit(calls: &Arc<Calls>, id: &str) -> Reply {
        let call = Call {
            id: id.parse().unwrap(),
            purpose: Purpose::Turn,
        };
        calls.submit(
            call,
            br#"{"model": "m", "messages": [{"role": "user", "content": "x"}]}"#,
        )
    }

    fn live(reply: Reply) -> Arc<Flight> {
        let Reply::Live(flight) = reply else {
            panic!("not in flight")
        };
        flight
    }

    /// Waits until the call is recorded as open, and lets the disk be full then.
    async fn fill_disk(calls: &Calls, id: &str) {
        let id = id.parse().unwrap();
        while calls.store.find(id).unwrap() != Some(Recorded::Open) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        calls.store.fill_disk(true);
    }

    /// What follows all that has come of an answer.
    async fn after_its_chunks(flight: &Flight) -> Next {
        let mut read = 0;
        loop {
            match flight.next(read).await {
                Next::Chunk(_) => read += 1,
                next @ (Next::End | Next::NotYet | Next::Failed(_)) => return next,
            }
        }
    }

    #[tokio::test]
    async fn an_outcome_that_the_disk_has_no_room_for_is_in_flight_until_it_has() {
        let directory = TempDir::new().unwrap();
        let calls = calls(&directory);
        let flight = live(submit(&calls, "t1c1a1"));
        fill_disk(&calls, "t1c1a1").await;
        // Neither its end nor a failure: ask again.
        assert_eq!(after_its_chunks(&flight).await, Next::NotYet);
        assert!(matches!(submit(&calls, "t1c1a1"), Reply::NotYet));
        assert!(!calls.acknowledge("t1c1a1".parse().unwrap()).unwrap());
        assert_eq!(calls.store.usage().calls, 0);
        let mut ended = calls.subscribe();
        calls.store.fill_disk(false);
        tokio::time::timeout(Duration::from_secs(10), ended.changed())
            .await
            .unwrap()
            .unwrap();
        let Reply::Ended(End::Answered { body, .. }) = submit(&calls, "t1c1a1") else {
            panic!("no answer")
        };
        assert!(body.len() > 60_000);
        assert_eq!(calls.store.usage().calls, 1, "paid once");
        assert!(calls.acknowledge("t1c1a1".parse().unwrap()).unwrap());
    }

    #[tokio::test]
    async fn the_end_of_the_pod_does_not_wait_for_the_disk() {
        let directory = TempDir::new().unwrap();
        let calls = calls(&directory);
        let flight = live(submit(&calls, "t1c1a1"));
        fill_disk(&calls, "t1c1a1").await;
        assert_eq!(after_its_chunks(&flight).await, Next::NotYet);
        calls.close(Duration::from_millis(10)).await;
        let Next::Failed(failure) = after_its_chunks(&flight).await else {
            panic!("no failure")
        };
        assert_eq!(failure.kind, FailureKind::RecordFailed);
    }

    #[tokio::test]
    async fn a_repeat_joins_the_call_in_flight() {
        let directory = TempDir::new().unwrap();
        let calls = calls(&directory);
        let first = live(submit(&calls, "t1c1a1"));
        assert!(Arc::ptr_eq(&first, &live(submit(&calls, "t1c1a1"))));
    }
}
