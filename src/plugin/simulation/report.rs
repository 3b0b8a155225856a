//! What a simulation found.

use std::fmt::Write as _;

use jiff::civil::Date;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::api::money::dollars;
use crate::plugin::screens::figures;
use crate::plugin::screens::table::TextTable;

/// Most stops that the text lists.
const MAX_STOPS: usize = 10;

/// Calls, and what they used.
#[derive(Serialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CallSum {
    /// Number of calls.
    pub calls: u64,
    /// Known tokens: uncached input, cache writes and output.
    pub tokens: i64,
    /// Known cost.
    #[serde(rename = "costMicroUSD")]
    pub cost: i64,
}

impl CallSum {
    /// Adds a call.
    pub fn add(&mut self, tokens: i64, cost: i64) {
        self.calls += 1;
        self.tokens = self.tokens.saturating_add(tokens);
        self.cost = self.cost.saturating_add(cost);
    }
}

/// A time without calls that a limit would have caused.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SimulatedStop {
    /// The history.
    pub agent: String,
    /// The limit.
    pub limit: String,
    /// The first call that would not have been made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call: Option<String>,
    /// Its number in the history, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    /// When the loop would have stopped.
    pub at: Timestamp,
    /// When it would have continued. Absent: not before the limit is raised, or the hours begin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// Only the turn would have ended, and the next one begun.
    pub ends_turn_only: bool,
    /// Calls that would not have been made.
    pub refused: CallSum,
}

/// A day, in UTC.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SimulatedDay {
    /// The day.
    pub day: Date,
    /// Calls of the history.
    pub made: CallSum,
    /// Those that would not have been made.
    pub refused: CallSum,
}

/// The result of a simulation.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SimulationReport {
    /// The limits that were simulated.
    pub changes: Vec<String>,
    /// The histories, by the names of their Agents.
    pub agents: Vec<String>,
    /// First and last call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period: Option<(Timestamp, Timestamp)>,
    /// Calls of the history.
    pub made: CallSum,
    /// Those that would not have been made.
    pub refused: CallSum,
    /// When loops would have stopped, in order.
    pub stops: Vec<SimulatedStop>,
    /// By day.
    pub days: Vec<SimulatedDay>,
    /// What differs from what would have happened.
    pub approximations: Vec<String>,
}

impl SimulationReport {
    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        let changes = self.changes.join(", ");
        let Some((first, last)) = self.period else {
            return "The history has no calls.\n".into();
        };
        let _ = writeln!(text, "With {changes}, from {first} to {last}:");
        match self
            .stops
            .iter()
            .find(|stop| stop.refused.calls > 0 || !stop.ends_turn_only)
        {
            None => text.push_str("no call would have been refused.\n"),
            Some(stop) => {
                let call = match (&stop.call, stop.number) {
                    (Some(call), Some(number)) => format!(" before call {number} ({call})"),
                    _ => String::new(),
                };
                let _ = writeln!(
                    text,
                    "the first stop is at {}{call} of {}, by {}.",
                    stop.at, stop.agent, stop.limit
                );
            }
        }
        let (refused, made) = (self.refused, self.made);
        let _ = writeln!(
            text,
            "Refused: {} of {} calls, {} of {} tokens; saved: {} of {}.\n",
            refused.calls,
            made.calls,
            refused.tokens,
            made.tokens,
            dollars(refused.cost),
            dollars(made.cost)
        );
        let _ = writeln!(text, "{}", self.table_of_days());
        if !self.stops.is_empty() {
            let _ = writeln!(text, "{}", self.table_of_stops());
        }
        if let Some(more) = self.stops.len().checked_sub(MAX_STOPS).filter(|more| *more > 0) {
            let _ = writeln!(text, "{more} more stops: use -o json\n");
        }
        text.push_str("Actual results may differ:\n");
        for approximation in &self.approximations {
            let _ = writeln!(text, "- {approximation}");
        }
        text
    }

    fn table_of_days(&self) -> TextTable {
        let mut table = TextTable::new(vec!["DAY", "CALLS", "REFUSED", "TOKENS", "REFUSED", "COST", "SAVED"]);
        for day in &self.days {
            table.push(vec![
                day.day.to_string(),
                day.made.calls.to_string(),
                day.refused.calls.to_string(),
                day.made.tokens.to_string(),
                day.refused.tokens.to_string(),
                dollars(day.made.cost),
                dollars(day.refused.cost),
            ]);
        }
        table
    }

    fn table_of_stops(&self) -> TextTable {
        // A single history needs no name.
        let has_agents = self.agents.len() > 1;
        let agent = has_agents.then_some("AGENT");
        let columns = ["STOP"].into_iter().chain(agent);
        let mut table = TextTable::new(columns.chain(["LIMIT", "LASTS", "REFUSED CALLS"]).collect());
        for stop in self.stops.iter().take(MAX_STOPS) {
            let lasts = match (stop.ends_turn_only, stop.until) {
                (true, _) => "the turn".into(),
                (false, None) => "until it is raised".into(),
                (false, Some(until)) => figures::duration(until.duration_since(stop.at).max(SignedDuration::ZERO)),
            };
            let mut cells = vec![stop.at.to_string()];
            cells.extend(has_agents.then(|| stop.agent.clone()));
            cells.extend([stop.limit.clone(), lasts, stop.refused.calls.to_string()]);
            table.push(cells);
        }
        table
    }
}
