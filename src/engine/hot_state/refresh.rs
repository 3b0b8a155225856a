//! Before a turn, fields that name a tool and are stale or empty are filled by runs of that tool.
//!
//! The runs are admitted, journalled and cancelled like any other, at most four at a time; only read-only tools are
//! run. The turn waits for all of them, at most for their timeouts, and begins whatever their outcome. Values end with
//! the process, so a new process refreshes again; runs that it finds open are sent again under their ids.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::effects::{EffectBuffer, journal_line};
use super::super::machine::Engine;
use super::super::message::ToolCall;
use super::super::tool::{ToolEffect, ToolOutcome, ToolRunId};
use super::super::tools::admission::{self, AdmissionContext};
use super::super::tools::batch::{MAX_READS, ToolRunPlan};
use super::super::untrusted::server_source;
use super::super::{EngineEffect, JournalRecord, OutcomeKind, RecordKind, ToolLine, ids};
use super::FieldSchema;
use agentloop_api::hot_state::FieldType;

/// The runs before the next turn.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(default)]
pub struct HotStateRefresh {
    /// The turn that they precede.
    turn: i64,
    /// Runs that were planned for it so far.
    planned: u32,
    /// Runs without an outcome, by index.
    runs: BTreeMap<u32, FieldRun>,
}

/// A run that fills a field.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
struct FieldRun {
    field: String,
    plan: ToolRunPlan,
}

impl Engine {
    /// Runs what must precede the next turn. True: the turn may begin.
    pub(crate) fn prepare_turn(&mut self, out: &mut EffectBuffer) -> bool {
        // Planned once for each turn: otherwise a failed run would be repeated for as long as the field has no value.
        if !std::mem::replace(&mut self.hot.refreshed, true) {
            self.plan_refresh(out);
        }
        self.send_refreshes(out);
        self.state.refresh.runs.is_empty()
    }

    /// The values were for a turn that begins at once; a turn that has to wait refreshes them again.
    pub(crate) fn end_preparation(&mut self) {
        if self.state.refresh.runs.is_empty() {
            self.hot.refreshed = false;
        }
    }

    /// Whether the next turn waits for runs.
    pub(crate) fn is_refreshing(&self) -> bool {
        self.running.keys().any(|run| run.is_refresh())
    }

    /// An id for a run before the next turn that has none yet.
    pub(crate) fn id_before_turn(&mut self) -> ToolRunId {
        self.begin_refresh();
        let refresh = &mut self.state.refresh;
        refresh.planned = refresh.planned.saturating_add(1);
        ToolRunId {
            member: ids::MAIN,
            turn: refresh.turn,
            call: 0,
            index: refresh.planned,
        }
    }

    fn begin_refresh(&mut self) {
        let coming = self.state.totals.next_turn();
        if self.state.refresh.turn != coming {
            self.state.refresh = HotStateRefresh {
                turn: coming,
                ..HotStateRefresh::default()
            };
        }
    }

    fn plan_refresh(&mut self, out: &mut EffectBuffer) {
        self.begin_refresh();
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
        let id = ToolRunId {
            member: ids::MAIN,
            turn: refresh.turn,
            call: 0,
            index,
        };
        let of = admission::run_identity(&self.agent, self.state.life.epoch(), id);
        match self.planned(field, &of) {
            Ok(plan) => {
                let field = field.name.clone();
                self.state.refresh.planned = index;
                self.state.refresh.runs.insert(index, FieldRun { field, plan });
            }
            Err(why) => self.field_problem(&field.name, why, out),
        }
    }

