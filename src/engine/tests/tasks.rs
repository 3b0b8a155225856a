//! Mode Task: one conversation, one response for each task, and its limits.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};

use super::rates::limit;
use super::work::wants;
use super::*;
use crate::settings::TaskSettings;
use crate::tasks::{TaskChange, TaskOffer, TaskOrigin, TaskResponse};
use agentloop_api::task::{TaskLimit, TaskOutcome};

/// The worker's table of tasks.
#[derive(Clone, Debug, Default)]
pub(super) struct TaskTable {
    /// In the order of their arrival.
    pub(super) waiting: Vec<TaskOffer>,
    /// Each origin of a task that was started, the one that waits longest since then first.
    served: Vec<TaskOrigin>,
    started: Vec<String>,
    pub(super) responses: Vec<TaskResponse>,
}

impl TaskTable {
    pub(super) fn change(&mut self, record: &JournalRecord) {
        match record.task.as_deref() {
            Some(TaskChange::Accepted(offer)) => {
                assert!(!self.waiting.contains(offer), "accepted twice");
                self.waiting.push(offer.clone());
            }
            Some(TaskChange::Started(id)) => {
                assert_eq!(self.start_next().id, *id, "of the origin that waits longest, the first");
                self.started.push(id.clone());
            }
            Some(TaskChange::Ended(response)) => {
                if self.waiting.iter().any(|task| task.id == response.id) {
                    assert_eq!(
                        self.waiting.remove(0).id,
                        response.id,
                        "the loop has ended: in order of arrival"
                    );
                    self.started.push(response.id.clone());
                }
                assert_eq!(self.started.last(), Some(&response.id), "one at a time");
                assert_eq!(self.responses.len() + 1, self.started.len(), "one response each");
                self.responses.push(response.clone());
            }
            None => {}
        }
    }

    pub(super) fn forget_served(&mut self) {
        self.served.clear();
    }

    /// With fewer origins than the loop remembers.
    fn start_next(&mut self) -> TaskOffer {
        let served = |task: &TaskOffer| self.served.iter().position(|origin| *origin == task.origin);
        let places = 0..self.waiting.len();
        let next = places.min_by_key(|place| (served(&self.waiting[*place]), *place));
        let task = self.waiting.remove(next.expect("a task that waits"));
        self.served.retain(|origin| *origin != task.origin);
        self.served.push(task.origin.clone());
        task
    }
}

pub(super) fn mode() -> TaskSettings {
    TaskSettings {
        prompt: None,
        min_interval: None,
        idle_pod: None,
        max_iterations: 10,
        max_tokens: 100_000,
        max_duration: seconds(300),
        response_schema: None,
        answer_schema: None,
    }
}

pub(super) fn with(task: TaskSettings) -> EngineSettings {
    EngineSettings {
        mode: ModeSettings::Task(task),
        ..settings()
    }
}

fn task(id: &str) -> TaskOffer {
    TaskOffer {
        id: id.into(),
        origin: TaskOrigin::Sensor("mail".into()),
        prompt: format!("answer {id}"),
        untrusted: None,
    }
}

/// A reactive loop with tools, at work on the task `a`.
pub(super) fn at_work(task_settings: TaskSettings) -> Driver {
    let mut driver = Driver::with_tools(with(task_settings));
    driver.take("a");
    driver
}

fn finishes(result: &Value) -> ModelAnswer {
    calls("finish", &json!({ "result": result }).to_string())
}

impl Driver {
    pub(super) fn take(&mut self, id: &str) {
        self.feed(EngineInput::TaskOffered(task(id)));
    }

    pub(super) fn response(&self) -> &TaskResponse {
        self.tasks.responses.last().expect("a response")
    }

    pub(super) fn answered_tasks(&self) -> Vec<(&str, TaskOutcome)> {
        let responses = self.tasks.responses.iter();
        responses.map(|response| (&*response.id, response.outcome)).collect()
    }
}

#[test]
fn a_reactive_loop_sleeps_until_a_task_arrives_and_after_its_response() {
    let mut driver = Driver::with_tools(with(mode()));
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.in_flight, None);
    assert_eq!(driver.timer, None);
    driver.take("a");
    assert_eq!(driver.state(), LoopState::Running);
    assert_eq!(
        driver.observed(),
        "Turn 1, 2026-01-01T00:00:00Z: task a, from sensor/mail.\n\nanswer a"
    );
    assert_eq!(driver.offered[0], "finish");
    driver.answer(says("42"));
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.response().result, Some(json!("42")));
    assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Completed)]);
    assert_eq!(driver.transcript, []);
    assert_eq!(driver.engine.view().recent_tasks[0].iterations, 1);
}

