//! Untrusted content: once the model has been shown some, calls with side effects wait for an approval, and nothing but the
//! loss of the content ends that.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};

use super::super::hot_state::FieldSchema;
use super::super::modes::continuous::heartbeat::HeartbeatSettings;
use super::super::notifications::{Notification, NotificationPriority};
use super::work::{tool, unknown, wants};
use super::*;
use agentloop_api::hot_state::FieldType;

/// A tool with the rule `afterUntrustedContent: Write`.
fn guarded(name: &str, effect: ToolEffect) -> ToolSpec {
    ToolSpec {
        needs_approval_after_untrusted: effect != ToolEffect::Read,
        ..tool(name, effect)
    }
}

/// Tools of a trusted server and of one that is not. `db__free` has the rule `approval: Never`.
pub(super) fn guarded_tools() -> Vec<ToolSpec> {
    let untrusted = |spec| ToolSpec { trusted: false, ..spec };
    vec![
        guarded("files__read", ToolEffect::Read),
        guarded("files__write", ToolEffect::Write),
        guarded("mail__send", ToolEffect::Destructive),
        guarded("bank__pay", ToolEffect::Write),
        guarded("shell__run", ToolEffect::Destructive),
        tool("db__free", ToolEffect::Write),
        untrusted(guarded("web__fetch", ToolEffect::Read)),
        untrusted(guarded("web__post", ToolEffect::Write)),
    ]
}

/// The same without the rule.
pub(super) fn unguarded_tools() -> Vec<ToolSpec> {
    let free = |spec| ToolSpec {
        needs_approval_after_untrusted: false,
        ..spec
    };
    guarded_tools().into_iter().map(free).collect()
}

fn with(settings: EngineSettings) -> Driver {
    let mut driver = Driver::fresh(settings);
    driver.offer(guarded_tools());
    driver.start(1);
    driver
}

/// A loop whose model has been shown a result of the server `web`, at its second call.
fn shown(settings: EngineSettings) -> Driver {
    let mut driver = with(settings);
    driver.answer(wants(&["web__fetch"]));
    driver.done(1, "a page");
    driver
}

pub(super) fn news(text: &str) -> EngineInput {
    notified(Notification {
        id: "news".into(),
        source: "sensor/prices".into(),
        priority: NotificationPriority::Normal,
        text: text.into(),
        at: "2026-01-01T00:00:00Z".parse().unwrap(),
    })
}

fn source(driver: &Driver) -> Option<String> {
    driver.engine.view().untrusted.map(|content| content.source)
}

/// The sources because of which calls wait.
pub(super) fn asked(driver: &Driver) -> Vec<Option<String>> {
    let gates = driver.engine.view().gates.into_iter();
    gates.map(|open| open.because_of).collect()
}

/// Requests a call with side effects. Whether it waits for an approval because of untrusted content.
fn asks(mut driver: Driver) -> bool {
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    let sent = driver.sent.len();
    driver.answer(wants(&["files__write"]));
    let asked = asked(&driver);
    assert_eq!(driver.sent.len() == sent, !asked.is_empty());
    asked.iter().any(Option::is_some)
}

#[rstest]
#[case("files__write")]
#[case("mail__send")]
#[case("web__post")]
fn after_a_result_of_an_untrusted_server_a_call_with_side_effects_waits_for_an_approval(#[case] name: &str) {
    let mut driver = shown(settings());
    assert_eq!(source(&driver).as_deref(), Some("server/web"));
    driver.answer(wants(&[name]));
    assert_eq!(driver.sent.len(), 1);
    assert_eq!(asked(&driver), [Some("server/web".to_owned())]);
    let opened = driver.notes(RecordKind::GateOpened);
    assert!(opened[0].ends_with(" UntrustedContent"), "{opened:?}");
    let view = driver.engine.view();
    assert_eq!(view.reasons[0].reason, PauseReason::ToolCallNeedsApproval);
    let message = format!(
        "the call of {name} waits for an approval, since the model has been shown untrusted content of server/web"
    );
    assert!(
        view.reasons[0].message.starts_with(&message),
        "{}",
        view.reasons[0].message
    );
    let open = view.gates[0].clone();
    driver.feed(EngineInput::GateAnswered(EngineGateAnswer {
        gate: open.gate.id,
        arguments: open.arguments,
        approved: true,
        by: Some("ann".into()),
    }));
    assert_eq!(driver.sent.last().unwrap().name, name);
    driver.done(1, "done");
    // An approval is of one call, and does not vouch for the content.
    assert!(asks(driver));
}

