//! The worker's client of the pod's socket.
//!
//! Owns the connection and its retries: failures between worker and gateway are retried here without limit, and never
//! count as failures of the model. The run lease bounds them from outside.

use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use reqwest::{Client, Response, StatusCode};
use serde::de::DeserializeOwned;
use sse_stream::SseStream;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::budget::BudgetState;
use crate::engine::message::ModelAnswer;
use crate::engine::{CallId, CallPurpose, OpenRequests};
use crate::link::deliveries::{Delivery, DeliveryAck, POLL_SECONDS};
use crate::link::events::{EventsPage, EventsResponse};
use crate::link::history::{HistoryAck, HistoryBatch};
use crate::link::messages::LoopReport;
use crate::link::socket::{
    CALL_HEADER, COST_EVENT, COST_HEADER, FAILURE_EVENT, FAILURE_HEADER, OutgoingResponse, PURPOSE_HEADER, SocketEvent,
    WorkerSession,
};
use crate::link::task_requests::{RequestedTask, TaskAck};
use crate::link::text_fragments::TextFragment;
use crate::otlp::{self, DropCount, LogSink, Span};
use crate::provider::WireFormat;
use crate::support::backoff::Backoff;
use crate::support::clock::ClockReading;
use crate::support::text::root_cause;

use super::answer_text::TextTap;
use super::budget;
use super::run_lease::RunLease;

/// First and longest wait before a request is retried.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
/// Attempts at one [`CallMessage`]: about a minute.
const ERRAND_TRIES: u32 = 60;
/// Spans of one message, few enough for spans with texts to fit, and attempts at it: the gateway may be restarting.
const MESSAGE_SPANS: usize = 16;
const SPAN_TRIES: u32 = 20;
/// Silence after which the event stream is reopened; the gateway sends an event every 5 s.
const EVENT_SILENCE: Duration = Duration::from_secs(15);
/// Timeout of a short request.
const SHORT: Duration = Duration::from_secs(5);
/// Longest time in which the gateway makes one attempt to send a response.
const RESPONSE_ATTEMPT: Duration = Duration::from_secs(35);
/// Timeout of a page of events, and of rows of the history: the controller may wait for its reader, or for the database,
/// before it answers.
const EVENTS_TAKEN: Duration = Duration::from_secs(15);

#[derive(Clone, Debug)]
pub struct GatewayUpdate {
    /// When it arrived.
    pub at: ClockReading,
    pub event: SocketEvent,
}

impl GatewayUpdate {
    #[must_use]
    pub fn suspends(&self) -> bool {
        self.event.directives.suspend
    }

    #[must_use]
    pub fn budget(&self) -> BudgetState {
        budget::from_directives(&self.event.directives)
    }

    /// The requests of users that are not known to be handled.
    #[must_use]
    pub fn open_requests(&self) -> OpenRequests {
        let directives = &self.event.directives;
        OpenRequests {
            wake: directives.wake.clone(),
            resume: directives.resume.clone(),
            stop: directives.stop.clone(),
        }
    }

    /// Returns the last contact with the controller, by the gateway's account.
    #[must_use]
    pub fn contact(&self) -> RunLease {
        // The event may have been queued in the socket while this process was suspended: add that delay to the age of
        // the contact. Worker and gateway share the clock of one machine; a negative delay (clock set back) counts as
        // 0.
        let late = self.event.sent_at.map(|sent| self.at.wall.duration_since(sent));
        let late = late.and_then(|late| Duration::try_from(late).ok()).unwrap_or_default();
        let age = Duration::from_millis(self.event.link_age_milliseconds);
        RunLease::new(self.at, age.saturating_add(late))
    }
}

/// A notice to the gateway about a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallMessage {
    /// The journal has the outcome of this call.
    Acknowledge(CallId),
    /// Cancel this call.
    Cancel(CallId),
}

enum CallError {
    /// The socket or the gateway failed: retry.
    Socket(String),
    /// The call itself failed: final.
    Call(CallFailure),
}

