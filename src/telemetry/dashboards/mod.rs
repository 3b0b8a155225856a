//! The Grafana dashboards, generated from the registry of metrics: `agentloop dashboards` writes them, the chart ships them.
//!
//! Classic JSON (schemaVersion 39), which file provisioning and Grafana 10 and newer read. Queries name metrics only through
//! the [registry](super::registry), so that a dashboard cannot ask for a metric that does not exist.

use serde_json::Value;

mod agent;
mod budgets;
mod dashboard;
mod fleet;
mod operator;
mod panel;
mod query;
#[cfg(test)]
mod query_tests;
mod sensors;
#[cfg(test)]
mod tests;

/// All dashboards, each with the name of its file.
#[must_use]
pub fn all() -> Vec<(String, Value)> {
    [
        fleet::board(),
        agent::board(),
        budgets::board(),
        sensors::board(),
        operator::board(),
    ]
    .map(|board| (board.file_name(), board.to_json()))
    .into()
}

/// A dashboard as the text of its file.
#[must_use]
pub fn to_text(board: &Value) -> String {
    format!("{board:#}\n")
}
