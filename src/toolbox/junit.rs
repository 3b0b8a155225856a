//! Reads JUnit XML reports: how many tests passed, failed and were skipped, and which failed.
//!
//! Reports are written by the commands of others, so everything is bounded: the size, the depth, the number of tests, and what
//! of names is kept. A document type declaration is refused, and only the five entities of XML itself are known, so that
//! nothing expands.

use std::io::BufRead;

use agentloop_support::text::first_bytes;
use agentloop_toolbox_protocol::test_report::TestReport;
use quick_xml::Reader;
use quick_xml::escape::unescape;
use quick_xml::events::{BytesStart, Event};

/// Largest report in bytes.
pub(crate) const MAX_REPORT_BYTES: u64 = 8 * 1024 * 1024;
/// Maximum number of elements within each other.
const MAX_DEPTH: usize = 32;
/// Maximum number of tests.
const MAX_TESTS: u64 = 100_000;
/// Names of failed tests that are kept.
const MAX_NAMES: usize = 10;
/// Maximum number of bytes of such a name.
const MAX_NAME: usize = 200;

/// Why a report says nothing about tests. Has no text of the report.
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReportProblem {
    #[error("it is not well-formed XML in UTF-8")]
    Malformed,
    #[error("it has a document type declaration")]
    DocType,
    #[error("it is not a JUnit report: its root is neither testsuites nor testsuite")]
    OtherRoot,
    #[error("its elements are nested more than {MAX_DEPTH} deep")]
    TooDeep,
    #[error("it has more than {MAX_TESTS} tests")]
    TooMany,
    #[error("it has more than {MAX_REPORT_BYTES} bytes")]
    TooLarge,
}

/// A test that is being read.
#[derive(Default)]
struct TestCase {
    name: String,
    depth: usize,
    has_failed: bool,
    was_skipped: bool,
}

#[derive(Default)]
struct ReportReader {
    report: TestReport,
    tests: u64,
    /// Maximum number of failures that one suite claims: some tools do not report each as a test.
    claimed: u64,
    depth: usize,
    case: Option<TestCase>,
}

/// Reads a whole report.
pub(crate) fn read(document: impl BufRead) -> Result<TestReport, ReportProblem> {
    let mut reader = Reader::from_reader(document);
    reader.config_mut().expand_empty_elements = true;
    let mut buffer = Vec::new();
    let mut found = ReportReader::default();
    let mut has_root = false;
    loop {
        match reader
            .read_event_into(&mut buffer)
            .map_err(|_| ReportProblem::Malformed)?
        {
            Event::Start(element) => {
                if found.depth == 0 {
                    let is_suite = matches!(element.local_name().as_ref(), "testsuites" | "testsuite");
                    if has_root || !is_suite {
                        return Err(ReportProblem::OtherRoot);
                    }
                    has_root = true;
                }
                found.begin(&element)?;
            }
            Event::End(_) => found.end(),
            Event::DocType(_) => return Err(ReportProblem::DocType),
            Event::Eof => break,
            Event::Empty(_)
            | Event::Text(_)
            | Event::CData(_)
            | Event::Comment(_)
            | Event::Decl(_)
            | Event::PI(_)
            | Event::GeneralRef(_) => {}
        }
        buffer.clear();
    }
    // The end of a document that was cut is no error of the reader.
    if !has_root || found.depth > 0 {
        return Err(ReportProblem::Malformed);
    }
    Ok(found.finish())
}

impl ReportReader {
    fn begin(&mut self, element: &BytesStart<'_>) -> Result<(), ReportProblem> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(ReportProblem::TooDeep);
        }
        match (element.local_name().as_ref(), &mut self.case) {
            ("testsuites" | "testsuite", None) => {
                let count = |name| -> Result<u64, ReportProblem> {
                    let value = attribute(element, name)?;
                    Ok(value.and_then(|value| value.trim().parse().ok()).unwrap_or(0))
                };
                self.claimed = self.claimed.max(count("failures")?.saturating_add(count("errors")?));
            }
            ("testcase", None) => {
                self.tests += 1;
                if self.tests > MAX_TESTS {
                    return Err(ReportProblem::TooMany);
                }
                self.case = Some(TestCase {
                    name: name(element)?,
                    depth: self.depth,
                    has_failed: false,
                    was_skipped: attribute(element, "status")?.as_deref() == Some("notrun"),
                });
            }
            ("failure" | "error", Some(case)) if self.depth == case.depth + 1 => case.has_failed = true,
            ("skipped", Some(case)) if self.depth == case.depth + 1 => case.was_skipped = true,
            _ => {}
        }
        Ok(())
    }

    fn end(&mut self) {
        if let Some(case) = self.case.take_if(|case| case.depth == self.depth) {
            if case.has_failed {
                self.report.failed += 1;
                if self.report.failures.len() < MAX_NAMES {
                    self.report.failures.push(case.name);
                }
            } else if case.was_skipped {
                self.report.skipped += 1;
            } else {
                self.report.passed += 1;
            }
        }
        self.depth = self.depth.saturating_sub(1);
    }

    fn finish(mut self) -> TestReport {
        self.report.failed = self.report.failed.max(self.claimed);
        self.report
    }
}

