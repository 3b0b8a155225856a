//! One task: requested once, and followed over any number of connections until it has ended.

use std::fmt::Write as _;
use std::io::Write;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::api::NamespacedName;
use crate::link::event_names;
use crate::link::events::EventLine;
use crate::link::json_error;
use crate::link::text_fragments::TextFragment;
use crate::plugin::failure::{ExitStatus, PluginError};
use crate::plugin::link::{EventCursor, FollowedEvents, LinkFailure, SubmissionReceipt, TaskSubmission, UserLink};
use crate::plugin::screens::printable::one_line;
use crate::plugin::session::{Screen, note};
use crate::plugin::tasks::live_text::{LiveText, NoteWriter};

/// Maximum number of attempts to request the task, when it is unknown whether an attempt arrived.
const MAX_ATTEMPTS: u32 = 5;
/// Delay before the second attempt, doubled before each further one.
const FIRST_DELAY: Duration = Duration::from_millis(250);
/// Maximum number of fragments of text that wait to be printed.
const MAX_FRAGMENTS: usize = 64;
/// How long a connection may be without an event while no event of a task that was requested before has been seen.
/// Kept events follow each other at once; this is only for those that a later version may number and not send.
const KEPT_EVENT: Duration = Duration::from_secs(10);

/// The response to a task.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ReceivedTaskResponse {
    /// Id of the task.
    pub id: String,
    /// `Completed`, `Failed` or `LimitReached`.
    pub outcome: String,
    /// The limit that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The result: a text, or JSON in the form that the Agent's schema requires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    /// Why there is no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Number of model calls.
    #[serde(default)]
    pub iterations: u32,
    /// Tokens of its model calls.
    #[serde(default)]
    pub tokens_used: i64,
    /// Source of the untrusted content that the conversation of the task had seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untrusted_content: Option<String>,
}

impl ReceivedTaskResponse {
    /// The result as a text.
    #[must_use]
    pub fn result_text(&self) -> String {
        match &self.result {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => serde_json::to_string_pretty(other).unwrap_or_default(),
        }
    }

    /// What the process returns.
    #[must_use]
    pub fn exit_status(&self) -> ExitStatus {
        match self.outcome.as_str() {
            "Completed" => ExitStatus::Success,
            "LimitReached" => ExitStatus::LimitReached,
            _ => ExitStatus::Failure,
        }
    }

    /// Why the task is not completed; `None`: it is.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if self.exit_status() == ExitStatus::Success {
            return None;
        }
        let mut text = format!("{}: {}", self.id, self.outcome);
        for part in [&self.reason, &self.error].into_iter().flatten() {
            let _ = write!(text, ": {part}");
        }
        Some(one_line(&text))
    }
}

/// How a run of a task ended.
#[derive(Clone, Debug, PartialEq)]
pub enum TaskEnd {
    /// The task has its response.
    Response(Box<ReceivedTaskResponse>),
    /// The task was requested before, and its events are no longer kept: there is no response to wait for.
    Forgotten {
        /// Id of the task.
        id: String,
    },
    /// The user interrupted the run; the task continues.
    Interrupted,
}

/// A signal of the user to stop waiting.
pub type Interrupt<'a> = Pin<&'a mut (dyn Future<Output = ()> + Send)>;

/// One task.
pub struct TaskRun<'a> {
    link: &'a UserLink<'a>,
    agent: &'a NamespacedName,
    task: &'a TaskSubmission,
    verbose: bool,
    requested: AtomicBool,
    received: AtomicBool,
}

impl<'a> TaskRun<'a> {
    /// A task that is not requested yet. `verbose`: tool runs are shown.
    #[must_use]
    pub fn new(link: &'a UserLink<'a>, agent: &'a NamespacedName, task: &'a TaskSubmission, verbose: bool) -> Self {
        Self {
            link,
            agent,
            task,
            verbose,
            requested: AtomicBool::new(false),
            received: AtomicBool::new(false),
        }
    }

    /// Whether a request was sent, so that the agent may have the task.
    #[must_use]
    pub fn was_requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Whether the controller has confirmed the task.
    #[must_use]
    pub fn was_received(&self) -> bool {
        self.received.load(Ordering::Relaxed)
    }

