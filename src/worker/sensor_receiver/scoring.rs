//! Events that wait for a score, and later events of the same Sensor, which must stay in order.
//!
//! They are part of the Sensor's record: an event that is on disk here is acknowledged, and takes effect once its
//! signals are scored. Bounded: beyond [`MAX_WAITING`] events of one Sensor, the next ones stay where they are, in the
//! outbox of the sensor pod or at the clock. The engine calls the model; this module decides what to ask and applies
//! the scores.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{LoopSensors, SensorMemory, SensorTransition, sensed};
use crate::engine::{EngineInput, scoring};
use crate::link::sensor_messages::SensorReport;
use crate::sensor_pipeline::delivery::SensorEvent;
use crate::sensor_pipeline::scored_effects::{SignalScoreRequest, SignalVerdict};

/// Maximum number of waiting events per Sensor.
pub const MAX_WAITING: usize = 16;

/// Maximum number of reported Sensors that run elsewhere. Those with the highest event numbers are preferred, because
/// the others may no longer exist.
pub const MAX_TOLD: usize = 64;

/// The waiting events of a Sensor.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ScoreQueue {
    name: String,
    /// Oldest first.
    events: VecDeque<SensorEvent>,
    /// Verdicts on the questions of the oldest event, in their order.
    verdicts: Vec<SignalVerdict>,
    /// When the cooldown of each scored signal ends.
    cooldowns: BTreeMap<String, Timestamp>,
    /// Number of consecutive signals without a score.
    unscored: u32,
}

/// The next action for scoring.
#[derive(Debug)]
pub enum ScoringStep {
    /// Apply the transition: its [`EngineInput`] and record are committed together.
    Happened(Box<SensorTransition>),
    /// Feed this [`EngineInput`] to the engine.
    Hear(Box<EngineInput>),
}

impl ScoreQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.events.len() >= MAX_WAITING
    }

    /// Describes missing scores for the status of the Sensor.
    pub(super) fn failure(&self) -> Option<String> {
        let scores = match self.unscored {
            0 => return None,
            1 => "signal was".to_owned(),
            many => format!("{many} signals in a row were"),
        };
        Some(format!(
            "the last {scores} not scored; check status.lastError of the Agent, and that its spec.lightModel is set"
        ))
    }

    /// Queues an event, or returns it if it can take effect at once.
    pub(super) fn keep(&mut self, name: &str, event: SensorEvent) -> Option<SensorEvent> {
        if self.events.is_empty() && event.trial.is_none() {
            return Some(event);
        }
        name.clone_into(&mut self.name);
        self.events.push_back(event);
        None
    }

    /// Returns the verdicts on the oldest event so far. A signal that is cooling down is not asked: it does not hold.
    fn known(&self, now: Timestamp) -> Vec<SignalVerdict> {
        let mut known = self.verdicts.clone();
        let rest = self.questions().iter().skip(known.len());
        let cool = rest.take_while(|question| self.is_cooling_down(question, now));
        known.extend(cool.map(|_| SignalVerdict::HoldsNot));
        known
    }

    fn questions(&self) -> &[SignalScoreRequest] {
        let trial = self.events.front().and_then(|event| event.trial.as_ref());
        trial.map_or(&[], |trial| &trial.questions)
    }

    fn is_cooling_down(&self, question: &SignalScoreRequest, now: Timestamp) -> bool {
        let until = self.cooldowns.get(&question.signal);
        // A cooldown that ends later than one started now would is ignored: the clock was set back.
        until.is_some_and(|until| now < *until && *until <= after(now, question))
    }

    /// Returns the question to ask next.
    fn next_question(&self, now: Timestamp) -> Option<&SignalScoreRequest> {
        self.questions().get(self.known(now).len())
    }

    /// Removes the oldest event once all its questions are answered, and applies the verdicts to it.
    fn settle(&mut self, now: Timestamp) -> Option<SensorEvent> {
        if self.next_question(now).is_some() {
            return None;
        }
        let known = self.known(now);
        let event = self.events.pop_front()?;
        self.verdicts.clear();
        self.cooldowns.retain(|_, until| *until > now);
        Some(event.settled(&known))
    }

    /// Records a score, or that there will be none. Returns false if it does not belong to a current question.
    fn judge(&mut self, (seq, signal): (i64, &str), score: Option<u8>, now: Timestamp) -> bool {
        if self.events.front().is_none_or(|event| event.seq != seq) {
            return false;
        }
        let place = self.questions().iter().position(|question| question.signal == signal);
        let Some(place) = place.filter(|place| *place >= self.verdicts.len()) else {
            return false;
        };
        let question = self.questions()[place].clone();
        let verdict = match score {
            Some(score) => question.verdict(score),
            None => SignalVerdict::Unscored {
                first: self.unscored == 0,
            },
        };
        self.unscored = score.map_or(self.unscored.saturating_add(1), |_| 0);
        // The questions before it were skipped by their cooldown when it was asked.
        self.verdicts.resize(place, SignalVerdict::HoldsNot);
        self.verdicts.push(verdict);
        if verdict != SignalVerdict::HoldsNot && question.cooldown_seconds > 0 {
            self.cooldowns.insert(question.signal.clone(), after(now, &question));
        }
        true
    }
}

