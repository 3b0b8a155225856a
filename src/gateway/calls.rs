//! Model calls: each id reaches the upstream at most once, even across crashes of the worker or the gateway.
//!
//! A new call is reserved, recorded, sent and settled in its own task, so a disconnecting worker does not end it. A
//! repeated request joins the call in flight or gets the recorded outcome. Only a cancellation, a stop by the
//! controller or a deadline cuts a call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::watch;
use tracing::Instrument as _;

use super::budget::{self, CallReservation, GatewayBudget};
use super::call_durations::CallTimes;
use super::call_spans::CallSpans;
use super::in_flight::InFlightCall;
use super::link_state::{LinkRefusal, LinkState};
use super::store::{CallEnd, CallSettlement, CallStore, CallStoreError, CallUsage, RecordedCall, StoredCallKey};
use super::upstream::{AnswerTail, ModelUpstream, ModelUpstreams, PreparedRequest};
use crate::api::failure::{CallFailure, FailureKind, ModelEvidence};
use crate::engine::CallId;
use crate::link::messages::ModelReport;
use crate::support::clock::ClockReading;

/// Time between two attempts to record an outcome.
const SETTLE_AGAIN: Duration = Duration::from_secs(1);

/// The reply to a worker's request for a call.
pub enum CallReply {
    /// The call is in flight.
    Live(Arc<InFlightCall>),
    /// The call ended with this outcome.
    Ended(CallEnd),
    /// The worker acknowledged the outcome; nothing is kept.
    Acknowledged,
    /// Not available yet; the worker retries.
    NotYet,
}

/// All calls of this gateway.
pub struct ModelCalls {
    store: Arc<CallStore>,
    budget: Arc<GatewayBudget>,
    contact: Arc<LinkState>,
    upstreams: ModelUpstreams,
    spans: CallSpans,
    times: CallTimes,
    flights: Mutex<HashMap<CallId, Arc<InFlightCall>>>,
    /// Number of calls that ended, and what the last one shows about the model.
    ended: watch::Sender<(u64, Option<ModelReport>)>,
    end: watch::Sender<ShutdownStage>,
}

/// Progress of the shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ShutdownStage {
    No,
    /// No new calls are accepted.
    Closed,
    /// Nothing is awaited any more.
    Now,
}

impl ModelCalls {
    pub fn new(
        store: Arc<CallStore>,
        budget: Arc<GatewayBudget>,
        contact: Arc<LinkState>,
        upstreams: ModelUpstreams,
        spans: CallSpans,
    ) -> Self {
        let times = CallTimes::new(store.models());
        let violated = store.violation().map(|violation| report(&violation.failure));
        Self {
            store,
            budget,
            contact,
            upstreams,
            spans,
            times,
            flights: Mutex::default(),
            ended: watch::Sender::new((0, violated)),
            end: watch::Sender::new(ShutdownStage::No),
        }
    }

    pub fn store(&self) -> &CallStore {
        &self.store
    }

    /// How long calls took.
    pub fn times(&self) -> &CallTimes {
        &self.times
    }

    /// Notifies about ended calls.
    pub fn subscribe(&self) -> watch::Receiver<(u64, Option<ModelReport>)> {
        self.ended.subscribe()
    }

    /// Starts a call, or joins an earlier request for the same call.
    pub fn submit(self: &Arc<Self>, call: StoredCallKey, body: &[u8]) -> CallReply {
        // The lock is held until the call is in the table or is rejected, so that of two concurrent requests the second
        // joins the first.
        let mut flights = self.flights();
        match flights.get(&call.id) {
            Some(flight) if flight.is_unrecorded() => return CallReply::NotYet,
            Some(flight) => return CallReply::Live(Arc::clone(flight)),
            None => {}
        }
        match self.store.find(call.id) {
            Ok(None) => self
                .begin(call, body, &mut flights)
                .unwrap_or_else(|failure| CallReply::Ended(CallEnd::Failed(failure))),
            Ok(Some(RecordedCall::Ended(end))) => CallReply::Ended(end),
            Ok(Some(RecordedCall::Acknowledged)) => CallReply::Acknowledged,
            // There is no await between recording a call and entering its flight: an open call without a flight is not
            // observable.
            Ok(Some(RecordedCall::Open)) => CallReply::NotYet,
            Err(error) => CallReply::Ended(CallEnd::Failed(not_recorded(&error))),
        }
    }

