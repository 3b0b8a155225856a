//! `read_file`: lines of a text file.

use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::{FileError, Workspace, check_cancelled, shown, size};
use crate::answer::ToolAnswer;

pub(crate) const DEFAULT_LINES: u64 = 2000;
pub(crate) const MAX_LINES: u64 = 100_000;
/// Maximum number of bytes of a file that are passed over before the first wanted line.
const MAX_SKIPPED: u64 = 256 * 1024 * 1024;
/// The first bytes of a file that are checked: with a zero byte among them it is not text.
const PROBED: usize = 8 * 1024;
const BUFFER: usize = 64 * 1024;

/// Arguments of `read_file`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadFile {
    path: String,
    #[serde(default = "one")]
    first_line: u64,
    #[serde(default = "default_lines")]
    max_lines: u64,
}

const fn one() -> u64 {
    1
}

const fn default_lines() -> u64 {
    DEFAULT_LINES
}

impl Workspace {
    /// Reads lines of a file, at most `limit` bytes of them.
    pub(crate) fn read(
        &self,
        wanted: &ReadFile,
        limit: usize,
        cancelled: &CancellationToken,
    ) -> Result<ToolAnswer, FileError> {
        let path = self.relative(&wanted.path)?;
        let (file, stat) = self.open_regular(path)?;
        let mut lines = TextFile {
            file: BufReader::with_capacity(BUFFER, file),
            path,
            cancelled,
        };
        if lines.is_binary()? {
            let text = format!("{}: binary, {} bytes; not shown", shown(path), size(&stat));
            return Err(FileError::Refused(text));
        }
        let first = wanted.first_line.max(1);
        let skipped = lines.skip(first - 1)?;
        if skipped < first - 1 {
            return Ok(ToolAnswer::text(format!("[the file has {skipped} lines]")));
        }
        let excerpt = lines.collect(wanted.max_lines.clamp(1, MAX_LINES), limit)?;
        if excerpt.bytes.is_empty() {
            let text = match first - 1 {
                0 => "[the file is empty]".to_owned(),
                lines => format!("[the file has {lines} lines]"),
            };
            return Ok(ToolAnswer::text(text));
        }
        Ok(ToolAnswer::text(excerpt.into_text(first)))
    }
}

struct TextFile<'a, R> {
    file: BufReader<R>,
    path: &'a Path,
    cancelled: &'a CancellationToken,
}

impl<R: std::io::Read> TextFile<'_, R> {
    fn fill(&mut self) -> Result<&[u8], FileError> {
        check_cancelled(self.cancelled)?;
        let path = self.path;
        self.file.fill_buf().map_err(|error| FileError::io(path, &error))
    }

    fn is_binary(&mut self) -> Result<bool, FileError> {
        let bytes = self.fill()?;
        Ok(bytes[..bytes.len().min(PROBED)].contains(&0))
    }

    /// Skips `count` lines. Returns how many there were; fewer, if the file ended.
    fn skip(&mut self, count: u64) -> Result<u64, FileError> {
        let (mut skipped, mut bytes, mut is_within) = (0, 0_u64, false);
        while skipped < count {
            let chunk = self.fill()?;
            if chunk.is_empty() {
                return Ok(skipped + u64::from(is_within));
            }
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(chunk.len(), |at| at + 1);
            is_within = end.is_none();
            skipped += u64::from(!is_within);
            self.file.consume(used);
            bytes += used as u64;
            if bytes > MAX_SKIPPED {
                let mib = MAX_SKIPPED / 1024 / 1024;
                return Err(FileError::Refused(format!(
                    "{}: line {} is beyond the first {mib} MiB, which is as far as this tool reads",
                    shown(self.path),
                    count + 1
                )));
            }
        }
        Ok(skipped)
    }

    fn collect(&mut self, count: u64, limit: usize) -> Result<LineExcerpt, FileError> {
        let mut excerpt = LineExcerpt::default();
        while excerpt.lines < count && excerpt.bytes.len() < limit {
            let remaining = limit - excerpt.bytes.len();
            let chunk = self.fill()?;
            if chunk.is_empty() {
                break;
            }
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(chunk.len(), |at| at + 1).min(remaining);
            excerpt.bytes.extend_from_slice(&chunk[..used]);
            excerpt.lines += u64::from(excerpt.bytes.last() == Some(&b'\n'));
            self.file.consume(used);
        }
        excerpt.is_complete = self.fill()?.is_empty();
        Ok(excerpt)
    }
}

#[derive(Default)]
struct LineExcerpt {
    bytes: Vec<u8>,
    /// Complete lines.
    lines: u64,
    /// Nothing follows.
    is_complete: bool,
}

impl LineExcerpt {
    fn into_text(self, first: u64) -> String {
        let text = match String::from_utf8(self.bytes) {
            Ok(text) => text,
            // A character may have been cut at the limit; anything else is shown as well as possible.
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        };
        if self.is_complete {
            return text;
        }
        if self.lines == 0 {
            return format!("{text}\n[line {first} is longer than a result; the rest of it is left out]");
        }
        // An incomplete line at the end is shown again with the next call.
        let end = text.rfind('\n').map_or(text.len(), |at| at + 1);
        let next = first + self.lines;
        format!("{}[more follows: continue with first_line {next}]", &text[..end])
    }
}
