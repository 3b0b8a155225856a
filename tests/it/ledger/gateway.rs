//! A simulated gateway: a wallet in memory, a disk that outlives it, and the order between the two.
//!
//! Every change is made on a clone of the wallet, committed to the disk in one transaction (rows, epochs and open
//! reservations), and only then put in place and acted on. A crash can come before or after each commit.

use std::collections::BTreeMap;

use agentloop::api::NamespacedName;
use agentloop::api::amount::{Amount, LimitAmounts};
use agentloop::ledger::account::{DurableGrant, LeaseHolder};
use agentloop::ledger::wallet::{AccountDraw, AccountId, LeaseRow, Reservation, Wallet};

use super::leader::LeaderResponse;
use super::mutation::Mutation;

/// State that survives a crash of the process, but not a loss of the volume.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// Made once, with the disk.
    pub record: String,
    /// Leases.
    pub rows: Vec<LeaseRow>,
    /// Newest known record, by account.
    pub epochs: Vec<(AccountId, i64)>,
    /// Calls that are not settled.
    pub open: BTreeMap<usize, Reservation>,
}

/// Where a crash hits a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// Nowhere.
    No,
    /// The change is not on disk.
    BeforeCommit,
    /// The change is on disk, and nothing else happened.
    AfterCommit,
}

/// A call in flight.
#[derive(Clone, Debug)]
pub struct CallInFlight {
    /// Its number in the oracle's book.
    pub call: usize,
    /// What it holds.
    pub reservation: Reservation,
    /// The provider has it.
    pub sent: bool,
}

/// A gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// On disk.
    pub disk: Disk,
    /// In memory.
    pub wallet: Wallet,
    /// The process runs.
    pub up: bool,
    /// It does nothing until then, although it is alive.
    pub frozen_until: i64,
    /// Which Agent it serves; its pod's uid and epoch.
    pub agent: usize,
    pub pod: i64,
    /// Which accounts apply, as far as it knows, with the kinds that each limits.
    pub draws: Vec<(usize, LimitAmounts)>,
    /// Calls of the process that runs.
    pub flights: Vec<CallInFlight>,
    /// The call that it wants to make: its least and its full amount.
    pub wants: Option<(Amount, Amount)>,
    /// What a token costs: of the model that its pod runs, and of the one in the current spec.
    pub price: i64,
    pub spec_price: i64,
    /// An earlier state of the disk.
    pub kept: Option<Disk>,
    /// How often the disk was restored. Answers to earlier requests reach no process.
    pub went_back: u32,
    /// Its Agent is deleted.
    pub leaving: bool,
}

/// Most accounts of a schedule, those of deleted budgets included.
pub const MAX_ACCOUNTS: usize = 6;

/// Name of an account.
pub fn account_id(account: usize) -> &'static str {
    ["a0", "a1", "a2", "a3", "a4", "a5"][account]
}

/// Number of an account.
pub fn account_index(id: &str) -> usize {
    usize::from(id.as_bytes()[1] - b'0')
}

impl Gateway {
    /// A gateway with an empty disk.
    pub fn new(agent: usize, record: String, price: i64) -> Self {
        Self {
            disk: Disk {
                record,
                ..Disk::default()
            },
            wallet: Wallet::default(),
            up: true,
            frozen_until: 0,
            agent,
            pod: 1,
            draws: Vec::new(),
            flights: Vec::new(),
            wants: None,
            price,
            spec_price: price,
            kept: None,
            went_back: 0,
            leaving: false,
        }
    }

    /// Who it is, as the leader sees it.
    pub fn who(&self) -> LeaseHolder {
        LeaseHolder {
            record: self.disk.record.clone(),
            agent: NamespacedName::new("n", ["x", "y", "z"][self.agent]),
            pod_uid: ["p0", "p1", "p2", "p3"][usize::try_from(self.pod).unwrap() % 4].into(),
            epoch: self.pod,
        }
    }

    /// Its accounts, for the wallet.
    pub fn wallet_draws(&self) -> Vec<AccountDraw<'static>> {
        let draw = |(account, limits): &(usize, LimitAmounts)| AccountDraw {
            account: account_id(*account),
            limits: *limits,
        };
        self.draws.iter().map(draw).collect()
    }

    /// One transaction: the new wallet, and the calls that are open afterwards. `false`: the process crashed.
    pub fn commit(&mut self, wallet: Wallet, open: Option<BTreeMap<usize, Reservation>>, crash: Crash) -> bool {
        if crash == Crash::BeforeCommit {
            self.die();
            return false;
        }
        self.disk.rows = wallet.rows().collect();
        self.disk.epochs = wallet.epochs().map(|(id, epoch)| (id.to_owned(), epoch)).collect();
        if let Some(open) = open {
            self.disk.open = open;
        }
        if crash == Crash::AfterCommit {
            self.die();
            return false;
        }
        self.wallet = wallet;
        true
    }

    /// The process ends. Calls that the provider has received stay there.
    pub fn die(&mut self) {
        self.up = false;
        self.flights.clear();
        self.wallet = Wallet::default();
        self.wants = None;
        self.frozen_until = 0;
    }

    /// Starts again from the disk: each call that was open counts as spent. Returns those calls, with what counts.
    pub fn start(&mut self, mutation: Mutation, crash: Crash) -> Option<Vec<(usize, Amount)>> {
        let mut wallet = Wallet::restore(self.disk.epochs.clone(), self.disk.rows.clone());
        let mut estimated = Vec::new();
        for (call, reservation) in &self.disk.open {
            if mutation == Mutation::ForgetOpenCalls {
                estimated.push((*call, Amount::ZERO));
                continue;
            }
            wallet.reopen(reservation);
            wallet.settle(reservation, &reservation.amount);
            estimated.push((*call, reservation.amount));
        }
        self.up = true;
        self.price = self.spec_price;
        let committed = self.commit(wallet, Some(BTreeMap::new()), crash);
        (committed || crash == Crash::AfterCommit).then_some(estimated)
    }

    /// Applies the leader's answer. `false`: the process crashed meanwhile.
    pub fn hear(&mut self, answer: &LeaderResponse, mutation: Mutation, crash: Crash) -> bool {
        let mut wallet = self.wallet.clone();
        let mut changed = false;
        let blind = mutation == Mutation::BelieveTheDisk;
        let told = |amount: Amount| if blind { Amount::ZERO } else { amount };
        for word in &answer.body.accounts {
            let granted: Vec<_> = word
                .leases
                .iter()
                .map(|lease| {
                    let sent = u64::try_from(answer.sent).unwrap();
                    let granted = DurableGrant {
                        lease: lease.lease,
                        granted: lease.granted,
                        spent: told(lease.spent),
                        returned: told(lease.returned),
                        ends: None,
                    };
                    (granted, lease.valid_milliseconds.map(|valid| sent + valid))
                })
                .collect();
            let known = wallet.epochs().find(|(known, _)| *known == word.account);
            let known = known.map_or(0, |(_, epoch)| epoch);
            let epoch = if mutation == Mutation::BelieveOlderEpoch {
                word.epoch.max(known)
            } else {
                word.epoch
            };
            changed |= wallet
                .apply_grants(&word.account, epoch, &granted, &word.forgotten)
                .changed;
        }
        if changed {
            return self.commit(wallet, None, crash);
        }
        self.wallet = wallet;
        true
    }
}
