//! Writes records into `status`, each over exactly its predecessor, together with the visible status of a budget.
//!
//! Uses JSON patches with `test` operations, never apply: finding a record of another leader ends this process. A write
//! with an unknown outcome is repeated unchanged until the outcome is known, so that no record is ever in doubt. A
//! write that is certainly rejected is composed again, with exponential backoff, and the budget reports it. All
//! requests that wait for one document share its next write. ADR 0060 explains why this is not a reconciler.

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
use crate::controller::runtime::fair_line::FairLine;

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent [`RecordWrite`]s.
const WRITERS: usize = 32;
/// Interval of the ledger's maintenance.
const TICK: Duration = Duration::from_secs(1);
/// Shortest interval after the last write at which urgent changes of the status are written.
const NEWS_INTERVAL: SignedDuration = SignedDuration::from_secs(5);
/// First and longest delay between attempts at one [`RecordWrite`].
const PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Longest delay before a rejected record is composed again, and the number of rejections before the budget reports it:
/// a single one happens when another client writes the status.
const MAX_REFUSED: SignedDuration = SignedDuration::from_mins(1);
const MIN_REPORTED_REFUSALS: u32 = 2;

/// The known state of a document's status.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "four independent facts")]
pub(super) struct StatusDocument {
    /// The status as last written, without the ledger.
    pub(super) shown: Map<String, Value>,
    /// The status must be written at once, because the spec changed.
    pub(super) urgent: bool,
    has_status: bool,
    has_ledger: bool,
    wrote: Option<Timestamp>,
    writing: bool,
    /// Number of consecutive rejections by the API server; with the last message and the time of the next attempt.
    refusals: u32,
    problem: String,
    next_attempt: Option<Timestamp>,
}

impl StatusDocument {
    /// Why its [`LedgerRecord`]s cannot be written, once that is worth reporting.
    pub(super) fn problem(&self) -> Option<&str> {
        (self.refusals >= MIN_REPORTED_REFUSALS).then_some(self.problem.as_str())
    }

    /// The document after another rejection, with the status found in the cluster.
    fn refused(&self, status: &Value, message: String, now: Timestamp) -> Self {
        let first = SignedDuration::try_from(PAUSE).unwrap_or_default();
        let pause = first.saturating_mul(1 << self.refusals.min(16)).min(MAX_REFUSED);
        Self {
            refusals: self.refusals.saturating_add(1),
            problem: message,
            next_attempt: now.checked_add(pause).ok(),
            wrote: self.wrote,
            ..Self::read(Some(status))
        }
    }

    fn is_backing_off(&self, now: Timestamp) -> bool {
        self.next_attempt.is_some_and(|moment| now < moment)
    }

    /// The status of a budget.
    pub(super) fn of_budget(status: Option<&AgentBudgetStatus>) -> Self {
        let value = status.and_then(|status| serde_json::to_value(status).ok());
        Self::read(value.as_ref())
    }

    /// The status of an Agent.
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

/// Another leader wrote a [`LedgerRecord`], so this one must stop.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error(
    "the ledger record of {kind} {namespace}/{name} has epoch {found}, but this leader wrote {expected}: another \
     leader has written it"
)]
pub struct RecordConflictError {
    pub(in crate::controller) kind: &'static str,
    pub(in crate::controller) namespace: String,
    pub(in crate::controller) name: String,
    pub(in crate::controller) expected: i64,
    pub(in crate::controller) found: i64,
}

#[derive(Clone, Debug)]
struct WriteJob {
    id: DocumentId,
    writes: Vec<RecordWrite>,
    display: Option<Map<String, Value>>,
    patch: Value,
}

#[derive(Debug)]
enum WriteOutcome {
    Written,
    /// The object was deleted, or replaced by another one of the same name.
    Gone,
    /// Certainly not written: the status found, and the message.
    Not(Value, String),
    Conflict(RecordConflictError),
}

