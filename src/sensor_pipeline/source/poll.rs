//! Sources that are polled: pages, Prometheus queries, and MCP tools.

mod mcp_tool;

use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_TYPE, ETAG, HeaderMap, IF_MODIFIED_SINCE, IF_NONE_MATCH, LAST_MODIFIED};
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::mcp_tool::ToolConnection;
use super::backoff::SourceBackoff;
use super::http::{SourceError, SourceTarget, body, refused, unreachable};
use super::{ArrivalOutcome, RepeatRule, SourceCursor, SourceFeed, SourceMessage};
use agentloop_api::polled_tool::PolledTool;
use agentloop_api::source::HttpMethod;
use agentloop_support::backoff::jitter;

/// Longest `ETag` or `Last-Modified` that is kept.
const MAX_VALIDATOR: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PollQuery {
    Page {
        method: HttpMethod,
        body: Option<String>,
    },
    /// An instant query; the target is the Prometheus server.
    Prometheus {
        query: String,
    },
    /// A tool; the target is the MCP server.
    Tool(PolledTool),
}

#[derive(Clone, Debug)]
pub struct SourcePoller {
    pub place: SourceTarget,
    pub question: PollQuery,
    /// Time from the start of one attempt to the start of the next.
    pub interval: Duration,
    /// Longest time of one attempt.
    pub timeout: Duration,
}

impl SourcePoller {
    /// Polls until it is dropped.
    pub async fn run(self, mut cursor: SourceCursor, feed: SourceFeed) {
        let mut backoff = SourceBackoff::new(self.interval);
        let mut clients = self.place.clients();
        let mut talk = ToolConnection::default();
        loop {
            let begun = Instant::now();
            let result = match clients.get() {
                Ok(client) => self.attempt(&client, &mut cursor, &mut talk, &feed).await,
                Err(failure) => Err(failure),
            };
            match result {
                Ok(()) => {
                    backoff.succeed();
                    feed.report_connected();
                    sleep_until(begun + self.interval).await;
                }
                Err(failure) => {
                    let wait = backoff.fail(jitter());
                    feed.failed(&failure.0, wait);
                    sleep(wait).await;
                }
            }
        }
    }

    async fn attempt(
        &self,
        client: &Client,
        cursor: &mut SourceCursor,
        talk: &mut ToolConnection,
        feed: &SourceFeed,
    ) -> Result<(), SourceError> {
        let answer = timeout(self.timeout, self.ask(client, cursor, talk));
        let answer = answer.await.map_err(|_| {
            SourceError(format!(
                "no complete response within {} s (timeoutSeconds)",
                self.timeout.as_secs()
            ))
        })??;
        let Some(message) = answer else {
            return Ok(());
        };
        let next = message.cursor.clone();
        match feed.submit(message).await {
            ArrivalOutcome::OnDisk | ArrivalOutcome::Known => *cursor = next,
            // Without its validator the page comes again, when the limits allow it.
            ArrivalOutcome::Dropped | ArrivalOutcome::TooDeep | ArrivalOutcome::Replayed => {}
            ArrivalOutcome::NotNow => {
                return Err(SourceError(
                    "cannot store incoming events; check the sensor pod's storage".into(),
                ));
            }
        }
        Ok(())
    }

    /// Requests the target once; `None`: not modified.
    async fn ask(
        &self,
        client: &Client,
        cursor: &SourceCursor,
        talk: &mut ToolConnection,
    ) -> Result<Option<SourceMessage>, SourceError> {
        self.place.check()?;
        let request = match &self.question {
            PollQuery::Page { method, body } => self.page(client, *method, body.as_deref(), cursor),
            PollQuery::Prometheus { query } => self.query(client, query),
            PollQuery::Tool(tool) => return talk.call_tool(client, &self.place, tool).await.map(Some),
        };
        let request = request.headers(self.place.headers()?);
        let response = request.send().await.map_err(|error| unreachable(&error))?;
        let status = response.status();
        if status == StatusCode::NOT_MODIFIED {
            return Ok(None);
        }
        // Prometheus reports the error in the body of these.
        let explained = matches!(self.question, PollQuery::Prometheus { .. }) && matches!(status.as_u16(), 400 | 422);
        if !status.is_success() && !explained {
            return Err(refused(status));
        }
        let cursor = validators(response.headers());
        let payload = body(response, self.place.max_bytes).await?;
        match self.question {
            PollQuery::Prometheus { .. } => self.result(payload).map(Some),
            PollQuery::Page { .. } | PollQuery::Tool(_) => Ok(Some(SourceMessage {
                id: None,
                payload,
                cursor,
                repeat: RepeatRule::SameAsLast,
            })),
        }
    }

