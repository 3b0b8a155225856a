//! A receiver: the Sensors and the engine of a worker, what is on its disk, and its gateway.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use agentloop::api::AgentSpec;
use agentloop::api::failure::{CallFailure, FailureKind};
use agentloop::engine::budget::BudgetState;
use agentloop::engine::machine::{Engine, EngineSnapshot};
use agentloop::engine::message::{FinishReason, Message, ModelAnswer, ToolCall};
use agentloop::engine::settings::EngineSettings;
use agentloop::engine::{CallId, CallPurpose, EngineEffect, EngineInput, JournalRecord, KnownTotals, OpenRequests};
use agentloop::link::deliveries::{Delivery, DeliveryAck};
use agentloop::worker::journal::SensorRecord;
use agentloop::worker::sensor_receiver::{LoopSensors, ScoringStep, SensorTransition};
use jiff::Timestamp;
use serde_json::json;

use crate::support::random::Random;

/// What is on the worker's disk; changes in one transaction.
#[derive(Clone, Default)]
struct Journal {
    kept: BTreeMap<String, SensorRecord>,
    snapshot: EngineSnapshot,
    transcript: Vec<Arc<Message>>,
    /// Events that took effect, in order, and how many notifications each gave.
    applied: Vec<(String, usize)>,
}

/// What the gateway has on its disk.
#[derive(Default)]
struct Gateway {
    /// What a call is about, and its outcome.
    calls: BTreeMap<CallId, (String, Option<Result<ModelAnswer, CallFailure>>)>,
    /// How often each score was paid for.
    paid: BTreeMap<String, usize>,
    failed: BTreeSet<String>,
}

pub struct Receiver {
    journal: Journal,
    gateway: Gateway,
    sensors: LoopSensors,
    engine: Engine,
    in_flight: Option<CallId>,
    timer: Option<Timestamp>,
    pub frozen: bool,
    pub kills: usize,
}

/// The worker died during an operation.
struct Killed;

fn settings() -> EngineSettings {
    let model = json!({"api": "OpenAIChat", "name": "m", "baseURL": "http://model"});
    let spec: AgentSpec = serde_json::from_value(json!({
        "model": model, "lightModel": model, "guardrails": {"idleTimeoutSeconds": 86_400},
    }))
    .unwrap();
    EngineSettings::try_from(&spec).unwrap()
}

impl Receiver {
    pub fn new(now: Timestamp) -> Self {
        let mut receiver = Self {
            journal: Journal::default(),
            gateway: Gateway::default(),
            sensors: LoopSensors::default(),
            engine: Engine::new(settings()),
            in_flight: None,
            timer: None,
            frozen: false,
            kills: 0,
        };
        receiver.start(now);
        receiver
    }

    /// The process dies, and another one continues from the disk.
    pub fn kill(&mut self, now: Timestamp) {
        self.kills += 1;
        self.sensors = LoopSensors::restore(self.journal.kept.values().cloned().collect());
        let (snapshot, transcript) = (self.journal.snapshot.clone(), self.journal.transcript.clone());
        self.engine = Engine::restore(settings(), snapshot, transcript);
        self.in_flight = None;
        self.timer = None;
        self.start(now);
    }

    fn start(&mut self, now: Timestamp) {
        let started = EngineInput::Started {
            agent: "agent".into(),
            epoch: 1,
            known: KnownTotals::default(),
            budget: BudgetState::default(),
            link_silent: false,
            open: OpenRequests::default(),
        };
        let _ = self.hear(now, Some(started), None, None);
    }

    /// A delivery arrives. Returns the number up to which all events are on disk; `None`: the worker died meanwhile.
    pub fn take(&mut self, now: Timestamp, delivery: &Delivery, random: &mut Random) -> Option<DeliveryAck> {
        while let Some(happened) = self.sensors.take(now, delivery) {
            if self.sense(now, happened, Some(random)).is_err() {
                self.kill(now);
                return None;
            }
        }
        self.advance(now, random);
        Some(self.sensors.delivered_through(delivery))
    }

    /// What is due by the clock, and what scores lead to.
    pub fn advance(&mut self, now: Timestamp, random: &mut Random) {
        if self.try_to_advance(now, random).is_err() {
            self.kill(now);
        }
    }

    fn try_to_advance(&mut self, now: Timestamp, random: &mut Random) -> Result<(), Killed> {
        if self.timer.is_some_and(|at| at <= now) {
            self.timer = None;
            self.hear(now, Some(EngineInput::Timer), None, Some(random))?;
        }
        loop {
            let scoring = (self.engine.score_outcome(), self.engine.is_scoring());
            let step = self.sensors.step(now, scoring, |_| true);
            match step {
                Some(ScoringStep::Happened(happened)) => self.sense(now, *happened, Some(random))?,
                Some(ScoringStep::Hear(input)) => self.hear(now, Some(*input), None, Some(random))?,
                None => return Ok(()),
            }
        }
    }

    /// The call in flight ends.
    pub fn answer(&mut self, now: Timestamp, random: &mut Random, may_fail: bool) {
        let Some(call) = self.in_flight.take() else {
            return;
        };
        let input = match self.gateway.end(call, may_fail && random.percent(17)) {
            Ok(answer) => EngineInput::Answered { call, answer },
            Err(failure) => EngineInput::Failed { call, failure },
        };
        let heard = self.hear(now, Some(input), None, Some(random));
        if heard.and_then(|()| self.try_to_advance(now, random)).is_err() {
            self.kill(now);
        }
    }