#[derive(Clone)]
pub struct GatewayClient {
    http: Client,
}

impl GatewayClient {
    /// Creates a client of the socket at `path`. Sends nothing yet.
    pub fn new(path: &Path) -> reqwest::Result<Self> {
        let http = Client::builder()
            .unix_socket(path)
            .no_proxy()
            // The socket does not use TLS, so no roots are loaded.
            .tls_certs_only([])
            .build()?;
        Ok(Self { http })
    }

    /// Returns the session, as soon as the gateway is attached.
    pub async fn session(&self) -> WorkerSession {
        let mut retry = RetryDelay::default();
        loop {
            match self.session_once().await {
                Ok(session) => return session,
                Err(detail) => retry.wait_after("failed to get the session; retrying", &detail).await,
            }
        }
    }

    /// Like [`GatewayClient::session`], which logs for both.
    pub async fn quiet_session(&self) -> WorkerSession {
        let mut backoff = RETRY;
        loop {
            match self.session_once().await {
                Ok(session) => return session,
                Err(_) => sleep(backoff.next_wait()).await,
            }
        }
    }

    async fn session_once(&self) -> Result<WorkerSession, String> {
        let response = short(self.http.get(url("/v1/session")).timeout(SHORT)).await?;
        response.json().await.map_err(describe_error)
    }

    /// Waits for the next events of a sensor pod.
    pub async fn next_delivery(&self) -> Delivery {
        let failed = "failed to poll the gateway for deliveries; retrying";
        self.poll("/v1/deliveries", failed).await
    }

    /// Acknowledges events of a sensor pod that are on disk. Sent once: if it is lost, the events are redelivered.
    pub async fn delivered(&self, delivered: &DeliveryAck) -> Result<(), String> {
        let request = self.http.post(url("/v1/deliveries/ack")).json(delivered);
        short(request.timeout(SHORT * 3)).await.map(drop)
    }

    /// Waits for the next task that a user requests.
    pub async fn next_task(&self) -> RequestedTask {
        self.poll("/v1/tasks", "failed to poll the gateway for tasks; retrying")
            .await
    }

    /// Sends the receipt of a task. Sent once: if it is lost, the client repeats its request.
    pub async fn acknowledge_task(&self, ack: &TaskAck) -> Result<(), String> {
        let request = self.http.post(url("/v1/tasks/ack")).json(ack);
        short(request.timeout(SHORT * 3)).await.map(drop)
    }

    /// Waits for the next item at a route that answers late, or with 204 when there was none for [`POLL_SECONDS`].
    async fn poll<T: DeserializeOwned>(&self, route: &str, failed: &'static str) -> T {
        let mut retry = RetryDelay::default();
        loop {
            match self.poll_once(route).await {
                Ok(Some(item)) => return item,
                Ok(None) => retry = RetryDelay::default(),
                Err(detail) => retry.wait_after(failed, &detail).await,
            }
        }
    }

    async fn poll_once<T: DeserializeOwned>(&self, route: &str) -> Result<Option<T>, String> {
        let longest = SHORT + Duration::from_secs(POLL_SECONDS);
        let response = short(self.http.get(url(route)).timeout(longest)).await?;
        match response.status() {
            StatusCode::OK => response.json().await.map(Some).map_err(describe_error),
            StatusCode::NO_CONTENT => Ok(None),
            status => Err(format!("status {}", status.as_u16())),
        }
    }

    /// Sends a response to a task once. Returns the status of its receiver.
    pub async fn send_response(&self, response: &OutgoingResponse) -> Result<u16, String> {
        let request = self.http.post(url("/v1/task-responses")).json(response);
        let answer = request
            .timeout(SHORT + RESPONSE_ATTEMPT)
            .send()
            .await
            .map_err(describe_error)?;
        if answer.status() == StatusCode::BAD_GATEWAY {
            return Err(answer.text().await.map_err(describe_error)?);
        }
        answer.json().await.map_err(describe_error)
    }

