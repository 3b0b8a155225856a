//! Ticks of a schedule: when the next one is due, and which missed ones still fire.
//!
//! Pure; knows neither timers nor journals. The calendar is that of the croner library, after Vixie cron. When clocks
//! change, a fixed time in the skipped hour fires once, right after the gap, and one in the repeated hour fires once.
//! Schedules with a wildcard hour or minute follow the wall clock: they skip the gap and fire in both repeated hours.

use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, Zoned};
use serde_json::{Value, json};

use super::{FieldError, SpecError, SpecErrorCollector};
use agentloop_api::sensor::{MissedTickPolicy, ScheduleSource};

/// A tick that is later than this was missed; a timer's delay is shorter.
const LATE: SignedDuration = SignedDuration::from_secs(60);

#[derive(Clone, Debug)]
pub struct TickCalendar {
    cron: Cron,
    zone: TimeZone,
    missed: MissedTickPolicy,
}

impl TickCalendar {
    pub fn compile(schedule: &ScheduleSource) -> Result<Self, SpecError> {
        let mut compiling = SpecErrorCollector::default();
        let invalid = |field: &str, detail: String| FieldError {
            field: format!("spec.source.schedule.{field}"),
            detail,
        };
        let zone = compiling.take(TimeZone::get(&schedule.time_zone).map_err(|_| {
            let detail = format!(
                "{} is not an IANA time zone: use for example Europe/Berlin or UTC",
                schedule.time_zone
            );
            invalid("timeZone", detail)
        }));
        let parser = CronParser::builder()
            .seconds(Seconds::Disallowed)
            .year(Year::Disallowed)
            .build();
        let cron = parser.parse(&schedule.cron);
        let cron = compiling.take(cron.map_err(|error| invalid("cron", error.to_string())));
        let never = |cron: &Cron| {
            let from = Timestamp::UNIX_EPOCH.to_zoned(TimeZone::UTC);
            cron.find_next_occurrence(&from, false).is_err()
        };
        if cron.as_ref().is_some_and(never) {
            compiling.take::<()>(Err(invalid("cron", "never matches a date".into())));
        }
        let missed = schedule.missed;
        compiling.end(|| {
            Some(Self {
                cron: cron?,
                zone: zone?,
                missed,
            })
        })
    }

    #[must_use]
    pub fn after(&self, moment: Timestamp) -> Option<Timestamp> {
        let found = self.cron.find_next_occurrence(&self.at(moment), false).ok()?;
        Some(found.timestamp()).filter(|found| *found > moment)
    }

    /// The tick that is due at `now`, given that ticks up to `through` are done and that the Sensor has been running
    /// since `since`.
    #[must_use]
    pub fn due(&self, through: Timestamp, since: Timestamp, now: Timestamp) -> DueTick {
        if self.after(through).is_none_or(|next| next > now) {
            return DueTick::Nothing;
        }
        let last = self.cron.find_previous_occurrence(&self.at(now), true).ok();
        // The backward search may miss a tick that the forward search found: then it is that one.
        let last = last.map(|last| last.timestamp()).filter(|last| *last > through);
        let Some(last) = last.or_else(|| self.after(through)) else {
            return DueTick::Nothing;
        };
        let missed = last < since || now.duration_since(last) > LATE;
        if missed && self.missed == MissedTickPolicy::Skip {
            DueTick::Skipped(last)
        } else {
            DueTick::Tick(last)
        }
    }

    fn at(&self, moment: Timestamp) -> Zoned {
        moment.to_zoned(self.zone.clone())
    }
}

/// The ticks due at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DueTick {
    /// No tick is due.
    Nothing,
    /// This tick fires; earlier ones do not.
    Tick(Timestamp),
    /// Ticks up to this one were missed and are skipped.
    Skipped(Timestamp),
}

/// The event id of a tick.
#[must_use]
pub fn delivery_id(sensor: &str, tick: Timestamp) -> String {
    format!("{sensor}/{tick}")
}

