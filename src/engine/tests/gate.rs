//! Admission: which calls become runs, and what the model sees of the others.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::work::{tool, wants};
use super::*;

#[test]
fn the_name_of_a_tool_that_there_is_not_is_in_no_journal_line() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["my password is 1234"]));
    let denied = driver.lines(RecordKind::ToolDenied);
    assert_eq!(denied[0].tool, None);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["UnknownTool"]);
    assert!(driver.result().contains("available: yield, files__read"));
}

#[rstest]
#[case("{", "(all)")]
#[case("[]", "(all)")]
#[case(r#"{"path": 1}"#, "/path")]
#[case(r#"{"way": "a"}"#, "(all)")]
fn arguments_that_do_not_fit_are_answered_with_the_argument_and_the_problem(
    #[case] arguments: &str,
    #[case] argument: &str,
) {
    let mut driver = Driver::with_tools(settings());
    let mut answer = wants(&["files__write"]);
    answer.tool_calls[0].arguments = arguments.into();
    driver.answer(answer);
    assert_eq!(driver.sent, []);
    let result: serde_json::Value = serde_json::from_str(driver.result()).unwrap();
    assert_eq!(
        (&result["error"], &result["argument"]),
        (&json!("invalid argument"), &json!(argument))
    );
    assert!(!result["fix"].as_str().unwrap().is_empty());
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["BadArguments"]);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
}

#[test]
fn three_denials_of_a_tool_close_it_until_the_next_turn_and_two_do_not_and_the_list_of_tools_stays() {
    let mut driver = Driver::with_tools(settings());
    let bad = || {
        let mut answer = wants(&["files__write"]);
        answer.tool_calls[0].arguments = r#"{"path": 1}"#.into();
        answer
    };
    let offered = driver.offered.clone();
    driver.answer(bad());
    driver.answer(bad());
    driver.answer(bad());
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["BadArguments"; 3]);
    driver.answer(wants(&["files__write"]));
    assert_eq!(driver.offered, offered);
    assert!(
        driver.result().contains("unavailable until the next turn"),
        "{}",
        driver.result()
    );
    assert_eq!(*driver.notes(RecordKind::ToolDenied).last().unwrap(), "Hidden");
    driver.turn();
    driver.answer(bad());
    driver.answer(bad());
    driver.answer(wants(&["files__write"]));
    assert_eq!(driver.running(), [1]);
}

#[test]
fn a_tool_whose_schema_cannot_be_used_is_not_offered_and_another_documents_is_not_fetched() {
    let broken = |parameters| ToolSpec {
        parameters,
        ..tool("broken", ToolEffect::Read)
    };
    for parameters in [
        json!({"type": 7}),
        json!({"$ref": "http://127.0.0.1:1/schema"}),
        json!({"$ref": "file:///etc/passwd"}),
        json!({"properties": {"a": {"pattern": "("}}}),
    ] {
        assert!(
            agentloop_support::json_schema::check(&parameters).is_err(),
            "{parameters}"
        );
        let mut driver = Driver::fresh(settings());
        driver.offer(vec![broken(parameters), tool("files__read", ToolEffect::Read)]);
        driver.start(1);
        assert_eq!(driver.offered, ["yield", "files__read"]);
    }
}

#[test]
fn the_answer_that_a_provider_refused_runs_nothing() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(ModelAnswer {
        finish: FinishReason::Refused,
        ..wants(&["files__read"])
    });
    assert_eq!(driver.sent, []);
    assert_eq!(driver.notes(RecordKind::TurnFailed), ["Refused"]);
    assert_eq!(driver.transcript, []);
}
