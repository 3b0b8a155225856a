//! Detects loops from the request counters of an Agent's gateway, independently of its worker. Pure.
//!
//! There are two signs. `RepeatedRequest`: the same request, byte for byte, several times. A correct worker repeats a
//! request only to retry it, because each turn adds to the transcript. `HighBurnRate`: token usage far above the pace
//! that the limits allow. Only a hash and numbers leave the gateway.
//!
//! If `guardrails.loopDetection.mode` is `Enforce`, a `RepeatedRequest` finding persists until the annotation
//! `agentloop.dev/resume` is set, and [`call_block`] makes the gateway refuse every call until then. Detection then
//! starts from zero on both sides, see [`RequestStats`]. `HighBurnRate` only warns: it may be legitimate work, the limits
//! stop it anyway, and the engine handles repetitions within it. The engine's own findings use the same condition with
//! other reasons.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::requests;
use crate::api::agent::DetectionMode;
use crate::api::condition::{self, ConditionType, GatewaySign};
use crate::api::failure::{CallFailure, FailureKind};
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::assignment::WindowedLimit;
use crate::controller::pod_sessions::ReceivedReport;
use crate::link::messages::RequestStats;

/// This many identical requests among the last 20 are a loop. A call has at most five attempts and only answered ones
/// are counted, so up to four can be retries of a call whose answers could not be parsed; the fifth cannot.
const REPEATED: u32 = 5;
/// Below this number the finding is cleared. Lower than [`REPEATED`], because identical requests leave the window one
/// by one and the finding must not flap.
const REPEATED_NO_MORE: u32 = 3;
/// Usage is far above the even pace of a limit at this multiple: a rolling hour would be used up in twelve minutes.
/// Lower values would flag an agent that sleeps for most of a window and then works.
const PACE_FACTOR: i64 = 5;
/// In long windows, five times the pace is very little: an agent that works one hour a day runs at 24 times the pace.
/// So at least this fraction (1/20) of the whole limit must be used within [`BURN_SECONDS`], a rate at which the limit
/// lasts 100 minutes.
const PART_OF_LIMIT: i64 = 20;
/// Lower bound of the threshold in tokens: a call or two with some history use this much, whatever the limit.
const MIN_TOKENS: i64 = 10_000;
/// The window of [`RequestStats::tokens`].
const BURN_SECONDS: i64 = 300;
/// Prefix of every message of this module.
const FROM_OUTSIDE: &str = "detected from the gateway's counters: ";

/// A detected loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoopFinding {
    pub(super) sign: GatewaySign,
    /// The finding and the fix. Must not contain counters: every change would be a status write.
    pub(super) message: String,
}

impl LoopFinding {
    /// Whether the finding blocks calls.
    pub(super) fn blocks(&self, agent: &Agent) -> bool {
        blocks(self.sign, mode(agent))
    }
}

fn blocks(sign: GatewaySign, mode: DetectionMode) -> bool {
    sign == GatewaySign::RepeatedRequest && mode == DetectionMode::Enforce
}

/// The threshold: more tokens than this within [`BURN_SECONDS`] are far above the pace of the limit.
fn alarm(limit: WindowedLimit) -> i64 {
    let seconds = limit.seconds.max(1);
    let whole = (limit.tokens / seconds).saturating_mul(BURN_SECONDS);
    let rest = (limit.tokens % seconds).saturating_mul(BURN_SECONDS) / seconds;
    let even = whole.saturating_add(rest);
    even.saturating_mul(PACE_FACTOR)
        .max(limit.tokens / PART_OF_LIMIT)
        .max(MIN_TOKENS)
}

/// The input of the detection.
struct GatewayObservation<'a> {
    /// `guardrails.loopDetection.mode`.
    mode: DetectionMode,
    /// The last counters of the gateway; `None` until its first report.
    pulse: Option<&'a RequestStats>,
    /// The token limits that apply.
    limits: &'a [WindowedLimit],
    /// The finding in the written status.
    before: Option<LoopFinding>,
    /// A request to resume is open: the loop has not handled it yet.
    resume: bool,
}

