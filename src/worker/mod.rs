//! The worker: drives the engine, keeps the journal, and calls models through the gateway's socket.
//!
//! Carries out the engine's effects and feeds the results back. Holds no secret and has no network identity.

pub mod answer_text;
pub mod artifacts;
pub mod budget;
#[cfg(test)]
mod crash_tests;
pub mod driver;
mod durations;
pub mod event_subscriptions;
pub mod events;
pub mod gateway_client;
pub mod history_upload;
pub mod instructions;
pub mod journal;
pub mod journaled_engine;
pub mod long_poller;
mod prompt_cache;
pub mod report;
pub mod reporter;
pub mod run_lease;
pub mod sensor_receiver;
mod span_texts;
pub mod spans;
pub mod startup;
pub mod task_responses;
#[cfg(test)]
mod text_tests;
pub mod tool_source;
pub mod tools;
pub mod turn_context;
