//! The leader's side of budgets: who may spend how much, persisted in `status` so that the next leader can take over.
//!
//! [`accounts`], [`entry`] and [`assignment`] are pure: the accounts, and which Agents draw on them. [`ledger`] holds
//! both under one lock and serves the link and the reconciler; [`watch`] feeds it, [`record_writer`] writes its
//! records, [`forfeit`] decides which lease holders are lost, and `maintenance` does what depends on time alone.

pub mod accounts;
pub mod approval;
pub mod assignment;
pub mod clock;
mod conditions;
pub mod entry;
mod events;
pub mod facts;
pub mod forfeit;
pub mod format;
pub mod ledger;
mod maintenance;
#[cfg(test)]
mod maintenance_tests;
pub mod presenter;
pub mod record_writer;
mod refusals;
pub mod shares;
pub mod status;
#[cfg(test)]
mod status_tests;
pub mod view;
pub mod watch;

pub use ledger::{BudgetLedger, LedgerSetup};
