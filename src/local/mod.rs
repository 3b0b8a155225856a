//! A run without a cluster: controller, gateways and workers in one process, on manifests from files.
//!
//! Owns what a cluster provides elsewhere: the objects and their API, the pods, and the checks at admission. The roles
//! are those of a cluster, unchanged, including all limits and metering. Listens only on loopback and on sockets in a
//! private directory.

pub mod agent_rows;
pub mod api_server;
pub mod events;
pub mod folders;
pub mod manifest;
pub mod object_store;
pub mod output;
pub mod patch;
pub mod pods;
pub mod roles;
pub mod run;
pub mod schema;
pub mod sensor_rows;
pub mod stateful_set;
pub mod volumes;
