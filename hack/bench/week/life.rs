//! A life of many days, with a model that follows a routine: what each day costs by the engine's rules, and by those that
//! it had before prompts were kept small.

#![allow(
    clippy::expect_used,
    reason = "a bench and a test: what is wrong here is wrong in the program"
)]

use std::sync::Arc;

use agentloop::api::AgentSpec;
use agentloop::engine::budget::BudgetState;
use agentloop::engine::machine::Engine;
use agentloop::engine::message::{FinishReason, Message, ModelAnswer, ToolCall};
use agentloop::engine::settings::EngineSettings;
use agentloop::engine::tool::{ToolEffect, ToolOutcome, ToolSpec, UnknownOutcomePolicy};
use agentloop::engine::{CallPurpose, EngineEffect, EngineInput, KnownTotals, OpenRequests};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::prices::{Bill, Caching, Provider, tokens};

const DAY: SignedDuration = SignedDuration::from_hours(24);
/// Bytes of a summary.
const SUMMARY: usize = 4_000;
/// Bytes of what the model says with each call.
const WORDS: usize = 200;
/// Bytes of the state at the end of each prompt.
const STATE: usize = 300;
const INSTRUCTIONS: usize = 2_000;

/// What happens in a day.
#[derive(Clone, Copy)]
pub struct Routine {
    /// Between two wakes.
    pub every: SignedDuration,
    /// Model calls of each: all but the last one read something.
    pub calls: usize,
    /// Bytes of what is read.
    pub result: usize,
    /// Length of a day.
    pub day: SignedDuration,
}

/// A wake each ten minutes, with three calls.
pub const QUIET: Routine = Routine {
    every: SignedDuration::from_mins(10),
    calls: 3,
    result: 2_000,
    day: DAY,
};

/// A wake each two minutes, with eight calls.
pub const BUSY: Routine = Routine {
    every: SignedDuration::from_mins(2),
    calls: 8,
    result: 2_000,
    day: DAY,
};

/// What a day came to.
#[derive(Clone, Copy, Default, Debug)]
pub struct Day {
    /// Billionths of a dollar.
    pub nanodollars: u64,
    /// Input tokens of all calls.
    pub input: u64,
    /// Wakes.
    pub wakes: u64,
    /// Summaries.
    #[allow(dead_code, reason = "for the figures")]
    pub summaries: u64,
    /// Bytes of the live transcript at its end.
    pub bytes: usize,
}

impl Day {
    fn add(&mut self, bill: Bill) {
        self.nanodollars += bill.nanodollars;
        self.input += bill.input;
    }
}

fn words(kind: &str, number: u64, bytes: usize) -> String {
    let mut text = format!("{kind} {number} ");
    text.push_str(&"w".repeat(bytes.saturating_sub(text.len())));
    text
}

fn wanted(number: u64, name: &str, arguments: String) -> ToolCall {
    ToolCall {
        id: format!("call_{number}"),
        name: name.to_owned(),
        arguments,
    }
}

/// The days of a loop under the engine's rules, with the defaults of a spec.
pub fn engine(routine: Routine, caching: Caching, days: usize) -> Vec<Day> {
    Life::new(routine, caching).live(days)
}

struct Life {
    routine: Routine,
    engine: Engine,
    provider: Provider,
    now: Timestamp,
    timer: Option<Timestamp>,
    /// Calls of the present wake that were answered.
    calls: usize,
    number: u64,
    transcript: usize,
    today: Day,
}

impl Life {
    fn new(routine: Routine, caching: Caching) -> Self {
        let spec = json!({
            "mode": "Continuous",
            "model": {"api": "AnthropicMessages", "baseURL": "http://model", "name": "m"},
            "guardrails": {"idleTimeoutSeconds": 86_400, "loopDetection": {"mode": "Disabled"}},
        });
        let spec: AgentSpec = serde_json::from_value(spec).expect("a spec");
        let settings = EngineSettings::try_from(&spec).expect("settings");
        let mut engine = Engine::new(settings);
        engine.set_instructions(words("instructions", 0, INSTRUCTIONS));
        Self {
            routine,
            engine,
            provider: Provider::new(caching),
            now: Timestamp::UNIX_EPOCH,
            timer: None,
            calls: 0,
            number: 0,
            transcript: 0,
            today: Day::default(),
        }
    }

