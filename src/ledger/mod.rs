//! The budget ledger: pure rules of who may spend how much, such that no window is ever overspent.
//!
//! Owns the arithmetic of both ends of a lease: [`account`] is one limit at the leader, [`wallet`] what a gateway
//! holds; [`window`] says when something counts, [`bound`] what a call can cost at most, [`price`] what tokens cost.
//! No clock, no I/O, no randomness; imports nothing of ours but `api`. What must be on disk before something is done
//! is said where it matters: that order is the promise.
//!
//! # The protocol
//!
//! All numbers are totals of one lease, so that repeats and reordering do no harm:
//!
//! - `granted` is the leader's: it only grows, and is written to the budget's status (compare-and-set) **before** the
//!   gateway is told. Whoever leads next finds at least as much there as any gateway was ever told.
//! - `spent` and `returned` are the gateway's: they only grow, and are in its record on disk before it says them.
//! - At the leader `outstanding = granted - spent - returned`, and `settled + outstanding <= limit` at every instant
//!   (but for a limit that was lowered, or a bill above its bound: then nothing is granted until it holds again).
//! - The gateway spends only what it holds: `spent + returned + open <= granted`.
//! - What a gateway says it spent is counted when the leader hears it, by the leader's time: later than it happened,
//!   so that a rolling window frees it late, never early. A lease of a calendar window counts in that window.
//! - A lease ends when the gateway closes it (nothing open, final numbers), or when its gateway is known to be dead:
//!   then all that is outstanding counts as spent. It never becomes free by time.

pub mod account;
pub mod bound;
pub mod limits;
pub mod price;
mod sum;
pub mod wallet;
pub mod window;
