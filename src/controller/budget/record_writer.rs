//! Writes records into `status`, each over exactly the one before, and what is shown of a budget with them.
//!
//! A JSON patch with tests, never an apply: what another leader wrote ends this process. A write whose outcome is not
//! known is repeated as it is until it is known, so that no record is ever left in doubt. One that is refused for certain
//! is made anew, later and later, and the budget says so. All who wait for one document share its next write.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, header};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::accounts::{DocumentId, DocumentKind, DocumentPart, RecordWrite, WRITE_INTERVAL};
use super::ledger::{BudgetLedger, LedgerState};
use super::view::BudgetView;
use crate::api::budget::{AgentBudgetStatus, LedgerRecord};
use crate::api::status::AgentStatus;

/// Longest time one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Writes at the same time.
const WRITERS: usize = 32;
/// How often the ledger looks at itself though nothing happened.
const TICK: Duration = Duration::from_secs(1);
/// Distance from the last write at which news is shown.
const NEWS_INTERVAL: SignedDuration = SignedDuration::from_secs(5);
/// Pauses between two attempts at one write.
const PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Longest pause before a record is made anew that was refused, and how often it must be until its budget says so: once
/// happens when somebody else writes the status.
const MAX_REFUSED: SignedDuration = SignedDuration::from_mins(1);
const MIN_REPORTED_REFUSALS: u32 = 2;

/// What is known of a document's status.
#[derive(Clone, Debug, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "four facts that have nothing to do with each other"
)]
pub(super) struct StatusDocument {
    /// All but the ledger, as last written.
    pub(super) shown: Map<String, Value>,
    /// What is shown is to be written at once: the spec is another.
    pub(super) hurry: bool,
    has_status: bool,
    has_ledger: bool,
    wrote: Option<Timestamp>,
    writing: bool,
    /// How often in a row the API server refused what was to be written, what it said, and when to try again.
    refusals: u32,
    trouble: String,
    again: Option<Timestamp>,
}

impl StatusDocument {
    /// Why its records cannot be written.
    pub(super) fn trouble(&self) -> Option<&str> {
        (self.refusals >= MIN_REPORTED_REFUSALS).then_some(self.trouble.as_str())
    }

    /// It was refused once more, and is this now.
    fn refused(&self, status: &Value, message: String, now: Timestamp) -> Self {
        let first = SignedDuration::try_from(PAUSE).unwrap_or_default();
        let pause = first.saturating_mul(1 << self.refusals.min(16)).min(MAX_REFUSED);
        Self {
            refusals: self.refusals.saturating_add(1),
            trouble: message,
            again: now.checked_add(pause).ok(),
            wrote: self.wrote,
            ..Self::read(Some(status))
        }
    }

    fn is_backing_off(&self, now: Timestamp) -> bool {
        self.again.is_some_and(|again| now < again)
    }

    /// Of a budget's object.
    pub(super) fn of_budget(status: Option<&AgentBudgetStatus>) -> Self {
        let value = status.and_then(|status| serde_json::to_value(status).ok());
        Self::read(value.as_ref())
    }

    /// Of an Agent's object.
    pub(super) fn of_agent(status: Option<&AgentStatus>) -> Self {
        Self {
            has_status: status.is_some(),
            has_ledger: status.is_some_and(|status| status.ledger.is_some()),
            ..Self::default()
        }
    }

    fn read(status: Option<&Value>) -> Self {
        let mut shown = status.and_then(Value::as_object).cloned().unwrap_or_default();
        let ledger = shown.remove("ledger");
        Self {
            has_status: status.is_some_and(Value::is_object),
            has_ledger: ledger.is_some(),
            shown,
            ..Self::default()
        }
    }
}

/// Why a leader must end.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error(
    "the ledger of {kind} {namespace}/{name} is at record {found} where this leader wrote {expected}: another leader has \
     written it"
)]
pub struct RecordConflictError {
    kind: &'static str,
    namespace: String,
    name: String,
    expected: i64,
    found: i64,
}

/// One write of one document.
#[derive(Clone, Debug)]
struct WriteJob {
    id: DocumentId,
    writes: Vec<RecordWrite>,
    display: Option<Map<String, Value>>,
    patch: Value,
}

