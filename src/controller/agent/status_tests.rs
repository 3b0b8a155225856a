//! Tests of the status that an Agent should have: rows of API.md, and rules that hold for every combination.

use std::collections::BTreeMap;

use jiff::Timestamp;
use strum::IntoEnumIterator;

use super::apply::Obstacle;
use super::events::{self, Notice};
use super::intent::{Intent, Replace, Rest};
use super::kstatus::{Verdict, verdict};
use super::outside::Finding;
use super::pod_state::{PodReason, PodState};
use super::status::{Facts, compute};
use super::totals;
use super::validate::{Invalid, InvalidReason};
use crate::api::agent::DetectionMode;
use crate::api::condition::{ConditionType, LoopSign, find};
use crate::api::failure::FailureKind;
use crate::api::status::{BudgetShare, LoopState, LoopStatus, Outcome, PauseReason, Usage};
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::shares::Shares;
use crate::controller::loops::Heard;
use crate::link::messages::{HeldReason, LoopReport, ModelReport, Report};

const GENERATION: Option<i64> = Some(3);

pub(super) fn now() -> Timestamp {
    "2026-11-22T14:00:00Z".parse().unwrap()
}

fn agent(suspend: bool) -> Agent {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
        "metadata": { "name": "coast", "namespace": "team-a", "uid": "u", "generation": 3 },
        "spec": { "model": { "api": "Scripted", "name": "demo" }, "suspend": suspend },
    }))
    .unwrap()
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

pub(super) fn heard(state: LoopState) -> Heard {
    Heard {
        report: Report {
            loop_: Some(LoopReport {
                state,
                ..LoopReport::default()
            }),
            ..Report::default()
        },
        at: now(),
    }
}

pub(super) fn held(state: LoopState, reason: PauseReason) -> Heard {
    let mut heard = heard(state);
    heard.report.loop_.as_mut().unwrap().reasons = vec![HeldReason {
        reason,
        until: Some(now() + jiff::SignedDuration::from_mins(5)),
        message: "why".into(),
    }];
    heard
}

fn failing(kind: FailureKind) -> Heard {
    let mut heard = heard(LoopState::Running);
    heard.report.model = Some(ModelReport {
        failure: Some(kind),
        message: "what to do".into(),
    });
    heard
}

/// Everything a test may vary; the rest is a running Agent.
pub(super) struct Case {
    pub(super) suspend: bool,
    pub(super) verdict: Result<(), Invalid>,
    pub(super) intent: Intent,
    pub(super) pod: Option<PodState>,
    pub(super) heard: Option<Heard>,
    pub(super) obstacle: Option<Obstacle>,
    pub(super) silent: bool,
    pub(super) finding: Option<Finding>,
    pub(super) enforce: bool,
    pub(super) shares: Shares,
    pub(super) sensors: BTreeMap<String, String>,
    pub(super) troubles: Option<Vec<(String, String)>>,
    pub(super) old: AgentStatus,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            suspend: false,
            verdict: Ok(()),
            intent: Intent::Keep,
            pod: Some(pod(PodReason::Running)),
            heard: Some(heard(LoopState::Running)),
            obstacle: None,
            silent: false,
            finding: None,
            enforce: false,
            shares: Shares::default(),
            sensors: BTreeMap::new(),
            troubles: Some(Vec::new()),
            old: AgentStatus::default(),
        }
    }
}

impl Case {
    pub(super) fn status(&self) -> AgentStatus {
        let mut agent = agent(self.suspend);
        let detection = &mut agent.spec.guardrails.loop_detection;
        detection.mode = if self.enforce {
            DetectionMode::Enforce
        } else {
            DetectionMode::Warn
        };
        compute(&Facts {
            agent: &agent,
            old: &self.old,
            verdict: &self.verdict,
            looked: true,
            intent: self.intent,
            pod: self.pod.as_ref(),
            heard: self.heard.as_ref(),
            known: &totals::known(&self.old, None, self.heard.as_ref()),
            finding: self.finding.as_ref(),
            shares: Some(&self.shares),
            sensors: &self.sensors,
            troubles: self.troubles.as_deref(),
            obstacle: self.obstacle.as_ref(),
            silent: self.silent,
            now: now(),
        })
    }
}

