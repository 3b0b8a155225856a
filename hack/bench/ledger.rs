//! How long the ledger's rules take, without I/O: `cargo bench --bench ledger`, part of `make bench`.
//!
//! A gateway reserves and settles; a leader applies reports and grants for 10,000 Agents on 100 budgets, and for 1,000 on one.

use std::time::Instant;

use agentloop::api::NamespacedName;
use agentloop::api::amount::{Amount, LimitAmounts};
use agentloop::api::budget::LedgerRecord;
use agentloop::ledger::account::{Account, DurableGrant, GrantRequest, LeaseHolder, LeaseStatement, LedgerTerms};
use agentloop::ledger::wallet::{AccountDraw, Wallet};
use agentloop::ledger::window::WindowRule;
use jiff::{SignedDuration, Timestamp};

const CALL: Amount = Amount {
    tokens: 1_000,
    input_tokens: 900,
    output_tokens: 100,
    calls: 1,
    cost: 10,
};
const LIMITS: LimitAmounts = LimitAmounts {
    tokens: Some(1_000_000_000_000),
    input_tokens: None,
    output_tokens: None,
    calls: None,
    cost: Some(1_000_000_000_000),
};
const ROUNDS: usize = 20;

#[expect(clippy::print_stdout, reason = "figures go to stdout")]
fn main() {
    println!("FIGURE ledger_reserve_and_settle {:.2} us", reserve_and_settle());
    for (name, budgets, agents) in [("100_budgets_of_100", 100, 100), ("1_budget_of_1000", 1, 1000)] {
        let (operations, bytes) = lead(budgets, agents);
        println!("FIGURE ledger_leader_{name} {operations:.0} hear+ask/s");
        println!("FIGURE ledger_record_{name} {bytes} bytes each");
    }
}

/// Microseconds for one call.
fn reserve_and_settle() -> f64 {
    const CALLS: u32 = 200_000;
    let mut wallet = Wallet::default();
    let all = Amount::from_fn(|_| 1_000_000_000_000);
    let granted = DurableGrant {
        lease: 1,
        granted: all,
        spent: Amount::ZERO,
        returned: Amount::ZERO,
        ends: None,
    };
    let accounts = ["team", "platform"];
    for account in accounts {
        wallet.apply_grants(account, 1, &[(granted.clone(), None)], &[]);
    }
    let draws = accounts.map(|account| AccountDraw {
        account,
        limits: LIMITS,
    });
    let start = Instant::now();
    for _ in 0..CALLS {
        // As the gateway works: on a copy, put in the place of the old once it is on disk.
        let mut next = wallet.clone();
        let Ok(reservation) = next.reserve(&draws, &CALL, 0) else {
            break;
        };
        next.settle(&reservation, &CALL);
        wallet = next;
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS)
}

/// Operations a second, and the mean size of a record.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn lead(budgets: usize, agents: usize) -> (f64, usize) {
    let now = Timestamp::UNIX_EPOCH;
    let terms = LedgerTerms {
        limits: LIMITS,
        per_agent: LimitAmounts::default(),
        window: WindowRule::Rolling(SignedDuration::from_hours(1)),
    };
    let mut accounts: Vec<_> = (0..budgets)
        .map(|_| Account::restore(terms.clone(), &LedgerRecord::default(), now))
        .collect();
    let whos: Vec<_> = (0..agents).map(who).collect();
    let start = Instant::now();
    for round in 0..ROUNDS {
        let now = now + SignedDuration::from_secs(i64::try_from(round).unwrap_or(0) * 15);
        for account in &mut accounts {
            for who in &whos {
                let known = account.durable_grants(&who.record).pop();
                if let Some(lease) = &known {
                    let statement = LeaseStatement {
                        lease: lease.lease,
                        spent: lease.granted,
                        returned: Amount::ZERO,
                        closed: false,
                    };
                    account.apply_statement(who, &statement, now);
                }
                let ask = GrantRequest {
                    lease: known.map(|lease| lease.lease),
                    open: Amount::ZERO,
                    least: CALL,
                    full: CALL,
                };
                assert!(account.request_grant(who, &ask, now).is_ok(), "there is room");
            }
            let record = account.compose();
            account.confirm_record(&record);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let size = |account: &mut Account| serde_json::to_vec(&account.compose()).map_or(0, |bytes| bytes.len());
    let bytes = accounts.iter_mut().map(size).sum::<usize>() / budgets;
    ((ROUNDS * budgets * agents) as f64 / seconds, bytes)
}

fn who(number: usize) -> LeaseHolder {
    LeaseHolder {
        record: format!("{number:032x}"),
        agent: NamespacedName::new("team", format!("agent-{number}")),
        pod_uid: format!("00000000-0000-0000-0000-{number:012x}"),
        epoch: 1,
    }
}
