//! Texts of turns and tool runs in spans: which, how long, and the same after a restart.

use jiff::Timestamp;
use opentelemetry_proto::tonic::common::v1::any_value;
use pretty_assertions::assert_eq;

use super::*;

fn user(text: &str) -> Message {
    Message::User { text: text.into() }
}

fn answer(text: &str, calls: &[(&str, &str)]) -> Message {
    let named = |(place, (name, arguments)): (usize, &(&str, &str))| message::ToolCall {
        id: message::call_id(3, 1, place),
        name: (*name).into(),
        arguments: (*arguments).into(),
    };
    Message::Assistant {
        text: (!text.is_empty()).then(|| text.into()),
        tool_calls: calls.iter().enumerate().map(named).collect(),
        reasoning: None,
    }
}

fn result(place: usize, text: &str) -> Message {
    Message::Tool {
        id: message::call_id(3, 1, place),
        text: text.into(),
        failed: false,
        reasoning: None,
        artifacts: crate::engine::tool::ResultArtifacts::default(),
    }
}

/// The end of a run in turn 3.
fn ended(run: &str) -> (JournalLine, Span) {
    let line = JournalLine {
        at: Timestamp::UNIX_EPOCH,
        run: Some(run.into()),
        ..JournalLine::bare(RecordKind::ToolOutcome, 3)
    };
    let span = Span {
        name: run.into(),
        parent_span_id: vec![1],
        ..Span::default()
    };
    (line, span)
}

/// The end of turn 3.
fn root() -> (JournalLine, Span) {
    let span = Span {
        name: "turn".into(),
        ..Span::default()
    };
    (JournalLine::bare(RecordKind::TurnCompleted, 3), span)
}

fn text_of(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|pair| pair.key == key)?;
    let value = found.value.as_ref()?.value.as_ref()?;
    let any_value::Value::StringValue(text) = value else {
        panic!("{value:?}")
    };
    Some(text.clone())
}

fn json_of(span: &Span, key: &str) -> Value {
    serde_json::from_str(&text_of(span, key).unwrap()).unwrap()
}

fn completed(spans: Vec<(JournalLine, Span)>, messages: &[Message]) -> Vec<Span> {
    let mut texts = SpanTexts::default();
    for (line, span) in spans {
        texts.take(&line, span);
    }
    texts.complete(usize::MAX, |turn| {
        assert_eq!(turn, (0, 3));
        messages.to_vec()
    })
}

