//! The wire types of `agentloop.dev/v1alpha1`: what users write and read with `kubectl`.
//!
//! Owns the custom resources, their bounds and CEL rules, and the names of conditions and reasons. Contains no
//! behaviour beyond what a type needs to be valid, does no I/O, and imports no other crate.

#![warn(missing_docs)]

mod active_hours;
pub mod agent;
pub mod amount;
pub mod annotations;
mod bounds;
pub mod budget;
pub mod condition;
pub mod crd;
pub mod endpoint;
pub mod extra;
pub mod failure;
pub mod first_elements;
pub mod goal;
pub mod hot_state;
mod light_model;
pub mod memory;
mod model;
pub mod money;
mod namespaced_name;
pub mod pause;
mod pod;
pub mod polled_tool;
pub mod price;
mod rate_limit;
pub mod reference;
pub mod sensor;
pub mod server_tls;
mod skill;
pub mod source;
pub mod status;
pub mod task;
pub mod toolbox;
pub mod tools;
pub mod unreadable;
pub mod usage_counts;
pub mod workspace;

pub use agent::{Agent, AgentSpec};
pub use budget::{AgentBudget, AgentBudgetSpec};
pub use namespaced_name::NamespacedName;
pub use sensor::{Sensor, SensorSpec};
pub use status::AgentStatus;

/// The API group of every resource here.
pub const GROUP: &str = "agentloop.dev";
/// Label of every object that belongs to an Agent; its value is the Agent's name.
pub const AGENT_LABEL: &str = "agentloop.dev/agent";
/// Label of every object that belongs to a Sensor; its value is the Sensor's name.
pub const SENSOR_LABEL: &str = "agentloop.dev/sensor";
/// Label of volume claims that Agents may name in `spec.workspace.claimName`; its value is `true`.
pub const WORKSPACE_LABEL: &str = "agentloop.dev/workspace";
/// Audience of the projected token with which a pod authenticates to the controller.
pub const LINK_AUDIENCE: &str = "agentloop.dev/link";
