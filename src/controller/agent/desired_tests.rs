//! Tests of the plan: what follows from an observation, without an API server.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde_json::json;

use super::context::ReconcilerSettings;
use super::desired::{PodStep, ReconcilePlan, desired};
use super::gateway_loop_detection::LoopFinding;
use super::intent::Intent;
use super::observe::{ObservedAgent, ObservedLimits, ObservedSensors};
use super::reconcile_state::{AgentReconcileState, ReconcileStates};
use super::status_tests::{heard, now, pod};
use super::validate::InvalidReason;
use crate::api::condition::{ConditionType, GatewaySign, condition};
use crate::api::status::LoopState;
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::assignment::{CallObstacle, CallObstacleReason};
use crate::controller::budget::shares::LimitShares;
use crate::controller::pod_sessions::AgentKey;
use crate::controller::policy::PlatformPolicy;
use crate::controller::runtime::pod_state::PodReason;
use crate::link::messages::LoopTotals;
use crate::link::pod::AgentEgress;

fn agent() -> Agent {
    serde_json::from_value(json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": { "name": "coast", "namespace": "team-a", "uid": "u", "generation": 3 },
        "spec": {
            "model": { "api": "Scripted", "name": "demo", "scripted": { "configMapKeyRef": { "name": "c", "key": "k" } } },
            "guardrails": { "loopDetection": { "mode": "Enforce" } },
        },
    }))
    .unwrap()
}

fn settings() -> ReconcilerSettings {
    ReconcilerSettings {
        image: "agentloop".into(),
        image_pull_policy: None,
        link_url: "https://link".into(),
        egress: AgentEgress::default(),
        controller_namespace: "system".into(),
        watch_namespaces: Vec::new(),
        gateway_resources: ResourceRequirements::default(),
        worker_resources: ResourceRequirements::default(),
        workers: 1,
        policy: PlatformPolicy::default(),
    }
}

/// An Agent whose pod runs.
struct Situation {
    status: AgentStatus,
    observed: ObservedAgent,
    memory: AgentReconcileState,
}

impl Situation {
    fn new() -> Self {
        let key = AgentKey {
            namespace: "team-a".into(),
            name: "coast".into(),
        };
        Self {
            status: AgentStatus::default(),
            observed: ObservedAgent {
                pod: Some(pod(PodReason::Running)),
                heard: Some(heard(LoopState::Running)),
                intent: Intent::Keep,
                references: None,
                claims: Vec::new(),
                node: None,
                known: LoopTotals::default(),
                finding: None,
                last_contact: None,
                limits: Some(ObservedLimits {
                    obstacle: None,
                    shares: LimitShares::default(),
                }),
                sensors: ObservedSensors {
                    names: BTreeMap::new(),
                    problems: Some(Vec::new()),
                },
            },
            memory: ReconcileStates::default().load(&key, "u", now()),
        }
    }

    fn plan(&self, now: Timestamp) -> ReconcilePlan<'_> {
        desired(&agent(), &self.status, &self.observed, &self.memory, &settings(), now)
    }
}

#[test]
fn the_plan_of_a_healthy_agent_keeps_its_pod_and_its_link() {
    let situation = Situation::new();
    let plan = situation.plan(now());
    assert_eq!((&plan.pod, &plan.verdict), (&PodStep::Nothing, &Ok(())));
    assert_eq!(plan.voice.map(|voice| voice.pod.uid).as_deref(), Some("pod"));
    assert!(plan.block.is_none() && plan.obstacle.is_none() && !plan.silent);
    assert_eq!(plan.reported, Some(&[][..]));
}

#[test]
fn a_pod_is_silent_after_its_run_lease_and_only_if_it_may_attach() {
    let mut situation = Situation::new();
    let after = |seconds| now() + SignedDuration::from_secs(seconds);
    situation.memory.listening = Some(("pod".into(), now()));
    assert!(!situation.plan(after(59)).silent);
    assert!(situation.plan(after(60)).silent);
    situation.observed.last_contact = Some(after(1));
    assert!(!situation.plan(after(60)).silent);
    situation.observed.last_contact = None;
    situation.memory.listening = Some(("an earlier pod".into(), now()));
    assert!(!situation.plan(after(60)).silent);
    situation.memory.listening = Some(("pod".into(), now()));
    situation.observed.pod.as_mut().unwrap().owner = Some("somebody else".into());
    let plan = situation.plan(after(60));
    assert!(plan.voice.is_none() && !plan.silent);
}

#[test]
fn a_reported_problem_of_budgets_is_kept_until_the_budgets_are_listed() {
    let mut situation = Situation::new();
    let reason = InvalidReason::BudgetNotFound;
    let accepted = condition(
        ConditionType::Accepted,
        false,
        reason.as_ref(),
        "no such budget",
        None,
        now(),
    );
    situation.status.conditions = vec![accepted];
    assert_eq!(
        situation.plan(now()).verdict,
        Ok(()),
        "the ledger says that there is none"
    );
    situation.observed.limits = None;
    let kept = situation.plan(now()).verdict.unwrap_err();
    assert_eq!((kept.reason, kept.message.as_str()), (reason, "no such budget"));
    situation.observed.limits = Some(ObservedLimits {
        obstacle: Some(CallObstacle {
            reason: CallObstacleReason::BudgetRequired,
            message: "name a budget".into(),
        }),
        shares: LimitShares::default(),
    });
    let refused = situation.plan(now()).verdict.unwrap_err();
    assert_eq!(refused.reason, InvalidReason::BudgetRequired);
}

#[test]
fn a_detected_loop_blocks_the_calls_of_the_pod() {
    let mut situation = Situation::new();
    situation.observed.finding = Some(LoopFinding {
        sign: GatewaySign::RepeatedRequest,
        message: "the same request".into(),
    });
    let plan = situation.plan(now());
    assert_eq!(
        plan.block.map(|block| block.message).as_deref(),
        Some("the same request")
    );
}