/// How a write ended.
#[derive(Debug)]
enum WriteOutcome {
    Written,
    /// The object is gone, or another one of that name is there.
    Gone,
    /// Certainly not written, and why; the status is this.
    Not(Value, String),
    Conflict(RecordConflictError),
}

impl BudgetLedger {
    /// Writes what is due, until another leader is found to have written.
    pub(super) async fn write(self: Arc<Self>) -> RecordConflictError {
        let mut jobs = JoinSet::new();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut look = true;
        loop {
            for job in self.start_writes(WRITERS.saturating_sub(jobs.len()), std::mem::take(&mut look)) {
                let budgets = self.clone();
                jobs.spawn(async move {
                    let ended = budgets.execute(&job).await;
                    (job, ended)
                });
            }
            tokio::select! {
                Some(Ok((job, ended))) = jobs.join_next() => {
                    if let Some(conflict) = self.finish_write(job, ended) {
                        return conflict;
                    }
                }
                () = self.kick.notified() => {}
                _ = tick.tick() => {
                    self.tick();
                    look = true;
                }
            }
        }
    }

    /// Composes at most so many writes that are due. `look`: also those that only what is shown asks for.
    fn start_writes(&self, most: usize, look: bool) -> Vec<WriteJob> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let now = self.now();
        let rests = |id: &DocumentId| state.papers.get(id).is_some_and(|paper| paper.is_backing_off(now));
        let mut due = state.book.due(now);
        due.retain(|id| !rests(id));
        let age = |paper: &StatusDocument| paper.wrote.map_or(WRITE_INTERVAL, |wrote| now.duration_since(wrote));
        let shows = |id: &DocumentId, paper: &StatusDocument| {
            // While records are refused, what is shown says so, and is written without one.
            let trouble = paper.trouble().filter(|_| paper.is_backing_off(now));
            let differs = || self.display(state, id, trouble).is_some_and(|new| new != paper.shown);
            if paper.is_backing_off(now) {
                return !paper.writing && trouble.is_some() && look && differs();
            }
            !paper.writing
                && (paper.hurry && differs()
                    || look && age(paper) >= WRITE_INTERVAL && differs()
                    || look && age(paper) >= NEWS_INTERVAL && self.is_news(state, id))
        };
        let show: Vec<DocumentId> = state
            .papers
            .iter()
            .filter(|(id, paper)| id.kind == DocumentKind::Budget && !due.contains(id) && shows(id, paper))
            .map(|(id, _)| id.clone())
            .collect();
        due.extend(show);
        due.truncate(most);
        due.into_iter().filter_map(|id| self.compose(state, id, now)).collect()
    }

    fn compose(&self, state: &mut LedgerState, id: DocumentId, now: Timestamp) -> Option<WriteJob> {
        let rests = state.papers.get(&id).is_some_and(|paper| paper.is_backing_off(now));
        let trouble = state
            .papers
            .get(&id)
            .and_then(StatusDocument::trouble)
            .map(str::to_owned);
        let (writes, display) = if rests {
            (Vec::new(), self.display(state, &id, trouble.as_deref()))
        } else {
            (state.book.compose(&id, now), self.display(state, &id, None))
        };
        let paper = state.papers.get_mut(&id)?;
        let patch = patch(&id, paper, &writes, display.as_ref());
        (paper.writing, paper.hurry) = (true, false);
        Some(WriteJob {
            id,
            writes,
            display,
            patch,
        })
    }

    /// What is to be shown. `trouble`: why records cannot be written.
    fn display(&self, state: &LedgerState, id: &DocumentId, trouble: Option<&str>) -> Option<Map<String, Value>> {
        if id.kind != DocumentKind::Budget {
            return None;
        }
        let facts = state.scope.budget(&id.uid)?;
        let view = self.view(state, facts);
        Some(self.face.status(&BudgetView { trouble, ..view }))
    }

    fn is_news(&self, state: &LedgerState, id: &DocumentId) -> bool {
        let facts = state.scope.budget(&id.uid);
        facts.is_some_and(|facts| self.face.is_news(&self.view(state, facts)))
    }

    fn finish_write(&self, job: WriteJob, ended: WriteOutcome) -> Option<RecordConflictError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let now = self.now();
        let mut told = Vec::new();
        match ended {
            WriteOutcome::Conflict(conflict) => return Some(conflict),
            WriteOutcome::Gone => {
                // The watch will say so too; until then nothing more is tried every second.
                state.book.written(&job.id, &[], now);
                if let Some(paper) = state.papers.get_mut(&job.id) {
                    (paper.writing, paper.wrote) = (false, Some(now));
                }
            }
            WriteOutcome::Not(status, message) => {
                if !job.writes.is_empty() {
                    state.book.not_written(&job.id);
                }
                let before = state.papers.remove(&job.id).unwrap_or_default();
                let read = before.refused(&status, message, now);
                tracing::warn!(
                    kind = kind(&job.id),
                    namespace = job.id.namespace,
                    name = job.id.name,
                    message = read.trouble,
                    refusals = read.refusals,
                    "a ledger record was refused; it is made anew, no grant until then"
                );
                state.papers.insert(job.id, read);
            }
            WriteOutcome::Written => {
                if !job.writes.is_empty() {
                    state.book.written(&job.id, &job.writes, now);
                }
                let before = state.papers.get_mut(&job.id).map(|paper| {
                    (paper.writing, paper.wrote) = (false, Some(now));
                    paper.has_status = true;
                    paper.has_ledger |= !job.writes.is_empty();
                    if !job.writes.is_empty() || job.id.kind == DocumentKind::Budget && !paper.is_backing_off(now) {
                        (paper.refusals, paper.again) = (0, None);
                    }
                    match &job.display {
                        Some(display) => std::mem::replace(&mut paper.shown, display.clone()),
                        None => Map::new(),
                    }
                });
                let facts = state.scope.budget(&job.id.uid);
                if let (Some(before), Some(after), Some(facts)) = (before, &job.display, facts)
                    && before != *after
                {
                    self.face.written(&facts.object, &before, after);
                    // What holds their calls may be another: a gate, a stop.
                    told.extend(state.scope.members(&job.id.account(DocumentPart::Budget)).cloned());
                }
            }
        }
        self.send_terms(state, told);
        drop(guard);
        self.note_written();
        None
    }

    /// Repeats one write until its outcome is known.
    async fn execute(&self, job: &WriteJob) -> WriteOutcome {
        let mut pause = PAUSE;
        loop {
            let trouble = match self.send("PATCH", &job.id, &job.patch).await {
                Ok(_) => return WriteOutcome::Written,
                Err(StatusWriteError::Status(404, _)) => return WriteOutcome::Gone,
                Err(StatusWriteError::Status(code, message)) if is_refusal(code, &message) => {
                    match self.send("GET", &job.id, &Value::Null).await {
                        // An attempt before, whose outcome was not known, may have been written.
                        Ok(object) => return judge_refusal(job, &object, message),
                        Err(StatusWriteError::Status(404, _)) => return WriteOutcome::Gone,
                        Err(trouble) => trouble,
                    }
                }
                Err(trouble) => trouble,
            };
            tracing::warn!(
                kind = kind(&job.id),
                namespace = job.id.namespace,
                name = job.id.name,
                %trouble,
                "a ledger record could not be written; trying again in {:.1} s, no grant until then",
                pause.as_secs_f64()
            );
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    async fn send(&self, method: &str, id: &DocumentId, body: &Value) -> Result<Value, StatusWriteError> {
        let plural = match id.kind {
            DocumentKind::Budget => "agentbudgets",
            DocumentKind::Agent => "agents",
        };
        let path = format!(
            "/apis/agentloop.dev/v1alpha1/namespaces/{}/{plural}/{}/status?fieldManager=agentloop-ledger",
            id.namespace, id.name
        );
        let bytes = if body.is_null() {
            Vec::new()
        } else {
            body.to_string().into_bytes()
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONTENT_TYPE, "application/json-patch+json")
            .body(bytes)
            .map_err(|error| StatusWriteError::Unknown(error.to_string()))?;
        match timeout(REQUEST_TIMEOUT, self.client.request::<Value>(request)).await {
            Ok(Ok(object)) => Ok(object),
            Ok(Err(kube::Error::Api(status))) => Err(StatusWriteError::Status(status.code, status.message.clone())),
            Ok(Err(error)) => Err(StatusWriteError::Unknown(error.to_string())),
            Err(_) => Err(StatusWriteError::Unknown(format!(
                "no answer within {} s",
                REQUEST_TIMEOUT.as_secs()
            ))),
        }
    }
}

#[derive(thiserror::Error, Debug)]
enum StatusWriteError {
    #[error("the API server answers {0}: {1}")]
    Status(u16, String),
    #[error("{0}")]
    Unknown(String),
}

/// Whether an answer says for certain that nothing was written, and that the same again will not be either.
fn is_refusal(code: u16, message: &str) -> bool {
    match code {
        // Timeouts, conflicts and too many requests pass.
        408 | 409 | 429 => false,
        400..=499 => true,
        // What the store says of an object that is too large.
        500 => message.contains("request is too large"),
        _ => false,
    }
}

/// What a refused patch found: ours from an attempt before, another leader's, another object, or neither.
fn judge_refusal(job: &WriteJob, object: &Value, message: String) -> WriteOutcome {
    if object["metadata"]["uid"] != json!(job.id.uid) {
        return WriteOutcome::Gone;
    }
    let found = |part: DocumentPart| {
        let value = object.pointer(&place(part))?;
        serde_json::from_value::<LedgerRecord>(value.clone()).ok()
    };
    if !job.writes.is_empty()
        && job
            .writes
            .iter()
            .all(|write| found(write.part).as_ref() == Some(&write.record))
    {
        return WriteOutcome::Written;
    }
    for write in &job.writes {
        let epoch = found(write.part).map_or(0, |record| record.epoch);
        if epoch != write.over {
            return WriteOutcome::Conflict(RecordConflictError {
                kind: kind(&job.id),
                namespace: job.id.namespace.clone(),
                name: job.id.name.clone(),
                expected: write.over,
                found: epoch,
            });
        }
    }
    WriteOutcome::Not(object["status"].clone(), message)
}

fn kind(id: &DocumentId) -> &'static str {
    match id.kind {
        DocumentKind::Budget => "AgentBudget",
        DocumentKind::Agent => "Agent",
    }
}

