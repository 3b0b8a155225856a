//! The hot state in the loop: the block at the end of each prompt, and the runs that fill it before a turn.

use rstest::rstest;
use serde_json::{Value, json};

use super::super::hot_state::FieldSchema;
use super::super::tool::{DeclaredDefinition, ToolEffect, ToolOutcome, ToolSpec};
use super::super::{EngineInput, RecordKind, StopCause};
use super::{
    Driver, EngineEffect, EngineSettings, LoopState, calls, says, seconds, settings, value_of, without_its_line,
};
use agentloop_api::hot_state::FieldType;

fn field(name: &str, kind: FieldType, refresh_tool: Option<&str>) -> FieldSchema {
    FieldSchema {
        name: name.into(),
        kind,
        ttl: Some(seconds(30)),
        max_items: None,
        refresh_tool: refresh_tool.map(Into::into),
    }
}

fn with(fields: Vec<FieldSchema>) -> EngineSettings {
    EngineSettings {
        hot_state: fields,
        ..settings()
    }
}

pub(super) fn tool(name: &str, effect: ToolEffect) -> ToolSpec {
    ToolSpec {
        name: name.into(),
        description: String::new(),
        parameters: json!({"type": "object"}),
        effect,
        idempotent: false,
        timeout: seconds(60),
        on_unknown: super::super::tool::UnknownOutcomePolicy::TellModel,
        target: String::new(),
        needs_approval: false,
        approval_condition: None,
        needs_approval_after_untrusted: false,
        trusted: true,
        missing_grant: None,
        definition: None,
    }
}

fn write(driver: &mut Driver, name: &str, value: Value) -> Vec<EngineEffect> {
    without_its_line(driver.feed(value_of(name, value)))
}

/// A loop with a number `n` that the tool `s__n` returns, and another tool with side effects.
fn refreshing() -> Driver {
    let mut driver = Driver::fresh(with(vec![field("n", FieldType::Number, Some("s__n"))]));
    driver.offer(vec![tool("s__n", ToolEffect::Read), tool("s__act", ToolEffect::Write)]);
    driver.start(1);
    driver
}

fn done(text: &str) -> ToolOutcome {
    ToolOutcome::Done { text: text.into() }
}

fn block(driver: &Driver) -> &str {
    driver.block.as_deref().unwrap_or_default()
}

#[test]
fn the_block_is_rendered_for_each_call_and_never_joins_the_transcript() {
    let mut driver = Driver::started(with(vec![field("n", FieldType::Number, None)]));
    assert!(
        block(&driver).starts_with("[From the runtime, not from a person"),
        "{}",
        block(&driver)
    );
    assert!(block(&driver).ends_with("Hot state:\nn: (no value yet)"));
    write(&mut driver, "n", json!(7));
    let before = driver.prompt.clone();
    driver.answer(calls("yield", "nonsense"));
    assert!(block(&driver).ends_with("\nn: 7 (0s ago)"), "{}", block(&driver));
    assert_eq!(driver.prompt[..before.len()], before, "the prefix stays");
    driver.pass(seconds(90));
    driver.answer(says("done"));
    driver.pass(seconds(1));
    assert!(block(&driver).ends_with("\nn: 7 (stale: 1m ago)"), "{}", block(&driver));
    assert_eq!(driver.prompt[..before.len()], before);
    let json = serde_json::to_string(&driver.transcript).unwrap();
    assert!(!json.contains("not from a person") && json.contains("Hot state, version 1: fresh: none; stale: n"));
}

#[test]
fn a_loop_without_fields_has_no_block() {
    let mut driver = Driver::started(settings());
    assert_eq!(driver.block, None);
    assert_eq!(write(&mut driver, "n", json!(7)), [], "only what the schema names");
}

#[test]
fn a_refused_value_leaves_the_last_good_one_and_is_journalled_once_without_it() {
    let mut driver = Driver::started(with(vec![field("n", FieldType::Number, None)]));
    write(&mut driver, "n", json!(7));
    write(&mut driver, "n", json!("canary"));
    write(&mut driver, "n", json!({"canary": 1}));
    let note = "n: the last value was refused: it requires type Number, but the value is a String";
    assert_eq!(driver.notes(RecordKind::HotStateRefused), [note]);
    driver.turn();
    let wanted = "n: 7 (0s ago; the last value was refused: it requires type Number, but the value is an Object)";
    assert!(block(&driver).ends_with(wanted), "{}", block(&driver));
    write(&mut driver, "n", json!(8));
    write(&mut driver, "n", json!("canary"));
    assert_eq!(
        driver.notes(RecordKind::HotStateRefused).len(),
        2,
        "a good value ends the streak"
    );
    assert!(!format!("{:?}{:?}", driver.engine.view(), driver.saved).contains("canary"));
}

#[test]
fn values_do_not_outlive_the_process() {
    let mut driver = Driver::started(with(vec![field("n", FieldType::Number, None)]));
    write(&mut driver, "n", json!(7));
    driver.restart(1);
    assert!(block(&driver).ends_with("n: (no value yet)"));
}