#[rstest]
#[case::as_many_as_are_kept(10, "t1")]
#[case::one_more(11, "t2")]
fn the_last_ten_ended_tasks_are_reported_newest_first(#[case] tasks: usize, #[case] oldest: &str) {
    let mut driver = Driver::with_tools(with(mode()));
    for number in 1..=tasks {
        driver.take(&format!("t{number}"));
        driver.answer(says("done"));
    }
    let recent = driver.engine.view().recent_tasks;
    let newest = format!("t{tasks}");
    assert_eq!(
        (recent.len(), recent[0].id.as_str(), recent[9].id.as_str()),
        (10, newest.as_str(), oldest)
    );
}

#[test]
fn tasks_of_one_origin_are_answered_in_order_and_in_separate_conversations() {
    let mut driver = at_work(mode());
    driver.take("b");
    driver.take("c");
    driver.take("b");
    assert_eq!(driver.engine.view().waiting_tasks, 2);
    driver.answer(finishes(&json!("first")));
    assert!(driver.observed().ends_with("task b, from sensor/mail.\n\nanswer b"));
    assert_eq!(driver.prompt.len(), 2, "the system message and the task");
    driver.answer(says("second"));
    driver.take("b");
    driver.answer(says("third"));
    driver.answer(says("fourth"));
    // The worker knows that `b` is over; the engine no longer does.
    let ids: Vec<&str> = driver.answered_tasks().iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, ["a", "b", "c", "b"]);
}

#[test]
fn the_task_of_the_spec_runs_once_for_each_spec() {
    let own = TaskSettings {
        prompt: Some("count the stars".into()),
        ..mode()
    };
    let mut driver = Driver::with_tools(with(own));
    assert!(
        driver
            .observed()
            .ends_with("task spec-0000000000000000-1.\n\ncount the stars")
    );
    driver.restart(1);
    driver.answer(says("9096"));
    driver.restart(2);
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.settings.spec = 1;
    driver.restart(3);
    driver.answer(says("9097"));
    assert_eq!(driver.tasks.responses.len(), 2);
    assert_eq!(driver.state(), LoopState::Sleeping);
}

#[test]
fn a_task_uses_tools_and_its_response_counts_its_calls_and_tokens() {
    let mut driver = at_work(mode());
    let answer = |mut answer: ModelAnswer| {
        (answer.tokens, answer.cost) = (Some(70), Some(5));
        answer
    };
    driver.answer(answer(wants(&["files__read"])));
    driver.done(1, "a file");
    driver.answer(answer(says("read")));
    let TaskResponse {
        iterations,
        tokens_used,
        ..
    } = *driver.response();
    assert_eq!((iterations, tokens_used), (2, 140));
    assert_eq!(driver.engine.view().recent_tasks[0].cost, 10);
}

/// Calls a tool and gets its result.
pub(super) fn one_call(driver: &mut Driver, place: usize, tokens: u64) {
    let mut answer = calls("files__read", &json!({ "path": place.to_string() }).to_string());
    answer.tokens = Some(tokens);
    driver.answer(answer);
    driver.done(1, &format!("file {place}"));
}

#[test]
fn max_iterations_ends_a_task_at_the_limit_and_not_before() {
    let limited = TaskSettings {
        max_iterations: 3,
        ..mode()
    };
    for (made, answered) in [(2, true), (3, false)] {
        let mut driver = at_work(limited.clone());
        for place in 0..made {
            one_call(&mut driver, place, 1);
        }
        if answered {
            driver.answer(says("done"));
            assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Completed)]);
            continue;
        }
        let response = driver.response();
        assert_eq!(response.outcome, TaskOutcome::LimitReached);
        assert_eq!(response.reason, Some(TaskLimit::MaxIterations));
        assert_eq!(response.error.as_deref(), Some("Task exceeded iteration limit"));
        assert_eq!(response.iterations, 3);
        // The next task has its own count.
        driver.take("b");
        one_call(&mut driver, 0, 1);
        driver.answer(says("done"));
        assert_eq!(driver.response().outcome, TaskOutcome::Completed);
    }
}