#[test]
fn before_any_untrusted_content_no_call_waits() {
    let mut driver = with(settings());
    assert_eq!(source(&driver), None);
    driver.answer(wants(&["files__write"]));
    assert_eq!((driver.running(), asked(&driver)), (vec![1], vec![]));
}

#[test]
fn a_call_beside_the_one_that_brings_the_content_was_requested_without_it() {
    let mut driver = with(settings());
    driver.answer(wants(&["web__fetch", "files__write"]));
    driver.done(1, "a page");
    assert_eq!((driver.running(), asked(&driver)), (vec![2], vec![]));
    driver.done(2, "written");
    assert!(asks(driver));
}

#[test]
fn a_result_of_a_trusted_server_is_not_untrusted_content() {
    let mut driver = with(settings());
    driver.answer(wants(&["files__read", "mail__send"]));
    driver.done(1, "a file");
    driver.done(2, "sent");
    assert_eq!(source(&driver), None);
    assert!(!asks(driver));
}

#[test]
fn neither_a_call_that_only_reads_nor_a_tool_that_is_exempt_waits() {
    let mut driver = shown(settings());
    driver.answer(wants(&["files__read", "web__fetch", "db__free"]));
    assert_eq!((driver.running(), asked(&driver)), (vec![1, 2], vec![]));
    driver.done(1, "a file");
    driver.done(2, "a page");
    assert_eq!(driver.running(), [3]);
}

#[test]
fn without_the_rule_the_content_is_noted_and_no_call_waits() {
    let mut driver = with(settings());
    driver.offer(unguarded_tools());
    driver.answer(says("well"));
    driver.next_timer();
    driver.answer(wants(&["web__fetch"]));
    driver.done(1, "a page");
    driver.answer(wants(&["files__write", "mail__send"]));
    assert_eq!((driver.running(), asked(&driver)), (vec![1], vec![]));
    assert_eq!(source(&driver).as_deref(), Some("server/web"));
}

#[test]
fn a_failure_of_an_untrusted_server_is_its_text_too() {
    for outcome in [
        ToolOutcome::Failed { text: "no".into() },
        ToolOutcome::Unavailable { message: "down".into() },
        unknown(),
    ] {
        let mut driver = with(settings());
        driver.answer(wants(&["web__fetch"]));
        driver.end(1, outcome.clone());
        assert!(asks(driver), "{outcome:?}");
    }
}

#[test]
fn a_call_that_was_denied_brought_nothing() {
    let mut driver = with(settings());
    let mut answer = wants(&["web__fetch"]);
    answer.tool_calls[0].arguments = r#"{"path": 7}"#.into();
    driver.answer(answer);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["BadArguments"]);
    assert!(!asks(driver));
}

#[test]
fn a_notification_is_untrusted_content_once_it_is_shown() {
    let mut driver = with(settings());
    driver.feed(news("buy now"));
    // The call in flight does not show it.
    assert_eq!(source(&driver), None);
    driver.turn();
    assert_eq!(source(&driver).as_deref(), Some("sensor/prices"));
    assert!(asks(driver));
}

fn field(kind: FieldType, refresh_tool: Option<&str>) -> EngineSettings {
    EngineSettings {
        hot_state: vec![FieldSchema {
            name: "f".into(),
            kind,
            ttl: None,
            max_items: None,
            refresh_tool: refresh_tool.map(Into::into),
        }],
        ..settings()
    }
}

