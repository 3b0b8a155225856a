//! The proof of the budget protocol: [`simulation`] simulates it from seeds, with injected faults; [`model`] checks a small
//! instance exhaustively; [`oracle`] records what really happened; [`mutation`] lists broken rules, each of which must be
//! detected.
//!
//! `AGENTLOOP_SIM_SEED=n` replays one schedule and prints what happens; `AGENTLOOP_SIM_SCHEDULES=n` sets their number.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod afterwards;
mod gateway;
mod leader;
mod model;
mod mutation;
mod oracle;
mod seeds;
mod simulation;

use std::io::Write;

use mutation::Mutation;
use simulation::Outcome;

/// Schedules of one run, and the number within which each broken rule must be detected.
const SCHEDULES: u64 = 25_000;
const UNNOTICED: u64 = 10_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A line for the list of figures; past the test harness, which keeps what a test prints.
fn figure(text: &str) {
    let _ = writeln!(std::io::stderr(), "FIGURE {text}");
}

/// One schedule; a panic is a failure like others.
fn run(seed: u64, mutation: Mutation) -> Result<Outcome, String> {
    let outcome = std::panic::catch_unwind(|| simulation::run(seed, mutation, false));
    outcome.unwrap_or_else(|_| Err("it panicked".into()))
}

#[derive(Default)]
struct Sums {
    steps: usize,
    calls: usize,
    overspent_afterwards: u64,
    worst: f64,
    sum: f64,
}

/// Every n-th seed, so that each core has its own.
fn run_all(seeds: impl Iterator<Item = u64>) -> Sums {
    let mut sums = Sums::default();
    for seed in seeds {
        let outcome = run(seed, Mutation::None);
        let outcome = outcome.unwrap_or_else(|what| panic!("AGENTLOOP_SIM_SEED={seed} replays it: {what}"));
        sums.steps += outcome.steps;
        sums.calls += outcome.calls;
        sums.overspent_afterwards += u64::from(outcome.afterwards > 0.0);
        sums.worst = sums.worst.max(outcome.afterwards);
        sums.sum += outcome.afterwards;
    }
    sums
}

#[test]
fn no_schedule_overspends_leaks_or_deadlocks() {
    if let Some(seed) = number("AGENTLOOP_SIM_SEED") {
        let outcome = simulation::run(seed, Mutation::None, true);
        assert!(outcome.is_ok(), "seed {seed}: {}", outcome.unwrap_err());
        return;
    }
    run_all(seeds::FOUND.into_iter().map(|(seed, _)| seed));
    let schedules = number("AGENTLOOP_SIM_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("AGENTLOOP_SIM_FIRST").unwrap_or(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let sums: Vec<_> = std::thread::scope(|scope| {
        let part = |core| (first..first + schedules).skip(core).step_by(cores);
        let threads: Vec<_> = (0..cores)
            .map(|core| scope.spawn(move || run_all(part(core))))
            .collect();
        let joined = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined
            .map(|sums| sums.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let (steps, calls): (usize, usize) = (
        sums.iter().map(|sums| sums.steps).sum(),
        sums.iter().map(|sums| sums.calls).sum(),
    );
    figure(&format!(
        "ledger_simulation {schedules} schedules, {steps} steps, {calls} calls: 0 windows overspent, 0 calls paid \
         twice, 0 leaks, 0 standstills"
    ));
    let over: u64 = sums.iter().map(|sums| sums.overspent_afterwards).sum();
    let worst = sums.iter().map(|sums| sums.worst).fold(0.0, f64::max);
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let mean = sums.iter().map(|sums| sums.sum).sum::<f64>() / schedules as f64;
    figure(&format!(
        "ledger_accounting_after_the_fact on the same schedules: {over} overspent, by {worst:.0} % at most, {mean:.1} \
         % on average of all"
    ));
}

#[test]
fn every_broken_rule_is_noticed() {
    let mut taken = Vec::new();
    for mutation in Mutation::ALL {
        let found = (0..UNNOTICED).find_map(|seed| Some((seed, run(seed, mutation).err()?)));
        let (seed, what) = found.unwrap_or_else(|| panic!("{mutation:?} is not noticed"));
        println!("{mutation:?}: noticed in schedule {seed}: {what}");
        taken.push(format!("{mutation:?} {}", seed + 1));
    }
    figure(&format!(
        "ledger_broken_rules noticed after so many schedules: {}",
        taken.join(", ")
    ));
}
