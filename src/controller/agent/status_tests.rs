//! Tests of the computed status: a table of situations, and invariants that hold for every combination.

mod limits;
mod stops;
mod texts;
mod turns;

use std::collections::BTreeMap;

use jiff::Timestamp;
use strum::IntoEnumIterator;

use super::apply::PodObstacle;
use super::events;
use super::gateway_loop_detection::LoopFinding;
use super::goal_tests;
use super::intent::{Intent, ReplaceReason, RestReason};
use super::status::{AgentStatusInput, compute};
use super::totals;
use super::validate::{InvalidAgent, InvalidReason};
use crate::api::agent::DetectionMode;
use crate::api::condition::{ConditionType, GatewaySign, find};
use crate::api::failure::FailureKind;
use crate::api::status::{BudgetShare, LoopOutcome, LoopState, LoopStatus, LoopUsage, PauseReason};
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::shares::LimitShares;
use crate::controller::kstatus::{KstatusVerdict, verdict};
use crate::controller::pod_sessions::ReceivedReport;
use crate::controller::runtime::KubeEvent;
use crate::controller::runtime::pod_state::{PodReason, PodState};
use crate::link::messages::{HeldReason, ModelReport, PodReport};

const GENERATION: Option<i64> = Some(3);

pub(super) fn now() -> Timestamp {
    "2026-11-22T14:00:00Z".parse().unwrap()
}

pub(super) fn agent(suspend: bool) -> Agent {
    let metadata = serde_json::json!({ "name": "coast", "namespace": "team-a", "uid": "u", "generation": 3 });
    let spec = serde_json::json!({ "model": { "api": "Scripted", "name": "demo" }, "suspend": suspend });
    let kind = serde_json::json!({ "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": metadata, "spec": spec });
    serde_json::from_value(kind).unwrap()
}

pub(super) fn pod(reason: PodReason) -> PodState {
    let mut pod = PodState::of(&k8s_openapi::api::core::v1::Pod::default());
    pod.name = "coast".into();
    pod.uid = "pod".into();
    pod.owner = Some("u".into());
    pod.epoch = 2;
    pod.reason = reason;
    pod.message = "as observed".into();
    pod
}

pub(super) fn reported(state: LoopState) -> ReceivedReport {
    let mut report = PodReport::default();
    report.loop_.get_or_insert_default().state = state;
    ReceivedReport { report, at: now() }
}

pub(super) fn held(state: LoopState, reason: PauseReason) -> ReceivedReport {
    let mut last_report = reported(state);
    last_report.report.loop_.as_mut().unwrap().reasons = vec![HeldReason {
        reason,
        until: Some(now() + jiff::SignedDuration::from_mins(5)),
        message: "why".into(),
    }];
    last_report
}

fn failing(kind: FailureKind) -> ReceivedReport {
    let mut last_report = reported(LoopState::Running);
    last_report.report.model = Some(ModelReport {
        failure: Some(kind),
        message: "what to do".into(),
    });
    last_report
}

/// Everything a test may vary; the rest is a running Agent.
#[expect(clippy::struct_excessive_bools, reason = "each varies on its own")]
pub(super) struct Case {
    pub(super) suspend: bool,
    /// The Agent is in mode `Goal`.
    pub(super) goal: bool,
    /// The Agent has a light model.
    pub(super) light: bool,
    pub(super) verdict: Result<(), InvalidAgent>,
    pub(super) intent: Intent,
    pub(super) pod: Option<PodState>,
    pub(super) last_report: Option<ReceivedReport>,
    pub(super) obstacle: Option<PodObstacle>,
    pub(super) silent: bool,
    pub(super) finding: Option<LoopFinding>,
    pub(super) enforce: bool,
    pub(super) shares: LimitShares,
    pub(super) sensors: BTreeMap<String, String>,
    pub(super) sensor_problems: Option<Vec<(String, String)>>,
    pub(super) old: AgentStatus,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            suspend: false,
            goal: false,
            light: false,
            verdict: Ok(()),
            intent: Intent::Keep,
            pod: Some(pod(PodReason::Running)),
            last_report: Some(reported(LoopState::Running)),
            obstacle: None,
            silent: false,
            finding: None,
            enforce: false,
            shares: LimitShares::default(),
            sensors: BTreeMap::new(),
            sensor_problems: Some(Vec::new()),
            old: AgentStatus::default(),
        }
    }
}

