//! What the controller and the gateway say to a worker.

use agentloop::engine::Input;
use agentloop::engine::machine::Engine;
use agentloop::link::messages::{Attached, LeaseAnswer, Report};
use agentloop::link::socket::{Session, SocketEvent};
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
        serde_json::to_value(Report::default()).unwrap(),
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
        let _ = serde_json::from_slice::<Attached>(&body);
        let _ = serde_json::from_slice::<LeaseAnswer>(&body);
        let _ = serde_json::from_slice::<Report>(&body);
        let now = Timestamp::UNIX_EPOCH;
        let mut engine = Engine::new(settings());
        if let Ok(session) = serde_json::from_slice::<Session>(&body) {
            engine.handle(now, started(session.epoch));
        }
        if let Ok(event) = serde_json::from_slice::<SocketEvent>(&body) {
            engine.handle(now, started(1));
            engine.handle(
                now,
                Input::BudgetChanged {
                    budget: budget::of(&event.directives),
                },
            );
            engine.handle(now, Input::Timer);
        }
    });
}
