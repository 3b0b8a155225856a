//! The most that a call can cost, before it is sent, and its actual cost afterwards.
//!
//! The bound of the input rests on three assumptions about servers; a bill above it is `BoundViolated`:
//!
//! 1. A token represents at least one byte of the text that the server renders, so text costs at most its bytes. This
//!    holds for byte-level BPE and for SentencePiece; only a normalization that lengthens text could break it.
//! 2. In addition to our text a server renders no more than [`RequestOverhead`] allows.
//! 3. A part costs the same in every request in which the server counts it, and removing parts makes nothing more
//!    expensive. So everything that was in the previous request costs at most that request's bill. A part that is
//!    [`RequestPart::unsteady`] may be dropped from one request and counted in the next.
//!
//! The size of content that a part only references (an image by its URL, a file by its id) is unknown: such requests
//! have no bound and must not be sent.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::price::ModelRates;
use agentloop_api::amount::{Amount, LimitAmounts};

/// The usage that a server billed for one call, in disjoint kinds; reasoning is a part of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallBill {
    /// Input that was neither read from nor written to a cache.
    pub input: i64,
    /// Input read from a cache.
    pub cache_read: i64,
    /// Input written to a cache for five minutes.
    pub cache_write: i64,
    /// Input written to a cache for an hour.
    pub cache_write_1h: i64,
    /// Output, including reasoning.
    pub output: i64,
    /// Output spent on reasoning.
    pub reasoning: i64,
}

impl CallBill {
    /// All input, cached or not. `None`: more than 64 bits.
    #[must_use]
    pub fn all_input(&self) -> Option<i64> {
        self.input
            .checked_add(self.cache_read)?
            .checked_add(self.cache_write)?
            .checked_add(self.cache_write_1h)
    }

    /// The amount that the call counts in every account: one call, its tokens, and its cost, which is 0 without rates.
    /// `None`: a count is negative or exceeds 64 bits, so the bill is invalid.
    #[must_use]
    pub fn amount(&self, rates: Option<&ModelRates>) -> Option<Amount> {
        let kinds = [
            self.input,
            self.cache_read,
            self.cache_write,
            self.cache_write_1h,
            self.output,
        ];
        if kinds.iter().any(|tokens| *tokens < 0) {
            return None;
        }
        let input_tokens = self.all_input()?;
        Some(Amount {
            // Cache reads count as input tokens, but not as new tokens.
            tokens: (input_tokens - self.cache_read).checked_add(self.output)?,
            input_tokens,
            output_tokens: self.output,
            calls: 1,
            cost: rates.map_or(Some(0), |rates| rates.cost(self))?,
        })
    }
}

/// One part of a request: the system text, the tools, or one message.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "camelCase")]
pub struct RequestPart {
    /// Hash of its whole content: parts are equal exactly if their hashes are.
    pub hash: [u8; 32],
    /// Its length in the request. It includes the JSON around the text, which pays for what a template writes around a
    /// tool call or a name.
    pub bytes: i64,
    /// Whether a server may count it in one request and drop it in another, such as reasoning that is sent back.
    pub unsteady: bool,
    /// Whether it is a message rather than the system text or the tools.
    pub is_message: bool,
}

/// What a server renders in addition to the text of a request, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestOverhead {
    /// Hidden text per request: instructions for tools, and the model's name, date and channels. Counted for a request
    /// without a previous bill, and whenever its system text or tools are new.
    ///
    /// Known: Anthropic adds 159 to 530 tokens when a request has tools; the templates of Llama 3, Qwen and gpt-oss
    /// write 20 to 300 tokens about tools, knowledge and date. 1,024 is about twice the maximum.
    pub request: i64,
    /// What a template writes around one message: its role, its borders, a channel, the name of a tool that the message
    /// itself does not contain. Known: 3 to 12 tokens. 32.
    pub message: i64,
    /// How much the server's own text may differ between two requests, and tokens that merge or split where a part was
    /// removed: a date, a border. 64.
    pub drift: i64,
}

impl RequestOverhead {
    /// For chat completions, on any server.
    pub const CHAT_COMPLETIONS: Self = Self {
        request: 1_024,
        message: 32,
        drift: 64,
    };
    /// For Anthropic messages.
    pub const MESSAGES: Self = Self {
        request: 1_024,
        message: 32,
        drift: 64,
    };
}

/// The previous request of the same conversation to the same model, and its billed input.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PreviousRequest {
    /// Its parts.
    pub parts: Vec<RequestPart>,
    /// All input on its bill, including cached input. An estimate must not be used here.
    pub billed_input: i64,
}

