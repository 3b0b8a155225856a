//! The consequences of tool calls in an answer.

use rstest::rstest;

use super::*;

#[test]
fn an_answer_without_a_tool_continues_the_loop_at_once() {
    let mut driver = Driver::started(settings());
    driver.answer(says("hm"));
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(driver.next_timer(), SignedDuration::from_millis(100));
    assert!(driver.observed().contains("the loop continues"));
}

#[rstest]
#[case("", LoopState::Running)]
#[case("{}", LoopState::Running)]
#[case(r#"{"mode": "continue", "sleep": 5}"#, LoopState::Running)]
#[case(r#"{"mode": "sleep", "sleep": 0}"#, LoopState::Running)]
#[case(r#"{"sleep": 0}"#, LoopState::Running)]
#[case(r#"{"sleep": null, "mode": null}"#, LoopState::Running)]
#[case(r#"{"sleep": 0.999}"#, LoopState::Running)]
#[case(r#"{"sleep": 1.5}"#, LoopState::Sleeping)]
#[case(r#"{"sleep": 1}"#, LoopState::Sleeping)]
#[case(
    r#"{"mode": "sleep", "wake_early_if": ["sensor/a", "signal/a/b", "notification", "chat", "a.b-c"]}"#,
    LoopState::Sleeping
)]
#[case(r#"{"sleep": 3, "mode": "shutdown"}"#, LoopState::Stopped)]
fn a_yield_sets_the_pace(#[case] arguments: &str, #[case] state: LoopState) {
    let mut driver = Driver::started(settings());
    driver.answer(calls("yield", arguments));
    assert_eq!(driver.state(), state);
    assert_eq!(driver.engine.view().counts.turns, 1);
}

#[rstest]
#[case("{", "(all)")]
#[case("[1]", "(all)")]
#[case(r#"{"sleep": "30"}"#, "sleep")]
#[case(r#"{"sleep": -1}"#, "sleep")]
#[case(r#"{"until": "tomorrow"}"#, "until")]
#[case(r#"{"until": "2026-01-01T08:00:00"}"#, "until")]
#[case(r#"{"until": "2026-01-01T08:00:00Z", "sleep": 5}"#, "until")]
#[case(r#"{"mode": "nap"}"#, "mode")]
#[case(r#"{"mode": 1}"#, "mode")]
#[case(r#"{"reason": []}"#, "reason")]
#[case(r#"{"seconds": 3}"#, "seconds")]
#[case(r#"{"sleep": 3, "wake_early_if": "chat"}"#, "wake_early_if")]
#[case(r#"{"sleep": 3, "wake_early_if": [""]}"#, "wake_early_if")]
#[case(r#"{"sleep": 3, "wake_early_if": ["Chat"]}"#, "wake_early_if")]
#[case(r#"{"sleep": 3, "wake_early_if": ["sensor/"]}"#, "wake_early_if")]
#[case(r#"{"sleep": 3, "wake_early_if": ["signal/a"]}"#, "wake_early_if")]
#[case(
    r#"{"sleep": 3, "wake_early_if": ["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]}"#,
    "wake_early_if"
)]
fn a_yield_that_cannot_be_read_is_answered_with_the_argument_and_the_fix(#[case] arguments: &str, #[case] name: &str) {
    let mut driver = Driver::started(settings());
    driver.answer(calls("yield", arguments));
    let result: serde_json::Value = serde_json::from_str(driver.result()).unwrap();
    assert_eq!(result["error"], "invalid argument");
    assert_eq!(result["argument"], name);
    assert!(!result["fix"].as_str().unwrap().is_empty());
    assert_eq!(
        driver.in_flight.unwrap().to_string(),
        "t1c2a1",
        "the model may fix it in the same turn"
    );
}

#[test]
fn an_unknown_tool_is_answered_with_the_tools_there_are() {
    let mut driver = Driver::started(settings());
    driver.answer(calls("shell", "{}"));
    assert!(driver.result().contains("unknown tool shell; available: yield"));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
}

#[test]
fn the_last_valid_yield_counts_and_every_call_has_its_result_in_order() {
    let mut driver = Driver::started(settings());
    let call = |id: &str, name: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    };
    driver.answer(ModelAnswer {
        text: None,
        tool_calls: vec![
            call("a", "yield", r#"{"sleep": 10}"#),
            call("b", "yield", r#"{"sleep": 20}"#),
            call("c", "yield", r#"{"sleep": -1}"#),
        ],
        finish: FinishReason::ToolCalls,
        ..ModelAnswer::default()
    });
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(20)));
    let ids: Vec<&str> = driver
        .transcript
        .iter()
        .filter_map(|message| match &**message {
            Message::Tool { id, .. } => Some(id.as_str()),
            Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => None,
        })
        .collect();
    assert_eq!(
        ids,
        ["000010100", "000010101", "000010102"],
        "one for each position, whatever id the model used"
    );
    driver.pass(seconds(20));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn changing_content_is_only_in_the_newest_message() {
    let mut driver = Driver::started(settings());
    let first = driver.prompt.clone();
    driver.turn();
    assert_eq!(driver.prompt[..first.len()], first);
    let Message::System { text } = &*first[0] else {
        panic!("no system message")
    };
    assert!(text.starts_with("Watch the stars.\n\n"));
}
