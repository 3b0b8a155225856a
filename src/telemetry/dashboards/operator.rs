//! The dashboard *Operator*: the controller itself.

use super::dashboard::{Annotation, Dashboard, DashboardVariable};
use super::panel::{DashboardPanel, PanelUnit, TableColumn, panel_query};
use super::query::{TARGET, a_step_ago, per_minute, quantile_by, rate, select, select_with, sum_by, total};
use crate::telemetry::registry;

pub fn board() -> Dashboard {
    let leader = select(&registry::LEADER);
    let led_before = a_step_ago("instance", &registry::LEADER, "");
    let target =
        |name, title, label, within| DashboardVariable::of_target(name, title, (&registry::BUILD_INFO, label), within);
    Dashboard {
        name: "operator",
        title: "agentloop / Operator",
        description: "The controller: reconciles, its queue, the Kubernetes API, the link to the pods, and its resources.",
        variables: vec![
            target("controller_namespace", "Namespace", "namespace", &[]),
            target("job", "Job", "job", &TARGET[..1]),
            target("instance", "Instance", "instance", &TARGET[..2]),
        ],
        annotations: vec![Annotation {
            name: "New leader",
            color: "blue",
            query: format!("max by (instance) ({leader} == 1) unless {led_before} == 1"),
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

fn now() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::stat(
            "Replicas",
            PanelUnit::Count,
            "Replicas of the controller that are scraped.",
            total(&select(&registry::BUILD_INFO)),
        ),
        DashboardPanel::stat(
            "Leaders",
            PanelUnit::Count,
            "Replicas that hold the Lease; 1 except during a change.",
            total(&select(&registry::LEADER)),
        ),
        DashboardPanel::stat(
            "Queue",
            PanelUnit::Count,
            "Objects that wait for a reconcile.",
            total(&select(&registry::QUEUE_DEPTH)),
        ),
        DashboardPanel::stat(
            "Longest reconcile",
            PanelUnit::Seconds,
            "Duration of the longest reconcile in progress.",
            format!("max({})", select(&registry::QUEUE_LONGEST)),
        ),
        DashboardPanel::table(
            "Builds",
            "What runs, since when.",
            vec![
                TableColumn {
                    title: "Started",
                    query: format!(
                        "max by (instance, version) ({} * on (job, instance) group_left () (max by (job, instance) ({}) * 1000))",
                        select(&registry::BUILD_INFO),
                        select(&registry::PROCESS_START)
                    ),
                    unit: PanelUnit::Timestamp,
                },
                TableColumn {
                    title: "Leads, caches filled",
                    query: format!(
                        "max by (instance, version) ({} * on (job, instance) group_left () max by (job, instance) ({}))",
                        select(&registry::BUILD_INFO),
                        select(&registry::CACHES_FILLED)
                    ),
                    unit: PanelUnit::Count,
                },
            ],
        )
        .wide(8),
    ]
}

fn reconciles() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::lines(
            "Reconciles",
            PanelUnit::PerMinute,
            "Reconciles per minute by controller and result.",
            vec![panel_query(
                per_minute("controller, result", &registry::RECONCILES),
                "{{controller}}: {{result}}",
            )],
        ),
        DashboardPanel::lines(
            "Errors and retries",
            PanelUnit::PerMinute,
            "Failed reconciles, those of them that took too long, and objects that were queued again after one, per minute.",
            vec![
                panel_query(
                    per_minute("controller", &registry::RECONCILE_ERRORS),
                    "{{controller}}: errors",
                ),
                panel_query(
                    per_minute("controller", &registry::RECONCILE_TIMEOUTS),
                    "{{controller}}: of these timeouts",
                ),
                panel_query(
                    per_minute("controller", &registry::QUEUE_RETRIES),
                    "{{controller}}: retries",
                ),
            ],
        ),
        DashboardPanel::lines(
            "Duration of reconciles",
            PanelUnit::Seconds,
            "99th percentile of the duration of reconciles, and of the work on objects from the queue; at most 60 s, \
             the longest bound of a bucket.",
            vec![
                panel_query(
                    quantile_by("controller", "0.99", &registry::RECONCILE_SECONDS),
                    "{{controller}}",
                ),
                panel_query(
                    quantile_by("controller", "0.99", &registry::QUEUE_WORK),
                    "{{controller}}: from the queue",
                ),
            ],
        ),
        DashboardPanel::lines(
            "Time in the queue",
            PanelUnit::Seconds,
            "99th percentile of the time that objects wait for their reconcile; at most 60 s, the longest bound of a bucket.",
            vec![panel_query(
                quantile_by("controller", "0.99", &registry::QUEUE_WAIT),
                "{{controller}}",
            )],
        ),
        DashboardPanel::lines(
            "Queue",
            PanelUnit::Count,
            "Objects that wait for a reconcile.",
            vec![panel_query(
                sum_by("controller", &select(&registry::QUEUE_DEPTH)),
                "{{controller}}",
            )],
        ),
        DashboardPanel::lines(
            "Added to the queue",
            PanelUnit::PerMinute,
            "Objects added to the queue per minute.",
            vec![panel_query(
                per_minute("controller", &registry::QUEUE_ADDS),
                "{{controller}}",
            )],
        ),
        DashboardPanel::lines(
            "Workers",
            PanelUnit::Count,
            "Reconciles in progress, and their maximum.",
            vec![
                panel_query(
                    sum_by("controller", &select(&registry::RECONCILE_WORKERS)),
                    "{{controller}}: active",
                ),
                panel_query(
                    format!("max by (controller) ({})", select(&registry::RECONCILE_MAX)),
                    "{{controller}}: maximum",
                ),
            ],
        ),
        DashboardPanel::lines(
            "Work in progress",
            PanelUnit::Seconds,
            "Time that the reconciles in progress have taken so far, as a sum.",
            vec![panel_query(
                sum_by("controller", &select(&registry::QUEUE_UNFINISHED)),
                "{{controller}}",
            )],
        ),
    ]
}