#[test]
fn a_field_without_a_value_is_filled_before_the_turn_and_again_when_it_is_stale() {
    let mut driver = refreshing();
    assert_eq!((driver.in_flight, driver.running()), (None, vec![1]), "the turn waits");
    assert_eq!(driver.state(), LoopState::Running);
    let intent = driver.lines(RecordKind::ToolIntent)[0];
    assert_eq!(
        (intent.run.to_string(), intent.tool.as_deref()),
        ("t1c0r1".into(), Some("s__n"))
    );
    driver.end(1, done("7"));
    assert_eq!(driver.outcomes(), ["Ok"]);
    assert!(
        driver.in_flight.is_some() && block(&driver).ends_with("\nn: 7 (0s ago)"),
        "{}",
        block(&driver)
    );
    driver.turn();
    assert!(driver.in_flight.is_some(), "a fresh value needs no run");
    driver.pass(seconds(30));
    driver.answer(says("x"));
    driver.pass(seconds(1));
    assert_eq!(driver.running(), [1]);
    assert_eq!(driver.engine.view().counts.tool_calls, 2);
    assert_eq!(driver.engine.view().counts.actions, 0);
}

#[rstest]
#[case(ToolOutcome::Failed { text: "canary".into() }, "its refreshTool failed")]
#[case(ToolOutcome::Unavailable { message: "canary".into() }, "its refreshTool could not be reached")]
#[case(ToolOutcome::Unknown { message: "canary".into() }, "its refreshTool gave no answer")]
#[case(
    done("canary"),
    "the last value was refused: it requires type Number, but the value is a String"
)]
fn a_refresh_that_fails_keeps_the_last_good_value_and_fails_no_turn(#[case] outcome: ToolOutcome, #[case] words: &str) {
    let mut driver = refreshing();
    driver.end(1, done("7"));
    driver.pass(seconds(60));
    driver.answer(says("x"));
    driver.pass(seconds(1));
    driver.end(1, outcome);
    assert!(driver.in_flight.is_some());
    let wanted = format!("n: 7 (stale: 1m ago; {words})");
    assert!(block(&driver).ends_with(&wanted), "{}", block(&driver));
    assert_eq!(driver.engine.view().consecutive_errors, 0);
    driver.turn();
    assert_eq!(driver.running(), [1], "it is tried again before the next turn");
    assert!(!format!("{:?}{:?}", driver.journal, driver.saved).contains("canary"));
}

#[rstest]
#[case("s__act", "its refreshTool is not run, since its effect is not Read")]
#[case("s__none", "its refreshTool is unknown")]
#[case("s__needs", "its refreshTool cannot be called without arguments")]
#[case("s__asks", "its refreshTool is not run, since its calls need an approval")]
#[case("s__if", "its refreshTool is not run, since its calls need an approval")]
fn a_forbidden_refresh_is_reported_and_not_run(#[case] name: &str, #[case] words: &str) {
    let mut driver = Driver::fresh(with(vec![field("n", FieldType::Number, Some(name))]));
    let mut needs = tool("s__needs", ToolEffect::Read);
    needs.parameters = json!({"type": "object", "required": ["path"]});
    let asks = ToolSpec {
        needs_approval: true,
        ..tool("s__asks", ToolEffect::Read)
    };
    let asks_if = ToolSpec {
        approval_condition: Some(super::super::tool::ApprovalCondition::new("it is empty", |arguments| {
            *arguments == json!({})
        })),
        ..tool("s__if", ToolEffect::Read)
    };
    driver.offer(vec![tool("s__act", ToolEffect::Write), needs, asks, asks_if]);
    driver.start(1);
    assert!(driver.sent.is_empty() && driver.in_flight.is_some());
    assert!(
        block(&driver).ends_with(&format!("n: (no value yet) ({words})")),
        "{}",
        block(&driver)
    );
}

#[test]
fn a_tool_may_be_named_as_its_server_has_it_where_only_one_does() {
    for (others, runs) in [(vec![], 1), (vec![tool("t__n", ToolEffect::Read)], 0)] {
        let mut driver = Driver::fresh(with(vec![field("n", FieldType::Number, Some("n"))]));
        driver.offer([vec![tool("s__n", ToolEffect::Read)], others].concat());
        driver.start(1);
        assert_eq!(driver.sent.len(), runs);
    }
}

