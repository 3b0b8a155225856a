//! `agentloop crds`: prints the custom resource definitions, or writes them to a directory.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args as ClapArgs;
use kube::ResourceExt;

use crate::api::crd;

/// Flags of `agentloop crds`.
#[derive(ClapArgs, Debug)]
pub(super) struct Args {
    /// Write one file per definition into this directory (made when missing) instead of printing them.
    #[arg(long, env = "AGENTLOOP_CRDS_DIR", value_name = "DIRECTORY")]
    dir: Option<PathBuf>,
}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        if let Some(dir) = &self.dir {
            std::fs::create_dir_all(dir).with_context(|| format!("cannot make the directory {}", dir.display()))?;
        }
        for definition in crd::all() {
            let text = crd::to_yaml(&definition)?;
            match &self.dir {
                Some(dir) => {
                    let path = dir.join(format!("{}.yaml", definition.name_any()));
                    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
                }
                None => write!(std::io::stdout(), "---\n{text}")?,
            }
        }
        Ok(())
    }
}
