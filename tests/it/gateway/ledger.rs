//! The leader's side of leases in the test's controller: real accounts, written to nowhere.

use std::collections::BTreeMap;

use agentloop::api::NamespacedName;
use agentloop::api::amount::{Amount, LimitAmounts};
use agentloop::api::budget::LedgerRecord;
use agentloop::ledger::account::{Account, GrantRequest, LeaseHolder, LedgerTerms};
use agentloop::ledger::window::WindowRule;
use agentloop::link::messages::{
    AccountRemaining, AccountRequest, AccountResponse, AccountTerms, BudgetTerms, LeaseGrant, LeaseRequest,
    LeaseResponse, LimitName,
};
use jiff::Timestamp;

#[derive(Default)]
pub struct Ledger {
    pub accounts: BTreeMap<String, Account>,
    pub requests: Vec<LeaseRequest>,
    /// Answers that are lost although the request was processed.
    pub lose: usize,
    pub terms: BudgetTerms,
    /// The leader's time; `None`: the time that it is.
    pub at: Option<Timestamp>,
}

impl Ledger {
    /// A limit from now on, or other numbers of one.
    pub fn limit(&mut self, id: &str, limits: LimitAmounts) {
        let terms = LedgerTerms {
            limits,
            per_agent: LimitAmounts::default(),
            window: WindowRule::Lifetime,
        };
        self.account(id, terms);
    }

    pub fn account(&mut self, id: &str, terms: LedgerTerms) {
        let now = self.now();
        if let Some(account) = self.accounts.get_mut(id) {
            account.set_terms(terms, now);
        } else {
            let account = Account::restore(terms, &LedgerRecord::default(), now);
            self.accounts.insert(id.into(), account);
        }
    }

    fn now(&self) -> Timestamp {
        self.at.unwrap_or_else(Timestamp::now)
    }

    /// The limits that the gateway receives.
    pub fn told(&mut self) -> BudgetTerms {
        let before = std::mem::take(&mut self.terms.accounts);
        let told = |(id, account): (&String, &Account)| {
            let old = before.iter().find(|old| old.account == *id);
            AccountTerms {
                account: id.clone(),
                limit: LimitName::Budget(id.clone()),
                limits: account.limits(),
                per_agent: account.per_agent(),
                recall: account.recalls(),
                held: old.and_then(|old| old.held.clone()),
                revision: 1,
                left: AccountRemaining::default(),
            }
        };
        self.terms.accounts = self.accounts.iter().map(told).collect();
        self.terms.clone()
    }

    pub fn lease(&mut self, request: &LeaseRequest) -> LeaseResponse {
        self.requests.push(request.clone());
        let now = self.now();
        let answers = request.accounts.iter().map(|said| {
            let Some(account) = self.accounts.get_mut(&said.account) else {
                return AccountResponse {
                    account: said.account.clone(),
                    forgotten: said.statements.iter().map(|statement| statement.lease).collect(),
                    ..AccountResponse::default()
                };
            };
            answer(account, &who(&request.record), said, now)
        });
        LeaseResponse {
            accounts: answers.collect(),
        }
    }

    /// What another gateway gets of an account.
    pub fn other(&mut self, id: &str, amount: Amount) -> Result<(), ()> {
        let ask = GrantRequest {
            lease: None,
            open: Amount::ZERO,
            least: amount,
            full: amount,
        };
        let request = AccountRequest {
            account: id.into(),
            statements: vec![],
            ask: Some(ask),
        };
        let now = self.now();
        let account = self.accounts.get_mut(id).unwrap();
        let answer = answer(account, &who("other"), &request, now);
        answer.refused.map_or(Ok(()), |_| Err(()))
    }

    pub fn used(&self, id: &str) -> Amount {
        self.accounts[id].used()
    }

    pub fn reserved(&self, id: &str) -> Amount {
        self.accounts[id].reserved()
    }
}

fn who(record: &str) -> LeaseHolder {
    LeaseHolder {
        record: record.into(),
        agent: NamespacedName::new("ns", record),
        pod_uid: "pod".into(),
        epoch: 3,
    }
}

fn answer(account: &mut Account, who: &LeaseHolder, said: &AccountRequest, now: Timestamp) -> AccountResponse {
    let unknown =
        |statement: &&agentloop::ledger::account::LeaseStatement| !account.apply_statement(who, statement, now);
    let forgotten = said.statements.iter().filter(unknown).map(|statement| statement.lease);
    let forgotten = forgotten.collect();
    let refused = said
        .ask
        .as_ref()
        .and_then(|ask| account.request_grant(who, ask, now).err());
    let record = account.compose();
    account.confirm_record(&record);
    let leases = account
        .durable_grants(&who.record)
        .into_iter()
        .map(|granted| LeaseGrant {
            lease: granted.lease,
            granted: granted.granted,
            spent: granted.spent,
            returned: granted.returned,
            valid_milliseconds: granted.ends.map(|end| milliseconds(now, end)),
        });
    AccountResponse {
        account: said.account.clone(),
        epoch: account.epoch(),
        leases: leases.collect(),
        forgotten,
        refused,
    }
}

fn milliseconds(now: Timestamp, end: Timestamp) -> u64 {
    u64::try_from(end.duration_since(now).as_millis()).unwrap_or(0)
}
