//! A run without a cluster: controller, gateways and workers in one process, on manifests from files.
//!
//! Owns what a cluster owns elsewhere: the objects and their API, the pods, the checks before an object is taken. The
//! roles are those of a cluster, unchanged; what limits and meters a loop is theirs. Listens on loopback and on
//! sockets in a private folder only.

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
