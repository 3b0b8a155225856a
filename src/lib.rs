//! agentloop: the Kubernetes operator for autonomous LLM agents.
//!
//! One static binary, several roles. Rooms, from the inside out; dependencies point inwards only:
//!
//! - [`api`]: the custom resources. Imports nothing of ours.
//! - [`engine`], [`ledger`], [`scripted`]: pure rules. Import `api`.
//! - [`clock`]: time that has passed, by two clocks. Imports nothing of ours.
//! - [`disk`]: files of SQLite that one process alone writes. Imports nothing of ours.
//! - [`connections`]: how many a server takes, and of whom. Imports nothing of ours.
//! - [`mcp`]: the client of MCP, for those who run tools. Imports nothing of ours.
//! - [`sensing`]: what Sensors do with what they hear. Imports `api` and `mcp`.
//! - [`link`]: where controller, gateway and worker meet. Imports `api`, `connections`, `ledger` and `sensing`.
//! - [`telemetry`]: logs, metrics, probes. Imports `api` and `connections`.
//! - [`controller`], [`gateway`], [`worker`], [`sensor`]: the roles. Never import each other.
//! - [`local`]: the three roles in one process, without a cluster. Imports what they make public.
//! - [`cli`]: wires a role to the world.

pub mod api;
pub mod cli;
pub mod clock;
pub mod connections;
pub mod controller;
pub mod disk;
pub mod engine;
pub mod gateway;
pub mod ledger;
pub mod link;
pub mod local;
pub mod mcp;
pub mod scripted;
pub mod sensing;
pub mod sensor;
pub mod telemetry;
pub mod worker;
