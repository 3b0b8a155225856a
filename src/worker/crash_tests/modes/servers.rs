//! Tool servers and the person who answers gates. Counts the effects of each run, and asserts that no rule of its tool is
//! broken.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::random::Random;
use super::schedule::{ASKS, GATED, IDEMPOTENT, LIST, RETRIES, SHELL};
use crate::api::status::GateKind;
use crate::engine::machine::LoopView;
use crate::engine::tool::{ToolOutcome, ToolRun};
use crate::engine::{EngineGateAnswer, OpenGate};
use crate::toolbox_protocol::file_report::{FileFinding, FileReport};

/// Maximum number of times that a run under policy Retry is sent.
const MAX_TRIES: usize = 3;

/// How a person answers gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Person {
    /// Approves all of them, soon.
    Helpful,
    /// Approves most of them.
    Kind,
    /// Denies most calls, and about half of the requests to continue a loop.
    Strict,
}

/// When a run arrives.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunContext {
    pub(super) now: Timestamp,
    /// Everything works.
    pub(super) calm: bool,
    /// Processes so far.
    pub(super) lives: usize,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Servers {
    /// Runs by their keys, over all histories of the volume.
    keys: BTreeMap<String, ToolRun>,
    /// Runs that may have had an effect, by id, with their number. Goes back with the volume.
    pub(super) effects: BTreeMap<String, usize>,
    /// The answers to gates, and when they were given: they stay on the object.
    answers: BTreeMap<String, (Timestamp, EngineGateAnswer)>,
    /// Gates that were opened, by id, with the hash of what was shown.
    shown: BTreeMap<String, String>,
}

impl Servers {
    /// A run arrives. How long it takes, and how it ends.
    pub(super) fn run(&mut self, run: &ToolRun, moment: RunContext, random: &mut Random) -> (i64, ToolOutcome) {
        let RunContext { now, calm, lives } = moment;
        let first = self
            .keys
            .entry(run.idempotency_key.clone())
            .or_insert_with(|| run.clone());
        let same = |run: &ToolRun| (run.id, run.name.clone(), run.arguments.clone());
        assert_eq!(same(first), same(run), "one key, one run");
        let takes = if !calm && random.percent(10) {
            random.range(30, 590)
        } else {
            random.range(0, 5)
        };
        let draw = if calm { 0 } else { random.index(12) };
        if draw == 9 {
            let message = "the server is down".to_owned();
            return (takes, ToolOutcome::Unavailable { message });
        }
        let id = run.id.to_string();
        let approved = self.approvals(&id, now);
        let times = self.effects.entry(id).or_default();
        *times += 1;
        let max = match &*run.name {
            "files__read" | IDEMPOTENT | SHELL | LIST => usize::MAX,
            // A restart sends what was under way again.
            RETRIES => MAX_TRIES + lives,
            ASKS => 1 + approved,
            name if GATED.contains(&name) => approved,
            _ => 1,
        };
        assert!(
            *times <= max,
            "{} of {} ran {times} times; allowed: {max}",
            run.id,
            run.name
        );
        if run.name == SHELL {
            let good = calm || random.percent(65);
            let text = if good { "exit code 0\nfine" } else { "exit code 1\nno" };
            return (takes, ToolOutcome::Done { text: text.into() });
        }
        if run.name == LIST {
            let text = found(run, calm, random);
            return (takes, ToolOutcome::Done { text });
        }
        let outcome = match draw {
            10 => ToolOutcome::Failed { text: "no".into() },
            11 => ToolOutcome::Unknown { message: "cut".into() },
            _ => ToolOutcome::Done {
                text: format!("{} of {}, {times}", run.id, run.name),
            },
        };
        (takes, outcome)
    }

    /// A person sees the open gates, and will answer most of them.
    pub(super) fn see(&mut self, view: &LoopView, person: Person, now: Timestamp, random: &mut Random) {
        let calm = person == Person::Helpful;
        for open in &view.gates {
            let id = &open.gate.id;
            let shown = self.shown.entry(id.clone()).or_insert_with(|| open.arguments.clone());
            assert_eq!(*shown, open.arguments, "a gate shows one call");
            let is_answered = self
                .answers
                .get(id)
                .is_some_and(|(_, given)| given.arguments == open.arguments);
            if is_answered || (!calm && self.answers.contains_key(id)) {
                continue;
            }
            let draw = if calm { 0 } else { random.index(10) };
            if draw == 9 {
                continue;
            }
            let at = now + SignedDuration::from_secs(if calm { 1 } else { random.range(0, 500) });
            let approved = match (person, open.gate.kind) {
                (Person::Strict, GateKind::ToolCallNeedsApproval) => draw > 7,
                (Person::Strict, GateKind::Escalated) => draw % 2 == 0,
                (Person::Helpful | Person::Kind | Person::Strict, _) => draw != 7,
            };
            let answer = EngineGateAnswer {
                gate: id.clone(),
                arguments: if draw == 8 {
                    "another".into()
                } else {
                    open.arguments.clone()
                },
                approved,
                by: approved.then(|| "ann".into()),
            };
            self.answers.insert(id.clone(), (at, answer));
        }
    }

    /// When the next answer is given of which the worker does not know.
    pub(super) fn next_answer(&self, known: &[EngineGateAnswer]) -> Option<Timestamp> {
        let open = self.answers.values().filter(|(_, answer)| !known.contains(answer));
        open.map(|(at, _)| *at).min()
    }

    /// An answer that was given and of which the worker does not know.
    pub(super) fn answer(&self, known: &[EngineGateAnswer], now: Timestamp) -> Option<EngineGateAnswer> {
        let mut given = self.answers.values().filter(|(at, _)| *at <= now);
        let found = given.find(|(_, answer)| !known.contains(answer))?;
        Some(found.1.clone())
    }

    /// How often a run was approved.
    fn approvals(&self, run: &str, now: Timestamp) -> usize {
        let of_run = |gate: &str| gate.split('-').nth(1) == Some(run);
        let given = self.answers.iter().filter(|(gate, (at, _))| *at <= now && of_run(gate));
        given
            .filter(|(gate, (_, answer))| answer.approved && self.shown.get(*gate) == Some(&answer.arguments))
            .count()
    }

    /// The volume is restored to an earlier state, which does not contain what was done since.
    pub(super) fn go_back(&mut self, effects: BTreeMap<String, usize>) {
        self.effects = effects;
    }
}

/// Which of the files exist. In bad times the result may be no report.
fn found(run: &ToolRun, calm: bool, random: &mut Random) -> String {
    if !calm && random.percent(5) {
        return "a/\nb.txt 2".to_owned();
    }
    let files = run.arguments["files"].as_array().map_or(0, Vec::len);
    let mut finding = || match if calm { 0 } else { random.index(10) } {
        7 => FileFinding::Absent,
        8 => FileFinding::Bytes(0),
        9 => FileFinding::NotRegular,
        _ => FileFinding::Bytes(1),
    };
    FileReport((0..files).map(|_| finding()).collect()).line()
}

/// A forged approval of the gate.
pub(super) fn forged(open: &OpenGate) -> EngineGateAnswer {
    EngineGateAnswer {
        gate: open.gate.id.clone(),
        arguments: open.arguments.clone(),
        approved: true,
        by: None,
    }
}
