//! `simulate`: reads histories from files, and shows what changed limits would have done.

use std::path::Path;

use crate::plugin::arguments::{OutputFormat, SimulateArgs};
use crate::plugin::failure::PluginError;
use crate::plugin::session::{Screen, print_data};
use crate::plugin::simulation::{changes, past, replay};

pub(super) fn simulate(
    format: Option<OutputFormat>,
    arguments: &SimulateArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let budget = arguments.budget.as_deref().map(text_of).transpose()?;
    let limits = changes::read(budget.as_deref(), &arguments.set)?;
    let mut histories = Vec::new();
    for file in &arguments.files {
        let history = past::read(&text_of(file)?)
            .map_err(|problem| PluginError::Refused(format!("{} is not a history: {problem}", file.display())))?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        histories.push((name, history));
    }
    let report = replay::run(&limits, &histories)?;
    if !print_data(format, &report, screen)? {
        write!(screen.out, "{}", report.text())?;
    }
    Ok(())
}

fn text_of(file: &Path) -> Result<String, PluginError> {
    std::fs::read_to_string(file)
        .map_err(|error| PluginError::Refused(format!("cannot read {}: {error}", file.display())))
}
