//! The controller: watches Agents, makes their pods, publishes their status.
//!
//! Owns what Kubernetes objects look like and when they are written. Meets the pods only through `link`.

pub mod access;
pub mod agent;
pub mod alone;
pub mod budget;
pub mod ca;
pub mod certificates;
pub mod connection;
mod gate;
pub mod identity;
pub mod leader;
mod leading;
pub mod loops;
pub mod policy;
pub mod process;
pub mod readings;
pub mod relay;
pub mod report;
mod restricted;
pub mod sensor;
pub mod serve;
