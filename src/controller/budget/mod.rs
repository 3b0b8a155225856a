//! The leader's side of the budgets: who may spend how much, kept in `status` so that the next leader goes on.
//!
//! [`book`] is pure: the accounts and what is said of them.

pub mod book;
