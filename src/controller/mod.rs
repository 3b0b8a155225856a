//! The controller: watches Agents, AgentBudgets and Sensors, creates their pods and publishes their status.
//!
//! Owns the shape of the Kubernetes objects and when they are written. Communicates with pods only through `link`.

pub mod access;
pub mod agent;
pub mod budget;
pub mod ca;
pub mod certificates;
pub mod connection;
pub mod delivery_relay;
mod duration_reports;
pub mod duration_totals;
pub mod election;
pub mod embedded;
pub mod event_subscriptions;
mod gate_announcements;
pub mod gate_answers;
pub mod gate_webhook;
pub mod history;
pub mod identity;
#[cfg(test)]
mod kstatus;
mod leader;
pub mod link_service;
pub mod metrics_access;
pub mod page;
mod plain_http;
mod pod_mounts;
mod pod_security;
pub mod pod_sessions;
pub mod policy;
pub mod process;
pub mod reconcile_metrics;
mod review_limiter;
pub mod runtime;
pub mod sensor;
pub mod task_relay;
#[cfg(test)]
mod text_tests;