/// At most this many documents: one of each namespace in turn, beginning after the one whose turn was last, so that a namespace whose
/// documents are always due delays no other.
fn take_turns(mut due: Vec<DocumentId>, last: &mut String, most: usize) -> Vec<DocumentId> {
    due.sort_by(|one, other| one.object.namespace.cmp(&other.object.namespace));
    let (later, earlier): (Vec<_>, Vec<_>) = due.into_iter().partition(|id| id.object.namespace > *last);
    let mut line = FairLine::new();
    for id in later.into_iter().chain(earlier) {
        let namespace = id.object.namespace.clone();
        line.push(&namespace, id);
    }
    let taken: Vec<_> = std::iter::from_fn(|| line.pop()).take(most).collect();
    if let Some(id) = taken.last() {
        last.clone_from(&id.object.namespace);
    }
    taken
}

/// The namespaces whose documents were written last.
#[derive(Debug, Default)]
pub(super) struct WriteTurns {
    /// Of the documents with due records.
    records: String,
    /// Of those of which only the visible status changes.
    shown: String,
}

impl WriteTurns {
    /// At most this many documents: those with due records first, since calls may wait for them; their writes include the visible
    /// status anyway.
    fn take(&mut self, due: Vec<DocumentId>, show: Vec<DocumentId>, most: usize) -> Vec<DocumentId> {
        let mut taken = take_turns(due, &mut self.records, most);
        let left = most.saturating_sub(taken.len());
        taken.extend(take_turns(show, &mut self.shown, left));
        taken
    }
}

