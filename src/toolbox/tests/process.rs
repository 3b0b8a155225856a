//! The roles of this crate as a process, for tests. The product's binary is `agentloop`.

use std::path::PathBuf;
use std::process::ExitCode;

use agentloop_toolbox::{BridgeFlags, LAUNCH, SUPERVISE, ToolboxFlags};
use clap::Parser;
use tokio_util::sync::CancellationToken;

#[derive(Parser)]
enum Role {
    Toolbox(Box<ToolboxFlags>),
    McpBridge(BridgeFlags),
    ToolboxInstall { folder: PathBuf },
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next() {
        Some(role) if role == SUPERVISE => {
            return agentloop_toolbox::supervise().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        Some(role) if role == LAUNCH => {
            let error = agentloop_toolbox::launch(&arguments.collect::<Vec<_>>());
            eprintln!("cannot start the program: {error}");
            return ExitCode::from(127);
        }
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ran = runtime.map_err(Into::into).and_then(|runtime| {
        runtime.block_on(async {
            let end = CancellationToken::new();
            let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
            let ending = end.clone();
            tokio::spawn(async move {
                terminate.recv().await;
                ending.cancel();
            });
            match Role::parse() {
                Role::Toolbox(flags) => agentloop_toolbox::run_toolbox(*flags, end).await,
                Role::ToolboxInstall { folder } => Ok(agentloop_toolbox::install(&folder)?),
                Role::McpBridge(flags) => agentloop_toolbox::run_bridge(flags, end).await,
            }
        })
    });
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
