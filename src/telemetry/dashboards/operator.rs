//! The board *Operator*: the controller itself.

use super::board::{Annotation, Board, Variable};
use super::panel::{Column, Panel, Unit, target};
use super::query::{per_minute, quantile_by, rate, select, select_with, sum_by, total};
use crate::telemetry::registry;

pub fn board() -> Board {
    let leader = select(&registry::LEADER);
    Board {
        name: "operator",
        title: "agentloop / Operator",
        description: "The controller: reconciles, its queue, the Kubernetes API, the link to the pods, and its resources.",
        variables: vec![
            Variable {
                name: "job",
                label: "Job",
                metric: &registry::BUILD_INFO,
                within: None,
            },
            Variable {
                name: "instance",
                label: "Instance",
                metric: &registry::BUILD_INFO,
                within: Some("job"),
            },
        ],
        annotations: vec![Annotation {
            name: "New leader",
            color: "blue",
            query: format!("({leader} == 1) unless ({leader} offset $__interval == 1)"),
            title: "{{instance}} leads",
        }],
        rows: vec![
            ("Now", now()),
            ("Reconciles", reconciles()),
            ("Kubernetes API and link", requests()),
            ("Ledger, histories and approvals", stores()),
            ("Process", process()),
        ],
    }
}

fn now() -> Vec<Panel> {
    vec![
        Panel::stat(
            "Replicas",
            Unit::Count,
            "Replicas of the controller that are scraped.",
            total(&select(&registry::BUILD_INFO)),
        ),
        Panel::stat(
            "Leaders",
            Unit::Count,
            "Replicas that hold the Lease; 1 except during a change.",
            total(&select(&registry::LEADER)),
        ),
        Panel::stat(
            "Queue",
            Unit::Count,
            "Objects that wait for a reconcile.",
            total(&select(&registry::QUEUE_DEPTH)),
        ),
        Panel::stat(
            "Longest reconcile",
            Unit::Seconds,
            "Duration of the longest reconcile in progress.",
            format!("max({})", select(&registry::QUEUE_LONGEST)),
        ),
        Panel::table(
            "Builds",
            "What runs, since when.",
            vec![Column {
                title: "Started",
                query: format!(
                    "max by (instance, version) ({} * 1000 * on (job, instance) group_left (version) {})",
                    select(&registry::PROCESS_START),
                    select(&registry::BUILD_INFO)
                ),
                unit: Unit::Moment,
            }],
        )
        .wide(8),
    ]
}

fn reconciles() -> Vec<Panel> {
    vec![
        Panel::lines(
            "Reconciles",
            Unit::PerMinute,
            "Reconciles per minute by controller and result.",
            vec![target(
                per_minute("controller, result", &registry::RECONCILES),
                "{{controller}}: {{result}}",
            )],
        ),
        Panel::lines(
            "Errors and retries",
            Unit::PerMinute,
            "Failed reconciles, those of them that took too long, and objects that were queued again after one, per minute.",
            vec![
                target(
                    per_minute("controller", &registry::RECONCILE_ERRORS),
                    "{{controller}}: errors",
                ),
                target(
                    per_minute("controller", &registry::RECONCILE_TIMEOUTS),
                    "{{controller}}: of these timeouts",
                ),
                target(
                    per_minute("controller", &registry::QUEUE_RETRIES),
                    "{{controller}}: retries",
                ),
            ],
        ),
        Panel::lines(
            "Duration of reconciles",
            Unit::Seconds,
            "99th percentile of the duration of reconciles, and of the work on objects from the queue.",
            vec![
                target(
                    quantile_by("controller", "0.99", &registry::RECONCILE_SECONDS),
                    "{{controller}}",
                ),
                target(
                    quantile_by("controller", "0.99", &registry::QUEUE_WORK),
                    "{{controller}}: from the queue",
                ),
            ],
        ),
        Panel::lines(
            "Time in the queue",
            Unit::Seconds,
            "99th percentile of the time that objects wait for their reconcile.",
            vec![target(
                quantile_by("controller", "0.99", &registry::QUEUE_WAIT),
                "{{controller}}",
            )],
        ),
        Panel::lines(
            "Queue",
            Unit::Count,
            "Objects that wait, and objects added per second.",
            vec![
                target(
                    sum_by("controller", &select(&registry::QUEUE_DEPTH)),
                    "{{controller}}: waiting",
                ),
                target(
                    sum_by("controller", &rate(&registry::QUEUE_ADDS)),
                    "{{controller}}: added per second",
                ),
            ],
        ),
        Panel::lines(
            "Workers",
            Unit::Count,
            "Reconciles in progress, their maximum, and the seconds that those in progress have taken so far.",
            vec![
                target(
                    sum_by("controller", &select(&registry::RECONCILE_WORKERS)),
                    "{{controller}}: active",
                ),
                target(
                    format!("max by (controller) ({})", select(&registry::RECONCILE_MAX)),
                    "{{controller}}: maximum",
                ),
                target(
                    sum_by("controller", &select(&registry::QUEUE_UNFINISHED)),
                    "{{controller}}: seconds in progress",
                ),
            ],
        ),
    ]
}

