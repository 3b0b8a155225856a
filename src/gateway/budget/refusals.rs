//! What a refused call says: which limit, what is left of it, when there is more, and what a person can do. Never a word
//! of a prompt.

use crate::api::amount::{Amount, AmountKind};
use crate::api::failure::{CallFailure, FailureKind};
use crate::gateway::failures::failure;
use crate::ledger::account::GrantRefusal;
use crate::ledger::price::MoneyError;
use crate::link::messages::{AccountTerms, LimitName};

/// The leader refused `needed`, of which the gateway itself holds `held`.
pub(super) fn refused(account: &AccountTerms, refused: &GrantRefusal, needed: &Amount, held: &Amount) -> CallFailure {
    let kind = refused.kind;
    let limits = if refused.per_agent {
        account.per_agent
    } else {
        account.limits
    };
    let limit = limits.get(kind).unwrap_or(0);
    let left = refused.left.saturating_add(held.get(kind)).min(limit);
    let of = |number: i64| kind.amount(number);
    let needs = of(needed.get(kind));
    let name = name(&account.limit, refused.per_agent);
    let add = remedy(&account.limit, kind, refused.per_agent);
    if refused.never && limit == 0 {
        let message = format!("{name} is {}, which blocks every call: {add}", of(limit));
        return failure(FailureKind::CallExceedsLimit, message);
    }
    if refused.never {
        let message = format!(
            "{name} is {}, and this call alone may need {needs}: it can never be made; {add}, or lower \
             spec.model.maxOutputTokens or the length of the context",
            of(limit)
        );
        return failure(FailureKind::CallExceedsLimit, message);
    }
    let when = match refused.resets_at {
        Some(at) => format!(
            "There is room for it at {} by itself",
            at.strftime("%Y-%m-%dT%H:%M:%SZ")
        ),
        None if refused.contended => "Others hold the rest, and may give it back".to_owned(),
        None => "Nothing frees it by itself".to_owned(),
    };
    CallFailure {
        resumes_at: refused.resets_at,
        ..failure(
            exhausted(&account.limit, kind),
            format!(
                "{name} has too little left for this call: {} of {}, and it may need {needs}. {when}; to add, {add}",
                of(left),
                of(limit)
            ),
        )
    }
}

fn exhausted(limit: &LimitName, kind: AmountKind) -> FailureKind {
    match (limit, kind) {
        (LimitName::Budget(_), _) => FailureKind::BudgetExhausted,
        (LimitName::TokensPerHour, _) => FailureKind::TokensPerHour,
        (LimitName::Total, AmountKind::Cost) => FailureKind::TotalCost,
        (LimitName::Total, _) => FailureKind::TotalTokens,
    }
}

fn name(limit: &LimitName, per_agent: bool) -> String {
    match limit {
        LimitName::Budget(name) if per_agent => format!("the Agent's part (perAgent) of AgentBudget {name}"),
        LimitName::Budget(_) | LimitName::TokensPerHour | LimitName::Total => limit.to_string(),
    }
}

fn remedy(limit: &LimitName, kind: AmountKind, per_agent: bool) -> String {
    let field = field(kind);
    match limit {
        LimitName::Budget(_) if per_agent => format!("raise its spec.perAgent.{field}"),
        LimitName::Budget(_) => format!("raise its spec.limits.{field} or append to its spec.topUps"),
        LimitName::TokensPerHour => "raise spec.guardrails.tokensPerHour".to_owned(),
        LimitName::Total => format!("raise spec.guardrails.total.{field}"),
    }
}

fn field(kind: AmountKind) -> &'static str {
    match kind {
        AmountKind::Tokens => "tokens",
        AmountKind::InputTokens => "inputTokens",
        AmountKind::OutputTokens => "outputTokens",
        AmountKind::Calls => "calls",
        AmountKind::Cost => "costUSD",
    }
}

/// Money is limited and no price is known.
pub(super) fn no_price(model: &str, limit: &LimitName) -> CallFailure {
    let name = name(limit, false);
    failure(
        FailureKind::BudgetUnavailable,
        format!(
            "{name} limits costUSD, and the price of model {model} is not known: add it to `prices` in the chart's \
             values, or set spec.model.price"
        ),
    )
}

/// A price that cannot be read.
pub(super) fn bad_price(model: &str, error: &MoneyError) -> CallFailure {
    failure(
        FailureKind::BudgetUnavailable,
        format!("the price of model {model} cannot be used: {error}; correct it in `prices` or in spec.model.price"),
    )
}

/// The controller has not said what limits the Agent.
pub(super) fn undecided() -> CallFailure {
    failure(
        FailureKind::BudgetUnavailable,
        "the controller has not said yet what limits this Agent; calls go on when it has",
    )
}

/// The controller cannot be asked for more.
pub(super) fn no_answer(error: &str) -> CallFailure {
    failure(
        FailureKind::BudgetUnavailable,
        format!("too little is left of what the gateway holds, and the controller cannot be asked for more ({error})"),
    )
}

