//! Logs, metrics and the small HTTP server for probes and `/metrics`.
//!
//! Owns the names and formats of logs and metrics. Contains no rules about loops.

pub mod agent_collector;
pub mod agent_spans;
pub mod budget_collector;
pub mod dashboards;
pub mod exposition;
pub mod families;
mod gzip;
pub mod http;
pub mod log;
#[cfg(test)]
pub(crate) mod log_buffer;
pub mod log_export;
mod metric_points;
pub mod metrics;
pub mod namespace_totals;
pub mod queues;
pub mod reconcile_traces;
pub mod registry;
pub mod requests;
pub mod sensor_collector;
mod write_timeout;
