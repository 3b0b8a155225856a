//! A loop as the receiver of Sensors: takes their events, runs those that run in its own pod (schedules and watches), and keeps
//! the state of all of them.
//!
//! Pure: the driver provides the time, feeds the loop, and writes a Sensor's new record in the same transaction as the
//! event's effect on the loop. Only then is the record confirmed here. So each event takes effect once, whenever the
//! worker is killed.

mod event_quota;
pub mod file_watcher;
mod files;
mod inotify;
mod memory;
mod scoring;
mod ticks;

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::Value;

use super::journal::SensorRecord;
use crate::api::sensor::SignalPriority;
use crate::engine::EngineInput;
use crate::engine::notifications;
use crate::engine::sensor_events::{SensedEvent, SensedNotification};
use crate::link::deliveries::DeliveryAck;
use crate::link::sensor_messages::{LastEvent, SensorReport, SensorTerms};
use crate::sensor_pipeline;
use crate::sensor_pipeline::delivery::{Delivery, MAX_SEQ, SensorEvent};
use crate::sensor_pipeline::rules::{RulesOutcome, SensorRules, TASK_PREFIX};
use crate::sensor_pipeline::schedule::{self, DueTick, TickCalendar};
use crate::sensor_pipeline::watch::{FileChange, FileFingerprint};

use file_watcher::{WantedWatches, WatchPermit, WatchReport, WatchTerms, WatchUpdate};

use memory::SensorMemory;
pub use scoring::ScoringStep;
use ticks::TickHistory;

#[derive(Debug, Default)]
pub struct LoopSensors {
    running: BTreeMap<String, RunningSensor>,
    /// By uid, including Sensors that no longer run: one that returns continues.
    memories: BTreeMap<String, SensorMemory>,
    /// Fingerprints of the files that each Sensor has reported, by uid.
    files: BTreeMap<String, BTreeMap<String, FileFingerprint>>,
    has_workspace: bool,
}

/// A Sensor that runs in the worker.
#[derive(Debug)]
struct RunningSensor {
    terms: SensorTerms,
    /// `None` while it is suspended.
    compiled: Option<Result<CompiledTerms, String>>,
    /// When the Sensor started to run here. Older ticks were missed.
    since: Timestamp,
    /// A [`FileChange`] of a file that the limits do not admit yet.
    waiting: Option<(FileChange, WatchPermit)>,
}

#[derive(Debug)]
struct CompiledTerms {
    rules: SensorRules,
    calendar: Option<TickCalendar>,
    watching: Option<WatchTerms>,
}

/// A step of a Sensor: its new state, and its effect on the loop.
#[derive(Debug)]
#[must_use]
pub struct SensorTransition {
    sensor: String,
    memory: SensorMemory,
    input: Option<EngineInput>,
    /// Fingerprints to persist; `None` removes that of a file.
    files: Vec<(String, Option<FileFingerprint>)>,
}

impl SensorTransition {
    /// The [`EngineInput`] for the engine, if the step affects the loop.
    #[must_use]
    pub fn input(&self) -> Option<&EngineInput> {
        self.input.as_ref()
    }

    /// The record to write in the same transaction as the [`EngineInput`].
    #[must_use]
    pub fn record(&self) -> SensorRecord {
        SensorRecord {
            sensor: self.sensor.clone(),
            seq: self.memory.through,
            memory: serde_json::to_string(&self.memory).unwrap_or_default(),
            files: self.files.clone(),
        }
    }
}

#[cfg(test)]
impl LoopSensors {
    pub(in crate::worker) fn files(&self) -> String {
        format!("{:?}", self.files)
    }
}

impl LoopSensors {
    /// Restores the Sensors from their records in the journal.
    #[must_use]
    pub fn restore(kept: Vec<SensorRecord>) -> Self {
        let mut sensors = Self::default();
        for kept in kept {
            let memory = serde_json::from_str(&kept.memory).unwrap_or_else(|_| {
                tracing::warn!(
                    sensor = kept.sensor,
                    "failed to parse the record of a Sensor; its values and windows are reset, and no event is \
                     processed twice"
                );
                SensorMemory {
                    through: kept.seq,
                    ..SensorMemory::default()
                }
            });
            let files = kept.files.into_iter();
            let files = files.filter_map(|(path, print)| Some((path, print?))).collect();
            sensors.files.insert(kept.sensor.clone(), files);
            sensors.memories.insert(kept.sensor, memory);
        }
        sensors
    }

