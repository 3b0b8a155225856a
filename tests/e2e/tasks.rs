//! Tasks on a real cluster: the example answers a webhook, and a running agent answers a request of a user.

use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use serde_json::json;

use super::agents::{Agent, script, scripted};
use super::cluster::{Namespace, figure, shared};
use super::link_client::{LinkUser, WAIT_TIMEOUT, block_on};
use super::responses::ResponseReceiver;
use super::sensor_pods::{KEY, Sender, until_listening, until_sensor_listens};
use super::task_chaos;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/triage.yaml");
const REQUEST_EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/request.yaml");
/// Stands in answers; may stand in no status and no log.
const CANARY: &str = "canary-answer-77d0";

#[test]
fn the_example_of_a_triage_answers_a_signed_webhook_in_its_form() {
    let Some(cluster) = shared() else { return };
    let receiver = ResponseReceiver::start(0);
    let namespace = Namespace::new(&cluster.system, "triage");
    let kubectl = &namespace.kubectl;
    let example = std::fs::read_to_string(EXAMPLE).unwrap();
    let url = "http://127.0.0.1:8905/responses";
    assert!(example.contains(url), "the example has a receiver");
    kubectl.apply(&example.replace(url, &receiver.url()));
    let agent = Agent::named(&namespace, "triage");
    until_sensor_listens(kubectl, "tickets");

    let (sender, body) = (
        Sender::to(kubectl, "tickets"),
        r#"{"ticket": 17, "text": "The shop is down."}"#,
    );
    assert_eq!(sender.send("another key", "17", body), 401);
    assert_eq!(sender.send(KEY, "17", body), 202);
    assert_eq!(sender.send(KEY, "17", body), 200, "known");
    let responses = receiver.until_accepted(1, 120);
    let response = &responses[0].body;
    assert_eq!(
        response["result"],
        json!({"severity": "high", "summary": "The shop is down."})
    );
    assert_eq!(
        (&response["channel"], &response["outcome"], &response["iterations"]),
        (&json!("responses"), &json!("Completed"), &json!(2)),
        "a text is no response of the required form"
    );
    let uid = agent.object()["metadata"]["uid"].clone();
    let identity = json!({"namespace": kubectl.namespace(), "name": "triage", "uid": uid});
    assert_eq!(response["agent"], identity);
    let key = format!("{}/{}", uid.as_str().unwrap(), response["id"].as_str().unwrap());
    assert_eq!(responses[0].key, key);

    let status = agent.until("the activation", 60, |agent| {
        (agent["status"]["recentActivations"].as_array()?.len() == 1).then(|| agent["status"].clone())
    });
    let activation = &status["recentActivations"][0];
    assert_eq!(
        (&activation["id"], &activation["kind"], &activation["outcome"]),
        (&response["id"], &json!("Sensor"), &json!("Completed"))
    );
    assert!(
        !status.to_string().contains("shop"),
        "no text of a task is in the status"
    );
    assert_eq!(receiver.all().len(), 1, "nothing is sent again");
}

#[test]
fn the_example_of_a_request_answers_in_its_form() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "request-example");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&["apply", "-f", REQUEST_EXAMPLE]);
    let agent = Agent::named(&namespace, "request");
    agent.until_state("Sleeping", 120);
    let user = LinkUser::editor(&cluster.system, kubectl, "editor");
    let prompt = "Ticket 17: The shop is down.";
    let (accepted, _) = block_on(user.until_accepted(&agent, "17", prompt, Duration::from_mins(1)));
    let response = block_on(user.response(&agent, &accepted, WAIT_TIMEOUT));
    assert_eq!(
        response["result"],
        json!({"severity": "high", "summary": "The shop is down."})
    );
}

