//! The totals of an Agent's life, whole and per model: exact sums that never step back.

use rusqlite::{Row, Transaction, params};

use super::{CallUsage, meta, set_meta};
use crate::api::status::{LoopUsage, ModelUsage};

/// Most models that are reported; the least used leave the list first, and stay in the sum.
pub(super) const MAX_MODELS: usize = 10;
/// The row with the sum of all models.
const ALL: &str = "";
const BASE: &str = "base";

/// The totals, as they are on disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct UsageTotals {
    all: ModelUsage,
    models: Vec<ModelUsage>,
    has_base: bool,
}

impl UsageTotals {
    pub(super) fn load(change: &Transaction<'_>) -> rusqlite::Result<Self> {
        let mut select = change.prepare("SELECT * FROM totals ORDER BY model")?;
        let rows: Vec<ModelUsage> = select.query_map([], from_row)?.collect::<Result<_, _>>()?;
        let (all, models) = rows.into_iter().partition::<Vec<_>, _>(|row| row.model == ALL);
        Ok(Self {
            all: all.into_iter().next().unwrap_or_default(),
            models,
            has_base: meta::<i64>(change, BASE)?.is_some(),
        })
    }

    /// Whether [`UsageTotals::adopt`] was done.
    pub(super) fn has_base(&self) -> bool {
        self.has_base
    }

    /// Adds what the Agent had used before this record began.
    pub(super) fn adopt(&mut self, change: &Transaction<'_>, known: &LoopUsage) -> rusqlite::Result<()> {
        let all = ModelUsage {
            model: ALL.into(),
            calls: known.calls,
            unknown_calls: known.unknown_calls,
            estimated_calls: known.estimated_calls,
            input_tokens: known.input_tokens,
            output_tokens: known.output_tokens,
            cache_read_tokens: known.cache_read_tokens,
            cache_write_tokens: known.cache_write_tokens,
            reasoning_tokens: known.reasoning_tokens,
            cost: known.cost,
        };
        self.all += &all;
        write(change, &self.all)?;
        for model in known.by_model.iter().filter(|model| model.model != ALL) {
            let total = self.of(&model.model);
            *total += model;
            write(change, total)?;
        }
        set_meta(change, BASE, "1")?;
        self.has_base = true;
        Ok(())
    }

    /// Counts one call of `model`: what it cost, where that is known, and whether a limit counts it as reserved.
    pub(super) fn count(
        &mut self,
        change: &Transaction<'_>,
        model: &str,
        metered: &CallUsage,
        (cost, estimated): (i64, bool),
    ) -> rusqlite::Result<()> {
        let mut one = ModelUsage {
            calls: 1,
            ..ModelUsage::default()
        };
        match metered {
            CallUsage::NotSent => return Ok(()),
            CallUsage::Free => {}
            CallUsage::Unknown => (one.unknown_calls, one.estimated_calls) = (1, estimated.into()),
            CallUsage::Billed(bill, _) => {
                one.input_tokens = bill.input;
                one.output_tokens = bill.output;
                one.cache_read_tokens = bill.cache_read;
                one.cache_write_tokens = bill.cache_write + bill.cache_write_1h;
                one.reasoning_tokens = bill.reasoning;
                one.cost = cost;
            }
        }
        self.all += &one;
        write(change, &self.all)?;
        let total = self.of(model);
        *total += &one;
        write(change, total)
    }

    pub(super) fn usage(&self) -> LoopUsage {
        let mut by_model = self.models.clone();
        by_model.sort_by(|a, b| b.calls.cmp(&a.calls).then_with(|| a.model.cmp(&b.model)));
        by_model.truncate(MAX_MODELS);
        by_model.sort_by(|a, b| a.model.cmp(&b.model));
        LoopUsage {
            calls: self.all.calls,
            unknown_calls: self.all.unknown_calls,
            estimated_calls: self.all.estimated_calls,
            input_tokens: self.all.input_tokens,
            output_tokens: self.all.output_tokens,
            cache_read_tokens: self.all.cache_read_tokens,
            cache_write_tokens: self.all.cache_write_tokens,
            reasoning_tokens: self.all.reasoning_tokens,
            cost: self.all.cost,
            // The worker counts these.
            turns: 0,
            tool_calls: 0,
            actions: 0,
            by_tool: Vec::new(),
            guardrail_trips: Vec::new(),
            by_model,
        }
    }

    fn of(&mut self, model: &str) -> &mut ModelUsage {
        let place = self
            .models
            .iter()
            .position(|total| total.model == model)
            .unwrap_or_else(|| {
                self.models.push(ModelUsage {
                    model: model.into(),
                    ..ModelUsage::default()
                });
                self.models.len() - 1
            });
        &mut self.models[place]
    }
}

fn write(change: &Transaction<'_>, total: &ModelUsage) -> rusqlite::Result<()> {
    let mut insert = change.prepare_cached("INSERT OR REPLACE INTO totals VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")?;
    insert.execute(params![
        total.model,
        total.calls,
        total.unknown_calls,
        total.input_tokens,
        total.output_tokens,
        total.cache_read_tokens,
        total.reasoning_tokens,
        total.estimated_calls,
        total.cache_write_tokens,
        total.cost
    ])?;
    Ok(())
}

fn from_row(row: &Row<'_>) -> rusqlite::Result<ModelUsage> {
    Ok(ModelUsage {
        model: row.get("model")?,
        calls: row.get("calls")?,
        unknown_calls: row.get("unknown_calls")?,
        input_tokens: row.get("input_tokens")?,
        output_tokens: row.get("output_tokens")?,
        cache_read_tokens: row.get("cache_read_tokens")?,
        reasoning_tokens: row.get("reasoning_tokens")?,
        estimated_calls: row.get("estimated_calls")?,
        cache_write_tokens: row.get("cache_write_tokens")?,
        cost: row.get("cost")?,
    })
}
