//! Windows: rolling, calendar and lifetime, and the usage settled in them.

use std::collections::VecDeque;

use jiff::civil::{Date, Weekday};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan};

use super::sum::{self, AmountSum};
use agentloop_api::amount::Amount;
use agentloop_api::budget::{BudgetWindow, CalendarPeriod, CalendarWindow, LifetimeWindow, RollingWindow, UsageBucket};

/// Number of buckets of a [`RollingWindow`]; a bucket expires only as a whole.
pub const PIECES: i32 = 60;
/// The same for the usage of each single Agent.
pub const SHARE_PIECES: i32 = 4;
const MIN_PIECE: SignedDuration = SignedDuration::from_millis(50);

/// The rule of a window.
#[derive(Clone, Debug, PartialEq)]
pub enum WindowRule {
    /// The time of this length before now.
    Rolling(SignedDuration),
    /// Days, weeks or months in a time zone.
    Calendar(CalendarPeriod, TimeZone),
    /// A single window without an end.
    Lifetime,
}

/// An invalid window.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub enum WindowError {
    /// Not exactly one kind of window.
    #[error("spec.window must have exactly one of rolling, calendar and lifetime, such as {{lifetime: {{}}}}")]
    NotOne,
    /// A time zone that is not in the IANA database.
    #[error("spec.window.calendar.timeZone {0} is not an IANA time zone: use for example Europe/Berlin or UTC")]
    Zone(String),
}

impl WindowRule {
    /// The rule of a spec.
    pub fn read(window: &BudgetWindow) -> Result<Self, WindowError> {
        match (&window.rolling, &window.calendar, &window.lifetime) {
            (Some(rolling), None, None) => Ok(Self::Rolling(SignedDuration::from_secs(rolling.seconds))),
            (None, Some(calendar), None) => TimeZone::get(&calendar.time_zone)
                .map(|zone| Self::Calendar(calendar.period, zone))
                .map_err(|_| WindowError::Zone(calendar.time_zone.clone())),
            (None, None, Some(_)) => Ok(Self::Lifetime),
            _ => Err(WindowError::NotOne),
        }
    }

    /// The rule as in a spec, in whole seconds.
    #[must_use]
    pub fn write(&self) -> BudgetWindow {
        let mut window = BudgetWindow {
            rolling: None,
            calendar: None,
            lifetime: None,
        };
        match self {
            Self::Rolling(length) => {
                let seconds = length.as_secs() + i64::from(length.subsec_nanos() > 0);
                window.rolling = Some(RollingWindow { seconds });
            }
            Self::Calendar(period, zone) => {
                window.calendar = Some(CalendarWindow {
                    period: *period,
                    time_zone: zone.iana_name().unwrap_or_default().to_owned(),
                });
            }
            Self::Lifetime => window.lifetime = Some(LifetimeWindow {}),
        }
        window
    }

    /// Beginning of the window at `now`, which identifies it; 1970 for rolling and lifetime windows, which have no
    /// identity.
    #[must_use]
    pub fn start(&self, now: Timestamp) -> Timestamp {
        match self {
            Self::Rolling(_) | Self::Lifetime => Timestamp::UNIX_EPOCH,
            Self::Calendar(period, zone) => bounds(*period, zone, now).0,
        }
    }

    /// Length of the window at `now` in seconds; `None`: it has no end.
    #[must_use]
    pub fn seconds(&self, now: Timestamp) -> Option<i64> {
        match self {
            Self::Rolling(length) => Some(length.as_secs()),
            Self::Calendar(..) => Some(self.end(now)?.duration_since(self.start(now)).as_secs()),
            Self::Lifetime => None,
        }
    }

    /// End of the [`CalendarWindow`] at `now`, which is the beginning of the next.
    #[must_use]
    pub fn end(&self, now: Timestamp) -> Option<Timestamp> {
        match self {
            Self::Rolling(_) | Self::Lifetime => None,
            Self::Calendar(period, zone) => bounds(*period, zone, now).1,
        }
    }

