//! When to reconnect after a long-lived connection ended.

use std::time::Duration;

use tokio::time::sleep;

use super::SourceFeed;
use super::backoff::SourceBackoff;
use super::http::SourceError;
use agentloop_support::backoff::jitter;

/// Shortest wait after a connection that the server closed normally; the server may ask for a longer one.
pub const PAUSE: Duration = Duration::from_secs(1);
/// A connection that lasted this long has recovered: the backoff starts over.
const HELD: Duration = Duration::from_mins(1);

/// Counts consecutive failures of connections.
#[derive(Debug)]
pub struct ReconnectBackoff {
    /// Wait after a normal close.
    pub pause: Duration,
    backoff: SourceBackoff,
}

impl Default for ReconnectBackoff {
    fn default() -> Self {
        Self {
            pause: PAUSE,
            backoff: SourceBackoff::new(PAUSE),
        }
    }
}

impl ReconnectBackoff {
    /// Waits after a connection that lasted for `held` and ended with `end`.
    pub async fn wait_to_reconnect(&mut self, held: Duration, end: Result<(), SourceError>, feed: &SourceFeed) {
        sleep(self.wait(held, end, feed)).await;
    }

    fn wait(&mut self, held: Duration, end: Result<(), SourceError>, feed: &SourceFeed) -> Duration {
        if held >= HELD {
            self.backoff = SourceBackoff::new(self.pause);
        }
        match end {
            Ok(()) => self.pause,
            Err(failure) => {
                let wait = self.backoff.fail(jitter());
                feed.failed(&failure.0, wait);
                wait
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits, in whole seconds, after connections that lasted for `held` seconds and then failed.
    fn waits(held: &[u64]) -> Vec<u128> {
        let (feed, _arrivals) = SourceFeed::new();
        let mut reopening = ReconnectBackoff::default();
        let mut wait = |held| {
            let failed = Err(SourceError("x".into()));
            let wait = reopening.wait(Duration::from_secs(held), failed, &feed);
            // Up to a tenth is jitter.
            wait.as_millis().div_ceil(1000)
        };
        held.iter().map(|held| wait(*held)).collect()
    }

    #[test]
    fn failures_in_a_row_double_the_wait_and_only_a_connection_that_held_ends_the_row() {
        assert_eq!(waits(&[0, 0, 59, 60, 0]), [2, 4, 8, 2, 4]);
    }

    #[test]
    fn an_end_in_order_is_no_failure() {
        let (feed, _arrivals) = SourceFeed::new();
        let mut reopening = ReconnectBackoff::default();
        for _ in 0..3 {
            assert_eq!(reopening.wait(Duration::ZERO, Ok(()), &feed), PAUSE);
        }
        assert_eq!(feed.condition().borrow().failures, 0);
    }
}