    fn begin(
        self: &Arc<Self>,
        call: StoredCallKey,
        body: &[u8],
        flights: &mut HashMap<CallId, Arc<InFlightCall>>,
    ) -> Result<CallReply, CallFailure> {
        match self.contact.refusal(ClockReading::now()) {
            None if *self.end.borrow() > ShutdownStage::No => return Err(ending()),
            None => {}
            Some(LinkRefusal::NotAttached) => return Ok(CallReply::NotYet),
            Some(LinkRefusal::Stopped(failure) | LinkRefusal::LinkLost(failure)) => return Err(failure),
        }
        let request = self
            .upstreams
            .of(call.purpose)
            .and_then(|upstream| upstream.prepare(call.id, body, self.store.scripted_turns(call.purpose)))
            .inspect_err(|failure| self.note_end(call, Some(failure)))?;
        let flight = Arc::new(InFlightCall::new());
        // Entered before any await, so that a repeated request also joins while the call waits for room.
        flights.insert(call.id, Arc::clone(&flight));
        let log_span = self.spans.log_span(&call.id.to_string());
        let running = Arc::clone(self).run_call(call, request, Arc::clone(&flight));
        tokio::spawn(running.instrument(log_span));
        Ok(CallReply::Live(flight))
    }

    async fn run_call(self: Arc<Self>, call: StoredCallKey, mut request: PreparedRequest, flight: Arc<InFlightCall>) {
        let _busy = self.budget.track_call();
        let from = Timestamp::now();
        let paid = tokio::select! {
            biased;
            why = flight.until_cut() => Err(why),
            hold = self.budget.reserve_call(call, &mut request) => hold,
        };
        flight.note_request(request.metadata());
        let failure = match paid {
            Ok(hold) => self.send_and_settle(call, request, hold, &flight).await,
            Err(failure) => {
                tracing::info!(call = %call.id, purpose = %call.purpose, kind = %failure.kind, message = failure.message, "call rejected before it was sent");
                Some(failure)
            }
        };
        flight.end(failure.clone().map_or(Ok(()), Err));
        self.flights().remove(&call.id);
        self.spans.ended(call, from, &flight, failure.as_ref());
        self.note_end(call, failure.as_ref());
    }

    async fn run(
        &self,
        call: StoredCallKey,
        request: PreparedRequest,
        flight: &InFlightCall,
    ) -> Result<AnswerTail, CallFailure> {
        self.upstreams.of(call.purpose)?.run(request, flight).await
    }

