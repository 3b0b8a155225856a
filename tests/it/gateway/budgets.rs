//! No call without room: what a gateway reserves, spends, says and gives back, against real accounts.

use std::collections::BTreeMap;
use std::time::Duration;

use agentloop::api::amount::{Amount, AmountKind, LimitAmounts};
use agentloop::api::budget::CalendarPeriod;
use agentloop::api::failure::{CallFailure, FailureKind};
use agentloop::api::price::ModelPrice;
use agentloop::api::status::LoopState;
use agentloop::ledger::account::{LeaseStatement, LedgerTerms};
use agentloop::ledger::window::WindowRule;
use agentloop::link::messages::{Directives, LoopReport, RefusalCode};
use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use rstest::rstest;
use serde_json::json;

use super::harness::{GatewayHarness, PROMPT, failure, streamed, url, whole, write};
use super::ledger::Ledger;
use super::link::until_event;
use super::provider::{ANSWER, STREAM_HEAD, STREAM_TAIL, ScriptedResponse, Step, send};
use super::scripted::scripted;

/// 15 tokens, 100 of input, 5 of output, and with the price below 15 + 10 + 9 = 34 micro-USD.
const SCRIPT: &str = "turns: [{text: one, usage: {inputTokens: 10, outputTokens: 5, cacheReadTokens: 90}}]";
const CALL: Amount = Amount {
    tokens: 15,
    input_tokens: 100,
    output_tokens: 5,
    calls: 1,
    cost: 34,
};
/// What [`ANSWER`] bills.
const BILL: Amount = Amount {
    tokens: 30,
    input_tokens: 100,
    output_tokens: 20,
    calls: 1,
    cost: 0,
};

pub fn limit(kind: AmountKind, limit: i64) -> LimitAmounts {
    let of = |other| (kind == other).then_some(limit);
    LimitAmounts {
        tokens: of(AmountKind::Tokens),
        input_tokens: of(AmountKind::InputTokens),
        output_tokens: of(AmountKind::OutputTokens),
        calls: of(AmountKind::Calls),
        cost: of(AmountKind::Cost),
    }
}

pub fn price() -> ModelPrice {
    ModelPrice {
        input_per_million: "1.00".into(),
        output_per_million: "3.00".into(),
        cache_read_per_million: Some("0.10".into()),
        ..ModelPrice::default()
    }
}

/// The price above, of this model.
pub fn prices(model: &str) -> BTreeMap<String, ModelPrice> {
    BTreeMap::from([(model.to_owned(), price())])
}

async fn refused(harness: &GatewayHarness, id: &str) -> CallFailure {
    let failure = failure(harness.call(id, &whole()).await).await;
    assert!(!failure.message.contains(PROMPT), "{}", failure.message);
    failure
}

async fn answered(harness: &GatewayHarness, id: &str) {
    let (status, body) = harness.ask(id).await;
    assert_eq!(status, StatusCode::OK, "{body}");
}

async fn say(harness: &GatewayHarness, state: LoopState) {
    let report = LoopReport {
        state,
        ..LoopReport::default()
    };
    harness
        .worker
        .put(url("/v1/report"))
        .json(&report)
        .send()
        .await
        .unwrap();
}

/// Waits until the gateway has received what the controller sends.
pub async fn await_directives(harness: &GatewayHarness) {
    let said = harness.controller.said();
    until_event(harness, |event| event.directives == said).await;
}

pub async fn limited(harness: &GatewayHarness, id: &str, limits: LimitAmounts) {
    harness.controller.limit(id, limits);
    await_directives(harness).await;
}

/// Waits until all is given back, and gives what was used.
async fn settled(harness: &GatewayHarness, id: &str) -> Amount {
    say(harness, LoopState::Sleeping).await;
    let free = |ledger: &Ledger| ledger.reserved(id).is_zero();
    harness.controller.until_ledger("nothing reserved", free).await;
    harness.controller.ledger(|ledger| ledger.used(id))
}

