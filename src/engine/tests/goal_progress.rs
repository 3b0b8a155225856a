//! Mode `Goal`: by what the progress is measured, and reports of tests as criteria.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};

use super::goal::{command, criterion, ended, finish, goal, judge, shell};
use super::work::tools;
use super::*;
use crate::modes::goal::{CommandCheck, CriterionCheck, GoalSettings, Verdict};
use agentloop_api::goal::{GoalArtifact, GoalEnd, ProgressSource};
use agentloop_api::status::LoopOutcome;
use agentloop_toolbox_protocol::file_report::{FileFinding, FileReport};
use agentloop_toolbox_protocol::test_report::TestReport;

fn junit() -> CriterionCheck {
    CriterionCheck::Command(CommandCheck {
        run: "make test".into(),
        pass_regex: None,
        junit: Some("target/report.xml".into()),
    })
}

/// A report, and a criterion that is met at the end only.
fn tests_and_text(goal: &mut GoalSettings) {
    goal.criteria.push(criterion("tests", junit()));
}

fn result(report: &TestReport) -> String {
    format!("exit code 0\n{}\nout", report.line())
}

fn report(passed: u64, failed: u64) -> TestReport {
    TestReport {
        passed,
        failed,
        failures: if failed > 0 { vec!["a.B.bad".into()] } else { Vec::new() },
        ..TestReport::default()
    }
}

impl Driver {
    pub(super) fn progress(&self) -> (u8, Option<ProgressSource>) {
        let progress = self.goal_view().progress;
        (progress.percent, progress.source)
    }

    /// A step whose command has this result.
    fn checked_with(&mut self, answer: ModelAnswer, result: &str) {
        if self.in_flight.is_none() {
            self.next_timer();
        }
        self.answer(answer);
        self.done(1, result);
    }
}

#[test]
fn a_command_with_a_report_is_run_with_its_path_and_names_what_failed() {
    let mut driver = Driver::with_goal(goal(tests_and_text));
    let Message::System { text } = &*driver.prompt[0] else {
        panic!("no system message");
    };
    assert!(
        text.contains("- tests: `make test` writes the JUnit report `target/report.xml`, in which a test has run and none has failed."),
        "{text}"
    );
    driver.answer(says("Written."));
    let run = driver.running.values().next().unwrap();
    assert_eq!(
        run.arguments,
        json!({"command": "make test", "junit": "target/report.xml"})
            .as_object()
            .cloned()
            .unwrap()
    );
    driver.done(1, &result(&report(3, 1)));
    driver.next_timer();
    assert!(
        driver
            .observed()
            .contains("Last check of tests: exit code 0; 1 of 4 tests failed: a.B.bad\nout"),
        "{}",
        driver.observed()
    );
}

#[test]
fn tests_measure_the_progress_before_criteria_and_are_not_all_of_it() {
    let mut driver = Driver::with_goal(goal(tests_and_text));
    assert_eq!(driver.progress(), (0, None), "nothing is known");
    driver.checked_with(says("Written."), &result(&report(2, 1)));
    assert_eq!(driver.progress(), (66, Some(ProgressSource::Tests)));
    driver.checked_with(says("Fixed."), &result(&report(4, 0)));
    assert_eq!(
        driver.progress(),
        (99, Some(ProgressSource::Tests)),
        "the other criterion is not met"
    );
    // Without a usable report the tests are not known, and the criteria count.
    let stale = TestReport {
        problem: Some("it is old".into()),
        ..TestReport::default()
    };
    driver.checked_with(finish("done"), &result(&stale));
    assert_eq!(driver.progress(), (50, Some(ProgressSource::Criteria)));
    driver.checked_with(finish("done"), &result(&report(5, 0)));
    assert_eq!(driver.progress(), (100, Some(ProgressSource::Tests)));
    assert_eq!(
        ended(&driver),
        (Some(LoopOutcome::Completed), Some(GoalEnd::CriteriaMet))
    );
}

