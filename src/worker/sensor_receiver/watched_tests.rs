//! Tests of Sensors that watch files: with a simulated journal, and with real file watchers on a real directory.

use std::path::Path;
use std::time::Duration;

use jiff::SignedDuration;
use pretty_assertions::assert_eq;
use serde_json::json;
use tokio::time::timeout;

use super::file_watcher::FileWatchers;
use super::*;
use crate::sensor_pipeline::watch::FileStat;

fn now() -> Timestamp {
    "2026-01-05T08:00:00Z".parse().expect("a moment")
}

fn watch(generation: i64, more: Value) -> SensorTerms {
    let mut spec = json!({"agentNames": ["a"], "source": {"watch": {"path": "inbox/"}}});
    let Value::Object(more) = more else {
        panic!("no fields");
    };
    spec.as_object_mut().expect("fields").extend(more);
    SensorTerms {
        uid: "uid".into(),
        name: "inbox".into(),
        generation,
        spec: serde_json::from_value(spec).expect("a spec"),
    }
}

/// An event of a Sensor as the loop receives it.
#[derive(Debug, PartialEq)]
struct ReceivedEvent {
    id: String,
    payload: Value,
}

/// The Sensors of a worker with a workspace, and the records in its journal.
struct Worker {
    sensors: LoopSensors,
    kept: SensorRecord,
    now: Timestamp,
}

impl Worker {
    fn new() -> Self {
        Self {
            sensors: LoopSensors::default().with_workspace(true),
            kept: SensorRecord::default(),
            now: now(),
        }
    }

    fn restart(&mut self) {
        self.sensors = LoopSensors::restore(vec![self.kept.clone()]).with_workspace(true);
    }

    fn direct(&mut self, terms: &[SensorTerms]) {
        for happened in self.sensors.apply_terms(self.now, Some(terms)) {
            self.keep(happened);
        }
    }

    /// Stores only changed files, as the journal does.
    fn keep(&mut self, happened: SensorTransition) -> Option<ReceivedEvent> {
        let told = |input: &EngineInput| {
            let EngineInput::Sensed(event) = input else {
                return None;
            };
            Some(ReceivedEvent {
                id: event.id.clone(),
                payload: serde_json::from_str(&event.notices[0].text).expect("JSON"),
            })
        };
        let told = happened.input().and_then(told);
        let mut kept = happened.record();
        let mut files: BTreeMap<_, _> = self.kept.files.drain(..).collect();
        files.extend(kept.files);
        kept.files = files.into_iter().filter(|(_, print)| print.is_some()).collect();
        self.kept = kept;
        self.sensors.confirm(happened);
        told
    }

    fn paths(&self) -> Vec<&str> {
        self.kept.files.iter().map(|(path, _)| &**path).collect()
    }

    fn see(&mut self, path: &str, hash: Option<&str>, was_there: bool) {
        let change = FileChange {
            path: path.into(),
            print: hash.map(|hash| FileFingerprint {
                look: FileStat {
                    size: 1,
                    ..FileStat::default()
                },
                hash: Some(hash.into()),
            }),
            was_there,
            text: Some("hi".into()),
        };
        let sighting = WatchReport::of("uid", WatchUpdate::Change(change, WatchPermit::default()));
        assert!(self.sensors.apply_watch_report(sighting).is_none(), "it is due first");
    }

    fn watch_failed(&mut self, why: Option<&str>) -> Option<EngineInput> {
        let sighting = WatchReport::of("uid", WatchUpdate::Problem(why.map(Into::into)));
        let happened = self.sensors.apply_watch_report(sighting)?;
        let input = happened.input().cloned();
        self.keep(happened);
        input
    }

    fn due(&mut self) -> Option<ReceivedEvent> {
        let happened = self.sensors.due(self.now, |_| true)?;
        self.keep(happened)
    }

    /// Returns the events of real files, until there are none for two seconds.
    async fn events(&mut self, lookouts: &mut FileWatchers, count: usize) -> Vec<(String, String)> {
        let mut events = Vec::new();
        while events.len() < count {
            let sighting = timeout(Duration::from_secs(20), lookouts.next())
                .await
                .expect("a change");
            if let Some(happened) = self.sensors.apply_watch_report(sighting) {
                self.keep(happened);
            }
            if let Some(told) = self.due() {
                let field = |name: &str| told.payload[name].as_str().expect("a text").to_owned();
                events.push((field("kind"), field("path")));
            }
        }
        events
    }

    async fn expect_no_event(&mut self, lookouts: &mut FileWatchers) {
        let quiet = Duration::from_millis(2500);
        while let Ok(sighting) = timeout(quiet, lookouts.next()).await {
            let WatchUpdate::Problem(None) = sighting.what else {
                panic!("{sighting:?}");
            };
        }
    }
}

