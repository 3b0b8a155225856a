//! A Sensor from `kubectl apply` to the loop that it wakes.

use super::agents::Agent;
use super::cluster::{Namespace, shared};
use super::node;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/schedule.yaml");
const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/watch.yaml");
const SENSOR: &str = "sensors.agentloop.dev/every-minute";

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
    let number = |path: &str| read(path).trim().parse::<i64>().unwrap_or_default();
    kubectl.wait(SENSOR, "condition=Ready", 30);
    kubectl.until("two events", 40, "sensors.agentloop.dev", "every-minute", |sensor| {
        sensor["status"]["events"].as_i64().filter(|events| *events >= 2)
    });
    assert!(!read("lastDeliveryId").is_empty() && number("errors") == 0);
    assert_eq!(number("notifications"), number("events"));

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
    let events = number("events");
    std::thread::sleep(std::time::Duration::from_secs(65));
    assert_eq!(number("events"), events, "a suspended Sensor does not tick");
    kubectl.ok(&["delete", SENSOR]);
    let same = agent.until_pod(None, 30);
    assert_eq!(
        same["metadata"]["uid"], pod["metadata"]["uid"],
        "all of this in one pod"
    );
    agent.stop(60);
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
