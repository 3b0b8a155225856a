//! `agentloop gateway`.

use clap::Args as ClapArgs;

/// Flags of `agentloop gateway`.
#[derive(ClapArgs, Debug)]
pub(super) struct Args {}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        anyhow::bail!("gateway is not wired yet")
    }
}
