//! Decides how long a provider is asked to cache a prompt.
//!
//! Pure: owns the policy of `spec.model.promptCache`, and remembers the calls on which `Auto` is based. Writes no
//! request.
//!
//! Writing to the cache costs more than plain input, reading much less. Which lifetime pays off depends on the pauses
//! between calls: five minutes suit a loop that runs all the time, an hour suits one that wakes every ten minutes, and
//! neither suits one that wakes every two hours for a single call.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::api::agent::{ModelSpec, PromptCache};
use crate::provider::prompt::CacheLifetime;

/// Number of [`CachedCall`]s that `Auto` considers.
const CALLS: usize = 32;
/// Share by which another lifetime must have been cheaper before `Auto` switches: each switch costs a cache write.
const GAIN: f64 = 0.1;

/// How long a cached prompt can be relied on: slightly shorter than the provider's promise, because a request takes
/// time to arrive.
fn lasts(lifetime: CacheLifetime) -> Duration {
    match lifetime {
        CacheLifetime::FiveMinutes => Duration::from_secs(290),
        CacheLifetime::OneHour => Duration::from_secs(3_570),
    }
}

/// Prices as multiples of the price of plain input.
#[derive(Clone, Copy, Debug)]
struct CachePrices {
    read: f64,
    write: f64,
    write_hour: f64,
}

#[derive(Clone, Copy, Debug)]
struct CachedCall {
    /// Time since the previous call.
    pause: Duration,
    /// Bytes that the previous call had already sent.
    old: f64,
    /// Bytes that are new in this call.
    new: f64,
}

/// The cache policy for one model.
#[derive(Debug)]
pub struct CachePolicy {
    mode: PromptCache,
    prices: CachePrices,
    past: VecDeque<CachedCall>,
    last: Option<(Instant, usize)>,
    present: Option<CacheLifetime>,
}

impl CachePolicy {
    /// Creates the policy. Until two calls were made, `Auto` means five minutes.
    #[must_use]
    pub fn new(model: &ModelSpec) -> Self {
        Self {
            mode: model.prompt_cache,
            prices: CachePrices::of(model),
            past: VecDeque::new(),
            last: None,
            present: Some(CacheLifetime::FiveMinutes),
        }
    }

    /// Returns the lifetime for a call with this many bytes that is made now. `None` for no caching.
    pub fn next(&mut self, now: Instant, bytes: usize) -> Option<CacheLifetime> {
        if let Some((before, sent)) = self.last.replace((now, bytes)) {
            if self.past.len() == CALLS {
                self.past.pop_front();
            }
            self.past.push_back(CachedCall {
                pause: now.saturating_duration_since(before),
                old: size(sent.min(bytes)),
                new: size(bytes.saturating_sub(sent)),
            });
        }
        match self.mode {
            PromptCache::Disabled => None,
            PromptCache::FiveMinutes => Some(CacheLifetime::FiveMinutes),
            PromptCache::OneHour => Some(CacheLifetime::OneHour),
            PromptCache::Auto => {
                self.reckon();
                self.present
            }
        }
    }

    /// Returns the lifetime for a call that shares no prefix with another, such as a pre-check: only an explicit
    /// setting.
    #[must_use]
    pub fn of_single_calls(model: &ModelSpec) -> Option<CacheLifetime> {
        match model.prompt_cache {
            PromptCache::Auto | PromptCache::Disabled => None,
            PromptCache::FiveMinutes => Some(CacheLifetime::FiveMinutes),
            PromptCache::OneHour => Some(CacheLifetime::OneHour),
        }
    }

    fn reckon(&mut self) {
        for other in [None, Some(CacheLifetime::FiveMinutes), Some(CacheLifetime::OneHour)] {
            if self.cost(other) < self.cost(self.present) * (1.0 - GAIN) {
                self.present = other;
            }
        }
    }

    /// Computes what the [`CachedCall`]s would have cost with this lifetime, in bytes of plain input.
    fn cost(&self, lifetime: Option<CacheLifetime>) -> f64 {
        let cost = |call: &CachedCall| {
            let Some(lifetime) = lifetime else {
                return call.old + call.new;
            };
            let write = match lifetime {
                CacheLifetime::FiveMinutes => self.prices.write,
                CacheLifetime::OneHour => self.prices.write_hour,
            };
            let old = if call.pause <= lasts(lifetime) {
                self.prices.read
            } else {
                write
            };
            call.old * old + call.new * write
        };
        self.past.iter().map(cost).sum()
    }
}

