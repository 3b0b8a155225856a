//! When something counts: rolling, calendar and lifetime windows, and what is settled in them.

use std::collections::VecDeque;

use jiff::civil::Weekday;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan, Zoned};

use crate::api::amount::Amount;
use crate::api::budget::{Bucket, Period, Window};

/// Pieces that a rolling window is counted in; a piece leaves only when all of it is out.
pub const PIECES: i32 = 60;
/// The same for what each single Agent used.
pub const SHARE_PIECES: i32 = 6;
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

    /// Beginning of the window at `now`, which names it; 1970 where windows have no name (rolling, lifetime).
    #[must_use]
    pub fn start(&self, now: Timestamp) -> Timestamp {
        match self {
            Self::Rolling(_) | Self::Lifetime => Timestamp::UNIX_EPOCH,
            Self::Calendar(period, zone) => begin(*period, &now.to_zoned(zone.clone())),
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

    /// End of the calendar window at `now`.
    #[must_use]
    pub fn end(&self, now: Timestamp) -> Option<Timestamp> {
        match self {
            Self::Rolling(_) | Self::Lifetime => None,
            Self::Calendar(period, zone) => {
                let start = self.start(now).to_zoned(zone.clone());
                let span = match period {
                    Period::Daily => 1.day(),
                    Period::Weekly => 1.week(),
                    Period::Monthly => 1.month(),
                };
                // By the civil date, so that a day with a change of the clocks ends at its midnight.
                let next = start.date().checked_add(span).ok()?;
                next.to_zoned(zone.clone()).ok().map(|next| next.timestamp())
            }
        }
    }

    /// Where something settled at `now` is counted, with windows in `pieces`.
    #[must_use]
    fn piece(&self, now: Timestamp, pieces: i32) -> Timestamp {
        match self {
            Self::Rolling(length) => {
                let piece = piece_length(*length, pieces).as_millis().max(1);
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

fn piece_length(window: SignedDuration, pieces: i32) -> SignedDuration {
    (window / pieces).max(SHORTEST_PIECE)
}

fn begin(period: Period, now: &Zoned) -> Timestamp {
    let date = match period {
        Period::Daily => now.date(),
        Period::Weekly => {
            let back = now.date().weekday().since(Weekday::Monday);
            now.date().checked_sub(i32::from(back).days()).unwrap_or(now.date())
        }
        Period::Monthly => now.date().first_of_month(),
    };
    date.to_zoned(now.time_zone().clone())
        .map_or_else(|_| now.timestamp(), |start| start.timestamp())
}

/// What is settled in the window at hand, in pieces.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    pieces: i32,
    buckets: VecDeque<Bucket>,
}

impl Settled {
    /// Nothing, counted in at most so many pieces.
    #[must_use]
    pub fn new(pieces: i32) -> Self {
        Self {
            pieces,
            buckets: VecDeque::new(),
        }
    }

    /// As it was written.
    #[must_use]
    pub fn restore(pieces: i32, buckets: &[Bucket]) -> Self {
        let mut buckets: Vec<Bucket> = buckets.to_vec();
        buckets.sort_by_key(|bucket| bucket.start);
        Self {
            pieces,
            buckets: buckets.into(),
        }
    }

    /// As it is written.
    #[must_use]
    pub fn buckets(&self) -> Vec<Bucket> {
        self.buckets.iter().cloned().collect()
    }

    /// Adds what was settled at `now`. `None`, and nothing done: a sum does not fit into 64 bits.
    #[must_use]
    pub fn add(&mut self, rule: &WindowRule, now: Timestamp, amount: &Amount) -> Option<()> {
        if amount.is_zero() {
            return Some(());
        }
        self.total().checked_add(amount)?;
        let start = rule.piece(now, self.pieces);
        match self.buckets.iter_mut().find(|bucket| bucket.start == start) {
            Some(bucket) => bucket.amount = bucket.amount.checked_add(amount)?,
            None => {
                let place = self.buckets.partition_point(|bucket| bucket.start < start);
                self.buckets.insert(place, Bucket { start, amount: *amount });
            }
        }
        Some(())
    }

    /// Lets go what counts no more at `now`.
    pub fn advance(&mut self, rule: &WindowRule, now: Timestamp) {
        let pieces = self.pieces;
        self.buckets
            .retain(|bucket| rule.leaves(bucket.start, pieces).is_none_or(|end| now < end));
    }

    /// Sum of all that counts.
    #[must_use]
    pub fn total(&self) -> Amount {
        self.buckets
            .iter()
            .fold(Some(Amount::ZERO), |sum, bucket| sum?.checked_add(&bucket.amount))
            // Checked when it was added.
            .unwrap_or(Amount::each(|_| i64::MAX))
    }

    /// Under another rule: each piece counts as if it had been settled at the last moment it can have been.
    pub fn translate(&mut self, old: &WindowRule, new: &WindowRule, now: Timestamp) {
        self.advance(old, now);
        let before = std::mem::take(&mut self.buckets);
        for bucket in before {
            let last = match old {
                WindowRule::Rolling(length) => bucket
                    .start
                    .checked_add(piece_length(*length, self.pieces))
                    .map_or(now, |end| end.min(now)),
                WindowRule::Calendar(..) | WindowRule::Lifetime => now,
            };
            // The same sum as before fits.
            let _ = self.add(new, last, &bucket.amount);
        }
        self.advance(new, now);
    }

    /// The first moment after `now` at which at least `missing` will have left; `None`: never.
    #[must_use]
    pub fn freed_at(&self, rule: &WindowRule, missing: &Amount) -> Option<Timestamp> {
        let mut freed = Amount::ZERO;
        for bucket in &self.buckets {
            freed = freed.checked_add(&bucket.amount)?;
            if freed.covers(missing) {
                return rule.leaves(bucket.start, self.pieces);
            }
        }
        None
    }
}
