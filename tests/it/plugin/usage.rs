//! Usage of calls in what the plugin shows of events.

use agentloop::plugin::ExitStatus;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::harness::{CommandOutput, NOW};
use super::link::{Answer, FakeController, OpenStream, Stream, event, start};

/// 1 h before [`NOW`].
const SINCE: &str = "2026-11-22T13:00:00Z";
const BEFORE: &str = "2026-11-22T12:59:59Z";

fn answered(seq: i64, at: &str, model: &str) -> (&'static str, i64, Value) {
    let usage = json!({"at": at, "model": model, "inputTokens": 3_000, "outputTokens": 400, "costMicroUSD": 12_000});
    event("model:call_answered", seq, &usage)
}

fn turn(first: i64) -> Vec<(&'static str, i64, Value)> {
    vec![
        event("autonomy:turn_started", first, &json!({})),
        answered(first + 1, NOW, "large"),
        answered(first + 2, NOW, "large"),
        event("autonomy:turn_completed", first + 3, &json!({"note": "sleep"})),
    ]
}

#[tokio::test]
async fn logs_and_history_show_what_a_turn_used() {
    let fake = FakeController::start(vec![start(4), Stream(turn(1)), start(4), Stream(turn(1))]).await;
    let logs = fake.harness.run("logs helper").await;
    let end = "t1      turn_completed       sleep  after 0s  6.8k tokens  $0.024\n";
    assert!(logs.out.contains(end), "{}{}", logs.out, logs.err);
    assert!(
        logs.out.ends_with("usage                total 1k tokens, $0.005\n"),
        "{}",
        logs.out
    );
    assert!(!logs.out.contains("call_answered"), "{}", logs.out);

    let history = fake.harness.run("history helper -o json").await;
    let rows: Value = serde_json::from_str(&history.out).unwrap();
    let found = ["calls", "inputTokens", "outputTokens", "costMicroUSD"].map(|field| rows[0][field].clone());
    assert_eq!(found, [2, 6_000, 800, 24_000].map(Value::from));
    assert_eq!(rows[0].get("unknownCalls"), None);
}

#[tokio::test]
async fn logs_that_follow_show_usage_with_the_end_of_a_turn_and_read_no_status_for_it() {
    let end = ("end", 0, json!({"reason": "the limit of one hour is reached"}));
    let mut events = turn(5);
    events.push(end);
    let refused = Answer::Json(403, json!({"code": "Forbidden", "message": "no longer"}));
    let fake = FakeController::start(vec![start(4), Stream(events), refused]).await;
    let logs = fake.harness.run("logs helper -f --tail 0").await;
    let end = "turn_completed       sleep  after 0s  6.8k tokens  $0.024\n";
    assert!(logs.out.ends_with(end), "{}{}", logs.out, logs.err);
}

/// `cost --by model --since 1h` with Agent `helper`, which has made calls.
async fn cost(answers: Vec<Answer>, more: &str) -> (CommandOutput, Vec<String>) {
    let fake = FakeController::start(answers).await;
    fake.harness.put_agent("helper", &json!({"usage": {"calls": 9}}));
    let done = fake.harness.run(&format!("cost --by model --since 1h {more}")).await;
    (done, fake.controller.lines())
}

fn rows(done: &CommandOutput) -> Vec<(String, [i64; 4])> {
    let rows: Value = serde_json::from_str(&done.out).unwrap();
    let row = |row: &Value| {
        let numbers =
            ["calls", "inputTokens", "outputTokens", "costMicroUSD"].map(|field| row[field].as_i64().unwrap());
        (row["of"].as_str().unwrap().to_owned(), numbers)
    };
    rows.as_array().unwrap().iter().map(row).collect()
}

#[tokio::test]
async fn usage_by_model_since_a_time_is_read_from_the_events_back_to_it() {
    // The first step has no event before that time, so an earlier one follows.
    let (done, requests) = cost(
        vec![
            start(1_500),
            Stream(vec![answered(600, SINCE, "large"), answered(1_500, NOW, "small")]),
            Stream(vec![
                answered(1, BEFORE, "large"),
                answered(499, BEFORE, "large"),
                answered(500, SINCE, "large"),
            ]),
        ],
        "-o json",
    )
    .await;
    assert_eq!((done.status, done.err.as_str()), (ExitStatus::Success, ""));
    let expected = [
        ("large".to_owned(), [2, 6_000, 800, 24_000]),
        ("small".to_owned(), [1, 3_000, 400, 12_000]),
    ];
    assert_eq!(rows(&done), expected);
    let expected = ["latest", "500", "0"];
    assert_eq!(
        requests,
        expected.map(|after| format!("GET team-a/helper/events?after={after}&messages=false"))
    );
}

