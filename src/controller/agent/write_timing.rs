//! Decides when a changed status of an Agent is written. Pure.
//!
//! Users wait for most changes. Counters, and changes between Running and Sleeping, wait until 15 s after the last write.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use crate::api::AgentStatus;
use crate::api::condition::ConditionType;
use crate::api::status::{AgentSummary, LoopState, LoopStatus};
use crate::controller::runtime::pod_state::PodReason;
use crate::controller::runtime::status_throttle::StatusThrottle;

/// When to write a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteTiming {
    /// Nothing has changed.
    Never,
    Now,
    /// Not before this time.
    At(Timestamp),
}

impl StatusThrottle {
    /// When to write `new` over `old`.
    pub(super) fn due(&self, old: &AgentStatus, new: &AgentStatus, now: Timestamp) -> WriteTiming {
        if old == new {
            return WriteTiming::Never;
        }
        let moment = self.next(urgent(old) != urgent(new));
        if moment <= now {
            WriteTiming::Now
        } else {
            WriteTiming::At(moment)
        }
    }
}

/// During a start, users wait for the result. These intermediate steps are not worth a write: the pod is up but its
/// loop is not, the model was called, the Sensors are healthy, and `Unschedulable`, which every pod reports until its
/// new volume claim is bound.
fn is_step_of_a_start(condition: &Condition) -> bool {
    let well = condition.type_ == ConditionType::SensorsHealthy.as_ref() && condition.status == "True";
    let pod = [
        ConditionType::PodReady,
        ConditionType::Ready,
        ConditionType::Reconciling,
    ];
    let calm = [PodReason::Starting, PodReason::Running, PodReason::Unschedulable];
    well || condition.type_ == ConditionType::ModelAvailable.as_ref()
        || pod.iter().any(|type_| type_.as_ref() == condition.type_)
            && calm.iter().any(|reason| reason.as_ref() == condition.reason)
}

/// The part of a status whose changes users wait for; everything else is set to a fixed value before the comparison.
fn urgent(status: &AgentStatus) -> AgentStatus {
    let mut status = status.clone();
    status.usage = None;
    status.pod = None;
    if let Some(error) = &mut status.last_error {
        error.at.0 = Timestamp::UNIX_EPOCH;
    }
    let awake = |state| matches!(state, LoopState::Running | LoopState::Sleeping);
    let mut turning = false;
    if status
        .r#loop
        .as_ref()
        .is_some_and(|status| status.state == LoopState::Starting)
    {
        status.conditions.retain(|condition| !is_step_of_a_start(condition));
        let waiting = PodReason::Unschedulable.as_ref();
        status.summary.iter_mut().for_each(|summary| {
            summary.reason.take_if(|reason| reason == waiting);
        });
    }
    // Running and Sleeping count as one state, without the time at which a sleep ends.
    if let Some(status) = &mut status.r#loop {
        turning = awake(status.state);
        *status = LoopStatus {
            state: if turning { LoopState::Running } else { status.state },
            reasons: status.reasons.clone(),
            resumes_at: status.resumes_at.clone().filter(|_| !turning),
            outcome: status.outcome,
            epoch: status.epoch,
            ..LoopStatus::default()
        };
    }
    status.summary = status.summary.map(|summary| AgentSummary {
        resumes: summary.resumes.filter(|_| !turning),
        reason: summary.reason,
        ..AgentSummary::default()
    });
    for budget in &mut status.budgets {
        (budget.remaining_tokens, budget.remaining_cost_micro_usd) = (None, None);
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::condition;
    use crate::api::status::{LoopUsage, PauseReason};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).unwrap()
    }

    fn status(state: LoopState, calls: i64, reasons: Vec<PauseReason>) -> AgentStatus {
        AgentStatus {
            r#loop: Some(LoopStatus {
                state,
                reasons,
                ..LoopStatus::default()
            }),
            usage: Some(LoopUsage {
                calls,
                ..LoopUsage::default()
            }),
            ..AgentStatus::default()
        }
    }

    fn running(calls: i64) -> AgentStatus {
        status(LoopState::Running, calls, Vec::new())
    }

    fn paused(reason: PauseReason) -> AgentStatus {
        status(LoopState::Paused, 0, vec![reason])
    }

    #[test]
    fn nothing_new_is_never_written() {
        assert_eq!(
            StatusThrottle::new(at(0)).due(&running(1), &running(1), at(1000)),
            WriteTiming::Never
        );
    }

    #[test]
    fn the_first_two_changes_are_written_at_once_and_the_third_after_five_seconds() {
        let mut pace = StatusThrottle::new(at(0));
        let (one, two) = (paused(PauseReason::CrashLoop), running(0));
        for _ in 0..2 {
            assert_eq!(pace.due(&one, &two, at(0)), WriteTiming::Now);
            pace.record_write(at(0));
        }
        assert_eq!(pace.due(&one, &two, at(0)), WriteTiming::At(at(5)));
        assert_eq!(pace.due(&one, &two, at(4)), WriteTiming::At(at(5)));
        assert_eq!(pace.due(&one, &two, at(5)), WriteTiming::Now);
        pace.record_write(at(5));
        assert_eq!(
            pace.due(&one, &two, at(5)),
            WriteTiming::At(at(10)),
            "one per five seconds from then on"
        );
    }

    #[test]
    fn numbers_and_naps_wait_fifteen_seconds_and_not_sixteen() {
        let mut pace = StatusThrottle::new(at(0));
        pace.record_write(at(0));
        let napping = status(LoopState::Sleeping, 0, Vec::new());
        for new in [running(9), napping] {
            assert_eq!(pace.due(&running(0), &new, at(14)), WriteTiming::At(at(15)));
            assert_eq!(pace.due(&running(0), &new, at(15)), WriteTiming::Now);
        }
        let reason = paused(PauseReason::ProviderRateLimit);
        assert_eq!(
            pace.due(&running(0), &reason, at(1)),
            WriteTiming::Now,
            "a reason does not wait"
        );
    }

    #[test]
    fn the_steps_of_a_start_wait_and_its_end_and_its_troubles_do_not() {
        let mut pace = StatusThrottle::new(at(0));
        pace.record_write(at(0));
        let starting = |reason: PodReason| {
            let set = |type_| condition::condition(type_, false, reason.as_ref(), "", None, at(0));
            AgentStatus {
                conditions: [
                    ConditionType::PodReady,
                    ConditionType::Ready,
                    ConditionType::Reconciling,
                ]
                .map(set)
                .into(),
                summary: Some(AgentSummary {
                    reason: (reason == PodReason::Unschedulable).then(|| reason.as_ref().into()),
                    ..AgentSummary::default()
                }),
                ..status(LoopState::Starting, 0, Vec::new())
            }
        };
        let old = starting(PodReason::Starting);
        let claim_unbound = starting(PodReason::Unschedulable);
        assert_eq!(pace.due(&old, &claim_unbound, at(1)), WriteTiming::At(at(15)));
        assert_eq!(
            pace.due(&old, &starting(PodReason::ImagePullFailed), at(1)),
            WriteTiming::Now
        );
        assert_eq!(pace.due(&claim_unbound, &running(1), at(1)), WriteTiming::Now);
        for (healthy, due) in [(true, WriteTiming::At(at(15))), (false, WriteTiming::Now)] {
            let mut spoken = starting(PodReason::Starting);
            let type_ = ConditionType::SensorsHealthy;
            spoken
                .conditions
                .push(condition::condition(type_, healthy, "Any", "", None, at(0)));
            assert_eq!(pace.due(&old, &spoken, at(1)), due, "SensorsHealthy={healthy}");
        }
    }
}
