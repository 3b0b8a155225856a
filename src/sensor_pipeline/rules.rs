//! The rules of one Sensor: turn an arrival into an event with its effects.
//!
//! Pure: state and time are passed in. Owns deduplication, rate limits, fields, signals and notifications, applied in
//! this order. Each arrival counts in exactly one total, except while it is held. Knows no source.

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::delivery::{FieldValue, SensorEvent, SensorNotification};
use super::expression::{Expression, ExpressionScope, ExpressionVariables, PatternAllowance};
use super::rules_state::HeldEvent;
pub use super::rules_state::{LastAccepted, RulesState};
use super::scored_effects::{ScoredEffects, SignalScoreRequest, most_urgent};
use super::signals::{CompiledSignal, EvaluatedSignal, SignalMatch};
use super::{FieldError, SpecError, SpecErrorCollector, parsed_size};
use agentloop_api::SensorSpec;
use agentloop_api::sensor::{SignalGate, SignalPriority};
use agentloop_support::hash::{sha256_hex, sha256_u64};

/// Maximum number of levels of nesting in a payload.
pub const MAX_DEPTH: usize = 32;
/// Maximum number of bytes of a field's value, as JSON.
pub const MAX_VALUE_BYTES: usize = 8 * 1024;
/// Maximum number of bytes of a notification.
pub const MAX_TEXT_BYTES: usize = 2 * 1024;
/// Maximum number of bytes of a notification as a JSON string.
pub const MAX_ESCAPED_BYTES: usize = 2 * MAX_TEXT_BYTES;
/// Prefix of the text of a task.
pub const TASK_PREFIX: &str = "Task: ";
/// Suffix of a truncated text.
const CUT: &str = " [cut]";

#[derive(Clone, Debug)]
pub struct SensorRules {
    name: String,
    updates: Vec<FieldUpdate>,
    signals: Vec<CompiledSignal>,
    text: Option<NotificationText>,
    /// Notifications are tasks: an event has at most one.
    is_task: bool,
    /// Whether an event of a Sensor without signals has a notification.
    notifies: bool,
    keeps_previous: bool,
    max_payload_bytes: usize,
    min_interval: SignedDuration,
    per_minute: u32,
}

#[derive(Clone, Debug)]
struct FieldUpdate {
    field: String,
    place: usize,
    value: Expression,
}

/// The text of a notification, and the field that defines it.
#[derive(Clone, Debug)]
struct NotificationText {
    field: &'static str,
    expression: Expression,
}

/// The outcome of an arrival.
#[derive(Clone, Debug, PartialEq)]
pub enum RulesOutcome {
    /// It became an event.
    Accepted(Box<SensorEvent>),
    /// It is held until `minIntervalMilliseconds` is over, unless a newer one replaces it.
    Held,
    /// It is a repeat.
    Filtered,
    /// It exceeds a limit.
    Dropped,
    /// It is nested deeper than [`MAX_DEPTH`]; counted as dropped.
    TooDeep,
    /// It could not be processed; [`RulesState::failure`] says why.
    Failed,
}

