//! A run as data: the model's answers and the outcome of each tool, by turn and call, so that they are the same however
//! often a worker is killed in between.

use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::api::AgentSpec;
use crate::api::failure::FailureKind;
use crate::api::status::LoopState;
use crate::engine::message::{FinishReason, ModelAnswer, ToolCall};
use crate::engine::notifications::NotificationPriority;
use crate::engine::settings::{EngineSettings, ModeSettings};
use crate::engine::tool::{ToolEffect, ToolSpec, UnknownOutcomePolicy};
use crate::link::sensor_messages::SensorTerms;

/// A run. Turns beyond the last one shut the loop down.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) settings: EngineSettings,
    pub(super) turns: Vec<Turn>,
    pub(super) heartbeat: Turn,
    pub(super) happenings: Vec<ExternalEvent>,
    pub(super) sensors: Vec<SensorTerms>,
}

/// The calls of a turn; a call beyond the last one is answered with text.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    pub(super) calls: Vec<Call>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Call {
    /// How its first attempts fail.
    pub(super) failures: Vec<FailedAttempt>,
    /// Seconds until its answer.
    pub(super) takes: i64,
    /// Tool calls in its answer.
    pub(super) wants: Vec<ScriptedToolCall>,
    /// Requested length of the sleep in seconds.
    pub(super) sleep: Option<i64>,
    pub(super) says: AnswerForm,
}

/// The form of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AnswerForm {
    #[default]
    Complete,
    /// Cut by the output limit.
    Truncated,
    /// Refused by the provider.
    Refused,
    /// Without text and without tool calls.
    Empty,
}

/// An attempt without an answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum FailedAttempt {
    Fails(FailureKind),
    /// The provider requests a wait of this many seconds.
    Waits(u64),
    /// A budget has no room for this many seconds.
    Refused(i64),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ScriptedToolCall {
    pub(super) tool: &'static str,
    /// Duration in seconds.
    pub(super) takes: i64,
    pub(super) ends: ScriptedOutcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScriptedOutcome {
    Ok,
    Error,
    NotRun,
    Unknown,
}

/// An external event, this many seconds after the loop was first in this state in this turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExternalEvent {
    pub(super) turn: i64,
    pub(super) state: LoopState,
    pub(super) after: i64,
    pub(super) what: ExternalEventKind,
}

