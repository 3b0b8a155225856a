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

use super::budgets::{price, told};
use super::provider::{ANSWER, Act, STREAM_HEAD, STREAM_TAIL, send};
use super::scripted::scripted;
use super::world::{World, streamed, whole};

/// By [`price`] 10 + 15 + 9 = 34 micro-dollars.
const SCRIPT: &str = "turns: [{text: one, usage: {inputTokens: 10, outputTokens: 5, cacheReadTokens: 90}}]";

async fn priced(world: &World, price: Option<ModelPrice>) {
    let prices = price.map(|price| ("m".to_owned(), price));
    world
        .controller
        .ledger(|ledger| ledger.terms.prices = prices.into_iter().collect());
    told(world).await;
}

/// Header and body of an answer.
async fn heard(world: &World, id: &str, stream: bool) -> (Option<String>, String) {
    let response = world.call(id, &if stream { streamed() } else { whole() }).await;
    let header = response.headers().get(COST_HEADER);
    let header = header.map(|cost| cost.to_str().unwrap().to_owned());
    (header, response.text().await.unwrap())
}

/// The answer of a call as a worker reads it.
async fn read(world: &World, id: &str, stream: bool) -> ModelAnswer {
    let model: ModelSpec = serde_json::from_value(world.model.clone()).unwrap();
    let model = ModelSpec { stream, ..model };
    let format = WireFormat::of(&model, &[]);
    let body = format.request(&model, &[Message::User { text: "x".into() }], &[]);
    let client = GatewayClient::new(&world.path("gateway.sock")).unwrap();
    let call = (id.parse().unwrap(), CallPurpose::Turn);
    client.call(call, format, body, None).await.unwrap()
}

#[rstest]
#[tokio::test]
async fn an_answer_says_what_it_cost_as_often_as_it_is_given_and_the_servers_bytes_stay(
    #[values(false, true)] stream: bool,
) {
    let mut world = scripted(SCRIPT).await;
    let (header, plain) = heard(&world, "t1c1a1", stream).await;
    assert_eq!((header, plain.contains(COST_EVENT)), (None, false), "no price, no cost");
    assert_eq!(read(&world, "t1c1a1", stream).await.cost, None);
    priced(&world, Some(price())).await;
    let said = heard(&world, "t2c1a1", stream).await;
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
    assert_eq!(heard(&world, "t2c1a1", stream).await, said);
    let answer = read(&world, "t2c1a1", stream).await;
    assert_eq!((answer.text.as_deref(), answer.cost), (Some("one"), Some(34)));
    world.kill();
    world.start().await;
    assert_eq!(heard(&world, "t2c1a1", stream).await, said, "kept over a restart");
    assert_eq!(
        read(&world, "t1c1a1", stream).await.cost,
        None,
        "its price was not known then"
    );
}

#[tokio::test]
async fn a_price_of_nothing_is_a_cost_of_nothing_and_no_unknown_one() {
    let world = scripted(SCRIPT).await;
    let free = ModelPrice {
        input_per_million: "0".into(),
        output_per_million: "0".into(),
        ..ModelPrice::default()
    };
    priced(&world, Some(free)).await;
    assert_eq!(heard(&world, "t1c1a1", false).await.0.as_deref(), Some("0"));
    assert_eq!(read(&world, "t2c1a1", true).await.cost, Some(0));
}

#[tokio::test]
async fn an_answer_whose_use_nobody_knows_has_no_cost() {
    let world = World::started().await;
    priced(&world, Some(price())).await;
    world.provider.will(Act::json(200, &ANSWER.replace("usage", "unusual")));
    assert_eq!(heard(&world, "t1c1a1", false).await.0, None);
    world.until_counted(1, 1).await;
}

#[tokio::test]
async fn a_stream_without_an_end_mark_says_what_it_cost_too() {
    let world = World::started().await;
    priced(&world, Some(price())).await;
    let unmarked = STREAM_TAIL.replace("data: [DONE]\n\n", "");
    assert_ne!(unmarked, STREAM_TAIL);
    world
        .provider
        .will(Act::stream(vec![send(STREAM_HEAD), send(&unmarked)]));
    let answer = read(&world, "t1c1a1", true).await;
    // 10 of input, 90 from the cache, 20 of output.
    assert_eq!(answer.cost, Some(10 + 9 + 60));
}
