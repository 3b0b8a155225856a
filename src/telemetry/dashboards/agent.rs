//! The dashboard *Agent*: one Agent in detail, or a few beside each other.

use super::dashboard::{Annotation, Dashboard, DashboardVariable};
use super::panel::{DashboardPanel, PanelUnit, STATE_COLORS, TableColumn, panel_query};
use super::query::{
    begins, grows, increase, mean_by, or_zero, per_minute, rate, rate_with, select, select_with, sum_by,
    sum_by_or_none, total, total_per_minute,
};
use crate::telemetry::registry;

/// Labels of an Agent.
const AGENT: &str = "namespace, agent";

pub fn board() -> Dashboard {
    let paused = (&registry::AGENT_LOOP_STATE, "state=\"Paused\"");
    let tripped = (&registry::AGENT_GUARDRAIL_TRIPS, "action=~\"pause|kill\"");
    Dashboard {
        name: "agent",
        title: "agentloop / Agent",
        description: "The loop of one Agent: its states, calls, tools, limits and tasks. No data with `metrics.perObject: Disabled`.",
        variables: vec![
            DashboardVariable::namespace(&registry::AGENT_INFO),
            DashboardVariable::in_namespace("agent", "Agent", &registry::AGENT_INFO),
        ],
        annotations: vec![
            Annotation {
                name: "Paused",
                color: "orange",
                query: begins(AGENT, paused, &registry::AGENT_INFO),
                title: "{{namespace}}/{{agent}} paused",
            },
            Annotation {
                name: "Limit reached",
                color: "red",
                query: grows("namespace, agent, guardrail, action", tripped, &registry::AGENT_INFO),
                title: "{{namespace}}/{{agent}}: {{guardrail}}, {{action}}",
            },
        ],
        rows: vec![
            ("State", state()),
            ("Definition and conditions", definition()),
            ("Calls and spend", spend()),
            ("Tools", tools()),
            ("Limits and approvals", limits()),
            ("Tasks", tasks()),
        ],
    }
}

/// The state as a number: 1 for the first of [`STATE_COLORS`], and so on.
fn state_number() -> String {
    let numbers = STATE_COLORS.iter().zip(1..).map(|((state, _), number)| {
        let series = select_with(&registry::AGENT_LOOP_STATE, &format!("state=\"{state}\""));
        format!("{series} * {number}")
    });
    format!("max by ({AGENT}) ({})", numbers.collect::<Vec<_>>().join(" or "))
}

fn state() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::states(
            "Loop state",
            "State of each loop over time.",
            state_number(),
            "{{namespace}}/{{agent}}",
        ),
        DashboardPanel::stat(
            "Turns",
            PanelUnit::Count,
            "Turns completed in the time shown.",
            total(&increase(&registry::AGENT_TURNS)),
        ),
        DashboardPanel::stat(
            "Last turn",
            PanelUnit::Timestamp,
            "When the last turn began, as far as the controller has learned.",
            format!("max({}) * 1000", select(&registry::AGENT_LAST_TURN)),
        ),
        DashboardPanel::stat(
            "Tokens",
            PanelUnit::Count,
            "Tokens billed in the time shown.",
            total(&increase(&registry::AGENT_TOKENS)),
        ),
        DashboardPanel::stat(
            "Cost",
            PanelUnit::UsDollars,
            "Cost in the time shown, at the prices known when each call was made.",
            total(&increase(&registry::AGENT_COST)),
        ),
        DashboardPanel::warning(
            "Pending approvals",
            "Requests that wait for a person.",
            or_zero(
                &total(&select(&registry::AGENT_PENDING_APPROVALS)),
                &registry::AGENT_INFO,
            ),
            1.0,
        ),
        DashboardPanel::warning(
            "Suspended",
            "Agents whose spec.suspend is true.",
            or_zero(&total(&select(&registry::AGENT_SUSPENDED)), &registry::AGENT_INFO),
            1.0,
        ),
    ]
}