#[rstest]
#[case(AmountKind::Tokens)]
#[case(AmountKind::InputTokens)]
#[case(AmountKind::OutputTokens)]
#[case(AmountKind::Calls)]
#[case(AmountKind::Cost)]
#[tokio::test]
async fn a_limit_of_each_kind_refuses_the_call_that_does_not_fit_and_none_before(#[case] kind: AmountKind) {
    let harness = scripted(SCRIPT).await;
    harness.controller.ledger(|ledger| ledger.terms.prices = prices("m"));
    await_directives(&harness).await;
    let one = CALL.get(kind);
    limited(&harness, "team", limit(kind, 3 * one)).await;
    for turn in 1..=3 {
        answered(&harness, &format!("t{turn}c1a1")).await;
    }
    let failure = refused(&harness, "t4c1a1").await;
    assert_eq!(failure.kind, FailureKind::BudgetExhausted);
    assert!(failure.message.contains("AgentBudget team"), "{}", failure.message);
    assert!(failure.message.contains("spec.topUps"), "{}", failure.message);
    // One less than it needs is too little, and what it needs is enough; the same id is sent then.
    limited(&harness, "team", limit(kind, 4 * one - 1)).await;
    assert_eq!(refused(&harness, "t4c1a1").await.kind, FailureKind::BudgetExhausted);
    limited(&harness, "team", limit(kind, 4 * one)).await;
    answered(&harness, "t4c1a1").await;
    assert_eq!(settled(&harness, "team").await.get(kind), 4 * one);
    let report = harness.until_counted(4, 0).await;
    assert_eq!(report.usage.cost, 4 * CALL.cost);
    assert_eq!(report.budget.refused_calls, 2);
}

#[tokio::test]
async fn a_call_that_can_never_fit_is_refused_as_such() {
    let harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::InputTokens, 99)).await;
    let failure = refused(&harness, "t1c1a1").await;
    assert_eq!(
        (failure.kind, failure.resumes_at),
        (FailureKind::CallExceedsLimit, None)
    );
    limited(&harness, "team", limit(AmountKind::InputTokens, 100)).await;
    answered(&harness, "t1c1a1").await;
}

#[tokio::test]
async fn a_call_needs_room_in_all_accounts_and_counts_in_all() {
    let harness = scripted(SCRIPT).await;
    limited(&harness, "wide", limit(AmountKind::Tokens, 1_000_000)).await;
    limited(&harness, "tight", limit(AmountKind::Calls, 2)).await;
    answered(&harness, "t1c1a1").await;
    answered(&harness, "t2c1a1").await;
    let failure = refused(&harness, "t3c1a1").await;
    assert!(failure.message.contains("AgentBudget tight"), "{}", failure.message);
    assert_eq!(settled(&harness, "tight").await.calls, 2);
    assert_eq!(settled(&harness, "wide").await.tokens, 30);
}

#[tokio::test]
async fn an_exhausted_share_per_agent_does_not_block_other_agents() {
    let harness = scripted(SCRIPT).await;
    let terms = |per_agent| LedgerTerms {
        limits: limit(AmountKind::Tokens, 1_000),
        per_agent: limit(AmountKind::Calls, per_agent),
        window: WindowRule::Lifetime,
    };
    harness.controller.ledger(|ledger| ledger.account("team", terms(2)));
    await_directives(&harness).await;
    for turn in 1..=2 {
        answered(&harness, &format!("t{turn}c1a1")).await;
    }
    let failure = refused(&harness, "t3c1a1").await;
    assert_eq!(failure.kind, FailureKind::BudgetExhausted);
    for part in [
        "the limit per Agent (perAgent) of AgentBudget team",
        "spec.perAgent.calls",
    ] {
        assert!(failure.message.contains(part), "{}", failure.message);
    }
    let another = Amount {
        calls: 2,
        ..Amount::ZERO
    };
    assert_eq!(
        harness.controller.ledger(|ledger| ledger.other("team", another)),
        Ok(())
    );
    harness.controller.ledger(|ledger| ledger.account("team", terms(3)));
    await_directives(&harness).await;
    answered(&harness, "t3c1a1").await;
    assert_eq!(refused(&harness, "t4c1a1").await.kind, FailureKind::BudgetExhausted);
}