    fn planned(&self, field: &FieldSchema, of: &Value) -> Result<ToolRunPlan, &'static str> {
        let wanted = field.refresh_tool.as_deref().unwrap_or_default();
        let name = self
            .offer
            .toolbox()
            .resolve(wanted)
            .ok_or("its refreshTool is unknown")?;
        // The tools of the last turn are still offered.
        if self.offer.changed(name).is_some() {
            return Err("its refreshTool is not run, since its definition has changed");
        }
        let call = ToolCall {
            id: String::new(),
            name: name.to_owned(),
            arguments: "{}".to_owned(),
        };
        // The model does not request it, so what the model has read does not matter.
        let context = AdmissionContext {
            denials: &BTreeMap::new(),
            untrusted: None,
        };
        let judged = self.offer.toolbox().admit(&call, context);
        let (known, arguments) = judged.map_err(|_| "its refreshTool cannot be called without arguments")?;
        if known.spec.effect != ToolEffect::Read {
            return Err("its refreshTool is not run, since its effect is not Read");
        }
        let plan = known.plan(of, &arguments, None);
        if plan.is_gated() {
            return Err("its refreshTool is not run, since its calls need an approval");
        }
        Ok(plan)
    }

    /// Sends as many runs as may be under way.
    fn send_refreshes(&mut self, out: &mut EffectBuffer) {
        let turn = self.state.refresh.turn;
        let indices: Vec<u32> = self.state.refresh.runs.keys().copied().collect();
        for index in indices {
            let id = ToolRunId {
                member: ids::MAIN,
                turn,
                call: 0,
                index,
            };
            let held = !self.state.reasons.are_free(out.now);
            if held || !self.state.life.is_active() || self.running.len() >= MAX_READS {
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
            self.state.totals.count_run(false);
        }
        let note = if is_new { "" } else { "repeated" };
        out.record(tool_line(RecordKind::ToolIntent, id, &plan, note, None));
        self.running.insert(id, out.now);
        let run = plan.run(id, serde_json::Map::new(), 0);
        out.push(EngineEffect::RunTool(run, plan.timeout));
    }

    /// Name of the tool of a run before the turn.
    pub(crate) fn refresh_tool(&self, id: ToolRunId) -> Option<&str> {
        if self.state.requests.runs(id) {
            return self.state.requests.tool();
        }
        Some(&self.state.refresh.runs.get(&id.index)?.plan.tool)
    }

    /// A run before the turn ended.
    pub(crate) fn refresh_finished(&mut self, id: ToolRunId, outcome: ToolOutcome, out: &mut EffectBuffer) {
        if self.state.requests.runs(id) {
            self.mode_check_ended(&outcome, out);
            return;
        }
        let Some(FieldRun { field, plan }) = self.state.refresh.runs.remove(&id.index) else {
            return;
        };
        let (kind, problem) = match outcome {
            ToolOutcome::Done { text } => {
                if let Some(known) = self.hot.field(&field) {
                    let value = read(known, text);
                    let untrusted = (!plan.trusted).then(|| server_source(&plan.tool));
                    self.write_field(&field, value, out.now, untrusted, out);
                }
                (OutcomeKind::Ok, None)
            }
            ToolOutcome::Failed { .. } => (OutcomeKind::Error, Some("its refreshTool failed")),
            ToolOutcome::Unavailable { .. } => (OutcomeKind::Unavailable, Some("its refreshTool could not be reached")),
            ToolOutcome::Unknown { .. } => (OutcomeKind::Unknown, Some("its refreshTool gave no answer")),
        };
        if let Some(problem) = problem {
            self.field_problem(&field, problem, out);
        }
        out.record(tool_line(RecordKind::ToolOutcome, id, &plan, "", Some(kind)));
        self.send_refreshes(out);
    }

    /// Stores a value of that time, or keeps the last good one and records why; journalled once, until a write
    /// succeeds. `untrusted`: its source, if that is not trusted.
    pub(crate) fn write_field(
        &mut self,
        name: &str,
        value: Value,
        at: Timestamp,
        untrusted: Option<String>,
        out: &mut EffectBuffer,
    ) {
        match (self.hot.write(name, value, at), untrusted) {
            (Ok(()), Some(source)) => self.hot.set_untrusted(name, source),
            (Ok(()), None) => {}
            (Err(refused), _) => self.field_problem(name, &format!("the last value was refused: {refused}"), out),
        }
    }

    fn field_problem(&mut self, name: &str, problem: &str, out: &mut EffectBuffer) {
        // A name that is not in the schema is foreign text.
        if self.hot.field(name).is_none() {
            return;
        }
        let before = self.hot.problems.insert(name.to_owned(), problem.to_owned());
        if before.is_none() {
            let note = format!("{name}: {problem}");
            out.record(journal_line(RecordKind::HotStateRefused, self.turn_number(), note));
        }
    }
}

impl super::HotState {
    /// The fields to fill now.
    fn fields_to_refresh(&self, now: jiff::Timestamp) -> impl Iterator<Item = &FieldSchema> {
        self.fields.iter().filter(move |field| {
            let lacks = !self.entries.contains_key(&field.name) || self.is_stale(field, now);
            lacks && field.refresh_tool.is_some()
        })
    }
}

/// A tool's result as a value for a field. Some servers wrap a single value as `{"result": …}`.
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
        // A text that looks like JSON is still a text.
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
