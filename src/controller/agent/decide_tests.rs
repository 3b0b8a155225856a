//! Tests of the plan: what follows from an observation, without an API server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde_json::json;

use super::apply::{AppliedPlan, PodObstacle};
use super::context::ReconcilerSettings;
use super::decide::{PodStep, ReconcilePlan, decide};
use super::intent::{Intent, PodSituation, RestReason};
use super::observe::{NodeState, ObservedAgent};
use super::reconcile_state::ReconcileStates;
use super::snapshot::{AgentSnapshot, ObservedLimits, ObservedSensors};
use super::status_tests::{now, pod, reported};
use super::validate::InvalidReason;
use crate::api::condition::{ConditionType, condition};
use crate::api::status::{LoopOutcome, LoopState, LoopStatus};
use crate::api::{Agent, NamespacedName};
use crate::controller::budget::assignment::{CallObstacle, CallObstacleReason};
use crate::controller::budget::shares::LimitShares;
use crate::controller::pod_sessions::LivePod;
use crate::controller::policy::PlatformPolicy;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::pod_state::PodReason;
use crate::controller::runtime::status_writer::LastStatus;
use crate::controller::runtime::watched_pod::WatchedPod;
use crate::link::messages::RequestStats;
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

pub(super) fn settings() -> ReconcilerSettings {
    ReconcilerSettings {
        image: "agentloop".into(),
        image_pull_policy: None,
        link_url: "https://link".into(),
        egress: AgentEgress::default(),
        controller_namespace: "system".into(),
        watch_namespaces: Vec::new(),
        gateway_resources: ResourceRequirements::default(),
        worker_resources: ResourceRequirements::default(),
        image_pull_secrets: Vec::new(),
        gateway_environment: Vec::new(),
        otlp_ca_secret: None,
        workers: 1,
        policy: PlatformPolicy::default(),
    }
}

/// An Agent whose pod runs.
struct Situation {
    observed: ObservedAgent,
}

impl Situation {
    fn new() -> Self {
        let key = NamespacedName::new("team-a", "coast");
        let snapshot = AgentSnapshot {
            is_wanted: false,
            now: now(),
            memory: ReconcileStates::default().load(&key, "u", now()),
            last: LastStatus::default(),
            pod: Some(pod(PodReason::Running)),
            watched: None,
            report: Some(reported(LoopState::Running)),
            final_report: None,
            last_contact: None,
            windows: Vec::new(),
            limits: Some(ObservedLimits {
                obstacle: None,
                shares: LimitShares::default(),
            }),
            sensors: ObservedSensors {
                names: BTreeMap::new(),
                problems: Some(Vec::new()),
            },
            others_wait: false,
        };
        Self {
            observed: ObservedAgent {
                snapshot,
                references: None,
                claims: Vec::new(),
                node: None,
            },
        }
    }

    fn snapshot(&mut self) -> &mut AgentSnapshot {
        &mut self.observed.snapshot
    }

    fn plan(&self) -> ReconcilePlan<'_> {
        self.plan_for(Intent::Keep)
    }

    fn plan_for(&self, intent: Intent) -> ReconcilePlan<'_> {
        decide(&agent(), intent, &self.observed, &settings())
    }

    fn plan_at(&mut self, now: Timestamp) -> ReconcilePlan<'_> {
        self.snapshot().now = now;
        self.plan()
    }
}

#[test]
fn the_plan_of_a_healthy_agent_keeps_its_pod_and_its_link() {
    let situation = Situation::new();
    let plan = situation.plan();
    assert_eq!((&plan.pod, &plan.verdict), (&PodStep::Nothing, &Ok(())));
    assert_eq!(plan.link_grant.map(|grant| grant.pod.uid).as_deref(), Some("pod"));
    assert!(plan.block.is_none() && plan.obstacle.is_none() && !plan.silent);
    assert_eq!(plan.reported, Some(&[][..]));
}

#[test]
fn a_loop_scaled_to_zero_is_started_by_a_task_and_an_ended_one_is_not() {
    for (outcome, is_wanted, intent) in [
        (LoopOutcome::ScaledToZero, false, Intent::Rest(RestReason::Completed)),
        (LoopOutcome::ScaledToZero, true, Intent::Create),
        (LoopOutcome::Completed, true, Intent::Rest(RestReason::Completed)),
        (LoopOutcome::Cancelled, true, Intent::Rest(RestReason::Completed)),
    ] {
        let mut situation = Situation::new();
        let snapshot = situation.snapshot();
        (snapshot.pod, snapshot.report, snapshot.is_wanted) = (None, None, is_wanted);
        snapshot.last.status.observed_generation = Some(3);
        snapshot.last.status.r#loop = Some(LoopStatus {
            outcome: Some(outcome),
            ..LoopStatus::default()
        });
        let (agent, settings) = (agent(), settings());
        let found = PodSituation {
            agent: &agent,
            snapshot: &situation.observed.snapshot,
            settings: &settings,
        }
        .intent();
        assert_eq!(found, intent, "{outcome} {is_wanted}");
    }
}

