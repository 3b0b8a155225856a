//! How long the engine takes for one turn, without I/O: `cargo bench --bench engine`, part of `make bench`.
//!
//! Also a gate from its opening to its answer, and 40 tool calls in one answer.
//!
//! Two loops of the same 20,000 turns: one with a short context, one whose context is always full, since the engine hands
//! the whole prompt to its driver with every call.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use agentloop::api::agent::{ExhaustionPolicy, LoopDetection, StructuredOutput};
use agentloop::engine::budget::BudgetState;
use agentloop::engine::machine::Engine;
use agentloop::engine::message::{FinishReason, ModelAnswer, ToolCall};
use agentloop::engine::settings::{EngineSettings, ModeSettings};
use agentloop::engine::tool::{ResultArtifacts, ToolEffect, ToolOutcome, ToolRunId, ToolSpec, UnknownOutcomePolicy};
use agentloop::engine::{CallId, EngineEffect, EngineGateAnswer, EngineInput, KnownTotals, OpenRequests};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

const TURNS: u32 = 20_000;
const GATES: u32 = 2_000;

#[expect(clippy::print_stdout, reason = "figures go to stdout")]
fn main() {
    for (name, context_tokens) in [("short_context", 4_000), ("context_128k", 128_000)] {
        let mut times = run(context_tokens);
        times.sort_unstable();
        let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6;
        println!("FIGURE engine_turn_{name}_p50 {:.1} us", at(50));
        println!("FIGURE engine_turn_{name}_p99 {:.1} us", at(99));
    }
    for (name, mut times) in [("gate_opened_and_answered", gates()), ("40_tool_calls", many_calls())] {
        times.sort_unstable();
        let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6;
        println!("FIGURE engine_{name}_p50 {:.1} us", at(50));
        println!("FIGURE engine_{name}_p99 {:.1} us", at(99));
    }
}

/// Time of each turn: its first timer, its answer, and the snapshot that its two commits need.
fn run(context_tokens: u32) -> Vec<Duration> {
    let mut bench = LoopBench::new(context_tokens, Vec::new());
    let mut times = Vec::new();
    for _ in 0..TURNS {
        let call = bench.next_call();
        bench.feed(EngineInput::Answered { call, answer: answer() });
        times.push(std::mem::take(&mut bench.spent));
    }
    times
}

/// Time of each gate: the answer of the model whose call opens it, and the answer of a person that sends the run.
fn gates() -> Vec<Duration> {
    let mut bench = LoopBench::new(128_000, vec![tool("bank__pay", true)]);
    let mut times = Vec::new();
    for _ in 0..GATES {
        let call = bench.next_call();
        bench.spent = Duration::ZERO;
        let asked = calls(&["bank__pay"]);
        bench.feed(EngineInput::Answered { call, answer: asked });
        // The call was for a summary.
        let Some(open) = bench.engine.view().gates.into_iter().next() else {
            continue;
        };
        bench.feed(EngineInput::GateAnswered(EngineGateAnswer {
            gate: open.gate.id,
            arguments: open.arguments,
            approved: true,
            by: Some("ann".to_owned()),
        }));
        times.push(bench.spent);
        bench.finish_runs();
        let call = bench.next_call();
        bench.feed(EngineInput::Answered { call, answer: answer() });
    }
    times
}

/// Time of each answer with 40 tool calls, until all have their results.
fn many_calls() -> Vec<Duration> {
    let mut bench = LoopBench::new(128_000, vec![tool("files__read", false)]);
    let mut times = Vec::new();
    for _ in 0..GATES {
        let call = bench.next_call();
        bench.spent = Duration::ZERO;
        let asked = calls(&["files__read"; 40]);
        bench.feed(EngineInput::Answered { call, answer: asked });
        bench.finish_runs();
        times.push(bench.spent);
        let call = bench.next_call();
        bench.feed(EngineInput::Answered { call, answer: answer() });
    }
    times
}

/// A loop, and the time that its engine has spent.
struct LoopBench {
    engine: Engine,
    now: Timestamp,
    effects: Vec<EngineEffect>,
    spent: Duration,
}

impl LoopBench {
    fn new(context_tokens: u32, tools: Vec<ToolSpec>) -> Self {
        let mut engine = Engine::new(settings(context_tokens));
        engine.set_instructions("You watch a queue. Yield when it is empty.".to_owned());
        let now = Timestamp::UNIX_EPOCH;
        engine.handle(
            now,
            EngineInput::ToolsChanged {
                tools,
                silent: Vec::new(),
            },
        );
        let started = EngineInput::Started {
            agent: String::new(),
            epoch: 1,
            known: KnownTotals::default(),
            budget: BudgetState::default(),
            link_silent: false,
            open: OpenRequests::default(),
        };
        let effects = engine.handle(now, started);
        Self {
            engine,
            now,
            effects,
            spent: Duration::ZERO,
        }
    }