fn definition() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::table(
            "About",
            "Model, mode and age of each Agent; generations differ while the controller has not yet seen a change of the spec.",
            vec![
                TableColumn {
                    title: "Created",
                    // One Agent can have two models for a moment, and has one time of creation.
                    query: format!(
                        "{} * on ({AGENT}) group_left () ({} * 1000)",
                        select(&registry::AGENT_INFO),
                        select(&registry::AGENT_CREATED)
                    ),
                    unit: PanelUnit::Timestamp,
                },
            ],
        )
        .wide(16),
        DashboardPanel::lines(
            "Generations not yet observed",
            PanelUnit::Count,
            "Changes of the spec that the status does not describe yet.",
            vec![panel_query(
                format!(
                    "{} - {}",
                    select(&registry::AGENT_GENERATION),
                    select(&registry::AGENT_OBSERVED_GENERATION)
                ),
                "{{namespace}}/{{agent}}",
            )],
        )
        .wide(8),
        DashboardPanel::stacked(
            "Conditions",
            PanelUnit::Count,
            "Conditions that hold: Ready with its status, others while they are not False.",
            vec![panel_query(
                sum_by("condition, status", &select(&registry::AGENT_CONDITION)),
                "{{condition}} {{status}}",
            )],
        )
        .wide(12),
        DashboardPanel::stacked(
            "Pause reasons",
            PanelUnit::Count,
            "Reasons for which loops are paused, and signs of repetition.",
            vec![
                panel_query(
                    sum_by_or_none(
                        "reason",
                        &select(&registry::AGENT_LOOP_PAUSED_REASON),
                        &registry::AGENT_INFO,
                    ),
                    "{{reason}}",
                ),
                panel_query(
                    sum_by("sign", &select(&registry::AGENT_LOOP_DETECTED)),
                    "loop: {{sign}}",
                ),
            ],
        )
        .wide(12),
    ]
}

fn spend() -> Vec<DashboardPanel> {
    let lost = |signal| {
        let rate = rate_with(&registry::AGENT_DROPPED_TELEMETRY, signal);
        total_per_minute(&rate, &registry::AGENT_CREATED)
    };
    vec![
        DashboardPanel::lines(
            "Turns",
            PanelUnit::PerMinute,
            "Completed turns per minute, and those that were given up after a failure.",
            vec![
                panel_query(per_minute(AGENT, &registry::AGENT_TURNS), "{{namespace}}/{{agent}}"),
                panel_query(
                    total_per_minute(&rate(&registry::AGENT_FAILED_TURNS), &registry::AGENT_CREATED),
                    "failed",
                ),
            ],
        ),
        DashboardPanel::stacked(
            "Tokens by type",
            PanelUnit::PerMinute,
            "Billed tokens per minute. The types are disjoint; reasoning is part of output.",
            vec![
                panel_query(per_minute("type", &registry::AGENT_TOKENS), "{{type}}"),
                panel_query(
                    format!("sum({}) * 60", rate(&registry::AGENT_REASONING_TOKENS)),
                    "of output: reasoning",
                ),
            ],
        ),
        DashboardPanel::lines(
            "Cost per hour",
            PanelUnit::UsDollars,
            "Cost per hour at the present rate, by model.",
            vec![panel_query(
                format!("{} * 3600", sum_by("model", &rate(&registry::AGENT_COST))),
                "{{model}}",
            )],
        ),
        DashboardPanel::lines(
            "Model calls",
            PanelUnit::PerMinute,
            "Model calls per minute by model, each attempt counts.",
            vec![panel_query(per_minute("model", &registry::AGENT_CALLS), "{{model}}")],
        )
        .wide(12),
        DashboardPanel::lines(
            "Calls refused or not billed exactly",
            PanelUnit::PerMinute,
            "Calls that a limit refused; calls of unknown usage, and those that are charged with their bound.",
            vec![
                panel_query(format!("sum({}) * 60", rate(&registry::AGENT_REFUSED_CALLS)), "refused"),
                panel_query(
                    format!("sum({}) * 60", rate(&registry::AGENT_UNKNOWN_CALLS)),
                    "usage unknown",
                ),
                panel_query(
                    format!("sum({}) * 60", rate(&registry::AGENT_ESTIMATED_CALLS)),
                    "charged by bound",
                ),
            ],
        )
        .wide(12),
        DashboardPanel::lines(
            "Telemetry not exported",
            PanelUnit::PerMinute,
            "Spans and log lines of the pod that were not exported over OTLP, per minute.",
            vec![
                panel_query(lost("signal=\"traces\""), "spans"),
                panel_query(lost("signal=\"logs\""), "log lines"),
            ],
        )
        .wide(12),
    ]
}

