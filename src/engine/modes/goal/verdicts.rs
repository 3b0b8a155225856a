//! What the answers of models and the outputs of commands say about a goal. Pure; whatever is unclear is no verdict.

use serde_json::Value;

use super::MAX_SAID;
use super::progress::TestCounts;
use super::settings::{self, CommandCheck};
use super::validation::{CriterionResult, Verdict};
use crate::message;
use agentloop_toolbox_protocol::test_report::TestReport;

/// Maximum number of bytes of the first line of what a check said.
const MAX_STATUS: usize = 400;

/// Whether a command has succeeded, by its result: a line with the exit code, then one with its report if it was asked for
/// one, and then its output. `toolbox`: what has run it.
pub(super) fn of_command(command: &CommandCheck, result: &str, toolbox: &str) -> CriterionResult {
    let (status, mut output) = result.split_once('\n').unwrap_or((result, ""));
    let mut tests = None;
    if command.junit.is_some() {
        let (line, rest) = output.split_once('\n').unwrap_or((output, ""));
        let Some(report) = TestReport::parse(line) else {
            return CriterionResult::unknown(format!(
                "{toolbox} has not read the JUnit report\n{}",
                last_bytes(result)
            ));
        };
        output = rest;
        let ran = report.ran();
        tests = (report.problem.is_none() && ran > 0).then_some(TestCounts {
            passed: report.passed,
            ran,
        });
        let (verdict, said) = of_report(&report);
        if verdict != Verdict::Met {
            return CriterionResult {
                verdict,
                said: last_bytes(&format!("{status}; {said}\n{output}")),
                tests,
            };
        }
    }
    let is_met = match &command.pass_regex {
        Some(regex) => settings::matches(regex, output),
        None => command.junit.is_some() || status == "exit code 0",
    };
    let result = if is_met {
        CriterionResult::MET
    } else {
        CriterionResult::unmet(last_bytes(&format!("{status}\n{output}")))
    };
    CriterionResult { tests, ..result }
}

/// What a report says: whether all is well, and what is not.
fn of_report(report: &TestReport) -> (Verdict, String) {
    if let Some(problem) = &report.problem {
        return (Verdict::Unknown, format!("no JUnit report: {problem}"));
    }
    if report.is_passed() {
        return (Verdict::Met, String::new());
    }
    let ran = report.ran();
    if ran == 0 {
        return (Verdict::Unmet, format!("no test ran, {} were skipped", report.skipped));
    }
    let names = report.failures.join(", ");
    let more = report
        .failed
        .saturating_sub(report.failures.len().try_into().unwrap_or(u64::MAX));
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    (
        Verdict::Unmet,
        format!("{} of {ran} tests failed: {names}{more}", report.failed),
    )
}

/// The end of a command's output, where its result stands, with its first line, which has the exit code and the failed tests.
fn last_bytes(text: &str) -> String {
    if text.len() <= MAX_SAID {
        return text.to_owned();
    }
    let status = text.lines().next().unwrap_or_default();
    let status = &status[..status.floor_char_boundary(MAX_STATUS)];
    let from = text.ceil_char_boundary(text.len().saturating_sub(MAX_SAID - 20 - status.len()));
    format!("{status}\n[cut] {}", &text[from..])
}

/// The confidence in an answer, rounded down; `None`: not a clear one.
pub(super) fn read_confidence(text: &str) -> Option<u8> {
    let percent = message::answered_object(text, "confidence")?
        .get("confidence")?
        .as_f64()?;
    let whole = (0..=100_u8).rev().find(|whole| f64::from(*whole) <= percent)?;
    (percent <= 100.0).then_some(whole)
}

/// The progress in the answer to a confidence check, in percent; `None`: it has no clear one.
pub(super) fn read_progress(text: &str) -> Option<u8> {
    let percent = message::answered_object(text, "confidence")?
        .get("progress")?
        .as_f64()?;
    (0..=100_u8)
        .rev()
        .find(|whole| f64::from(*whole) <= percent)
        .filter(|_| percent <= 100.0)
}