    /// Start of the bucket for usage settled at `now`, in windows of `pieces` buckets.
    #[must_use]
    fn piece(&self, now: Timestamp, pieces: i32) -> Timestamp {
        match self {
            Self::Rolling(length) => {
                let piece = piece_length(*length, pieces).as_millis();
                let at = i128::from(now.as_millisecond());
                let start = at - at.rem_euclid(piece);
                i64::try_from(start)
                    .ok()
                    .and_then(|start| Timestamp::from_millisecond(start).ok())
                    .unwrap_or(now)
            }
            Self::Calendar(..) | Self::Lifetime => self.start(now),
        }
    }

    /// When a [`UsageBucket`] that starts at `start` expires; `None`: never.
    #[must_use]
    fn expires(&self, start: Timestamp, pieces: i32) -> Option<Timestamp> {
        match self {
            Self::Rolling(length) => start
                .checked_add(piece_length(*length, pieces))
                .and_then(|end| end.checked_add(*length))
                .ok(),
            Self::Calendar(..) => self.end(start),
            Self::Lifetime => None,
        }
    }

    /// When usage settled at `at` expires, provided it counts at `now`; `None`: never.
    #[must_use]
    pub fn expires_at(&self, at: Timestamp, now: Timestamp) -> Option<Timestamp> {
        match self {
            Self::Rolling(length) => at.checked_add(*length).ok(),
            Self::Calendar(..) => self.end(now),
            Self::Lifetime => None,
        }
    }

    /// Whether usage settled at `at` counts at `now`.
    #[must_use]
    pub fn counts(&self, at: Timestamp, now: Timestamp) -> bool {
        match self {
            Self::Rolling(length) => at.checked_add(*length).is_ok_and(|end| now < end),
            Self::Calendar(..) => at >= self.start(now),
            Self::Lifetime => true,
        }
    }
}

/// In whole milliseconds, rounded up: a window has at most `pieces` whole buckets, and parts of two more at its ends.
fn piece_length(window: SignedDuration, pieces: i32) -> SignedDuration {
    let nanos = (window / pieces).as_nanos();
    let millis = nanos.div_euclid(1_000_000) + i128::from(nanos.rem_euclid(1_000_000) > 0);
    SignedDuration::from_millis(i64::try_from(millis).unwrap_or(i64::MAX)).max(MIN_PIECE)
}

/// Beginning and end of the [`CalendarWindow`] at `now`. A window begins at the first instant of a civil day and ends
/// where the next begins, so every instant is in exactly one window, even if midnight does not exist (the day then
/// begins when the clocks jump), occurs twice, or clocks set back after midnight return to the previous day.
fn bounds(period: CalendarPeriod, zone: &TimeZone, now: Timestamp) -> (Timestamp, Option<Timestamp>) {
    let begins = |date: Date| date.to_zoned(zone.clone()).ok().map(|start| start.timestamp());
    let today = zone.to_datetime(now).date();
    let mut first = match period {
        CalendarPeriod::Daily => today,
        CalendarPeriod::Weekly => {
            let back = today.weekday().since(Weekday::Monday);
            today.checked_sub(i32::from(back).days()).unwrap_or(today)
        }
        CalendarPeriod::Monthly => today.first_of_month(),
    };
    let span = match period {
        CalendarPeriod::Daily => 1.day(),
        CalendarPeriod::Weekly => 1.week(),
        CalendarPeriod::Monthly => 1.month(),
    };
    // If clocks jump over midnight, the day begins a little after its nominal first instant.
    if begins(first).is_some_and(|start| start > now) {
        first = first.checked_sub(span).unwrap_or(first);
    }
    loop {
        let next = first.checked_add(span).ok();
        match next.and_then(|next| Some((next, begins(next)?))) {
            Some((next, start)) if start <= now => first = next,
            end => return (begins(first).unwrap_or(Timestamp::MIN), end.map(|(_, start)| start)),
        }
    }
}

/// The usage settled in the current window, in [`UsageBucket`]s.
#[derive(Clone, Debug, PartialEq)]
pub struct SettledUsage {
    pieces: i32,
    /// Oldest first, which is also the order of expiry.
    buckets: VecDeque<UsageBucket>,
    sum: AmountSum,
}