#[test]
fn a_sleeping_agent_answers_a_request_once_and_continues_its_sleep() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "request");
    let kubectl = &namespace.kubectl;
    let turns = json!({"turns": [{"yield": {"sleep": 3600}}, {"text": CANARY}]});
    kubectl.apply(&script("sleeper", &turns));
    let agent = Agent::apply(&namespace, "sleeper", &scripted("sleeper"), &json!({}));
    let asleep = agent.until_state("Sleeping", 120);
    let user = LinkUser::editor(&cluster.system, kubectl, "editor");

    let limit = Duration::from_mins(1);
    let (accepted, _) = block_on(user.until_accepted(&agent, "stars", "How many stars?", limit));
    assert_eq!(accepted["id"], "request-stars");
    let response = block_on(user.response(&agent, &accepted, WAIT_TIMEOUT));
    assert_eq!(
        (&response["id"], &response["outcome"], &response["result"]),
        (&json!("request-stars"), &json!("Completed"), &json!(CANARY))
    );
    let (repeated, _) = block_on(user.until_accepted(&agent, "stars", "And now?", limit));
    assert_eq!(
        (&repeated["state"], &repeated["after"]),
        (&json!("Repeated"), &accepted["after"])
    );

    let status = agent.until("the activation", 60, |agent| {
        let again = agent["status"]["loop"]["state"] == "Sleeping";
        (again && agent["status"]["recentActivations"].is_array()).then(|| agent["status"].clone())
    });
    assert_eq!(status["recentActivations"].as_array().map(Vec::len), Some(1));
    assert_eq!(status["recentActivations"][0]["kind"], "Request");
    assert_eq!(
        status["loop"]["resumesAt"], asleep["status"]["loop"]["resumesAt"],
        "the sleep is the same"
    );
    let logs = kubectl.ok(&["logs", "sleeper", "--all-containers", "--tail=-1"]);
    for text in [CANARY, "How many stars"] {
        assert!(!logs.contains(text) && !status.to_string().contains(text), "{text}");
    }
}

#[test]
fn an_agent_without_tasks_scales_to_zero_and_a_webhook_or_request_scales_it_up() {
    let Some(cluster) = shared() else { return };
    let receiver = ResponseReceiver::start(0);
    let namespace = Namespace::new(&cluster.system, "scale-to-zero");
    let kubectl = &namespace.kubectl;
    kubectl.apply(&script("answers", &json!({"turns": [{"text": "done"}]})));
    let responses = json!({"http": {"url": receiver.url()}});
    let spec = json!({"mode": "Task", "task": {"idlePodSeconds": 3, "responses": responses}});
    let agent = Agent::apply(&namespace, "clerk", &scripted("answers"), &spec);
    kubectl.apply(&task_chaos::sensor());
    until_listening(kubectl);
    let user = LinkUser::editor(&cluster.system, kubectl, "editor");
    // A pod that waits for its task for longer than three seconds scales to zero too, and another one follows.
    let until_gone = |epoch: i64| {
        let epoch = agent.until(&format!("no pod of epoch {epoch} or later"), 120, |agent| {
            let found = &agent["status"]["loop"];
            let found = (found["outcome"] == "ScaledToZero").then(|| found["epoch"].as_i64())??;
            (found >= epoch).then_some(found)
        });
        kubectl.until_gone("pod", &agent.name, 60);
        epoch
    };
    let first = until_gone(1);
    agent.until_condition("Ready", "True", "ScaledToZero", 30);

    let begun = Instant::now();
    assert_eq!(Sender::of(kubectl).send(KEY, "1", r#"{"task": "a webhook"}"#), 202);
    receiver.until_accepted(1, 120);
    let seconds = begun.elapsed().as_secs_f64();
    figure("scaled_to_zero_webhook_to_response", format!("{seconds:.1}"), "s");
    let second = until_gone(first + 1);

    let limit = Duration::from_mins(2);
    block_on(user.until_accepted(&agent, "2", "a request", limit));
    let responses = receiver.until_accepted(2, 60);
    assert_eq!(responses[1].body["id"], "request-2");
    until_gone(second + 1);
    assert_eq!(receiver.all().len(), 2, "nothing is sent again");
}
