//! `agentloop mcp-bridge`.

use clap::Args as ClapArgs;

use super::pod;
use crate::toolbox::{self, BridgeFlags};

/// Flags of `agentloop mcp-bridge`.
#[derive(ClapArgs, Debug)]
pub(super) struct McpBridgeArgs {
    #[command(flatten)]
    flags: BridgeFlags,
}

impl McpBridgeArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        crate::telemetry::log::init();
        pod::run(async move |end| Ok(toolbox::run_bridge(self.flags, end).await?))
    }
}
