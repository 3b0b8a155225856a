//! Approvals: a call that needs one runs only after it, exactly as it was shown, and blocks nothing else permanently.

use pretty_assertions::assert_eq;
use rstest::rstest;

use super::super::OpenGate;
use super::super::tool::ApprovalCondition;
use super::work::{tool, tools, unknown, wants};
use super::*;

/// Tools whose calls need an approval, one whose results are untrusted content, and one whose calls need an approval after it.
pub(super) const NAMES: [&str; 5] = ["repo__delete", "bank__pay", "vault__read", "web__fetch", "chat__post"];

/// The usual tools, and those whose calls need an approval.
pub(super) fn gated_tools() -> Vec<ToolSpec> {
    let asks = |spec| ToolSpec {
        needs_approval: true,
        ..spec
    };
    let mut offered = tools();
    offered.push(asks(tool("repo__delete", ToolEffect::Destructive)));
    offered.push(ToolSpec {
        on_unknown: UnknownOutcomePolicy::Ask,
        ..asks(tool("bank__pay", ToolEffect::Write))
    });
    offered.push(asks(tool("vault__read", ToolEffect::Read)));
    offered.push(ToolSpec {
        trusted: false,
        ..tool("web__fetch", ToolEffect::Read)
    });
    offered.push(ToolSpec {
        needs_approval_after_untrusted: true,
        ..tool("chat__post", ToolEffect::Write)
    });
    offered
}

impl Driver {
    pub(super) fn with_gates(settings: EngineSettings) -> Self {
        let mut driver = Self::fresh(settings);
        driver.offer(gated_tools());
        driver.start(1);
        driver
    }

    fn gates(&self) -> Vec<OpenGate> {
        self.engine.view().gates
    }

    pub(super) fn gate_ids(&self) -> Vec<String> {
        self.gates().into_iter().map(|open| open.gate.id).collect()
    }

    pub(super) fn answer_gate(&mut self, id: &str, approved: bool) {
        let gate = self.gates().into_iter().find(|open| open.gate.id == id);
        let arguments = gate.expect("an open gate").arguments;
        self.answer_with_hash(id, approved, &arguments);
    }

    fn answer_with_hash(&mut self, id: &str, approved: bool, arguments: &str) {
        self.answer_as(id, approved, arguments, approved.then_some("ann"));
    }

    fn answer_as(&mut self, id: &str, approved: bool, arguments: &str, by: Option<&str>) {
        self.feed(EngineInput::GateAnswered(EngineGateAnswer {
            gate: id.into(),
            arguments: arguments.into(),
            approved,
            by: by.map(str::to_owned),
        }));
    }
}

/// A loop that waits for the approval of a repetition.
pub(super) fn of_unknown_outcome() -> Driver {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["bank__pay"]));
    driver.answer_gate("e1-t1c1r1", true);
    driver.end(1, unknown());
    driver
}

/// A loop that waits for the approval of a call.
pub(super) fn waiting() -> Driver {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["repo__delete"]));
    driver
}

#[test]
fn a_call_that_needs_an_approval_pauses_the_loop_and_runs_once_it_is_approved() {
    let mut driver = waiting();
    assert_eq!(driver.sent, []);
    assert_eq!(
        (driver.state(), driver.reasons()),
        (LoopState::Paused, vec![PauseReason::ToolCallNeedsApproval])
    );
    assert_eq!(driver.gate_ids(), ["e1-t1c1r1"]);
    assert_eq!(driver.notes(RecordKind::GateOpened), ["e1-t1c1r1 ToolPolicy"]);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(3600)));
    driver.pass(seconds(1800));
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [1]);
    assert_eq!((driver.state(), driver.gates()), (LoopState::Running, vec![]));
    assert_eq!(driver.notes(RecordKind::GateResolved), ["e1-t1c1r1 approved by ann"]);
    driver.done(1, "gone");
    assert_eq!(driver.results(), [("0", "gone")]);
}

#[test]
fn a_call_that_needs_none_is_not_held() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["mail__send"]));
    assert_eq!((driver.running(), driver.gates()), (vec![1], vec![]));
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn a_denied_call_is_not_run_and_is_reported_to_the_model() {
    let mut driver = waiting();
    driver.answer_gate("e1-t1c1r1", false);
    assert_eq!(driver.sent, []);
    assert_eq!(driver.notes(RecordKind::GateResolved), ["e1-t1c1r1 denied"]);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["NotApproved"]);
    assert!(
        driver.result().contains("a person denied this call"),
        "{}",
        driver.result()
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn a_denial_is_recorded_with_the_name_of_its_user_if_known() {
    let mut driver = waiting();
    let arguments = driver.gates()[0].arguments.clone();
    driver.answer_as("e1-t1c1r1", false, &arguments, Some("bob"));
    assert_eq!(driver.sent, []);
    assert_eq!(driver.notes(RecordKind::GateResolved), ["e1-t1c1r1 denied by bob"]);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["NotApproved"]);
    assert!(!driver.result().contains("bob"), "{}", driver.result());
}