    fn sense(&mut self, now: Timestamp, happened: SensorTransition, random: Option<&mut Random>) -> Result<(), Killed> {
        let kept = happened.record();
        let input = happened.input().cloned();
        self.sensors.confirm(happened);
        self.hear(now, input, Some(kept), random)
    }

    /// One step, as the driver does it: commit, then act. It may die before and after the commit.
    fn hear(
        &mut self,
        now: Timestamp,
        input: Option<EngineInput>,
        kept: Option<SensorRecord>,
        random: Option<&mut Random>,
    ) -> Result<(), Killed> {
        let (before, after) = random.map_or((false, false), |random| (random.percent(2), random.percent(2)));
        let applied = match &input {
            Some(EngineInput::Sensed(event)) => Some((event.id.clone(), event.notices.len())),
            _ => None,
        };
        let effects = input.map(|input| self.engine.handle(now, input)).unwrap_or_default();
        if before {
            return Err(Killed);
        }
        let records: Vec<&JournalRecord> = effects
            .iter()
            .filter_map(|effect| {
                if let EngineEffect::Record(record) = effect {
                    Some(record)
                } else {
                    None
                }
            })
            .collect();
        if !records.is_empty() || kept.is_some() {
            self.journal.commit(&records, self.engine.snapshot(), kept);
            self.journal.applied.extend(applied);
        }
        if after {
            return Err(Killed);
        }
        for effect in effects {
            match effect {
                EngineEffect::CallModel {
                    call,
                    purpose,
                    messages,
                    ..
                } => {
                    self.gateway.submit(call, purpose, &messages);
                    self.in_flight = Some(call);
                }
                EngineEffect::Acknowledge { call } => self.gateway.calls.retain(|other, _| *other > call),
                EngineEffect::SetTimer(timer) => self.timer = timer,
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether a call is under way, or something is due.
    pub fn is_busy(&self, now: Timestamp) -> bool {
        let (scored, scoring) = (self.engine.score_outcome(), self.engine.is_scoring());
        self.in_flight.is_some() || scoring || self.sensors.step(now, (scored, scoring), |_| true).is_some()
    }

    /// Events that took effect, in order, and how many notifications each gave.
    pub fn applied(&self) -> &[(String, usize)] {
        &self.journal.applied
    }

    /// How often each score was paid for, by the number of its event.
    pub fn paid(&self) -> &BTreeMap<String, usize> {
        &self.gateway.paid
    }
}

impl Journal {
    fn commit(&mut self, records: &[&JournalRecord], snapshot: EngineSnapshot, kept: Option<SensorRecord>) {
        for record in records {
            let left = self.transcript.len() - record.retract;
            self.transcript.truncate(left);
            self.transcript.drain(record.forget.clone());
            self.transcript.extend(record.messages.iter().cloned());
        }
        self.snapshot = snapshot;
        if let Some(kept) = kept {
            self.kept.insert(kept.sensor.clone(), kept);
        }
    }
}

impl Gateway {
    fn submit(&mut self, call: CallId, purpose: CallPurpose, messages: &[Arc<Message>]) {
        let about = match (purpose, messages.last().map(|message| &**message)) {
            (CallPurpose::Signal, Some(Message::User { text })) => text.lines().last().unwrap_or_default().to_owned(),
            _ => String::new(),
        };
        self.calls.entry(call).or_insert((about, None));
    }

    /// How a call ends. Each score fails once at most: five failures in a row would be none.
    fn end(&mut self, call: CallId, fails: bool) -> Result<ModelAnswer, CallFailure> {
        let (about, end) = self.calls.get_mut(&call).expect("a call");
        if end.is_none() {
            *end = Some(if fails && self.failed.insert(about.clone()) {
                Err(CallFailure {
                    kind: FailureKind::Interrupted,
                    message: "the gateway was killed".into(),
                    retry_after_milliseconds: None,
                    resumes_at: None,
                })
            } else if about.is_empty() {
                Ok(sleeps())
            } else {
                *self.paid.entry(about.clone()).or_default() += 1;
                Ok(scores(about))
            });
        }
        end.clone().expect("an end")
    }
}

/// The score of an event, by its number: one below the threshold, at it, above, or none.
fn scores(about: &str) -> ModelAnswer {
    let event: serde_json::Value = serde_json::from_str(about).unwrap();
    let text = match event["n"].as_i64().unwrap() % 4 {
        0 => "{\"score\": 79}",
        1 => "{\"score\": 80}",
        2 => "{\"score\": 100}",
        _ => "who knows",
    };
    ModelAnswer {
        text: Some(text.into()),
        ..ModelAnswer::default()
    }
}

fn sleeps() -> ModelAnswer {
    ModelAnswer {
        tool_calls: vec![ToolCall {
            id: "a".into(),
            name: "yield".into(),
            arguments: json!({"sleep": 600}).to_string(),
        }],
        finish: FinishReason::ToolCalls,
        ..ModelAnswer::default()
    }
}
