//! Mode `Goal`: what follows calls that are denied, from the first one to a person's decision on the loop.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::approvals::gated_tools;
use super::goal::{ended, goal};
use super::work::tool;
use super::*;
use crate::modes::goal::{ESCALATED_AFTER, HIDDEN_AFTER};
use agentloop_api::goal::GoalEnd;
use agentloop_api::status::{GateKind, LoopOutcome};

const TOOL: &str = "repo__delete";

fn driver() -> Driver {
    let mut driver = Driver::fresh(goal(|goal| goal.max_attempts = 10));
    let mut offered = gated_tools();
    offered.push(ToolSpec {
        missing_grant: Some("repo:admin".into()),
        ..tool("repo__admin", ToolEffect::Write)
    });
    driver.offer(offered);
    driver.start(1);
    driver
}

impl Driver {
    fn requests(&mut self, tool: &str, path: u32) {
        if self.in_flight.is_none() {
            self.next_timer();
        }
        self.answer(calls(tool, &json!({ "path": path.to_string() }).to_string()));
    }

    /// The only open gate is answered.
    fn answers(&mut self, approved: bool) {
        let ids = self.gate_ids();
        assert_eq!(ids.len(), 1, "{ids:?}");
        self.answer_gate(&ids[0], approved);
    }

    /// So many different calls are requested and denied, the first one with this number.
    fn denied(&mut self, first: u32, times: u32) {
        for path in first..first + times {
            self.requests(TOOL, path);
            self.answers(false);
        }
    }

    /// The attempt ends with something that worked, so that the next step begins.
    fn step_ends(&mut self) {
        self.requests("files__read", 0);
        self.done(1, "text");
        self.answer(says("Looked."));
    }

    fn last_denial(&self) -> &str {
        self.notes(RecordKind::ToolDenied).last().unwrap()
    }

    fn gate_kinds(&self) -> Vec<GateKind> {
        let gates = self.engine.view().gates;
        gates.iter().map(|open| open.gate.kind).collect()
    }
}

#[test]
fn a_denied_call_is_not_requested_again_in_its_step_and_may_be_in_the_next_one() {
    let mut driver = driver();
    driver.denied(1, 1);
    driver.requests(TOOL, 1);
    assert_eq!((driver.last_denial(), driver.gate_kinds()), ("DeniedBefore", vec![]));
    assert!(driver.result().contains("take another approach"), "{}", driver.result());
    // Another call of the tool is another approach.
    driver.requests(TOOL, 2);
    driver.answers(true);
    driver.done(1, "gone");
    driver.step_ends();
    driver.requests(TOOL, 1);
    assert_eq!(driver.gate_kinds(), [GateKind::ToolCallNeedsApproval]);
}

#[rstest]
#[case::one_less(HIDDEN_AFTER - 1, false)]
#[case::as_many(HIDDEN_AFTER, true)]
fn a_tool_is_hidden_for_the_rest_of_a_step_at_the_limit_and_not_before(#[case] denials: u32, #[case] is_hidden: bool) {
    let mut driver = driver();
    driver.denied(1, denials);
    driver.requests(TOOL, 100);
    assert_eq!(driver.gate_kinds().is_empty(), is_hidden);
    if is_hidden {
        assert_eq!(driver.last_denial(), "Hidden");
        assert!(driver.result().contains("until the next one"), "{}", driver.result());
        // Other tools are not.
        driver.requests("files__read", 0);
        driver.done(1, "text");
    } else {
        driver.answers(true);
        driver.done(1, "gone");
    }
}

#[test]
fn denials_in_all_attempts_at_a_step_count_and_the_next_step_starts_at_zero() {
    let mut driver = driver();
    driver.denied(1, HIDDEN_AFTER - 1);
    driver.answer(says("They were denied."));
    driver.denied(HIDDEN_AFTER, 1);
    driver.answer(says("It was denied."));
    driver.next_timer();
    assert!(driver.observed().contains("Attempt 3"), "{}", driver.observed());
    driver.requests(TOOL, 100);
    assert_eq!(driver.last_denial(), "Hidden");
    driver.step_ends();
    driver.requests(TOOL, 1);
    assert_eq!(driver.gate_kinds(), [GateKind::ToolCallNeedsApproval]);
}

