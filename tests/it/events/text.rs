//! Text of answers while the model writes it: a real worker and gateway, and a model server that waits for the test.

use std::io::{self, Write};
use std::path::Path;

use agentloop::controller::pod_sessions::LivePod;
use agentloop::link::events::EventsPage;
use agentloop::link::messages::{Directives, LoopTotals};
use agentloop::link::text_fragments::{MAX_FRAGMENT_BYTES, RelayedTextFragment, TextFragment};
use agentloop::plugin::ExitStatus;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use super::harness::{CANARY, EDITOR, EPOCH, EventsHarness, READER, WAIT_TIMEOUT, agent_key, pod_of, wait_until};
use super::plugin::run_into;
use super::reader::{Event, Reader};
use super::tasks::{submit, until_ended};
use crate::gateway::provider::{Provider, ScriptedResponse, Step, send};

/// A piece of an answer.
fn piece(text: &str) -> Step {
    let choice = json!({"index": 0, "delta": {"content": text}, "finish_reason": null});
    send(&format!("data: {}\n\n", json!({"choices": [choice]})))
}

/// A piece of reasoning.
fn thought(text: &str) -> Step {
    let choice = json!({"index": 0, "delta": {"reasoning_content": text}, "finish_reason": null});
    send(&format!("data: {}\n\n", json!({"choices": [choice]})))
}

/// The end of an answer.
fn end() -> Step {
    let choice = json!({"index": 0, "delta": {}, "finish_reason": "stop"});
    let usage = json!({"prompt_tokens": 10, "completion_tokens": 5});
    let last = json!({"choices": [], "usage": usage});
    send(&format!(
        "data: {}\n\ndata: {last}\n\ndata: [DONE]\n\n",
        json!({"choices": [choice]})
    ))
}

/// A pod in mode Task whose model is controlled by the test.
async fn harness() -> (EventsHarness, Provider) {
    let (mut harness, provider) = (EventsHarness::start().await, Provider::start().await);
    harness.spec = json!({
        "instructions": "Be brief.",
        "mode": "Task", "task": {},
        "model": {"api": "OpenAIChat", "name": "m", "baseURL": format!("http://{}/v1", provider.address)},
    });
    harness.start_pod();
    (harness, provider)
}

fn data(event: &Event) -> Value {
    serde_json::from_str(&event.data).unwrap()
}

/// The next fragment; other events before it are dropped.
async fn next_text(reader: &mut Reader) -> TextFragment {
    loop {
        let event = reader.take(1).await.remove(0);
        if event.name == "text" {
            assert_eq!(event.id, None, "it moves no cursor");
            return serde_json::from_str(&event.data).unwrap();
        }
    }
}

/// The events up to the end of a task: fragments, and all others.
async fn rest(reader: &mut Reader, id: &str) -> (Vec<TextFragment>, Vec<Event>) {
    let (texts, events): (Vec<_>, Vec<_>) = until_ended(reader, id)
        .await
        .into_iter()
        .partition(|event| event.name == "text");
    (
        texts
            .iter()
            .map(|event| serde_json::from_str(&event.data).unwrap())
            .collect(),
        events,
    )
}

/// The response in the last event.
fn response(events: &[Event]) -> Value {
    let end = data(events.last().unwrap());
    serde_json::from_str(end["messages"][0].as_str().unwrap()).unwrap()
}

#[tokio::test]
async fn the_first_text_is_read_before_the_model_has_ended_and_cursors_stay_as_without_it() {
    let (harness, provider) = harness().await;
    let steps = vec![
        thought("canary-of-reasoning"),
        piece(CANARY),
        Step::Hold,
        piece(" is "),
        piece("fine."),
        end(),
    ];
    provider.will(ScriptedResponse::stream(steps));
    let mut reader = Reader::connect(&harness, EDITOR, "?after=latest&messages=true&text=true", None).await;
    let start = reader.take(1).await.remove(0);
    assert_eq!(start.name, "start");
    let mut without = Reader::connect(&harness, READER, "?after=0", None).await;
    submit(&harness, "one").await;
    let first = next_text(&mut reader).await;
    assert_eq!(
        (first.task.as_str(), first.attempt, first.offset, first.text.as_str()),
        ("request-one", 1, 0, CANARY)
    );
    provider.release();
    let (texts, events) = rest(&mut reader, "request-one").await;
    // What is still missing at the end may be lost; what came is in order and without gaps.
    let mut text = first.text.clone();
    for fragment in &texts {
        assert_eq!((&fragment.call, fragment.offset), (&first.call, text.len() as u64));
        text.push_str(&fragment.text);
    }
    let response = response(&events);
    let whole = format!("{CANARY} is fine.");
    assert_eq!(response["result"], whole);
    assert!(whole.starts_with(&text), "{text}");

    // A reader that requests no text gets none, and the same events.
    let all = until_ended(&mut without, "request-one").await;
    assert!(
        all.iter()
            .all(|event| event.name != "text" && !event.data.contains(CANARY))
    );
    let ids: Vec<_> = all.iter().map(|event| event.id.unwrap()).collect();
    assert_eq!(ids, (1..=i64::try_from(ids.len()).unwrap()).collect::<Vec<_>>());
    let ids: Vec<_> = events.iter().map(|event| event.id.unwrap()).collect();
    let last = ids.last().copied().unwrap();
    assert!(
        ids.iter()
            .copied()
            .eq(last + 1 - i64::try_from(ids.len()).unwrap()..=last)
    );
    // And the cursor continues after a connection with text.
    provider.will(ScriptedResponse::stream(vec![piece("Yes."), end()]));
    submit(&harness, "two").await;
    let mut again = Reader::connect(&harness, EDITOR, "?messages=true&text=true", Some(last)).await;
    let (_, events) = rest(&mut again, "request-two").await;
    assert_eq!(events[0].id, Some(last + 1));
    for log in ["worker", "gateway"] {
        let log = harness.output(log);
        assert!(!log.contains(CANARY) && !log.contains("canary-of-reasoning"));
    }
}