    /// Makes one model call. Retries with the same id until the gateway has reported how it ended, so that a call is
    /// never paid for twice. `tap` watches the text of the answer, each time from its beginning.
    pub async fn call(
        &self,
        call: (CallId, CallPurpose),
        format: WireFormat,
        body: serde_json::Value,
        tap: Option<TextTap>,
    ) -> Result<ModelAnswer, CallFailure> {
        let mut retry = RetryDelay::default();
        loop {
            match self.call_once(call, format, &body, tap.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(CallError::Call(failure)) => return Err(failure),
                Err(CallError::Socket(detail)) => {
                    retry
                        .wait_after("the gateway is unreachable; retrying the call", &detail)
                        .await;
                }
            }
        }
    }

    async fn call_once(
        &self,
        (call, purpose): (CallId, CallPurpose),
        format: WireFormat,
        body: &serde_json::Value,
        tap: Option<TextTap>,
    ) -> Result<ModelAnswer, CallError> {
        let response = self
            .http
            .post(url(format.endpoint().route))
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
            // Not attached, or attaching again: temporary, and bounded by the run lease.
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
            streamed(response, format, tap).await
        } else {
            let body = response.bytes().await.map_err(CallError::socket)?;
            let answer = format.answer(&body).map_err(CallError::Call)?;
            Ok(ModelAnswer { cost, ..answer })
        }
    }

    /// Sends [`CallMessage`]s, each until the gateway accepts it or its retries are exhausted. Ends when the sender is
    /// dropped and all are sent.
    pub async fn run_notices(self, mut errands: mpsc::UnboundedReceiver<CallMessage>) {
        let mut running = JoinSet::new();
        while let Some(errand) = errands.recv().await {
            running.spawn(self.clone().run_notice(errand));
            while running.try_join_next().is_some() {}
        }
        running.join_all().await;
    }

    async fn run_notice(self, errand: CallMessage) {
        let path = match errand {
            CallMessage::Acknowledge(call) => format!("/v1/calls/{call}/ack"),
            CallMessage::Cancel(call) => format!("/v1/calls/{call}/cancel"),
        };
        let mut retry = RetryDelay::default();
        for _ in 0..ERRAND_TRIES {
            match short(self.http.post(url(&path)).timeout(SHORT)).await {
                Ok(_) => return,
                Err(detail) => retry.wait_after("failed to send a notice; retrying", &detail).await,
            }
        }
        tracing::warn!(path, "failed to send a call notice to the gateway; giving up");
    }

    /// Sends spans, each message a few times at most. Ends when the sender is dropped and all are sent or given up.
    pub async fn run_spans(self, mut queue: mpsc::Receiver<Span>, dropped: DropCount) {
        let mut spans = Vec::new();
        while queue.recv_many(&mut spans, MESSAGE_SPANS).await > 0 {
            let count = spans.len();
            let body = otlp::encode(std::mem::take(&mut spans));
            let mut retry = RetryDelay::default();
            let mut is_sent = false;
            for _ in 0..SPAN_TRIES {
                match self.send_telemetry("/v1/traces", body.clone(), &dropped).await {
                    Ok(is_accepted) => {
                        is_sent = is_accepted;
                        break;
                    }
                    Err(detail) => retry.wait_after("failed to send spans; retrying", &detail).await,
                }
            }
            if !is_sent {
                dropped.add(count);
            }
        }
    }

    /// Sends lines of the log, each message a few times at most, until `closing` and all are sent or given up. Logs
    /// nothing: it would be sent as well.
    pub async fn run_logs(self, lines: LogSink, closing: CancellationToken) {
        let dropped = lines.dropped();
        while let Some((message, count)) = lines.next_message(&closing).await {
            let mut backoff = RETRY;
            let mut is_sent = false;
            for _ in 0..SPAN_TRIES {
                let sent = self.send_telemetry("/v1/logs", message.clone(), &dropped).await;
                is_sent = sent == Ok(true);
                if sent.is_ok() || closing.is_cancelled() {
                    break;
                }
                sleep(backoff.next_wait()).await;
            }
            if !is_sent {
                dropped.add(count);
            }
        }
    }

    /// Sends a message once, with the number of what was dropped since the last one. Returns whether the gateway accepted it;
    /// what it refused, it refuses again. Logs nothing, because the log is sent here too.
    async fn send_telemetry(&self, path: &str, message: Vec<u8>, dropped: &DropCount) -> Result<bool, String> {
        let told = u32::try_from(dropped.take()).unwrap_or(u32::MAX);
        let path = format!("{path}?dropped={told}");
        let sent = self.http.post(url(&path)).body(message).timeout(SHORT).send().await;
        let status = sent.map(|response| response.status()).map_err(describe_error);
        if !matches!(&status, Ok(status) if status.is_success()) {
            dropped.add(usize::try_from(told).unwrap_or(usize::MAX));
        }
        match status? {
            status if status.is_server_error() => Err(format!("status {}", status.as_u16())),
            status => Ok(status.is_success()),
        }
    }

    /// Sends a page of events to a reader. Fails if the page was not accepted and has to be sent again.
    pub async fn send_events(&self, page: &EventsPage) -> Result<EventsResponse, String> {
        let request = self.http.post(url("/v1/readings")).json(page).timeout(EVENTS_TAKEN);
        let response = short(request).await?;
        response.json().await.map_err(describe_error)
    }

    /// Sends text of an answer that arrives, once.
    pub async fn send_text(&self, fragment: TextFragment) -> Result<(), String> {
        let request = self.http.post(url("/v1/text")).json(&fragment).timeout(SHORT);
        short(request).await.map(drop)
    }

    /// Uploads rows of the history once. Fails if they were not stored.
    pub async fn upload_history(&self, batch: &HistoryBatch) -> Result<HistoryAck, String> {
        let request = self.http.post(url("/v1/history")).json(batch).timeout(EVENTS_TAKEN);
        let response = request.send().await.map_err(describe_error)?;
        match response.status() {
            StatusCode::OK => response.json().await.map_err(describe_error),
            StatusCode::BAD_GATEWAY => Err(response.text().await.map_err(describe_error)?),
            status => Err(format!("status {}", status.as_u16())),
        }
    }

    /// Sends each newest [`LoopReport`], and sends it again after each new connection of the event stream, because a
    /// restarted gateway has no report. Ends when the sender is dropped and the last report was accepted.
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
                    retry
                        .wait_after("failed to send the report to the gateway; retrying", &detail)
                        .await;
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

    /// Follows the gateway's event stream forever. `connections` counts the connections made.
    pub async fn run_events(self, updates: watch::Sender<Option<GatewayUpdate>>, connections: watch::Sender<u64>) {
        let mut retry = RetryDelay::default();
        loop {
            let detail = match self.http.get(url("/v1/events")).send().await {
                Ok(response) if response.status() == StatusCode::OK => {
                    connections.send_modify(|count| *count += 1);
                    let opened = ClockReading::now();
                    let detail = follow(response, &updates).await;
                    if opened.instant.elapsed() > EVENT_SILENCE {
                        retry = RetryDelay::default();
                    }
                    detail
                }
                Ok(response) => format!("status {}", response.status().as_u16()),
                Err(error) => error.without_url().to_string(),
            };
            retry
                .wait_after("the gateway's event stream ended; reconnecting", &detail)
                .await;
        }
    }
}

