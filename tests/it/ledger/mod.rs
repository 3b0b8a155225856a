//! The proof of the budget's protocol: [`world`] simulates it from seeds, with everything that can go wrong; [`judge`]
//! knows what really happened; [`mutation`] lists broken rules, each of which must be noticed.
//!
//! `AGENTLOOP_SIM_SEED=n` replays one schedule and says what happens; `AGENTLOOP_SIM_SCHEDULES=n` sets their number.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod afterwards;
mod gateway;
mod judge;
mod leader;
mod mutation;
mod random;
mod world;

use std::io::Write;

use mutation::Mutation;

const SCHEDULES: u64 = 20_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A line for the list of figures; past the test harness, which keeps what a test prints.
fn figure(text: &str) {
    let _ = writeln!(std::io::stderr(), "FIGURE {text}");
}

#[test]
fn no_schedule_overspends_leaks_or_stands_still() {
    if let Some(seed) = number("AGENTLOOP_SIM_SEED") {
        let outcome = world::run(seed, Mutation::None, true);
        assert!(outcome.is_ok(), "seed {seed}: {}", outcome.unwrap_err());
        return;
    }
    let schedules = number("AGENTLOOP_SIM_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("AGENTLOOP_SIM_FIRST").unwrap_or(0);
    let (mut steps, mut calls, mut over, mut worst, mut sum) = (0, 0, 0_u64, 0.0_f64, 0.0);
    for seed in first..first + schedules {
        let outcome = match std::panic::catch_unwind(|| world::run(seed, Mutation::None, false)) {
            Ok(outcome) => outcome,
            Err(_) => Err("panicked".into()),
        };
        match outcome {
            Ok(outcome) => {
                steps += outcome.steps;
                calls += outcome.calls;
                over += u64::from(outcome.afterwards > 0.0);
                worst = worst.max(outcome.afterwards);
                sum += outcome.afterwards;
            }
            Err(what) => panic!("AGENTLOOP_SIM_SEED={seed}: {what}"),
        }
    }
    figure(&format!(
        "ledger_simulation {schedules} schedules, {steps} steps, {calls} calls, 0 windows overspent, 0 calls paid twice, 0 leaks"
    ));
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let mean = sum / schedules as f64;
    figure(&format!(
        "ledger_accounting_after_the_fact on the same schedules: {over} of {schedules} overspent, by {worst:.0} % at most and {mean:.1} % on average"
    ));
}

#[test]
fn every_broken_rule_is_noticed() {
    std::panic::set_hook(Box::new(|_| {}));
    for mutation in Mutation::ALL {
        let mut found = Vec::new();
        for seed in 0..number("AGENTLOOP_SIM_SCHEDULES").unwrap_or(2000) {
            let outcome = std::panic::catch_unwind(|| world::run(seed, mutation, false));
            if let Ok(Err(what)) = outcome {
                if found.is_empty() {
                    println!("{mutation:?} {seed} {what}");
                }
                found.push(what[0..8].to_owned());
            } else if outcome.is_err() {
                found.push("PANIC".into());
            }
        }
        found.sort();
        let n = found.len();
        let mut u = found.clone();
        u.dedup();
        println!(
            "{mutation:?} {n} {:?}",
            u.iter()
                .map(|x| (x.clone(), found.iter().filter(|y| *y == x).count()))
                .collect::<Vec<_>>()
        );
    }
}

#[test]
#[ignore = "for development: every failing seed, by kind"]
fn triage() {
    std::panic::set_hook(Box::new(|_| {}));
    let schedules = number("AGENTLOOP_SIM_SCHEDULES").unwrap_or(2000);
    let (mut st, mut ca, mut af) = (0, 0, 0.0);
    let mut kinds: std::collections::BTreeMap<String, (usize, u64, String)> = Default::default();
    for seed in 0..schedules {
        let outcome = match std::panic::catch_unwind(|| world::run(seed, Mutation::None, false)) {
            Ok(outcome) => outcome,
            Err(what) => Err(format!("panicked {:?}", what.downcast_ref::<String>())),
        };
        if let Ok(o) = &outcome {
            st += o.steps;
            ca += o.calls;
            af += o.afterwards;
        }
        if let Err(what) = outcome {
            let kind: String = what.chars().filter(|c| !c.is_ascii_digit()).take(40).collect();
            let entry = kinds.entry(kind).or_insert((0, seed, what));
            entry.0 += 1;
        }
    }
    println!("{schedules} times, {st} steps {ca} calls {}", af / schedules as f64);
    for (_, (count, seed, what)) in kinds {
        println!("{count} times, seed {seed}: {what}");
    }
}
