//! The command line: one file a subcommand; every flag has an environment twin.

use clap::{Parser, Subcommand};

mod controller;
mod crds;
mod gateway;
mod probe;
mod worker;

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
            Command::Crds(args) => args.run(),
            Command::Probe(args) => args.run(),
        }
    }
}
