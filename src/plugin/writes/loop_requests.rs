//! Requests to loops: suspend, continue, wake, stop.

use jiff::Timestamp;
use serde_json::json;

use super::PlannedWrite;
use crate::api::Agent;
use crate::api::annotations::{RESUME, STOP, STOP_NOW, WAKE};
use crate::api::condition::{self, ConditionType, GatewaySign};
use crate::api::pause::PauseReason;
use crate::api::status::{LoopOutcome, LoopState, LoopStatus};
use crate::plugin::failure::PluginError;

/// Suspends an Agent.
#[must_use]
pub fn pause(name: &str, agent: &Agent) -> PlannedWrite {
    if agent.spec.suspend {
        return PlannedWrite {
            patch: None,
            message: format!("{name} is suspended already"),
        };
    }
    PlannedWrite {
        patch: Some(json!({"spec": {"suspend": true}})),
        message: format!("{name} suspended: its pod is deleted, its state is kept"),
    }
}

/// Ends a suspension, and whatever else a resume request ends.
pub fn resume(name: &str, agent: &Agent, now: Timestamp) -> Result<PlannedWrite, PluginError> {
    let held = reasons(agent);
    let ended: Vec<&str> = held
        .iter()
        .filter(|reason| reason.facts().ends_on_resume)
        .map(AsRef::as_ref)
        .chain(outside_the_loop(agent))
        .collect();
    let outcome = loop_of(agent).outcome.filter(|outcome| restarts_on_resume(*outcome));
    if !agent.spec.suspend && ended.is_empty() && outcome.is_none() {
        let others: Vec<&str> = held.iter().map(AsRef::as_ref).collect();
        if others.is_empty() {
            return Ok(PlannedWrite {
                patch: None,
                message: format!("{name} is not paused"),
            });
        }
        return Err(PluginError::Refused(format!(
            "{name} is paused because of {}, which a resume request does not end; see kubectl agentloop explain {name}",
            others.join(", ")
        )));
    }
    let mut patch = json!({});
    let mut done = Vec::new();
    if agent.spec.suspend {
        patch["spec"] = json!({"suspend": false});
        done.push("no longer suspended".to_owned());
    }
    if !ended.is_empty() || outcome.is_some() {
        patch["metadata"] = json!({"annotations": {RESUME: now.to_string()}});
    }
    if let Some(outcome) = outcome {
        done.push(format!("has ended ({outcome}): requested to start again"));
    } else if !ended.is_empty() {
        done.push(format!("requested to end {}", ended.join(", ")));
    }
    Ok(PlannedWrite {
        patch: Some(patch),
        message: format!("{name} {}", done.join("; ")),
    })
}

/// Whether a resume request starts a loop again that has ended so. One that had nothing to do has nothing to resume.
fn restarts_on_resume(outcome: LoopOutcome) -> bool {
    !matches!(outcome, LoopOutcome::Idle | LoopOutcome::ScaledToZero)
}

/// Ends the loop: after the turn that runs, or at once.
pub fn stop(name: &str, agent: &Agent, at_once: bool, now: Timestamp) -> Result<PlannedWrite, PluginError> {
    let state = loop_of(agent);
    match state.outcome {
        Some(LoopOutcome::ScaledToZero) => {
            return Err(PluginError::Refused(format!(
                "{name} has no task and no pod, and its next task starts it again: use kubectl agentloop pause {name}"
            )));
        }
        Some(outcome) => {
            return Ok(PlannedWrite {
                patch: None,
                message: format!("{name} has ended already ({outcome})"),
            });
        }
        None => {}
    }
    let (value, when) = if at_once {
        (format!("{STOP_NOW}{now}"), "now")
    } else if state.state == LoopState::Running {
        (now.to_string(), "after the turn that it is in")
    } else {
        (now.to_string(), "as soon as no turn runs")
    };
    let message = if agent.spec.suspend {
        format!("{name} is suspended: stop requested, which it receives once it is resumed")
    } else {
        format!("{name} ends its loop {when}, until kubectl agentloop wake {name} or a change of its spec")
    };
    Ok(PlannedWrite {
        patch: Some(json!({"metadata": {"annotations": {STOP: value}}})),
        message,
    })
}

