//! The dashboard *Fleet*: all Agents of the chosen namespaces. Uses sums of namespaces where they exist, so that it
//! works with each level of `metrics.perObject`; its last row needs series of single Agents.

use super::dashboard::{Annotation, Dashboard, DashboardVariable};
use super::panel::{DashboardPanel, PanelUnit, TableColumn, panel_query};
use super::query::{
    count_per_minute, counted, increase, per_minute, quantile, quantile_by, rate, select, select_with, sum_by,
    sum_by_or_none, sum_or_zero_by, total,
};
use crate::telemetry::registry::{self, Metric};

pub fn board() -> Dashboard {
    Dashboard {
        name: "fleet",
        title: "agentloop / Fleet",
        description: "What the Agents of the chosen namespaces do, spend and wait for. No data without a leader, and before the \
                      first Agent.",
        variables: vec![
            DashboardVariable::namespace(&registry::NAMESPACE_AGENTS),
            DashboardVariable::in_namespace("agent", "Agent", &registry::AGENT_INFO),
        ],
        annotations: vec![Annotation {
            name: "Limit reached",
            color: "orange",
            query: counted(
                "namespace, guardrail",
                &registry::NAMESPACE_TRIPS,
                "action=~\"pause|kill\"",
            ),
            title: "{{namespace}}: {{guardrail}}",
        }],
        rows: vec![
            ("Now", now()),
            ("Work and spend", work()),
            ("Durations", durations()),
            ("Limits, approvals and tools", limits()),
            ("Agents", agents()),
        ],
    }
}

fn now() -> Vec<DashboardPanel> {
    let in_state = |states: &str| {
        total(&select_with(
            &registry::NAMESPACE_AGENTS,
            &format!("state=~\"{states}\""),
        ))
    };
    vec![
        DashboardPanel::stat(
            "Agents",
            PanelUnit::Count,
            "Number of Agents.",
            total(&select(&registry::NAMESPACE_AGENTS)),
        ),
        DashboardPanel::stat(
            "Running or sleeping",
            PanelUnit::Count,
            "Agents whose loop runs a turn or sleeps until the next one.",
            in_state("Running|Sleeping"),
        ),
        DashboardPanel::warning(
            "Paused",
            "Agents whose loop is stopped for a reason that the model did not choose.",
            in_state("Paused"),
            1.0,
        ),
        DashboardPanel::warning(
            "Pending approvals",
            "Requests that wait for a person. `kubectl agentloop approvals` lists them.",
            total(&select(&registry::NAMESPACE_APPROVALS)),
            1.0,
        ),
        DashboardPanel::stat(
            "Tokens",
            PanelUnit::Count,
            "Tokens billed in the time shown.",
            total(&increase(&registry::NAMESPACE_TOKENS)),
        ),
        DashboardPanel::stat(
            "Cost",
            PanelUnit::UsDollars,
            "Cost in the time shown, at the prices known when each call was made.",
            total(&increase(&registry::NAMESPACE_COST)),
        ),
        DashboardPanel::stacked(
            "Loop states",
            PanelUnit::Count,
            "Number of loops in each state; None before the first report.",
            vec![panel_query(
                sum_by("state", &select(&registry::NAMESPACE_AGENTS)),
                "{{state}}",
            )],
        )
        .wide(12),
        DashboardPanel::stacked(
            "Pause reasons",
            PanelUnit::Count,
            "Number of loops that are paused for each reason. A loop can have several.",
            vec![panel_query(
                sum_by_or_none(
                    "reason",
                    &select(&registry::AGENT_LOOP_PAUSED_REASON),
                    &registry::AGENT_INFO,
                ),
                "{{reason}}",
            )],
        )
        .wide(12),
        DashboardPanel::stacked(
            "Ended loops",
            PanelUnit::Count,
            "Number of loops that have ended, by outcome. One that was scaled to zero starts again with its next task.",
            vec![panel_query(
                sum_by_or_none("outcome", &select(&registry::AGENT_LOOP_OUTCOME), &registry::AGENT_INFO),
                "{{outcome}}",
            )],
        )
        .wide(12),
        DashboardPanel::lines(
            "Pending approvals by namespace",
            PanelUnit::Count,
            "Requests that wait for a person.",
            vec![panel_query(
                sum_by("namespace", &select(&registry::NAMESPACE_APPROVALS)),
                "{{namespace}}",
            )],
        )
        .wide(12),
    ]
}

fn work() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::lines(
            "Turns",
            PanelUnit::PerMinute,
            "Turns that ended per minute. A failed one was given up after a failure.",
            vec![panel_query(
                per_minute("namespace, outcome", &registry::NAMESPACE_TURNS),
                "{{namespace}}: {{outcome}}",
            )],
        ),
        DashboardPanel::stacked(
            "Tokens by type",
            PanelUnit::PerMinute,
            "Billed tokens per minute. The types are disjoint.",
            vec![panel_query(per_minute("type", &registry::NAMESPACE_TOKENS), "{{type}}")],
        ),
        DashboardPanel::lines(
            "Cost per hour",
            PanelUnit::UsDollars,
            "Cost per hour at the present rate.",
            vec![panel_query(
                format!("{} * 3600", sum_by("namespace", &rate(&registry::NAMESPACE_COST))),
                "{{namespace}}",
            )],
        ),
        DashboardPanel::lines(
            "Model calls",
            PanelUnit::PerMinute,
            "Model calls per minute, each attempt counts; and calls that a limit refused.",
            vec![
                panel_query(format!("sum({}) * 60", rate(&registry::NAMESPACE_CALLS)), "sent"),
                panel_query(format!("sum({}) * 60", rate(&registry::NAMESPACE_REFUSED)), "refused"),
            ],
        ),
        DashboardPanel::stacked(
            "Tasks",
            PanelUnit::PerMinute,
            "Tasks and requests that ended per minute, by outcome.",
            vec![panel_query(
                per_minute("outcome", &registry::NAMESPACE_TASKS),
                "{{outcome}}",
            )],
        ),
    ]
}