/// The kind of an external event.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExternalEventKind {
    Wake,
    Resume,
    /// A request to stop, at once or after the turn.
    Stop {
        at_once: bool,
    },
    /// The budgets have changed, so refused calls may be possible.
    TopUp,
    Outage,
    LinkBack,
    /// A notification arrives, and is redelivered until the end.
    Notice(NotificationPriority),
    /// The user of this name sends a request, and sends it again until it is accepted.
    Request(&'static str),
    /// The pod is replaced in order.
    NewPod,
    /// A file of the workspace is written with this content.
    Put(&'static str, &'static str),
    /// A file of the workspace is removed.
    Remove(&'static str),
}

/// Builds the settings of a spec with these guardrails.
pub(super) fn settings(guardrails: &Value) -> EngineSettings {
    settings_of(
        &json!({"guardrails": guardrails, "model": {"api": "OpenAIChat", "baseURL": "http://model", "name": "m"}}),
    )
}

/// A schedule with a notification for each tick.
pub(super) fn clock(uid: &str, cron: &str) -> SensorTerms {
    let spec = json!({
        "agentNames": ["a"],
        "source": {"schedule": {"cron": cron}},
        "notification": {"text": "'tick ' + payload.scheduledTime"},
    });
    SensorTerms {
        uid: uid.into(),
        name: "clock".into(),
        generation: 1,
        spec: serde_json::from_value(spec).expect("a spec"),
    }
}

/// A watch of the directory `inbox` with a notification for each change.
pub(super) fn inbox() -> SensorTerms {
    let spec = json!({
        "agentNames": ["a"],
        "source": {"watch": {"path": "inbox/"}},
        "limits": {"perMinute": 2},
        "notification": {
            "text": "payload.kind + ' ' + payload.path + ': ' + (has(payload.content) ? payload.content : 'gone') + '.'",
        },
    });
    SensorTerms {
        uid: "inbox".into(),
        name: "inbox".into(),
        generation: 1,
        spec: serde_json::from_value(spec).expect("a spec"),
    }
}

pub(super) fn settings_of(spec: &Value) -> EngineSettings {
    let spec: AgentSpec = serde_json::from_value(spec.clone()).expect("a spec");
    let mut settings = EngineSettings::try_from(&spec).expect("settings");
    settings.idle_timeout = SignedDuration::from_hours(1000);
    settings.max_sleep = SignedDuration::from_hours(12);
    settings.longest_text_delay = SignedDuration::ZERO;
    settings.light_context_tokens = 128_000;
    settings
}

/// A tool whose calls a person approves, and one whose calls are denied.
pub(super) const APPROVED: &str = "bank__pay";
pub(super) const DENIED: &str = "bank__close";

/// What the gates of a loop in mode `Goal` show instead of a tool.
pub(super) const GOAL: &str = "goal";

/// The tool that runs commands of criteria; only offered in mode `Goal`.
const SHELL: &str = "toolbox__shell";
/// The tool that finds artifacts; only offered in mode `Goal`.
pub(super) const LIST: &str = "toolbox__list_directory";

pub(super) const GATED: [&str; 2] = [APPROVED, DENIED];

pub(super) const TOOLS: [&str; 8] = [
    APPROVED,
    DENIED,
    "files__read",
    "files__write",
    "mail__send",
    "db__put",
    "job__start",
    "nothing",
];

/// One tool of each kind; the last of the names above is not a tool.
fn tools() -> Vec<ToolSpec> {
    let tool = |name: &str, effect, idempotent, on_unknown| ToolSpec {
        name: name.into(),
        description: format!("does {name}"),
        parameters: json!({"type": "object", "properties": {"command": {"type": "string"}, "files": {"type": "array"}}}),
        effect,
        idempotent,
        timeout: SignedDuration::from_secs(600),
        on_unknown,
        target: String::new(),
        needs_approval: GATED.contains(&name),
        approval_condition: None,
        needs_approval_after_untrusted: false,
        trusted: name != "files__read",
        missing_grant: None,
        definition: None,
    };
    let (tell, retry) = (UnknownOutcomePolicy::TellModel, UnknownOutcomePolicy::Retry);
    vec![
        tool("files__read", ToolEffect::Read, false, tell),
        tool("files__write", ToolEffect::Write, false, tell),
        tool("mail__send", ToolEffect::Destructive, false, tell),
        tool("db__put", ToolEffect::Write, true, tell),
        tool("job__start", ToolEffect::Write, false, retry),
        tool(APPROVED, ToolEffect::Write, false, tell),
        tool(DENIED, ToolEffect::Destructive, false, tell),
        tool(SHELL, ToolEffect::Destructive, false, tell),
        tool(LIST, ToolEffect::Read, false, tell),
    ]
}

/// Whether the rules of the tool allow a second run with the same key.
pub(super) fn may_be_repeated(tool: &str) -> bool {
    matches!(tool, "files__read" | "db__put" | "job__start")
}

impl Script {
    /// The tools. Those with approvals only where they are called: more definitions move the summaries of a long script to
    /// other calls, which the comparison of runs takes for a difference.
    pub(super) fn tools(&self) -> Vec<ToolSpec> {
        let calls = self.turns.iter().flat_map(|turn| &turn.calls);
        let asks = calls
            .flat_map(|call| &call.wants)
            .any(|want| GATED.contains(&want.tool));
        tools()
            .into_iter()
            .filter(|tool| asks || !tool.needs_approval)
            .filter(|tool| ![SHELL, LIST].contains(&&*tool.name) || matches!(self.settings.mode, ModeSettings::Goal(_)))
            .collect()
    }

    pub(super) fn call(&self, turn: i64, call: u32) -> Option<Call> {
        let turn = usize::try_from(turn).ok()?.checked_sub(1)?;
        let beyond = self.turns.len() <= turn;
        let call = usize::try_from(call).ok()?.checked_sub(1)?;
        if beyond {
            return None;
        }
        Some(self.turns[turn].calls.get(call).cloned().unwrap_or_default())
    }

    /// Returns the answer of a call, independent of its attempt.
    pub(super) fn answer(&self, turn: i64, call: u32) -> ModelAnswer {
        let Some(Call { wants, sleep, says, .. }) = self.call(turn, call) else {
            return answer("end", &[("yield", json!({"mode": "shutdown"}))]);
        };
        let mut all: Vec<(&str, Value)> = wants.iter().map(|want| (want.tool, json!({}))).collect();
        if let Some(seconds) = sleep {
            all.push(("yield", json!({"sleep": seconds, "reason": "all is quiet"})));
        }
        let id = format!("t{turn}c{call}");
        let whole = if all.is_empty() {
            ModelAnswer {
                text: Some(format!("{id}: nothing new")),
                ..ModelAnswer::default()
            }
        } else {
            answer(&id, &all)
        };
        let finish = match says {
            AnswerForm::Complete => return whole,
            AnswerForm::Empty => return ModelAnswer::default(),
            AnswerForm::Truncated => FinishReason::Length,
            AnswerForm::Refused => FinishReason::Refused,
        };
        ModelAnswer { finish, ..whole }
    }
}

/// Returns the answer of a heartbeat's call.
pub(super) fn of_heartbeat(turn: i64, call: u32, planned: Option<&Call>) -> ModelAnswer {
    let wants: Vec<(&str, Value)> = planned
        .map(|call| call.wants.iter().map(|want| (want.tool, json!({}))).collect())
        .unwrap_or_default();
    if wants.is_empty() {
        return ModelAnswer {
            text: Some("all is well".to_owned()),
            ..ModelAnswer::default()
        };
    }
    answer(&format!("h{turn}c{call}"), &wants)
}

/// Returns the call of a turn that answers a request in a mode other than Task.
pub(super) fn request_call(number: u32) -> Call {
    let want = |tool| ScriptedToolCall {
        tool,
        takes: 1,
        ends: ScriptedOutcome::Ok,
    };
    match number {
        1 => Call {
            takes: 2,
            wants: vec![want("files__write"), want("db__put")],
            ..Call::default()
        },
        _ => Call {
            takes: 1,
            ..Call::default()
        },
    }
}

/// Returns the answer of such a call.
pub(super) fn of_request(turn: i64, call: u32) -> ModelAnswer {
    let wants: Vec<(&str, Value)> = request_call(call)
        .wants
        .iter()
        .map(|want| (want.tool, json!({})))
        .collect();
    if wants.is_empty() {
        return ModelAnswer {
            text: Some(format!("I am well in turn {turn}")),
            ..ModelAnswer::default()
        };
    }
    answer(&format!("q{turn}c{call}"), &wants)
}

/// Returns the pre-check's answer: no, and yes the next time.
pub(super) fn pre_check(attempt: u32) -> ModelAnswer {
    ModelAnswer {
        text: Some(json!({"wake": attempt.is_multiple_of(2)}).to_string()),
        tokens: Some(10),
        ..ModelAnswer::default()
    }
}

/// Returns the confidence that the goal is reached, which is low.
pub(super) fn confidence() -> ModelAnswer {
    ModelAnswer {
        text: Some(json!({"confidence": 20}).to_string()),
        tokens: Some(10),
        ..ModelAnswer::default()
    }
}

/// Returns the score of a tick: at 06:00 it holds, at 12:00 it just holds, at 18:00 it just does not, and at midnight
/// the answer is unusable.
pub(super) fn score(about: &str) -> ModelAnswer {
    let text = if about.contains("T06:") {
        r#"{"score": 95}"#
    } else if about.contains("T12:") {
        r#"{"score": 80}"#
    } else if about.contains("T18:") {
        r#"{"score": 79}"#
    } else {
        "no idea"
    };
    ModelAnswer {
        text: Some(text.into()),
        tokens: Some(10),
        ..ModelAnswer::default()
    }
}

/// Returns the summary for a turn; some are unusable.
pub(super) fn summary(turn: i64) -> ModelAnswer {
    let text = format!("All was quiet before turn {turn}.");
    ModelAnswer {
        text: (turn % 3 > 0).then_some(text),
        tokens: Some(1000),
        ..ModelAnswer::default()
    }
}

fn answer(id: &str, all: &[(&str, Value)]) -> ModelAnswer {
    let call = |(place, (name, arguments)): (usize, &(&str, Value))| ToolCall {
        id: format!("{id}-{place}"),
        name: (*name).into(),
        arguments: arguments.to_string(),
    };
    ModelAnswer {
        text: Some(format!("{id}: {}", "I had better look. ".repeat(20))),
        tool_calls: all.iter().enumerate().map(call).collect(),
        reasoning: None,
        finish: FinishReason::ToolCalls,
        tokens: Some(1000),
        input_tokens: None,
        output_tokens: None,
        cost: Some(7),
    }
}