impl Case {
    pub(super) fn status(&self) -> AgentStatus {
        let mut agent = if self.goal {
            goal_tests::goal_agent()
        } else {
            agent(self.suspend)
        };
        agent.spec.light_model = self.light.then(|| agent.spec.model.clone());
        let detection = &mut agent.spec.guardrails.loop_detection;
        detection.mode = if self.enforce {
            DetectionMode::Enforce
        } else {
            DetectionMode::Warn
        };
        self.status_of(&agent)
    }

    /// The status of this Agent in the same situation.
    pub(super) fn status_of(&self, agent: &Agent) -> AgentStatus {
        compute(&AgentStatusInput {
            agent,
            old: &self.old,
            verdict: &self.verdict,
            looked: true,
            intent: self.intent,
            pod: self.pod.as_ref(),
            last_report: self.last_report.as_ref(),
            known: &totals::merge_totals(&self.old, None, self.last_report.as_ref()),
            finding: self.finding.as_ref(),
            shares: Some(&self.shares),
            sensors: &self.sensors,
            sensor_problems: self.sensor_problems.as_deref(),
            obstacle: self.obstacle.as_ref(),
            silent: self.silent,
            now: now(),
        })
    }
}

fn invalid(reason: InvalidReason) -> Result<(), InvalidAgent> {
    Err(InvalidAgent {
        reason,
        message: "field and fix".into(),
    })
}

