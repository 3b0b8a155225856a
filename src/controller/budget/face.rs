//! Shows budgets: status, Events, and what a spent one holds. The seam to the ledger is [`super::view::Face`].

use kube::Resource;
use serde_json::{Map, Value};

use super::gate;
use super::notices;
use super::status::{self, Input};
use super::view::{BudgetView, Face, Held};
use crate::api::AgentBudget;
use crate::api::amount::Amount;
use crate::api::budget::{AgentBudgetStatus, OnExhausted};
use crate::api::condition::{ConditionType, find};
use crate::api::failure::{Failure, FailureKind};
use crate::controller::agent::events::Sink;
use crate::link::messages::LimitName;

/// Shows budgets in their status and by Events.
pub struct Shown {
    own_namespace: String,
    events: Sink,
}

impl Shown {
    /// Of a controller in this namespace.
    #[must_use]
    pub fn new(own_namespace: &str, events: Sink) -> Self {
        Self {
            own_namespace: own_namespace.into(),
            events,
        }
    }

    fn input<'a>(&'a self, view: &BudgetView<'a>, old: &'a AgentBudgetStatus) -> Input<'a> {
        Input {
            budget: view.budget,
            old,
            entry: view.entry,
            agents: view.agents,
            own_namespace: &self.own_namespace,
            now: view.now,
        }
    }
}

fn read(shown: &Map<String, Value>) -> AgentBudgetStatus {
    // What this version cannot read it writes anew.
    serde_json::from_value(Value::Object(shown.clone())).unwrap_or_default()
}

impl Face for Shown {
    fn status(&self, view: &BudgetView<'_>) -> Map<String, Value> {
        let old = read(view.shown);
        let new = status::compute(&self.input(view, &old));
        match serde_json::to_value(&new) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) | Err(_) => view.shown.clone(),
        }
    }

    fn is_news(&self, view: &BudgetView<'_>) -> bool {
        let old = read(view.shown);
        status::is_news(&old, &status::compute(&self.input(view, &old)))
    }

    fn approved(&self, view: &BudgetView<'_>) -> Option<(String, Amount)> {
        (view.budget.spec.on_exhausted == OnExhausted::Ask)
            .then(|| gate::approved(view.budget, &read(view.shown)))
            .flatten()
    }

    fn held(&self, view: &BudgetView<'_>, name: &LimitName) -> Option<Held> {
        if view.budget.spec.on_exhausted == OnExhausted::Pause {
            return None;
        }
        let old = read(view.shown);
        let spent = status::spent(&self.input(view, &old))?;
        let name = match name {
            LimitName::Budget(name) => name.as_str(),
            LimitName::TokensPerHour | LimitName::Total => return None,
        };
        let failure = |kind, message, resumes_at| Failure {
            kind,
            message,
            retry_after_milliseconds: None,
            resumes_at,
        };
        if spent.held {
            let message = format!(
                "AgentBudget {name} is spent, and its onExhausted is Stop: raise spec.limits or add to spec.topUps there"
            );
            return Some(Held {
                failure: failure(FailureKind::BudgetExhausted, message, None),
                cut: true,
            });
        }
        let gate = old.gates.first()?;
        let message = format!(
            "AgentBudget {name} is spent and asks for more: answer its gate {} (kubectl describe agentbudgets.agentloop.dev \
             says how)",
            gate.id
        );
        Some(Held {
            failure: failure(FailureKind::BudgetAsk, message, spent.resets_at),
            cut: false,
        })
    }

    fn written(&self, budget: &AgentBudget, before: &Map<String, Value>, after: &Map<String, Value>) {
        let (before, after) = (read(before), read(after));
        let notices = notices::of_status(budget, &before, &after);
        if let Some(first) = notices.first() {
            let exhausted =
                find(&after.conditions, ConditionType::Exhausted).map(|condition| condition.status.as_str());
            tracing::info!(
                namespace = budget.metadata.namespace,
                budget = budget.metadata.name,
                reason = first.reason,
                exhausted,
                "a budget's state changed"
            );
        }
        self.events.send(notices, &budget.object_ref(&()));
    }
}