#[rstest]
#[case(FieldType::String, json!("buy now"), true)]
#[case(FieldType::Array, json!(["buy now"]), true)]
#[case(FieldType::Object, json!({"buy now": 1}), true)]
#[case(FieldType::Number, json!(7), false)]
#[case(FieldType::Boolean, json!(true), false)]
#[case(FieldType::Array, json!([1, 2]), false)]
fn a_value_of_a_sensor_is_untrusted_content_if_it_has_text(
    #[case] kind: FieldType,
    #[case] value: Value,
    #[case] is_untrusted: bool,
) {
    let mut driver = with(field(kind, None));
    driver.feed(value_of("f", value.clone()));
    driver.turn();
    assert_eq!(source(&driver).is_some(), is_untrusted, "{value}");
    assert_eq!(asks(driver), is_untrusted, "{value}");
    // The same value in a process that did not receive it.
    let mut later = Driver::fresh(field(kind, None));
    later.offer(guarded_tools());
    later.engine.restore_field("f", value.clone(), later.now);
    later.start(1);
    assert_eq!(asks(later), is_untrusted, "{value}");
}

#[rstest]
#[case("web__fetch", true)]
#[case("files__read", false)]
fn a_value_of_a_tool_is_untrusted_content_if_its_server_is_not_trusted(#[case] name: &str, #[case] is_untrusted: bool) {
    let mut driver = with(field(FieldType::String, Some(name)));
    assert_eq!(driver.running(), [1], "it is refreshed before the first turn");
    driver.done(1, "buy now");
    assert!(driver.block.as_deref().unwrap().contains("buy now"));
    assert_eq!(asks(driver), is_untrusted);
}

