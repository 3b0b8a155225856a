//! Decides everything that a reconcile changes, from what was observed. Pure.
//!
//! The plan names all effects, also the changes of the reconciler's memory. What only the answers of the API server
//! show, `apply` returns as data; [`ReconcilePlan::recheck_after`] and the status follow from both.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use super::apply::{AppliedPlan, PodObstacle};
use super::claims::{ClaimState, VolumeClaim};
use super::context::ReconcilerSettings;
use super::gateway_loop_detection::LoopFinding;
use super::intent::{Intent, PodSituation, ReplaceReason};
use super::manifest;
use super::observe::{NodeState, ObservedAgent};
use super::reconcile_state::{CreationBackoff, MemoryChange};
use super::snapshot::AgentSnapshot;
use super::validate::{AgentReferences, InvalidAgent, reported_budget_problem, validate};
use super::{gateway_loop_detection, liveness, requests, totals};
use crate::api::failure::CallFailure;
use crate::api::{Agent, AgentStatus};
use crate::controller::pod_sessions::LivePod;
use crate::controller::runtime::backoff::{self, until};
use crate::controller::runtime::pod_state::PodReason;
use crate::link::messages::{Directives, LoopTotals};
use crate::link::sensor_messages::SensorReport;

/// Interval between checks of an obstacle that is not watched.
const OBSTACLE_RECHECK: Duration = Duration::from_secs(30);

/// The action on the pod.
#[derive(Debug, PartialEq)]
pub(super) enum PodStep {
    Nothing,
    /// Create this pod.
    Create(Box<Pod>),
    /// Delete the pod with this UID.
    Delete {
        /// Precondition of the deletion.
        uid: String,
        /// Grace period 0: its node is gone, so nothing there could confirm the termination.
        force: bool,
        /// Why it is replaced; `None`: it is not.
        replaces: Option<ReplaceReason>,
    },
}

/// The pod that may attach to the link, with its [`Directives`].
#[derive(Debug, PartialEq)]
pub(super) struct LinkGrant {
    pub(super) pod: LivePod,
    /// Totals of the loop, so that a new pod continues from them.
    pub(super) known: LoopTotals,
    pub(super) directives: Directives,
}

#[derive(Debug)]
pub(super) struct ReconcilePlan<'a> {
    pub(super) intent: Intent,
    /// Whether the spec, what it refers to and its limits permit a loop.
    pub(super) verdict: Result<(), InvalidAgent>,
    /// The merged totals: written, remembered and just reported.
    pub(super) known: LoopTotals,
    /// A loop detected from the gateway's counters.
    pub(super) finding: Option<LoopFinding>,
    /// What the pod reported about Sensors, to pass on.
    pub(super) reported: Option<&'a [SensorReport]>,
    /// Why the gateway must make no calls; `None`: it may.
    pub(super) block: Option<CallFailure>,
    /// No contact with the running pod for the whole run lease.
    pub(super) silent: bool,
    pub(super) pod: PodStep,
    /// The claims to create.
    pub(super) claims: Vec<PersistentVolumeClaim>,
    /// What prevents the pod from being created, from starting or from being deleted.
    pub(super) obstacle: Option<PodObstacle>,
    /// The pod that may attach; `None`: no pod.
    pub(super) link_grant: Option<LinkGrant>,
    pub(super) memory: MemoryChange,
    /// The claims that were found to be usable.
    pub(super) usable_claims: Vec<String>,
    /// When the next pod may be created, if this plan's pod fails.
    pub(super) backoff: CreationBackoff,
    /// When to reconcile again even if nothing watched changes.
    recheck: PlannedRecheck,
}

/// The parts of [`ReconcilePlan::recheck_after`] that are known before the plan is carried out.
#[derive(Debug)]
struct PlannedRecheck {
    now: Timestamp,
    /// Until references that cannot be used are read again.
    references: Option<Duration>,
    /// The time before which no pod may be created, as remembered.
    no_pod_before: Option<Timestamp>,
    /// Until a claim that cannot be used is read again.
    claim: Duration,
    /// Follows from the intent.
    intent: Option<Duration>,
}