    /// Sets whether the Agent has a workspace whose files can be watched.
    #[must_use]
    pub fn with_workspace(mut self, has_workspace: bool) -> Self {
        self.has_workspace = has_workspace;
        self
    }

    /// Returns the values that Sensors have set, the oldest first.
    #[must_use]
    pub fn values(&self) -> Vec<(&str, &Value, Timestamp)> {
        let given = self.memories.values().flat_map(|memory| &memory.values);
        let mut values: Vec<_> = given.map(|(field, given)| (&**field, &given.value, given.at)).collect();
        values.sort_by_key(|(.., at)| *at);
        values
    }

    /// Replaces the Sensors that run here. `None`: not decided yet, nothing changes. Returns records to persist at
    /// once.
    pub fn apply_terms(&mut self, now: Timestamp, terms: Option<&[SensorTerms]>) -> Vec<SensorTransition> {
        let Some(terms) = terms else {
            return Vec::new();
        };
        self.running
            .retain(|uid, _| terms.iter().any(|terms| terms.uid == *uid));
        let mut begun = Vec::new();
        for terms in terms {
            let known = self.running.get(&terms.uid);
            if known.is_some_and(|running| running.terms == *terms) {
                continue;
            }
            // A Sensor that was already running keeps its start, so that a change of its terms skips no tick.
            let listened = known.filter(|running| running.compiled.is_some());
            let mut running = RunningSensor {
                since: listened.map_or(now, |running| running.since.min(now)),
                compiled: (!terms.spec.suspend).then(|| compile(terms, self.has_workspace)),
                terms: terms.clone(),
                waiting: None,
            };
            let started = running.begins(now, self.memories.get(&terms.uid));
            // Each transition replaces the memory, so the second starts from that of the first.
            let memory = started.as_ref().map(|started| &started.memory);
            let memory = memory.or_else(|| self.memories.get(&terms.uid));
            let forgotten = running.forget_unwatched(memory, self.files.get(&terms.uid));
            begun.extend(started);
            begun.extend(forgotten);
            if let Some(before) = self.running.remove(&terms.uid)
                && before.watching() == running.watching()
            {
                running.waiting = before.waiting;
            }
            self.running.insert(terms.uid.clone(), running);
        }
        begun
    }

