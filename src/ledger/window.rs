//! When something counts: rolling, calendar and lifetime windows, and what is settled in them.

use std::collections::VecDeque;

use jiff::civil::{Date, Weekday};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan};

use super::sum::{self, Sum};
use crate::api::amount::Amount;
use crate::api::budget::{Bucket, Calendar, Lifetime, Period, Rolling, Window};

/// Pieces that a rolling window is counted in; a piece leaves only when all of it is out.
pub const PIECES: i32 = 60;
/// The same for what each single Agent used.
pub const SHARE_PIECES: i32 = 4;
const SHORTEST_PIECE: SignedDuration = SignedDuration::from_millis(50);

/// The rule of a window.
#[derive(Clone, Debug, PartialEq)]
pub enum WindowRule {
    /// The last so long, at every moment.
    Rolling(SignedDuration),
    /// Days, weeks or months of a zone.
    Calendar(Period, TimeZone),
    /// One window for ever.
    Lifetime,
}

/// A window that cannot be used.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
pub enum WindowError {
    /// Not exactly one kind.
    #[error("spec.window must have exactly one of rolling, calendar and lifetime")]
    NotOne,
    /// A zone that is not in the IANA database.
    #[error("spec.window.calendar.timeZone {0} is no IANA time zone, such as Europe/Berlin")]
    Zone(String),
}

impl WindowRule {
    /// The rule of a spec.
    pub fn read(window: &Window) -> Result<Self, WindowError> {
        match (&window.rolling, &window.calendar, &window.lifetime) {
            (Some(rolling), None, None) => Ok(Self::Rolling(SignedDuration::from_secs(rolling.seconds))),
            (None, Some(calendar), None) => TimeZone::get(&calendar.time_zone)
                .map(|zone| Self::Calendar(calendar.period, zone))
                .map_err(|_| WindowError::Zone(calendar.time_zone.clone())),
            (None, None, Some(_)) => Ok(Self::Lifetime),
            _ => Err(WindowError::NotOne),
        }
    }

    /// The same as a spec says it, in whole seconds.
    #[must_use]
    pub fn write(&self) -> Window {
        let mut window = Window {
            rolling: None,
            calendar: None,
            lifetime: None,
        };
        match self {
            Self::Rolling(length) => {
                let seconds = length.as_secs() + i64::from(length.subsec_nanos() > 0);
                window.rolling = Some(Rolling { seconds });
            }
            Self::Calendar(period, zone) => {
                window.calendar = Some(Calendar {
                    period: *period,
                    time_zone: zone.iana_name().unwrap_or_default().to_owned(),
                });
            }
            Self::Lifetime => window.lifetime = Some(Lifetime {}),
        }
        window
    }

    /// Beginning of the window at `now`, which names it; 1970 where windows have no name (rolling, lifetime).
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

    /// End of the calendar window at `now`: the beginning of the next.
    #[must_use]
    pub fn end(&self, now: Timestamp) -> Option<Timestamp> {
        match self {
            Self::Rolling(_) | Self::Lifetime => None,
            Self::Calendar(period, zone) => bounds(*period, zone, now).1,
        }
    }

    /// Where something settled at `now` is counted, with windows in `pieces`.
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

    /// When a piece that began at `start` counts no more; `None`: never.
    #[must_use]
    fn leaves(&self, start: Timestamp, pieces: i32) -> Option<Timestamp> {
        match self {
            Self::Rolling(length) => start
                .checked_add(piece_length(*length, pieces))
                .and_then(|end| end.checked_add(*length))
                .ok(),
            Self::Calendar(..) => self.end(start),
            Self::Lifetime => None,
        }
    }

    /// When what landed at `at` counts no more, if it counts at `now`; `None`: never.
    #[must_use]
    pub fn leaves_at(&self, at: Timestamp, now: Timestamp) -> Option<Timestamp> {
        match self {
            Self::Rolling(length) => at.checked_add(*length).ok(),
            Self::Calendar(..) => self.end(now),
            Self::Lifetime => None,
        }
    }

    /// Whether what landed at `at` counts at `now`.
    #[must_use]
    pub fn holds(&self, at: Timestamp, now: Timestamp) -> bool {
        match self {
            Self::Rolling(length) => at.checked_add(*length).is_ok_and(|end| now < end),
            Self::Calendar(..) => at >= self.start(now),
            Self::Lifetime => true,
        }
    }
}

