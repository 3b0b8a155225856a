//! The accounts of the ledger on the calls of a history: each call is a lease of its own.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::changes::SimulatedLimits;
use crate::api::NamespacedName;
use crate::api::amount::{Amount, AmountKind, LimitAmounts};
use crate::api::budget::{LedgerRecord, OnExhausted};
use crate::api::money::micro_usd;
use crate::ledger::account::{Account, GrantRefusal, GrantRequest, LeaseHolder, LeaseStatement, LedgerTerms};
use crate::ledger::limits::{added_amount, limit_amounts};
use crate::ledger::window::WindowRule;
use crate::plugin::failure::PluginError;

/// Window of `guardrails.tokensPerHour`.
const HOUR: SignedDuration = SignedDuration::from_hours(1);

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetStop {
    /// The limit.
    pub limit: String,
    /// When a call like it fits. `None`: when the limit is raised.
    pub until: Option<Timestamp>,
}

/// One account, and what it is called.
struct SimulatedAccount {
    account: Account,
    /// Name of a limit by its kind, and whether it is of each Agent.
    named: fn(AmountKind, bool) -> String,
    /// Nothing is let through once it is exhausted.
    stops: bool,
    /// The refusal after which nothing is let through.
    stopped: Option<BudgetStop>,
    /// What each Agent needed for its last call.
    requested: BTreeMap<String, Amount>,
}

/// While more than this part of a limit is left, it is exhausted only if all Agents have made calls, as in the ledger.
const LAST_FRACTION: i64 = 4;

/// All accounts that apply.
pub struct SimulatedAccounts {
    accounts: Vec<SimulatedAccount>,
    /// Number of Agents.
    agents: usize,
}

impl SimulatedAccounts {
    /// Empty accounts, at the time of the first call. `agents`: how many share a budget. `None`: the accounts of the
    /// limits that each Agent has of its own.
    pub fn new(limits: &SimulatedLimits, agents: Option<usize>, now: Timestamp) -> Result<Self, PluginError> {
        let wrong = |error: &dyn std::fmt::Display| PluginError::Usage(error.to_string());
        let mut accounts = Vec::new();
        let account = |terms: LedgerTerms, named, stops| SimulatedAccount {
            account: Account::restore(terms, &LedgerRecord::default(), now),
            named,
            stops,
            stopped: None,
            requested: BTreeMap::new(),
        };
        if let Some(budget) = limits.budget.as_ref().filter(|_| agents.is_some()) {
            let per_agent = budget.per_agent.as_ref().map(limit_amounts).transpose();
            let terms = LedgerTerms {
                limits: limit_amounts(&budget.limits).map_err(|error| wrong(&error))?,
                per_agent: per_agent.map_err(|error| wrong(&error))?.unwrap_or_default(),
                window: WindowRule::read(&budget.window).map_err(|error| wrong(&error))?,
            };
            let mut of_all = account(terms, of_budget, budget.on_exhausted == OnExhausted::Stop);
            for top_up in &budget.top_ups {
                let amount = added_amount(&top_up.amount).map_err(|error| wrong(&error))?;
                of_all.account.top_up(&top_up.id, amount, now);
            }
            accounts.push(of_all);
        }
        if agents.is_none() {
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
            if hourly != LimitAmounts::default() {
                accounts.push(account(
                    terms_of(hourly, WindowRule::Rolling(HOUR)),
                    |_, _| "guardrails.tokensPerHour".into(),
                    false,
                ));
            }
            if total != LimitAmounts::default() {
                accounts.push(account(terms_of(total, WindowRule::Lifetime), of_total, false));
            }
        }
        let agents = agents.unwrap_or(1);
        Ok(Self { accounts, agents })
    }

    /// Whether a limit is on cost, for which each call needs a known one.
    #[must_use]
    pub fn limit_cost(&self) -> bool {
        let limits = |held: &SimulatedAccount| held.account.limits().cost.or(held.account.per_agent().cost).is_some();
        self.accounts.iter().any(limits)
    }

    /// Whether a call has room everywhere. Returns the account that has room last, if not.
    pub fn refusal(&mut self, agent: &str, amount: &Amount, now: Timestamp) -> Option<BudgetStop> {
        let who = holder(agent);
        let ask = asked(amount);
        let mut latest: Option<BudgetStop> = None;
        for held in &mut self.accounts {
            if let Some(stopped) = &held.stopped {
                return Some(stopped.clone());
            }
            held.account.advance(now);
            held.requested.insert(agent.to_owned(), *amount);
            if held.account.has_room(&who, &ask) {
                continue;
            }
            let Err(refusal) = held.account.request_grant(&who, &ask, now) else {
                continue;
            };
            held.account.withdraw(&who.agent);
            let stop = held.stop(&refusal, self.agents);
            if latest.as_ref().is_none_or(|found| is_later(stop.until, found.until)) {
                latest = Some(stop);
            }
        }
        latest
    }

    /// Charges a call that had room.
    pub fn charge(&mut self, agent: &str, amount: &Amount, (starts, ends): (Timestamp, Timestamp)) {
        let who = holder(agent);
        for held in &mut self.accounts {
            let account = &mut held.account;
            if account.request_grant(&who, &asked(amount), starts).is_err() {
                continue;
            }
            write(account);
            let grants = account.durable_grants(&who.record);
            for grant in grants {
                let statement = LeaseStatement {
                    lease: grant.lease,
                    spent: *amount,
                    returned: grant.granted.saturating_sub(amount),
                    closed: true,
                };
                account.apply_statement(&who, &statement, ends.max(starts));
            }
            write(account);
        }
    }
}

impl SimulatedAccount {
    fn stop(&mut self, refusal: &GrantRefusal, agents: usize) -> BudgetStop {
        let stops = self.stops && self.is_exhausted(refusal, agents);
        let stop = BudgetStop {
            limit: (self.named)(refusal.kind, refusal.per_agent),
            until: refusal.resets_at.filter(|_| !stops),
        };
        if stops {
            self.stopped = Some(stop.clone());
        }
        stop
    }

    /// Whether less is left than the smallest call that any Agent last made, as the controller decides it: a single Agent
    /// that does not fit, or that has used its own share, does not stop the others.
    fn is_exhausted(&self, refusal: &GrantRefusal, agents: usize) -> bool {
        if refusal.per_agent || refusal.never {
            return false;
        }
        let limits = self.account.limits();
        let left = limits.left_after(&self.account.used()).get(refusal.kind);
        let smallest = self.requested.values().map(|amount| amount.get(refusal.kind)).min();
        let (Some(limit), Some(left), Some(smallest)) = (limits.get(refusal.kind), left, smallest) else {
            return false;
        };
        left < smallest && (self.requested.len() >= agents || left <= limit / LAST_FRACTION)
    }
}

/// A time without an end is the latest.
#[must_use]
pub fn is_later(one: Option<Timestamp>, other: Option<Timestamp>) -> bool {
    one.unwrap_or(Timestamp::MAX) > other.unwrap_or(Timestamp::MAX)
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

fn holder(agent: &str) -> LeaseHolder {
    LeaseHolder {
        record: agent.to_owned(),
        agent: NamespacedName::new("simulated", agent),
        pod_uid: agent.to_owned(),
        epoch: 1,
    }
}

fn asked(amount: &Amount) -> GrantRequest {
    GrantRequest {
        lease: None,
        open: Amount::ZERO,
        least: *amount,
        full: *amount,
    }
}

/// What a leader writes before a gateway gets a grant.
fn write(account: &mut Account) {
    let record = account.compose();
    account.confirm_record(&record);
}
