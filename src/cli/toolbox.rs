//! `agentloop toolbox`, and how it starts programs.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args as ClapArgs;

use super::pod;
use crate::toolbox::{self, ToolboxFlags};

/// Flags of `agentloop toolbox`.
#[derive(ClapArgs, Debug)]
pub(super) struct ToolboxArgs {
    #[command(flatten)]
    flags: ToolboxFlags,
}

impl ToolboxArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        crate::telemetry::log::init();
        pod::run(async move |end| Ok(toolbox::run_toolbox(self.flags, end).await?))
    }
}

/// Arguments of `agentloop toolbox-install`.
#[derive(ClapArgs, Debug)]
pub(super) struct InstallArgs {
    /// The directory: a volume that the other container mounts.
    directory: PathBuf,
}

impl InstallArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let directory = self.directory.display();
        toolbox::install(&self.directory).with_context(|| format!("cannot copy to {directory}"))
    }
}

/// Arguments of the launcher.
#[derive(ClapArgs, Debug)]
pub(super) struct LaunchArgs {
    /// Limits as JSON, the program, and its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    arguments: Vec<OsString>,
}

impl LaunchArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        // Returns only if it fails.
        Err(toolbox::launch(&self.arguments)).context("cannot start the program")
    }
}
