//! Shows a run: a table that is redrawn on a terminal, otherwise JSON lines.
//!
//! A line contains only what has changed. If the reader closes the output, the run ends.

use std::fmt::Write as _;
use std::io::{self, Write};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};

use super::sensor_rows;
use crate::page::agent_rows::AgentRow;
use crate::page::sensor_rows::SensorRow;

/// Rows that are drawn; more are counted.
const MAX_ROWS: usize = 40;
/// Moves the cursor up and to the left, and clears everything below; disables wrapping while drawing.
const NO_WRAP: &str = "\x1b[?7l";
const WRAP: &str = "\x1b[?7h";

/// Where and how a run is shown.
pub enum RunOutput {
    /// A table, redrawn in place.
    Table {
        /// The user's time zone.
        zone: TimeZone,
        /// Lines of the last drawing.
        drawn: usize,
    },
    /// JSON lines.
    Lines {
        /// As last shown.
        shown: Vec<AgentRow>,
        /// As last shown.
        sensors: Vec<SensorRow>,
    },
}

impl RunOutput {
    /// A table in this time zone.
    #[must_use]
    pub fn table(zone: TimeZone) -> Self {
        Self::Table { zone, drawn: 0 }
    }

    /// Lines; nothing was shown yet.
    #[must_use]
    pub fn lines() -> Self {
        Self::Lines {
            shown: Vec::new(),
            sensors: Vec::new(),
        }
    }

    /// Shows the rows that have changed.
    pub fn show(
        &mut self,
        out: &mut impl Write,
        (rows, sensors): (&[AgentRow], &[SensorRow]),
        now: Timestamp,
    ) -> io::Result<()> {
        match self {
            Self::Table { zone, drawn } => {
                let text = table(rows, zone) + &sensor_rows::table(sensors);
                let back = if *drawn > 0 {
                    format!("\x1b[{drawn}A\r\x1b[J")
                } else {
                    String::new()
                };
                *drawn = text.lines().count();
                out.write_all(format!("{NO_WRAP}{back}{text}{WRAP}").as_bytes())?;
            }
            Self::Lines { shown, sensors: before } => {
                for row in rows.iter().filter(|row| !shown.contains(row)) {
                    line(out, &json_row(row, now))?;
                }
                for row in sensors.iter().filter(|row| !before.contains(row)) {
                    line(out, &sensor_rows::json_row(row, &stamp(now)))?;
                }
                *shown = rows.to_vec();
                *before = sensors.to_vec();
            }
        }
        out.flush()
    }

    /// Shows where the page is. With a table, this is the line above it.
    pub fn page(&self, out: &mut impl Write, url: &str, now: Timestamp) -> io::Result<()> {
        match self {
            Self::Table { .. } => writeln!(out, "Page: {url}")?,
            Self::Lines { .. } => line(out, &json!({ "ts": stamp(now), "type": "page", "url": url }))?,
        }
        out.flush()
    }

    /// Shows why the run ended.
    pub fn end(&self, out: &mut impl Write, cause: &str, words: &str, now: Timestamp) -> io::Result<()> {
        match self {
            Self::Table { .. } => writeln!(out, "{words}")?,
            Self::Lines { .. } => line(out, &json!({ "ts": stamp(now), "type": "end", "cause": cause }))?,
        }
        out.flush()
    }
}

/// Writes a line at once: several threads write lines.
pub fn line(out: &mut impl Write, value: &Value) -> io::Result<()> {
    out.write_all(format!("{value}\n").as_bytes())
}

/// A time in a line.
#[must_use]
pub fn stamp(now: Timestamp) -> String {
    format!("{now:.3}")
}

