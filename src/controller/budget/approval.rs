//! The gate that an exhausted budget with `onExhausted: Ask` opens, and the answer of a person. Pure.
//!
//! A gate is named after the epoch of the ledger record that is written with it. Names are never reused, so an
//! annotation left on the object cannot answer a later gate. An approval is the top-up `gate/<id>`, counted once like
//! any other.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use super::format;
use crate::api::AgentBudget;
use crate::api::amount::Amount;
use crate::api::budget::{AgentBudgetStatus, BudgetGate, OnExhausted};
use crate::ledger::account::GATE_TOP_UP;
use crate::ledger::limits::{added_amount, limit_amounts};
use crate::link::gate_annotations::{self, AnnotatedAnswer};
pub use crate::link::gate_annotations::{APPROVE, APPROVED_BY, DENY};
use crate::support::hash::sha256_hex;

/// Value of `kind` of the [`BudgetGate`].
pub const KIND: &str = "BudgetAsk";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BudgetGateDecision {
    Approved {
        /// Id of the [`BudgetGate`].
        id: String,
        /// Name of the approver.
        by: String,
        /// The annotation's value.
        value: String,
    },
    Denied {
        /// The annotation's value.
        value: String,
    },
}

/// The [`Amount`] that an approval adds: `ask.topUp`, or by default a quarter of each limit.
#[must_use]
pub fn offer(budget: &AgentBudget) -> Amount {
    let asked = budget.spec.ask.as_ref().and_then(|ask| added_amount(&ask.top_up).ok());
    let quarter = || limit_amounts(&budget.spec.limits).map(|limits| format::quarter(&limits));
    asked.unwrap_or_else(|| quarter().unwrap_or_default())
}

/// The [`BudgetGate`] to open with the record of this epoch; `None` unless `onExhausted` is `Ask`.
#[must_use]
pub fn open(budget: &AgentBudget, epoch: i64, now: Timestamp) -> Option<BudgetGate> {
    let asks = budget.spec.on_exhausted == OnExhausted::Ask;
    asks.then(|| {
        let id = format!("ask-{epoch}");
        BudgetGate {
            arguments_hash: hash(budget, &id),
            id,
            kind: KIND.into(),
            opened_at: Time(format::whole_second(now)),
        }
    })
}

/// Hash of the question: the budget's uid, the gate's id, and the amount offered.
#[must_use]
pub fn hash(budget: &AgentBudget, id: &str) -> String {
    let uid = budget.metadata.uid.as_deref().unwrap_or_default();
    let question = format!("{uid}\n{id}\n{}", format::fields(&offer(budget)));
    sha256_hex(question, 16)
}

/// The answer to the open [`BudgetGate`] in `status`. Editing the offered amount changes the hash, so an approval of
/// the earlier amount is void.
#[must_use]
pub fn answer(budget: &AgentBudget, status: &AgentBudgetStatus) -> Option<BudgetGateDecision> {
    let gate = status.gates.first()?;
    match gate_annotations::answer(budget.annotations(), &gate.id, &gate.arguments_hash)? {
        AnnotatedAnswer::Denied { value, .. } => Some(BudgetGateDecision::Denied { value }),
        AnnotatedAnswer::Approved { by, value } => {
            let current = gate.arguments_hash == hash(budget, &gate.id);
            current.then(|| BudgetGateDecision::Approved {
                id: gate.id.clone(),
                by,
                value,
            })
        }
    }
}

/// The top-up granted by an approval annotation, with its id in the ledger.
#[must_use]
pub fn approved(budget: &AgentBudget, status: &AgentBudgetStatus) -> Option<(String, Amount)> {
    match answer(budget, status)? {
        BudgetGateDecision::Approved { id, .. } => Some((format!("{GATE_TOP_UP}{id}"), offer(budget))),
        BudgetGateDecision::Denied { .. } => None,
    }
}

/// The `kubectl` command that answers the [`BudgetGate`].
#[must_use]
pub fn how_to_answer(budget: &AgentBudget, gate: &BudgetGate) -> String {
    let (namespace, name) = (budget.namespace().unwrap_or_default(), budget.name_any());
    let commands = gate_annotations::commands(
        "agentbudgets.agentloop.dev",
        (&namespace, &name),
        (&gate.id, &gate.arguments_hash),
    );
    format!("To approve, which adds {}: {commands}", format::amount(&offer(budget)))
}