impl SensorRules {
    /// Compiles the rules of a spec, for a Sensor of this name.
    pub fn compile(name: &str, spec: &SensorSpec) -> Result<Self, SpecError> {
        let (mut compiling, mut allowance) = (SpecErrorCollector::default(), PatternAllowance::default());
        let updates: Vec<_> = (spec.updates.iter().enumerate())
            .filter_map(|(place, update)| {
                let value = compiled(format!("spec.updates[{place}].value"), &update.value, &mut allowance);
                let (field, value) = (update.field.clone(), compiling.take(value)?);
                Some(FieldUpdate { field, place, value })
            })
            .collect();
        let signals: Vec<_> = (spec.signals.iter().enumerate())
            .filter_map(|(place, signal)| compiling.take(CompiledSignal::compile(place, signal, &mut allowance)))
            .collect();
        let text = text_of(spec).and_then(|(field, text)| {
            let expression = compiling.take(compiled(field.into(), text, &mut allowance))?;
            Some(NotificationText { field, expression })
        });
        let values = updates.iter().map(|update| &update.value);
        let keeps_previous = values
            .chain(text.iter().map(|text| &text.expression))
            .any(Expression::uses_previous)
            || signals.iter().any(CompiledSignal::uses_previous);
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

    /// Whether [`SensorRules::compile`] accepts a spec. Holds one compiled expression at a time, so that the
    /// controller, which validates the Sensors of many tenants, needs little memory for a spec with many large
    /// patterns.
    pub fn check(spec: &SensorSpec) -> Result<(), SpecError> {
        let (mut compiling, mut allowance) = (SpecErrorCollector::default(), PatternAllowance::default());
        for (place, update) in spec.updates.iter().enumerate() {
            let field = format!("spec.updates[{place}].value");
            compiling.take(compiled(field, &update.value, &mut allowance).map(drop));
        }
        for (place, signal) in spec.signals.iter().enumerate() {
            compiling.take(CompiledSignal::compile(place, signal, &mut allowance).map(drop));
        }
        if let Some((field, text)) = text_of(spec) {
            compiling.take(compiled(field.into(), text, &mut allowance).map(drop));
        }
        compiling.end(|| Some(()))
    }

    /// Processes an arrival: JSON, or else a string. `id` is the sender's id; without one, an arrival with the same
    /// content as the last event is a repeat.
    pub fn process(&self, state: &mut RulesState, now: Timestamp, id: Option<&str>, body: &[u8]) -> RulesOutcome {
        self.process_any(state, now, (id, false), body)
    }

    /// The same for an arrival that is known not to be a repeat.
    pub fn process_new(&self, state: &mut RulesState, now: Timestamp, id: Option<&str>, body: &[u8]) -> RulesOutcome {
        self.process_any(state, now, (id, true), body)
    }

    fn process_any(
        &self,
        state: &mut RulesState,
        now: Timestamp,
        (id, is_news): (Option<&str>, bool),
        body: &[u8],
    ) -> RulesOutcome {
        self.apply_clock(state, now);
        if body.len() > self.max_payload_bytes {
            return dropped(state);
        }
        let Ok(text) = std::str::from_utf8(body) else {
            return failed(state, "the payload is neither JSON nor UTF-8 text".into());
        };
        if parsed_size::is_too_large(text) {
            let max = parsed_size::MAX_BYTES / (1024 * 1024);
            return failed(
                state,
                format!(
                    "the payload takes more than {max} MiB of memory: make the source send less, or lower spec.limits.maxPayloadBytes"
                ),
            );
        }
        let payload: Value = match serde_json::from_str(text) {
            Ok(payload) => payload,
            // Nested deeper than the parser's limit, which is above ours; it is JSON, not a string.
            Err(error) if error.to_string().starts_with("recursion limit exceeded") => return too_deep(state),
            Err(_) => text.into(),
        };
        if is_deep(&payload, MAX_DEPTH) {
            return too_deep(state);
        }
        let arrival = HeldEvent {
            id: id.map_or_else(|| content_id(&payload), str::to_owned),
            own_id: id.is_some() && !is_news,
            is_news,
            payload,
        };
        if is_known(state, &arrival) {
            state.totals.filtered += 1;
            return RulesOutcome::Filtered;
        }
        // At most one event is held: a newer one replaces it, and the replaced one counts as dropped.
        if self.free_from(state).is_some_and(|free| now < free) {
            if state.held.replace(arrival).is_some() {
                state.totals.dropped += 1;
            }
            return RulesOutcome::Held;
        }
        if state.held.take().is_some() {
            state.totals.dropped += 1;
        }
        self.accept(state, now, arrival)
    }

    /// When the held event is due for [`SensorRules::release_held`].
    #[must_use]
    pub fn waits_until(&self, state: &RulesState) -> Option<Timestamp> {
        state.held.as_ref()?;
        Some(self.free_from(state).unwrap_or(Timestamp::MIN))
    }

    /// Processes the [`HeldEvent`] once it is due.
    pub fn release_held(&self, state: &mut RulesState, now: Timestamp) -> Option<RulesOutcome> {
        self.apply_clock(state, now);
        if self.waits_until(state)? > now {
            return None;
        }
        let held = state.held.take()?;
        if is_known(state, &held) {
            state.totals.filtered += 1;
            return Some(RulesOutcome::Filtered);
        }
        Some(self.accept(state, now, held))
    }

    /// Records a failure of the source; `failure` never contains text of a payload.
    pub fn record_failure(state: &mut RulesState, failure: String) {
        let _ = failed(state, failure);
    }

    /// When the next event fits into the rate limits. A source that can wait until then avoids held and dropped events.
    #[must_use]
    pub fn below_limit_from(&self, state: &RulesState, now: Timestamp) -> Timestamp {
        let free = self.free_from(state).unwrap_or(Timestamp::MIN);
        free.max(state.below_limit_from(now, self.per_minute))
    }

    /// Adjusts the state if the clock was set back.
    pub fn apply_clock(&self, state: &mut RulesState, now: Timestamp) {
        let cooldowns = self.signals.iter().map(|signal| signal.cooldown);
        state.apply_clock(now, cooldowns.max().unwrap_or_default());
    }

    /// When `minIntervalMilliseconds` allows the next event.
    fn free_from(&self, state: &RulesState) -> Option<Timestamp> {
        let last = state.last.as_ref().filter(|_| self.min_interval.is_positive())?;
        Some(last.at.checked_add(self.min_interval).unwrap_or(Timestamp::MAX))
    }

    fn accept(&self, state: &mut RulesState, now: Timestamp, arrival: HeldEvent) -> RulesOutcome {
        if state.recent(now) >= self.per_minute {
            return dropped(state);
        }
        match self.event(state, now, &arrival) {
            Ok(event) => {
                self.record_event(state, now, &event, arrival);
                RulesOutcome::Accepted(Box::new(event))
            }
            Err(invalid) => failed(state, invalid.to_string()),
        }
    }

    /// The event with its effects.
    fn event(&self, state: &RulesState, now: Timestamp, arrival: &HeldEvent) -> Result<SensorEvent, FieldError> {
        let variables = ExpressionVariables::new(&arrival.payload, state.previous.as_ref(), now);
        let seen = self
            .signals
            .iter()
            .map(|signal| signal.evaluate_signal(state, &variables));
        let seen = seen.collect::<Result<Vec<_>, _>>()?;
        let (questions, mut notifications) = self.notices(&seen, &variables, &arrival.payload)?;
        if self.is_task {
            notifications = most_urgent(notifications).into_iter().collect();
        }
        let writes =
            |seen: &EvaluatedSignal<'_>| seen.holds != SignalMatch::No || seen.signal.gate == SignalGate::Notify;
        let mut updates = Vec::new();
        if seen.iter().all(writes) {
            let values = self.updates.iter().map(|update| update.value(&variables));
            updates = values.collect::<Result<_, _>>()?;
        }
        // If a score gates the updates, they move into the scored effects: the receiver writes them once it has the
        // score.
        let trial = (!questions.is_empty()).then(|| {
            let gated = questions.iter().any(|question| question.gate != SignalGate::Notify);
            ScoredEffects {
                data: ScoredEffects::data(&arrival.payload),
                updates: if gated {
                    std::mem::take(&mut updates)
                } else {
                    Vec::new()
                },
                task: self.is_task,
                questions,
            }
        });
        let held = seen.iter().filter(|seen| seen.holds == SignalMatch::Yes);
        let held = held.map(|seen| seen.signal.event(&self.name));
        Ok(SensorEvent {
            seq: state.seq + 1,
            id: arrival.id.clone(),
            outbox: String::new(),
            at: now,
            updates,
            notifications,
            wakes: std::iter::once(self.source()).chain(held).collect(),
            trial,
        })
    }

    /// The questions to the model, and the notifications that need no score.
    fn notices(
        &self,
        seen: &[EvaluatedSignal<'_>],
        variables: &ExpressionVariables,
        payload: &Value,
    ) -> Result<(Vec<SignalScoreRequest>, Vec<SensorNotification>), FieldError> {
        let notice = |source, priority| {
            let text = self.text(variables, payload)?;
            let is_task = self.is_task;
            Ok::<_, FieldError>(SensorNotification {
                source,
                text,
                priority,
                is_task,
            })
        };
        let (mut questions, mut notices) = (Vec::new(), Vec::new());
        for EvaluatedSignal { signal, holds } in seen {
            let told = match holds {
                // A loop that waits for the signal must not wake before it is scored.
                SignalMatch::Asked => Some(self.source()),
                SignalMatch::Yes => Some(signal.event(&self.name)),
                SignalMatch::No => (signal.gate == SignalGate::Update).then(|| self.source()),
            };
            let told = told.filter(|_| signal.notify);
            let told = told.map(|source| notice(source, signal.priority)).transpose()?;
            if *holds == SignalMatch::Asked {
                questions.extend(signal.question(&self.name, told));
            } else {
                notices.extend(told);
            }
        }
        if self.signals.is_empty() && self.notifies {
            notices.push(notice(self.source(), SignalPriority::Normal)?);
        }
        Ok((questions, notices))
    }

    fn source(&self) -> String {
        format!("sensor/{}", self.name)
    }

    fn text(&self, variables: &ExpressionVariables, payload: &Value) -> Result<String, FieldError> {
        let Some(NotificationText { field, expression }) = &self.text else {
            return Ok(truncate(payload.to_string()));
        };
        let invalid = |detail: String| invalid((*field).into(), &detail);
        match expression
            .evaluate(variables)
            .map_err(|failure| invalid(failure.to_string()))?
        {
            Value::String(text) if self.is_task => Ok(truncate(format!("{TASK_PREFIX}{text}"))),
            Value::String(text) => Ok(truncate(text)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                Err(invalid("is not a string: use string() or json()".into()))
            }
        }
    }

    /// Updates the state after an accepted event.
    fn record_event(&self, state: &mut RulesState, now: Timestamp, event: &SensorEvent, arrival: HeldEvent) {
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
        if arrival.own_id {
            state.remember(key(&arrival.id));
        }
        state.previous = self.keeps_previous.then_some(arrival.payload);
        state.last = Some(LastAccepted {
            at: now,
            id: arrival.id,
        });
    }
}

impl FieldUpdate {
    fn value(&self, variables: &ExpressionVariables) -> Result<FieldValue, FieldError> {
        let field = || format!("spec.updates[{}].value", self.place);
        let value = self
            .value
            .evaluate(variables)
            .map_err(|failure| invalid(field(), &failure))?;
        let bytes = value.to_string().len();
        if bytes > MAX_VALUE_BYTES {
            let detail = format!("must be at most {MAX_VALUE_BYTES} bytes as JSON, and has {bytes}");
            return Err(invalid(field(), &detail));
        }
        Ok(FieldValue {
            field: self.field.clone(),
            value,
        })
    }
}

pub(super) fn compiled(field: String, text: &str, allowance: &mut PatternAllowance) -> Result<Expression, FieldError> {
    Expression::compile_within(text, ExpressionScope::SensorEvent, allowance)
        .map_err(|detail| FieldError { field, detail })
}

/// The expression of a notification or a task, and its field.
fn text_of(spec: &SensorSpec) -> Option<(&'static str, &String)> {
    let task = spec.task.as_ref().map(|found| ("spec.task.prompt", &found.prompt));
    task.or_else(|| {
        let text = spec.notification.as_ref();
        text.map(|found| ("spec.notification.text", &found.text))
    })
}

fn invalid(field: String, detail: &impl ToString) -> FieldError {
    FieldError {
        field,
        detail: detail.to_string(),
    }
}

fn dropped(state: &mut RulesState) -> RulesOutcome {
    state.totals.dropped += 1;
    RulesOutcome::Dropped
}

fn too_deep(state: &mut RulesState) -> RulesOutcome {
    let _ = dropped(state);
    RulesOutcome::TooDeep
}

fn failed(state: &mut RulesState, failure: String) -> RulesOutcome {
    state.totals.errors += 1;
    state.consecutive_failures += 1;
    state.failure = Some(failure);
    RulesOutcome::Failed
}

/// Whether it is a repeat: by the sender's id, or by the content of the newest arrival.
fn is_known(state: &RulesState, arrival: &HeldEvent) -> bool {
    if arrival.is_news {
        return false;
    }
    let waits = state.held.as_ref().is_some_and(|held| held.id == arrival.id);
    if arrival.own_id {
        return waits || state.remembered.contains(&key(&arrival.id));
    }
    match &state.held {
        Some(_) => waits,
        None => state.last.as_ref().is_some_and(|last| last.id == arrival.id),
    }
}

fn content_id(payload: &Value) -> String {
    format!("sha256:{}", sha256_hex(payload.to_string(), 16))
}

fn key(id: &str) -> u64 {
    sha256_u64(id)
}

fn is_deep(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(items) => levels == 0 || items.iter().any(|item| is_deep(item, levels - 1)),
        Value::Object(fields) => levels == 0 || fields.values().any(|field| is_deep(field, levels - 1)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Truncates a text to the size of a notification. Control characters take six bytes each in JSON, so text that
/// consists mostly of those is cut earlier.
fn truncate(mut text: String) -> String {
    let max = MAX_TEXT_BYTES - CUT.len();
    let (mut end, mut escaped) = (0, 0);
    for (place, character) in text.char_indices() {
        escaped += escaped_length(character);
        let after = place + character.len_utf8();
        if after <= max && escaped <= MAX_ESCAPED_BYTES - CUT.len() {
            end = after;
        }
    }
    if text.len() > MAX_TEXT_BYTES || escaped > MAX_ESCAPED_BYTES {
        text.truncate(end);
        text.push_str(CUT);
    }
    text
}

/// Bytes of a character in a JSON string.
fn escaped_length(character: char) -> usize {
    match character {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        other => other.len_utf8(),
    }
}

#[cfg(test)]
mod tests;
