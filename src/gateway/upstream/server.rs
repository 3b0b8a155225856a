//! A model server of any wire format.
//!
//! Answers are passed on line by line as they arrive; the last line waits until the outcome is recorded. The key is
//! read for each call and used only in one header. Redirects are not followed: they could disclose the key.

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
use crate::gateway::failures::{failure_from_error, failure_from_status, is_rejected, is_unprocessed};
use crate::gateway::http::{self, MountedRoots, ServerClient};
use crate::gateway::in_flight::{InFlightCall, SendStatus};
use crate::gateway::model_field::ModelField;
use crate::gateway::request::{CheckedRequest, RequestRules};
use crate::ledger::bound::CallBill;
use crate::provider::WireFormat;
use crate::provider::meter::{AnswerError, StreamReader};
use crate::provider::usage::read_beside;

/// Longest answer. An endless stream ends here or at `timeoutSeconds`.
pub const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// How much of an error's body is read.
const MAX_ERROR_BYTES: usize = 64 * 1024;
/// Statuses whose body is inspected.
const BODY_MATTERS: [u16; 5] = [400, 422, 429, 500, 503];
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(2);
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

pub struct ProviderServer {
    field: ModelField,
    format: WireFormat,
    client: ServerClient,
    url: Url,
    headers: HeaderMap,
    rules: RequestRules,
    agent_uid: String,
    key_file: Option<PathBuf>,
    idle_timeout: Duration,
}

pub struct ProviderRequest {
    pub(super) format: WireFormat,
    client: Client,
    headers: HeaderMap,
    pub(super) checked: CheckedRequest,
}

impl ProviderServer {
    pub(super) fn new(caller: &UpstreamConfig<'_>) -> Result<Self, String> {
        let (model, field) = (caller.model, caller.field);
        let format = WireFormat::of_api(model.api);
        let base = model
            .base_url
            .as_deref()
            .ok_or_else(|| format!("{field}.baseURL is missing; this {field}.api requires it"))?;
        let url = Url::parse(&format!("{}{}", base.trim_end_matches('/'), format.endpoint().path))
            .map_err(|error| format!("{field}.baseURL is not a valid URL: {error}"))?;
        let roots = model.tls.as_ref().map(|_| MountedRoots::new(caller.ca_dir, field));
        let client = ServerClient::new(&url, caller.policy, roots)
            .map_err(|error| format!("cannot connect to {field}.baseURL: {error}"))?;
        Ok(Self {
            field,
            format,
            client,
            headers: headers(caller, format)?,
            rules: RequestRules::new(model, url.host_str())
                .map_err(|error| format!("{field}.extraBody: {}", error.message(field)))?,
            url,
            agent_uid: caller.agent_uid.into(),
            key_file: model.api_key_secret_ref.is_some().then(|| caller.key_file.into()),
            idle_timeout: Duration::from_secs(model.stream_idle_timeout_seconds.into()),
        })
    }

    pub(super) fn prepare(&self, id: CallId, body: &[u8]) -> Result<ProviderRequest, CallFailure> {
        let checked = self.rules.apply(body).map_err(|error| refused(self.field, &error))?;
        let mut headers = self.headers.clone();
        if let Ok(key) = HeaderValue::try_from(format!("{}-{id}", self.agent_uid)) {
            headers.insert(IDEMPOTENCY_KEY, key);
        }
        if let Some((name, value)) = self.authorization()? {
            headers.insert(name, value);
        }
        let client = self.client.get().map_err(|error| {
            let advice = format!("the model server at {}.baseURL cannot be reached: {error}", self.field);
            CallFailure::new(FailureKind::Unreachable, advice)
        })?;
        Ok(ProviderRequest {
            format: self.format,
            client,
            headers,
            checked,
        })
    }

    fn authorization(&self) -> Result<Option<(HeaderName, HeaderValue)>, CallFailure> {
        let Some(path) = &self.key_file else {
            return Ok(None);
        };
        let wrong = |what: &str| {
            let advice = format!("the key of {}.apiKeySecretRef {what}; correct the Secret", self.field);
            CallFailure::new(FailureKind::AuthenticationFailed, advice)
        };
        let key = std::fs::read_to_string(path).map_err(|_| wrong("cannot be read"))?;
        if key.trim().is_empty() {
            return Err(wrong("is empty"));
        }
        let header = self.format.endpoint().authorization(key.trim());
        header.map(Some).ok_or_else(|| wrong("is not a single line of text"))
    }

