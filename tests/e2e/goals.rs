//! Mode Goal on a real cluster: a test suite that an agent makes pass in its toolbox, a goal that is not reached, and the
//! example.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::agents::{Agent, condition, script, scripted};
use super::cluster::{self, AGENTS, Namespace, shared};
use super::node;
use super::toolbox::{image, inside, shell, wake, write};
use crate::support::kubectl::Kubectl;

/// The suite, as the agent writes it in its first step.
const SUITE: &str = r#"failed=0
[ "$(sh sum.sh 2 40)" = 42 ] || failed=$((failed + 1))
[ "$(sh sum.sh 1 1)" = 2 ] || failed=$((failed + 1))
echo "2 tests, $failed failed"
[ $failed = 0 ]"#;

/// Writes a suite that fails, then looks, repairs what it tests, and hands in a result; the last answer is the judge's.
fn turns() -> Value {
    json!({"atEnd": "Fail", "turns": [
        {"toolCalls": [write("suite.sh", SUITE), write("sum.sh", "echo $(($1 - $2))\n")]},
        {"text": "The suite is there."},
        {"toolCalls": [shell("sh suite.sh")]},
        {"toolCalls": [write("sum.sh", "echo $(($1 + $2))\n")]},
        {"toolCalls": [{"name": "finish", "arguments": {"result": "2 tests pass."}}]},
        {"text": r#"{"met": true, "reason": "it says how many"}"#},
    ]})
}

fn goal() -> Value {
    json!({
        "mode": "Goal",
        "goal": {
            "description": "Make the test suite pass.",
            "acceptanceCriteria": [
                // The file has a line for each time the command was begun. The first time waits for the kill, within
                // the 50 s that a command may take.
                {"name": "tests", "command": {
                    "run": "echo begun >> begun; [ $(wc -l < begun) -gt 1 ] || sleep 40; sh suite.sh",
                }},
                {"name": "count", "regex": "[0-9]+ tests pass"},
                {"name": "says-so", "judge": "Does it say how many tests pass?"},
            ],
            "maxSteps": 5,
        },
        "tools": {
            "builtin": ["Shell", "Files"], "approval": {"default": "Never"}, "toolbox": {"image": image()},
        },
        "workspace": {"size": "64Mi"},
    })
}

/// Whether `Succeeded` is True, False or Unknown, by the metric.
fn measured(agent: &Agent<'_>, system: &Kubectl, status: &str) -> Option<f64> {
    let labels = [
        ("namespace", agent.kubectl.namespace()),
        ("agent", agent.name.as_str()),
        ("condition", "Succeeded"),
        ("status", status),
    ];
    cluster::series(&cluster::metrics(system), "agentloop_agent_status_condition", &labels)
}

/// `status.goal` without when the run was and what it has used. These differ from run to run, and are checked here.
pub fn goal_without_totals(agent: &Value) -> Value {
    let mut goal = agent["status"]["goal"].clone();
    let fields = goal.as_object_mut().expect("a goal");
    let mut time = |field: &str| {
        let text = fields.remove(field)?;
        Some(text.as_str()?.parse::<jiff::Timestamp>().expect("a time"))
    };
    let (started, ended) = (time("startedAt").expect("a start"), time("endedAt"));
    let has_ended = agent["status"]["loop"]["outcome"].is_string();
    assert_eq!(ended.is_some(), has_ended, "{agent}");
    assert!(ended.is_none_or(|ended| started <= ended), "{started} {ended:?}");
    let usage = fields.remove("usage").expect("usage");
    let calls = usage["calls"].as_i64().unwrap_or_default();
    let all = agent["status"]["usage"]["calls"].as_i64().unwrap_or_default();
    assert!((1..=all).contains(&calls), "{usage}, and {all} calls of all runs");
    goal
}

fn wait_for(agent: &Agent<'_>, what: &str) {
    agent.kubectl.wait(&format!("{AGENTS}/{}", agent.name), what, 240);
}

#[test]
fn an_agent_makes_a_test_suite_pass_in_its_toolbox_although_its_worker_is_killed_during_a_check() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "goal");
    namespace.kubectl.apply(&script("repair", &turns()));
    let agent = Agent::apply(&namespace, "repair", &scripted("repair"), &goal());
    let pod = agent.until_pod(None, 180);
    let begun = "cat /workspace/begun 2>/dev/null; true";
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
    while inside(&agent, "toolbox", begun).is_empty() {
        assert!(std::time::Instant::now() < deadline, "the criteria are not checked");
    }
    node::kill(&pod, "worker");

    wait_for(&agent, "condition=Succeeded");
    let ended = agent.object();
    let status = &ended["status"];
    let met = |name: &str| json!({"name": name, "met": true});
    assert_eq!(
        goal_without_totals(&ended),
        json!({
            "steps": 2, "progressPercent": 100, "progressSource": "Criteria", "end": "CriteriaMet",
            "criteria": [met("tests"), met("count"), met("says-so")],
        })
    );
    assert_eq!(status["loop"]["outcome"], "Completed");
    let usage = &status["usage"];
    assert_eq!((&usage["turns"], &usage["calls"]), (&json!(2), &json!(6)), "{usage}");
    let succeeded = condition(&ended, "Succeeded").expect("it is set");
    assert_eq!(
        (&succeeded["reason"], &succeeded["message"]),
        (&json!("Completed"), &json!("all criteria were met after 2 steps"))
    );
    agent.until_event("Normal", "Completed", 30);
    assert_eq!(measured(&agent, &cluster.system, "true"), Some(1.0));
    let workspace = node::claim(agent.kubectl, "repair-workspace");
    let begun = std::fs::read_to_string(workspace.join("begun")).unwrap();
    assert_eq!(begun.lines().count(), 3, "the interrupted check was repeated");
}

