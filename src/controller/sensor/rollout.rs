//! Paces pod replacements after an upgrade of the controller: running pods are replaced one after the other. Pure.
//!
//! An upgrade changes the `StatefulSets` of all Sensors, and their webhooks must not all be down at once. The queue is
//! not persisted: a new leader sees which `StatefulSets` are still as an earlier one applied them.

use std::time::Duration;

use tokio::time::Instant;

/// Time between two replacements.
const PACE: Duration = Duration::from_secs(5);
/// Time from the start of leadership to the first replacement. While an upgrade rolls out, old and new replicas may
/// lead in turn, and pods must not be replaced back and forth.
const FIRST_REPLACEMENT_DELAY: Duration = Duration::from_mins(1);

/// The replacement queue of one leader.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplacementQueue {
    /// No turn is taken before this.
    begin: Instant,
    /// The first free place, behind all that are taken.
    end: Instant,
    /// No turn is taken before this: another pod has just had its turn.
    pause: Instant,
}

impl Default for ReplacementQueue {
    fn default() -> Self {
        Self::since(Instant::now())
    }
}

impl ReplacementQueue {
    /// The queue of a leader that leads since `start`.
    pub(super) fn since(start: Instant) -> Self {
        let begin = start + FIRST_REPLACEMENT_DELAY;
        Self {
            begin,
            end: begin,
            pause: begin,
        }
    }

    /// How long a running pod would wait for its turn now.
    pub(super) fn wait(&self, place: Option<Instant>, now: Instant) -> Duration {
        let mine = place.unwrap_or_else(|| self.end.max(now));
        mine.max(self.pause).saturating_duration_since(now)
    }

    /// The same for a pod that is not running: it has nothing to lose, so it waits only for the start of the queue.
    pub(super) fn wait_idle(&self, now: Instant) -> Duration {
        self.begin.saturating_duration_since(now)
    }

    /// Gives a running pod a place in the queue, unless it has one.
    pub(super) fn reserve(&mut self, place: &mut Option<Instant>, now: Instant) {
        // Places are PACE apart and assigned on first request, so each pod learns once how long to wait.
        place.get_or_insert_with(|| {
            let last = self.end.max(now);
            self.end = last + PACE;
            last
        });
    }

    /// Takes the turn of a running pod, or returns how long it still waits. `place`: its place in the queue; without
    /// one it gets the last.
    pub(super) fn take(&mut self, place: &mut Option<Instant>, now: Instant) -> Result<(), Duration> {
        self.reserve(place, now);
        // A pod that takes its turn late pushes the next one back, so that two replacements are never closer than PACE.
        let wait = self.wait(*place, now);
        if !wait.is_zero() {
            return Err(wait);
        }
        *place = None;
        self.pause = now + PACE;
        Ok(())
    }
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
        assert_eq!(
            turns.take(&mut a, at(75)),
            left(4),
            "a second turn is behind all others"
        );
        assert_eq!(turns.take(&mut b, at(200)), Ok(()), "an empty queue does not delay");
    }

    #[test]
    fn a_peek_at_the_queue_returns_the_same_wait_as_a_reservation_and_reserves_nothing() {
        let start = Instant::now();
        let mut turns = ReplacementQueue::since(start);
        let mut other = None;
        assert_eq!(turns.wait(None, start), FIRST_REPLACEMENT_DELAY);
        assert_eq!(turns.wait(None, start), FIRST_REPLACEMENT_DELAY, "nothing was reserved");
        turns.reserve(&mut other, start);
        assert_eq!(turns.wait(None, start), FIRST_REPLACEMENT_DELAY + PACE);
        assert_eq!(turns.wait(other, start + FIRST_REPLACEMENT_DELAY), Duration::ZERO);
        assert_eq!(turns.take(&mut other, start + FIRST_REPLACEMENT_DELAY), Ok(()));
        assert_eq!(
            turns.wait(Some(start), start + FIRST_REPLACEMENT_DELAY),
            PACE,
            "another pod just had its turn"
        );
    }

    #[test]
    fn an_idle_queue_waits_only_for_the_first_delay() {
        let start = Instant::now();
        let turns = ReplacementQueue::since(start);
        assert_eq!(turns.wait_idle(start), FIRST_REPLACEMENT_DELAY);
        assert_eq!(turns.wait_idle(start + FIRST_REPLACEMENT_DELAY), Duration::ZERO);
    }
}
