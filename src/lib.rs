//! agentloop: the Kubernetes operator for autonomous LLM agents.
//!
//! One static binary, several roles. Modules, from the inside out; dependencies point inwards only:
//!
//! - [`api`]: the custom resources. Imports no other module.
//! - [`ledger`]: pure rules. Imports `api`.
//! - [`toolbox_protocol`]: what the toolbox writes into results of tools for engine and worker. Imports no other module.
//! - [`engine`]: pure rules. Imports `api`, `support` and `toolbox_protocol`.
//! - [`provider`]: the wire formats of model servers, and the built-in scripted model. Pure. Imports `api`, `engine` and
//!   `ledger`.
//! - [`support`]: elapsed time, backoff, hashes, shortened texts, limits on connections, SQLite files. Imports no other
//!   module.
//! - [`mcp`]: the client of the Model Context Protocol. Imports no other module.
//! - [`egress`]: which addresses Sensors and Agents may connect to. Imports no other module.
//! - [`sensor_pipeline`]: how an event of a Sensor becomes a delivery: sources, expressions, signals and rules. Imports `api`,
//!   `egress`, `mcp` and `support`.
//! - [`link`]: the protocol between pods and controller. Imports `api`, `ledger`, `sensor_pipeline` and `support`.
//! - [`history`]: histories of Agents in Postgres. Imports `link` and `support`.
//! - [`api_server`]: an API server in memory, for `agentloop run` and for tests. Imports `api` and `support`.
//! - [`toolbox`]: built-in tools as an MCP server, and the bridge to MCP servers that use standard input and output.
//!   Imports `api`, `egress`, `support` and `toolbox_protocol`.
//! - [`otlp`]: traces, logs and metrics in OpenTelemetry's data model, and their export over OTLP. Imports `support`.
//! - [`telemetry`]: logs, metrics, probes, how traces name an Agent. Imports `api`, `otlp` and `support`.
//! - [`page`]: the page about loops in a browser, as `agentloop run` and the controller serve it. Imports `api`, `link` and
//!   `support`.
//! - [`controller`], [`gateway`], [`worker`], [`sensor_pod`]: the roles. Never import each other.
//! - [`local`]: all roles in one process, without a cluster. Imports their public interfaces.
//! - [`plugin`]: the kubectl plugin, a client of the API server and of the link. Imports `api`, `engine`, `ledger` (what `simulate`
//!   asks), `link` and `support`.
//! - [`cli`]: the command line; starts the roles.

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

pub use agentloop_api as api;
pub use agentloop_api_server as api_server;
pub use agentloop_egress as egress;
pub use agentloop_engine as engine;
pub use agentloop_history as history;
pub use agentloop_ledger as ledger;
pub use agentloop_link as link;
pub use agentloop_mcp as mcp;
pub use agentloop_otlp as otlp;
pub use agentloop_provider as provider;
pub use agentloop_sensor_pipeline as sensor_pipeline;
pub use agentloop_support as support;
pub use agentloop_toolbox as toolbox;
pub use agentloop_toolbox_protocol as toolbox_protocol;

pub mod cli;
pub mod controller;
pub mod gateway;
pub mod local;
pub mod page;
pub mod plugin;
pub mod sensor_pod;
pub mod telemetry;
pub mod worker;
