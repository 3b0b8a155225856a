//! What the controller and the gateway send to a worker.

use agentloop::engine::EngineInput;
use agentloop::engine::machine::Engine;
use agentloop::link::messages::{AttachResponse, LeaseResponse, PodReport};
use agentloop::link::socket::{SocketEvent, WorkerSession};
use agentloop::worker::budget;
use jiff::Timestamp;
use serde_json::json;

use super::journal::{settings, started};
use super::mutation::mutated;
use super::rounds;

fn samples() -> Vec<Vec<u8>> {
    let held = json!({"reason": "BudgetExhausted", "until": "2026-01-05T08:00:00Z", "message": "wait"});
    let all = [
        json!({"directives": {"suspend": true, "wake": "a", "resume": "b", "budget": {"revision": 3, "held": [held]}},
            "linkAgeMilliseconds": 12, "fenced": false}),
        serde_json::to_value(SocketEvent::default()).unwrap(),
        serde_json::to_value(PodReport::default()).unwrap(),
        json!({"epoch": 3, "known": {"turn": 7, "toolCalls": 1, "actions": 1}}),
    ];
    all.iter().map(|body| body.to_string().into_bytes()).collect()
}

#[test]
fn no_directive_makes_a_worker_panic() {
    let samples = samples();
    rounds(1, |random| {
        let (one, other) = (&samples[random.index(4)], &samples[random.index(4)]);
        let body = mutated(random, one, other);
        let _ = serde_json::from_slice::<AttachResponse>(&body);
        let _ = serde_json::from_slice::<LeaseResponse>(&body);
        let _ = serde_json::from_slice::<PodReport>(&body);
        let now = Timestamp::UNIX_EPOCH;
        let mut engine = Engine::new(settings());
        if let Ok(session) = serde_json::from_slice::<WorkerSession>(&body) {
            engine.handle(now, started(session.epoch));
        }
        if let Ok(event) = serde_json::from_slice::<SocketEvent>(&body) {
            engine.handle(now, started(1));
            engine.handle(
                now,
                EngineInput::BudgetChanged {
                    budget: budget::from_directives(&event.directives),
                },
            );
            engine.handle(now, EngineInput::Timer);
        }
    });
}