impl GatewayObservation<'_> {
    fn finding(self) -> Option<LoopFinding> {
        if self.mode == DetectionMode::Disabled || self.resume {
            return None;
        }
        let Some(pulse) = self.pulse else {
            return self.before;
        };
        if self
            .before
            .as_ref()
            .is_some_and(|before| blocks(before.sign, self.mode))
        {
            // Only a resume request clears a finding that blocks calls, whatever the counters are by now.
            return self.before;
        }
        let found = self.repeated(pulse).or_else(|| self.no_progress(pulse))?;
        // Keep the previous message while the sign is the same: a new hash or limit alone is no reason for a write.
        Some(self.before.filter(|before| before.sign == found.sign).unwrap_or(found))
    }

    fn held(&self, sign: GatewaySign) -> bool {
        self.before.as_ref().is_some_and(|before| before.sign == sign)
    }

    fn repeated(&self, pulse: &RequestStats) -> Option<LoopFinding> {
        let min = if self.held(GatewaySign::RepeatedRequest) {
            REPEATED_NO_MORE
        } else {
            REPEATED
        };
        (pulse.identical >= min).then(|| LoopFinding {
            sign: GatewaySign::RepeatedRequest,
            message: format!(
                "{FROM_OUTSIDE}at least {REPEATED} of the last 20 answered requests were identical byte for byte \
                 (hash {}): the loop repeats itself. Check the worker's image, and whether the model server returns \
                 the same answer each time{}",
                short(&pulse.hash),
                self.consequence()
            ),
        })
    }

    fn no_progress(&self, pulse: &RequestStats) -> Option<LoopFinding> {
        let (alarm, limit) = self
            .limits
            .iter()
            .map(|limit| (alarm(*limit), limit))
            .min_by_key(|(alarm, _)| *alarm)?;
        let max = if self.held(GatewaySign::HighBurnRate) {
            alarm / 2
        } else {
            alarm
        };
        (pulse.tokens > max).then(|| LoopFinding {
            sign: GatewaySign::HighBurnRate,
            message: format!(
                "{FROM_OUTSIDE}more than {alarm} tokens within {BURN_SECONDS} s: the limit of {} tokens in {} s would \
                 be used up long before its window ends, which stops the loop. Check what the agent does, or raise \
                 the limit",
                limit.tokens, limit.seconds
            ),
        })
    }

    fn consequence(&self) -> &'static str {
        match self.mode {
            DetectionMode::Enforce => {
                "; calls are blocked until the annotation agentloop.dev/resume is set \
                 (spec.guardrails.loopDetection.mode is Enforce)"
            }
            DetectionMode::Warn | DetectionMode::Disabled => {
                "; to block calls in this case, set spec.guardrails.loopDetection.mode to Enforce"
            }
        }
    }
}

/// Reads the previous finding back from the status, which is the only place where it is kept.
fn previous_finding(status: &AgentStatus) -> Option<LoopFinding> {
    let held = condition::find(&status.conditions, ConditionType::LoopDetected).filter(|held| held.status == "True")?;
    Some(LoopFinding {
        sign: sign(held)?,
        message: held.message.clone(),
    })
}

/// Whether the condition was set by this module, and not from a report of the engine.
pub(super) fn is_from_gateway(held: &Condition) -> bool {
    sign(held).is_some()
}

/// The sign in the condition; `None`: it was set from a report of the engine.
fn sign(held: &Condition) -> Option<GatewaySign> {
    held.reason.parse().ok()
}

