//! The model sees what its limits have left, at the end of each prompt and nowhere else.

use super::super::context::budget_health::BudgetHealth;
use super::*;
use agentloop_api::agent::LimitedResource;

fn team(tenths: u8, until: Option<&str>) -> BudgetHealth {
    BudgetHealth {
        name: "AgentBudget team".into(),
        limit: "9000 tokens".into(),
        tenths,
        until: until.map(|until| until.parse().unwrap()),
    }
}

fn hear(driver: &mut Driver, health: Vec<BudgetHealth>) {
    let budget = BudgetState {
        health,
        ..driver.budget.clone()
    };
    driver.feed(EngineInput::BudgetChanged { budget });
}

fn block(driver: &Driver) -> &str {
    driver.block.as_deref().unwrap_or_default()
}

#[test]
fn a_loop_without_limits_is_shown_none() {
    let mut driver = Driver::started(settings());
    driver.turn();
    assert_eq!(driver.block, None);
}

#[test]
fn the_remaining_budget_is_in_the_next_call_and_never_in_the_transcript() {
    let mut driver = Driver::started(settings());
    hear(&mut driver, vec![team(4, None)]);
    driver.turn();
    let expected = "[From the runtime, not from a person: how things stand. It is replaced with each call.]\n\
                    What is left of your limits; a call that finds too little waits:\n\
                    - AgentBudget team: at least 40% of 9000 tokens";
    assert_eq!(block(&driver), expected);
    hear(&mut driver, vec![team(0, None)]);
    driver.turn();
    assert!(block(&driver).contains("AgentBudget team: less than 10% of 9000 tokens\nSome of it is nearly used up"));
    hear(&mut driver, vec![team(1, None)]);
    driver.turn();
    assert!(!block(&driver).contains("nearly used up"), "at 10 %");
    hear(&mut driver, vec![team(10, None)]);
    driver.turn();
    assert!(block(&driver).ends_with("AgentBudget team: all of 9000 tokens"));
    hear(&mut driver, Vec::new());
    driver.turn();
    assert_eq!(driver.block, None);
    let prompt = serde_json::to_string(&driver.prompt).unwrap();
    assert!(!prompt.contains("AgentBudget"), "{prompt}");
    let saved = serde_json::to_string(&driver.saved).unwrap();
    assert!(!saved.contains("AgentBudget"), "{saved}");
}

#[test]
fn the_rest_of_a_window_is_not_shown_after_its_end() {
    let mut driver = Driver::started(settings());
    hear(&mut driver, vec![team(1, Some("2026-01-01T00:00:30Z")), team(5, None)]);
    driver.turn();
    assert_eq!(block(&driver).matches("AgentBudget").count(), 2);
    driver.answer(calls("yield", r#"{"sleep": 60}"#));
    driver.pass(seconds(60));
    assert_eq!(block(&driver).matches("AgentBudget").count(), 1);
    assert!(block(&driver).contains("at least 50%"), "{}", block(&driver));
}

#[test]
fn rate_limits_show_what_is_left_and_recover_with_their_window() {
    let mut driver = Driver::started(EngineSettings {
        rate_limits: vec![rates::limit(LimitedResource::LLMCalls, 4, 60)],
        ..settings()
    });
    let says = |driver: &Driver, left: &str| {
        let line = format!("- guardrails.rateLimits: {left} of 4 LLMCalls in 60 s");
        assert!(block(driver).contains(&line), "{}", block(driver));
        let is_advised = block(driver).contains("do the most important thing now");
        assert_eq!(is_advised, left == "less than 10%", "{}", block(driver));
    };
    says(&driver, "at least 70%");
    driver.turn();
    says(&driver, "at least 50%");
    driver.turn();
    driver.turn();
    says(&driver, "less than 10%");
    driver.answer(calls("yield", r#"{"sleep": 90}"#));
    driver.pass(seconds(90));
    says(&driver, "at least 70%");
}

#[test]
fn the_hot_state_precedes_the_limits() {
    let field = crate::hot_state::FieldSchema {
        name: "balance".into(),
        kind: agentloop_api::hot_state::FieldType::Number,
        ttl: None,
        max_items: None,
        refresh_tool: None,
    };
    let mut driver = Driver::started(EngineSettings {
        hot_state: vec![field],
        ..settings()
    });
    hear(&mut driver, vec![team(4, None)]);
    driver.turn();
    let lines: Vec<&str> = block(&driver).lines().skip(1).collect();
    assert_eq!(
        lines,
        [
            "Hot state:",
            "balance: (no value yet)",
            "",
            "What is left of your limits; a call that finds too little waits:",
            "- AgentBudget team: at least 40% of 9000 tokens",
        ]
    );
}
