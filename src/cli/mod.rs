//! The command line: one file per subcommand. Every flag has an environment variable.

use std::io::{self, Write, stdout};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::local::manifest::ManifestError;
use crate::plugin::PluginArgs;

mod controller;
mod crds;
mod dashboards;
mod gateway;
mod history;
mod journal;
mod mcp_bridge;
mod pod;
mod probe;
mod run;
mod sensor;
mod toolbox;
mod worker;

pub use history::history_of;

/// Exit code for invalid input; the same as clap's.
const BAD_INPUT: u8 = 2;

/// The exit code for an error.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    if error.is::<ManifestError>() {
        ExitCode::from(BAD_INPUT)
    } else {
        ExitCode::FAILURE
    }
}

/// Prints the result of a command.
fn print(text: &str) -> io::Result<()> {
    let mut out = stdout().lock();
    unless_closed(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// The end of a command that only prints: the reader of a pipe that has read enough, such as `head`, is no failure.
fn unless_closed(ended: io::Result<()>) -> io::Result<()> {
    match ended {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        ended => ended,
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
    /// Reconcile Agents, AgentBudgets and Sensors.
    Controller(Box<controller::ControllerArgs>),
    /// Run the loop of one Agent (in its pod).
    Worker(worker::WorkerArgs),
    /// Hold the provider key and meter every model call (in the Agent's pod).
    Gateway(gateway::GatewayArgs),
    /// Run the source of one Sensor and deliver its events (in the sensor pod).
    // Hidden, since only the controller starts it.
    #[command(hide = true)]
    Sensor(sensor::SensorArgs),
    /// Run the Agents of manifests in this process, without a cluster.
    Run(run::LocalRunArgs),
    /// Write a copy of an Agent's journal, an SQLite database, to standard output; the Agent may keep running.
    Journal(journal::JournalArgs),
    /// Print the executions, steps and tool decisions in a copy of a journal as JSON lines.
    History(history::HistoryExportArgs),
    /// Print the custom resource definitions, or write them to a directory.
    Crds(crds::CrdsArgs),
    /// Print the Grafana dashboards, or write them to a directory.
    Dashboards(dashboards::DashboardsArgs),
    /// Inspect and control the Agents of a cluster; as a kubectl plugin: `kubectl agentloop`.
    Kubectl(Box<PluginArgs>),
    /// Exit with 0 if the gateway of this pod is healthy.
    Probe(probe::ProbeArgs),
    /// Serve the built-in tools as an MCP server (in the Agent's pod, in the image of its tools).
    // Hidden, like the ones below, since only the controller and this binary itself start them.
    #[command(hide = true)]
    Toolbox(Box<toolbox::ToolboxArgs>),
    /// Serve an MCP server that uses standard input and output over HTTP (in the Agent's pod, in the server's image).
    #[command(hide = true)]
    McpBridge(mcp_bridge::McpBridgeArgs),
    /// Copy this binary to a directory, for a container with another image.
    #[command(hide = true)]
    ToolboxInstall(toolbox::InstallArgs),
    /// Run one command of the toolbox, and end what it started.
    #[command(hide = true, name = crate::toolbox::SUPERVISE)]
    Supervise,
    /// Apply resource limits, then execute a program in place of this process.
    #[command(hide = true, name = crate::toolbox::LAUNCH)]
    Launch(toolbox::LaunchArgs),
}

impl Cli {
    /// Runs the subcommand until it ends.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            // Says itself what went wrong.
            Command::Kubectl(args) => return Ok(ExitCode::from(args.run(history_of).code())),
            Command::Controller(args) => args.run(),
            Command::Worker(args) => args.run(),
            Command::Gateway(args) => args.run(),
            Command::Sensor(args) => args.run(),
            Command::Run(args) => args.run(),
            Command::Journal(args) => args.run(),
            Command::History(args) => args.run(),
            Command::Crds(args) => args.run(),
            Command::Dashboards(args) => args.run(),
            Command::Probe(args) => args.run(),
            Command::Toolbox(args) => args.run(),
            Command::McpBridge(args) => args.run(),
            Command::ToolboxInstall(args) => args.run(),
            Command::Supervise => Ok(crate::toolbox::supervise()?),
            Command::Launch(args) => args.run(),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}
