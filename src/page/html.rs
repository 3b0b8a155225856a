//! The page as HTML: a document, and the parts of it that change.
//!
//! All text goes through the template's escaping: names, tools, notes and messages come from manifests, tool servers and
//! models. The only unescaped texts are parts, which were escaped when they were written.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::agent_rows::AgentRow;
use super::recent::{AgentHistory, TurnResult};
use super::responses::{SCRIPT_NAME, STYLE_NAME};
use super::sensor_rows::SensorRow;
use super::view::{AgentView, BudgetRow, PageView};
use crate::api::status::LoopState;
use crate::link::events::EventLine;

/// Agents that are shown; more are counted.
pub const MAX_AGENTS: usize = 100;
/// Sensors, AgentBudgets and approvals that are shown; more are counted.
pub const MAX_ROWS: usize = 100;

/// A part of the page that is sent again when it changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagePart {
    /// The id of its element.
    pub id: String,
    /// What is in the element.
    pub html: String,
    /// The heading above it; empty for a part that needs none.
    heading: String,
    /// It is shown on request.
    folded: bool,
}

/// The parts of the page, in their order. Times are shown in this zone.
#[must_use]
pub fn parts(view: &PageView, zone: &TimeZone) -> Vec<PagePart> {
    let several = view
        .agents
        .windows(2)
        .any(|pair| pair[0].row.namespace != pair[1].row.namespace);
    let page = PageWriter { zone, several };
    let part = |id: &str, heading: &str, markup: Markup| PagePart {
        id: id.into(),
        html: markup.into_string(),
        heading: heading.into(),
        folded: false,
    };
    let mut parts = vec![
        part("agents", "Agents", page.agents(&view.agents)),
        part("approvals", "Approvals", page.approvals(view)),
    ];
    if !view.budgets.is_empty() {
        parts.push(part("budgets", "AgentBudgets", page.budgets(&view.budgets)));
    }
    if !view.sensors.is_empty() {
        parts.push(part("sensors", "Sensors", page.sensors(&view.sensors)));
    }
    if !view.notes.is_empty() {
        parts.push(part("notes", "Not shown", notes(&view.notes)));
    }
    for agent in view.agents.iter().take(MAX_AGENTS) {
        let Some(history) = &agent.history else { continue };
        let (key, name) = (
            format!("{}/{}", agent.row.namespace, agent.row.agent),
            page.name(&agent.row),
        );
        let turns = page.turns(history);
        parts.push(part(&format!("turns/{key}"), &format!("Turns of {name}"), turns));
        parts.push(PagePart {
            folded: true,
            ..part(
                &format!("events/{key}"),
                &format!("Events of {name}"),
                page.events(history),
            )
        });
    }
    parts
}

/// The head of a page of ours. `lives`: it has the script.
#[must_use]
pub fn head(lives: bool) -> Markup {
    html! {
        head {
            meta charset="utf-8";
            title { "agentloop" }
            meta name="viewport" content="width=device-width, initial-scale=1";
            link rel="icon" href="data:,";
            link rel="stylesheet" href=(STYLE_NAME);
            @if lives {
                script src=(SCRIPT_NAME) defer {}
                noscript { meta http-equiv="refresh" content="5"; }
            }
        }
    }
}

/// The whole page. `more` is shown beside the title.
#[must_use]
pub fn document(parts: &[PagePart], zone: &TimeZone, more: &Markup) -> String {
    let zone = zone.iana_name().unwrap_or("the time zone of the run");
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (head(true))
            body {
                header {
                    h1 { "agentloop" }
                    p #connection role="status" { "Not live: reload the page" }
                    p { "Times are in " (zone) "." }
                    (more)
                }
                main {
                    @for part in parts {
                        @if part.folded {
                            details {
                                summary { (part.heading) }
                                div .wide id=(part.id) { (PreEscaped(&part.html)) }
                            }
                        } @else {
                            h2 { (part.heading) }
                            div .wide id=(part.id) { (PreEscaped(&part.html)) }
                        }
                    }
                }
            }
        }
    };
    page.into_string()
}

fn notes(notes: &[String]) -> Markup {
    html! { @for note in notes.iter().take(MAX_ROWS) { p { (note) } } }
}

/// A request for an approval.
struct ApprovalRow {
    /// What it is for, its gate, the kind, and the tool.
    texts: [String; 4],
    since: Timestamp,
    until: Option<Timestamp>,
}