/// The files below a directory that contain a text.
fn files_with(directory: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_with(&path, text));
        } else if let Ok(bytes) = std::fs::read(&path)
            && bytes.windows(text.len()).any(|window| window == text.as_bytes())
        {
            found.push(path.display().to_string());
        }
    }
    found
}

#[tokio::test]
async fn text_of_a_failed_attempt_is_void_and_in_no_file() {
    const VOID: &str = "canary-void-9a3d";
    let (harness, provider) = harness().await;
    provider.will(ScriptedResponse::stream(vec![piece(VOID), Step::Hold, Step::Cut]));
    provider.will(ScriptedResponse::stream(vec![piece("Right."), Step::Hold, end()]));
    let mut reader = Reader::connect(&harness, EDITOR, "?after=0&messages=true&text=true", None).await;
    submit(&harness, "one").await;
    let first = next_text(&mut reader).await;
    assert_eq!((first.attempt, first.text.as_str()), (1, VOID));
    provider.release_one();
    let second = next_text(&mut reader).await;
    assert_eq!((second.attempt, second.offset, second.text.as_str()), (2, 0, "Right."));
    assert_eq!(second.call_of_all_attempts(), first.call_of_all_attempts());
    provider.release_one();
    let (_, events) = rest(&mut reader, "request-one").await;
    assert_eq!(response(&events)["result"], "Right.");
    // Neither journal and history, nor the record of the gateway, nor logs.
    let journal = harness.path("journal");
    let folder = journal.parent().unwrap();
    assert_eq!(files_with(folder, VOID), Vec::<String>::new());
    assert!(
        !files_with(folder, "Right.").is_empty(),
        "the search finds what is stored"
    );
}

#[tokio::test]
async fn a_worker_that_is_killed_sends_the_text_again_from_its_beginning_and_the_answer_is_whole() {
    let (mut harness, provider) = harness().await;
    provider.will(ScriptedResponse::stream(vec![
        piece("All is "),
        Step::Hold,
        piece("well."),
        end(),
    ]));
    let mut reader = Reader::connect(&harness, EDITOR, "?after=0&messages=true&text=true", None).await;
    submit(&harness, "one").await;
    let first = next_text(&mut reader).await;
    harness.restart_worker().await;
    let again = next_text(&mut reader).await;
    assert_eq!(again, first, "the same call, from its beginning");
    provider.release();
    let (_, events) = rest(&mut reader, "request-one").await;
    assert_eq!(response(&events)["result"], "All is well.");
    assert_eq!(provider.seen().len(), 1, "the model was asked once");
}

#[tokio::test]
async fn a_pod_sends_text_only_while_a_reader_requests_it() {
    let (harness, provider) = harness().await;
    let asks_for_text = || harness.directives().readings.iter().any(|reading| reading.text);
    provider.will(ScriptedResponse::stream(vec![
        piece("before "),
        Step::Hold,
        piece("after"),
        Step::Hold,
        end(),
    ]));
    let mut events = Reader::connect(&harness, EDITOR, "?after=0&messages=true", None).await;
    events.take(1).await;
    submit(&harness, "one").await;
    provider.until_asked(1).await;
    assert!(!asks_for_text());
    // Its first page shows that the worker knows of it; the text before may be lost.
    let mut reader = Reader::connect(&harness, EDITOR, "?after=latest&text=true", None).await;
    reader.take(1).await;
    assert!(asks_for_text());
    provider.release_one();
    let fragment = next_text(&mut reader).await;
    assert!(
        ["before ", "before after", "after"].contains(&fragment.text.as_str()) && fragment.end() <= 12,
        "{fragment:?}"
    );
    assert!(fragment.offset == 0 || (fragment.offset == 7 && fragment.text == "after"));
    drop(reader);
    wait_until("the end of the reading", || !asks_for_text()).await;
    provider.release_one();
    let (texts, events) = rest(&mut events, "request-one").await;
    assert_eq!(texts, []);
    assert_eq!(response(&events)["result"], "before after");
}