#[tokio::test]
async fn a_block_by_the_controller_refuses_new_calls_and_keeps_the_call_in_flight() {
    let harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::Calls, 10)).await;
    harness.provider.will(ScriptedResponse::stream(vec![
        Step::Hold,
        send(STREAM_HEAD),
        send(STREAM_TAIL),
    ]));
    let call = harness.call_aside("t1c1a1", &streamed());
    harness.provider.until_asked(1).await;
    let why = CallFailure {
        kind: FailureKind::LoopDetected,
        message: "the same request 20 times".into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    };
    harness
        .controller
        .ledger(|ledger| ledger.terms.blocked = Some(why.clone()));
    await_directives(&harness).await;
    assert_eq!(refused(&harness, "t2c1a1").await, why);
    harness.provider.release();
    assert_eq!(
        call.await.unwrap(),
        (StatusCode::OK, format!("{STREAM_HEAD}{STREAM_TAIL}"))
    );
    assert_eq!(harness.provider.seen().len(), 1);
    harness.controller.ledger(|ledger| ledger.terms.blocked = None);
    await_directives(&harness).await;
    answered(&harness, "t2c1a1").await;
    assert_eq!(settled(&harness, "team").await.calls, 2);
    assert_eq!(harness.until_counted(2, 0).await.budget.refused_calls, 1);
}

#[tokio::test]
async fn money_without_a_price_makes_no_call() {
    let harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::Cost, 1_000_000)).await;
    let failure = refused(&harness, "t1c1a1").await;
    assert_eq!(failure.kind, FailureKind::BudgetUnavailable);
    for part in ["model m", "`prices`", "spec.model.price"] {
        assert!(failure.message.contains(part), "{}", failure.message);
    }
    harness.controller.ledger(|ledger| ledger.terms.prices = prices("m"));
    await_directives(&harness).await;
    answered(&harness, "t1c1a1").await;
}

#[tokio::test]
async fn a_call_is_charged_at_the_price_of_its_own_model_whatever_the_spec_names_by_now() {
    let harness = scripted(SCRIPT).await;
    let cheap = ModelPrice {
        input_per_million: "0".into(),
        output_per_million: "0".into(),
        ..ModelPrice::default()
    };
    // The spec was edited: the pod still calls the old model.
    let both = prices("m").into_iter().chain([("nano".to_owned(), cheap.clone())]);
    harness.controller.ledger(|ledger| ledger.terms.prices = both.collect());
    await_directives(&harness).await;
    limited(&harness, "team", limit(AmountKind::Cost, CALL.cost)).await;
    answered(&harness, "t1c1a1").await;
    assert_eq!(settled(&harness, "team").await.cost, CALL.cost);
    let usage = harness.until_counted(1, 0).await.usage;
    let costs: Vec<(&str, i64)> = usage.by_model.iter().map(|used| (&*used.model, used.cost)).collect();
    assert_eq!(costs, [("m", CALL.cost)]);
    // A price of another model is none.
    let other = BTreeMap::from([("nano".to_owned(), cheap)]);
    harness.controller.ledger(|ledger| ledger.terms.prices = other);
    await_directives(&harness).await;
    let failure = refused(&harness, "t2c1a1").await;
    assert_eq!(failure.kind, FailureKind::BudgetUnavailable);
}

#[tokio::test]
async fn a_gateway_reports_its_models_and_their_prices_from_its_spec() {
    let mut harness = GatewayHarness::new().await;
    harness.set(&json!({"price": price()}));
    harness.light = json!({"api": "Scripted", "name": "small"});
    harness.start().await;
    let said = harness.controller.models();
    let said: Vec<(&str, bool)> = said.iter().map(|model| (&*model.name, model.price.is_some())).collect();
    assert_eq!(said, [("m", true), ("small", false)]);
}

#[tokio::test]
async fn no_call_is_made_until_the_controller_has_sent_the_limits() {
    let harness = GatewayHarness::started().await;
    harness.controller.undecide();
    await_directives(&harness).await;
    let failure = refused(&harness, "t1c1a1").await;
    assert_eq!(failure.kind, FailureKind::BudgetUnavailable);
    assert!(harness.provider.seen().is_empty());
    let call = harness.call_aside("t1c1a1", &whole());
    limited(&harness, "team", limit(AmountKind::Calls, 1)).await;
    assert_eq!(call.await.unwrap().1, ANSWER);
}