#[test]
fn an_unwritten_change_is_the_same_event_after_a_restart_and_a_written_one_is_not_repeated() {
    let mut worker = Worker::new();
    worker.direct(&[watch(1, json!({}))]);
    worker.see("inbox/a", Some("x"), false);
    let lost = worker.sensors.due(worker.now, |_| true).expect("a change");
    let Some(EngineInput::Sensed(lost)) = lost.input().cloned() else {
        panic!("no event");
    };
    worker.restart();
    worker.direct(&[watch(1, json!({}))]);
    assert_eq!(worker.sensors.watched()["uid"].1.len(), 0);
    worker.see("inbox/a", Some("x"), false);
    let told = worker.due().expect("a change");
    assert_eq!((told.id, &told.payload["content"]), (lost.id, &json!("hi")));
    assert_eq!(worker.due(), None);
    worker.restart();
    worker.direct(&[watch(1, json!({}))]);
    let hash = |worker: &Worker| worker.sensors.watched()["uid"].1["inbox/a"].hash.clone();
    assert_eq!(
        hash(&worker).as_deref(),
        Some("x"),
        "a lookout begins with what was told"
    );
    worker.see("inbox/a", None, true);
    assert_eq!(worker.due().expect("a change").payload["kind"], "Removed");
    assert_eq!(worker.paths(), Vec::<&str>::new());
}

#[test]
fn a_sensor_changed_from_a_watch_to_a_schedule_drops_its_files_and_ticks() {
    let mut worker = Worker::new();
    worker.direct(&[watch(1, json!({}))]);
    worker.see("inbox/a", Some("x"), false);
    assert!(worker.due().is_some());
    let mut clock = watch(2, json!({}));
    clock.spec.source = serde_json::from_value(json!({"schedule": {"cron": "0 * * * *"}})).expect("a source");
    worker.direct(&[clock]);
    assert_eq!(worker.paths(), Vec::<&str>::new());
    assert_eq!(
        worker.sensors.next(worker.now, |_| true),
        Some("2026-01-05T09:00:00Z".parse().expect("a moment"))
    );
}

#[test]
fn the_same_file_with_the_same_content_again_is_an_event_each_time() {
    let mut worker = Worker::new();
    worker.direct(&[watch(1, json!({}))]);
    for _ in 0..3 {
        worker.see("inbox/a", Some("x"), false);
        assert_eq!(worker.due().expect("a change").payload["kind"], "Created");
        worker.see("inbox/a", None, true);
        assert_eq!(worker.due().expect("a change").payload["kind"], "Removed");
    }
    assert_eq!(worker.sensors.reports()[0].totals.filtered, 0);
}

#[test]
fn files_wait_for_room_in_the_limits_and_none_is_dropped() {
    let mut worker = Worker::new();
    worker.direct(&[watch(1, json!({"limits": {"perMinute": 2}}))]);
    let first = worker.now;
    for name in ["a", "b"] {
        worker.see(&format!("inbox/{name}"), Some("x"), false);
        assert!(worker.due().is_some(), "{name}");
    }
    worker.see("inbox/c", Some("x"), false);
    assert_eq!(worker.due(), None);
    let free_from = worker.sensors.next(worker.now, |_| true).expect("a moment");
    assert_eq!(free_from, first + SignedDuration::from_secs(61));
    worker.now = free_from - SignedDuration::from_millis(1);
    assert_eq!(worker.due(), None);
    worker.now = free_from;
    assert_eq!(worker.due().expect("a change").payload["path"], "inbox/c");
    assert_eq!(worker.sensors.reports()[0].totals.dropped, 0);
    // One event per five seconds.
    worker.direct(&[watch(2, json!({"limits": {"minIntervalMilliseconds": 5000}}))]);
    worker.see("inbox/d", Some("x"), false);
    assert_eq!(worker.due(), None);
    worker.now = free_from + SignedDuration::from_secs(5);
    assert_eq!(worker.sensors.next(worker.now, |_| true), Some(worker.now));
    assert!(worker.due().is_some());
}

#[test]
fn a_change_that_waits_outlives_an_edit_of_anything_but_what_is_watched() {
    let mut worker = Worker::new();
    worker.direct(&[watch(1, json!({}))]);
    worker.see("inbox/a", Some("x"), false);
    worker.direct(&[watch(
        2,
        json!({"notification": {"text": "'{\"path\": \"' + payload.path + '\"}'"}}),
    )]);
    assert_eq!(worker.due().expect("a change").payload, json!({"path": "inbox/a"}));
    worker.see("inbox/b", Some("x"), false);
    worker.direct(&[watch(3, json!({"source": {"watch": {"path": "other"}}}))]);
    assert_eq!(worker.due(), None);
    assert_eq!(
        worker.paths(),
        Vec::<&str>::new(),
        "what is not watched any more is forgotten, and not gone"
    );
}