#[test]
fn the_lines_about_a_call_name_the_same_arguments_and_the_key_of_its_run() {
    let mut driver = waiting();
    driver.answer_gate("e1-t1c1r1", true);
    driver.done(1, "gone");
    driver.answer(wants(&["repo__delete", "nothing"]));
    driver.answer_gate("e1-t1c2r1", false);
    let of = |kind| driver.lines(kind);
    let [first, second] = of(RecordKind::GateOpened)[..] else {
        panic!("two gates");
    };
    let [approved, denied] = of(RecordKind::GateResolved)[..] else {
        panic!("two answers");
    };
    let sent = of(RecordKind::ToolIntent)[0];
    for line in [approved, sent] {
        assert_eq!((&line.key, &line.arguments), (&first.key, &first.arguments));
    }
    assert_eq!((&denied.key, &denied.arguments), (&second.key, &second.arguments));
    assert!(first.key.is_some() && first.key != second.key);
    // A call that is not run has no key.
    let [unknown, rejected] = of(RecordKind::ToolDenied)[..] else {
        panic!("two denials");
    };
    assert_eq!((&rejected.key, &rejected.arguments), (&None, &second.arguments));
    assert_eq!(rejected.effect, Some(ToolEffect::Destructive));
    assert_eq!((&unknown.tool, unknown.effect), (&None, None));
    assert_eq!(unknown.arguments, second.arguments, "both have none");
}

#[test]
fn a_gate_expires_at_its_time_and_not_a_second_before_which_denies_the_call() {
    let mut driver = waiting();
    driver.pass(seconds(3599));
    assert_eq!((driver.state(), driver.gates().len()), (LoopState::Paused, 1));
    driver.pass(seconds(1));
    assert_eq!((driver.gates(), driver.sent.len()), (vec![], 0));
    assert_eq!(driver.notes(RecordKind::GateResolved), ["e1-t1c1r1 expired"]);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["ApprovalExpired"]);
    assert!(
        driver.result().contains("this call was not approved in time"),
        "{}",
        driver.result()
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    // An answer that is late changes nothing.
    driver.answer_with_hash("e1-t1c1r1", true, "any");
    assert_eq!(driver.sent, []);
}

#[test]
fn nothing_but_its_own_answer_or_its_expiry_ends_the_wait() {
    let mut driver = waiting();
    try_everything_but(&mut driver, true);
    driver.feed(EngineInput::BudgetChanged {
        budget: BudgetState {
            revision: 7,
            ..BudgetState::default()
        },
    });
    let hash = driver.gates()[0].arguments.clone();
    driver.answer_with_hash("e1-t1c1r2", true, &hash);
    driver.answer_with_hash("e2-t1c1r1", true, &hash);
    assert_eq!((driver.sent.len(), driver.gates().len()), (0, 1));
    assert_eq!(driver.state(), LoopState::Paused);
}

#[test]
fn an_approval_of_other_arguments_is_none() {
    let mut driver = waiting();
    let other =
        super::super::tools::admission::arguments_hash(&serde_json::Map::from_iter([("path".into(), "b".into())]));
    assert_ne!(driver.gates()[0].arguments, other);
    driver.answer_with_hash("e1-t1c1r1", true, &other);
    assert_eq!((driver.sent.len(), driver.gates().len()), (0, 1));
}

#[test]
fn the_gates_of_an_answer_open_together_are_answered_one_by_one_and_the_calls_keep_their_order() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["files__read", "repo__delete", "files__write", "bank__pay"]));
    assert_eq!(driver.gate_ids(), ["e1-t1c1r2", "e1-t1c1r4"]);
    // What is before the first gate runs at once, and the loop is not paused meanwhile.
    assert_eq!((driver.running(), driver.state()), (vec![1], LoopState::Running));
    driver.done(1, "read");
    assert_eq!(driver.state(), LoopState::Paused);
    driver.answer_gate("e1-t1c1r4", true);
    assert_eq!((driver.running(), driver.state()), (vec![], LoopState::Paused));
    driver.answer_gate("e1-t1c1r2", false);
    assert_eq!(driver.running(), [3]);
    driver.done(3, "written");
    assert_eq!(driver.running(), [4]);
    driver.done(4, "paid");
    let results: Vec<&str> = driver.results().iter().map(|(place, _)| *place).collect();
    assert_eq!(results, ["0", "1", "2", "3"]);
    // The gate that was waited for never flickered.
    let paused = driver.notes(RecordKind::Transition);
    let times = paused
        .iter()
        .filter(|note| note.ends_with("Paused (ToolCallNeedsApproval)"))
        .count();
    assert_eq!(times, 1, "{paused:?}");
}

