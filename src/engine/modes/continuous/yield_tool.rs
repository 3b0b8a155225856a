//! The tool `yield`, with which an agent sets its own pace. Parses and checks its arguments.

use std::fmt::Write as _;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};

use super::matches_event;
use crate::message::{self, ToolDefinition};
use crate::modes::{LoopPace, ModeContext};
use crate::resources::{ResourceLimit, ResourceWait};
use crate::time_math;
use agentloop_support::clock::rfc3339_seconds;

pub const NAME: &str = "yield";
/// Its result in a turn that cannot set the pace.
pub const NOT_HERE: &str = "Denied: a heartbeat sets no pace. End it with an answer that calls no tool.";
/// A shorter sleep is treated as none.
pub const MIN_SLEEP: SignedDuration = SignedDuration::from_secs(1);
const MAX_EVENTS: usize = 16;
/// Maximum number of events that are listed by name.
const MAX_LISTED: usize = 64;
/// Matches any notification.
const NOTIFICATION: &str = "notification";
const MAX_NAME: usize = 128;
const MAX_REASON: usize = 500;

/// An argument that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ArgumentError {
    argument: String,
    fix: String,
}

/// The tool as offered to the model. `events`: those that can wake the loop, as far as they are known.
pub fn tool(limits: &[ResourceLimit], events: Option<&[String]>) -> ToolDefinition {
    let parameters = json!({
        "type": "object",
        "properties": {
            "sleep": {"type": "number", "minimum": 0, "description": "Seconds to sleep; less than 1 continues at once."},
            "until": {"type": "string", "description": "Instead of sleep: a time such as 2026-01-31T08:00:00Z."},
            "wake_early_if": {
                "type": "array", "items": {"type": "string"}, "maxItems": MAX_EVENTS,
                "description": wakes(limits, events),
            },
            "reason": {"type": "string", "description": "Why, in a few words; repeated to you when you wake."},
            "mode": {
                "type": "string", "enum": ["continue", "sleep", "shutdown"],
                "description": "shutdown ends the loop for good: only a person can start it again. Default: sleep when \
                                `sleep` or `until` is given, else continue.",
            },
        },
        "additionalProperties": false,
    });
    ToolDefinition {
        name: NAME.into(),
        description:
            "Ends the turn and sets when the next one begins: at once, after a sleep, or never. Call it alone: \
                      results of other calls in the same answer reach you only after the sleep."
                .into(),
        parameters,
    }
}

/// The allowed values of `wake_early_if`, for the model.
fn wakes(limits: &[ResourceLimit], events: Option<&[String]>) -> String {
    let mut text = "What ends the sleep early: ".to_owned();
    match events {
        None => text.push_str("sensor/<name>, signal/<sensor>/<signal>, "),
        Some(events) => {
            for name in events.iter().take(MAX_LISTED) {
                text.push_str(name);
                text.push_str(", ");
            }
            let rest = events.len().saturating_sub(MAX_LISTED);
            if rest > 0 {
                let _ = write!(
                    text,
                    "{rest} more of the forms sensor/<name> and signal/<sensor>/<signal>, "
                );
            }
        }
    }
    text.push_str("notification (any).");
    let mut resources: Vec<String> = limits.iter().map(|limit| limit.resource.to_string()).collect();
    resources.sort_unstable();
    resources.dedup();
    for resource in resources {
        let _ = write!(
            text,
            " resource/{resource}/<n>: the rate limit leaves n {resource} again."
        );
    }
    text
}

/// Parses a call: the requested pace and the text of the result, or the text of an error that says how to fix the call.
pub fn read(arguments: &str, around: &ModeContext<'_>) -> Result<(LoopPace, String), String> {
    parse(arguments, around).map_err(|refused| {
        let ArgumentError { argument, fix } = refused;
        json!({"error": "invalid argument", "argument": argument, "fix": fix}).to_string()
    })
}

/// The result if the sleep begins only once the other calls of the same answer are done. `None`: the same result.
pub fn result_after_runs(pace: &LoopPace) -> Option<String> {
    match pace {
        LoopPace::Sleep { wait, .. } => Some(format!(
            "Sleeping for {} s once the other calls of this answer are done.",
            wait.as_secs()
        )),
        LoopPace::Continue | LoopPace::Shutdown | LoopPace::Finish { .. } | LoopPace::CheckConfidence { .. } => None,
    }
}

fn parse(arguments: &str, around: &ModeContext<'_>) -> Result<(LoopPace, String), ArgumentError> {
    let (settings, now) = (around.settings, around.now);
    let arguments = object(arguments)?;
    let sleep = seconds(&arguments)?.or(until(&arguments, now)?);
    let wake_early_if = events(&arguments, around)?;
    let reason = text(&arguments, "reason")?.unwrap_or_default();
    let asleep = match text(&arguments, "mode")?.as_deref() {
        Some("shutdown") if !around.silent_servers.is_empty() => {
            let silent = around.silent_servers.join(", ");
            let fix = format!("not now: tools are missing, since these servers have not answered yet: {silent}; sleep");
            return Err(refused("mode", fix));
        }
        Some("shutdown") => return Ok((LoopPace::Shutdown, "The loop shuts down.".to_owned())),
        Some("continue") => false,
        Some("sleep") => true,
        None => sleep.is_some(),
        Some(_) => return Err(refused("mode", "use one of continue, sleep, shutdown")),
    };
    let asked = sleep.unwrap_or(settings.max_sleep);
    if !asleep || asked < MIN_SLEEP {
        return Ok((LoopPace::Continue, "The next turn begins at once.".to_owned()));
    }
    let wait = asked.min(settings.max_sleep);
    let pace = LoopPace::Sleep {
        wait,
        wake_early_if,
        reason: reason.chars().take(MAX_REASON).collect(),
    };
    let shortened = if wait < asked {
        format!(" Shortened to the longest sleep, {} s.", wait.as_secs())
    } else {
        String::new()
    };
    let until = rfc3339_seconds(time_math::after(now, wait));
    Ok((pace, format!("Sleeping until {until}.{shortened}")))
}