/// The median, and how long the slowest twentieth and hundredth took at least.
fn quantiles(title: &'static str, description: &'static str, metric: &Metric) -> DashboardPanel {
    let targets = [("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99")];
    let targets = targets.map(|(of, legend)| panel_query(quantile(of, metric), legend));
    DashboardPanel::lines(title, PanelUnit::Seconds, description, targets.into())
}

fn durations() -> Vec<DashboardPanel> {
    vec![
        quantiles(
            "Duration of model calls",
            "Median, 95th and 99th percentile of answered calls, from the request to the end of the answer; at \
             most 82 s, the longest bound of a bucket.",
            &registry::NAMESPACE_CALL_SECONDS,
        )
        .wide(12),
        DashboardPanel::lines(
            "Duration of model calls by model (p95)",
            PanelUnit::Seconds,
            "95th percentile of answered calls of each model; at most 82 s, the longest bound of a bucket.",
            vec![panel_query(
                quantile_by("model", "0.95", &registry::NAMESPACE_CALL_SECONDS),
                "{{model}}",
            )],
        )
        .wide(12),
        quantiles(
            "Duration of turns",
            "Median, 95th and 99th percentile of completed turns, with the pauses and waits for approvals in them; at \
             most 410 s, the longest bound of a bucket.",
            &registry::NAMESPACE_TURN_SECONDS,
        )
        .wide(12),
        quantiles(
            "Duration of tool runs",
            "Median, 95th and 99th percentile of tool runs, whatever their outcome; at most 82 s, the longest bound of a \
             bucket.",
            &registry::NAMESPACE_TOOL_SECONDS,
        )
        .wide(12),
        DashboardPanel::lines(
            "Wait for approvals (median)",
            PanelUnit::Seconds,
            "Median of the time for which gates were open, by how they closed; at most a week, the longest bound of a bucket.",
            vec![panel_query(
                quantile_by("decision", "0.5", &registry::NAMESPACE_APPROVAL_SECONDS),
                "{{decision}}",
            )],
        )
        .wide(12),
        DashboardPanel::stacked(
            "Closed gates",
            PanelUnit::PerMinute,
            "Gates that closed per minute, by how they closed.",
            vec![panel_query(
                count_per_minute("decision", &registry::NAMESPACE_APPROVAL_SECONDS),
                "{{decision}}",
            )],
        )
        .wide(12),
    ]
}

fn limits() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::stacked(
            "Limits reached and loops detected",
            PanelUnit::PerMinute,
            "Steps of guardrails and of loop detection per minute, by what was done.",
            vec![panel_query(
                per_minute("guardrail, action", &registry::NAMESPACE_TRIPS),
                "{{guardrail}}: {{action}}",
            )],
        )
        .wide(12),
        DashboardPanel::stacked(
            "Tool calls",
            PanelUnit::PerMinute,
            "Tool calls per minute by outcome. Denied and unavailable ones were not run.",
            vec![panel_query(
                per_minute("outcome", &registry::NAMESPACE_OUTCOMES),
                "{{outcome}}",
            )],
        )
        .wide(12),
    ]
}

fn agents() -> Vec<DashboardPanel> {
    let by_agent = |query: &str| sum_by("namespace, agent", query);
    // Of metrics that are absent at 0.
    let by_each = |metric| sum_or_zero_by("namespace, agent", &select(metric), &registry::AGENT_INFO);
    vec![DashboardPanel::table(
        "Agents",
        "What each Agent has done in the time shown, with its requests that wait for a person.",
        vec![
            TableColumn {
                title: "Turns",
                query: by_agent(&increase(&registry::AGENT_TURNS)),
                unit: PanelUnit::Count,
            },
            TableColumn {
                title: "Tokens",
                query: by_agent(&increase(&registry::AGENT_TOKENS)),
                unit: PanelUnit::Count,
            },
            TableColumn {
                title: "Cost",
                query: by_agent(&increase(&registry::AGENT_COST)),
                unit: PanelUnit::UsDollars,
            },
            TableColumn {
                title: "Tool calls",
                query: by_agent(&increase(&registry::AGENT_TOOL_CALLS)),
                unit: PanelUnit::Count,
            },
            TableColumn {
                title: "Pending approvals",
                query: by_each(&registry::AGENT_PENDING_APPROVALS),
                unit: PanelUnit::Count,
            },
            TableColumn {
                title: "Suspended",
                query: by_each(&registry::AGENT_SUSPENDED),
                unit: PanelUnit::Count,
            },
        ],
    )]
}
