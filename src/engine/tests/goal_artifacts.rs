//! Mode `Goal`: the files that a goal declares, as a part of its check and as a measure of its progress.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::{Value, json};

use super::goal::{command, criterion, ended, finish, goal, judge, lister, shell};
use super::work::tools;
use super::*;
use crate::modes::goal::{CommandCheck, CriterionCheck, GoalSettings};
use agentloop_api::goal::{ArtifactStatus, GoalArtifact, GoalEnd, ProgressSource};
use agentloop_api::status::LoopOutcome;
use agentloop_toolbox_protocol::file_report::{FileFinding, FileReport};
use agentloop_toolbox_protocol::test_report::TestReport;

const MET: (Option<LoopOutcome>, Option<GoalEnd>) = (Some(LoopOutcome::Completed), Some(GoalEnd::CriteriaMet));
const OPEN: (Option<LoopOutcome>, Option<GoalEnd>) = (None, None);

fn artifact(path: &str, min_bytes: u32) -> GoalArtifact {
    GoalArtifact {
        path: path.into(),
        min_bytes,
    }
}

/// A command, and two artifacts.
fn two_files(goal: &mut GoalSettings) {
    goal.criteria = vec![criterion("tests", command("make", None))];
    goal.artifacts = vec![artifact("NOTES.md", 1), artifact("dist/app", 100)];
}

impl Driver {
    /// The run of the check ends with this text.
    fn ran(&mut self, text: &str) {
        let run = self.running.values().next().expect("a run").id;
        self.feed(EngineInput::ToolFinished {
            run,
            outcome: ToolOutcome::Done { text: text.into() },
            artifacts: ResultArtifacts::default(),
        });
    }

    /// The artifacts are found like this.
    fn found(&mut self, findings: &[FileFinding]) {
        let run = self.running.values().next().expect("a run");
        assert_eq!(run.name, "toolbox__list_directory");
        self.ran(&FileReport(findings.to_vec()).line());
    }

    /// A step whose command succeeds and which leaves these files.
    fn leaves(&mut self, findings: &[FileFinding]) {
        if self.in_flight.is_none() {
            self.next_timer();
        }
        self.answer(says("Written."));
        self.ran("exit code 0\nok");
        self.found(findings);
    }

    fn last_record(&self) -> Value {
        json!(self.validations().pop().expect("a record").1)
    }
}

#[test]
fn artifacts_are_listed_for_the_agent_and_checked_after_the_commands_without_an_approval() {
    let mut driver = Driver::with_goal(goal(two_files));
    let Message::System { text } = &*driver.prompt[0] else {
        panic!("no system message");
    };
    assert!(
        text.contains(
            "\n\nArtifacts, files that must be in the workspace when the criteria are met:\n- `NOTES.md`, not empty\n- \
             `dist/app`, at least 100 bytes\n\nConstraints:"
        ),
        "{text}"
    );
    assert!(!driver.observed().contains("rtifacts"), "none was looked for yet");
    driver.answer(says("Written."));
    assert_eq!(driver.running.values().next().unwrap().name, "toolbox__shell");
    driver.ran("exit code 1\nno");
    let run = driver.running.values().next().unwrap();
    assert_eq!(run.name, "toolbox__list_directory");
    assert_eq!(json!(run.arguments), json!({"files": ["NOTES.md", "dist/app"]}));
    driver.found(&[FileFinding::Absent, FileFinding::Bytes(99)]);
    driver.next_timer();
    assert!(
        driver.observed().contains(
            "\nUnmet criteria: tests.\nLast check of tests: exit code 1\nno\nMissing artifacts: `NOTES.md` (no such file), \
             `dist/app` (99 of at least 100 bytes).\nPlan"
        ),
        "{}",
        driver.observed()
    );
}

#[test]
fn a_goal_is_not_reached_while_one_of_its_artifacts_is_missing() {
    let mut driver = Driver::with_goal(goal(two_files));
    driver.leaves(&[FileFinding::Absent, FileFinding::Absent]);
    assert_eq!(
        (ended(&driver), driver.progress()),
        (OPEN, (0, Some(ProgressSource::Artifacts)))
    );
    driver.leaves(&[FileFinding::Bytes(1), FileFinding::Bytes(99)]);
    assert_eq!(
        (ended(&driver), driver.progress()),
        (OPEN, (50, Some(ProgressSource::Artifacts)))
    );
    let status = |path: &str, met, bytes| ArtifactStatus {
        path: path.into(),
        met,
        bytes: Some(bytes),
    };
    let view = driver.goal_view();
    assert_eq!(
        view.artifacts,
        [status("NOTES.md", true, 1), status("dist/app", false, 99)]
    );
    assert_eq!(view.criteria, [("tests".to_owned(), true)]);
    driver.leaves(&[FileFinding::Bytes(1), FileFinding::Bytes(100)]);
    assert_eq!(
        (ended(&driver), driver.progress()),
        (MET, (100, Some(ProgressSource::Artifacts)))
    );
}

