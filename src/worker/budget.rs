//! Derives the engine's view of an Agent's budgets from the directives. Pure.

use serde_json::{Value, json};
use strum::IntoEnumIterator;

use crate::api::amount::{AmountKind, LimitAmounts};
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::BudgetHealth;
use crate::engine::budget::BudgetState;
use crate::link::messages::{AccountTerms, BudgetTerms, Directives};
use crate::support::clock::rfc3339_seconds;
use crate::support::hash::sha256_u64;

/// Builds the budget state from the directives. Without [`BudgetTerms`] it is the default state, under which every call
/// is refused.
#[must_use]
pub fn from_directives(directives: &Directives) -> BudgetState {
    let Some(terms) = &directives.budget else {
        return BudgetState::default();
    };
    BudgetState {
        revision: revision(terms),
        tokens: tokens(terms),
        held: terms.blocked.is_some() || terms.accounts.iter().any(|account| account.held.is_some()),
        stop: terms.cut.then(|| why_stopped(terms)),
        health: terms.accounts.iter().flat_map(health).collect(),
    }
}

/// Hashes everything that can make a refused call possible. Excludes `recall`, which other Agents' calls set and clear,
/// and the messages of refusals. The journal keeps the hash, so it is the same in every version.
fn revision(terms: &BudgetTerms) -> u64 {
    let refusal = |refusal: &Option<CallFailure>| {
        let refusal = refusal.as_ref();
        refusal.map(|refusal| json!([refusal.kind.as_ref(), refusal.resumes_at]))
    };
    let accounts: Vec<Value> = terms
        .accounts
        .iter()
        .map(|account| {
            let limits = [account.limits, account.per_agent].map(|limits| kinds(&limits));
            json!([account.account, account.revision, limits, refusal(&account.held)])
        })
        .collect();
    let prices: Vec<Value> = terms
        .prices
        .iter()
        .map(|(model, price)| json!([model, price.input_per_million, price.output_per_million]))
        .collect();
    let all = json!([accounts, refusal(&terms.blocked), prices, terms.min_output_tokens]);
    sha256_u64(all.to_string())
}

fn kinds(limits: &LimitAmounts) -> [Option<i64>; 5] {
    [
        limits.tokens,
        limits.input_tokens,
        limits.output_tokens,
        limits.calls,
        limits.cost,
    ]
}

/// Returns the smallest number of tokens that any limit, when unused, allows in one call. `None` if nothing limits
/// tokens or cost, and also if some limit admits no call at all: a shorter call would not help then.
fn tokens(terms: &BudgetTerms) -> Option<u64> {
    let mut limits = terms
        .accounts
        .iter()
        .flat_map(|account| [&account.limits, &account.per_agent]);
    let blocks = |limits: &LimitAmounts| {
        kinds(limits).contains(&Some(0))
            || limits
                .output_tokens
                .is_some_and(|limit| limit < terms.min_output_tokens.into())
    };
    if limits.clone().any(blocks) {
        return None;
    }
    limits
        .by_ref()
        .flat_map(|limits| {
            [
                limits.tokens,
                limits.input_tokens,
                affordable_tokens(limits.cost, terms),
            ]
        })
        .flatten()
        .min()
        .and_then(|tokens| u64::try_from(tokens).ok())
}

/// Estimates how many input tokens `cost` buys from the most expensive model. Dollars per million tokens equal
/// micro-dollars per token.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "an estimate is sufficient"
)]
fn affordable_tokens(cost: Option<i64>, terms: &BudgetTerms) -> Option<i64> {
    let prices = terms.prices.values();
    let price = prices.filter_map(|price| price.input_per_million.parse::<f64>().ok());
    let price = price.reduce(f64::max)?;
    (price > 0.0).then_some((cost? as f64 / price) as i64)
}

