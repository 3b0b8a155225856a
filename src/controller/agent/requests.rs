//! Requests by annotation: each value is handled once and remembered in status; nothing is removed from the object.

use kube::ResourceExt;

use super::names;
use crate::api::status::HandledRequests;
use crate::api::{Agent, AgentStatus};

/// Requests not handled yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OpenRequests {
    /// Value of the wake annotation.
    pub(super) wake: Option<String>,
    /// Value of the resume annotation.
    pub(super) resume: Option<String>,
}

/// The requests of an Agent that its status does not remember.
pub(super) fn open(agent: &Agent, status: &AgentStatus) -> OpenRequests {
    let handled = status.last_handled_requests.clone().unwrap_or_default();
    let asked = requested(agent);
    OpenRequests {
        wake: asked.wake.filter(|value| handled.wake.as_ref() != Some(value)),
        resume: asked.resume.filter(|value| handled.resume.as_ref() != Some(value)),
    }
}

/// What to remember. A value once handled stays so while it stands in the annotation, whatever an older report says.
pub(super) fn remember(
    agent: &Agent,
    old: Option<&HandledRequests>,
    reported: Option<&HandledRequests>,
    all: bool,
) -> Option<HandledRequests> {
    let asked = requested(agent);
    let old = old.cloned().unwrap_or_default();
    let reported = reported.cloned().unwrap_or_default();
    let one = |asked: Option<String>, old: Option<String>, reported: Option<String>| {
        if asked.is_some() && (all || old == asked) {
            asked
        } else {
            reported.or(old)
        }
    };
    let handled = HandledRequests {
        wake: one(asked.wake, old.wake, reported.wake),
        resume: one(asked.resume, old.resume, reported.resume),
    };
    (handled != HandledRequests::default()).then_some(handled)
}

fn requested(agent: &Agent) -> OpenRequests {
    let value = |key| {
        let value = agent.annotations().get(key).filter(|value| !value.is_empty());
        value.map(|value| value.chars().take(256).collect())
    };
    OpenRequests {
        wake: value(names::WAKE),
        resume: value(names::RESUME),
    }
}
