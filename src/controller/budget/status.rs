//! Computes the status of an AgentBudget from its account. Pure: the same account gives the same status, so an
//! unchanged budget causes no write.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::ResourceExt;

use super::approval::{self, BudgetGateDecision};
use super::conditions;
use super::entry::AccountEntry;
use super::format;
use crate::api::amount::{Amount, AmountKind};
use crate::api::budget::{
    AgentBudgetStatus, BudgetGate, BudgetSummary, HandledAnswers, OnExhausted, TopAgent, WindowStatus,
};
use crate::api::condition::{self, ConditionType};
use crate::api::{AgentBudget, NamespacedName};
use crate::ledger::account::{GrantRequest, LeaseHolder};
use crate::ledger::window::WindowRule;

/// Reason of the conditions while a limit is 0.
pub(super) const BLOCKS: &str = "BlocksEverything";
/// Maximum number of Agents in `status.topAgents`.
const MAX_AGENTS: usize = 10;

pub struct BudgetStatusInput<'a> {
    pub budget: &'a AgentBudget,
    /// The [`AgentBudgetStatus`] as last written.
    pub old: &'a AgentBudgetStatus,
    /// The [`AccountEntry`], or what is wrong with the spec.
    pub entry: Result<&'a AccountEntry, &'a str>,
    /// Number of Agents that draw on the budget.
    pub agents: usize,
    /// Why its record cannot be written at the moment.
    pub problem: Option<&'a str>,
    pub own_namespace: &'a str,
    pub now: Timestamp,
}

/// A budget that has no room for the next call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetExhaustion {
    /// The [`AmountKind`] that is exhausted.
    pub kind: AmountKind,
    /// When there is room without user action; `None`: never, or unknown.
    pub resets_at: Option<Timestamp>,
    pub on_exhausted: OnExhausted,
    /// Held by `onExhausted: Stop` until a person adds room.
    pub held: bool,
    /// The field whose limit of 0 blocks every call: `spec.limits` or `spec.perAgent`. No [`BudgetGate`] is opened and
    /// no call in flight is cut then, since the limit itself blocks.
    pub zero: Option<&'static str>,
}

/// Whether, and how, the budget is exhausted.
#[must_use]
pub fn exhaustion(input: &BudgetStatusInput<'_>) -> Option<BudgetExhaustion> {
    let entry = input.entry.ok()?;
    let on_exhausted = input.budget.spec.on_exhausted;
    let make = |kind, resets_at, held| BudgetExhaustion {
        kind,
        resets_at,
        on_exhausted,
        held,
        zero: None,
    };
    let (limits, per_agent) = (entry.account().limits(), entry.account().per_agent());
    for (field, limits) in [("spec.limits", limits), ("spec.perAgent", per_agent)] {
        if let Some(kind) = limits.kinds().find(|kind| limits.get(*kind) == Some(0)) {
            return Some(BudgetExhaustion {
                on_exhausted: OnExhausted::Pause,
                zero: Some(field),
                ..make(kind, None, false)
            });
        }
    }
    let stops = on_exhausted == OnExhausted::Stop;
    if let Some((_, blocked)) = entry.exhausted(input.agents) {
        return Some(make(blocked.refused.kind, blocked.refused.resets_at, stops));
    }
    let account = entry.account();
    let used = account.used();
    let full = |kind: &AmountKind| limits.get(*kind).is_some_and(|limit| used.get(*kind) >= limit);
    if let Some(kind) = limits.kinds().find(full) {
        let one = Amount::from_fn(|each| i64::from(each == kind));
        let ask = GrantRequest {
            lease: None,
            open: Amount::ZERO,
            least: one,
            full: one,
        };
        return Some(make(kind, account.resets_at(&LeaseHolder::default(), &ask), stops));
    }
    remembered_refusal(input, entry).map(|(kind, resets_at)| make(kind, resets_at, stops))
}

