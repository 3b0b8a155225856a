//! What must hold, whatever fails: follows the loop by what it commits, and by what the environment knows.
//!
//! Restored with the volume. Asserts at each step, after each restart and at the end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rusqlite::Connection;
use serde_json::Value;

use super::denials::DenialWatch;
use super::provider::Provider;
use super::schedule::{Criterion, LIST, SHELL, ScheduleSpec};
use super::task_origins::origin_of;
use crate::api::agent::AgentMode;
use crate::api::goal::GoalEnd;
use crate::api::status::LoopOutcome;
use crate::engine::machine::{EngineSnapshot, LoopView};
use crate::engine::message::ModelAnswer;
use crate::engine::tasks::{TaskOffer, TaskOrigin, TaskResponse};
use crate::engine::tool::{ToolOutcome, ToolRun, ToolRunId};
use crate::engine::{CallId, CallPurpose, RecordKind};
use crate::toolbox_protocol::file_report::{FileFinding, FileReport};
use crate::worker::journal::JournalLine;

/// What reached the loop from outside, as far as a check of criteria is concerned.
#[derive(Clone, Debug)]
pub(super) enum CheckInput {
    Nothing,
    Answer(CallId, CallPurpose, Box<ModelAnswer>, Option<Criterion>),
    Ran(Box<ToolRun>, ToolOutcome),
}

/// The check of the criteria after one step.
#[derive(Clone, Debug, Default, PartialEq)]
struct CriteriaCheck {
    met: BTreeSet<Criterion>,
    result: String,
}

#[derive(Clone, Debug, Default)]
pub(super) struct InvariantChecker {
    /// Tasks that may be accepted, by id, with the word in their answer.
    asked: BTreeMap<String, String>,
    /// Tasks that the loop has promised to answer: a receipt or an acknowledgement says so.
    promised: BTreeSet<String>,
    accepted: BTreeSet<String>,
    /// In the order of their arrival.
    waiting: VecDeque<String>,
    /// Origins of tasks that were begun, the one that waits longest since then first.
    served: Vec<TaskOrigin>,
    current: Option<String>,
    /// Tasks that have ended, in order.
    ended: Vec<String>,
    /// Events of Sensors that took effect.
    pub(super) sensed: i64,
    intents: BTreeSet<String>,
    /// Runs with their outcomes.
    outcomes: BTreeMap<String, Vec<String>>,
    started: BTreeSet<String>,
    pub(super) answered: BTreeSet<String>,
    /// Calls of `memory` in answers, by run.
    operations: BTreeMap<String, Value>,
    /// The notes, by title.
    notes: BTreeMap<String, String>,
    check: CriteriaCheck,
    /// That of the turn before.
    before: CriteriaCheck,
    /// Outcomes of the loop, one for each time that it ended.
    pub(super) outcomes_of_loop: Vec<LoopOutcome>,
    last_line: i64,
    turn: i64,
    pub(super) denials: DenialWatch,
}

impl InvariantChecker {
    /// A task that may be accepted from now on.
    pub(super) fn ask(&mut self, id: &str, word: &str) {
        self.asked.insert(id.into(), word.into());
    }

    /// The volume was restored to an earlier state, and requests that were sent meanwhile remain.
    pub(super) fn still_asked(&mut self, later: Self) {
        self.asked.extend(later.asked);
    }

    pub(super) fn promise(&mut self, id: &str) {
        self.promised.insert(id.into());
    }

    pub(super) fn has_ended(&self, id: &str) -> Option<usize> {
        self.ended.iter().position(|ended| ended == id)
    }

    pub(super) fn current(&self) -> Option<String> {
        self.current.clone()
    }

    pub(super) fn tasks(&self) -> usize {
        self.ended.len()
    }

    /// Whether a task waits or is under way.
    pub(super) fn is_busy(&self) -> bool {
        self.current.is_some() || !self.waiting.is_empty()
    }

    /// Another process begins with this state.
    pub(super) fn restored(&self, snapshot: Option<&EngineSnapshot>, tasks: &[TaskOffer]) {
        let waiting: Vec<&str> = tasks.iter().map(|task| &*task.id).collect();
        assert_eq!(
            waiting,
            Vec::from(self.waiting.clone()),
            "the tasks that wait after a restart"
        );
        self.compare_notes(&serde_json::to_value(snapshot).expect("a snapshot"));
    }

