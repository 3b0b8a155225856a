//! The interface between the ledger and the AgentBudget objects: the status beside the record, and what holds calls.

use jiff::Timestamp;
use serde_json::{Map, Value};

use super::entry::AccountEntry;
use crate::api::AgentBudget;
use crate::api::amount::Amount;
use crate::api::failure::CallFailure;
use crate::link::messages::LimitName;

/// The current state of a budget.
pub struct BudgetView<'a> {
    /// The object as last seen. Its status may lag behind [`Self::shown`].
    pub budget: &'a AgentBudget,
    /// The status as last written, without `ledger`.
    pub shown: &'a Map<String, Value>,
    /// The [`AccountEntry`], or what is wrong with the spec.
    pub entry: Result<&'a AccountEntry, &'a str>,
    /// Number of Agents that draw on the budget.
    pub agents: usize,
    /// Why its record cannot be written at the moment.
    pub problem: Option<&'a str>,
    /// The ledger's time.
    pub now: Timestamp,
}

/// Blocks calls that need this budget for a reason other than a refusal of its [`AccountEntry`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetHold {
    /// Kind `BudgetAsk` or `BudgetExhausted`.
    pub failure: CallFailure,
    /// Whether calls in flight are cut as well.
    pub cut: bool,
}

/// Computes the status of budgets and what holds their calls. Called under the ledger's lock: must not block or do I/O.
pub trait BudgetPresentation: Send + Sync {
    /// The whole status without `ledger`; written with the next record, at least 15 s after the previous one.
    fn status(&self, view: &BudgetView<'_>) -> Map<String, Value>;

    /// Whether the status has a change that people wait for, and that is therefore written within seconds.
    fn is_urgent(&self, view: &BudgetView<'_>) -> bool;

    /// The top-up of an approved gate, with its id; counted once.
    fn approved(&self, view: &BudgetView<'_>) -> Option<(String, Amount)>;

    /// What holds the calls of the budget. `name`: the limit as the Agent's messages call it.
    fn hold(&self, view: &BudgetView<'_>, name: &LimitName) -> Option<BudgetHold>;

    /// Called after a status was written in place of another.
    fn written(&self, budget: &AgentBudget, before: &Map<String, Value>, after: &Map<String, Value>);
}
