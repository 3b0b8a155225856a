//! What a JUnit report says, as the toolbox writes it and the engine reads it: one line of the result of a command.

use serde::{Deserialize, Serialize};

use crate::report_line;

/// What the line begins with.
const PREFIX: &str = "JUnit report: ";

/// Counts of the tests of a JUnit report.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct TestReport {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed or ended with an error.
    pub failed: u64,
    /// Tests that did not run.
    pub skipped: u64,
    /// Names of the first failed tests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<String>,
    /// Why there are no counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl TestReport {
    /// The line of a result.
    #[must_use]
    pub fn line(&self) -> String {
        report_line::write(PREFIX, self)
    }

    /// Reads such a line; `None`: it is another one.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        report_line::read(PREFIX, line)
    }

    /// Tests that ran.
    #[must_use]
    pub fn ran(&self) -> u64 {
        self.passed.saturating_add(self.failed)
    }

    /// Whether at least one test ran, and none failed.
    #[must_use]
    pub fn is_passed(&self) -> bool {
        self.problem.is_none() && self.failed == 0 && self.passed > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written_and_stays_one_line() {
        let report = TestReport {
            passed: 2,
            failed: 1,
            failures: vec!["a\n\"b\"".into()],
            ..TestReport::default()
        };
        let line = report.line();
        assert_eq!(line.lines().count(), 1);
        assert_eq!(TestReport::parse(&line), Some(report));
        assert_eq!(TestReport::parse("JUnit report: 12 passed"), None);
        assert_eq!(TestReport::parse("12 passed"), None);
    }

    #[test]
    fn a_report_is_passed_if_a_test_ran_and_none_failed() {
        let report = |passed, failed, skipped| TestReport {
            passed,
            failed,
            skipped,
            ..TestReport::default()
        };
        assert!(report(1, 0, 3).is_passed());
        assert!(!report(0, 0, 3).is_passed());
        assert!(!report(5, 1, 0).is_passed());
        let unusable = TestReport {
            problem: Some("it is not there".into()),
            ..report(1, 0, 0)
        };
        assert!(!unusable.is_passed());
    }
}
