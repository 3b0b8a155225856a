//! Tasks that users request over the link: accepted by the worker, answered once, and read from the events.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use reqwest::StatusCode;
use rstest::rstest;
use serde_json::{Value, json};

use super::harness::{CANARY, EDITOR, EventsHarness, READER, WAIT_TIMEOUT};
use super::reader::{Event, Reader};

/// Requests a task of an Agent.
async fn post(harness: &EventsHarness, token: Option<&str>, agent: &str, body: &str) -> (StatusCode, Value) {
    let request = harness.client.post(harness.tasks_url(agent)).body(body.to_owned());
    let request = match token {
        Some(token) => request.bearer_auth(token),
        None => request,
    };
    let response = request.send().await.unwrap();
    let status = response.status();
    (status, response.json().await.unwrap())
}

/// Repeats a request until it is accepted, as a client does.
pub(super) async fn submit(harness: &EventsHarness, id: &str) -> Value {
    let body = json!({"prompt": "how are you?", "id": id}).to_string();
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let (status, answer) = post(harness, Some(EDITOR), "a/x", &body).await;
        if status == StatusCode::ACCEPTED {
            return answer;
        }
        assert!(Instant::now() < deadline, "{id}: {status} {answer}");
        assert!(
            [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS].contains(&status),
            "{status} {answer}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The events up to the end of this task.
pub(super) async fn until_ended(reader: &mut Reader, id: &str) -> Vec<Event> {
    let mut events = Vec::new();
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        assert!(Instant::now() < deadline, "{id} has not ended");
        let event = reader.take(1).await.remove(0);
        let data: Value = serde_json::from_str(&event.data).unwrap();
        let ends = event.name == "task:ended" && data["note"].as_str().unwrap().starts_with(&format!("{id}: "));
        events.push(event);
        if ends {
            return events;
        }
    }
}

#[tokio::test]
async fn a_request_is_answered_and_its_response_is_in_the_events_for_users_with_access_to_texts() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let accepted = submit(&harness, "one").await;
    assert_eq!(
        (&accepted["id"], &accepted["state"]),
        (&json!("request-one"), &json!("Accepted"))
    );
    let after = accepted["after"].as_i64().unwrap();
    let mut reader = Reader::connect(&harness, EDITOR, &format!("?after={after}&messages=true"), None).await;
    let events = until_ended(&mut reader, "request-one").await;
    assert_eq!(events[0].name, "task:accepted");
    let end: Value = serde_json::from_str(&events.last().unwrap().data).unwrap();
    assert_eq!(end["note"], "request-one: Completed");
    let response: Value = serde_json::from_str(end["messages"][0].as_str().unwrap()).unwrap();
    assert_eq!(
        (&response["id"], &response["outcome"]),
        (&json!("request-one"), &json!("Completed"))
    );
    assert!(response["result"].as_str().unwrap().contains(CANARY), "{response}");
    // A user who may only read events gets no text.
    let mut reader = Reader::connect(&harness, READER, &format!("?after={after}"), None).await;
    let end = until_ended(&mut reader, "request-one").await.pop().unwrap();
    assert!(!end.data.contains(CANARY), "{}", end.data);
    // A repeated request has no further effect, and says where the events of the first one begin.
    let repeated = submit(&harness, "one").await;
    assert_eq!(
        repeated,
        json!({"id": "request-one", "state": "Repeated", "after": after})
    );
    // Its user is named where it is answered, and no text is in a log.
    assert!(!harness.output("worker").contains("how are you"));
    assert!(!harness.output("gateway").contains("how are you"));
}

