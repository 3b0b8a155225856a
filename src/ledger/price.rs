//! The cost of tokens, in whole micro-dollars.
//!
//! Exact: a call's cost is summed in quarters of a micro-dollar per million tokens, in 128 bits, and rounded up once. A
//! result that exceeds 64 bits is `None`, never a smaller number.

use std::fmt;

use super::bound::CallBill;
use agentloop_api::money;
pub use agentloop_api::money::MoneyProblem;
use agentloop_api::price::{LongContextPrice, ModelPrice};

/// Rates are in quarters of a micro-dollar per million tokens, since a cache write costs 1.25 times the input by
/// default.
const QUARTERS: i128 = 4;
/// The ratio of a sum of rates times tokens to the cost in micro-dollars.
const SCALE: i128 = QUARTERS * 1_000_000;

/// An invalid amount of money. Names the field by its path from where parsing began; empty for a bare value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoneyError {
    /// Path of the field.
    pub field: String,
    /// What is wrong with it.
    pub problem: MoneyProblem,
}

impl fmt::Display for MoneyError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.field.is_empty() {
            write!(out, "{} ", self.field)?;
        }
        self.problem.fmt(out)
    }
}

impl std::error::Error for MoneyError {}

impl MoneyError {
    /// The same error with an outer field prepended: `price` turns `inputPerMillion` into `price.inputPerMillion`.
    #[must_use]
    pub fn within(self, outer: &str) -> Self {
        let field = match self.field.as_str() {
            "" => outer.to_owned(),
            inner => format!("{outer}.{inner}"),
        };
        Self { field, ..self }
    }
}

/// Parses US dollars into micro-dollars: digits, and at most six decimals after a point.
pub fn micro_usd(text: &str) -> Result<i64, MoneyError> {
    money::micro_usd(text).map_err(|problem| MoneyError {
        field: String::new(),
        problem,
    })
}

/// The [`ModelPrice`]s of each kind of token, in quarters of a micro-dollar per million.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PriceTier {
    input: i128,
    output: i128,
    cache_read: i128,
    cache_write: i128,
    cache_write_1h: i128,
}

impl PriceTier {
    fn dearest_input(&self) -> i128 {
        self.input
            .max(self.cache_read)
            .max(self.cache_write)
            .max(self.cache_write_1h)
    }

    /// Cost of a call in micro-dollars, times [`SCALE`].
    fn scaled(&self, bill: &CallBill) -> Option<i128> {
        [
            (bill.input, self.input),
            (bill.cache_read, self.cache_read),
            (bill.cache_write, self.cache_write),
            (bill.cache_write_1h, self.cache_write_1h),
            (bill.output, self.output),
        ]
        .into_iter()
        .try_fold(0_i128, |sum, (tokens, rate)| {
            sum.checked_add(count(tokens)?.checked_mul(rate)?)
        })
    }
}

/// Parsed [`ModelPrice`]s of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelRates {
    base: PriceTier,
    /// The prices of all tokens of a call whose total input exceeds this number of tokens.
    long: Option<(i64, PriceTier)>,
}

impl ModelRates {
    /// Parses a price. An error names the field, such as `longContext.outputPerMillion`.
    pub fn read(price: &ModelPrice) -> Result<Self, MoneyError> {
        let base = read_tier([
            Some(&price.input_per_million),
            Some(&price.output_per_million),
            price.cache_read_per_million.as_ref(),
            price.cache_write_per_million.as_ref(),
            price.cache_write_1h_per_million.as_ref(),
        ])?;
        let long = price.long_context.as_ref().map(read_long).transpose()?;
        Ok(Self { base, long })
    }

    /// The cost of a call, rounded up to a whole micro-dollar. `None`: it exceeds 64 bits, or the bill is invalid.
    #[must_use]
    pub fn cost(&self, bill: &CallBill) -> Option<i64> {
        let tier = match &self.long {
            Some((above, tier)) if bill.all_input()? > *above => tier,
            _ => &self.base,
        };
        rounded_up(tier.scaled(bill)?)
    }

    /// The highest cost of a call with at most this input and output, whatever kinds of tokens they are billed as.
    /// `None`: it exceeds 64 bits.
    #[must_use]
    pub fn worst_cost(&self, input: i64, output: i64) -> Option<i64> {
        let output = count(output)?;
        self.dearest(input)?
            .map(|(input, tier)| {
                let scaled = input.checked_add(output.checked_mul(tier.output)?)?;
                rounded_up(scaled)
            })
            .try_fold(0, |highest, cost| Some(highest.max(cost?)))
    }

