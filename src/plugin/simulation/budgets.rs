//! The limits of the ledger that apply to a loop: those of an AgentBudget, and those of its own guardrails.

use jiff::{SignedDuration, Timestamp};

use super::account::{BudgetStop, SimulatedAccount, is_later};
use super::changes::SimulatedLimits;
use crate::api::amount::{Amount, AmountKind, LimitAmounts};
use crate::api::money::micro_usd;
use crate::ledger::account::LedgerTerms;
use crate::ledger::limits::{added_amount, limit_amounts};
use crate::ledger::window::WindowRule;
use crate::plugin::failure::PluginError;

/// Window of `guardrails.tokensPerHour`.
const HOUR: SignedDuration = SignedDuration::from_hours(1);

/// All accounts that apply.
pub struct SimulatedAccounts(Vec<SimulatedAccount>);

impl SimulatedAccounts {
    /// The account of the AgentBudget that so many Agents share, empty at the time of the first call.
    pub fn shared(limits: &SimulatedLimits, agents: usize, now: Timestamp) -> Result<Self, PluginError> {
        let Some(budget) = &limits.budget else {
            return Ok(Self(Vec::new()));
        };
        let per_agent = budget.per_agent.as_ref().map(limit_amounts).transpose();
        let terms = LedgerTerms {
            limits: limit_amounts(&budget.limits).map_err(|error| wrong(&error))?,
            per_agent: per_agent.map_err(|error| wrong(&error))?.unwrap_or_default(),
            window: WindowRule::read(&budget.window).map_err(|error| wrong(&error))?,
        };
        let mut account = SimulatedAccount::new(terms, of_budget, now).shared(agents, budget.on_exhausted);
        for top_up in &budget.top_ups {
            let amount = added_amount(&top_up.amount).map_err(|error| wrong(&error))?;
            account.top_up(&top_up.id, amount, now);
        }
        Ok(Self(vec![account]))
    }

    /// The accounts of the limits that each Agent has of its own.
    pub fn own(limits: &SimulatedLimits, now: Timestamp) -> Result<Self, PluginError> {
        let total_cost = limits.own.total_cost.as_deref().map(micro_usd).transpose();
        let total = LimitAmounts {
            tokens: limits.own.total_tokens,
            cost: total_cost.map_err(|error| wrong(&error))?,
            ..LimitAmounts::default()
        };
        let hourly = LimitAmounts {
            tokens: limits.own.tokens_per_hour,
            ..LimitAmounts::default()
        };
        let mut accounts = Vec::new();
        if hourly != LimitAmounts::default() {
            let terms = terms_of(hourly, WindowRule::Rolling(HOUR));
            accounts.push(SimulatedAccount::new(terms, of_hour, now));
        }
        if total != LimitAmounts::default() {
            let terms = terms_of(total, WindowRule::Lifetime);
            accounts.push(SimulatedAccount::new(terms, of_total, now));
        }
        Ok(Self(accounts))
    }

    /// Whether a limit is of this kind.
    #[must_use]
    pub fn have_limit(&self, kind: AmountKind) -> bool {
        self.0.iter().any(|held| held.has_limit(kind))
    }

    /// Whether a call has room everywhere. Returns the account that has room last, if not.
    pub fn refusal(&mut self, agent: &str, amount: &Amount, now: Timestamp) -> Option<BudgetStop> {
        let refused = self.0.iter_mut().filter_map(|held| held.refusal(agent, amount, now));
        refused.reduce(|found, stop| if is_later(stop.until, found.until) { stop } else { found })
    }

    /// Begins a call that had room.
    pub fn begin(&mut self, agent: &str, amount: &Amount, time: (Timestamp, Timestamp)) {
        for held in &mut self.0 {
            held.begin(agent, amount, time);
        }
    }

    /// The loop of an Agent has begun to sleep or to wait.
    pub fn rest(&mut self, agent: &str, now: Timestamp) {
        for held in &mut self.0 {
            held.rest(agent, now);
        }
    }
}

fn wrong(error: &dyn std::fmt::Display) -> PluginError {
    PluginError::Usage(error.to_string())
}

fn terms_of(limits: LimitAmounts, window: WindowRule) -> LedgerTerms {
    LedgerTerms {
        limits,
        per_agent: LimitAmounts::default(),
        window,
    }
}

fn of_budget(kind: AmountKind, per_agent: bool) -> String {
    let part = if per_agent { "perAgent" } else { "limits" };
    format!("AgentBudget {part}.{}", field(kind))
}

fn of_hour(_: AmountKind, _: bool) -> String {
    "guardrails.tokensPerHour".into()
}

fn of_total(kind: AmountKind, _: bool) -> String {
    format!("guardrails.total.{}", field(kind))
}

/// The kind as the spec names it.
fn field(kind: AmountKind) -> String {
    if kind == AmountKind::Cost {
        return "costUSD".into();
    }
    kind.to_string()
}
