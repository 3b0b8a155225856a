//! The page of fixed states: as a whole, and with hostile text in every field.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pretty_assertions::assert_eq;

use super::*;
use crate::api::budget::BudgetSummary;
use crate::api::status::{Gate, GateKind, LoopOutcome, LoopUsage, PauseReason};
use crate::page::recent::TurnRecord;

fn at(second: i64) -> Timestamp {
    // 2026-11-22 12:00:00 UTC
    Timestamp::from_second(1_795_348_800 + second).unwrap()
}

fn gate(id: &str, tool: &str) -> Gate {
    Gate {
        id: id.into(),
        kind: GateKind::ToolCallNeedsApproval,
        tool: tool.into(),
        arguments_hash: "5f0c".into(),
        opened_at: Time(at(30)),
        expires_at: Some(Time(at(3630))),
        untrusted_content_source: None,
    }
}

fn event(seq: i64, name: &str) -> EventLine {
    EventLine {
        seq,
        event: name.into(),
        at: at(seq).to_string(),
        turn: 7,
        ..EventLine::default()
    }
}

fn turn(number: i64, end: Option<TurnResult>) -> TurnRecord {
    TurnRecord {
        turn: number,
        started_at: at(number).to_string(),
        ended_at: end.as_ref().map(|_| at(number + 1).to_string()),
        end,
        calls: 3,
        runs: 2,
        denied: 1,
        tools: BTreeSet::from(["files__read".into(), "files__write".into()]),
        ..TurnRecord::default()
    }
}

fn watcher() -> AgentView {
    let heartbeat = TurnRecord {
        kind: "heartbeat".into(),
        ..turn(6, Some(TurnResult::Failed("Timeout".into())))
    };
    let run = EventLine {
        run: Some("t7c1r1".into()),
        tool: Some("files__write".into()),
        outcome: Some("ok".into()),
        ..event(9, "tool:outcome")
    };
    AgentView {
        row: AgentRow {
            namespace: "team-a".into(),
            agent: "watcher".into(),
            state: LoopState::Paused,
            reasons: vec![PauseReason::ConsecutiveErrors],
            resumes_at: Some(at(90)),
            turns: (8, 7),
            errors: 3,
            last_error: Some("Timeout".into()),
            ..AgentRow::default()
        },
        model: "gpt-5.2".into(),
        usage: LoopUsage {
            input_tokens: 1200,
            output_tokens: 340,
            cache_read_tokens: 9000,
            cache_write_tokens: 800,
            ..LoopUsage::default()
        },
        cost: Some("$1.25".into()),
        budget: Some("62%".into()),
        gates: vec![gate("g7", "files__write")],
        history: Some(AgentHistory {
            turns: [
                turn(5, Some(TurnResult::Completed("sleep".into()))),
                heartbeat,
                turn(7, None),
            ]
            .into(),
            events: [event(8, "autonomy:turn_started"), run].into(),
        }),
    }
}

fn helper() -> AgentView {
    AgentView {
        row: AgentRow {
            namespace: "team-b".into(),
            agent: "helper".into(),
            state: LoopState::Stopped,
            outcome: Some(LoopOutcome::Completed),
            ..AgentRow::default()
        },
        model: "scripted".into(),
        history: Some(AgentHistory::default()),
        ..AgentView::default()
    }
}

fn budget() -> BudgetRow {
    BudgetRow {
        namespace: "team-a".into(),
        budget: "team".into(),
        ready: "False".into(),
        message: Some("Exhausted: add a top-up".into()),
        summary: BudgetSummary {
            window: "1h".into(),
            limit: "30k tokens".into(),
            used: "19k".into(),
            used_percent: "62%".into(),
            reserved: "4k".into(),
            resets: "14:05 UTC".into(),
        },
        agents: 2,
        gate: Some(("b1".into(), at(45))),
    }
}

fn sensor() -> SensorRow {
    SensorRow {
        namespace: "team-a".into(),
        sensor: "orders".into(),
        source: "Webhook".into(),
        url: Some("http://127.0.0.1:8080/".into()),
        ready: "True".into(),
        message: None,
        counts: (3, 1),
    }
}

fn page(view: &PageView) -> String {
    document(&parts(view, &TimeZone::UTC), &TimeZone::UTC, &Markup::default())
}

#[test]
fn the_page_shows_loops_usage_approvals_budgets_sensors_turns_and_events() {
    let view = PageView {
        agents: vec![watcher(), helper()],
        budgets: vec![budget()],
        sensors: vec![sensor()],
        notes: vec!["The turns of 3 Agents are not shown.".into()],
    };
    insta::assert_snapshot!("page", page(&view).replace("><", ">\n<"));
}