#[tokio::test]
async fn leases_are_kept_while_the_limits_are_unknown() {
    let harness = GatewayHarness::started().await;
    let ten = limit(AmountKind::Calls, 10);
    limited(&harness, "team", ten).await;
    assert_eq!(harness.ask("t1c1a1").await.1, ANSWER);
    harness.controller.undecide();
    await_directives(&harness).await;
    assert_eq!(refused(&harness, "t2c1a1").await.kind, FailureKind::BudgetUnavailable);
    limited(&harness, "team", ten).await;
    assert_eq!(harness.ask("t2c1a1").await.1, ANSWER);
    let stated = harness.controller.ledger(|ledger| {
        let accounts = ledger.requests.iter().flat_map(|request| request.accounts.clone());
        accounts.flat_map(|account| account.statements).collect::<Vec<_>>()
    });
    assert!(
        stated.iter().all(|statement| statement.lease == 1 && !statement.closed),
        "{stated:?}"
    );
    assert_eq!(settled(&harness, "team").await.calls, 2);
    let stated = harness.controller.ledger(|ledger| {
        let accounts = ledger.requests.iter().flat_map(|request| request.accounts.clone());
        accounts
            .flat_map(|account| account.statements)
            .any(|statement| statement.closed)
    });
    assert!(stated, "a loop that rests closes it");
}

#[tokio::test]
async fn an_answer_is_clipped_to_what_is_left_and_not_below_the_floor() {
    let harness = GatewayHarness::started().await;
    harness.controller.ledger(|ledger| ledger.terms.min_output_tokens = 30);
    limited(&harness, "team", limit(AmountKind::OutputTokens, 29)).await;
    assert_eq!(refused(&harness, "t1c1a1").await.kind, FailureKind::CallExceedsLimit);
    limited(&harness, "team", limit(AmountKind::OutputTokens, 30)).await;
    // What the worker asks for does not matter.
    let mut body = whole();
    body["max_tokens"] = json!(100_000);
    assert_eq!(harness.call("t1c1a1", &body).await.status(), StatusCode::OK);
    let seen = &harness.provider.seen()[0].body;
    assert!(seen.contains("\"max_tokens\":30"), "{seen}");
    assert_eq!(settled(&harness, "team").await, BILL);
    // 10 are left, whatever the id.
    for id in ["t2c1a1", "t1c1a2", "t9c9a9"] {
        assert_eq!(refused(&harness, id).await.kind, FailureKind::BudgetExhausted);
    }
    assert_eq!(harness.provider.seen().len(), 1);
}

#[tokio::test]
async fn the_next_request_reserves_the_bill_before_and_what_is_new() {
    let harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::InputTokens, 1_000_000)).await;
    answered(&harness, "t1c1a1").await;
    assert_eq!(settled(&harness, "team").await.input_tokens, 100);
    // Its bytes and the hidden text that a server may add would be more than 1,000.
    limited(&harness, "team", limit(AmountKind::InputTokens, 100 + 164)).await;
    answered(&harness, "t2c1a1").await;
    assert_eq!(settled(&harness, "team").await.input_tokens, 200);
}

#[tokio::test]
async fn a_bill_above_what_the_one_before_measured_costs_a_warning_and_not_the_agent() {
    let harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::InputTokens, 1_000_000)).await;
    answered(&harness, "t1c1a1").await;
    // The name stands for a model with another tokenizer now: more than before, and less than the bytes.
    let more = ANSWER.replace("\"prompt_tokens\":100", "\"prompt_tokens\":900");
    harness.provider.will(ScriptedResponse::json(
        200,
        &more.replace("\"total_tokens\":120", "\"total_tokens\":920"),
    ));
    answered(&harness, "t2c1a1").await;
    assert_eq!(settled(&harness, "team").await.input_tokens, 1_000);
    assert!(harness.log().contains("the last bill does not predict this one"));
    // By its bytes a request needs more than 1,000 from now on.
    limited(&harness, "team", limit(AmountKind::InputTokens, 2_000)).await;
    assert_eq!(refused(&harness, "t3c1a1").await.kind, FailureKind::BudgetExhausted);
    limited(&harness, "team", limit(AmountKind::InputTokens, 1_000_000)).await;
    answered(&harness, "t3c1a1").await;
    assert_eq!(harness.until_counted(3, 0).await.usage.estimated_calls, 0);
}

