//! Tests of events over the link: a real worker and gateway, the controller's link over TLS, and people who read.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod harness;
mod page;
mod plugin;
mod reader;
mod tasks;
mod text;

use agentloop::controller::pod_sessions::LivePod;
use agentloop::link::events::{EventLine, EventsPage, EventsResponse, PAGE_LINES};
use agentloop::link::messages::{Directives, LoopTotals};
use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::Value;

use harness::{CANARY, EDITOR, EPOCH, EventsHarness, READER, agent_key, pod_of, wait_until};
use reader::{Event, Reader};

fn numbers(events: &[Event]) -> Vec<i64> {
    events.iter().map(|event| event.id.unwrap()).collect()
}

#[tokio::test]
async fn each_event_is_read_once_in_order_over_kills_of_the_worker_and_connections_of_the_reader() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let mut reader = Reader::connect(&harness, READER, "?after=0", None).await;
    let mut events = reader.take(20).await;
    // The stream itself continues when a container of the pod starts again.
    harness.restart_worker().await;
    events.extend(reader.take(20).await);
    harness.restart_gateway().await;
    events.extend(reader.take(20).await);
    drop(reader);
    // And a reader that connects again says with which event it ended.
    let last = events.last().unwrap().id.unwrap();
    let mut reader = Reader::connect(&harness, READER, "?after=0", Some(last)).await;
    events.extend(reader.take(20).await);
    harness.restart_worker().await;
    events.extend(reader.take(20).await);

    assert_eq!(numbers(&events), (1..=100).collect::<Vec<_>>());
    assert_eq!(events[0].name, "loop:started");
    let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    for name in [
        "autonomy:turn_started",
        "model:call_answered",
        "autonomy:turn_completed",
    ] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert_eq!(names.iter().filter(|name| **name == "loop:started").count(), 3);
    for event in &events {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        assert_eq!(
            (data["seq"].as_i64(), data["event"].as_str()),
            (event.id, Some(&*event.name))
        );
        assert!(!event.data.contains(CANARY), "{}", event.data);
    }
    // What a call used is written with its line, and is the same after the restarts.
    let mut reader = Reader::connect(&harness, READER, "?after=0", None).await;
    let again = reader.take(100).await;
    let texts = |events: &[Event]| events.iter().map(|event| event.data.clone()).collect::<Vec<_>>();
    assert_eq!(texts(&again), texts(&events));
    for event in events.iter().filter(|event| event.name == "model:call_answered") {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        assert_eq!(data["model"], "s");
        let tokens = ["inputTokens", "outputTokens"].map(|field| data[field].as_i64().unwrap_or(0));
        assert!(tokens.iter().all(|tokens| *tokens > 0), "{data}");
    }
    // The same lines as on the worker's standard output.
    let told = harness.output("worker");
    let turn = events
        .iter()
        .find(|event| event.name == "autonomy:turn_completed")
        .unwrap();
    assert!(told.contains(&format!(
        r#""seq":{},"event":"autonomy:turn_completed""#,
        turn.id.unwrap()
    )));
}

#[tokio::test]
async fn a_reader_of_the_latest_events_learns_where_the_journal_ends_and_reads_on_from_there() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let mut reader = Reader::connect(&harness, READER, "?after=0", None).await;
    reader.take(20).await;
    let mut reader = Reader::connect(&harness, READER, "?after=latest", None).await;
    let mut events = reader.take(1).await;
    assert_eq!(events[0].name, "start");
    let start = events[0].id.unwrap();
    assert!(start >= 20, "{start}");
    // A restarted worker sends what it was asked for again, from the latest event on.
    harness.restart_worker().await;
    events.extend(reader.take(20).await);
    assert_eq!(numbers(&events), (start..=start + 20).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_pod_sends_events_only_while_a_reader_is_connected() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    assert_eq!(harness.directives().readings, []);
    let mut reader = Reader::connect(&harness, READER, "", None).await;
    reader.take(1).await;
    assert_eq!(harness.directives().readings.len(), 1);
    drop(reader);
    wait_until("the reading to end", || harness.directives().readings.is_empty()).await;
}

#[tokio::test]
async fn the_last_events_of_a_stopping_loop_are_read_before_its_pod_is_deleted() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let mut reader = Reader::connect(&harness, READER, "", None).await;
    reader.take(5).await;
    harness.terminate_worker().await;
    loop {
        let event = reader.take(1).await.remove(0);
        if event.data.contains("-> Stopped") {
            break;
        }
    }
    harness.forget_pod();
    let end = reader.take(1).await.remove(0);
    assert_eq!((end.name.as_str(), end.id), ("end", None));
    assert!(end.data.contains("the pod of this Agent was deleted"), "{}", end.data);
    assert!(reader.ended().await);
}

