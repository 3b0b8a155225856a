//! The rules of one Sensor: what becomes of what it hears.
//!
//! Pure: the state comes in and goes out, time comes in. Owns sameness, pace, fields, signals and notifications, in this
//! order; each event that is heard counts in exactly one total, but for one that waits. Knows no source.

use jiff::{SignedDuration, Timestamp};
use ring::digest::{SHA256, digest};
use serde_json::Value;

use super::Invalid;
use super::delivery::{Event, FieldValue, Notice};
use super::expression::{Expression, Variables};
use super::state::Held;
pub use super::state::{Last, State};
use crate::api::SensorSpec;
use crate::api::sensor::{Gate, Priority};

/// Most levels of a payload.
pub const MOST_DEPTH: usize = 32;
/// Most bytes of a field's value, as JSON.
pub const MOST_VALUE_BYTES: usize = 8 * 1024;
/// Most bytes of a notification.
pub const MOST_TEXT_BYTES: usize = 2 * 1024;
/// What ends a text that was longer.
const CUT: &str = " [cut]";

/// The compiled rules of a Sensor.
#[derive(Clone, Debug)]
pub struct Rules {
    name: String,
    updates: Vec<Update>,
    signals: Vec<Signal>,
    text: Option<Expression>,
    /// Without signals: whether an event gives a notification.
    notifies: bool,
    keeps_previous: bool,
    max_payload_bytes: usize,
    min_interval: SignedDuration,
    per_minute: u32,
}

#[derive(Clone, Debug)]
struct Update {
    field: String,
    place: usize,
    value: Expression,
}

#[derive(Clone, Debug)]
struct Signal {
    name: String,
    place: usize,
    when: Expression,
    gate: Gate,
    notify: bool,
    priority: Priority,
    cooldown: SignedDuration,
}

/// What came of an event that was heard.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It takes effect.
    Accepted(Event),
    /// It waits for the end of `minIntervalMilliseconds`, unless a newer one comes before.
    Held,
    /// It was no news.
    Filtered,
    /// It was beyond a limit.
    Dropped,
    /// It was not understood; [`State::failure`] says why.
    Failed,
}

/// What a signal says of an event.
struct Seen<'a> {
    signal: &'a Signal,
    holds: bool,
}

