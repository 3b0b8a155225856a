//! Snapshots of early journals. Converts their JSON before it is read.
//!
//! They had no [`CallSlot`](super::model_call::CallSlot): the state of a call stood in the turn, in the pre-check or in the
//! score that it was for. They had no [`LoopCounts`](agentloop_api::usage_counts::LoopCounts) either: each count stood alone. And
//! what leads to cool-downs had fields of its own instead of [`Streaks`](super::pauses::cooldowns::Streaks).

use jiff::Timestamp;
use serde_json::{Value, json};

/// The same snapshot as it is stored now.
pub fn convert(snapshot: Value) -> Value {
    with_streaks(with_counts(with_call_slot(snapshot)))
}

/// The same snapshot with what leads to cool-downs in one map.
fn with_streaks(mut snapshot: Value) -> Value {
    let cooling = |reason| snapshot.pointer(&format!("/reasons/{reason}")).is_some();
    let field = |name: &str| {
        let counters = snapshot.get("counters");
        counters.and_then(|counters| counters.get(name)?.as_u64()).unwrap_or(0)
    };
    // Refused turns brought a cool-down each, from the second in a row on.
    let streaks = json!({
        "ConsecutiveErrors": {
            "count": field("errors"), "cooldowns": field("error_cooldowns"), "cooling": cooling("ConsecutiveErrors"),
        },
        "CrashLoop": {"count": 0, "cooldowns": field("crash_cooldowns"), "cooling": cooling("CrashLoop")},
        "ModelRefused": {
            "count": field("refusals"), "cooldowns": field("refusals").saturating_sub(1), "cooling": cooling("ModelRefused"),
        },
    });
    if let Some(counters) = snapshot.get_mut("counters").and_then(Value::as_object_mut) {
        counters.entry("streaks").or_insert(streaks);
    }
    snapshot
}

/// The same snapshot with its counts in one place.
fn with_counts(mut snapshot: Value) -> Value {
    const PLACES: [(&str, &str); 5] = [
        ("/turns_completed", "turns"),
        ("/tool_calls", "toolCalls"),
        ("/actions", "actions"),
        ("/tally/tools", "byTool"),
        ("/tally/trips", "guardrailTrips"),
    ];
    if snapshot.get("counts").is_none() {
        let found = PLACES.iter().filter_map(|(place, name)| {
            let count = snapshot.pointer(place)?.clone();
            Some(((*name).to_owned(), count))
        });
        let counts = Value::Object(found.collect());
        if let Some(fields) = snapshot.as_object_mut() {
            fields.insert("counts".to_owned(), counts);
        }
    }
    snapshot
}

/// The same snapshot with its call in the slot.
fn with_call_slot(mut snapshot: Value) -> Value {
    if snapshot.get("call").is_none()
        && let Some(call) = slot(&snapshot)
        && let Some(fields) = snapshot.as_object_mut()
    {
        fields.insert("call".to_owned(), call);
    }
    // The slot says that a score is being asked for. When it was due no longer matters.
    if let Some(step) = snapshot.pointer_mut("/scoring/asked/step")
        && *step == "Open"
    {
        *step = json!({ "Due": Timestamp::UNIX_EPOCH });
    }
    snapshot
}

fn slot(snapshot: &Value) -> Option<Value> {
    let turn = snapshot.get("turn").filter(|turn| turn.is_object());
    let pre_check = snapshot.get("pre_check");
    let before_turn = pre_check.and_then(|check| check.get("attempts")?.as_u64()).unwrap_or(0);
    let current = match turn {
        Some(turn) => call_of_turn(turn),
        None => call_before_turn(snapshot, before_turn),
    };
    Some(json!({"current": current?, "before_turn": before_turn}))
}

fn call_of_turn(turn: &Value) -> Option<Value> {
    let step = turn.get("step")?;
    if step == "Tools" {
        return Some(Value::Null);
    }
    let task = match turn.get("compaction") {
        Some(compaction) if !compaction.is_null() => json!({ "Summary": compaction }),
        Some(_) | None => json!("Turn"),
    };
    Some(json!({
        "id": {"turn": turn.get("number")?, "call": turn.get("call")?, "attempt": turn.get("attempt")?},
        "task": task,
        "failures": turn.get("failures")?,
        "step": step,
        "asked_under": turn.get("asked_under").cloned().unwrap_or(json!(0)),
    }))
}

