//! All modes with faults, from seeds: a loop of a drawn mode runs on a real journal until everything is quiet, against a
//! simulated world that counts effects. [`referee`] knows what must hold; [`broken`] lists broken rules, each of which must be
//! noticed.
//!
//! `AGENTLOOP_MODE_SEED=n` replays one schedule and says what happens; `AGENTLOOP_MODE_SCHEDULES=n` sets their number, and
//! `AGENTLOOP_MODE_FIRST=n` the first of them.

mod broken;
mod outside;
mod patches;
mod process;
mod provider;
#[path = "../../../../tests/it/support/random.rs"]
mod random;
mod referee;
mod servers;
mod story;

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
use broken::Broken;
use outside::{Figures, World, seconds};
use process::End;

/// Schedules of one run, and the most that a broken rule may stay unnoticed.
const SCHEDULES: u64 = 60;
const UNNOTICED: u64 = 300;
/// Lines of the trace that a failure prints.
const TOLD: usize = 40;
/// Processes of one schedule, after which it does not end.
const MOST_LIVES: usize = 300;

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
fn simulate(seed: u64, broken: Option<Broken>) -> Figures {
    TRACE.with_borrow_mut(Vec::clear);
    let mut world = World::new(seed, broken);
    let mut dir = Files::default().volume();
    note(format!("{:?}", world.story));
    for _ in 0..MOST_LIVES {
        let end = process::live(&mut world, dir.path(), &mut note);
        let view = match end {
            End::Killed(files) => {
                note("killed".into());
                dir = after_kill(&mut world, &files);
                continue;
            }
            End::Failed => {
                note("the volume is full".into());
                let to = world.now + seconds(world.random.range(1, 120));
                world.pass(to);
                continue;
            }
            End::Quiet(view) => {
                check(&world, &dir, &view);
                return figures(&world);
            }
            End::Stopped(view) => view,
        };
        note(format!("stopped: {:?}", view.outcome));
        world.referee.loop_ended(&view, &world.story);
        world.figures.goals += usize::from(view.goal.as_ref().is_some_and(|goal| goal.end.is_some()));
        world.figures.stops += usize::from(view.outcome == Some(LoopOutcome::Cancelled));
        if view.outcome.is_some() && rests(&world, view.outcome) {
            check(&world, &dir, &view);
            return figures(&world);
        }
        dir = next_pod(&mut world, &dir, view.outcome);
    }
    panic!("the schedule never ends");
}

/// Whether a loop that has ended stays ended: everything works, and nothing waits that starts it again.
fn rests(world: &World, outcome: Option<LoopOutcome>) -> bool {
    let is_wanted = match outcome {
        Some(LoopOutcome::ScaledToZero) => world.has_pending(),
        // What it was given waits for the user to start it again.
        Some(LoopOutcome::Cancelled) => true,
        _ => false,
    };
    world.calm && !is_wanted && !world.edited
}

fn figures(world: &World) -> Figures {
    Figures {
        tasks: world.referee.tasks(),
        ..world.figures
    }
}

/// A process was killed, sometimes with its gateway, its pod, its node or its volume.
fn after_kill(world: &mut World, files: &Files) -> TempDir {
    let away = match world.random.index(10) {
        0 => world.random.range(300, 20_000),
        _ => world.random.range(0, 60),
    };
    let to = world.now + seconds(away);
    world.pass(to);
    if world.random.percent(30) {
        world.provider.lose_gateway();
    }
    if world.is_broken(Broken::LosesCommit)
        && let Some(saved) = world.saved.take()
    {
        return saved.files.volume();
    }
    if world.random.percent(30) {
        if world.knows_end {
            // The controller makes no other pod by itself.
            world.start_again();
        }
        return another_pod(world, files);
    }
    files.volume()
}

