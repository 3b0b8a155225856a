//! The conditions of an AgentBudget. Pure.
//!
//! `Ready` is `False` only while a person has to act, as for Agents: an exhausted lifetime window, `onExhausted: Stop`,
//! or an unusable spec. It stays `True` while a window frees room at a known time, and while a gate is open.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use strum::IntoEnumIterator;

use super::approval;
use super::format;
use super::status::{BLOCKS, BudgetExhaustion, BudgetStatusInput};
use crate::api::amount::{Amount, AmountKind};
use crate::api::budget::{BudgetGate, OnExhausted, TopUp};
use crate::api::condition::ConditionType;
use crate::controller::runtime::condition_list::ConditionList;
use crate::ledger::limits::limit_amounts;
use crate::support::clock::rfc3339_seconds;

/// Why `Accepted` is `False`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InvalidBudget {
    pub(super) reason: &'static str,
    /// Names the field and the fix.
    pub(super) message: String,
}

/// The first problem of the spec that the admission policies cannot detect.
pub(super) fn refusal(input: &BudgetStatusInput<'_>) -> Option<InvalidBudget> {
    if let Err(problem) = &input.entry {
        let message = format!("{problem}. The Agents that draw on this budget make no calls until it is fixed");
        return Some(InvalidBudget {
            reason: "InvalidSpec",
            message,
        });
    }
    let elsewhere = input.budget.namespace().as_deref() != Some(input.own_namespace);
    (elsewhere && input.budget.spec.namespace_selector.is_some()).then(|| InvalidBudget {
        reason: "NamespaceSelectorRefused",
        message: format!(
            "spec.namespaceSelector is honoured only in the controller's own namespace, {}: remove it, or create \
             the budget there; until then the budget selects no Agents",
            input.own_namespace
        ),
    })
}

pub(super) fn compute(
    input: &BudgetStatusInput<'_>,
    refusal: Option<&InvalidBudget>,
    spent: Option<&BudgetExhaustion>,
    gate: Option<&BudgetGate>,
) -> Vec<Condition> {
    let mut conditions = BudgetConditions {
        input,
        list: ConditionList::new(
            &input.old.conditions,
            input.budget.metadata.generation,
            format::whole_second(input.now),
        ),
    };
    if let Some(refusal) = refusal {
        conditions
            .list
            .set(ConditionType::Accepted, false, refusal.reason, refusal.message.clone());
    } else {
        let ineffective = ineffective_top_up(input).map_or_else(String::new, |what| format!(". {what}"));
        let message = format!("the spec is valid{ineffective}");
        conditions.list.set(ConditionType::Accepted, true, "Accepted", message);
    }
    conditions.near_limit();
    match spent {
        Some(spent) => {
            let message = conditions.what_is_spent(spent, gate);
            conditions
                .list
                .set(ConditionType::Exhausted, true, spent.reason(), message);
        }
        None => conditions.list.clear(ConditionType::Exhausted),
    }
    conditions.standing(refusal, spent, gate);
    conditions.list.into_conditions()
}

struct BudgetConditions<'a> {
    input: &'a BudgetStatusInput<'a>,
    list: ConditionList,
}

impl BudgetConditions<'_> {
    fn near_limit(&mut self) {
        let percent = i64::from(self.input.budget.spec.warn_at_percent);
        let near = self.input.entry.ok().and_then(|entry| {
            let (limits, used) = (entry.account().limits(), entry.account().used());
            let near = |kind: &AmountKind| {
                limits
                    .get(*kind)
                    .is_some_and(|limit| limit > 0 && reaches(used.get(*kind), limit, percent))
            };
            AmountKind::iter()
                .find(near)
                .map(|kind| (kind, used.get(kind), limits.get(kind).unwrap_or_default()))
        });
        match near {
            Some((kind, used, limit)) => {
                let message = format!(
                    "{} of {} used, which reaches spec.warnAtPercent ({percent} %). {}",
                    format::exact(kind, used),
                    format::exact(kind, limit),
                    how_to_add(self.input, None)
                );
                self.list.set(ConditionType::NearLimit, true, "WarnAtPercent", message);
            }
            None => self.list.clear(ConditionType::NearLimit),
        }
    }

    fn what_is_spent(&self, spent: &BudgetExhaustion, gate: Option<&BudgetGate>) -> String {
        if let Some(field) = spent.zero {
            return self.what_blocks(field, spent.kind);
        }
        let mut parts = Vec::new();
        if let Ok(entry) = self.input.entry {
            let account = entry.account();
            let limit = account.limits().get(spent.kind).unwrap_or_default();
            parts.push(format!(
                "no room for the next call: {} of {} used and {} reserved",
                format::exact(spent.kind, account.used().get(spent.kind)),
                format::exact(spent.kind, limit),
                format::number(spent.kind, account.reserved().get(spent.kind)),
            ));
            let highest: Vec<String> = account
                .shares()
                .into_iter()
                .take(3)
                .map(|(agent, used)| {
                    format!(
                        "{}/{} ({})",
                        agent.namespace,
                        agent.name,
                        format::number(spent.kind, used.get(spent.kind))
                    )
                })
                .collect();
            if !highest.is_empty() {
                parts.push(format!("Highest usage: {}", highest.join(", ")));
            }
        }
        parts.push(match (spent.held, spent.resets_at) {
            (true, _) => "spec.onExhausted is Stop: the loops stay stopped until room is added".into(),
            (false, Some(at)) => format!("Room is available again at {}", rfc3339_seconds(at)),
            (false, None) => "The budget does not reset".into(),
        });
        parts.push(match gate {
            Some(gate) => approval::how_to_answer(self.input.budget, gate),
            None => how_to_add(self.input, Some(spent.kind)),
        });
        parts.join(". ")
    }

    fn what_blocks(&self, field: &str, kind: AmountKind) -> String {
        let blocks = format!("{field}.{} is 0, which blocks every call", kind.limit_field());
        if field == "spec.perAgent" {
            return format!("{blocks} of every Agent: raise it, or remove it to lift the limit per Agent");
        }
        format!(
            "{blocks}: raise it, or remove it to leave this kind unlimited. {}",
            how_to_add(self.input, Some(kind))
        )
    }

    fn standing(
        &mut self,
        refusal: Option<&InvalidBudget>,
        spent: Option<&BudgetExhaustion>,
        gate: Option<&BudgetGate>,
    ) {
        let exhausted = self.list.find(ConditionType::Exhausted);
        let exhausted = exhausted.map_or_else(String::new, |exhausted| exhausted.message.clone());
        let refused = self.input.problem.map(|problem| {
            format!(
                "the API server rejects the ledger record in the status of this budget, so no leases are granted: \
                 {problem}. The write is retried every minute"
            )
        });
        let (ready, reason, message) = match (refusal, spent) {
            (Some(refusal), _) => (false, refusal.reason, refusal.message.clone()),
            (None, _) if refused.is_some() => (false, "RecordRefused", refused.unwrap_or_default()),
            (None, Some(_)) if gate.is_some() => (true, "AwaitingApproval", exhausted),
            (None, Some(spent)) if !spent.held && spent.resets_at.is_some() => (true, "Exhausted", exhausted),
            (None, Some(spent)) if spent.zero.is_some() => (false, spent.reason(), exhausted),
            (None, Some(_)) => (false, "Exhausted", exhausted),
            (None, None) => (true, "Accepted", "the budget has room for calls".into()),
        };
        self.list.set(ConditionType::Ready, ready, reason, message.clone());
        if ready {
            self.list.remove(ConditionType::Stalled);
        } else {
            self.list.set(ConditionType::Stalled, true, reason, message);
        }
    }
}

