//! A Sensor from `kubectl apply` to the loop that it wakes.

use std::time::Duration;

use jiff::Timestamp;
use rusqlite::Connection;

use super::agents::Agent;
use super::cluster::{Namespace, shared};
use super::node;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/schedule.yaml");
const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/watch.yaml");
const SENSOR: &str = "sensors.agentloop.dev/every-minute";
/// Until a pod knows that a Sensor is suspended.
const KNOWN: Duration = Duration::from_secs(10);

#[test]
fn a_schedule_wakes_the_loop_that_waits_for_it_is_edited_suspended_and_deleted_in_one_pod() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "sensors");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&["apply", "-f", EXAMPLE]);
    let agent = Agent::named(&namespace, "schedule");
    kubectl.wait("agents.agentloop.dev/schedule", "condition=Ready", 90);
    let pod = agent.until_pod(None, 30);
    kubectl.wait(SENSOR, "condition=Connected", 60);
    let asleep = agent.until_state("Sleeping", 60);
    let turns = asleep["status"]["usage"]["turns"].as_i64().unwrap_or_default();

    // Two ticks, each of which ends a sleep of an hour.
    agent.until_turns(turns + 2, 150);
    kubectl.wait(SENSOR, "jsonpath={.status.type}=Schedule", 30);
    let read = |path: &str| kubectl.ok(&["get", SENSOR, "-o", &format!("jsonpath={{.status.{path}}}")]);
    kubectl.wait(SENSOR, "condition=Ready", 30);
    let status = kubectl.until("two events", 40, "sensors.agentloop.dev", "every-minute", |sensor| {
        let status = &sensor["status"];
        (status["events"].as_i64()? >= 2).then(|| status.clone())
    });
    let has_id = status["lastDeliveryId"].as_str().is_some_and(|id| !id.is_empty());
    assert!(has_id && status["errors"].as_i64().unwrap_or(0) == 0, "{status:#}");
    assert_eq!(status["notifications"], status["events"], "{status:#}");

    // A mistake is said with its field, and stops no loop.
    let broken = r#"{"spec": {"notification": {"text": "payload.(("}}}"#;
    kubectl.ok(&["patch", SENSOR, "--type=merge", "-p", broken]);
    kubectl.wait(SENSOR, "condition=Accepted=false", 30);
    let said = read("conditions[?(@.type==\"Accepted\")].message");
    assert!(said.contains("spec.notification.text"), "{said}");
    let paused = r#"{"spec": {"suspend": true, "notification": {"text": "'now'"}}}"#;
    kubectl.ok(&["patch", SENSOR, "--type=merge", "-p", paused]);
    kubectl.wait(SENSOR, "condition=Suspended", 30);
    kubectl.wait(SENSOR, "condition=Ready", 30);
    let silent_from = Timestamp::now() + KNOWN;
    // A full minute begins in this time.
    std::thread::sleep(KNOWN + Duration::from_secs(61));
    kubectl.ok(&["delete", SENSOR]);
    let same = agent.until_pod(None, 30);
    assert_eq!(
        same["metadata"]["uid"], pod["metadata"]["uid"],
        "all of this in one pod"
    );
    agent.stop(60);
    // The status has each tick a moment late: the journal says when it was.
    let ticks = ticks(&agent);
    assert!(ticks.len() >= 2, "{ticks:?}");
    assert!(
        ticks.iter().all(|tick| *tick < silent_from),
        "a suspended Sensor does not tick: {ticks:?}, from {silent_from} on"
    );
}

/// When each event of a Sensor took effect in an Agent, whose loop has ended.
fn ticks(agent: &Agent<'_>) -> Vec<Timestamp> {
    let journal = Connection::open(node::journal(agent.kubectl, &agent.name)).unwrap();
    let select = "SELECT at FROM journal WHERE kind = 'SensorUpdated' ORDER BY seq";
    let mut select = journal.prepare(select).unwrap();
    let rows = select.query_map([], |row| row.get::<_, String>(0)).unwrap();
    rows.map(|at| at.unwrap().parse().unwrap()).collect()
}

#[test]
fn files_moved_into_a_workspace_are_reported_once_across_a_kill_and_a_new_pod() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "files");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&["apply", "-f", FILES]);
    let agent = Agent::named(&namespace, "reader");
    kubectl.wait("agents.agentloop.dev/reader", "condition=Ready", 90);
    let pod = agent.until_pod(None, 30);
    let inbox = "sensors.agentloop.dev/inbox";
    // The directory does not exist.
    kubectl.wait(inbox, "condition=Connected=false", 60);
    let folder = node::claim(kubectl, "reader-workspace");
    std::fs::create_dir(folder.join("inbox")).expect("a folder");
    kubectl.wait(inbox, "condition=Connected", 60);
    kubectl.wait(inbox, "jsonpath={.status.type}=Watch", 30);
    let put = |name: &str| {
        std::fs::write(folder.join(name), name).expect("a file");
        std::fs::rename(folder.join(name), folder.join("inbox").join(name)).expect("a file");
    };
    let until = |events: i64| {
        let what = format!("{events} events");
        kubectl.until(&what, 60, "sensors.agentloop.dev", "inbox", |sensor| {
            sensor["status"]["events"].as_i64().filter(|seen| *seen >= events)
        })
    };
    let asleep = agent.until_state("Sleeping", 60);
    let turns = asleep["status"]["usage"]["turns"].as_i64().unwrap_or_default();
    put("first");
    until(1);
    agent.until_turns(turns + 1, 60);
    node::kill(&pod, "worker");
    put("second");
    until(2);
    kubectl.ok(&["delete", "pod", "reader", "--wait=true"]);
    put("third");
    agent.until_pod(Some(&pod), 90);
    until(3);
    std::fs::remove_file(folder.join("inbox/first")).expect("removed");
    assert_eq!(until(4), 4, "each file once, and one that is gone");
    agent.stop(60);
}
