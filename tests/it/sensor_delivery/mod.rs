//! The proof that an event of a Sensor takes effect once: a simulation from seeds, with the real rules, outbox, receivers and
//! engine, over a network that loses, duplicates and reorders, while sensor pod, leader, workers and gateways are killed and frozen.
//!
//! `AGENTLOOP_SIM_SEED=n` replays one schedule; `AGENTLOOP_SENSOR_SCHEDULES=n` sets their number. It is much smaller than that
//! of the ledger's simulation, because the files are real.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::wildcard_enum_match_arm
)]

mod receiver;
mod simulation;

use simulation::SensorSimulation;

/// Schedules of one run.
const SCHEDULES: u64 = 150;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn no_schedule_loses_doubles_or_reorders_an_event_or_pays_twice_for_its_score() {
    if let Some(seed) = number("AGENTLOOP_SIM_SEED") {
        SensorSimulation::new(seed).run();
        return;
    }
    let schedules = number("AGENTLOOP_SENSOR_SCHEDULES").unwrap_or(SCHEDULES).max(1);
    let first = number("AGENTLOOP_SIM_FIRST").unwrap_or(0);
    let mut sums = [0; 4];
    for seed in first..first + schedules {
        let found = std::panic::catch_unwind(|| SensorSimulation::new(seed).run());
        let found = found.unwrap_or_else(|_| panic!("AGENTLOOP_SIM_SEED={seed} replays it"));
        for (sum, found) in sums.iter_mut().zip(found) {
            *sum += found;
        }
    }
    let [events, effects, scores, kills] = sums;
    println!("{schedules} schedules: {events} events, {effects} effects, {scores} scores, {kills} kills");
    assert!(effects > events && scores > 0 && kills > 0);
}