    fn live(mut self, days: usize) -> Vec<Day> {
        self.feed(EngineInput::ToolsChanged {
            tools: vec![tool()],
            silent: Vec::new(),
        });
        self.feed(EngineInput::Started {
            agent: String::new(),
            epoch: 1,
            known: KnownTotals::default(),
            budget: BudgetState::default(),
            link_silent: false,
            open: OpenRequests::default(),
        });
        let mut all = Vec::new();
        for _ in 0..days {
            let end = Timestamp::UNIX_EPOCH + self.routine.day * i32::try_from(all.len() + 1).unwrap_or(1);
            while let Some(due) = self.timer.filter(|due| *due < end) {
                self.now = self.now.max(due);
                self.timer = None;
                self.feed(EngineInput::Timer);
            }
            self.today.bytes = self.transcript;
            all.push(std::mem::take(&mut self.today));
        }
        all
    }

    fn feed(&mut self, input: EngineInput) {
        let mut effects = self.engine.handle(self.now, input);
        while !effects.is_empty() {
            let mut next = Vec::new();
            for effect in effects {
                match effect {
                    EngineEffect::SetTimer(timer) => self.timer = timer,
                    EngineEffect::CallModel {
                        call,
                        purpose,
                        messages,
                        state,
                        tools,
                        ..
                    } => {
                        let tools = tools
                            .iter()
                            .map(|tool| tool.description.len() + tool.parameters.to_string().len());
                        let state = state.map_or(0, |state| state.len()) + STATE;
                        let answer = self.answer(purpose, &messages, (tools.sum(), state));
                        next.push(EngineInput::Answered { call, answer });
                    }
                    EngineEffect::RunTool(run, _) => {
                        self.number += 1;
                        let text = words("result", self.number, self.routine.result);
                        let outcome = ToolOutcome::Done { text };
                        next.push(EngineInput::ToolFinished {
                            run: run.id,
                            outcome,
                            artifacts: agentloop::engine::tool::ResultArtifacts::default(),
                        });
                    }
                    EngineEffect::Record(_)
                    | EngineEffect::CancelTool(_)
                    | EngineEffect::CancelCall { .. }
                    | EngineEffect::Acknowledge { .. }
                    | EngineEffect::Report
                    | EngineEffect::Stopped => {}
                }
            }
            effects = next
                .into_iter()
                .flat_map(|input| {
                    self.now += SignedDuration::from_secs(2);
                    self.engine.handle(self.now, input)
                })
                .collect();
        }
    }

