//! A week with everything that a loop can meet, with a kill at each boundary of the journal in turn.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::json;

use super::script::{
    AnswerForm, Call, ExternalEvent, ExternalEventKind, FailedAttempt, Script, ScriptedOutcome, ScriptedToolCall, Turn,
};
use super::*;
use crate::api::failure::FailureKind;
use crate::api::status::{LoopOutcome, LoopState};
use crate::engine::notifications::NotificationPriority;

const HOUR: i64 = 3600;

fn want(tool: &'static str) -> ScriptedToolCall {
    ScriptedToolCall {
        tool,
        takes: 0,
        ends: ScriptedOutcome::Ok,
    }
}

fn ending(tool: &'static str, takes: i64, ends: ScriptedOutcome) -> ScriptedToolCall {
    ScriptedToolCall { tool, takes, ends }
}

fn call(wants: Vec<ScriptedToolCall>) -> Call {
    Call {
        wants,
        ..Call::default()
    }
}

fn turn(calls: Vec<Call>) -> Turn {
    Turn { calls }
}

fn sleep(hours: i64) -> Call {
    Call {
        sleep: Some(hours * HOUR),
        ..Call::default()
    }
}

fn failing(failures: Vec<FailedAttempt>) -> Call {
    Call {
        failures,
        ..Call::default()
    }
}

fn saying(says: AnswerForm, wants: Vec<ScriptedToolCall>) -> Call {
    Call { says, ..call(wants) }
}

