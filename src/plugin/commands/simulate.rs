//! `simulate`: reads histories from files and from Agents, and shows what changed limits would have done.

use std::path::Path;

use jiff::Timestamp;

use crate::plugin::arguments::{OutputFormat, SimulateArgs};
use crate::plugin::failure::PluginError;
use crate::plugin::journal_copy;
use crate::plugin::session::{PluginSession, Screen, print_data};
use crate::plugin::simulation::past::{self, PastLoop};
use crate::plugin::simulation::{changes, replay};

/// With histories from files only, which needs no cluster.
pub(super) fn of_files(
    (format, now): (Option<OutputFormat>, Timestamp),
    arguments: &SimulateArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let simulation = SimulateRequest::new(arguments)?;
    let histories = of_all_files(arguments)?;
    simulation.show((format, now), histories, screen)
}

/// With histories of Agents too.
pub(super) async fn of_agents(
    session: &PluginSession,
    arguments: &SimulateArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let simulation = SimulateRequest::new(arguments)?;
    let mut histories = of_all_files(arguments)?;
    for name in &arguments.names {
        let lines = journal_copy::history(session, name).await?;
        histories.push((name.clone(), history(&lines, &format!("the journal of {name}"))?));
    }
    simulation.show((session.format, session.now()), histories, screen)
}

/// The request, which is parsed before any history is read.
struct SimulateRequest<'a> {
    limits: changes::SimulatedLimits,
    arguments: &'a SimulateArgs,
}

impl<'a> SimulateRequest<'a> {
    fn new(arguments: &'a SimulateArgs) -> Result<Self, PluginError> {
        let budget = arguments.budget.as_deref().map(text_of).transpose()?;
        let limits = changes::read(budget.as_deref(), &arguments.set)?;
        Ok(Self { limits, arguments })
    }

    fn show(
        &self,
        (format, now): (Option<OutputFormat>, Timestamp),
        mut histories: Vec<(String, PastLoop)>,
        screen: &mut Screen<'_>,
    ) -> Result<(), PluginError> {
        let begin = self.arguments.since.and_then(|since| now.checked_sub(since).ok());
        if let Some(begin) = begin {
            for (_, history) in &mut histories {
                history.begin_at(begin);
            }
        }
        let mut report = replay::run(&self.limits, &histories)?;
        if let Some(begin) = begin {
            report.approximations.push(format!(
                "Usage before {begin} is not counted: windows start empty, and a turn in progress at that time starts with its next call."
            ));
        }
        if !print_data(format, &report, screen)? {
            write!(screen.out, "{}", report.text())?;
        }
        Ok(())
    }
}

fn of_all_files(arguments: &SimulateArgs) -> Result<Vec<(String, PastLoop)>, PluginError> {
    let read = |file: &std::path::PathBuf| {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, history(&text_of(file)?, &file.display().to_string())?))
    };
    arguments.files.iter().map(read).collect()
}

fn history(lines: &str, source: &str) -> Result<PastLoop, PluginError> {
    past::read(lines).map_err(|problem| PluginError::Refused(format!("{source} is not a history: {problem}")))
}

fn text_of(file: &Path) -> Result<String, PluginError> {
    std::fs::read_to_string(file)
        .map_err(|error| PluginError::Refused(format!("cannot read {}: {error}", file.display())))
}