fn place(part: DocumentPart) -> String {
    match part {
        DocumentPart::Budget => "/status/ledger".into(),
        DocumentPart::TokensPerHour => "/status/ledger/tokensPerHour".into(),
        DocumentPart::Total => "/status/ledger/total".into(),
    }
}

/// The patch: first all tests, then all changes.
fn patch(
    id: &DocumentId,
    paper: &StatusDocument,
    writes: &[RecordWrite],
    display: Option<&Map<String, Value>>,
) -> Value {
    let test = |path: &str, value: Value| json!({"op": "test", "path": path, "value": value});
    let add = |path: &str, value: Value| json!({"op": "add", "path": path, "value": value});
    let mut tests = vec![test("/metadata/uid", json!(id.uid))];
    let mut changes = Vec::new();
    if !paper.has_status {
        tests.push(test("/status", Value::Null));
        changes.push(add("/status", json!({})));
    }
    let nested = id.kind == DocumentKind::Agent;
    if nested && !paper.has_ledger {
        if paper.has_status {
            tests.push(test("/status/ledger", Value::Null));
        }
        changes.push(add("/status/ledger", json!({})));
    }
    for write in writes {
        let place = place(write.part);
        if write.over > 0 {
            tests.push(test(&format!("{place}/epoch"), json!(write.over)));
        } else if paper.has_status && (!nested || paper.has_ledger) {
            tests.push(test(&place, Value::Null));
        }
        changes.push(add(&place, json!(write.record)));
    }
    if let Some(display) = display {
        let gone = paper.shown.keys().filter(|key| !display.contains_key(*key));
        changes.extend(gone.map(|key| json!({"op": "remove", "path": format!("/status/{key}")})));
        let news = display
            .iter()
            .filter(|(key, value)| paper.shown.get(*key) != Some(*value));
        changes.extend(news.map(|(key, value)| add(&format!("/status/{key}"), value.clone())));
    }
    tests.append(&mut changes);
    Value::Array(tests)
}
