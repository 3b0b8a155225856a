//! Tests on a real one-node cluster, with the image and the chart that users get.
//!
//! Run by `make test`, which starts the cluster. Measured figures are printed as lines `FIGURE name value unit`.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod agents;
mod api_writes;
mod approvals;
mod budget_chaos;
mod budget_examples;
mod budget_writes;
mod budgets;
mod cluster;
mod control_plane;
mod docs;
mod events;
mod expensive_specs;
mod goal_gates;
mod goals;
mod install_modes;
mod invalid_specs;
mod link_client;
mod link_partition;
mod metering;
pub mod model_server;
mod node;
mod page;
mod plugin;
mod plugin_user;
mod process_chaos;
mod prometheus;
mod provider_outage;
mod providers;
mod quickstart;
mod real_model;
mod reasoning;
mod recreate;
mod release;
mod responses;
mod resume;
mod secrets;
mod sensor_chaos;
mod sensor_pods;
mod sensors;
mod suspend;
mod tampered_worker;
mod task_chaos;
mod tasks;
mod telemetry;
mod toolbox;
mod tools;
mod turns;
mod upgrade;