    fn compare_notes(&self, snapshot: &Value) {
        let kept = snapshot["memory"].as_object().cloned().unwrap_or_default();
        let text = |note: &Value| note["text"].as_str().unwrap_or_default().to_owned();
        let kept: BTreeMap<String, String> = kept.iter().map(|(title, note)| (title.clone(), text(note))).collect();
        assert_eq!(kept, self.notes, "the notes are the sequence of what was acknowledged");
    }

    /// The criteria were edited: what was met before says nothing about them.
    pub(super) fn criteria_edited(&mut self) {
        self.check.met.clear();
    }

    /// The workspace was lost with the pod: what was met in a check that is not over says nothing about the next one.
    pub(super) fn pod_replaced(&mut self, schedule: &ScheduleSpec) {
        if self.missing(schedule).is_some() {
            self.check.met.clear();
        }
    }

    /// A step is on disk.
    pub(super) fn committed(&mut self, heard: &CheckInput, lines: &[JournalLine]) {
        if let CheckInput::Answer(call, _, answer, _) = heard {
            self.note_operations(*call, answer);
        }
        // What was received ends the check before a new turn begins.
        self.hear(heard);
        for line in lines {
            assert_eq!(line.seq, self.last_line + 1, "each line is reported once");
            self.last_line = line.seq;
            self.read(line);
        }
        if let CheckInput::Answer(call, ..) = heard {
            let is_answered = self.answered.contains(&call.to_string());
            assert!(
                is_answered || lines.is_empty(),
                "{call} was answered, and no line says so"
            );
        }
    }

    fn note_operations(&mut self, call: CallId, answer: &ModelAnswer) {
        for (index, wanted) in (1..).zip(&answer.tool_calls) {
            if wanted.name == "memory" {
                let run = ToolRunId {
                    member: call.member,
                    turn: call.turn,
                    call: call.call,
                    index,
                };
                let arguments = serde_json::from_str(&wanted.arguments).unwrap_or_default();
                self.operations.insert(run.to_string(), arguments);
            }
        }
    }

    fn hear(&mut self, heard: &CheckInput) {
        let (criterion, is_met) = match heard {
            CheckInput::Answer(_, CallPurpose::Judge, answer, Some(criterion)) => {
                let text = answer.text.as_deref().unwrap_or_default();
                (*criterion, text.contains("true"))
            }
            CheckInput::Answer(_, _, answer, _) => {
                for call in answer.tool_calls.iter().filter(|call| call.name == "finish") {
                    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
                    arguments["result"]
                        .as_str()
                        .unwrap_or_default()
                        .clone_into(&mut self.check.result);
                }
                return;
            }
            CheckInput::Ran(run, ToolOutcome::Done { text }) if run.name == SHELL => {
                let command = run.arguments["command"].as_str().unwrap_or_default();
                let number = command.trim_matches(|sign: char| !sign.is_ascii_digit()).parse();
                let Ok(number) = number else { return };
                (Criterion::Command(number), text.starts_with("exit code 0"))
            }
            CheckInput::Ran(run, ToolOutcome::Done { text }) if run.name == LIST => {
                self.hear_files(run, text);
                return;
            }
            CheckInput::Nothing | CheckInput::Ran(..) => return,
        };
        self.judge(criterion, is_met);
    }

    fn judge(&mut self, criterion: Criterion, is_met: bool) {
        if is_met {
            self.check.met.insert(criterion);
        } else {
            self.check.met.remove(&criterion);
        }
    }

