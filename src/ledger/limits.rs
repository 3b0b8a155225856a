//! Converts the limits of a spec into amounts.

use super::price::{MoneyError, micro_usd};
use agentloop_api::amount::{Amount, AmountKind, LimitAmounts};
use agentloop_api::budget::BudgetLimits;

/// The limits of a spec; an absent kind is unlimited. The error's field is `costUSD`.
pub fn limit_amounts(limits: &BudgetLimits) -> Result<LimitAmounts, MoneyError> {
    let cost = limits.cost_usd.as_deref().map(micro_usd).transpose();
    Ok(LimitAmounts {
        tokens: limits.tokens,
        input_tokens: limits.input_tokens,
        output_tokens: limits.output_tokens,
        calls: limits.calls,
        cost: cost.map_err(|error| error.within("costUSD"))?,
    })
}

/// An addition to limits, such as a top-up; an absent kind adds nothing. The error's field is `costUSD`.
pub fn added_amount(limits: &BudgetLimits) -> Result<Amount, MoneyError> {
    let read = limit_amounts(limits)?;
    Ok(Amount::from_fn(|kind: AmountKind| read.get(kind).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_kinds_are_not_limited_and_add_nothing() {
        let written = BudgetLimits {
            tokens: Some(5),
            calls: Some(0),
            cost_usd: Some("25.5".into()),
            ..BudgetLimits::default()
        };
        let limits = LimitAmounts {
            tokens: Some(5),
            calls: Some(0),
            cost: Some(25_500_000),
            ..LimitAmounts::default()
        };
        assert_eq!(limit_amounts(&written), Ok(limits));
        let added = Amount {
            tokens: 5,
            cost: 25_500_000,
            ..Amount::ZERO
        };
        assert_eq!(added_amount(&written), Ok(added));
        assert_eq!(limit_amounts(&BudgetLimits::default()), Ok(LimitAmounts::default()));
    }

    #[test]
    fn a_bad_cost_names_its_field() {
        let written = BudgetLimits {
            cost_usd: Some("much".into()),
            ..BudgetLimits::default()
        };
        for error in [
            limit_amounts(&written).unwrap_err(),
            added_amount(&written).unwrap_err(),
        ] {
            let message = error.within("spec.limits").to_string();
            assert!(
                message.starts_with("spec.limits.costUSD must be US dollars"),
                "{message}"
            );
        }
    }
}
