//! What loops do in a run: beside each other, within budgets, and the same as in a pod.

use serde_json::{Value, json};

use super::process::{CANARY, LocalHarness, agent, script, scripted, various};
use crate::worker::process as pods;
use crate::worker::{Gateway, answer};

/// A yield with these arguments; none when there are none.
fn calls(arguments: &Value) -> impl Iterator<Item = (&'static str, Value)> {
    let is_empty = arguments.as_object().unwrap().is_empty();
    (!is_empty).then(|| ("yield", arguments.clone())).into_iter()
}

fn turns_of(line: &Value) -> i64 {
    line["turnsCompleted"].as_i64().unwrap()
}

#[tokio::test]
async fn test_multiple_agents_run_side_by_side_and_neither_a_slow_nor_a_broken_one_holds_another() {
    let mut harness = LocalHarness::new();
    let turn = |delay: u32| various(&json!({ "delayMilliseconds": delay }));
    let (fast, slow) = (scripted("fast", &turn(20)), scripted("slow", &turn(2000)));
    let broken = scripted("broken", &json!([{ "fail": { "status": 401 } }]));
    harness.write("all.yaml", &[fast, slow, broken].concat());
    // Long enough for a machine that takes seconds to start them.
    let mut run = harness.run(&["--duration", "12"]);
    assert_eq!(run.cause().await, "Duration");
    assert_eq!(run.agent("broken")["reasons"], json!(["AuthenticationFailed"]));
    let (fast, slow) = (turns_of(&run.agent("fast")), turns_of(&run.agent("slow")));
    assert!((1..=6).contains(&slow), "{slow}");
    assert!(fast > 2 * slow, "the slow one holds the fast one: {fast} and {slow}");
}

#[tokio::test]
async fn a_budget_that_two_share_stops_both_before_it_is_crossed() {
    let mut harness = LocalHarness::new();
    let turns = various(&json!({ "usage": { "inputTokens": 900, "outputTokens": 100 } }));
    let budget = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": { "name": "team" },
        "spec": { "selector": { "matchLabels": { "of": "test" } }, "limits": { "tokens": 12_000 }, "window": { "lifetime": {} } },
    });
    harness.write(
        "all.yaml",
        &[&[budget.clone()][..], &scripted("a", &turns), &scripted("b", &turns)].concat(),
    );
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    let lines = ["a", "b"].map(|name| run.agent(name));
    let used: i64 = lines.iter().map(|line| line["tokens"].as_i64().unwrap()).sum();
    assert!((6_000..=12_000).contains(&used), "{used}");
    for line in &lines {
        // Shown to the last, though the loops are stopped by then.
        assert_eq!(
            (&line["state"], &line["reasons"]),
            (&json!("Paused"), &json!(["BudgetExhausted"]))
        );
        assert!(line["message"].as_str().unwrap().contains("team"), "{line}");
    }

    // The ledger is in the state: a second run spends nothing, and one with a top-up continues.
    let mut again = harness.run(&[]);
    assert_eq!(again.cause().await, "NothingRuns");
    let still: i64 = ["a", "b"]
        .iter()
        .map(|name| again.agent(name)["tokens"].as_i64().unwrap())
        .sum();
    assert_eq!(still, used);
    let mut more = budget;
    more["spec"]["topUps"] = json!([{ "id": "one", "tokens": 5_000, "reason": "the test is not over" }]);
    harness.write(
        "all.yaml",
        &[&[more][..], &scripted("a", &turns), &scripted("b", &turns)].concat(),
    );
    let mut third = harness.run(&[]);
    assert_eq!(third.cause().await, "NothingRuns");
    let then: i64 = ["a", "b"]
        .iter()
        .map(|name| third.agent(name)["tokens"].as_i64().unwrap())
        .sum();
    assert!(then > used && then <= 17_000, "{then} after {used}");
}

#[tokio::test]
async fn a_limit_of_its_own_holds_an_agent_too() {
    let mut harness = LocalHarness::new();
    let turns = various(&json!({ "usage": { "inputTokens": 900, "outputTokens": 100 } }));
    let limited = agent("a", &json!({ "guardrails": { "total": { "tokens": 5_000 } } }));
    harness.write("all.yaml", &[script("a", &turns), limited]);
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    let used = run.agent("a")["tokens"].as_i64().unwrap();
    assert!((3_000..=5_000).contains(&used), "{used}");
}

#[tokio::test]
async fn the_same_script_yields_the_same_records_as_a_worker_in_a_pod() {
    let said = [
        ("one", json!({})),
        ("two", json!({ "mode": "sleep", "sleep": 1 })),
        ("three", json!({ "mode": "shutdown", "reason": "done" })),
    ];
    let turns: Vec<Value> = said
        .iter()
        .map(|(text, arguments)| {
            let calls: Vec<Value> = calls(arguments)
                .map(|(name, arguments)| json!({ "name": name, "arguments": arguments }))
                .collect();
            json!({ "text": text, "toolCalls": calls })
        })
        .collect();
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &scripted("a", &json!(turns)));
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");

    let mut pod = pods::WorkerHarness::new();
    let replies = said.iter().map(|(text, arguments)| {
        let calls: Vec<_> = calls(arguments).collect();
        answer(text, &calls)
    });
    let gateway = Gateway::start(pod.dir.path(), replies.collect());
    let mut worker = pod.worker(&gateway);
    gateway.until("completed", |log| log.last().outcome.is_some()).await;
    worker.terminate().await;
    worker.ended().await;
    let in_pod = super::process::records(&pod.journal.join("journal.sqlite"));
    assert_eq!(harness.journal("a"), in_pod);
}

