//! Mode `Goal`: a process may end at any time, in the middle of a step, a check, a question or a gate.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};

use super::goal::{command, criterion, finish, goal, judge};
use super::*;
use agentloop_api::goal::GoalEnd;
use agentloop_api::status::LoopOutcome;

fn everything() -> EngineSettings {
    goal(|goal| {
        goal.criteria = vec![
            criterion("tests", command("cargo test", None)),
            criterion("sense", judge()),
        ];
        goal.confidence_every = 2;
    })
}

impl Driver {
    /// One input of a world in which the first attempt fails, and the third step meets the goal.
    fn goes_on(&mut self) {
        let steps = self.goal_view().steps;
        if let Some(run) = self.running.values().next().cloned() {
            let outcome = match (&*run.name, steps) {
                ("toolbox__shell", 0) => ToolOutcome::Done {
                    text: "exit code 1\nFAILED".into(),
                },
                ("toolbox__shell", _) => ToolOutcome::Done {
                    text: "exit code 0\nok".into(),
                },
                _ => ToolOutcome::Failed { text: "no".into() },
            };
            self.feed(EngineInput::ToolFinished {
                run: run.id,
                outcome,
                artifacts: ResultArtifacts::default(),
            });
        } else if self.in_flight.is_some() {
            let last = self.transcript.last().map(|message| (**message).clone());
            let answer = match (self.purpose, last) {
                (CallPurpose::Confidence, _) => says(r#"{"confidence": 20}"#),
                (CallPurpose::Judge, _) => says(r#"{"met": true}"#),
                (_, Some(Message::User { text })) if text.contains("Step 1 of") && !text.contains("Attempt") => {
                    calls("files__read", "{}")
                }
                (_, Some(Message::User { .. })) if steps == 2 => finish("done"),
                _ => says("I have done something."),
            };
            self.answer(answer);
        } else if let Some(open) = self.engine.view().gates.into_iter().next() {
            self.feed(EngineInput::GateAnswered(EngineGateAnswer {
                gate: open.gate.id,
                arguments: open.arguments,
                approved: true,
                by: None,
            }));
        } else {
            self.next_timer();
        }
    }

    /// What was recorded of the attempts, without what depends on the time.
    fn checked(&self) -> Vec<Value> {
        let attempts = self.validations();
        let told = attempts
            .iter()
            .map(|(_, of)| json!([of.step, of.attempt, of.error, of.criteria]));
        told.collect()
    }

    /// Plays to the end, with a restart after `restart_after` inputs. Returns how many inputs there were.
    fn plays(&mut self, restart_after: Option<usize>, epochs: i64) -> usize {
        for inputs in 0..100 {
            if self.stopped {
                return inputs;
            }
            if restart_after == Some(inputs) {
                self.restart(self.epoch + epochs);
            }
            self.goes_on();
        }
        panic!("no end: {:?}", self.engine.view());
    }
}

/// What the story leads to, whatever ends in between.
fn result(driver: &Driver) -> (Option<LoopOutcome>, Option<GoalEnd>, u32, Option<u8>, usize) {
    let view = driver.goal_view();
    let gates = driver.notes(RecordKind::GateOpened).len();
    let outcome = driver.engine.view().outcome;
    (outcome, view.end, view.steps, view.last_confidence, gates)
}

/// How many commands were run, however often each was sent.
fn commands(driver: &Driver) -> usize {
    let runs = driver.sent.iter().filter(|run| run.name == "toolbox__shell");
    runs.map(|run| run.id).collect::<BTreeSet<_>>().len()
}

#[rstest]
#[case::same_pod(0)]
#[case::new_pod(1)]
fn a_restart_at_any_point_leads_to_the_same_end(#[case] epochs: i64) {
    let mut plain = Driver::with_goal(everything());
    let inputs = plain.plays(None, epochs);
    assert_eq!(
        result(&plain),
        (Some(LoopOutcome::Completed), Some(GoalEnd::CriteriaMet), 3, Some(20), 1)
    );
    assert_eq!(commands(&plain), 3);
    assert!(inputs > 10, "{inputs}");
    assert_eq!(
        plain.checked(),
        [
            json!([1, 1, "ToolCallsFailed", []]),
            json!([1, 2, null, [{"name": "tests", "verdict": "Unmet"}]]),
            json!([2, 1, null, [{"name": "tests", "verdict": "Met"}]]),
            json!([3, 1, null, [{"name": "tests", "verdict": "Met"}, {"name": "sense", "verdict": "Met"}]]),
        ]
    );
    let mut again = 0;
    for after in 0..inputs {
        let mut driver = Driver::with_goal(everything());
        driver.plays(Some(after), epochs);
        assert_eq!(result(&driver), result(&plain), "after {after} inputs");
        assert_eq!(driver.checked(), plain.checked(), "after {after} inputs");
        again += commands(&driver) - 3;
    }
    // While the judge is asked: the command before it may have left files in the pod.
    assert_eq!(again, usize::from(epochs > 0), "commands that were run again");
}

#[test]
fn a_check_that_a_restart_interrupts_is_sent_again_under_its_id() {
    let mut driver = Driver::with_goal(everything());
    driver.answer(says("The code is written."));
    let run = driver.running.values().next().unwrap().clone();
    driver.restart(1);
    assert_eq!(driver.running.values().next(), Some(&run));
    assert_eq!(driver.notes(RecordKind::ToolIntent), ["", "repeated"]);
    driver.done(1, "exit code 0\nok");
    assert_eq!(driver.outcomes(), ["Ok"]);
    assert_eq!(driver.goal_view().steps, 1);
}

#[test]
fn a_check_waits_for_the_link_and_a_suspension_cuts_it() {
    let mut driver = Driver::with_goal(everything());
    driver.feed(EngineInput::LinkSilent);
    driver.answer(says("The code is written."));
    assert!(driver.running().is_empty(), "it may have side effects");
    assert_eq!(driver.timer, None, "only the link ends the wait");
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.running(), [1]);
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    assert!(driver.stopped);
    assert_eq!(driver.cut.len(), 1);
}

#[test]
fn a_criterion_that_an_edit_removes_in_the_middle_of_its_check_no_longer_counts() {
    let mut driver = Driver::with_goal(everything());
    driver.answer(says("The code is written."));
    driver.settings = goal(|_| {});
    driver.restart(2);
    assert_eq!(driver.goal_view().steps, 1);
    driver.next_timer();
    assert!(
        driver.observed().contains("Unmet criteria: text."),
        "{}",
        driver.observed()
    );
    driver.answer(finish("done"));
    assert_eq!(driver.goal_view().end, Some(GoalEnd::CriteriaMet));
}
