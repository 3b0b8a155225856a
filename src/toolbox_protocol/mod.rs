//! What the toolbox and the readers of its results agree on beyond MCP: reports in the text of a result, keys in its `_meta`, and
//! the names of unfinished files.
//!
//! The toolbox writes them; engine and worker read them, also from an older or newer toolbox. Imports no other module.

#![warn(missing_docs)]

pub mod file_report;
mod report_line;
pub mod test_report;

/// Key in `_meta` of a result of the toolbox: bytes that the call wrote to a disk.
pub const DISK_WRITE_BYTES_META: &str = "agentloop.dev/disk-write-bytes";
/// Key in `_meta` of a result of the toolbox: bytes that the call sent over the network.
pub const BANDWIDTH_BYTES_META: &str = "agentloop.dev/bandwidth-bytes";
/// Names of files that the toolbox has not finished begin with this. Readers of the workspace ignore them.
pub const UNFINISHED_FILE_PREFIX: &str = ".agentloop-";
