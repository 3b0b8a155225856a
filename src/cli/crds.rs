//! `agentloop crds`.

use clap::Args as ClapArgs;

/// Flags of `agentloop crds`.
#[derive(ClapArgs, Debug)]
pub(super) struct Args {}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        anyhow::bail!("crds is not wired yet")
    }
}
