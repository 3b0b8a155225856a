//! `agentloop controller`.

use clap::Args as ClapArgs;

/// Flags of `agentloop controller`.
#[derive(ClapArgs, Debug)]
pub(super) struct Args {}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        anyhow::bail!("controller is not wired yet")
    }
}