impl Rules {
    /// Compiles the rules of a spec, for a Sensor of this name.
    pub fn compile(name: &str, spec: &SensorSpec) -> Result<Self, Invalid> {
        let updates = (spec.updates.iter().enumerate())
            .map(|(place, update)| {
                let value = compiled(format!("spec.updates[{place}].value"), &update.value)?;
                let field = update.field.clone();
                Ok(Update { field, place, value })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let signals = (spec.signals.iter().enumerate())
            .map(|(place, signal)| {
                Ok(Signal {
                    name: signal.name.clone(),
                    place,
                    when: compiled(format!("spec.signals[{place}].when"), &signal.when)?,
                    gate: signal.gate,
                    notify: signal.notify,
                    priority: signal.priority,
                    cooldown: SignedDuration::from_secs(signal.cooldown_seconds.into()),
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let text = (spec.notification.iter())
            .map(|notification| compiled("spec.notification.text".into(), &notification.text))
            .next()
            .transpose()?;
        let expressions = updates.iter().map(|update| &update.value);
        let expressions = expressions
            .chain(signals.iter().map(|signal| &signal.when))
            .chain(&text);
        let keeps_previous = expressions.into_iter().any(Expression::uses_previous);
        let milliseconds = i64::from(spec.limits.min_interval_milliseconds);
        Ok(Self {
            name: name.into(),
            notifies: text.is_some() || updates.is_empty(),
            keeps_previous,
            updates,
            signals,
            text,
            max_payload_bytes: usize::try_from(spec.limits.max_payload_bytes).unwrap_or(usize::MAX),
            min_interval: SignedDuration::from_millis(milliseconds),
            per_minute: spec.limits.per_minute,
        })
    }

    /// Hears of something: JSON, or else a text. `id` is the sender's own; without one, what says the same as the event
    /// before is no news.
    pub fn hear(&self, state: &mut State, now: Timestamp, id: Option<&str>, body: &[u8]) -> Outcome {
        self.heed_clock(state, now);
        if body.len() > self.max_payload_bytes {
            return dropped(state);
        }
        let Ok(text) = std::str::from_utf8(body) else {
            return failed(state, "what came is neither JSON nor text in UTF-8".into());
        };
        let payload: Value = serde_json::from_str(text).unwrap_or_else(|_| text.into());
        if is_deep(&payload, MOST_DEPTH) {
            return dropped(state);
        }
        let heard = Held {
            id: id.map_or_else(|| content_id(&payload), str::to_owned),
            own_id: id.is_some(),
            payload,
        };
        if is_known(state, &heard) {
            state.totals.filtered += 1;
            return Outcome::Filtered;
        }
        if self.free_from(state).is_some_and(|free| now < free) {
            if state.held.replace(heard).is_some() {
                state.totals.dropped += 1;
            }
            return Outcome::Held;
        }
        if state.held.take().is_some() {
            state.totals.dropped += 1;
        }
        self.accept(state, now, heard)
    }

    /// When an event that waits is to be taken up by [`Rules::take_up`].
    #[must_use]
    pub fn waits_until(&self, state: &State) -> Option<Timestamp> {
        state.held.as_ref()?;
        Some(self.free_from(state).unwrap_or(Timestamp::MIN))
    }

    /// Takes up the event that waits, once it has waited long enough.
    pub fn take_up(&self, state: &mut State, now: Timestamp) -> Option<Outcome> {
        self.heed_clock(state, now);
        if self.waits_until(state)? > now {
            return None;
        }
        let held = state.held.take()?;
        if is_known(state, &held) {
            state.totals.filtered += 1;
            return Some(Outcome::Filtered);
        }
        Some(self.accept(state, now, held))
    }

    /// The source heard nothing, and why; never text of a payload.
    pub fn not_heard(state: &mut State, failure: String) {
        let _ = failed(state, failure);
    }

    /// When the next event finds room in the limits of time: one that could wait need not be held or dropped.
    #[must_use]
    pub fn room_from(&self, state: &State, now: Timestamp) -> Timestamp {
        let free = self.free_from(state).unwrap_or(Timestamp::MIN);
        free.max(state.room_from(now, self.per_minute))
    }

    /// The clock may have been set back.
    pub fn heed_clock(&self, state: &mut State, now: Timestamp) {
        let cooldowns = self.signals.iter().map(|signal| signal.cooldown);
        state.heed_clock(now, cooldowns.max().unwrap_or_default());
    }

    /// When the next event may be accepted.
    fn free_from(&self, state: &State) -> Option<Timestamp> {
        let last = state.last.as_ref().filter(|_| self.min_interval.is_positive())?;
        Some(last.at.checked_add(self.min_interval).unwrap_or(Timestamp::MAX))
    }

    fn accept(&self, state: &mut State, now: Timestamp, heard: Held) -> Outcome {
        if state.recent(now) >= self.per_minute {
            return dropped(state);
        }
        match self.event(state, now, &heard) {
            Ok(event) => {
                self.note(state, now, &event, heard);
                Outcome::Accepted(event)
            }
            Err(invalid) => failed(state, invalid.to_string()),
        }
    }

    /// What an event does.
    fn event(&self, state: &State, now: Timestamp, heard: &Held) -> Result<Event, Invalid> {
        let variables = Variables::new(&heard.payload, state.previous.as_ref(), now);
        let seen = self.signals(state, &variables)?;
        let writes = |seen: &Seen<'_>| seen.holds || seen.signal.gate == Gate::Notify;
        let updates = if seen.iter().all(writes) {
            self.updates
                .iter()
                .map(|update| update.value(&variables))
                .collect::<Result<_, _>>()?
        } else {
            Vec::new()
        };
        let sensor = format!("sensor/{}", self.name);
        let signal = |seen: &Seen<'_>| format!("signal/{}/{}", self.name, seen.signal.name);
        let mut notifications = Vec::new();
        for seen in &seen {
            if seen.signal.notify && (seen.holds || seen.signal.gate == Gate::Update) {
                notifications.push(Notice {
                    // Whoever waits for the signal is not to wake without it.
                    source: if seen.holds { signal(seen) } else { sensor.clone() },
                    text: self.text(&variables, &heard.payload)?,
                    priority: seen.signal.priority,
                });
            }
        }
        if self.signals.is_empty() && self.notifies {
            notifications.push(Notice {
                source: sensor.clone(),
                text: self.text(&variables, &heard.payload)?,
                priority: Priority::Normal,
            });
        }
        let held = seen.iter().filter(|seen| seen.holds).map(signal);
        Ok(Event {
            seq: state.seq + 1,
            id: heard.id.clone(),
            at: now,
            updates,
            notifications,
            wakes: std::iter::once(sensor).chain(held).collect(),
        })
    }

    fn signals(&self, state: &State, variables: &Variables) -> Result<Vec<Seen<'_>>, Invalid> {
        self.signals
            .iter()
            .map(|signal| {
                let field = || format!("spec.signals[{}].when", signal.place);
                let value = signal
                    .when
                    .evaluate(variables)
                    .map_err(|failure| invalid(field(), &failure))?;
                let when = value
                    .as_bool()
                    .ok_or_else(|| invalid(field(), &"is neither true nor false"))?;
                let holds = when && !state.cooldowns.contains_key(&signal.name);
                Ok(Seen { signal, holds })
            })
            .collect()
    }

    fn text(&self, variables: &Variables, payload: &Value) -> Result<String, Invalid> {
        let field = || "spec.notification.text".to_owned();
        let text = match &self.text {
            None => payload.to_string(),
            Some(text) => match text.evaluate(variables).map_err(|failure| invalid(field(), &failure))? {
                Value::String(text) => text,
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                    return Err(invalid(field(), &"is no text: string() or json() makes one"));
                }
            },
        };
        Ok(cut(text))
    }

    /// Remembers an event that was accepted.
    fn note(&self, state: &mut State, now: Timestamp, event: &Event, heard: Held) {
        state.seq = event.seq;
        state.totals.events += 1;
        state.totals.updates += i64::try_from(event.updates.len()).unwrap_or(i64::MAX);
        state.totals.notifications += i64::try_from(event.notifications.len()).unwrap_or(i64::MAX);
        state.consecutive_failures = 0;
        state.failure = None;
        state.count_accepted(now);
        for signal in &self.signals {
            let held = format!("signal/{}/{}", self.name, signal.name);
            if signal.cooldown.is_positive() && event.wakes.contains(&held) {
                let until = now.checked_add(signal.cooldown).unwrap_or(Timestamp::MAX);
                state.cooldowns.insert(signal.name.clone(), until);
            }
        }
        if heard.own_id {
            state.remember(key(&heard.id));
        }
        state.previous = self.keeps_previous.then_some(heard.payload);
        state.last = Some(Last { at: now, id: heard.id });
    }
}

impl Update {
    fn value(&self, variables: &Variables) -> Result<FieldValue, Invalid> {
        let field = || format!("spec.updates[{}].value", self.place);
        let value = self
            .value
            .evaluate(variables)
            .map_err(|failure| invalid(field(), &failure))?;
        let bytes = value.to_string().len();
        if bytes > MOST_VALUE_BYTES {
            let detail = format!("may have {MOST_VALUE_BYTES} bytes as JSON, and has {bytes}");
            return Err(invalid(field(), &detail));
        }
        Ok(FieldValue {
            field: self.field.clone(),
            value,
        })
    }
}

fn compiled(field: String, text: &str) -> Result<Expression, Invalid> {
    Expression::compile(text).map_err(|detail| Invalid { field, detail })
}

fn invalid(field: String, detail: &impl ToString) -> Invalid {
    Invalid {
        field,
        detail: detail.to_string(),
    }
}

fn dropped(state: &mut State) -> Outcome {
    state.totals.dropped += 1;
    Outcome::Dropped
}

fn failed(state: &mut State, failure: String) -> Outcome {
    state.totals.errors += 1;
    state.consecutive_failures += 1;
    state.failure = Some(failure);
    Outcome::Failed
}

/// Whether it came before: under the sender's own id, or as what the newest one says.
fn is_known(state: &State, heard: &Held) -> bool {
    let waits = state.held.as_ref().is_some_and(|held| held.id == heard.id);
    if heard.own_id {
        return waits || state.remembered.contains(&key(&heard.id));
    }
    match &state.held {
        Some(_) => waits,
        None => state.last.as_ref().is_some_and(|last| last.id == heard.id),
    }
}

fn content_id(payload: &Value) -> String {
    let hash = digest(&SHA256, payload.to_string().as_bytes());
    let bytes = hash.as_ref().iter().take(16);
    bytes.fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

fn key(id: &str) -> u64 {
    let hash = digest(&SHA256, id.as_bytes());
    u64::from_be_bytes(hash.as_ref().first_chunk().copied().unwrap_or_default())
}

fn is_deep(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(items) => levels == 0 || items.iter().any(|item| is_deep(item, levels - 1)),
        Value::Object(fields) => levels == 0 || fields.values().any(|field| is_deep(field, levels - 1)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn cut(mut text: String) -> String {
    if text.len() > MOST_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MOST_TEXT_BYTES - CUT.len()));
        text.push_str(CUT);
    }
    text
}

#[cfg(test)]
mod tests;
