//! What an answer cost, as the worker receives it: by the known prices, beside the server's own bytes, as often as it is asked for.

use agentloop::api::agent::ModelSpec;
use agentloop::api::price::ModelPrice;
use agentloop::engine::CallPurpose;
use agentloop::engine::message::{Message, ModelAnswer};
use agentloop::link::socket::{COST_EVENT, COST_HEADER};
use agentloop::provider::WireFormat;
use agentloop::worker::gateway_client::GatewayClient;
use pretty_assertions::assert_eq;
use rstest::rstest;

use super::budgets::{await_directives, price};
use super::harness::{GatewayHarness, streamed, whole};
use super::provider::{ANSWER, STREAM_HEAD, STREAM_TAIL, ScriptedResponse, send};
use super::scripted::scripted;

/// By [`price`] 10 + 15 + 9 = 34 micro-dollars.
const SCRIPT: &str = "turns: [{text: one, usage: {inputTokens: 10, outputTokens: 5, cacheReadTokens: 90}}]";

async fn priced(harness: &GatewayHarness, price: Option<ModelPrice>) {
    let prices = price.map(|price| ("m".to_owned(), price));
    harness
        .controller
        .ledger(|ledger| ledger.terms.prices = prices.into_iter().collect());
    await_directives(harness).await;
}

/// Header and body of an answer.
async fn heard(harness: &GatewayHarness, id: &str, stream: bool) -> (Option<String>, String) {
    let response = harness.call(id, &if stream { streamed() } else { whole() }).await;
    let header = response.headers().get(COST_HEADER);
    let header = header.map(|cost| cost.to_str().unwrap().to_owned());
    (header, response.text().await.unwrap())
}

/// The answer of a call as a worker reads it.
async fn read(harness: &GatewayHarness, id: &str, stream: bool) -> ModelAnswer {
    let model: ModelSpec = serde_json::from_value(harness.model.clone()).unwrap();
    let model = ModelSpec { stream, ..model };
    let format = WireFormat::of(&model, &[]);
    let body = format.request(&model, &[Message::User { text: "x".into() }], &[]);
    let client = GatewayClient::new(&harness.path("gateway.sock")).unwrap();
    let call = (id.parse().unwrap(), CallPurpose::Turn);
    client.call(call, format, body, None).await.unwrap()
}

#[rstest]
#[tokio::test]
async fn each_repetition_of_an_answer_has_its_cost_and_the_bytes_of_the_server_are_unchanged(
    #[values(false, true)] stream: bool,
) {
    let mut harness = scripted(SCRIPT).await;
    let (header, plain) = heard(&harness, "t1c1a1", stream).await;
    assert_eq!((header, plain.contains(COST_EVENT)), (None, false), "no price, no cost");
    assert_eq!(read(&harness, "t1c1a1", stream).await.cost, None);
    priced(&harness, Some(price())).await;
    let said = heard(&harness, "t2c1a1", stream).await;
    let cost = format!("\nevent: {COST_EVENT}\ndata: 34\n\n");
    if stream {
        assert!(
            said.0.is_none() && said.1.ends_with(&format!("data: [DONE]\n\n{cost}")),
            "{said:?}"
        );
    } else {
        assert_eq!(said.0.as_deref(), Some("34"));
        assert!(serde_json::from_str::<serde_json::Value>(&said.1).is_ok());
    }
    assert_eq!(heard(&harness, "t2c1a1", stream).await, said);
    let answer = read(&harness, "t2c1a1", stream).await;
    assert_eq!((answer.text.as_deref(), answer.cost), (Some("one"), Some(34)));
    harness.kill();
    harness.start().await;
    assert_eq!(heard(&harness, "t2c1a1", stream).await, said, "kept over a restart");
    assert_eq!(
        read(&harness, "t1c1a1", stream).await.cost,
        None,
        "its price was not known then"
    );
}

#[tokio::test]
async fn a_price_of_nothing_is_a_cost_of_nothing_and_no_unknown_one() {
    let harness = scripted(SCRIPT).await;
    let free = ModelPrice {
        input_per_million: "0".into(),
        output_per_million: "0".into(),
        ..ModelPrice::default()
    };
    priced(&harness, Some(free)).await;
    assert_eq!(heard(&harness, "t1c1a1", false).await.0.as_deref(), Some("0"));
    assert_eq!(read(&harness, "t2c1a1", true).await.cost, Some(0));
}

#[tokio::test]
async fn an_answer_of_unknown_usage_has_no_cost() {
    let harness = GatewayHarness::started().await;
    priced(&harness, Some(price())).await;
    harness
        .provider
        .will(ScriptedResponse::json(200, &ANSWER.replace("usage", "unusual")));
    assert_eq!(heard(&harness, "t1c1a1", false).await.0, None);
    harness.until_counted(1, 1).await;
}

#[tokio::test]
async fn a_stream_without_an_end_mark_has_a_cost_too() {
    let harness = GatewayHarness::started().await;
    priced(&harness, Some(price())).await;
    let unmarked = STREAM_TAIL.replace("data: [DONE]\n\n", "");
    assert_ne!(unmarked, STREAM_TAIL);
    harness
        .provider
        .will(ScriptedResponse::stream(vec![send(STREAM_HEAD), send(&unmarked)]));
    let answer = read(&harness, "t1c1a1", true).await;
    // 10 of input, 90 from the cache, 20 of output.
    assert_eq!(answer.cost, Some(10 + 9 + 60));
}
