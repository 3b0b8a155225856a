//! Sends Kubernetes Events in the background, so that no reconcile waits for them.

use std::collections::HashSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::names;

/// Bound of the queue; further Events are dropped.
const QUEUE: usize = 1024;
/// Most bytes of a note: the API server refuses an Event with a longer one.
const MOST_NOTE_BYTES: usize = 1024;
/// The end of a note that was too long.
const CUT: &str = "…";
/// Time limit for one Event.
const SEND: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeEvent {
    /// Type `Warning`: intervention may be needed.
    pub warning: bool,
    pub reason: String,
    /// The `action` of the Event, a verb such as `Delete`.
    pub action: &'static str,
    /// Human-readable text.
    pub note: String,
}

impl KubeEvent {
    pub fn normal(reason: &str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: false,
            reason: reason.into(),
            action,
            note: note.into(),
        }
    }

    pub fn warning(reason: &str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: true,
            ..Self::normal(reason, action, note)
        }
    }
}

/// The receiving half of the queue of Events.
pub type EventQueue = mpsc::Receiver<(KubeEvent, ObjectReference)>;

/// The sending half of the queue of Events.
#[derive(Clone)]
pub struct EventSink(mpsc::Sender<(KubeEvent, ObjectReference)>);

impl EventSink {
    /// Creates the queue. The receiver belongs to [`publish`].
    #[must_use]
    pub fn new() -> (Self, EventQueue) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self(sender), receiver)
    }

    /// Never blocks: Events are dropped if the queue is full.
    pub fn send(&self, notices: impl IntoIterator<Item = KubeEvent>, about: &ObjectReference) {
        for notice in notices {
            if let Err(error) = self.0.try_send((notice, about.clone())) {
                tracing::debug!(%error, "dropped an Event; the queue is full");
            }
        }
    }
}

/// Publishes the Events of a queue one after another until all its sinks are dropped or, once `finished` is cancelled, the
/// queue is empty.
pub async fn publish(recorder: Recorder, mut queue: EventQueue, finished: CancellationToken) {
    let mut warned = HashSet::new();
    while let Some((notice, about)) = next(&mut queue, &finished).await {
        let event = Event {
            type_: if notice.warning {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: notice.reason,
            action: notice.action.into(),
            note: Some(limit_note(notice.note)),
            secondary: None,
        };
        let sent = tokio::time::timeout(SEND, recorder.publish(&event, &about)).await;
        let failure = match sent {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "timed out".into(),
        };
        // Logged once per cause, and for at most 16 causes: a missing permission would otherwise fill the log.
        if warned.len() < 16 && warned.insert(failure.clone()) {
            tracing::warn!(error = failure, "failed to send an Event");
        }
    }
}

/// The note, or its beginning if it is too long.
fn limit_note(mut note: String) -> String {
    if note.len() > MOST_NOTE_BYTES {
        note.truncate(note.floor_char_boundary(MOST_NOTE_BYTES - CUT.len()));
        note.push_str(CUT);
    }
    note
}

async fn next(queue: &mut EventQueue, finished: &CancellationToken) -> Option<(KubeEvent, ObjectReference)> {
    if let Some(next) = finished.run_until_cancelled(queue.recv()).await {
        return next;
    }
    queue.close();
    queue.recv().await
}

/// Creates the recorder that publishes Events with this process as the reporting instance.
#[must_use]
pub fn recorder(client: Client, instance: String) -> Recorder {
    let reporter = Reporter {
        controller: names::MANAGER.into(),
        instance: Some(instance),
    };
    Recorder::new(client, reporter)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::longest("x".repeat(1024), "x".repeat(1024))]
    #[case::one_byte_more("x".repeat(1025), "x".repeat(1021) + "…")]
    #[case::longest_of_wide_characters("é".repeat(512), "é".repeat(512))]
    #[case::cut_between_characters("é".repeat(513), "é".repeat(510) + "…")]
    fn a_note_has_at_most_1024_bytes(#[case] note: String, #[case] sent: String) {
        assert!(sent.len() <= 1024);
        assert_eq!(limit_note(note), sent);
    }

    #[tokio::test]
    async fn the_queue_ends_when_its_senders_have_finished_though_a_sink_remains() {
        let ((sink, mut queue), finished) = (EventSink::new(), CancellationToken::new());
        let send = |reason| sink.send([KubeEvent::normal(reason, "Test", "")], &ObjectReference::default());
        send("First");
        finished.cancel();
        let first = next(&mut queue, &finished).await.unwrap();
        assert_eq!(first.0.reason, "First", "what was sent before is still published");
        send("Late");
        assert!(next(&mut queue, &finished).await.is_none());
    }
}