/// An exhaustion that is known only from the previous status, because the refused requests were lost with an earlier
/// leader. `Stop` holds until limits are raised; otherwise it holds until its reset time, or until room is freed or an
/// Agent stops waiting.
fn remembered_refusal(input: &BudgetStatusInput<'_>, entry: &AccountEntry) -> Option<(AmountKind, Option<Timestamp>)> {
    let old = input.old;
    let holds = |condition: &&Condition| condition.status == "True" && condition.reason != BLOCKS;
    condition::find(&old.conditions, ConditionType::Exhausted).filter(holds)?;
    let (limits, before) = (entry.account().limits(), old.limits?);
    // A raised limit, or a kind that is no longer limited.
    let raised = before
        .kinds()
        .any(|kind| limits.get(kind).is_none_or(|limit| Some(limit) > before.get(kind)));
    if raised {
        return None;
    }
    let resets_at = old
        .window
        .as_ref()
        .and_then(|window| window.resets_at.as_ref())
        .map(|at| at.0);
    let kind = tightest(input).map_or(AmountKind::Tokens, |(kind, _, _)| kind);
    if input.budget.spec.on_exhausted == OnExhausted::Stop {
        return Some((kind, resets_at));
    }
    let due = resets_at.is_some_and(|at| at <= input.now);
    let remaining = entry.remaining();
    let freed = old
        .remaining
        .is_none_or(|old| remaining.kinds().any(|kind| remaining.get(kind) > old.get(kind)));
    (!due && !freed && !entry.released()).then_some((kind, resets_at))
}

/// The limit with the highest share used: its [`AmountKind`], the limit, and the used amount.
fn tightest(input: &BudgetStatusInput<'_>) -> Option<(AmountKind, i64, i64)> {
    let account = input.entry.ok()?.account();
    let (limits, used) = (account.limits(), account.used());
    let all = limits
        .kinds()
        .filter_map(|kind| limits.get(kind).map(|limit| (kind, limit, used.get(kind))));
    all.max_by(|(a, limit_a, used_a), (b, limit_b, used_b)| {
        let left = i128::from(*used_a) * i128::from((*limit_b).max(1));
        let right = i128::from(*used_b) * i128::from((*limit_a).max(1));
        left.cmp(&right).then_with(|| b.cmp(a))
    })
}

/// The whole [`AgentBudgetStatus`] without `ledger`.
#[must_use]
pub fn compute(input: &BudgetStatusInput<'_>) -> AgentBudgetStatus {
    let refusal = conditions::refusal(input);
    let spent = exhaustion(input);
    let (gate, handled) = gates(input, spent.as_ref());
    let mut status = AgentBudgetStatus {
        observed_generation: input.budget.metadata.generation,
        conditions: conditions::compute(input, refusal.as_ref(), spent.as_ref(), gate.as_ref()),
        agents: i32::try_from(input.agents).unwrap_or(i32::MAX),
        gates: gate.into_iter().collect(),
        last_handled_requests: handled,
        ..AgentBudgetStatus::default()
    };
    if let Ok(entry) = input.entry {
        let account = entry.account();
        let window = window(input, entry, spent.as_ref());
        status.limits = Some(account.limits());
        status.used = Some(account.used());
        status.reserved = Some(account.reserved());
        status.remaining = Some(entry.remaining());
        status.top_agents = account.shares().into_iter().take(MAX_AGENTS).map(top_agent).collect();
        status.summary = Some(summary(input, entry, &window));
        status.window = Some(window);
    }
    status
}

