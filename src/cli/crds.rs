//! `agentloop crds`: prints the custom resource definitions or their reference, or writes them to a directory.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args as ClapArgs, ValueEnum};
use kube::ResourceExt;

use crate::api::{crd, reference};

use super::print;

/// Flags of `agentloop crds`.
#[derive(ClapArgs, Debug)]
pub(super) struct CrdsArgs {
    /// Write one file per definition to this directory instead of printing them; it is created if missing.
    #[arg(long, env = "AGENTLOOP_CRDS_DIR", value_name = "DIRECTORY")]
    dir: Option<PathBuf>,
    /// What to print: the definitions (yaml) or their reference (markdown).
    #[arg(long, env = "AGENTLOOP_CRDS_FORMAT", default_value = "yaml", conflicts_with = "dir")]
    format: CrdFormat,
}

/// What is printed.
#[derive(ValueEnum, Clone, Copy, Debug)]
enum CrdFormat {
    /// The definitions, ready to install.
    Yaml,
    /// The API reference.
    Markdown,
}

impl CrdsArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match (self.dir, self.format) {
            (Some(dir), _) => write_files(&dir),
            (None, CrdFormat::Yaml) => {
                let mut text = String::new();
                for definition in crd::all() {
                    text.push_str("---\n");
                    text.push_str(&crd::to_yaml(&definition)?);
                }
                Ok(print(&text)?)
            }
            (None, CrdFormat::Markdown) => Ok(print(&reference::markdown(&crd::all()))?),
        }
    }
}

fn write_files(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create directory {}", dir.display()))?;
    for definition in crd::all() {
        let path = dir.join(format!("{}.yaml", definition.name_any()));
        std::fs::write(&path, crd::to_yaml(&definition)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
