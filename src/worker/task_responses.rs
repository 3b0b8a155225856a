//! Delivers the responses to tasks: one after the other, in the order in which the tasks were accepted, each until its
//! receiver has accepted it.
//!
//! Keeps nothing: a response stays in the journal until it is delivered, so that a restart continues with it. It may
//! then be sent again, with the same idempotency key.

use futures::FutureExt;
use futures::future::{self, BoxFuture};
use serde_json::{Map, Value};
use tokio::time::{Duration, sleep};

use super::gateway_client::GatewayClient;
use super::journal::{JournalError, WaitingResponse};
use super::journaled_engine::JournaledEngine;
use crate::api::task::TaskOutcome;
use crate::engine::tasks::TaskResponse;
use crate::link::socket::OutgoingResponse;
use crate::support::backoff::{Backoff, jitter};

const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_mins(5);
/// Attempts after which a response is given up that its receiver refuses for good.
const MOST_REFUSALS: u32 = 5;

pub struct ResponseDelivery {
    gateway: GatewayClient,
    /// The Agent has a receiver.
    is_enabled: bool,
    /// The delivery of the response at this position.
    sending: Option<BoxFuture<'static, i64>>,
}

impl ResponseDelivery {
    #[must_use]
    pub fn new(gateway: &GatewayClient, is_enabled: bool) -> Self {
        Self {
            gateway: gateway.clone(),
            is_enabled,
            sending: None,
        }
    }

    /// Begins with the oldest response, unless one is being sent.
    pub fn begin(&mut self, steps: &JournaledEngine<'_>) -> Result<(), JournalError> {
        if !self.is_enabled || self.sending.is_some() {
            return Ok(());
        }
        if let Some(waiting) = steps.next_response()? {
            self.sending = Some(deliver(self.gateway.clone(), waiting).boxed());
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

async fn deliver(gateway: GatewayClient, waiting: WaitingResponse) -> i64 {
    let WaitingResponse { seq, response } = waiting;
    let response = outgoing(&response);
    let mut backoff = Backoff::new(FIRST_RETRY, LONGEST_RETRY);
    let mut refusals = 0;
    loop {
        let detail = match gateway.send_response(&response).await {
            Ok(status) if (200..300).contains(&status) => return seq,
            Ok(status) => {
                let is_refusal = (400..500).contains(&status) && ![408, 425, 429].contains(&status);
                refusals = if is_refusal { refusals + 1 } else { 0 };
                if refusals >= MOST_REFUSALS {
                    tracing::warn!(
                        task = response.id,
                        status,
                        "the receiver of spec.task.responses refuses a response; it is kept in the journal and not sent again"
                    );
                    return seq;
                }
                format!("status {status}")
            }
            Err(detail) => {
                refusals = 0;
                detail
            }
        };
        tracing::debug!(task = response.id, detail, "failed to deliver a response; retrying");
        sleep(backoff.next_spread(jitter())).await;
    }
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
