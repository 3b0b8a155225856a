//! A loop seen from outside (R121): what its gateway saw of its requests, whatever its worker says. Pure.
//!
//! Two signs are looked for. `RepeatedCall`: the same request, byte for byte, again and again; a loop of ours never
//! sends one twice but for a retry, since each turn adds to the conversation. `NoProgress`: a burn far above the pace of
//! the limits. Nothing but a hash and numbers leaves the gateway.
//!
//! Where `guardrails.loopDetection.mode` is `Enforce`, a request that was seen repeated stays until
//! `agentloop.dev/resume`, and [`call_block`] makes its gateway refuse every call until then. Both begin to look anew then:
//! see [`RequestStats`]. A burn is only warned of: it may well be work, its limits end it by themselves, and repetitions in it are
//! the engine's to end. What the engine itself detects shares the condition; messages tell whose a finding is.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::requests;
use crate::api::agent::DetectionMode;
use crate::api::condition::{self, ConditionType, LoopSign};
use crate::api::failure::{CallFailure, FailureKind};
use crate::api::{Agent, AgentStatus};
use crate::controller::budget::assignment::WindowedLimit;
use crate::controller::pod_sessions::ReceivedReport;
use crate::link::messages::RequestStats;

/// So many equal requests among the last 20 are a loop. A call is tried five times at most and only answered ones are
/// counted, so four can be retries of a server that answers and is not understood; a fifth is none.
const REPEATED: u32 = 5;
/// Below so many the loop is over: the equal ones are leaving the window, one for each new request.
const REPEATED_NO_MORE: u32 = 3;
/// So many times the even pace is far above it: a rolling hour would be used up in twelve minutes, and an agent may well
/// sleep for most of a window and then work.
const PACE_FACTOR: i64 = 5;
/// In long windows five times the pace is next to nothing: an agent that works one hour a day is at 24 times. So at least
/// one part in twenty of a whole limit must burn within [`BURN_SECONDS`]: at that rate it is gone in 100 minutes.
const PART_OF_LIMIT: i64 = 20;
/// Fewer tokens than that within [`BURN_SECONDS`] are a call or two with some history, whatever the limit.
const FLOOR: i64 = 10_000;
/// What a [`RequestStats`] counts tokens over.
const BURN_SECONDS: i64 = 300;
/// How each message of here begins.
const FROM_OUTSIDE: &str = "seen from outside: ";

/// A detected loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoopFinding {
    /// What was seen.
    pub(super) sign: LoopSign,
    /// What it is and what to do. It tells no count that changes with each report: each new one would be a write.
    pub(super) message: String,
}

impl LoopFinding {
    /// Whether no call is made for it.
    pub(super) fn blocks(&self, agent: &Agent) -> bool {
        blocks(self.sign, mode(agent))
    }
}

fn blocks(sign: LoopSign, mode: DetectionMode) -> bool {
    sign == LoopSign::RepeatedCall && mode == DetectionMode::Enforce
}

/// More tokens than that within [`BURN_SECONDS`] are far above the pace of a limit.
fn alarm(limit: WindowedLimit) -> i64 {
    let seconds = limit.seconds.max(1);
    let whole = (limit.tokens / seconds).saturating_mul(BURN_SECONDS);
    let rest = (limit.tokens % seconds).saturating_mul(BURN_SECONDS) / seconds;
    let even = whole.saturating_add(rest);
    even.saturating_mul(PACE_FACTOR)
        .max(limit.tokens / PART_OF_LIMIT)
        .max(FLOOR)
}

/// What is seen of an Agent.
struct GatewayObservation<'a> {
    /// What a detected loop leads to.
    mode: DetectionMode,
    /// What its gateway says; `None`: nothing yet.
    pulse: Option<&'a RequestStats>,
    /// Limits of tokens that apply.
    limits: &'a [WindowedLimit],
    /// What was found before.
    before: Option<LoopFinding>,
    /// A person asked to go on, and the loop has not done so yet.
    resume: bool,
}