/// All kinds of tools, outcomes and failures, and all ways to sleep and to pause.
#[expect(clippy::too_many_lines, reason = "one script, read from its beginning to its end")]
fn week() -> Script {
    let broken = || failing(vec![FailedAttempt::Fails(FailureKind::BadResponse)]);
    let slow = |wants| Call {
        takes: 3,
        ..call(wants)
    };
    let turns = vec![
        turn(vec![
            call(vec![want("files__read"); 5]),
            call(vec![want("files__write"), want("files__read"), want("mail__send")]),
            sleep(6),
        ]),
        turn(vec![
            slow(vec![ending("mail__send", 40, ScriptedOutcome::Ok), want("db__put")]),
            sleep(8),
        ]),
        turn(vec![
            failing(vec![FailedAttempt::Fails(FailureKind::Timeout)]),
            sleep(1),
        ]),
        turn(vec![
            Call {
                failures: vec![FailedAttempt::Fails(FailureKind::Unreachable)],
                ..slow(vec![want("db__put"), ending("job__start", 30, ScriptedOutcome::Ok)])
            },
            sleep(12),
        ]),
        turn(vec![Call {
            failures: vec![FailedAttempt::Refused(HOUR)],
            ..sleep(5)
        }]),
        // No turn yields a sleep: one is forced after four turns.
        turn(vec![call(vec![])]),
        turn(vec![call(vec![])]),
        turn(vec![call(vec![want("files__read")])]),
        turn(vec![call(vec![])]),
        turn(vec![
            call(vec![
                ending("mail__send", 600, ScriptedOutcome::Unknown),
                ending("files__write", 0, ScriptedOutcome::Error),
                ending("db__put", 0, ScriptedOutcome::NotRun),
                ending("job__start", 5, ScriptedOutcome::Unknown),
            ]),
            sleep(12),
        ]),
        // A turn that fails before an action, and one that fails after it.
        turn(vec![broken()]),
        turn(vec![call(vec![want("files__write")]), broken()]),
        turn(vec![call(vec![want("nothing")]), sleep(10)]),
        turn(vec![
            failing(vec![
                FailedAttempt::Waits(120),
                FailedAttempt::Fails(FailureKind::Timeout),
            ]),
            sleep(12),
        ]),
        turn(vec![call(vec![want("mail__send"); 5]), sleep(11)]),
        // Three consecutive failed turns: a cool-down, which the user ends.
        turn(vec![broken()]),
        turn(vec![broken()]),
        turn(vec![broken()]),
        turn(vec![sleep(12)]),
        turn(vec![call(vec![]), sleep(12)]),
        turn(vec![slow(vec![want("files__read")]), sleep(12)]),
        turn(vec![sleep(12)]),
        turn(vec![call(vec![want("mail__send"), want("files__read")]), sleep(12)]),
        turn(vec![sleep(12)]),
        turn(vec![sleep(12)]),
        turn(vec![Call { takes: 90, ..sleep(12) }]),
        turn(vec![sleep(12)]),
        turn(vec![sleep(12)]),
        turn(vec![sleep(12)]),
        turn(vec![sleep(12)]),
        // An outage of minutes, and a refused key in the middle of a turn.
        turn(vec![
            call(vec![want("files__read")]),
            Call {
                failures: vec![FailedAttempt::Fails(FailureKind::Unreachable); 8],
                ..sleep(12)
            },
        ]),
        turn(vec![
            call(vec![want("files__read")]),
            Call {
                failures: vec![FailedAttempt::Fails(FailureKind::AuthenticationFailed); 2],
                ..sleep(12)
            },
        ]),
        // An answer that was cut, and a turn that ends without text.
        turn(vec![
            saying(AnswerForm::Truncated, vec![want("files__read"), want("mail__send")]),
            saying(AnswerForm::Empty, vec![]),
        ]),
        turn(vec![sleep(12)]),
        // An empty answer is retried once, and then the turn fails.
        turn(vec![saying(AnswerForm::Empty, vec![])]),
        turn(vec![sleep(12)]),
        // Two consecutive refusals, the first after an action.
        turn(vec![
            call(vec![want("files__write")]),
            saying(AnswerForm::Refused, vec![want("mail__send")]),
        ]),
        turn(vec![saying(AnswerForm::Refused, vec![want("mail__send")])]),
        turn(vec![sleep(12)]),
    ];
    let happening = |turn, state, after, what| ExternalEvent {
        turn,
        state,
        after,
        what,
    };
    let happenings = vec![
        happening(3, LoopState::Sleeping, 1800, ExternalEventKind::Wake),
        happening(5, LoopState::Paused, 600, ExternalEventKind::TopUp),
        happening(10, LoopState::Sleeping, 600, ExternalEventKind::Outage),
        happening(10, LoopState::Sleeping, 900, ExternalEventKind::LinkBack),
        happening(13, LoopState::Sleeping, HOUR, ExternalEventKind::NewPod),
        happening(18, LoopState::Paused, 10, ExternalEventKind::Resume),
        happening(19, LoopState::Sleeping, 60, ExternalEventKind::Wake),
        // One that does not wake, one in a turn that fails, and one that wakes.
        happening(
            2,
            LoopState::Sleeping,
            30,
            ExternalEventKind::Notice(NotificationPriority::Normal),
        ),
        happening(
            2,
            LoopState::Sleeping,
            60,
            ExternalEventKind::Notice(NotificationPriority::Low),
        ),
        happening(
            10,
            LoopState::Sleeping,
            30,
            ExternalEventKind::Notice(NotificationPriority::Normal),
        ),
        happening(
            18,
            LoopState::Paused,
            5,
            ExternalEventKind::Notice(NotificationPriority::Low),
        ),
        happening(
            21,
            LoopState::Sleeping,
            60,
            ExternalEventKind::Notice(NotificationPriority::High),
        ),
    ];
    let mut settings = script::settings(&json!({
        "activeHours": {"timeZone": "Europe/Berlin", "start": "06:00", "end": "23:30"},
    }));
    settings.max_consecutive_errors = 3;
    settings.max_consecutive_turns = 4;
    settings.actions_per_minute = 3;
    settings.context_tokens = settings.max_output_tokens + 3_500;
    Script {
        settings,
        turns,
        heartbeat: Turn::default(),
        happenings,
        sensors: Vec::new(),
    }
}

/// Collects the fingerprint of the loop at the start of each turn.
#[derive(Default)]
pub(super) struct Fingerprints(BTreeSet<u64>);

impl LifeObserver for Fingerprints {
    fn lives(&mut self, _: KillPoint, _: &SimulatedEnvironment, _: &Path) -> bool {
        true
    }

    fn goes_on(&mut self, fingerprint: u64) -> bool {
        self.0.insert(fingerprint);
        true
    }
}

/// Observes a loop until its fingerprint equals one of the undisturbed run: from there on it can only do the same.
struct UntilKnownState<'a>(&'a BTreeSet<u64>);

impl LifeObserver for UntilKnownState<'_> {
    fn lives(&mut self, _: KillPoint, _: &SimulatedEnvironment, _: &Path) -> bool {
        true
    }

    fn goes_on(&mut self, fingerprint: u64) -> bool {
        !self.0.contains(&fingerprint)
    }
}

/// Starts another run at each point of this one, as if the worker had been killed there.
pub(super) struct BoundaryKiller<'a> {
    plain: &'a RunResult,
    looks: &'a BTreeSet<u64>,
    compare: fn(&RunResult, &RunResult, &[KillScope]),
    before: Files,
    boundaries: usize,
    killed: BTreeMap<&'static str, usize>,
}