    /// The longest output with which [`ModelRates::worst_cost`] is at most `cost`. `None`: the input alone costs more.
    #[must_use]
    pub fn output_within(&self, cost: i64, input: i64) -> Option<i64> {
        let cost = count(cost)?.checked_mul(SCALE)?;
        self.dearest(input)?.try_fold(i64::MAX, |lowest, (input, tier)| {
            let left = cost.checked_sub(input).filter(|left| *left >= 0)?;
            // Free output is not limited by cost.
            let output = left.checked_div(tier.output).unwrap_or(i128::MAX);
            Some(lowest.min(i64::try_from(output).unwrap_or(i64::MAX)))
        })
    }

    /// The tiers that a call with at most this input can fall into, each with the highest cost of its input there,
    /// scaled.
    fn dearest(&self, input: i64) -> Option<impl Iterator<Item = (i128, PriceTier)> + use<>> {
        let below = self.long.map_or(input, |(above, _)| input.min(above));
        let in_tier = |input: i64, tier: PriceTier| Some((count(input)?.checked_mul(tier.dearest_input())?, tier));
        let base = in_tier(below, self.base)?;
        let long = match self.long {
            Some((above, tier)) if input > above => Some(in_tier(input, tier)?),
            _ => None,
        };
        Some(std::iter::once(base).chain(long))
    }
}

/// A token count; `None` if it is negative.
fn count(tokens: i64) -> Option<i128> {
    (tokens >= 0).then_some(i128::from(tokens))
}

fn rounded_up(scaled: i128) -> Option<i64> {
    i64::try_from(scaled.checked_add(SCALE - 1)?.div_euclid(SCALE)).ok()
}

const FIELDS: [&str; 5] = [
    "inputPerMillion",
    "outputPerMillion",
    "cacheReadPerMillion",
    "cacheWritePerMillion",
    "cacheWrite1hPerMillion",
];

fn read_tier(texts: [Option<&String>; 5]) -> Result<PriceTier, MoneyError> {
    let mut rates = [None; 5];
    for ((rate, text), field) in rates.iter_mut().zip(texts).zip(FIELDS) {
        let read = text.map(|text| micro_usd(text)).transpose();
        *rate = read
            .map_err(|error| error.within(field))?
            .map(|micro| i128::from(micro) * QUARTERS);
    }
    let [input, output, cache_read, cache_write, cache_write_1h] = rates;
    let (input, output) = (input.unwrap_or_default(), output.unwrap_or_default());
    Ok(PriceTier {
        input,
        output,
        cache_read: cache_read.unwrap_or(input),
        // Exact, because the rates are multiples of four quarters.
        cache_write: cache_write.unwrap_or(input / 4 * 5),
        cache_write_1h: cache_write_1h.unwrap_or(input * 2),
    })
}