    /// Requests the task and waits for its end, or for the interrupt. Progress goes to standard error, and text of the answer
    /// to `live` as it arrives.
    pub async fn run(
        &self,
        screen: &mut Screen<'_>,
        mut live: Option<&mut LiveText>,
        interrupt: Interrupt<'_>,
    ) -> Result<TaskEnd, PluginError> {
        let (sender, mut fragments) = mpsc::channel(MAX_FRAGMENTS);
        let sender = live.is_some().then_some(sender);
        let has_open_line = live.as_ref().map(|live| Arc::clone(&live.has_open_line));
        let mut err = NoteWriter {
            err: screen.err,
            has_open_line: &has_open_line.unwrap_or_default(),
        };
        let print = async {
            while let (Some(live), Some(fragment)) = (&mut live, fragments.recv().await) {
                live.show(&fragment, screen.out);
            }
            std::future::pending().await
        };
        let ended = tokio::select! {
            biased;
            // First: text precedes what comes after it.
            never = print => never,
            ended = self.until_end(&mut err, sender) => ended,
            () = interrupt => Ok(TaskEnd::Interrupted),
        };
        if let Some(live) = live
            && !matches!(ended, Ok(TaskEnd::Response(_)))
        {
            live.end_line(screen.out);
        }
        ended
    }

    async fn until_end(
        &self,
        err: &mut (dyn Write + Send),
        text: Option<mpsc::Sender<TextFragment>>,
    ) -> Result<TaskEnd, PluginError> {
        // Before the task is requested, so that nothing is requested without the permission to read the response.
        let latest = FollowedEvents::resume(self.link, self.agent, EventCursor::Latest, true);
        let before = latest.with_text(text.clone()).connected().await;
        let before = match before {
            Ok(events) => Some(events),
            // An Agent without tasks may have no pod: the request starts it. Or its pod was just replaced: the request waits for the
            // next one.
            Err(LinkFailure::Refused { status: 503, .. } | LinkFailure::Ended(_)) => None,
            Err(failure) => return Err(failure.into()),
        };
        let receipt = self.submit().await?;
        self.received.store(true, Ordering::Relaxed);
        if self.verbose {
            note(err, &format!("{}: {}", receipt.id, receipt.state));
        }
        let mut watch = TaskWatch::new(&receipt, self.verbose);
        let after = receipt.after.unwrap_or(0);
        let mut events = match before {
            Some(events) if !receipt.is_repeated() => events,
            Some(_) | None => {
                let after = EventCursor::After(receipt.after.unwrap_or(0));
                FollowedEvents::resume(self.link, self.agent, after, true).with_text(text)
            }
        };
        if receipt.is_repeated() {
            // After the receipt: only then are all events that the task has had so far before this one.
            watch.unseen_until = Some(self.newest().await?);
        }
        loop {
            if watch
                .unseen_until
                .is_some_and(|newest| after.max(events.cursor()) >= newest)
            {
                return Ok(TaskEnd::Forgotten { id: receipt.id });
            }
            let event = if watch.unseen_until.is_none() {
                events.next().await?
            } else {
                let Some(event) = events.next_within(KEPT_EVENT).await? else {
                    return Ok(TaskEnd::Forgotten { id: receipt.id });
                };
                event
            };
            if let Some(reason) = events.take_interruption().filter(|_| self.verbose) {
                note(err, &format!("connected again: {reason}"));
            }
            match watch.see(&event)? {
                Seen::Nothing => {}
                Seen::Progress(line) => note(err, &line),
                Seen::End(response) => return Ok(TaskEnd::Response(response)),
            }
        }
    }

    /// The number of the newest event.
    async fn newest(&self) -> Result<i64, LinkFailure> {
        let mut delay = FIRST_DELAY;
        for _ in 1..MAX_ATTEMPTS {
            match FollowedEvents::open(self.link, self.agent, EventCursor::Latest, false).await {
                Err(failure) if failure.is_temporary() => {
                    tokio::time::sleep(delay).await;
                    delay *= 2;
                }
                opened => return opened.map(|events| events.cursor()),
            }
        }
        let opened = FollowedEvents::open(self.link, self.agent, EventCursor::Latest, false).await;
        opened.map(|events| events.cursor())
    }

