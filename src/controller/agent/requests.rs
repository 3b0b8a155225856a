//! Requests by annotation. Each value is handled once and recorded in `status.lastHandledRequests`; the annotation is
//! not removed.

use kube::ResourceExt;

use crate::api::status::{Gate, GateKind, HandledRequests};
use crate::api::{Agent, AgentStatus};
use crate::controller::runtime::names;
use crate::link::gate_annotations::{self, AnnotatedAnswer};
use crate::link::messages::GateAnswer;
use crate::support::text::first_chars;

/// Requests that are not handled yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PendingAnnotations {
    /// Value of the annotation `agentloop.dev/wake`.
    pub(super) wake: Option<String>,
    /// Value of the annotation `agentloop.dev/resume`.
    pub(super) resume: Option<String>,
    /// Value of the annotation `agentloop.dev/stop`.
    pub(super) stop: Option<String>,
}

/// Whether a loop has an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoopEnds {
    /// In the status as last written.
    pub(super) before: bool,
    /// In the status that is computed.
    pub(super) now: bool,
}

/// The requests of an Agent that its status does not record as handled.
pub(super) fn open(agent: &Agent, status: &AgentStatus) -> PendingAnnotations {
    let handled = status.last_handled_requests.clone().unwrap_or_default();
    let asked = requested(agent);
    PendingAnnotations {
        wake: asked.wake.filter(|value| handled.wake.as_ref() != Some(value)),
        resume: asked.resume.filter(|value| handled.resume.as_ref() != Some(value)),
        stop: asked.stop.filter(|value| handled.stop.as_ref() != Some(value)),
    }
}

/// What an open gate that does not pause the loop is for.
pub(super) fn gate_message(gate: &Gate) -> String {
    let because_of = gate.untrusted_content_source.as_ref();
    let because_of = because_of.map(|source| format!(", since the model has been shown untrusted content of {source}"));
    let (tool, id, because_of) = (&gate.tool, &gate.id, because_of.unwrap_or_default());
    match gate.kind {
        GateKind::ToolDefinitionsChanged => format!(
            "the tool server {tool} has changed or added tools, which are withheld until a person has approved them; the \
             loop continues without them (gate {id}; the event gate:opened names the tools)"
        ),
        GateKind::ToolCallNeedsApproval => format!("the call of {tool} waits for an approval{because_of} (gate {id})"),
        GateKind::LowConfidence | GateKind::Escalated => {
            format!("the loop waits for an approval to continue towards its goal (gate {id})")
        }
        GateKind::UnknownOutcome => {
            format!("the outcome of a call of {tool} is unknown; repeating it waits for an approval (gate {id})")
        }
    }
}

/// The answers to the open gates. They are handed out until the loop reports that the gate is closed.
pub(super) fn gate_answers(agent: &Agent, status: &AgentStatus) -> Vec<GateAnswer> {
    let answer = |gate: &Gate| {
        let (approved, by) = match gate_annotations::answer(agent.annotations(), &gate.id, &gate.arguments_hash)? {
            AnnotatedAnswer::Approved { by, .. } => (true, Some(by)),
            AnnotatedAnswer::Denied { by, .. } => (false, by),
        };
        Some(GateAnswer {
            id: gate.id.clone(),
            arguments_hash: gate.arguments_hash.clone(),
            approved,
            by,
        })
    };
    status.gates.iter().filter_map(answer).collect()
}

/// The [`HandledRequests`] to record. While a handled value is still in the annotation it stays recorded, so that an
/// older report cannot make it open again. A loop that starts again has done what any request to start it asked for.
///
/// A request to stop stays open until the loop has reported that it is handled: each pod gets it, so it outlives a lost volume
/// and a lost report. If the loop had ended before, there is nothing to stop, and it must not end again when it is started.
/// Requests to start it that are open as well are then recorded too: which came first is not known, and a stop holds until
/// the next of them.
pub(super) fn remember(
    agent: &Agent,
    old: Option<&HandledRequests>,
    reported: Option<&HandledRequests>,
    ends: LoopEnds,
) -> Option<HandledRequests> {
    let asked = requested(agent);
    let old = old.cloned().unwrap_or_default();
    let reported = reported.cloned().unwrap_or_default();
    let one = |asked: Option<String>, old: Option<String>, reported: Option<String>, all: bool| {
        if asked.is_some() && (all || old == asked) {
            asked
        } else {
            reported.or(old)
        }
    };
    let rests = ends.before && ends.now;
    let is_stopped = rests && asked.stop.is_some() && asked.stop != old.stop;
    let all = ends.before && !ends.now || is_stopped;
    let handled = HandledRequests {
        wake: one(asked.wake, old.wake, reported.wake, all),
        resume: one(asked.resume, old.resume, reported.resume, all),
        stop: one(asked.stop, old.stop, reported.stop, rests),
    };
    (handled != HandledRequests::default()).then_some(handled)
}