#[test]
fn an_unreached_goal_leaves_a_stalled_agent_that_reports_what_is_missing_and_can_restart() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "goal-missed");
    namespace
        .kubectl
        .apply(&script("idle", &json!({"turns": [{"text": "I look around."}]})));
    let spec = json!({"mode": "Goal", "goal": {
        "description": "Count the stars.",
        "acceptanceCriteria": [{"name": "number", "regex": "[0-9]+ stars"}],
        "maxSteps": 2,
    }});
    let agent = Agent::apply(&namespace, "idle", &scripted("idle"), &spec);
    wait_for(&agent, "jsonpath={.status.loop.outcome}=Failed");
    let failed = |agent: &Agent<'_>| {
        agent.until_condition("Stalled", "True", "Failed", 60);
        let ended = agent.object();
        let goal = json!({
            "steps": 2, "progressPercent": 0, "end": "StepLimit", "criteria": [{"name": "number", "met": false}],
        });
        assert_eq!(goal_without_totals(&ended), goal);
        let succeeded = condition(&ended, "Succeeded").expect("it is set").clone();
        assert_eq!(
            (&succeeded["status"], &succeeded["reason"]),
            (&json!("False"), &json!("Failed"))
        );
        let message = succeeded["message"].as_str().unwrap_or_default();
        for part in ["spec.goal.maxSteps", "number", "agentloop.dev/wake"] {
            assert!(message.contains(part), "{message}");
        }
    };
    failed(&agent);
    // Events are copied to where logs are: this one has no names of criteria.
    let note = agent.until_event("Warning", "Failed", 30);
    let unmet = "(spec.goal.maxSteps); after 2 steps 1 of 1 criteria are not met. ";
    assert!(note.contains(unmet) && !note.contains("number"), "{note}");
    assert_eq!(measured(&agent, &cluster.system, "true"), None);

    let turns = agent.object()["status"]["usage"]["turns"].as_i64().unwrap_or(0);
    wake(&agent, "again");
    agent.until_turns(turns + 2, 120);
    wait_for(&agent, "jsonpath={.status.loop.outcome}=Failed");
    failed(&agent);
    assert_eq!(agent.object()["status"]["usage"]["turns"], turns + 2);
}

/// The example of a test suite, with the image of the tests.
pub fn example_of_tests() -> String {
    let example = include_str!("../../examples/goal-tests.yaml");
    let image = "docker.io/library/node:22";
    assert!(example.contains(image), "the example has another image");
    example.replace(image, &self::image())
}

#[test]
fn the_example_of_a_test_suite_makes_it_pass() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "goal-tests");
    namespace.kubectl.apply(&example_of_tests());
    let agent = Agent::named(&namespace, "repair");
    wait_for(&agent, "condition=Succeeded");
    assert_eq!(
        goal_without_totals(&agent.object()),
        json!({
            "steps": 2, "progressPercent": 100, "progressSource": "Tests", "end": "CriteriaMet",
            "criteria": [{"name": "tests", "met": true}],
            "artifacts": [{"path": "CHANGES.md", "met": true, "bytes": 32}],
        })
    );
    let report = std::fs::read_to_string(node::claim(agent.kubectl, "repair-workspace").join("report.xml")).unwrap();
    assert!(report.contains("adds zero") && !report.contains("<failure"), "{report}");
}

#[test]
fn the_example_of_a_goal_reaches_it() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "goal-example");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/goal.yaml");
    namespace.kubectl.ok(&["apply", "-f", example]);
    let agent = Agent::named(&namespace, "counter");
    wait_for(&agent, "condition=Succeeded");
    let ended = agent.object();
    assert_eq!(
        (
            &ended["status"]["goal"]["end"],
            &ended["status"]["goal"]["steps"],
            &ended["status"]["usage"]["calls"]
        ),
        (&json!("CriteriaMet"), &json!(2), &json!(3)),
        "the judge's call counts"
    );
}
