//! Modes `Goal` and `Task` with a small real model: checks the form of results, limits and token counts, not their quality.

use std::time::Duration;

use pretty_assertions::assert_eq;
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::agents::{Agent, computed, condition, openai, status_used};
use super::cluster::{Namespace, shared};
use super::goals;
use super::link_client::{LinkUser, block_on};
use super::model_server::{self, ModelServer, Used};
use super::node;
use super::responses::ResponseReceiver;
use super::toolbox::inside;
use crate::support::kubectl::Kubectl;

const STEPS: i64 = 3;
const ITERATIONS: i64 = 3;
/// Seconds for all calls of a test, on a busy machine.
const LONG: u64 = 900;

/// Tokens as limits count them: without what was read from the cache.
fn tokens(used: Used) -> i64 {
    used.input + used.output + used.cache_write
}

/// What the Agent is said to have used is what the server says.
fn counted(agent: &Agent<'_>, server: &ModelServer, label: &str) -> Used {
    let used = agent.until("the counts of the server", 60, |agent| {
        let used = status_used(agent);
        (used == server.used(label)).then_some(used)
    });
    assert!(
        used.input > 0 && used.output > 0,
        "a real model was really used: {used:?}"
    );
    used
}

#[test]
fn a_goal_of_a_real_model_ends_within_its_limits_and_its_judge_and_its_checks_are_counted() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "real-goal");
    let label = namespace.kubectl.namespace();
    let spec = json!({
        "mode": "Goal", "instructions": "You write short texts.",
        "goal": {
            "description": "Say hello to the harbor by calling finish with the result: Hello, harbor 1.",
            "acceptanceCriteria": [
                {"name": "text", "regex": "."},
                {"name": "polite", "judge": "Is it a greeting?"},
            ],
            "maxSteps": STEPS, "confidence": {"everySteps": 2, "thresholdPercent": 1},
        },
        // An estimate that cannot be read waits for a person, and there is no answer.
        "tools": {"approval": {"timeoutSeconds": 60}},
    });
    let mut model = computed(openai(&server.base_url(label)));
    model["structuredOutput"] = "WithoutTools".into();
    let agent = Agent::apply(&namespace, "greeter", &model, &spec);
    let ended = agent.until("an end", LONG, |agent| {
        agent["status"]["loop"]["outcome"].is_string().then(|| agent.clone())
    });
    let (goal, outcome) = (&ended["status"]["goal"], &ended["status"]["loop"]["outcome"]);
    let steps = goal["steps"].as_i64().expect("steps are counted");
    eprintln!("the goal ended after {steps} steps: {outcome} ({})", goal["end"]);
    assert!((0..=STEPS).contains(&steps), "{goal}");
    let expected = match goal["end"].as_str().expect("it says what ended it") {
        "CriteriaMet" => "Completed",
        "LowConfidence" | "LoopDetected" => "Escalated",
        "StepLimit" => "Failed",
        other => panic!("nothing else can end it: {other}"),
    };
    assert_eq!(outcome, expected);
    let met = goal["criteria"].as_array().expect("criteria");
    let met = met.iter().filter(|one| one["met"] == true).count();
    match goal["progressSource"].as_str() {
        Some("Criteria") => assert_eq!(goal["progressPercent"], met * 50),
        // None was checked, since nothing was handed in: what the model says is all that is known.
        Some("Estimate") => assert!(goal["progressPercent"].as_i64() < Some(100), "{goal}"),
        None => assert_eq!(goal["progressPercent"], 0),
        Some(other) => panic!("there is no {other} to measure"),
    }
    let succeeded = condition(&ended, "Succeeded").expect("it is set at the end");
    assert_eq!(succeeded["status"] == "True", expected == "Completed");
    let used = counted(&agent, server, label);
    assert!(used.calls >= steps, "each step has a call: {used:?}");
}

/// The example of a test suite with the real model, which cannot be expected to fix it: its checks count the tests that pass.
#[test]
fn a_goal_of_a_real_model_is_measured_by_the_test_suite_in_its_toolbox() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "real-tests");
    let label = namespace.kubectl.namespace();
    let example = goals::example_of_tests();
    let documents: Vec<Value> = serde_yaml::Deserializer::from_str(&example)
        .map(|document| Value::deserialize(document).expect("the example is YAML"))
        .collect();
    let script = documents[0]["data"]["script.yaml"].as_str().expect("it has a script");
    let script: Value = serde_yaml::from_str(script).expect("the script is YAML");
    let mut spec = documents[1]["spec"].clone();
    spec["goal"]["maxSteps"] = STEPS.into();
    let mut model = computed(openai(&server.base_url(label)));
    // The definitions of its tools need more than a text does.
    model["contextTokens"] = 6000.into();
    spec.as_object_mut().expect("a spec").remove("model");
    let agent = Agent::apply(&namespace, "repair", &model, &spec);
    agent.until_pod(None, 180);
    // The project with its bug, as the script of the example writes it.
    for file in script["turns"][0]["toolCalls"].as_array().expect("two files") {
        let arguments = &file["arguments"];
        let text = |name: &str| arguments[name].as_str().expect("a text").to_owned();
        let command = format!("cat > /workspace/{} <<'END'\n{}END", text("path"), text("content"));
        inside(&agent, "toolbox", &command);
    }
    let ended = agent.until("an end", LONG, |agent| {
        agent["status"]["loop"]["outcome"].is_string().then(|| agent.clone())
    });
    let goal = &ended["status"]["goal"];
    eprintln!("the goal of tests ended: {goal}");
    assert_eq!(goal["progressSource"], "Tests", "{goal}");
    let steps = goal["steps"].as_i64().expect("steps are counted");
    assert!((1..=STEPS).contains(&steps), "{goal}");
    // The pod of a loop that has ended is gone.
    let report = std::fs::read_to_string(node::claim(agent.kubectl, "repair-workspace").join("report.xml")).unwrap();
    match goal["end"].as_str().expect("it says what ended it") {
        "CriteriaMet" => assert!(
            goal["progressPercent"] == 100 && !report.contains("<failure"),
            "{report}"
        ),
        "StepLimit" | "LoopDetected" => assert!(goal["progressPercent"].as_i64() < Some(100), "{goal}"),
        other => panic!("nothing else can end it: {other}"),
    }
    counted(&agent, server, label);
}