fn invalid(reason: InvalidReason) -> Result<(), Invalid> {
    Err(Invalid {
        reason,
        message: "field and fix".into(),
    })
}

pub(super) fn row(case: &Case, kstatus: Verdict, state: LoopState, ready: &str) {
    let status = case.status();
    let condition = find(&status.conditions, ConditionType::Ready).unwrap();
    let seen = (
        verdict(GENERATION, &status),
        status.r#loop.as_ref().unwrap().state,
        condition.reason.as_str(),
    );
    assert_eq!(seen, (kstatus, state, ready), "{:#?}", status.conditions);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn each_situation_of_the_contract_has_its_verdict() {
    use LoopState::{Paused, Running, Sleeping, Starting, Stopped, Stopping};
    let of = |heard| Case {
        heard: Some(heard),
        ..Case::default()
    };
    row(&Case::default(), Verdict::Current, Running, "LoopRunning");
    row(&of(heard(Sleeping)), Verdict::Current, Sleeping, "LoopRunning");
    for reason in [
        PauseReason::ActionsPerMinute,
        PauseReason::RateWindow,
        PauseReason::ProviderRateLimit,
    ] {
        row(&of(held(Paused, reason)), Verdict::Current, Paused, "RateLimited");
    }
    let turns = held(Sleeping, PauseReason::MaxConsecutiveTurns);
    row(&of(turns), Verdict::Current, Sleeping, "TurnLimitReached");
    let closed = held(Paused, PauseReason::OutsideActiveHours);
    row(&of(closed), Verdict::Current, Paused, "OutsideActiveHours");
    for reason in [
        PauseReason::ConsecutiveErrors,
        PauseReason::CrashLoop,
        PauseReason::ModelRefused,
    ] {
        row(&of(held(Paused, reason)), Verdict::Current, Paused, "ErrorLimitReached");
    }
    row(
        &of(held(Paused, PauseReason::LinkLost)),
        Verdict::InProgress,
        Paused,
        "LinkLost",
    );
    let away = held(Paused, PauseReason::ModelUnreachable);
    row(&of(away), Verdict::InProgress, Paused, "Unreachable");
    for reason in [PauseReason::AuthenticationFailed, PauseReason::QuotaExceeded] {
        row(&of(held(Paused, reason)), Verdict::Failed, Paused, reason.as_ref());
    }
    for kind in [FailureKind::AuthenticationFailed, FailureKind::QuotaExceeded] {
        row(&of(failing(kind)), Verdict::Failed, Running, kind.as_ref());
    }
    for kind in [FailureKind::Unreachable, FailureKind::Timeout, FailureKind::BadResponse] {
        row(&of(failing(kind)), Verdict::InProgress, Running, kind.as_ref());
    }
    row(
        &of(failing(FailureKind::Cancelled)),
        Verdict::Current,
        Running,
        "LoopRunning",
    );
    let silent = Case {
        silent: true,
        ..Case::default()
    };
    row(&silent, Verdict::InProgress, Paused, "LinkLost");
    for (enforce, kstatus, ready) in [
        (false, Verdict::Current, "LoopRunning"),
        (true, Verdict::Failed, "LoopDetected"),
    ] {
        let looping = Case {
            finding: Some(Finding {
                sign: LoopSign::RepeatedCall,
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
            ("True", "RepeatedCall")
        );
    }
    let resting = |rest, pod| Case {
        suspend: rest == Rest::Suspended,
        intent: Intent::Rest(rest),
        pod,
        heard: None,
        ..Case::default()
    };
    row(
        &resting(Rest::Suspended, None),
        Verdict::Current,
        Stopped,
        "SuspendedBySpec",
    );
    row(&resting(Rest::Completed, None), Verdict::Current, Stopped, "Completed");
    let stopping = resting(Rest::Suspended, Some(pod(PodReason::Absent)));
    row(&stopping, Verdict::InProgress, Stopping, "SuspendedBySpec");
    let waiting = Case {
        intent: Intent::KeepOutdated(true),
        ..Case::default()
    };
    row(&waiting, Verdict::InProgress, Running, "UpdatePending");
    let by_hand = Case {
        intent: Intent::KeepOutdated(false),
        ..Case::default()
    };
    row(&by_hand, Verdict::Current, Running, "LoopRunning");
    for reason in InvalidReason::iter() {
        let case = Case {
            verdict: invalid(reason),
            intent: Intent::Create,
            pod: None,
            heard: None,
            ..Case::default()
        };
        row(&case, Verdict::Failed, Stopped, reason.as_ref());
    }
    for reason in [
        PodReason::Unschedulable,
        PodReason::ImagePullFailed,
        PodReason::CrashLooping,
    ] {
        let case = Case {
            pod: Some(pod(reason)),
            heard: None,
            ..Case::default()
        };
        row(&case, Verdict::InProgress, Starting, reason.as_ref());
    }
    let lost = Case {
        intent: Intent::Ending {
            rest: None,
            overdue: true,
        },
        obstacle: Some(Obstacle::NodeLost("node-1".into())),
        ..Case::default()
    };
    row(&lost, Verdict::Failed, Stopping, "NodeLost");
}

#[test]
fn hours_that_end_are_told_once_as_a_matter_of_course() {
    let old = Case::default().status();
    let closed = Case {
        heard: Some(held(LoopState::Paused, PauseReason::OutsideActiveHours)),
        ..Case::default()
    };
    let new = closed.status();
    let condition = find(&new.conditions, ConditionType::OutsideActiveHours).unwrap();
    assert_eq!(condition.message, "why; goes on at 2026-11-22T14:05:00Z");
    let notices = events::of_status(&old, &new);
    assert_eq!(
        notices,
        [Notice::normal("OutsideActiveHours", "Pause", condition.message.clone())]
    );
    assert_eq!(events::of_status(&new, &new), []);
}

#[test]
fn an_idle_loop_that_was_ended_needs_nobody_and_says_how_to_start_it_until_it_starts() {
    let mut ending = Case::default();
    ending.heard.as_mut().unwrap().report.loop_.as_mut().unwrap().outcome = Some(Outcome::Idle);
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
        events::of_status(&old, &ended),
        [Notice::warning("IdleTimeoutReached", "End", idle.message.clone())]
    );
    let mut resting = Case {
        intent: Intent::Rest(Rest::Completed),
        pod: None,
        heard: None,
        old: ended,
        ..Case::default()
    };
    row(&resting, Verdict::Current, LoopState::Stopped, "IdleTimeoutReached");
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
        Intent::Replace(Replace::Outdated),
        Intent::AwaitStop(now()),
        Intent::RecordOutcome,
        Intent::Remove(Rest::Completed),
        Intent::Rest(Rest::Suspended),
    ];
    let obstacles = [
        None,
        Some(Obstacle::Foreign),
        Some(Obstacle::Refused("quota".into())),
        Some(Obstacle::NodeLost("n".into())),
        Some(Obstacle::ClaimEnding("c".into())),
        Some(Obstacle::ClaimForeign("c".into())),
    ];
    let mut seen = std::collections::BTreeSet::new();
    for intent in intents {
        for obstacle in &obstacles {
            for reason in PodReason::iter() {
                for kind in FailureKind::iter().map(Some).chain([None]) {
                    for held_reason in PauseReason::iter() {
                        let mut heard = held(LoopState::Paused, held_reason);
                        heard.report.model = kind.map(|kind| failing(kind).report.model.unwrap());
                        let case = Case {
                            intent,
                            obstacle: obstacle.clone(),
                            pod: Some(pod(reason)),
                            heard: Some(heard),
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

fn rules(status: &AgentStatus) -> Verdict {
    let conditions = &status.conditions;
    let of_others = [
        ConditionType::NearLimit,
        ConditionType::Exhausted,
        ConditionType::Connected,
        ConditionType::Durable,
    ];
    for type_ in ConditionType::iter().filter(|type_| !of_others.contains(type_)) {
        let count = conditions.iter().filter(|c| c.type_ == type_.as_ref()).count();
        let optional = [ConditionType::Reconciling, ConditionType::Stalled].contains(&type_);
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
    verdict(GENERATION, status)
}

#[test]
fn the_same_facts_give_the_same_status() {
    let first = Case::default().status();
    let again = Case {
        old: first.clone(),
        ..Case::default()
    };
    assert_eq!(again.status(), first);
}

#[test]
fn what_nobody_has_spoken_of_yet_stays_as_it_was() {
    let mut before = Case {
        heard: Some(held(LoopState::Paused, PauseReason::ConsecutiveErrors)),
        ..Case::default()
    };
    before.heard.as_mut().unwrap().report.usage = Usage {
        calls: 7,
        ..Usage::default()
    };
    let written = before.status();
    let after = Case {
        old: written.clone(),
        heard: None,
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
        heard: Some(failing(FailureKind::Unreachable)),
        ..Case::default()
    };
    let status = failing.status();
    let moved = |type_| find(&status.conditions, type_).unwrap().last_transition_time.0 == now();
    assert!(moved(ConditionType::Ready) && moved(ConditionType::ModelAvailable) && moved(ConditionType::Reconciling));
    assert!(!moved(ConditionType::PodReady) && !moved(ConditionType::LinkLost));
}

#[test]
fn an_outcome_is_kept_while_resting_and_cleared_with_its_request_when_the_loop_starts_again() {
    let old = AgentStatus {
        r#loop: Some(LoopStatus {
            state: LoopState::Stopped,
            outcome: Some(Outcome::Completed),
            epoch: 2,
            ..LoopStatus::default()
        }),
        ..AgentStatus::default()
    };
    let case = |intent| Case {
        old: old.clone(),
        intent,
        pod: None,
        heard: None,
        ..Case::default()
    };
    let resting = case(Intent::Rest(Rest::Completed)).status();
    assert_eq!(resting.r#loop.unwrap().outcome, Some(Outcome::Completed));
    let again = case(Intent::Create).status();
    assert_eq!(again.r#loop.unwrap().outcome, None);
}

/// A loop that a limit holds; until a moment, or for ever.
fn spent(reason: PauseReason, until: Option<Timestamp>) -> Heard {
    let mut heard = held(LoopState::Paused, reason);
    let report = heard.report.loop_.as_mut().unwrap();
    report.reasons[0].until = until;
    report.resumes_at = until;
    heard
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
                heard: Some(spent(reason, until)),
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
        heard: Some(spent(PauseReason::BudgetAsk, None)),
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
        heard: Some(failing(FailureKind::BoundViolated)),
        ..Case::default()
    };
    let stalled = case.status();
    let stalled = find(&stalled.conditions, ConditionType::Stalled).unwrap();
    assert_eq!(stalled.reason, "BoundViolated");
}

fn share(remaining: i64, exhausted: bool) -> Shares {
    Shares {
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
fn what_others_use_of_a_budget_is_shown_with_the_next_change_and_not_before() {
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
    assert_eq!(next.status(), old, "only others drew on it");
    next.heard = Some(heard(LoopState::Sleeping));
    let changed = next.status();
    assert_eq!(changed.budgets[0].remaining_tokens, Some(50));
    assert_eq!(changed.summary.unwrap().budget.as_deref(), Some("50%"));
    next.heard = Some(heard(LoopState::Running));
    next.shares = share(0, true);
    assert!(next.status().budgets[0].exhausted, "that it is spent is news");
}

#[test]
fn cost_shows_once_there_is_any() {
    let mut case = Case::default();
    assert_eq!(case.status().summary.unwrap().cost, None);
    case.heard.as_mut().unwrap().report.usage.cost = 7_420_000;
    assert_eq!(case.status().summary.unwrap().cost.as_deref(), Some("$7.42"));
}