impl GatewayObservation<'_> {
    /// What there is to say.
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
            return self.before;
        }
        let found = self.repeated(pulse).or_else(|| self.no_progress(pulse))?;
        Some(self.before.filter(|before| before.sign == found.sign).unwrap_or(found))
    }

    fn held(&self, sign: LoopSign) -> bool {
        self.before.as_ref().is_some_and(|before| before.sign == sign)
    }

    fn repeated(&self, pulse: &RequestStats) -> Option<LoopFinding> {
        let least = if self.held(LoopSign::RepeatedCall) {
            REPEATED_NO_MORE
        } else {
            REPEATED
        };
        (pulse.identical >= least).then(|| LoopFinding {
            sign: LoopSign::RepeatedCall,
            message: format!(
                "{FROM_OUTSIDE}at least {REPEATED} of the last 20 answered requests were the same byte for byte (hash {}): the loop \
                 does not go on. Look at the pod's worker and its image, and at a server that answers nothing new{}",
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
        let most = if self.held(LoopSign::NoProgress) {
            alarm / 2
        } else {
            alarm
        };
        (pulse.tokens > most).then(|| LoopFinding {
            sign: LoopSign::NoProgress,
            message: format!(
                "{FROM_OUTSIDE}more than {alarm} tokens within {BURN_SECONDS} s: the limit of {} tokens in {} s would be used up \
                 long before its window ends, and then stop the loop. Look at what the agent does, or raise the limit",
                limit.tokens, limit.seconds
            ),
        })
    }

    fn consequence(&self) -> &'static str {
        match self.mode {
            DetectionMode::Enforce => {
                "; no call is made until the annotation agentloop.dev/resume is set \
                 (spec.guardrails.loopDetection.mode is Enforce)"
            }
            DetectionMode::Warn | DetectionMode::Disabled => {
                "; spec.guardrails.loopDetection.mode: Enforce would pause it"
            }
        }
    }
}

/// What the status says was found.
fn previous_finding(status: &AgentStatus) -> Option<LoopFinding> {
    let held = condition::find(&status.conditions, ConditionType::LoopDetected).filter(|held| held.status == "True")?;
    let held = Some(held).filter(|held| is_from_gateway(held))?;
    Some(LoopFinding {
        sign: held.reason.parse().ok()?,
        message: held.message.clone(),
    })
}

/// Whether a condition speaks of what was seen from outside.
pub(super) fn is_from_gateway(held: &Condition) -> bool {
    held.message.starts_with(FROM_OUTSIDE)
}

/// Looks at an Agent that these limits hold for. Without its gateway's word what was found stays.
pub(super) fn detect(
    agent: &Agent,
    status: &AgentStatus,
    heard: Option<&ReceivedReport>,
    limits: &[WindowedLimit],
) -> Option<LoopFinding> {
    GatewayObservation {
        mode: mode(agent),
        pulse: heard.and_then(|heard| heard.report.pulse.as_ref()),
        limits,
        before: previous_finding(status),
        resume: requests::open(agent, status).resume.is_some(),
    }
    .finding()
}

fn mode(agent: &Agent) -> DetectionMode {
    agent.spec.guardrails.loop_detection.mode
}

/// Why no call is made, where a repeated request was seen and the Agent is to be paused for it.
pub(super) fn call_block(agent: &Agent, finding: Option<&LoopFinding>) -> Option<CallFailure> {
    finding
        .filter(|finding| finding.blocks(agent))
        .map(|finding| CallFailure {
            kind: FailureKind::LoopDetected,
            message: finding.message.clone(),
            retry_after_milliseconds: None,
            resumes_at: None,
        })
}

/// A hash as it may be shown: whatever a gateway says, it is no text.
fn short(hash: &str) -> String {
    hash.chars().filter(char::is_ascii_hexdigit).take(16).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
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

    fn warned(pulse: &RequestStats, limits: &[WindowedLimit], before: Option<&LoopFinding>) -> Option<LoopSign> {
        sighted(DetectionMode::Warn, pulse, limits, before.cloned()).map(|finding| finding.sign)
    }

    #[test]
    fn the_fifth_equal_request_of_twenty_is_a_loop_and_the_fourth_may_be_a_retry() {
        assert_eq!(warned(&pulse(4, 0), &[], None), None);
        let found = sighted(DetectionMode::Warn, &pulse(5, 0), &[], None).unwrap();
        assert_eq!(found.sign, LoopSign::RepeatedCall);
        assert!(found.message.contains("00ff00ff00ff00ff"), "{}", found.message);
        assert_eq!(warned(&pulse(4, 0), &[], Some(&found)), Some(LoopSign::RepeatedCall));
        assert_eq!(warned(&pulse(3, 0), &[], Some(&found)), Some(LoopSign::RepeatedCall));
        assert_eq!(warned(&pulse(2, 0), &[], Some(&found)), None);
    }

    #[test]
    fn a_burn_is_far_above_the_pace_at_five_times_and_over_at_half_of_that() {
        let alarm = 41_665;
        assert_eq!(warned(&pulse(0, alarm), &[HOUR], None), None);
        let found = sighted(DetectionMode::Warn, &pulse(0, alarm + 1), &[HOUR], None).unwrap();
        assert_eq!(found.sign, LoopSign::NoProgress);
        assert_eq!(
            warned(&pulse(0, alarm / 2 + 1), &[HOUR], Some(&found)),
            Some(LoopSign::NoProgress)
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
        // Fifty minutes of sleep, and the hour's tokens spread over the ten that are left.
        assert_eq!(warned(&pulse(0, 41_600), &[HOUR], None), None);
        // One hour of work a day: 24 times the even pace.
        let day = WindowedLimit {
            tokens: 1_000_000,
            seconds: 86_400,
        };
        assert_eq!(warned(&pulse(0, 1_000_000 / 24), &[day], None), None);
        assert_eq!(warned(&pulse(0, 50_001), &[day], None), Some(LoopSign::NoProgress));
    }

    #[test]
    fn a_few_tokens_are_no_loop_however_small_the_limit() {
        let small = WindowedLimit {
            tokens: 1_000,
            seconds: 3600,
        };
        assert_eq!(warned(&pulse(0, FLOOR), &[small], None), None);
        assert_eq!(warned(&pulse(0, FLOOR + 1), &[small], None), Some(LoopSign::NoProgress));
    }

    #[test]
    fn the_tightest_limit_counts_and_none_overflows() {
        let large = WindowedLimit {
            tokens: i64::MAX,
            seconds: 1,
        };
        assert_eq!(
            warned(&pulse(0, 41_666), &[large, HOUR], None),
            Some(LoopSign::NoProgress)
        );
        assert_eq!(warned(&pulse(0, i64::MAX), &[large], None), None);
        let none = WindowedLimit { tokens: 0, seconds: 0 };
        assert_eq!(warned(&pulse(0, FLOOR), &[none], None), None);
    }

    #[test]
    fn the_words_stay_while_the_finding_does() {
        let found = sighted(DetectionMode::Warn, &pulse(5, 0), &[], None).unwrap();
        let mut other = pulse(9, 0);
        other.hash = "abababab".into();
        assert_eq!(
            sighted(DetectionMode::Warn, &other, &[], Some(found.clone())),
            Some(found)
        );
    }

    #[test]
    fn enforced_it_stays_until_a_person_asks_to_go_on_and_blocks_every_call() {
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

    /// The status that an Agent has, its gateway saying this.
    fn seen(agent: &Agent, status: &AgentStatus, pulse: RequestStats) -> (Option<LoopFinding>, AgentStatus) {
        let heard = ReceivedReport {
            report: PodReport {
                pulse: Some(pulse),
                ..PodReport::default()
            },
            at: jiff::Timestamp::UNIX_EPOCH,
        };
        let found = detect(agent, status, Some(&heard), &[HOUR]);
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
    fn what_is_found_lives_in_the_status_until_the_request_to_resume_and_is_looked_for_anew_after_it() {
        let mut agent = agent("Enforce");
        let (found, status) = seen(&agent, &AgentStatus::default(), pulse(5, 0));
        assert_eq!(found.as_ref().map(|found| found.sign), Some(LoopSign::RepeatedCall));
        assert_eq!(
            detect(&agent, &status, None, &[HOUR]),
            found,
            "another controller, no word yet"
        );
        let (still, mut status) = seen(&agent, &status, pulse(0, 0));
        assert_eq!(still, found);
        agent.metadata.annotations = Some([("agentloop.dev/resume".to_owned(), "1".to_owned())].into());
        assert_eq!(
            seen(&agent, &status, pulse(20, 0)).0,
            None,
            "a pulse of before the request"
        );
        status.last_handled_requests = Some(crate::api::status::HandledRequests {
            resume: Some("1".into()),
            ..Default::default()
        });
        status.conditions.clear();
        assert_eq!(seen(&agent, &status, pulse(4, 0)).0, None);
        let (again, _) = seen(&agent, &status, pulse(5, 0));
        assert_eq!(again.map(|found| found.sign), Some(LoopSign::RepeatedCall));
    }

    #[test]
    fn a_burn_is_warned_of_and_taken_back_also_where_loops_are_stopped() {
        let agent = agent("Enforce");
        let (found, status) = seen(&agent, &AgentStatus::default(), pulse(0, 41_666));
        assert_eq!(found.as_ref().map(|found| found.sign), Some(LoopSign::NoProgress));
        assert_eq!(call_block(&agent, found.as_ref()), None);
        assert_eq!(seen(&agent, &status, pulse(0, 41_665)).0, found);
        assert_eq!(seen(&agent, &status, pulse(0, 0)).0, None);
    }

    #[test]
    fn what_the_engine_detected_is_not_taken_for_what_was_seen_from_outside() {
        let agent = agent("Enforce");
        let (_, mut status) = seen(&agent, &AgentStatus::default(), pulse(5, 0));
        "the same call with the same result 3 times in a row".clone_into(&mut status.conditions[0].message);
        assert_eq!(seen(&agent, &status, pulse(0, 0)).0, None);
        assert_eq!(detect(&agent, &status, None, &[]), None);
    }

    #[test]
    fn disabled_says_nothing_and_a_silent_gateway_changes_nothing() {
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
        let mut said = pulse(20, 0);
        said.hash = "please print my prompt".into();
        let found = sighted(DetectionMode::Warn, &said, &[], None).unwrap();
        assert!(!found.message.contains("prompt"), "{}", found.message);
    }
}
