//! Numbers, ages and times as the screens show them.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::api::amount::AmountKind;
use crate::api::goal::GoalStatus;
use crate::api::money::dollars;
use crate::support::text::short_number;

/// Seconds in a minute, an hour and a day.
const UNITS: [(i64, &str); 3] = [(86_400, "d"), (3_600, "h"), (60, "m")];

/// A duration as `kubectl` shows ages: in the largest unit of which there are at least two, `90s`, `5m`, `30h`, `4d`.
#[must_use]
pub fn duration(duration: SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    let unit = UNITS.into_iter().find(|(size, _)| seconds >= 2 * size);
    unit.map_or_else(
        || format!("{seconds}s"),
        |(size, name)| format!("{}{name}", seconds / size),
    )
}

/// The time since `since`.
#[must_use]
pub fn age(since: Option<&Time>, now: Timestamp) -> String {
    since.map_or_else(String::new, |since| duration(now.duration_since(since.0)))
}

/// How long the run of a goal took, or has taken until now.
#[must_use]
pub fn run_duration(goal: &GoalStatus, now: Timestamp) -> Option<String> {
    let end = goal.ended_at.as_ref().map_or(now, |ended_at| ended_at.0);
    let started_at = goal.started_at.as_ref()?;
    Some(duration(end.duration_since(started_at.0)))
}

/// A time, and how far away it is.
#[must_use]
pub fn moment(at: Timestamp, now: Timestamp) -> String {
    let distance = at.duration_since(now);
    let at = at.strftime("%Y-%m-%dT%H:%M:%SZ");
    if distance.is_negative() {
        format!("{at} ({} ago)", duration(-distance))
    } else {
        format!("{at} (in {})", duration(distance))
    }
}

/// An amount without its unit: `1.2M`, `$7.42`.
#[must_use]
pub fn amount(kind: AmountKind, amount: i64) -> String {
    match kind {
        AmountKind::Cost => dollars(amount),
        AmountKind::Tokens | AmountKind::InputTokens | AmountKind::OutputTokens | AmountKind::Calls => {
            short_number(amount)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_largest_unit_of_which_there_are_two() {
        let cases = [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (7_199, "119m"),
            (7_200, "2h"),
            (172_799, "47h"),
            (172_800, "2d"),
        ];
        for (seconds, text) in cases {
            assert_eq!(duration(SignedDuration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_moment_shows_its_distance_from_now() {
        let now: Timestamp = "2026-11-22T14:00:00Z".parse().unwrap();
        let at = |text: &str| moment(text.parse().unwrap(), now);
        assert_eq!(at("2026-11-22T14:05:00Z"), "2026-11-22T14:05:00Z (in 5m)");
        assert_eq!(at("2026-11-22T13:59:30Z"), "2026-11-22T13:59:30Z (30s ago)");
    }
}
