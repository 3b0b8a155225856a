//! What one schedule is about, drawn from its seed: the mode, the spec and its edits, and how unreliable everything is.

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::random::Random;
use crate::api::AgentSpec;
use crate::api::agent::AgentMode;
use crate::engine::settings::EngineSettings;
use crate::engine::tool::{ToolEffect, ToolSpec, UnknownOutcomePolicy};

/// Runs commands of criteria.
pub(super) const SHELL: &str = "toolbox__shell";
/// Finds artifacts.
pub(super) const LIST: &str = "toolbox__list_directory";
/// A person decides whether a run of unknown outcome is repeated.
pub(super) const ASKS: &str = "wire__send";
/// A run of unknown outcome is repeated.
pub(super) const RETRIES: &str = "job__start";
/// A second run with the same key has no further effect.
pub(super) const IDEMPOTENT: &str = "db__put";
/// Each run needs an approval.
pub(super) const GATED: [&str; 2] = ["bank__pay", "bank__close"];

/// Names that the model calls; the last one is not a tool.
pub(super) const NAMES: [&str; 10] = [
    "files__read",
    "files__read",
    "files__write",
    "mail__send",
    IDEMPOTENT,
    RETRIES,
    ASKS,
    GATED[0],
    GATED[1],
    "nothing",
];

/// A criterion of the goal, or an artifact. Its number is unique to its wording, so that an edited one is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Criterion {
    Regex(u32),
    Command(u32),
    Judge(u32),
    Artifact(u32),
}

impl Criterion {
    /// What only this criterion has in its text, and what an answer has that is about it.
    pub(super) fn word(self) -> String {
        match self {
            Self::Regex(number) => format!("r{number};"),
            Self::Command(number) => format!("c{number};"),
            Self::Judge(number) => format!("j{number};"),
            Self::Artifact(number) => format!("a{number}"),
        }
    }

    /// The artifact with this path.
    pub(super) fn of_path(path: &str) -> Option<Self> {
        Some(Self::Artifact(path.strip_prefix('a')?.parse().ok()?))
    }

    fn spec(self, place: usize) -> Value {
        let name = format!("k{place}");
        match self {
            Self::Regex(_) => json!({"name": name, "regex": self.word()}),
            Self::Command(_) => json!({"name": name, "command": {"run": self.word()}}),
            Self::Judge(_) => json!({"name": name, "judge": self.word()}),
            Self::Artifact(_) => json!({"path": self.word()}),
        }
    }
}

#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each asked by its name")]
pub(super) struct ScheduleSpec {
    pub(super) mode: AgentMode,
    /// Inputs before everything works again.
    pub(super) steps: usize,
    /// Chance of an event from outside before each input, in percent.
    pub(super) events: i64,
    /// Chance of a kill at each input, in permille.
    pub(super) kills: i64,
    /// Edits of the spec so far.
    pub(super) edits: u32,
    pub(super) criteria: Vec<Criterion>,
    /// Those before all edits.
    first_criteria: Vec<Criterion>,
    /// Files that must exist, in mode Goal.
    pub(super) artifacts: Vec<Criterion>,
    /// The last number of a criterion.
    numbers: u32,
    /// Responses of mode Task have a receiver.
    pub(super) has_receiver: bool,
    /// Responses of mode Task have a schema.
    pub(super) has_schema: bool,
    /// The spec has a task of its own.
    pub(super) has_own_task: bool,
    /// In mode Goal: the model insists on calls that a person denies. Not drawn, so that the other schedules stay what they are.
    pub(super) is_denied: bool,
    gives_pod_back: bool,
    defers: bool,
    has_small_window: bool,
}

impl ScheduleSpec {
    pub(super) fn draw(random: &mut Random) -> Self {
        let mode = [AgentMode::Continuous, AgentMode::Task, AgentMode::Goal][random.index(3)];
        let mut schedule = Self {
            mode,
            steps: 60 + random.index(140),
            events: random.range(15, 50),
            kills: random.range(0, 90),
            edits: 0,
            criteria: Vec::new(),
            first_criteria: Vec::new(),
            artifacts: Vec::new(),
            numbers: 0,
            has_receiver: random.percent(70),
            has_schema: random.percent(40),
            has_own_task: random.percent(30),
            is_denied: false,
            gives_pod_back: random.percent(30),
            defers: random.percent(40),
            has_small_window: random.percent(20),
        };
        schedule.draw_criteria(random);
        schedule.first_criteria.clone_from(&schedule.criteria);
        if schedule.mode == AgentMode::Goal {
            schedule.draw_artifacts(random);
        }
        schedule
    }

    /// A broken rule: no artifact is looked for.
    pub(super) fn without_artifacts(&self) -> Self {
        Self {
            artifacts: Vec::new(),
            ..self.clone()
        }
    }

    /// A broken rule: the criteria are those of the first spec.
    pub(super) fn with_first_criteria(&self) -> Self {
        Self {
            criteria: self.first_criteria.clone(),
            ..self.clone()
        }
    }

