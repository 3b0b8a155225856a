//! The results of the calls in a step of the history.

use serde_json::{Value, json};

/// The results of a step's calls, as far as they have ended.
pub(super) struct StepResults {
    pub(super) calls: usize,
    pub(super) results: Vec<Value>,
}

impl StepResults {
    /// Returns the result of the call at `place`, creating it if needed. `None` for a call that does not exist.
    pub(super) fn result_at(&mut self, place: usize) -> Option<&mut Value> {
        if place >= self.calls {
            return None;
        }
        if self.results.len() <= place {
            self.results.resize_with(place + 1, || json!({}));
        }
        self.results.get_mut(place).filter(|result| result.is_object())
    }

    /// Counts the leading results that have their text.
    pub(super) fn joined(&self) -> usize {
        let has_text = |result: &&Value| result.get("text").is_some();
        self.results.iter().take_while(has_text).count()
    }

    /// `None` while calls are open. Calls answered by the runtime itself, such as `yield`, have no outcome.
    pub(super) fn success(&self) -> Option<bool> {
        let good = |result: &Value| matches!(result["outcome"].as_str(), None | Some("Ok"));
        (self.joined() == self.calls).then(|| self.results.iter().all(good))
    }

    /// The first outcome that is not `Ok`.
    pub(super) fn error(&self) -> Option<&str> {
        let mut outcomes = self.results.iter().filter_map(|result| result["outcome"].as_str());
        outcomes.find(|outcome| *outcome != "Ok")
    }
}