impl CallError {
    fn socket(error: reqwest::Error) -> Self {
        Self::Socket(describe_error(error))
    }
}

/// Reads events until the stream ends or delivers nothing for [`EVENT_SILENCE`]; returns the reason.
async fn follow(response: Response, updates: &watch::Sender<Option<GatewayUpdate>>) -> String {
    let mut events = SseStream::from_bytes_stream(response.bytes_stream());
    loop {
        let event = match tokio::time::timeout(EVENT_SILENCE, events.next()).await {
            Err(_) => return format!("silent for {} s", EVENT_SILENCE.as_secs()),
            Ok(None) => return "closed".into(),
            Ok(Some(Err(error))) => return error.to_string(),
            Ok(Some(Ok(event))) => event,
        };
        // Ignore events of a later version.
        if let Some(event) = event.data.and_then(|data| serde_json::from_str(&data).ok()) {
            updates.send_replace(Some(GatewayUpdate {
                at: ClockReading::now(),
                event,
            }));
        }
    }
}

async fn streamed(response: Response, format: WireFormat, mut tap: Option<TextTap>) -> Result<ModelAnswer, CallError> {
    let mut events = SseStream::from_bytes_stream(response.bytes_stream());
    let mut aggregate = format.aggregate();
    let (mut is_done, mut cost) = (false, None);
    loop {
        let next = tokio::time::timeout(if is_done { SHORT } else { Duration::MAX }, events.next());
        // After the end mark only the cost follows; the answer is complete without it.
        let Ok(Some(event)) = next.await else { break };
        let event = event.map_err(|error| {
            // A broken socket shows nothing about the call: a repeat with the same id gets its recorded outcome.
            if let sse_stream::Error::Body(error) = error {
                CallError::Socket(error.to_string())
            } else {
                CallError::Call(format.endpoint().bad_response("the stream is not server-sent events"))
            }
        })?;
        let data = event.data.unwrap_or_default();
        match event.event.as_deref() {
            Some(FAILURE_EVENT) => return Err(CallError::Call(failure_of(data.as_bytes()))),
            Some(COST_EVENT) => cost = data.trim().parse().ok(),
            _ if is_done || data.is_empty() => {}
            _ => {
                is_done = aggregate.push(&data).map_err(CallError::Call)?;
                let text = aggregate.take_text();
                if let Some(tap) = &mut tap {
                    tap.push(&text);
                }
            }
        }
    }
    let answer = aggregate.finish(is_done).map_err(CallError::Call)?;
    Ok(ModelAnswer { cost, ..answer })
}

