//! `guardrails.activeHours`: holds the loop outside the hours, by the clock of their time zone. Clears only when the
//! next window begins; a call in flight at the end of a window is finished.
//!
//! A window is a pair of instants, so that it begins and ends exactly once. If the clocks skip its beginning or its
//! end, the instant of the jump counts; if they show it twice, the first time counts.

use jiff::civil::{Date, DateTime, Time, Weekday};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp, ToSpan};

use super::{ClockDecision, ClockPause, Guardrail};
use crate::settings::EngineSettings;
use agentloop_api::agent::{self, DayOfWeek};
use agentloop_api::status::PauseReason;

/// Days to search for the next window: a yearly clock change may skip a weekly window.
const LOOK_AHEAD: i32 = 40;

pub struct ActiveHoursGuardrail;

impl Guardrail for ActiveHoursGuardrail {
    fn by_clock(&self, settings: &EngineSettings, now: Timestamp) -> Option<ClockDecision> {
        let at = settings.active_hours.as_ref().map(|hours| (hours, hours.at(now)));
        let (closed, changes) = match at {
            None => (None, None),
            Some((_, WindowPosition::Inside { end })) => (None, Some(end)),
            Some((hours, WindowPosition::Outside { next })) => {
                let message = format!("outside guardrails.activeHours ({})", hours.words);
                (Some(ClockPause { until: next, message }), next)
            }
        };
        Some(ClockDecision {
            reason: PauseReason::OutsideActiveHours,
            closed,
            changes,
        })
    }
}

/// The windows of each week.
#[derive(Clone, Debug, PartialEq)]
pub struct ActiveHours {
    zone: TimeZone,
    /// Monday first.
    days: [bool; 7],
    start: Time,
    end: Time,
    /// The window ends on the day after it begins.
    past_midnight: bool,
    /// The hours as text, for messages.
    words: String,
}

/// Active hours that cannot be used; admission rejects all but unknown time zones.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub enum ActiveHoursError {
    #[error("spec.guardrails.activeHours.timeZone {0} is not an IANA time zone: use for example Europe/Berlin or UTC")]
    Zone(String),
    #[error("spec.guardrails.activeHours: {0} is not a time of day: use for example 08:00")]
    Time(String),
}

/// Where a time lies relative to the windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowPosition {
    /// Inside a window.
    Inside {
        /// The end of the window, which may be the beginning of the next one.
        end: Timestamp,
    },
    /// Outside every window.
    Outside {
        /// When the next window begins; `None`: never.
        next: Option<Timestamp>,
    },
}

impl ActiveHours {
    /// Parses the windows of a spec.
    pub fn read(hours: &agent::ActiveHoursSpec) -> Result<Self, ActiveHoursError> {
        let zone = TimeZone::get(&hours.time_zone).map_err(|_| ActiveHoursError::Zone(hours.time_zone.clone()))?;
        let time = |text: &String| text.parse::<Time>().map_err(|_| ActiveHoursError::Time(text.clone()));
        let start = time(&hours.start)?;
        let (end, past_midnight) = if hours.end == "24:00" {
            (Time::midnight(), true)
        } else {
            let end = time(&hours.end)?;
            (end, end <= start)
        };
        let mut days = [hours.days.is_empty(); 7];
        for day in &hours.days {
            days[*day as usize] = true;
        }
        let named: Vec<&str> = hours.days.iter().map(DayOfWeek::as_ref).collect();
        let named = if named.is_empty() {
            "every day".to_owned()
        } else {
            named.join(", ")
        };
        let words = format!("{named} {} to {}, {}", hours.start, hours.end, hours.time_zone);
        Ok(Self {
            zone,
            days,
            start,
            end,
            past_midnight,
            words,
        })
    }

    #[must_use]
    pub fn at(&self, now: Timestamp) -> WindowPosition {
        let today = self.zone.to_datetime(now).date();
        let window = |offset: i32| self.window(today.checked_add(offset.days()).ok()?);
        let mut around = (-2..=1).filter_map(window);
        if let Some((_, end)) = around.rfind(|(start, end)| (*start..*end).contains(&now)) {
            return WindowPosition::Inside { end };
        }
        let next = (-1..=LOOK_AHEAD).filter_map(window).find(|(start, _)| *start > now);
        WindowPosition::Outside {
            next: next.map(|(start, _)| start),
        }
    }

    /// The window that begins on a day; `None`: the day has none, or the clocks skip all of it.
    fn window(&self, date: Date) -> Option<(Timestamp, Timestamp)> {
        if !self.days[usize::try_from(date.weekday().since(Weekday::Monday)).ok()?] {
            return None;
        }
        let last = if self.past_midnight {
            date.tomorrow().ok()?
        } else {
            date
        };
        let start = self.instant(date.to_datetime(self.start))?;
        let end = self.instant(last.to_datetime(self.end))?;
        (start < end).then_some((start, end))
    }