#[test]
fn a_turn_and_its_run_have_messages_arguments_and_results() {
    let messages = [
        user("Go."),
        answer("I write.", &[("write", r#"{"text": "one"}"#)]),
        result(0, "written"),
        answer("Done.", &[]),
    ];
    let spans = completed(vec![ended("t3c1r1"), root()], &messages);
    let [run, root] = &spans[..] else { panic!("{spans:?}") };
    assert_eq!(json_of(run, "gen_ai.tool.call.arguments"), json!({"text": "one"}));
    assert_eq!(text_of(run, "gen_ai.tool.call.result").unwrap(), "written");
    assert_eq!(
        json_of(root, "gen_ai.input.messages"),
        json!([{"role": "user", "parts": [{"type": "text", "content": "Go."}]}])
    );
    let call = json!({
        "type": "tool_call", "id": message::call_id(3, 1, 0), "name": "write", "arguments": {"text": "one"},
    });
    assert_eq!(
        json_of(root, "gen_ai.output.messages"),
        json!([
            {"role": "assistant", "parts": [{"type": "text", "content": "I write."}, call], "finish_reason": "tool_call"},
            {"role": "assistant", "parts": [{"type": "text", "content": "Done."}], "finish_reason": "stop"},
        ])
    );
}

#[test]
fn a_run_waits_for_its_result_until_its_turn_ends() {
    let calls = answer("", &[("a", "{}"), ("b", "no JSON")]);
    let mut texts = SpanTexts::default();
    let (line, span) = ended("t3c1r2");
    texts.take(&line, span.clone());
    assert_eq!(texts.complete(usize::MAX, |_| vec![calls.clone()]), []);
    // The run is repeated: it is one span.
    texts.take(&line, span);
    let joined = [calls.clone(), result(0, "first"), result(1, "second")];
    let spans = texts.complete(usize::MAX, |_| joined.to_vec());
    assert_eq!(spans.len(), 1);
    assert_eq!(json_of(&spans[0], "gen_ai.tool.call.arguments"), json!("no JSON"));
    assert_eq!(text_of(&spans[0], "gen_ai.tool.call.result").unwrap(), "second");
    let spans = completed(vec![ended("t3c1r2"), root()], &[calls]);
    assert_eq!((spans.len(), text_of(&spans[0], "gen_ai.tool.call.result")), (2, None));
}

#[test]
fn what_has_no_texts_does_not_wait() {
    let refresh = ended("t3c0r1");
    let mut wait = root();
    wait.0.kind = RecordKind::GateResolved;
    wait.1.parent_span_id = vec![1];
    let spans = completed(vec![refresh, wait, ended("t3c1r1")], &[]);
    assert_eq!(spans.len(), 3);
    assert!(spans.iter().all(|span| span.attributes.is_empty()));
}

#[test]
fn runs_that_wait_are_bounded_and_so_are_spans_with_texts() {
    let calls = [("a", "{}"); 99];
    let messages = [answer("", &calls)];
    let runs = |count: usize| (1..=count).map(|run| ended(&format!("t3c1r{run}"))).collect();
    assert_eq!(completed(runs(MAX_WAITING), &messages).len(), 0);
    assert_eq!(completed(runs(MAX_WAITING + 1), &messages).len(), 1);
    let mut texts = SpanTexts::default();
    for (line, span) in [ended("t3c1r1"), root()] {
        texts.take(&line, span);
    }
    let spans = texts.complete(1, |_| messages.to_vec());
    let have_texts: Vec<_> = spans.iter().map(|span| !span.attributes.is_empty()).collect();
    assert_eq!(have_texts, [true, false]);
}

/// A message whose JSON in a list has this many bytes.
fn list_of(bytes: usize) -> Vec<Value> {
    let of = |text: &str| vec![json!({"role": "user", "parts": [text_part(text)]})];
    let bare = Value::Array(of("")).to_string().len();
    of(&"x".repeat(bytes - bare))
}

#[test]
fn an_attribute_is_cut_above_its_bound_and_remains_json() {
    let whole = messages_text(list_of(MAX_CONTENT));
    assert_eq!(whole, Value::Array(list_of(MAX_CONTENT)).to_string());
    let text = messages_text(list_of(MAX_CONTENT + 1));
    assert_eq!(text.len(), MAX_CONTENT);
    let value: Value = serde_json::from_str(&text).unwrap();
    assert!(value[0]["parts"][0]["content"].as_str().unwrap().ends_with("x… [cut]"));
    // Characters of several bytes, and those that JSON escapes.
    for character in ["ä", "𝄞", "\"", "\n", "\u{1}"] {
        let long = character.repeat(MAX_CONTENT);
        let text = messages_text(vec![json!({"role": "user", "parts": [text_part(&long)]})]);
        assert!(
            text.len() <= MAX_CONTENT && text.len() > MAX_CONTENT - 16,
            "{}",
            text.len()
        );
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value[0]["role"], "user");
    }
}

#[test]
fn of_several_texts_the_long_ones_are_cut() {
    let messages = vec![
        json!({"role": "user", "parts": [text_part("short")]}),
        json!({"role": "user", "parts": [text_part(&"x".repeat(MAX_CONTENT))]}),
    ];
    let value: Value = serde_json::from_str(&messages_text(messages)).unwrap();
    assert_eq!(value[0]["parts"][0]["content"], "short");
    assert!(value[1]["parts"][0]["content"].as_str().unwrap().ends_with(CUT));
}

#[test]
fn of_too_many_messages_the_newest_are_kept() {
    let many = |count: usize| -> Vec<Value> {
        let one =
            |number: usize| json!({"role": "user", "parts": [text_part(&format!("{number} {}", "x".repeat(90)))]});
        (0..count).map(one).collect()
    };
    let text = messages_text(many(1_000));
    assert!(text.len() <= MAX_CONTENT, "{}", text.len());
    let value: Value = serde_json::from_str(&text).unwrap();
    let kept = value.as_array().unwrap();
    let content = |message: &Value| message["parts"][0]["content"].as_str().unwrap().to_owned();
    let left = 1_000 - (kept.len() - 1);
    assert_eq!(content(&kept[0]), format!("[{left} older messages are left out]"));
    assert!(content(&kept[1]).starts_with(&format!("{left} x")));
    assert!(content(kept.last().unwrap()).starts_with("999 x"));
}

#[test]
fn arguments_with_too_many_fields_are_a_text() {
    let fields = |count: usize| {
        let fields = (0..count).map(|number| (format!("field{number:08}"), Value::from(number)));
        Value::Object(fields.collect()).to_string()
    };
    let few: Value = serde_json::from_str(&arguments_text(&fields(10))).unwrap();
    assert_eq!(few["field00000009"], 9);
    let text = arguments_text(&fields(10_000));
    assert!(text.len() <= MAX_CONTENT, "{}", text.len());
    let value: Value = serde_json::from_str(&text).unwrap();
    assert!(value.as_str().unwrap().ends_with(CUT), "{text}");
    let long = json!({"text": "x".repeat(MAX_CONTENT)}).to_string();
    let value: Value = serde_json::from_str(&arguments_text(&long)).unwrap();
    assert!(value["text"].as_str().unwrap().ends_with(CUT));
}

#[test]
fn a_result_is_cut_above_its_bound() {
    let of = |bytes: usize| {
        let messages = [answer("", &[("a", "{}")]), result(0, &"x".repeat(bytes))];
        let spans = completed(vec![ended("t3c1r1")], &messages);
        text_of(&spans[0], "gen_ai.tool.call.result").unwrap()
    };
    assert_eq!(of(MAX_CONTENT), "x".repeat(MAX_CONTENT));
    let cut = of(MAX_CONTENT + 1);
    assert_eq!((cut.len(), cut.ends_with("x… [cut]")), (MAX_CONTENT, true));
}
