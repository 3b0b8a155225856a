//! Requests of users to end the loop.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::goal::{finish, goal};
use super::requests::request;
use super::work::wants;
use super::*;
use agentloop_api::status::LoopOutcome;
use agentloop_api::task::TaskOutcome;

fn stop(driver: &mut Driver, token: &str) {
    driver.feed(EngineInput::StopRequested { token: token.into() });
}

fn is_cancelled(driver: &Driver) -> bool {
    let view = driver.engine.view();
    (view.state, view.outcome) == (LoopState::Stopped, Some(LoopOutcome::Cancelled)) && driver.stopped
}

#[test]
fn the_turn_that_runs_ends_first_and_no_other_begins() {
    let mut driver = Driver::with_tools(settings());
    stop(&mut driver, "1");
    assert_eq!((driver.state(), driver.cancelled.len()), (LoopState::Running, 0));
    driver.answer(wants(&["files__read"]));
    driver.done(1, "a file");
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    driver.answer(says("done"));
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    assert_eq!(driver.engine.view().counts.turns, 1);
    assert_eq!(driver.notes(RecordKind::RequestHandled), ["stop"]);
    assert_eq!(driver.engine.view().handled.stop.as_deref(), Some("1"));
}

#[test]
fn a_loop_that_was_stopped_begins_again_only_in_a_pod_that_is_started_afterwards() {
    let mut driver = Driver::started(settings());
    stop(&mut driver, "1");
    driver.answer(says("done"));
    driver.restart(1);
    assert!(is_cancelled(&driver), "the same pod");
    driver.restart(2);
    driver.pass(seconds(1));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
    stop(&mut driver, "1");
    driver.turn();
    assert_eq!(
        driver.in_flight.unwrap().to_string(),
        "t3c1a1",
        "handled once per value"
    );
    stop(&mut driver, "2");
    driver.answer(says("done"));
    assert!(is_cancelled(&driver));
}

