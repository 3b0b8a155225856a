//! `simulate`: what a changed limit would have done to the calls of a history.
//!
//! Decides nothing itself: the ledger decides about budgets, the guardrails of the engine about the others. Calls keep their
//! recorded times, see [`report::SimulationReport::approximations`].

pub mod account;
pub mod budgets;
pub mod changes;
pub mod past;
pub mod replay;
pub mod report;
pub mod settings;

#[cfg(test)]
mod budget_tests;
#[cfg(test)]
mod tests;