/// A bill above its bound.
pub(super) fn violated(bound: &Amount, bill: &Amount) -> CallFailure {
    let kinds = [
        AmountKind::InputTokens,
        AmountKind::OutputTokens,
        AmountKind::Tokens,
        AmountKind::Cost,
        AmountKind::Calls,
    ];
    let kind = kinds.into_iter().find(|kind| bill.get(*kind) > bound.get(*kind));
    let kind = kind.unwrap_or(AmountKind::Tokens);
    failure(
        FailureKind::BoundViolated,
        format!(
            "the model server billed {} for a call that could cost {} at most: limits cannot hold with it, so no more \
             calls are made; check spec.model and the server's count, then annotate the Agent with \
             agentloop.dev/resume=<any new value>",
            kind.amount(bill.get(kind)),
            kind.amount(bound.get(kind))
        ),
    )
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use pretty_assertions::assert_eq;
    use rstest::rstest;

    use super::*;
    use crate::api::amount::LimitAmounts;

    fn account(limit: LimitName) -> AccountTerms {
        AccountTerms {
            account: "uid".into(),
            limit,
            limits: LimitAmounts {
                tokens: Some(1_000),
                cost: Some(2_500_000),
                ..LimitAmounts::default()
            },
            per_agent: LimitAmounts {
                tokens: Some(400),
                ..LimitAmounts::default()
            },
            recall: false,
            held: None,
            revision: 1,
            left: crate::link::messages::AccountRemaining::default(),
        }
    }

    fn no(kind: AmountKind) -> GrantRefusal {
        GrantRefusal {
            kind,
            left: 30,
            per_agent: false,
            never: false,
            resets_at: Some(Timestamp::UNIX_EPOCH),
            contended: false,
        }
    }

    const NEEDED: Amount = Amount {
        tokens: 90,
        input_tokens: 0,
        output_tokens: 0,
        calls: 1,
        cost: 1_000_001,
    };
    const HELD: Amount = Amount {
        tokens: 20,
        ..Amount::ZERO
    };

    #[test]
    fn a_refusal_says_which_limit_what_is_left_when_it_resets_and_how_to_add() {
        let budget = account(LimitName::Budget("team".into()));
        let failure = refused(&budget, &no(AmountKind::Tokens), &NEEDED, &HELD);
        assert_eq!(
            (failure.kind, failure.resumes_at),
            (FailureKind::BudgetExhausted, Some(Timestamp::UNIX_EPOCH))
        );
        assert_eq!(
            failure.message,
            "AgentBudget team has too little left for this call: 50 tokens of 1000 tokens, and it may need 90 tokens. \
             There is room for it at 1970-01-01T00:00:00Z by itself; to add, raise its spec.limits.tokens or append to \
             its spec.topUps"
        );
        let own = GrantRefusal {
            per_agent: true,
            ..no(AmountKind::Tokens)
        };
        let message = refused(&budget, &own, &NEEDED, &HELD).message;
        assert!(message.contains("50 tokens of 400 tokens"), "{message}");
        assert!(message.contains("raise its spec.perAgent.tokens"), "{message}");
    }

    #[rstest]
    #[case(LimitName::Budget("b".into()), AmountKind::Cost, FailureKind::BudgetExhausted, "spec.limits.costUSD")]
    #[case(
        LimitName::TokensPerHour,
        AmountKind::Tokens,
        FailureKind::TokensPerHour,
        "spec.guardrails.tokensPerHour"
    )]
    #[case(
        LimitName::Total,
        AmountKind::Tokens,
        FailureKind::TotalTokens,
        "spec.guardrails.total.tokens"
    )]
    #[case(
        LimitName::Total,
        AmountKind::Cost,
        FailureKind::TotalCost,
        "spec.guardrails.total.costUSD"
    )]
    fn each_limit_has_its_kind_and_its_remedy(
        #[case] limit: LimitName,
        #[case] kind: AmountKind,
        #[case] expected: FailureKind,
        #[case] remedy: &str,
    ) {
        let failure = refused(&account(limit.clone()), &no(kind), &NEEDED, &Amount::ZERO);
        assert_eq!(failure.kind, expected);
        assert!(failure.message.contains(remedy), "{}", failure.message);
        let never = GrantRefusal {
            never: true,
            ..no(kind)
        };
        let failure = refused(&account(limit), &never, &NEEDED, &Amount::ZERO);
        assert_eq!(
            (failure.kind, failure.resumes_at),
            (FailureKind::CallExceedsLimit, None)
        );
        assert!(failure.message.contains(remedy), "{}", failure.message);
    }

    #[test]
    fn a_limit_of_nothing_says_that_it_blocks_every_call() {
        let mut budget = account(LimitName::Budget("team".into()));
        (budget.limits.tokens, budget.per_agent.tokens) = (Some(0), Some(0));
        for (per_agent, text) in [
            (
                false,
                "AgentBudget team is 0 tokens, which blocks every call: raise its spec.limits.tokens or append to its \
                 spec.topUps",
            ),
            (
                true,
                "the Agent's part (perAgent) of AgentBudget team is 0 tokens, which blocks every call: raise its \
                 spec.perAgent.tokens",
            ),
        ] {
            let never = GrantRefusal {
                never: true,
                per_agent,
                ..no(AmountKind::Tokens)
            };
            let failure = refused(&budget, &never, &NEEDED, &Amount::ZERO);
            assert_eq!(
                (failure.kind, failure.message.as_str()),
                (FailureKind::CallExceedsLimit, text)
            );
        }
    }
}
