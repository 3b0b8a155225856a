//! The loop as a pure state machine: inputs in, effects out.
//!
//! Owns every rule about when a loop runs turns, sleeps, pauses and stops. It has no clock, I/O, randomness or async:
//! the time comes with each input, so that tests simulate years in microseconds. Imports only `api`, and the pure
//! functions of `support`.
//!
//! Contract with the driver (`worker`): feed one [`EngineInput`] to [`machine::Engine::handle`]; commit all
//! [`EngineEffect::Record`]s of that call together with [`machine::Engine::snapshot`] in **one** transaction **before**
//! acting on any other effect of it; then act on the rest in order. Without a Record nothing is written, not even the
//! snapshot: after [`StopCause::Fenced`] the journal belongs to another pod. A restart restores the engine from the
//! last snapshot and the live transcript, and feeds [`EngineInput::Started`].

#[cfg(test)]
#[macro_use]
extern crate agentloop_texts;

pub mod answer_schema;
mod approvals;
mod calls;
mod context;
mod counters;
mod deferred;
pub mod definition_parts;
mod definitions;
mod early_snapshot;
mod effect;
mod effects;
mod gate_cause;
mod guardrails;
mod hot_state;
pub mod ids;
mod input;
mod lifecycle;
mod light_model;
mod loop_detection;
pub mod machine;
mod memory;
pub mod message;
mod mode_requests;
mod model_call;
mod modes;
pub mod notifications;
mod pauses;
pub mod precheck;
mod purpose;
mod record;
pub mod replay;
mod resources;
mod retry;
mod runtime_mark;
pub mod scoring;
pub mod sensor_events;
pub mod settings;
mod snapshot;
mod stop_requests;
pub mod tasks;
#[cfg(test)]
mod tests;
mod time_math;
pub mod tool;
mod tools;
mod totals;
mod turn;
mod untrusted;
mod view;
mod wake;

pub use approvals::{EngineGateAnswer, GateTerms, OpenGate};
pub use context::budget_health::BudgetHealth;
pub use context::prompt::Skill;
pub use deferred::is_deferred_result;
pub use effect::EngineEffect;
pub use gate_cause::GateCause;
pub use ids::{CallId, CallIdError};
pub use input::{EngineInput, KnownTotals, StopCause};
pub use modes::GoalView;
pub use modes::goal::{CheckedArtifacts, CheckedCriterion, StepValidation, Verdict};
pub use pauses::budget;
pub use purpose::CallPurpose;
pub use record::{JournalRecord, OutcomeKind, RecordDetail, RecordKind, RecordedUsage, ToolLine};
pub use stop_requests::OpenRequests;
pub use untrusted::UntrustedSource;
