//! The rules of one Sensor: what becomes of what it hears.
//!
//! Pure: the state comes in and goes out, time comes in. Owns sameness, pace, fields, signals and notifications, in this
//! order; each event that is heard counts in exactly one total, but for one that waits. Knows no source.

use jiff::{SignedDuration, Timestamp};
use ring::digest::{SHA256, digest};
use serde_json::Value;

use super::delivery::{Event, FieldValue, Notice};
use super::expression::{Allowance, Expression, Variables};
use super::signals::{Holds, Seen, Signal};
use super::state::Held;
pub use super::state::{Last, State};
use super::trial::{Question, Trial, most_urgent};
use super::{Compiling, Invalid, Mistakes, expanded};
use crate::api::SensorSpec;
use crate::api::sensor::{Gate, Priority};

/// Most levels of a payload.
pub const MOST_DEPTH: usize = 32;
/// Most bytes of a field's value, as JSON.
pub const MOST_VALUE_BYTES: usize = 8 * 1024;
/// Most bytes of a notification.
pub const MOST_TEXT_BYTES: usize = 2 * 1024;
/// Most bytes of a notification as a text of JSON.
pub const MOST_ESCAPED_BYTES: usize = 2 * MOST_TEXT_BYTES;
/// What a task begins with.
const TASK: &str = "Task: ";
/// What ends a text that was longer.
const CUT: &str = " [cut]";

/// The compiled rules of a Sensor.
#[derive(Clone, Debug)]
pub struct Rules {
    name: String,
    updates: Vec<Update>,
    signals: Vec<Signal>,
    text: Option<Text>,
    /// Notifications are tasks: an event gives one at most.
    is_task: bool,
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

/// What a notification says.
#[derive(Clone, Debug)]
struct Text {
    field: &'static str,
    expression: Expression,
}

/// What came of an event that was heard.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It takes effect.
    Accepted(Box<Event>),
    /// It waits for the end of `minIntervalMilliseconds`, unless a newer one comes before.
    Held,
    /// It was no news.
    Filtered,
    /// It was beyond a limit.
    Dropped,
    /// It has more than [`MOST_DEPTH`] levels; counted as dropped.
    TooDeep,
    /// It was not understood; [`State::failure`] says why.
    Failed,
}

impl Rules {
    /// Compiles the rules of a spec, for a Sensor of this name.
    pub fn compile(name: &str, spec: &SensorSpec) -> Result<Self, Mistakes> {
        let (mut compiling, mut allowance) = (Compiling::default(), Allowance::default());
        let updates: Vec<_> = (spec.updates.iter().enumerate())
            .filter_map(|(place, update)| {
                let value = compiled(format!("spec.updates[{place}].value"), &update.value, &mut allowance);
                let (field, value) = (update.field.clone(), compiling.take(value)?);
                Some(Update { field, place, value })
            })
            .collect();
        let signals: Vec<_> = (spec.signals.iter().enumerate())
            .filter_map(|(place, signal)| compiling.take(Signal::compile(place, signal, &mut allowance)))
            .collect();
        let text = text_of(spec).and_then(|(field, text)| {
            let expression = compiling.take(compiled(field.into(), text, &mut allowance))?;
            Some(Text { field, expression })
        });
        let values = updates.iter().map(|update| &update.value);
        let keeps_previous = values
            .chain(text.iter().map(|text| &text.expression))
            .any(Expression::uses_previous)
            || signals.iter().any(Signal::uses_previous);
        let milliseconds = i64::from(spec.limits.min_interval_milliseconds);
        compiling.end(|| {
            Some(Self {
                name: name.into(),
                notifies: text.is_some() || updates.is_empty(),
                keeps_previous,
                updates,
                signals,
                text,
                is_task: spec.task.is_some(),
                max_payload_bytes: usize::try_from(spec.limits.max_payload_bytes).unwrap_or(usize::MAX),
                min_interval: SignedDuration::from_millis(milliseconds),
                per_minute: spec.limits.per_minute,
            })
        })
    }

