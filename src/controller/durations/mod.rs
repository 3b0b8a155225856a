//! Durations that pods report, as histograms of their namespaces.

pub(super) mod reports;
pub mod totals;
