//! Outages of `spec.lightModel` that only a user can end: a rejected key, an exhausted account.
//!
//! Decides when such a model is tried again, and what is reported until then. An outage holds nothing: a turn runs without its
//! pre-check, and a signal has no score. Without a minimum wait, each event of a Sensor would send another call with the same
//! key.
//!
//! An outage ends with an answer, with another failure for which the server must have accepted the key, and with an edit of
//! the spec.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::machine::Engine;
use super::{retry, time_math};
use agentloop_api::failure::{CallFailure, FailureKind};

/// A light model that only a user can make usable again.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LightModelOutage {
    /// No call is sent before this moment.
    until: Timestamp,
    /// The failure of the last call.
    failure: CallFailure,
    /// [`super::settings::EngineSettings::spec`] when it failed.
    #[serde(default)]
    spec: u64,
}

/// Whether the server accepted the key and the account before the call failed.
const fn was_admitted(kind: FailureKind) -> bool {
    matches!(kind, FailureKind::BadResponse | FailureKind::ContextExceeded)
}

impl Engine {
    /// A call to the light model failed.
    pub(super) fn note_light_failure(&mut self, failure: &CallFailure, now: Timestamp) {
        if failure.kind.facts().needs_user {
            let wait = retry::PERSON_WAIT.max(retry::retry_after(failure));
            self.state.light_model = Some(LightModelOutage {
                until: time_math::after(now, wait),
                failure: failure.clone(),
                spec: self.settings.spec,
            });
        } else if was_admitted(failure.kind) {
            self.state.light_model = None;
        }
    }

    /// The light model answered.
    pub(super) fn note_light_answer(&mut self) {
        self.state.light_model = None;
    }

    /// The failure because of which no call to the light model is sent now.
    pub(super) fn light_model_held(&self, now: Timestamp) -> Option<&CallFailure> {
        let outage = self.state.light_model.as_ref()?;
        (now < outage.until).then_some(&outage.failure)
    }

    /// The next call may be sent at once: another process may have another key, and a resume request says that the cause is
    /// fixed. After an edit of the spec the outage is over, since its model or key may be another one.
    pub(super) fn retry_light_model(&mut self, now: Timestamp) {
        let spec = self.settings.spec;
        let has_light_model = self.settings.light_output_tokens.is_some() || self.settings.pre_check.is_some();
        self.state
            .light_model
            .take_if(|outage| !has_light_model || outage.spec != spec);
        if let Some(outage) = &mut self.state.light_model {
            outage.until = outage.until.min(now);
        }
    }

    /// The clock was set back: the wait is not longer than it can be from now on.
    pub(super) fn limit_light_wait(&mut self, now: Timestamp) {
        if let Some(outage) = &mut self.state.light_model {
            outage.until = outage.until.min(time_math::after(now, retry::MAX_RETRY_AFTER));
        }
    }

    /// The failure to report.
    pub(super) fn light_model_failure(&self) -> Option<&CallFailure> {
        self.state.light_model.as_ref().map(|outage| &outage.failure)
    }
}