    /// Whether [`Rules::compile`] takes a spec. Holds one compiled expression at a time: a process that checks the Sensors of
    /// many tenants needs no more memory for one with many large patterns.
    pub fn check(spec: &SensorSpec) -> Result<(), Mistakes> {
        let (mut compiling, mut allowance) = (Compiling::default(), Allowance::default());
        for (place, update) in spec.updates.iter().enumerate() {
            let field = format!("spec.updates[{place}].value");
            compiling.take(compiled(field, &update.value, &mut allowance).map(drop));
        }
        for (place, signal) in spec.signals.iter().enumerate() {
            compiling.take(Signal::compile(place, signal, &mut allowance).map(drop));
        }
        if let Some((field, text)) = text_of(spec) {
            compiling.take(compiled(field.into(), text, &mut allowance).map(drop));
        }
        compiling.end(|| Some(()))
    }

    /// Hears of something: JSON, or else a text. `id` is the sender's own; without one, what says the same as the event
    /// before is no news.
    pub fn hear(&self, state: &mut State, now: Timestamp, id: Option<&str>, body: &[u8]) -> Outcome {
        self.hear_any(state, now, (id, false), body)
    }

    /// The same for what is known to be no repeat.
    pub fn hear_news(&self, state: &mut State, now: Timestamp, id: Option<&str>, body: &[u8]) -> Outcome {
        self.hear_any(state, now, (id, true), body)
    }