    /// Returns the watches of all running Sensors.
    pub(super) fn watched(&self) -> WantedWatches<'_> {
        let watching = self.running.iter();
        let watching = watching.filter_map(|(uid, running)| Some((&**uid, running.watching()?)));
        let files = |uid: &str| self.files.get(uid).cloned().unwrap_or_default();
        watching.map(|(uid, watching)| (uid, (watching, files(uid)))).collect()
    }

    /// Applies a report of a file watcher. Returns a record to persist at once; a change instead becomes due once the
    /// limits admit it.
    pub fn apply_watch_report(&mut self, sighting: WatchReport) -> Option<SensorTransition> {
        let running = self.running.get_mut(&sighting.sensor)?;
        match sighting.what {
            WatchUpdate::Change(change, hold) => {
                running.waiting = Some((change, hold));
                None
            }
            WatchUpdate::Problem(problem) => {
                let memory = self.memories.get(&sighting.sensor);
                running.watch_problem_changed(problem, memory.cloned().unwrap_or_default())
            }
        }
    }

    /// Returns when the next step of a Sensor is due. `has_room`: whether the loop takes an event of the Sensor of this name;
    /// one of another Sensor waits here, and is due as soon as there is room.
    #[must_use]
    pub fn next(&self, now: Timestamp, has_room: impl Fn(&str) -> bool) -> Option<Timestamp> {
        let nothing = SensorMemory::default();
        let of =
            |(uid, running): (&String, &RunningSensor)| running.next(self.memories.get(uid).unwrap_or(&nothing), now);
        let with_room = self.running.iter().filter(|(_, running)| has_room(&running.terms.name));
        with_room.filter_map(of).min()
    }

    /// Whether something is received or scored here: without the pod it would be missed.
    #[must_use]
    pub fn needs_pod(&self) -> bool {
        let receives = self.running.values().any(|running| running.compiled.is_some());
        receives || self.memories.values().any(|memory| !memory.waiting.is_empty())
    }

    /// Returns a step that is due now, of a Sensor for which `has_room` holds.
    pub fn due(&mut self, now: Timestamp, has_room: impl Fn(&str) -> bool) -> Option<SensorTransition> {
        let with_room = self.running.iter_mut();
        for (uid, running) in with_room.filter(|(_, running)| has_room(&running.terms.name)) {
            let memory = match (self.memories.get_mut(uid), &running.waiting) {
                (Some(memory), _) => memory,
                (None, Some(_)) => self.memories.entry(uid.clone()).or_default(),
                (None, None) => continue,
            };
            // The clock was set back: repeated ticks are recognized by their id.
            running.since = running.since.min(now);
            if let Some(ticks) = &mut memory.ticks {
                ticks.through = ticks.through.min(now);
            }
            if let Some(happened) = running.due(memory, now) {
                return Some(happened);
            }
        }
        None
    }

    /// Takes the first event of a delivery that was not taken before. `None` if there is none, or while the queue for
    /// scores is full. The Sensor need not run here.
    #[must_use]
    pub fn take(&self, now: Timestamp, delivery: &Delivery) -> Option<SensorTransition> {
        let known = self.delivered_through(delivery).through;
        // Numbers ascend within an outbox: a lower number is a redelivery. Numbers above MAX_SEQ are invalid.
        let next = |event: &&SensorEvent| event.seq > known && event.seq <= MAX_SEQ;
        let event = delivery.events.iter().find(next)?.clone();
        let mut memory = self.memories.get(&delivery.sensor).cloned().unwrap_or_default();
        if memory.waiting.is_full() {
            return None;
        }
        memory.counts_by(&delivery.outbox);
        let event = SensorEvent {
            outbox: delivery.outbox.clone(),
            ..event
        };
        let event = memory.take_from_pod(now, delivery, event);
        Some(SensorTransition {
            sensor: delivery.sensor.clone(),
            memory,
            input: event.map(|event| EngineInput::Sensed(sensed(&delivery.sensor, &delivery.name, event))),
            files: Vec::new(),
        })
    }

    /// Returns the number up to which events of the delivery's outbox were taken; 0 for none.
    #[must_use]
    pub fn delivered_through(&self, delivery: &Delivery) -> DeliveryAck {
        let memory = self.memories.get(&delivery.sensor);
        DeliveryAck {
            sensor: delivery.sensor.clone(),
            outbox: delivery.outbox.clone(),
            through: memory.map_or(0, |memory| memory.through_of(&delivery.outbox)),
        }
    }

    /// Adopts a transition whose record is on disk.
    pub fn confirm(&mut self, happened: SensorTransition) {
        if let Some(running) = self.running.get_mut(&happened.sensor) {
            let told =
                |(change, _): &(FileChange, WatchPermit)| happened.files.iter().any(|(path, _)| *path == change.path);
            running.waiting = running.waiting.take().filter(|waiting| !told(waiting));
        }
        let files = self.files.entry(happened.sensor.clone()).or_default();
        for (path, print) in happened.files {
            match print {
                Some(print) => files.insert(path, print),
                None => files.remove(&path),
            };
        }
        self.memories.insert(happened.sensor, happened.memory);
    }

    /// Reports the Sensors that run here, and those that run elsewhere whose events are scored or dropped here.
    #[must_use]
    pub fn reports(&self) -> Vec<SensorReport> {
        let nothing = SensorMemory::default();
        let of = |(uid, running): (&String, &RunningSensor)| running.report(self.memories.get(uid).unwrap_or(&nothing));
        let running = self.running.iter().map(of);
        running.chain(self.scored_elsewhere()).collect()
    }
}