fn read_long(long: &LongContextPrice) -> Result<(i64, PriceTier), MoneyError> {
    let tier = read_tier([
        Some(&long.input_per_million),
        Some(&long.output_per_million),
        long.cache_read_per_million.as_ref(),
        long.cache_write_per_million.as_ref(),
        long.cache_write_1h_per_million.as_ref(),
    ]);
    let tier = tier.map_err(|error| error.within("longContext"))?;
    Ok((long.above_input_tokens, tier))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn price(input: &str, output: &str) -> ModelPrice {
        ModelPrice {
            input_per_million: input.into(),
            output_per_million: output.into(),
            ..ModelPrice::default()
        }
    }

    fn rates(price: &ModelPrice) -> ModelRates {
        ModelRates::read(price).unwrap()
    }

    fn with_long_context() -> ModelPrice {
        ModelPrice {
            cache_read_per_million: Some("0.30".into()),
            long_context: Some(LongContextPrice {
                above_input_tokens: 200_000,
                input_per_million: "6.00".into(),
                output_per_million: "22.50".into(),
                cache_read_per_million: Some("0.60".into()),
                ..LongContextPrice::default()
            }),
            ..price("3.00", "15.00")
        }
    }

    #[rstest]
    #[case("0", 0)]
    #[case("0.000001", 1)]
    #[case("3", 3_000_000)]
    #[case("3.00", 3_000_000)]
    #[case("25.5", 25_500_000)]
    #[case("007.10", 7_100_000)]
    #[case("9223372036854.775807", i64::MAX)]
    fn dollars_become_whole_millionths(#[case] text: &str, #[case] micro: i64) {
        assert_eq!(micro_usd(text), Ok(micro));
    }

    #[rstest]
    #[case("", MoneyProblem::NotDecimal)]
    #[case(".", MoneyProblem::NotDecimal)]
    #[case(".5", MoneyProblem::NotDecimal)]
    #[case("5.", MoneyProblem::NotDecimal)]
    #[case("-1", MoneyProblem::NotDecimal)]
    #[case("+1", MoneyProblem::NotDecimal)]
    #[case("1e3", MoneyProblem::NotDecimal)]
    #[case(" 1", MoneyProblem::NotDecimal)]
    #[case("1,5", MoneyProblem::NotDecimal)]
    #[case("1.2.3", MoneyProblem::NotDecimal)]
    #[case("$1", MoneyProblem::NotDecimal)]
    #[case("١", MoneyProblem::NotDecimal)]
    #[case("0.0000001", MoneyProblem::TooFine)]
    #[case("1.0000000", MoneyProblem::TooFine)]
    #[case("9223372036854.775808", MoneyProblem::TooLarge)]
    #[case("99999999999999999999", MoneyProblem::TooLarge)]
    fn a_malformed_amount_of_dollars_is_refused(#[case] text: &str, #[case] problem: MoneyProblem) {
        assert_eq!(micro_usd(text).map_err(|error| error.problem), Err(problem));
    }

    #[test]
    fn a_bad_price_names_its_field() {
        let named = |price: &ModelPrice| ModelRates::read(price).map_err(|error| error.field);
        assert_eq!(named(&price("x", "1")), Err("inputPerMillion".into()));
        assert_eq!(named(&price("1", "")), Err("outputPerMillion".into()));
        let bad = ModelPrice {
            cache_write_1h_per_million: Some("1.0000000".into()),
            ..price("1", "1")
        };
        assert_eq!(named(&bad), Err("cacheWrite1hPerMillion".into()));
        let mut bad = with_long_context();
        bad.long_context.as_mut().unwrap().cache_write_per_million = Some("-1".into());
        let error = ModelRates::read(&bad).unwrap_err().within("spec.model.price");
        assert_eq!(
            error.to_string(),
            "spec.model.price.longContext.cacheWritePerMillion must be US dollars as a decimal number in quotes, \
             such as \"3.00\""
        );
    }

    #[rstest]
    #[case(CallBill { input: 1_000_000, ..CallBill::default() }, 3_000_000)]
    #[case(CallBill { output: 1_000_000, reasoning: 400_000, ..CallBill::default() }, 15_000_000)]
    #[case(CallBill { cache_read: 1_000_000, ..CallBill::default() }, 3_000_000)]
    #[case(CallBill { cache_write: 1_000_000, ..CallBill::default() }, 3_750_000)]
    #[case(CallBill { cache_write_1h: 1_000_000, ..CallBill::default() }, 6_000_000)]
    #[case(CallBill { input: 10, cache_read: 20, cache_write: 4, cache_write_1h: 5, output: 7, reasoning: 7 }, 240)]
    #[case(CallBill::default(), 0)]
    fn absent_prices_of_the_cache_follow_the_input(#[case] bill: CallBill, #[case] cost: i64) {
        assert_eq!(rates(&price("3.00", "15.00")).cost(&bill), Some(cost));
    }

    #[test]
    fn specified_prices_of_the_cache_count() {
        let given = ModelPrice {
            cache_read_per_million: Some("0.30".into()),
            cache_write_per_million: Some("3.10".into()),
            cache_write_1h_per_million: Some("0".into()),
            ..price("3.00", "15.00")
        };
        let bill = CallBill {
            cache_read: 1_000_000,
            cache_write: 1_000_000,
            cache_write_1h: 1_000_000,
            ..CallBill::default()
        };
        assert_eq!(rates(&given).cost(&bill), Some(300_000 + 3_100_000));
    }

    #[test]
    fn a_call_is_rounded_up_once() {
        let cheap = rates(&price("0.000001", "0.000001"));
        let tokens = |input, output| CallBill {
            input,
            output,
            ..CallBill::default()
        };
        assert_eq!(cheap.cost(&tokens(1, 0)), Some(1));
        // Two fractions below a micro-dollar add up to one micro-dollar.
        assert_eq!(cheap.cost(&tokens(500_000, 500_000)), Some(1));
        assert_eq!(cheap.cost(&tokens(500_000, 500_001)), Some(2));
        // 1.25 times a micro-dollar per million is exact: 800,000 tokens cost one micro-dollar, one token more costs
        // two.
        let written = |cache_write| CallBill {
            cache_write,
            ..CallBill::default()
        };
        assert_eq!(cheap.cost(&written(800_000)), Some(1));
        assert_eq!(cheap.cost(&written(800_001)), Some(2));
    }

    #[test]
    fn zero_is_a_price() {
        let free = rates(&price("0", "0.00"));
        let bill = CallBill {
            input: i64::MAX,
            output: i64::MAX,
            ..CallBill::default()
        };
        assert_eq!(free.cost(&bill), Some(0));
        assert_eq!(free.worst_cost(i64::MAX, i64::MAX), Some(0));
        assert_eq!(free.output_within(0, i64::MAX), Some(i64::MAX));
    }

    #[test]
    fn a_long_input_is_one_that_is_longer_than_the_threshold_cached_input_included() {
        let rates = rates(&with_long_context());
        let at = |input, cache_read| CallBill {
            input,
            cache_read,
            output: 1_000_000,
            ..CallBill::default()
        };
        assert_eq!(rates.cost(&at(100_000, 100_000)), Some(300_000 + 30_000 + 15_000_000));
        // With one token more, all tokens of the call cost more.
        assert_eq!(rates.cost(&at(100_000, 100_001)), Some(600_000 + 60_001 + 22_500_000));
    }

    #[test]
    fn a_cost_out_of_range_is_none() {
        let dear = rates(&price("9223372036854.775807", "9223372036854.775807"));
        let tokens = |input| CallBill {
            input,
            ..CallBill::default()
        };
        assert_eq!(dear.cost(&tokens(1_000_000)), Some(i64::MAX));
        assert_eq!(dear.cost(&tokens(1_000_001)), None);
        assert_eq!(dear.cost(&tokens(i64::MAX)), None);
        assert_eq!(dear.cost(&tokens(-1)), None);
        assert_eq!(
            dear.worst_cost(1_000_000, 0),
            None,
            "an hour's cache write costs twice as much"
        );
        assert_eq!(dear.worst_cost(-1, 0), None);
        assert_eq!(dear.output_within(-1, 0), None);
    }

    #[test]
    fn the_worst_case_of_an_input_at_the_threshold_is_not_that_of_a_long_one() {
        // An hour's cache write costs twice the input.
        let rates = rates(&with_long_context());
        assert_eq!(rates.worst_cost(200_000, 0), Some(6 * 200_000));
        assert_eq!(rates.worst_cost(200_001, 0), Some(12 * 200_001));
    }

    #[test]
    fn the_worst_case_includes_prices_below_the_threshold() {
        // Cheaper above the threshold: the most expensive call is then the longest one below it.
        let odd = ModelPrice {
            long_context: Some(LongContextPrice {
                above_input_tokens: 1_000,
                input_per_million: "1".into(),
                output_per_million: "1".into(),
                ..LongContextPrice::default()
            }),
            ..price("10", "10")
        };
        assert_eq!(rates(&odd).worst_cost(1_001, 0), Some(20 * 1_000));
        assert_eq!(rates(&odd).worst_cost(100_000, 0), Some(2 * 100_000));
    }

    prop_compose! {
        fn any_price()(
            base in (0..=9_000_000_i64, 0..=9_000_000_i64),
            cache in proptest::array::uniform3(proptest::option::of(0..=9_000_000_i64)),
            long in proptest::option::of((1..5_000_i64, 0..=9_000_000_i64, 0..=9_000_000_i64)),
        ) -> ModelPrice {
            let text = |micro: i64| format!("{}.{:06}", micro / 1_000_000, micro % 1_000_000);
            ModelPrice {
                cache_read_per_million: cache[0].map(text),
                cache_write_per_million: cache[1].map(text),
                cache_write_1h_per_million: cache[2].map(text),
                long_context: long.map(|(above_input_tokens, input, output)| LongContextPrice {
                    above_input_tokens,
                    input_per_million: text(input),
                    output_per_million: text(output),
                    ..LongContextPrice::default()
                }),
                ..price(&text(base.0), &text(base.1))
            }
        }
    }

    proptest! {
        #[test]
        fn no_call_costs_more_than_its_worst_case(
            price in any_price(),
            kinds in proptest::array::uniform4(0..3_000_i64),
            output in 0..3_000_i64,
            spare in (0..2_000_i64, 0..2_000_i64),
        ) {
            let rates = rates(&price);
            let [input, cache_read, cache_write, cache_write_1h] = kinds;
            let bill = CallBill { input, cache_read, cache_write, cache_write_1h, output, reasoning: 0 };
            let all = bill.all_input().unwrap();
            prop_assert!(rates.cost(&bill) <= rates.worst_cost(all + spare.0, output + spare.1));
        }

        #[test]
        fn the_output_that_money_allows_is_the_longest(
            price in any_price(),
            cost in 0..100_000_i64,
            input in 0..10_000_i64,
        ) {
            let rates = rates(&price);
            match rates.output_within(cost, input) {
                Some(output) => {
                    prop_assert!(rates.worst_cost(input, output.min(1 << 40)).unwrap() <= cost);
                    if let Some(more) = output.checked_add(1) {
                        prop_assert!(rates.worst_cost(input, more).unwrap() > cost);
                    }
                }
                None => prop_assert!(rates.worst_cost(input, 0).unwrap() > cost),
            }
        }
    }
}
