//! Random scripts with kills at random points. Runs a quarter of `PROPTEST_CASES` cases.

use std::path::Path;

use proptest::prelude::*;

use super::script::{
    AnswerForm, Call, ExternalEvent, ExternalEventKind, FailedAttempt, Script, ScriptedOutcome, ScriptedToolCall,
    TOOLS, Turn,
};
use super::*;
use crate::api::failure::FailureKind;
use crate::api::status::LoopState;
use crate::engine::notifications::NotificationPriority;

/// A kill, after this many further inputs.
#[derive(Clone, Copy, Debug)]
struct Kill {
    inputs: usize,
    how: PlannedPoint,
    death: KillScope,
}

#[derive(Clone, Copy, Debug)]
enum PlannedPoint {
    Before,
    /// After this percentage of what the transaction writes.
    Torn(usize),
    /// After this many effects, if there are as many.
    AfterEffects(usize),
}

/// Kills as planned, and keeps the files.
struct RandomKiller {
    kills: std::vec::IntoIter<Kill>,
    next: Option<Kill>,
    /// The files before the input whose kill is planned.
    before: Option<Files>,
    left: Files,
    deaths: Vec<KillScope>,
}

impl RandomKiller {
    fn new(kills: Vec<Kill>) -> Self {
        let mut kills = kills.into_iter();
        Self {
            next: kills.next(),
            kills,
            before: None,
            left: Files::default(),
            deaths: Vec::new(),
        }
    }

    fn dies(&mut self, left: Files) -> bool {
        self.left = left;
        self.before = None;
        self.deaths.extend(self.next.map(|kill| kill.death));
        self.next = self.kills.next();
        false
    }
}

impl LifeObserver for RandomKiller {
    fn lives(&mut self, moment: KillPoint, _: &SimulatedEnvironment, dir: &Path) -> bool {
        let Some(kill) = &mut self.next else {
            return true;
        };
        if moment == KillPoint::Before {
            if kill.inputs > 0 {
                kill.inputs -= 1;
                return true;
            }
            self.before = Some(Files::of(dir));
            return !matches!(kill.how, PlannedPoint::Before) || self.dies(Files::of(dir));
        }
        let Some(before) = &self.before else {
            return true;
        };
        match (kill.how, moment) {
            (PlannedPoint::Torn(percent), KillPoint::AfterEffects(0)) => {
                let torn = before.torn(&Files::of(dir), percent);
                self.dies(torn)
            }
            (PlannedPoint::AfterEffects(wanted), KillPoint::AfterEffects(done)) if wanted == done => {
                self.dies(Files::of(dir))
            }
            _ => true,
        }
    }
}

fn calls() -> impl Strategy<Value = Call> {
    let failure = prop_oneof![
        Just(FailedAttempt::Fails(FailureKind::Timeout)),
        Just(FailedAttempt::Fails(FailureKind::BadResponse)),
        Just(FailedAttempt::Fails(FailureKind::AuthenticationFailed)),
        Just(FailedAttempt::Fails(FailureKind::Unreachable)),
        Just(FailedAttempt::Waits(60)),
        Just(FailedAttempt::Refused(600)),
    ];
    let ends = prop_oneof![
        4 => Just(ScriptedOutcome::Ok),
        1 => Just(ScriptedOutcome::Error),
        1 => Just(ScriptedOutcome::NotRun),
        1 => Just(ScriptedOutcome::Unknown),
    ];
    let want = (prop::sample::select(TOOLS.to_vec()), 0..3_i64, ends);
    let want = want.prop_map(|(tool, takes, ends)| ScriptedToolCall { tool, takes, ends });
    (
        prop_oneof![
            9 => prop::collection::vec(failure, 0..2),
            1 => Just(vec![FailedAttempt::Fails(FailureKind::Unreachable); 7]),
        ],
        0..3_i64,
        prop::collection::vec(want, 0..4),
        prop::option::weighted(0.3, prop::sample::select(vec![0, 30, 90, 7200])),
        prop_oneof![6 => Just(AnswerForm::Complete), 1 => Just(AnswerForm::Truncated), 1 => Just(AnswerForm::Refused), 1 => Just(AnswerForm::Empty)],
    )
        .prop_map(|(failures, takes, wants, sleep, says)| Call {
            failures,
            takes,
            // A kill may cause an unknown outcome; a sleep requested in the same answer would then wait.
            sleep: sleep.filter(|_| wants.is_empty()),
            wants,
            says,
        })
}

fn happenings() -> impl Strategy<Value = ExternalEvent> {
    let what = prop_oneof![
        Just(ExternalEventKind::Wake),
        Just(ExternalEventKind::NewPod),
        Just(ExternalEventKind::TopUp),
        Just(ExternalEventKind::Notice(NotificationPriority::Normal)),
        Just(ExternalEventKind::Notice(NotificationPriority::High))
    ];
    (1..6_i64, what).prop_map(|(turn, what)| ExternalEvent {
        turn,
        state: LoopState::Sleeping,
        after: 45,
        what,
    })
}

fn scripts() -> impl Strategy<Value = Script> {
    let turn = prop::collection::vec(calls(), 1..3).prop_map(|calls| Turn { calls });
    (
        prop::collection::vec(turn, 1..6),
        prop::collection::vec(happenings(), 0..2),
    )
        .prop_map(|(turns, happenings)| Script {
            sensors: Vec::new(),
            settings: script::settings(&serde_json::json!({})),
            turns,
            heartbeat: Turn::default(),
            happenings,
        })
}

fn kills() -> impl Strategy<Value = Vec<Kill>> {
    let how = prop_oneof![
        Just(PlannedPoint::Before),
        (0..=100_usize).prop_map(PlannedPoint::Torn),
        (0..3_usize).prop_map(PlannedPoint::AfterEffects),
    ];
    let kill = (0..25_usize, how).prop_map(|(inputs, how)| Kill {
        inputs,
        how,
        death: KillScope::Worker,
    });
    let both = (0..25_usize, 0..3_usize).prop_map(|(inputs, done)| Kill {
        inputs,
        how: PlannedPoint::AfterEffects(done),
        death: KillScope::Both,
    });
    (prop::collection::vec(kill, 1..5), prop::collection::vec(both, 0..2)).prop_map(|(mut kills, both)| {
        kills.extend(both);
        kills
    })
}

proptest! {
    // A case has several lives, each on a journal of its own.
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 4))]

    #[test]
    fn any_script_continues_over_any_kills_as_if_nothing_had_happened(script in scripts(), kills in kills()) {
        let plain = undisturbed(&script, &mut NoKills);
        let killer = std::cell::RefCell::new(RandomKiller::new(kills));
        let mut watcher = Shared(&killer);
        let found = run(SimulatedEnvironment::new(script), &Files::default(), &mut watcher, &mut |environment| {
            let killer = killer.borrow();
            if let Some(death) = killer.deaths.last() {
                die(*death, environment);
            }
            killer.left.clone()
        });
        let deaths = killer.borrow().deaths.clone();
        compare(&plain, &found, &deaths);
    }
}

/// The watcher, shared so that the test can inspect it.
struct Shared<'a>(&'a std::cell::RefCell<RandomKiller>);

impl LifeObserver for Shared<'_> {
    fn lives(&mut self, moment: KillPoint, environment: &SimulatedEnvironment, dir: &Path) -> bool {
        self.0.borrow_mut().lives(moment, environment, dir)
    }
}
