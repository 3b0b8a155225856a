//! The leader's side of the budgets: who may spend how much, kept in `status` so that the next leader goes on.
//!
//! [`accounts`], [`entry`] and [`assignment`] are pure: the accounts, and who draws on which. [`ledger`] holds both under one lock and is
//! what link and reconciler speak to; [`watch`] feeds it, [`record_writer`] writes its records, [`forfeit`] says who is dead, `sweep` does what time alone
//! does.

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
