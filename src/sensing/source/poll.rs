//! Sources that ask again and again: pages, queries of a Prometheus, and tools.

mod talk;

use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_TYPE, ETAG, HeaderMap, IF_MODIFIED_SINCE, IF_NONE_MATCH, LAST_MODIFIED};
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::talk::Talk;
use super::backoff::{Backoff, jitter};
use super::http::{Failure, Place, body, refused, unreachable};
use super::{Cursor, Feed, Heard, Repeat, Taken};
use crate::api::polled_tool::PolledTool;
use crate::api::source::Method;

/// Longest validator of a page that is kept.
const MOST_VALIDATOR: usize = 1024;

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// A page.
    Page {
        /// How.
        method: Method,
        /// With what.
        body: Option<String>,
    },
    /// An instant query of the Prometheus whose query address this is.
    Prometheus {
        /// The query.
        query: String,
    },
    /// A tool of the MCP server whose address this is.
    Tool(PolledTool),
}

/// Asks again and again.
#[derive(Clone, Debug)]
pub struct Poller {
    /// Whom.
    pub place: Place,
    /// What.
    pub question: Question,
    /// From the beginning of one attempt to the next.
    pub interval: Duration,
    /// After which an attempt has failed.
    pub timeout: Duration,
}

impl Poller {
    /// Asks until it is dropped.
    pub async fn run(self, mut cursor: Cursor, feed: Feed) {
        let mut backoff = Backoff::new(self.interval);
        let mut clients = self.place.clients();
        let mut talk = Talk::default();
        loop {
            let begun = Instant::now();
            let result = match clients.get() {
                Ok(client) => self.attempt(&client, &mut cursor, &mut talk, &feed).await,
                Err(failure) => Err(failure),
            };
            match result {
                Ok(()) => {
                    backoff.succeed();
                    feed.works();
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

    async fn attempt(&self, client: &Client, cursor: &mut Cursor, talk: &mut Talk, feed: &Feed) -> Result<(), Failure> {
        let answer = timeout(self.timeout, self.ask(client, cursor, talk));
        let answer = answer.await.map_err(|_| {
            Failure(format!(
                "no whole answer within {} s (timeoutSeconds)",
                self.timeout.as_secs()
            ))
        })??;
        let Some(heard) = answer else {
            return Ok(());
        };
        let next = heard.cursor.clone();
        match feed.give(heard).await {
            Taken::OnDisk | Taken::Known => *cursor = next,
            // Without its validator the page comes again, when there is room for it.
            Taken::Dropped | Taken::TooDeep | Taken::Replayed => {}
            Taken::NotNow => {
                return Err(Failure(
                    "what came cannot be kept now; look at the sensor pod's storage".into(),
                ));
            }
        }
        Ok(())
    }

    /// What there is to hear; `None`: nothing new.
    async fn ask(&self, client: &Client, cursor: &Cursor, talk: &mut Talk) -> Result<Option<Heard>, Failure> {
        self.place.check()?;
        let request = match &self.question {
            Question::Page { method, body } => self.page(client, *method, body.as_deref(), cursor),
            Question::Prometheus { query } => self.query(client, query),
            Question::Tool(tool) => return talk.ask(client, &self.place, tool).await.map(Some),
        };
        let request = request.headers(self.place.headers()?);
        let response = request.send().await.map_err(|error| unreachable(&error))?;
        let status = response.status();
        if status == StatusCode::NOT_MODIFIED {
            return Ok(None);
        }
        // A Prometheus says why in the body of these.
        let explained = matches!(self.question, Question::Prometheus { .. }) && matches!(status.as_u16(), 400 | 422);
        if !status.is_success() && !explained {
            return Err(refused(status));
        }
        let cursor = validators(response.headers());
        let payload = body(response, self.place.most_bytes).await?;
        match self.question {
            Question::Prometheus { .. } => self.result(payload).map(Some),
            Question::Page { .. } | Question::Tool(_) => Ok(Some(Heard {
                id: None,
                payload,
                cursor,
                repeat: Repeat::SameAsLast,
            })),
        }
    }

    fn page(&self, client: &Client, method: Method, body: Option<&str>, cursor: &Cursor) -> RequestBuilder {
        let url = self.place.url.clone();
        match method {
            Method::Get => {
                let request = client.get(url);
                match (&cursor.etag, &cursor.last_modified) {
                    (Some(etag), _) => request.header(IF_NONE_MATCH, etag),
                    (None, Some(date)) => request.header(IF_MODIFIED_SINCE, date),
                    (None, None) => request,
                }
            }
            Method::Post => client
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

    fn result(&self, payload: Vec<u8>) -> Result<Heard, Failure> {
        let cursor = Cursor::default();
        if payload.len() > self.place.most_bytes {
            // Too long to be read: the rules count it.
            return Ok(Heard {
                id: None,
                payload,
                cursor,
                repeat: Repeat::SameAsLast,
            });
        }
        let unreadable = |_| Failure("the answer is not one of a Prometheus; look at the url".into());
        let answer: Answer = serde_json::from_slice(&payload).map_err(unreadable)?;
        let data = match (answer.data, answer.error_type) {
            (Some(data), None) => data,
            (_, kind) => {
                let kind: String = kind
                    .unwrap_or_default()
                    .chars()
                    .filter(|c| c.is_ascii_alphabetic() || *c == '_')
                    .take(32)
                    .collect();
                return Err(Failure(format!(
                    "the Prometheus refuses the query ({kind}); look at spec.source.poll.prometheus.query"
                )));
            }
        };
        let payload = json!({"resultType": data.result_type, "result": without_times(data.result)});
        let payload = serde_json::to_vec(&payload).map_err(unreadable)?;
        Ok(Heard {
            id: None,
            payload,
            cursor,
            repeat: Repeat::SameAsLast,
        })
    }
}

#[derive(Deserialize)]
struct Answer {
    data: Option<Data>,
    #[serde(rename = "errorType")]
    error_type: Option<String>,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "resultType")]
    result_type: String,
    result: Value,
}

/// Samples without their times, with numbers as values: the time is that of the query, and would make each answer news.
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

/// The number that a text is; `NaN` and `+Inf` stay texts, which JSON has no numbers for.
fn number(value: Value) -> Value {
    let parsed = value.as_str().and_then(|text| text.parse::<f64>().ok());
    parsed
        .and_then(serde_json::Number::from_f64)
        .map_or(value, Value::Number)
}

fn validators(headers: &HeaderMap) -> Cursor {
    let text = |name| {
        let value = headers.get(name)?.to_str().ok()?;
        (value.len() <= MOST_VALIDATOR).then(|| value.to_owned())
    };
    Cursor {
        etag: text(ETAG),
        last_modified: text(LAST_MODIFIED),
        last_event_id: None,
    }
}

#[cfg(test)]
mod tests;
