//! A model server of either wire format.
//!
//! The answer passes through as it comes, line by line; its last line waits for the record. The key is read for each
//! call, goes into one header, and nowhere else. Redirects are not followed: they could carry it away.

use std::path::PathBuf;
use std::time::Duration;

use axum::body::Bytes;
use jiff::Timestamp;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Response, Url};
use serde_json::Value;

use super::{AnswerTail, EVENT_STREAM, JSON, UpstreamConfig, refused};
use crate::api::extra::RESERVED_HEADERS;
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::CallId;
use crate::gateway::answer::{AnswerError, StreamReader, read_body};
use crate::gateway::dialect::ProviderDialect;
use crate::gateway::failures::{failure, failure_from_status, is_unprocessed};
use crate::gateway::http;
use crate::gateway::in_flight::{InFlightCall, SendStatus};
use crate::gateway::request::{CheckedRequest, RequestRules};
use crate::gateway::usage::read_beside;
use crate::ledger::bound::CallBill;

/// Longest answer. An endless stream ends here, or at `timeoutSeconds`.
pub const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// As much of an error's body as is looked at.
const MAX_ERROR_BYTES: usize = 64 * 1024;
/// Statuses whose body says more.
const BODY_MATTERS: [u16; 5] = [400, 422, 429, 500, 503];
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(2);
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// A server.
pub struct ProviderServer {
    dialect: ProviderDialect,
    client: Client,
    url: Url,
    headers: HeaderMap,
    rules: RequestRules,
    agent_uid: String,
    key_file: Option<PathBuf>,
    idle_timeout: Duration,
}

/// A request that may be sent.
pub struct ProviderRequest {
    pub(super) dialect: ProviderDialect,
    headers: HeaderMap,
    pub(super) checked: CheckedRequest,
}

impl ProviderServer {
    pub(super) fn new(caller: &UpstreamConfig<'_>) -> Result<Self, String> {
        let model = caller.model;
        let dialect = ProviderDialect::of(model.api);
        let base = model
            .base_url
            .as_deref()
            .ok_or("spec.model.baseURL is missing; this api needs it")?;
        let url = Url::parse(&format!("{}{}", base.trim_end_matches('/'), dialect.path()))
            .map_err(|error| format!("spec.model.baseURL is no address: {error}"))?;
        let client = http::client(&url, caller.policy)
            .map_err(|error| format!("no connection to spec.model.baseURL is possible: {error}"))?;
        Ok(Self {
            dialect,
            client,
            headers: headers(caller, dialect)?,
            rules: RequestRules::new(model, url.host_str())
                .map_err(|error| format!("spec.model.extraBody: {error}"))?,
            url,
            agent_uid: caller.agent_uid.into(),
            key_file: model.api_key_secret_ref.is_some().then(|| caller.key_file.into()),
            idle_timeout: Duration::from_secs(model.stream_idle_timeout_seconds.into()),
        })
    }

    pub(super) fn prepare(&self, id: CallId, body: &[u8]) -> Result<ProviderRequest, CallFailure> {
        let checked = self.rules.apply(body).map_err(|error| refused(&error))?;
        let mut headers = self.headers.clone();
        if let Ok(key) = HeaderValue::try_from(format!("{}-{id}", self.agent_uid)) {
            headers.insert(IDEMPOTENCY_KEY, key);
        }
        if let Some((name, value)) = self.authorization()? {
            headers.insert(name, value);
        }
        Ok(ProviderRequest {
            dialect: self.dialect,
            headers,
            checked,
        })
    }

    fn authorization(&self) -> Result<Option<(HeaderName, HeaderValue)>, CallFailure> {
        let Some(path) = &self.key_file else {
            return Ok(None);
        };
        let wrong = |what: &str| {
            let advice = format!("the key that spec.model.apiKeySecretRef names {what}; put it into the Secret");
            failure(FailureKind::AuthenticationFailed, advice)
        };
        let key = std::fs::read_to_string(path).map_err(|_| wrong("cannot be read"))?;
        if key.trim().is_empty() {
            return Err(wrong("is empty"));
        }
        let header = self.dialect.authorization(key.trim());
        header.map(Some).ok_or_else(|| wrong("is more than one line of text"))
    }

    pub(super) async fn run(&self, request: ProviderRequest, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        let body = request.checked.body().map_err(|error| refused(&error))?;
        // Of a long request one copy is enough while its answer is waited for.
        drop(request.checked);
        flight.note_sent(SendStatus::Yes);
        let sending = self
            .client
            .post(self.url.clone())
            .headers(request.headers)
            .body(body)
            .send();
        let response = sending.await.map_err(|error| {
            if error.is_connect() {
                flight.note_sent(SendStatus::No);
            }
            unreachable(&error)
        })?;
        if !response.status().is_success() {
            return Err(refusal(response, flight).await);
        }
        let content_type = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        if content_type.trim_start().to_ascii_lowercase().starts_with(EVENT_STREAM) {
            self.stream(response, flight).await
        } else {
            self.whole(response, flight).await
        }
    }