/// Maximum number of tokens that a server can bill for the input of a request with these parts: the lesser of the previous bill
/// plus the bytes of all new parts, and the bytes of all parts.
///
/// A bound that exceeds 64 bits is `i64::MAX`, for which no limit has room.
#[must_use]
pub fn input_bound(previous: Option<&PreviousRequest>, parts: &[RequestPart], overhead: RequestOverhead) -> i64 {
    let afresh = parts.iter().fold(overhead.request, |sum, part| {
        sum.saturating_add(part.bound_when_new(overhead))
    });
    let Some(previous) = previous else {
        return afresh;
    };
    let mut known: HashMap<&RequestPart, usize> = HashMap::new();
    for part in &previous.parts {
        *known.entry(part).or_default() += 1;
    }
    let mut hidden = overhead.drift;
    let mut grown = previous.billed_input.max(0);
    for part in parts {
        let more = if let Some(count) = known.get_mut(part).filter(|count| **count > 0) {
            *count -= 1;
            if part.unsteady { part.bytes } else { 0 }
        } else {
            if !part.is_message {
                hidden = hidden.max(overhead.request);
            }
            part.bound_when_new(overhead)
        };
        grown = grown.saturating_add(more);
    }
    afresh.min(grown.saturating_add(hidden))
}

impl RequestPart {
    /// The bound of a part without a previous bill. A message is rendered as it is; tools are rendered in the server's
    /// own format, such as indented JSON, together with the system text: these count twice.
    fn bound_when_new(&self, overhead: RequestOverhead) -> i64 {
        let times = if self.is_message { 1 } else { 2 };
        self.bytes.saturating_mul(times).saturating_add(overhead.message)
    }
}

/// Maximum amount that a call with this input and output bound can count in every account; the cost is 0 without rates.
/// `None`: more than 64 bits, so no limit has room for it.
#[must_use]
pub fn worst_case(input: i64, output: i64, rates: Option<&ModelRates>) -> Option<Amount> {
    Some(Amount {
        tokens: input.checked_add(output)?,
        input_tokens: input,
        output_tokens: output,
        calls: 1,
        cost: rates.map_or(Some(0), |rates| rates.worst_cost(input, output))?,
    })
}

