//! Kubernetes Events: one for each transition that a person may want to know of, never with text of a prompt.
//!
//! The first start of an Agent emits one (`LoopStarted`), after its status is written: an Event is a write too. A pod
//! made again emits `PodCreated`. Events are sent in the background and may be lost; status is the truth.

use std::collections::HashSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder};
use tokio::sync::mpsc;

use super::apply::AppliedPlan;
use super::intent::ReplaceReason;
use crate::api::AgentStatus;
use crate::api::condition::{self, ConditionType};
use crate::api::status::{LoopOutcome, LoopState};

/// Events waiting to be sent; more are dropped.
const QUEUE: usize = 1024;
/// Longest time one may take.
const SEND: Duration = Duration::from_secs(10);

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeEvent {
    /// Whether somebody should look.
    pub warning: bool,
    /// Why.
    pub reason: String,
    /// What was done.
    pub action: &'static str,
    /// In words.
    pub note: String,
}

impl KubeEvent {
    /// Nobody need look.
    pub fn normal(reason: &str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: false,
            reason: reason.into(),
            action,
            note: note.into(),
        }
    }

    /// Somebody should look.
    pub fn warning(reason: &str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: true,
            ..Self::normal(reason, action, note)
        }
    }
}

/// Guardrails whose beginning is an event.
const GUARDRAILS: [ConditionType; 6] = [
    ConditionType::BudgetExhausted,
    ConditionType::ApprovalPending,
    ConditionType::RateLimited,
    ConditionType::TurnLimitReached,
    ConditionType::ErrorLimitReached,
    ConditionType::LinkLost,
];

/// What a written status has to tell. Pure.
pub(super) fn from_status(old: &AgentStatus, new: &AgentStatus) -> Vec<KubeEvent> {
    let mut notices = Vec::new();
    let turned = |type_, status: &str| {
        let now = condition::find(&new.conditions, type_).filter(|now| now.status == status)?;
        let before = condition::find(&old.conditions, type_).is_some_and(|before| before.status == status);
        (!before).then_some(now)
    };
    for type_ in GUARDRAILS {
        if let Some(held) = turned(type_, "True") {
            notices.push(KubeEvent::warning(&held.type_, "Pause", held.message.clone()));
        }
    }
    if let Some(held) = turned(ConditionType::LoopDetected, "True") {
        notices.push(KubeEvent::warning(&held.type_, "Watch", held.message.clone()));
    }
    for (type_, action) in [
        (ConditionType::Accepted, "Validate"),
        (ConditionType::ModelAvailable, "CallModel"),
    ] {
        if let Some(held) = turned(type_, "False") {
            notices.push(KubeEvent::warning(&held.reason, action, held.message.clone()));
        }
    }
    // A matter of course, every day.
    if let Some(held) = turned(ConditionType::OutsideActiveHours, "True") {
        notices.push(KubeEvent::normal(&held.type_, "Pause", held.message.clone()));
    }
    if turned(ConditionType::Suspended, "True").is_some() {
        notices.push(KubeEvent::normal(
            "Suspended",
            "Suspend",
            "spec.suspend was set; the state is kept",
        ));
    }
    let was_suspended = condition::find(&old.conditions, ConditionType::Suspended).is_some_and(|c| c.status == "True");
    if was_suspended && turned(ConditionType::Suspended, "False").is_some() {
        notices.push(KubeEvent::normal("Resumed", "Resume", "spec.suspend was cleared"));
    }
    notices.extend(from_loop(old, new));
    notices
}

fn from_loop(old: &AgentStatus, new: &AgentStatus) -> Option<KubeEvent> {
    let (before, now) = (old.r#loop.as_ref()?, new.r#loop.as_ref()?);
    match (before.outcome, now.outcome) {
        (None, Some(LoopOutcome::Completed)) => {
            let note = "the agent ended its loop itself";
            return Some(KubeEvent::normal(LoopOutcome::Completed.as_ref(), "End", note));
        }
        (None, Some(LoopOutcome::Idle)) => {
            let held = condition::find(&new.conditions, ConditionType::IdleTimeoutReached)?;
            return Some(KubeEvent::warning(&held.type_, "End", held.message.clone()));
        }
        (None, Some(LoopOutcome::Failed)) => {
            let held = condition::find(&new.conditions, ConditionType::LoopDetected);
            let note = held.map_or("", |held| &held.message);
            return Some(KubeEvent::warning(LoopOutcome::Failed.as_ref(), "End", note));
        }
        (Some(_), _) | (None, None) => {}
    }
    let up = matches!(now.state, LoopState::Running | LoopState::Sleeping | LoopState::Paused);
    (before.state == LoopState::Starting && up).then(|| {
        let note = format!("the loop runs in epoch {}", now.epoch);
        KubeEvent::normal("LoopStarted", "Start", note)
    })
}

/// What was done to the pod. Pure.
pub(super) fn from_pod(applied: &AppliedPlan) -> Option<KubeEvent> {
    let epoch = applied.pod.as_ref().map_or(0, |pod| pod.epoch);
    if applied.created && epoch > 1 {
        let note = format!("made the pod of epoch {epoch}");
        return Some(KubeEvent::normal("PodCreated", "Create", note));
    }
    let why = match applied.replaced? {
        ReplaceReason::Outdated => "the spec changed",
        ReplaceReason::Stopped => "its loop had stopped and is to go on",
        ReplaceReason::Ended => "the pod had ended",
        ReplaceReason::Foreign => "it was made for an earlier Agent of this name",
    };
    Some(KubeEvent::normal(
        "PodReplaced",
        "Delete",
        format!("deleted the pod, another follows: {why}"),
    ))
}

/// Where events go in.
#[derive(Clone)]
pub struct EventSink(mpsc::Sender<(KubeEvent, ObjectReference)>);

impl EventSink {
    /// A sink, and what comes out of it.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<(KubeEvent, ObjectReference)>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self(sender), receiver)
    }

    /// Sends in the background; dropped when too many wait.
    pub fn send(&self, notices: impl IntoIterator<Item = KubeEvent>, about: &ObjectReference) {
        for notice in notices {
            if let Err(error) = self.0.try_send((notice, about.clone())) {
                tracing::debug!(%error, "an Event was dropped");
            }
        }
    }
}

/// Publishes what comes out of a sink, one at a time, until the sink is gone.
pub async fn publish(recorder: Recorder, mut queue: mpsc::Receiver<(KubeEvent, ObjectReference)>) {
    let mut warned = HashSet::new();
    while let Some((notice, about)) = queue.recv().await {
        let event = Event {
            type_: if notice.warning {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: notice.reason,
            action: notice.action.into(),
            note: Some(notice.note),
            secondary: None,
        };
        let sent = tokio::time::timeout(SEND, recorder.publish(&event, &about)).await;
        let failure = match sent {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".into(),
        };
        // Said once per cause: what cannot be sent now cannot be sent a thousand times either.
        if warned.len() < 16 && warned.insert(failure.clone()) {
            tracing::warn!(error = failure, "an Event could not be sent");
        }
    }
}