fn refused(argument: &str, fix: impl Into<String>) -> ArgumentError {
    ArgumentError {
        argument: argument.to_owned(),
        fix: fix.into(),
    }
}

/// The arguments by name; models write absent ones as null.
fn object(arguments: &str) -> Result<Map<String, Value>, ArgumentError> {
    let Some(mut object) = message::arguments(arguments) else {
        return Err(refused(
            "(all)",
            "write the arguments as one JSON object, such as {\"sleep\": 30}",
        ));
    };
    object.retain(|_, value| !value.is_null());
    let known = ["sleep", "until", "wake_early_if", "reason", "mode"];
    match object.keys().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(refused(
            &name.chars().take(MAX_NAME).collect::<String>(),
            format!("there is no such argument; use {}", known.join(", ")),
        )),
        None => Ok(object),
    }
}

fn seconds(arguments: &Map<String, Value>) -> Result<Option<SignedDuration>, ArgumentError> {
    let Some(value) = arguments.get("sleep") else {
        return Ok(None);
    };
    match value.as_f64() {
        Some(seconds) if seconds.is_finite() && seconds >= 0.0 => Ok(Some(
            SignedDuration::try_from_secs_f64(seconds).unwrap_or(SignedDuration::MAX),
        )),
        _ => Err(refused("sleep", "write a number of seconds, 0 or more")),
    }
}

/// The wait until a time; zero if it has passed.
fn until(arguments: &Map<String, Value>, now: Timestamp) -> Result<Option<SignedDuration>, ArgumentError> {
    let Some(text) = text(arguments, "until")? else {
        return Ok(None);
    };
    if arguments.contains_key("sleep") {
        return Err(refused("until", "give either sleep or until"));
    }
    let fix = "write a time with its offset from UTC, such as 2026-01-31T08:00:00Z";
    let moment: Timestamp = text.parse().map_err(|_| refused("until", fix))?;
    Ok(Some(moment.duration_since(now).max(SignedDuration::ZERO)))
}

fn text(arguments: &Map<String, Value>, name: &str) -> Result<Option<String>, ArgumentError> {
    match arguments.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(refused(name, "write a string")),
    }
}

fn events(arguments: &Map<String, Value>, around: &ModeContext<'_>) -> Result<Vec<String>, ArgumentError> {
    let fix = "write a list of at most 16 event names: sensor/<name>, signal/<sensor>/<signal>, notification, \
               or a bare name of a-z, 0-9, '.', '-' and '/'";
    let Some(value) = arguments.get("wake_early_if") else {
        return Ok(Vec::new());
    };
    let Some(list) = value.as_array().filter(|list| list.len() <= MAX_EVENTS) else {
        return Err(refused("wake_early_if", fix));
    };
    list.iter()
        .map(|name| match name.as_str() {
            Some(name) if name.starts_with("resource/") => {
                check_resource_wait(name, &around.settings.rate_limits).map(|()| name.to_owned())
            }
            Some(name) if is_event_name(name) => exists(name, around.wake_events).map(|()| name.to_owned()),
            _ => Err(refused("wake_early_if", fix)),
        })
        .collect()
}

/// Checks that an event of this name can occur: a sleep that waits for a misspelt one would last to its end.
fn exists(name: &str, events: Option<&[String]>) -> Result<(), ArgumentError> {
    let Some(events) = events else {
        return Ok(());
    };
    if name == NOTIFICATION || events.iter().any(|event| matches_event(name, event)) {
        return Ok(());
    }
    let known = events.iter().map(String::as_str).take(MAX_LISTED).chain([NOTIFICATION]);
    let known: Vec<&str> = known.collect();
    let fix = format!(
        "there is no event {name}; events that can wake you: {}",
        known.join(", ")
    );
    Err(refused("wake_early_if", fix))
}

/// Checks that a wait for room can end under the configured limits.
fn check_resource_wait(name: &str, limits: &[ResourceLimit]) -> Result<(), ArgumentError> {
    let fix = "write resource/LLMCalls/<n>, resource/LLMTokens/<n> or resource/Actions/<n>, with n of 1 or more";
    let (resource, amount) = ResourceWait::read(name)
        .ok_or_else(|| refused("wake_early_if", fix))?
        .parts();
    let largest = limits
        .iter()
        .filter(|limit| limit.resource == resource)
        .map(|limit| limit.amount)
        .min();
    match largest {
        Some(largest) if amount <= largest => Ok(()),
        Some(largest) => Err(refused(
            "wake_early_if",
            format!("the rate limit allows at most {largest} {resource}"),
        )),
        None => Err(refused(
            "wake_early_if",
            format!("no rate limit is set for {resource}: sleep without it"),
        )),
    }
}

fn is_event_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-/".contains(c);
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(allowed) {
        return false;
    }
    let parts: Vec<&str> = name.split('/').collect();
    let complete = parts.iter().all(|part| !part.is_empty());
    match parts[0] {
        "sensor" if parts.len() > 1 => complete && parts.len() == 2,
        "signal" if parts.len() > 1 => complete && parts.len() == 3,
        _ => complete,
    }
}
