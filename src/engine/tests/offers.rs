//! What the model is offered: servers that have not answered yet, lists that change during a turn, events that can wake
//! it.

use pretty_assertions::assert_eq;
use rstest::rstest;

use serde_json::json;

use super::work::{tool as of_effect, wants};
use super::*;
use crate::modes::continuous::yield_tool;
use crate::resources::ResourceLimit;

fn tool(name: &str) -> ToolSpec {
    of_effect(name, ToolEffect::Write)
}

fn offers(tools: Vec<ToolSpec>, silent: &[&str]) -> EngineInput {
    EngineInput::ToolsChanged {
        tools,
        silent: silent.iter().map(|name| (*name).to_owned()).collect(),
    }
}

fn events(names: &[&str]) -> EngineInput {
    EngineInput::WakeEventsChanged {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
    }
}

/// A loop whose server `mail` has not answered yet.
fn without_mail() -> Driver {
    let mut driver = Driver::fresh(settings());
    driver.feed(offers(Vec::new(), &["mail"]));
    driver.start(1);
    driver
}

#[test]
fn the_prompt_names_servers_that_have_not_answered_until_they_have() {
    let mut driver = without_mail();
    assert_eq!(driver.offered, ["yield"]);
    assert!(
        driver
            .block
            .as_ref()
            .unwrap()
            .contains("have not answered yet, so that their tools are missing for now: mail.")
    );
    driver.feed(offers(vec![tool("mail__send")], &[]));
    driver.turn();
    assert_eq!(driver.offered, ["yield", "mail__send"]);
    assert_eq!(driver.block, None);
}

#[test]
fn a_call_of_a_server_that_has_not_answered_is_refused_with_that_reason() {
    let mut driver = without_mail();
    driver.answer(wants(&["mail__send"]));
    assert!(
        driver.result().contains("the tool server mail has not answered yet"),
        "{}",
        driver.result()
    );
    driver.answer(wants(&["maill__send"]));
    assert!(
        driver.result().contains("unknown tool maill__send"),
        "{}",
        driver.result()
    );
}

#[test]
fn a_loop_does_not_shut_down_while_its_tools_are_missing() {
    let mut driver = without_mail();
    driver.answer(calls("yield", r#"{"mode": "shutdown"}"#));
    assert!(
        driver.result().contains("these servers have not answered yet: mail"),
        "{}",
        driver.result()
    );
    assert_eq!(driver.state(), LoopState::Running);
    driver.feed(offers(Vec::new(), &[]));
    driver.answer(calls("yield", r#"{"mode": "shutdown"}"#));
    assert_eq!(driver.state(), LoopState::Stopped);
}

#[test]
fn the_list_of_tools_stays_as_it_is_within_a_turn() {
    let mut driver = Driver::fresh(settings());
    driver.feed(offers(vec![tool("files__read")], &["mail"]));
    driver.start(1);
    driver.feed(offers(vec![tool("files__read"), tool("files__copy")], &["mail"]));
    driver.answer(wants(&["files__nothing"]));
    assert_eq!(
        driver.offered,
        ["yield", "files__read"],
        "a change waits for the next turn"
    );
    // A server that answers for the first time joins at once, since its tools were missing.
    driver.feed(offers(vec![tool("files__read"), tool("mail__send")], &[]));
    driver.answer(wants(&["files__nothing"]));
    assert_eq!(driver.offered, ["yield", "files__read", "mail__send"]);
    driver.feed(offers(vec![tool("mail__send")], &[]));
    driver.turn();
    assert_eq!(driver.offered, ["yield", "mail__send"]);
}

#[rstest]
#[case(&["sensor/prices"], true)]
#[case(&["signal/prices/spike", "notification"], true)]
#[case(&["prices"], true)]
#[case(&["spike"], true)]
#[case(&["sensor/price"], false)]
#[case(&["signal/prices/spikes"], false)]
#[case(&["chat"], false)]
fn only_events_that_there_are_can_be_waited_for(#[case] wanted: &[&str], #[case] good: bool) {
    let mut driver = Driver::started(settings());
    driver.feed(events(&["sensor/prices", "signal/prices/spike"]));
    driver.answer(calls(
        "yield",
        &json!({"sleep": 60, "wake_early_if": wanted}).to_string(),
    ));
    assert_eq!(driver.state() == LoopState::Sleeping, good);
    if !good {
        let result = driver.result();
        assert!(
            result.contains("events that can wake you: sensor/prices, signal/prices/spike, notification"),
            "{result}"
        );
    }
}

#[test]
fn yield_lists_the_events_that_can_wake_the_loop_and_rate_limits_only_where_there_are_some() {
    let words = |limits: &[ResourceLimit], events: Option<&[String]>| {
        let tool = yield_tool::tool(limits, events);
        tool.parameters["properties"]["wake_early_if"]["description"].to_string()
    };
    let unknown = words(&[], None);
    assert!(
        unknown.contains("sensor/<name>") && !unknown.contains("resource/"),
        "{unknown}"
    );
    let names = ["sensor/prices".to_owned(), "signal/prices/spike".to_owned()];
    let known = words(&[], Some(&names));
    assert!(
        known.contains("sensor/prices, signal/prices/spike, notification"),
        "{known}"
    );
    assert!(!known.contains("<name>"), "{known}");
    let limited = words(&[ResourceLimit::of_actions_per_minute(3)], Some(&[]));
    assert!(
        limited.contains("resource/Actions/<n>") && !limited.contains("LLMCalls"),
        "{limited}"
    );
}

#[test]
fn yield_lists_64_events_and_the_number_of_the_others() {
    let names = |count: usize| {
        (1..=count)
            .map(|number| format!("sensor/s{number}"))
            .collect::<Vec<_>>()
    };
    for (count, more) in [
        (63, None),
        (64, None),
        (65, Some("1 more of the forms")),
        (70, Some("6 more of the forms")),
    ] {
        let names = names(count);
        let tool = yield_tool::tool(&[], Some(&names));
        let words = tool.parameters["properties"]["wake_early_if"]["description"].to_string();
        assert_eq!(words.matches("sensor/s").count(), count.min(64));
        match more {
            Some(more) => assert!(words.contains(more), "{words}"),
            None => assert!(!words.contains("more of the forms"), "{words}"),
        }
        let mut driver = Driver::started(settings());
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        driver.feed(events(&all));
        driver.answer(calls(
            "yield",
            &json!({"sleep": 60, "wake_early_if": ["sensor/none"]}).to_string(),
        ));
        let last = format!("sensor/s{count}");
        assert_eq!(driver.result().contains(&last), count <= 64, "{}", driver.result());
        let known = json!({"sleep": 60, "wake_early_if": [last]}).to_string();
        driver.answer(calls("yield", &known));
        assert_eq!(
            driver.state(),
            LoopState::Sleeping,
            "one that is not listed can be waited for"
        );
    }
}