/// Computes the plan. `intent` is the result of [`PodSituation::intent`] for the same snapshot.
pub(super) fn decide<'a>(
    agent: &Agent,
    intent: Intent,
    observed: &'a ObservedAgent,
    settings: &ReconcilerSettings,
) -> ReconcilePlan<'a> {
    let snapshot = &observed.snapshot;
    let (status, memory) = (snapshot.status(), &snapshot.memory);
    let situation = PodSituation {
        agent,
        snapshot,
        settings,
    };
    let verdict = verdict(agent, observed, settings);
    let claim_obstacle = observed.claims.iter().find_map(claim_obstacle);
    let pod = match (&claim_obstacle, intent, &snapshot.pod) {
        (Some(_), Intent::Create, _) => PodStep::Nothing,
        // The pod has no node yet. Delete it before it starts on the claim of another Agent.
        (Some(_), Intent::Keep | Intent::KeepOutdated(_), Some(pod)) => PodStep::Delete {
            uid: pod.uid.clone(),
            force: false,
            replaces: None,
        },
        _ => pod_step(&situation, intent, observed, verdict.is_ok()),
    };
    // Claims are created together with their pod, or for a pod that already waits for them, and never for no pod.
    let wanted = matches!(pod, PodStep::Create(_)) || matches!(pod, PodStep::Nothing) && snapshot.pod.is_some();
    let in_state = |state: ClaimState| observed.claims.iter().filter(move |claim| claim.standing == state);
    let claims = if wanted && claim_obstacle.is_none() {
        let absent = in_state(ClaimState::Absent);
        absent.map(|claim| claim.wanted.clone()).collect()
    } else {
        Vec::new()
    };
    let known = known_totals(snapshot);
    let report = snapshot.report.as_ref().and_then(|report| report.report.loop_.as_ref());
    let finding = gateway_loop_detection::detect(agent, status, snapshot.report.as_ref(), &snapshot.windows);
    let link_grant = link_grant(agent, snapshot, &known);
    let silent = link_grant.is_some() && is_silent(snapshot);
    let memory_change = memory_change(agent, observed, verdict.is_ok(), &known, link_grant.as_ref(), silent);
    ReconcilePlan {
        intent,
        recheck: planned_recheck(agent, intent, observed, &verdict, &memory_change),
        verdict,
        reported: report.map(|report| report.sensors.as_slice()),
        block: gateway_loop_detection::call_block(agent, finding.as_ref()),
        finding,
        silent,
        pod,
        claims,
        obstacle: claim_obstacle.or_else(|| standing_obstacle(&situation, intent, observed)),
        link_grant,
        known,
        usable_claims: in_state(ClaimState::Ours).map(VolumeClaim::name).collect(),
        backoff: memory.next_backoff(snapshot.now),
        memory: memory_change,
    }
}

fn verdict(agent: &Agent, observed: &ObservedAgent, settings: &ReconcilerSettings) -> Result<(), InvalidAgent> {
    let none = AgentReferences::default();
    validate(agent, observed.references.as_ref().unwrap_or(&none), settings)?;
    match &observed.snapshot.limits {
        Some(limits) => limits.obstacle.clone().map_or(Ok(()), |obstacle| Err(obstacle.into())),
        None => reported_budget_problem(observed.snapshot.status()).map_or(Ok(()), Err),
    }
}

/// The totals with the last report of the pod, or with the final report of a pod that is gone. The report and the
/// deletion may both have arrived since the previous reconcile.
fn known_totals(snapshot: &AgentSnapshot) -> LoopTotals {
    // A pod of an earlier Agent with the same name was never monitored by this one: its report does not count.
    let listening = snapshot.memory.listening.as_ref();
    let monitored = |pod: &LivePod| listening.is_some_and(|(uid, _)| *uid == pod.uid);
    let final_report = snapshot.final_report.as_ref().filter(|(pod, _)| monitored(pod));
    let report = snapshot.report.as_ref().or(final_report.map(|(_, report)| report));
    totals::merge_totals(snapshot.status(), snapshot.memory.known.as_ref(), report)
}

