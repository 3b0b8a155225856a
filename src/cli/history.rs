//! `agentloop history`: writes the history and the audit in a copy of a journal to standard output.

use std::io::{BufWriter, stdout};
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use crate::worker::journal::{export, export_bytes};

/// Flags of `agentloop history`.
#[derive(ClapArgs, Debug)]
pub(super) struct HistoryExportArgs {
    /// Copy of a journal, as written by `agentloop journal`.
    #[arg(env = "AGENTLOOP_JOURNAL_COPY")]
    copy: PathBuf,
}

impl HistoryExportArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        export(&self.copy, &mut BufWriter::new(stdout().lock()))?;
        Ok(())
    }
}

/// The same lines from a copy in memory, for the kubectl plugin, which knows no role. `name`: what errors call the copy.
pub fn history_of(copy: &[u8], name: &str) -> Result<String, String> {
    let mut lines = Vec::new();
    export_bytes(copy, Path::new(name), &mut lines).map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&lines).into_owned())
}