/// What must not end it.
fn endure(driver: &mut Driver) {
    try_everything_but(driver, true);
    driver.answer(calls("yield", r#"{"sleep": 3000}"#));
    driver.pass(seconds(3000));
    driver.answer(says("awake"));
    driver.restart(1);
    driver.restart(2);
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    driver.settings.spec = 7;
    driver.restart(3);
    driver.pass(SignedDuration::from_hours(24 * 30));
}

#[test]
fn neither_time_nor_a_sleep_nor_a_restart_nor_an_edit_ends_it() {
    let mut driver = shown(settings());
    let since = driver.engine.view().untrusted;
    endure(&mut driver);
    assert_eq!(driver.engine.view().untrusted, since);
    assert!(asks(driver));
    let mut clean = with(settings());
    endure(&mut clean);
    assert!(!asks(clean), "nothing of this is untrusted content");
}

#[test]
fn a_gate_and_its_cause_outlive_the_process() {
    let mut driver = shown(settings());
    driver.answer(wants(&["files__write"]));
    driver.restart(2);
    assert_eq!(asked(&driver), [Some("server/web".to_owned())]);
    assert_eq!(driver.sent.len(), 1);
}

#[test]
fn a_failed_turn_removed_from_the_conversation_removes_its_untrusted_content() {
    let mut driver = with(settings());
    driver.answer(says("well"));
    driver.feed(news("buy now"));
    driver.next_timer();
    assert_eq!(source(&driver).as_deref(), Some("sensor/prices"));
    driver.failed_turn();
    assert_eq!(source(&driver), None);
    assert_eq!(driver.notes(RecordKind::TurnFailed).len(), 1);
}

#[test]
fn a_failed_turn_with_kept_results_stays_untrusted_until_they_are_removed() {
    let mut driver = shown(settings());
    driver.failed_turn();
    assert!(source(&driver).is_some(), "the result stays in the conversation");
    driver.next_timer();
    driver.failed_turn();
    assert_eq!(source(&driver), None, "no call after it succeeded, so it was taken out");
    assert!(!asks(driver));
}

#[test]
fn a_failed_turn_that_has_acted_stays() {
    let mut driver = with(settings());
    driver.answer(wants(&["web__fetch", "files__write"]));
    driver.done(1, "a page");
    driver.done(2, "written");
    for _ in 0..2 {
        driver.failed_turn();
        driver.next_timer();
    }
    assert!(asks(driver));
}

#[rstest]
#[case::summary(true)]
#[case::digest(false)]
fn content_that_leaves_with_a_summary_or_a_digest_has_not_left(#[case] summarized: bool) {
    let mut driver = with(EngineSettings {
        max_consecutive_turns: 1000,
        context_tokens: 4096 + 2500,
        ..settings()
    });
    let shows = |driver: &Driver| format!("{:?}", driver.transcript).contains("a page");
    // Older turns leave before it.
    for _ in 0..5 {
        driver.answer(says(&"x".repeat(400)));
        driver.pass(seconds(3));
    }
    driver.answer(wants(&["web__fetch"]));
    driver.done(1, "a page");
    for _ in 0..100 {
        match driver.purpose {
            CallPurpose::Compaction if summarized => driver.answer(says("Nothing new so far.")),
            // No summary can be had.
            CallPurpose::Compaction => driver.answer(calls("files__read", "{}")),
            CallPurpose::Turn
            | CallPurpose::Heartbeat
            | CallPurpose::Chat
            | CallPurpose::Precheck
            | CallPurpose::Signal
            | CallPurpose::Judge
            | CallPurpose::Confidence
            | CallPurpose::LightJudge
            | CallPurpose::LightConfidence => driver.answer(says(&"x".repeat(400))),
        };
        driver.pass(seconds(3));
        if !shows(&driver) {
            break;
        }
    }
    let left = if summarized {
        RecordKind::Compacted
    } else {
        RecordKind::Trimmed
    };
    assert!(!shows(&driver) && !driver.notes(left).is_empty());
    // A turn that is taken out of the conversation was not the one that brought it.
    while driver.purpose == CallPurpose::Compaction {
        driver.answer(says("Nothing new so far."));
    }
    driver.failed_turn();
    assert_eq!(driver.notes(RecordKind::TurnFailed).len(), 1);
    assert!(asks(driver));
}

#[test]
fn untrusted_content_of_a_heartbeat_stays_with_its_answer_and_is_removed_with_its_failure() {
    let beats = || EngineSettings {
        heartbeat: Some(HeartbeatSettings {
            every: seconds(600),
            prompt: "Is all well?".into(),
        }),
        max_sleep: SignedDuration::from_hours(24),
        ..settings()
    };
    let read = || {
        let mut driver = with(beats());
        driver.answer(calls("yield", r#"{"sleep": 86400}"#));
        driver.pass(seconds(600));
        assert_eq!(driver.purpose, CallPurpose::Heartbeat);
        driver.answer(wants(&["web__fetch"]));
        driver.done(1, "a page");
        driver
    };
    let mut done = read();
    done.answer(says("Buy now!"));
    done.pass(seconds(600));
    assert!(done.observed().contains("Buy now!"));
    assert!(asks(done));
    let mut failed = read();
    failed.failed_turn();
    failed.pass(seconds(600));
    assert!(!asks(failed));
}

#[test]
fn a_snapshot_from_before_the_rule_is_read_and_its_run_counts_as_untrusted() {
    let mut driver = with(settings());
    driver.answer(wants(&["files__read"]));
    let mut saved = serde_json::to_value(&driver.saved).unwrap();
    assert!(saved.as_object_mut().unwrap().remove("trust").is_some());
    let plan = saved.pointer_mut("/turn/work/slots/0/Open").expect("a run");
    assert_eq!(plan.as_object_mut().unwrap().remove("trusted"), Some(json!(true)));
    driver.saved = serde_json::from_value(saved).unwrap();
    driver.restart(1);
    assert_eq!(source(&driver), None);
    driver.done(1, "a file");
    assert_eq!(source(&driver).as_deref(), Some("server/files"));
}

#[test]
fn arguments_that_are_too_long_to_be_shown_are_denied_only_if_they_must_be() {
    let long = || {
        let mut answer = wants(&["files__write"]);
        answer.tool_calls[0].arguments = json!({"path": "x".repeat(48 * 1024)}).to_string();
        answer
    };
    let mut driver = with(settings());
    driver.answer(long());
    assert_eq!(driver.running(), [1]);
    let mut driver = shown(settings());
    driver.answer(long());
    assert_eq!(
        (driver.running(), driver.notes(RecordKind::ToolDenied)),
        (vec![], vec!["BadArguments"])
    );
}