impl SettledUsage {
    /// No usage, counted in at most `pieces` buckets.
    #[must_use]
    pub fn new(pieces: i32) -> Self {
        Self {
            pieces,
            buckets: VecDeque::new(),
            sum: AmountSum::default(),
        }
    }

    /// Restores written [`UsageBucket`]s.
    #[must_use]
    pub fn restore(pieces: i32, buckets: &[UsageBucket]) -> Self {
        let mut settled = Self::new(pieces);
        for bucket in buckets {
            settled.put(bucket.start, &bucket.amount);
        }
        settled
    }

    /// The [`UsageBucket`]s to be written.
    #[must_use]
    pub fn buckets(&self) -> Vec<UsageBucket> {
        self.buckets.iter().cloned().collect()
    }

    /// The amount of each [`UsageBucket`].
    pub fn amounts(&self) -> impl Iterator<Item = &Amount> {
        self.buckets.iter().map(|bucket| &bucket.amount)
    }

    /// Adds usage settled at `now`. A sum that exceeds 64 bits saturates and leaves no room.
    pub fn add(&mut self, rule: &WindowRule, now: Timestamp, amount: &Amount) {
        self.put(rule.piece(now, self.pieces), amount);
    }

    fn put(&mut self, start: Timestamp, amount: &Amount) {
        if amount.is_zero() {
            return;
        }
        let place = self.buckets.partition_point(|bucket| bucket.start < start);
        if self.buckets.get(place).is_none_or(|bucket| bucket.start != start) {
            let amount = Amount::ZERO;
            self.buckets.insert(place, UsageBucket { start, amount });
        }
        if let Some(bucket) = self.buckets.get_mut(place) {
            self.sum.take(&bucket.amount);
            bucket.amount = sum::saturating_sum(&bucket.amount, amount);
            self.sum.add(&bucket.amount);
        }
    }

    /// Drops what has expired at `now`.
    pub fn advance(&mut self, rule: &WindowRule, now: Timestamp) {
        while self.expiries(rule).next().is_some_and(|end| end <= now) {
            if let Some(bucket) = self.buckets.pop_front() {
                self.sum.take(&bucket.amount);
            }
        }
    }

    /// The sum of all [`UsageBucket`]s.
    #[must_use]
    pub fn total(&self) -> Amount {
        self.sum.amount()
    }

    /// The future sums if nothing is added, each with the time from which it holds; the first is the current sum.
    #[must_use]
    pub fn forecast(&self, rule: &WindowRule) -> Vec<(Timestamp, Amount)> {
        let mut sum = self.sum;
        let mut sums = vec![(Timestamp::MIN, sum.amount())];
        for (bucket, end) in self.buckets.iter().zip(self.expiries(rule)) {
            sum.take(&bucket.amount);
            sums.push((end, sum.amount()));
        }
        sums
    }

    /// The times at which [`UsageBucket`]s expire, in order.
    pub fn expiries<'a>(&'a self, rule: &'a WindowRule) -> impl Iterator<Item = Timestamp> + 'a {
        self.buckets
            .iter()
            .map_while(|bucket| rule.expires(bucket.start, self.pieces))
    }

    /// Converts to another rule: each [`UsageBucket`] counts as if it had been settled at the last possible moment.
    pub fn translate(&mut self, old: &WindowRule, new: &WindowRule, now: Timestamp) {
        self.advance(old, now);
        let before = std::mem::replace(self, Self::new(self.pieces));
        for bucket in before.buckets {
            let last = match old {
                WindowRule::Rolling(length) => bucket
                    .start
                    .checked_add(piece_length(*length, self.pieces))
                    .map_or(now, |end| end.min(now)),
                WindowRule::Calendar(..) | WindowRule::Lifetime => now,
            };
            self.add(new, last, &bucket.amount);
        }
        self.advance(new, now);
    }

