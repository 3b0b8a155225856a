//! Tokens and cost of answered model calls, from their events.
//!
//! What a pod says about itself is not trusted: negative numbers count as 0, and sums end at the largest number.

use crate::api::money::dollars;
use crate::link::events::EventLine;
use crate::support::text::short_number;

/// The usage of some answered calls, as far as their events have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnsweredCalls {
    /// Answered calls.
    pub calls: i64,
    /// Calls without tokens in their events.
    pub unknown_calls: i64,
    /// Calls without a cost in their events.
    unpriced_calls: i64,
    /// Input tokens of the other calls, including those read from or written to a cache.
    pub input_tokens: i64,
    /// Output tokens of the other calls.
    pub output_tokens: i64,
    /// Cost of the other calls in micro-dollars.
    pub cost: i64,
}

impl AnsweredCalls {
    /// Adds the call of a `model:call_answered`.
    pub fn add(&mut self, event: &EventLine) {
        self.calls = self.calls.saturating_add(1);
        if let (Some(input), Some(output)) = (event.input_tokens, event.output_tokens) {
            self.input_tokens = self.input_tokens.saturating_add(input.max(0));
            self.output_tokens = self.output_tokens.saturating_add(output.max(0));
        } else {
            self.unknown_calls = self.unknown_calls.saturating_add(1);
        }
        match event.cost {
            Some(cost) => self.cost = self.cost.saturating_add(cost.max(0)),
            None => self.unpriced_calls = self.unpriced_calls.saturating_add(1),
        }
    }

    /// Whether the tokens of any call are known.
    #[must_use]
    pub fn has_tokens(&self) -> bool {
        self.unknown_calls < self.calls
    }

    /// Whether the cost of any call is known.
    #[must_use]
    pub fn has_cost(&self) -> bool {
        self.unpriced_calls < self.calls
    }

    /// All tokens, such as `3.4k`, or `≥3.4k` if those of some calls are not known; `None`: of no call.
    #[must_use]
    pub fn tokens_text(&self) -> Option<String> {
        let tokens = short_number(self.input_tokens.saturating_add(self.output_tokens));
        self.has_tokens()
            .then(|| format!("{}{tokens}", at_least(self.unknown_calls)))
    }

    /// The cost, such as `$0.012`, or `≥$0.012` if that of some calls is not known; `None`: of no call.
    #[must_use]
    pub fn cost_text(&self) -> Option<String> {
        self.has_cost()
            .then(|| format!("{}{}", at_least(self.unpriced_calls), dollars(self.cost)))
    }
}

fn at_least(unknown: i64) -> &'static str {
    if unknown > 0 { "≥" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(events: &[(Option<i64>, Option<i64>, Option<i64>)]) -> AnsweredCalls {
        let mut sum = AnsweredCalls::default();
        for (input_tokens, output_tokens, cost) in events.iter().copied() {
            sum.add(&EventLine {
                input_tokens,
                output_tokens,
                cost,
                ..EventLine::default()
            });
        }
        sum
    }

    fn texts(events: &[(Option<i64>, Option<i64>, Option<i64>)]) -> [Option<String>; 2] {
        let sum = sum(events);
        [sum.tokens_text(), sum.cost_text()]
    }

    #[test]
    fn a_sum_says_what_is_not_known() {
        let text = |text: &str| Some(text.to_owned());
        let known = (Some(3_000), Some(400), Some(12_000));
        assert_eq!(texts(&[]), [None, None]);
        assert_eq!(texts(&[known]), [text("3.4k"), text("$0.012")]);
        assert_eq!(texts(&[known, known]), [text("6.8k"), text("$0.024")]);
        assert_eq!(texts(&[known, (None, None, None)]), [text("≥3.4k"), text("≥$0.012")]);
        assert_eq!(texts(&[(Some(3), None, None)]), [None, None]);
        assert_eq!(texts(&[(Some(3), Some(0), Some(0))]), [text("3"), text("$0.00")]);
    }

    #[test]
    fn numbers_that_no_call_has_neither_overflow_nor_lower_a_sum() {
        let absurd = (Some(i64::MAX), Some(i64::MAX), Some(i64::MAX));
        let negative = (Some(i64::MIN), Some(-1), Some(i64::MIN));
        let sum = sum(&[absurd, absurd, negative]);
        let found = (sum.calls, sum.input_tokens, sum.output_tokens, sum.cost);
        assert_eq!(found, (3, i64::MAX, i64::MAX, i64::MAX));
        assert!(sum.tokens_text().is_some() && sum.cost_text().is_some());
    }
}
