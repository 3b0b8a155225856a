//! Before a turn: fields that are stale or have no value, and name a tool, are filled by runs of it.
//!
//! The runs pass the gate, are journalled and cut like any other, at most four at a time; only tools that only look are
//! run. The turn waits for all of them, for their timeouts at most, and begins whatever they said. Values die with the
//! process, so a new one refreshes again; runs that it finds open it sends once more, under their ids.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::effects::{EffectBuffer, journal_line};
use super::super::machine::Engine;
use super::super::message::ToolCall;
use super::super::snapshot::LifecyclePhase;
use super::super::tool::{ToolEffect, ToolOutcome, ToolRun, ToolRunId};
use super::super::tool_admission;
use super::super::tool_batch::{MOST_READS, ToolRunPlan};
use super::super::{EngineEffect, JournalRecord, OutcomeKind, RecordKind, ToolLine};
use super::FieldSchema;
use crate::api::hot_state::FieldType;

/// The runs before the coming turn.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct HotStateRefresh {
    /// The turn that they precede.
    turn: i64,
    /// Runs that were planned for it so far.
    planned: u32,
    /// Those without an outcome, by their index.
    runs: BTreeMap<u32, FieldRun>,
}

/// A run that fills a field.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
struct FieldRun {
    field: String,
    plan: ToolRunPlan,
}

impl Engine {
    /// Does what must be done before the coming turn. True: it may begin.
    pub(in crate::engine) fn prepare_turn(&mut self, out: &mut EffectBuffer) -> bool {
        if !std::mem::replace(&mut self.hot.refreshed, true) {
            self.plan_refresh(out);
        }
        self.send_refreshes(out);
        self.state.refresh.runs.is_empty()
    }

    /// What was refreshed was for a turn that began at once; a turn that had to wait wants it anew.
    pub(in crate::engine) fn end_preparation(&mut self) {
        if self.state.refresh.runs.is_empty() {
            self.hot.refreshed = false;
        }
    }

    /// Whether the coming turn waits for runs.
    pub(in crate::engine) fn is_refreshing(&self) -> bool {
        self.running.keys().any(|run| run.is_refresh())
    }

    fn plan_refresh(&mut self, out: &mut EffectBuffer) {
        let coming = self.state.turns_begun.saturating_add(1);
        if self.state.refresh.turn != coming {
            self.state.refresh = HotStateRefresh {
                turn: coming,
                ..HotStateRefresh::default()
            };
        }
        let wanted: Vec<FieldSchema> = self.hot.fields_to_refresh(out.now).cloned().collect();
        for field in wanted {
            let runs = &self.state.refresh.runs;
            if !runs.values().any(|run| run.field == field.name) {
                self.plan_run(&field, out);
            }
        }
    }

    fn plan_run(&mut self, field: &FieldSchema, out: &mut EffectBuffer) {
        let refresh = &self.state.refresh;
        let index = refresh.planned.saturating_add(1);
        let of = json!([self.agent, self.state.epoch, refresh.turn, 0, index]);
        match self.planned(field, &of) {
            Ok(plan) => {
                let field = field.name.clone();
                self.state.refresh.planned = index;
                self.state.refresh.runs.insert(index, FieldRun { field, plan });
            }
            Err(why) => self.field_trouble(&field.name, why, out),
        }
    }

