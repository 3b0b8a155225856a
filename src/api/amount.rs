//! Amounts of what budgets limit: tokens, input, output, calls and cost, each exact in 64 bits.
//!
//! Nothing here saturates: a sum that overflows is `None`, and the caller must refuse it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{AsRefStr, EnumIter, IntoEnumIterator};

/// Kind of a limit.
#[derive(
    schemars::JsonSchema,
    Serialize,
    Deserialize,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    AsRefStr,
    EnumIter,
    strum::Display,
)]
#[serde(rename_all = "camelCase")]
#[strum(serialize_all = "camelCase")]
pub enum AmountKind {
    /// Uncached input, cache writes and output.
    Tokens,
    /// All input, including cache reads and writes.
    InputTokens,
    /// All output, including reasoning.
    OutputTokens,
    /// Requests sent; each attempt counts.
    Calls,
    /// Cost in millionths of a US dollar.
    #[serde(rename = "costMicroUSD")]
    #[strum(serialize = "costMicroUSD")]
    Cost,
}

impl AmountKind {
    /// The field of [`LimitAmounts`] in a spec.
    #[must_use]
    pub const fn limit_field(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::InputTokens => "inputTokens",
            Self::OutputTokens => "outputTokens",
            Self::Calls => "calls",
            Self::Cost => "costUSD",
        }
    }

    /// An amount as text: `1200 tokens`, `2.50 USD`.
    #[must_use]
    pub fn amount(self, number: i64) -> String {
        match self {
            Self::Tokens => format!("{number} tokens"),
            Self::InputTokens => format!("{number} input tokens"),
            Self::OutputTokens => format!("{number} output tokens"),
            Self::Calls => format!("{number} calls"),
            Self::Cost => {
                let decimals = format!("{:06}", number % 1_000_000);
                let (cents, rest) = decimals.split_at(2);
                format!("{}.{cents}{} USD", number / 1_000_000, rest.trim_end_matches('0'))
            }
        }
    }
}

/// An amount of each kind, never negative. Kinds that are zero are omitted from JSON.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Amount {
    /// Uncached input, cache writes and output tokens.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "is_zero")]
    pub tokens: i64,
    /// All input tokens, including cache reads and writes.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "is_zero")]
    pub input_tokens: i64,
    /// All output tokens, including reasoning.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "is_zero")]
    pub output_tokens: i64,
    /// Requests sent; each attempt counts.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "is_zero")]
    pub calls: i64,
    /// Cost in millionths of a US dollar.
    #[schemars(range(min = 0))]
    #[serde(rename = "costMicroUSD", skip_serializing_if = "is_zero")]
    pub cost: i64,
}

/// Limits by kind. A kind that is absent is not limited; 0 blocks every call.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LimitAmounts {
    /// Uncached input, cache writes and output tokens.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<i64>,
    /// All input tokens, including cache reads and writes.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<i64>,
    /// All output tokens, including reasoning.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<i64>,
    /// Requests sent; each attempt counts.
    #[schemars(range(min = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<i64>,
    /// Cost in millionths of a US dollar.
    #[schemars(range(min = 0))]
    #[serde(rename = "costMicroUSD", skip_serializing_if = "Option::is_none")]
    pub cost: Option<i64>,
}

/// Whether a field of messages and statuses is left out.
#[must_use]
pub fn is_zero(value: &i64) -> bool {
    *value == 0
}

impl Amount {
    /// No tokens, no calls and no cost.
    pub const ZERO: Self = Self {
        tokens: 0,
        input_tokens: 0,
        output_tokens: 0,
        calls: 0,
        cost: 0,
    };

    /// The amount of one kind.
    #[must_use]
    pub fn get(&self, kind: AmountKind) -> i64 {
        match kind {
            AmountKind::Tokens => self.tokens,
            AmountKind::InputTokens => self.input_tokens,
            AmountKind::OutputTokens => self.output_tokens,
            AmountKind::Calls => self.calls,
            AmountKind::Cost => self.cost,
        }
    }

    /// Each kind from a function.
    #[must_use]
    pub fn from_fn(mut of: impl FnMut(AmountKind) -> i64) -> Self {
        Self {
            tokens: of(AmountKind::Tokens),
            input_tokens: of(AmountKind::InputTokens),
            output_tokens: of(AmountKind::OutputTokens),
            calls: of(AmountKind::Calls),
            cost: of(AmountKind::Cost),
        }
    }

    /// The sum; `None` when a kind does not fit into 64 bits.
    #[must_use]
    pub fn checked_add(&self, more: &Self) -> Option<Self> {
        Some(Self {
            tokens: self.tokens.checked_add(more.tokens)?,
            input_tokens: self.input_tokens.checked_add(more.input_tokens)?,
            output_tokens: self.output_tokens.checked_add(more.output_tokens)?,
            calls: self.calls.checked_add(more.calls)?,
            cost: self.cost.checked_add(more.cost)?,
        })
    }

