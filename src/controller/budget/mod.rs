//! The leader's side of the budgets: who may spend how much, kept in `status` so that the next leader goes on.
//!
//! [`book`], [`entry`] and [`scope`] are pure: the accounts, and who draws on which. [`ledger`] holds both under one lock and is
//! what link and reconciler speak to; [`watch`] feeds it, [`persist`] writes its records, [`bury`] says who is dead, `sweep` does what time alone
//! does.

pub mod book;
pub mod bury;
pub mod clock;
mod conditions;
pub mod entry;
pub mod face;
pub mod facts;
pub mod gate;
pub mod ledger;
mod notices;
pub mod persist;
mod refusals;
pub mod scope;
pub mod shares;
pub mod status;
#[cfg(test)]
mod status_tests;
mod sweep;
#[cfg(test)]
mod sweep_tests;
pub mod view;
pub mod watch;
pub mod words;

pub use ledger::{Budgets, Setup};