fn tools() -> Vec<DashboardPanel> {
    // Denied and unavailable calls were not run.
    let runs = (&registry::AGENT_TOOL_OUTCOMES, "outcome=~\"ok|error|unknown\"");
    let absent_at_zero = |metric| total_per_minute(&rate(metric), &registry::AGENT_CREATED);
    vec![
        DashboardPanel::stacked(
            "Tool calls by outcome",
            PanelUnit::PerMinute,
            "Tool calls per minute. Denied and unavailable ones were not run; unknown ones may have run.",
            vec![panel_query(
                per_minute("tool, outcome", &registry::AGENT_TOOL_OUTCOMES),
                "{{tool}}: {{outcome}}",
            )],
        ),
        DashboardPanel::lines(
            "Duration of tool runs",
            PanelUnit::Seconds,
            "Mean duration of tool runs. One that a restart of the worker cut counts as if it had taken no time.",
            vec![panel_query(
                mean_by("tool", &registry::AGENT_TOOL_SECONDS, runs),
                "{{tool}}",
            )],
        ),
        DashboardPanel::lines(
            "Tool runs and actions",
            PanelUnit::PerMinute,
            "Tool runs per minute, those of them with side effects, and tool calls that were denied.",
            vec![
                panel_query(format!("sum({}) * 60", rate(&registry::AGENT_TOOL_CALLS)), "tool runs"),
                panel_query(absent_at_zero(&registry::AGENT_ACTIONS), "of these actions"),
                panel_query(absent_at_zero(&registry::AGENT_DENIED_TOOL_CALLS), "denied"),
            ],
        ),
    ]
}

fn limits() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::stacked(
            "Limits reached and loops detected",
            PanelUnit::PerMinute,
            "Steps of guardrails and of loop detection per minute, by what was done.",
            vec![panel_query(
                per_minute("guardrail, action", &registry::AGENT_GUARDRAIL_TRIPS),
                "{{guardrail}}: {{action}}",
            )],
        )
        .wide(12),
        DashboardPanel::lines(
            "Age of the oldest pending approval",
            PanelUnit::Seconds,
            "How long the oldest request has waited for a person; 0 without one.",
            vec![panel_query(
                or_zero(
                    &format!("time() - min({})", select(&registry::AGENT_OLDEST_APPROVAL)),
                    &registry::AGENT_CREATED,
                ),
                "oldest",
            )],
        )
        .wide(12),
    ]
}

fn tasks() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::lines(
            "Waiting tasks",
            PanelUnit::Count,
            "Tasks and requests that wait for their turn.",
            vec![panel_query(
                sum_by(AGENT, &select(&registry::AGENT_WAITING_TASKS)),
                "{{namespace}}/{{agent}}",
            )],
        )
        .wide(12),
        DashboardPanel::stacked(
            "Tasks",
            PanelUnit::PerMinute,
            "Tasks and requests that ended per minute, by outcome.",
            vec![panel_query(
                per_minute("outcome", &registry::AGENT_TASKS),
                "{{outcome}}",
            )],
        )
        .wide(12),
    ]
}