    pub(super) async fn run(&self, request: ProviderRequest, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        let body = request.checked.body().map_err(|error| refused(self.field, &error))?;
        // Frees one of two copies of a long request while its answer is awaited.
        drop(request.checked);
        flight.note_sent(SendStatus::Yes);
        let sending = request
            .client
            .post(self.url.clone())
            .headers(request.headers)
            .body(body)
            .send();
        let response = sending.await.map_err(|error| {
            if error.is_connect() {
                flight.note_sent(SendStatus::No);
            }
            self.unreachable(&error)
        })?;
        if !response.status().is_success() {
            return Err(self.refusal(response, flight).await);
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
        let mut reader = StreamReader::new(self.format);
        let mut length = 0;
        loop {
            let chunk = tokio::time::timeout(self.idle_timeout, response.chunk())
                .await
                .map_err(|_| self.idle())?;
            let Some(chunk) = chunk.map_err(|error| self.unreachable(&error))? else {
                break;
            };
            length += chunk.len();
            if length > MAX_ANSWER_BYTES {
                return Err(too_long());
            }
            let lines = reader.feed(&chunk);
            flight.note_bill(self.bill(reader.usage(), reader.has_content()));
            flight.note_answered(reader.metadata());
            let lines = lines.map_err(|error| self.answer_failure(&error, reader.is_processed(), flight))?;
            let lines = Bytes::from(lines);
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
        Err(CallFailure::new(
            FailureKind::Unreachable,
            "the model server closed the connection before its answer was complete; the loop retries",
        ))
    }

    async fn whole(&self, mut response: Response, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.unreachable(&error))? {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_ANSWER_BYTES {
                return Err(too_long());
            }
        }
        let parsed = self.format.read_body(&body);
        let parsed = parsed.map_err(|error| self.answer_failure(&error, false, flight))?;
        flight.note_bill(self.bill(parsed.usage.as_ref(), parsed.content));
        flight.note_answered(&parsed.metadata);
        Ok(AnswerTail {
            content_type: JSON,
            rest: body.into(),
        })
    }

    fn bill(&self, usage: Option<&Value>, content: bool) -> Option<(CallBill, String)> {
        let bill = read_beside(content, self.format, usage?)?;
        Some((bill, usage?.to_string()))
    }

    /// The [`CallFailure`] of an answer with a good status that is not an answer. `processed`: a part of one came
    /// before.
    fn answer_failure(&self, error: &AnswerError, processed: bool, flight: &InFlightCall) -> CallFailure {
        match error {
            AnswerError::Garbage => {
                let (endpoint, field) = (self.format.endpoint(), self.field);
                CallFailure::new(
                    FailureKind::BadResponse,
                    format!(
                        "the model server's answer is not in the format of {}; check {field}.baseURL ({})",
                        endpoint.format, endpoint.base_url_advice
                    ),
                )
            }
            AnswerError::ServerError(error) => {
                if !processed && is_rejected(error) {
                    flight.note_sent(SendStatus::Refused);
                }
                failure_from_error(self.field, error)
            }
        }
    }

    /// Notes whether the request was processed, which decides its charge. If the body is too slow, the status alone
    /// counts.
    async fn refusal(&self, mut response: Response, flight: &InFlightCall) -> CallFailure {
        let mut body = Vec::new();
        if BODY_MATTERS.contains(&response.status().as_u16()) {
            let _ = tokio::time::timeout(ERROR_BODY_TIMEOUT, read_error(&mut response, &mut body)).await;
        }
        if is_unprocessed(response.status(), &body) {
            flight.note_sent(SendStatus::Refused);
        }
        let answer = (response.status(), response.headers());
        failure_from_status(self.field, answer, &body, Timestamp::now())
    }

    /// A transport error. Its causes contain no header and no body.
    fn unreachable(&self, error: &reqwest::Error) -> CallFailure {
        let (cause, field) = (http::cause(error), self.field);
        let what = if error.is_connect() {
            "cannot be reached"
        } else {
            "closed the connection"
        };
        let advice = http::tls_advice(&cause, field);
        CallFailure::new(
            FailureKind::Unreachable,
            format!("the model server at {field}.baseURL {what}: {cause}{advice}"),
        )
    }

    fn idle(&self) -> CallFailure {
        let (seconds, field) = (self.idle_timeout.as_secs(), self.field);
        CallFailure::new(
            FailureKind::Timeout,
            format!(
                "the model server sent nothing for {seconds} s within its answer ({field}.streamIdleTimeoutSeconds)"
            ),
        )
    }
}

/// The headers of each request: those of the format, and those of the spec, which cannot override them.
fn headers(caller: &UpstreamConfig<'_>, format: WireFormat) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in &caller.model.headers {
        let wrong = || format!("{}.headers: {name} cannot be set; remove it", caller.field);
        let known = HeaderName::try_from(name).map_err(|_| wrong())?;
        if RESERVED_HEADERS.contains(&known.as_str()) || known.as_str().starts_with("x-agentloop-") {
            return Err(wrong());
        }
        headers.insert(known, HeaderValue::try_from(value).map_err(|_| wrong())?);
    }
    headers.extend(format.endpoint().headers());
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(JSON));
    Ok(headers)
}

async fn read_error(response: &mut Response, body: &mut Vec<u8>) {
    while let Ok(Some(chunk)) = response.chunk().await {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ERROR_BYTES {
            return;
        }
    }
}

fn too_long() -> CallFailure {
    CallFailure::new(
        FailureKind::BadResponse,
        format!(
            "the model server's answer is longer than {} MiB",
            MAX_ANSWER_BYTES / 1024 / 1024
        ),
    )
}