fn requests() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::lines(
            "Requests to the Kubernetes API",
            PanelUnit::PerMinute,
            "Requests per minute by method and status code, and Events that were not written, since their objects had too many.",
            vec![
                panel_query(per_minute("method, code", &registry::REQUESTS), "{{method}} {{code}}"),
                panel_query(
                    format!("sum({}) * 60", rate(&registry::KUBERNETES_EVENTS_DROPPED)),
                    "dropped Events",
                ),
            ],
        ),
        DashboardPanel::lines(
            "Duration of requests",
            PanelUnit::Seconds,
            "99th percentile of the time until the head of the response, by verb; at most 30 s, the longest bound of a bucket.",
            vec![panel_query(
                quantile_by("verb", "0.99", &registry::REQUEST_SECONDS),
                "{{verb}}",
            )],
        ),
        DashboardPanel::lines(
            "Link",
            PanelUnit::PerMinute,
            "Pods that attached, reports that were accepted, and requests that were refused, per minute.",
            vec![
                panel_query(format!("sum({}) * 60", rate(&registry::LINK_ATTACHES)), "attaches"),
                panel_query(format!("sum({}) * 60", rate(&registry::LINK_REPORTS)), "reports"),
                panel_query(per_minute("code", &registry::LINK_REFUSALS), "refused: {{code}}"),
            ],
        ),
    ]
}

fn stores() -> Vec<DashboardPanel> {
    let per_hour = |metric| format!("sum({}) * 3600", rate(metric));
    vec![
        DashboardPanel::lines(
            "Forfeited tokens and calls",
            PanelUnit::Count,
            "Amounts that lost gateways held and that are charged to their budgets, per hour.",
            vec![
                panel_query(per_hour(&registry::FORFEITED_TOKENS), "tokens"),
                panel_query(per_hour(&registry::FORFEITED_INPUT), "input tokens"),
                panel_query(per_hour(&registry::FORFEITED_OUTPUT), "output tokens"),
                panel_query(per_hour(&registry::FORFEITED_CALLS), "calls"),
                panel_query(
                    per_hour(&registry::LOST_LEASES),
                    "leases of gateways with older storage",
                ),
            ],
        ),
        DashboardPanel::lines(
            "Forfeited cost",
            PanelUnit::UsDollars,
            "Dollars that lost gateways held and that are charged to their budgets, per hour.",
            vec![panel_query(per_hour(&registry::FORFEITED_USD), "cost")],
        ),
        DashboardPanel::lines(
            "Webhooks of approvals",
            PanelUnit::PerMinute,
            "Requests to the webhook that announces approvals, per minute by event and result.",
            vec![panel_query(
                per_minute("event, result", &registry::GATE_WEBHOOKS),
                "{{event}}: {{result}}",
            )],
        ),
        DashboardPanel::lines(
            "Batches of histories",
            PanelUnit::PerMinute,
            "Batches of histories for the database per minute, by result.",
            vec![panel_query(
                per_minute("result", &registry::HISTORY_BATCHES),
                "{{result}}",
            )],
        ),
        DashboardPanel::lines(
            "Rows of histories",
            PanelUnit::PerMinute,
            "Rows written to the database and deleted from it per minute.",
            vec![
                panel_query(per_minute("record", &registry::HISTORY_ROWS), "written: {{record}}"),
                panel_query(
                    per_minute("record", &registry::HISTORY_DELETED_ROWS),
                    "deleted: {{record}}",
                ),
            ],
        ),
        DashboardPanel::stat(
            "Database last answered",
            PanelUnit::Timestamp,
            "When the database of histories last answered; no data: not since the start, or no database is configured.",
            format!("max({} > 0) * 1000", select(&registry::HISTORY_LAST_SUCCESS)),
        )
        .wide(8),
        DashboardPanel::lines(
            "Telemetry not exported",
            PanelUnit::PerMinute,
            "Spans, log lines and data points of the controller that were not exported over OTLP, per minute.",
            vec![panel_query(
                per_minute("signal", &registry::TELEMETRY_DROPPED),
                "{{signal}}",
            )],
        ),
    ]
}

fn process() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::lines(
            "CPU",
            PanelUnit::Cores,
            "Cores in use.",
            vec![panel_query(
                sum_by("instance", &rate(&registry::PROCESS_CPU)),
                "{{instance}}",
            )],
        ),
        DashboardPanel::lines(
            "Memory",
            PanelUnit::Bytes,
            "Resident and virtual memory.",
            vec![
                panel_query(
                    sum_by("instance", &select(&registry::PROCESS_RESIDENT)),
                    "{{instance}}: resident",
                ),
                panel_query(
                    sum_by("instance", &select_with(&registry::PROCESS_VIRTUAL, "")),
                    "{{instance}}: virtual",
                ),
            ],
        ),
        DashboardPanel::lines(
            "File descriptors and threads",
            PanelUnit::Count,
            "Open file descriptors, their maximum, and threads.",
            vec![
                panel_query(
                    sum_by("instance", &select(&registry::PROCESS_OPEN_FDS)),
                    "{{instance}}: open",
                ),
                panel_query(
                    sum_by("instance", &select(&registry::PROCESS_MAX_FDS)),
                    "{{instance}}: maximum",
                ),
                panel_query(
                    sum_by("instance", &select(&registry::PROCESS_THREADS)),
                    "{{instance}}: threads",
                ),
            ],
        ),
    ]
}
