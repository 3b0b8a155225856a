//! What the loop's limits have left, as text for the model: part of the state block at the end of a prompt, never of
//! what precedes it.
//!
//! Shown in tenths, so that the text rarely changes. Decides nothing: calls are refused by the gateway or by a
//! guardrail.

use jiff::Timestamp;

use crate::budget::BudgetState;
use crate::resources::ResourceTracker;
use crate::settings::EngineSettings;

/// A limit on spending, and what is left of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetHealth {
    /// The owner of the limit: `AgentBudget team`.
    pub name: String,
    /// The limit: `100000 tokens in any 3600 s`.
    pub limit: String,
    /// Tenths of it that are left, rounded down.
    pub tenths: u8,
    /// When this expires, because the window ends.
    pub until: Option<Timestamp>,
}

impl BudgetHealth {
    /// Less than 10 % is left.
    fn is_low(&self) -> bool {
        self.tenths == 0
    }
}

impl std::fmt::Display for BudgetHealth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, limit, .. } = self;
        match self.tenths {
            0 => write!(f, "{name}: less than 10% of {limit}"),
            tenths @ 1..10 => write!(f, "{name}: at least {tenths}0% of {limit}"),
            10.. => write!(f, "{name}: all of {limit}"),
        }
    }
}

/// Tenths of a limit that are left, rounded down.
fn tenths(left: u64, limit: u64) -> u8 {
    let tenths = u128::from(left) * 10 / u128::from(limit.max(1));
    u8::try_from(tenths.min(10)).unwrap_or(10)
}

/// A line for each limit; `None`: no limit is set or known.
pub fn text(budget: &BudgetState, settings: &EngineSettings, used: &ResourceTracker, now: Timestamp) -> Option<String> {
    let holds = |health: &&BudgetHealth| health.until.is_none_or(|until| now < until);
    let budgets = budget
        .health
        .iter()
        .filter(holds)
        .map(|health| (health.is_low(), health.to_string()));
    let rates = settings.rate_limits.iter().map(|limit| {
        let left = limit.amount.saturating_sub(used.used(*limit, now));
        let health = BudgetHealth {
            name: "guardrails.rateLimits".to_owned(),
            limit: limit.to_string(),
            tenths: tenths(left, limit.amount),
            until: None,
        };
        (health.is_low(), health.to_string())
    });
    let lines: Vec<(bool, String)> = budgets.chain(rates).collect();
    if lines.is_empty() {
        return None;
    }
    let advice = if lines.iter().any(|(is_low, _)| *is_low) {
        advice(settings)
    } else {
        String::new()
    };
    let lines: Vec<String> = lines.iter().map(|(_, line)| format!("\n- {line}")).collect();
    let lines = lines.concat();
    Some(format!(
        "What is left of your limits; a call that finds too little waits:{lines}{advice}"
    ))
}

/// What the model can do about a limit that is nearly used up.
fn advice(settings: &EngineSettings) -> String {
    let sleep = settings
        .mode
        .sleep_tool()
        .map(|tool| format!(", or sleep with `{tool}`"));
    format!(
        "\nSome of it is nearly used up: do the most important thing now{}.",
        sleep.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenths_are_rounded_down_and_end_at_all_of_it() {
        let cases = [
            (0, 100, 0),
            (9, 100, 0),
            (10, 100, 1),
            (99, 100, 9),
            (100, 100, 10),
            (200, 100, 10),
        ];
        for (left, limit, expected) in cases {
            assert_eq!(tenths(left, limit), expected, "{left} of {limit}");
        }
        assert_eq!(tenths(u64::MAX, u64::MAX), 10);
        assert_eq!(tenths(0, 0), 0);
    }
}