    fn planned(&self, field: &FieldSchema, of: &Value) -> Result<ToolRunPlan, &'static str> {
        let wanted = field.refresh_tool.as_deref().unwrap_or_default();
        let name = self
            .toolbox
            .resolve(wanted)
            .ok_or("there is no tool of its refreshTool's name")?;
        let call = ToolCall {
            id: String::new(),
            name: name.to_owned(),
            arguments: "{}".to_owned(),
        };
        let judged = self.toolbox.admit(&call, &BTreeMap::new());
        let (known, arguments) = judged.map_err(|_| "its refreshTool cannot be called without arguments")?;
        if known.spec.effect != ToolEffect::Read {
            return Err("its refreshTool is not run, since it does not only look (its effect is not Read)");
        }
        Ok(ToolRunPlan {
            tool: known.spec.name.clone(),
            effect: known.spec.effect,
            idempotent: known.spec.idempotent,
            on_unknown: known.spec.on_unknown,
            timeout: known.spec.timeout,
            key: tool_admission::idempotency_key(of, &known.spec.name, &arguments),
            arguments: tool_admission::arguments_hash(&arguments),
            tries: 0,
        })
    }

    /// Sends runs, as many as may be under way.
    fn send_refreshes(&mut self, out: &mut EffectBuffer) {
        let turn = self.state.refresh.turn;
        let indices: Vec<u32> = self.state.refresh.runs.keys().copied().collect();
        for index in indices {
            let id = ToolRunId { turn, call: 0, index };
            let held = self.free_from().is_none_or(|moment| moment > out.now);
            if held || self.state.lifecycle != LifecyclePhase::Active || self.running.len() >= MOST_READS {
                return;
            }
            if !self.running.contains_key(&id) {
                self.send_refresh(id, out);
            }
        }
    }

    fn send_refresh(&mut self, id: ToolRunId, out: &mut EffectBuffer) {
        let Some(run) = self.state.refresh.runs.get_mut(&id.index) else {
            return;
        };
        run.plan.tries = run.plan.tries.saturating_add(1);
        let plan = run.plan.clone();
        let is_new = plan.tries == 1;
        if is_new {
            self.state.tool_calls = self.state.tool_calls.saturating_add(1);
        }
        let note = if is_new { "" } else { "repeated" };
        out.record(tool_line(RecordKind::ToolIntent, id, &plan, note, None));
        self.running.insert(id, out.now);
        let run = ToolRun {
            id,
            name: plan.tool,
            arguments: serde_json::Map::new(),
            idempotency_key: plan.key,
        };
        out.push(EngineEffect::RunTool(run, plan.timeout));
    }

    /// Name of the tool of a run that fills a field.
    pub(in crate::engine) fn refresh_tool(&self, id: ToolRunId) -> Option<&str> {
        Some(&self.state.refresh.runs.get(&id.index)?.plan.tool)
    }

    /// A run that fills a field came to an end.
    pub(in crate::engine) fn refresh_finished(&mut self, id: ToolRunId, outcome: ToolOutcome, out: &mut EffectBuffer) {
        let Some(FieldRun { field, plan }) = self.state.refresh.runs.remove(&id.index) else {
            return;
        };
        let (kind, trouble) = match outcome {
            ToolOutcome::Done { text } => {
                if let Some(known) = self.hot.field(&field) {
                    let value = read(known, text);
                    self.write_field(&field, value, out.now, out);
                }
                (OutcomeKind::Ok, None)
            }
            ToolOutcome::Failed { .. } => (OutcomeKind::Error, Some("its refreshTool failed")),
            ToolOutcome::Unavailable { .. } => (OutcomeKind::Unavailable, Some("its refreshTool could not be reached")),
            ToolOutcome::Unknown { .. } => (OutcomeKind::Unknown, Some("its refreshTool gave no answer")),
        };
        if let Some(trouble) = trouble {
            self.field_trouble(&field, trouble, out);
        }
        out.record(tool_line(RecordKind::ToolOutcome, id, &plan, "", Some(kind)));
        self.send_refreshes(out);
    }
}

impl super::HotState {
    /// Fields that a tool is to fill now.
    fn fields_to_refresh(&self, now: jiff::Timestamp) -> impl Iterator<Item = &FieldSchema> {
        self.fields.iter().filter(move |field| {
            let lacks = !self.entries.contains_key(&field.name) || self.is_stale(field, now);
            lacks && field.refresh_tool.is_some()
        })
    }
}

/// What a tool said, as a value for a field. Servers wrap a single value as `{"result": …}`.
fn read(field: &FieldSchema, text: String) -> Value {
    let Ok(value) = serde_json::from_str::<Value>(&text) else {
        return Value::String(text);
    };
    if field.coerce(value.clone()).is_ok() {
        return value;
    }
    let inner = value.as_object().filter(|object| object.len() == 1);
    match inner.and_then(|object| object.get("result")) {
        Some(inner) if field.coerce(inner.clone()).is_ok() => inner.clone(),
        // What looks like JSON is a text all the same.
        _ if field.kind == FieldType::String => Value::String(text),
        _ => value,
    }
}

fn tool_line(
    kind: RecordKind,
    id: ToolRunId,
    plan: &ToolRunPlan,
    note: &str,
    outcome: Option<OutcomeKind>,
) -> JournalRecord {
    JournalRecord {
        tool: Some(ToolLine {
            run: id,
            tool: Some(plan.tool.clone()),
            effect: Some(plan.effect),
            key: Some(plan.key.clone()),
            arguments: Some(plan.arguments.clone()),
            outcome,
        }),
        ..journal_line(kind, id.turn, note)
    }
}