pub(super) fn row(case: &Case, kstatus: KstatusVerdict, state: LoopState, ready: &str) {
    let status = case.status();
    let condition = find(&status.conditions, ConditionType::Ready).unwrap();
    let seen = (
        verdict(status.observed_generation == GENERATION, &status.conditions),
        status.r#loop.as_ref().unwrap().state,
        condition.reason.as_str(),
    );
    assert_eq!(seen, (kstatus, state, ready), "{:#?}", status.conditions);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn each_situation_of_the_contract_has_its_verdict() {
    use LoopState::{Paused, Running, Sleeping, Starting, Stopped, Stopping};
    let of = |last_report| Case {
        last_report: Some(last_report),
        ..Case::default()
    };
    row(&Case::default(), KstatusVerdict::Current, Running, "LoopRunning");
    let sleeping = of(reported(Sleeping));
    row(&sleeping, KstatusVerdict::Current, Sleeping, "LoopRunning");
    for reason in [
        PauseReason::ActionsPerMinute,
        PauseReason::RateWindow,
        PauseReason::ProviderRateLimit,
    ] {
        row(
            &of(held(Paused, reason)),
            KstatusVerdict::Current,
            Paused,
            "RateLimited",
        );
    }
    let turns = held(Sleeping, PauseReason::MaxConsecutiveTurns);
    row(&of(turns), KstatusVerdict::Current, Sleeping, "TurnLimitReached");
    let closed = held(Paused, PauseReason::OutsideActiveHours);
    row(&of(closed), KstatusVerdict::Current, Paused, "OutsideActiveHours");
    let tools = held(Paused, PauseReason::ConsecutiveToolFailures);
    row(&of(tools), KstatusVerdict::Current, Paused, "ToolFailureLimitReached");
    for reason in [
        PauseReason::ConsecutiveErrors,
        PauseReason::CrashLoop,
        PauseReason::ModelRefused,
    ] {
        row(
            &of(held(Paused, reason)),
            KstatusVerdict::Current,
            Paused,
            "ErrorLimitReached",
        );
    }
    row(
        &of(held(Paused, PauseReason::LinkLost)),
        KstatusVerdict::InProgress,
        Paused,
        "LinkLost",
    );
    let away = held(Paused, PauseReason::ModelUnreachable);
    row(&of(away), KstatusVerdict::InProgress, Paused, "Unreachable");
    for reason in [PauseReason::AuthenticationFailed, PauseReason::QuotaExceeded] {
        row(
            &of(held(Paused, reason)),
            KstatusVerdict::Failed,
            Paused,
            reason.as_ref(),
        );
    }
    for kind in [FailureKind::AuthenticationFailed, FailureKind::QuotaExceeded] {
        row(&of(failing(kind)), KstatusVerdict::Failed, Running, kind.as_ref());
    }
    for kind in [FailureKind::Unreachable, FailureKind::Timeout, FailureKind::BadResponse] {
        row(&of(failing(kind)), KstatusVerdict::InProgress, Running, kind.as_ref());
    }
    row(
        &of(failing(FailureKind::Cancelled)),
        KstatusVerdict::Current,
        Running,
        "LoopRunning",
    );
    let silent = Case {
        silent: true,
        ..Case::default()
    };
    row(&silent, KstatusVerdict::InProgress, Paused, "LinkLost");
    for (enforce, kstatus, ready) in [
        (false, KstatusVerdict::Current, "LoopRunning"),
        (true, KstatusVerdict::Failed, "LoopDetected"),
    ] {
        let looping = Case {
            finding: Some(LoopFinding {
                sign: GatewaySign::RepeatedRequest,
                message: "what was seen".into(),
            }),
            enforce,
            ..Case::default()
        };
        row(&looping, kstatus, Running, ready);
        let status = looping.status();
        let detected = find(&status.conditions, ConditionType::LoopDetected).unwrap();
        assert_eq!(
            (detected.status.as_str(), detected.reason.as_str()),
            ("True", "RepeatedRequest")
        );
    }
    let resting = |rest, pod| Case {
        suspend: rest == RestReason::Suspended,
        intent: Intent::Rest(rest),
        pod,
        last_report: None,
        ..Case::default()
    };
    row(
        &resting(RestReason::Suspended, None),
        KstatusVerdict::Current,
        Stopped,
        "SuspendedBySpec",
    );
    row(
        &resting(RestReason::Completed, None),
        KstatusVerdict::Current,
        Stopped,
        "Completed",
    );
    let stopping = resting(RestReason::Suspended, Some(pod(PodReason::Absent)));
    row(&stopping, KstatusVerdict::InProgress, Stopping, "SuspendedBySpec");
    let waiting = Case {
        intent: Intent::KeepOutdated(true),
        ..Case::default()
    };
    row(&waiting, KstatusVerdict::InProgress, Running, "UpdatePending");
    let by_hand = Case {
        intent: Intent::KeepOutdated(false),
        ..Case::default()
    };
    row(&by_hand, KstatusVerdict::Current, Running, "LoopRunning");
    for reason in InvalidReason::iter() {
        let case = Case {
            verdict: invalid(reason),
            intent: Intent::Create,
            pod: None,
            last_report: None,
            ..Case::default()
        };
        row(&case, KstatusVerdict::Failed, Stopped, reason.as_ref());
    }
    for reason in [
        PodReason::Unschedulable,
        PodReason::ImagePullFailed,
        PodReason::CrashLooping,
    ] {
        let case = Case {
            pod: Some(pod(reason)),
            last_report: None,
            ..Case::default()
        };
        row(&case, KstatusVerdict::InProgress, Starting, reason.as_ref());
    }
    let lost = Case {
        intent: Intent::Ending {
            rest: None,
            overdue: true,
        },
        obstacle: Some(PodObstacle::NodeLost("node-1".into())),
        ..Case::default()
    };
    row(&lost, KstatusVerdict::Failed, Stopping, "NodeLost");
}

#[test]
fn a_loop_ended_by_idleness_needs_no_person_and_explains_how_to_start_it() {
    let mut ending = Case::default();
    let report = &mut ending.last_report.as_mut().unwrap().report;
    report.loop_.as_mut().unwrap().outcome = Some(LoopOutcome::Idle);
    ending.intent = Intent::RecordOutcome;
    let old = Case::default().status();
    let ended = ending.status();
    let idle = find(&ended.conditions, ConditionType::IdleTimeoutReached)
        .unwrap()
        .clone();
    assert_eq!((idle.status.as_str(), idle.reason.as_str()), ("True", "IdleTimeout"));
    assert!(
        idle.message.contains("600 s (guardrails.idleTimeoutSeconds)"),
        "{}",
        idle.message
    );
    assert!(idle.message.contains("agentloop.dev/wake"), "{}", idle.message);
    assert_eq!(
        events::from_status(&old, &ended),
        [KubeEvent::warning("IdleTimeoutReached", "End", idle.message.clone())]
    );
    let mut resting = Case {
        intent: Intent::Rest(RestReason::Completed),
        pod: None,
        last_report: None,
        old: ended,
        ..Case::default()
    };
    row(
        &resting,
        KstatusVerdict::Current,
        LoopState::Stopped,
        "IdleTimeoutReached",
    );
    assert_eq!(resting.status().summary.unwrap().reason.as_deref(), Some("Idle"));
    resting.intent = Intent::Create;
    let again = resting.status();
    assert_eq!(
        find(&again.conditions, ConditionType::IdleTimeoutReached)
            .unwrap()
            .status,
        "False"
    );
}

#[test]
fn every_combination_keeps_the_rules_of_conditions() {
    let intents = [
        Intent::Create,
        Intent::CreateLater(now()),
        Intent::Keep,
        Intent::KeepOutdated(true),
        Intent::Replace(ReplaceReason::Outdated),
        Intent::AwaitStop(now()),
        Intent::RecordOutcome,
        Intent::Remove(RestReason::Completed),
        Intent::Rest(RestReason::Suspended),
    ];
    let obstacles = [
        None,
        Some(PodObstacle::Foreign),
        Some(PodObstacle::Refused("quota".into())),
        Some(PodObstacle::NodeLost("n".into())),
        Some(PodObstacle::ClaimEnding("c".into())),
        Some(PodObstacle::ClaimForeign("c".into())),
    ];
    let mut seen = std::collections::BTreeSet::new();
    for intent in intents {
        for obstacle in &obstacles {
            for reason in PodReason::iter() {
                for kind in FailureKind::iter().map(Some).chain([None]) {
                    for held_reason in PauseReason::iter() {
                        let mut last_report = held(LoopState::Paused, held_reason);
                        last_report.report.model = kind.map(|kind| failing(kind).report.model.unwrap());
                        let case = Case {
                            intent,
                            obstacle: obstacle.clone(),
                            pod: Some(pod(reason)),
                            last_report: Some(last_report),
                            ..Case::default()
                        };
                        seen.insert(rules(&case.status()));
                    }
                }
            }
        }
    }
    assert_eq!(seen.len(), 3, "all verdicts occur");
}

#[test]
fn a_rejected_key_of_the_light_model_is_stalled_with_its_field_and_cleared_by_the_next_answer() {
    let mut case = Case {
        light: true,
        ..Case::default()
    };
    assert!(find(&case.status().conditions, ConditionType::Stalled).is_none());
    let report = |case: &mut Case, failure: Option<FailureKind>| {
        let loop_ = case.last_report.as_mut().unwrap().report.loop_.as_mut().unwrap();
        loop_.light_model = failure.map(|kind| ModelReport {
            failure: Some(kind),
            message: "check the key that spec.lightModel.apiKeySecretRef names".into(),
        });
    };
    report(&mut case, Some(FailureKind::AuthenticationFailed));
    let status = case.status();
    let light = find(&status.conditions, ConditionType::LightModelAvailable).unwrap();
    assert_eq!((&*light.status, &*light.reason), ("False", "AuthenticationFailed"));
    assert!(
        light.message.contains("spec.lightModel.apiKeySecretRef"),
        "{}",
        light.message
    );
    let stalled = find(&status.conditions, ConditionType::Stalled).unwrap();
    assert_eq!(stalled.reason, "AuthenticationFailed");
    assert_eq!(
        status.r#loop.as_ref().unwrap().state,
        LoopState::Running,
        "nothing holds the loop"
    );
    rules(&status);

    case.old = status;
    case.last_report = None;
    let silent = case.status();
    assert!(find(&silent.conditions, ConditionType::LightModelAvailable).is_some());
    case.last_report = Some(reported(LoopState::Running));
    report(&mut case, None);
    let healed = case.status();
    assert!(find(&healed.conditions, ConditionType::LightModelAvailable).is_none());
    assert!(find(&healed.conditions, ConditionType::Stalled).is_none());
}

fn rules(status: &AgentStatus) -> KstatusVerdict {
    let conditions = &status.conditions;
    let of_others = [
        ConditionType::NearLimit,
        ConditionType::Exhausted,
        ConditionType::Connected,
        ConditionType::Durable,
    ];
    for type_ in ConditionType::iter().filter(|type_| !of_others.contains(type_)) {
        let count = conditions.iter().filter(|c| c.type_ == type_.as_ref()).count();
        // The others appear when they are first True.
        let always = [
            ConditionType::Ready,
            ConditionType::Accepted,
            ConditionType::PodReady,
            ConditionType::ModelAvailable,
            ConditionType::SensorsHealthy,
        ];
        let optional = !always.contains(&type_);
        assert!(count == 1 || optional && count == 0, "{type_:?} occurs {count} times");
    }
    for condition in conditions {
        assert!(
            condition.reason.starts_with(|first: char| first.is_ascii_uppercase()),
            "{condition:?}"
        );
        assert_eq!(condition.observed_generation, GENERATION);
    }
    let has = |type_| find(conditions, type_).is_some();
    let ready = find(conditions, ConditionType::Ready).unwrap().status == "True";
    assert!(!(has(ConditionType::Reconciling) && has(ConditionType::Stalled)));
    assert!(!(ready && has(ConditionType::Stalled)));
    assert!(ready || has(ConditionType::Reconciling) || has(ConditionType::Stalled));
    verdict(status.observed_generation == GENERATION, &status.conditions)
}

#[test]
fn the_same_facts_yield_the_same_status() {
    let first = Case::default().status();
    let again = Case {
        old: first.clone(),
        ..Case::default()
    };
    assert_eq!(again.status(), first);
}

#[test]
fn fields_not_reported_yet_keep_their_status() {
    let mut before = Case {
        last_report: Some(held(LoopState::Paused, PauseReason::ConsecutiveErrors)),
        ..Case::default()
    };
    before.last_report.as_mut().unwrap().report.usage = LoopUsage {
        calls: 7,
        ..LoopUsage::default()
    };
    let written = before.status();
    let after = Case {
        old: written.clone(),
        last_report: None,
        ..Case::default()
    };
    assert_eq!(after.status(), written);
}

#[test]
fn a_transition_time_moves_only_when_the_status_flips() {
    let mut old = Case::default().status();
    for condition in &mut old.conditions {
        condition.last_transition_time.0 = Timestamp::UNIX_EPOCH;
    }
    let failing = Case {
        old,
        last_report: Some(failing(FailureKind::Unreachable)),
        ..Case::default()
    };
    let status = failing.status();
    let moved = |type_| find(&status.conditions, type_).unwrap().last_transition_time.0 == now();
    assert!(moved(ConditionType::Ready) && moved(ConditionType::ModelAvailable) && moved(ConditionType::Reconciling));
    assert!(!moved(ConditionType::PodReady) && !moved(ConditionType::Accepted));
}

#[test]
fn an_outcome_is_kept_while_resting_and_cleared_with_its_request_when_the_loop_starts_again() {
    let old = AgentStatus {
        r#loop: Some(LoopStatus {
            state: LoopState::Stopped,
            outcome: Some(LoopOutcome::Completed),
            epoch: 2,
            ..LoopStatus::default()
        }),
        ..AgentStatus::default()
    };
    let case = |intent| Case {
        old: old.clone(),
        intent,
        pod: None,
        last_report: None,
        ..Case::default()
    };
    let resting = case(Intent::Rest(RestReason::Completed)).status();
    assert_eq!(resting.r#loop.unwrap().outcome, Some(LoopOutcome::Completed));
    let again = case(Intent::Create).status();
    assert_eq!(again.r#loop.unwrap().outcome, None);
}

/// A loop paused by a limit, until a time or permanently.
fn spent(reason: PauseReason, until: Option<Timestamp>) -> ReceivedReport {
    let mut last_report = held(LoopState::Paused, reason);
    let report = last_report.report.loop_.as_mut().unwrap();
    report.reasons[0].until = until;
    report.resumes_at = until;
    last_report
}

#[test]
fn a_spent_limit_pauses_until_its_moment_and_without_one_needs_a_person() {
    let until = Some(now() + jiff::SignedDuration::from_mins(5));
    for reason in [
        PauseReason::BudgetExhausted,
        PauseReason::TokensPerHour,
        PauseReason::TotalTokens,
        PauseReason::TotalCost,
        PauseReason::CallExceedsLimit,
    ] {
        let says = |until, type_| {
            let case = Case {
                last_report: Some(spent(reason, until)),
                ..Case::default()
            };
            let status = case.status();
            let condition = find(&status.conditions, type_).cloned();
            condition.map(|condition| (condition.status, condition.reason))
        };
        let named = |status: &str, reason: &str| Some((status.to_owned(), reason.to_owned()));
        assert_eq!(
            says(until, ConditionType::BudgetExhausted),
            named("True", reason.as_ref())
        );
        assert_eq!(says(until, ConditionType::Ready), named("True", "PausedByBudget"));
        assert_eq!(says(until, ConditionType::Stalled), None);
        assert_eq!(says(None, ConditionType::Ready), named("False", reason.as_ref()));
        assert_eq!(says(None, ConditionType::Stalled), named("True", reason.as_ref()));
    }
}

#[test]
fn an_open_question_waits_by_design_and_a_broken_bound_does_not() {
    let case = Case {
        last_report: Some(spent(PauseReason::BudgetAsk, None)),
        ..Case::default()
    };
    let status = case.status();
    let ready = find(&status.conditions, ConditionType::Ready).unwrap();
    assert_eq!(
        (ready.status.as_str(), ready.reason.as_str()),
        ("True", "AwaitingApproval")
    );
    let asked = find(&status.conditions, ConditionType::ApprovalPending).unwrap();
    assert_eq!((asked.status.as_str(), asked.reason.as_str()), ("True", "BudgetAsk"));
    let case = Case {
        last_report: Some(failing(FailureKind::BoundViolated)),
        ..Case::default()
    };
    let stalled = case.status();
    let stalled = find(&stalled.conditions, ConditionType::Stalled).unwrap();
    assert_eq!(stalled.reason, "BoundViolated");
}

fn share(remaining: i64, exhausted: bool) -> LimitShares {
    LimitShares {
        budgets: vec![BudgetShare {
            name: "team".into(),
            remaining_tokens: Some(remaining),
            remaining_cost_micro_usd: None,
            exhausted,
        }],
        used_percent: Some(100 - remaining),
    }
}

#[test]
fn usage_of_a_budget_by_others_is_shown_with_the_next_change_and_not_before() {
    let first = Case {
        shares: share(90, false),
        ..Case::default()
    };
    let old = first.status();
    assert_eq!(old.summary.clone().unwrap().budget.as_deref(), Some("10%"));
    let mut next = Case {
        shares: share(50, false),
        old: old.clone(),
        ..Case::default()
    };
    assert_eq!(next.status(), old, "only other Agents used it");
    next.last_report = Some(reported(LoopState::Sleeping));
    let changed = next.status();
    assert_eq!(changed.budgets[0].remaining_tokens, Some(50));
    assert_eq!(changed.summary.unwrap().budget.as_deref(), Some("50%"));
    next.last_report = Some(reported(LoopState::Running));
    next.shares = share(0, true);
    assert!(next.status().budgets[0].exhausted, "exhaustion is written at once");
}

#[test]
fn cost_shows_once_there_is_any() {
    let mut case = Case::default();
    assert_eq!(case.status().summary.unwrap().cost, None);
    case.last_report.as_mut().unwrap().report.usage.cost = 7_420_000;
    assert_eq!(case.status().summary.unwrap().cost.as_deref(), Some("$7.42"));
}