#[tokio::test]
async fn only_users_with_access_to_messages_see_the_texts_of_a_detected_loop() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let detected = async |token, query| {
        let mut reader = Reader::connect(&harness, token, query, None).await;
        loop {
            let event = reader.take(1).await.remove(0);
            if event.name == "autonomy:loop_detected" {
                return event.data;
            }
        }
    };
    let data: Value = serde_json::from_str(&detected(EDITOR, "?messages=true").await).unwrap();
    let messages = data["messages"].as_array().unwrap();
    assert!((1..=12).contains(&messages.len()), "{data}");
    assert!(
        messages
            .iter()
            .any(|message| message.as_str().unwrap().contains(CANARY)),
        "{data}"
    );
    for message in messages {
        let message: Value = serde_json::from_str(message.as_str().unwrap()).unwrap();
        assert!(
            ["assistant", "tool"].contains(&message["role"].as_str().unwrap()),
            "{message}"
        );
    }
    for (token, query) in [(EDITOR, ""), (READER, "?messages=false")] {
        let data = detected(token, query).await;
        assert!(!data.contains(CANARY) && !data.contains("messages"), "{data}");
    }
    for log in ["worker", "gateway"] {
        assert!(!harness.output(log).contains(CANARY), "{log}");
    }
}

#[rstest]
#[case::no_token(None, "a/x", "", 401, "Unauthenticated")]
#[case::no_token_of_this_cluster(Some("nonsense"), "a/x", "", 401, "Unauthenticated")]
#[case::a_token_of_a_pod(Some("agentloop.dev/link a agentloop-agent x u2"), "a/x", "", 401, "Unauthenticated")]
#[case::without_the_right(Some("person visitor"), "a/x", "", 403, "Forbidden")]
#[case::without_the_right_to_what_is_not_there(Some("person visitor"), "a/none", "", 403, "Forbidden")]
#[case::without_the_right_to_messages(Some(READER), "a/x", "?messages=true", 403, "Forbidden")]
#[case::text_without_the_right_to_messages(Some(READER), "a/x", "?text=true", 403, "Forbidden")]
#[case::no_choice(Some(EDITOR), "a/x", "?text=some", 400, "Malformed")]
#[case::no_agent(Some(READER), "a/none", "", 404, "NotFound")]
#[case::an_agent_without_a_pod(Some(READER), "a/y", "", 503, "Unavailable")]
#[case::no_number(Some(READER), "a/x", "?after=first", 400, "Malformed")]
#[case::a_number_below_zero(Some(READER), "a/x", "?after=-1", 400, "Malformed")]
#[case::the_number_of_the_latest(Some(READER), "a/x", "?after=9223372036854775807", 400, "Malformed")]
#[tokio::test]
async fn an_unauthorized_or_invalid_request_for_events_is_refused_with_a_message(
    #[case] token: Option<&str>,
    #[case] agent: &str,
    #[case] query: &str,
    #[case] status: u16,
    #[case] code: &str,
) {
    let harness = EventsHarness::start().await;
    let response = reader::request(&harness, token, agent, query, None).await;
    assert_eq!(response.status().as_u16(), status);
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["code"], code, "{body}");
    assert!(body["message"].as_str().unwrap().len() > 20, "{body}");
    assert!(token.is_none_or(|token| !body.to_string().contains(token)), "{body}");
    assert_eq!(harness.directives().readings, []);
}

#[tokio::test]
async fn the_access_review_names_the_exact_agent_and_the_events_subresource() {
    let harness = EventsHarness::start().await;
    reader::request(&harness, Some("person visitor"), "a/x", "", None).await;
    let asked = harness.asked();
    let want = serde_json::json!({
        "user": "visitor", "groups": ["people"], "uid": "uid-of-visitor", "extra": {"scopes": ["all"]},
        "resourceAttributes": {"verb": "get", "group": "agentloop.dev", "resource": "agents",
            "subresource": "events", "namespace": "a", "name": "x"},
    });
    assert_eq!(asked, [want]);
}

#[tokio::test]
async fn a_cursor_beyond_the_journal_ends_with_the_newest_number() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let mut reader = Reader::connect(&harness, READER, "?after=1000000", None).await;
    let end = reader.take(1).await.remove(0);
    assert_eq!(end.name, "end");
    assert!(end.data.contains("event 1000000 does not exist yet"), "{}", end.data);
    assert!(reader.ended().await);
}