#[rstest]
#[case::default_empty(1, FileFinding::Bytes(0), "0 of at least 1 bytes")]
#[case::default_smallest(1, FileFinding::Bytes(1), "")]
#[case::empty_allowed(0, FileFinding::Bytes(0), "")]
#[case::empty_allowed_and_absent(0, FileFinding::Absent, "no such file")]
#[case::one_byte_short(1000, FileFinding::Bytes(999), "999 of at least 1000 bytes")]
#[case::just_enough(1000, FileFinding::Bytes(1000), "")]
#[case::directory(1, FileFinding::NotRegular, "not a regular file")]
#[case::link_to_the_outside(
    1,
    FileFinding::Outside,
    "it leads out of the workspace, as each absolute link does; a relative link may be used"
)]
#[case::unreadable(1, FileFinding::Unreadable, "it could not be looked up")]
fn an_artifact_is_a_regular_file_of_its_minimum_size(
    #[case] min_bytes: u32,
    #[case] found: FileFinding,
    #[case] missing: &str,
) {
    let mut driver = Driver::with_goal(goal(|goal| {
        two_files(goal);
        goal.artifacts = vec![artifact("out/a b.txt", min_bytes)];
    }));
    driver.leaves(&[found]);
    let verdict = &driver.last_record()["artifacts"]["verdict"];
    if missing.is_empty() {
        assert_eq!((ended(&driver), verdict), (MET, &json!("Met")));
        return;
    }
    let expected = if found == FileFinding::Unreadable {
        "Unknown"
    } else {
        "Unmet"
    };
    assert_eq!((ended(&driver), verdict), (OPEN, &json!(expected)));
    driver.next_timer();
    let line = format!("\nMissing artifacts: `out/a b.txt` ({missing}).\nPlan");
    assert!(driver.observed().contains(&line), "{}", driver.observed());
    assert!(!driver.observed().contains("criteria"), "{}", driver.observed());
}

#[test]
fn artifacts_and_criteria_that_were_met_in_different_checks_are_no_success() {
    let mut driver = Driver::with_goal(goal(|goal| goal.artifacts = vec![artifact("a", 1)]));
    driver.answer(finish("done"));
    driver.found(&[FileFinding::Absent]);
    driver.next_timer();
    driver.answer(says("The file is there now."));
    driver.found(&[FileFinding::Bytes(5)]);
    assert_eq!(ended(&driver), OPEN, "the result was not handed in in this step");
    driver.next_timer();
    assert!(
        driver
            .observed()
            .contains("All criteria were met at their last check, but not in the same one: call finish"),
        "{}",
        driver.observed()
    );
    driver.answer(finish("done"));
    driver.found(&[FileFinding::Bytes(5)]);
    assert_eq!(ended(&driver), MET);
}

#[test]
fn a_judge_is_called_only_if_all_artifacts_exist() {
    let mut driver = Driver::with_goal(goal(|goal| {
        goal.criteria = vec![criterion("sense", judge())];
        goal.artifacts = vec![artifact("a", 1)];
    }));
    driver.answer(finish("done"));
    driver.found(&[FileFinding::Absent]);
    assert_eq!(driver.purpose, CallPurpose::Turn, "a judge could not decide");
    driver.next_timer();
    driver.answer(finish("done"));
    driver.found(&[FileFinding::Bytes(1)]);
    assert_eq!(driver.purpose, CallPurpose::Judge);
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(ended(&driver), MET);
}

#[test]
fn tests_measure_the_progress_before_artifacts_and_artifacts_before_criteria() {
    let mut driver = Driver::with_goal(goal(|goal| {
        two_files(goal);
        goal.criteria = vec![
            criterion("text", CriterionCheck::Regex("^done".into())),
            criterion(
                "tests",
                CriterionCheck::Command(CommandCheck {
                    run: "make test".into(),
                    pass_regex: None,
                    junit: Some("report.xml".into()),
                }),
            ),
        ];
    }));
    let report = |passed, failed, problem: Option<&str>| TestReport {
        passed,
        failed,
        problem: problem.map(str::to_owned),
        ..TestReport::default()
    };
    let there = FileFinding::Bytes(100);
    let mut step = |answer: ModelAnswer, report: TestReport, found: [FileFinding; 2]| {
        if driver.in_flight.is_none() {
            driver.next_timer();
        }
        driver.answer(answer);
        driver.ran(&format!("exit code 0\n{}\nout", report.line()));
        driver.found(&found);
        (driver.progress(), ended(&driver) == MET)
    };
    let absent = FileFinding::Absent;
    let no_report = || report(0, 0, Some("it is old"));
    assert_eq!(
        step(says("a"), report(3, 1, None), [there, absent]),
        ((75, Some(ProgressSource::Tests)), false)
    );
    assert_eq!(
        step(says("b"), no_report(), [there, absent]),
        ((50, Some(ProgressSource::Artifacts)), false)
    );
    assert_eq!(
        step(says("c"), no_report(), [there, there]),
        ((99, Some(ProgressSource::Artifacts)), false),
        "criteria are not met"
    );
    assert_eq!(
        step(finish("done"), report(4, 0, None), [there, absent]),
        ((99, Some(ProgressSource::Tests)), false),
        "an artifact is missing"
    );
    assert_eq!(
        step(finish("done"), report(4, 0, None), [there, there]),
        ((100, Some(ProgressSource::Tests)), true)
    );
}

