//! The command line: one file a subcommand; every flag has an environment twin.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::local::manifest::Mistakes;

mod controller;
mod crds;
mod gateway;
mod journal;
mod pod;
mod probe;
mod run;
mod sensor;
mod worker;

/// Exit code for a mistake in what the user gave; clap's own.
const BAD_INPUT: u8 = 2;

/// The exit code that an error asks for.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    if error.is::<Mistakes>() {
        ExitCode::from(BAD_INPUT)
    } else {
        ExitCode::FAILURE
    }
}

/// The Kubernetes operator for autonomous LLM agents.
#[derive(Parser, Debug)]
#[command(name = "agentloop", version, about)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Watch Agents, run their pods, publish their status.
    Controller(Box<controller::Args>),
    /// Run the loop of one Agent (in its pod).
    Worker(worker::Args),
    /// Hold the provider key and meter every model call (in the Agent's pod).
    Gateway(gateway::Args),
    /// Listen for one Sensor, and deliver its events (in the Sensor's own pod).
    // Not shown: the controller does not make that pod yet.
    #[command(hide = true)]
    Sensor(sensor::Args),
    /// Run the Agents of manifests in this process, without a cluster.
    Run(run::Args),
    /// Write a copy of an Agent's journal to standard output, a file of SQLite; the Agent may run meanwhile.
    Journal(journal::Args),
    /// Print the custom resource definitions, or write them to a directory.
    Crds(crds::Args),
    /// Exit 0 when the gateway of this pod serves.
    Probe(probe::Args),
}

impl Cli {
    /// Runs the subcommand until it ends.
    pub fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Controller(args) => args.run(),
            Command::Worker(args) => args.run(),
            Command::Gateway(args) => args.run(),
            Command::Sensor(args) => args.run(),
            Command::Run(args) => args.run(),
            Command::Journal(args) => args.run(),
            Command::Crds(args) => args.run(),
            Command::Probe(args) => args.run(),
        }
    }
}