    async fn stream(&self, mut response: Response, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        let mut reader = StreamReader::new(self.dialect);
        let mut length = 0;
        loop {
            let chunk = tokio::time::timeout(self.idle_timeout, response.chunk())
                .await
                .map_err(|_| self.idle())?;
            let Some(chunk) = chunk.map_err(|error| unreachable(&error))? else {
                break;
            };
            length += chunk.len();
            if length > MAX_ANSWER_BYTES {
                return Err(too_long());
            }
            let lines = reader.feed(&chunk);
            flight.note_bill(self.bill(reader.usage(), reader.has_content()));
            flight.note_answered(reader.model());
            let lines = Bytes::from(lines.map_err(|trouble| self.trouble(trouble))?);
            if reader.is_done() {
                return Ok(AnswerTail {
                    content_type: EVENT_STREAM,
                    rest: lines,
                });
            }
            if !lines.is_empty() {
                flight.push(EVENT_STREAM, lines);
            }
        }
        if reader.is_whole() {
            return Ok(AnswerTail {
                content_type: EVENT_STREAM,
                rest: Bytes::new(),
            });
        }
        Err(failure(
            FailureKind::Unreachable,
            "the model server cut its answer short; the loop tries again",
        ))
    }

    async fn whole(&self, mut response: Response, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(&error))? {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_ANSWER_BYTES {
                return Err(too_long());
            }
        }
        let said = read_body(self.dialect, &body).map_err(|trouble| self.trouble(trouble))?;
        flight.note_bill(self.bill(said.usage.as_ref(), said.content));
        flight.note_answered(&said.model);
        Ok(AnswerTail {
            content_type: JSON,
            rest: body.into(),
        })
    }

    fn bill(&self, usage: Option<&Value>, content: bool) -> Option<(CallBill, String)> {
        let bill = read_beside(content, self.dialect, usage?)?;
        Some((bill, usage?.to_string()))
    }

    fn trouble(&self, trouble: AnswerError) -> CallFailure {
        match trouble {
            AnswerError::Garbage => failure(
                FailureKind::BadResponse,
                format!("the model server's answer is not one of {}", self.dialect.server()),
            ),
            AnswerError::ServerError => failure(
                FailureKind::Unreachable,
                "the model server reported an error within its answer; the loop tries again",
            ),
        }
    }

    fn idle(&self) -> CallFailure {
        let seconds = self.idle_timeout.as_secs();
        failure(
            FailureKind::Timeout,
            format!(
                "the model server was silent for {seconds} s (spec.model.streamIdleTimeoutSeconds) within its answer"
            ),
        )
    }
}

/// Headers of each request: the dialect's, and the spec's own, which replace none that is written here.
fn headers(caller: &UpstreamConfig<'_>, dialect: ProviderDialect) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in &caller.model.headers {
        let wrong = || format!("spec.model.headers: {name} cannot be set; remove it");
        let known = HeaderName::try_from(name).map_err(|_| wrong())?;
        if RESERVED_HEADERS.contains(&known.as_str()) || known.as_str().starts_with("x-agentloop-") {
            return Err(wrong());
        }
        headers.insert(known, HeaderValue::try_from(value).map_err(|_| wrong())?);
    }
    headers.extend(dialect.headers());
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(JSON));
    Ok(headers)
}

/// Notes whether the request was processed, which decides what it is charged. A slow body leaves the status as it is.
async fn refusal(mut response: Response, flight: &InFlightCall) -> CallFailure {
    let mut body = Vec::new();
    if BODY_MATTERS.contains(&response.status().as_u16()) {
        let _ = tokio::time::timeout(ERROR_BODY_TIMEOUT, read_error(&mut response, &mut body)).await;
    }
    if is_unprocessed(response.status(), &body) {
        flight.note_sent(SendStatus::Refused);
    }
    failure_from_status(response.status(), response.headers(), &body, Timestamp::now())
}

async fn read_error(response: &mut Response, body: &mut Vec<u8>) {
    while let Ok(Some(chunk)) = response.chunk().await {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ERROR_BYTES {
            return;
        }
    }
}

/// None of the causes carries a header or a body.
fn unreachable(error: &reqwest::Error) -> CallFailure {
    let cause = http::cause(error);
    let what = if error.is_connect() {
        "cannot be reached"
    } else {
        "broke the connection"
    };
    failure(
        FailureKind::Unreachable,
        format!("the model server at spec.model.baseURL {what}: {cause}"),
    )
}

fn too_long() -> CallFailure {
    failure(
        FailureKind::BadResponse,
        format!(
            "the model server's answer is longer than {} MiB",
            MAX_ANSWER_BYTES / 1024 / 1024
        ),
    )
}
