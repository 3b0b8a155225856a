//! Metrics of AgentBudgets, read from the controller's cache at each scrape.
//!
//! All values but the burn rate equal those in the status. For the burn rate the samples of the last ten minutes of
//! scrapes are kept here, until the budget is deleted.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::ResourceExt;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use strum::IntoEnumIterator;

use super::families::{MetricFamilies, bit, number};
use super::registry::{self, Metric, MetricSource};
use crate::api::amount::{Amount, AmountKind, LimitAmounts};
use crate::api::budget::{AgentBudget, BudgetWindow, LedgerRecord, UsageBucket};

/// The time over which the burn rate is measured.
const HORIZON: Duration = Duration::from_mins(10);
/// Shortest time between two samples that are kept.
const STEP: Duration = Duration::from_secs(10);
/// The conditions that the controller writes.
const CONDITIONS: [&str; 4] = ["Ready", "Accepted", "NearLimit", "Exhausted"];

/// Calls its argument with each AgentBudget in the cache.
type ForEachBudget = Box<dyn Fn(&mut dyn FnMut(&AgentBudget)) + Send + Sync>;

/// Collects the AgentBudgets in the cache at each scrape.
pub struct BudgetCollector {
    for_each: ForEachBudget,
    descriptions: Vec<Desc>,
    burns: Mutex<HashMap<String, BurnHistory>>,
}

impl BudgetCollector {
    /// `for_each` visits the AgentBudgets at the time of a scrape.
    pub fn new(for_each: impl Fn(&mut dyn FnMut(&AgentBudget)) + Send + Sync + 'static) -> prometheus::Result<Self> {
        let metrics = registry::ALL
            .iter()
            .filter(|metric| metric.source == MetricSource::Budgets);
        Ok(Self {
            for_each: Box::new(for_each),
            descriptions: metrics.map(Metric::desc).collect::<Result<_, _>>()?,
            burns: Mutex::default(),
        })
    }

    /// The series at `now`.
    fn collect_at(&self, now: Instant) -> Vec<MetricFamily> {
        let mut families = MetricFamilies::default();
        let mut burns = self.burns.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = std::mem::take(&mut *burns);
        (self.for_each)(&mut |budget| {
            let uid = budget.uid().unwrap_or_default();
            let mut burn = before.remove(&uid).unwrap_or_default();
            burn.record(budget, now);
            budget_series(&mut families, budget, &burn);
            burns.insert(uid, burn);
        });
        families.into_all()
    }
}

impl Collector for BudgetCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.collect_at(Instant::now())
    }
}

fn budget_series(families: &mut MetricFamilies, budget: &AgentBudget, burn: &BurnHistory) {
    let namespace = budget.namespace().unwrap_or_default();
    let name = budget.name_any();
    let id = [namespace.as_str(), name.as_str()];
    let Some(status) = &budget.status else { return };
    families.put(&registry::BUDGET_AGENTS, &id, status.agents.into());
    let record = LedgerRecord::default();
    let record = status.ledger.as_ref().unwrap_or(&record);
    families.put(&registry::BUDGET_LEASES, &id, number(record.next_lease));
    families.put(&registry::BUDGET_WRITES, &id, number(record.epoch));
    if let Some(resets) = status.window.as_ref().and_then(|window| window.resets_at.as_ref()) {
        families.put(&registry::BUDGET_RESETS, &id, number(resets.0.as_second()));
    }
    for condition in &status.conditions {
        if !CONDITIONS.contains(&condition.type_.as_str()) {
            continue;
        }
        for (label, status) in [("true", "True"), ("false", "False"), ("unknown", "Unknown")] {
            let labels = [id[0], id[1], condition.type_.as_str(), label];
            families.put(&registry::BUDGET_CONDITION, &labels, bit(condition.status == status));
        }
    }
    let limits = status.limits.unwrap_or_default();
    let (used, reserved) = (status.used.unwrap_or_default(), status.reserved.unwrap_or_default());
    let remaining = status.remaining.unwrap_or_default();
    for kind in limits.kinds() {
        let labels = [id[0], id[1], label(kind)];
        let mut put = |metric, amount| families.put(metric, &labels, amount);
        put(&registry::BUDGET_LIMIT, value(kind, limit(&limits, kind)));
        put(&registry::BUDGET_USED, value(kind, used.get(kind)));
        put(&registry::BUDGET_RESERVED, value(kind, reserved.get(kind)));
        put(&registry::BUDGET_REMAINING, value(kind, limit(&remaining, kind)));
        let Some(per_second) = burn.per_second(kind) else {
            continue;
        };
        put(&registry::BUDGET_BURN, scale(kind, per_second * 3600.0));
        if per_second > 0.0 {
            // Amounts leased to gateways are not spent yet.
            let left = limit(&limits, kind).saturating_sub(used.get(kind)).max(0);
            put(&registry::BUDGET_EXHAUSTION, number(left) / per_second);
        }
    }
}