fn json_row(row: &AgentRow, now: Timestamp) -> Value {
    let mut line = json!({
        "ts": stamp(now), "type": "agent", "namespace": row.namespace, "agent": row.agent,
        "state": row.state, "turn": row.turns.0, "turnsCompleted": row.turns.1, "tokens": row.tokens,
    });
    let mut add = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            line[name] = value;
        }
    };
    add("reasons", (!row.reasons.is_empty()).then(|| json!(row.reasons)));
    add("resumesAt", row.resumes_at.map(|moment| json!(stamp(moment))));
    add("wakesOn", row.wakes_on.as_ref().map(|names| json!(names)));
    add("outcome", row.outcome.map(|outcome| json!(outcome)));
    add("lastError", row.last_error.as_ref().map(|kind| json!(kind)));
    add("message", row.message.as_ref().map(|message| json!(message)));
    line
}

fn table(rows: &[AgentRow], zone: &TimeZone) -> String {
    let several = rows.windows(2).any(|pair| pair[0].namespace != pair[1].namespace);
    let name = |row: &AgentRow| {
        if several {
            format!("{}/{}", row.namespace, row.agent)
        } else {
            row.agent.clone()
        }
    };
    let width = rows.iter().map(|row| name(row).chars().count()).fold(5, usize::max);
    let mut text = format!(
        "{:width$}  {:9} {:>6} {:>9}  WAITS FOR\n",
        "AGENT", "STATE", "TURNS", "TOKENS"
    );
    for row in rows.iter().take(MAX_ROWS) {
        let cells = format!(
            "{:width$}  {:9} {:>6} {:>9}  {}",
            name(row),
            row.state.as_ref(),
            row.turns.1,
            row.tokens,
            row.waits_for(zone)
        );
        text.push_str(cells.trim_end());
        text.push('\n');
    }
    if rows.len() > MAX_ROWS {
        let _ = writeln!(text, "and {} more", rows.len() - MAX_ROWS);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::status::{LoopState, PauseReason};

    fn asleep(agent: &str) -> AgentRow {
        AgentRow {
            namespace: "default".into(),
            agent: agent.into(),
            state: LoopState::Sleeping,
            resumes_at: Some("2026-11-22T12:00:05Z".parse().unwrap()),
            turns: (3, 2),
            tokens: 120,
            ..AgentRow::default()
        }
    }

    fn shown(output: &mut RunOutput, rows: &[AgentRow]) -> String {
        let mut bytes = Vec::new();
        output.show(&mut bytes, (rows, &[]), Timestamp::UNIX_EPOCH).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_table_has_a_row_for_each_agent_and_is_drawn_over_the_one_before() {
        let mut output = RunOutput::table(TimeZone::UTC);
        let paused = AgentRow {
            state: LoopState::Paused,
            reasons: vec![PauseReason::BudgetExhausted],
            resumes_at: None,
            message: Some("top it up".into()),
            ..asleep("b")
        };
        let first = shown(&mut output, &[asleep("a"), paused.clone()]);
        assert!(
            first.contains("a      Sleeping       2       120  until 12:00:05\n"),
            "{first}"
        );
        assert!(first.contains("BudgetExhausted: top it up\n"), "{first}");
        assert!(shown(&mut output, &[asleep("a"), paused]).contains("\x1b[3A"));
    }

    #[test]
    fn names_of_several_namespaces_are_whole() {
        let other = AgentRow {
            namespace: "team".into(),
            ..asleep("b")
        };
        let text = shown(&mut RunOutput::table(TimeZone::UTC), &[asleep("a"), other]);
        assert!(text.contains("default/a") && text.contains("team/b"), "{text}");
    }

    #[test]
    fn lines_are_json_and_contain_only_changes() {
        let mut output = RunOutput::lines();
        let text = shown(&mut output, &[asleep("a"), asleep("b")]);
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(
            (&lines[0]["agent"], &lines[0]["state"]),
            (&json!("a"), &json!("Sleeping"))
        );
        assert_eq!(shown(&mut output, &[asleep("a"), asleep("b")]), "");
        let more = AgentRow {
            tokens: 121,
            ..asleep("b")
        };
        assert_eq!(shown(&mut output, &[asleep("a"), more]).lines().count(), 1);
    }
}
