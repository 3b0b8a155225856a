//! The worker's end of the pod's socket.
//!
//! Owns the connection and its repeats: what goes wrong between worker and gateway is tried again here for as long as
//! it takes, and is never counted as a failure of the model. The run lease bounds it from outside.

use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use reqwest::{Client, Response, StatusCode};
use sse_stream::SseStream;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::api::failure::{CallFailure, FailureKind};
use crate::clock::ClockReading;
use crate::engine::budget::BudgetState;
use crate::engine::message::ModelAnswer;
use crate::engine::{CallId, CallPurpose};
use crate::link::deliveries::{Delivery, DeliveryAck, POLL_SECONDS};
use crate::link::events::{EventsPage, EventsResponse};
use crate::link::messages::LoopReport;
use crate::link::socket::{
    CALL_HEADER, COST_EVENT, COST_HEADER, FAILURE_EVENT, FAILURE_HEADER, PURPOSE_HEADER, SocketEvent, WorkerSession,
};

use super::budget;
use super::model::WireFormat;
use super::run_lease::RunLease;

/// First and longest wait before another try at the socket.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// Tries at one errand: about a minute.
const ERRAND_TRIES: u32 = 60;
/// Silence on the event stream after which it is opened anew; the gateway speaks every 5 s.
const EVENT_SILENCE: Duration = Duration::from_secs(15);
/// Longest time a short request may take.
const SHORT: Duration = Duration::from_secs(5);
/// Longest wait until events are taken: the controller may wait for its reader before it says so.
const EVENTS_TAKEN: Duration = Duration::from_secs(15);

/// The gateway said something: when, and what.
#[derive(Clone, Debug)]
pub struct GatewayUpdate {
    /// When it came.
    pub at: ClockReading,
    /// What it said.
    pub event: SocketEvent,
}

impl GatewayUpdate {
    /// Whether the loop is to be suspended.
    #[must_use]
    pub fn suspends(&self) -> bool {
        self.event.directives.suspend
    }

    /// What limits the calls.
    #[must_use]
    pub fn budget(&self) -> BudgetState {
        budget::from_directives(&self.event.directives)
    }

    /// What it says about contact with the controller.
    #[must_use]
    pub fn contact(&self) -> RunLease {
        // It may have lain in the socket while this process stood still. Both read the clock of one machine.
        let said = self.event.said_at.map(|said| self.at.wall.duration_since(said));
        let late = said.and_then(|late| Duration::try_from(late).ok()).unwrap_or_default();
        let age = Duration::from_millis(self.event.link_age_milliseconds);
        RunLease::new(self.at, age.saturating_add(late))
    }
}

/// A small thing to tell the gateway about a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallNotice {
    /// The journal has its outcome.
    Acknowledge(CallId),
    /// Cut it.
    Cancel(CallId),
}

/// Something between worker and gateway went wrong: try again.
enum CallError {
    /// The socket or the gateway behind it.
    Socket(String),
    /// The call itself: its end.
    Call(CallFailure),
}

/// Speaks to the gateway.
#[derive(Clone)]
pub struct GatewayClient {
    http: Client,
}

impl GatewayClient {
    /// A client of the socket at `path`. Nothing is sent yet.
    pub fn new(path: &Path) -> reqwest::Result<Self> {
        let http = Client::builder()
            .unix_socket(path)
            .no_proxy()
            // There is no TLS on this socket, so no roots are loaded.
            .tls_certs_only([])
            .build()?;
        Ok(Self { http })
    }

    /// The session, as soon as the gateway is attached.
    pub async fn session(&self) -> WorkerSession {
        let mut retry = RetryDelay::default();
        loop {
            match self.session_once().await {
                Ok(session) => return session,
                Err(detail) => retry.wait_after("waiting for the gateway's session", &detail).await,
            }
        }
    }

    async fn session_once(&self) -> Result<WorkerSession, String> {
        let response = short(self.http.get(url("/v1/session")).timeout(SHORT)).await?;
        response.json().await.map_err(describe_error)
    }

    /// The next events of a Sensor's pod, as soon as there are some.
    pub async fn next_delivery(&self) -> Delivery {
        let mut retry = RetryDelay::default();
        loop {
            match self.delivery_once().await {
                Ok(Some(delivery)) => return delivery,
                Ok(None) => retry = RetryDelay::default(),
                Err(detail) => {
                    retry
                        .wait_after("the gateway gives no deliveries; asking again", &detail)
                        .await;
                }
            }
        }
    }

    async fn delivery_once(&self) -> Result<Option<Delivery>, String> {
        let longest = SHORT + Duration::from_secs(POLL_SECONDS);
        let response = short(self.http.get(url("/v1/deliveries")).timeout(longest)).await?;
        match response.status() {
            StatusCode::OK => response.json().await.map(Some).map_err(describe_error),
            StatusCode::NO_CONTENT => Ok(None),
            status => Err(format!("status {}", status.as_u16())),
        }
    }

    /// Says that events of a Sensor's pod are on disk. Once: when it is lost, they come again.
    pub async fn delivered(&self, delivered: &DeliveryAck) -> Result<(), String> {
        let request = self.http.post(url("/v1/deliveries/ack")).json(delivered);
        short(request.timeout(SHORT * 3)).await.map(drop)
    }

