//! The timer that the engine sets: when the loop is due without an input.

use jiff::Timestamp;

/// A time by the wall clock. It fires once: if something is due after that, the engine sets it again.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopTimer(Option<Timestamp>);

impl LoopTimer {
    pub fn set(&mut self, at: Option<Timestamp>) {
        self.0 = at;
    }

    /// When it fires; `None`: it is not set.
    #[must_use]
    pub fn at(&self) -> Option<Timestamp> {
        self.0
    }

    /// Whether it fires now. It is not set from then on.
    pub fn fires(&mut self, now: Timestamp) -> bool {
        self.0.take_if(|at| *at <= now).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A timer that stays in the past would be due at once repeatedly, for as long as the engine has nothing to wait
    /// for but a call: a worker that does nothing would use a whole core.
    #[test]
    fn a_timer_fires_once_and_not_before_its_time() {
        let at: Timestamp = "2026-01-05T07:00:00Z".parse().unwrap();
        let before: Timestamp = "2026-01-05T06:59:59.999Z".parse().unwrap();
        let mut timer = LoopTimer::default();
        assert!(!timer.fires(at));
        timer.set(Some(at));
        assert!(!timer.fires(before));
        assert_eq!(timer.at(), Some(at));
        assert!(timer.fires(at));
        assert_eq!(timer.at(), None);
        assert!(!timer.fires(at));
        timer.set(Some(at));
        timer.set(None);
        assert!(!timer.fires(at));
    }
}
