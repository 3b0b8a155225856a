//! Reports of the toolbox as one line of a result: a prefix that names the report, and JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The line of a report.
pub(crate) fn write<T: Serialize>(prefix: &str, report: &T) -> String {
    // Fails for no type of a report.
    let json = serde_json::to_string(report).unwrap_or_default();
    format!("{prefix}{json}")
}

/// Reads such a line; `None`: it is another one.
pub(crate) fn read<T: DeserializeOwned>(prefix: &str, line: &str) -> Option<T> {
    serde_json::from_str(line.strip_prefix(prefix)?).ok()
}
