//! A run without a cluster: controller, gateways and workers in one process, on manifests from files.
//!
//! Owns what a cluster provides elsewhere: the pods with their tokens and volumes, and the checks at admission; the
//! objects are those of [`crate::api_server`]. The roles are those of a cluster, unchanged, including all limits and
//! metering. Listens only on loopback and on sockets in a private directory.

pub mod directories;
pub mod documents;
pub mod events;
pub mod manifest;
pub mod output;
pub mod page;
pub mod pod_tokens;
pub mod pods;
pub mod roles;
pub mod run;
pub mod sensor_rows;
pub mod stateful_set;
pub mod volumes;