/// In whole milliseconds, rounded up: a window has at most `pieces` of them, and parts of two more at its ends.
fn piece_length(window: SignedDuration, pieces: i32) -> SignedDuration {
    let nanos = (window / pieces).as_nanos();
    let millis = nanos.div_euclid(1_000_000) + i128::from(nanos.rem_euclid(1_000_000) > 0);
    SignedDuration::from_millis(i64::try_from(millis).unwrap_or(i64::MAX)).max(SHORTEST_PIECE)
}

/// Beginning and end of the calendar window at `now`. Windows begin at the first instant of a civil day and end where
/// the next begins, so that every instant is in exactly one: also where midnight does not exist (then the day begins
/// when the clocks jump), comes twice, or where clocks set back after midnight return to the day before.
fn bounds(period: Period, zone: &TimeZone, now: Timestamp) -> (Timestamp, Option<Timestamp>) {
    let begins = |date: Date| date.to_zoned(zone.clone()).ok().map(|start| start.timestamp());
    let today = zone.to_datetime(now).date();
    let mut first = match period {
        Period::Daily => today,
        Period::Weekly => {
            let back = today.weekday().since(Weekday::Monday);
            today.checked_sub(i32::from(back).days()).unwrap_or(today)
        }
        Period::Monthly => today.first_of_month(),
    };
    let span = match period {
        Period::Daily => 1.day(),
        Period::Weekly => 1.week(),
        Period::Monthly => 1.month(),
    };
    // Where clocks jump over midnight, the day begins a little after its first instant.
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

/// What is settled in the window at hand, in pieces.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    pieces: i32,
    /// The oldest first, which is also the first to leave.
    buckets: VecDeque<Bucket>,
    sum: Sum,
}

impl Settled {
    /// Nothing, counted in at most so many pieces.
    #[must_use]
    pub fn new(pieces: i32) -> Self {
        Self {
            pieces,
            buckets: VecDeque::new(),
            sum: Sum::default(),
        }
    }

    /// As it was written.
    #[must_use]
    pub fn restore(pieces: i32, buckets: &[Bucket]) -> Self {
        let mut settled = Self::new(pieces);
        for bucket in buckets {
            settled.put(bucket.start, &bucket.amount);
        }
        settled
    }

    /// As it is written.
    #[must_use]
    pub fn buckets(&self) -> Vec<Bucket> {
        self.buckets.iter().cloned().collect()
    }

    /// Adds what was settled at `now`. A sum that does not fit into 64 bits stays at their end, and leaves no room.
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
            self.buckets.insert(place, Bucket { start, amount });
        }
        if let Some(bucket) = self.buckets.get_mut(place) {
            self.sum.take(&bucket.amount);
            bucket.amount = sum::full(&bucket.amount, amount);
            self.sum.add(&bucket.amount);
        }
    }

    /// Lets go what counts no more at `now`.
    pub fn advance(&mut self, rule: &WindowRule, now: Timestamp) {
        while self.leaves(rule).next().is_some_and(|end| end <= now) {
            if let Some(bucket) = self.buckets.pop_front() {
                self.sum.take(&bucket.amount);
            }
        }
    }

    /// Sum of all that counts.
    #[must_use]
    pub fn total(&self) -> Amount {
        self.sum.amount()
    }

    /// Sums of what counts when nothing is added, each from its moment on; the first is the sum now.
    #[must_use]
    pub fn ahead(&self, rule: &WindowRule) -> Vec<(Timestamp, Amount)> {
        let mut sum = self.sum;
        let mut sums = vec![(Timestamp::MIN, sum.amount())];
        for (bucket, end) in self.buckets.iter().zip(self.leaves(rule)) {
            sum.take(&bucket.amount);
            sums.push((end, sum.amount()));
        }
        sums
    }

    /// The moments at which something of this leaves, in order.
    pub fn leaves<'a>(&'a self, rule: &'a WindowRule) -> impl Iterator<Item = Timestamp> + 'a {
        self.buckets
            .iter()
            .map_while(|bucket| rule.leaves(bucket.start, self.pieces))
    }

    /// Under another rule: each piece counts as if it had been settled at the last moment it can have been.
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

    /// At least as much as `other` at every moment: of each piece the greater.
    pub fn cover(&mut self, other: &Self) {
        for bucket in &other.buckets {
            let here = self.buckets.iter().find(|here| here.start == bucket.start);
            let more = bucket.amount.without(&here.map_or(Amount::ZERO, |here| here.amount));
            self.put(bucket.start, &more);
        }
    }
}
