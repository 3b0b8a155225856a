//! The commands: each reads what it needs, has it rendered or decided by a pure function, and writes.

mod cost;
mod reads;
mod report;
mod simulate;
mod streams;
mod tasks;
mod writes;

use jiff::Timestamp;

use super::arguments::{BudgetCommand, OutputFormat, PluginArgs, PluginCommand};
use super::failure::{ExitStatus, PluginError, unless_closed};
use super::journal_copy::JournalExport;
use super::session::{PluginSession, Screen};
use super::{completion, reference};

/// Runs the command of these arguments.
pub async fn run(
    arguments: PluginArgs,
    export: JournalExport,
    screen: &mut Screen<'_>,
) -> Result<ExitStatus, PluginError> {
    refuse_all_namespaces(arguments.connection.all_namespaces, &arguments.command)?;
    refuse_format(arguments.connection.output, &arguments.command)?;
    // These need no cluster.
    if let PluginCommand::Completion(arguments) = &arguments.command {
        unless_closed(
            screen
                .out
                .write_all(&completion::script(arguments.shell))
                .map_err(Into::into),
        )?;
        return Ok(ExitStatus::Success);
    }
    if matches!(arguments.command, PluginCommand::Reference) {
        screen.result(&reference::markdown())?;
        return Ok(ExitStatus::Success);
    }
    if let PluginCommand::Simulate(simulated) = &arguments.command
        && simulated.names.is_empty()
    {
        let reader = (arguments.connection.output, Timestamp::now());
        unless_closed(simulate::of_files(reader, simulated, screen))?;
        return Ok(ExitStatus::Success);
    }
    let session = PluginSession::connect(&arguments.connection, export).await?;
    execute(&session, arguments.command, screen).await
}

/// A command that would ignore the flag could act on an object of another namespace than the user means.
fn refuse_all_namespaces(is_set: bool, command: &PluginCommand) -> Result<(), PluginError> {
    if is_set && !command.lists_objects() {
        return Err(PluginError::Usage(
            "--all-namespaces (-A) is for commands that list objects: name one namespace with -n".into(),
        ));
    }
    Ok(())
}

/// A program would take what a command prints instead for what it has asked for.
fn refuse_format(format: Option<OutputFormat>, command: &PluginCommand) -> Result<(), PluginError> {
    if format.is_some_and(|format| !command.prints(format)) {
        return Err(PluginError::Usage(
            "this command does not print the format of --output (-o): leave it out".into(),
        ));
    }
    Ok(())
}

/// Runs a command that needs a cluster.
pub async fn execute(
    session: &PluginSession,
    command: PluginCommand,
    screen: &mut Screen<'_>,
) -> Result<ExitStatus, PluginError> {
    use PluginCommand as Asked;
    refuse_all_namespaces(session.all_namespaces, &command)?;
    refuse_format(session.format, &command)?;
    match command {
        Asked::Status(arguments) => return reads::status(session, &arguments, screen).await,
        Asked::Explain(agent) => unless_closed(reads::explain(session, &agent.name, screen).await)?,
        Asked::Approvals => unless_closed(reads::approvals(session, screen).await)?,
        Asked::Cost(arguments) => unless_closed(cost::cost(session, &arguments, screen).await)?,
        Asked::Budget(BudgetCommand::Top) => unless_closed(reads::budgets(session, screen).await)?,
        Asked::Check(arguments) => return reads::check(session, &arguments, screen).await,
        Asked::Simulate(arguments) => unless_closed(simulate::of_agents(session, &arguments, screen).await)?,
        Asked::Report(arguments) => report::report(session, &arguments, screen).await?,
        Asked::Logs(arguments) => unless_closed(streams::logs(session, &arguments, screen).await)?,
        Asked::Events(arguments) => unless_closed(streams::events(session, &arguments, screen).await)?,
        Asked::History(arguments) => unless_closed(streams::history(session, &arguments, screen).await)?,
        Asked::Approve(arguments) => writes::answer(session, &arguments, true, screen).await?,
        Asked::Deny(arguments) => writes::answer(session, &arguments, false, screen).await?,
        Asked::Pause(agents) => {
            return writes::request(session, &agents.names, writes::LoopRequest::Pause, screen).await;
        }
        Asked::Resume(agents) => {
            return writes::request(session, &agents.names, writes::LoopRequest::Resume, screen).await;
        }
        Asked::Wake(agents) => return writes::request(session, &agents.names, writes::LoopRequest::Wake, screen).await,
        Asked::Stop(arguments) => {
            let request = writes::LoopRequest::Stop { at_once: arguments.now };
            return writes::request(session, &arguments.names, request, screen).await;
        }
        Asked::Budget(BudgetCommand::TopUp(arguments)) => writes::top_up(session, arguments, screen).await?,
        Asked::Run(arguments) => return tasks::run(session, arguments, screen).await,
        Asked::Chat(arguments) => tasks::chat(session, &arguments, screen).await?,
        Asked::Completion(_) | Asked::Reference => {}
    }
    Ok(ExitStatus::Success)
}