    /// Requests the task. A repetition has no further effect, since the request has an id.
    async fn submit(&self) -> Result<SubmissionReceipt, LinkFailure> {
        self.requested.store(true, Ordering::Relaxed);
        let mut delay = FIRST_DELAY;
        for _ in 1..MAX_ATTEMPTS {
            match self.link.submit(self.agent, self.task).await {
                Err(LinkFailure::Unreachable(_) | LinkFailure::Refused { status: 503, .. }) => {
                    tokio::time::sleep(delay).await;
                    delay *= 2;
                }
                answered => return answered,
            }
        }
        self.link.submit(self.agent, self.task).await
    }
}

/// What an event means for the task.
#[derive(Debug, PartialEq)]
enum Seen {
    Nothing,
    /// A line for the user.
    Progress(String),
    /// The task has ended.
    End(Box<ReceivedTaskResponse>),
}

/// Reads the events of an Agent for those of one task.
struct TaskWatch {
    id: String,
    verbose: bool,
    /// The agent works on the task.
    working: bool,
    /// For a task that was requested before: the newest event at that time, if no event of the task was seen yet.
    unseen_until: Option<i64>,
}

impl TaskWatch {
    fn new(receipt: &SubmissionReceipt, verbose: bool) -> Self {
        Self {
            id: receipt.id.clone(),
            verbose,
            working: false,
            unseen_until: None,
        }
    }

    fn see(&mut self, event: &EventLine) -> Result<Seen, PluginError> {
        let is_of_task = event.note == self.id || event.note.starts_with(&format!("{}: ", self.id));
        match event.event.as_str() {
            event_names::TASK_ACCEPTED if is_of_task => self.unseen_until = None,
            event_names::TASK_STARTED if is_of_task => {
                self.unseen_until = None;
                self.working = true;
            }
            event_names::TASK_ENDED if is_of_task => {
                return response(event).map(|response| Seen::End(Box::new(response)));
            }
            _ => {}
        }
        Ok(self.progress(event).map_or(Seen::Nothing, Seen::Progress))
    }

    fn progress(&self, event: &EventLine) -> Option<String> {
        let tool = event.tool.as_deref().unwrap_or_default();
        let outcome = event.outcome.as_deref().unwrap_or_default();
        let line = match event.event.as_str() {
            // Without an answer the task does not continue: always shown.
            event_names::GATE_OPENED if self.working => {
                let gate = event.note.split(' ').next().unwrap_or_default();
                format!("waits for an approval of {tool}: gate {gate}")
            }
            "loop:state_changed" if event.note.contains("-> Paused") && self.unseen_until.is_none() => {
                format!("the agent is paused: {}", event.note)
            }
            event_names::TOOL_INTENT if self.verbose && self.working => format!("runs {tool}"),
            event_names::TOOL_OUTCOME if self.verbose && self.working => format!("ran {tool}: {outcome}"),
            event_names::TOOL_DENIED if self.verbose && self.working => format!("denied {tool}: {}", event.note),
            _ => return None,
        };
        Some(one_line(&line))
    }
}

