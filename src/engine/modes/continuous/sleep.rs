//! The sleep that an agent chose: how it begins, and the text about its end.

use jiff::SignedDuration;

use super::yield_tool::MIN_SLEEP;
use crate::modes::{ModeContext, WakeTrigger};
use crate::resources::ResourceWait;
use crate::snapshot::ChosenSleep;
use crate::time_math;
use agentloop_support::clock::rfc3339_seconds;

/// If the room that it waits for is available already, the sleep has the shortest length.
pub fn begin(
    wait: SignedDuration,
    wake_early_if: Vec<String>,
    reason: String,
    context: &ModeContext<'_>,
) -> ChosenSleep {
    let now = context.now;
    let rooms = wake_early_if.iter().filter_map(|name| ResourceWait::read(name));
    let (used, limits) = (context.used, &context.settings.rate_limits);
    let shortest = time_math::after(now, MIN_SLEEP);
    let room_at = rooms
        .map(|wait| wait.comes_at(used, limits, now).map_or(shortest, |at| at.max(shortest)))
        .min();
    ChosenSleep {
        until: time_math::after(now, wait),
        length: wait,
        wake_early_if,
        room_at,
        reason,
    }
}

/// The cause of the turn after a sleep that ended for this reason.
pub fn cause(why: &str, sleep: &ChosenSleep) -> String {
    let reason = if sleep.reason.is_empty() {
        String::new()
    } else {
        format!(", you slept because: {}", sleep.reason)
    };
    format!("{why} (it was to last until {}{reason})", rfc3339_seconds(sleep.until))
}

/// Whether this ends the sleep early.
pub fn is_ended_by(sleep: &ChosenSleep, trigger: WakeTrigger<'_>) -> bool {
    match trigger {
        WakeTrigger::Event(name) => sleep.wake_early_if.iter().any(|wanted| matches_event(wanted, name)),
        WakeTrigger::Urgent | WakeTrigger::Request => true,
    }
}

/// Whether an event is the wanted one. A bare name matches the Sensor or the signal of that name.
pub fn matches_event(wanted: &str, event: &str) -> bool {
    if wanted == event {
        return true;
    }
    match event.split('/').collect::<Vec<_>>()[..] {
        ["sensor", sensor] => wanted == sensor,
        ["signal", _, signal] => wanted == signal,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::matches_event;

    #[test]
    fn a_bare_name_matches_a_sensor_or_a_signal_of_that_name_and_nothing_else() {
        assert!(matches_event("spike", "sensor/spike"));
        assert!(matches_event("spike", "signal/prices/spike"));
        assert!(matches_event("spike", "spike"));
        assert!(!matches_event("prices", "signal/prices/spike"));
        assert!(!matches_event("sensor/spike", "signal/prices/spike"));
        assert!(!matches_event("chat", "notification"));
    }
}