fn requests() -> Vec<Panel> {
    vec![
        Panel::lines(
            "Requests to the Kubernetes API",
            Unit::PerMinute,
            "Requests per minute by method and status code.",
            vec![target(
                per_minute("method, code", &registry::REQUESTS),
                "{{method}} {{code}}",
            )],
        ),
        Panel::lines(
            "Duration of requests",
            Unit::Seconds,
            "99th percentile of the time until the head of the response, by verb.",
            vec![target(
                quantile_by("verb", "0.99", &registry::REQUEST_SECONDS),
                "{{verb}}",
            )],
        ),
        Panel::lines(
            "Link",
            Unit::PerMinute,
            "Pods that attached, reports that were accepted, and requests that were refused, per minute.",
            vec![
                target(format!("sum({}) * 60", rate(&registry::LINK_ATTACHES)), "attaches"),
                target(format!("sum({}) * 60", rate(&registry::LINK_REPORTS)), "reports"),
                target(per_minute("code", &registry::LINK_REFUSALS), "refused: {{code}}"),
            ],
        ),
    ]
}

fn stores() -> Vec<Panel> {
    let per_hour = |metric| format!("sum({}) * 3600", rate(metric));
    vec![
        Panel::lines(
            "Forfeited tokens and calls",
            Unit::Count,
            "Amounts that lost gateways held and that are charged to their budgets, per hour.",
            vec![
                target(per_hour(&registry::FORFEITED_TOKENS), "tokens"),
                target(per_hour(&registry::FORFEITED_INPUT), "input tokens"),
                target(per_hour(&registry::FORFEITED_OUTPUT), "output tokens"),
                target(per_hour(&registry::FORFEITED_CALLS), "calls"),
                target(
                    per_hour(&registry::LOST_LEASES),
                    "leases of gateways with older storage",
                ),
            ],
        ),
        Panel::lines(
            "Forfeited cost",
            Unit::UsDollars,
            "Dollars that lost gateways held and that are charged to their budgets, per hour.",
            vec![target(per_hour(&registry::FORFEITED_USD), "cost")],
        ),
        Panel::lines(
            "Webhooks of approvals",
            Unit::PerMinute,
            "Requests to the webhook that announces approvals, per minute by event and result.",
            vec![target(
                per_minute("event, result", &registry::GATE_WEBHOOKS),
                "{{event}}: {{result}}",
            )],
        ),
        Panel::lines(
            "Batches of histories",
            Unit::PerMinute,
            "Batches of histories for the database per minute, by result.",
            vec![target(per_minute("result", &registry::HISTORY_BATCHES), "{{result}}")],
        ),
        Panel::lines(
            "Rows of histories",
            Unit::PerMinute,
            "Rows written to the database and deleted from it per minute.",
            vec![
                target(per_minute("record", &registry::HISTORY_ROWS), "written: {{record}}"),
                target(
                    per_minute("record", &registry::HISTORY_DELETED_ROWS),
                    "deleted: {{record}}",
                ),
            ],
        ),
        Panel::stat(
            "Database last answered",
            Unit::Moment,
            "When the database of histories last answered; no data: not since the start, or no database is configured.",
            format!("max({} > 0) * 1000", select(&registry::HISTORY_LAST_SUCCESS)),
        )
        .wide(8),
        Panel::lines(
            "Telemetry not exported",
            Unit::PerMinute,
            "Spans, log lines and data points of the controller that were not exported over OTLP, per minute.",
            vec![target(per_minute("signal", &registry::TELEMETRY_DROPPED), "{{signal}}")],
        ),
    ]
}

fn process() -> Vec<Panel> {
    vec![
        Panel::lines(
            "CPU",
            Unit::Cores,
            "Cores in use.",
            vec![target(
                sum_by("instance", &rate(&registry::PROCESS_CPU)),
                "{{instance}}",
            )],
        ),
        Panel::lines(
            "Memory",
            Unit::Bytes,
            "Resident and virtual memory.",
            vec![
                target(
                    sum_by("instance", &select(&registry::PROCESS_RESIDENT)),
                    "{{instance}}: resident",
                ),
                target(
                    sum_by("instance", &select_with(&registry::PROCESS_VIRTUAL, "")),
                    "{{instance}}: virtual",
                ),
            ],
        ),
        Panel::lines(
            "File descriptors and threads",
            Unit::Count,
            "Open file descriptors, their maximum, and threads.",
            vec![
                target(
                    sum_by("instance", &select(&registry::PROCESS_OPEN_FDS)),
                    "{{instance}}: open",
                ),
                target(
                    sum_by("instance", &select(&registry::PROCESS_MAX_FDS)),
                    "{{instance}}: maximum",
                ),
                target(
                    sum_by("instance", &select(&registry::PROCESS_THREADS)),
                    "{{instance}}: threads",
                ),
            ],
        ),
    ]
}