impl BudgetLedger {
    /// Writes due [`LedgerRecord`]s until a record of another leader is found.
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
                () = self.wake_writer.notified() => {}
                _ = tick.tick() => {
                    self.tick();
                    look = true;
                }
            }
        }
    }

    /// Composes up to `max` due writes. `look`: including those that only change the visible status.
    fn start_writes(&self, max: usize, look: bool) -> Vec<WriteJob> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let now = self.now();
        let backs_off = |id: &DocumentId| {
            state
                .status_documents
                .get(id)
                .is_some_and(|document| document.is_backing_off(now))
        };
        let mut due = state.book.due(now);
        due.retain(|id| !backs_off(id));
        let age = |document: &StatusDocument| document.wrote.map_or(WRITE_INTERVAL, |wrote| now.duration_since(wrote));
        let shows = |id: &DocumentId, document: &StatusDocument| {
            // While records are rejected, the status reports that, and is written without a record.
            let problem = document.problem().filter(|_| document.is_backing_off(now));
            let differs = || {
                self.display(state, id, problem)
                    .is_some_and(|new| new != document.shown)
            };
            if document.is_backing_off(now) {
                return !document.writing && problem.is_some() && look && differs();
            }
            !document.writing
                && (document.urgent && differs()
                    || look && age(document) >= WRITE_INTERVAL && differs()
                    || look && age(document) >= NEWS_INTERVAL && self.is_urgent(state, id))
        };
        let show: Vec<DocumentId> = state
            .status_documents
            .iter()
            .filter(|(id, document)| id.kind == DocumentKind::Budget && !due.contains(id) && shows(id, document))
            .map(|(id, _)| id.clone())
            .collect();
        let taken = state.write_turns.take(due, show, max);
        taken
            .into_iter()
            .filter_map(|id| self.compose(state, id, now))
            .collect()
    }

    fn compose(&self, state: &mut LedgerState, id: DocumentId, now: Timestamp) -> Option<WriteJob> {
        let backs_off = state
            .status_documents
            .get(&id)
            .is_some_and(|document| document.is_backing_off(now));
        let problem = state
            .status_documents
            .get(&id)
            .and_then(StatusDocument::problem)
            .map(str::to_owned);
        let (writes, display) = if backs_off {
            (Vec::new(), self.display(state, &id, problem.as_deref()))
        } else {
            (state.book.compose(&id, now), self.display(state, &id, None))
        };
        let document = state.status_documents.get_mut(&id)?;
        let patch = patch(&id, document, &writes, display.as_ref());
        (document.writing, document.urgent) = (true, false);
        Some(WriteJob {
            id,
            writes,
            display,
            patch,
        })
    }

    /// The visible status. `problem`: why records cannot be written.
    fn display(&self, state: &LedgerState, id: &DocumentId, problem: Option<&str>) -> Option<Map<String, Value>> {
        if id.kind != DocumentKind::Budget {
            return None;
        }
        let facts = state.assignments.budget(&id.uid)?;
        let view = self.view(state, facts);
        Some(self.presentation.status(&BudgetView { problem, ..view }))
    }

    fn is_urgent(&self, state: &LedgerState, id: &DocumentId) -> bool {
        let facts = state.assignments.budget(&id.uid);
        facts.is_some_and(|facts| self.presentation.is_urgent(&self.view(state, facts)))
    }

    fn finish_write(&self, job: WriteJob, ended: WriteOutcome) -> Option<RecordConflictError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let now = self.now();
        let mut affected = Vec::new();
        match ended {
            WriteOutcome::Conflict(conflict) => return Some(conflict),
            WriteOutcome::Gone => {
                // The watch will report the deletion; until then this write is not retried every second.
                state.book.written(&job.id, &[], now);
                if let Some(document) = state.status_documents.get_mut(&job.id) {
                    (document.writing, document.wrote) = (false, Some(now));
                }
            }
            WriteOutcome::Not(status, message) => {
                if !job.writes.is_empty() {
                    state.book.not_written(&job.id);
                }
                let before = state.status_documents.remove(&job.id).unwrap_or_default();
                let read = before.refused(&status, message, now);
                tracing::warn!(
                    kind = kind(&job.id),
                    namespace = job.id.object.namespace,
                    name = job.id.object.name,
                    message = read.problem,
                    refusals = read.refusals,
                    "the API server rejected a ledger record; retrying with a new one, no leases are granted until then"
                );
                state.status_documents.insert(job.id, read);
            }
            WriteOutcome::Written => {
                if !job.writes.is_empty() {
                    state.book.written(&job.id, &job.writes, now);
                }
                let before = state.status_documents.get_mut(&job.id).map(|document| {
                    (document.writing, document.wrote) = (false, Some(now));
                    document.has_status = true;
                    document.has_ledger |= !job.writes.is_empty();
                    if !job.writes.is_empty() || job.id.kind == DocumentKind::Budget && !document.is_backing_off(now) {
                        (document.refusals, document.next_attempt) = (0, None);
                    }
                    match &job.display {
                        Some(display) => std::mem::replace(&mut document.shown, display.clone()),
                        None => Map::new(),
                    }
                });
                let facts = state.assignments.budget(&job.id.uid);
                if let (Some(before), Some(after), Some(facts)) = (before, &job.display, facts)
                    && before != *after
                {
                    self.presentation.written(&facts.object, &before, after);
                    // What holds the calls may have changed: a gate, a stop.
                    affected.extend(
                        state
                            .assignments
                            .members(&job.id.account(DocumentPart::Budget))
                            .cloned(),
                    );
                }
            }
        }
        self.send_terms(state, affected);
        drop(guard);
        self.note_written();
        None
    }

    /// Repeats one [`RecordWrite`] until its outcome is known.
    async fn execute(&self, job: &WriteJob) -> WriteOutcome {
        let mut pause = PAUSE;
        loop {
            let problem = match self.send("PATCH", &job.id, &job.patch).await {
                Ok(_) => return WriteOutcome::Written,
                Err(StatusWriteError::Status(404, _)) => return WriteOutcome::Gone,
                Err(StatusWriteError::Status(code, message)) if is_refusal(code, &message) => {
                    match self.send("GET", &job.id, &Value::Null).await {
                        // An earlier attempt with an unknown outcome may have been written.
                        Ok(object) => return judge_refusal(job, &object, message),
                        Err(StatusWriteError::Status(404, _)) => return WriteOutcome::Gone,
                        Err(problem) => problem,
                    }
                }
                Err(problem) => problem,
            };
            tracing::warn!(
                kind = kind(&job.id),
                namespace = job.id.object.namespace,
                name = job.id.object.name,
                %problem,
                "failed to write a ledger record; retrying in {:.1} s, no leases are granted until then",
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
            id.object.namespace, id.object.name
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
    #[error("the API server answered {0}: {1}")]
    Status(u16, String),
    #[error("{0}")]
    Unknown(String),
}

/// Whether an answer means for certain that nothing was written, and that the same request would fail again.
fn is_refusal(code: u16, message: &str) -> bool {
    match code {
        // Timeouts, conflicts and rate limits are temporary.
        408 | 409 | 429 => false,
        400..=499 => true,
        // The answer of etcd for an object that is too large.
        500 => message.contains("request is too large"),
        _ => false,
    }
}

/// Determines what a rejected patch ran into: our own earlier attempt, another leader, another object, or none of
/// these.
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
                namespace: job.id.object.namespace.clone(),
                name: job.id.object.name.clone(),
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
    document: &StatusDocument,
    writes: &[RecordWrite],
    display: Option<&Map<String, Value>>,
) -> Value {
    let test = |path: &str, value: Value| json!({"op": "test", "path": path, "value": value});
    let add = |path: &str, value: Value| json!({"op": "add", "path": path, "value": value});
    let mut tests = vec![test("/metadata/uid", json!(id.uid))];
    let mut changes = Vec::new();
    if !document.has_status {
        tests.push(test("/status", Value::Null));
        changes.push(add("/status", json!({})));
    }
    let nested = id.kind == DocumentKind::Agent;
    if nested && !document.has_ledger {
        if document.has_status {
            tests.push(test("/status/ledger", Value::Null));
        }
        changes.push(add("/status/ledger", json!({})));
    }
    for write in writes {
        let place = place(write.part);
        if write.over > 0 {
            tests.push(test(&format!("{place}/epoch"), json!(write.over)));
        } else if document.has_status && (!nested || document.has_ledger) {
            tests.push(test(&place, Value::Null));
        }
        changes.push(add(&place, json!(write.record)));
    }
    if let Some(display) = display {
        let gone = document.shown.keys().filter(|key| !display.contains_key(*key));
        changes.extend(gone.map(|key| json!({"op": "remove", "path": format!("/status/{key}")})));
        let news = display
            .iter()
            .filter(|(key, value)| document.shown.get(*key) != Some(*value));
        changes.extend(news.map(|(key, value)| add(&format!("/status/{key}"), value.clone())));
    }
    tests.append(&mut changes);
    Value::Array(tests)
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::api::NamespacedName;

    fn document(kind: DocumentKind, namespace: &str, name: &str) -> DocumentId {
        DocumentId {
            kind,
            object: NamespacedName::new(namespace, name),
            uid: name.to_owned(),
        }
    }

    #[test]
    fn namespaces_take_turns_however_many_documents_of_one_are_always_due() {
        let agent = |namespace: &str, name: &str| document(DocumentKind::Agent, namespace, name);
        let due = vec![
            document(DocumentKind::Budget, "c", "team"),
            agent("a", "0"),
            agent("a", "1"),
            agent("b", "0"),
        ];
        let mut last = String::new();
        let turn = |last: &mut String, most| -> Vec<String> {
            let taken = take_turns(due.clone(), last, most);
            taken.iter().map(|id| id.object.to_string()).collect()
        };
        // One place at a time, and all documents are due again each time.
        let turns: Vec<_> = (0..4).flat_map(|_| turn(&mut last, 1)).collect();
        assert_eq!(turns, ["a/0", "b/0", "c/team", "a/0"]);
        assert_eq!(turn(&mut last, 3), ["b/0", "c/team", "a/0"]);
        assert_eq!(turn(&mut last, 4), ["b/0", "c/team", "a/0", "a/1"]);
        assert_eq!(turn(&mut last, 0), [""; 0]);
        assert_eq!(last, "a");
    }

    #[test]
    fn documents_with_due_records_come_before_those_of_which_only_the_status_changes() {
        let due = vec![document(DocumentKind::Agent, "z", "waits")];
        let show: Vec<_> = (0..40)
            .map(|number| document(DocumentKind::Budget, &format!("a{number:02}"), "team"))
            .collect();
        let mut turns = WriteTurns::default();
        let mut turn = |due: &[DocumentId], most| -> Vec<String> {
            let taken = turns.take(due.to_vec(), show.clone(), most);
            taken.into_iter().map(|id| id.object.namespace).collect()
        };
        let expected = |rest: std::ops::Range<usize>| -> Vec<String> {
            let rest = rest.map(|number| format!("a{number:02}"));
            std::iter::once("z".to_owned()).chain(rest).collect()
        };
        assert_eq!(turn(&due, 1), expected(0..0));
        assert_eq!(turn(&due, 32), expected(0..31));
        // Records do not move the turns of the others.
        assert_eq!(turn(&due, 2), expected(31..32));
        assert_eq!(turn(&[], 2), expected(32..34)[1..]);
    }
}
