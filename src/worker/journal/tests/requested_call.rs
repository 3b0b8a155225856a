//! Tests of the call that is shown to a person who may approve it.

use serde_json::{Value, json};

use super::*;
use crate::engine::message::{ToolCall, call_id};
use crate::engine::tool::ToolRunId;

fn answer(call: u32, arguments: &[&str]) -> Message {
    let call = |(place, arguments): (usize, &&str)| ToolCall {
        id: call_id(3, call, place),
        name: "hub__note".into(),
        arguments: (*arguments).into(),
    };
    Message::Assistant {
        text: Some("I write it down.".into()),
        tool_calls: arguments.iter().enumerate().map(call).collect(),
        reasoning: None,
    }
}

fn run(call: u32, index: u32) -> ToolRunId {
    ToolRunId {
        member: 0,
        turn: 3,
        call,
        index,
    }
}

#[test]
fn it_is_the_call_of_that_run_and_no_other_and_a_long_one_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(dir.path(), 1);
    let messages = vec![
        user("go on"),
        answer(1, &[r#"{"text":"a"}"#, r#"{"text":"b"}"#]),
        // A name that is written twice: the last one is run, and shown.
        answer(2, &[r#"{"text":"harmless","text":"a"}"#]),
    ];
    write(&mut journal, &[record(RecordKind::CallAnswered, 3, messages)]);
    let shown = |call, index| journal.requested_call(run(call, index), 1000).unwrap();
    let second: Value = serde_json::from_str(&shown(1, 2).unwrap()).unwrap();
    let expected = json!({"tool": "hub__note", "arguments": {"text": "b"}, "text": "I write it down."});
    assert_eq!(second, expected);
    assert!(shown(2, 1).unwrap().contains(r#""text":"a""#));
    for (call, index) in [(1, 3), (2, 2), (3, 1)] {
        assert_eq!(shown(call, index), None, "{call} {index}");
    }
    let cut = journal.requested_call(run(1, 1), 20).unwrap().unwrap();
    assert!(cut.starts_with(r#"{"tool""#) && cut.len() < 30, "{cut}");
}