/// The pod has ended in order; if its loop has ended for good, something starts it again.
fn next_pod(world: &mut World, dir: &TempDir, outcome: Option<LoopOutcome>) -> TempDir {
    if outcome == Some(LoopOutcome::Cancelled) && !world.knows_end {
        // It was lost with its last report, and the controller believes that the loop runs.
        note("nobody knows of the end".into());
        world.figures.unknown_ends += 1;
        let to = world.now + seconds(world.random.range(1, 120));
        world.pass(to);
        let files = Files::of(dir.path());
        return another_pod(world, &files);
    }
    let has_ended = outcome.is_some();
    if has_ended {
        world.start_again();
    }
    if has_ended && !world.edited {
        let to = world.now + seconds(world.random.range(10, 4000));
        world.pass(to);
    }
    // The controller lifts the suspension.
    world.suspended = false;
    if has_ended && !world.calm && world.random.percent(50) {
        world.edited = true;
    }
    let files = Files::of(dir.path());
    another_pod(world, &files)
}

fn another_pod(world: &mut World, files: &Files) -> TempDir {
    world.epoch += 1;
    if std::mem::take(&mut world.edited) {
        let before = world.story.criteria.clone();
        world.story.edit(&mut world.random);
        if before != world.story.criteria {
            world.referee.criteria_edited();
        }
        note(format!("edited: {:?}", world.story.criteria));
    }
    if !world.calm
        && world.random.percent(10)
        && let Some(saved) = world.saved.take()
    {
        note("the volume goes back".into());
        return world.go_back(saved).volume();
    }
    if !world.calm && world.random.percent(4) {
        note("the volume is lost".into());
        return world.lose_volume().volume();
    }
    files.volume()
}

/// What must hold at the end.
fn check(world: &World, dir: &TempDir, view: &LoopView) {
    let connection = Connection::open(dir.path().join("journal.sqlite")).expect("a journal");
    world.referee.finish(&connection, view, world.figures.rollbacks == 0);
    if !world.was_full {
        world.referee.compare_bills(&connection, &world.provider);
        let _ = History::of(&connection);
    }
    if world.figures.rollbacks == 0 {
        // The acknowledgement of one that ended the loop may be lost.
        let sensed = world.referee.sensed;
        assert!(
            world.outbox.through <= sensed && sensed <= world.outbox.count(),
            "each event took effect once"
        );
        if world.story.mode == AgentMode::Task && world.story.has_receiver {
            assert_eq!(
                world.receiver.received.len(),
                world.referee.tasks(),
                "responses that were received"
            );
        }
    }
}

/// A failure with the end of its trace.
fn attempt(seed: u64, broken: Option<Broken>) -> Result<Figures, String> {
    let ran = std::panic::catch_unwind(|| simulate(seed, broken));
    ran.map_err(|panic| {
        let why = panic.downcast_ref::<String>().cloned();
        why.or_else(|| panic.downcast_ref::<&str>().map(|why| (*why).to_owned()))
            .unwrap_or_default()
    })
}

fn told() -> String {
    TRACE.with_borrow(|trace| trace[trace.len().saturating_sub(TOLD)..].join("\n"))
}

fn digest() -> u64 {
    let mut hasher = DefaultHasher::new();
    TRACE.with_borrow(|trace| trace.hash(&mut hasher));
    hasher.finish()
}

#[test]
fn no_schedule_of_any_mode_loses_repeats_or_stands_still() {
    if let Some(seed) = number("AGENTLOOP_MODE_SEED") {
        let ran = attempt(seed, None);
        TRACE.with_borrow(|trace| eprintln!("{}", trace.join("\n")));
        assert!(ran.is_ok(), "seed {seed}: {ran:?}");
        return;
    }
    let schedules = number("AGENTLOOP_MODE_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("AGENTLOOP_MODE_FIRST").unwrap_or(0);
    let mut sums = Figures::default();
    for seed in first..first + schedules {
        let ran = attempt(seed, None);
        let found = ran.unwrap_or_else(|why| panic!("AGENTLOOP_MODE_SEED={seed} replays it: {why}\n{}", told()));
        sums.add(&found);
    }
    figure(&format!("mode_simulation {schedules} schedules: {sums:?}"));
}

#[test]
fn a_seed_always_gives_the_same_schedule() {
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
