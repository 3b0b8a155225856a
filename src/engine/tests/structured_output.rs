//! Which calls send the schema of their answer to the server.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};

use super::goal::{criterion, finish, goal, judge};
use super::rates::limit;
use super::work::wants;
use super::*;
use crate::answer_schema::AnswerSchema;
use crate::hot_state::FieldSchema;
use crate::modes::continuous::heartbeat::HeartbeatSettings;
use crate::precheck::PreCheckSettings;
use crate::resources::ResourceLimit;
use crate::scoring::ScoreQuestion;
use crate::tasks::{TaskOffer, TaskOrigin};
use StructuredOutput::{Always, Disabled, WithoutTools};
use agentloop_api::AgentSpec;
use agentloop_api::agent::LimitedResource;
use agentloop_api::hot_state::FieldType;

/// The name of the schema in the call last sent, and the fields that an answer has.
fn sent_schema(driver: &Driver) -> Option<(&'static str, Vec<String>)> {
    let schema = driver.answer_schema.as_ref()?;
    let fields = schema.schema["properties"].as_object().unwrap();
    Some((schema.name, fields.keys().cloned().collect()))
}

/// The schema says the same as the text of the question.
fn assert_is_asked_for(driver: &Driver, name: &str) {
    let (told, fields) = sent_schema(driver).expect("a schema");
    assert_eq!(told, name);
    let Message::System { text } = &*driver.prompt[0] else {
        panic!("no system message");
    };
    for field in fields {
        assert!(text.contains(&format!("\"{field}\": ")), "{field} is not in: {text}");
    }
    assert_eq!(driver.offered, [""; 0]);
}

fn judged(main: StructuredOutput, light: StructuredOutput) -> Driver {
    let mut driver = Driver::with_goal(EngineSettings {
        structured_output: main,
        light_structured_output: light,
        ..goal(|goal| {
            goal.criteria = vec![criterion("sense", judge())];
            goal.confidence_every = 1;
        })
    });
    assert_eq!(sent_schema(&driver), None, "a step has tools and no form");
    driver.answer(finish("done"));
    assert_eq!(driver.purpose, CallPurpose::Judge);
    driver
}