#[tokio::test]
async fn usage_of_zeros_beside_content_costs_the_reservation() {
    let harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::OutputTokens, 1_000)).await;
    let stub = r#"{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}"#;
    harness.provider.will(ScriptedResponse::json(200, stub));
    answered(&harness, "t1c1a1").await;
    assert_eq!(settled(&harness, "team").await.output_tokens, 77);
    assert_eq!(harness.until_counted(1, 1).await.usage.estimated_calls, 1);
}

#[tokio::test]
async fn a_request_larger_than_the_context_requests_no_lease() {
    let harness = GatewayHarness::started_with(json!({"contextTokens": 1_000})).await;
    limited(&harness, "team", limit(AmountKind::InputTokens, 1_000_000)).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(100_000)}]});
    let failure = failure(harness.call("t1c1a1", &body).await).await;
    assert_eq!(failure.kind, FailureKind::ContextExceeded);
    assert!(
        failure.message.contains("spec.model.contextTokens"),
        "{}",
        failure.message
    );
    assert!(harness.provider.seen().is_empty());
    assert!(harness.controller.ledger(|ledger| ledger.requests.is_empty()));
}

#[tokio::test]
async fn killed_between_reservation_and_settlement_all_that_was_reserved_is_spent() {
    let mut harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::OutputTokens, 1_000)).await;
    harness.provider.will(ScriptedResponse::stream(vec![Step::Hold]));
    let call = harness.call_aside("t1c1a1", &whole());
    harness.provider.until_asked(1).await;
    harness.kill();
    assert!(call.await.is_err());
    harness.start().await;
    let report = harness.until_counted(1, 1).await;
    assert_eq!(report.usage.estimated_calls, 1);
    assert_eq!(settled(&harness, "team").await.output_tokens, 77);
    answered(&harness, "t1c1a2").await;
    assert_eq!(settled(&harness, "team").await.output_tokens, 97);
}

#[tokio::test]
async fn a_cut_call_counts_as_reserved() {
    let harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::OutputTokens, 1_000)).await;
    harness.provider.will(ScriptedResponse::stream(vec![Step::Hold]));
    let call = harness.call_aside("t1c1a1", &whole());
    harness.provider.until_asked(1).await;
    harness.errand("t1c1a1", "cancel").await;
    call.await.unwrap();
    let report = harness.until_counted(1, 1).await;
    assert_eq!(report.usage.estimated_calls, 1);
    assert_eq!(settled(&harness, "team").await.output_tokens, 77);
}

#[tokio::test]
async fn a_call_that_was_refused_with_an_error_costs_one_call_and_no_tokens() {
    let harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::OutputTokens, 1_000)).await;
    let overloaded = ScriptedResponse::json(529, r#"{"type":"error","error":{"type":"overloaded_error"}}"#);
    harness.provider.will(overloaded);
    assert_eq!(refused(&harness, "t1c1a1").await.kind, FailureKind::Unreachable);
    let used = settled(&harness, "team").await;
    assert_eq!((used.calls, used.tokens, used.output_tokens), (1, 0, 0));
}

#[tokio::test]
async fn five_ambiguous_errors_cost_five_reservations() {
    let harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::OutputTokens, 1_000)).await;
    for attempt in 1..=5 {
        harness.provider.will(ScriptedResponse::json(504, "<html>"));
        let failure = refused(&harness, &format!("t1c1a{attempt}")).await;
        assert_eq!(failure.kind, FailureKind::Unreachable);
    }
    let used = settled(&harness, "team").await;
    assert_eq!((used.calls, used.output_tokens), (5, 5 * 77));
    assert_eq!(harness.until_counted(5, 5).await.usage.estimated_calls, 5);
}