/// Writes the parts.
struct PageWriter<'a> {
    zone: &'a TimeZone,
    /// The Agents are in several namespaces: names include them.
    several: bool,
}

impl PageWriter<'_> {
    fn name(&self, row: &AgentRow) -> String {
        self.named(&row.namespace, &row.agent)
    }

    fn named(&self, namespace: &str, name: &str) -> String {
        if self.several {
            format!("{namespace}/{name}")
        } else {
            name.into()
        }
    }

    fn agents(&self, agents: &[AgentView]) -> Markup {
        let numbers = [
            "Turns",
            "Input",
            "Output",
            "Cache read",
            "Cache write",
            "Cost",
            "Budget",
        ];
        html! {
            table {
                caption { "State and usage since each Agent was created" }
                thead { tr {
                    @for name in ["Agent", "Model", "State"] { th scope="col" { (name) } }
                    @for name in numbers { th .number scope="col" { (name) } }
                    @for name in ["Resumes", "Waits for"] { th scope="col" { (name) } }
                } }
                tbody {
                    @for agent in agents.iter().take(MAX_AGENTS) { (self.agent(agent)) }
                }
            }
            (more(agents.len(), MAX_AGENTS))
        }
    }

    fn agent(&self, agent: &AgentView) -> Markup {
        let (row, usage) = (&agent.row, &agent.usage);
        let is_bad = row.state == LoopState::Paused || row.message.is_some();
        let waits_for = AgentRow {
            resumes_at: None,
            ..row.clone()
        };
        html! {
            tr {
                th scope="row" { (self.name(row)) }
                td { (agent.model) }
                td .bad[is_bad] { (row.state) }
                td .number { (row.turns.1) }
                @for tokens in [usage.input_tokens, usage.output_tokens, usage.cache_read_tokens, usage.cache_write_tokens] {
                    td .number { (tokens) }
                }
                td .number { (agent.cost.as_deref().unwrap_or("–")) }
                td .number { (agent.budget.as_deref().unwrap_or("–")) }
                td { @if let Some(at) = row.resumes_at { (self.time(at)) } }
                td .text { (waits_for.waits_for(self.zone)) }
            }
        }
    }

    fn approvals(&self, view: &PageView) -> Markup {
        let calls = view.agents.iter().flat_map(|agent| {
            let name = self.name(&agent.row);
            agent.gates.iter().map(move |gate| ApprovalRow {
                texts: [name.clone(), gate.id.clone(), gate.kind.to_string(), gate.tool.clone()],
                since: gate.opened_at.0,
                until: gate.expires_at.as_ref().map(|at| at.0),
            })
        });
        let budgets = view.budgets.iter().filter_map(|budget| {
            let (id, since) = budget.gate.clone()?;
            let name = self.named(&budget.namespace, &budget.budget);
            Some(ApprovalRow {
                texts: [name, id, "BudgetAsk".into(), String::new()],
                since,
                until: None,
            })
        });
        let rows: Vec<ApprovalRow> = calls.chain(budgets).collect();
        if rows.is_empty() {
            return html! { p { "Nothing waits for an approval." } };
        }
        html! {
            table {
                caption { "Waiting for an approval" }
                thead { tr {
                    @for name in ["For", "Gate", "Kind", "Tool", "Since", "Until"] { th scope="col" { (name) } }
                } }
                tbody {
                    @for row in rows.iter().take(MAX_ROWS) { tr {
                        @for text in &row.texts { td { (text) } }
                        td { (self.time(row.since)) }
                        td { @if let Some(at) = row.until { (self.time(at)) } }
                    } }
                }
            }
            (more(rows.len(), MAX_ROWS))
        }
    }

    fn budgets(&self, budgets: &[BudgetRow]) -> Markup {
        html! {
            table {
                caption { "Limits that Agents share" }
                thead { tr {
                    @for name in ["AgentBudget", "Ready", "Window", "Limit", "Used", "Used share", "Reserved", "Resets"] {
                        th scope="col" { (name) }
                    }
                    th .number scope="col" { "Agents" }
                    th scope="col" { "Message" }
                } }
                tbody {
                    @for budget in budgets.iter().take(MAX_ROWS) { @let summary = &budget.summary; tr {
                        th scope="row" { (self.named(&budget.namespace, &budget.budget)) }
                        td .bad[budget.message.is_some()] { (budget.ready) }
                        @for text in [
                            &summary.window, &summary.limit, &summary.used, &summary.used_percent, &summary.reserved, &summary.resets,
                        ] { td { (text) } }
                        td .number { (budget.agents) }
                        td .text { @if let Some(message) = &budget.message { (message) } }
                    } }
                }
            }
            (more(budgets.len(), MAX_ROWS))
        }
    }

    fn sensors(&self, sensors: &[SensorRow]) -> Markup {
        html! {
            table {
                caption { "Sources of events" }
                thead { tr {
                    @for name in ["Sensor", "Type", "Ready"] { th scope="col" { (name) } }
                    @for name in ["Events", "Errors"] { th .number scope="col" { (name) } }
                    th scope="col" { "Message" }
                } }
                tbody {
                    @for sensor in sensors.iter().take(MAX_ROWS) { tr {
                        th scope="row" { (self.named(&sensor.namespace, &sensor.sensor)) }
                        td { (sensor.source) }
                        td .bad[sensor.message.is_some()] { (sensor.ready) }
                        td .number { (sensor.counts.0) }
                        td .number { (sensor.counts.1) }
                        td .text { (sensor.message.as_deref().or(sensor.url.as_deref()).unwrap_or_default()) }
                    } }
                }
            }
            (more(sensors.len(), MAX_ROWS))
        }
    }

    fn turns(&self, history: &AgentHistory) -> Markup {
        if history.turns.is_empty() {
            return html! { p { "No turn yet." } };
        }
        html! {
            table {
                thead { tr {
                    th .number scope="col" { "Turn" }
                    @for name in ["Kind", "Began", "Ended", "End"] { th scope="col" { (name) } }
                    @for name in ["Calls", "Tool runs", "Denied"] { th .number scope="col" { (name) } }
                    th scope="col" { "Tools" }
                } }
                tbody {
                    @for turn in history.turns.iter().rev() { tr {
                        th .number scope="row" { (turn.turn) }
                        td { (if turn.kind.is_empty() { "own" } else { &turn.kind }) }
                        td { (self.time_of(&turn.started_at)) }
                        td { @if let Some(at) = &turn.ended_at { (self.time_of(at)) } }
                        td .text .bad[matches!(turn.end, Some(TurnResult::Failed(_)))] { @match &turn.end {
                            None => "in progress",
                            Some(TurnResult::Completed(how)) if how.is_empty() => "completed",
                            Some(TurnResult::Completed(how)) => { "completed: " (how) }
                            Some(TurnResult::Failed(kind)) => { "failed: " (kind) }
                        } }
                        @for count in [turn.calls, turn.runs, turn.denied] { td .number { (count) } }
                        td .text { (turn.tools.iter().map(String::as_str).collect::<Vec<_>>().join(", ")) }
                    } }
                }
            }
        }
    }

    fn events(&self, history: &AgentHistory) -> Markup {
        html! {
            table {
                thead { tr {
                    @for name in ["Time", "Event", "Turn", "Call or run", "Tool", "Outcome", "Note"] { th scope="col" { (name) } }
                } }
                tbody {
                    @for event in history.events.iter().rev() { (self.event(event)) }
                }
            }
        }
    }

    fn event(&self, event: &EventLine) -> Markup {
        let id = event.run.as_deref().or(event.call.as_deref()).unwrap_or_default();
        html! {
            tr {
                td { (self.time_of(&event.at)) }
                td { (event.event) }
                td { (event.turn) }
                td { (id) }
                td { (event.tool.as_deref().unwrap_or_default()) }
                td { (event.outcome.as_deref().unwrap_or_default()) }
                td .text { (event.note) }
            }
        }
    }

    fn time(&self, at: Timestamp) -> Markup {
        let clock = at.to_zoned(self.zone.clone()).strftime("%H:%M:%S").to_string();
        html! { time datetime=(format!("{at:.0}")) { (clock) } }
    }

    /// A time as an event states it.
    fn time_of(&self, at: &str) -> Markup {
        at.parse().map_or_else(|_| html! { (at) }, |at| self.time(at))
    }
}

/// How many rows are not shown.
fn more(count: usize, shown: usize) -> Markup {
    html! { @if count > shown { p { "and " (count - shown) " more" } } }
}

#[cfg(test)]
mod tests;
