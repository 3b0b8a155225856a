//! Delivers the responses to tasks: one after the other, in the order in which the tasks ended, each until its
//! receiver has accepted it.
//!
//! Keeps nothing: a response stays in the journal until it is delivered, so that a restart continues with it. It may
//! then be sent again, with the same idempotency key.

use futures::FutureExt;
use futures::future::{self, BoxFuture};
use serde_json::{Map, Value};
use tokio::time::{Duration, Instant, sleep, timeout_at};

use super::gateway_client::GatewayClient;
use super::journal::{JournalError, WaitingResponse};
use super::journaled_engine::JournaledEngine;
use crate::api::task::TaskOutcome;
use crate::engine::tasks::TaskResponse;
use crate::link::socket::OutgoingResponse;
use crate::support::backoff::{Backoff, jitter};

const FIRST_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_mins(5);
/// Refusals in a row with a status for an invalid request, and how long they must continue, until the response is dropped.
const MAX_REFUSALS: u32 = 5;
const MAX_REFUSAL: Duration = Duration::from_mins(10);
/// The same for all answers other than success: otherwise one response could block the others forever. The number is so
/// high that a receiver that was unreachable for a day does not lose a response by the first answer of its return.
const MAX_FAILURES: u32 = 100;
const MAX_FAILURE: Duration = Duration::from_hours(24);
/// How long the end of the loop waits for the responses that are left.
const SHUTDOWN_RESPONSES_TIMEOUT: Duration = Duration::from_secs(5);
/// Responses that wait, from which on no further task is accepted.
const MAX_WAITING: usize = 1_000;
/// Failed attempts after which a log line says so.
const TOLD_AFTER: u32 = 3;

pub struct ResponseDelivery {
    gateway: GatewayClient,
    /// The Agent has a receiver.
    is_enabled: bool,
    /// Responses that have not been delivered.
    waiting: usize,
    /// The delivery of the response at this position.
    sending: Option<BoxFuture<'static, i64>>,
}

impl ResponseDelivery {
    #[must_use]
    pub fn new(gateway: &GatewayClient, is_enabled: bool) -> Self {
        Self {
            gateway: gateway.clone(),
            is_enabled,
            waiting: 0,
            sending: None,
        }
    }

    /// Continues with what the previous process has not delivered.
    pub fn resume(&mut self, steps: &JournaledEngine<'_>) -> Result<(), JournalError> {
        self.waiting = steps.count_responses()?;
        self.begin(steps)
    }

    /// Tasks have ended.
    pub fn added(&mut self, responses: usize, steps: &JournaledEngine<'_>) -> Result<(), JournalError> {
        if self.is_enabled {
            self.waiting = self.waiting.saturating_add(responses);
        }
        self.begin(steps)
    }

    /// The response at this position was delivered.
    pub fn delivered(&mut self, seq: i64, steps: &JournaledEngine<'_>) -> Result<(), JournalError> {
        self.waiting = self.waiting.saturating_sub(1);
        steps.response_delivered(seq)?;
        self.begin(steps)
    }

    /// Whether a response waits to be delivered.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Whether no further task may be accepted: an unavailable receiver must not fill the volume.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.waiting >= MAX_WAITING
    }

    /// Begins with the oldest response, unless one is being sent.
    fn begin(&mut self, steps: &JournaledEngine<'_>) -> Result<(), JournalError> {
        if !self.is_enabled || self.sending.is_some() {
            return Ok(());
        }
        if let Some(waiting) = steps.next_response()? {
            self.sending = Some(deliver(self.gateway.clone(), waiting).boxed());
        }
        Ok(())
    }

    /// Sends the responses that are left, for at most [`SHUTDOWN_RESPONSES_TIMEOUT`] and no longer than `left`. The rest stays in the
    /// journal for the next start.
    pub async fn finish(&mut self, left: Duration, steps: &mut JournaledEngine<'_>) -> Result<(), JournalError> {
        let deadline = Instant::now() + SHUTDOWN_RESPONSES_TIMEOUT.min(left);
        while self.sending.is_some() {
            let Ok(seq) = timeout_at(deadline, self.next()).await else {
                break;
            };
            self.delivered(seq, steps)?;
        }
        Ok(())
    }

    /// The position of the next response that is delivered. Cancel safe.
    pub async fn next(&mut self) -> i64 {
        let Some(sending) = &mut self.sending else {
            return future::pending().await;
        };
        let seq = sending.await;
        self.sending = None;
        seq
    }
}

/// The answers to one response that were no success.
#[derive(Default)]
struct ResponseRefusals {
    /// Those in a row that say that the response is wrong: how many, and since when.
    definite: Option<(u32, Instant)>,
    /// All of them.
    all: Option<(u32, Instant)>,
}

impl ResponseRefusals {
    /// The receiver answered with this status. Whether the response is dropped.
    fn ends_with(&mut self, status: u16, now: Instant) -> bool {
        let counted = |refusals: Option<(u32, Instant)>| {
            let (count, since) = refusals.unwrap_or((0, now));
            (count.saturating_add(1), since)
        };
        self.definite = refuses_for_good(status).then(|| counted(self.definite));
        let all = counted(self.all);
        self.all = Some(all);
        let is_over = |(count, since): (u32, Instant), max, longest| count >= max && now - since >= longest;
        let is_wrong = |definite| is_over(definite, MAX_REFUSALS, MAX_REFUSAL);
        self.definite.is_some_and(is_wrong) || is_over(all, MAX_FAILURES, MAX_FAILURE)
    }

