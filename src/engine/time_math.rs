//! Arithmetic on times and durations that cannot overflow. Reads no clock.

use jiff::{SignedDuration, Timestamp};

/// The time `wait` after `now`, at most [`Timestamp::MAX`].
pub fn after(now: Timestamp, wait: SignedDuration) -> Timestamp {
    now.checked_add(wait).unwrap_or(Timestamp::MAX)
}

/// The time `span` before `now`, or the earliest time.
pub fn before(now: Timestamp, span: SignedDuration) -> Timestamp {
    now.checked_sub(span).unwrap_or(Timestamp::MIN)
}

/// `base` doubled `times` times, at most `cap`.
pub fn doubled(base: SignedDuration, times: u32, cap: SignedDuration) -> SignedDuration {
    base.checked_mul(1 << times.min(30))
        .map_or(cap, |duration| duration.min(cap))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubling_stops_at_the_cap_and_never_overflows() {
        let second = SignedDuration::from_secs(1);
        let cap = SignedDuration::from_secs(60);
        assert_eq!(doubled(second, 0, cap), second);
        assert_eq!(doubled(second, 5, cap), SignedDuration::from_secs(32));
        assert_eq!(doubled(second, 6, cap), cap);
        assert_eq!(doubled(SignedDuration::MAX, u32::MAX, cap), cap);
    }

    #[test]
    fn a_wait_beyond_the_end_of_time_ends_there() {
        assert_eq!(after(Timestamp::MAX, SignedDuration::from_secs(1)), Timestamp::MAX);
        assert_eq!(after(Timestamp::UNIX_EPOCH, SignedDuration::MAX), Timestamp::MAX);
    }
}