/// A response to a task of the real model: documented, and in its form.
fn judge(response: &Value) -> i64 {
    let iterations = response["iterations"].as_i64().expect("calls are counted");
    assert!((1..=ITERATIONS).contains(&iterations), "{response}");
    match response["outcome"].as_str().expect("an outcome") {
        "Completed" => {
            let result = response["result"].as_object().expect("a result of the form");
            let severity = result["severity"].as_str().expect("a severity");
            assert!(["low", "high"].contains(&severity) && result.len() == 1, "{response}");
        }
        "LimitReached" => {
            assert!(
                response["result"].is_null() && response["error"].is_string(),
                "{response}"
            );
            let reason = response["reason"].as_str().expect("a reason");
            let limits = ["MaxIterations", "MaxTokens", "MaxDuration", "LoopDetected"];
            assert!(limits.contains(&reason), "{response}");
        }
        "Failed" => assert!(response["error"].is_string(), "{response}"),
        other => panic!("{other} is not documented"),
    }
    response["tokensUsed"].as_i64().expect("tokens are counted")
}

#[test]
fn tasks_of_a_real_model_return_the_required_form_or_report_the_limit_that_ended_them() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "real-task");
    // With and without a server that enforces the schema.
    for structured in ["Disabled", "Always"] {
        two_tasks(&cluster.system, &namespace, server, structured);
    }
}

fn two_tasks(system: &Kubectl, namespace: &Namespace, server: &ModelServer, structured: &str) {
    let receiver = ResponseReceiver::start(0);
    let name = format!("triage-{}", structured.to_lowercase());
    let label = format!("{}-{name}", namespace.kubectl.namespace());
    let spec = json!({
        "mode": "Task", "instructions": "You say how severe a ticket is: low or high.",
        "task": {
            "maxIterations": ITERATIONS, "prompt": "Ticket 1: The shop is down.",
            "responseSchema": {
                "type": "object", "properties": {"severity": {"type": "string", "enum": ["low", "high"]}},
                "required": ["severity"], "additionalProperties": false,
            },
            "responses": {"http": {"url": receiver.url()}},
        },
    });
    let mut model = computed(openai(&server.base_url(&label)));
    model["structuredOutput"] = structured.into();
    let agent = Agent::apply(namespace, &name, &model, &spec);
    let client = LinkUser::editor(system, &namespace.kubectl, &name);
    let limit = Duration::from_mins(3);
    block_on(client.until_accepted(&agent, "two", "Ticket 2: A letter is blue.", limit));
    let responses = receiver.until_accepted(2, LONG);
    let sum: i64 = responses.iter().map(|response| judge(&response.body)).sum();
    let outcome = |place: usize| &responses[place].body["outcome"];
    eprintln!("structuredOutput {structured}: {} and {}", outcome(0), outcome(1));
    let used = counted(&agent, server, &label);
    assert_eq!(tokens(used), sum, "the tokens of the tasks are those of the server");
    let calls = |response: &Value| response["iterations"].as_i64().unwrap_or(0);
    assert_eq!(used.calls, responses.iter().map(|one| calls(&one.body)).sum::<i64>());
}

#[test]
fn a_request_to_a_loop_of_a_real_model_is_answered_beside_its_own_work_within_its_limits() {
    let (Some(cluster), Some(server)) = (shared(), model_server::real()) else {
        return;
    };
    let namespace = Namespace::new(&cluster.system, "real-request");
    let label = namespace.kubectl.namespace();
    let spec = json!({"guardrails": {"maxCallsPerTurn": 2, "maxConsecutiveTurns": 1000}});
    let agent = Agent::apply(&namespace, "watcher", &computed(openai(&server.base_url(label))), &spec);
    agent.until_turns(1, LONG);
    let client = LinkUser::editor(&cluster.system, &namespace.kubectl, "editor");
    let limit = Duration::from_mins(3);
    let (accepted, _) = block_on(client.until_accepted(&agent, "hello", "Say hello.", limit));
    let response = block_on(client.response(&agent, &accepted, Duration::from_secs(LONG)));
    let outcome = response["outcome"].as_str().expect("an outcome");
    eprintln!("the request ended: {outcome}");
    assert!(["Completed", "LimitReached", "Failed"].contains(&outcome), "{response}");
    assert_eq!(response["result"].is_string(), outcome == "Completed", "{response}");
    let calls = response["iterations"].as_i64().expect("calls are counted");
    assert!((1..=2).contains(&calls), "{response}");
    assert!(
        response["tokensUsed"].as_i64().is_some_and(|tokens| tokens > 0),
        "{response}"
    );
    let turns = agent.object()["status"]["usage"]["turns"].as_i64().unwrap_or(0);
    agent.until_turns(turns + 1, LONG);
}