fn limit(limits: &LimitAmounts, kind: AmountKind) -> i64 {
    limits.get(kind).unwrap_or_default()
}

pub(super) fn label(kind: AmountKind) -> &'static str {
    match kind {
        AmountKind::Tokens => "tokens",
        AmountKind::InputTokens => "input_tokens",
        AmountKind::OutputTokens => "output_tokens",
        AmountKind::Calls => "calls",
        AmountKind::Cost => "cost_usd",
    }
}

pub(super) fn value(kind: AmountKind, amount: i64) -> f64 {
    scale(kind, number(amount))
}

/// Converts costs to dollars; other kinds are plain counts.
fn scale(kind: AmountKind, amount: f64) -> f64 {
    if kind == AmountKind::Cost { amount / 1e6 } else { amount }
}

/// The settled amounts of one budget in the last ten minutes.
#[derive(Default)]
struct BurnHistory {
    window: Option<BudgetWindow>,
    epoch: i64,
    buckets: Vec<UsageBucket>,
    settled: [f64; 5],
    samples: VecDeque<(Instant, [f64; 5])>,
}

impl BurnHistory {
    /// Records the current [`LedgerRecord`] of the budget as a sample.
    fn record(&mut self, budget: &AgentBudget, now: Instant) {
        let record = budget.status.as_ref().and_then(|status| status.ledger.as_ref());
        let window = Some(&budget.spec.window);
        if let Some(record) = record.filter(|record| record.epoch != self.epoch) {
            // Another window has other buckets, so their difference is meaningless.
            if self.epoch != 0 && self.window.as_ref() == window {
                for (settled, kind) in self.settled.iter_mut().zip(AmountKind::iter()) {
                    *settled += number(newly_settled(&self.buckets, &record.buckets, kind));
                }
            }
            self.epoch = record.epoch;
            self.buckets.clone_from(&record.buckets);
        }
        if self.window.as_ref() != window {
            self.window = window.cloned();
            self.samples.clear();
        }
        if self.samples.len() >= 2
            && let Some(before_last) = self.samples.get(self.samples.len() - 2)
            && now.duration_since(before_last.0) < STEP
        {
            self.samples.pop_back();
        }
        self.samples.push_back((now, self.settled));
        while self.samples.len() > 2 && now.duration_since(self.samples[1].0) >= HORIZON {
            self.samples.pop_front();
        }
    }

    /// The average amount settled per second; `None` before there are two samples.
    fn per_second(&self, kind: AmountKind) -> Option<f64> {
        let ((first, before), (last, now)) = (self.samples.front()?, self.samples.back()?);
        let seconds = last.duration_since(*first).as_secs_f64();
        let index = AmountKind::iter().position(|one| one == kind)?;
        (seconds > 0.0).then(|| ((now[index] - before[index]) / seconds).max(0.0))
    }
}