#[rstest]
#[case(FieldType::Number, "7", "7")]
#[case(FieldType::Number, r#"{"result": 7}"#, "7")]
#[case(FieldType::Object, r#"{"result": 7}"#, r#"{"result":7}"#)]
#[case(FieldType::Array, r#"{"result": ["a"]}"#, r#"["a"]"#)]
#[case(FieldType::String, "rain", r#""rain""#)]
#[case(FieldType::String, r#"{"result": "rain"}"#, r#""rain""#)]
#[case(FieldType::String, "42", r#""42""#)]
#[case(FieldType::Boolean, "true", "true")]
fn the_result_of_a_tool_becomes_a_value_of_the_fields_type(
    #[case] kind: FieldType,
    #[case] answer: &str,
    #[case] value: &str,
) {
    let mut driver = Driver::fresh(with(vec![field("n", kind, Some("n"))]));
    driver.offer(vec![tool("s__n", ToolEffect::Read)]);
    driver.start(1);
    driver.end(1, done(answer));
    assert!(
        block(&driver).ends_with(&format!("\nn: {value} (0s ago)")),
        "{}",
        block(&driver)
    );
}

#[test]
fn four_fields_are_refreshed_at_a_time() {
    let names = ["a", "b", "c", "d", "e", "f"];
    let mut driver = Driver::fresh(with(
        names.map(|name| field(name, FieldType::Number, Some("n"))).to_vec(),
    ));
    driver.offer(vec![tool("s__n", ToolEffect::Read)]);
    driver.start(1);
    assert_eq!(driver.running(), [1, 2, 3, 4]);
    driver.end(2, done("1"));
    assert_eq!(driver.running(), [1, 3, 4, 5]);
    for index in [1, 3, 4, 5, 6] {
        assert_eq!(driver.in_flight, None);
        driver.end(index, done("1"));
    }
    assert!(driver.in_flight.is_some());
    assert_eq!(driver.sent.len(), 6);
}

#[test]
fn a_crash_during_a_refresh_repeats_open_runs_and_those_whose_values_are_lost() {
    let names = ["a", "b"];
    let mut driver = Driver::fresh(with(
        names.map(|name| field(name, FieldType::Number, Some("n"))).to_vec(),
    ));
    driver.offer(vec![tool("s__n", ToolEffect::Read)]);
    driver.start(1);
    driver.end(1, done("1"));
    driver.restart(1);
    let sent: Vec<String> = driver.sent.iter().map(|run| run.id.to_string()).collect();
    assert_eq!(sent, ["t1c0r1", "t1c0r2", "t1c0r2", "t1c0r3"]);
    assert_eq!(driver.in_flight, None);
    driver.end(2, done("2"));
    driver.end(3, done("3"));
    assert!(
        block(&driver).ends_with("a: 3 (0s ago)\nb: 2 (0s ago)"),
        "{}",
        block(&driver)
    );
    assert_eq!(driver.engine.view().counts.tool_calls, 3, "a repeat counts once");
}

#[test]
fn a_stop_cuts_a_refresh_and_the_next_pod_begins_the_turn_with_it() {
    let mut driver = refreshing();
    driver.feed(EngineInput::Stop {
        cause: StopCause::Drain,
    });
    assert!(driver.stopped && driver.cut.len() == 1);
    driver.restart(2);
    assert_eq!(driver.running(), [1]);
    driver.end(1, done("7"));
    assert!(driver.in_flight.is_some());
}

#[test]
fn a_turn_that_had_to_wait_after_its_refresh_refreshes_again_what_is_stale() {
    let mut driver = refreshing();
    driver.feed(EngineInput::LinkLost);
    driver.end(1, done("7"));
    assert_eq!(driver.in_flight, None);
    driver.pass(seconds(31));
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.running(), [2], "a new run, under its own id");
    driver.end(2, done("8"));
    assert!(block(&driver).ends_with("\nn: 8 (0s ago)"));
}

#[test]
fn the_block_counts_in_the_prompt() {
    let fields = || vec![field("n", FieldType::String, None)];
    let small = |fields| {
        let mut driver = Driver::started(EngineSettings {
            context_tokens: 4_000,
            max_output_tokens: 100,
            ..with(fields)
        });
        write(&mut driver, "n", json!("x".repeat(8_000)));
        for _ in 0..2 {
            driver.answer(says(&"y".repeat(1_600)));
            driver.pass(seconds(1));
        }
        driver.notes(RecordKind::CallStarted).contains(&"Compaction")
    };
    assert_eq!((small(vec![]), small(fields())), (false, true));
}

#[test]
fn a_tool_whose_definition_is_withheld_fills_no_field() {
    let listed = |hash: &str| ToolSpec {
        definition: Some(DeclaredDefinition {
            hash: hash.into(),
            parts: super::super::tool::DefinitionParts::default(),
            server: "s".into(),
            holds_changes: true,
            holds_new: true,
        }),
        ..tool("s__n", ToolEffect::Read)
    };
    let mut driver = Driver::fresh(with(vec![field("n", FieldType::Number, Some("s__n"))]));
    driver.offer(vec![listed("one")]);
    driver.start(1);
    assert_eq!(driver.sent[0].definition, "one");
    driver.end(1, done("7"));
    driver.offer(vec![listed("two")]);
    driver.pass(seconds(90));
    driver.turn();
    assert_eq!(driver.sent.len(), 1);
    assert!(
        block(&driver).contains("its definition has changed"),
        "{}",
        block(&driver)
    );
}
