//! Expiry: tool calls with side effects that have waited too long are not run.
//!
//! An action that was right when the model requested it may be wrong after a pause, a suspension or an edit of the
//! spec. Such calls get a result that says so, and the model can request them again. Reads still run: they do no harm.

use jiff::SignedDuration;

use crate::tools::admission::{DenialReason, DeniedCall};

/// The longest pause after which a call that the model requested before it is still run.
pub const MAX_PAUSE: SignedDuration = SignedDuration::from_mins(5);
/// The longest that a model call can take: an answer to an older one has been waiting.
pub(super) const MAX_CALL: SignedDuration = SignedDuration::from_hours(1);

pub(crate) fn expired_text(time: SignedDuration) -> String {
    let minutes = time.as_mins();
    if minutes < 120 {
        format!("you requested it more than {minutes} min ago")
    } else {
        format!("you requested it more than {} h ago", minutes / 60)
    }
}

pub(crate) fn expired(why: &str) -> DeniedCall {
    let fix = "check how things are now; call it again if it is still right";
    DeniedCall::not_run(DenialReason::Outdated, why, fix)
}