#[tokio::test]
async fn a_restarted_gateway_keeps_its_lease_and_spends_exactly() {
    let mut harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::Tokens, 100_000)).await;
    for turn in 1..=5 {
        answered(&harness, &format!("t{turn}c1a1")).await;
        harness.kill();
        harness.start().await;
    }
    let leases = harness
        .controller
        .ledger(|ledger| ledger.accounts["team"].holders().count());
    assert_eq!(leases, 1, "one lease for all");
    assert_eq!(settled(&harness, "team").await.tokens, 5 * 15);
}

#[tokio::test]
async fn a_lost_answer_is_requested_again_and_counted_once() {
    let harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::Tokens, 60)).await;
    harness.controller.ledger(|ledger| ledger.lose = 2);
    for turn in 1..=2 {
        answered(&harness, &format!("t{turn}c1a1")).await;
    }
    harness.controller.ledger(|ledger| ledger.lose = 1);
    for turn in 3..=4 {
        answered(&harness, &format!("t{turn}c1a1")).await;
    }
    assert_eq!(refused(&harness, "t5c1a1").await.kind, FailureKind::BudgetExhausted);
    harness.controller.ledger(|ledger| ledger.lose = 1);
    assert_eq!(settled(&harness, "team").await.tokens, 60);
}

#[tokio::test]
async fn a_lease_requested_by_another_gateway_is_returned_at_once() {
    let harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::Tokens, 100)).await;
    answered(&harness, "t1c1a1").await;
    // The gateway holds more than it needs, and the other needs all that is not spent.
    let rest = Amount {
        tokens: 85,
        ..Amount::ZERO
    };
    let got = harness.controller.ledger(|ledger| ledger.other("team", rest));
    assert_eq!(got, Err(()), "it is out");
    let free = |ledger: &Ledger| ledger.reserved("team").is_zero();
    harness.controller.until_ledger("all given back", free).await;
    assert_eq!(harness.controller.ledger(|ledger| ledger.other("team", rest)), Ok(()));
    assert_eq!(refused(&harness, "t2c1a1").await.kind, FailureKind::BudgetExhausted);
}

#[tokio::test]
async fn leases_are_returned_when_the_loop_sleeps_and_no_further_requests_follow() {
    let harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::Tokens, 100_000)).await;
    answered(&harness, "t1c1a1").await;
    assert!(!harness.controller.ledger(|ledger| ledger.reserved("team")).is_zero());
    assert_eq!(settled(&harness, "team").await.tokens, 15);
    // It is said until the leader has forgotten the lease; the next call gets another one.
    answered(&harness, "t2c1a1").await;
    assert_eq!(settled(&harness, "team").await.tokens, 30);
}

#[tokio::test]
async fn leases_are_returned_after_thirty_seconds_without_a_call_and_not_before() {
    let mut harness = GatewayHarness::new().await;
    harness.set(&json!({"api": "Scripted", "baseURL": null, "apiKeySecretRef": null}));
    write(&harness.path("script"), SCRIPT);
    // In this process, so that its time can be moved on.
    let gateway = tokio::spawn(agentloop::gateway::run(
        harness.options(Duration::from_hours(1)),
        std::future::pending(),
    ));
    await_directives(&harness).await;
    limited(&harness, "team", limit(AmountKind::Tokens, 100_000)).await;
    answered(&harness, "t1c1a1").await;
    let pass = async |seconds| {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(seconds)).await;
        tokio::time::resume();
    };
    // What is spent is said long before; it is a sign that the gateway has looked at the clock.
    let said = |ledger: &Ledger| last_statement(ledger).is_some_and(|said| said.spent.tokens == 15);
    // What the machine takes on top must not add up to thirty.
    pass(26).await;
    harness.controller.until_ledger("what is spent", said).await;
    harness.controller.ledger(|ledger| {
        assert!(!ledger.reserved("team").is_zero());
        assert!(!last_statement(ledger).unwrap().closed);
    });
    pass(4).await;
    let free = |ledger: &Ledger| ledger.reserved("team").is_zero();
    harness.controller.until_ledger("all given back", free).await;
    assert_eq!(harness.controller.ledger(|ledger| ledger.used("team").tokens), 15);
    // The next call gets a lease again.
    answered(&harness, "t2c1a1").await;
    gateway.abort();
}

