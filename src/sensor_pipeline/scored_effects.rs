//! Effects of an event that depend on a model's score: the questions, and the consequence of each answer.
//!
//! Pure. The receiver has the questions answered, one after the other, and only then applies the event. Scoring fails
//! open: a signal that could not be scored is still delivered, marked as unscored, but only the first of several in a
//! row may wake the loop. signals in a row may wake it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::delivery::{FieldValue, MAX_NAME_BYTES, MAX_PARTS, READ_PARTS, SensorEvent, SensorNotification};
use super::rules::TASK_PREFIX;
use agentloop_api::first_elements::first_elements;
use agentloop_api::sensor::{SignalGate, SignalPriority};
use agentloop_support::text::truncate_bytes;

/// Maximum number of bytes of a payload, as JSON, in a question.
pub const MAX_DATA_BYTES: usize = 8 * 1024;
/// Maximum number of bytes of a question's prompt: 2,048 characters.
const MAX_PROMPT_BYTES: usize = 4 * 2048;
/// Prefix of a notification whose signal was not scored.
const UNSCORED: &str = "[not scored: the light model gave no answer] ";

/// What an event does when its signals hold.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct ScoredEffects {
    /// The questions to the model, in order; at least one.
    #[serde(deserialize_with = "first_elements::<READ_PARTS, _, _>")]
    pub questions: Vec<SignalScoreRequest>,
    /// The payload as JSON, truncated. Untrusted text.
    pub data: String,
    /// Fields that are written unless a question that gates them does not hold.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<READ_PARTS, _, _>"
    )]
    pub updates: Vec<FieldValue>,
    /// Whether the notification is a task: only the most urgent one is delivered.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub task: bool,
}

/// A signal that a model is to score.
#[derive(schemars::JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SignalScoreRequest {
    /// The event's name when the signal holds: `signal/<sensor>/<signal>`.
    pub signal: String,
    /// What to score, in the user's words.
    pub prompt: String,
    /// The minimum score with which it holds.
    pub threshold_percent: u32,
    /// Which effects require that the signal holds.
    pub gate: SignalGate,
    /// Seconds after it held in which it does not hold again.
    #[serde(default)]
    pub cooldown_seconds: u32,
    /// The notification. Its source is that of an event without the signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice: Option<SensorNotification>,
}

/// The result of a question.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalVerdict {
    /// The score is at or above the threshold.
    Holds,
    /// The score is below the threshold, or it was not requested because of the cooldown.
    HoldsNot,
    Unscored {
        /// Whether it is the first in a row.
        first: bool,
    },
}

impl SignalScoreRequest {
    /// The verdict of a score from 0 to 100.
    #[must_use]
    pub fn verdict(&self, score: u8) -> SignalVerdict {
        if u32::from(score) >= self.threshold_percent {
            SignalVerdict::Holds
        } else {
            SignalVerdict::HoldsNot
        }
    }

    /// The notification that follows from a verdict.
    fn tells(&self, verdict: SignalVerdict) -> Option<SensorNotification> {
        let notice = self.notice.clone()?;
        let held = || SensorNotification {
            source: self.signal.clone(),
            ..notice.clone()
        };
        let marked = |notice: SensorNotification| {
            let text = match notice.text.strip_prefix(TASK_PREFIX) {
                Some(task) if notice.is_task => format!("{TASK_PREFIX}{UNSCORED}{task}"),
                _ => format!("{UNSCORED}{}", notice.text),
            };
            SensorNotification { text, ..notice }
        };
        match verdict {
            SignalVerdict::Holds => Some(held()),
            SignalVerdict::HoldsNot => (self.gate == SignalGate::Update).then_some(notice),
            SignalVerdict::Unscored { first: true } => Some(marked(held())),
            SignalVerdict::Unscored { first: false } => {
                let priority = if notice.priority == SignalPriority::Low {
                    SignalPriority::Low
                } else {
                    SignalPriority::Normal
                };
                Some(marked(SensorNotification { priority, ..notice }))
            }
        }
    }
}

impl ScoredEffects {
    /// Whether the rules could have produced it.
    pub(super) fn is_plausible(&self) -> bool {
        let short = |question: &SignalScoreRequest| {
            question.signal.len() <= MAX_NAME_BYTES && question.prompt.len() <= MAX_PROMPT_BYTES
        };
        self.data.len() <= MAX_DATA_BYTES && self.updates.len() <= MAX_PARTS && self.questions.iter().all(short)
    }

    /// The payload as shown to the model.
    #[must_use]
    pub fn data(payload: &Value) -> String {
        let mut data = payload.to_string();
        truncate_bytes(&mut data, MAX_DATA_BYTES);
        data
    }
}

impl SensorEvent {
    /// The event with the effects that follow from the verdicts.
    #[must_use]
    pub fn settled(mut self, verdicts: &[SignalVerdict]) -> Self {
        let Some(trial) = self.trial.take() else {
            return self;
        };
        let known: Vec<_> = trial.questions.iter().zip(verdicts.iter().copied()).collect();
        let writes = |(question, verdict): &(&SignalScoreRequest, SignalVerdict)| {
            *verdict != SignalVerdict::HoldsNot || question.gate == SignalGate::Notify
        };
        if known.iter().all(writes) {
            self.updates.extend(trial.updates);
        }
        for (question, verdict) in known {
            self.notifications.extend(question.tells(verdict));
            if matches!(verdict, SignalVerdict::Holds | SignalVerdict::Unscored { first: true }) {
                self.wakes.push(question.signal.clone());
            }
        }
        if trial.task {
            self.notifications = most_urgent(self.notifications).into_iter().collect();
        }
        self
    }
}

/// The notification of a task: the first of the most urgent ones.
pub(super) fn most_urgent(notices: Vec<SensorNotification>) -> Option<SensorNotification> {
    let rank = |notice: &SensorNotification| match notice.priority {
        SignalPriority::Low => 2,
        SignalPriority::Normal => 1,
        SignalPriority::High => 0,
    };
    notices.into_iter().min_by_key(rank)
}

#[cfg(test)]
mod tests;