fn call_before_turn(snapshot: &Value, attempt: u64) -> Option<Value> {
    let pre_check = snapshot.get("pre_check");
    let question = pre_check.and_then(|check| check.get("open")?.as_str());
    let scores = snapshot
        .pointer("/scoring/asked/step")
        .is_some_and(|step| step == "Open");
    let task = match question {
        Some(question) => json!({"PreCheck": serde_json::from_str::<Value>(question).ok()?}),
        None if scores => json!("Score"),
        None => return Some(Value::Null),
    };
    let turn = snapshot.get("turns_begun")?.as_i64()?.saturating_add(1);
    Some(json!({
        "id": {"turn": turn, "call": 0, "attempt": attempt},
        "task": task,
        "failures": 0,
        "step": "Open",
        "asked_under": pre_check.and_then(|check| check.get("asked_under")).cloned().unwrap_or(json!(0)),
    }))
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use rstest::rstest;
    use serde_json::{Value, json};

    use crate::machine::EngineSnapshot;

    fn of_turn(step: &Value, compaction: &Value) -> Value {
        json!({"turns_begun": 7, "turn": {
            "number": 7, "call": 2, "attempt": 3, "failures": 1, "step": step, "messages": 3, "crashes": 0,
            "asked_under": 4, "compaction": compaction, "briefing": {"cause": "", "notes": []},
        }})
    }

    fn before_turn(pre_check: &Value, scoring: &Value) -> Value {
        json!({"turns_begun": 7, "turn": null, "pre_check": pre_check, "scoring": scoring})
    }

    fn scored(step: &Value) -> Value {
        json!({"asked": {
            "question": {"id": "e", "signal": "s", "prompt": "p", "data": "d"}, "failures": 1, "step": step,
        }})
    }

    #[test]
    fn the_counts_of_an_early_journal_are_in_one_place() {
        let trips = json!([{"guardrail": "IdleTimeout", "action": "kill", "count": 1}]);
        let stored = json!({
            "turns_begun": 8, "turns_completed": 7, "tool_calls": 5, "actions": 3,
            "tally": {"tools": [{"tool": "a", "ok": 2}], "trips": trips},
        });
        let snapshot: EngineSnapshot = serde_json::from_value(stored).unwrap();
        let again = serde_json::to_value(&snapshot).unwrap();
        let counts = &again["counts"];
        assert_eq!(
            (&counts["turns"], &counts["toolCalls"], &counts["actions"]),
            (&json!(7), &json!(5), &json!(3))
        );
        assert_eq!(
            (&counts["byTool"][0]["ok"], &counts["guardrailTrips"]),
            (&json!(2), &trips)
        );
        let read: EngineSnapshot = serde_json::from_value(again).unwrap();
        assert_eq!(read, snapshot);
    }

    #[test]
    fn the_streaks_of_an_early_journal_are_merged_into_one_map() {
        let stored = json!({
            "reasons": {"ModelRefused": {"until": null, "message": ""}},
            "counters": {"errors": 4, "error_cooldowns": 2, "refusals": 3, "crash_cooldowns": 1, "turns": 9},
        });
        let snapshot: EngineSnapshot = serde_json::from_value(stored).unwrap();
        let again = serde_json::to_value(&snapshot).unwrap();
        let streaks = json!({
            "ConsecutiveErrors": {"count": 4, "cooldowns": 2, "cooling": false},
            "CrashLoop": {"count": 0, "cooldowns": 1, "cooling": false},
            "ModelRefused": {"count": 3, "cooldowns": 2, "cooling": true},
        });
        assert_eq!(
            (&again["counters"]["streaks"], &again["counters"]["turns"]),
            (&streaks, &json!(9))
        );
        let read: EngineSnapshot = serde_json::from_value(again).unwrap();
        assert_eq!(read, snapshot);
    }

    #[rstest]
    #[case::open(of_turn(&json!("Open"), &json!(null)), json!({
        "id": {"turn": 7, "call": 2, "attempt": 3}, "task": "Turn", "failures": 1, "step": "Open", "asked_under": 4,
    }))]
    #[case::due(of_turn(&json!({"Due": "2026-01-01T00:00:00Z"}), &json!(null)), json!({
        "id": {"turn": 7, "call": 2, "attempt": 3}, "task": "Turn", "failures": 1,
        "step": {"Due": "2026-01-01T00:00:00Z"}, "asked_under": 4,
    }))]
    #[case::summary(of_turn(&json!("Open"), &json!({"messages": 5, "most_bytes": 512, "failures": 1})), json!({
        "id": {"turn": 7, "call": 2, "attempt": 3},
        "task": {"Summary": {"messages": 5, "most_bytes": 512, "failures": 1}},
        "failures": 1, "step": "Open", "asked_under": 4,
    }))]
    #[case::tools(of_turn(&json!("Tools"), &json!(null)), json!(null))]
    #[case::pre_check(
        before_turn(&json!({"sleep": null, "attempts": 2, "open": "[\"task\",\"data\"]", "asked_under": 9}), &json!({})),
        json!({
            "id": {"turn": 8, "call": 0, "attempt": 2}, "task": {"PreCheck": ["task", "data"]}, "failures": 0,
            "step": "Open", "asked_under": 9,
        })
    )]
    #[case::score(before_turn(&json!({"attempts": 1}), &scored(&json!("Open"))), json!({
        "id": {"turn": 8, "call": 0, "attempt": 1}, "task": "Score", "failures": 0, "step": "Open", "asked_under": 0,
    }))]
    #[case::due_score(
        before_turn(&json!({"attempts": 1}), &scored(&json!({"Due": "2026-01-01T00:00:00Z"}))),
        json!(null)
    )]
    #[case::no_call(before_turn(&json!({}), &json!({})), json!(null))]
    fn a_call_of_an_early_journal_is_in_the_slot(#[case] stored: Value, #[case] call: Value) {
        let snapshot: EngineSnapshot = serde_json::from_value(stored).unwrap();
        let again = serde_json::to_value(&snapshot).unwrap();
        assert_eq!(again["call"]["current"], call);
        let read: EngineSnapshot = serde_json::from_value(again).unwrap();
        assert_eq!(read, snapshot);
    }
}
