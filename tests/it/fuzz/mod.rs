//! Garbage that was nearly right: what comes from a model's server, from the controller, from pods and from the disk, changed a
//! little. Whatever it contains, the result is a value or an error with a message: no panic, no hang, and no secret in the error.
//!
//! `AGENTLOOP_FUZZ_ROUNDS` (default 2,000) says how often; each round is a seed, named when it fails.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod answers;
mod directives;
mod journal;
mod mutation;
mod pods;

use crate::support::random::Random;

/// Runs one `share`-th of the rounds, each with random numbers of its own.
fn rounds(share: u64, mut round: impl FnMut(&mut Random)) {
    let rounds: u64 = std::env::var("AGENTLOOP_FUZZ_ROUNDS")
        .map_or(2_000, |text| text.parse().expect("AGENTLOOP_FUZZ_ROUNDS is a number"));
    for seed in 0..(rounds / share).max(1) {
        let _told = PrintSeedOnPanic(seed);
        round(&mut Random::new(seed));
    }
}

/// Names the seed of a round that fails.
struct PrintSeedOnPanic(u64);

impl Drop for PrintSeedOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in the round with seed {}", self.0);
        }
    }
}