impl CachePrices {
    /// Takes the prices of the spec, and Anthropic's by default: 0.1, 1.25 and 2 times plain input.
    fn of(model: &ModelSpec) -> Self {
        let decimal = |text: &String| text.parse::<f64>().ok();
        let price = model.price.as_ref();
        let input = price
            .and_then(|price| decimal(&price.input_per_million))
            .filter(|input| *input > 0.0);
        let ratio = |price: Option<&String>, usual: f64| match (price.and_then(decimal), input) {
            (Some(price), Some(input)) => price / input,
            _ => usual,
        };
        Self {
            read: ratio(price.and_then(|price| price.cache_read_per_million.as_ref()), 0.1),
            write: ratio(price.and_then(|price| price.cache_write_per_million.as_ref()), 1.25),
            write_hour: ratio(price.and_then(|price| price.cache_write_1h_per_million.as_ref()), 2.0),
        }
    }
}

/// Exact for all request sizes up to 4 GiB.
fn size(bytes: usize) -> f64 {
    f64::from(u32::try_from(bytes).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn model(more: &Value) -> ModelSpec {
        let mut model = json!({"api": "AnthropicMessages", "name": "m", "baseURL": "http://m"});
        model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(model).unwrap()
    }

    /// Returns the lifetime of the last wake, after this many calls in each, which start the given seconds apart.
    fn settles(model: &ModelSpec, every: Duration, calls: u32) -> Option<CacheLifetime> {
        let mut policy = CachePolicy::new(model);
        let (mut now, mut bytes, mut price) = (Instant::now(), 100_000, None);
        for _ in 0..40 {
            for call in 0..calls {
                bytes += 2_000;
                price = policy.next(now + Duration::from_secs(5) * call, bytes);
            }
            now += every;
        }
        price
    }

    #[rstest]
    #[case::it_turns_all_the_time(60, 3, Some(CacheLifetime::FiveMinutes))]
    #[case::just_within_five_minutes(280, 1, Some(CacheLifetime::FiveMinutes))]
    #[case::every_ten_minutes(600, 3, Some(CacheLifetime::OneHour))]
    #[case::every_ten_minutes_one_call(600, 1, Some(CacheLifetime::OneHour))]
    #[case::every_two_hours_a_few_calls(7_200, 4, Some(CacheLifetime::FiveMinutes))]
    #[case::every_two_hours_one_call(7_200, 1, None)]
    fn auto_settles_on_what_would_have_cost_least(
        #[case] every: u64,
        #[case] calls: u32,
        #[case] expected: Option<CacheLifetime>,
    ) {
        assert_eq!(settles(&model(&json!({})), Duration::from_secs(every), calls), expected);
    }

    #[test]
    fn auto_heeds_the_prices_of_the_spec() {
        // In this case an hour costs no more than five minutes, and reads cost as much as plain input.
        let cheap =
            json!({"price": {"inputPerMillion": "3", "outputPerMillion": "15", "cacheWrite1hPerMillion": "3.75"}});
        assert_eq!(
            settles(&model(&cheap), Duration::from_mins(10), 1),
            Some(CacheLifetime::OneHour)
        );
        let dear = json!({"price": {"inputPerMillion": "3", "outputPerMillion": "15", "cacheReadPerMillion": "3"}});
        assert_eq!(settles(&model(&dear), Duration::from_mins(10), 1), None);
    }

    #[test]
    fn the_first_call_requests_five_minutes_and_a_specified_lifetime_is_not_computed() {
        let now = Instant::now();
        assert_eq!(
            CachePolicy::new(&model(&json!({}))).next(now, 10),
            Some(CacheLifetime::FiveMinutes)
        );
        for (price, expected) in [
            ("Disabled", None),
            ("FiveMinutes", Some(CacheLifetime::FiveMinutes)),
            ("OneHour", Some(CacheLifetime::OneHour)),
        ] {
            let model = model(&json!({"promptCache": price}));
            assert_eq!(settles(&model, Duration::from_mins(1), 2), expected);
            assert_eq!(CachePolicy::of_single_calls(&model), expected);
        }
        assert_eq!(CachePolicy::of_single_calls(&model(&json!({}))), None);
    }
}