#[test]
fn an_approval_in_between_does_not_reset_the_count_and_wrong_calls_do_not_add_to_it() {
    let mut driver = driver();
    driver.denied(1, HIDDEN_AFTER - 1);
    driver.requests(TOOL, 50);
    driver.answers(true);
    driver.done(1, "gone");
    // In another attempt, so that the turn's own limit of wrong calls does not matter.
    driver.answer(calls(TOOL, "{half"));
    assert_eq!(driver.last_denial(), "BadArguments");
    driver.requests(TOOL, 51);
    assert_eq!(
        driver.last_denial(),
        "Hidden",
        "of the turn: three calls were denied or wrong"
    );
    driver.answer(says("Next."));
    driver.requests(TOOL, 52);
    driver.answers(false);
    assert_eq!(
        driver.notes(RecordKind::GateOpened).len(),
        4,
        "a new step, which counts anew"
    );
}

#[test]
fn a_call_without_its_grant_counts_as_denied() {
    let mut driver = driver();
    for path in 1..=HIDDEN_AFTER {
        driver.requests("repo__admin", path);
        assert_eq!(driver.last_denial(), "MissingGrant");
        if path == 1 {
            driver.answer(says("No grant."));
        }
    }
    driver.answer(says("No grant."));
    driver.requests("repo__admin", 100);
    assert_eq!(driver.last_denial(), "Hidden");
}

/// So many denials of the tool, in two steps.
fn denied_often(denials: u32) -> Driver {
    let mut driver = driver();
    driver.denied(1, HIDDEN_AFTER);
    driver.step_ends();
    driver.denied(1, denials - HIDDEN_AFTER);
    driver.step_ends();
    if driver.gate_kinds().is_empty() {
        driver.next_timer();
    }
    driver
}

#[test]
fn a_person_decides_on_the_loop_at_the_limit_of_denials_and_not_before() {
    let driver = denied_often(ESCALATED_AFTER - 1);
    assert_eq!((driver.gate_kinds(), driver.state()), (vec![], LoopState::Running));
    let mut driver = denied_often(ESCALATED_AFTER);
    assert_eq!(
        (driver.gate_kinds(), driver.reasons()),
        (vec![GateKind::Escalated], vec![PauseReason::Escalated])
    );
    let opened = *driver.notes(RecordKind::GateOpened).last().unwrap();
    assert!(
        opened.starts_with("goal-e1-") && opened.ends_with(" CallsDenied"),
        "{opened}"
    );
    driver.answers(false);
    assert_eq!(
        ended(&driver),
        (Some(LoopOutcome::Escalated), Some(GoalEnd::CallsDenied))
    );
}

#[test]
fn calls_of_a_hidden_tool_lead_to_a_person_as_well() {
    let mut driver = driver();
    driver.denied(1, HIDDEN_AFTER);
    for path in HIDDEN_AFTER..ESCALATED_AFTER {
        assert_eq!(driver.gate_kinds(), [], "nothing is asked within a turn");
        driver.requests(TOOL, 100 + path);
    }
    driver.step_ends();
    assert_eq!(driver.gate_kinds(), [GateKind::Escalated]);
}

#[rstest]
#[case::same_process(false)]
#[case::after_a_restart(true)]
fn an_approved_loop_continues_and_its_next_denial_escalates_again(#[case] restarts: bool) {
    let mut driver = denied_often(ESCALATED_AFTER);
    driver.answers(true);
    if restarts {
        driver.restart(2);
    }
    assert_eq!(ended(&driver), (None, None));
    driver.denied(1, 1);
    driver.step_ends();
    assert_eq!(driver.gate_kinds(), [GateKind::Escalated]);
}
