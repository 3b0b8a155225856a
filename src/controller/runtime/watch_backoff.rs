//! How long a watch that failed waits before it is resumed.

use std::time::Duration;

use kube::runtime::utils;
use tokio::time::Instant;

use crate::support::backoff::{Backoff, jitter};

const FIRST: Duration = Duration::from_millis(800);
/// Until a watch is resumed, a suspended Agent continues and a new one does not start. kube's own policy waits up to 60 s
/// (30 s and as much jitter); one controller can afford to ask more often than a fleet of clients.
const MAX_DELAY: Duration = Duration::from_secs(10);
/// The delay starts over when no error occurred for this long. Two errors of a server that is away have less between them:
/// [`MAX_DELAY`], and the time of a request.
const RESET_AFTER: Duration = Duration::from_secs(15);

/// Exponential backoff with jitter from 0.8 s to 10 s.
///
/// A success does not reset it, only time does: each new list begins with [`Event::Init`], which succeeds before the API
/// server was asked, so that a list that always fails would be retried with the first delay forever.
///
/// [`Event::Init`]: kube::runtime::watcher::Event::Init
pub(in crate::controller) struct WatchBackoff {
    backoff: Backoff,
    last_error: Option<Instant>,
}

impl Default for WatchBackoff {
    fn default() -> Self {
        Self {
            backoff: Backoff::new(FIRST, MAX_DELAY),
            last_error: None,
        }
    }
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let now = Instant::now();
        if self
            .last_error
            .is_some_and(|last| now.duration_since(last) > RESET_AFTER)
        {
            self.backoff.reset();
        }
        self.last_error = Some(now);
        Some(self.backoff.next_spread(jitter()))
    }
}

impl utils::Backoff for WatchBackoff {
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use kube::runtime::utils::Backoff as _;
    use tokio::time::{advance, sleep};

    use super::*;

    fn delay(backoff: &mut WatchBackoff) -> Duration {
        backoff.next().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_is_resumed_within_ten_seconds_of_the_end_of_an_outage() {
        for _ in 0..200 {
            let (mut backoff, start) = (WatchBackoff::default(), Instant::now());
            while start.elapsed() < Duration::from_secs(30) {
                sleep(delay(&mut backoff)).await;
            }
            assert!(start.elapsed() <= Duration::from_secs(40), "{:?}", start.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_always_fails_is_retried_with_growing_delays() {
        let mut backoff = WatchBackoff::default();
        for _ in 0..5 {
            sleep(delay(&mut backoff)).await;
            backoff.reset();
        }
        let later = delay(&mut backoff);
        assert!(later >= MAX_DELAY / 2, "{later:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_while_without_errors_starts_the_delays_over() {
        let mut backoff = WatchBackoff::default();
        for _ in 0..5 {
            delay(&mut backoff);
        }
        advance(RESET_AFTER).await;
        let within = delay(&mut backoff);
        assert!(within > FIRST, "{within:?}");
        advance(RESET_AFTER + Duration::from_millis(1)).await;
        let after = delay(&mut backoff);
        assert!(after <= FIRST, "{after:?}");
    }
}
