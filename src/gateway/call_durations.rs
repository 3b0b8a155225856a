//! How long the answered calls of each model took, since the start of this gateway.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::store::{ModelNames, StoredCallKey};
use crate::link::durations::{CALL_BOUNDS, CallDurations};
use crate::otlp::turn_of;

/// The durations of one Agent's calls.
pub struct CallTimes {
    names: ModelNames,
    models: Mutex<Vec<CallDurations>>,
}

impl CallTimes {
    pub fn new(names: ModelNames) -> Self {
        let models = names.all().into_iter().map(|model| CallDurations {
            model: model.to_owned(),
            ..CallDurations::default()
        });
        Self {
            models: Mutex::new(models.collect()),
            names,
        }
    }

    /// A call was answered, this long after it was sent.
    pub fn answered(&self, call: StoredCallKey, took: Duration) {
        let turn = turn_of(&call.id.to_string()).unwrap_or_default();
        let name = self.names.of(call.purpose);
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(model) = models.iter_mut().find(|model| model.model == name) {
            model.counts.observe(CALL_BOUNDS, took, turn);
        }
    }

    /// The durations to report, of models that have answered a call.
    pub fn report(&self) -> Vec<CallDurations> {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let used = models.iter().filter(|model| model.counts.count() > 0);
        used.cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;
    use crate::engine::CallPurpose;

    fn call(id: &str, purpose: CallPurpose) -> StoredCallKey {
        StoredCallKey {
            id: id.parse().unwrap(),
            purpose,
        }
    }

    #[test]
    fn each_model_has_the_durations_of_its_own_calls_once_there_are_any() {
        let times = CallTimes::new(ModelNames::from("main"));
        assert_eq!(times.report(), []);
        times.answered(call("m3-t12c1a1", CallPurpose::Turn), Duration::from_millis(10));
        times.answered(call("t4c2a1", CallPurpose::Precheck), Duration::from_millis(11));
        let report = times.report();
        let models: Vec<_> = report.iter().map(|model| model.model.as_str()).collect();
        assert_eq!(models, ["main", "light"]);
        assert_eq!(report[0].counts.buckets, [1]);
        assert_eq!(report[1].counts.buckets, [0, 1]);
        let last = report[0].counts.last.unwrap();
        assert_eq!((last.member, last.turn, last.microseconds), (3, 12, 10_000));
    }
}
