//! The budget ledger: pure rules for who may spend how much, so that no window is ever overspent.
//!
//! Owns the arithmetic of both ends of a lease: [`account`] is one limit at the leader, [`wallet`] what a gateway
//! holds; [`window`] defines when usage counts, [`bound`] the most that a call can cost, [`price`] what tokens cost.
//! No clock, no I/O, no randomness; imports only `api`. Where something must be on disk before an action, the item says
//! so: the guarantee rests on that order.
//!
//! # The protocol
//!
//! All numbers are totals of one lease, so repeats and reordering are harmless:
//!
//! - `granted` belongs to the leader: it only grows, and is written to the budget's status (compare-and-set) **before**
//!   the gateway gets it. So the next leader finds at least as much there as any gateway was ever granted.
//! - `spent` and `returned` belong to the gateway: they only grow, and are in its record on disk before they are
//!   reported.
//! - At the leader `outstanding = granted - spent - returned`, and `settled + outstanding <= limit` at every instant
//!   (except after a limit was lowered or a bill exceeded its bound: then nothing is granted until it holds again).
//! - The gateway spends only what it holds: `spent + returned + open <= granted`.
//! - What a gateway spent counts when the leader receives the report, by the leader's time. That is later than the
//!   call, so a rolling window frees it late, never early. A lease of a calendar window counts in that window.
//! - A lease ends when the gateway closes it (nothing open, final numbers), or when its gateway is known to be lost:
//!   then all that is outstanding counts as spent. Time alone never frees it.

#![warn(missing_docs)]

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

pub mod account;
pub mod bound;
pub mod limits;
pub mod price;
mod sum;
#[cfg(test)]
mod text_tests;
pub mod wallet;
pub mod window;