/// The response in the messages of the event.
fn response(event: &EventLine) -> Result<ReceivedTaskResponse, PluginError> {
    let text = event.messages.first().ok_or_else(|| {
        LinkFailure::Unreadable(format!("event {} of the end of the task has no response", event.seq))
    })?;
    let read = serde_json::from_str(text);
    let unreadable = |error| LinkFailure::Unreadable(format!("event {}: {}", event.seq, json_error::describe(&error)));
    Ok(read.map_err(unreadable)?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn receipt(state: &str) -> SubmissionReceipt {
        SubmissionReceipt {
            id: "request-a".into(),
            state: state.into(),
            after: None,
        }
    }

    fn event(seq: i64, name: &str, note: &str) -> EventLine {
        EventLine {
            seq,
            event: name.into(),
            note: note.into(),
            tool: Some("bank\u{7}__pay".into()),
            outcome: Some("Ok".into()),
            messages: vec![json!({"id": "request-a", "outcome": "Completed", "result": "done"}).to_string()],
            ..EventLine::default()
        }
    }

    fn ended(seen: &Seen) -> bool {
        matches!(seen, Seen::End(_))
    }

    #[test]
    fn a_task_ends_with_its_own_event_only() {
        let mut watch = TaskWatch::new(&receipt("Accepted"), false);
        assert!(!ended(
            &watch.see(&event(6, "task:ended", "request-ab: Completed")).unwrap()
        ));
        assert!(!ended(&watch.see(&event(7, "task:accepted", "request-a")).unwrap()));
        assert!(ended(
            &watch.see(&event(8, "task:ended", "request-a: Completed")).unwrap()
        ));
    }

    #[test]
    fn tool_runs_are_shown_while_the_agent_works_on_the_task_and_gates_always() {
        let mut watch = TaskWatch::new(&receipt("Accepted"), true);
        assert_eq!(watch.see(&event(6, "tool:intent", "")).unwrap(), Seen::Nothing);
        watch.see(&event(7, "task:started", "request-a")).unwrap();
        let progress = |text: &str| Seen::Progress(text.to_owned());
        assert_eq!(
            watch.see(&event(8, "tool:intent", "")).unwrap(),
            progress("runs bank __pay")
        );
        assert_eq!(
            watch.see(&event(9, "tool:outcome", "")).unwrap(),
            progress("ran bank __pay: Ok")
        );
        watch.verbose = false;
        assert_eq!(watch.see(&event(10, "tool:intent", "")).unwrap(), Seen::Nothing);
        let gate = watch.see(&event(11, "gate:opened", "e1-t1c1r1 ToolPolicy")).unwrap();
        assert_eq!(gate, progress("waits for an approval of bank __pay: gate e1-t1c1r1"));
    }

    #[test]
    fn a_repeated_task_is_unseen_until_an_event_of_it() {
        let mut watch = TaskWatch::new(&receipt("Repeated"), false);
        watch.unseen_until = Some(5);
        watch.see(&event(4, "task:ended", "request-b: Completed")).unwrap();
        assert_eq!(watch.unseen_until, Some(5));
        watch.see(&event(4, "task:accepted", "request-a")).unwrap();
        assert_eq!(watch.unseen_until, None);
    }

    #[test]
    fn the_outcome_decides_the_exit_status_and_an_unknown_one_is_a_failure() {
        let of = |outcome: &str| ReceivedTaskResponse {
            id: "request-a".into(),
            outcome: outcome.into(),
            reason: Some("MaxTokens".into()),
            error: Some("no room".into()),
            ..ReceivedTaskResponse::default()
        };
        assert_eq!(of("Completed").exit_status(), ExitStatus::Success);
        assert_eq!(of("Completed").problem(), None);
        assert_eq!(of("Failed").exit_status(), ExitStatus::Failure);
        assert_eq!(of("Other").exit_status(), ExitStatus::Failure);
        assert_eq!(of("LimitReached").exit_status(), ExitStatus::LimitReached);
        assert_eq!(
            of("LimitReached").problem().unwrap(),
            "request-a: LimitReached: MaxTokens: no room"
        );
    }

    #[test]
    fn a_result_is_a_text_or_json() {
        let text = |result: Option<Value>| {
            ReceivedTaskResponse {
                result,
                ..ReceivedTaskResponse::default()
            }
            .result_text()
        };
        assert_eq!(text(Some(json!("done"))), "done");
        assert_eq!(text(Some(json!({"a": 1}))), "{\n  \"a\": 1\n}");
        assert_eq!(text(None), "");
        assert_eq!(text(Some(Value::Null)), "");
    }

    #[test]
    fn an_end_without_a_readable_response_is_an_error() {
        let mut end = event(8, "task:ended", "request-a: Completed");
        end.messages = vec!["{".into()];
        assert!(response(&end).is_err());
        end.messages.clear();
        assert!(response(&end).is_err());
    }
}
