//! `agentloop dashboards`: prints the Grafana dashboards, or writes them to a directory.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args as ClapArgs;

use crate::telemetry::dashboards;

use super::print;

/// Flags of `agentloop dashboards`.
#[derive(ClapArgs, Debug)]
pub(super) struct DashboardsArgs {
    /// Write one file per dashboard to this directory, which is created if missing, instead of printing a JSON list of them.
    #[arg(long, env = "AGENTLOOP_DASHBOARDS_DIR", value_name = "DIRECTORY")]
    dir: Option<PathBuf>,
}

impl DashboardsArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let boards = dashboards::all();
        let Some(dir) = self.dir else {
            let list = boards.into_iter().map(|(_, board)| board).collect();
            return Ok(print(&dashboards::to_text(&list))?);
        };
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create directory {}", dir.display()))?;
        for (name, board) in boards {
            let path = dir.join(name);
            std::fs::write(&path, dashboards::to_text(&board))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}