    /// One input, and the snapshot that its commit needs.
    fn feed(&mut self, input: EngineInput) {
        let begun = Instant::now();
        self.effects = self.engine.handle(self.now, input);
        std::hint::black_box(self.engine.snapshot());
        self.spent += begun.elapsed();
    }

    /// The next model call, however long the loop waits before it.
    fn next_call(&mut self) -> CallId {
        loop {
            if let Some(call) = self.effects.iter().find_map(call_of) {
                return call;
            }
            self.now += SignedDuration::from_secs(60);
            self.feed(EngineInput::Timer);
        }
    }

    /// Ends the runs under way, and those that follow.
    fn finish_runs(&mut self) {
        let mut runs: VecDeque<ToolRunId> = self.effects.iter().filter_map(run_of).collect();
        while let Some(run) = runs.pop_front() {
            let outcome = ToolOutcome::Done { text: "ok ".repeat(20) };
            self.feed(EngineInput::ToolFinished {
                run,
                outcome,
                artifacts: ResultArtifacts::default(),
            });
            runs.extend(self.effects.iter().filter_map(run_of));
        }
    }
}

fn settings(context_tokens: u32) -> EngineSettings {
    EngineSettings {
        mode: ModeSettings::Continuous,
        min_delay: SignedDuration::from_millis(100),
        max_delay: SignedDuration::from_secs(10),
        max_consecutive_errors: 5,
        max_consecutive_tool_failures: None,
        max_sleep: SignedDuration::from_secs(3600),
        heartbeat: None,
        max_consecutive_turns: 50,
        max_calls_per_turn: 25,
        idle_timeout: SignedDuration::from_secs(600),
        rate_limits: Vec::new(),
        exhaustion_policy: ExhaustionPolicy::Skip,
        active_hours: None,
        context_tokens,
        max_output_tokens: 1_000,
        history_tokens: context_tokens,
        actions_per_minute: 10,
        pre_check: None,
        hot_state: Vec::new(),
        memory_bytes: None,
        max_result_bytes: 32 * 1024,
        image_input: None,
        structured_output: StructuredOutput::Disabled,
        light_structured_output: StructuredOutput::Disabled,
        approval_timeout: SignedDuration::from_hours(1),
        defers_approvals: false,
        // They are called repeatedly.
        loop_detection: LoopDetection {
            exempt_tools: vec!["bank__pay".to_owned(), "files__read".to_owned()],
            ..LoopDetection::default()
        },
        spec: 0,
        quick_text_turns: 0,
        longest_text_delay: SignedDuration::ZERO,
        light_output_tokens: None,
        light_context_tokens: 0,
        toolbox_image: None,
    }
}

fn tool(name: &str, needs_approval: bool) -> ToolSpec {
    ToolSpec {
        name: name.to_owned(),
        description: "A tool.".to_owned(),
        parameters: json!({"type": "object", "properties": {"number": {"type": "integer"}}}),
        effect: ToolEffect::Read,
        idempotent: false,
        timeout: SignedDuration::from_secs(60),
        on_unknown: UnknownOutcomePolicy::TellModel,
        target: String::new(),
        needs_approval,
        needs_approval_after_untrusted: false,
        approval_condition: None,
        trusted: true,
        missing_grant: None,
        definition: None,
    }
}

fn calls(names: &[&str]) -> ModelAnswer {
    let call = |(number, name): (usize, &&str)| ToolCall {
        id: format!("call_{number}"),
        name: (*name).to_owned(),
        arguments: format!(r#"{{"number": {number}}}"#),
    };
    ModelAnswer {
        tool_calls: names.iter().enumerate().map(call).collect(),
        ..answer()
    }
}

fn run_of(effect: &EngineEffect) -> Option<ToolRunId> {
    if let EngineEffect::RunTool(run, _) = effect {
        Some(run.id)
    } else {
        None
    }
}

fn call_of(effect: &EngineEffect) -> Option<CallId> {
    if let EngineEffect::CallModel { call, .. } = effect {
        Some(*call)
    } else {
        None
    }
}

fn answer() -> ModelAnswer {
    ModelAnswer {
        reasoning: None,
        text: Some("The queue holds 3 items; none is older than a minute. ".repeat(4)),
        tool_calls: vec![ToolCall {
            id: "call_1".to_owned(),
            name: "yield".to_owned(),
            arguments: r#"{"sleep": 30, "reason": "nothing to do"}"#.to_owned(),
        }],
        finish: FinishReason::ToolCalls,
        tokens: Some(900),
        input_tokens: None,
        output_tokens: None,
        cost: None,
    }
}