    fn answer(&mut self, purpose: CallPurpose, messages: &[Arc<Message>], around: (usize, usize)) -> ModelAnswer {
        self.number += 1;
        let bytes = |message: &Arc<Message>| serde_json::to_string(&**message).map_or(0, |text| text.len());
        let answer = if purpose == CallPurpose::Compaction {
            self.today.summaries += 1;
            ModelAnswer {
                text: Some(words("summary", self.number, SUMMARY)),
                ..ModelAnswer::default()
            }
        } else {
            self.calls += 1;
            self.transcript = messages.iter().map(bytes).sum();
            let call = if self.calls < self.routine.calls {
                wanted(self.number, "feed__read", format!(r#"{{"page": {}}}"#, self.number))
            } else {
                self.calls = 0;
                self.today.wakes += 1;
                let took = SignedDuration::from_secs(i64::try_from(self.routine.calls * 4).unwrap_or(0));
                let sleep = (self.routine.every - took).as_secs();
                wanted(
                    self.number,
                    "yield",
                    format!(r#"{{"sleep": {sleep}, "reason": "all is well"}}"#),
                )
            };
            ModelAnswer {
                text: Some(words("I look", self.number, WORDS)),
                tool_calls: vec![call],
                finish: FinishReason::ToolCalls,
                ..ModelAnswer::default()
            }
        };
        let said = answer.text.as_ref().map_or(0, String::len)
            + answer
                .tool_calls
                .iter()
                .map(|call| call.arguments.len() + call.name.len())
                .sum::<usize>();
        let bill = self.provider.charge(self.now, around, messages, said);
        self.today.add(bill);
        ModelAnswer {
            input_tokens: Some(bill.input),
            tokens: Some(bill.input + tokens(said)),
            ..answer
        }
    }
}

fn tool() -> ToolSpec {
    ToolSpec {
        name: "feed__read".to_owned(),
        description: words("description", 0, 400),
        parameters: json!({"type": "object", "properties": {"page": {"type": "integer"}}}),
        effect: ToolEffect::Read,
        idempotent: false,
        timeout: SignedDuration::from_secs(60),
        on_unknown: UnknownOutcomePolicy::TellModel,
        target: String::new(),
        needs_approval: false,
        needs_approval_after_untrusted: false,
        approval_condition: None,
        trusted: true,
        missing_grant: None,
        definition: None,
    }
}

/// The same days by the rules before: nothing leaves until a prompt would have more than 80 % of the window, four bytes a
/// token; then a summary takes the place of the oldest turns, and half of the room is free.
pub fn before(routine: Routine, caching: Caching, days: usize) -> Vec<Day> {
    const WINDOW: usize = 128_000;
    let mut provider = Provider::new(caching);
    let system = Arc::new(Message::System {
        text: words("instructions", 0, INSTRUCTIONS),
    });
    let tools = tool().description.len() + 1_500;
    let mut transcript: Vec<Arc<Message>> = Vec::new();
    let mut summary: Option<Arc<Message>> = None;
    let mut number = 0;
    let mut now = Timestamp::UNIX_EPOCH;
    let mut all = Vec::new();
    let estimate =
        |messages: &[Arc<Message>]| -> usize { messages.iter().map(|message| 8 + text_of(message) / 4).sum() };
    for day in 1..=days {
        let mut today = Day::default();
        let end = Timestamp::UNIX_EPOCH + routine.day * i32::try_from(day).unwrap_or(1);
        while now < end {
            let woken = now;
            transcript.push(user(words("Turn", number, 100)));
            for call in 1..=routine.calls {
                let prompt = |messages: &[Arc<Message>], last: Option<Arc<Message>>| -> Vec<Arc<Message>> {
                    let head = std::iter::once(system.clone()).chain(summary.clone());
                    head.chain(messages.iter().cloned()).chain(last).collect()
                };
                let fixed = estimate(&prompt(&[], None)) + tools / 4;
                let room = WINDOW / 5 * 4 - fixed;
                if estimate(&transcript) > room {
                    let mut starts =
                        (1..transcript.len()).filter(|place| matches!(*transcript[*place], Message::User { .. }));
                    let cut = starts
                        .find(|cut| estimate(&transcript[*cut..]) <= room / 2)
                        .unwrap_or(0);
                    let request = prompt(&transcript[..cut], Some(user(words("Sum it up", 0, 600))));
                    today.add(provider.charge(now, (tools, 0), &request, SUMMARY));
                    today.summaries += 1;
                    transcript.drain(..cut);
                    number += 1;
                    summary = Some(user(words("summary", number, SUMMARY)));
                    let head = std::iter::once(system.clone()).chain(summary.clone());
                    let request: Vec<Arc<Message>> = head.chain(transcript.iter().cloned()).collect();
                    today.add(provider.charge(now, (tools, STATE), &request, WORDS + 30));
                } else {
                    today.add(provider.charge(now, (tools, STATE), &prompt(&transcript, None), WORDS + 30));
                }
                now += SignedDuration::from_secs(4);
                number += 1;
                let last = call == routine.calls;
                let (name, result) = if last {
                    ("yield", 60)
                } else {
                    ("feed__read", routine.result)
                };
                transcript.push(Arc::new(assistant(
                    &words("I look", number, WORDS),
                    &wanted(number, name, "{\"page\": 1}".to_owned()),
                )));
                transcript.push(Arc::new(Message::Tool {
                    id: format!("call_{number}"),
                    text: words("result", number, result),
                    reasoning: None,
                    failed: false,
                    artifacts: agentloop::engine::tool::ResultArtifacts::default(),
                }));
            }
            today.wakes += 1;
            now = woken + routine.every;
        }
        today.bytes = transcript.iter().map(|message| text_of(message)).sum();
        all.push(today);
    }
    all
}

fn user(text: String) -> Arc<Message> {
    Arc::new(Message::User { text })
}

fn assistant(text: &str, call: &ToolCall) -> Message {
    let message = json!({"role": "assistant", "text": text, "tool_calls": [call]});
    serde_json::from_value(message).expect("a message")
}

fn text_of(message: &Message) -> usize {
    match message {
        Message::System { text } | Message::User { text } | Message::Tool { text, .. } => text.len(),
        Message::Assistant { text, tool_calls, .. } => {
            let calls = tool_calls
                .iter()
                .map(|call| call.id.len() + call.name.len() + call.arguments.len());
            text.as_ref().map_or(0, String::len) + calls.sum::<usize>()
        }
    }
}