/// The open [`BudgetGate`], and the answers handled so far.
fn gates(
    input: &BudgetStatusInput<'_>,
    spent: Option<&BudgetExhaustion>,
) -> (Option<BudgetGate>, Option<HandledAnswers>) {
    let old = input.old;
    let mut handled = old.last_handled_requests.clone();
    let mut approved = false;
    if let Some(answer) = approval::answer(input.budget, old) {
        let known = handled.get_or_insert_default();
        match answer {
            BudgetGateDecision::Approved { by, value, .. } => {
                (known.approve, known.approved_by) = (Some(value), Some(by));
                approved = true;
            }
            BudgetGateDecision::Denied { value } => {
                known.deny = Some(value);
                // From now on the same as `Pause`: the window frees room, or a person adds it.
                return (None, handled);
            }
        }
    }
    if spent.is_none_or(|spent| spent.on_exhausted != OnExhausted::Ask) {
        return (None, handled);
    }
    let asked = old.gates.first().filter(|_| !approved);
    // A gate whose offered amount was edited is replaced by a new one.
    if let Some(gate) = asked.filter(|gate| gate.arguments_hash == approval::hash(input.budget, &gate.id)) {
        return (Some(gate.clone()), handled);
    }
    let was = condition::find(&old.conditions, ConditionType::Exhausted).is_some_and(|old| old.status == "True");
    let edited = old.observed_generation != input.budget.metadata.generation;
    // A gate opens when the budget becomes exhausted, when an approved top-up was not enough, and after an edit, but
    // not again after a denial: `Exhausted` was true before it already.
    let ask = !was || approved || edited || asked.is_some();
    let epoch = input.entry.map_or(0, |entry| entry.account().epoch()) + 1;
    (
        ask.then(|| approval::open(input.budget, epoch, input.now)).flatten(),
        handled,
    )
}

fn window(input: &BudgetStatusInput<'_>, entry: &AccountEntry, spent: Option<&BudgetExhaustion>) -> WindowStatus {
    let account = entry.account();
    let rule = &account.terms().window;
    let started_at = match rule {
        WindowRule::Rolling(_) => None,
        WindowRule::Calendar(..) => Some(Time(rule.start(account.time()))),
        WindowRule::Lifetime => input.budget.creation_timestamp(),
    };
    let resets_at = match spent {
        Some(_) => conditions::resets(spent),
        None => rule.end(account.time()),
    };
    WindowStatus {
        started_at,
        resets_at: resets_at.map(|at| Time(format::whole_second(at))),
    }
}

fn top_agent((agent, used): (NamespacedName, Amount)) -> TopAgent {
    TopAgent {
        namespace: agent.namespace,
        name: agent.name,
        tokens: used.tokens,
        cost: used.cost,
    }
}

fn summary(input: &BudgetStatusInput<'_>, entry: &AccountEntry, window: &WindowStatus) -> BudgetSummary {
    let mut summary = BudgetSummary {
        window: format::window(&input.budget.spec.window),
        resets: window
            .resets_at
            .as_ref()
            .map_or_else(String::new, |at| format::clock(at.0, &input.budget.spec.window)),
        ..BudgetSummary::default()
    };
    if let Some((kind, limit, used)) = tightest(input) {
        summary.limit = format::short(kind, limit);
        summary.used = format::number(kind, used);
        summary.used_percent = format!("{}%", format::percent(used, limit));
        summary.reserved = format::number(kind, entry.account().reserved().get(kind));
    }
    summary
}

/// Whether `new` has a change that should be written at once: a condition, a [`BudgetGate`], a handled answer or a
/// generation.
#[must_use]
pub fn is_urgent(old: &AgentBudgetStatus, new: &AgentBudgetStatus) -> bool {
    let states = |status: &AgentBudgetStatus| {
        let states = status.conditions.iter();
        let mut states: Vec<_> = states
            .map(|c| (c.type_.clone(), c.status.clone(), c.reason.clone()))
            .collect();
        states.sort();
        states
    };
    let gates = |status: &AgentBudgetStatus| status.gates.first().map(|gate| gate.id.clone());
    let spent = |status: &AgentBudgetStatus| status.last_handled_requests.clone();
    states(old) != states(new)
        || gates(old).is_some() != gates(new).is_some()
        || spent(old) != spent(new)
        || old.observed_generation != new.observed_generation
}
