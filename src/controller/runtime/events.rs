//! Sends Kubernetes Events in the background, so that no reconcile waits for them.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use prometheus::IntCounter;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::event_limiter::EventLimiter;
use super::event_queue::EventQueue;
use super::names;
use crate::support::hash;

/// Maximum number of bytes of a note: the API server rejects an Event with a longer one.
const MAX_NOTE_BYTES: usize = 1024;
/// The end of a note that was too long.
const CUT: &str = "…";
/// Time limit for one Event.
const SEND: Duration = Duration::from_secs(10);
/// How long after the last one the same Event counts as another of its series.
const SERIES: SignedDuration = SignedDuration::from_mins(6);
/// Maximum number of Events that can become series; beyond them, the oldest of the namespace that has the most is forgotten, and the same Event is
/// a new one.
const MAX_RECENT: usize = 4096;

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

/// Publishes the Events of a queue one after another until all its sinks are dropped or, once `finished` is cancelled, the
/// queue is empty.
pub async fn publish(mut recorder: EventRecorder, mut queue: EventQueue, finished: CancellationToken) {
    let mut warned = HashSet::new();
    while let Some((notice, about)) = next(&mut queue, &finished).await {
        let sent = tokio::time::timeout(SEND, recorder.record(notice, about, Timestamp::now())).await;
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

/// Hash of what Events have in common.
pub(super) type EventHash = [u8; hash::BYTES];

/// Writes Events with this process as the reporting instance. The same Event again is counted in the series of the first
/// one; one with another note is an Event of its own, since a series has the note of its first Event only. Of those with one
/// reason about one object, a burst and then one every few minutes are written, and the others are dropped.
pub struct EventRecorder {
    client: Client,
    instance: String,
    recent: HashMap<EventHash, RecentEvent>,
    limiter: EventLimiter,
    dropped: IntCounter,
}

/// An Event that becomes a series if it is repeated soon.
struct RecentEvent {
    namespace: String,
    name: String,
    count: i32,
    last: Timestamp,
}

impl EventRecorder {
    /// A recorder that has written no Events. `dropped` counts those that it does not write.
    #[must_use]
    pub fn new(client: Client, instance: String, dropped: IntCounter) -> Self {
        Self {
            client,
            instance,
            recent: HashMap::new(),
            limiter: EventLimiter::default(),
            dropped,
        }
    }

    async fn record(
        &mut self,
        mut notice: KubeEvent,
        about: ObjectReference,
        now: Timestamp,
    ) -> Result<(), kube::Error> {
        notice.note = limit_note(notice.note);
        let identity = identity(&notice, &about);
        self.recent.retain(|_, recent| now.duration_since(recent.last) < SERIES);
        if !self.limiter.admit(limit_key(&notice, &about), now) {
            self.drop_event(&identity, &notice.reason, &about, now);
            return Ok(());
        }
        // Events about objects outside namespaces are in this one.
        let namespace = about.namespace.as_deref().unwrap_or("default");
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        // It is forgotten if the write fails: the Event may be gone.
        let recent = if let Some(mut recent) = self.recent.remove(&identity) {
            let count = recent.count.saturating_add(1);
            let series = json!({"series": {"count": count, "lastObservedTime": MicroTime(now)}});
            events
                .patch(&recent.name, &PatchParams::default(), &Patch::Merge(&series))
                .await?;
            (recent.count, recent.last) = (count, now);
            recent
        } else {
            let namespace = namespace.to_owned();
            let event = self.event(notice, about, now);
            events.create(&PostParams::default(), &event).await?;
            self.make_room();
            let name = event.metadata.name.unwrap_or_default();
            RecentEvent {
                namespace,
                name,
                count: 1,
                last: now,
            }
        };
        self.recent.insert(identity, recent);
        Ok(())
    }

    /// A repetition is counted in its series, and is written with the next one that is admitted.
    fn drop_event(&mut self, identity: &EventHash, reason: &str, about: &ObjectReference, now: Timestamp) {
        if let Some(recent) = self.recent.get_mut(identity) {
            recent.count = recent.count.saturating_add(1);
            recent.last = now;
        }
        self.dropped.inc();
        let (namespace, name) = (about.namespace.as_deref(), about.name.as_deref());
        tracing::debug!(
            reason,
            kind = about.kind.as_deref(),
            namespace,
            name,
            dropped = self.dropped.get(),
            "dropped an Event; its object had too many with this reason"
        );
    }

    fn make_room(&mut self) {
        if self.recent.len() < MAX_RECENT {
            return;
        }
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for recent in self.recent.values() {
            *counts.entry(&recent.namespace).or_default() += 1;
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        let of_most = self
            .recent
            .iter()
            .filter(|(_, recent)| most.is_some_and(|(namespace, _)| recent.namespace == namespace));
        let oldest = of_most.min_by_key(|(_, recent)| recent.last);
        if let Some(oldest) = oldest.map(|(identity, _)| *identity) {
            self.recent.remove(&oldest);
        }
    }

    fn event(&self, notice: KubeEvent, about: ObjectReference, now: Timestamp) -> Event {
        let name = about.name.as_deref().unwrap_or(names::MANAGER);
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{:x}", now.as_nanosecond())),
                namespace: about.namespace.clone(),
                ..ObjectMeta::default()
            },
            type_: Some(if notice.warning { "Warning" } else { "Normal" }.into()),
            reason: Some(notice.reason),
            action: Some(notice.action.into()),
            note: Some(notice.note),
            event_time: Some(MicroTime(now)),
            reporting_controller: Some(names::MANAGER.into()),
            reporting_instance: Some(self.instance.clone()),
            regarding: Some(about),
            ..Event::default()
        }
    }
}

/// Hash of what makes two Events the same. The version of the object does not.
fn identity(notice: &KubeEvent, about: &ObjectReference) -> EventHash {
    let event = (notice.warning, &notice.reason, notice.action, &notice.note);
    hash::sha256(json!([object_fields(about), event]).to_string())
}

/// Hash of what the Events have in common that are limited together.
fn limit_key(notice: &KubeEvent, about: &ObjectReference) -> EventHash {
    hash::sha256(json!([object_fields(about), notice.reason]).to_string())
}

fn object_fields(about: &ObjectReference) -> [Option<&str>; 5] {
    [
        about.api_version.as_deref(),
        about.kind.as_deref(),
        about.namespace.as_deref(),
        about.name.as_deref(),
        about.uid.as_deref(),
    ]
}

/// The note, or its beginning if it is too long.
fn limit_note(mut note: String) -> String {
    if note.len() > MAX_NOTE_BYTES {
        note.truncate(note.floor_char_boundary(MAX_NOTE_BYTES - CUT.len()));
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use axum::http::{Method, Request, Response};
    use kube::client::Body;
    use pretty_assertions::assert_eq;
    use rstest::rstest;
    use serde_json::Value;
    use tower::service_fn;

    use super::*;
    use crate::controller::runtime::EventSink;

    /// Stores Events by their names. Writes can be made to fail.
    #[derive(Clone, Default)]
    struct EventServer {
        events: Arc<Mutex<HashMap<String, Value>>>,
        fails: Arc<Mutex<bool>>,
    }

    impl EventServer {
        fn recorder(&self) -> EventRecorder {
            let server = self.clone();
            let answer = service_fn(move |request: Request<Body>| {
                let server = server.clone();
                async move {
                    let (parts, body) = request.into_parts();
                    let body: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
                    if *server.fails.lock().unwrap() {
                        let gone = json!({"kind": "Status", "status": "Failure", "message": "gone", "code": 404});
                        let answer = Response::builder().status(404).body(gone.to_string().into());
                        return Ok::<Response<axum::body::Body>, Infallible>(answer.unwrap());
                    }
                    let event = server.write(&parts.method, parts.uri.path(), body);
                    Ok(Response::new(event.to_string().into()))
                }
            });
            let dropped = IntCounter::new("dropped", "Dropped Events").unwrap();
            EventRecorder::new(Client::new(answer, "default"), "pod".into(), dropped)
        }

        /// How many Events about each object there are, by reason.
        fn counts(&self) -> BTreeMap<(String, String), usize> {
            let mut counts = BTreeMap::new();
            for event in self.events.lock().unwrap().values() {
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                let of = (text(&event["regarding"]["name"]), text(&event["reason"]));
                *counts.entry(of).or_default() += 1;
            }
            counts
        }

        fn write(&self, method: &Method, path: &str, body: Value) -> Value {
            let mut events = self.events.lock().unwrap();
            assert!(path.starts_with("/apis/events.k8s.io/v1/namespaces/ns/events"));
            if method == Method::POST {
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                assert_eq!(events.insert(name, body.clone()), None);
                return body;
            }
            assert_eq!(method, Method::PATCH);
            let event = events.get_mut(path.rsplit('/').next().unwrap()).unwrap();
            assert_eq!(body.as_object().unwrap().len(), 1, "a series changes nothing else");
            event["series"] = body["series"].clone();
            event.clone()
        }

        /// The note and the count of each Event, sorted.
        fn stored(&self) -> Vec<(String, Option<i64>)> {
            let events = self.events.lock().unwrap();
            let of = |event: &Value| {
                assert_eq!(
                    (&event["regarding"]["name"], &event["type"]),
                    (&json!("helper"), &json!("Normal"))
                );
                assert_eq!(event["reportingInstance"], "pod");
                (
                    event["note"].as_str().unwrap().to_owned(),
                    event["series"]["count"].as_i64(),
                )
            };
            let mut stored: Vec<_> = events.values().map(of).collect();
            stored.sort();
            stored
        }
    }

    /// The reference names the version of the object, which no two Events share.
    fn helper(version: usize) -> ObjectReference {
        ObjectReference {
            kind: Some("Agent".into()),
            namespace: Some("ns".into()),
            name: Some("helper".into()),
            resource_version: Some(version.to_string()),
            ..ObjectReference::default()
        }
    }

    fn answered(note: &str) -> KubeEvent {
        KubeEvent::normal("AskAnswered", "Answer", note)
    }

    #[rstest]
    #[case::one(&["by ann"], &[("by ann", None)])]
    #[case::repeated(&["by ann", "by ann", "by ann"], &[("by ann", Some(3))])]
    #[case::another_note(&["by ann", "by bob", "by ann"], &[("by ann", Some(2)), ("by bob", None)])]
    #[tokio::test]
    async fn a_repeated_event_is_a_series_and_another_note_is_another_event(
        #[case] notes: &[&str],
        #[case] expected: &[(&str, Option<i64>)],
    ) {
        let ((sink, queue), finished) = (EventSink::new(), CancellationToken::new());
        let server = EventServer::default();
        for (version, note) in notes.iter().enumerate() {
            sink.send([answered(note)], &helper(version));
        }
        finished.cancel();
        publish(server.recorder(), queue, finished).await;
        let expected = expected.iter().map(|(note, count)| ((*note).to_owned(), *count));
        assert_eq!(server.stored(), expected.collect::<Vec<_>>());
    }

    /// A time of the tests.
    fn at(nanoseconds: i64) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::from_nanos(nanoseconds)
    }

    #[tokio::test]
    async fn a_series_ends_after_six_minutes_without_the_event() {
        let (server, pause) = (EventServer::default(), 6 * 60 * 1_000_000_000);
        let mut recorder = server.recorder();
        for time in [0, pause - 1, 2 * (pause - 1)] {
            recorder.record(answered("by ann"), helper(0), at(time)).await.unwrap();
        }
        assert_eq!(server.stored(), [("by ann".into(), Some(3))]);
        let later = at(2 * (pause - 1) + pause);
        recorder.record(answered("by ann"), helper(0), later).await.unwrap();
        assert_eq!(server.stored(), [("by ann".into(), None), ("by ann".into(), Some(3))]);
    }

    #[tokio::test]
    async fn a_series_ends_if_its_event_is_deleted() {
        let server = EventServer::default();
        let mut recorder = server.recorder();
        recorder.record(answered("by ann"), helper(1), at(1)).await.unwrap();
        *server.fails.lock().unwrap() = true;
        assert!(recorder.record(answered("by ann"), helper(2), at(2)).await.is_err());
        *server.fails.lock().unwrap() = false;
        server.events.lock().unwrap().clear();
        recorder.record(answered("by ann"), helper(3), at(3)).await.unwrap();
        assert_eq!(server.stored(), [("by ann".into(), None)]);
    }

    #[tokio::test]
    async fn the_oldest_of_too_many_events_is_evicted() {
        let server = EventServer::default();
        let mut recorder = server.recorder();
        let last = i64::try_from(MAX_RECENT).unwrap();
        for number in (0..=last).chain([0, last]) {
            let time = at(server.events.lock().unwrap().len().try_into().unwrap());
            // Each with a reason of its own, so that none is dropped.
            let event = KubeEvent::normal(&format!("Reason{number}"), "Answer", number.to_string());
            recorder.record(event, helper(0), time).await.unwrap();
        }
        assert_eq!(recorder.recent.len(), MAX_RECENT);
        let stored = server.stored();
        assert_eq!(stored[..2], [("0".into(), None), ("0".into(), None)]);
        assert!(stored.contains(&(last.to_string(), Some(2))));
    }

    #[tokio::test]
    async fn many_events_of_a_namespace_end_no_series_of_another() {
        let server = EventServer::default();
        let mut recorder = server.recorder();
        let recent = |namespace: &str, number: usize| RecentEvent {
            namespace: namespace.into(),
            name: number.to_string(),
            count: 1,
            last: at(number.try_into().unwrap()),
        };
        let identity = |number: usize| hash::sha256(number.to_string());
        recorder.recent.insert(identity(0), recent("quiet", 0));
        for number in 1..MAX_RECENT {
            recorder.recent.insert(identity(number), recent("noisy", number));
        }
        recorder.make_room();
        assert_eq!(recorder.recent.len(), MAX_RECENT - 1);
        assert!(recorder.recent.contains_key(&identity(0)) && !recorder.recent.contains_key(&identity(1)));
        recorder.make_room();
        assert_eq!(recorder.recent.len(), MAX_RECENT - 1, "there is room for one");
    }

    #[tokio::test]
    async fn events_with_ever_new_notes_are_limited_by_object_and_reason() {
        let server = EventServer::default();
        let mut recorder = server.recorder();
        let other = ObjectReference {
            name: Some("other".into()),
            ..helper(0)
        };
        let minute = |minutes: i64, number: i64| at(minutes * 60 * 1_000_000_000 + number);
        for number in 0..40 {
            let event = KubeEvent::warning("AskOpened", "Ask", format!("gate {number}"));
            recorder.record(event, helper(0), minute(0, number)).await.unwrap();
        }
        let of = |name: &str, reason: &str| server.counts().get(&(name.into(), reason.into())).copied();
        assert_eq!((of("helper", "AskOpened"), recorder.dropped.get()), (Some(25), 15));
        // Neither another reason nor another object is affected.
        recorder
            .record(answered("by ann"), helper(0), minute(1, 0))
            .await
            .unwrap();
        assert_eq!(of("helper", "AskAnswered"), Some(1));
        let event = KubeEvent::warning("AskOpened", "Ask", "gate 99");
        recorder.record(event.clone(), other, minute(1, 1)).await.unwrap();
        assert_eq!(of("other", "AskOpened"), Some(1));
        recorder.record(event.clone(), helper(0), minute(4, 0)).await.unwrap();
        assert_eq!((of("helper", "AskOpened"), recorder.dropped.get()), (Some(25), 16));
        recorder.record(event, helper(0), minute(5, 0)).await.unwrap();
        assert_eq!((of("helper", "AskOpened"), recorder.dropped.get()), (Some(26), 16));
    }

    #[tokio::test]
    async fn repetitions_that_are_not_written_are_counted_in_the_series_with_the_next_one() {
        let server = EventServer::default();
        let mut recorder = server.recorder();
        for number in 0..30 {
            recorder
                .record(answered("by ann"), helper(0), at(number))
                .await
                .unwrap();
        }
        assert_eq!(server.stored(), [("by ann".into(), Some(25))]);
        let later = at(5 * 60 * 1_000_000_000);
        recorder.record(answered("by ann"), helper(0), later).await.unwrap();
        assert_eq!(server.stored(), [("by ann".into(), Some(31))]);
        assert_eq!(recorder.dropped.get(), 5);
    }

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