/// What the gateway last said of a lease.
fn last_statement(ledger: &Ledger) -> Option<&LeaseStatement> {
    ledger.requests.last()?.accounts.last()?.statements.last()
}

#[tokio::test]
async fn a_lease_of_one_day_is_not_spent_on_the_next_though_it_has_room() {
    let harness = scripted(SCRIPT).await;
    let day = LedgerTerms {
        limits: limit(AmountKind::Calls, 1_000),
        per_agent: LimitAmounts::default(),
        window: WindowRule::Calendar(CalendarPeriod::Daily, jiff::tz::TimeZone::UTC),
    };
    let at = |ledger: &mut Ledger, time: &str| ledger.at = Some(time.parse().unwrap());
    harness.controller.ledger(|ledger| {
        at(ledger, "2026-03-01T12:00:00Z");
        ledger.account("team", day);
    });
    await_directives(&harness).await;
    answered(&harness, "t1c1a1").await;
    let (lease, room) = harness
        .controller
        .ledger(|ledger| (last_lease(ledger), ledger.reserved("team").calls));
    assert!(room > 1, "{room}");
    // It learns how long its lease is valid each time that it attaches.
    for (time, over) in [("2026-03-01T23:00:00Z", false), ("2026-03-02T00:00:00Z", true)] {
        let before = harness.controller.ledger(|ledger| {
            at(ledger, time);
            ledger.requests.len()
        });
        harness.controller.silence(true);
        harness.controller.silence(false);
        let heard = |ledger: &Ledger| ledger.requests.len() > before && ledger.reserved("team").is_zero() == over;
        harness.controller.until_ledger(time, heard).await;
    }
    assert_eq!(
        harness.controller.ledger(|ledger| ledger.used("team").calls),
        0,
        "a new day"
    );
    answered(&harness, "t2c1a1").await;
    assert_ne!(harness.controller.ledger(|ledger| last_lease(ledger)), lease);
    assert_eq!(settled(&harness, "team").await.calls, 1);
}

/// The newest lease that is held.
fn last_lease(ledger: &Ledger) -> i64 {
    let record = &ledger.requests.last().unwrap().record;
    ledger.accounts["team"].durable_grants(record).last().unwrap().lease
}

#[tokio::test]
async fn leases_are_returned_at_the_end_of_the_pod() {
    let mut harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::Tokens, 100_000)).await;
    answered(&harness, "t1c1a1").await;
    harness.terminate();
    assert!(harness.exited().await.success(), "{}", harness.log());
    harness.controller.ledger(|ledger| {
        assert!(ledger.reserved("team").is_zero());
        assert_eq!(ledger.used("team").tokens, 15);
    });
}

#[tokio::test]
async fn leases_are_returned_at_the_end_of_the_pod_even_while_the_leader_is_starting() {
    let mut harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::Tokens, 100_000)).await;
    answered(&harness, "t1c1a1").await;
    harness.controller.refuse(Some(RefusalCode::NotLeading));
    harness.terminate();
    while !harness.log().contains("failed to return the leases to the leader") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    harness.controller.refuse(None);
    assert!(harness.exited().await.success(), "{}", harness.log());
    assert!(harness.controller.ledger(|ledger| ledger.reserved("team").is_zero()));
}

#[tokio::test]
async fn without_a_leader_a_gateway_spends_what_it_holds_and_then_stops() {
    let harness = scripted(SCRIPT).await;
    limited(&harness, "team", limit(AmountKind::Tokens, 100_000)).await;
    answered(&harness, "t1c1a1").await;
    let held = harness.controller.ledger(|ledger| ledger.reserved("team").tokens) / 15;
    harness.controller.freeze(true);
    let mut made = 0;
    let failure = loop {
        let response = harness.call(&format!("t{}c1a1", made + 2), &whole()).await;
        if response.status() != StatusCode::OK {
            break failure(response).await;
        }
        made += 1;
    };
    assert!(made > 0 && made <= held, "{made} calls with {held} held");
    assert_eq!(failure.kind, FailureKind::BudgetUnavailable);
    assert!(failure.resumes_at.is_some());
    harness.controller.freeze(false);
    answered(&harness, &format!("t{}c1a1", made + 2)).await;
    assert_eq!(settled(&harness, "team").await.tokens, (made + 2) * 15);
}

