//! `agentloop worker`.

use clap::Args as ClapArgs;

/// Flags of `agentloop worker`.
#[derive(ClapArgs, Debug)]
pub(super) struct Args {}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        anyhow::bail!("worker is not wired yet")
    }
}