#[tokio::test]
async fn requests_are_answered_once_each_while_worker_and_gateway_are_killed() {
    let mut harness = EventsHarness::start().await;
    harness.start_pod();
    let mut after = None;
    for number in 0_u32..24 {
        let accepted = submit(&harness, &number.to_string()).await;
        after = after.or(accepted["after"].as_i64());
        match number % 6 {
            2 => {
                // A task that the worker does not survive three times fails. On a busy machine three kills would hit
                // one task, so that the one that was open at the kill before the last must have ended.
                if let Some(earlier) = number.checked_sub(8) {
                    let mut reader =
                        Reader::connect(&harness, READER, &format!("?after={}", after.unwrap()), None).await;
                    until_ended(&mut reader, &format!("request-{earlier}")).await;
                }
                harness.restart_worker().await;
            }
            4 => harness.restart_gateway().await,
            _ => {}
        }
    }
    // Without an id, each request is another task.
    let (status, last) = post(&harness, Some(EDITOR), "a/x", r#"{"prompt": "and now?"}"#).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{last}");
    let mut reader = Reader::connect(&harness, READER, &format!("?after={}", after.unwrap()), None).await;
    let events = until_ended(&mut reader, last["id"].as_str().unwrap()).await;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for event in events.iter().filter(|event| event.name == "task:ended") {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        *counts.entry(data["note"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    let mut expected: BTreeMap<String, usize> = (0..24)
        .map(|number| (format!("request-{number}: Completed"), 1))
        .collect();
    expected.insert(format!("{}: Completed", last["id"].as_str().unwrap()), 1);
    assert_eq!(counts, expected);
}

#[rstest]
#[case::quotes('"', "'\"'")]
#[case::backslashes('\\', "'\\'")]
#[case::controls('\u{1}', "\"\\x01\"")]
#[tokio::test]
async fn a_response_that_json_makes_much_longer_is_shortened_and_does_not_block_the_events(
    #[case] character: char,
    #[case] yaml: &str,
) {
    let mut harness = EventsHarness::start().await;
    let text = yaml.replacen(&yaml[1..yaml.len() - 1], &yaml[1..yaml.len() - 1].repeat(63_000), 1);
    harness.set_script(&format!("turns: [{{text: {text}, delayMilliseconds: 20}}]"));
    harness.start_pod();
    let accepted = submit(&harness, "one").await;
    let mut reader = Reader::connect(
        &harness,
        EDITOR,
        &format!("?after={}&messages=true", accepted["after"]),
        None,
    )
    .await;
    let end = until_ended(&mut reader, "request-one").await.pop().unwrap();
    let end: Value = serde_json::from_str(&end.data).unwrap();
    let response: Value = serde_json::from_str(end["messages"][0].as_str().unwrap()).unwrap();
    let result = response["result"].as_str().unwrap();
    assert!(
        result.starts_with(character) && result.len() < 63_000,
        "{}",
        result.len()
    );
    // And what follows is read too.
    reader.take(3).await;
}

#[rstest]
#[case::no_token(None, "a/x", r#"{"prompt": "x"}"#, 401, "the token is missing")]
#[case::a_reader(
    Some(READER),
    "a/x",
    r#"{"prompt": "x"}"#,
    403,
    "reader may not create agents/tasks of Agent a/x"
)]
#[case::unknown(Some(EDITOR), "a/none", r#"{"prompt": "x"}"#, 404, "does not exist")]
#[case::no_pod(Some(EDITOR), "a/y", r#"{"prompt": "x"}"#, 503, "the Agent has no connected pod")]
#[case::no_prompt(Some(EDITOR), "a/x", "{}", 400, r#"send {"prompt": "..."}"#)]
#[case::empty(Some(EDITOR), "a/x", r#"{"prompt": " "}"#, 400, "prompt is empty")]
#[case::bad_id(
    Some(EDITOR),
    "a/x",
    r#"{"prompt": "x", "id": "a/b"}"#,
    400,
    "id must have 1 to 63 letters"
)]
#[case::unknown_field(
    Some(EDITOR),
    "a/x",
    r#"{"prompt": "x", "wait": 1}"#,
    400,
    "the body is not the expected JSON"
)]
#[tokio::test]
async fn an_invalid_request_is_refused_with_the_reason(
    #[case] token: Option<&str>,
    #[case] agent: &str,
    #[case] body: &str,
    #[case] status: u16,
    #[case] message: &str,
) {
    let harness = EventsHarness::start().await;
    let (found, answer) = post(&harness, token, agent, body).await;
    assert_eq!(found.as_u16(), status, "{answer}");
    assert!(answer["message"].as_str().unwrap().contains(message), "{answer}");
}
