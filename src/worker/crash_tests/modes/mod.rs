//! All modes with faults, from seeds: a loop of a drawn mode runs on a real journal until everything is quiet, against a
//! simulated environment that counts effects. [`invariants`] knows what must hold; [`injected_bugs`] lists broken rules, each of which must be
//! detected.
//!
//! `AGENTLOOP_MODE_SEED=n` replays one schedule and prints what happens; `AGENTLOOP_MODE_SCHEDULES=n` sets their number, and
//! `AGENTLOOP_MODE_FIRST=n` the first of them.

mod counts;
mod denials;
mod injected_bugs;
mod invariants;
mod loop_environment;
mod patches;
mod process;
mod provider;
#[path = "../../../../tests/it/support/random.rs"]
mod random;
mod schedule;
mod servers;
mod task_origins;

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;

use rusqlite::Connection;
use tempfile::TempDir;

use super::files::Files;
use super::history::History;
use crate::api::agent::AgentMode;
use crate::api::status::LoopOutcome;
use crate::engine::machine::LoopView;
use counts::SimulationCounts;
use injected_bugs::Broken;
use loop_environment::{LoopEnvironment, seconds};
use process::ProcessEnd;
use schedule::ScheduleSpec;

/// Schedules of one run, and the number within which each broken rule must be detected.
const SCHEDULES: u64 = 60;
const UNNOTICED: u64 = 300;
/// Lines of the trace that a failure prints.
const TRACE_LINES: usize = 40;
/// Processes of one schedule, after which it does not end.
const MAX_LIVES: usize = 300;