/// What the pod sends of an answer.
fn fragment(epoch: i64, text: &str) -> RelayedTextFragment {
    RelayedTextFragment {
        epoch,
        fragment: TextFragment {
            task: "request-one".into(),
            call: "t1c1a1".into(),
            attempt: 1,
            offset: 0,
            text: text.into(),
        },
    }
}

#[tokio::test]
async fn a_pod_sends_text_of_its_own_agent_only_while_it_is_expected_and_within_the_bound() {
    let harness = EventsHarness::start().await;
    let pod = harness.link_client();
    pod.text(&fragment(EPOCH, "nobody reads")).await.unwrap();
    let mut readers = Vec::new();
    for (reading, query) in [(1, "?text=true"), (2, "?messages=true")] {
        let request = harness.client.get(harness.events_url("a/x", query)).bearer_auth(EDITOR);
        let sent = tokio::spawn(async move { request.send().await.unwrap() });
        wait_until("the reading", || {
            harness.directives().readings.len() == usize::try_from(reading).unwrap()
        })
        .await;
        let page = EventsPage {
            epoch: EPOCH,
            reading,
            ..EventsPage::default()
        };
        pod.events(&page).await.unwrap();
        readers.push(Reader::connected(sent.await.unwrap()));
    }
    harness.loops.expect_pod(
        (&agent_key("y"), "uid-of-y"),
        pod_of("y"),
        LoopTotals::default(),
        Directives::default(),
    );
    harness
        .link_client_of("y")
        .text(&fragment(EPOCH, "of another"))
        .await
        .unwrap();
    let longest = "x".repeat(MAX_FRAGMENT_BYTES);
    let refused = pod.text(&fragment(EPOCH, &format!("{longest}x"))).await.unwrap_err();
    assert!(refused.to_string().contains("at most 4096 bytes"), "{refused}");
    assert!(pod.text(&fragment(EPOCH - 1, "old")).await.is_err());
    pod.text(&fragment(EPOCH, &longest)).await.unwrap();
    assert_eq!(next_text(&mut readers[0]).await.text, longest);
    // The reader without text gets the next event as its first one.
    let line = agentloop::link::events::EventLine {
        seq: 1,
        event: "task:started".into(),
        ..Default::default()
    };
    let page = EventsPage {
        epoch: EPOCH,
        reading: 2,
        next: 1,
        newest: 1,
        events: vec![line],
        ..EventsPage::default()
    };
    pod.events(&page).await.unwrap();
    assert_eq!(readers[1].take(1).await[0].name, "task:started");
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
    assert!(pod.text(&fragment(EPOCH, "fenced")).await.is_err());
}

/// A screen that a test watches.
#[derive(Clone)]
struct WatchedScreen(watch::Sender<String>);

impl WatchedScreen {
    async fn until(&self, text: &str) {
        let mut shown = self.0.subscribe();
        let found = timeout(WAIT_TIMEOUT, shown.wait_for(|shown| shown.contains(text))).await;
        assert!(found.is_ok(), "not in time: {text:?} in {:?}", self.0.borrow());
    }
}

impl Write for WatchedScreen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .send_modify(|shown| shown.push_str(std::str::from_utf8(bytes).unwrap()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn the_plugin_prints_text_as_it_arrives_marks_what_is_void_and_prints_nothing_twice() {
    let (harness, provider) = harness().await;
    provider.will(ScriptedResponse::stream(vec![piece("Al"), Step::Hold, Step::Cut]));
    provider.will(ScriptedResponse::stream(vec![
        piece("All is "),
        Step::Hold,
        piece("well."),
        end(),
    ]));
    provider.will(ScriptedResponse::stream(vec![piece("As before"), end()]));
    wait_until("the pod is connected", || {
        harness.output("worker").contains("loop:started")
    })
    .await;
    let screen = WatchedScreen(watch::Sender::default());
    let mut out = screen.clone();
    let watch = async {
        screen.until("Al").await;
        provider.release_one();
        screen.until("All is ").await;
        provider.release_one();
    };
    let run = run_into(&harness, EDITOR, "run x --prompt count --stream", &mut out);
    let ((status, err), ()) = tokio::join!(run, watch);
    assert_eq!(status, ExitStatus::Success, "{err}");
    let void = "[the model call failed and is retried: ignore the text above]";
    assert_eq!(*screen.0.borrow(), format!("Al\n{void}\nAll is well.\n"));
    let mut out = Vec::new();
    let (status, err) = run_into(&harness, EDITOR, "run x --prompt count", &mut out).await;
    assert_eq!(
        (status, out.as_slice()),
        (ExitStatus::Success, &b"As before\n"[..]),
        "{err}"
    );
}
