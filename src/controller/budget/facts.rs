//! The properties of Agents and budgets that determine the assignment of accounts. Parsed once per version of an
//! object.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use kube::core::Selector;

use super::accounts::{DocumentId, DocumentKind, DocumentPart};
use crate::api::agent::ModelSpec;
use crate::api::amount::{Amount, LimitAmounts};
use crate::api::budget::{BudgetLimits, LedgerRecord};
use crate::api::status::LoopUsage;
use crate::api::{Agent, AgentBudget, NamespacedName};
use crate::ledger::account::LedgerTerms;
use crate::ledger::limits::{added_amount, limit_amounts};
use crate::ledger::price::micro_usd;
use crate::ledger::window::WindowRule;
use crate::link::messages::PricedModel;

/// Window of `guardrails.tokensPerHour`.
const HOUR: SignedDuration = SignedDuration::from_secs(3600);

/// The relevant properties of an Agent.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentFacts {
    /// The document of its own limits.
    pub document: DocumentId,
    pub labels: BTreeMap<String, String>,
    /// The budgets named in its spec.
    pub refs: Vec<String>,
    /// Its own limits with their records, or what is wrong with them.
    pub own: Result<Vec<OwnLimit>, String>,
    /// The models in its spec, with their prices there.
    pub models: Vec<ModelFacts>,
    /// Its storage is deleted with its pod.
    pub ephemeral: bool,
    /// It is suspended, so it makes no calls and waits for none.
    pub suspended: bool,
    /// Longest timeout of its calls.
    pub longest_call: SignedDuration,
}

/// A model in an Agent's spec.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFacts {
    /// The field that names it.
    pub field: &'static str,
    pub model: PricedModel,
}

/// One of an Agent's own limits.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnLimit {
    pub part: DocumentPart,
    /// Its terms; without limits if only its record is left.
    pub terms: LedgerTerms,
    /// The [`LedgerRecord`] as last written.
    pub record: Option<LedgerRecord>,
    /// The Agent's usage since its creation, by its status; zero for windows that end.
    pub used: Amount,
}

impl AgentFacts {
    /// The accounts of its own limits that are not set.
    #[must_use]
    pub fn unset(&self) -> Vec<String> {
        let Ok(own) = &self.own else { return Vec::new() };
        [DocumentPart::TokensPerHour, DocumentPart::Total]
            .into_iter()
            .filter(|part| own.iter().all(|own| own.part != *part))
            .map(|part| self.document.account(part))
            .collect()
    }

    #[must_use]
    pub fn of(agent: &Agent) -> Self {
        let spec = &agent.spec;
        Self {
            document: document(DocumentKind::Agent, agent),
            labels: agent.labels().clone(),
            refs: spec
                .budget_refs
                .iter()
                .map(|reference| reference.name.clone())
                .collect(),
            own: own(agent),
            models: models(agent),
            ephemeral: spec.storage.ephemeral,
            suspended: spec.suspend,
            longest_call: longest_call(agent),
        }
    }
}

fn longest_call(agent: &Agent) -> SignedDuration {
    let spec = &agent.spec;
    let light = spec.light_model.as_ref().map(|model| model.timeout_seconds);
    let seconds = light.into_iter().fold(spec.model.timeout_seconds, u32::max);
    SignedDuration::from_secs(seconds.into())
}

fn models(agent: &Agent) -> Vec<ModelFacts> {
    let named = [
        ("spec.model", Some(&agent.spec.model)),
        ("spec.lightModel", agent.spec.light_model.as_ref()),
    ];
    let of = |(field, model): (&'static str, Option<&ModelSpec>)| {
        let model = model?;
        Some(ModelFacts {
            field,
            model: PricedModel {
                name: model.name.clone(),
                price: model.price.clone(),
            },
        })
    };
    named.into_iter().filter_map(of).collect()
}

fn own(agent: &Agent) -> Result<Vec<OwnLimit>, String> {
    let guardrails = &agent.spec.guardrails;
    let status = agent.status.as_ref();
    let ledger = status.and_then(|status| status.ledger.clone()).unwrap_or_default();
    let hourly = guardrails.tokens_per_hour.map(|tokens| LimitAmounts {
        tokens: Some(tokens),
        ..LimitAmounts::default()
    });
    let total = guardrails.total.as_ref().map(|total| {
        let cost = total.cost_usd.as_deref().map(micro_usd).transpose();
        let cost = cost.map_err(|error| error.within("spec.guardrails.total.costUSD").to_string())?;
        Ok::<_, String>(LimitAmounts {
            tokens: total.tokens,
            cost,
            ..LimitAmounts::default()
        })
    });
    let total = total.transpose()?;
    let used = status.and_then(|status| status.usage.as_ref()).map(life);
    let parts = [
        (
            DocumentPart::TokensPerHour,
            WindowRule::Rolling(HOUR),
            hourly,
            ledger.tokens_per_hour,
            Amount::ZERO,
        ),
        (
            DocumentPart::Total,
            WindowRule::Lifetime,
            total,
            ledger.total,
            used.unwrap_or_default(),
        ),
    ];
    let set = parts
        .into_iter()
        .filter(|(_, _, limits, record, _)| limits.is_some() || record.is_some());
    Ok(set
        .map(|(part, window, limits, record, used)| OwnLimit {
            part,
            terms: LedgerTerms {
                limits: limits.unwrap_or_default(),
                per_agent: LimitAmounts::default(),
                window,
            },
            record,
            used,
        })
        .collect())
}