thread_local! {
    static TRACE: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn note(line: String) {
    TRACE.with_borrow_mut(|trace| trace.push(line));
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A line for the list of figures; past the test harness, which keeps what a test prints.
fn figure(text: &str) {
    let _ = writeln!(std::io::stderr(), "FIGURE {text}");
}

/// Runs one schedule until everything is quiet.
fn simulate(seed: u64, broken: Option<Broken>) -> SimulationCounts {
    TRACE.with_borrow_mut(Vec::clear);
    let mut environment = LoopEnvironment::new(seed, broken);
    let mut dir = Files::default().volume();
    note(format!("{:?}", environment.schedule));
    for _ in 0..MAX_LIVES {
        let end = process::live(&mut environment, dir.path(), &mut note);
        let view = match end {
            ProcessEnd::Killed(files) => {
                note("killed".into());
                dir = after_kill(&mut environment, &files);
                continue;
            }
            ProcessEnd::Failed => {
                note("the volume is full".into());
                let to = environment.now + seconds(environment.random.range(1, 120));
                environment.pass(to);
                continue;
            }
            ProcessEnd::Quiet(view) => {
                check(&environment, &dir, &view);
                return figures(&environment);
            }
            ProcessEnd::Stopped(view) => view,
        };
        note(format!("stopped: {:?}", view.outcome));
        environment.invariants.loop_ended(&view, &environment.schedule);
        environment.figures.goals += usize::from(view.goal.as_ref().is_some_and(|goal| goal.end.is_some()));
        environment.figures.stops += usize::from(view.outcome == Some(LoopOutcome::Cancelled));
        if view.outcome.is_some() && rests(&environment, view.outcome) {
            check(&environment, &dir, &view);
            return figures(&environment);
        }
        dir = next_pod(&mut environment, &dir, view.outcome);
    }
    panic!("the schedule never ends");
}

/// Whether a loop that has ended stays ended: everything works, and nothing waits that starts it again.
fn rests(environment: &LoopEnvironment, outcome: Option<LoopOutcome>) -> bool {
    let is_wanted = match outcome {
        Some(LoopOutcome::ScaledToZero) => environment.has_pending(),
        // What it was given waits for the user to start it again.
        Some(LoopOutcome::Cancelled) => true,
        _ => false,
    };
    environment.calm && !is_wanted && !environment.edited
}

fn figures(environment: &LoopEnvironment) -> SimulationCounts {
    SimulationCounts {
        tasks: environment.invariants.tasks(),
        denials: environment.invariants.denials.denials,
        denied_goals: environment.invariants.denials.ends,
        ..environment.figures
    }
}

/// A process was killed, sometimes with its gateway, its pod, its node or its volume.
fn after_kill(environment: &mut LoopEnvironment, files: &Files) -> TempDir {
    let away = match environment.random.index(10) {
        0 => environment.random.range(300, 20_000),
        _ => environment.random.range(0, 60),
    };
    let to = environment.now + seconds(away);
    environment.pass(to);
    if environment.random.percent(30) {
        environment.provider.lose_gateway();
    }
    if environment.is_broken(Broken::LosesCommit)
        && let Some(saved) = environment.saved.take()
    {
        return saved.files.volume();
    }
    if environment.random.percent(30) {
        if environment.knows_end {
            // The controller does not create another pod automatically.
            environment.start_again();
        }
        return another_pod(environment, files);
    }
    files.volume()
}

/// The pod has ended in order; if its loop has ended for good, something starts it again.
fn next_pod(environment: &mut LoopEnvironment, dir: &TempDir, outcome: Option<LoopOutcome>) -> TempDir {
    if outcome == Some(LoopOutcome::Cancelled) && !environment.knows_end {
        // It was lost with its last report, and the controller believes that the loop runs.
        note("the end was not reported".into());
        environment.figures.unknown_ends += 1;
        let to = environment.now + seconds(environment.random.range(1, 120));
        environment.pass(to);
        let files = Files::of(dir.path());
        return another_pod(environment, &files);
    }
    let has_ended = outcome.is_some();
    if has_ended {
        environment.start_again();
    }
    if has_ended && !environment.edited {
        let to = environment.now + seconds(environment.random.range(10, 4000));
        environment.pass(to);
    }
    // The controller lifts the suspension.
    environment.suspended = false;
    if has_ended && !environment.calm && environment.random.percent(50) {
        environment.edited = true;
    }
    let files = Files::of(dir.path());
    another_pod(environment, &files)
}

fn another_pod(environment: &mut LoopEnvironment, files: &Files) -> TempDir {
    environment.epoch += 1;
    environment.invariants.pod_replaced(&environment.schedule);
    if std::mem::take(&mut environment.edited) {
        let parts = |schedule: &ScheduleSpec| (schedule.criteria.clone(), schedule.artifacts.clone());
        let before = parts(&environment.schedule);
        environment.schedule.edit(&mut environment.random);
        let after = parts(&environment.schedule);
        if before != after {
            environment.invariants.criteria_edited();
        }
        note(format!("edited: {after:?}"));
    }
    if !environment.calm
        && environment.random.percent(10)
        && let Some(saved) = environment.saved.take()
    {
        note("the volume goes back".into());
        return environment.go_back(saved).volume();
    }
    if !environment.calm && environment.random.percent(4) {
        note("the volume is lost".into());
        return environment.lose_volume().volume();
    }
    files.volume()
}

/// What must hold at the end.
fn check(environment: &LoopEnvironment, dir: &TempDir, view: &LoopView) {
    let connection = Connection::open(dir.path().join("journal.sqlite")).expect("a journal");
    environment
        .invariants
        .finish(&connection, view, environment.figures.rollbacks == 0);
    if !environment.was_full {
        environment.invariants.compare_bills(&connection, &environment.provider);
        let _ = History::of(&connection);
    }
    if environment.figures.rollbacks == 0 {
        // The acknowledgement of one that ended the loop may be lost.
        let sensed = environment.invariants.sensed;
        assert!(
            environment.outbox.through <= sensed && sensed <= environment.outbox.count(),
            "each event took effect once"
        );
        if environment.schedule.mode == AgentMode::Task && environment.schedule.has_receiver {
            assert_eq!(
                environment.receiver.received.len(),
                environment.invariants.tasks(),
                "responses that were received"
            );
        }
    }
}

/// A failure with the end of its trace.
fn attempt(seed: u64, broken: Option<Broken>) -> Result<SimulationCounts, String> {
    let ran = std::panic::catch_unwind(|| simulate(seed, broken));
    ran.map_err(|panic| {
        let why = panic.downcast_ref::<String>().cloned();
        why.or_else(|| panic.downcast_ref::<&str>().map(|why| (*why).to_owned()))
            .unwrap_or_default()
    })
}

fn trace_end() -> String {
    TRACE.with_borrow(|trace| trace[trace.len().saturating_sub(TRACE_LINES)..].join("\n"))
}

fn digest() -> u64 {
    let mut hasher = DefaultHasher::new();
    TRACE.with_borrow(|trace| trace.hash(&mut hasher));
    hasher.finish()
}

#[test]
fn no_schedule_of_any_mode_loses_repeats_or_deadlocks() {
    if let Some(seed) = number("AGENTLOOP_MODE_SEED") {
        let ran = attempt(seed, None);
        TRACE.with_borrow(|trace| eprintln!("{}", trace.join("\n")));
        assert!(ran.is_ok(), "seed {seed}: {ran:?}");
        return;
    }
    let schedules = number("AGENTLOOP_MODE_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("AGENTLOOP_MODE_FIRST").unwrap_or(0);
    let mut sums = SimulationCounts::default();
    for seed in first..first + schedules {
        let ran = attempt(seed, None);
        let found = ran.unwrap_or_else(|why| panic!("AGENTLOOP_MODE_SEED={seed} replays it: {why}\n{}", trace_end()));
        sums.add(&found);
    }
    figure(&format!("mode_simulation {schedules} schedules: {sums:?}"));
}

#[test]
fn a_seed_always_yields_the_same_schedule() {
    for seed in 0..6 {
        let first = (attempt(seed, None).is_ok(), digest());
        assert_eq!(first, (attempt(seed, None).is_ok(), digest()), "seed {seed}");
    }
}

#[test]
fn every_broken_rule_is_noticed() {
    let mut taken = Vec::new();
    for broken in Broken::ALL {
        let first = broken.first_seed();
        let found = (first..first + UNNOTICED).find_map(|seed| Some((seed, attempt(seed, Some(broken)).err()?)));
        let (seed, why) = found.unwrap_or_else(|| panic!("{broken:?} is not noticed"));
        eprintln!(
            "{broken:?}: noticed in schedule {seed}: {}",
            why.lines().next().unwrap_or_default()
        );
        taken.push(format!("{broken:?} {}", seed + 1));
    }
    figure(&format!(
        "mode_broken_rules noticed after so many schedules: {}",
        taken.join(", ")
    ));
}
