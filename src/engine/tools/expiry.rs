//! Expiry: tool calls with side effects that have waited too long are not run.
//!
//! An action that was right when the model requested it may be wrong after a pause, a suspension or an edit of the
//! spec. Such calls get a result that says so, and the model can request them again. Reads still run: they do no harm.

use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use crate::effects::EffectBuffer;
use crate::loop_detection::ToolCallEnding;
use crate::machine::Engine;
use crate::snapshot::LifecyclePhase;
use crate::tool::ToolOutcome;
use crate::tools::MAX_TRIES;
use crate::tools::admission::{DenialReason, DeniedCall};
use crate::tools::batch::{ToolBatch, ToolSlot};
use crate::turn::Turn;

/// The longest pause after which a call that the model requested before it is still run.
pub const LONGEST_PAUSE: SignedDuration = SignedDuration::from_mins(5);
/// The longest that a model call can take: an answer to an older one has been waiting.
const LONGEST_CALL: SignedDuration = SignedDuration::from_hours(1);

impl Engine {
    /// At the start of a process: why an answer, or its tool calls, may be out of date.
    pub(crate) fn outdated_since_start(&mut self, before: Option<Timestamp>, now: Timestamp) -> Option<String> {
        let spec = self.settings.spec;
        let edited = self.state.spec.replace(spec).is_some_and(|before| before != spec);
        let asleep = before.map_or(SignedDuration::ZERO, |before| now.duration_since(before));
        let why = if self.state.suspended {
            "the loop was suspended after you requested it".to_owned()
        } else if edited {
            "the spec of this agent was changed after you requested it".to_owned()
        } else if asleep > LONGEST_CALL + LONGEST_PAUSE {
            asked_before(asleep)
        } else {
            return None;
        };
        if let Some(turn) = self.state.turn.as_mut().filter(|_| self.state.call.is_open()) {
            turn.outdate(why.clone());
        }
        Some(why)
    }

    /// An answer arrived. Its calls are not run if things have changed since its call was sent.
    pub(crate) fn expire_outdated(&mut self, out: &mut EffectBuffer) {
        if let Some(why) = self.state.turn.as_mut().and_then(Turn::take_outdated) {
            self.expire(&why, false, out);
        }
    }

    /// Calls that a pause has delayed for too long are not run when the loop resumes.
    pub(crate) fn expire_held(&mut self, out: &mut EffectBuffer) {
        let free = self.state.reasons.are_free(out.now);
        if self.fenced || !free || self.state.lifecycle != LifecyclePhase::Active || !self.running.is_empty() {
            return;
        }
        let held = self
            .tool_batch()
            .map_or(SignedDuration::ZERO, |batch| batch.held_for(out.now));
        if held > LONGEST_PAUSE {
            self.expire(&asked_before(held), true, out);
        }
    }

    /// Denies every waiting call with side effects. With `repeats`, a run of unknown outcome is not repeated either.
    pub(crate) fn expire(&mut self, why: &str, repeats: bool, out: &mut EffectBuffer) {
        let places = self.tool_batch().map_or(0, ToolBatch::places);
        for place in 0..places {
            let (Some(id), Some(wanted)) = (self.run_id(place), self.wanted_call(place).cloned()) else {
                continue;
            };
            let runs = self.running.contains_key(&id);
            match self.tool_batch().and_then(|batch| batch.slot(place)) {
                Some(ToolSlot::Waiting(plan)) if !plan.only_looks() => {
                    let text = self.deny(id, &wanted, expired(why), out);
                    if let Some(batch) = self.batch_mut() {
                        batch.end(place, ToolCallEnding::Failed, text);
                    }
                }
                Some(ToolSlot::Open(plan)) if repeats && !plan.only_looks() && !runs => {
                    if let Some(batch) = self.batch_mut() {
                        batch.set_last_try(place, MAX_TRIES);
                    }
                    let message = format!("it was sent, its outcome is unknown, and it is not repeated, since {why}");
                    self.record_outcome(place, id, ToolOutcome::Unknown { message }, out);
                }
                Some(ToolSlot::Waiting(_) | ToolSlot::Open(_) | ToolSlot::Result(_) | ToolSlot::Yield(_)) | None => {}
            }
        }
    }
}

fn asked_before(time: SignedDuration) -> String {
    let minutes = time.as_mins();
    if minutes < 120 {
        format!("you requested it more than {minutes} min ago")
    } else {
        format!("you requested it more than {} h ago", minutes / 60)
    }
}

fn expired(why: &str) -> DeniedCall {
    let error = json!({
        "error": "not run",
        "detail": why,
        "fix": "check how things are now; call it again if it is still right",
    });
    DeniedCall {
        why: DenialReason::Outdated,
        text: error.to_string(),
    }
}
