//! What an Agent used since a time, by model, from its events. Keeps sums, and no event.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kube::ResourceExt;

use super::costs::CostRow;
use super::event_usage::AnsweredCalls;
use crate::api::Agent;
use crate::api::status::{MAX_MODELS, OTHER_MODELS};
use crate::link::event_names;
use crate::link::events::EventLine;
use crate::support::text::first_chars;

/// Name of the event of a worker that starts. Its note is the epoch of the pod.
const STARTED: &str = "loop:started";
/// Epoch of the first pod of an Agent: no call was made before.
const FIRST_EPOCH: &str = "1";
/// Maximum number of characters of the name of a model.
const MAX_NAME: usize = 256;
/// Events of one Agent that are read: twice as many as a journal keeps.
const MAX_EVENTS: u32 = 100_000;

/// Why the events of an Agent do not say what it used.
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageGap {
    /// A worker of an earlier version made calls.
    #[error("calls were made by an earlier version of agentloop")]
    EarlierWorker,
    /// The journal begins later.
    #[error("its journal does not reach back that far")]
    LaterJournal,
    /// Events that do not belong to one journal.
    #[error("its events changed while they were read")]
    OtherJournal,
    /// More events than a journal has, one without a time, or fewer than there are.
    #[error("its events cannot be read")]
    Unreadable,
}

/// The calls of one Agent since a time.
#[derive(Clone, Debug)]
pub struct CallsSince {
    since: Timestamp,
    /// Whether there was an event before that time, or there cannot be one.
    is_reached: bool,
    gap: Option<UsageGap>,
    read: u32,
    by_model: BTreeMap<String, AnsweredCalls>,
}

impl CallsSince {
    /// The calls since a time, of which those of an earlier Agent of this name are none.
    #[must_use]
    pub fn new(agent: &Agent, since: Timestamp) -> Self {
        let created = agent.creation_timestamp().map(|time| time.0);
        Self {
            since: created.map_or(since, |created| created.max(since)),
            is_reached: false,
            gap: None,
            read: 0,
            by_model: BTreeMap::new(),
        }
    }

    /// Adds an event, in any order.
    pub fn add(&mut self, event: &EventLine) {
        self.read = self.read.saturating_add(1);
        let at: Option<Timestamp> = event.at.parse().ok();
        let Some(at) = at.filter(|_| self.read <= MAX_EVENTS) else {
            self.gap = Some(UsageGap::Unreadable);
            return;
        };
        self.is_reached |= at < self.since || event.event == STARTED && event.note == FIRST_EPOCH;
        if at < self.since || event.event != event_names::CALL_ANSWERED {
            return;
        }
        let Some(model) = &event.model else {
            self.gap = Some(UsageGap::EarlierWorker);
            return;
        };
        let model = first_chars(model, MAX_NAME);
        let is_listed = self.by_model.len() < MAX_MODELS || self.by_model.contains_key(model);
        let model = if is_listed { model } else { OTHER_MODELS };
        self.by_model.entry(model.to_owned()).or_default().add(event);
    }

    /// The events are not those of one journal.
    pub fn interrupt(&mut self) {
        self.gap = Some(UsageGap::OtherJournal);
    }

    /// Events are missing, since the pod did not send them in time.
    pub fn break_off(&mut self) {
        self.gap = Some(UsageGap::Unreadable);
    }

