//! What a [`LeaseRequest`] may contain. It is written by a pod, and its answer is composed under the lock of all accounts.

use std::collections::BTreeSet;

use agentloop_api::amount::Amount;
use agentloop_ledger::account::MAX_LEASES;

use super::messages::LeaseRequest;

/// Most accounts of a request, more than fit into a body if each has no more than one closed lease. An Agent draws on two accounts
/// of its own and on those of its budgets, and returns the leases of budgets that it drew on before.
pub const MAX_ACCOUNTS: usize = 2_500;
/// Most statements about one account: it has no more leases.
pub const MAX_STATEMENTS: usize = MAX_LEASES;
/// Most bytes of the id of an account: a uid, perhaps followed by the name of a limit.
pub const MAX_ACCOUNT_BYTES: usize = 128;
/// Length of the name of a gateway's record.
const RECORD_DIGITS: usize = 32;

/// How many accounts are read: one more than there may be, which shows that there are too many.
pub(super) const READ_ACCOUNTS: usize = MAX_ACCOUNTS + 1;
/// How many statements are read, likewise.
pub(super) const READ_STATEMENTS: usize = MAX_STATEMENTS + 1;

impl LeaseRequest {
    /// Why a request is not one that a gateway sends; `None`: nothing is wrong with it.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let is_digit = |byte: u8| byte.is_ascii_hexdigit();
        if self.record.len() != RECORD_DIGITS || !self.record.bytes().all(is_digit) {
            return Some(format!("record must have {RECORD_DIGITS} hexadecimal digits"));
        }
        if self.accounts.len() > MAX_ACCOUNTS {
            return Some(format!("a request has at most {MAX_ACCOUNTS} accounts"));
        }
        let mut named = BTreeSet::new();
        for part in &self.accounts {
            if part.account.len() > MAX_ACCOUNT_BYTES {
                return Some(format!("the id of an account has at most {MAX_ACCOUNT_BYTES} bytes"));
            }
            if part.statements.len() > MAX_STATEMENTS {
                return Some(format!("an account has at most {MAX_STATEMENTS} statements"));
            }
            // The answer contains the leases of each account that is named.
            if !named.insert(&part.account) {
                return Some("an account is named twice".into());
            }
        }
        self.has_negative_amount()
            .then(|| "an amount must not be negative".into())
    }

    /// Whether an amount is less than zero, which would make room that does not exist.
    fn has_negative_amount(&self) -> bool {
        self.accounts.iter().any(|account| {
            let stated = account.statements.iter().flat_map(|said| [&said.spent, &said.returned]);
            let asked = account.ask.iter().flat_map(|ask| [&ask.open, &ask.least, &ask.full]);
            stated.chain(asked).any(Amount::is_negative)
        })
    }
}

#[cfg(test)]
mod tests {
    use agentloop_ledger::account::LeaseStatement;

    use super::*;
    use crate::messages::AccountRequest;
    use crate::server::MAX_BODY_BYTES;

    fn statement(lease: i64) -> LeaseStatement {
        LeaseStatement {
            lease,
            spent: Amount::ZERO,
            returned: Amount::ZERO,
            closed: true,
        }
    }

    fn account(account: &str, statements: usize) -> AccountRequest {
        AccountRequest {
            account: account.into(),
            statements: (1..).take(statements).map(statement).collect(),
            ask: None,
        }
    }

    fn request(accounts: Vec<AccountRequest>) -> LeaseRequest {
        LeaseRequest {
            epoch: 1,
            record: "0123456789abcdef0123456789abcdef".into(),
            accounts,
        }
    }

    /// The problem of a request, as a server reads it.
    fn problem(request: &LeaseRequest) -> Option<String> {
        let text = serde_json::to_string(request).unwrap();
        serde_json::from_str::<LeaseRequest>(&text).unwrap().problem()
    }

    #[test]
    fn a_request_has_a_bounded_number_of_accounts_and_statements_and_names_each_account_once() {
        let many = |length: usize| request((0..length).map(|number| account(&number.to_string(), 1)).collect());
        assert_eq!(problem(&many(MAX_ACCOUNTS)), None);
        let told = problem(&many(MAX_ACCOUNTS + 1));
        assert_eq!(told.as_deref(), Some("a request has at most 2500 accounts"));

        let stated = |length| request(vec![account("a", 1), account("b", length)]);
        assert_eq!(problem(&stated(MAX_STATEMENTS)), None);
        let told = problem(&stated(MAX_STATEMENTS + 1));
        assert_eq!(told.as_deref(), Some("an account has at most 1000 statements"));

        let named = |length| request(vec![account(&"x".repeat(length), 1)]);
        assert_eq!(problem(&named(MAX_ACCOUNT_BYTES)), None);
        let told = problem(&named(MAX_ACCOUNT_BYTES + 1));
        assert_eq!(told.as_deref(), Some("the id of an account has at most 128 bytes"));

        let twice = |again: &str| request(vec![account("a", 0), account("b", 1), account(again, 0)]);
        assert_eq!(problem(&twice("c")), None);
        assert_eq!(problem(&twice("a")).as_deref(), Some("an account is named twice"));
    }

    #[test]
    fn what_is_beyond_the_bounds_takes_no_memory() {
        let part = r#"["",[[1,[],[],false]]],"#;
        let text = format!(r#"{{"accounts": [{}[""]]}}"#, part.repeat(10_000));
        let read: LeaseRequest = serde_json::from_str(&text).unwrap();
        assert_eq!(read.accounts.len(), READ_ACCOUNTS);
        let text = format!(
            r#"{{"accounts": [["a", [{}[1,[],[],false]]]]}}"#,
            "[1,[],[],false],".repeat(10_000)
        );
        let read: LeaseRequest = serde_json::from_str(&text).unwrap();
        assert_eq!(read.accounts[0].statements.len(), READ_STATEMENTS);
    }

    #[test]
    fn no_request_of_a_gateway_that_fits_into_a_body_has_more_accounts() {
        let uid = "01234567-89ab-cdef-0123-456789abcdef";
        let smallest = serde_json::to_string(&account(uid, 1)).unwrap();
        assert!(smallest.len() * MAX_ACCOUNTS > MAX_BODY_BYTES, "{smallest}");
    }
}