    /// One model call. Repeats the same id until the gateway has said how it ended.
    pub async fn call(
        &self,
        call: (CallId, CallPurpose),
        format: WireFormat,
        body: serde_json::Value,
    ) -> Result<ModelAnswer, CallFailure> {
        let mut retry = RetryDelay::default();
        loop {
            match self.call_once(call, format, &body).await {
                Ok(answer) => return Ok(answer),
                Err(CallError::Call(failure)) => return Err(failure),
                Err(CallError::Socket(detail)) => {
                    retry.wait_after("the gateway is away; asking again", &detail).await;
                }
            }
        }
    }

    async fn call_once(
        &self,
        (call, purpose): (CallId, CallPurpose),
        format: WireFormat,
        body: &serde_json::Value,
    ) -> Result<ModelAnswer, CallError> {
        let response = self
            .http
            .post(url(format.route()))
            .header(CALL_HEADER, call.to_string())
            .header(PURPOSE_HEADER, purpose.as_ref())
            .json(body)
            .send()
            .await
            .map_err(CallError::socket)?;
        if response.headers().contains_key(FAILURE_HEADER) {
            let failure = response.bytes().await.map_err(CallError::socket)?;
            return Err(CallError::Call(failure_of(&failure)));
        }
        match response.status() {
            StatusCode::OK => {}
            // Not attached yet, or again: it will be, or the run lease ends this.
            StatusCode::SERVICE_UNAVAILABLE => return Err(CallError::Socket("status 503".into())),
            status => return Err(CallError::Call(unexpected(status))),
        }
        let cost = response
            .headers()
            .get(COST_HEADER)
            .and_then(|cost| cost.to_str().ok()?.parse().ok());
        let is_stream = response
            .headers()
            .get(reqwest::header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        if is_stream {
            streamed(response, format).await
        } else {
            let body = response.bytes().await.map_err(CallError::socket)?;
            let answer = format.answer(&body).map_err(CallError::Call)?;
            Ok(ModelAnswer { cost, ..answer })
        }
    }

    /// Runs errands, each until the gateway has taken it or it is too late to matter; ends when the sender is dropped
    /// and all are done.
    pub async fn run_notices(self, mut errands: mpsc::UnboundedReceiver<CallNotice>) {
        let mut running = JoinSet::new();
        while let Some(errand) = errands.recv().await {
            running.spawn(self.clone().run_notice(errand));
            while running.try_join_next().is_some() {}
        }
        running.join_all().await;
    }

    async fn run_notice(self, errand: CallNotice) {
        let path = match errand {
            CallNotice::Acknowledge(call) => format!("/v1/calls/{call}/ack"),
            CallNotice::Cancel(call) => format!("/v1/calls/{call}/cancel"),
        };
        let mut retry = RetryDelay::default();
        for _ in 0..ERRAND_TRIES {
            match short(self.http.post(url(&path)).timeout(SHORT)).await {
                Ok(_) => return,
                Err(detail) => retry.wait_after("an errand to the gateway waits", &detail).await,
            }
        }
        tracing::warn!(path, "the gateway did not take an errand");
    }

    /// Sends events to one who reads them. An error says why they were not taken: not now.
    pub async fn send_events(&self, page: &EventsPage) -> Result<EventsResponse, String> {
        let request = self.http.post(url("/v1/readings")).json(page).timeout(EVENTS_TAKEN);
        let response = short(request).await?;
        response.json().await.map_err(describe_error)
    }

    /// Sends the newest report whenever there is one, and again after each new connection of the event stream (a
    /// gateway that restarted has forgotten it). Ends when the sender is dropped and the last report was taken.
    pub async fn run_reports(
        self,
        mut newest: watch::Receiver<Option<LoopReport>>,
        mut connections: watch::Receiver<u64>,
    ) {
        let mut retry = RetryDelay::default();
        loop {
            let report = newest.borrow_and_update().clone();
            connections.mark_unchanged();
            if let Some(report) = report {
                let request = self.http.put(url("/v1/report")).json(&report).timeout(SHORT);
                if let Err(detail) = short(request).await {
                    retry.wait_after("a report to the gateway waits", &detail).await;
                    continue;
                }
                retry = RetryDelay::default();
            }
            tokio::select! {
                changed = newest.changed() => if changed.is_err() { return },
                Ok(()) = connections.changed() => {}
            }
        }
    }

    /// Follows the gateway's events for ever. `connections` counts the connections made.
    pub async fn run_events(self, heard: watch::Sender<Option<GatewayUpdate>>, connections: watch::Sender<u64>) {
        let mut retry = RetryDelay::default();
        loop {
            let detail = match self.http.get(url("/v1/events")).send().await {
                Ok(response) if response.status() == StatusCode::OK => {
                    connections.send_modify(|count| *count += 1);
                    let opened = ClockReading::now();
                    let detail = follow(response, &heard).await;
                    if opened.instant.elapsed() > EVENT_SILENCE {
                        retry = RetryDelay::default();
                    }
                    detail
                }
                Ok(response) => format!("status {}", response.status().as_u16()),
                Err(error) => error.without_url().to_string(),
            };
            retry
                .wait_after("the gateway's events ended; opening them again", &detail)
                .await;
        }
    }
}

impl CallError {
    fn socket(error: reqwest::Error) -> Self {
        Self::Socket(describe_error(error))
    }
}

/// Reads events until the stream ends or falls silent; says why.
async fn follow(response: Response, heard: &watch::Sender<Option<GatewayUpdate>>) -> String {
    let mut events = SseStream::from_bytes_stream(response.bytes_stream());
    loop {
        let event = match tokio::time::timeout(EVENT_SILENCE, events.next()).await {
            Err(_) => return format!("silent for {} s", EVENT_SILENCE.as_secs()),
            Ok(None) => return "closed".into(),
            Ok(Some(Err(error))) => return error.to_string(),
            Ok(Some(Ok(event))) => event,
        };
        // Events of a later version are passed over.
        if let Some(event) = event.data.and_then(|data| serde_json::from_str(&data).ok()) {
            heard.send_replace(Some(GatewayUpdate {
                at: ClockReading::now(),
                event,
            }));
        }
    }
}

async fn streamed(response: Response, format: WireFormat) -> Result<ModelAnswer, CallError> {
    let mut events = SseStream::from_bytes_stream(response.bytes_stream());
    let mut aggregate = format.aggregate();
    let (mut is_done, mut cost) = (false, None);
    loop {
        let next = tokio::time::timeout(if is_done { SHORT } else { Duration::MAX }, events.next());
        // After the end mark only what it cost is to come; without it the answer is as good.
        let Ok(Some(event)) = next.await else { break };
        let event = event.map_err(|error| {
            if let sse_stream::Error::Body(error) = error {
                CallError::Socket(error.to_string())
            } else {
                CallError::Call(format.bad_response("the stream is not server-sent events"))
            }
        })?;
        let data = event.data.unwrap_or_default();
        match event.event.as_deref() {
            Some(FAILURE_EVENT) => return Err(CallError::Call(failure_of(data.as_bytes()))),
            Some(COST_EVENT) => cost = data.trim().parse().ok(),
            _ if is_done || data.is_empty() => {}
            _ => is_done = aggregate.push(&data).map_err(CallError::Call)?,
        }
    }
    let answer = aggregate.finish(is_done).map_err(CallError::Call)?;
    Ok(ModelAnswer { cost, ..answer })
}

/// A short request: its response when it was taken (2xx), or was refused for good (4xx, logged); else why it was not.
async fn short(request: reqwest::RequestBuilder) -> Result<Response, String> {
    let response = request.send().await.map_err(describe_error)?;
    let status = response.status();
    if status.is_server_error() {
        return Err(format!("status {}", status.as_u16()));
    }
    if status.is_client_error() {
        tracing::warn!(
            path = response.url().path(),
            status = status.as_u16(),
            "the gateway refused a request"
        );
    }
    Ok(response)
}

fn failure_of(json: &[u8]) -> CallFailure {
    serde_json::from_slice(json).unwrap_or_else(|_| CallFailure {
        kind: FailureKind::BadResponse,
        message: "the gateway said that the call failed, but not how: worker and gateway are of different versions"
            .into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    })
}

fn unexpected(status: StatusCode) -> CallFailure {
    CallFailure {
        kind: FailureKind::BadResponse,
        message: format!(
            "the pod's gateway refused the call with status {}: worker and gateway are of different versions",
            status.as_u16()
        ),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}

/// An error and its root cause, without the address.
fn describe_error(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut root: &dyn std::error::Error = &error;
    while let Some(cause) = root.source() {
        root = cause;
    }
    format!("{error}: {root}")
}

fn url(path: &str) -> String {
    format!("http://gateway{path}")
}

/// Waits between two tries, a little longer each time; says so once.
pub(super) struct RetryDelay {
    wait: Duration,
    said: bool,
}

impl Default for RetryDelay {
    fn default() -> Self {
        Self {
            wait: RETRY.0,
            said: false,
        }
    }
}

impl RetryDelay {
    pub(super) async fn wait_after(&mut self, what: &str, detail: &str) {
        if !std::mem::replace(&mut self.said, true) {
            tracing::warn!(detail, "{what}");
        }
        sleep(self.wait).await;
        self.wait = (self.wait * 2).min(RETRY.1);
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn an_event_that_lay_in_the_socket_says_how_old_it_is() {
        let at = ClockReading::now();
        let age = |said_at| {
            let event = SocketEvent {
                link_age_milliseconds: 8_000,
                said_at,
                ..SocketEvent::default()
            };
            GatewayUpdate { at, event }.contact().age(at)
        };
        let before = |seconds| Some(at.wall - SignedDuration::from_secs(seconds));
        assert_eq!(age(before(0)), Duration::from_secs(8));
        assert_eq!(age(before(50)), Duration::from_secs(58), "read late");
        assert_eq!(age(before(-3_600)), Duration::from_secs(8), "the clock was set back");
        assert_eq!(age(None), Duration::from_secs(8));
    }
}