#[test]
fn nineteen_gates_are_open_at_a_time_and_the_next_opens_when_one_closes() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["repo__delete"; 22]));
    assert_eq!(driver.gates().len(), 19);
    driver.answer_gate("e1-t1c1r1", false);
    assert_eq!(driver.gates().len(), 19);
    assert_eq!(driver.gate_ids().last().unwrap(), "e1-t1c1r20");
}

#[test]
fn reads_can_need_an_approval_too() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["vault__read", "files__read"]));
    assert_eq!(
        (driver.running(), driver.gate_ids()),
        (vec![], vec!["e1-t1c1r1".to_owned()])
    );
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [1, 2]);
}

#[rstest]
#[case::container(1)]
#[case::pod(2)]
fn a_gate_outlives_the_process_and_keeps_its_id(#[case] epoch: i64) {
    let mut driver = waiting();
    driver.pass(seconds(100));
    driver.restart(epoch);
    assert_eq!(
        (driver.gate_ids(), driver.state()),
        (vec!["e1-t1c1r1".to_owned()], LoopState::Paused)
    );
    assert_eq!(driver.notes(RecordKind::GateOpened).len(), 1);
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [1]);
}

#[test]
fn a_gate_outlives_an_edit_of_the_rule_and_a_suspension() {
    let mut driver = waiting();
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    driver.pass(seconds(2000));
    driver.settings.spec = 7;
    driver.tools = tools();
    driver.tools.push(tool("repo__delete", ToolEffect::Read));
    driver.restart(2);
    assert_eq!(
        (driver.running(), driver.gate_ids()),
        (vec![], vec!["e1-t1c1r1".to_owned()])
    );
    // The rule of the Driver would not ask for an approval any more.
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [1]);
}

#[test]
fn a_gate_that_expired_while_the_loop_was_suspended_stays_open_for_a_minute_after_its_start() {
    let mut driver = waiting();
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    driver.pass(seconds(4000));
    driver.restart(2);
    // An answer that was given in the meantime arrives now.
    driver.pass(seconds(59));
    assert_eq!(driver.gates().len(), 1);
    driver.pass(seconds(1));
    assert_eq!(driver.notes(RecordKind::GateResolved), ["e1-t1c1r1 expired"]);
    assert_eq!((driver.sent.len(), driver.state()), (0, LoopState::Running));
}

#[test]
fn an_approved_call_runs_after_a_long_wait_and_what_waited_behind_it_does_not() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["repo__delete", "files__write"]));
    driver.pass(seconds(3000));
    driver.answer_gate("e1-t1c1r1", true);
    assert_eq!(driver.running(), [1]);
    driver.done(1, "gone");
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["Outdated"]);
    assert_eq!(driver.sent.len(), 1);
}

#[test]
fn an_approval_is_out_of_date_after_a_pause_of_more_than_five_minutes() {
    for (held, sent) in [(300, 1), (301, 0)] {
        let mut driver = waiting();
        driver.feed(EngineInput::LinkLost);
        driver.answer_gate("e1-t1c1r1", true);
        driver.pass(seconds(held));
        driver.feed(EngineInput::LinkBack);
        assert_eq!(driver.sent.len(), sent, "after {held} s");
    }
}

#[test]
fn a_run_of_unknown_outcome_is_repeated_only_if_that_is_approved() {
    let mut driver = of_unknown_outcome();
    assert_eq!(
        (driver.gate_ids(), driver.reasons()),
        (vec!["e1-t1c1r1-try2".to_owned()], vec![PauseReason::UnknownOutcome])
    );
    assert_eq!(driver.sent.len(), 1);
    let opened = driver.notes(RecordKind::GateOpened);
    assert_eq!(*opened.last().unwrap(), "e1-t1c1r1-try2 UnknownOutcome");
    driver.answer_gate("e1-t1c1r1-try2", true);
    assert_eq!(driver.sent.len(), 2);
    assert_eq!(driver.sent[0], driver.sent[1]);
    driver.done(1, "paid");
    assert_eq!(driver.results(), [("0", "paid")]);
}

