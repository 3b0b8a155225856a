//! Logs, metrics and the small HTTP server for probes and `/metrics`.
//!
//! Owns names and formats of what the processes say about themselves. Knows no rule of loops.

pub mod agent_collector;
pub mod budget_collector;
mod families;
pub mod http;
pub mod log;
pub mod metrics;
pub mod registry;
pub mod requests;
pub mod sensor_collector;
