//! The controller: watches Agents, AgentBudgets and Sensors, creates their pods and publishes their status.
//!
//! Owns the shape of the Kubernetes objects and when they are written. Communicates with pods only through `link`.

pub mod agent;
pub mod auth;
pub mod budget;
pub mod connection;
pub mod delivery_relay;
pub mod durations;
pub mod embedded;
pub mod event_subscriptions;
pub mod gates;
pub mod history;
#[cfg(test)]
mod kstatus;
pub mod leadership;
pub mod link_service;
pub mod page;
mod plain_http;
mod pod_mounts;
mod pod_security;
pub mod pod_sessions;
pub mod policy;
pub mod process;
pub mod reconcile_metrics;
pub mod runtime;
pub mod sensor;
pub mod task_relay;
#[cfg(test)]
mod text_tests;
pub mod tls;
