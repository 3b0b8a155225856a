//! The integration-test binary. Tests that need a cluster are skipped if `make test` did not start one.

mod support;

mod alerts;
mod answers;
mod budget;
mod chart;
mod controller;
mod controller_stop;
mod controller_telemetry;
mod devcluster;
mod dockerfile;
mod docs;
mod events;
mod fuzz;
mod gate_webhook;
mod gateway;
mod history;
mod layering;
mod leader;
mod ledger;
mod link;
mod local;
mod metrics;
mod metrics_tls;
mod openmetrics;
mod plugin;
mod printing;
mod recovery;
mod schema;
mod scrape;
mod sensor_delivery;
mod sensor_pods;
mod sensor_telemetry;
mod sensors;
mod shared_objects;
mod sources;
mod supply_chain;
mod tools;
mod week_bench;
mod worker;

#[path = "../e2e/mod.rs"]
mod e2e;
