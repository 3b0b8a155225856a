//! `guardrails.maxCallsPerTurn`: counts the model calls of one turn; at the limit the turn ends and counts as
//! completed. It raises no pause: the next turn starts from zero.

use super::{Guardrail, TurnLimit};
use crate::settings::EngineSettings;
use agentloop_api::usage_counts::GuardrailTrip;

pub struct CallsPerTurn;

impl Guardrail for CallsPerTurn {
    fn before_call(&self, settings: &EngineSettings, calls: u32) -> Option<TurnLimit> {
        (calls >= settings.max_calls_per_turn).then(|| TurnLimit {
            trip: GuardrailTrip::MaxCallsPerTurn,
            note: format!("the last turn reached maxCallsPerTurn ({calls}) and was ended"),
        })
    }
}