    /// Raises each bucket to at least that of `other`.
    pub fn raise_to(&mut self, other: &Self) {
        for bucket in &other.buckets {
            let here = self.buckets.iter().find(|here| here.start == bucket.start);
            let more = bucket
                .amount
                .saturating_sub(&here.map_or(Amount::ZERO, |here| here.amount));
            self.put(bucket.start, &more);
        }
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;

    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[rstest]
    // Clocks go forward: the day has 23 hours; or back: 25.
    #[case::forward(
        CalendarPeriod::Daily,
        "Europe/Berlin",
        "2026-03-29T12:00:00Z",
        "2026-03-28T23:00:00Z",
        "2026-03-29T22:00:00Z"
    )]
    #[case::back(
        CalendarPeriod::Daily,
        "Europe/Berlin",
        "2026-10-25T12:00:00Z",
        "2026-10-24T22:00:00Z",
        "2026-10-25T23:00:00Z"
    )]
    #[case::forward_west(
        CalendarPeriod::Daily,
        "America/New_York",
        "2026-03-08T12:00:00Z",
        "2026-03-08T05:00:00Z",
        "2026-03-09T04:00:00Z"
    )]
    #[case::back_west(
        CalendarPeriod::Daily,
        "America/New_York",
        "2026-11-01T12:00:00Z",
        "2026-11-01T04:00:00Z",
        "2026-11-02T05:00:00Z"
    )]
    // A day without midnight begins with its first instant.
    #[case::no_midnight(
        CalendarPeriod::Daily,
        "Asia/Beirut",
        "2022-03-27T12:00:00Z",
        "2022-03-26T22:00:00Z",
        "2022-03-27T21:00:00Z"
    )]
    #[case::no_midnight_west(
        CalendarPeriod::Daily,
        "America/Sao_Paulo",
        "2018-11-04T12:00:00Z",
        "2018-11-04T03:00:00Z",
        "2018-11-05T02:00:00Z"
    )]
    // Weeks begin on Monday, also across clock changes.
    #[case::week(
        CalendarPeriod::Weekly,
        "UTC",
        "2026-11-22T23:59:59Z",
        "2026-11-16T00:00:00Z",
        "2026-11-23T00:00:00Z"
    )]
    #[case::week_of_a_change(
        CalendarPeriod::Weekly,
        "Europe/Berlin",
        "2026-10-25T12:00:00Z",
        "2026-10-18T22:00:00Z",
        "2026-10-25T23:00:00Z"
    )]
    // Months have their own lengths.
    #[case::short_month(
        CalendarPeriod::Monthly,
        "UTC",
        "2026-02-28T23:59:59Z",
        "2026-02-01T00:00:00Z",
        "2026-03-01T00:00:00Z"
    )]
    #[case::leap_day(
        CalendarPeriod::Monthly,
        "UTC",
        "2028-02-29T12:00:00Z",
        "2028-02-01T00:00:00Z",
        "2028-03-01T00:00:00Z"
    )]
    #[case::leap_year_daily(
        CalendarPeriod::Daily,
        "UTC",
        "2028-02-29T12:00:00Z",
        "2028-02-29T00:00:00Z",
        "2028-03-01T00:00:00Z"
    )]
    #[case::year_end(
        CalendarPeriod::Monthly,
        "Asia/Tokyo",
        "2026-12-31T16:00:00Z",
        "2026-12-31T15:00:00Z",
        "2027-01-31T15:00:00Z"
    )]
    fn a_calendar_window_spans_from_its_first_moment_to_the_next_ones(
        #[case] period: CalendarPeriod,
        #[case] zone: &str,
        #[case] now: &str,
        #[case] start: &str,
        #[case] end: &str,
    ) {
        let rule = WindowRule::Calendar(period, TimeZone::get(zone).unwrap());
        let (start, end) = (at(start), at(end));
        assert_eq!((rule.start(at(now)), rule.end(at(now))), (start, Some(end)));
        // It holds from its first instant to its last.
        let last = end - SignedDuration::from_nanos(1);
        assert_eq!((rule.start(start), rule.start(last)), (start, start));
        assert_eq!(rule.start(end), end);
    }

    #[test]
    fn the_use_of_a_day_counts_until_its_last_moment() {
        let rule = WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::get("Europe/Berlin").unwrap());
        let used = Amount {
            tokens: 5,
            ..Amount::ZERO
        };
        let mut settled = SettledUsage::new(PIECES);
        settled.add(&rule, at("2026-03-29T00:30:00Z"), &used);
        settled.advance(&rule, at("2026-03-29T21:59:59Z"));
        assert_eq!(settled.total().tokens, 5);
        settled.advance(&rule, at("2026-03-29T22:00:00Z"));
        assert_eq!(settled.total().tokens, 0);
    }

    #[rstest]
    #[case(None, None, None)]
    #[case(Some(RollingWindow { seconds: 60 }), None, Some(LifetimeWindow {}))]
    fn exactly_one_kind_of_window_can_be_read(
        #[case] rolling: Option<RollingWindow>,
        #[case] calendar: Option<CalendarWindow>,
        #[case] lifetime: Option<LifetimeWindow>,
    ) {
        let window = BudgetWindow {
            rolling,
            calendar,
            lifetime,
        };
        assert_eq!(WindowRule::read(&window).unwrap_err(), WindowError::NotOne);
    }

    #[rstest]
    #[case(WindowRule::Rolling(SignedDuration::from_secs(2)), Some(2))]
    #[case(WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::get("Europe/Berlin").unwrap()), Some(23 * 3_600))]
    #[case(WindowRule::Lifetime, None)]
    fn a_rule_is_read_as_written_and_has_its_length(#[case] rule: WindowRule, #[case] seconds: Option<i64>) {
        assert_eq!(WindowRule::read(&rule.write()), Ok(rule.clone()));
        assert_eq!(rule.seconds(at("2026-03-29T12:00:00Z")), seconds);
    }

    #[rstest]
    #[case::rolling(WindowRule::Rolling(SignedDuration::from_mins(1)), Some("2026-03-29T12:01:00Z"))]
    #[case::calendar(
        WindowRule::Calendar(CalendarPeriod::Daily, TimeZone::UTC),
        Some("2026-03-30T00:00:00Z")
    )]
    #[case::lifetime(WindowRule::Lifetime, None)]
    fn usage_expires_a_window_later_or_with_its_calendar_window(#[case] rule: WindowRule, #[case] end: Option<&str>) {
        let (settled, now) = (at("2026-03-29T12:00:00Z"), at("2026-03-29T12:00:30Z"));
        assert_eq!(rule.expires_at(settled, now), end.map(at));
    }

    #[test]
    fn a_fraction_of_a_second_is_written_as_a_whole_one() {
        let written = WindowRule::Rolling(SignedDuration::from_millis(2_001)).write();
        assert_eq!(written.rolling, Some(RollingWindow { seconds: 3 }));
    }

    #[rstest]
    #[case::exact(SignedDuration::from_mins(1), 1_000)]
    #[case::rounded_up(SignedDuration::from_secs(10), 167)]
    #[case::shortest(SignedDuration::from_secs(3), 50)]
    #[case::short(SignedDuration::from_secs(1), 50)]
    fn usage_leaves_a_rolling_window_with_the_last_moment_of_its_piece(
        #[case] length: SignedDuration,
        #[case] piece: i64,
    ) {
        assert_eq!(piece_length(length, PIECES), SignedDuration::from_millis(piece));
        let rule = WindowRule::Rolling(length);
        // A piece begins at each multiple of its length.
        let begin = Timestamp::from_millisecond(1_000_000 * piece).unwrap();
        let last = SignedDuration::from_millis(piece - 1);
        let mut settled = SettledUsage::new(PIECES);
        let used = Amount {
            tokens: 5,
            ..Amount::ZERO
        };
        settled.add(&rule, begin, &used);
        settled.add(&rule, begin + last, &used);
        assert_eq!(settled.buckets().len(), 1);
        settled.advance(&rule, begin + last + length);
        assert_eq!(settled.total().tokens, 10);
        settled.advance(&rule, begin + last + length + SignedDuration::from_millis(1));
        assert_eq!(settled.total().tokens, 0);
    }

    #[test]
    fn a_zone_that_is_none_is_named() {
        let window = BudgetWindow {
            rolling: None,
            calendar: Some(CalendarWindow {
                period: CalendarPeriod::Daily,
                time_zone: "Europe/Atlantis".into(),
            }),
            lifetime: None,
        };
        let error = WindowRule::read(&window).unwrap_err().to_string();
        assert!(
            error.contains("Europe/Atlantis") && error.contains("spec.window.calendar.timeZone"),
            "{error}"
        );
    }
}
