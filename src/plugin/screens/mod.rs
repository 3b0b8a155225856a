//! What the commands show, as pure functions of objects and of the time: tables, texts, and their data for programs.

pub mod approvals;
pub mod budgets;
pub mod calls_since;
pub mod checks;
pub mod costs;
pub mod event_lines;
pub mod event_usage;
pub mod explanation;
pub mod figures;
pub mod printable;
pub mod status;
pub mod table;
pub mod turns;

#[cfg(test)]
mod tests;
