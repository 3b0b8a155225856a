//! What is found of named files, as the toolbox writes it and the engine reads it: the result of `list_directory` with `files`.

use serde::{Deserialize, Serialize};

use crate::report_line;

/// Maximum number of files in one report.
pub const MAX_FILES: usize = 32;

/// What the line begins with.
const PREFIX: &str = "Files: ";

/// What was found, file by file, in the order in which they were named. Has no path, so that its length is bounded.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct FileReport(pub Vec<FileFinding>);

/// What was found under one path.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum FileFinding {
    /// A regular file with this size.
    Bytes(u64),
    /// Nothing.
    Absent,
    /// A directory, or something else that is not a regular file.
    NotRegular,
    /// The path, or a link on it, leads out of the workspace. Absolute links count as such.
    Outside,
    /// It could not be determined.
    Unreadable,
}

impl FileReport {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written_and_nothing_else_is() {
        let report = FileReport(vec![
            FileFinding::Bytes(12),
            FileFinding::Absent,
            FileFinding::NotRegular,
            FileFinding::Outside,
            FileFinding::Unreadable,
        ]);
        let line = report.line();
        assert_eq!(
            line,
            r#"Files: [{"bytes":12},"absent","notRegular","outside","unreadable"]"#
        );
        assert_eq!(FileReport::parse(&line), Some(report));
        for other in [
            "",
            "a/\nb.txt 12",
            "Files: 2",
            r#"Files: [{"bytes":-1}]"#,
            r#"Files: ["gone"]"#,
        ] {
            assert_eq!(FileReport::parse(other), None, "{other}");
        }
    }
}