#[test]
fn a_loop_that_has_ended_does_not_start_again_while_a_request_to_stop_is_open() {
    for (annotations, handled, intent) in [
        (json!({"agentloop.dev/wake": "w"}), json!({}), Intent::Create),
        (
            json!({"agentloop.dev/wake": "w", "agentloop.dev/stop": "s"}),
            json!({}),
            Intent::Rest(RestReason::Completed),
        ),
        (
            json!({"agentloop.dev/wake": "w", "agentloop.dev/stop": "s"}),
            json!({"stop": "s"}),
            Intent::Create,
        ),
    ] {
        let mut situation = Situation::new();
        let snapshot = situation.snapshot();
        (snapshot.pod, snapshot.report) = (None, None);
        snapshot.last.status.observed_generation = Some(3);
        snapshot.last.status.last_handled_requests = serde_json::from_value(handled).unwrap();
        snapshot.last.status.r#loop = Some(LoopStatus {
            outcome: Some(LoopOutcome::Completed),
            ..LoopStatus::default()
        });
        let mut agent = agent();
        agent.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        let found = PodSituation {
            agent: &agent,
            snapshot: &situation.observed.snapshot,
            settings: &settings(),
        }
        .intent();
        assert_eq!(found, intent, "{annotations}");
    }
}

#[test]
fn a_suspend_waits_for_a_running_pod_that_a_new_leader_has_not_heard_yet() {
    let mut situation = Situation::new();
    let mut agent = agent();
    agent.spec.suspend = true;
    situation.snapshot().report = None;
    let after = |seconds| now() + SignedDuration::from_secs(seconds);
    let intent_at = |situation: &mut Situation, moment| {
        situation.snapshot().now = moment;
        PodSituation {
            agent: &agent,
            snapshot: &situation.observed.snapshot,
            settings: &settings(),
        }
        .intent()
    };
    let removed = Intent::Remove(RestReason::Suspended);
    // The first look of a leader, and later ones until the pod had time to attach.
    assert_eq!(intent_at(&mut situation, now()), Intent::AwaitStop(after(15)));
    situation.snapshot().memory.listening = Some(("pod".into(), now()));
    assert_eq!(intent_at(&mut situation, after(14)), Intent::AwaitStop(after(15)));
    assert_eq!(intent_at(&mut situation, after(15)), removed);
    // Once it is heard, the grace period of a suspend applies.
    situation.snapshot().last_contact = Some(after(2));
    situation.snapshot().memory.suspend_asked = Some(after(2));
    assert_eq!(intent_at(&mut situation, after(4)), Intent::AwaitStop(after(5)));
    assert_eq!(intent_at(&mut situation, after(5)), removed);
    // What does not run has nothing to report.
    situation.snapshot().last_contact = None;
    situation.snapshot().pod.as_mut().unwrap().reason = PodReason::Starting;
    assert_eq!(intent_at(&mut situation, now()), removed);
}

#[test]
fn a_pod_is_silent_after_its_run_lease_and_only_if_it_may_attach() {
    let mut situation = Situation::new();
    let after = |seconds| now() + SignedDuration::from_secs(seconds);
    situation.snapshot().memory.listening = Some(("pod".into(), now()));
    assert!(!situation.plan_at(after(59)).silent);
    assert!(situation.plan_at(after(60)).silent);
    situation.snapshot().last_contact = Some(after(1));
    assert!(!situation.plan_at(after(60)).silent);
    situation.snapshot().last_contact = None;
    situation.snapshot().memory.listening = Some(("an earlier pod".into(), now()));
    assert!(!situation.plan_at(after(60)).silent);
    situation.snapshot().memory.listening = Some(("pod".into(), now()));
    situation.snapshot().pod.as_mut().unwrap().owner = Some("somebody else".into());
    let plan = situation.plan_at(after(60));
    assert!(plan.link_grant.is_none() && !plan.silent);
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
    situation.snapshot().last.status.conditions = vec![accepted];
    assert_eq!(situation.plan().verdict, Ok(()), "the ledger says that there is none");
    situation.snapshot().limits = None;
    let kept = situation.plan().verdict.unwrap_err();
    assert_eq!((kept.reason, kept.message.as_str()), (reason, "no such budget"));
    situation.snapshot().limits = Some(ObservedLimits {
        obstacle: Some(CallObstacle {
            reason: CallObstacleReason::BudgetRequired,
            message: "name a budget".into(),
        }),
        shares: LimitShares::default(),
    });
    let refused = situation.plan().verdict.unwrap_err();
    assert_eq!(refused.reason, InvalidReason::BudgetRequired);
}