#[rstest]
#[case::denied(false)]
#[case::crash(true)]
fn without_an_approval_the_unknown_outcome_is_reported_to_the_model(#[case] crash: bool) {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["bank__pay"]));
    driver.answer_gate("e1-t1c1r1", true);
    if crash {
        driver.restart(1);
    } else {
        driver.end(1, unknown());
    }
    driver.restart(1);
    assert_eq!(driver.gate_ids(), ["e1-t1c1r1-try2"]);
    driver.answer_gate("e1-t1c1r1-try2", false);
    assert_eq!(
        (driver.sent.len(), driver.outcomes().last().copied()),
        (1, Some("Unknown"))
    );
    assert!(
        driver.result().contains("a repetition was not approved"),
        "{}",
        driver.result()
    );
}

#[test]
fn three_denials_by_a_person_close_the_tool_for_the_turn() {
    let mut driver = Driver::with_gates(settings());
    for call in 1..=3 {
        driver.answer(wants(&["repo__delete"]));
        driver.answer_gate(&format!("e1-t1c{call}r1"), false);
    }
    driver.answer(wants(&["repo__delete"]));
    assert_eq!(driver.gates(), []);
    assert_eq!(driver.notes(RecordKind::ToolDenied).last(), Some(&"Hidden"));
}

#[test]
fn a_clock_that_was_set_back_makes_no_gate_last_longer() {
    let mut driver = waiting();
    driver.now -= seconds(86_400);
    driver.feed(EngineInput::Timer);
    assert_eq!(driver.gates()[0].gate.expires_at, Some(driver.now + seconds(3600)));
    driver.pass(seconds(3600));
    assert_eq!(driver.gates(), []);
}

#[test]
fn a_yield_beside_a_call_that_was_not_approved_waits_until_the_model_has_seen_it() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["repo__delete", "yield"]));
    driver.answer_gate("e1-t1c1r1", false);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    assert!(driver.result().contains("Not yet"), "{}", driver.result());
}

#[test]
fn a_missing_grant_is_named_and_nothing_is_run() {
    let mut driver = Driver::fresh(settings());
    let mut offered = tools();
    offered.push(ToolSpec {
        missing_grant: Some("github".into()),
        ..tool("github__merge", ToolEffect::Write)
    });
    driver.offer(offered);
    driver.start(1);
    driver.answer(wants(&["github__merge"]));
    assert_eq!(driver.sent, []);
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["MissingGrant"]);
    assert!(driver.result().contains("Missing grant github"), "{}", driver.result());
}

/// How a try ends without an outcome.
#[derive(Clone, Copy, Debug)]
enum TryEnd {
    Unknown,
    Crash,
    /// A spent budget stops the loop, which cancels reads, until there is room again.
    BudgetStop,
}

fn cut_try(driver: &mut Driver, cut: TryEnd) {
    match cut {
        TryEnd::Unknown => driver.end(1, unknown()),
        TryEnd::Crash => driver.restart(1),
        TryEnd::BudgetStop => {
            let budget = |revision, stop: Option<&str>| EngineInput::BudgetChanged {
                budget: BudgetState {
                    revision,
                    held: stop.is_some(),
                    stop: stop.map(Into::into),
                    ..BudgetState::default()
                },
            };
            driver.feed(budget(1, Some("raise spec.limits")));
            if driver.running() == [1] {
                // One with side effects finishes.
                driver.end(1, unknown());
            }
            driver.feed(budget(2, None))
        }
    };
}

#[test]
fn an_approval_is_for_one_try_whatever_the_tool_allows() {
    for spec in [
        ToolSpec {
            on_unknown: UnknownOutcomePolicy::Retry,
            ..tool("disk__wipe", ToolEffect::Destructive)
        },
        ToolSpec {
            idempotent: true,
            ..tool("disk__wipe", ToolEffect::Destructive)
        },
        tool("disk__wipe", ToolEffect::Read),
    ] {
        for cut in [TryEnd::Unknown, TryEnd::Crash, TryEnd::BudgetStop] {
            let mut driver = Driver::fresh(settings());
            driver.offer(vec![ToolSpec {
                needs_approval: true,
                ..spec.clone()
            }]);
            driver.start(1);
            driver.answer(wants(&["disk__wipe"]));
            driver.answer_gate("e1-t1c1r1", true);
            cut_try(&mut driver, cut);
            assert_eq!(
                (driver.sent.len(), driver.gate_ids()),
                (1, vec!["e1-t1c1r1-try2".to_owned()]),
                "{spec:?} {cut:?}"
            );
            driver.answer_gate("e1-t1c1r1-try2", true);
            assert_eq!(driver.sent.len(), 2);
        }
    }
}

