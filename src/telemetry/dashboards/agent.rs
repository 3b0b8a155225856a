//! The board *Agent*: one Agent in detail, or a few beside each other.

use super::board::{Annotation, Board, Variable};
use super::panel::{Column, Panel, STATE_COLORS, Unit, target};
use super::query::{
    increase, mean_by, per_minute, rate, rate_with, select, select_with, sum_by, total, total_per_minute,
};
use crate::telemetry::registry;

/// Labels of an Agent.
const AGENT: &str = "namespace, agent";

pub fn board() -> Board {
    let paused = select_with(&registry::AGENT_LOOP_STATE, "state=\"Paused\"");
    let tripped = select_with(&registry::AGENT_GUARDRAIL_TRIPS, "action=~\"pause|kill\"");
    Board {
        name: "agent",
        title: "agentloop / Agent",
        description: "The loop of one Agent: its states, calls, tools, limits and tasks.",
        variables: vec![
            Variable::namespace(&registry::AGENT_INFO),
            Variable::in_namespace("agent", "Agent", &registry::AGENT_INFO),
        ],
        annotations: vec![
            Annotation {
                name: "Paused",
                color: "orange",
                query: format!("{paused} unless {paused} offset $__interval"),
                title: "{{namespace}}/{{agent}} paused",
            },
            Annotation {
                name: "Limit reached",
                color: "red",
                query: format!("increase({tripped}[$__interval]) > 0"),
                title: "{{namespace}}/{{agent}}: {{guardrail}}",
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

fn state() -> Vec<Panel> {
    vec![
        Panel::states(
            "Loop state",
            "State of each loop over time.",
            state_number(),
            "{{namespace}}/{{agent}}",
        ),
        Panel::stat(
            "Turns",
            Unit::Count,
            "Turns completed in the time shown.",
            total(&increase(&registry::AGENT_TURNS)),
        ),
        Panel::stat(
            "Last turn",
            Unit::Moment,
            "When the last turn completed.",
            format!("max({}) * 1000", select(&registry::AGENT_LAST_TURN)),
        ),
        Panel::stat(
            "Tokens",
            Unit::Count,
            "Tokens billed in the time shown.",
            total(&increase(&registry::AGENT_TOKENS)),
        ),
        Panel::stat(
            "Cost",
            Unit::UsDollars,
            "Cost in the time shown, at the prices known when each call was made.",
            total(&increase(&registry::AGENT_COST)),
        ),
        Panel::warning(
            "Pending approvals",
            "Requests that wait for a person.",
            total(&select(&registry::AGENT_PENDING_APPROVALS)),
            1.0,
        ),
        Panel::warning(
            "Suspended",
            "Agents whose spec.suspend is true.",
            total(&select(&registry::AGENT_SUSPENDED)),
            1.0,
        ),
    ]
}

fn definition() -> Vec<Panel> {
    vec![
        Panel::table(
            "About",
            "Model, mode and age of each Agent; generations differ while the controller has not yet seen a change of the spec.",
            vec![
                Column {
                    title: "Created",
                    query: format!(
                        "max by ({AGENT}, api, model, mode) ({} * 1000 * on ({AGENT}) group_left (api, model, mode) {})",
                        select(&registry::AGENT_CREATED),
                        select(&registry::AGENT_INFO)
                    ),
                    unit: Unit::Moment,
                },
            ],
        )
        .wide(16),
        Panel::lines(
            "Generations not yet observed",
            Unit::Count,
            "Changes of the spec that the status does not describe yet.",
            vec![target(
                format!(
                    "{} - {}",
                    select(&registry::AGENT_GENERATION),
                    select(&registry::AGENT_OBSERVED_GENERATION)
                ),
                "{{namespace}}/{{agent}}",
            )],
        )
        .wide(8),
        Panel::stacked(
            "Conditions",
            Unit::Count,
            "Conditions that hold: Ready with its status, others while they are not False.",
            vec![target(
                sum_by("condition, status", &select(&registry::AGENT_CONDITION)),
                "{{condition}} {{status}}",
            )],
        )
        .wide(12),
        Panel::stacked(
            "Pause reasons",
            Unit::Count,
            "Reasons for which loops are paused, and signs of repetition.",
            vec![
                target(
                    format!(
                        "{} or label_replace(vector(0), \"reason\", \"none\", \"\", \"\")",
                        sum_by("reason", &select(&registry::AGENT_LOOP_PAUSED_REASON))
                    ),
                    "{{reason}}",
                ),
                target(
                    sum_by("sign", &select(&registry::AGENT_LOOP_DETECTED)),
                    "loop: {{sign}}",
                ),
            ],
        )
        .wide(12),
    ]
}

fn spend() -> Vec<Panel> {
    let lost = |signal| total_per_minute(&rate_with(&registry::AGENT_DROPPED_TELEMETRY, signal));
    vec![
        Panel::lines(
            "Turns",
            Unit::PerMinute,
            "Completed turns per minute.",
            vec![target(
                per_minute(AGENT, &registry::AGENT_TURNS),
                "{{namespace}}/{{agent}}",
            )],
        ),
        Panel::stacked(
            "Tokens by type",
            Unit::PerMinute,
            "Billed tokens per minute. The types are disjoint; reasoning is part of output.",
            vec![
                target(per_minute("type", &registry::AGENT_TOKENS), "{{type}}"),
                target(
                    format!("sum({}) * 60", rate(&registry::AGENT_REASONING_TOKENS)),
                    "of output: reasoning",
                ),
            ],
        ),
        Panel::lines(
            "Cost per hour",
            Unit::UsDollars,
            "Cost per hour at the present rate, by model.",
            vec![target(
                format!("{} * 3600", sum_by("model", &rate(&registry::AGENT_COST))),
                "{{model}}",
            )],
        ),
        Panel::lines(
            "Model calls",
            Unit::PerMinute,
            "Model calls per minute by model, each attempt counts.",
            vec![target(per_minute("model", &registry::AGENT_CALLS), "{{model}}")],
        )
        .wide(12),
        Panel::lines(
            "Calls refused or not billed exactly",
            Unit::PerMinute,
            "Calls that a limit refused; calls of unknown usage, and those that are charged with their bound.",
            vec![
                target(format!("sum({}) * 60", rate(&registry::AGENT_REFUSED_CALLS)), "refused"),
                target(
                    format!("sum({}) * 60", rate(&registry::AGENT_UNKNOWN_CALLS)),
                    "usage unknown",
                ),
                target(
                    format!("sum({}) * 60", rate(&registry::AGENT_ESTIMATED_CALLS)),
                    "charged by bound",
                ),
            ],
        )
        .wide(12),
        Panel::lines(
            "Telemetry not exported",
            Unit::PerMinute,
            "Spans and log lines of the pod that were not exported over OTLP, per minute.",
            vec![
                target(lost("signal=\"traces\""), "spans"),
                target(lost("signal=\"logs\""), "log lines"),
            ],
        )
        .wide(12),
    ]
}

fn tools() -> Vec<Panel> {
    vec![
        Panel::stacked(
            "Tool calls by outcome",
            Unit::PerMinute,
            "Tool calls per minute. Denied and unavailable ones were not run; unknown ones may have run.",
            vec![target(
                per_minute("tool, outcome", &registry::AGENT_TOOL_OUTCOMES),
                "{{tool}}: {{outcome}}",
            )],
        ),
        Panel::lines(
            "Duration of tool runs",
            Unit::Seconds,
            "Mean duration of tool runs.",
            vec![target(mean_by("tool", &registry::AGENT_TOOL_SECONDS), "{{tool}}")],
        ),
        Panel::lines(
            "Tool runs and actions",
            Unit::PerMinute,
            "Tool runs per minute, those of them with side effects, and tool calls that were denied.",
            vec![
                target(format!("sum({}) * 60", rate(&registry::AGENT_TOOL_CALLS)), "tool runs"),
                target(total_per_minute(&rate(&registry::AGENT_ACTIONS)), "of these actions"),
                target(total_per_minute(&rate(&registry::AGENT_DENIED_TOOL_CALLS)), "denied"),
            ],
        ),
    ]
}

fn limits() -> Vec<Panel> {
    vec![
        Panel::stacked(
            "Limits reached and loops detected",
            Unit::PerMinute,
            "Steps of guardrails and of loop detection per minute, by what was done.",
            vec![target(
                per_minute("guardrail, action", &registry::AGENT_GUARDRAIL_TRIPS),
                "{{guardrail}}: {{action}}",
            )],
        )
        .wide(12),
        Panel::lines(
            "Age of the oldest pending approval",
            Unit::Seconds,
            "How long the oldest request has waited for a person; 0 without one.",
            vec![target(
                format!(
                    "time() - min({}) or vector(0)",
                    select(&registry::AGENT_OLDEST_APPROVAL)
                ),
                "oldest",
            )],
        )
        .wide(12),
    ]
}

fn tasks() -> Vec<Panel> {
    vec![
        Panel::lines(
            "Waiting tasks",
            Unit::Count,
            "Tasks and requests that wait for their turn.",
            vec![target(
                sum_by(AGENT, &select(&registry::AGENT_WAITING_TASKS)),
                "{{namespace}}/{{agent}}",
            )],
        )
        .wide(12),
        Panel::stacked(
            "Tasks",
            Unit::PerMinute,
            "Tasks and requests that ended per minute, by outcome.",
            vec![target(per_minute("outcome", &registry::AGENT_TASKS), "{{outcome}}")],
        )
        .wide(12),
    ]
}