/// The usage that counts for a lifetime limit: cache writes are new tokens, cache reads are not.
fn life(usage: &LoopUsage) -> Amount {
    let tokens = [usage.cache_write_tokens, usage.output_tokens]
        .into_iter()
        .fold(usage.input_tokens, i64::saturating_add);
    Amount {
        tokens,
        cost: usage.cost,
        ..Amount::ZERO
    }
}

/// The relevant properties of a budget.
#[derive(Clone, Debug)]
pub struct BudgetFacts {
    pub document: DocumentId,
    /// The object as last seen.
    pub object: Arc<AgentBudget>,
    /// Its selectors, or why they are invalid.
    pub selects: Result<BudgetSelector, String>,
    /// Its [`LedgerTerms`] and its top-ups by id, or what is wrong with them.
    pub terms: Result<(LedgerTerms, Vec<(String, Amount)>), String>,
}

#[derive(Clone, Debug)]
pub struct BudgetSelector {
    /// Selects Agents; `None`: none.
    pub agents: Option<Selector>,
    /// Selects namespaces; `None`: the budget's own.
    pub namespaces: Option<Selector>,
}

impl BudgetFacts {
    #[must_use]
    pub fn of(budget: &Arc<AgentBudget>) -> Self {
        let spec = &budget.spec;
        let agents = selector("spec.selector", spec.selector.as_ref());
        let namespaces = selector("spec.namespaceSelector", spec.namespace_selector.as_ref());
        Self {
            document: document(DocumentKind::Budget, budget.as_ref()),
            object: budget.clone(),
            selects: agents.and_then(|agents| {
                let namespaces = namespaces?;
                Ok(BudgetSelector { agents, namespaces })
            }),
            terms: terms(budget),
        }
    }

    /// What is wrong with its spec.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        let terms = self.terms.as_ref().err();
        terms.or(self.selects.as_ref().err()).map(String::as_str)
    }

    /// Whether it selects Agents of other namespaces.
    #[must_use]
    pub fn is_cross_namespace(&self) -> bool {
        self.object.spec.namespace_selector.is_some()
    }

    /// Whether any of its limits is a cost limit.
    #[must_use]
    pub fn limits_cost(&self) -> bool {
        let limits = |terms: &LedgerTerms| terms.limits.cost.is_some() || terms.per_agent.cost.is_some();
        self.terms.as_ref().is_ok_and(|(terms, _)| limits(terms))
    }
}

fn terms(budget: &AgentBudget) -> Result<(LedgerTerms, Vec<(String, Amount)>), String> {
    let spec = &budget.spec;
    let read = |field: &str, limits: &BudgetLimits| {
        limit_amounts(limits)
            .map_err(|error| error.within(field).to_string())
            .and_then(|limits| {
                let negative = limits.kinds().find(|kind| limits.get(*kind) < Some(0));
                negative.map_or(Ok(limits), |kind| Err(format!("{field}.{kind} must not be negative")))
            })
    };
    let terms = LedgerTerms {
        limits: read("spec.limits", &spec.limits)?,
        per_agent: spec
            .per_agent
            .as_ref()
            .map(|limits| read("spec.perAgent", limits))
            .transpose()?
            .unwrap_or_default(),
        window: WindowRule::read(&spec.window).map_err(|error| error.to_string())?,
    };
    let top_ups = spec.top_ups.iter().map(|top_up| {
        let amount = added_amount(&top_up.amount);
        let field = format!("spec.topUps[{}]", top_up.id);
        let amount = amount.map_err(|error| error.within(&field).to_string())?;
        Ok((top_up.id.clone(), amount))
    });
    Ok((terms, top_ups.collect::<Result<_, String>>()?))
}

fn selector(field: &str, selector: Option<&LabelSelector>) -> Result<Option<Selector>, String> {
    selector
        .map(|selector| {
            let read = Selector::try_from(selector.clone());
            read.map_err(|error| format!("{field}.matchExpressions: {error}; In and NotIn need values"))
        })
        .transpose()
}

pub fn document(kind: DocumentKind, object: &impl ResourceExt) -> DocumentId {
    DocumentId {
        kind,
        object: NamespacedName::of(object),
        uid: object.uid().unwrap_or_default(),
    }
}