fn requested(agent: &Agent) -> PendingAnnotations {
    let value = |key| {
        let value = agent.annotations().get(key).filter(|value| !value.is_empty());
        value.map(|value| first_chars(value, 256).to_owned())
    };
    PendingAnnotations {
        wake: value(names::WAKE),
        resume: value(names::RESUME),
        stop: value(names::STOP),
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::link::gate_annotations::{ANSWERS, APPROVE, APPROVED_BY};

    #[test]
    fn answers_of_both_ways_reach_the_pod_with_the_name_of_each_user() {
        let gate = |id: &str| {
            json!({
                "id": id, "kind": "ToolCallNeedsApproval", "tool": "bank__pay", "argumentsHash": "ab",
                "openedAt": "2026-11-22T13:05:00Z", "expiresAt": "2026-11-22T14:05:00Z",
            })
        };
        let answer = |answer: &str, hash: &str, by: &str| json!({"answer": answer, "argumentsHash": hash, "by": by, "at": "2026-11-22T13:06:00Z"});
        let recorded = json!({
            "g1": answer("Approve", "ab", "ann"), "g2": answer("Deny", "ab", "bob"),
            "g4": answer("Approve", "another", "ann"), "closed": answer("Approve", "ab", "ann"),
        });
        let agent: Agent = serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"name": "x", "namespace": "a", "annotations": {
                ANSWERS: recorded.to_string(), APPROVE: "g3:ab", APPROVED_BY: "carl",
            }},
            "spec": {"instructions": "Be brief.", "model": {"api": "Scripted", "name": "small"}},
            "status": {"gates": [gate("g1"), gate("g2"), gate("g3"), gate("g4")]},
        }))
        .unwrap();
        let answers = gate_answers(&agent, agent.status.as_ref().unwrap());
        let seen: Vec<_> = answers
            .iter()
            .map(|answer| (answer.id.as_str(), answer.approved, answer.by.as_deref()))
            .collect();
        assert_eq!(
            seen,
            [
                ("g1", true, Some("ann")),
                ("g2", false, Some("bob")),
                ("g3", true, Some("carl"))
            ]
        );
    }

    /// An Agent with these annotations.
    fn asked(annotations: &[(&str, &str)]) -> Agent {
        let annotations: serde_json::Map<String, serde_json::Value> = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), json!(value)))
            .collect();
        serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"name": "x", "namespace": "a", "annotations": annotations},
            "spec": {"instructions": "Be brief.", "model": {"api": "Scripted", "name": "small"}},
        }))
        .unwrap()
    }

    fn handled(wake: Option<&str>, stop: Option<&str>) -> HandledRequests {
        HandledRequests {
            wake: wake.map(str::to_owned),
            stop: stop.map(str::to_owned),
            ..HandledRequests::default()
        }
    }

    #[rstest]
    #[case::it_runs(None, LoopEnds { before: false, now: false }, None)]
    #[case::it_has_ended_for_this_request(Some("s"), LoopEnds { before: false, now: true }, Some("s"))]
    #[case::it_has_just_ended_for_another_reason(None, LoopEnds { before: false, now: true }, None)]
    #[case::it_had_ended_before(None, LoopEnds { before: true, now: true }, Some("s"))]
    #[case::it_starts_again(None, LoopEnds { before: true, now: false }, None)]
    fn a_stop_stays_open_until_its_end_is_reported_or_there_is_nothing_to_stop(
        #[case] reported: Option<&str>,
        #[case] ends: LoopEnds,
        #[case] recorded: Option<&str>,
    ) {
        let agent = asked(&[(names::STOP, "s")]);
        let found = remember(&agent, None, Some(&handled(None, reported)), ends);
        assert_eq!(found.and_then(|handled| handled.stop).as_deref(), recorded);
    }

    #[test]
    fn a_stop_that_is_requested_with_a_wake_counts_for_both_in_a_loop_that_has_ended() {
        let agent = asked(&[(names::WAKE, "w"), (names::STOP, "s")]);
        let rests = LoopEnds {
            before: true,
            now: true,
        };
        assert_eq!(remember(&agent, None, None, rests), Some(handled(Some("w"), Some("s"))));
        // Not a wake request after the end for an earlier one.
        let old = handled(None, Some("s"));
        assert_eq!(remember(&agent, Some(&old), None, rests), Some(old));
        let ends = LoopEnds {
            before: false,
            now: true,
        };
        // A loop that finds both when it starts reports both. One that ended for the stop before it received the wake request
        // leaves that open: it starts the loop again.
        let both = handled(Some("w"), Some("s"));
        assert_eq!(remember(&agent, None, Some(&both), ends), Some(both));
        let reported = handled(None, Some("s"));
        assert_eq!(remember(&agent, None, Some(&reported), ends), Some(reported));
    }
}
