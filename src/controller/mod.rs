//! The controller: watches Agents, makes their pods, publishes their status.
//!
//! Owns what Kubernetes objects look like and when they are written. Meets the pods only through `link`.

pub mod agent;
pub mod loops;
