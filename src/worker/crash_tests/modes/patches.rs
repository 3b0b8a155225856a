//! Breaks rules between the journal and the loop: what a process begins with is not what the one before has committed.

use std::collections::BTreeSet;

use serde_json::Value;

use super::injected_bugs::Broken;
use super::loop_environment::LoopEnvironment;
use super::schedule::ScheduleSpec;
use super::task_origins::origin_of;
use crate::engine::machine::EngineSnapshot;
use crate::engine::settings::EngineSettings;
use crate::engine::tasks::{TaskOffer, TaskOrigin};
use crate::worker::journal::RestoredJournal;

/// The settings that a process begins with.
pub(super) fn settings(environment: &LoopEnvironment, schedule: &ScheduleSpec) -> EngineSettings {
    if environment.is_broken(Broken::KeepsCriteria) {
        return schedule.with_first_criteria().settings();
    }
    if environment.is_broken(Broken::IgnoresArtifacts) {
        return schedule.without_artifacts().settings();
    }
    schedule.settings()
}

/// What a process begins with.
pub(super) fn restored(environment: &mut LoopEnvironment, restored: RestoredJournal) -> RestoredJournal {
    let mut restored = restored;
    match environment.broken {
        Some(Broken::LosesTask) if !restored.tasks.is_empty() => {
            restored.tasks.remove(0);
        }
        Some(Broken::KeepsStartedTask) => {
            if let Some(id) = environment.invariants.current() {
                let offer = TaskOffer {
                    prompt: format!("task={id}; How are you?"),
                    origin: origin_of(&id),
                    id,
                    untrusted: None,
                };
                restored.tasks.insert(0, offer);
            }
        }
        Some(
            Broken::RepeatsNote
            | Broken::LosesNote
            | Broken::JoinsChecks
            | Broken::KeepsCheck
            | Broken::LosesCount
            | Broken::ForgetsServed
            | Broken::ForgetsDenials,
        ) => {
            restored.snapshot = restored.snapshot.map(|snapshot| patched(&snapshot, environment));
        }
        _ => {}
    }
    for offer in &mut restored.tasks {
        offer.origin = origin(environment, offer);
    }
    if environment.is_broken(Broken::ForgetsCalls) {
        environment.provider.forget();
    }
    restored
}

/// The origin of a task, as the loop learns it.
pub(super) fn origin(environment: &LoopEnvironment, offer: &TaskOffer) -> TaskOrigin {
    match (environment.broken, &offer.origin) {
        (Some(Broken::OrderOfArrival), TaskOrigin::Request(_)) => TaskOrigin::Request("anyone".into()),
        (Some(Broken::StarvesOrigin), TaskOrigin::Request(_)) => TaskOrigin::Request(offer.id.clone()),
        (_, origin) => origin.clone(),
    }
}

fn patched(snapshot: &EngineSnapshot, environment: &mut LoopEnvironment) -> EngineSnapshot {
    let mut state = serde_json::to_value(snapshot).expect("a snapshot");
    match environment.broken {
        Some(Broken::RepeatsNote) => {
            let notes = state.get_mut("memory").and_then(Value::as_object_mut);
            for note in notes.into_iter().flat_map(|notes| notes.values_mut()) {
                let text = note["text"].as_str().unwrap_or_default().replace('|', "+|");
                note["text"] = text.into();
            }
        }
        Some(Broken::LosesNote) => {
            if let Some(notes) = state.get_mut("memory").and_then(Value::as_object_mut) {
                let first = notes.keys().next().cloned();
                first.and_then(|first| notes.shift_remove(&first));
            }
        }
        Some(Broken::LosesCount) => {
            state["counts"]["toolCalls"] = 0.into();
            state["counts"]["byTool"] = Value::Array(Vec::new());
        }
        Some(Broken::ForgetsServed) => {
            let tasks = state.get_mut("tasks").and_then(Value::as_object_mut);
            tasks.and_then(|tasks| tasks.shift_remove("served"));
        }
        Some(Broken::ForgetsDenials) => {
            let goal = state.get_mut("goal").and_then(Value::as_object_mut);
            goal.and_then(|goal| goal.shift_remove("denials"));
        }
        Some(Broken::KeepsCheck) if state["goal"]["validation"].is_object() && state["outcome"].is_null() => {
            state["epoch"] = environment.epoch.into();
        }
        Some(Broken::JoinsChecks) => join_checks(&mut state["goal"], &mut environment.once_met),
        _ => {}
    }
    serde_json::from_value(state).expect("a snapshot")
}

/// Whatever a check has found once counts in the one that is under way.
fn join_checks(goal: &mut Value, once_met: &mut BTreeSet<String>) {
    let criteria = goal["criteria"].as_object().cloned().unwrap_or_default();
    let met = criteria.iter().filter(|(_, state)| state["met"] == true);
    once_met.extend(met.map(|(name, _)| name.clone()));
    if goal["validation"].is_object() {
        goal["validation"]["met"] = once_met.iter().cloned().collect();
        goal["validation"]["failed"] = false.into();
    }
}