#[rstest]
#[case(99, None)]
#[case(100, Some(TaskLimit::MaxTokens))]
fn max_tokens_ends_a_task_before_another_call(#[case] tokens: u64, #[case] limit: Option<TaskLimit>) {
    let limited = TaskSettings {
        max_tokens: 100,
        ..mode()
    };
    let mut driver = at_work(limited);
    one_call(&mut driver, 0, tokens);
    if limit.is_none() {
        driver.answer(says("done"));
    }
    assert_eq!(driver.response().reason, limit);
}

#[test]
fn a_response_counts_even_if_it_is_the_call_that_reaches_a_limit() {
    let limited = TaskSettings {
        max_tokens: 100,
        max_iterations: 1,
        ..mode()
    };
    let mut driver = at_work(limited);
    driver.answer(ModelAnswer {
        tokens: Some(500),
        ..finishes(&json!("done"))
    });
    assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Completed)]);
}

#[test]
fn max_duration_cancels_the_call_at_the_limit_and_not_before() {
    let mut driver = at_work(mode());
    let call = driver.in_flight.expect("a call");
    driver.pass(seconds(299));
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.in_flight, Some(call));
    driver.pass(seconds(1));
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.cancelled, [call]);
    assert_eq!(driver.response().reason, Some(TaskLimit::MaxDuration));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.take("b");
    driver.answer(says("in time"));
    assert_eq!(driver.response().outcome, TaskOutcome::Completed);
}

#[test]
fn max_duration_awaits_a_tool_run_and_starts_no_further_one() {
    let mut driver = at_work(mode());
    driver.answer(wants(&["files__write", "mail__send"]));
    assert_eq!(driver.running(), [1]);
    driver.pass(seconds(300));
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.running(), [1]);
    assert!(driver.tasks.responses.is_empty());
    driver.done(1, "written");
    assert_eq!(driver.running(), Vec::<u32>::new());
    assert_eq!(driver.response().reason, Some(TaskLimit::MaxDuration));
    assert_eq!(driver.sent.len(), 1);
}

#[test]
fn time_in_a_pause_and_between_two_processes_does_not_count() {
    let mut driver = at_work(mode());
    driver.pass(seconds(200));
    driver.feed(EngineInput::LinkLost);
    driver.fail(FailureKind::LinkLost);
    driver.pass(seconds(5000));
    driver.feed(EngineInput::LinkBack);
    driver.restart(1);
    driver.pass(seconds(99));
    driver.feed(EngineInput::Timer);
    assert!(driver.tasks.responses.is_empty());
    assert!(driver.in_flight.is_some());
    driver.pass(seconds(201));
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.response().reason, Some(TaskLimit::MaxDuration));
}

#[test]
fn a_failed_call_fails_the_task_and_it_is_not_tried_again() {
    let mut driver = at_work(mode());
    driver.take("b");
    driver.fail(FailureKind::BadResponse);
    let response = driver.response();
    assert_eq!((&*response.id, response.outcome), ("a", TaskOutcome::Failed));
    assert!(
        response
            .error
            .as_deref()
            .is_some_and(|text| text.contains("what to do"))
    );
    driver.next_timer();
    driver.answer(says("b is fine"));
    assert_eq!(driver.answered_tasks()[1], ("b", TaskOutcome::Completed));
}

#[test]
fn failures_in_a_row_pause_the_loop_and_a_response_ends_the_row() {
    let mut driver = Driver::with_tools(with(mode()));
    let fail = |driver: &mut Driver, id: &str| {
        driver.take(id);
        while driver.in_flight.is_none() {
            driver.next_timer();
        }
        driver.fail(FailureKind::BadResponse);
    };
    for id in ["1", "2", "3", "4"] {
        fail(&mut driver, id);
    }
    assert_eq!(driver.reasons(), []);
    driver.take("good");
    driver.next_timer();
    driver.answer(says("fine"));
    for id in ["5", "6", "7", "8"] {
        fail(&mut driver, id);
    }
    assert_eq!(driver.reasons(), []);
    fail(&mut driver, "9");
    assert_eq!(driver.reasons(), [PauseReason::ConsecutiveErrors]);
    driver.take("waits");
    assert_eq!(driver.in_flight, None);
    driver.next_timer();
    driver.answer(says("fine"));
    assert_eq!(driver.response().id, "waits");
}

