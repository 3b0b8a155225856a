//! The texts that models see in mode `Goal`.

use agentloop_texts::TextRows;

use super::goal::{command, criterion, finish, goal, judge};
use super::*;
use crate::modes::goal::CriterionCheck;
use agentloop_api::goal::GoalArtifact;
use agentloop_toolbox_protocol::file_report::{FileFinding, FileReport};

fn system(driver: &Driver) -> &str {
    let Message::System { text } = &*driver.prompt[0] else {
        panic!("no system message");
    };
    text
}

#[test]
fn the_texts_of_mode_goal() {
    let mut rows = TextRows::new();
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria = vec![
            criterion("text", CriterionCheck::Regex("^done".into())),
            criterion("shape", CriterionCheck::Schema(serde_json::json!({"type": "string"}))),
            criterion("tests", command("cargo test", None)),
            criterion("count", command("wc -l", Some("12"))),
            criterion("sense", judge()),
        ];
        let artifact = |path: &str, min_bytes| GoalArtifact {
            path: path.into(),
            min_bytes,
        };
        goal.artifacts = vec![
            artifact("NOTES.md", 1),
            artifact("empty", 0),
            artifact("dist/app", 4096),
        ];
    }));
    rows.push(text!(
        "System prompt",
        "instructions, runtime and goal",
        system(&driver)
    ));
    rows.push(text!("First messages", "the first step", driver.observed()));
    driver.failed_attempt("a", "no such file");
    driver.next_timer();
    rows.push(text!("First messages", "the second attempt", driver.observed()));
    driver.answer(calls("files__read", r#"{"path": "a"}"#));
    rows.push(text!("Results", "a call that has failed", driver.result()));
    driver.failed_attempt("b", "no such folder");
    driver.next_timer();
    driver.failed_attempt("c", "disk full");
    driver.next_timer();
    rows.push(text!("First messages", "after the last attempt", driver.observed()));
    driver.answer(calls("finish", "{}"));
    rows.push(text!("Results", "finish without a result", driver.result()));
    driver.answer(finish("no"));
    rows.push(text!("Results", "finish", driver.result()));
    for index in [1, 2] {
        driver.done(index, "exit code 1\n<output>");
    }
    let found = [FileFinding::NotRegular, FileFinding::Bytes(0), FileFinding::Bytes(17)];
    driver.done(3, &FileReport(found.to_vec()).line());
    driver.next_timer();
    rows.push(text!("First messages", "after a check", driver.observed()));
    driver.answer(calls("request_confidence_check", r#"{"reason": "<reason>"}"#));
    rows.push(text!("Results", "request_confidence_check", driver.result()));
    for index in [1, 2] {
        driver.done(index, "exit code 0\n12");
    }
    driver.end(
        3,
        ToolOutcome::Failed {
            text: "no toolbox".into(),
        },
    );
    rows.push(text!("Confidence check", "system message", system(&driver)));
    rows.push(text!("Confidence check", "data", driver.observed()));
    let mut judged = Driver::with_goal(goal(|goal| goal.criteria = vec![criterion("sense", judge())]));
    judged.answer(finish("<result>"));
    rows.push(text!("Judge", "system message", system(&judged)));
    rows.push(text!("Judge", "data", judged.observed()));
    assert_texts!("goal", "What models are told in mode Goal", rows);
}
