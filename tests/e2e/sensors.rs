//! A Sensor from `kubectl apply` to the loop that it wakes.

use super::agents::Agent;
use super::cluster::{Namespace, shared};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/schedule.yaml");
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