#[test]
fn a_response_must_match_the_schema_and_the_model_may_try_again() {
    let schema = json!({
        "type": "object",
        "properties": {"severity": {"$ref": "#/$defs/level"}},
        "required": ["severity"],
        "$defs": {"level": {"enum": ["low", "high"]}},
    });
    let structured = TaskSettings {
        response_schema: Some(schema),
        max_iterations: 4,
        ..mode()
    };
    let mut driver = at_work(structured.clone());
    driver.answer(says("it is bad"));
    assert!(
        driver
            .observed()
            .contains("not a response of the required form: it is not JSON")
    );
    driver.answer(finishes(&json!({"severity": "awful"})));
    assert!(driver.result().starts_with("the response was not accepted: /severity:"));
    driver.answer(finishes(&json!({"severity": "high"})));
    assert_eq!(driver.response().result, Some(json!({"severity": "high"})));
    driver.take("b");
    driver.answer(says(" {\"severity\": \"low\"}\n"));
    assert_eq!(driver.response().result, Some(json!({"severity": "low"})));
    // Each rejected answer counts.
    driver.take("c");
    for _ in 0..4 {
        driver.answer(says("it is bad"));
    }
    assert_eq!(driver.response().reason, Some(TaskLimit::MaxIterations));
}

#[test]
fn an_answer_that_was_cut_is_no_response() {
    let mut driver = at_work(mode());
    driver.answer(ModelAnswer {
        finish: FinishReason::Length,
        ..says("once upon a")
    });
    assert!(driver.observed().contains("cut at the output limit of 4096 tokens"));
    driver.answer(says("no tale"));
    assert_eq!(driver.response().result, Some(json!("no tale")));
}

#[test]
fn a_turn_that_ends_without_an_answer_fails_its_task() {
    let mut driver = at_work(mode());
    one_call(&mut driver, 0, 1);
    driver.answer(says(" "));
    assert_eq!(driver.response().outcome, TaskOutcome::Failed);
}

#[test]
fn a_full_window_of_rates_delays_a_task_and_does_not_end_it() {
    let limited = EngineSettings {
        rate_limits: vec![limit(agentloop_api::agent::LimitedResource::LLMCalls, 1, 60)],
        ..with(mode())
    };
    let mut driver = Driver::with_tools(limited);
    driver.take("a");
    one_call(&mut driver, 0, 1);
    assert_eq!(driver.reasons(), [PauseReason::RateWindow]);
    driver.next_timer();
    driver.answer(says("done"));
    assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Completed)]);
}

#[test]
fn an_agent_that_repeats_itself_fails_its_task_and_not_the_loop() {
    let watched = EngineSettings {
        loop_detection: detection(DetectionMode::Enforce),
        ..with(TaskSettings {
            max_iterations: 1000,
            max_duration: seconds(1_000_000),
            ..mode()
        })
    };
    let watched = EngineSettings {
        max_calls_per_turn: 1000,
        ..watched
    };
    let mut driver = Driver::with_tools(watched);
    driver.take("a");
    for _ in 0..900 {
        if !driver.tasks.responses.is_empty() {
            break;
        }
        if driver.in_flight.is_none() {
            driver.next_timer();
            continue;
        }
        driver.answer(wants(&["files__read"]));
        if !driver.running.is_empty() {
            driver.done(1, "the same");
        }
    }
    assert_eq!(driver.response().reason, Some(TaskLimit::LoopDetected));
    assert_eq!(driver.state(), LoopState::Sleeping);
    driver.take("b");
    driver.answer(wants(&["files__read"]));
    driver.done(1, "the same");
    driver.answer(says("done"));
    assert_eq!(driver.response().outcome, TaskOutcome::Completed);
}

#[test]
fn a_kill_at_any_record_loses_no_task_and_answers_none_twice() {
    let script = |driver: &mut Driver, step: u32| match (step, driver.running.is_empty()) {
        (_, false) => {
            driver.done(1, "a file");
        }
        (_, true) if driver.in_flight.is_some() => {
            let second = driver.transcript.len() > 1;
            driver.answer(if second { says("done") } else { wants(&["files__read"]) });
        }
        _ => {
            driver.next_timer();
        }
    };
    for kill in 0..20 {
        let mut driver = at_work(mode());
        driver.take("b");
        for step in 0..40 {
            if step == kill {
                driver.restart(i64::from(kill % 2) + 1);
            }
            if driver.tasks.responses.len() == 2 {
                break;
            }
            script(&mut driver, step);
        }
        assert_eq!(
            driver.answered_tasks(),
            [("a", TaskOutcome::Completed), ("b", TaskOutcome::Completed)],
            "killed before step {kill}"
        );
    }
}

