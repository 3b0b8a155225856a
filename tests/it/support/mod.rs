//! What several tests share.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod agents;
pub mod api_server;
pub mod browser;
pub mod clusters;
pub mod dashboards;
pub mod harness;
pub mod http;
pub mod kubectl;
pub mod otlp;
pub mod ports;
pub mod postgres;
pub mod prometheus;
pub mod proxy;
pub mod random;
pub mod tokens;