/// Prints which kill caused a failure.
struct PrintOnPanic(&'static str, KillScope, Timestamp);

impl Drop for PrintOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("killed {} at {}: {:?}", self.0, self.2, self.1);
        }
    }
}

impl<'a> BoundaryKiller<'a> {
    pub(super) fn new(
        plain: &'a RunResult,
        looks: &'a Fingerprints,
        compare: fn(&RunResult, &RunResult, &[KillScope]),
    ) -> Self {
        Self {
            plain,
            looks: &looks.0,
            compare,
            before: Files::default(),
            boundaries: 0,
            killed: BTreeMap::new(),
        }
    }

    /// Number of boundaries with kills, and of kills by their extent.
    pub(super) fn count(&self) -> (usize, &BTreeMap<&'static str, usize>) {
        (self.boundaries, &self.killed)
    }

    fn kill(&mut self, when: &'static str, death: KillScope, environment: &SimulatedEnvironment, files: &Files) {
        let mut environment = environment.clone();
        let _told = PrintOnPanic(when, death, environment.now);
        die(death, &mut environment);
        let found = run(environment, files, &mut UntilKnownState(self.looks), &mut |_| {
            panic!("one kill")
        });
        (self.compare)(self.plain, &found, &[death]);
        *self.killed.entry(when).or_default() += 1;
    }

    /// Kills the worker alone, and every third time the gateway as well, which takes longer to converge with the plain
    /// run.
    fn kill_both_ways(&mut self, when: &'static str, environment: &SimulatedEnvironment, files: &Files) {
        self.kill(when, KillScope::Worker, environment, files);
        if self.killed[when] % 3 == 1 {
            self.kill(when, KillScope::Both, environment, files);
        }
    }
}

impl LifeObserver for BoundaryKiller<'_> {
    fn lives(&mut self, moment: KillPoint, environment: &SimulatedEnvironment, dir: &Path) -> bool {
        let files = Files::of(dir);
        match moment {
            KillPoint::Before => {
                self.kill_both_ways("before the transaction", environment, &files);
                self.before = files;
            }
            KillPoint::AfterEffects(0) if files != self.before => {
                let torn = self.before.torn(&files, [100, 70, 0, 30][self.boundaries % 4]);
                self.kill(
                    "in the middle of the transaction",
                    KillScope::Worker,
                    environment,
                    &torn,
                );
                self.kill_both_ways("after the transaction", environment, &files);
                if self.boundaries.is_multiple_of(4) {
                    self.kill(
                        "after the transaction, for 5 hours",
                        KillScope::Downtime(5 * HOUR),
                        environment,
                        &files,
                    );
                }
                self.boundaries += 1;
            }
            KillPoint::AfterEffects(0) => {}
            KillPoint::AfterEffects(_) => self.kill_both_ways("after some of the effects", environment, &files),
        }
        true
    }
}

#[test]
fn a_scripted_week_is_what_it_is_meant_to_be() {
    let plain = undisturbed(&week(), &mut NoKills);
    let view = plain.view.as_ref().expect("an end");
    assert_eq!(view.outcome, Some(LoopOutcome::Completed));
    let lasted = plain.now.duration_since(SimulatedEnvironment::new(week()).now);
    assert!(lasted >= SignedDuration::from_hours(24 * 7), "{lasted}");
    for kind in ["TurnFailed", "Compacted", "RequestHandled", "ToolDenied", "CallFailed"] {
        assert!(!lines(&plain, kind, None).is_empty(), "no {kind}");
    }
    assert_eq!(lines(&plain, "ToolOutcome", Some("Unknown")).len(), 2);
    assert_eq!(plain.shown.len(), 5, "{:?}", plain.shown);
    assert!(
        plain.shown.values().any(|turns| turns.len() > 1),
        "in a turn that failed, too"
    );
}

#[test]
fn a_worker_killed_at_any_boundary_of_its_journal_continues_as_if_nothing_had_happened() {
    let mut looks = Fingerprints::default();
    let plain = undisturbed(&week(), &mut looks);
    let mut killer = BoundaryKiller::new(&plain, &looks, compare);
    undisturbed(&week(), &mut killer);
    eprintln!("killed at {} boundaries: {:?}", killer.boundaries, killer.killed);
    assert!(
        killer.boundaries > 100 && killer.killed.len() == 5,
        "{:?}",
        killer.killed
    );
}
