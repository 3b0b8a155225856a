//! `agentloop history`: writes the history and the audit in a copy of a journal to standard output.

use std::io::{BufWriter, stdout};
use std::path::PathBuf;

use clap::Args as ClapArgs;

use crate::worker::journal::export;

/// Flags of `agentloop history`.
#[derive(ClapArgs, Debug)]
pub(super) struct HistoryArgs {
    /// Copy of a journal, as written by `agentloop journal`.
    #[arg(env = "AGENTLOOP_JOURNAL_COPY")]
    copy: PathBuf,
}

impl HistoryArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        export(&self.copy, &mut BufWriter::new(stdout().lock()))?;
        Ok(())
    }
}
