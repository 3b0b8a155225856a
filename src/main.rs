//! `agentloop`: one binary, several roles. See `agentloop --help`.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // One TLS provider for the whole process, chosen before any client exists.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match agentloop::cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("agentloop: {error:#}");
            agentloop::cli::exit_code(&error)
        }
    }
}