#[test]
fn an_approved_repetition_that_was_not_sent_survives_a_restart_without_a_second_gate() {
    let mut driver = of_unknown_outcome();
    driver.feed(EngineInput::LinkLost);
    driver.answer_gate("e1-t1c1r1-try2", true);
    assert_eq!(driver.sent.len(), 1);
    driver.restart(1);
    assert_eq!((driver.gates(), driver.sent.len()), (vec![], 1));
    driver.feed(EngineInput::LinkBack);
    assert_eq!((driver.gates(), driver.sent.len()), (vec![], 2));
}

#[test]
fn approvals_in_any_order_are_valid_once_all_are_recorded() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["repo__delete", "bank__pay"]));
    driver.pass(seconds(60));
    driver.answer_gate("e1-t1c1r2", true);
    driver.pass(seconds(600));
    driver.answer_gate("e1-t1c1r1", true);
    driver.done(1, "gone");
    driver.done(2, "paid");
    assert_eq!(driver.results(), [("0", "gone"), ("1", "paid")]);
}

#[test]
fn the_wait_for_an_approval_is_shown_while_something_else_holds_the_loop_too() {
    let mut driver = Driver::with_gates(settings());
    driver.answer(wants(&["files__read", "repo__delete"]));
    driver.feed(EngineInput::LinkLost);
    driver.done(1, "read");
    let mut reasons = driver.reasons();
    reasons.sort();
    assert_eq!(reasons, [PauseReason::LinkLost, PauseReason::ToolCallNeedsApproval]);
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.reasons(), [PauseReason::ToolCallNeedsApproval]);
}

#[test]
fn the_next_run_has_a_gate_however_many_are_open_behind_it() {
    let mut driver = Driver::fresh(settings());
    let mut offered = gated_tools();
    offered.push(ToolSpec {
        on_unknown: UnknownOutcomePolicy::Ask,
        ..tool("job__run", ToolEffect::Write)
    });
    driver.offer(offered);
    driver.start(1);
    let names: Vec<&str> = ["job__run"].into_iter().chain(["repo__delete"; 25]).collect();
    driver.answer(wants(&names));
    assert_eq!(driver.gates().len(), 19);
    driver.end(1, unknown());
    assert_eq!(driver.gates().len(), 20);
    assert_eq!(
        (driver.gate_ids()[0].as_str(), driver.reasons()),
        ("e1-t1c1r1-try2", vec![PauseReason::UnknownOutcome])
    );
}

#[test]
fn a_call_whose_arguments_are_too_long_to_be_shown_is_denied() {
    for (bytes, gates) in [(48 * 1024, 1), (48 * 1024 + 1, 0)] {
        let mut driver = Driver::with_gates(settings());
        let mut answer = wants(&["repo__delete"]);
        let text = "x".repeat(bytes - r#"{"path":""}"#.len());
        answer.tool_calls[0].arguments = format!(r#"{{"path":"{text}"}}"#);
        driver.answer(answer);
        assert_eq!(driver.gates().len(), gates, "{bytes} bytes");
    }
}

#[test]
fn a_condition_requires_an_approval_only_for_calls_whose_arguments_match() {
    let long = ApprovalCondition::new("long", |arguments| {
        arguments["path"].as_str().is_none_or(|path| path.len() > 3)
    });
    for (path, gates) in [("abc", 0), ("abcd", 1)] {
        let mut driver = Driver::fresh(settings());
        let mut offered = tools();
        offered.push(ToolSpec {
            approval_condition: Some(long.clone()),
            ..tool("bank__pay", ToolEffect::Write)
        });
        driver.offer(offered);
        driver.start(1);
        let mut answer = wants(&["bank__pay"]);
        answer.tool_calls[0].arguments = format!(r#"{{"path":"{path}"}}"#);
        driver.answer(answer);
        assert_eq!(
            (driver.gates().len(), driver.running().len()),
            (gates, 1 - gates),
            "{path}"
        );
        assert!(driver.gates().iter().all(|open| open.because_of.is_none()));
        let opened = driver.notes(RecordKind::GateOpened);
        assert!(opened.iter().all(|note| *note == "e1-t1c1r1 ApprovalCondition"));
    }
}
