//! `agentloop`: one binary, several roles. See `agentloop --help`.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // Install the TLS provider of the whole process before any client is created.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match agentloop::cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("agentloop: {error:#}");
            agentloop::cli::exit_code(&error)
        }
    }
}