    /// Sends the call and settles it. Returns the [`CallFailure`] if there is no answer.
    async fn send_and_settle(
        &self,
        call: StoredCallKey,
        request: PreparedRequest,
        hold: CallReservation,
        flight: &InFlightCall,
    ) -> Option<CallFailure> {
        // Dropping the request closes the connection; what the server had done by then is unknown, unless its usage was
        // already read.
        let sent = Instant::now();
        let result = tokio::select! {
            biased;
            why = flight.until_cut() => Err((why, true)),
            result = self.run(call, request, flight) => result.map_err(|failure| (failure, false)),
        };
        if result.is_ok() {
            self.times.answered(call, sent.elapsed());
        }
        let was_cut = matches!(&result, Err((_, true)));
        let metered = flight.metered();
        let charge = self.budget.charge(&hold, &metered, &flight.answered().model);
        let end = match &result {
            Ok(complete) => CallEnd::Answered {
                content_type: complete.content_type.into(),
                body: flight.body_with(&complete.rest),
                cost: charge.cost,
            },
            Err((failure, _)) => CallEnd::Failed(failure.clone()),
        };
        log(call, &end, &metered);
        let (cost, violation) = (charge.cost, charge.violation.clone());
        let settlement = CallSettlement {
            call,
            end,
            // A turn of the script that timed out was not delivered, so it is not consumed.
            scripted_turn: self.upstreams.of(call.purpose).is_ok_and(ModelUpstream::is_scripted)
                && !was_cut
                && metered != CallUsage::Unknown,
            metered,
            reservation: hold.reservation,
            charge: charge.amount,
            violation: charge.violation,
            basis: charge.basis,
            at: Timestamp::now(),
        };
        let settled = self.settle(settlement, flight).await;
        if let Some(violation) = violation {
            tracing::error!(call = %call.id, message = violation.failure.message, "a call was billed above its bound");
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

    /// Records the outcome. As long as that fails, for example because the disk is full, the call is not over: its
    /// answer was paid for and exists only in memory, so it must be neither dropped nor acknowledged. The shutdown of
    /// the pod ends the wait.
    async fn settle(&self, settlement: CallSettlement, flight: &InFlightCall) -> Result<(), CallStoreError> {
        let mut end = self.end.subscribe();
        let mut settled = self.store.settle(settlement);
        while let Err(error) = settled {
            if *end.borrow_and_update() == ShutdownStage::Now {
                return Err(error);
            }
            tracing::error!(%error, "failed to record the outcome of a call; retrying");
            flight.note_unrecorded(true);
            tokio::select! {
                () = tokio::time::sleep(SETTLE_AGAIN) => {}
                // The sender is owned by `self`, so it cannot be dropped.
                _ = end.changed() => {}
            }
            settled = self.store.settle_rest();
        }
        flight.note_unrecorded(false);
        Ok(())
    }

    /// The worker has stored the outcome. `false`: the call is still in flight.
    pub fn acknowledge(&self, id: CallId) -> Result<bool, CallStoreError> {
        if self.flights().keys().any(|flying| flying.is_up_to(id)) {
            return Ok(false);
        }
        self.store.acknowledge(id).map(|()| true)
    }

    /// Cuts the call if it is in flight.
    pub fn cancel(&self, id: CallId) {
        if let Some(flight) = self.flights().get(&id) {
            flight.cut(CallFailure::new(
                FailureKind::Cancelled,
                "the worker cancelled the call",
            ));
        }
    }

    /// Cuts all calls in flight whenever the controller requires it. Never returns.
    pub async fn enforce_stops(&self) {
        let mut view = self.contact.subscribe();
        loop {
            let stop = {
                let view = view.borrow_and_update();
                view.stop()
                    .or_else(|| view.directives.budget.as_ref().and_then(budget::cut_reason))
            };
            if let Some(why) = stop {
                self.cut_all(&why);
            }
            if view.changed().await.is_err() {
                return;
            }
        }
    }

    /// Rejects new calls, gives those in flight `grace` to finish, then cuts them; returns when all are settled.
    pub async fn close(&self, grace: Duration) {
        self.end.send_replace(ShutdownStage::Closed);
        let mut ended = self.ended.subscribe();
        let landed = async {
            while !self.flights().is_empty() {
                // A flight leaves the table before its end is announced; the sender is owned by `self`, so it cannot be
                // dropped.
                let _ = ended.changed().await;
            }
        };
        tokio::pin!(landed);
        if tokio::time::timeout(grace, &mut landed).await.is_err() {
            self.end.send_replace(ShutdownStage::Now);
            self.cut_all(&ending());
            landed.await;
        }
    }

    fn cut_all(&self, why: &CallFailure) {
        for flight in self.flights().values() {
            flight.cut(why.clone());
        }
    }

    /// Publishes the end of a call. Ends that show nothing about `spec.model` leave its state unchanged.
    fn note_end(&self, call: StoredCallKey, failure: Option<&CallFailure>) {
        // An answer that was billed above its bound does not count as a success.
        let violated = self.store.violation();
        match violated.as_ref().map(|violation| &violation.failure).or(failure) {
            None if call.purpose.uses_light_model() => {
                self.ended.send_modify(|(count, _)| *count += 1);
            }
            Some(failure) if !concerns_main_model(call, failure.kind) => {
                self.ended.send_modify(|(count, _)| *count += 1);
            }
            spoken => self.note_model(spoken),
        }
    }

    fn note_model(&self, failure: Option<&CallFailure>) {
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

    fn flights(&self) -> MutexGuard<'_, HashMap<CallId, Arc<InFlightCall>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn report(failure: &CallFailure) -> ModelReport {
    ModelReport {
        failure: Some(failure.kind),
        message: failure.message.clone(),
    }
}

fn ending() -> CallFailure {
    CallFailure::new(FailureKind::Cancelled, "the gateway is shutting down with its pod")
}

/// The record cannot be written, so no call may be made.
pub fn not_recorded(error: &CallStoreError) -> CallFailure {
    tracing::error!(%error, "failed to write the call store");
    CallFailure::new(
        FailureKind::RecordFailed,
        format!(
            "{error}; no calls are made until it can be written: expand the PersistentVolumeClaim or free space on the volume"
        ),
    )
}

/// Whether the end of the call is evidence about `spec.model`.
fn concerns_main_model(call: StoredCallKey, kind: FailureKind) -> bool {
    if call.purpose.uses_light_model() {
        // Turns continue without the answers of the light model, but no call is made after a bill above its bound.
        return kind == FailureKind::BoundViolated;
    }
    kind.facts().model != ModelEvidence::None
}

fn log(call: StoredCallKey, end: &CallEnd, metered: &CallUsage) {
    let bill = match metered {
        CallUsage::Billed(bill, _) => Some(bill),
        CallUsage::NotSent | CallUsage::Free | CallUsage::Unknown => None,
    };
    match end {
        CallEnd::Answered { body, .. } => tracing::info!(
            call = %call.id,
            purpose = %call.purpose,
            bytes = body.len(),
            input = bill.map(|bill| bill.input + bill.cache_read + bill.cache_write + bill.cache_write_1h),
            output = bill.map(|bill| bill.output),
            "call answered"
        ),
        CallEnd::Failed(failure) => {
            tracing::warn!(call = %call.id, purpose = %call.purpose, kind = %failure.kind, message = failure.message, "call failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tempfile::TempDir;

    use super::*;
    use crate::egress::AddressPolicy;
    use crate::engine::CallPurpose;
    use crate::gateway::in_flight::AnswerItem;
    use crate::gateway::model_field::ModelField;
    use crate::gateway::store::ModelNames;
    use crate::gateway::upstream::UpstreamConfig;
    use crate::link::client::LinkClient;
    use crate::link::messages::{BudgetTerms, Directives, LoopTotals};
    use crate::link::socket::WorkerSession;
    use crate::otlp::SpanSink;

    /// The calls of a gateway with a script and no controller, so without limits.
    fn calls(directory: &TempDir) -> Arc<ModelCalls> {
        let path = |name: &str| directory.path().join(name);
        // So long that its outcome does not fit on the full disk.
        let text = "one ".repeat(16_000);
        let script = format!("turns: [{{text: '{text}', delayMilliseconds: 200}}, {{text: two}}]");
        std::fs::write(path("script"), script).unwrap();
        let now = ClockReading::now();
        let contact = Arc::new(LinkState::new(Duration::from_mins(1), now));
        let session = WorkerSession {
            epoch: 1,
            known: LoopTotals::default(),
            traces: false,
            content: false,
            logs: false,
        };
        let directives = Directives {
            budget: Some(BudgetTerms::default()),
            ..Directives::default()
        };
        contact.attached(session, directives, (now, now));
        let store = Arc::new(CallStore::open(directory.path(), "m".into(), Timestamp::UNIX_EPOCH).unwrap());
        let client = Arc::new(LinkClient::new("https://nowhere", path("ca"), path("token")));
        let budget = GatewayBudget::new(
            Arc::clone(&store),
            Arc::clone(&contact),
            client,
            1,
            ModelNames::from("m"),
        );
        let model = serde_json::from_value(json!({"api": "Scripted", "name": "m"})).unwrap();
        let main = ModelUpstream::new(&UpstreamConfig {
            field: ModelField::Main,
            agent_uid: "uid",
            model: &model,
            key_file: &path("key"),
            ca_dir: &path("ca"),
            script_file: &path("script"),
            policy: &Arc::new(AddressPolicy::of_agents(vec![], vec![], true)),
        });
        let upstreams = ModelUpstreams { main, light: None };
        let config = json!({
            "namespace": "n", "name": "a", "uid": "uid", "epoch": 1, "linkUrl": "", "spec": {"model": model},
        });
        let spans = CallSpans::new(&serde_json::from_value(config).unwrap(), SpanSink::default(), false);
        Arc::new(ModelCalls::new(store, Arc::new(budget), contact, upstreams, spans))
    }

    fn submit(calls: &Arc<ModelCalls>, id: &str) -> CallReply {
        let call = StoredCallKey {
            id: id.parse().unwrap(),
            purpose: CallPurpose::Turn,
        };
        calls.submit(
            call,
            br#"{"model": "m", "messages": [{"role": "user", "content": "x"}]}"#,
        )
    }

    fn live(reply: CallReply) -> Arc<InFlightCall> {
        let CallReply::Live(flight) = reply else {
            panic!("not in flight")
        };
        flight
    }

    /// Waits until the call is recorded as open, then fills the disk.
    async fn fill_disk(calls: &ModelCalls, id: &str) {
        let id = id.parse().unwrap();
        while calls.store.find(id).unwrap() != Some(RecordedCall::Open) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        calls.store.fill_disk(true);
    }

    /// The item after all chunks received so far.
    async fn after_its_chunks(flight: &InFlightCall) -> AnswerItem {
        let mut read = 0;
        loop {
            match flight.next(read).await {
                AnswerItem::Chunk(_) => read += 1,
                next @ (AnswerItem::End | AnswerItem::NotYet | AnswerItem::Failed(_)) => return next,
            }
        }
    }

    #[tokio::test]
    async fn an_outcome_that_the_disk_has_no_room_for_is_in_flight_until_it_has() {
        let directory = TempDir::new().unwrap();
        let calls = calls(&directory);
        let flight = live(submit(&calls, "t1c1a1"));
        fill_disk(&calls, "t1c1a1").await;
        // Neither an end nor a failure: the worker retries.
        assert_eq!(after_its_chunks(&flight).await, AnswerItem::NotYet);
        assert!(matches!(submit(&calls, "t1c1a1"), CallReply::NotYet));
        assert!(!calls.acknowledge("t1c1a1".parse().unwrap()).unwrap());
        assert_eq!(calls.store.usage().calls, 0);
        let mut ended = calls.subscribe();
        calls.store.fill_disk(false);
        tokio::time::timeout(Duration::from_secs(10), ended.changed())
            .await
            .unwrap()
            .unwrap();
        let CallReply::Ended(CallEnd::Answered { body, .. }) = submit(&calls, "t1c1a1") else {
            panic!("no answer")
        };
        assert!(body.len() > 60_000);
        assert_eq!(calls.store.usage().calls, 1, "charged once");
        let times = calls.times().report();
        // The scripted delay of 200 ms, and no wait for the disk.
        assert_eq!((times[0].model.as_str(), times[0].counts.count()), ("m", 1));
        assert!(
            (200_000..5_000_000).contains(&times[0].counts.sum_microseconds),
            "{times:?}"
        );
        assert!(calls.acknowledge("t1c1a1".parse().unwrap()).unwrap());
    }

    #[tokio::test]
    async fn the_end_of_the_pod_does_not_wait_for_the_disk() {
        let directory = TempDir::new().unwrap();
        let calls = calls(&directory);
        let flight = live(submit(&calls, "t1c1a1"));
        fill_disk(&calls, "t1c1a1").await;
        assert_eq!(after_its_chunks(&flight).await, AnswerItem::NotYet);
        calls.close(Duration::from_millis(10)).await;
        let AnswerItem::Failed(failure) = after_its_chunks(&flight).await else {
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