/// Ends a sleep, or starts a loop again that has ended.
#[must_use]
pub fn wake(name: &str, agent: &Agent, now: Timestamp) -> PlannedWrite {
    let state = loop_of(agent);
    let message = match (state.outcome, state.state) {
        _ if agent.spec.suspend => {
            format!("{name} is suspended: wake requested, which it receives once it is resumed")
        }
        (Some(outcome), _) => format!("{name} has ended ({outcome}): requested to start again"),
        (None, LoopState::Sleeping) => format!("{name} woken"),
        (None, state) => format!("{name} is {state}: wake requested, which ends only a sleep"),
    };
    PlannedWrite {
        patch: Some(json!({"metadata": {"annotations": {WAKE: now.to_string()}}})),
        message,
    }
}

fn loop_of(agent: &Agent) -> LoopStatus {
    let status = agent.status.as_ref();
    status.and_then(|status| status.r#loop.clone()).unwrap_or_default()
}

/// The reasons of the pause, without the suspension.
fn reasons(agent: &Agent) -> Vec<PauseReason> {
    let mut reasons = loop_of(agent).reasons;
    reasons.retain(|reason| *reason != PauseReason::SuspendedBySpec);
    reasons
}

/// What a resume request ends although it is no reason of the loop: a loop that the controller detected, and a light
/// model that is tried only once a minute.
fn outside_the_loop(agent: &Agent) -> Vec<&'static str> {
    let conditions = agent.status.iter().flat_map(|status| &status.conditions);
    let conditions: Vec<_> = conditions.cloned().collect();
    let holds = |type_, status: &str| condition::find(&conditions, type_).filter(|found| found.status == status);
    let detected = holds(ConditionType::LoopDetected, "True");
    let detected = detected.filter(|found| found.reason.parse::<GatewaySign>().is_ok());
    let light = holds(ConditionType::LightModelAvailable, "False");
    let names = [
        detected.map(|_| "LoopDetected"),
        light.map(|_| "LightModelAvailable=False"),
    ];
    names.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const NOW: &str = "2026-11-22T14:00:00Z";

    fn agent(suspend: bool, status: &Value) -> Agent {
        let object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": {"name": "helper"},
            "spec": {"instructions": "Be brief.", "suspend": suspend, "model": {"api": "Scripted", "name": "small"}},
            "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    fn paused(reasons: &[&str]) -> Value {
        json!({"loop": {"state": "Paused", "reasons": reasons}})
    }

    fn resumed(agent: &Agent) -> Result<Option<Value>, PluginError> {
        resume("helper", agent, NOW.parse().unwrap()).map(|planned| planned.patch)
    }

    #[test]
    fn a_pause_is_a_suspension_once() {
        assert_eq!(
            pause("helper", &agent(false, &json!({}))).patch,
            Some(json!({"spec": {"suspend": true}}))
        );
        assert_eq!(pause("helper", &agent(true, &json!({}))).patch, None);
    }

    #[test]
    fn a_resume_ends_a_suspension_and_what_a_person_ends() {
        let request = json!({"annotations": {RESUME: NOW}});
        assert_eq!(
            resumed(&agent(
                true,
                &json!({"loop": {"state": "Stopped", "reasons": ["SuspendedBySpec"]}})
            ))
            .unwrap(),
            Some(json!({"spec": {"suspend": false}}))
        );
        assert_eq!(
            resumed(&agent(false, &paused(&["ConsecutiveErrors", "RateWindow"]))).unwrap(),
            Some(json!({"metadata": request}))
        );
        assert_eq!(
            resumed(&agent(true, &paused(&["BoundViolated"]))).unwrap(),
            Some(json!({"spec": {"suspend": false}, "metadata": request}))
        );
    }

    #[test]
    fn a_resume_request_is_not_set_where_it_has_no_effect() {
        assert_eq!(
            resumed(&agent(false, &json!({"loop": {"state": "Running"}}))).unwrap(),
            None
        );
        let refused = resumed(&agent(false, &paused(&["BudgetExhausted"])))
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("because of BudgetExhausted, which a resume request does not end"),
            "{refused}"
        );
    }

    #[test]
    fn a_loop_that_the_controller_detected_and_a_light_model_end_on_resume() {
        let condition = |type_: &str, status: &str, reason: &str| {
            json!({"conditions": [{"type": type_, "status": status, "reason": reason, "message": "",
                "lastTransitionTime": NOW}], "loop": {"state": "Running"}})
        };
        for (status, ends) in [
            (condition("LoopDetected", "True", "RepeatedRequest"), true),
            (condition("LoopDetected", "True", "RepeatedCall"), false),
            (condition("LoopDetected", "False", "Inactive"), false),
            (condition("LightModelAvailable", "False", "QuotaExceeded"), true),
        ] {
            assert_eq!(resumed(&agent(false, &status)).unwrap().is_some(), ends, "{status}");
        }
    }

    #[test]
    fn a_stop_request_reports_when_the_loop_ends_and_is_refused_where_it_has_no_effect() {
        let now: Timestamp = NOW.parse().unwrap();
        let stopped = |suspend, status: Value, at_once| stop("helper", &agent(suspend, &status), at_once, now);
        let running = json!({"loop": {"state": "Running"}});
        let planned = stopped(false, running.clone(), false).unwrap();
        assert_eq!(
            planned.patch,
            Some(json!({"metadata": {"annotations": {STOP: "2026-11-22T14:00:00Z"}}}))
        );
        assert_eq!(
            planned.message,
            "helper ends its loop after the turn that it is in, until kubectl agentloop wake helper or a change of its spec"
        );
        let at_once = stopped(false, running, true).unwrap();
        assert_eq!(
            at_once.patch,
            Some(json!({"metadata": {"annotations": {STOP: "now:2026-11-22T14:00:00Z"}}}))
        );
        assert!(
            stopped(true, json!({}), false)
                .unwrap()
                .message
                .contains("is suspended")
        );
        let ended = |outcome: &str| stopped(false, json!({"loop": {"state": "Stopped", "outcome": outcome}}), false);
        assert_eq!(ended("Completed").unwrap().patch, None);
        assert!(ended("ScaledToZero").is_err());
    }

    #[test]
    fn a_resume_request_starts_a_stopped_loop_again_but_not_one_that_had_nothing_to_do() {
        let ended = |outcome: &str| agent(false, &json!({"loop": {"state": "Stopped", "outcome": outcome}}));
        for outcome in ["Cancelled", "Failed", "Completed", "Escalated"] {
            assert_eq!(
                resumed(&ended(outcome)).unwrap(),
                Some(json!({"metadata": {"annotations": {RESUME: NOW}}})),
                "{outcome}"
            );
        }
        for outcome in ["Idle", "ScaledToZero"] {
            assert_eq!(resumed(&ended(outcome)).unwrap(), None, "{outcome}");
        }
    }

    #[test]
    fn a_wake_request_reports_its_effect() {
        let message = |suspend, status: Value| wake("helper", &agent(suspend, &status), NOW.parse().unwrap()).message;
        assert_eq!(message(false, json!({"loop": {"state": "Sleeping"}})), "helper woken");
        assert_eq!(
            message(false, json!({"loop": {"state": "Stopped", "outcome": "Completed"}})),
            "helper has ended (Completed): requested to start again"
        );
        assert_eq!(
            message(false, paused(&["RateWindow"])),
            "helper is Paused: wake requested, which ends only a sleep"
        );
        assert!(message(true, json!({})).contains("suspended"));
    }
}