#[test]
fn a_run_without_budgets_and_sensors_has_no_tables_of_them() {
    let view = PageView {
        agents: vec![helper()],
        ..PageView::default()
    };
    let ids: Vec<String> = parts(&view, &TimeZone::UTC).into_iter().map(|part| part.id).collect();
    assert_eq!(
        ids,
        ["agents", "approvals", "turns/team-b/helper", "events/team-b/helper"]
    );
    assert!(page(&view).contains("Nothing waits for an approval.") && page(&view).contains("No turn yet."));
}

/// A text that would run in the page, and leave an attribute, if it were not escaped.
const HOSTILE: &str = "'\"><script>alert(1)</script><img src=x onerror=alert(1)>&amp;";
/// The same, escaped.
const ESCAPED: &str = "'&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&amp;amp;";

fn hostile() -> PageView {
    let text = || HOSTILE.to_owned();
    let completed = TurnRecord {
        kind: text(),
        started_at: text(),
        ended_at: Some(text()),
        tools: BTreeSet::from([text()]),
        ..turn(1, Some(TurnResult::Completed(text())))
    };
    let failed = turn(2, Some(TurnResult::Failed(text())));
    let event = EventLine {
        seq: 1,
        event: text(),
        at: text(),
        run: Some(text()),
        tool: Some(text()),
        outcome: Some(text()),
        note: text(),
        ..EventLine::default()
    };
    let agent = AgentView {
        row: AgentRow {
            namespace: text(),
            agent: text(),
            wakes_on: Some(text()),
            errors: 1,
            last_error: Some(text()),
            message: Some(text()),
            ..AgentRow::default()
        },
        model: text(),
        cost: Some(text()),
        budget: Some(text()),
        gates: vec![gate(HOSTILE, HOSTILE)],
        history: Some(AgentHistory {
            turns: [completed, failed].into(),
            events: [event].into(),
        }),
        usage: LoopUsage::default(),
    };
    let summary = BudgetSummary {
        window: text(),
        limit: text(),
        used: text(),
        used_percent: text(),
        reserved: text(),
        resets: text(),
    };
    PageView {
        agents: vec![agent],
        budgets: vec![BudgetRow {
            namespace: text(),
            budget: text(),
            ready: text(),
            message: Some(text()),
            summary,
            agents: 1,
            gate: Some((text(), at(0))),
        }],
        sensors: vec![SensorRow {
            namespace: text(),
            sensor: text(),
            source: text(),
            url: None,
            ready: text(),
            message: Some(text()),
            counts: (0, 0),
        }],
        notes: vec![text()],
    }
}

#[test]
fn an_agent_whose_turns_are_not_shown_has_its_row_only() {
    let agent = AgentView {
        history: None,
        ..watcher()
    };
    let view = PageView {
        agents: vec![agent],
        notes: vec!["Turns need a permission.".into()],
        ..PageView::default()
    };
    let page = page(&view);
    assert!(
        page.contains("gpt-5.2") && page.contains("Turns need a permission."),
        "{page}"
    );
    assert!(!page.contains("turns/team-a") && !page.contains("autonomy:"), "{page}");
}

#[test]
fn hostile_text_is_escaped_in_every_field() {
    let page = page(&hostile());
    assert_eq!(page.matches("<script").count(), 1, "the script of the page only");
    assert!(!page.contains(HOSTILE) && !page.contains("<img"), "{page}");
    let count = page.matches(ESCAPED).count();
    // Agent 7 with what it waits for, approvals 5, budgets 9, Sensors 4, the note, turns 6, events 6; headings and ids 2 + 4.
    assert_eq!(count, 44, "{}", page.replace("><", ">\n<"));
}

#[test]
fn rows_are_shown_up_to_the_bounds_and_the_rest_is_counted() {
    for (count, words) in [(MAX_AGENTS, None), (MAX_AGENTS + 1, Some("and 1 more"))] {
        let view = PageView {
            agents: vec![helper(); count],
            budgets: vec![budget(); count],
            sensors: vec![sensor(); count],
            notes: Vec::new(),
        };
        let parts = parts(&view, &TimeZone::UTC);
        for part in &parts[..4] {
            assert_eq!(part.html.matches("<tr>").count(), MAX_AGENTS + 1, "{}", part.id);
            assert_eq!(part.html.contains("more"), words.is_some(), "{}", part.id);
        }
        let turns = parts.iter().filter(|part| part.id.starts_with("turns/"));
        assert_eq!(turns.count(), MAX_AGENTS);
    }
    assert_eq!(MAX_AGENTS, MAX_ROWS);
}