/// The first top-up of a kind that has no limit: admission allows one in a new budget, and the limit may be removed
/// later.
fn ineffective_top_up(input: &BudgetStatusInput<'_>) -> Option<String> {
    let spec = &input.budget.spec;
    let limits = limit_amounts(&spec.limits).ok()?;
    let unlimited = |top_up: &TopUp| {
        let amount = limit_amounts(&top_up.amount).unwrap_or_default();
        amount.kinds().find(|kind| limits.get(*kind).is_none())
    };
    let (top_up, kind) = spec
        .top_ups
        .iter()
        .find_map(|top_up| Some((top_up, unlimited(top_up)?)))?;
    let field = kind.limit_field();
    Some(format!(
        "spec.topUps[{}].{field} adds nothing: spec.limits has no {field}",
        top_up.id
    ))
}

/// Whether `used` is at least `percent` percent of `limit`.
fn reaches(used: i64, limit: i64, percent: i64) -> bool {
    i128::from(used) * 100 >= i128::from(limit) * i128::from(percent)
}

/// A command that tops up `kind`, or without a kind a quarter of every limit.
pub(super) fn how_to_add(input: &BudgetStatusInput<'_>, kind: Option<AmountKind>) -> String {
    let budget = input.budget;
    let (namespace, name) = (budget.namespace().unwrap_or_default(), budget.name_any());
    let limits = input
        .entry
        .map(|entry| entry.account().terms().limits)
        .unwrap_or_default();
    let quarter = format::quarter(&limits);
    let more = Amount::from_fn(|each| match kind {
        Some(kind) if kind != each => 0,
        Some(_) | None => quarter.get(each),
    });
    // A quarter of a limit of 0 is 0: suggest 1 instead.
    let more = if more.is_zero() {
        let kind = kind.or_else(|| limits.kinds().next()).unwrap_or(AmountKind::Tokens);
        Amount::from_fn(|each| i64::from(each == kind))
    } else {
        more
    };
    let id = free_id(input);
    let entry = format!("{{\"id\":\"{id}\",{}}}", format::fields(&more));
    let (path, value) = if budget.spec.top_ups.is_empty() {
        ("/spec/topUps", format!("[{entry}]"))
    } else {
        ("/spec/topUps/-", entry)
    };
    format!(
        "To add to this window: kubectl patch agentbudgets.agentloop.dev -n {namespace} {name} --type=json \
         -p '[{{\"op\":\"add\",\"path\":\"{path}\",\"value\":{value}}}]'"
    )
}

/// An id that no top-up of the spec has.
fn free_id(input: &BudgetStatusInput<'_>) -> String {
    let taken = |id: &String| input.budget.spec.top_ups.iter().any(|top_up| top_up.id == *id);
    let known = input.budget.spec.top_ups.len();
    // At most `known` of these `known + 1` numbers are taken, so at least one is free.
    (known + 1..=2 * known + 1)
        .map(|number| format!("more-{number}"))
        .find(|id| !taken(id))
        .unwrap_or_default()
}

impl BudgetExhaustion {
    fn reason(&self) -> &'static str {
        match self.on_exhausted {
            _ if self.zero.is_some() => BLOCKS,
            OnExhausted::Pause => "NoRoom",
            OnExhausted::Ask => "AskedForMore",
            OnExhausted::Stop => "Stopped",
        }
    }
}

/// When an exhausted budget has room again without user action; `None` for `Stop`, which waits for a person.
pub(super) fn resets(spent: Option<&BudgetExhaustion>) -> Option<Timestamp> {
    spent.filter(|spent| !spent.held).and_then(|spent| spent.resets_at)
}
