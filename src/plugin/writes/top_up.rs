//! Top-ups of AgentBudgets.

use jiff::Timestamp;
use serde_json::json;

use super::PlannedWrite;
use crate::api::AgentBudget;
use crate::api::budget::{BudgetLimits, TopUp};
use crate::plugin::failure::PluginError;

/// Maximum number of entries of `spec.topUps`.
const MAX_TOP_UPS: usize = 64;

/// An id of the time, for readers, and of random digits: two top-ups in one second are two.
#[must_use]
pub fn id_of(now: Timestamp, random: &str) -> String {
    format!("{}-{random}", now.strftime("%Y%m%dT%H%M%SZ"))
}

/// Adds an entry to `spec.topUps`. The same entry twice is added once.
pub fn plan(name: &str, budget: &AgentBudget, new: &TopUp) -> Result<PlannedWrite, PluginError> {
    let before = &budget.spec.top_ups;
    let id = &new.id;
    if let Some(old) = before.iter().find(|old| old.id == *id) {
        if old.amount == new.amount {
            return Ok(PlannedWrite {
                patch: None,
                message: format!("{name}: top-up {id} was added before, and counts once"),
            });
        }
        return Err(PluginError::Refused(format!(
            "{name} has a top-up {id} with another amount: choose another --id"
        )));
    }
    if before.len() >= MAX_TOP_UPS {
        return Err(PluginError::Refused(format!(
            "{name} has {MAX_TOP_UPS} top-ups, which is the limit over its life: raise spec.limits"
        )));
    }
    let missing = unlimited(&budget.spec.limits, &new.amount);
    if !missing.is_empty() {
        return Err(PluginError::Refused(format!(
            "{name} does not limit {}: leave that out, or add a limit for it",
            missing.join(", ")
        )));
    }
    // Only the new entry is sent: the others may have fields that this version does not know.
    let step = if before.is_empty() {
        json!({"op": "add", "path": "/spec/topUps", "value": [new]})
    } else {
        json!({"op": "add", "path": "/spec/topUps/-", "value": new})
    };
    Ok(PlannedWrite {
        patch: Some(json!([step])),
        message: format!("{name}: top-up {id} added"),
    })
}

/// The kinds of an amount that are not limited.
fn unlimited(limits: &BudgetLimits, amount: &BudgetLimits) -> Vec<&'static str> {
    let kinds = [
        ("tokens", amount.tokens.is_some(), limits.tokens.is_some()),
        (
            "inputTokens",
            amount.input_tokens.is_some(),
            limits.input_tokens.is_some(),
        ),
        (
            "outputTokens",
            amount.output_tokens.is_some(),
            limits.output_tokens.is_some(),
        ),
        ("calls", amount.calls.is_some(), limits.calls.is_some()),
        ("costUSD", amount.cost_usd.is_some(), limits.cost_usd.is_some()),
    ];
    let missing = kinds.into_iter().filter(|(_, added, limited)| *added && !limited);
    missing.map(|(kind, ..)| kind).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn budget(top_ups: &[Value]) -> AgentBudget {
        let object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": {"name": "team"},
            "spec": {"limits": {"tokens": 1000, "costUSD": "5"}, "window": {"lifetime": {}}, "topUps": top_ups},
        });
        serde_json::from_value(object).unwrap()
    }

    fn top_up(entry: Value) -> TopUp {
        serde_json::from_value(entry).unwrap()
    }

    #[test]
    fn only_the_new_entry_is_sent() {
        let first = json!({"id": "a", "tokens": 10, "reason": "x"});
        let second = json!({"id": "b", "costUSD": "2.00"});
        let patch = |before: &[Value]| plan("team", &budget(before), &top_up(second.clone())).unwrap().patch;
        assert_eq!(
            patch(&[first]),
            Some(json!([{"op": "add", "path": "/spec/topUps/-", "value": second}]))
        );
        assert_eq!(
            patch(&[]),
            Some(json!([{"op": "add", "path": "/spec/topUps", "value": [second]}]))
        );
    }

    #[test]
    fn a_repeated_id_is_added_once_and_never_changed() {
        let entry = json!({"id": "a", "tokens": 10});
        let budget = budget(std::slice::from_ref(&entry));
        assert_eq!(plan("team", &budget, &top_up(entry)).unwrap().patch, None);
        assert!(plan("team", &budget, &top_up(json!({"id": "a", "tokens": 11}))).is_err());
    }

    #[test]
    fn an_unlimited_amount_cannot_be_topped_up() {
        let refused = plan(
            "team",
            &budget(&[]),
            &top_up(json!({"id": "a", "tokens": 1, "calls": 1})),
        )
        .err()
        .unwrap();
        assert_eq!(
            refused.to_string(),
            "team does not limit calls: leave that out, or add a limit for it"
        );
    }

    #[test]
    fn the_64th_entry_is_the_last() {
        let entries = |count: usize| {
            (0..count)
                .map(|n| json!({"id": format!("t{n}"), "tokens": 1}))
                .collect::<Vec<_>>()
        };
        let new = top_up(json!({"id": "new", "tokens": 1}));
        assert!(plan("team", &budget(&entries(63)), &new).is_ok());
        assert!(plan("team", &budget(&entries(64)), &new).is_err());
    }

    #[test]
    fn an_id_is_valid_for_the_api() {
        let id = id_of("2026-11-22T14:00:00Z".parse().unwrap(), "000102fdfeff");
        assert_eq!(id, "20261122T140000Z-000102fdfeff");
    }
}