fn compile(terms: &SensorTerms, has_workspace: bool) -> Result<CompiledTerms, String> {
    let spec = &terms.spec;
    if spec.source.watch.is_some() && !has_workspace {
        return Err("spec.source.watch requires a workspace: set spec.workspace of the Agent ({} is enough)".into());
    }
    let max_text = usize::try_from(spec.limits.max_payload_bytes).unwrap_or(usize::MAX);
    let compiled = sensor_pipeline::compile(&terms.name, spec).map_err(|mistakes| mistakes.to_string())?;
    Ok(CompiledTerms {
        rules: compiled.rules,
        calendar: compiled.calendar,
        watching: compiled.scope.map(|scope| WatchTerms { scope, max_text }),
    })
}

impl RunningSensor {
    fn listens(&self) -> Option<&CompiledTerms> {
        self.compiled.as_ref()?.as_ref().ok()
    }

    /// Starts the schedule: only ticks after this moment count.
    fn begins(&self, now: Timestamp, memory: Option<&SensorMemory>) -> Option<SensorTransition> {
        let schedule = self.terms.spec.source.schedule.as_ref()?;
        let schedule = format!("{} {}", schedule.cron, schedule.time_zone);
        let known = memory.and_then(|memory| memory.ticks.as_ref());
        if known.is_some_and(|ticks| ticks.schedule == schedule) {
            return None;
        }
        let mut memory = memory.cloned().unwrap_or_default();
        memory.ticks = Some(TickHistory::begin(schedule, now));
        Some(self.happened(memory, None))
    }

    fn watching(&self) -> Option<&WatchTerms> {
        self.listens()?.watching.as_ref()
    }

    /// Forgets files that the Sensor no longer watches, without reporting them as removed.
    fn forget_unwatched(
        &self,
        memory: Option<&SensorMemory>,
        files: Option<&BTreeMap<String, FileFingerprint>>,
    ) -> Option<SensorTransition> {
        let watching = self.listens()?.watching.as_ref();
        let covers = |path: &str| watching.is_some_and(|watching| watching.scope.covers(path));
        let left = files?.keys().filter(|path| !covers(path));
        let left: Vec<_> = left.map(|path| (path.clone(), None)).collect();
        if left.is_empty() {
            return None;
        }
        let mut happened = self.happened(memory.cloned().unwrap_or_default(), None);
        happened.files = left;
        Some(happened)
    }

    /// Records that files became unreadable, or readable again. Counts an error only when they become unreadable.
    fn watch_problem_changed(&self, problem: Option<String>, mut memory: SensorMemory) -> Option<SensorTransition> {
        if memory.watch_problem == problem {
            return None;
        }
        let begins = memory.watch_problem.is_none();
        memory.watch_problem = problem;
        let input = memory.watch_problem.is_some() && begins;
        memory.rules.totals.errors += i64::from(input);
        let input = input.then(|| EngineInput::SensorFailed {
            sensor: self.terms.name.clone(),
        });
        Some(self.happened(memory, input))
    }

    fn next(&self, memory: &SensorMemory, now: Timestamp) -> Option<Timestamp> {
        let compiled = self.listens().filter(|_| !memory.waiting.is_full())?;
        let rules = &compiled.rules;
        let waits = rules.waits_until(&memory.rules);
        let file = self
            .waiting
            .as_ref()
            .map(|_| rules.below_limit_from(&memory.rules, now));
        self.next_tick(memory).into_iter().chain(waits).chain(file).min()
    }

    fn next_tick(&self, memory: &SensorMemory) -> Option<Timestamp> {
        let calendar = self.listens()?.calendar.as_ref()?;
        calendar.after(memory.ticks.as_ref()?.through)
    }

    fn due(&self, memory: &SensorMemory, now: Timestamp) -> Option<SensorTransition> {
        let compiled = self.listens().filter(|_| !memory.waiting.is_full())?;
        let mut memory = memory.clone();
        if let Some(outcome) = compiled.rules.release_held(&mut memory.rules, now) {
            return Some(self.transition(memory, outcome));
        }
        if let Some((change, _)) = &self.waiting {
            return self.due_file(compiled, memory, change, now);
        }
        let (calendar, ticks) = (compiled.calendar.as_ref()?, memory.ticks.as_mut()?);
        match calendar.due(ticks.through, self.since, now) {
            DueTick::Nothing => None,
            DueTick::Skipped(tick) => {
                ticks.through = tick;
                Some(self.happened(memory, None))
            }
            DueTick::Tick(tick) => {
                if !ticks.record_tick(tick, calendar) {
                    memory.rules.totals.filtered += 1;
                    return Some(self.happened(memory, None));
                }
                let id = schedule::delivery_id(&self.terms.uid, tick);
                let body = schedule::payload(tick).to_string();
                let outcome = compiled
                    .rules
                    .process(&mut memory.rules, now, Some(&id), body.as_bytes());
                Some(self.transition(memory, outcome))
            }
        }
    }

