//! `agentloop journal`: writes a copy of an Agent's journal to standard output.

use std::io::{BufWriter, IsTerminal, stdout};
use std::path::PathBuf;

use anyhow::ensure;
use clap::Args as ClapArgs;

use crate::link::pod::JOURNAL_DIR;
use crate::worker::journal::copy;

/// Flags of `agentloop journal`.
#[derive(ClapArgs, Debug)]
pub(super) struct JournalArgs {
    /// Directory of the journal.
    #[arg(long, env = "AGENTLOOP_JOURNAL_DIR", default_value = JOURNAL_DIR)]
    journal_dir: PathBuf,
}

impl JournalArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let out = stdout().lock();
        ensure!(
            !out.is_terminal(),
            "the copy of the journal is an SQLite database: redirect standard output to a file (agentloop journal > copy.sqlite)"
        );
        copy(&self.journal_dir, &mut BufWriter::with_capacity(1 << 16, out))?;
        Ok(())
    }
}