/// The payload of a tick.
#[must_use]
pub fn payload(tick: Timestamp) -> Value {
    json!({ "scheduledTime": tick.to_string() })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn calendar(cron: &str, zone: &str, missed: MissedTickPolicy) -> TickCalendar {
        let schedule = ScheduleSource {
            cron: cron.into(),
            time_zone: zone.into(),
            missed,
        };
        TickCalendar::compile(&schedule).expect("a schedule")
    }

    fn moment(text: &str) -> Timestamp {
        text.parse().expect("a moment")
    }

    /// Each tick between two moments, found one after the other.
    fn ticks(cron: &str, zone: &str, from: &str, to: &str) -> Vec<String> {
        let calendar = calendar(cron, zone, MissedTickPolicy::RunOnce);
        let (mut at, to) = (moment(from), moment(to));
        let mut found = Vec::new();
        while let Some(next) = calendar.after(at).filter(|next| *next <= to) {
            // The backward search finds the same tick.
            let seen = calendar.due(at, at, next);
            assert_eq!(seen, DueTick::Tick(next), "after {at}");
            found.push(next.to_string());
            at = next;
        }
        found
    }

    #[rstest]
    // Berlin, into summer time: 02:00 is 03:00.
    #[case("30 2 * * *", "Europe/Berlin", "2026-03-28T00:00:00Z", "2026-03-30T12:00:00Z",
        &["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"])]
    #[case("*/30 * * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", "2026-03-29T01:30:00Z",
        &["2026-03-29T00:30:00Z", "2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"])]
    // And back: 03:00 is 02:00 again.
    #[case("30 2 * * *", "Europe/Berlin", "2026-10-24T00:00:00Z", "2026-10-26T12:00:00Z",
        &["2026-10-24T00:30:00Z", "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"])]
    #[case("*/30 * * * *", "Europe/Berlin", "2026-10-25T00:00:00Z", "2026-10-25T02:00:00Z",
        &["2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z", "2026-10-25T02:00:00Z"])]
    // New York, both ways.
    #[case("30 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", "2026-03-09T12:00:00Z",
        &["2026-03-08T07:00:00Z", "2026-03-09T06:30:00Z"])]
    #[case("30 1 * * *", "America/New_York", "2026-10-31T12:00:00Z", "2026-11-02T12:00:00Z",
        &["2026-11-01T05:30:00Z", "2026-11-02T06:30:00Z"])]
    // Leap days, working days, and the end of a year.
    #[case("0 8 29 2 *", "UTC", "2026-01-01T00:00:00Z", "2033-01-01T00:00:00Z",
        &["2028-02-29T08:00:00Z", "2032-02-29T08:00:00Z"])]
    #[case("0 8 * * 1-5", "UTC", "2026-01-02T00:00:00Z", "2026-01-06T00:00:00Z",
        &["2026-01-02T08:00:00Z", "2026-01-05T08:00:00Z"])]
    #[case("59 23 31 12 *", "Asia/Tokyo", "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z", &["2026-12-31T14:59:00Z"])]
    fn each_tick_fires_once_in_its_time_zone(
        #[case] cron: &str,
        #[case] zone: &str,
        #[case] from: &str,
        #[case] to: &str,
        #[case] expected: &[&str],
    ) {
        assert_eq!(ticks(cron, zone, from, to), expected);
    }

    #[rstest]
    #[case("* * * *", "UTC", "spec.source.schedule.cron: ")]
    #[case("* * * * * *", "UTC", "spec.source.schedule.cron: ")]
    #[case("61 * * * *", "UTC", "spec.source.schedule.cron: ")]
    #[case("0 0 30 2 *", "UTC", "spec.source.schedule.cron: never matches a date")]
    #[case(
        "0 0 1 1 *",
        "Europe/Atlantis",
        "spec.source.schedule.timeZone: Europe/Atlantis is not an IANA time zone: use for example Europe/Berlin or UTC"
    )]
    fn an_invalid_schedule_is_refused_with_its_field(#[case] cron: &str, #[case] zone: &str, #[case] expected: &str) {
        let schedule = ScheduleSource {
            cron: cron.into(),
            time_zone: zone.into(),
            missed: MissedTickPolicy::RunOnce,
        };
        let error = TickCalendar::compile(&schedule).expect_err("an error").to_string();
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn after_a_day_of_downtime_at_most_the_last_tick_fires_late() {
        let (through, now) = (moment("2026-01-05T08:00:00Z"), moment("2026-01-06T08:00:30Z"));
        let of = |missed| calendar("*/10 * * * *", "UTC", missed);
        let last = moment("2026-01-06T08:00:00Z");
        assert_eq!(
            of(MissedTickPolicy::RunOnce).due(through, now, now),
            DueTick::Tick(last)
        );
        assert_eq!(
            of(MissedTickPolicy::Skip).due(through, now, now),
            DueTick::Skipped(last)
        );
        assert_eq!(of(MissedTickPolicy::RunOnce).due(last, now, now), DueTick::Nothing);
    }

    #[test]
    fn an_awaited_tick_fires_up_to_a_minute_late_and_is_missed_after_that() {
        let calendar = calendar("0 8 * * *", "UTC", MissedTickPolicy::Skip);
        let (through, tick) = (moment("2026-01-05T08:00:00Z"), moment("2026-01-06T08:00:00Z"));
        let at = |seconds| tick + SignedDuration::from_secs(seconds);
        assert_eq!(calendar.due(through, through, at(-1)), DueTick::Nothing);
        assert_eq!(calendar.due(through, through, at(0)), DueTick::Tick(tick));
        assert_eq!(calendar.due(through, through, at(60)), DueTick::Tick(tick));
        assert_eq!(calendar.due(through, through, at(61)), DueTick::Skipped(tick));
        // A Sensor that runs only since then has missed it.
        assert_eq!(calendar.due(through, at(1), at(2)), DueTick::Skipped(tick));
        assert_eq!(calendar.due(through, at(0), at(2)), DueTick::Tick(tick));
    }
}