fn after(now: Timestamp, question: &SignalScoreRequest) -> Timestamp {
    let cooldown = SignedDuration::from_secs(question.cooldown_seconds.into());
    now.checked_add(cooldown).unwrap_or(Timestamp::MAX)
}

impl LoopSensors {
    /// Returns the next action, if any. `scored`: the outcome that the engine holds; `scoring`: it has an open
    /// question; `has_room`: whether the loop takes an event of the Sensor of this name.
    #[must_use]
    pub fn step(
        &self,
        now: Timestamp,
        (scored, scoring): (Option<(&str, Option<u8>)>, bool),
        has_room: impl Fn(&str) -> bool,
    ) -> Option<ScoringStep> {
        if let Some(settled) = self.settle(now, has_room) {
            return Some(ScoringStep::Happened(Box::new(settled)));
        }
        if let Some((id, score)) = scored {
            let taken = || ScoringStep::Hear(Box::new(EngineInput::ScoreTaken { id: id.into() }));
            let judged = self.judge(id, score, now).map(Box::new);
            return Some(judged.map_or_else(taken, ScoringStep::Happened));
        }
        let question = self.question(now).filter(|_| !scoring)?;
        Some(ScoringStep::Hear(Box::new(EngineInput::Score(question))))
    }

    /// Returns the open question of the oldest event among all Sensors.
    fn question(&self, now: Timestamp) -> Option<scoring::ScoreQuestion> {
        let asking = self.memories.iter().filter_map(|(uid, memory)| {
            let question = memory.waiting.next_question(now)?;
            Some((uid, memory.waiting.events.front()?, question))
        });
        let (uid, event, question) = asking.min_by_key(|(_, event, _)| event.at)?;
        let data = event.trial.as_ref().map(|trial| trial.data.clone());
        Some(scoring::ScoreQuestion {
            id: format!("{uid}/{}/{}", event.seq, question.signal),
            signal: question.signal.clone(),
            prompt: question.prompt.clone(),
            data: data.unwrap_or_default(),
        })
    }

    fn judge(&self, id: &str, score: Option<u8>, now: Timestamp) -> Option<SensorTransition> {
        let (uid, rest) = id.split_once('/')?;
        let (seq, signal) = rest.split_once('/')?;
        let mut memory = self.memories.get(uid)?.clone();
        if !memory.waiting.judge((seq.parse().ok()?, signal), score, now) {
            return None;
        }
        memory.rules.totals.errors += i64::from(score.is_none());
        Some(SensorTransition {
            sensor: uid.into(),
            memory,
            input: Some(EngineInput::ScoreTaken { id: id.into() }),
            files: Vec::new(),
        })
    }

    /// Lets the first waiting event take effect whose scores are complete.
    fn settle(&self, now: Timestamp, has_room: impl Fn(&str) -> bool) -> Option<SensorTransition> {
        self.memories.iter().find_map(|(uid, memory)| {
            let is_complete = !memory.waiting.events.is_empty() && memory.waiting.next_question(now).is_none();
            if !is_complete || !has_room(&memory.waiting.name) {
                return None;
            }
            let mut memory = memory.clone();
            let before = memory.waiting.events.front()?;
            let (updates, notices) = (before.updates.len(), before.notifications.len());
            let event = memory.waiting.settle(now)?;
            memory.count(
                event.updates.len() - updates,
                event.notifications.len().saturating_sub(notices),
            );
            memory.note(&event);
            let name = memory.waiting.name.clone();
            Some(SensorTransition {
                sensor: uid.clone(),
                memory,
                input: Some(EngineInput::Sensed(sensed(uid, &name, event))),
                files: Vec::new(),
            })
        })
    }
}

impl LoopSensors {
    /// Reports on Sensors that run in pods of their own what only the receiver can count: scored effects and dropped
    /// events.
    pub(super) fn scored_elsewhere(&self) -> impl Iterator<Item = SensorReport> {
        let elsewhere = self.memories.iter().filter(|(uid, memory)| {
            let scored = !memory.waiting.name.is_empty();
            (scored || memory.rules.totals.dropped > 0) && !self.running.contains_key(*uid)
        });
        let mut newest: Vec<_> = elsewhere.collect();
        newest.sort_by_key(|(_, memory)| Reverse(memory.through));
        newest.into_iter().take(MAX_TOLD).map(|(uid, memory)| SensorReport {
            uid: uid.clone(),
            generation: 0,
            totals: memory.rules.totals,
            last: None,
            consecutive_failures: 0,
            failure: None,
            next_attempt_at: None,
        })
    }
}

impl SensorMemory {
    /// Counts the effects that a score let through.
    fn count(&mut self, updates: usize, notices: usize) {
        let totals = &mut self.rules.totals;
        totals.updates += i64::try_from(updates).unwrap_or_default();
        totals.notifications += i64::try_from(notices).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests;
