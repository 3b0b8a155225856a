//! What `kubectl agentloop simulate` says about a changed limit is what happens when the same script runs under it.

use std::path::{Path, PathBuf};

use agentloop::plugin::simulation::settings;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::process::Command;

use super::process::{LocalHarness, agent, script};

/// Tokens of each call.
const INPUT: i64 = 1_500;
const OUTPUT: i64 = 100;

/// Two turns of four calls, and the end.
fn turns() -> Value {
    let usage = json!({"inputTokens": INPUT, "outputTokens": OUTPUT});
    let call = |n: u32| json!({"toolCalls": [{"name": "missing", "arguments": {"n": n}}], "usage": usage});
    let text = |text: &str| json!({"text": text, "usage": usage});
    json!([
        call(1), call(2), call(3), text("one"), call(4), call(5), call(6), text("two"),
        {"yield": {"mode": "shutdown"}, "usage": usage},
    ])
}

fn limited(spec: &Value) -> Value {
    let mut whole = json!({"instructions": "Be brief. ".repeat(200)});
    for (field, value) in spec.as_object().unwrap() {
        whole[field] = value.clone();
    }
    agent("a", &whole)
}

/// The history of the script without a limit.
async fn unlimited(harness: &mut LocalHarness) -> PathBuf {
    harness.write("all.yaml", &[script("a", &turns()), limited(&json!({}))]);
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    let journal = harness.state().join("volumes/default/a-state/worker/journal.sqlite");
    let exported = agentloop(&["history", journal.to_str().unwrap()]).await;
    let file = harness.path("a.jsonl");
    std::fs::write(&file, exported).unwrap();
    file
}

async fn agentloop(arguments: &[&str]) -> Vec<u8> {
    let done = Command::new(env!("CARGO_BIN_EXE_agentloop"))
        .args(arguments)
        .output()
        .await
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    done.stdout
}

/// The number of the first call that a simulation refuses.
async fn simulated(history: &Path, set: &str) -> u64 {
    let arguments = [
        "kubectl",
        "simulate",
        "--file",
        history.to_str().unwrap(),
        "--set",
        set,
        "-o",
        "json",
    ];
    let report: Value = serde_json::from_slice(&agentloop(&arguments).await).unwrap();
    let stops = report["stops"].as_array().unwrap();
    let stop = stops.iter().find(|stop| stop["refused"]["calls"] != 0);
    stop.unwrap_or_else(|| panic!("{set}: nothing is refused: {report}"))["number"]
        .as_u64()
        .unwrap()
}

/// The number of the first call that is not made in a run under these limits, until the loop pauses or ends.
async fn really(spec: &Value, budget: Option<&Value>, pauses: bool) -> u64 {
    let mut harness = LocalHarness::new();
    let mut objects = vec![script("a", &turns()), limited(spec)];
    objects.extend(budget.map(|limits| {
        json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": {"name": "b"},
            "spec": {"selector": {"matchLabels": {"of": "test"}}, "limits": limits, "window": {"lifetime": {}}}})
    }));
    harness.write("all.yaml", &objects);
    let mut run = harness.run(&[]);
    if pauses {
        run.until("a", "paused", |line| line["state"] == "Paused").await;
        run.interrupt().await;
    }
    run.ended().await;
    let answered = harness.journal("a").into_iter().filter(|(kind, turn, _)| {
        // Of a turn that was cut, the next one continues with the script.
        kind == "CallAnswered" && (pauses || *turn == 1)
    });
    u64::try_from(answered.count()).unwrap() + 1
}

#[tokio::test]
async fn a_simulated_limit_stops_a_loop_at_the_call_at_which_it_really_stops() {
    let mut harness = LocalHarness::new();
    let history = unlimited(&mut harness).await;
    let answered = harness
        .journal("a")
        .into_iter()
        .filter(|(kind, ..)| kind == "CallAnswered");
    assert_eq!(answered.count(), 9);

    let calls = really(&json!({}), Some(&json!({"calls": 5})), true).await;
    assert_eq!((simulated(&history, "limits.calls=5").await, calls), (6, 6));

    // After six calls, less is left than any call needs.
    let tokens = 6 * (INPUT + OUTPUT) + INPUT - 100;
    let spent = really(&json!({}), Some(&json!({"tokens": tokens})), true).await;
    assert_eq!(
        (simulated(&history, &format!("limits.tokens={tokens}")).await, spent),
        (7, 7)
    );

    for (set, guardrails, call, pauses) in [
        ("guardrails.maxCallsPerTurn=3", json!({"maxCallsPerTurn": 3}), 4, false),
        (
            "guardrails.maxConsecutiveTurns=1",
            json!({"maxConsecutiveTurns": 1}),
            5,
            true,
        ),
        (
            "guardrails.rateLimits=[{resource: LLMCalls, amount: 5, windowSeconds: 3600}]",
            json!({"rateLimits": [{"resource": "LLMCalls", "amount": 5, "windowSeconds": 3600}]}),
            6,
            true,
        ),
    ] {
        let really = really(&json!({"guardrails": guardrails}), None, pauses).await;
        assert_eq!((simulated(&history, set).await, really), (call, call), "{set}");
    }
}

#[tokio::test]
async fn the_command_says_that_a_history_is_empty_and_which_limits_there_are() {
    let harness = LocalHarness::new();
    let file = harness.path("a.jsonl");
    std::fs::write(&file, "").unwrap();
    let simulate = async |set: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_agentloop"));
        command.args(["kubectl", "simulate", "--file"]).arg(&file);
        for change in set {
            command.args(["--set", change]);
        }
        let done = command.output().await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (done.status.code(), text(&done.stdout), text(&done.stderr))
    };
    let budget = harness.path("team.yaml");
    std::fs::write(
        &budget,
        "{kind: AgentBudget, metadata: {name: team}, spec: {limits: {calls: 2}, window: {lifetime: {}}}}",
    )
    .unwrap();
    let [histories, manifest] = [&file, &budget].map(|path| path.to_str().unwrap());
    let arguments = [
        "kubectl", "simulate", "--file", histories, "--budget", manifest, "-o", "json",
    ];
    let report: Value = serde_json::from_slice(&agentloop(&arguments).await).unwrap();
    assert_eq!(
        report["changes"],
        json!(["AgentBudget team", "limits.calls=2", "window.lifetime={}"])
    );
    assert_eq!(report["agents"], json!(["a"]));
    let (code, out, _) = simulate(&["limits.calls=1"]).await;
    assert_eq!((code, out.as_str()), (Some(0), "The history has no calls.\n"));
    for set in [
        &["limits.token=1"][..],
        &["limits.calls=-1"],
        &["limits.calls=1", "limits.calls=2"],
        &["limits.calls=99999999999999999999"],
    ] {
        let (code, out, problem) = simulate(set).await;
        assert_eq!((code, out.as_str()), (Some(64), ""), "{set:?}: {problem}");
        assert!(problem.contains("limits."), "{set:?}: {problem}");
    }
    let (_, _, problem) = simulate(&["limits.token=1"]).await;
    assert!(
        settings::SETTINGS.iter().all(|setting| problem.contains(setting)),
        "{problem}"
    );
}