#[tokio::test]
async fn records_are_json_lines_with_kinds_and_ids_and_no_output_has_a_text_of_the_model() {
    let mut harness = LocalHarness::new();
    let turns = json!([
        { "text": format!("I say {CANARY}") },
        { "text": CANARY, "yield": { "sleep": 1, "reason": CANARY } },
        { "yield": { "mode": "shutdown", "reason": CANARY } },
    ]);
    harness.write("all.yaml", &scripted("a", &turns));
    let mut run = harness.run(&["--events"]);
    assert_eq!(run.cause().await, "NothingRuns");
    let lines = run.lines();
    let records: Vec<(String, i64)> = lines
        .iter()
        .filter(|line| line["type"] == "event")
        .map(|line| {
            assert_eq!((&line["namespace"], &line["agent"]), (&json!("default"), &json!("a")));
            assert!(
                line["seq"].as_i64() > Some(0) && line["event"].is_string() && line["ts"].is_string(),
                "{line}"
            );
            (line["kind"].as_str().unwrap().into(), line["turn"].as_i64().unwrap())
        })
        .collect();
    let journal: Vec<(String, i64)> = harness
        .journal("a")
        .into_iter()
        .map(|(kind, turn, _)| (kind, turn))
        .collect();
    assert_eq!(records, journal);
    let answered = lines.iter().find(|line| line["kind"] == "CallAnswered").unwrap();
    assert_eq!(answered["call"], "t1c1a1");
    for text in [run.out(), run.err()] {
        assert!(!text.contains(CANARY), "{text}");
    }
}

#[tokio::test]
async fn instructions_and_skills_come_from_the_config_maps_that_the_spec_names() {
    let mut harness = LocalHarness::new();
    let mut whole = agent(
        "a",
        &json!({
            "instructionsFrom": { "configMapKeyRef": { "name": "words", "key": "text" } },
            "skills": [{ "name": "calm", "configMapKeyRef": { "name": "words", "key": "skill" } }],
        }),
    );
    whole["spec"].as_object_mut().unwrap().remove("instructions");
    let words = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "words" }, "data": { "text": CANARY, "skill": CANARY } });
    harness.write(
        "all.yaml",
        &[script("a", &json!([{ "yield": { "mode": "shutdown" } }])), words, whole],
    );
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    assert_eq!(run.agent("a")["outcome"], "Completed");
    assert!(!run.out().contains(CANARY));
}

#[tokio::test]
async fn the_actions_of_a_running_agent_can_be_read_from_a_copy_of_its_journal() {
    let mut harness = LocalHarness::new();
    let turns = various(&json!({ "delayMilliseconds": 20, "usage": { "inputTokens": 90, "outputTokens": 10 } }));
    let [script, mut agent] = scripted("a", &turns);
    agent["spec"]["model"]["price"] = json!({ "inputPerMillion": "1.00", "outputPerMillion": "3.00" });
    harness.write("all.yaml", &[script, agent]);
    let mut run = harness.run(&[]);
    run.until("a", "in turn 4", |line| line["turnsCompleted"].as_i64() >= Some(3))
        .await;
    let path = harness.path("copy.sqlite");
    // One that is tidied up meanwhile is copied at the second try.
    let copied = (0..5).any(|_| {
        let status = std::process::Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg("journal")
            .env(
                "AGENTLOOP_JOURNAL_DIR",
                harness.state().join("volumes/default/a-state/worker"),
            )
            .stdout(std::fs::File::create(&path).unwrap())
            .status();
        status.unwrap().success()
    });
    assert!(copied);
    let connection = rusqlite::Connection::open(&path).unwrap();
    let sql = "SELECT count(*), sum(tokens_used), min(success), count(DISTINCT execution_id), sum(cost_micro_usd),
               min(cost_usd), max(total_cost_usd)
               FROM agent_execution_steps JOIN agent_execution_history AS history ON history.id = execution_id
               WHERE final_status = 'success' AND agent_id <> '' AND reasoning LIKE '___'";
    let (steps, tokens, success, turns, cost): (i64, i64, i64, i64, i64) = connection
        .query_row(sql, [], |row| {
            assert_eq!(
                [row.get::<_, String>(5)?, row.get(6)?],
                ["0.000120", "0.000120"],
                "of a step, of a turn"
            );
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
        })
        .unwrap();
    assert!(turns >= 3 && steps == turns, "{steps} steps in {turns} turns");
    assert_eq!(cost, steps * (90 + 30));
    assert_eq!((tokens, success), (steps * 100, 1));
    // The run has not noticed.
    let now = turns_of(&run.agent("a"));
    run.until("a", "further", |line| turns_of(line) > now).await;
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
}
