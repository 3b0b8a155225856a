//! Tests of `agentloop run`: the real binary on manifests, in a directory of its own.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ends;
mod examples;
mod input;
mod loops;
mod page;
pub mod process;
mod sensors;
mod simulate;
mod simulate_running;
mod simulate_settings;
mod simulate_sleeping;
mod sources;
mod tasks;
mod traces;
