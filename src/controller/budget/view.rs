//! What is shown of a budget beside its record, and what holds its calls: the seam between ledger and objects.

use jiff::Timestamp;
use serde_json::{Map, Value};

use super::entry::AccountEntry;
use crate::api::AgentBudget;
use crate::api::amount::Amount;
use crate::api::failure::CallFailure;
use crate::link::messages::LimitName;

/// A budget as it stands.
pub struct BudgetView<'a> {
    /// The object as it was last seen. Its status may lag behind; see `shown`.
    pub budget: &'a AgentBudget,
    /// Its status as last written, without `ledger`.
    pub shown: &'a Map<String, Value>,
    /// Its account, or what is wrong with the spec.
    pub entry: Result<&'a AccountEntry, &'a str>,
    /// Agents that draw on it.
    pub agents: usize,
    /// Why its records cannot be written at the moment.
    pub trouble: Option<&'a str>,
    /// The leader's time.
    pub now: Timestamp,
}

/// Why no call that needs this budget may be made, though it is not the account that refuses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetHold {
    /// `BudgetAsk` or `BudgetExhausted`.
    pub failure: CallFailure,
    /// Calls in flight are cut too.
    pub cut: bool,
}

/// Makes a budget's status, and holds its calls. Called under the ledger's lock: it computes and nothing else.
pub trait BudgetPresentation: Send + Sync {
    /// The status, whole, without `ledger`; written with the next record, at least 15 s after the last one.
    fn status(&self, view: &BudgetView<'_>) -> Map<String, Value>;

    /// Whether its status says something that people wait for: it is written within seconds then.
    fn is_news(&self, view: &BudgetView<'_>) -> bool;

    /// A top-up that a person has approved, with its id; it is counted once.
    fn approved(&self, view: &BudgetView<'_>) -> Option<(String, Amount)>;

    /// What holds its calls. `name`: as the Agent that would be told sees it.
    fn hold(&self, view: &BudgetView<'_>, name: &LimitName) -> Option<BudgetHold>;

    /// A status was written in place of another.
    fn written(&self, budget: &AgentBudget, before: &Map<String, Value>, after: &Map<String, Value>);
}