/// Returns the remaining share of each limit of an account, as this Agent sees it.
fn health(account: &AccountTerms) -> Vec<BudgetHealth> {
    let left = &account.left;
    let window = match (left.rolling_seconds, left.resets_at) {
        (_, Some(at)) => format!(" until {}", rfc3339_seconds(at)),
        (Some(seconds), None) => format!(" in any {seconds} s"),
        (None, None) => String::new(),
    };
    let name = account.limit.to_string();
    let own = format!("your part of {name}");
    let parts = [
        (name, account.limits, left.of_limits),
        (own, account.per_agent, left.of_per_agent),
    ];
    let lines = parts.into_iter().flat_map(|(name, limits, left)| {
        let window = window.clone();
        AmountKind::iter().filter_map(move |kind| {
            Some(BudgetHealth {
                name: name.clone(),
                limit: kind.amount(limits.get(kind)?) + &window,
                tenths: u8::try_from(left.get(kind)?).ok()?,
                until: account.left.resets_at,
            })
        })
    });
    lines.collect()
}

/// Returns the message of the exhausted budget that stops the loop.
fn why_stopped(terms: &BudgetTerms) -> String {
    let held = terms.accounts.iter().filter_map(|account| account.held.as_ref());
    held.filter(|held| held.kind == FailureKind::BudgetExhausted)
        .map(|held| held.message.clone())
        .next()
        .unwrap_or_else(|| {
            "an AgentBudget with onExhausted: Stop is exhausted: raise its spec.limits or append to its spec.topUps"
                .into()
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::price::ModelPrice;
    use crate::link::messages::{AccountRemaining, LimitName};

    fn account(limits: LimitAmounts) -> AccountTerms {
        AccountTerms {
            account: "uid".into(),
            limit: LimitName::Budget("team".into()),
            limits,
            per_agent: LimitAmounts::default(),
            recall: false,
            held: None,
            revision: 1,
            left: AccountRemaining::default(),
        }
    }

    fn limited(tokens: i64) -> LimitAmounts {
        LimitAmounts {
            tokens: Some(tokens),
            ..LimitAmounts::default()
        }
    }

    fn directives(accounts: Vec<AccountTerms>) -> Directives {
        Directives {
            budget: Some(BudgetTerms {
                accounts,
                min_output_tokens: 256,
                ..BudgetTerms::default()
            }),
            ..Directives::default()
        }
    }

    fn spent(kind: FailureKind) -> CallFailure {
        CallFailure::new(kind, "add to it")
    }

    #[test]
    fn whatever_may_make_room_is_another_revision_and_nothing_else_is() {
        let first = directives(vec![account(limited(10))]);
        let revision = |change: &dyn Fn(&mut AccountTerms)| {
            let mut changed = first.clone();
            change(&mut changed.budget.as_mut().unwrap().accounts[0]);
            from_directives(&changed).revision
        };
        let was = from_directives(&first).revision;
        assert_ne!(was, from_directives(&Directives::default()).revision);
        assert_ne!(was, revision(&|account| account.revision = 2));
        assert_ne!(was, revision(&|account| account.limits = limited(11)));
        assert_ne!(was, revision(&|account| account.per_agent = limited(10)));
        assert_ne!(
            was,
            revision(&|account| account.held = Some(spent(FailureKind::BudgetAsk)))
        );
        assert_eq!(was, revision(&|account| account.recall = true));
        let mut blocked = first.clone();
        blocked.budget.as_mut().unwrap().blocked = Some(spent(FailureKind::BudgetUnavailable));
        assert_ne!(was, from_directives(&blocked).revision);
        assert_eq!(
            (from_directives(&first).held, from_directives(&blocked).held),
            (false, true)
        );
    }

    #[test]
    fn messages_do_not_change_a_revision() {
        let mut first = directives(vec![account(limited(10))]);
        let budget = first.budget.as_mut().unwrap();
        budget.accounts[0].held = Some(spent(FailureKind::BudgetAsk));
        budget.blocked = Some(spent(FailureKind::BudgetUnavailable));
        let mut other = first.clone();
        let budget = other.budget.as_mut().unwrap();
        "raise it".clone_into(&mut budget.accounts[0].held.as_mut().unwrap().message);
        "wait for it".clone_into(&mut budget.blocked.as_mut().unwrap().message);
        assert_eq!(from_directives(&first).revision, from_directives(&other).revision);
        let budget = other.budget.as_mut().unwrap();
        budget.blocked.as_mut().unwrap().resumes_at = Some(jiff::Timestamp::UNIX_EPOCH);
        assert_ne!(from_directives(&first).revision, from_directives(&other).revision);
    }

    #[test]
    fn a_revision_is_the_same_in_every_version() {
        let mut terms = directives(vec![account(limited(10))]).budget.unwrap();
        terms.accounts[0].held = Some(spent(FailureKind::BudgetAsk));
        let price = ModelPrice {
            input_per_million: "3.00".into(),
            output_per_million: "15.00".into(),
            ..ModelPrice::default()
        };
        terms.prices.insert("main".into(), price);
        assert_eq!(revision(&terms), 9_983_374_071_661_644_861);
    }

    #[test]
    fn the_smallest_limit_of_all_counts_money_by_what_it_buys() {
        let cost = LimitAmounts {
            cost: Some(6_000),
            ..LimitAmounts::default()
        };
        let mut found = directives(vec![account(limited(9_000)), account(limited(7_000)), account(cost)]);
        assert_eq!(from_directives(&found).tokens, Some(7_000));
        let budget = found.budget.as_mut().unwrap();
        let price = |dollars: &str| ModelPrice {
            input_per_million: dollars.into(),
            ..ModelPrice::default()
        };
        budget.prices = [("main", "3.00"), ("light", "0.10")]
            .map(|(model, dollars)| (model.to_owned(), price(dollars)))
            .into();
        assert_eq!(from_directives(&found).tokens, Some(2_000));
        found.budget.as_mut().unwrap().accounts[0].per_agent = limited(500);
        assert_eq!(from_directives(&found).tokens, Some(500));
        assert_eq!(
            from_directives(&directives(vec![account(LimitAmounts::default())])).tokens,
            None
        );
    }

    #[test]
    fn each_limit_shows_what_is_left_for_this_agent() {
        let tenths = |tenths| LimitAmounts {
            tokens: Some(tenths),
            cost: Some(tenths),
            ..LimitAmounts::default()
        };
        let mut found = directives(vec![account(limited(9_000)), account(LimitAmounts::default())]);
        assert_eq!(from_directives(&found).health, [], "no usage is known yet");
        let accounts = &mut found.budget.as_mut().unwrap().accounts;
        accounts[0].limit = LimitName::TokensPerHour;
        accounts[0].left = AccountRemaining {
            of_limits: tenths(7),
            rolling_seconds: Some(3600),
            ..AccountRemaining::default()
        };
        let end = "2026-02-01T00:00:00Z".parse().unwrap();
        accounts[1].per_agent.cost = Some(2_500_000);
        accounts[1].left = AccountRemaining {
            of_per_agent: tenths(0),
            resets_at: Some(end),
            ..AccountRemaining::default()
        };
        let health = from_directives(&found).health;
        let lines: Vec<String> = health.iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "guardrails.tokensPerHour: at least 70% of 9000 tokens in any 3600 s",
                "your part of AgentBudget team: less than 10% of 2.50 USD until 2026-02-01T00:00:00Z",
            ]
        );
        assert_eq!([health[0].until, health[1].until], [None, Some(end)]);
    }

    #[test]
    fn a_limit_that_blocks_every_call_does_not_shorten_any() {
        let output = LimitAmounts {
            output_tokens: Some(255),
            ..LimitAmounts::default()
        };
        let calls = LimitAmounts {
            calls: Some(0),
            ..LimitAmounts::default()
        };
        for blocking in [limited(0), output, calls] {
            let found = directives(vec![account(limited(9_000)), account(blocking)]);
            assert_eq!(from_directives(&found).tokens, None);
        }
    }

    #[test]
    fn a_stopping_budget_reports_its_own_reason() {
        let mut found = directives(vec![account(limited(10))]);
        assert_eq!(from_directives(&found).stop, None);
        let budget = found.budget.as_mut().unwrap();
        budget.cut = true;
        budget.accounts[0].held = Some(spent(FailureKind::BudgetExhausted));
        assert_eq!(from_directives(&found).stop.as_deref(), Some("add to it"));
        found.budget.as_mut().unwrap().accounts[0].held = None;
        assert!(from_directives(&found).stop.unwrap().contains("spec.topUps"));
    }
}