/// The schema of `list_directory` before it had `files`.
fn old_lister() -> ToolSpec {
    ToolSpec {
        parameters: json!({"type": "object", "properties": {"path": {"type": "string"}}, "additionalProperties": false}),
        ..lister()
    }
}

#[rstest]
#[case::older_toolbox(
    Some(old_lister()),
    "not run: the toolbox (of the pod's agentloop image, copied into a container of image ci-tools:7) is of an older version, \
     whose list_directory has no argument files: recreate the pod with one version for all of its containers"
)]
#[case::no_tool(None, "{\"error\":\"unknown tool toolbox__list_directory;")]
fn a_toolbox_that_cannot_check_artifacts_leaves_the_goal_open_with_a_reason(
    #[case] lister: Option<ToolSpec>,
    #[case] why: &str,
) {
    let mut driver = Driver::fresh(EngineSettings {
        toolbox_image: Some("ci-tools:7".into()),
        ..goal(two_files)
    });
    driver.offer(tools().into_iter().chain([shell()]).chain(lister).collect());
    driver.start(1);
    driver.answer(says("Written."));
    driver.ran("exit code 0\nok");
    assert!(driver.running.is_empty(), "{:?}", driver.running);
    let record = driver.last_record();
    assert_eq!(
        record["artifacts"],
        json!({"verdict": "Unknown", "met": 0, "declared": 2})
    );
    assert_eq!(
        (ended(&driver), driver.progress()),
        (OPEN, (99, Some(ProgressSource::Criteria)))
    );
    driver.next_timer();
    let line = format!("\nLast check of the artifacts: {why}");
    assert!(driver.observed().contains(&line), "{}", driver.observed());
}

#[rstest]
#[case::other_text("a/\nb.txt 2\n")]
#[case::too_few("Files: [{\"bytes\":7}]")]
#[case::too_many("Files: [{\"bytes\":700},{\"bytes\":700},{\"bytes\":700}]")]
#[case::text_before("x\nFiles: [{\"bytes\":700},{\"bytes\":700}]")]
fn a_result_that_is_no_report_about_these_files_is_no_verdict(#[case] text: &str) {
    let mut driver = Driver::with_goal(goal(two_files));
    driver.answer(says("Written."));
    driver.ran("exit code 0\nok");
    driver.ran(text);
    assert_eq!(driver.last_record()["artifacts"]["verdict"], "Unknown");
    assert_eq!(ended(&driver), OPEN);
    driver.next_timer();
    assert!(
        driver.observed().contains(
            "\nLast check of the artifacts: the toolbox (of the pod's agentloop image) did not report which of the files exist"
        ),
        "{}",
        driver.observed()
    );
}

#[test]
fn a_step_records_how_many_artifacts_there_are_without_their_paths() {
    let mut driver = Driver::with_goal(goal(two_files));
    driver.failed_attempt("a", "no");
    assert_eq!(driver.last_record().get("artifacts"), None, "nothing was checked");
    driver.leaves(&[FileFinding::Bytes(5), FileFinding::NotRegular]);
    let record = driver.last_record();
    assert_eq!(
        record["artifacts"],
        json!({"verdict": "Unmet", "met": 1, "declared": 2})
    );
    assert_eq!(record["progressSource"], "Artifacts");
    let notes = driver.notes(RecordKind::StepChecked);
    let note = notes.last().unwrap();
    assert!(
        note.ends_with("progress 50 % by Artifacts, tests=Met, 1 of 2 artifacts=Unmet"),
        "{note}"
    );
}

#[test]
fn a_search_for_artifacts_that_a_restart_interrupts_is_sent_again_under_its_id() {
    let mut driver = Driver::with_goal(goal(two_files));
    driver.answer(says("Written."));
    driver.ran("exit code 0\nok");
    let run = driver.running.values().next().unwrap().clone();
    driver.restart(1);
    assert_eq!(driver.running.values().next(), Some(&run));
    driver.found(&[FileFinding::Bytes(1), FileFinding::Bytes(100)]);
    assert_eq!((ended(&driver), driver.goal_view().steps), (MET, 1));
}