/// The verdict in an answer; `None`: not a clear one.
pub(super) fn read_verdict(text: &str) -> Option<CriterionResult> {
    let answer = message::answered_object(text, "met")?;
    let met = answer.get("met")?.as_bool()?;
    let reason = answer
        .get("reason")
        .and_then(Value::as_str)
        .unwrap_or("the judge says no");
    Some(if met {
        CriterionResult::MET
    } else {
        CriterionResult::unmet(reason)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_answer_is_a_confidence() {
        for (text, percent) in [
            (r#"{"confidence": 0}"#, Some(0)),
            (
                r#"<think>{"confidence": 3}?</think> {"confidence": 71.9, "reason": "x"}"#,
                Some(71),
            ),
            (r#"{"confidence": 40, "progress": 90}"#, Some(40)),
            (r#"{"confidence": 101}"#, None),
            (r#"{"confidence": -1}"#, None),
            (r#"{"confidence": "85"}"#, None),
            (r#"{"confidence": 5, "reason": "it says {"confidence": 90}"}"#, None),
            ("85", None),
            ("", None),
        ] {
            assert_eq!(read_confidence(text), percent, "{text}");
        }
    }

    #[test]
    fn an_answer_may_contain_the_progress_too() {
        for (text, percent) in [
            (r#"{"confidence": 50, "progress": 30.9, "reason": "x"}"#, Some(30)),
            (r#"{"confidence": 50, "progress": 0}"#, Some(0)),
            (r#"{"confidence": 50, "progress": 101}"#, None),
            (r#"{"confidence": 50, "progress": "30"}"#, None),
            (r#"{"confidence": 50}"#, None),
            (r#"{"progress": 30}"#, None),
        ] {
            assert_eq!(read_progress(text), percent, "{text}");
        }
    }

    #[test]
    fn only_a_clear_answer_is_a_verdict() {
        assert_eq!(read_verdict(r#"{"met": true}"#), Some(CriterionResult::MET));
        assert_eq!(
            read_verdict(r#"{"met": false, "reason": "too short"}"#),
            Some(CriterionResult::unmet("too short"))
        );
        assert_eq!(
            read_verdict("It is fine.\n```json\n{\"met\": true}\n```\nThat is, {\"met\": true}."),
            Some(CriterionResult::MET)
        );
        for text in [
            r#"{"met": "yes"}"#,
            "yes",
            "",
            r#"{"met": false, "reason": "it claims {"met": true}"}"#,
            r#"{"met": false, "reason": "no"} although it claims {"met": true}"#,
            r#"{"met": false, "reason": "it ends with </think>{"met": true}"}"#,
            r#"<think>it claims {"met": true}"#,
            r#"No, it claims {"met": true}, {"met": false}"#,
            r#"{"met": true, "reason": "the res"#,
            r#"{"met": false, "reason": "it says ", "met": true, "x": ""}"#,
        ] {
            assert_eq!(read_verdict(text), None, "{text}");
        }
    }

    fn tests(passed: u64, failed: u64, failures: &[&str]) -> TestReport {
        TestReport {
            passed,
            failed,
            failures: failures.iter().map(ToString::to_string).collect(),
            ..TestReport::default()
        }
    }

    fn of(status: &str, report: &TestReport, pass_regex: Option<&str>) -> CriterionResult {
        let command = CommandCheck {
            run: "make test".into(),
            pass_regex: pass_regex.map(str::to_owned),
            junit: Some("report.xml".into()),
        };
        of_command(
            &command,
            &format!("{status}\n{}\nthe output", report.line()),
            "the toolbox",
        )
    }

    #[test]
    fn a_report_decides_whatever_the_exit_code_is_and_a_regular_expression_must_match_too() {
        let counted = |passed, ran, result| CriterionResult {
            tests: Some(TestCounts { passed, ran }),
            ..result
        };
        let met = counted(1, 1, CriterionResult::MET);
        assert_eq!(of("exit code 1", &tests(1, 0, &[]), None), met);
        assert_eq!(of("exit code 0", &tests(1, 0, &[]), Some("^the")), met);
        let not_matched = of("exit code 0", &tests(1, 0, &[]), Some("passed"));
        assert_eq!(
            not_matched,
            counted(1, 1, CriterionResult::unmet("exit code 0\nthe output"))
        );
        let failed = of("exit code 0", &tests(4, 3, &["a.B.one", "two"]), Some("^the"));
        assert_eq!(
            failed,
            counted(
                4,
                7,
                CriterionResult::unmet("exit code 0; 3 of 7 tests failed: a.B.one, two and 1 more\nthe output")
            )
        );
        assert_eq!(
            of("exit code 0", &tests(0, 0, &[]), None),
            CriterionResult::unmet("exit code 0; no test ran, 0 were skipped\nthe output")
        );
    }

    #[test]
    fn without_a_usable_report_nothing_is_known() {
        let stale = TestReport {
            problem: Some("it is old".into()),
            ..TestReport::default()
        };
        assert_eq!(
            of("exit code 0", &stale, None),
            CriterionResult::unknown("exit code 0; no JUnit report: it is old\nthe output")
        );
        let command = CommandCheck {
            run: "make test".into(),
            pass_regex: None,
            junit: Some("report.xml".into()),
        };
        // The output comes after the line of the toolbox, so that it cannot take its place.
        for result in ["exit code 0\n5 passed", "exit code 0"] {
            assert_eq!(
                of_command(&command, result, "the toolbox").verdict,
                Verdict::Unknown,
                "{result}"
            );
        }
    }

    #[test]
    fn failed_tests_are_named_within_the_bound() {
        let names = vec!["x".repeat(200); 10];
        let report = TestReport {
            failed: 10,
            failures: names,
            ..TestReport::default()
        };
        let result = of("exit code 1", &report, None);
        assert!(result.said.len() <= MAX_SAID, "{}", result.said.len());
        assert!(result.said.starts_with("exit code 1; 10 of 10 tests failed: xxx"));
    }

    #[test]
    fn a_long_output_keeps_its_exit_code_and_its_end() {
        let text = format!("exit code 1\n{}the end", "ä".repeat(1000));
        let said = last_bytes(&text);
        assert!(
            said.starts_with("exit code 1\n[cut] ä") && said.ends_with("the end"),
            "{said}"
        );
        assert!(said.len() <= MAX_SAID, "{}", said.len());
    }
}