/// The longest output, at most `max`, with which the worst case of a call fits into `available`; kinds that are absent
/// there are unlimited. 0: there is no room for any output.
#[must_use]
pub fn output_that_fits(available: &LimitAmounts, input: i64, rates: Option<&ModelRates>, max: i64) -> i64 {
    let no_room =
        available.calls.is_some_and(|calls| calls < 1) || available.input_tokens.is_some_and(|tokens| tokens < input);
    if no_room || input < 0 {
        return 0;
    }
    let by_tokens = available.tokens.map(|tokens| tokens.saturating_sub(input));
    let by_money = match (available.cost, rates) {
        // If the cost is limited and the price is unknown, no call is possible.
        (Some(_), None) => Some(0),
        (Some(cost), Some(rates)) => Some(rates.output_within(cost, input).unwrap_or(0)),
        (None, _) => None,
    };
    // Their sum must fit into 64 bits as well.
    let by_size = i64::MAX - input;
    [by_tokens, available.output_tokens, by_money, Some(by_size)]
        .into_iter()
        .flatten()
        .fold(max, i64::min)
        .max(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use agentloop_api::price::ModelPrice;

    const OVERHEAD: RequestOverhead = RequestOverhead {
        request: 1_000,
        message: 10,
        drift: 50,
    };

    fn rates(input: &str, output: &str) -> ModelRates {
        let price = ModelPrice {
            input_per_million: input.into(),
            output_per_million: output.into(),
            ..ModelPrice::default()
        };
        ModelRates::read(&price).unwrap()
    }

    fn part(name: u8, bytes: i64) -> RequestPart {
        RequestPart {
            hash: [name; 32],
            bytes,
            unsteady: false,
            is_message: true,
        }
    }

    fn system(name: u8, bytes: i64) -> RequestPart {
        RequestPart {
            is_message: false,
            ..part(name, bytes)
        }
    }

    fn after(parts: &[RequestPart], billed_input: i64) -> PreviousRequest {
        PreviousRequest {
            parts: parts.to_vec(),
            billed_input,
        }
    }

    #[test]
    fn a_bill_counts_each_token_where_it_belongs() {
        let bill = CallBill {
            input: 100,
            cache_read: 1_000,
            cache_write: 20,
            cache_write_1h: 3,
            output: 50,
            reasoning: 40,
        };
        let amount = Amount {
            tokens: 173,
            input_tokens: 1_123,
            output_tokens: 50,
            calls: 1,
            cost: 0,
        };
        assert_eq!(bill.amount(None), Some(amount));
        let cost = rates("1", "2").cost(&bill).unwrap();
        assert_eq!(bill.amount(Some(&rates("1", "2"))), Some(Amount { cost, ..amount }));
    }

    #[rstest]
    #[case(CallBill { input: -1, ..CallBill::default() })]
    #[case(CallBill { cache_read: -1, input: 5, ..CallBill::default() })]
    #[case(CallBill { output: -1, ..CallBill::default() })]
    #[case(CallBill { input: i64::MAX, output: 1, ..CallBill::default() })]
    #[case(CallBill { input: i64::MAX, cache_read: 1, ..CallBill::default() })]
    fn an_invalid_bill_counts_nothing(#[case] bill: CallBill) {
        assert_eq!(bill.amount(None), None);
    }

    #[test]
    fn a_kind_that_was_not_used_makes_no_bill_invalid() {
        let bill = CallBill {
            output: 5,
            ..CallBill::default()
        };
        let amount = Amount {
            tokens: 5,
            output_tokens: 5,
            calls: 1,
            ..Amount::ZERO
        };
        assert_eq!(bill.amount(None), Some(amount));
    }

    #[test]
    fn a_first_request_costs_its_bytes_and_what_the_server_may_add() {
        let parts = [system(1, 300), part(2, 40)];
        assert_eq!(input_bound(None, &parts, OVERHEAD), 1_000 + 2 * 300 + 40 + 2 * 10);
    }

    #[test]
    fn a_next_request_costs_the_bill_before_and_what_is_new() {
        let parts = [system(1, 30_000), part(2, 4_000), part(3, 200)];
        let previous = after(&parts[..2], 8_000);
        assert_eq!(
            input_bound(Some(&previous), &parts, OVERHEAD),
            8_000 + 50 + 200 + 10,
            "the last message is new"
        );
    }

    #[test]
    fn turns_that_leave_do_not_make_the_rest_new() {
        let before = [system(1, 30_000), part(2, 9_000), part(3, 9_000), part(4, 100)];
        let now = [before[0], before[2], part(5, 70), part(6, 100)];
        let bound = input_bound(Some(&after(&before, 12_000)), &now, OVERHEAD);
        assert_eq!(bound, 12_000 + 50 + (70 + 10) + (100 + 10));
    }

    #[test]
    fn a_repeated_part_is_paid_twice() {
        let before = [system(1, 9_000), part(2, 500)];
        let now = [before[0], before[1], before[1]];
        assert_eq!(
            input_bound(Some(&after(&before, 3_000)), &now, OVERHEAD),
            3_000 + 50 + 510
        );
    }

    #[test]
    fn new_tools_bring_the_hidden_text_with_them() {
        let before = [system(1, 9_000), part(2, 500)];
        let now = [system(3, 100), before[0], before[1]];
        let bound = input_bound(Some(&after(&before, 3_000)), &now, OVERHEAD);
        assert_eq!(bound, 3_000 + 1_000 + 2 * 100 + 10);
    }

    #[test]
    fn reasoning_that_may_have_been_left_out_is_paid_again() {
        let thought = RequestPart {
            unsteady: true,
            ..part(2, 900)
        };
        let before = [system(1, 9_000), thought];
        assert_eq!(
            input_bound(Some(&after(&before, 3_000)), &before, OVERHEAD),
            3_000 + 50 + 900
        );
    }

    #[test]
    fn another_conversation_costs_its_own_bytes() {
        let previous = after(&[system(1, 90_000)], 80_000);
        let parts = [system(2, 100), part(3, 10)];
        assert_eq!(
            input_bound(Some(&previous), &parts, OVERHEAD),
            input_bound(None, &parts, OVERHEAD)
        );
    }

    #[test]
    fn a_bound_that_does_not_fit_has_room_nowhere() {
        let parts = [part(1, i64::MAX), part(2, i64::MAX)];
        assert_eq!(input_bound(None, &parts, OVERHEAD), i64::MAX);
        assert_eq!(input_bound(Some(&after(&[], i64::MAX)), &parts, OVERHEAD), i64::MAX);
        assert_eq!(worst_case(i64::MAX, 1, None), None);
    }

    #[test]
    fn the_output_is_clipped_to_the_scarcest_kind() {
        let rates = rates("1", "10");
        let of = |available: LimitAmounts| output_that_fits(&available, 100, Some(&rates), 1_000);
        let none = LimitAmounts::default();
        assert_eq!(of(none), 1_000);
        assert_eq!(
            of(LimitAmounts {
                tokens: Some(400),
                ..none
            }),
            300
        );
        assert_eq!(
            of(LimitAmounts {
                tokens: Some(99),
                ..none
            }),
            0
        );
        assert_eq!(
            of(LimitAmounts {
                output_tokens: Some(70),
                ..none
            }),
            70
        );
        assert_eq!(
            of(LimitAmounts {
                input_tokens: Some(100),
                ..none
            }),
            1_000
        );
        assert_eq!(
            of(LimitAmounts {
                input_tokens: Some(99),
                ..none
            }),
            0
        );
        assert_eq!(of(LimitAmounts { calls: Some(1), ..none }), 1_000);
        assert_eq!(of(LimitAmounts { calls: Some(0), ..none }), 0);
        // An hour's cache write of 100 tokens at 2 is 200; 5 of output at 10 are 50.
        assert_eq!(
            of(LimitAmounts {
                cost: Some(259),
                ..none
            }),
            5
        );
        assert_eq!(
            of(LimitAmounts {
                cost: Some(199),
                ..none
            }),
            0
        );
        let unpriced = LimitAmounts {
            cost: Some(i64::MAX),
            ..none
        };
        assert_eq!(output_that_fits(&unpriced, 100, None, 1_000), 0, "no price, no call");
    }

    #[test]
    fn input_and_output_together_fit_into_64_bits() {
        let of = |input| output_that_fits(&LimitAmounts::default(), input, None, i64::MAX);
        assert_eq!(
            [of(-1), of(0), of(100), of(i64::MAX)],
            [0, i64::MAX, i64::MAX - 100, 0],
            "an input of less than nothing has no bound"
        );
    }

    proptest! {
        /// Any bill of a server that meets the three assumptions is within the bound.
        #[test]
        fn no_server_that_keeps_the_statements_bills_above_the_bound(
            sizes in proptest::collection::vec((1..200_i64, 0..=100_i64, any::<bool>()), 8),
            before in proptest::collection::vec(0..8_usize, 0..12),
            now in proptest::collection::vec(0..8_usize, 0..12),
            (hidden, drift) in (0..=1_000_i64, 0..=50_i64),
            counts_unsteady in any::<(bool, bool)>(),
        ) {
            // The first two are the system text and the tools.
            let all: Vec<(RequestPart, i64)> = sizes.iter().zip(0_u8..).map(|((bytes, percent, unsteady), name)| {
                let part = RequestPart { unsteady: *unsteady && name > 1, is_message: name > 1, ..part(name, *bytes) };
                let tokens = bytes * percent / 100 * if name > 1 { 1 } else { 2 };
                // A template writes text around the part whether or not the part is counted.
                let tokens = if part.unsteady { 0 } else { tokens } + percent % 10;
                (part, tokens)
            }).collect();
            let bill = |indices: &[usize], hidden: i64, counts_unsteady: bool| {
                indices.iter().fold(hidden, |sum, index| {
                    let (part, tokens) = &all[*index];
                    sum + tokens + if counts_unsteady && part.unsteady { part.bytes } else { 0 }
                })
            };
            let parts = |indices: &[usize]| -> Vec<RequestPart> { indices.iter().map(|index| all[*index].0).collect() };
            // Only tools and system text bring hidden text.
            let has_more = |indices: &[usize]| indices.iter().any(|index| *index < 2 && !before.contains(index));
            let first_hidden = if before.iter().any(|index| *index < 2) { hidden } else { 0 };
            let first = bill(&before, first_hidden, counts_unsteady.0);
            prop_assert!(first <= input_bound(None, &parts(&before), OVERHEAD));
            let then_hidden = if has_more(&now) { hidden } else { first_hidden.min(hidden) + drift };
            let then_hidden = then_hidden.min(OVERHEAD.request);
            let then = bill(&now, then_hidden, counts_unsteady.1);
            let previous = after(&parts(&before), first);
            let bound = input_bound(Some(&previous), &parts(&now), OVERHEAD);
            prop_assert!(then <= bound, "{then} > {bound}");
        }

        #[test]
        fn the_output_that_fits_is_the_longest(
            (tokens, output_tokens, cost) in proptest::option::of(0..3_000_i64).prop_flat_map(|tokens| (
                Just(tokens),
                proptest::option::of(0..2_000_i64),
                proptest::option::of(0..30_000_i64),
            )),
            input in 0..2_000_i64,
            max in 1..2_000_i64,
        ) {
            let rates = rates("1.5", "7.25");
            let available = LimitAmounts { tokens, output_tokens, cost, ..LimitAmounts::default() };
            let fits = |output| {
                available.exceeded_by(&worst_case(input, output, Some(&rates)).unwrap()).is_none()
            };
            let output = output_that_fits(&available, input, Some(&rates), max);
            prop_assert!((0..=max).contains(&output));
            prop_assert!(output == 0 || fits(output));
            prop_assert!(output == max || !fits(output + 1));
        }
    }
}