/// Whether the running pod has been silent for the whole run lease. The silence of a new pod is measured from its
/// grant.
fn is_silent(snapshot: &AgentSnapshot) -> bool {
    let running = snapshot.pod.as_ref().filter(|pod| pod.reason == PodReason::Running);
    let listening = snapshot.memory.listening.as_ref();
    listening.is_some_and(|(uid, since)| {
        running.is_some_and(|pod| pod.uid == *uid) && liveness::is_silent(snapshot.last_contact, *since, snapshot.now)
    })
}

/// The obstacle that a claim is to the pod, if it must not be used.
pub(super) fn claim_obstacle(claim: &VolumeClaim) -> Option<PodObstacle> {
    match claim.standing {
        ClaimState::Absent | ClaimState::Ours => None,
        ClaimState::Ending => Some(PodObstacle::ClaimEnding(claim.name())),
        ClaimState::Foreign => Some(PodObstacle::ClaimForeign(claim.name())),
    }
}

/// The obstacle that still applies while nothing new is attempted.
fn standing_obstacle(situation: &PodSituation<'_>, intent: Intent, observed: &ObservedAgent) -> Option<PodObstacle> {
    if matches!(intent, Intent::CreateLater(_)) {
        return observed.snapshot.memory.obstacle.clone();
    }
    let is_lost = observed.node == Some(NodeState::Silent) && !situation.is_spent();
    let node = || observed.snapshot.pod.as_ref().and_then(|pod| pod.node.clone());
    is_lost.then(|| PodObstacle::NodeLost(node().unwrap_or_default()))
}

fn pod_step(situation: &PodSituation<'_>, intent: Intent, observed: &ObservedAgent, valid: bool) -> PodStep {
    let replaces = if let Intent::Replace(reason) = intent {
        Some(reason)
    } else {
        None
    };
    let delete = |force| match &observed.snapshot.pod {
        Some(pod) => PodStep::Delete {
            uid: pod.uid.clone(),
            force,
            replaces,
        },
        None => PodStep::Nothing,
    };
    match intent {
        Intent::Create if valid => {
            let epoch = observed.snapshot.next_epoch();
            PodStep::Create(Box::new(manifest::pod(situation.agent, epoch, situation.settings)))
        }
        // A running loop is not stopped for a spec that cannot run.
        Intent::Replace(ReplaceReason::Outdated) if valid => delete(false),
        Intent::Replace(ReplaceReason::Stopped | ReplaceReason::Ended | ReplaceReason::Foreign) | Intent::Remove(_) => {
            delete(false)
        }
        Intent::Ending { overdue: true, .. } if nothing_runs(situation, observed.node) => delete(true),
        Intent::Create
        | Intent::CreateLater(_)
        | Intent::Keep
        | Intent::KeepOutdated(_)
        | Intent::Replace(ReplaceReason::Outdated)
        | Intent::AwaitStop(_)
        | Intent::RecordOutcome
        | Intent::Rest(_)
        | Intent::Ending { .. } => PodStep::Nothing,
    }
}

/// Whether nothing of the terminating pod can still act.
fn nothing_runs(situation: &PodSituation<'_>, node: Option<NodeState>) -> bool {
    match node {
        Some(NodeState::Gone) => true,
        Some(NodeState::Silent) => situation.is_spent(),
        Some(NodeState::There) | None => false,
    }
}

/// The Agent's own pod may attach as long as its object exists: a terminating pod still sends its final totals.
fn link_grant(agent: &Agent, snapshot: &AgentSnapshot, known: &LoopTotals) -> Option<LinkGrant> {
    let pod = snapshot.pod.as_ref()?;
    if pod.owner.as_deref() != agent.metadata.uid.as_deref() || pod.ended {
        return None;
    }
    Some(LinkGrant {
        pod: LivePod {
            uid: pod.uid.clone(),
            epoch: pod.epoch,
        },
        known: known.clone(),
        directives: directives(agent, snapshot.status()),
    })
}

