//! Statistics of the last requests, for loop detection outside the worker. In memory only.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::link::messages::RequestStats;

/// Number of requests that are compared.
const REQUESTS: usize = 20;
/// Time over which tokens are counted.
const SPAN: Duration = Duration::from_mins(5);
/// Tokens are summed per step of this length.
const STEP: Duration = Duration::from_secs(1);

/// The last answered requests.
#[derive(Default)]
pub(super) struct RequestWindow {
    hashes: VecDeque<[u8; 32]>,
    tokens: VecDeque<(Instant, i64)>,
    /// The last known value of the annotation `agentloop.dev/resume`.
    resume: Option<String>,
}

impl RequestWindow {
    /// A new value of the annotation means that a person reviewed the loop, so what was seen before is discarded.
    /// `None`: no request at the moment, because the last one was handled.
    pub(super) fn resumed(&mut self, request: Option<&str>) {
        if request.is_some_and(|request| self.resume.as_deref() != Some(request)) {
            *self = Self {
                resume: request.map(str::to_owned),
                ..Self::default()
            };
        }
    }

    /// Adds an ended call: the hash of its messages if it was answered, and the tokens charged.
    pub(super) fn add(&mut self, hash: Option<[u8; 32]>, tokens: i64, now: Instant) {
        if let Some(hash) = hash {
            self.hashes.push_back(hash);
            if self.hashes.len() > REQUESTS {
                self.hashes.pop_front();
            }
        }
        match self.tokens.back_mut() {
            Some((at, sum)) if now.saturating_duration_since(*at) < STEP => *sum = sum.saturating_add(tokens),
            _ => self.tokens.push_back((now, tokens)),
        }
        self.drop_expired(now);
    }

    /// The statistics; `None` before the first answer.
    pub(super) fn stats(&mut self, now: Instant) -> Option<RequestStats> {
        self.drop_expired(now);
        let count = |hash: &[u8; 32]| self.hashes.iter().filter(|other| *other == hash).count();
        // Of equally frequent hashes the latest.
        let (identical, hash) = self
            .hashes
            .iter()
            .map(|hash| (count(hash), hash))
            .max_by_key(|(count, _)| *count)?;
        Some(RequestStats {
            identical: u32::try_from(identical).unwrap_or(u32::MAX),
            hash: format!("{:016x}", beginning(hash)),
            tokens: self
                .tokens
                .iter()
                .fold(0, |sum, (_, tokens)| sum.saturating_add(*tokens)),
        })
    }

    fn drop_expired(&mut self, now: Instant) {
        self.tokens.retain(|(at, _)| now.saturating_duration_since(*at) < SPAN);
    }
}

fn beginning(hash: &[u8; 32]) -> u64 {
    hash.iter().take(8).fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    #[test]
    fn the_most_frequent_of_the_last_twenty_is_counted() {
        let start = Instant::now();
        let mut window = RequestWindow::default();
        assert_eq!(window.stats(start), None);
        for number in 0..20 {
            window.add(Some([number % 4; 32]), 10, start);
        }
        let pulse = window.stats(start).unwrap();
        assert_eq!((pulse.identical, pulse.tokens), (5, 200));
        for _ in 0..6 {
            window.add(Some([0xab; 32]), 0, start);
        }
        let pulse = window.stats(start).unwrap();
        assert_eq!((pulse.identical, pulse.hash.as_str()), (6, "abababababababab"));
    }

    #[test]
    fn a_request_to_resume_ends_what_was_seen_once() {
        let start = Instant::now();
        let mut window = RequestWindow::default();
        window.add(Some([1; 32]), 7, start);
        window.resumed(None);
        assert_eq!(window.stats(start).unwrap().identical, 1);
        window.resumed(Some("once"));
        assert_eq!(window.stats(start), None);
        window.add(Some([1; 32]), 7, start);
        window.resumed(Some("once"));
        assert_eq!(window.stats(start).unwrap().tokens, 7);
        window.resumed(None);
        assert_eq!(
            window.stats(start).unwrap().tokens,
            7,
            "the request was handled, not renewed"
        );
        window.resumed(Some("again"));
        assert_eq!(window.stats(start), None);
    }

    #[test]
    fn tokens_count_for_five_minutes_and_failed_calls_only_there() {
        let start = Instant::now();
        let mut window = RequestWindow::default();
        window.add(Some([1; 32]), 7, start);
        window.add(None, 5, start + STEP);
        assert_eq!(window.stats(start + SPAN.saturating_sub(STEP)).unwrap().tokens, 12);
        let late = window.stats(start + SPAN).unwrap();
        assert_eq!((late.tokens, late.identical), (5, 1));
    }
}
