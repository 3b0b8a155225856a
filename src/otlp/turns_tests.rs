//! Spans of turns: their relations and attributes, over restarts, and what they never contain.

use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use pretty_assertions::assert_eq;

use super::*;
use crate::spans::tests::{agent, attributes};

const TURN: (u16, i64) = (0, 12);

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000 + second).unwrap()
}

/// A turn with a tool run, an approval, a pause and a denied call.
const STORY: &[TurnFact<'_>] = &[
    TurnFact::Started { kind: "task" },
    TurnFact::GateOpened { note: "g1 canary-tool" },
    TurnFact::StateChanged {
        note: "Running -> Paused (ToolCallNeedsApproval)",
    },
    TurnFact::GateResolved {
        note: "g1 approved by canary-user",
    },
    TurnFact::StateChanged {
        note: "Paused (ToolCallNeedsApproval) -> Running",
    },
    TurnFact::RunStarted {
        run: "t12c1r1",
        tool: "files__write",
        effect: "Write",
    },
    TurnFact::RunDenied {
        run: "t12c1r2",
        why: "BadArguments canary-argument",
    },
    TurnFact::RunEnded {
        run: "t12c1r1",
        tool: "files__write",
        call: Some("0000c0100"),
        outcome: "Ok",
    },
    TurnFact::Completed { then: "sleep" },
];

fn tell(tracer: &mut TurnTracer, facts: &[TurnFact<'_>], from: usize) -> Vec<Span> {
    let told = facts.iter().enumerate();
    told.flat_map(|(second, fact)| tracer.observe(TURN, at(i64::try_from(from + second).unwrap()), *fact))
        .collect()
}

#[test]
fn a_turn_is_the_root_of_its_runs_and_waits() {
    let spans = tell(&mut TurnTracer::new(agent()), STORY, 0);
    let seconds = |span: &Span| {
        (
            span.start_time_unix_nano / 1_000_000_000,
            span.end_time_unix_nano / 1_000_000_000,
        )
    };
    let told: Vec<_> = spans.iter().map(|span| (span.name.as_str(), seconds(span))).collect();
    assert_eq!(
        told,
        [
            ("wait_for_approval", (1_001, 1_003)),
            ("wait_paused", (1_002, 1_004)),
            ("execute_tool files__write", (1_005, 1_007)),
            ("invoke_agent watcher", (1_000, 1_008)),
        ]
    );
    let root = spans.last().unwrap();
    assert!(root.parent_span_id.is_empty());
    for span in &spans[..3] {
        assert_eq!((&span.trace_id, &span.parent_span_id), (&root.trace_id, &root.span_id));
    }
    let events: Vec<_> = root.events.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(events, ["state_changed", "state_changed", "tool_denied"]);
}

#[test]
fn a_turn_has_the_attributes_of_the_conventions() {
    let spans = tell(&mut TurnTracer::new(agent()), STORY, 0);
    let expected = [
        ("gen_ai.operation.name", "invoke_agent"),
        ("gen_ai.provider.name", "openai"),
        ("gen_ai.agent.name", "watcher"),
        ("gen_ai.agent.id", "uid"),
        ("gen_ai.request.model", "m"),
        ("k8s.namespace.name", "team-a"),
        ("agentloop.turn", "12"),
        ("agentloop.turn.kind", "task"),
        ("agentloop.turn.outcome", "completed"),
        ("agentloop.turn.then", "sleep"),
    ];
    let of = |name: &str| attributes(&spans.iter().find(|span| span.name == name).unwrap().attributes);
    let text = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        let pairs = pairs.iter();
        pairs.map(|(key, value)| ((*key).into(), (*value).into())).collect()
    };
    assert_eq!(of("invoke_agent watcher"), text(&expected));
    let expected = [
        ("gen_ai.operation.name", "execute_tool"),
        ("gen_ai.tool.name", "files__write"),
        ("gen_ai.tool.type", "function"),
        ("gen_ai.agent.name", "watcher"),
        ("gen_ai.agent.id", "uid"),
        ("agentloop.run", "t12c1r1"),
        ("agentloop.tool.outcome", "Ok"),
        ("gen_ai.tool.call.id", "0000c0100"),
        ("agentloop.tool.effect", "Write"),
    ];
    assert_eq!(of("execute_tool files__write"), text(&expected));
    let expected = [("agentloop.gate", "g1"), ("agentloop.gate.outcome", "approved")];
    assert_eq!(of("wait_for_approval"), text(&expected));
    let expected = [("agentloop.pause.reasons", "ToolCallNeedsApproval")];
    assert_eq!(of("wait_paused"), text(&expected));
}