fn page(after: i64, next: i64) -> EventsPage {
    let line = |seq| EventLine {
        seq,
        event: "tool:outcome".into(),
        note: "n".repeat(500),
        ..EventLine::default()
    };
    EventsPage {
        epoch: EPOCH,
        reading: 1,
        after,
        next,
        newest: 1_000_000,
        events: (after + 1..=next).map(line).collect(),
    }
}

#[tokio::test]
async fn a_stalled_reader_is_buffered_within_bounds_and_delays_no_other_reader() {
    let harness = EventsHarness::start().await;
    let pod = harness.link_client();
    let lazy = tokio::spawn({
        let url = harness.events_url("a/x", "");
        let request = harness.client.get(url).bearer_auth(READER);
        async move { request.send().await.unwrap() }
    });
    wait_until("the reading", || harness.directives().readings.len() == 1).await;
    let (mut after, mut full) = (0, false);
    while !full {
        let next = after + i64::try_from(PAGE_LINES).unwrap();
        let EventsResponse { after: said } = pod.events(&page(after, next)).await.unwrap();
        full = said == Some(after);
        after = said.unwrap();
        assert!(after < 200_000, "there is no end to what waits for a reader");
    }
    let mut other = tokio::spawn({
        let url = harness.events_url("a/x", "");
        let request = harness.client.get(url).bearer_auth(READER);
        async move { request.send().await.unwrap() }
    });
    wait_until("the second reading", || harness.directives().readings.len() == 2).await;
    let second = EventsPage {
        reading: 2,
        ..page(0, 3)
    };
    assert_eq!(pod.events(&second).await.unwrap().after, Some(3));
    (&mut other).await.unwrap();
    // Once it reads, it gets each line, and there is room again.
    let mut reader = Reader::connected(lazy.await.unwrap());
    let events = reader.take(usize::try_from(after).unwrap()).await;
    assert_eq!(numbers(&events), (1..=after).collect::<Vec<_>>());
    assert_eq!(
        pod.events(&page(after, after + 1)).await.unwrap().after,
        Some(after + 1)
    );
}

#[tokio::test]
async fn eight_may_read_one_agent_and_the_ninth_when_one_leaves() {
    let harness = EventsHarness::start().await;
    let pod = harness.link_client();
    let mut readers = Vec::new();
    for reading in 1..=8 {
        let request = harness.client.get(harness.events_url("a/x", "")).bearer_auth(READER);
        let sent = tokio::spawn(async move { request.send().await.unwrap() });
        wait_until("the reading", || harness.directives().readings.len() == reading).await;
        let reading = u64::try_from(reading).unwrap();
        pod.events(&EventsPage { reading, ..page(0, 1) }).await.unwrap();
        readers.push(sent.await.unwrap());
    }
    let ninth = reader::request(&harness, Some(READER), "a/x", "", None).await;
    assert_eq!(ninth.status().as_u16(), 429);
    readers.pop();
    wait_until("room", || harness.directives().readings.len() == 7).await;
    let request = harness.client.get(harness.events_url("a/x", "")).bearer_auth(READER);
    let _sent = tokio::spawn(async move { request.send().await });
    wait_until("the reading", || harness.directives().readings.len() == 8).await;
}

#[tokio::test]
async fn a_pod_sends_events_only_for_its_own_agent_and_only_while_it_is_expected() {
    let harness = EventsHarness::start().await;
    let request = harness.client.get(harness.events_url("a/x", "")).bearer_auth(READER);
    let _reader = tokio::spawn(async move { request.send().await });
    wait_until("the reading", || harness.directives().readings.len() == 1).await;
    // Another Agent's pod does not find the reading.
    harness.loops.expect_pod(
        (&agent_key("y"), "uid-of-y"),
        pod_of("y"),
        LoopTotals::default(),
        Directives::default(),
    );
    assert_eq!(
        harness.link_client_of("y").events(&page(0, 1)).await.unwrap().after,
        None
    );
    let newer = LivePod {
        uid: "newer".into(),
        epoch: EPOCH + 1,
    };
    harness.loops.expect_pod(
        (&agent_key("x"), "uid-of-x"),
        newer,
        LoopTotals::default(),
        Directives::default(),
    );
    assert!(harness.link_client().events(&page(0, 1)).await.is_err());
}