fn task_event(id: &str) -> EngineInput {
    EngineInput::Sensed(crate::sensor_events::SensedEvent {
        id: id.into(),
        sensor: "mail".into(),
        at: "2026-01-01T00:00:00Z".parse().unwrap(),
        updates: Vec::new(),
        notices: vec![crate::sensor_events::SensedNotification {
            source: "sensor/mail".into(),
            priority: crate::notifications::NotificationPriority::Normal,
            text: "answer the mail".into(),
            is_task: true,
        }],
        wakes: vec!["sensor/mail".into()],
    })
}

#[test]
fn an_event_with_a_task_is_a_task_and_its_content_is_untrusted() {
    let mut driver = Driver::with_tools(with(mode()));
    driver.feed(task_event("uid/1"));
    assert!(
        driver
            .observed()
            .ends_with("task uid/1/0, from sensor/mail.\n\nanswer the mail")
    );
    assert_eq!(
        driver.engine.view().untrusted.map(|content| content.source).as_deref(),
        Some("sensor/mail")
    );
    driver.answer(says("done"));
    assert_eq!(
        driver.engine.view().untrusted,
        None,
        "it has left with its conversation"
    );
}

#[test]
fn in_another_mode_a_task_is_a_notification() {
    let mut driver = Driver::started(settings());
    driver.feed(task_event("uid/1"));
    driver.turn();
    assert!(
        driver
            .block
            .as_deref()
            .is_some_and(|block| block.contains("Task: answer the mail"))
    );
}

#[test]
fn a_call_that_waits_for_its_approval_when_the_time_is_over_is_withdrawn() {
    let mut driver = Driver::fresh(with(mode()));
    let asked = crate::tool::ToolSpec {
        needs_approval: true,
        ..super::work::tool("mail__send", ToolEffect::Destructive)
    };
    driver.offer(vec![super::work::tool("files__read", ToolEffect::Read), asked]);
    driver.start(1);
    driver.take("a");
    driver.answer(wants(&["files__read", "mail__send"]));
    driver.pass(seconds(300));
    driver.feed(EngineInput::Timer);
    driver.done(1, "a file");
    assert_eq!(driver.response().reason, Some(TaskLimit::MaxDuration));
    assert!(driver.engine.view().gates.is_empty());
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["TaskEnded"]);
}

#[test]
fn a_task_that_can_never_fit_into_a_budget_fails_and_the_next_one_begins() {
    let mut driver = at_work(mode());
    driver.take("b");
    driver.fail(FailureKind::CallExceedsLimit);
    assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Failed)]);
    while driver.in_flight.is_none() {
        driver.next_timer();
    }
    driver.answer(says("smaller"));
    assert_eq!(driver.answered_tasks()[1], ("b", TaskOutcome::Completed));
}

#[test]
fn a_task_that_ends_the_worker_three_times_fails() {
    let mut driver = at_work(mode());
    for epoch in [1, 1] {
        driver.restart(epoch);
        assert!(driver.tasks.responses.is_empty());
    }
    driver.restart(1);
    assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Failed)]);
}

#[test]
fn a_task_outlasts_any_number_of_pods() {
    let mut driver = at_work(mode());
    for epoch in 2..=20 {
        driver.restart(epoch);
        assert!(driver.tasks.responses.is_empty(), "{epoch}");
    }
    driver.answer(says("done"));
    assert_eq!(driver.answered_tasks(), [("a", TaskOutcome::Completed)]);
}

#[test]
fn a_spec_that_returns_runs_its_task_again_under_another_id() {
    let own = TaskSettings {
        prompt: Some("count the stars".into()),
        ..mode()
    };
    let mut driver = Driver::with_tools(with(own));
    for spec in [0, 1, 0] {
        driver.settings.spec = spec;
        driver.restart(1);
        driver.answer(says("9096"));
    }
    let ids: Vec<&str> = driver.answered_tasks().iter().map(|(id, _)| *id).collect();
    assert_eq!(
        ids,
        [
            "spec-0000000000000000-1",
            "spec-0000000000000001-2",
            "spec-0000000000000000-3"
        ]
    );
}

#[test]
fn unreported_tokens_count_towards_the_limit_and_not_as_used() {
    let limited = TaskSettings {
        max_tokens: 1000,
        ..mode()
    };
    let mut driver = at_work(limited);
    driver.answer(calls("files__read", "{}"));
    driver.done(1, "a file");
    let response = driver.response();
    assert_eq!((response.reason, response.tokens_used), (Some(TaskLimit::MaxTokens), 0));
}
