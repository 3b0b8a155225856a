//! The protocol between controller, gateway and worker: its messages, and both ends of the link.
//!
//! Two hops. Pod ⇄ controller ([`messages`]): HTTPS with an audience-bound token; the gateway represents its pod.
//! Worker ⇄ gateway ([`socket`]): HTTP over a Unix socket in a volume that only those two mount.
//! Messages carry totals and complete states, never deltas, so repeats are harmless; unknown fields are ignored.
//! Must not decide anything about loops: that is up to the engine and the controller.

#![warn(missing_docs)]

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

mod acceptor;
pub mod answers;
mod answers_route;
pub mod body_room;
pub mod client;
pub mod deliveries;
pub mod durations;
pub mod event_names;
pub mod events;
mod events_route;
pub mod gate_annotations;
pub mod history;
pub mod json_error;
pub mod lease_bounds;
#[cfg(test)]
mod list_bounds_tests;
pub mod messages;
pub mod pod;
mod pod_route;
pub mod sensor_messages;
pub mod server;
pub mod socket;
pub mod task_requests;
mod tasks_route;
pub mod text_fragments;
mod text_route;
#[cfg(test)]
mod text_tests;
#[cfg(test)]
mod wire_tests;
