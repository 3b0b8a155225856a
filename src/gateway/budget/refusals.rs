//! Messages of refused calls: which limit, what is left of it, when it resets, and the fix. Never contains text of a
//! prompt.

use crate::api::amount::{Amount, AmountKind};
use crate::api::failure::{CallFailure, FailureKind};
use crate::gateway::model_field::ModelField;
use crate::ledger::account::GrantRefusal;
use crate::ledger::price::MoneyError;
use crate::link::messages::{AccountTerms, LimitName};

/// The minimum that a call may need.
pub(super) struct CallNeeds {
    pub(super) field: ModelField,
    pub(super) amount: Amount,
}

/// The [`CallFailure`] of a call that needs `needed`, of which the gateway holds `held` and the leader refused the
/// rest.
pub(super) fn refused(
    account: &AccountTerms,
    refused: &GrantRefusal,
    needed: &CallNeeds,
    held: &Amount,
) -> CallFailure {
    let kind = refused.kind;
    let limits = if refused.per_agent {
        account.per_agent
    } else {
        account.limits
    };
    let limit = limits.get(kind).unwrap_or(0);
    let left = refused.left.saturating_add(held.get(kind)).min(limit);
    let of = |number: i64| kind.amount(number);
    let needs = of(needed.amount.get(kind));
    let name = name(&account.limit, refused.per_agent);
    let add = remedy(&account.limit, kind, refused.per_agent);
    if refused.never && limit == 0 {
        let message = format!("{name} allows {}, which blocks every call: {add}", of(limit));
        return CallFailure::new(FailureKind::CallExceedsLimit, message);
    }
    if refused.never {
        let message = format!(
            "{name} allows {}, but this call alone may need {needs}, so it can never be made: {add}, lower \
             {}.maxOutputTokens, or shorten the context",
            of(limit),
            needed.field
        );
        return CallFailure::new(FailureKind::CallExceedsLimit, message);
    }
    let when = match refused.resets_at {
        // The time is in `resumes_at`: the condition shows it.
        Some(_) => "The call waits until the window has room for it",
        None if refused.contended => "Other Agents hold the rest and may return it",
        None => "No room becomes available over time",
    };
    CallFailure {
        resumes_at: refused.resets_at,
        ..CallFailure::new(
            exhausted(&account.limit, kind),
            format!(
                "{name} has {} of {} left, and the call may need {needs}. {when}; to add room, {add}",
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
        LimitName::Budget(name) if per_agent => format!("the limit per Agent (perAgent) of AgentBudget {name}"),
        LimitName::Budget(_) | LimitName::TokensPerHour | LimitName::Total => limit.to_string(),
    }
}

fn remedy(limit: &LimitName, kind: AmountKind, per_agent: bool) -> String {
    let field = kind.limit_field();
    match limit {
        LimitName::Budget(_) if per_agent => format!("raise its spec.perAgent.{field}"),
        LimitName::Budget(_) => format!("raise its spec.limits.{field} or append to its spec.topUps"),
        LimitName::TokensPerHour => "raise spec.guardrails.tokensPerHour".to_owned(),
        LimitName::Total => format!("raise spec.guardrails.total.{field}"),
    }
}

/// Cost is limited and the model has no known price.
pub(super) fn no_price(field: ModelField, model: &str, limit: &LimitName) -> CallFailure {
    let name = name(limit, false);
    CallFailure::new(
        FailureKind::BudgetUnavailable,
        format!(
            "{name} limits costUSD, but the price of model {model} is unknown: add it to `prices` in the chart's \
             values, or set {field}.price"
        ),
    )
}

pub(super) fn bad_price(field: ModelField, model: &str, error: &MoneyError) -> CallFailure {
    CallFailure::new(
        FailureKind::BudgetUnavailable,
        format!("the price of model {model} is invalid: {error}; correct it in `prices` or in {field}.price"),
    )
}

/// The controller has not yet sent the Agent's limits.
pub(super) fn undecided() -> CallFailure {
    CallFailure::new(
        FailureKind::BudgetUnavailable,
        "the controller has not determined this Agent's limits yet; calls resume once it has",
    )
}

/// The leases held are too small, and the leader did not answer with usable grants.
pub(super) fn no_answer(error: &str) -> CallFailure {
    CallFailure::new(
        FailureKind::BudgetUnavailable,
        format!("the gateway's leases do not cover this call, and the controller granted no more ({error})"),
    )
}

/// The server billed more than the bound of the call.
pub(super) fn violated(field: ModelField, bound: &Amount, bill: &Amount) -> CallFailure {
    let kinds = [
        AmountKind::InputTokens,
        AmountKind::OutputTokens,
        AmountKind::Tokens,
        AmountKind::Cost,
        AmountKind::Calls,
    ];
    let kind = kinds.into_iter().find(|kind| bill.get(*kind) > bound.get(*kind));
    let kind = kind.unwrap_or(AmountKind::Tokens);
    CallFailure::new(
        FailureKind::BoundViolated,
        format!(
            "the model server billed {} for a call that was bounded at {}: limits cannot be enforced, so no more \
             calls are made; check {field} and the server's usage counts, then annotate the Agent with \
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
    use crate::ledger::price::micro_usd;

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

    #[test]
    fn the_texts_of_refusals() {
        let names = [
            ("AgentBudget", LimitName::Budget("team".into())),
            ("guardrails.tokensPerHour", LimitName::TokensPerHour),
            ("guardrails.total", LimitName::Total),
        ];
        let mut rows = Vec::new();
        let mut add = |section: &str, failure: CallFailure| rows.push(text!(section, failure.kind, failure.message));
        for (section, name) in names {
            let account = account(name);
            let with = |change: fn(&mut GrantRefusal)| {
                let mut refusal = no(AmountKind::Tokens);
                change(&mut refusal);
                refused(&account, &refusal, &NEEDED, &HELD)
            };
            add(section, with(|_| {}));
            add(section, with(|refusal| refusal.resets_at = None));
            add(
                section,
                with(|refusal| (refusal.resets_at, refusal.contended) = (None, true)),
            );
            add(section, with(|refusal| refusal.never = true));
            add(
                section,
                with(|refusal| (refusal.never, refusal.kind) = (true, AmountKind::Calls)),
            );
            if matches!(account.limit, LimitName::Budget(_)) {
                add(section, with(|refusal| refusal.per_agent = true));
            }
            add(section, with(|refusal| refusal.kind = AmountKind::Cost));
        }
        let limit = LimitName::Budget("team".into());
        add("Prices", no_price(ModelField::Main, "small", &limit));
        add(
            "Prices",
            bad_price(
                ModelField::Main,
                "small",
                &micro_usd("3,00").unwrap_err().within("inputPerMillion"),
            ),
        );
        add("The controller", undecided());
        add("The controller", no_answer("no answer in time"));
        add("Bounds", violated(ModelField::Main, &HELD, &NEEDED.amount));
        assert_texts!("budget-refusals", "Calls that a limit refuses", rows);
    }

    const NEEDED: CallNeeds = CallNeeds {
        field: ModelField::Main,
        amount: Amount {
            tokens: 90,
            input_tokens: 0,
            output_tokens: 0,
            calls: 1,
            cost: 1_000_001,
        },
    };
    const HELD: Amount = Amount {
        tokens: 20,
        ..Amount::ZERO
    };

    #[test]
    fn a_refusal_names_the_limit_the_rest_the_reset_time_and_how_to_add() {
        let budget = account(LimitName::Budget("team".into()));
        let failure = refused(&budget, &no(AmountKind::Tokens), &NEEDED, &HELD);
        assert_eq!(
            (failure.kind, failure.resumes_at),
            (FailureKind::BudgetExhausted, Some(Timestamp::UNIX_EPOCH))
        );
        assert_eq!(
            failure.message,
            "AgentBudget team has 50 tokens of 1000 tokens left, and the call may need 90 tokens. The call waits until the \
             window has room for it; to add room, raise its spec.limits.tokens or append to its spec.topUps"
        );
        for (contended, text) in [
            (true, "Other Agents hold the rest"),
            (false, "No room becomes available over time"),
        ] {
            let lasting = GrantRefusal {
                resets_at: None,
                contended,
                ..no(AmountKind::Tokens)
            };
            let failure = refused(&budget, &lasting, &NEEDED, &HELD);
            assert_eq!(failure.resumes_at, None);
            assert!(failure.message.contains(text), "{}", failure.message);
        }
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
    fn a_limit_of_zero_reports_that_it_blocks_every_call() {
        let mut budget = account(LimitName::Budget("team".into()));
        (budget.limits.tokens, budget.per_agent.tokens) = (Some(0), Some(0));
        for (per_agent, text) in [
            (
                false,
                "AgentBudget team allows 0 tokens, which blocks every call: raise its spec.limits.tokens or append to \
                 its spec.topUps",
            ),
            (
                true,
                "the limit per Agent (perAgent) of AgentBudget team allows 0 tokens, which blocks every call: raise its \
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