/// A command, two artifacts, and a judge.
fn with_judge(goal: &mut GoalSettings) {
    two_files(goal);
    goal.criteria.push(criterion("sense", judge()));
}

/// A goal for which all is done but the answer of its judge.
fn before_the_judge(change: impl FnOnce(&mut GoalSettings)) -> Driver {
    let mut driver = Driver::with_goal(goal(change));
    driver.answer(finish("done"));
    driver.ran("exit code 0\nok");
    if !driver.running.is_empty() {
        driver.found(&[FileFinding::Bytes(1), FileFinding::Bytes(100)]);
    }
    assert_eq!(driver.purpose, CallPurpose::Judge);
    driver
}

#[rstest]
#[case::path(artifact("dist/other", 100), true)]
#[case::size(artifact("dist/app", 101), true)]
#[case::nothing(artifact("dist/app", 100), false)]
fn an_edit_of_the_artifacts_makes_the_check_begin_again(#[case] second: GoalArtifact, #[case] again: bool) {
    let mut driver = before_the_judge(with_judge);
    driver.settings = goal(|goal| {
        with_judge(goal);
        goal.max_steps = 7;
        goal.artifacts[1] = second;
    });
    driver.restart(1);
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(ended(&driver), if again { OPEN } else { MET });
    if again {
        assert_eq!(
            driver.goal_view().artifacts[0].bytes,
            None,
            "what was found before is forgotten"
        );
        driver.ran("exit code 0\nok");
        driver.found(&[FileFinding::Bytes(1), FileFinding::Bytes(100)]);
    }
}

/// The files of a workspace are lost with the pod, unless they are on a volume.
#[rstest]
#[case::command_and_artifacts(true)]
#[case::command(false)]
fn a_check_restarts_in_another_pod_and_continues_in_the_same_one(#[case] has_artifacts: bool) {
    let settings = |goal: &mut GoalSettings| {
        with_judge(goal);
        if !has_artifacts {
            goal.artifacts.clear();
        }
    };
    let mut same = before_the_judge(settings);
    same.restart(1);
    same.answer(says(r#"{"met": true}"#));
    assert_eq!((ended(&same), same.goal_view().steps), (MET, 1));

    let mut driver = before_the_judge(settings);
    driver.restart(2);
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!(
        ended(&driver),
        OPEN,
        "the files that the judge has decided after are gone"
    );
    driver.ran(if has_artifacts {
        "exit code 0\nok"
    } else {
        "exit code 1\nno file"
    });
    if has_artifacts {
        driver.found(&[FileFinding::Absent, FileFinding::Absent]);
    }
    assert_eq!((ended(&driver), driver.goal_view().steps), (OPEN, 1));
    driver.next_timer();
    assert_eq!(driver.purpose, CallPurpose::Turn, "a judge could not decide");
    driver.answer(finish("done"));
    driver.ran("exit code 0\nok");
    if has_artifacts {
        driver.found(&[FileFinding::Bytes(1), FileFinding::Bytes(100)]);
    }
    driver.answer(says(r#"{"met": true}"#));
    assert_eq!((ended(&driver), driver.goal_view().steps), (MET, 2));
}

#[test]
fn artifacts_added_to_a_goal_during_its_check_are_checked() {
    let mut driver = Driver::with_goal(goal(|goal| {
        two_files(goal);
        goal.artifacts.clear();
    }));
    driver.answer(says("Written."));
    driver.settings = goal(two_files);
    driver.restart(2);
    driver.ran("exit code 0\nok");
    driver.found(&[FileFinding::Bytes(1), FileFinding::Absent]);
    assert_eq!(ended(&driver), OPEN);
}

#[test]
fn a_journal_from_before_artifacts_is_read_and_its_check_continues() {
    let without = |goal: &mut GoalSettings| {
        two_files(goal);
        goal.artifacts.clear();
        goal.criteria.push(criterion("lint", command("make lint", None)));
    };
    let mut driver = Driver::with_goal(goal(without));
    driver.answer(says("Written."));
    driver.ran("exit code 0\nok");
    let mut old = json!(driver.saved);
    let goal = old["goal"].as_object_mut().unwrap();
    assert!(goal.remove("artifacts").is_some());
    assert!(
        goal["validation"]
            .as_object_mut()
            .unwrap()
            .remove("artifacts")
            .is_some()
    );
    driver.saved = serde_json::from_value(old).unwrap();
    driver.restart(1);
    driver.ran("exit code 0\nok");
    assert_eq!((ended(&driver), driver.goal_view().steps), (MET, 1));
    assert_eq!(driver.last_record().get("artifacts"), None);
    assert_eq!(driver.goal_view().artifacts, []);
}
