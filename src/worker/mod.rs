//! The worker: drives the engine, keeps the journal, speaks to models through the gateway's socket.
//!
//! Does what the engine's effects say and feeds the results back. Holds no secret and no network identity.

pub mod budget;
pub mod deliveries;
pub mod driver;
pub mod event_subscriptions;
pub mod events;
pub mod gateway_client;
pub mod instructions;
pub mod journal;
pub mod journaled_engine;
#[cfg(test)]
mod kills;
pub mod model;
pub mod report;
pub mod reporter;
pub mod run_lease;
pub mod sensors;
pub mod startup;
pub mod tool_source;
pub mod tools;