/// The increase of the buckets from `before` to `after`; buckets that left the window do not count.
fn newly_settled(before: &[UsageBucket], after: &[UsageBucket], kind: AmountKind) -> i64 {
    let known: HashMap<_, _> = before.iter().map(|bucket| (bucket.start, &bucket.amount)).collect();
    let new = after.iter().map(|bucket| {
        let old = known.get(&bucket.start).map_or(0, |amount: &&Amount| amount.get(kind));
        (bucket.amount.get(kind) - old).max(0)
    });
    new.fold(0, i64::saturating_add)
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;

    fn budget(epoch: i64, buckets: &Value, used: i64) -> AgentBudget {
        serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
            "metadata": {"namespace": "a", "name": "b", "uid": "u"},
            "spec": {"limits": {"tokens": 10_000}, "window": {"rolling": {"seconds": 3600}}},
            "status": {
                "limits": {"tokens": 10_000}, "used": {"tokens": used}, "remaining": {"tokens": 10_000 - used},
                "ledger": {"epoch": epoch, "watermark": "2026-01-01T00:00:00Z", "buckets": buckets},
            },
        }))
        .unwrap()
    }

    fn bucket(minute: u8, tokens: i64) -> Value {
        json!({"start": format!("2026-01-01T00:{minute:02}:00Z"), "amount": {"tokens": tokens}})
    }

    #[test]
    fn the_burn_is_what_was_settled_though_the_window_forgets() {
        let (mut burn, start) = (BurnHistory::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        burn.record(&budget(1, &json!([bucket(0, 500), bucket(1, 100)]), 600), start);
        assert_eq!(burn.per_second(AmountKind::Tokens), None, "no burn rate without a past");
        // 500 leave the window, 50 and 250 are added: 300 in 60 s.
        burn.record(&budget(2, &json!([bucket(1, 150), bucket(2, 250)]), 400), at(60));
        assert_eq!(burn.per_second(AmountKind::Tokens), Some(5.0));
        assert_eq!(burn.per_second(AmountKind::Calls), Some(0.0));
        burn.record(&budget(2, &json!([bucket(1, 150), bucket(2, 250)]), 400), at(600));
        assert_eq!(burn.per_second(AmountKind::Tokens), Some(0.5));
        burn.record(&budget(2, &json!([bucket(2, 250)]), 250), at(660));
        assert_eq!(
            burn.per_second(AmountKind::Tokens),
            Some(0.0),
            "the ten minutes are over"
        );
    }

    #[test]
    fn many_scrapes_keep_few_samples() {
        let (mut burn, start) = (BurnHistory::default(), Instant::now());
        for tenth in 0..20_000 {
            let one = budget(1, &json!([]), 0);
            burn.record(&one, start + Duration::from_millis(tenth * 100));
        }
        assert!(burn.samples.len() < 70, "{}", burn.samples.len());
    }

    #[test]
    fn a_budget_that_burns_says_when_it_is_spent_and_one_at_rest_does_not() {
        let cache = std::sync::Arc::new(Mutex::new(budget(1, &json!([bucket(0, 1000)]), 1000)));
        let seen = cache.clone();
        let collector = BudgetCollector::new(move |visit| visit(&seen.lock().unwrap())).unwrap();
        let start = Instant::now();
        let read = |seconds: u64, name: &str| {
            let families = collector.collect_at(start + Duration::from_secs(seconds));
            let family = families.into_iter().find(|family| family.name() == name)?;
            Some(family.get_metric()[0].get_gauge().get_value())
        };
        let exhaustion = "agentloop_budget_exhaustion_seconds";
        assert_eq!(read(0, exhaustion), None);
        assert_eq!(read(10, exhaustion), None, "no usage");
        assert_eq!(read(20, "agentloop_budget_burn_per_hour"), Some(0.0));
        *cache.lock().unwrap() = budget(2, &json!([bucket(0, 2000)]), 2000);
        assert_eq!(read(100, exhaustion), Some(800.0), "8,000 remain, at 10 per second");
        assert_eq!(read(100, "agentloop_budget_burn_per_hour"), Some(36_000.0));
    }
}