    fn page(&self, client: &Client, method: HttpMethod, body: Option<&str>, cursor: &SourceCursor) -> RequestBuilder {
        let url = self.place.url.clone();
        match method {
            HttpMethod::Get => {
                let request = client.get(url);
                match (&cursor.etag, &cursor.last_modified) {
                    (Some(etag), _) => request.header(IF_NONE_MATCH, etag),
                    (None, Some(date)) => request.header(IF_MODIFIED_SINCE, date),
                    (None, None) => request,
                }
            }
            HttpMethod::Post => client
                .post(url)
                .header(CONTENT_TYPE, "application/json")
                .body(body.unwrap_or_default().to_owned()),
        }
    }

    fn query(&self, client: &Client, query: &str) -> RequestBuilder {
        let mut url = self.place.url.clone();
        url.query_pairs_mut().append_pair("query", query);
        client.get(url).header(ACCEPT, "application/json")
    }

    fn result(&self, payload: Vec<u8>) -> Result<SourceMessage, SourceError> {
        let cursor = SourceCursor::default();
        if payload.len() > self.place.max_bytes {
            // Too long to parse: the rules count it.
            return Ok(SourceMessage {
                id: None,
                payload,
                cursor,
                repeat: RepeatRule::SameAsLast,
            });
        }
        let unreadable = |_| SourceError("the response is not from the Prometheus API; check url".into());
        let answer: PrometheusResponse = serde_json::from_slice(&payload).map_err(unreadable)?;
        let data = match (answer.data, answer.error_type) {
            (Some(data), None) => data,
            (_, kind) => {
                let kind: String = kind
                    .unwrap_or_default()
                    .chars()
                    .filter(|c| c.is_ascii_alphabetic() || *c == '_')
                    .take(32)
                    .collect();
                return Err(SourceError(format!(
                    "Prometheus rejected the query ({kind}); check spec.source.poll.prometheus.query"
                )));
            }
        };
        let payload = json!({"resultType": data.result_type, "result": without_times(data.result)});
        let payload = serde_json::to_vec(&payload).map_err(unreadable)?;
        Ok(SourceMessage {
            id: None,
            payload,
            cursor,
            repeat: RepeatRule::SameAsLast,
        })
    }
}

#[derive(Deserialize)]
struct PrometheusResponse {
    data: Option<PrometheusResult>,
    #[serde(rename = "errorType")]
    error_type: Option<String>,
}

#[derive(Deserialize)]
struct PrometheusResult {
    #[serde(rename = "resultType")]
    result_type: String,
    result: Value,
}

/// Samples without their timestamps, with numbers as values: the timestamp is that of the query, and would make each
/// answer differ from the last.
fn without_times(result: Value) -> Value {
    match result {
        // A scalar or a string: [time, value].
        Value::Array(mut sample) if sample.len() == 2 && sample.first().is_some_and(Value::is_number) => {
            number(sample.pop().unwrap_or_default())
        }
        Value::Array(series) => series.into_iter().map(without_times).collect(),
        Value::Object(mut series) => {
            for name in ["value", "values"] {
                if let Some(samples) = series.get_mut(name) {
                    *samples = without_times(samples.take());
                }
            }
            Value::Object(series)
        }
        plain @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => plain,
    }
}

/// Parses a number; `NaN` and `+Inf` stay strings, since JSON has no such numbers.
fn number(value: Value) -> Value {
    let parsed = value.as_str().and_then(|text| text.parse::<f64>().ok());
    parsed
        .and_then(serde_json::Number::from_f64)
        .map_or(value, Value::Number)
}

fn validators(headers: &HeaderMap) -> SourceCursor {
    let text = |name| {
        let value = headers.get(name)?.to_str().ok()?;
        (value.len() <= MAX_VALIDATOR).then(|| value.to_owned())
    };
    SourceCursor {
        etag: text(ETAG),
        last_modified: text(LAST_MODIFIED),
        last_event_id: None,
    }
}

#[cfg(test)]
mod tests;
