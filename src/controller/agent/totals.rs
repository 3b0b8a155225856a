//! Arithmetic of usage totals. Pure.

use crate::api::AgentStatus;
use crate::api::status::{LoopUsage, MAX_MODELS};
use crate::api::usage_counts::raise;
use crate::controller::pod_sessions::ReceivedReport;
use crate::link::messages::LoopTotals;

/// Merges the written totals, the remembered ones and the last report. What a pod has reported and is not written yet
/// is remembered, so that it outlives the pod.
pub(super) fn merge_totals(
    status: &AgentStatus,
    remembered: Option<&LoopTotals>,
    last_report: Option<&ReceivedReport>,
) -> LoopTotals {
    let mut known = LoopTotals {
        usage: status.usage.clone().unwrap_or_default(),
        turn: status.r#loop.as_ref().map_or(0, |status| status.turn),
    };
    if let Some(remembered) = remembered {
        known.usage = merge(known.usage, remembered.usage.clone());
        known.turn = known.turn.max(remembered.turn);
    }
    if let Some(received) = last_report {
        let report = received.report.loop_.as_ref();
        let mut usage = received.report.usage.clone();
        usage.counts = report.map(|report| report.counts.clone()).unwrap_or_default();
        known.usage = merge(known.usage, usage);
        known.turn = known.turn.max(report.map_or(0, |report| report.turn));
    }
    known
}

/// The greater of both in each count: totals never decrease.
pub(super) fn merge(mut known: LoopUsage, new: LoopUsage) -> LoopUsage {
    raise!(
        known, new;
        calls, unknown_calls, estimated_calls, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens,
        reasoning_tokens, cost,
    );
    for model in new.by_model {
        // Not cut off later: each name would be compared with all before it.
        let has_room = known.by_model.len() < MAX_MODELS;
        match known.by_model.iter_mut().find(|known| known.model == model.model) {
            Some(known) => raise!(
                known, model;
                calls, unknown_calls, estimated_calls, input_tokens, output_tokens, cache_read_tokens,
                cache_write_tokens, reasoning_tokens, cost,
            ),
            None if has_room => known.by_model.push(model),
            None => {}
        }
    }
    known.counts.merge(&new.counts);
    known
}

/// The sum of all tokens. The four kinds are disjoint; reasoning tokens are part of the output.
pub(super) fn tokens(usage: &LoopUsage) -> i64 {
    usage
        .input_tokens
        .saturating_add(usage.output_tokens)
        .saturating_add(usage.cache_read_tokens)
        .saturating_add(usage.cache_write_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::status::ModelUsage;
    use crate::api::usage_counts::{LoopCounts, of_tool, of_trip};

    #[test]
    fn totals_never_step_back_in_any_field() {
        let model = |name: &str, calls| ModelUsage {
            model: name.into(),
            calls,
            ..ModelUsage::default()
        };
        let old = LoopUsage {
            calls: 5,
            input_tokens: 100,
            counts: LoopCounts {
                turns: 3,
                tool_calls: 7,
                actions: 2,
                ..LoopCounts::default()
            },
            by_model: vec![model("a", 5)],
            ..LoopUsage::default()
        };
        let new = LoopUsage {
            calls: 4,
            input_tokens: 120,
            counts: LoopCounts {
                actions: 4,
                ..LoopCounts::default()
            },
            by_model: vec![model("a", 4), model("b", 1)],
            ..LoopUsage::default()
        };
        let merged = merge(old, new);
        assert_eq!((merged.calls, merged.input_tokens, merged.counts.turns), (5, 120, 3));
        assert_eq!((merged.counts.tool_calls, merged.counts.actions), (7, 4));
        assert_eq!(merged.by_model, [model("a", 5), model("b", 1)]);
    }

    #[test]
    fn the_first_ten_models_stay_listed_and_further_names_are_in_the_totals_only() {
        let model = |number: usize| ModelUsage {
            model: number.to_string(),
            calls: 1,
            ..ModelUsage::default()
        };
        let usage = |names: std::ops::Range<usize>| LoopUsage {
            by_model: names.map(model).collect(),
            ..LoopUsage::default()
        };
        for (known, new, listed) in [
            (0..9, 9..10, 10),
            (0..9, 9..11, 10),
            (0..10, 10..11, 10),
            (0..0, 0..16_000, 10),
        ] {
            let merged = merge(usage(known), usage(new));
            assert_eq!(merged.by_model, usage(0..listed).by_model);
        }
        // Without the bound, each of these names would be compared with all before it.
        let many = usage(0..200_000);
        let begun = std::time::Instant::now();
        merge(LoopUsage::default(), many);
        assert!(begun.elapsed() < std::time::Duration::from_secs(30));
    }

    #[test]
    fn reasoning_is_not_counted_twice() {
        let usage = LoopUsage {
            input_tokens: 1,
            output_tokens: 20,
            cache_read_tokens: 300,
            reasoning_tokens: 7,
            ..LoopUsage::default()
        };
        assert_eq!(tokens(&usage), 321);
    }

    #[test]
    fn counts_of_tools_and_limits_come_with_the_report_and_never_step_back() {
        let mut usage = LoopUsage::default();
        of_tool(&mut usage.counts.by_tool, "a").ok = 5;
        of_trip(&mut usage.counts.guardrail_trips, "IdleTimeout", "kill").count = 2;
        let status = AgentStatus {
            usage: Some(usage.clone()),
            ..AgentStatus::default()
        };
        let mut report = crate::link::messages::LoopReport::default();
        of_tool(&mut report.counts.by_tool, "a").error = 1;
        of_trip(&mut report.counts.guardrail_trips, "IdleTimeout", "kill").count = 1;
        let report = ReceivedReport {
            report: crate::link::messages::PodReport {
                loop_: Some(report),
                ..crate::link::messages::PodReport::default()
            },
            at: jiff::Timestamp::UNIX_EPOCH,
        };
        of_tool(&mut usage.counts.by_tool, "a").error = 1;
        assert_eq!(merge_totals(&status, None, Some(&report)).usage, usage);
    }
}