#[tokio::test]
async fn agents_whose_events_do_not_say_what_they_used_are_named() {
    let refused = |status, code: &str, message: &str| Answer::Json(status, json!({"code": code, "message": message}));
    let cases = [
        (
            vec![refused(503, "Unavailable", "this Agent has no pod now")],
            "no pod now",
        ),
        (
            vec![refused(403, "Forbidden", "you may not get agents/events")],
            "may not get",
        ),
        (
            vec![start(2), Stream(vec![answered(2, SINCE, "large")])],
            "does not reach back",
        ),
        (
            vec![
                start(2),
                Stream(vec![
                    answered(1, BEFORE, "large"),
                    event("model:call_answered", 2, &json!({})),
                ]),
            ],
            "an earlier version",
        ),
        (
            vec![
                start(2),
                Stream(vec![answered(1, SINCE, "large"), answered(1, SINCE, "large")]),
            ],
            "changed while they were read",
        ),
        // The pod sends two of three events, and then nothing.
        (
            vec![
                start(3),
                OpenStream(vec![answered(1, BEFORE, "large"), answered(2, SINCE, "large")]),
            ],
            "cannot be read",
        ),
    ];
    for (answers, why) in cases {
        let (done, _) = cost(answers, "-o json").await;
        assert_eq!((done.status, rows(&done)), (ExitStatus::Success, vec![]), "{why}");
        let warning = "warning: no event of the loop records the usage of: team-a/helper (";
        assert!(
            done.err.starts_with(warning) && done.err.contains(why),
            "{why}: {}",
            done.err
        );
    }
    let (done, _) = cost(vec![refused(503, "Unavailable", "no pod")], "").await;
    assert!(
        done.out
            .contains("No event of the loop records the usage of this time for: team-a/helper ("),
        "{}",
        done.out
    );
}

#[tokio::test]
async fn an_agent_that_made_no_call_is_not_named_and_one_refused_token_ends_the_command() {
    let unavailable = || {
        Answer::Json(
            503,
            json!({"code": "Unavailable", "message": "this Agent has no pod now"}),
        )
    };
    let fake = FakeController::start(vec![unavailable()]).await;
    fake.harness.put_agent("helper", &json!({"usage": {"turns": 0}}));
    let done = fake.harness.run("cost --by model --since 1h -o json").await;
    assert_eq!(
        (done.status, done.out.trim(), done.err.as_str()),
        (ExitStatus::Success, "[]", "")
    );

    let unauthenticated = Answer::Json(
        401,
        json!({"code": "Unauthenticated", "message": "the token is not valid"}),
    );
    let (done, _) = cost(vec![unauthenticated], "").await;
    assert_eq!(done.status, ExitStatus::Failure);
    assert!(done.err.contains("the token is not valid"), "{}", done.err);
}

#[tokio::test]
async fn a_pod_with_absurd_numbers_breaks_no_sum() {
    let absurd = |seq| {
        let usage = json!({"inputTokens": i64::MAX, "outputTokens": i64::MIN, "costMicroUSD": i64::MAX, "model": "m"});
        event("model:call_answered", seq, &usage)
    };
    let first = event("autonomy:turn_started", 1, &json!({"at": BEFORE}));
    let (done, _) = cost(vec![start(3), Stream(vec![first, absurd(2), absurd(3)])], "").await;
    assert_eq!(done.status, ExitStatus::Success, "{}", done.err);
    let (done, _) = cost(
        vec![
            start(3),
            OpenStream(vec![
                event("autonomy:turn_started", 1, &json!({"at": BEFORE})),
                absurd(2),
                absurd(3),
            ]),
        ],
        "-o json",
    )
    .await;
    assert_eq!(rows(&done), [("m".to_owned(), [2, i64::MAX, 0, i64::MAX])]);
}