    fn hear_any(&self, state: &mut State, now: Timestamp, (id, is_news): (Option<&str>, bool), body: &[u8]) -> Outcome {
        self.heed_clock(state, now);
        if body.len() > self.max_payload_bytes {
            return dropped(state);
        }
        let Ok(text) = std::str::from_utf8(body) else {
            return failed(state, "what came is neither JSON nor text in UTF-8".into());
        };
        if expanded::is_too_large(text) {
            let most = expanded::MOST_BYTES / (1024 * 1024);
            return failed(
                state,
                format!(
                    "what came takes more than {most} MiB of memory: have the source say less, or lower limits.maxPayloadBytes"
                ),
            );
        }
        let payload: Value = match serde_json::from_str(text) {
            Ok(payload) => payload,
            // Deeper than the parser goes: more so than is allowed, and no text.
            Err(error) if error.to_string().starts_with("recursion limit exceeded") => return too_deep(state),
            Err(_) => text.into(),
        };
        if is_deep(&payload, MOST_DEPTH) {
            return too_deep(state);
        }
        let heard = Held {
            id: id.map_or_else(|| content_id(&payload), str::to_owned),
            own_id: id.is_some() && !is_news,
            is_news,
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
                Outcome::Accepted(Box::new(event))
            }
            Err(invalid) => failed(state, invalid.to_string()),
        }
    }

    /// What an event does.
    fn event(&self, state: &State, now: Timestamp, heard: &Held) -> Result<Event, Invalid> {
        let variables = Variables::new(&heard.payload, state.previous.as_ref(), now);
        let seen = self.signals.iter().map(|signal| signal.seen(state, &variables));
        let seen = seen.collect::<Result<Vec<_>, _>>()?;
        let (questions, mut notifications) = self.notices(&seen, &variables, &heard.payload)?;
        if self.is_task {
            notifications = most_urgent(notifications).into_iter().collect();
        }
        let writes = |seen: &Seen<'_>| seen.holds != Holds::No || seen.signal.gate == Gate::Notify;
        let mut updates = Vec::new();
        if seen.iter().all(writes) {
            let values = self.updates.iter().map(|update| update.value(&variables));
            updates = values.collect::<Result<_, _>>()?;
        }
        let trial = (!questions.is_empty()).then(|| {
            let gated = questions.iter().any(|question| question.gate != Gate::Notify);
            Trial {
                data: Trial::data(&heard.payload),
                updates: if gated {
                    std::mem::take(&mut updates)
                } else {
                    Vec::new()
                },
                task: self.is_task,
                questions,
            }
        });
        let held = seen.iter().filter(|seen| seen.holds == Holds::Yes);
        let held = held.map(|seen| seen.signal.event(&self.name));
        Ok(Event {
            seq: state.seq + 1,
            id: heard.id.clone(),
            outbox: String::new(),
            at: now,
            updates,
            notifications,
            wakes: std::iter::once(self.source()).chain(held).collect(),
            trial,
        })
    }

    /// What is asked of an event, and what it tells already.
    fn notices(
        &self,
        seen: &[Seen<'_>],
        variables: &Variables,
        payload: &Value,
    ) -> Result<(Vec<Question>, Vec<Notice>), Invalid> {
        let notice = |source, priority| {
            let text = self.text(variables, payload)?;
            Ok::<_, Invalid>(Notice { source, text, priority })
        };
        let (mut questions, mut notices) = (Vec::new(), Vec::new());
        for Seen { signal, holds } in seen {
            let told = match holds {
                // Whoever waits for the signal is not to wake without it.
                Holds::Asked => Some(self.source()),
                Holds::Yes => Some(signal.event(&self.name)),
                Holds::No => (signal.gate == Gate::Update).then(|| self.source()),
            };
            let told = told.filter(|_| signal.notify);
            let told = told.map(|source| notice(source, signal.priority)).transpose()?;
            if *holds == Holds::Asked {
                questions.extend(signal.question(&self.name, told));
            } else {
                notices.extend(told);
            }
        }
        if self.signals.is_empty() && self.notifies {
            notices.push(notice(self.source(), Priority::Normal)?);
        }
        Ok((questions, notices))
    }

    fn source(&self) -> String {
        format!("sensor/{}", self.name)
    }

    fn text(&self, variables: &Variables, payload: &Value) -> Result<String, Invalid> {
        let Some(Text { field, expression }) = &self.text else {
            return Ok(cut(payload.to_string()));
        };
        let invalid = |detail: String| invalid((*field).into(), &detail);
        match expression
            .evaluate(variables)
            .map_err(|failure| invalid(failure.to_string()))?
        {
            Value::String(text) if self.is_task => Ok(cut(format!("{TASK}{text}"))),
            Value::String(text) => Ok(cut(text)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                Err(invalid("is no text: string() or json() makes one".into()))
            }
        }
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
            if signal.cooldown.is_positive() && event.wakes.contains(&signal.event(&self.name)) {
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

pub(super) fn compiled(field: String, text: &str, allowance: &mut Allowance) -> Result<Expression, Invalid> {
    Expression::compile_within(text, allowance).map_err(|detail| Invalid { field, detail })
}

/// What a notification or a task says, and the field that says so.
fn text_of(spec: &SensorSpec) -> Option<(&'static str, &String)> {
    let task = spec.task.as_ref().map(|found| ("spec.task.prompt", &found.prompt));
    task.or_else(|| {
        let text = spec.notification.as_ref();
        text.map(|found| ("spec.notification.text", &found.text))
    })
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

fn too_deep(state: &mut State) -> Outcome {
    let _ = dropped(state);
    Outcome::TooDeep
}

fn failed(state: &mut State, failure: String) -> Outcome {
    state.totals.errors += 1;
    state.consecutive_failures += 1;
    state.failure = Some(failure);
    Outcome::Failed
}

/// Whether it came before: under the sender's own id, or as what the newest one says.
fn is_known(state: &State, heard: &Held) -> bool {
    if heard.is_news {
        return false;
    }
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

/// As much of a text as a notification may have. Control characters become six bytes each in JSON, in which a notification
/// travels: what is mostly those is cut earlier.
fn cut(mut text: String) -> String {
    let most = MOST_TEXT_BYTES - CUT.len();
    let (mut end, mut escaped) = (0, 0);
    for (place, character) in text.char_indices() {
        escaped += escaped_length(character);
        let after = place + character.len_utf8();
        if after <= most && escaped <= MOST_ESCAPED_BYTES - CUT.len() {
            end = after;
        }
    }
    if text.len() > MOST_TEXT_BYTES || escaped > MOST_ESCAPED_BYTES {
        text.truncate(end);
        text.push_str(CUT);
    }
    text
}

/// Bytes of a character in a text of JSON.
fn escaped_length(character: char) -> usize {
    match character {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        other => other.len_utf8(),
    }
}

#[cfg(test)]
mod tests;