/// Sends a short request. Returns the response if the request was accepted (2xx) or rejected permanently (4xx, logged),
/// otherwise the error.
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
            "the gateway rejected a request"
        );
    }
    Ok(response)
}

fn failure_of(json: &[u8]) -> CallFailure {
    serde_json::from_slice(json).unwrap_or_else(|_| {
        CallFailure::new(
            FailureKind::BadResponse,
            "the gateway reported an unknown failure: worker and gateway are of different versions",
        )
    })
}

fn unexpected(status: StatusCode) -> CallFailure {
    CallFailure::new(
        FailureKind::BadResponse,
        format!(
            "the pod's gateway rejected the call with status {}: worker and gateway are of different versions",
            status.as_u16()
        ),
    )
}

/// Formats an error and its root cause, without the URL.
fn describe_error(error: reqwest::Error) -> String {
    let error = error.without_url();
    format!("{error}: {}", root_cause(&error))
}

fn url(path: &str) -> String {
    format!("http://gateway{path}")
}

/// Exponential backoff between retries; logs the first one only.
pub(super) struct RetryDelay {
    backoff: Backoff,
    is_logged: bool,
}

impl Default for RetryDelay {
    fn default() -> Self {
        Self {
            backoff: RETRY,
            is_logged: false,
        }
    }
}

impl RetryDelay {
    pub(super) async fn wait_after(&mut self, what: &str, detail: &str) {
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::warn!(detail, "{what}");
        }
        sleep(self.backoff.next_wait()).await;
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn an_event_delayed_in_the_socket_has_its_age() {
        let at = ClockReading::now();
        let age = |sent_at| {
            let event = SocketEvent {
                link_age_milliseconds: 8_000,
                sent_at,
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