/// The class and the name of a test, as far as they are kept.
fn name(element: &BytesStart<'_>) -> Result<String, ReportProblem> {
    let part = |name| attribute(element, name).map(Option::unwrap_or_default);
    let (class, test) = (part("classname")?, part("name")?);
    let name = match (class.is_empty(), test.is_empty()) {
        (true, true) => "[a test without a name]".to_owned(),
        (true, false) => test,
        (false, _) => format!("{class}.{test}"),
    };
    let name: String = name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    Ok(first_bytes(&name, MAX_NAME).to_owned())
}

fn attribute(element: &BytesStart<'_>, name: &str) -> Result<Option<String>, ReportProblem> {
    let found = element.try_get_attribute(name).map_err(|_| ReportProblem::Malformed)?;
    let Some(found) = found else {
        return Ok(None);
    };
    let text = unescape(&found.value).map_err(|_| ReportProblem::Malformed)?;
    Ok(Some(text.into_owned()))
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;

    use super::*;

    fn counts(document: &str) -> Result<(u64, u64, u64), ReportProblem> {
        read(document.as_bytes()).map(|report| (report.passed, report.failed, report.skipped))
    }

    fn suite(cases: &str) -> String {
        format!("<?xml version=\"1.0\"?><testsuites><testsuite name=\"s\">{cases}</testsuite></testsuites>")
    }

    #[test]
    fn tests_are_counted_by_how_they_ended_and_failed_ones_are_named() {
        let report = read(
            suite(
                r#"<testcase classname="a.B" name="good"/>
                <testcase classname="a.B" name="bad &lt;1&gt;"><failure message="no">at line 3</failure></testcase>
                <testcase name="broken"><error/></testcase>
                <testcase name="later"><skipped/></testcase>
                <testcase name="disabled" status="notrun"/>
                <testcase name="flaky"><flakyFailure/><system-out><![CDATA[<failure/>]]></system-out></testcase>"#,
            )
            .as_bytes(),
        )
        .unwrap();
        assert_eq!((report.passed, report.failed, report.skipped), (2, 2, 2));
        assert_eq!(report.failures, ["a.B.bad <1>", "broken"]);
    }

    #[test]
    fn failures_that_only_a_suite_claims_count() {
        let claimed = r#"<testsuite tests="2" failures="1" errors="2"><testcase name="a"/></testsuite>"#;
        assert_eq!(counts(claimed), Ok((1, 3, 0)));
        let clean = r#"<testsuite tests="1" failures="0" errors="0"><testcase name="a"/></testsuite>"#;
        assert_eq!(counts(clean), Ok((1, 0, 0)));
    }

    #[rstest]
    #[case::empty("", ReportProblem::Malformed)]
    #[case::text("12 passed", ReportProblem::Malformed)]
    #[case::cut("<testsuite><testcase name=\"a\"/>", ReportProblem::Malformed)]
    #[case::crossed("<testsuite><testcase></testsuite></testcase>", ReportProblem::Malformed)]
    #[case::other_root("<html><testcase/></html>", ReportProblem::OtherRoot)]
    #[case::two_roots("<testsuite/><testsuite/>", ReportProblem::OtherRoot)]
    #[case::doc_type(
        "<!DOCTYPE t [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;\">]><testsuite><testcase name=\"&b;\"/></testsuite>",
        ReportProblem::DocType
    )]
    #[case::entity("<testsuite><testcase name=\"&b;\"/></testsuite>", ReportProblem::Malformed)]
    fn an_invalid_report_yields_no_counts(#[case] document: &str, #[case] problem: ReportProblem) {
        assert_eq!(counts(document), Err(problem));
    }

    #[test]
    fn another_encoding_than_utf_8_is_refused() {
        let latin = [b"<testsuite><testcase name=\"", &[0xe4][..], b"\"/></testsuite>"].concat();
        assert_eq!(read(&*latin), Err(ReportProblem::Malformed));
    }

    #[test]
    fn the_depth_and_the_number_of_tests_are_bounded() {
        let nested = |depth: usize| {
            let (open, close) = ("<testsuite>".repeat(depth - 1), "</testsuite>".repeat(depth - 1));
            format!("{open}<testcase name=\"a\"/>{close}")
        };
        assert_eq!(counts(&nested(MAX_DEPTH)), Ok((1, 0, 0)));
        assert_eq!(counts(&nested(MAX_DEPTH + 1)), Err(ReportProblem::TooDeep));
        let many = |number: u64| suite(&"<testcase/>".repeat(usize::try_from(number).unwrap()));
        assert_eq!(counts(&many(MAX_TESTS)), Ok((MAX_TESTS, 0, 0)));
        assert_eq!(counts(&many(MAX_TESTS + 1)), Err(ReportProblem::TooMany));
    }

    #[test]
    fn names_are_bounded_in_number_and_length_and_have_no_control_characters() {
        let long = "ä".repeat(MAX_NAME);
        let cases = format!("<testcase name=\"{long}&#10;\"><failure/></testcase>").repeat(MAX_NAMES + 1);
        let report = read(suite(&cases).as_bytes()).unwrap();
        assert_eq!(report.failed, u64::try_from(MAX_NAMES).unwrap() + 1);
        assert_eq!(report.failures.len(), MAX_NAMES);
        assert!(report.failures.iter().all(|name| name.len() <= MAX_NAME));
        let two_lines = suite("<testcase name=\"a&#10;b\"><failure/></testcase>");
        assert_eq!(read(two_lines.as_bytes()).unwrap().failures, ["a b"]);
    }
}
