//! The lifetime totals of an Agent, in all and per model: exact sums that never decrease.

use rusqlite::{Row, Transaction, params};

use super::{CallUsage, meta, set_meta};
use crate::api::status::{LoopUsage, MAX_MODELS, ModelUsage};
use crate::api::usage_counts::{LoopCounts, raise};

/// Name of the row with the sum over all models.
const ALL: &str = "";
const BASE: &str = "base";

/// The totals as they are on disk.
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

    /// Adds what the Agent used before this record was created.
    pub(super) fn adopt(&mut self, change: &Transaction<'_>, known: &LoopUsage) -> rusqlite::Result<()> {
        self.all += &sum_of(known);
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

    /// Raises each count to what the controller knows. An intact record already has at least that; one on a volume that was
    /// reset to an earlier state has less, and would otherwise report the same totals until it caught up.
    pub(super) fn raise(&mut self, change: &Transaction<'_>, known: &LoopUsage) -> rusqlite::Result<()> {
        raise_model(&mut self.all, &sum_of(known));
        write(change, &self.all)?;
        for model in known.by_model.iter().filter(|model| model.model != ALL) {
            let total = self.of(&model.model);
            raise_model(total, model);
            write(change, total)?;
        }
        Ok(())
    }

    /// Whether [`UsageTotals::raise`] would change anything.
    pub(super) fn is_below(&self, known: &LoopUsage) -> bool {
        let below = |total: &ModelUsage, known: &ModelUsage| {
            let mut raised = total.clone();
            raise_model(&mut raised, known);
            raised != *total
        };
        let none = ModelUsage::default();
        let of = |name: &str| self.models.iter().find(|total| total.model == name).unwrap_or(&none);
        let mut models = known.by_model.iter().filter(|model| model.model != ALL);
        below(&self.all, &sum_of(known)) || models.any(|model| below(of(&model.model), model))
    }

    /// Counts one call of `model`: its cost if known, and whether a limit charges its reservation.
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
            // Counted by the worker.
            counts: LoopCounts::default(),
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

/// The sum over all models, as a row.
fn sum_of(known: &LoopUsage) -> ModelUsage {
    ModelUsage {
        model: ALL.into(),
        ..known.of_all_models()
    }
}

fn raise_model(total: &mut ModelUsage, known: &ModelUsage) {
    raise!(
        total, known;
        calls, unknown_calls, estimated_calls, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens,
        reasoning_tokens, cost,
    );
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
