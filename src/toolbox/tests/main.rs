//! The toolbox and the bridge as real processes, used by the client of the worker.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod bridge;
mod escapes;
mod files;
mod harness;
mod http;
mod server;
mod shell;