    /// The receiver did not answer.
    fn unanswered(&mut self) {
        self.definite = None;
    }
}

async fn deliver(gateway: GatewayClient, waiting: WaitingResponse) -> i64 {
    let WaitingResponse { seq, response } = waiting;
    let response = outgoing(&response);
    let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
    let (mut failures, mut refusals) = (0_u32, ResponseRefusals::default());
    loop {
        let detail = match gateway.send_response(&response).await {
            Ok(status) if (200..300).contains(&status) => return seq,
            Ok(status) => {
                if refusals.ends_with(status, Instant::now()) {
                    tracing::warn!(
                        task = response.id,
                        status,
                        "the receiver of spec.task.responses rejects a response; it is kept in the journal and not sent again"
                    );
                    return seq;
                }
                format!("status {status}")
            }
            Err(detail) => {
                refusals.unanswered();
                detail
            }
        };
        failures = failures.saturating_add(1);
        if failures == TOLD_AFTER {
            tracing::warn!(
                task = response.id,
                detail,
                "failed to deliver a response to spec.task.responses; retrying"
            );
        }
        sleep(backoff.next_spread(jitter())).await;
    }
}

/// Whether the same response would be refused again. A missing permission or path may be repaired.
fn refuses_for_good(status: u16) -> bool {
    matches!(status, 400 | 405 | 406 | 409 | 410 | 411 | 413 | 415 | 422)
}

/// What the receiver is sent, apart from which Agent it comes from.
fn outgoing(response: &TaskResponse) -> OutgoingResponse {
    let mut body = match serde_json::to_value(response) {
        Ok(Value::Object(body)) => body,
        Ok(_) | Err(_) => Map::new(),
    };
    let channel = match response.outcome {
        TaskOutcome::Failed => "agent-errors",
        TaskOutcome::Completed | TaskOutcome::LimitReached => "responses",
    };
    body.insert("channel".to_owned(), channel.into());
    OutgoingResponse {
        id: response.id.clone(),
        body,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::machine::Engine;
    use crate::engine::settings::EngineSettings;
    use crate::worker::journal::{Journal, JournalOwner};

    #[test]
    fn the_outbox_is_full_at_its_limit_and_has_room_once_a_response_is_delivered() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let owner = JournalOwner {
            agent_uid: "agent".into(),
            pod_uid: "pod".into(),
            epoch: 1,
        };
        let (mut journal, _) = Journal::open(dir.path(), &owner).unwrap();
        journal.claim(&owner).unwrap();
        let spec = serde_json::from_value(serde_json::json!({
            "mode": "Task", "instructions": "Answer.", "model": {"api": "OpenAIChat", "name": "m", "baseURL": "http://m"},
        }))
        .unwrap();
        let engine = Engine::new(EngineSettings::try_from(&spec).unwrap());
        let steps = JournaledEngine::new(engine, &mut journal);
        let gateway = GatewayClient::new(&dir.path().join("socket")).unwrap();
        let mut responses = ResponseDelivery::new(&gateway, true);
        responses.added(MAX_WAITING - 1, &steps).unwrap();
        assert!(!responses.is_full());
        responses.added(1, &steps).unwrap();
        assert!(responses.is_full());
        responses.delivered(1, &steps).unwrap();
        assert!(!responses.is_full());
        let mut without = ResponseDelivery::new(&gateway, false);
        without.added(MAX_WAITING, &steps).unwrap();
        assert!(!without.is_full(), "without a receiver, none waits");
    }

    #[test]
    fn an_invalid_response_is_dropped_after_ten_minutes_and_any_other_refused_one_after_a_day() {
        let start = Instant::now();
        let minutes = |count: u64| start + Duration::from_mins(count);
        let refused = |status: u16, max: u32, last: Instant| {
            let mut refusals = ResponseRefusals::default();
            for _ in 1..max {
                assert!(!refusals.ends_with(status, start));
            }
            refusals.ends_with(status, last)
        };
        let almost = Duration::from_millis(1);
        for (status, max, longest) in [
            (422, MAX_REFUSALS, MAX_REFUSAL),
            (500, MAX_FAILURES, MAX_FAILURE),
            (404, MAX_FAILURES, MAX_FAILURE),
        ] {
            assert!(
                !refused(status, max, start + longest.saturating_sub(almost)),
                "{status}"
            );
            assert!(!refused(status, max - 1, start + longest), "{status}");
            assert!(refused(status, max, start + longest), "{status}");
        }
        // Another answer, or none, ends the row of those that say that it is wrong, and not the day.
        let mut refusals = ResponseRefusals::default();
        for attempt in 0..4 {
            assert!(!refusals.ends_with(422, minutes(attempt)));
        }
        refusals.unanswered();
        assert!(!refusals.ends_with(422, start + MAX_REFUSAL));
        for _ in 5..MAX_FAILURES - 1 {
            assert!(!refusals.ends_with(503, start));
        }
        refusals.unanswered();
        assert!(refusals.ends_with(422, start + MAX_FAILURE));
    }

    #[test]
    fn a_response_is_refused_for_good_only_if_it_is_wrong_itself() {
        for status in [400, 413, 422] {
            assert!(refuses_for_good(status), "{status}");
        }
        for status in [200, 301, 401, 403, 404, 408, 425, 429, 500, 503] {
            assert!(!refuses_for_good(status), "{status}");
        }
    }
}
