//! How long the engine takes for one turn, without I/O: `cargo bench --bench engine`, part of `make bench`.
//!
//! Two loops of the same 20,000 turns: one with a short context, one whose context is always full, since the engine hands
//! the whole prompt to its driver with every call.

use std::time::{Duration, Instant};

use agentloop::api::agent::{ExhaustionPolicy, LoopDetection};
use agentloop::engine::budget::BudgetState;
use agentloop::engine::machine::Engine;
use agentloop::engine::message::{FinishReason, ModelAnswer, ToolCall};
use agentloop::engine::settings::{EngineSettings, ModeSettings};
use agentloop::engine::{EngineEffect, EngineInput, KnownTotals};
use jiff::{SignedDuration, Timestamp};

const TURNS: u32 = 20_000;

#[expect(clippy::print_stdout, reason = "figures go to stdout")]
fn main() {
    for (name, context_tokens) in [("short_context", 4_000), ("context_128k", 128_000)] {
        let mut times = run(context_tokens);
        times.sort_unstable();
        let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6;
        println!("FIGURE engine_turn_{name}_p50 {:.1} us", at(50));
        println!("FIGURE engine_turn_{name}_p99 {:.1} us", at(99));
    }
}

/// Time of each turn: its first timer, its answer, and the snapshot that its two commits need.
fn run(context_tokens: u32) -> Vec<Duration> {
    let mut engine = Engine::new(EngineSettings {
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
        max_result_bytes: 32 * 1024,
        approval_timeout: SignedDuration::from_hours(1),
        defers_approvals: false,
        loop_detection: LoopDetection::default(),
        spec: 0,
        quick_text_turns: 0,
        longest_text_delay: SignedDuration::ZERO,
        light_output_tokens: None,
        light_context_tokens: 0,
    });
    engine.set_instructions("You watch a queue. Yield when it is empty.".to_owned());
    let mut now = Timestamp::UNIX_EPOCH;
    let mut effects = engine.handle(
        now,
        EngineInput::Started {
            agent: String::new(),
            epoch: 1,
            known: KnownTotals::default(),
            budget: BudgetState::default(),
            link_silent: false,
        },
    );
    let mut times = Vec::new();
    for _ in 0..TURNS {
        let mut spent = Duration::ZERO;
        let call = loop {
            if let Some(call) = effects.iter().find_map(call_of) {
                break call;
            }
            now += SignedDuration::from_secs(60);
            let begun = Instant::now();
            effects = engine.handle(now, EngineInput::Timer);
            std::hint::black_box(engine.snapshot());
            spent += begun.elapsed();
        };
        let answer = answer();
        let begun = Instant::now();
        effects = engine.handle(now, EngineInput::Answered { call, answer });
        std::hint::black_box(engine.snapshot());
        times.push(spent + begun.elapsed());
    }
    times
}

fn call_of(effect: &EngineEffect) -> Option<agentloop::engine::CallId> {
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
        cost: None,
    }
}
