//! The most that a call can cost under the current terms. Pure.

use super::refusals::{self, CallNeeds};
use crate::api::amount::{Amount, AmountKind, LimitAmounts};
use crate::api::failure::CallFailure;
use crate::api::price::ModelPrice;
use crate::gateway::model_field::ModelField;
use crate::gateway::request::PromptPart;
use crate::gateway::upstream::PreparedRequest;
use crate::ledger::bound::{PreviousRequest, RequestPart, input_bound, output_that_fits, worst_case};
use crate::ledger::price::ModelRates;
use crate::ledger::wallet::{AccountDraw, Wallet};
use crate::link::messages::{AccountTerms, BudgetTerms};
use crate::support::hash::sha256;

/// Stands for amounts that exceed 64 bits: no limit has room for them.
const TOO_MUCH: Amount = Amount {
    tokens: i64::MAX,
    input_tokens: i64::MAX,
    output_tokens: i64::MAX,
    calls: 1,
    cost: i64::MAX,
};

pub(super) struct CallBound {
    field: ModelField,
    pub(super) rates: Option<ModelRates>,
    /// The smallest amount with which the call is worth making.
    pub(super) least: Amount,
    /// The amount with which it has its full output limit.
    pub(super) full: Amount,
    /// Input bound, and longest and shortest useful output in tokens; `None` if the bill is known in advance.
    clip: Option<(i64, u32, u32)>,
    /// Input bound by bytes alone.
    bound_by_bytes: i64,
}

/// A model and its [`ModelPrice`].
pub(super) struct PricedField<'a> {
    pub(super) field: ModelField,
    pub(super) name: &'a str,
    pub(super) price: Option<&'a ModelPrice>,
}

impl CallBound {
    /// The bound of a request, or why there is none.
    pub(super) fn new(
        terms: &BudgetTerms,
        model: &PricedField<'_>,
        request: &PreparedRequest,
        parts: &[RequestPart],
        previous: Option<&PreviousRequest>,
    ) -> Result<Self, CallFailure> {
        let PricedField { field, name, price } = *model;
        let rates = price.map(ModelRates::read).transpose();
        let rates = rates.map_err(|error| refusals::bad_price(field, name, &error))?;
        let unpriced = terms.accounts.iter().find(|account| limited(account).cost.is_some());
        if let (None, Some(account)) = (rates, unpriced) {
            return Err(refusals::no_price(field, name, &account.limit));
        }
        if let Some(bill) = request.exact_bill() {
            let amount = bill.amount(rates.as_ref()).unwrap_or(TOO_MUCH);
            return Ok(Self {
                field,
                rates,
                least: amount,
                full: amount,
                clip: None,
                bound_by_bytes: 0,
            });
        }
        let input = input_bound(previous, parts, request.overhead());
        let longest = request.max_output();
        let shortest = terms.min_output_tokens.clamp(1, longest.max(1)).min(longest);
        let worst = |output: u32| worst_case(input, output.into(), rates.as_ref()).unwrap_or(TOO_MUCH);
        Ok(Self {
            field,
            rates,
            least: worst(shortest),
            full: worst(longest),
            clip: Some((input, longest, shortest)),
            bound_by_bytes: input_bound(None, parts, request.overhead()),
        })
    }

    /// The minimum with which the call is worth making.
    pub(super) fn needs(&self) -> CallNeeds {
        CallNeeds {
            field: self.field,
            amount: self.least,
        }
    }

    /// The worst case with `output` tokens of output, by bytes alone.
    pub(super) fn bound_by_bytes(&self, output: u32) -> Option<Amount> {
        worst_case(self.bound_by_bytes, output.into(), self.rates.as_ref())
    }

    /// The longest useful output for which the call fits into the leases held, and the worst case with it.
    pub(super) fn fitting(&self, draws: &[AccountDraw<'_>], wallet: &Wallet, now: u64) -> Option<(u32, Amount)> {
        let (input, longest, shortest) = self.clip?;
        let mut held = LimitAmounts::default();
        for draw in draws {
            let available = wallet.available(draw.account, now);
            let less = |kind: AmountKind| match (draw.limits.get(kind), held.get(kind)) {
                (Some(_), Some(known)) => Some(known.min(available.get(kind))),
                (Some(_), None) => Some(available.get(kind)),
                (None, known) => known,
            };
            held = LimitAmounts::from_fn(less);
        }
        let output = output_that_fits(&held, input, self.rates.as_ref(), longest.into());
        let output = u32::try_from(output).ok().filter(|output| *output >= shortest)?;
        Some((output, worst_case(input, output.into(), self.rates.as_ref())?))
    }
}

/// The kinds that an account limits, for this Agent or for all together.
pub(super) fn limited(account: &AccountTerms) -> LimitAmounts {
    account.limits.min(&account.per_agent)
}

/// The accounts that a call draws on.
pub(super) fn draws(terms: &BudgetTerms) -> Vec<AccountDraw<'_>> {
    let accounts = terms.accounts.iter();
    accounts
        .map(|account| AccountDraw {
            account: &account.account,
            limits: limited(account),
        })
        .collect()
}

/// The [`RequestPart`]s of a request, as the bound compares them.
pub(super) fn parts(request: &PreparedRequest) -> Vec<RequestPart> {
    let part = |found: PromptPart<'_>| {
        // Templates re-render the arguments of tools, so these count twice, as tools do.
        let length = found.traits.images.bound(found.bytes.len(), request.image_input());
        let length = length.saturating_add(found.traits.rewritten);
        RequestPart {
            hash: sha256(found.bytes),
            bytes: i64::try_from(length).unwrap_or(i64::MAX),
            unsteady: found.traits.unsteady,
            is_message: found.is_message,
        }
    };
    request.parts().into_iter().map(part).collect()
}

pub(super) fn messages_hash(parts: &[RequestPart]) -> [u8; 32] {
    let messages = parts.iter().filter(|part| part.is_message);
    sha256(messages.flat_map(|part| part.hash).collect::<Vec<u8>>())
}