    /// The goal has other criteria.
    fn draw_criteria(&mut self, random: &mut Random) {
        let count = 1 + random.index(4);
        self.criteria = (0..count).map(|_| self.draw_criterion(random)).collect();
    }

    /// The goal has other artifacts, or none.
    fn draw_artifacts(&mut self, random: &mut Random) {
        let numbers = self.numbers + 1..=self.numbers + [0, 0, 1, 3][random.index(4)];
        self.artifacts = numbers.map(Criterion::Artifact).collect();
        self.numbers += 3;
    }

    fn draw_criterion(&mut self, random: &mut Random) -> Criterion {
        self.numbers += 1;
        [Criterion::Regex, Criterion::Command, Criterion::Judge][random.index(3)](self.numbers)
    }

    /// A user edits the spec: a criterion, all of them, the artifacts, or something else.
    pub(super) fn edit(&mut self, random: &mut Random) {
        self.edits += 1;
        match random.index(4) {
            0 => self.draw_criteria(random),
            1 | 2 => {
                let place = random.index(self.criteria.len());
                self.criteria[place] = self.draw_criterion(random);
            }
            _ if self.mode == AgentMode::Goal => self.draw_artifacts(random),
            _ => self.has_own_task = random.percent(50),
        }
    }

    fn spec(&self) -> Value {
        let mut spec = json!({
            "mode": self.mode,
            // Each edit makes another spec.
            "instructions": format!("Do what is right, edition {}.", self.edits),
            "model": {"api": "OpenAIChat", "baseURL": "http://model", "name": "m"},
            "memory": {},
            "tools": {"approval": {"timeoutSeconds": 600}},
            "guardrails": {"idleTimeoutSeconds": 4_000_000},
        });
        if self.defers && self.mode != AgentMode::Task {
            spec["tools"]["approval"]["whilePending"] = "Continue".into();
        }
        match self.mode {
            AgentMode::Continuous => {}
            AgentMode::Task => {
                let mut task = json!({"maxIterations": 6, "maxTokens": 100_000, "maxDurationSeconds": 900});
                if self.has_receiver {
                    task["responses"] = json!({"http": {"url": "http://receiver"}});
                }
                if self.has_schema {
                    task["responseSchema"] = json!({
                        "type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"],
                    });
                }
                if self.has_own_task {
                    task["prompt"] = "task=own; Look around.".into();
                }
                if self.gives_pod_back {
                    task["idlePodSeconds"] = 600.into();
                }
                spec["task"] = task;
            }
            AgentMode::Goal => {
                let criteria: Vec<Value> = (0..).zip(&self.criteria).map(|(place, one)| one.spec(place)).collect();
                spec["goal"] = json!({
                    "description": "Keep the lights on.",
                    "acceptanceCriteria": criteria,
                    "maxSteps": 40,
                    "maxAttempts": 3,
                    "timeoutSeconds": 864_000,
                    "confidence": {"everySteps": 5},
                });
                if !self.artifacts.is_empty() {
                    let artifacts: Vec<Value> = self.artifacts.iter().map(|one| one.spec(0)).collect();
                    spec["goal"]["artifacts"] = artifacts.into();
                }
            }
        }
        spec
    }

    pub(super) fn settings(&self) -> EngineSettings {
        let spec: AgentSpec = serde_json::from_value(self.spec()).expect("a spec");
        let mut settings = EngineSettings::try_from(&spec).expect("settings");
        settings.max_sleep = SignedDuration::from_hours(12);
        if self.has_small_window {
            settings.context_tokens = settings.max_output_tokens + 9_000;
        }
        settings
    }
}

fn tool(name: &str, effect: ToolEffect) -> ToolSpec {
    ToolSpec {
        name: name.into(),
        description: format!("does {name}"),
        parameters: match name {
            LIST => json!({"type": "object", "properties": {"files": {"type": "array"}}}),
            _ => json!({"type": "object", "properties": {"command": {"type": "string"}}}),
        },
        effect,
        idempotent: name == IDEMPOTENT,
        timeout: SignedDuration::from_secs(600),
        on_unknown: match name {
            RETRIES => UnknownOutcomePolicy::Retry,
            ASKS => UnknownOutcomePolicy::Ask,
            _ => UnknownOutcomePolicy::TellModel,
        },
        target: String::new(),
        needs_approval: GATED.contains(&name),
        approval_condition: None,
        needs_approval_after_untrusted: false,
        trusted: true,
        missing_grant: None,
        definition: None,
    }
}

/// One tool of each kind.
pub(super) fn tools() -> Vec<ToolSpec> {
    vec![
        tool("files__read", ToolEffect::Read),
        tool("files__write", ToolEffect::Write),
        tool("mail__send", ToolEffect::Destructive),
        tool(IDEMPOTENT, ToolEffect::Write),
        tool(RETRIES, ToolEffect::Write),
        tool(ASKS, ToolEffect::Write),
        tool(GATED[0], ToolEffect::Write),
        tool(GATED[1], ToolEffect::Destructive),
        tool(SHELL, ToolEffect::Destructive),
        tool(LIST, ToolEffect::Read),
    ]
}
