//! `agentloop probe`.

use clap::Args as ClapArgs;

/// Flags of `agentloop probe`.
#[derive(ClapArgs, Debug)]
pub(super) struct Args {}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        anyhow::bail!("probe is not wired yet")
    }
}
