//! Limits how often a status is written. Pure.
//!
//! Changes that users wait for are written at once, but in the long run at most once per 5 s and object. Two writes may
//! follow each other directly, so that both "starting" and "running" become visible. Other changes wait.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

/// Long-run interval between two writes of one object.
const DISTANCE: SignedDuration = SignedDuration::from_secs(5);
/// Interval after the last write for changed counters.
const SLOW: SignedDuration = SignedDuration::from_secs(15);
/// Interval after the last write for insignificant changes.
const RARE: SignedDuration = SignedDuration::from_mins(5);

/// What to do with a computed status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum StatusStep {
    /// Nothing: the written status is kept.
    Keep,
    /// Compute it again after this time.
    Postpone(Duration),
    Write,
}

/// Write throttle of one object: a leaky bucket with room for two writes, which drains one per 5 s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) struct StatusThrottle {
    /// Time of the last write, or the start of the process.
    last: Timestamp,
    /// Time at which the bucket is empty again. Each write moves it by [`DISTANCE`]; a write is allowed while it is at
    /// most one [`DISTANCE`] ahead.
    whole_at: Timestamp,
}

impl StatusThrottle {
    pub(in crate::controller) fn new(now: Timestamp) -> Self {
        Self {
            last: now,
            whole_at: now,
        }
    }

    pub(in crate::controller) fn record_write(&mut self, now: Timestamp) {
        self.last = now;
        self.whole_at = self.whole_at.max(now) + DISTANCE;
    }

    /// The earliest time of the next write; `urgent`: users wait for the change.
    pub(in crate::controller) fn next(&self, urgent: bool) -> Timestamp {
        let allowed = self.whole_at - DISTANCE;
        if urgent { allowed } else { allowed.max(self.last + SLOW) }
    }

    /// The earliest time to write an insignificant change.
    pub(in crate::controller) fn next_minor(&self) -> Timestamp {
        self.last + RARE
    }
}