    /// The first instant at which the clocks of the zone show a time; if they skip it, the instant of the jump.
    fn instant(&self, time: DateTime) -> Option<Timestamp> {
        match self.zone.to_ambiguous_timestamp(time).offset() {
            AmbiguousOffset::Unambiguous { offset } | AmbiguousOffset::Fold { before: offset, .. } => {
                offset.to_timestamp(time).ok()
            }
            AmbiguousOffset::Gap { before, .. } => {
                let unmoved = before.to_timestamp(time).ok()?;
                let after = unmoved.checked_add(SignedDuration::from_nanos(1)).ok()?;
                self.zone.preceding(after).next().map(|jump| jump.timestamp())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hours(zone: &str, days: &[DayOfWeek], start: &str, end: &str) -> ActiveHours {
        ActiveHours::read(&agent::ActiveHoursSpec {
            time_zone: zone.into(),
            days: days.to_vec(),
            start: start.into(),
            end: end.into(),
        })
        .unwrap()
    }

    /// Every change between inside and outside, found by stepping through time minute by minute.
    fn changes(hours: &ActiveHours, from: &str, days: i64) -> Vec<String> {
        let from: Timestamp = from.parse().unwrap();
        let inside = |now| matches!(hours.at(now), WindowPosition::Inside { .. });
        let mut found = Vec::new();
        let mut before = inside(from);
        for minute in 1..=days * 24 * 60 {
            let now = from + SignedDuration::from_mins(minute);
            if inside(now) != before {
                before = !before;
                let mark = if before { "+" } else { "-" };
                found.push(format!("{mark}{}", now.strftime("%m-%dT%H:%M")));
            }
        }
        found
    }

    /// Every change as [`ActiveHours::at`] predicts it.
    fn foretold(hours: &ActiveHours, from: &str, days: i64) -> Vec<String> {
        let mut now: Timestamp = from.parse().unwrap();
        let end = now + SignedDuration::from_hours(24 * days);
        let mut found = Vec::new();
        loop {
            let (mark, next) = match hours.at(now) {
                WindowPosition::Inside { end } => ("-", Some(end)),
                WindowPosition::Outside { next } => ("+", next),
            };
            let Some(next) = next.filter(|next| *next <= end) else {
                return found;
            };
            assert!(next > now, "{next} after {now}");
            now = next;
            // One window may end where the next begins.
            if (mark == "-") == matches!(hours.at(now), WindowPosition::Outside { .. }) {
                found.push(format!("{mark}{}", now.strftime("%m-%dT%H:%M")));
            }
        }
    }

    fn both(hours: &ActiveHours, from: &str, days: i64) -> Vec<String> {
        let walked = changes(hours, from, days);
        assert_eq!(foretold(hours, from, days), walked);
        walked
    }

    #[test]
    fn a_window_begins_with_its_first_moment_and_is_over_with_its_last() {
        let hours = hours("UTC", &[], "08:00", "23:00");
        let at = |text: &str| hours.at(text.parse().unwrap());
        let next = |text: &str| WindowPosition::Outside {
            next: Some(text.parse().unwrap()),
        };
        let inside = WindowPosition::Inside {
            end: "2026-05-04T23:00:00Z".parse().unwrap(),
        };
        assert_eq!(at("2026-05-04T07:59:59.999999999Z"), next("2026-05-04T08:00:00Z"));
        assert_eq!(at("2026-05-04T08:00:00Z"), inside);
        assert_eq!(at("2026-05-04T22:59:59.999999999Z"), inside);
        assert_eq!(at("2026-05-04T23:00:00Z"), next("2026-05-05T08:00:00Z"));
    }

    #[test]
    fn a_window_over_midnight_belongs_to_the_day_on_which_it_begins() {
        let hours = hours("UTC", &[DayOfWeek::Friday, DayOfWeek::Saturday], "22:00", "02:00");
        // 2026-05-04 is a Monday.
        let week = ["+05-08T22:00", "-05-09T02:00", "+05-09T22:00", "-05-10T02:00"];
        assert_eq!(both(&hours, "2026-05-04T00:00:00Z", 7), week);
    }

    #[test]
    fn whole_days_follow_each_other_without_a_gap() {
        let days = [
            DayOfWeek::Monday,
            DayOfWeek::Tuesday,
            DayOfWeek::Wednesday,
            DayOfWeek::Thursday,
            DayOfWeek::Friday,
        ];
        let work = hours("UTC", &days, "00:00", "24:00");
        assert_eq!(
            both(&work, "2026-05-01T00:00:00Z", 9),
            ["-05-02T00:00", "+05-04T00:00", "-05-09T00:00"]
        );
        assert_eq!(
            both(&hours("UTC", &[], "00:00", "24:00"), "2026-05-01T00:00:00Z", 9),
            Vec::<String>::new()
        );
        assert_eq!(
            both(
                &hours("UTC", &[DayOfWeek::Sunday], "20:00", "00:00"),
                "2026-05-01T00:00:00Z",
                7
            ),
            ["+05-03T20:00", "-05-04T00:00"]
        );
    }

    #[test]
    fn hours_are_those_of_the_clock_on_the_wall_through_both_changes_in_two_zones() {
        let berlin = hours("Europe/Berlin", &[], "08:00", "23:00");
        assert_eq!(
            both(&berlin, "2026-03-28T00:00:00Z", 3),
            [
                "+03-28T07:00",
                "-03-28T22:00",
                "+03-29T06:00",
                "-03-29T21:00",
                "+03-30T06:00",
                "-03-30T21:00"
            ]
        );
        assert_eq!(
            both(&berlin, "2026-10-24T00:00:00Z", 2),
            ["+10-24T06:00", "-10-24T21:00", "+10-25T07:00", "-10-25T22:00"]
        );
        let lord_howe = hours("Australia/Lord_Howe", &[], "08:00", "23:00");
        // Half an hour, and in the other direction: clocks are set back in April.
        assert_eq!(
            both(&lord_howe, "2026-04-03T13:00:00Z", 2),
            ["+04-03T21:00", "-04-04T12:00", "+04-04T21:30", "-04-05T12:30"]
        );
        assert_eq!(
            both(&lord_howe, "2026-10-02T13:00:00Z", 2),
            ["+10-02T21:30", "-10-03T12:30", "+10-03T21:00", "-10-04T12:00"]
        );
    }

    #[test]
    fn a_time_that_the_clocks_skip_is_the_moment_at_which_they_jump() {
        // In Berlin, 02:00 to 03:00 does not exist on 29 March; the clocks jump at 01:00 UTC.
        let night = hours("Europe/Berlin", &[DayOfWeek::Sunday], "02:30", "04:00");
        assert_eq!(
            both(&night, "2026-03-29T00:00:00Z", 1),
            ["+03-29T01:00", "-03-29T02:00"]
        );
        let at_the_jump = hours("Europe/Berlin", &[DayOfWeek::Sunday], "02:00", "04:00");
        assert_eq!(
            both(&at_the_jump, "2026-03-29T00:00:00Z", 1),
            ["+03-29T01:00", "-03-29T02:00"]
        );
        let early = hours("Europe/Berlin", &[DayOfWeek::Sunday], "01:00", "02:30");
        assert_eq!(
            both(&early, "2026-03-28T12:00:00Z", 1),
            ["+03-29T00:00", "-03-29T01:00"]
        );
        let skipped = hours("Europe/Berlin", &[DayOfWeek::Sunday], "02:10", "02:50");
        assert_eq!(
            both(&skipped, "2026-03-23T00:00:00Z", 14),
            ["+04-05T00:10", "-04-05T00:50"],
            "all of it is skipped: there is none that Sunday"
        );
    }

    #[test]
    fn the_first_occurrence_counts_of_a_time_that_occurs_twice() {
        // In Berlin, 02:00 to 03:00 occurs twice on 25 October: from 00:00 and from 01:00 UTC.
        let end = hours("Europe/Berlin", &[DayOfWeek::Sunday], "01:00", "02:30");
        assert_eq!(both(&end, "2026-10-24T12:00:00Z", 1), ["+10-24T23:00", "-10-25T00:30"]);
        let start = hours("Europe/Berlin", &[DayOfWeek::Sunday], "02:30", "05:00");
        assert_eq!(
            both(&start, "2026-10-24T12:00:00Z", 1),
            ["+10-25T00:30", "-10-25T04:00"]
        );
    }

    #[test]
    fn a_day_that_a_zone_never_had_has_no_window() {
        // Samoa went from 29 to 31 December 2011; the 30th was a Friday.
        let apia = hours("Pacific/Apia", &[DayOfWeek::Friday], "08:00", "09:00");
        assert_eq!(
            both(&apia, "2011-12-24T00:00:00Z", 14),
            ["+01-05T18:00", "-01-05T19:00"]
        );
    }

    #[test]
    fn an_invalid_zone_or_time_is_refused_by_name() {
        let read = |zone: &str, start: &str, end: &str| {
            ActiveHours::read(&agent::ActiveHoursSpec {
                time_zone: zone.into(),
                days: Vec::new(),
                start: start.into(),
                end: end.into(),
            })
        };
        let error = read("Mars/Base", "08:00", "09:00").unwrap_err();
        assert!(error.to_string().contains("activeHours.timeZone Mars/Base"));
        assert_eq!(
            read("UTC", "25:00", "09:00"),
            Err(ActiveHoursError::Time("25:00".into()))
        );
        assert_eq!(
            read("UTC", "08:00", "24:01"),
            Err(ActiveHoursError::Time("24:01".into()))
        );
    }
}