    /// Which artifacts exist. A result that is no report says that of none.
    fn hear_files(&mut self, run: &ToolRun, text: &str) {
        let FileReport(findings) = FileReport::parse(text).unwrap_or_default();
        let paths = run.arguments["files"].as_array().into_iter().flatten();
        let named = paths.filter_map(|path| Criterion::of_path(path.as_str()?));
        for (place, artifact) in named.enumerate() {
            let found = findings.get(place);
            self.judge(artifact, matches!(found, Some(FileFinding::Bytes(bytes)) if *bytes > 0));
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "the other kinds have no rule here")]
    fn read(&mut self, line: &JournalLine) {
        let id = line.note.split(": ").next().unwrap_or_default().to_owned();
        match line.kind {
            RecordKind::TurnStarted => {
                assert!(line.turn > self.turn, "turn {} after turn {}", line.turn, self.turn);
                self.turn = line.turn;
                self.before = std::mem::take(&mut self.check);
            }
            RecordKind::TaskAccepted => {
                let is_own = id.starts_with("spec-");
                assert!(is_own || self.asked.contains_key(&id), "{id} was not asked");
                assert!(self.accepted.insert(id.clone()), "{id} was accepted twice");
                if is_own {
                    self.asked.insert(id.clone(), "own".into());
                }
                self.waiting.push_back(id);
            }
            RecordKind::TaskStarted => {
                self.begin_in_turn(&id);
                assert_eq!(self.current, None, "one task at a time");
                self.current = Some(id);
                // A check that a request interrupts starts over.
                self.check = CriteriaCheck {
                    met: BTreeSet::new(),
                    result: std::mem::take(&mut self.before).result,
                };
            }
            RecordKind::TaskEnded => {
                if self.current.as_ref() == Some(&id) {
                    self.current = None;
                } else {
                    // The loop has ended: requests that wait fail, in order.
                    assert_eq!(self.waiting.pop_front(), Some(id.clone()), "tasks end in order");
                }
                assert!(!self.ended.contains(&id), "{id} was answered twice");
                self.ended.push(id);
            }
            RecordKind::SensorUpdated => self.sensed += 1,
            RecordKind::CallStarted => {
                let call = line.call.clone().unwrap_or_default();
                assert!(self.started.insert(call.clone()), "{call} was started twice");
            }
            RecordKind::CallAnswered => {
                let call = line.call.clone().unwrap_or_default();
                assert!(self.started.contains(&call), "{call} was answered and not asked");
                assert!(self.answered.insert(call.clone()), "{call} was answered twice");
            }
            RecordKind::ToolIntent => {
                self.intents.insert(line.run.clone().unwrap_or_default());
            }
            RecordKind::ToolOutcome => self.ran(line),
            _ => {}
        }
    }

    /// Of the origins with tasks that wait, the one whose last task was begun longest ago is next; of its tasks, the first. There
    /// are fewer origins than a loop remembers.
    fn begin_in_turn(&mut self, id: &str) {
        let staleness = |id: &String| self.served.iter().position(|origin| *origin == origin_of(id));
        let next = self.waiting.iter().min_by_key(|id| staleness(id));
        assert_eq!(next.map(String::as_str), Some(id), "the task of another origin is next");
        self.waiting.retain(|waiting| waiting != id);
        let origin = origin_of(id);
        self.served.retain(|served| *served != origin);
        self.served.push(origin);
    }

    fn ran(&mut self, line: &JournalLine) {
        let run = line.run.clone().unwrap_or_default();
        let outcome = line.outcome.clone().unwrap_or_default();
        assert!(self.intents.contains(&run), "{run} has an outcome and no intent");
        if line.tool.as_deref() == Some("memory") {
            let operation = self.operations.remove(&run).expect("an operation");
            assert_eq!(self.note(&operation), outcome == "Ok", "{operation} of {run}");
        }
        self.outcomes.entry(run).or_default().push(outcome);
    }

    /// Applies a call of `memory`. Whether it is possible.
    fn note(&mut self, operation: &Value) -> bool {
        let text = |name: &str| operation[name].as_str().unwrap_or_default().to_owned();
        let title = text("title");
        match &*text("operation") {
            "write" => {
                self.notes.insert(title, text("text"));
                true
            }
            "replace" => self.notes.get_mut(&title).is_some_and(|note| {
                *note = note.replace(&text("old"), &text("new"));
                true
            }),
            "delete" => self.notes.remove(&title).is_some(),
            _ => self.notes.contains_key(&title),
        }
    }

    /// A run reaches its server.
    pub(super) fn sent(&self, run: &ToolRun) {
        let id = run.id.to_string();
        // What fills a check has no other trace than its intent either.
        assert!(
            self.intents.contains(&id),
            "{id} was sent before its intent was on disk"
        );
    }

    /// A call reaches the gateway.
    pub(super) fn called(&self, call: CallId) {
        let call = call.to_string();
        assert!(
            self.started.contains(&call),
            "{call} was sent before its start was on disk"
        );
    }

    /// A loop has ended.
    pub(super) fn loop_ended(&mut self, view: &LoopView, schedule: &ScheduleSpec) {
        let Some(outcome) = view.outcome else { return };
        self.outcomes_of_loop.push(outcome);
        if schedule.mode != AgentMode::Goal || outcome == LoopOutcome::Cancelled {
            return;
        }
        let goal = view.goal.as_ref().expect("a goal");
        let is_met = goal.end == Some(GoalEnd::CriteriaMet);
        assert_eq!(outcome == LoopOutcome::Completed, is_met, "{goal:?}");
        assert!(goal.end.is_some(), "a loop that ended says why");
        if !is_met {
            return;
        }
        let missing = self.missing(schedule);
        assert_eq!(missing, None, "was not met in the last check: {:?}", self.check);
    }