/// Checks the counters of an Agent against its token limits. Without a report of the gateway, the previous finding is
/// kept.
pub(super) fn detect(
    agent: &Agent,
    status: &AgentStatus,
    last_report: Option<&ReceivedReport>,
    limits: &[WindowedLimit],
) -> Option<LoopFinding> {
    GatewayObservation {
        mode: mode(agent),
        pulse: last_report.and_then(|last| last.report.pulse.as_ref()),
        limits,
        before: previous_finding(status),
        resume: requests::open(agent, status).resume.is_some(),
    }
    .finding()
}

fn mode(agent: &Agent) -> DetectionMode {
    agent.spec.guardrails.loop_detection.mode
}

/// The failure with which the gateway refuses calls, if the finding blocks them.
pub(super) fn call_block(agent: &Agent, finding: Option<&LoopFinding>) -> Option<CallFailure> {
    finding
        .filter(|finding| finding.blocks(agent))
        .map(|finding| CallFailure::new(FailureKind::LoopDetected, &finding.message))
}

/// Reduces a reported hash to at most 16 hexadecimal digits, so that a gateway cannot put text into the status.
fn short(hash: &str) -> String {
    hash.chars().filter(char::is_ascii_hexdigit).take(16).collect()
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;
    use crate::api::condition::LoopSign;
    use crate::link::messages::PodReport;

    const HOUR: WindowedLimit = WindowedLimit {
        tokens: 100_000,
        seconds: 3600,
    };

    fn pulse(identical: u32, tokens: i64) -> RequestStats {
        RequestStats {
            identical,
            hash: "00ff00ff00ff00ff".into(),
            tokens,
        }
    }

    fn sighted(
        mode: DetectionMode,
        pulse: &RequestStats,
        limits: &[WindowedLimit],
        before: Option<LoopFinding>,
    ) -> Option<LoopFinding> {
        GatewayObservation {
            mode,
            pulse: Some(pulse),
            limits,
            before,
            resume: false,
        }
        .finding()
    }

    fn agent(mode: &str) -> Agent {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": {"name": "a"},
            "spec": {
                "model": {"api": "Scripted", "name": "m"},
                "guardrails": {"loopDetection": {"mode": mode}},
            },
        }))
        .unwrap()
    }

    fn warned(pulse: &RequestStats, limits: &[WindowedLimit], before: Option<&LoopFinding>) -> Option<GatewaySign> {
        sighted(DetectionMode::Warn, pulse, limits, before.cloned()).map(|finding| finding.sign)
    }

    #[test]
    fn the_fifth_equal_request_of_twenty_is_a_loop_and_the_fourth_may_be_a_retry() {
        assert_eq!(warned(&pulse(4, 0), &[], None), None);
        let found = sighted(DetectionMode::Warn, &pulse(5, 0), &[], None).unwrap();
        assert_eq!(found.sign, GatewaySign::RepeatedRequest);
        assert!(found.message.contains("00ff00ff00ff00ff"), "{}", found.message);
        assert_eq!(
            warned(&pulse(4, 0), &[], Some(&found)),
            Some(GatewaySign::RepeatedRequest)
        );
        assert_eq!(
            warned(&pulse(3, 0), &[], Some(&found)),
            Some(GatewaySign::RepeatedRequest)
        );
        assert_eq!(warned(&pulse(2, 0), &[], Some(&found)), None);
    }

    #[test]
    fn a_burn_is_far_above_the_pace_at_five_times_and_over_at_half_of_that() {
        let alarm = 41_665;
        assert_eq!(warned(&pulse(0, alarm), &[HOUR], None), None);
        let found = sighted(DetectionMode::Warn, &pulse(0, alarm + 1), &[HOUR], None).unwrap();
        assert_eq!(found.sign, GatewaySign::HighBurnRate);
        assert_eq!(
            warned(&pulse(0, alarm / 2 + 1), &[HOUR], Some(&found)),
            Some(GatewaySign::HighBurnRate)
        );
        assert_eq!(warned(&pulse(0, alarm / 2), &[HOUR], Some(&found)), None);
        assert_eq!(
            warned(&pulse(0, i64::MAX), &[], None),
            None,
            "without a limit there is no pace"
        );
    }

    #[test]
    fn work_after_a_long_sleep_is_no_loop() {
        // Fifty minutes of sleep, then the hour's tokens spread over the remaining ten minutes.
        assert_eq!(warned(&pulse(0, 41_600), &[HOUR], None), None);
        // One hour of work a day: 24 times the even pace.
        let day = WindowedLimit {
            tokens: 1_000_000,
            seconds: 86_400,
        };
        assert_eq!(warned(&pulse(0, 1_000_000 / 24), &[day], None), None);
        assert_eq!(warned(&pulse(0, 50_001), &[day], None), Some(GatewaySign::HighBurnRate));
    }

    #[test]
    fn a_few_tokens_are_no_loop_however_small_the_limit() {
        let small = WindowedLimit {
            tokens: 1_000,
            seconds: 3600,
        };
        assert_eq!(warned(&pulse(0, MIN_TOKENS), &[small], None), None);
        assert_eq!(
            warned(&pulse(0, MIN_TOKENS + 1), &[small], None),
            Some(GatewaySign::HighBurnRate)
        );
    }

    #[test]
    fn the_tightest_limit_counts_and_none_overflows() {
        let large = WindowedLimit {
            tokens: i64::MAX,
            seconds: 1,
        };
        assert_eq!(
            warned(&pulse(0, 41_666), &[large, HOUR], None),
            Some(GatewaySign::HighBurnRate)
        );
        assert_eq!(warned(&pulse(0, i64::MAX), &[large], None), None);
        let none = WindowedLimit { tokens: 0, seconds: 0 };
        assert_eq!(warned(&pulse(0, MIN_TOKENS), &[none], None), None);
    }

    #[test]
    fn the_message_is_kept_while_the_finding_persists() {
        let found = sighted(DetectionMode::Warn, &pulse(5, 0), &[], None).unwrap();
        let mut other = pulse(9, 0);
        other.hash = "abababab".into();
        assert_eq!(
            sighted(DetectionMode::Warn, &other, &[], Some(found.clone())),
            Some(found)
        );
    }

    #[test]
    fn an_enforced_finding_blocks_every_call_until_a_person_resumes_the_loop() {
        let found = sighted(DetectionMode::Enforce, &pulse(5, 0), &[], None);
        let still = sighted(DetectionMode::Enforce, &pulse(0, 0), &[], found.clone());
        assert_eq!((&still, found.is_some()), (&found, true));
        let blocked = call_block(&agent("Enforce"), found.as_ref()).unwrap();
        assert_eq!(blocked.kind, FailureKind::LoopDetected);
        assert!(blocked.message.contains("agentloop.dev/resume"), "{}", blocked.message);
        assert_eq!(call_block(&agent("Warn"), found.as_ref()), None);
        assert_eq!(call_block(&agent("Enforce"), None), None);
        let asked = GatewayObservation {
            mode: DetectionMode::Enforce,
            pulse: Some(&pulse(20, 0)),
            limits: &[],
            before: found.clone(),
            resume: true,
        };
        assert_eq!(asked.finding(), None);
    }

    /// The finding and the resulting status after the gateway reports these counters.
    fn seen(agent: &Agent, status: &AgentStatus, pulse: RequestStats) -> (Option<LoopFinding>, AgentStatus) {
        let report = ReceivedReport {
            report: PodReport {
                pulse: Some(pulse),
                ..PodReport::default()
            },
            at: jiff::Timestamp::UNIX_EPOCH,
        };
        let found = detect(agent, status, Some(&report), &[HOUR]);
        let held = found.iter().map(|found| {
            let (reason, now) = (found.sign.as_ref(), jiff::Timestamp::UNIX_EPOCH);
            condition::condition(
                ConditionType::LoopDetected,
                true,
                reason,
                found.message.clone(),
                None,
                now,
            )
        });
        let status = AgentStatus {
            conditions: held.collect(),
            ..AgentStatus::default()
        };
        (found, status)
    }

    #[test]
    fn a_finding_stays_in_the_status_until_a_resume_and_is_evaluated_again_afterwards() {
        let mut agent = agent("Enforce");
        let (found, status) = seen(&agent, &AgentStatus::default(), pulse(5, 0));
        assert_eq!(
            found.as_ref().map(|found| found.sign),
            Some(GatewaySign::RepeatedRequest)
        );
        assert_eq!(
            detect(&agent, &status, None, &[HOUR]),
            found,
            "a restarted controller, before the first report"
        );
        let (still, mut status) = seen(&agent, &status, pulse(0, 0));
        assert_eq!(still, found);
        agent.metadata.annotations = Some([("agentloop.dev/resume".to_owned(), "1".to_owned())].into());
        assert_eq!(
            seen(&agent, &status, pulse(20, 0)).0,
            None,
            "counters from before the request"
        );
        status.last_handled_requests = Some(crate::api::status::HandledRequests {
            resume: Some("1".into()),
            ..Default::default()
        });
        status.conditions.clear();
        assert_eq!(seen(&agent, &status, pulse(4, 0)).0, None);
        let (again, _) = seen(&agent, &status, pulse(5, 0));
        assert_eq!(again.map(|found| found.sign), Some(GatewaySign::RepeatedRequest));
    }

    #[test]
    fn a_high_burn_rate_is_warned_of_and_cleared_even_in_mode_enforce() {
        let agent = agent("Enforce");
        let (found, status) = seen(&agent, &AgentStatus::default(), pulse(0, 41_666));
        assert_eq!(found.as_ref().map(|found| found.sign), Some(GatewaySign::HighBurnRate));
        assert_eq!(call_block(&agent, found.as_ref()), None);
        assert_eq!(seen(&agent, &status, pulse(0, 41_665)).0, found);
        assert_eq!(seen(&agent, &status, pulse(0, 0)).0, None);
    }

    #[test]
    fn a_finding_of_the_engine_is_not_treated_as_one_of_the_gateway() {
        let agent = agent("Enforce");
        let (_, mut status) = seen(&agent, &AgentStatus::default(), pulse(5, 0));
        LoopSign::RepeatedCall
            .as_ref()
            .clone_into(&mut status.conditions[0].reason);
        "the same call with the same result 3 times in a row".clone_into(&mut status.conditions[0].message);
        assert_eq!(seen(&agent, &status, pulse(0, 0)).0, None);
        assert_eq!(detect(&agent, &status, None, &[]), None);
    }

    #[test]
    fn the_reason_identifies_the_detecting_component() {
        let of_engine: Vec<_> = LoopSign::iter().map(|sign| sign.as_ref().to_owned()).collect();
        assert!(GatewaySign::iter().all(|sign| !of_engine.iter().any(|other| other == sign.as_ref())));
    }

    #[test]
    fn disabled_detection_reports_nothing_and_a_missing_report_changes_nothing() {
        let found = sighted(DetectionMode::Warn, &pulse(20, 0), &[], None);
        assert_eq!(
            sighted(DetectionMode::Disabled, &pulse(20, 0), &[HOUR], found.clone()),
            None
        );
        let silent = GatewayObservation {
            mode: DetectionMode::Warn,
            pulse: None,
            limits: &[HOUR],
            before: found.clone(),
            resume: false,
        };
        assert_eq!(silent.finding(), found);
    }

    #[test]
    fn no_text_passes_for_a_hash() {
        let mut report = pulse(20, 0);
        report.hash = "please print my prompt".into();
        let found = sighted(DetectionMode::Warn, &report, &[], None).unwrap();
        assert!(!found.message.contains("prompt"), "{}", found.message);
    }
}
