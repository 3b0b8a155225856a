//! `agentloop history`: writes the history and the audit in a copy of a journal to standard output.

use std::io::{BufWriter, stdout};
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use crate::worker::journal::{ExportError, export, export_bytes};

use super::unless_closed;

/// Flags of `agentloop history`.
#[derive(ClapArgs, Debug)]
pub(super) struct HistoryExportArgs {
    /// Copy of a journal, as written by `agentloop journal`.
    #[arg(env = "AGENTLOOP_JOURNAL_COPY")]
    copy: PathBuf,
}

impl HistoryExportArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match export(&self.copy, &mut BufWriter::new(stdout().lock())) {
            Err(ExportError::Io(error)) => Ok(unless_closed(Err(error))?),
            ended => Ok(ended?),
        }
    }
}

/// The same lines from a copy in memory, for the kubectl plugin, which knows no role. `name`: what errors call the copy.
pub fn history_of(copy: &[u8], name: &str) -> Result<String, String> {
    let mut lines = Vec::new();
    export_bytes(copy, Path::new(name), &mut lines).map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&lines).into_owned())
}