#[test]
fn an_obstacle_to_watching_is_one_failure_until_it_is_removed() {
    let mut worker = Worker::new();
    worker.direct(&[watch(1, json!({}))]);
    let failed = Some(EngineInput::SensorFailed { sensor: "inbox".into() });
    let report = |worker: &Worker| {
        let report = worker.sensors.reports().remove(0);
        (report.failure, report.consecutive_failures, report.totals.errors)
    };
    assert_eq!(worker.watch_failed(None), None);
    assert_eq!(report(&worker), (None, 0, 0));
    assert_eq!(worker.watch_failed(Some("why")), failed);
    assert_eq!(worker.watch_failed(Some("another")), None);
    worker.restart();
    worker.direct(&[watch(1, json!({}))]);
    assert_eq!(worker.watch_failed(Some("another")), None);
    assert_eq!(report(&worker), (Some("another".into()), 1, 1));
    assert_eq!(worker.watch_failed(None), None);
    assert_eq!(report(&worker), (None, 0, 1));
    assert_eq!(worker.watch_failed(Some("why")), failed);
}

#[test]
fn without_a_workspace_nothing_is_watched_and_the_report_explains_what_to_do() {
    let mut sensors = LoopSensors::default();
    let _ = sensors.apply_terms(now(), Some(&[watch(1, json!({}))]));
    assert!(sensors.watched().is_empty());
    let failure = sensors.reports().remove(0).failure.expect("a failure");
    assert!(failure.contains("set spec.workspace of the Agent"), "{failure}");
}

fn put(folder: &Path, name: &str, text: &str) {
    let (aside, path) = (folder.join("aside"), folder.join("inbox").join(name));
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    std::fs::write(&aside, text).expect("a file");
    std::fs::rename(aside, path).expect("a file");
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter()
        .map(|(kind, path)| ((*kind).to_owned(), (*path).to_owned()))
        .collect()
}

#[tokio::test]
async fn real_files_are_reported_once_over_restarts() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut worker = Worker::new();
    let terms = [watch(1, json!({}))];
    worker.direct(&terms);
    let mut lookouts = FileWatchers::new(Some(dir.path().into()));
    lookouts.set(&worker.sensors);
    let absent = timeout(Duration::from_secs(20), lookouts.next()).await.expect("a word");
    let WatchUpdate::Problem(Some(why)) = absent.what else {
        panic!("{absent:?}");
    };
    assert!(why.contains("is not in the workspace"), "{why}");
    put(dir.path(), "first", "1");
    assert_eq!(
        worker.events(&mut lookouts, 1).await,
        pairs(&[("Created", "inbox/first")])
    );
    put(dir.path(), "deep/second", "2");
    put(dir.path(), "first", "one");
    let mut events = worker.events(&mut lookouts, 2).await;
    events.sort();
    assert_eq!(
        events,
        pairs(&[("Created", "inbox/deep/second"), ("Modified", "inbox/first")])
    );
    // The same content with another modification time is not a change.
    put(dir.path(), "first", "one");
    worker.expect_no_event(&mut lookouts).await;
    drop(lookouts);

    std::fs::remove_file(dir.path().join("inbox/first")).expect("removed");
    put(dir.path(), "third", "3");
    worker.restart();
    worker.direct(&terms);
    let mut lookouts = FileWatchers::new(Some(dir.path().into()));
    lookouts.set(&worker.sensors);
    let expected = pairs(&[("Removed", "inbox/first"), ("Created", "inbox/third")]);
    assert_eq!(worker.events(&mut lookouts, 2).await, expected);
    worker.expect_no_event(&mut lookouts).await;
    assert_eq!(worker.paths(), ["inbox/deep/second", "inbox/third"]);
}

#[tokio::test]
async fn no_second_change_is_seen_before_the_first_is_on_disk_and_none_of_a_lookout_that_was_ended() {
    let dir = tempfile::tempdir().expect("a folder");
    put(dir.path(), "a", "1");
    put(dir.path(), "b", "2");
    let mut worker = Worker::new();
    worker.direct(&[watch(1, json!({}))]);
    let mut lookouts = FileWatchers::new(Some(dir.path().into()));
    lookouts.set(&worker.sensors);
    let first = loop {
        let seen = timeout(Duration::from_secs(20), lookouts.next())
            .await
            .expect("a change");
        if matches!(seen.what, WatchUpdate::Change(..)) {
            break seen;
        }
    };
    assert!(worker.sensors.apply_watch_report(first).is_none());
    let none = timeout(Duration::from_millis(1500), lookouts.next()).await;
    assert!(none.is_err(), "{none:?}");
    assert!(worker.due().is_some());
    // The second change is in flight while the watch changes: it comes once, from the new watcher.
    tokio::time::sleep(Duration::from_millis(300)).await;
    worker.direct(&[watch(2, json!({"limits": {"maxPayloadBytes": 4096}}))]);
    lookouts.set(&worker.sensors);
    assert_eq!(worker.events(&mut lookouts, 1).await.len(), 1);
    worker.expect_no_event(&mut lookouts).await;
}