    /// A criterion or an artifact that the check has not found.
    fn missing<'a>(&self, schedule: &'a ScheduleSpec) -> Option<&'a Criterion> {
        let holds = |criterion: &Criterion| match criterion {
            Criterion::Regex(_) => self.check.result.contains(&criterion.word()),
            Criterion::Command(_) | Criterion::Judge(_) | Criterion::Artifact(_) => self.check.met.contains(criterion),
        };
        let mut required = schedule.criteria.iter().chain(&schedule.artifacts);
        required.find(|criterion| !holds(criterion))
    }

    /// Everything is quiet: what the journal says of the whole history.
    /// `is_whole`: the volume was never restored.
    pub(super) fn finish(&self, connection: &Connection, view: &LoopView, is_whole: bool) {
        let unanswered: Vec<_> = self.promised.iter().filter(|id| !self.ended.contains(id)).collect();
        assert!(unanswered.is_empty(), "promised and never answered: {unanswered:?}");
        assert!(!self.is_busy(), "{:?} {:?}", self.current, self.waiting);
        self.compare_responses(connection);
        if is_whole {
            self.compare_counts(view);
        }
        let kept: String = connection
            .query_row("SELECT value FROM kv WHERE key = 'snapshot'", [], |row| row.get(0))
            .expect("a snapshot");
        self.compare_notes(&serde_json::from_str(&kept).expect("a snapshot"));
    }

    /// What the loop has counted is what it did. Restoring a volume does not restore the counts.
    fn compare_counts(&self, view: &LoopView) {
        let counts = &view.counts;
        let done = counts.tasks.completed + counts.tasks.failed + counts.tasks.limit_reached;
        assert_eq!(usize::try_from(done), Ok(self.ended.len()), "counted tasks");
        assert_eq!(
            usize::try_from(counts.tool_calls),
            Ok(self.intents.len()),
            "counted runs"
        );
        for (outcome, counted) in [
            ("Ok", counts.by_tool.iter().map(|tool| tool.ok).sum::<i64>()),
            ("Error", counts.by_tool.iter().map(|tool| tool.error).sum()),
            ("Unavailable", counts.by_tool.iter().map(|tool| tool.unavailable).sum()),
            ("Unknown", counts.by_tool.iter().map(|tool| tool.unknown).sum()),
        ] {
            let outcomes = self.outcomes.values().flatten().filter(|found| *found == outcome);
            assert_eq!(usize::try_from(counted), Ok(outcomes.count()), "counted as {outcome}");
        }
    }

    fn compare_responses(&self, connection: &Connection) {
        let rows: Vec<(String, String, Option<String>)> = connection
            .prepare("SELECT id, state, response FROM tasks ORDER BY seq")
            .and_then(|mut select| {
                select
                    .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
                    .collect()
            })
            .expect("rows");
        assert_eq!(rows.len(), self.accepted.len(), "rows of tasks");
        for (id, state, response) in rows {
            assert_eq!(state, "Ended", "{id}");
            let response: TaskResponse = serde_json::from_str(&response.unwrap_or_default()).expect("a response");
            self.compare_response(&response);
        }
    }

    /// A response answers what was asked, and nothing else.
    pub(super) fn compare_response(&self, response: &TaskResponse) {
        let word = self.asked.get(&response.id);
        let word = word.unwrap_or_else(|| panic!("{} was not asked", response.id));
        if let Some(result) = &response.result {
            let about = format!("answer to {word},");
            let is_about = result.to_string().contains(&about) || *result == "7" || *result == 7;
            assert!(is_about, "{} has the answer {result}", response.id);
        }
    }

    /// Each answer that the loop took is paid for, and counted with what it cost.
    pub(super) fn compare_bills(&self, connection: &Connection, provider: &Provider) {
        let bills: BTreeMap<String, (u64, i64)> = provider
            .bills
            .iter()
            .map(|(call, bill)| (call.to_string(), *bill))
            .collect();
        let (mut tokens, mut cost) = (0, 0);
        for call in &self.answered {
            let (more, micro_dollars) = bills.get(call).unwrap_or_else(|| panic!("{call} is not paid for"));
            tokens += i64::try_from(*more).expect("few");
            cost += micro_dollars;
        }
        let sums = "SELECT coalesce(sum(total_tokens), 0), coalesce(sum(total_cost_micro_usd), 0) FROM agent_execution_history";
        let counted: (i64, i64) = connection
            .query_row(sums, [], |row| Ok((row.get(0)?, row.get(1)?)))
            .expect("a row");
        assert_eq!(counted, (tokens, cost), "tokens and cost of all answers");
    }
}