#[test]
fn a_request_to_stop_at_once_cuts_the_turn_which_continues_if_the_loop_starts_again() {
    let mut driver = Driver::started(settings());
    stop(&mut driver, "1");
    stop(&mut driver, "now:2");
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    assert_eq!(driver.cancelled[0].to_string(), "t1c1a1");
    driver.restart(2);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
    driver.answer(says("done"));
    driver.pass(seconds(1));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[rstest]
#[case("1", true)]
#[case("now:1", false)]
fn an_action_that_was_sent_ends_first_and_a_kill_meanwhile_does_not_start_the_loop_again(
    #[case] token: &str,
    #[case] continues: bool,
) {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send"]));
    stop(&mut driver, token);
    assert!(!driver.stopped);
    let killed = driver.clone();
    driver.done(1, "sent");
    if continues {
        driver.answer(says("done"));
    }
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    for epoch in [1, 2] {
        let mut killed = killed.clone();
        killed.restart(epoch);
        if continues {
            killed.answer(says("done"));
        }
        assert!(is_cancelled(&killed), "{epoch}: {:?}", killed.engine.view());
        assert_eq!(killed.sent.len(), 1, "the action is not repeated");
    }
}

#[test]
fn no_turn_begins_after_one_that_the_time_of_its_task_has_ended() {
    let mut driver = Driver::started(settings());
    driver.answer(says("done"));
    driver.ask("a");
    driver.ask("b");
    stop(&mut driver, "1");
    driver.pass(seconds(300));
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    assert_eq!(driver.notes(RecordKind::TurnStarted).len(), 2);
    assert_eq!(
        driver.answered_tasks(),
        [
            ("request-a", TaskOutcome::LimitReached),
            ("request-b", TaskOutcome::Failed)
        ]
    );
}

#[test]
fn a_sleep_and_a_turn_under_a_pause_are_not_waited_for() {
    let mut asleep = Driver::with_tools(settings());
    asleep.answer(calls("yield", r#"{"sleep": 3600}"#));
    stop(&mut asleep, "1");
    assert!(is_cancelled(&asleep));

    let mut paused = Driver::started(settings());
    paused.fail(FailureKind::AuthenticationFailed);
    assert_eq!(paused.state(), LoopState::Paused);
    stop(&mut paused, "1");
    assert!(is_cancelled(&paused), "{:?}", paused.engine.view());
    let mut during = Driver::started(settings());
    stop(&mut during, "1");
    during.fail(FailureKind::AuthenticationFailed);
    assert!(is_cancelled(&during), "{:?}", during.engine.view());
}

#[rstest]
#[case(EngineInput::WakeRequested { token: "w".into() })]
#[case(EngineInput::ResumeRequested { token: "r".into() })]
fn a_wake_or_resume_request_cancels_a_pending_stop(#[case] input: EngineInput) {
    let mut driver = Driver::started(settings());
    stop(&mut driver, "1");
    driver.feed(input);
    driver.turn();
    assert_eq!(driver.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn a_wake_request_during_the_end_is_left_for_the_next_pod() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send"]));
    stop(&mut driver, "now:1");
    assert_eq!(driver.state(), LoopState::Stopping);
    driver.feed(EngineInput::WakeRequested { token: "w".into() });
    assert_eq!(driver.engine.view().handled.wake, None);
}

#[test]
fn a_drain_and_a_suspension_do_not_lose_the_request() {
    for cause in [StopCause::Drain, StopCause::Suspend] {
        let mut driver = Driver::started(settings());
        stop(&mut driver, "1");
        driver.feed(EngineInput::Stop { cause });
        driver.feed(EngineInput::DrainEnded);
        assert!(driver.stopped && driver.engine.view().outcome.is_none());
        driver.restart(2);
        driver.answer(says("done"));
        assert!(is_cancelled(&driver), "{cause:?}: {:?}", driver.engine.view());
    }
}

#[test]
fn requests_that_wait_fail_and_a_goal_that_starts_again_begins_from_its_first_step() {
    let mut driver = Driver::started(settings());
    driver.feed(EngineInput::TaskOffered(request("a")));
    stop(&mut driver, "1");
    driver.answer(says("done"));
    assert!(is_cancelled(&driver));
    assert_eq!(driver.response().outcome, TaskOutcome::Failed);

    // A request that is worked on is cut like any turn, and those behind it wait with it.
    let mut driver = Driver::started(settings());
    driver.answer(says("done"));
    for id in ["a", "b"] {
        driver.feed(EngineInput::TaskOffered(request(id)));
    }
    stop(&mut driver, "now:1");
    assert!(is_cancelled(&driver) && driver.tasks.responses.is_empty());
    driver.restart(2);
    for id in ["request-a", "request-b"] {
        driver.answer(says("well"));
        assert_eq!(driver.response().id, id);
    }

    let mut driver = Driver::started(goal(|_| {}));
    driver.answer(says("one step"));
    driver.pass(seconds(1));
    assert_eq!(driver.engine.view().goal.unwrap().steps, 1);
    stop(&mut driver, "now:1");
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    driver.restart(2);
    let view = driver.engine.view();
    let goal = view.goal.unwrap();
    assert_eq!((view.outcome, goal.end, goal.steps), (None, None, 0));
}

#[test]
fn a_recreated_agent_is_not_stopped_by_the_request_of_the_previous_one() {
    let mut driver = Driver::with_tools(settings());
    stop(&mut driver, "1");
    driver.saved = driver.saved.clone().inherited();
    driver.restart(1);
    driver.answer(says("done"));
    assert!(!is_cancelled(&driver), "{:?}", driver.engine.view());
}

#[test]
fn a_recreated_agent_does_not_inherit_the_outcome_of_the_previous_one() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    stop(&mut driver, "1");
    resume(&mut driver, "r");
    driver.answer(finish("done"));
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
    driver.saved = driver.saved.clone().inherited();
    // Its manifest has the same annotation as the previous one.
    driver.open_requests.stop = Some("1".into());
    driver.restart(1);
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    assert_eq!(driver.goal_view().steps, 0);
    let handled = driver.engine.view().handled;
    assert_eq!((handled.stop.as_deref(), handled.resume), (Some("1"), None));
}

/// The Agent gets another pod while the controller does not know that this request is handled.
fn restart_with_pending(driver: &mut Driver, token: &str) {
    driver.open_requests.stop = Some(token.into());
    driver.restart(2);
}

#[test]
fn a_request_counts_as_handled_once_the_loop_has_ended_or_continues() {
    let mut driver = Driver::started(settings());
    stop(&mut driver, "1");
    assert_eq!(driver.engine.view().handled.stop, None, "the turn has not ended");
    let mut resumed = driver.clone();
    driver.answer(says("done"));
    assert_eq!(driver.engine.view().handled.stop.as_deref(), Some("1"));
    resume(&mut resumed, "r");
    assert_eq!(resumed.engine.view().handled.stop.as_deref(), Some("1"));
}

#[rstest]
#[case("1")]
#[case("now:1")]
fn a_new_journal_ends_for_a_pending_request_before_its_first_turn(#[case] token: &str) {
    let mut driver = Driver::fresh(settings());
    driver.open_requests.stop = Some(token.into());
    driver.start(2);
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    let view = driver.engine.view();
    assert_eq!((view.counts.turns, view.handled.stop.as_deref()), (0, Some(token)));
    assert_eq!(driver.notes(RecordKind::RequestHandled), ["stop"]);
}

#[test]
fn a_loop_whose_end_was_not_reported_stays_ended_in_the_next_pod() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.turn();
    stop(&mut driver, "1");
    driver.answer(says("Not yet."));
    assert!(is_cancelled(&driver));
    restart_with_pending(&mut driver, "1");
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    assert_eq!(driver.goal_view().steps, 2, "it has not begun again");
    driver.open_requests.stop = None;
    driver.restart(3);
    assert_eq!(
        driver.engine.view().outcome,
        None,
        "the controller knows of the end, and starts it again"
    );
    assert_eq!(driver.goal_view().steps, 0);
}

#[test]
fn a_request_received_after_the_end_ends_the_restarted_loop() {
    let mut driver = Driver::with_goal(goal(|_| {}));
    driver.answer(finish("done"));
    assert_eq!(driver.engine.view().outcome, Some(LoopOutcome::Completed));
    restart_with_pending(&mut driver, "1");
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
}

#[test]
fn an_earlier_state_of_the_volume_ends_after_the_turn_that_is_open_in_it() {
    let mut driver = Driver::started(settings());
    let mut earlier = driver.clone();
    stop(&mut driver, "1");
    driver.answer(says("done"));
    restart_with_pending(&mut earlier, "1");
    assert_eq!(earlier.in_flight.unwrap().to_string(), "t1c1a1");
    earlier.answer(says("done"));
    assert!(is_cancelled(&earlier), "{:?}", earlier.engine.view());
}

#[test]
fn a_cancelled_stop_request_does_not_end_the_loop_in_the_next_pod() {
    let mut driver = Driver::started(settings());
    stop(&mut driver, "1");
    resume(&mut driver, "r");
    restart_with_pending(&mut driver, "1");
    driver.turn();
    assert_eq!(driver.engine.view().outcome, None);
    assert_eq!(driver.engine.view().handled.stop.as_deref(), Some("1"));
}

/// All requests are open, and fed as the worker does, when the process of the next pod starts.
fn restart_with_all_open(driver: &mut Driver, stop: &str) {
    driver.open_requests = OpenRequests {
        wake: Some("w".into()),
        resume: Some("r".into()),
        stop: Some(stop.into()),
    };
    driver.restart(2);
    driver.feed(EngineInput::WakeRequested { token: "w".into() });
    driver.feed(EngineInput::ResumeRequested { token: "r".into() });
    driver.feed(EngineInput::StopRequested { token: stop.into() });
}

fn handles_all(driver: &Driver, stop: &str) -> bool {
    let handled = driver.engine.view().handled;
    [handled.wake, handled.resume, handled.stop] == ["w", "r", stop].map(|token| Some(token.to_owned()))
}

#[rstest]
#[case::before_the_first_turn(false, "1")]
#[case::after_the_open_turn(true, "1")]
#[case::in_the_open_turn(true, "now:1")]
fn open_wake_and_resume_requests_do_not_cancel_a_stop_that_is_new_to_the_journal(
    #[case] in_turn: bool,
    #[case] token: &str,
) {
    let mut driver = Driver::started(settings());
    if !in_turn {
        driver.answer(says("done"));
    }
    restart_with_all_open(&mut driver, token);
    if in_turn && token == "1" {
        assert_eq!(driver.in_flight.unwrap().to_string(), "t1c1a1");
        assert_eq!(driver.engine.view().handled.stop, None, "the turn has not ended");
        driver.answer(says("done"));
    }
    assert!(is_cancelled(&driver), "{:?}", driver.engine.view());
    assert!(handles_all(&driver, token), "{:?}", driver.engine.view().handled);
    assert_eq!(driver.notes(RecordKind::RequestHandled), ["wake", "resume", "stop"]);
    assert_eq!(
        driver.engine.view().counts.turns,
        i64::from(token == "1"),
        "no other turn, and one that is cut stays open"
    );
    // The end was not reported: it holds in the next pod too.
    driver.restart(3);
    assert!(is_cancelled(&driver) && handles_all(&driver, token));
}

#[test]
fn a_wake_that_came_after_the_stop_as_the_journal_proves_is_not_lost() {
    let mut ended = Driver::started(settings());
    stop(&mut ended, "1");
    let mut waits = ended.clone();
    ended.answer(says("done"));
    restart_with_all_open(&mut ended, "1");
    assert!(is_cancelled(&ended));
    assert_eq!(ended.engine.view().handled.wake, None, "it starts the loop again");

    restart_with_all_open(&mut waits, "1");
    waits.turn();
    assert_eq!(waits.in_flight.unwrap().to_string(), "t2c1a1");
}

#[test]
fn a_stop_of_a_loop_that_ends_is_left_open_as_the_requests_before_it_are() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send"]));
    stop(&mut driver, "now:1");
    driver.feed(EngineInput::WakeRequested { token: "w".into() });
    stop(&mut driver, "2");
    driver.done(1, "sent");
    assert!(is_cancelled(&driver));
    let handled = driver.engine.view().handled;
    assert_eq!((handled.wake, handled.stop.as_deref()), (None, Some("now:1")));
}