    fn due_file(
        &self,
        compiled: &CompiledTerms,
        mut memory: SensorMemory,
        change: &FileChange,
        now: Timestamp,
    ) -> Option<SensorTransition> {
        let (rules, state) = (&compiled.rules, &mut memory.rules);
        rules.apply_clock(state, now);
        if rules.below_limit_from(state, now) > now {
            return None;
        }
        let id = change.delivery_id(&self.terms.uid, state.seq + 1);
        let payload = change.payload(compiled.watching.as_ref()?.max_text);
        let outcome = rules.process(state, now, Some(&id), payload.as_bytes());
        let mut happened = self.transition(memory, outcome);
        happened.files.push((change.path.clone(), change.print.clone()));
        Some(happened)
    }

    fn transition(&self, mut memory: SensorMemory, outcome: RulesOutcome) -> SensorTransition {
        let input = match outcome {
            RulesOutcome::Accepted(event) => {
                let event = memory.take(&self.terms.name, *event);
                event.map(|event| EngineInput::Sensed(sensed(&self.terms.uid, &self.terms.name, event)))
            }
            // Only the first failure in a row is reported to the loop.
            RulesOutcome::Failed if memory.rules.consecutive_failures == 1 => Some(EngineInput::SensorFailed {
                sensor: self.terms.name.clone(),
            }),
            RulesOutcome::Failed
            | RulesOutcome::Held
            | RulesOutcome::Filtered
            | RulesOutcome::Dropped
            | RulesOutcome::TooDeep => None,
        };
        self.happened(memory, input)
    }

    fn happened(&self, memory: SensorMemory, input: Option<EngineInput>) -> SensorTransition {
        SensorTransition {
            sensor: self.terms.uid.clone(),
            memory,
            input,
            files: Vec::new(),
        }
    }

    fn report(&self, memory: &SensorMemory) -> SensorReport {
        let state = &memory.rules;
        let invalid = self.compiled.as_ref().and_then(|compiled| compiled.as_ref().err());
        SensorReport {
            uid: self.terms.uid.clone(),
            generation: self.terms.generation,
            totals: state.totals,
            last: state.last.as_ref().map(|last| LastEvent {
                at: last.at,
                id: last.id.clone(),
            }),
            consecutive_failures: state
                .consecutive_failures
                .max(i64::from(memory.watch_problem.is_some())),
            failure: invalid
                .or(memory.watch_problem.as_ref())
                .or(state.failure.as_ref())
                .cloned()
                .or_else(|| memory.waiting.failure()),
            next_attempt_at: self.next_tick(memory),
        }
    }
}

fn sensed(uid: &str, name: &str, event: SensorEvent) -> SensedEvent {
    SensedEvent {
        id: if event.outbox.is_empty() {
            format!("{uid}/{}", event.seq)
        } else {
            format!("{uid}/{}/{}", event.outbox, event.seq)
        },
        sensor: name.into(),
        at: event.at,
        updates: event
            .updates
            .into_iter()
            .map(|update| (update.field, update.value))
            .collect(),
        notices: event
            .notifications
            .into_iter()
            .map(|notice| SensedNotification {
                source: notice.source,
                priority: priority(notice.priority),
                text: match notice.text.strip_prefix(TASK_PREFIX) {
                    Some(task) if notice.is_task => task.to_owned(),
                    _ => notice.text,
                },
                is_task: notice.is_task,
            })
            .collect(),
        wakes: event.wakes,
    }
}

fn priority(priority: SignalPriority) -> notifications::NotificationPriority {
    match priority {
        SignalPriority::Low => notifications::NotificationPriority::Low,
        SignalPriority::Normal => notifications::NotificationPriority::Normal,
        SignalPriority::High => notifications::NotificationPriority::High,
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod watched_tests;