    /// The rest of each kind after subtracting `less`; at least zero.
    #[must_use]
    pub fn saturating_sub(&self, less: &Self) -> Self {
        Self::from_fn(|kind| (self.get(kind).max(less.get(kind))) - less.get(kind))
    }

    /// The greater of each kind.
    #[must_use]
    pub fn max(&self, other: &Self) -> Self {
        Self::from_fn(|kind| self.get(kind).max(other.get(kind)))
    }

    /// The smaller of each kind.
    #[must_use]
    pub fn min(&self, other: &Self) -> Self {
        Self::from_fn(|kind| self.get(kind).min(other.get(kind)))
    }

    /// Whether a kind is less than zero.
    #[must_use]
    pub fn is_negative(&self) -> bool {
        AmountKind::iter().any(|kind| self.get(kind) < 0)
    }

    /// Whether every kind is zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        *self == Self::ZERO
    }

    /// Whether `other` is at most this in every kind.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        AmountKind::iter().all(|kind| other.get(kind) <= self.get(kind))
    }

    /// The kinds that `limits` limits; zero for the others.
    #[must_use]
    pub fn limited_by(&self, limits: &LimitAmounts) -> Self {
        Self::from_fn(|kind| limits.get(kind).map_or(0, |_| self.get(kind)))
    }
}

impl LimitAmounts {
    /// Each kind from a function.
    #[must_use]
    pub fn from_fn(mut of: impl FnMut(AmountKind) -> Option<i64>) -> Self {
        Self {
            tokens: of(AmountKind::Tokens),
            input_tokens: of(AmountKind::InputTokens),
            output_tokens: of(AmountKind::OutputTokens),
            calls: of(AmountKind::Calls),
            cost: of(AmountKind::Cost),
        }
    }

    /// The lower of both limits of each kind; a kind that only one limits has its limit.
    #[must_use]
    pub fn min(&self, other: &Self) -> Self {
        Self::from_fn(|kind| match (self.get(kind), other.get(kind)) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        })
    }

    /// The first kind whose limit is zero.
    #[must_use]
    pub fn zero_kind(&self) -> Option<AmountKind> {
        self.kinds().find(|kind| self.get(*kind) == Some(0))
    }

    /// The limit of one kind.
    #[must_use]
    pub fn get(&self, kind: AmountKind) -> Option<i64> {
        match kind {
            AmountKind::Tokens => self.tokens,
            AmountKind::InputTokens => self.input_tokens,
            AmountKind::OutputTokens => self.output_tokens,
            AmountKind::Calls => self.calls,
            AmountKind::Cost => self.cost,
        }
    }

    /// The kinds that are limited.
    pub fn kinds(&self) -> impl Iterator<Item = AmountKind> {
        let limits = *self;
        AmountKind::iter().filter(move |kind| limits.get(*kind).is_some())
    }

    /// Whether nothing is limited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// These limits with `more` of each limited kind; `None` when a sum does not fit.
    #[must_use]
    pub fn checked_add(&self, more: &Amount) -> Option<Self> {
        let add = |kind| match self.get(kind) {
            Some(limit) => limit.checked_add(more.get(kind)).map(Some),
            None => Some(None),
        };
        Some(Self {
            tokens: add(AmountKind::Tokens)?,
            input_tokens: add(AmountKind::InputTokens)?,
            output_tokens: add(AmountKind::OutputTokens)?,
            calls: add(AmountKind::Calls)?,
            cost: add(AmountKind::Cost)?,
        })
    }

    /// The rest of each limit after subtracting `taken`; at least zero.
    #[must_use]
    pub fn left_after(&self, taken: &Amount) -> Self {
        Self::from_fn(|kind| {
            let limit = self.get(kind)?;
            Some((limit - taken.get(kind).min(limit)).max(0))
        })
    }

    /// The first kind whose limit `amount` exceeds.
    #[must_use]
    pub fn exceeded_by(&self, amount: &Amount) -> Option<AmountKind> {
        self.kinds()
            .find(|kind| self.get(*kind).is_some_and(|limit| amount.get(*kind) > limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_is_written_in_dollars_to_the_millionth() {
        let texts = [0, 1, 2_500_000, 1_000_001, 12_340_000].map(|number| AmountKind::Cost.amount(number));
        assert_eq!(
            texts,
            ["0.00 USD", "0.000001 USD", "2.50 USD", "1.000001 USD", "12.34 USD"]
        );
    }
}