#[rstest]
#[case(WithoutTools)]
#[case(Always)]
fn questions_of_a_goal_send_the_schema_of_their_answer(#[case] main: StructuredOutput) {
    let mut driver = judged(main, Disabled);
    assert_is_asked_for(&driver, "verdict");
    driver.restart(2);
    assert_is_asked_for(&driver, "verdict");
    driver.answer(says(r#"{"met": false, "reason": "too short"}"#));
    assert_eq!(driver.purpose, CallPurpose::Confidence);
    assert_is_asked_for(&driver, "confidence");
    driver.answer(says(r#"{"confidence": 90, "reason": "close"}"#));
    driver.next_timer();
    assert_eq!((driver.purpose, sent_schema(&driver)), (CallPurpose::Turn, None));
}

#[test]
fn each_model_has_its_own_setting() {
    assert_eq!(sent_schema(&judged(Disabled, Always)), None);
    assert_eq!(sent_schema(&pre_checked(Always, Disabled)), None);
    assert_eq!(sent_schema(&scored(Always, Disabled)), None);
}

/// A loop whose pre-check is asked.
fn pre_checked(main: StructuredOutput, light: StructuredOutput) -> Driver {
    let price = FieldSchema {
        name: "price".into(),
        kind: FieldType::Number,
        ttl: None,
        max_items: None,
        refresh_tool: None,
    };
    let mut driver = Driver::fresh(EngineSettings {
        pre_check: Some(PreCheckSettings {
            prompt: None,
            max_output_tokens: 64,
        }),
        hot_state: vec![price],
        structured_output: main,
        light_structured_output: light,
        ..settings()
    });
    driver.start(1);
    assert_eq!(sent_schema(&driver), None);
    driver.feed(value_of("price", json!(5)));
    driver.answer(calls("yield", "nonsense"));
    driver.answer(calls("yield", r#"{"sleep": 100}"#));
    driver.feed(value_of("price", json!(6)));
    driver.pass(seconds(100));
    assert_eq!(driver.purpose, CallPurpose::Precheck);
    driver
}

/// A limit that counts tokens.
fn tokens() -> ResourceLimit {
    limit(LimitedResource::LLMTokens, 1_000_000, 3600)
}

/// A loop that asks for a score.
fn scored(main: StructuredOutput, light: StructuredOutput) -> Driver {
    let mut driver = Driver::started(EngineSettings {
        light_output_tokens: Some(64),
        rate_limits: vec![tokens()],
        structured_output: main,
        light_structured_output: light,
        ..settings()
    });
    driver.answer(calls("yield", r#"{"sleep": 600}"#));
    driver.feed(EngineInput::Score(ScoreQuestion {
        id: "a".into(),
        signal: "signal/prices/spike".into(),
        prompt: "How likely is a spike?".into(),
        data: "5".into(),
    }));
    assert_eq!(driver.purpose, CallPurpose::Signal);
    driver
}

#[test]
fn questions_to_the_light_model_send_the_schema_of_their_answer() {
    assert_is_asked_for(&pre_checked(Disabled, WithoutTools), "decision");
    assert_is_asked_for(&scored(Disabled, WithoutTools), "score");
}

#[test]
fn a_question_without_reported_usage_counts_with_its_schema() {
    let used = |output: StructuredOutput| {
        let mut driver = scored(Disabled, output);
        let tokens = |driver: &Driver| driver.engine.state.used.used(tokens(), driver.now);
        let before = tokens(&driver);
        driver.answer(says(r#"{"score": 85}"#));
        tokens(&driver) - before
    };
    let schema = AnswerSchema::of_question(CallPurpose::Signal).unwrap();
    assert_eq!(used(Always), used(Disabled) + sizes::schema_size(Some(&schema)));
}

/// A spec in mode Task with this schema.
fn spec(output: &str, schema: &Value) -> AgentSpec {
    let model = json!({"api": "OpenAIChat", "name": "m", "baseURL": "http://unused", "structuredOutput": output});
    let spec = json!({"mode": "Task", "instructions": "Triage.", "model": model, "task": {"responseSchema": schema}});
    serde_json::from_value(spec).unwrap()
}

fn severity() -> Value {
    json!({
        "type": "object",
        "properties": {"severity": {"type": "string", "enum": ["low", "high"]}},
        "required": ["severity"],
        "additionalProperties": false,
    })
}

/// A loop at work on a task.
fn at_work(output: &str, schema: &Value) -> Driver {
    let settings = EngineSettings::try_from(&spec(output, schema)).unwrap();
    let mut driver = Driver::with_tools(settings);
    driver.feed(EngineInput::TaskOffered(TaskOffer {
        id: "a".into(),
        origin: TaskOrigin::Sensor("mail".into()),
        prompt: "answer".into(),
        untrusted: None,
    }));
    driver
}

#[test]
fn the_calls_of_a_task_send_the_schema_of_the_response_beside_the_tools() {
    let mut driver = at_work("Always", &severity());
    let form = Some(("response", vec!["severity".to_owned()]));
    assert_eq!((sent_schema(&driver), &*driver.offered[0]), (form.clone(), "finish"));
    driver.answer(wants(&["files__read"]));
    driver.done(1, "mail");
    assert_eq!(sent_schema(&driver), form);
    // A server that ignores it is corrected as before.
    driver.answer(says(r#"{"severity": "awful"}"#));
    assert!(driver.observed().contains("not a response of the required form"));
    assert_eq!(sent_schema(&driver), form);
    driver.answer(says(r#"{"severity": "low"}"#));
    assert_eq!(driver.state(), LoopState::Sleeping);
}

#[rstest]
#[case::opted_out("Disabled", severity())]
#[case::only_without_tools("WithoutTools", severity())]
#[case::no_object("Always", json!({"type": "array", "items": {"type": "string"}}))]
#[case::no_schema("Always", json!({}))]
#[case::too_large("Always", json!({"type": "object", "title": "x".repeat(AnswerSchema::MAX_BYTES)}))]
fn other_tasks_send_no_schema(#[case] output: &str, #[case] schema: Value) {
    assert_eq!(sent_schema(&at_work(output, &schema)), None);
}

#[test]
fn requests_and_heartbeats_send_no_schema() {
    let settings = EngineSettings {
        structured_output: Always,
        light_structured_output: Always,
        heartbeat: Some(HeartbeatSettings {
            every: seconds(60),
            prompt: "ping".into(),
        }),
        ..settings()
    };
    let mut driver = Driver::started(settings);
    driver.answer(calls("yield", r#"{"sleep": 600}"#));
    driver.feed(EngineInput::TaskOffered(TaskOffer {
        id: "a".into(),
        origin: TaskOrigin::Request("ann".into()),
        prompt: "How far are you?".into(),
        untrusted: None,
    }));
    assert_eq!((driver.purpose, sent_schema(&driver)), (CallPurpose::Chat, None));
    driver.answer(says("Half way."));
    driver.pass(seconds(60));
    assert_eq!((driver.purpose, sent_schema(&driver)), (CallPurpose::Heartbeat, None));
}

#[test]
fn the_form_of_a_response_is_a_part_of_the_prompt() {
    let size = |output: &str| at_work(output, &severity()).engine.fixed_tokens();
    let schema = AnswerSchema::new("response", &severity()).unwrap();
    assert_eq!(size("Always"), size("Disabled") + sizes::schema_size(Some(&schema)));
}

#[test]
fn data_for_the_light_model_leaves_room_for_the_form() {
    let cut = |output: StructuredOutput| {
        let settings = EngineSettings {
            light_context_tokens: 256,
            light_structured_output: output,
            ..settings()
        };
        let text = settings.for_light_model(CallPurpose::Signal, &"x".repeat(1_000), 100);
        text.strip_suffix(" [cut]").expect("cut").len()
    };
    let schema = AnswerSchema::of_question(CallPurpose::Signal).unwrap();
    assert_eq!([cut(Disabled), cut(Always)], [412, 412 - schema.bytes()]);
}