    /// Whether earlier events change nothing.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_reached || self.gap.is_some()
    }

    /// A row for each model, once all events are read that there are.
    pub fn rows(self) -> Result<Vec<CostRow>, UsageGap> {
        if let Some(gap) = self.gap {
            return Err(gap);
        }
        if !self.is_reached {
            return Err(UsageGap::LaterJournal);
        }
        let row = |(model, calls): (String, AnsweredCalls)| CostRow {
            of: model,
            deleted: false,
            calls: calls.calls,
            unknown_calls: Some(calls.unknown_calls),
            input_tokens: calls.input_tokens,
            output_tokens: calls.output_tokens,
            cost: calls.cost,
            from: Some(self.since),
        };
        Ok(self.by_model.into_iter().map(row).collect())
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;

    const SINCE: &str = "2026-11-22T13:00:00Z";

    fn agent(created: &str) -> Agent {
        serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"namespace": "team-a", "name": "helper", "creationTimestamp": created},
            "spec": {"instructions": "Be brief.", "model": {"api": "Scripted", "name": "small"}},
        }))
        .unwrap()
    }

    fn sums(created: &str, events: &Value) -> Result<Vec<(String, [i64; 4])>, UsageGap> {
        let mut calls = CallsSince::new(&agent(created), SINCE.parse().unwrap());
        let events: Vec<EventLine> = serde_json::from_value(events.clone()).unwrap();
        for event in &events {
            calls.add(event);
        }
        let row = |row: CostRow| (row.of, [row.calls, row.input_tokens, row.output_tokens, row.cost]);
        Ok(calls.rows()?.into_iter().map(row).collect())
    }

    fn answered(at: &str, model: &str) -> Value {
        json!({"event": "model:call_answered", "at": at, "model": model,
            "inputTokens": 100, "outputTokens": 10, "costMicroUSD": 5})
    }

    const CREATED: &str = "2026-11-01T00:00:00Z";
    const BEFORE: &str = "2026-11-22T12:59:59.999Z";
    const LATER: &str = "2026-11-22T13:30:00Z";

    #[test]
    fn calls_are_summed_by_model_from_the_very_moment_on() {
        let events = json!([
            answered(BEFORE, "large"),
            answered(SINCE, "large"),
            answered(LATER, "large"),
            answered(LATER, "small"),
            {"event": "model:call_answered", "at": LATER, "model": "small"},
        ]);
        let expected = [
            ("large".to_owned(), [2, 200, 20, 10]),
            ("small".to_owned(), [2, 100, 10, 5]),
        ];
        assert_eq!(sums(CREATED, &events), Ok(expected.to_vec()));
    }

    #[test]
    fn events_that_do_not_say_all_give_no_sum() {
        let later = json!([answered(LATER, "large")]);
        assert_eq!(sums(CREATED, &later), Err(UsageGap::LaterJournal));
        let earlier_worker = json!([answered(BEFORE, "large"), {"event": "model:call_answered", "at": LATER}]);
        assert_eq!(sums(CREATED, &earlier_worker), Err(UsageGap::EarlierWorker));
        // Before that time it does not matter.
        let earlier_worker = json!([{"event": "model:call_answered", "at": BEFORE}]);
        assert_eq!(sums(CREATED, &earlier_worker), Ok(vec![]));
        let no_time = json!([answered(BEFORE, "large"), answered("", "large")]);
        assert_eq!(sums(CREATED, &no_time), Err(UsageGap::Unreadable));
    }

    #[test]
    fn the_events_of_an_agent_that_is_younger_begin_with_its_first_pod() {
        let events =
            |epoch: &str| json!([{"event": "loop:started", "at": LATER, "note": epoch}, answered(LATER, "large")]);
        let expected = vec![("large".to_owned(), [1, 100, 10, 5])];
        assert_eq!(sums(LATER, &events("1")), Ok(expected));
        assert_eq!(sums(LATER, &events("2")), Err(UsageGap::LaterJournal));
        // The calls of an earlier Agent whose journal it has inherited are not its own.
        let inherited = json!([answered("2026-11-22T13:29:59Z", "large")]);
        assert_eq!(sums(LATER, &inherited), Ok(vec![]));
    }

    #[test]
    fn a_pod_that_names_many_models_adds_few_rows() {
        let many = (0..100).map(|number| answered(LATER, &format!("m{number:03}")));
        let events: Vec<Value> = std::iter::once(answered(BEFORE, "m")).chain(many).collect();
        let rows = sums(CREATED, &json!(events)).unwrap();
        assert_eq!(rows.len(), MAX_MODELS + 1);
        assert_eq!(rows.last().unwrap(), &(OTHER_MODELS.to_owned(), [90, 9_000, 900, 450]));
    }
}