#[test]
fn notes_are_reduced_to_their_first_word() {
    let spans = tell(&mut TurnTracer::new(agent()), STORY, 0);
    let shown = format!("{spans:?}");
    assert!(shown.contains("BadArguments"));
    assert!(!shown.contains("canary"), "{shown}");
}

#[test]
fn a_tracer_that_receives_the_open_turn_again_ends_the_same_spans() {
    let whole = tell(&mut TurnTracer::new(agent()), STORY, 0);
    for killed_after in 1..STORY.len() {
        let mut before = tell(&mut TurnTracer::new(agent()), &STORY[..killed_after], 0);
        let mut restarted = TurnTracer::new(agent());
        let again = tell(&mut restarted, &STORY[..killed_after], 0);
        assert_eq!(again, before);
        before.extend(tell(&mut restarted, &STORY[killed_after..], killed_after));
        assert_eq!(before, whole, "killed after {killed_after}");
    }
}

#[test]
fn failures_have_their_kind() {
    let mut tracer = TurnTracer::new(agent());
    let facts = [
        TurnFact::Started { kind: "" },
        TurnFact::RunEnded {
            run: "t12c1r1",
            tool: "shell",
            call: None,
            outcome: "Unknown",
        },
        TurnFact::Failed { kind: "Timeout" },
    ];
    let spans = tell(&mut tracer, &facts, 0);
    let kinds: Vec<_> = spans
        .iter()
        .map(|span| {
            let attributes = attributes(&span.attributes);
            let kind = attributes.into_iter().find(|(key, _)| key == "error.type").unwrap().1;
            (kind, span.status.as_ref().unwrap().code())
        })
        .collect();
    assert_eq!(
        kinds,
        [
            ("Unknown".to_owned(), StatusCode::Error),
            ("Timeout".to_owned(), StatusCode::Error)
        ]
    );
}

#[test]
fn a_turn_that_ends_while_paused_ends_its_pause() {
    let facts = [
        TurnFact::Started { kind: "" },
        TurnFact::StateChanged {
            note: "Running -> Paused (BudgetExhausted)",
        },
        TurnFact::Failed { kind: "Cancelled" },
        TurnFact::StateChanged {
            note: "Paused (BudgetExhausted) -> Running",
        },
    ];
    let spans = tell(&mut TurnTracer::new(agent()), &facts, 0);
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["wait_paused", "invoke_agent watcher"]);
}

#[test]
fn memory_is_bounded() {
    let mut tracer = TurnTracer::new(agent());
    tracer.observe(TURN, at(0), TurnFact::Started { kind: "" });
    for number in 0..MAX_EVENTS + 3 {
        let run = format!("t12c1r{number}");
        tracer.observe(
            TURN,
            at(1),
            TurnFact::RunDenied {
                run: &run,
                why: "Hidden",
            },
        );
    }
    for number in 0..=MAX_OPEN {
        let run = format!("t12c2r{number}");
        let started = TurnFact::RunStarted {
            run: &run,
            tool: "x",
            effect: "Read",
        };
        tracer.observe(TURN, at(1), started);
        tracer.observe(TURN, at(1), TurnFact::GateOpened { note: &run });
    }
    assert_eq!((tracer.runs.len(), tracer.gates.len()), (MAX_OPEN, MAX_OPEN));
    let spans = tracer.observe(TURN, at(2), TurnFact::Completed { then: "continue" });
    assert_eq!((spans[0].events.len(), spans[0].dropped_events_count), (MAX_EVENTS, 3));
}
