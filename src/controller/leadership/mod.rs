//! Which replica leads, and what the leader runs.

pub mod election;
pub(super) mod leader;
