//! The kubectl plugin, `kubectl agentloop`: what a user does with Agents and AgentBudgets, as commands.
//!
//! Owns the commands, their screens and their exit codes. It is a client like any other, with the rights of the user: it
//! reads the custom resources, sets fields and annotations that users may set, and reaches the controller over the link's
//! API for clients. It decides nothing that the controller decides.

pub mod api_requests;
pub mod arguments;
pub mod cluster_errors;
pub mod commands;
pub mod completion;
pub mod failure;
pub mod impersonation;
pub mod journal_copy;
pub mod link;
pub mod reference;
pub mod report;
pub mod retries;
pub mod screens;
pub mod session;
pub mod simulation;
pub mod tasks;
pub mod writes;

use std::io::{stderr, stdout};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

pub use arguments::{PluginArgs, PluginCli};
pub use failure::{ExitStatus, PluginError};
pub use journal_copy::JournalExport;
pub use session::{PluginSession, Screen};

/// Name of the plugin's program: kubectl runs it as `kubectl agentloop`.
pub const PROGRAM: &str = "kubectl-agentloop";
/// Name of the subcommand that is the same: `agentloop kubectl`.
pub const SUBCOMMAND: &str = "kubectl";
/// Name of the program that kubectl asks for completions.
pub const COMPLETION_PROGRAM: &str = "kubectl_complete-agentloop";

/// The definition of the commands.
#[must_use]
pub fn command() -> clap::Command {
    PluginCli::command()
        .about("Inspect and control the Agents of a cluster.")
        .after_long_help(reference::exit_codes_text())
}

/// Parses the arguments of [`PROGRAM`] and runs the command.
#[must_use]
pub fn main(export: JournalExport) -> ExitCode {
    let parsed = command()
        .try_get_matches()
        .and_then(|matches| PluginCli::from_arg_matches(&matches));
    match parsed {
        Ok(cli) => ExitCode::from(cli.arguments.run(export).code()),
        Err(error) => rejected(&error),
    }
}

/// Prints why the arguments of a command cannot be used, or the help or the version that they ask for. Returns the exit code
/// of the plugin, whichever name it was started under.
#[must_use]
pub fn rejected(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    // Help and version are printed in the same way, to standard output.
    let status = if error.use_stderr() {
        ExitStatus::Usage
    } else {
        ExitStatus::Success
    };
    ExitCode::from(status.code())
}

impl PluginArgs {
    /// Runs the command until it ends. Errors are printed.
    #[must_use]
    pub fn run(self, export: JournalExport) -> ExitStatus {
        let (mut out, mut err) = (stdout(), stderr());
        let mut screen = Screen {
            out: &mut out,
            err: &mut err,
        };
        if let Err(error) = self.connection.impersonation.refuse_lost_groups(std::env::args_os()) {
            screen.note(&format!("error: {error}"));
            return error.exit_status();
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let ended = match runtime {
            Ok(runtime) => {
                let ended = runtime.block_on(Box::pin(commands::run(self, export, &mut screen)));
                // What still reads standard input may not keep the process alive.
                runtime.shutdown_background();
                ended
            }
            Err(error) => Err(error.into()),
        };
        ended.unwrap_or_else(|error| {
            let status = error.exit_status();
            screen.note(&format!("error: {error}"));
            status
        })
    }
}

#[cfg(test)]
mod text_tests;
