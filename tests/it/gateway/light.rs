//! `spec.lightModel` through the gateway: its own server, key, price and messages; the same record and the same budgets.

use agentloop::api::amount::{AmountKind, LimitAmounts};
use agentloop::api::failure::FailureKind;
use agentloop::link::socket::{CALL_HEADER, PURPOSE_HEADER};
use pretty_assertions::assert_eq;
use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

use super::budgets::{await_directives, limited, prices};
use super::harness::{GatewayHarness, PROMPT, failure, url, whole, write};
use super::provider::{ANSWER, Provider, ScriptedResponse};

/// A gateway with a light model on another server.
async fn started() -> (GatewayHarness, Provider) {
    let light = Provider::start().await;
    let mut harness = GatewayHarness::new().await;
    harness.light = json!({
        "api": "OpenAIChat", "name": "small", "baseURL": format!("http://{}/v1", light.address),
        "apiKeySecretRef": {"name": "s", "key": "k"}, "maxOutputTokens": 33, "timeoutSeconds": 30,
    });
    write(&harness.path("light-key"), "light-key-value");
    harness.start().await;
    (harness, light)
}

fn question() -> Value {
    json!({"model": "small", "messages": [{"role": "user", "content": PROMPT}]})
}

async fn ask(harness: &GatewayHarness, id: &str, body: &Value) -> Response {
    let request = harness.worker.post(url(harness.route)).header(CALL_HEADER, id);
    let request = request.header(PURPOSE_HEADER, "Precheck").json(body);
    request.send().await.unwrap()
}

#[tokio::test]
async fn a_pre_check_calls_the_light_model_with_its_own_key_and_limit_and_counts_under_its_name() {
    let (harness, light) = started().await;
    let response = ask(&harness, "t2c0a1", &question()).await;
    assert_eq!(
        (response.status(), response.text().await.unwrap()),
        (StatusCode::OK, ANSWER.into())
    );
    assert_eq!(harness.ask("t2c1a1").await.0, StatusCode::OK);
    let (asked, main) = (light.seen(), harness.provider.seen());
    assert_eq!((asked.len(), main.len()), (1, 1));
    assert_eq!(asked[0].headers["authorization"], "Bearer light-key-value");
    assert_ne!(main[0].headers["authorization"], "Bearer light-key-value");
    let body: Value = serde_json::from_str(&asked[0].body).unwrap();
    assert_eq!(body["max_tokens"], 33);
    let usage = harness.until_counted(2, 0).await.usage;
    let models: Vec<(&str, i64)> = usage.by_model.iter().map(|used| (&*used.model, used.calls)).collect();
    assert_eq!(models, [("m", 1), ("small", 1)]);
}

#[tokio::test]
async fn each_model_serves_its_own_purpose_only() {
    let (harness, light) = started().await;
    for body in [whole(), json!({"model": "other", "messages": []})] {
        let failure = failure(ask(&harness, "t2c0a1", &body).await).await;
        assert_eq!(failure.kind, FailureKind::BadResponse);
        assert!(
            failure.message.contains("not spec.lightModel.name"),
            "{}",
            failure.message
        );
    }
    let failure = failure(harness.call("t2c1a1", &question()).await).await;
    assert!(failure.message.contains("not spec.model.name"), "{}", failure.message);
    assert_eq!((light.seen().len(), harness.provider.seen().len()), (0, 0));
}

#[tokio::test]
async fn without_a_light_model_a_pre_check_is_refused_and_never_sent_to_the_other() {
    let harness = GatewayHarness::started().await;
    let failure = failure(ask(&harness, "t2c0a1", &whole()).await).await;
    assert!(failure.message.contains("no spec.lightModel"), "{}", failure.message);
    assert!(harness.provider.seen().is_empty());
}

#[tokio::test]
async fn a_failure_of_the_light_model_names_its_fields_and_does_not_affect_the_main_model() {
    let (harness, light) = started().await;
    assert_eq!(harness.ask("t1c1a1").await.0, StatusCode::OK);
    light.will(ScriptedResponse::json(401, "{}"));
    let failure = failure(ask(&harness, "t2c0a1", &question()).await).await;
    assert_eq!(failure.kind, FailureKind::AuthenticationFailed);
    assert!(
        failure.message.contains("spec.lightModel.apiKeySecretRef"),
        "{}",
        failure.message
    );
    assert_eq!(ask(&harness, "t2c0a2", &question()).await.status(), StatusCode::OK);
    let report = harness.until_counted(3, 0).await;
    assert_eq!(report.model.map(|model| model.failure), Some(None), "the model answers");
}

#[tokio::test]
async fn a_budget_refuses_a_pre_check_as_any_call_and_counts_it_by_its_own_price() {
    let (harness, light) = started().await;
    harness
        .controller
        .ledger(|ledger| ledger.terms.prices = prices("small"));
    await_directives(&harness).await;
    let one_dollar = LimitAmounts {
        cost: Some(1_000_000),
        ..LimitAmounts::default()
    };
    limited(&harness, "team", one_dollar).await;
    assert_eq!(ask(&harness, "t2c0a1", &question()).await.status(), StatusCode::OK);
    // Uncached input 10, cached 90 at a tenth, output 20 at three: 10 + 9 + 60 micro-dollars.
    let report = harness.until_counted(1, 0).await;
    assert_eq!(report.usage.cost, 79);
    let refused = failure(harness.call("t2c1a1", &whole()).await).await;
    assert_eq!(
        refused.kind,
        FailureKind::BudgetUnavailable,
        "the other one has no price"
    );
    assert!(refused.message.contains("model m"), "{}", refused.message);
    let nothing = super::budgets::limit(AmountKind::Calls, 1);
    limited(&harness, "team", nothing).await;
    let refused = failure(ask(&harness, "t3c0a1", &question()).await).await;
    assert_eq!(refused.kind, FailureKind::BudgetExhausted);
    assert_eq!(light.seen().len(), 1);
}

#[tokio::test]
async fn repeated_equal_questions_are_no_loop() {
    let (harness, _light) = started().await;
    for attempt in 1..=25 {
        let id = format!("t2c0a{attempt}");
        assert_eq!(ask(&harness, &id, &question()).await.status(), StatusCode::OK);
    }
    let report = harness.until_counted(25, 0).await;
    assert!(report.pulse.is_none_or(|pulse| pulse.identical == 0));
}

#[tokio::test]
async fn two_scripts_continue_independently_over_restarts() {
    let mut harness = GatewayHarness::new().await;
    let scripted = json!({"api": "Scripted", "baseURL": null, "apiKeySecretRef": null});
    harness.set(&scripted);
    harness.light = json!({"api": "Scripted", "name": "small"});
    let script = |word: &str| format!("turns: [{{text: {word} one}}, {{text: {word} two}}]");
    write(&harness.path("script"), &script("main"));
    write(&harness.path("light-script"), &script("light"));
    harness.start().await;
    let text = async |harness: &GatewayHarness, id: &str, purpose: &str| {
        let request = harness.worker.post(url(harness.route)).header(CALL_HEADER, id);
        let request = request.header(PURPOSE_HEADER, purpose).json(&whole());
        request.send().await.unwrap().text().await.unwrap()
    };
    assert!(text(&harness, "t1c1a1", "Turn").await.contains("main one"));
    assert!(text(&harness, "t2c0a1", "Precheck").await.contains("light one"));
    harness.kill();
    harness.start().await;
    assert!(text(&harness, "t2c0a2", "Precheck").await.contains("light two"));
    assert!(text(&harness, "t2c1a1", "Turn").await.contains("main two"));
}
