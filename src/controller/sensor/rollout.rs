//! Whose turn it is: pods that run are replaced for the sake of another controller one after the other. Pure.
//!
//! An upgrade changes the sets of all Sensors, and webhooks must not all be down together. Nothing of this is written down: a
//! new leader sees which sets are still as an earlier one made them.

use std::time::Duration;

use tokio::time::Instant;

/// Time between two pods.
const PACE: Duration = Duration::from_secs(5);
/// How long a leader waits before its first: while an upgrade rolls out, old and new replicas may lead in turn, and pods must
/// not be replaced back and forth.
const PATIENCE: Duration = Duration::from_mins(1);

/// The turns of one leader.
#[derive(Debug)]
pub(super) struct ReplacementQueue {
    /// When the first may be taken.
    begin: Instant,
    /// The first place behind all that are taken.
    end: Instant,
    /// Before this none is taken: somebody has just had one.
    pause: Instant,
}

impl Default for ReplacementQueue {
    fn default() -> Self {
        Self::since(Instant::now())
    }
}

impl ReplacementQueue {
    /// Of one who leads since then.
    fn since(start: Instant) -> Self {
        let begin = start + PATIENCE;
        Self {
            begin,
            end: begin,
            pause: begin,
        }
    }

    /// Takes the turn of a pod that runs, or says how long it still waits. `place`: its own in the queue; without one it gets
    /// the last.
    pub(super) fn take(&mut self, place: &mut Option<Instant>, now: Instant) -> Result<(), Duration> {
        let mine = *place.get_or_insert_with(|| {
            let last = self.end.max(now);
            self.end = last + PACE;
            last
        });
        // Who comes late does not run into the next one's turn: that one waits a little longer.
        wait_until(mine.max(self.pause), now)?;
        *place = None;
        self.pause = now + PACE;
        Ok(())
    }

    /// The same of a pod that does not run: it has nothing to lose and waits for no other.
    pub(super) fn take_idle(&self, now: Instant) -> Result<(), Duration> {
        wait_until(self.begin, now)
    }
}

fn wait_until(moment: Instant, now: Instant) -> Result<(), Duration> {
    let left = moment.saturating_duration_since(now);
    if left.is_zero() { Ok(()) } else { Err(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_turn_after_the_one_before_also_when_one_is_late() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let left = |seconds| Err(Duration::from_secs(seconds));
        let mut turns = ReplacementQueue::since(start);
        let [mut a, mut b, mut c] = [None; 3];
        assert_eq!(turns.take(&mut a, at(10)), left(50));
        assert_eq!(turns.take(&mut b, at(10)), left(55));
        assert_eq!(turns.take(&mut c, at(10)), left(60));
        assert_eq!(turns.take(&mut a, at(64)), Ok(()), "four seconds late");
        assert_eq!(turns.take(&mut b, at(65)), left(4));
        assert_eq!(turns.take(&mut b, at(69)), Ok(()));
        assert_eq!(turns.take(&mut c, at(74)), Ok(()));
        assert_eq!(turns.take(&mut a, at(75)), left(4), "again is behind all others");
        assert_eq!(turns.take(&mut b, at(200)), Ok(()), "an empty queue holds nobody up");
    }

    #[test]
    fn what_does_not_run_waits_for_no_other() {
        let start = Instant::now();
        let turns = ReplacementQueue::since(start);
        assert_eq!(turns.take_idle(start), Err(PATIENCE));
        assert_eq!(turns.take_idle(start + PATIENCE), Ok(()));
    }
}
