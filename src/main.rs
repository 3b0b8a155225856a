//! `agentloop`: one binary, several roles. See `agentloop --help`.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use agentloop::plugin;
use clap::Parser;

fn main() -> ExitCode {
    // Install the TLS provider of the whole process before any client is created.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // kubectl runs its plugins by their names, which are links to this binary.
    let program = std::env::args_os().next().unwrap_or_default();
    match Path::new(&program).file_name().and_then(OsStr::to_str) {
        Some(plugin::PROGRAM) => return plugin::main(agentloop::cli::history_of),
        Some(plugin::COMPLETION_PROGRAM) => {
            let words: Vec<String> = std::env::args().skip(1).collect();
            let answer = plugin::completion::answer(&words, plugin::completion::names_of_objects);
            // kubectl may have stopped reading.
            let _ = std::io::stdout().write_all(answer.as_bytes());
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let is_plugin = std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == plugin::SUBCOMMAND);
    let cli = match agentloop::cli::Cli::try_parse() {
        Ok(cli) => cli,
        // Its exit code 2 is that of a task that a limit ended.
        Err(error) if is_plugin => return plugin::rejected(&error),
        Err(error) => error.exit(),
    };
    match cli.run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("agentloop: {error:#}");
            agentloop::cli::exit_code(&error)
        }
    }
}