#[tokio::test]
async fn a_repeat_joins_a_call_that_waits_for_room() {
    let harness = GatewayHarness::started().await;
    harness.controller.freeze(true);
    limited(&harness, "team", limit(AmountKind::Calls, 1)).await;
    let first = harness.call_aside("t1c1a1", &streamed());
    let second = harness.call_aside("t1c1a1", &streamed());
    harness.controller.freeze(false);
    assert_eq!(first.await.unwrap(), second.await.unwrap());
    assert_eq!(harness.provider.seen().len(), 1);
    assert_eq!(settled(&harness, "team").await, BILL);
}

#[tokio::test]
async fn a_spent_budget_that_stops_cuts_the_call_in_flight() {
    let harness = GatewayHarness::started().await;
    limited(&harness, "team", limit(AmountKind::Calls, 10)).await;
    harness.provider.will(ScriptedResponse::stream(vec![Step::Hold]));
    let call = harness.call_aside("t1c1a1", &whole());
    harness.provider.until_asked(1).await;
    let stop = CallFailure {
        kind: FailureKind::BudgetExhausted,
        message: "team is spent".into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    };
    harness.controller.ledger(|ledger| {
        ledger.terms.cut = true;
        ledger.terms.accounts[0].held = Some(stop.clone());
    });
    assert!(call.await.unwrap().1.contains("team is spent"));
    assert_eq!(refused(&harness, "t2c1a1").await, stop);
    harness.controller.ledger(|ledger| {
        ledger.terms.cut = false;
        ledger.terms.accounts[0].held = None;
    });
    await_directives(&harness).await;
    answered(&harness, "t2c1a1").await;
}

#[tokio::test]
async fn a_bill_above_its_bound_is_charged_and_stops_all_calls_until_a_new_resume() {
    let mut harness = GatewayHarness::started().await;
    let resume = |token: &str| Directives {
        resume: Some(token.into()),
        ..Directives::default()
    };
    harness.controller.direct(resume("old"));
    limited(&harness, "team", limit(AmountKind::Tokens, 1_000_000)).await;
    harness.provider.will(ScriptedResponse::json(
        200,
        &ANSWER
            .replace("\"prompt_tokens\":100", "\"prompt_tokens\":50000")
            .replace("\"total_tokens\":120", "\"total_tokens\":50020"),
    ));
    answered(&harness, "t1c1a1").await;
    for _ in 0..2 {
        let failure = refused(&harness, "t2c1a1").await;
        assert_eq!(failure.kind, FailureKind::BoundViolated);
        assert!(failure.message.contains("50000 input tokens"), "{}", failure.message);
        let violated = |report: &agentloop::link::messages::PodReport| {
            report.model.as_ref().and_then(|model| model.failure) == Some(FailureKind::BoundViolated)
        };
        harness.controller.until("the violation", violated).await;
        harness.kill();
        harness.start().await;
    }
    harness.controller.direct(resume("new"));
    await_directives(&harness).await;
    answered(&harness, "t2c1a1").await;
    assert_eq!(harness.provider.seen().len(), 2);
    assert_eq!(settled(&harness, "team").await.tokens, 49_910 + 20 + 30);
}

#[tokio::test]
async fn the_pulse_shows_requests_that_repeat() {
    let harness = GatewayHarness::started().await;
    for turn in 1..=3 {
        answered(&harness, &format!("t{turn}c1a1")).await;
    }
    let mut other = whole();
    other["messages"][0]["content"] = json!("something else");
    harness.call("t4c1a1", &other).await;
    let pulse = harness.until_counted(4, 0).await.pulse.unwrap();
    assert_eq!((pulse.identical, pulse.tokens, pulse.hash.len()), (3, 4 * 30, 16));
}
