//! The board *Fleet*: all Agents of the chosen namespaces. Uses sums of namespaces where they exist, so that it works with
//! each level of `metrics.perObject`; its last row needs series of single Agents.

use super::board::{Annotation, Board, Variable};
use super::panel::{Column, Panel, Unit, target};
use super::query::{
    count_per_minute, increase, per_minute, quantile, quantile_by, rate, select, select_with, sum_by, sum_or_zero_by,
    total,
};
use crate::telemetry::registry::{self, Metric};

pub fn board() -> Board {
    Board {
        name: "fleet",
        title: "agentloop / Fleet",
        description: "What the Agents of the chosen namespaces do, spend and wait for.",
        variables: vec![
            Variable::namespace(&registry::NAMESPACE_AGENTS),
            Variable::in_namespace("agent", "Agent", &registry::AGENT_INFO),
        ],
        annotations: vec![Annotation {
            name: "Limit reached",
            color: "orange",
            query: format!(
                "{} > 0",
                sum_by(
                    "namespace, guardrail",
                    &format!(
                        "increase({}[$__interval])",
                        select_with(&registry::NAMESPACE_TRIPS, "action=~\"pause|kill\"")
                    )
                )
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

fn now() -> Vec<Panel> {
    let in_state = |states: &str| {
        total(&select_with(
            &registry::NAMESPACE_AGENTS,
            &format!("state=~\"{states}\""),
        ))
    };
    vec![
        Panel::stat(
            "Agents",
            Unit::Count,
            "Number of Agents.",
            total(&select(&registry::NAMESPACE_AGENTS)),
        ),
        Panel::stat(
            "Running or sleeping",
            Unit::Count,
            "Agents whose loop runs a turn or sleeps until the next one.",
            in_state("Running|Sleeping"),
        ),
        Panel::warning(
            "Paused",
            "Agents whose loop is stopped for a reason that the model did not choose.",
            in_state("Paused"),
            1.0,
        ),
        Panel::warning(
            "Pending approvals",
            "Requests that wait for a person. `kubectl agentloop approvals` lists them.",
            total(&select(&registry::NAMESPACE_APPROVALS)),
            1.0,
        ),
        Panel::stat(
            "Tokens",
            Unit::Count,
            "Tokens billed in the time shown.",
            total(&increase(&registry::NAMESPACE_TOKENS)),
        ),
        Panel::stat(
            "Cost",
            Unit::UsDollars,
            "Cost in the time shown, at the prices known when each call was made.",
            total(&increase(&registry::NAMESPACE_COST)),
        ),
        Panel::stacked(
            "Loop states",
            Unit::Count,
            "Number of loops in each state; None before the first report.",
            vec![target(
                sum_by("state", &select(&registry::NAMESPACE_AGENTS)),
                "{{state}}",
            )],
        )
        .wide(12),
        Panel::stacked(
            "Pause reasons",
            Unit::Count,
            "Number of loops that are paused for each reason. A loop can have several.",
            vec![target(
                format!(
                    "{} or label_replace(vector(0), \"reason\", \"none\", \"\", \"\")",
                    sum_by("reason", &select(&registry::AGENT_LOOP_PAUSED_REASON))
                ),
                "{{reason}}",
            )],
        )
        .wide(12),
        Panel::stacked(
            "Ended loops",
            Unit::Count,
            "Number of loops that have ended, by outcome. One that was scaled to zero starts again with its next task.",
            vec![target(
                format!(
                    "{} or label_replace(vector(0), \"outcome\", \"none\", \"\", \"\")",
                    sum_by("outcome", &select(&registry::AGENT_LOOP_OUTCOME))
                ),
                "{{outcome}}",
            )],
        )
        .wide(12),
        Panel::lines(
            "Pending approvals by namespace",
            Unit::Count,
            "Requests that wait for a person.",
            vec![target(
                sum_by("namespace", &select(&registry::NAMESPACE_APPROVALS)),
                "{{namespace}}",
            )],
        )
        .wide(12),
    ]
}

fn work() -> Vec<Panel> {
    vec![
        Panel::lines(
            "Turns",
            Unit::PerMinute,
            "Completed turns per minute.",
            vec![target(
                per_minute("namespace", &registry::NAMESPACE_TURNS),
                "{{namespace}}",
            )],
        ),
        Panel::stacked(
            "Tokens by type",
            Unit::PerMinute,
            "Billed tokens per minute. The types are disjoint.",
            vec![target(per_minute("type", &registry::NAMESPACE_TOKENS), "{{type}}")],
        ),
        Panel::lines(
            "Cost per hour",
            Unit::UsDollars,
            "Cost per hour at the present rate.",
            vec![target(
                format!("{} * 3600", sum_by("namespace", &rate(&registry::NAMESPACE_COST))),
                "{{namespace}}",
            )],
        ),
        Panel::lines(
            "Model calls",
            Unit::PerMinute,
            "Model calls per minute, each attempt counts; and calls that a limit refused.",
            vec![
                target(format!("sum({}) * 60", rate(&registry::NAMESPACE_CALLS)), "sent"),
                target(format!("sum({}) * 60", rate(&registry::NAMESPACE_REFUSED)), "refused"),
            ],
        ),
        Panel::stacked(
            "Tasks",
            Unit::PerMinute,
            "Tasks and requests that ended per minute, by outcome.",
            vec![target(per_minute("outcome", &registry::NAMESPACE_TASKS), "{{outcome}}")],
        ),
    ]
}

/// The median, and how long the slowest twentieth and hundredth took at least.
fn quantiles(title: &'static str, description: &'static str, metric: &Metric) -> Panel {
    let targets = [("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99")];
    let targets = targets.map(|(of, legend)| target(quantile(of, metric), legend));
    Panel::lines(title, Unit::Seconds, description, targets.into())
}

fn durations() -> Vec<Panel> {
    vec![
        quantiles(
            "Duration of model calls",
            "Median, 95th and 99th percentile of answered calls, from the request to the end of the answer. Above the \
             longest bound of a bucket, 82 s, it is shown as that.",
            &registry::NAMESPACE_CALL_SECONDS,
        )
        .wide(12),
        Panel::lines(
            "Duration of model calls by model (p95)",
            Unit::Seconds,
            "95th percentile of answered calls of each model.",
            vec![target(
                quantile_by("model", "0.95", &registry::NAMESPACE_CALL_SECONDS),
                "{{model}}",
            )],
        )
        .wide(12),
        quantiles(
            "Duration of turns",
            "Median, 95th and 99th percentile of completed turns, with the pauses and waits for approvals in them.",
            &registry::NAMESPACE_TURN_SECONDS,
        )
        .wide(12),
        quantiles(
            "Duration of tool runs",
            "Median, 95th and 99th percentile of tool runs, whatever their outcome.",
            &registry::NAMESPACE_TOOL_SECONDS,
        )
        .wide(12),
        Panel::lines(
            "Wait for approvals (median)",
            Unit::Seconds,
            "Median of the time for which gates were open, by how they closed.",
            vec![target(
                quantile_by("decision", "0.5", &registry::NAMESPACE_APPROVAL_SECONDS),
                "{{decision}}",
            )],
        )
        .wide(12),
        Panel::stacked(
            "Closed gates",
            Unit::PerMinute,
            "Gates that closed per minute, by how they closed.",
            vec![target(
                count_per_minute("decision", &registry::NAMESPACE_APPROVAL_SECONDS),
                "{{decision}}",
            )],
        )
        .wide(12),
    ]
}

fn limits() -> Vec<Panel> {
    vec![
        Panel::stacked(
            "Limits reached and loops detected",
            Unit::PerMinute,
            "Steps of guardrails and of loop detection per minute, by what was done.",
            vec![target(
                per_minute("guardrail, action", &registry::NAMESPACE_TRIPS),
                "{{guardrail}}: {{action}}",
            )],
        )
        .wide(12),
        Panel::stacked(
            "Tool calls",
            Unit::PerMinute,
            "Tool calls per minute by outcome. Denied and unavailable ones were not run.",
            vec![target(
                per_minute("outcome", &registry::NAMESPACE_OUTCOMES),
                "{{outcome}}",
            )],
        )
        .wide(12),
    ]
}

fn agents() -> Vec<Panel> {
    let by_agent = |query: &str| sum_by("namespace, agent", query);
    // Of metrics that are absent at 0.
    let by_each = |metric| sum_or_zero_by("namespace, agent", &select(metric), &registry::AGENT_CREATED);
    vec![Panel::table(
        "Agents",
        "What each Agent has done in the time shown, with its requests that wait for a person.",
        vec![
            Column {
                title: "Turns",
                query: by_agent(&increase(&registry::AGENT_TURNS)),
                unit: Unit::Count,
            },
            Column {
                title: "Tokens",
                query: by_agent(&increase(&registry::AGENT_TOKENS)),
                unit: Unit::Count,
            },
            Column {
                title: "Cost",
                query: by_agent(&increase(&registry::AGENT_COST)),
                unit: Unit::UsDollars,
            },
            Column {
                title: "Tool calls",
                query: by_agent(&increase(&registry::AGENT_TOOL_CALLS)),
                unit: Unit::Count,
            },
            Column {
                title: "Pending approvals",
                query: by_each(&registry::AGENT_PENDING_APPROVALS),
                unit: Unit::Count,
            },
            Column {
                title: "Suspended",
                query: by_each(&registry::AGENT_SUSPENDED),
                unit: Unit::Count,
            },
        ],
    )]
}