#[test]
fn a_detected_loop_blocks_the_calls_of_the_pod() {
    let mut situation = Situation::new();
    let report = &mut situation.snapshot().report.as_mut().unwrap().report;
    report.pulse = Some(RequestStats {
        identical: 20,
        hash: "00ff".into(),
        tokens: 1,
    });
    let plan = situation.plan();
    let message = plan.block.map(|block| block.message).unwrap();
    assert!(message.contains("hash 00ff"), "{message}");
}

#[test]
fn the_final_report_of_a_monitored_pod_counts_and_that_of_an_earlier_agents_pod_does_not() {
    let mut situation = Situation::new();
    let mut last = reported(LoopState::Stopped);
    last.report.usage.calls = 7;
    let gone = LivePod {
        uid: "gone".into(),
        epoch: 1,
    };
    let snapshot = situation.snapshot();
    (snapshot.pod, snapshot.report) = (None, None);
    snapshot.final_report = Some((gone, last));
    assert_eq!(situation.plan().known.usage.calls, 0);
    situation.snapshot().memory.listening = Some(("gone".into(), now()));
    let plan = situation.plan();
    assert_eq!(plan.known.usage.calls, 7);
    let mut memory = situation.observed.snapshot.memory.clone();
    memory.record_plan(&plan.memory);
    assert_eq!(
        memory.known.map(|known| known.usage.calls),
        Some(7),
        "the session ends with this plan"
    );
    assert_eq!(memory.listening, None);
}

#[test]
fn a_pod_on_an_unresponsive_node_is_an_obstacle_until_it_cannot_act() {
    let mut situation = Situation::new();
    situation.observed.node = Some(NodeState::Silent);
    let snapshot = situation.snapshot();
    snapshot.pod.as_mut().unwrap().node = Some("n".into());
    snapshot.memory.listening = Some(("pod".into(), now()));
    let overdue = Intent::Ending {
        rest: None,
        overdue: true,
    };
    let plan = situation.plan_for(overdue);
    assert_eq!(plan.pod, PodStep::Nothing);
    assert_eq!(plan.obstacle, Some(PodObstacle::NodeLost("n".into())));
    let mut ephemeral = agent();
    ephemeral.spec.storage.ephemeral = true;
    situation.snapshot().now = now() + SignedDuration::from_hours(2);
    let plan = decide(&ephemeral, overdue, &situation.observed, &settings());
    assert!(
        matches!(plan.pod, PodStep::Delete { force: true, .. }),
        "{:?}",
        plan.pod
    );
    assert_eq!(plan.obstacle, None);
}

#[test]
fn a_pod_that_is_rejected_again_waits_longer_and_one_that_runs_resets_the_wait() {
    let mut situation = Situation::new();
    let rejected = AppliedPlan {
        obstacle: Some(PodObstacle::Refused("quota".into())),
        held_back: true,
        ..AppliedPlan::default()
    };
    let mut waits = Vec::new();
    for _ in 0..2 {
        let plan = situation.plan_for(Intent::Create);
        waits.push(plan.recheck_after(&rejected).unwrap());
        let mut memory = situation.observed.snapshot.memory.clone();
        memory.record_applied(&plan, &rejected);
        situation.snapshot().memory = memory;
    }
    assert!(waits[1] > waits[0], "{waits:?}");
    assert_eq!(situation.snapshot().memory.failed_pods, 2);
    let plan = situation.plan();
    let runs = AppliedPlan {
        pod: Some(pod(PodReason::Running)),
        ..AppliedPlan::default()
    };
    assert_eq!(plan.recheck_after(&runs), None);
    let mut memory = situation.observed.snapshot.memory.clone();
    memory.record_applied(&plan, &runs);
    assert_eq!((memory.failed_pods, memory.obstacle), (0, None));
}

#[test]
fn objects_applied_before_a_failed_request_are_remembered() {
    let situation = Situation::new();
    let plan = situation.plan_for(Intent::Create);
    let created: WatchedPod = serde_json::from_value(json!({"metadata": {"name": "coast", "uid": "new"}})).unwrap();
    let failed = AppliedPlan {
        created: Some(Arc::new(created)),
        made_claims: vec!["coast-state".into()],
        failure: Some(ReconcileError::Timeout {
            action: "create a volume claim",
            limit: Duration::from_secs(1),
        }),
        ..AppliedPlan::default()
    };
    let mut memory = situation.observed.snapshot.memory.clone();
    memory.record_applied(&plan, &failed);
    assert!(memory.created.is_some() && memory.known_claims.contains("coast-state"));
    let mut memory = situation.observed.snapshot.memory.clone();
    memory.seen_pod = Some("new".into());
    memory.record_applied(&plan, &failed);
    assert!(memory.created.is_none(), "the watch was faster");
}