#[test]
fn the_share_of_criteria_is_the_progress_once_one_was_checked_and_a_models_estimate_before() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.confidence_every = 1;
        goal.criteria.push(criterion("sense", judge()));
    }));
    driver.answer(says("Not yet."));
    driver.answer(says(r#"{"confidence": 80, "progress": 30}"#));
    assert_eq!(driver.progress(), (30, Some(ProgressSource::Estimate)));
    driver.next_timer();
    driver.answer(says("Nearly."));
    driver.answer(says(r#"{"confidence": 80, "progress": 100}"#));
    assert_eq!(
        driver.progress(),
        (99, Some(ProgressSource::Estimate)),
        "an estimate is no check"
    );
    driver.next_timer();
    driver.answer(finish("not so good"));
    assert_eq!(driver.progress(), (0, Some(ProgressSource::Criteria)));
    driver.answer(says(r#"{"confidence": 80, "progress": 90}"#));
    assert_eq!(driver.progress(), (0, Some(ProgressSource::Criteria)));
}

#[test]
fn the_confidence_question_contains_the_progress_and_how_it_was_measured() {
    let asked = |change: fn(&mut GoalSettings), answer: ModelAnswer, result: Option<&str>| {
        let mut driver = Driver::with_goal(goal(|goal| {
            goal.confidence_every = 1;
            change(goal);
        }));
        driver.answer(answer);
        if let Some(result) = result {
            driver.done(1, result);
        }
        assert_eq!(driver.purpose, CallPurpose::Confidence);
        driver
    };
    let artifact = |goal: &mut GoalSettings| {
        goal.artifacts = vec![GoalArtifact {
            path: "NOTES.md".into(),
            min_bytes: 1,
        }];
    };
    let found = FileReport(vec![FileFinding::Bytes(3)]).line();
    let tests = result(&report(2, 1));
    let mut estimated = asked(|_| {}, says("Not yet."), None);
    estimated.answer(says(r#"{"confidence": 80, "progress": 30}"#));
    estimated.next_timer();
    estimated.answer(says("Nearly."));
    for (driver, line) in [
        (
            Box::new(asked(|_| {}, says("Not yet."), None)),
            "Progress: not known yet.",
        ),
        (
            Box::new(estimated),
            "Progress: 30 % (the estimate of the last confidence check).",
        ),
        (
            Box::new(asked(|_| {}, finish("no"), None)),
            "Progress: 0 % (of the criteria, those that were met).",
        ),
        (
            Box::new(asked(artifact, says("Written."), Some(&found))),
            "Progress: 99 % (of the declared artifacts, those that existed).",
        ),
        (
            Box::new(asked(tests_and_text, says("Written."), Some(&tests))),
            "Progress: 66 % (of the tests that ran, those that passed).",
        ),
    ] {
        let data = driver.observed();
        assert!(data.contains(" steps are used. Unmet criteria: text"), "{data}");
        assert!(data.contains(line), "{line}: {data}");
    }
}

#[test]
fn an_edit_of_the_criteria_discards_the_measured_progress() {
    let mut driver = Driver::with_goal(goal(tests_and_text));
    driver.checked_with(says("Written."), &result(&report(2, 1)));
    driver.settings = goal(|goal| goal.criteria.push(criterion("tests", command("make", None))));
    driver.restart(2);
    assert_eq!(driver.progress(), (0, None));
}

/// A toolbox of an older version has no argument for a report, ignores it, and its output can look like the line of a report.
#[rstest]
#[case::any_argument(json!({"type": "object", "properties": {"command": {"type": "string"}}}), Some("ci-tools:7"))]
#[case::no_other_argument(
    json!({"type": "object", "properties": {"command": {"type": "string"}}, "additionalProperties": false}),
    Some("ci-tools:7")
)]
#[case::image_of_the_pod(json!({"type": "object", "properties": {"command": {"type": "string"}}}), None)]
fn a_toolbox_that_reads_no_report_runs_no_command_with_one_and_nothing_is_known(
    #[case] parameters: Value,
    #[case] image: Option<&str>,
) {
    let mut driver = Driver::fresh(EngineSettings {
        toolbox_image: image.map(str::to_owned),
        ..goal(|goal| goal.criteria = vec![criterion("tests", junit())])
    });
    let old = ToolSpec { parameters, ..shell() };
    driver.offer(tools().into_iter().chain([old]).collect());
    driver.start(1);
    driver.answer(says("Written."));
    assert!(driver.running.is_empty(), "{:?}", driver.running);
    assert_eq!(ended(&driver), (None, None));
    driver.next_timer();
    let place = image.map_or_else(String::new, |image| {
        format!(", copied into a container of image {image}")
    });
    let expected = format!(
        "Last check of tests: not run: the toolbox (of the pod's agentloop image{place}) is of an older version, whose shell has no argument junit: recreate \
         the pod with one version for all of its containers"
    );
    assert!(driver.observed().contains(&expected), "{}", driver.observed());
    let checked = driver.journal.iter().filter_map(|record| record.validation.as_ref());
    let verdicts: Vec<_> = checked.flat_map(|step| &step.criteria).map(|one| one.verdict).collect();
    assert_eq!(verdicts, [Verdict::Unknown]);
}

#[test]
fn a_result_without_a_report_names_the_image_that_the_toolbox_is_from_and_its_place() {
    let mut driver = Driver::with_goal(EngineSettings {
        toolbox_image: Some("ci-tools:7".into()),
        ..goal(|goal| goal.criteria = vec![criterion("tests", junit())])
    });
    driver.checked_with(says("Written."), "exit code 0\n5 passed");
    assert_eq!(ended(&driver), (None, None));
    driver.next_timer();
    assert!(
        driver
            .observed()
            .contains(
                "Last check of tests: the toolbox (of the pod's agentloop image, copied into a container of image ci-tools:7) has \
                 not read the JUnit report\nexit code 0"
            ),
        "{}",
        driver.observed()
    );
}