/// What the memory becomes, whatever the requests of the plan result in.
fn memory_change(
    agent: &Agent,
    observed: &ObservedAgent,
    valid: bool,
    known: &LoopTotals,
    grant: Option<&LinkGrant>,
    silent: bool,
) -> MemoryChange {
    let (memory, now) = (&observed.snapshot.memory, observed.snapshot.now);
    let (missing, accepted_generation) = match (valid, observed.references.is_some()) {
        (false, _) => (memory.missing.saturating_add(1), None),
        (true, true) => (0, agent.metadata.generation),
        (true, false) => (memory.missing, memory.accepted_generation),
    };
    let since = |grant: &LinkGrant| match &memory.listening {
        Some((uid, since)) if *uid == grant.pod.uid => *since,
        Some(_) | None => now,
    };
    MemoryChange {
        awaits_watch: observed.snapshot.last.is_ahead_of_watch,
        known: known.clone(),
        missing,
        accepted_generation,
        listening: grant.map(|grant| (grant.pod.uid.clone(), since(grant))),
        silent,
        suspend_asked: match grant {
            Some(grant) => grant.directives.suspend.then(|| memory.suspend_asked.unwrap_or(now)),
            None => memory.suspend_asked,
        },
    }
}

fn planned_recheck(
    agent: &Agent,
    intent: Intent,
    observed: &ObservedAgent,
    verdict: &Result<(), InvalidAgent>,
    change: &MemoryChange,
) -> PlannedRecheck {
    let (memory, now) = (&observed.snapshot.memory, observed.snapshot.now);
    let uid = agent.metadata.uid.as_deref().unwrap_or_default();
    PlannedRecheck {
        now,
        references: (verdict.is_err() && observed.references.is_some())
            .then(|| backoff::REFERENCES.delay(change.missing, uid)),
        no_pod_before: memory.no_pod_before,
        claim: backoff::REFERENCES.delay(memory.claim_looks.saturating_add(1), uid),
        intent: match intent {
            Intent::AwaitStop(moment) | Intent::CreateLater(moment) => Some(until(moment, now)),
            // In case the watch misses the deletion.
            Intent::Ending { .. } | Intent::Replace(_) | Intent::Remove(_) => Some(OBSTACLE_RECHECK),
            Intent::Create | Intent::Keep | Intent::KeepOutdated(_) | Intent::RecordOutcome | Intent::Rest(_) => None,
        },
    }
}

impl ReconcilePlan<'_> {
    /// When to reconcile again even if nothing watched changes, given what came of the plan.
    pub(super) fn recheck_after(&self, applied: &AppliedPlan) -> Option<Duration> {
        let PlannedRecheck {
            now,
            references,
            no_pod_before,
            claim,
            intent,
        } = self.recheck;
        if references.is_some() {
            return references;
        }
        let no_pod_before = if applied.held_back {
            Some(self.backoff.no_pod_before)
        } else {
            no_pod_before
        };
        if let Some(moment) = no_pod_before.filter(|moment| *moment > now && applied.pod.is_none()) {
            return Some(until(moment, now));
        }
        match &applied.obstacle {
            Some(obstacle) if obstacle.is_claim() => Some(claim),
            Some(_) => Some(OBSTACLE_RECHECK),
            None => intent,
        }
    }
}

/// The [`Directives`] for a pod of this Agent that follow from its spec and annotations.
pub(super) fn directives(agent: &Agent, status: &AgentStatus) -> Directives {
    let open = requests::open(agent, status);
    Directives {
        suspend: agent.spec.suspend,
        wake: open.wake,
        resume: open.resume,
        stop: open.stop,
        gate_answers: requests::gate_answers(agent, status),
        // Added by `PodSessions`, from the ledger.
        budget: None,
        // Added by `PodSessions`, from the registry of Sensors.
        sensors: None,
        wake_events: None,
        // Added by `PodSessions`.
        history: false,
        // Added by the link, which knows the subscribers.
        readings: Vec::new(),
    }
}
