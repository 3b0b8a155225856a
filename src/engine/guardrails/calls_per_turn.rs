//! `guardrails.maxCallsPerTurn`: counts the model calls of one turn; at the limit the turn ends, counted as completed.
//! It holds nothing, so there is nothing to clear: the next turn starts from zero.

use super::Guardrail;
use crate::engine::settings::EngineSettings;

/// The limit.
pub struct CallsPerTurn;

impl Guardrail for CallsPerTurn {
    fn before_call(&self, settings: &EngineSettings, calls: u32) -> Option<String> {
        (calls >= settings.max_calls_per_turn)
            .then(|| format!("the last turn reached maxCallsPerTurn ({calls}) and was ended"))
    }
}
