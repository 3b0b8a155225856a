//! The dashboard *Budgets*: limits, what is used and reserved, how fast it is spent, and when it will be used up.

use super::dashboard::{Annotation, Dashboard, DashboardVariable};
use super::panel::{DashboardPanel, PanelQuery, PanelUnit, TableColumn, panel_query};
use super::query::{
    a_step_ago, an_hour_ago, begins, increase_of_an_hour, or_zero, per_minute, rate, select, select_with, sum_by, total,
};
use crate::telemetry::registry::{self, Metric};

/// Labels of an AgentBudget.
const BUDGET: &str = "namespace, budget";

/// The metrics of one kind of amount.
struct AmountPanel {
    name: &'static str,
    /// Titles of the panels of amounts and of the pace, and their descriptions.
    titles: [&'static str; 2],
    descriptions: [&'static str; 2],
    unit: PanelUnit,
    limit: &'static Metric,
    used: &'static Metric,
    reserved: &'static Metric,
    spent: &'static Metric,
}

const KINDS: [AmountPanel; 5] = [
    AmountPanel {
        name: "tokens",
        titles: ["Tokens", "Tokens per hour"],
        descriptions: ["Limit, used and reserved amount of tokens.", "Tokens spent per hour."],
        unit: PanelUnit::Count,
        limit: &registry::BUDGET_LIMIT_TOKENS,
        used: &registry::BUDGET_USED_TOKENS,
        reserved: &registry::BUDGET_RESERVED_TOKENS,
        spent: &registry::BUDGET_SPENT_TOKENS,
    },
    AmountPanel {
        name: "cost",
        titles: ["Cost", "Cost per hour"],
        descriptions: [
            "Limit, used and reserved amount in US dollars.",
            "US dollars spent per hour.",
        ],
        unit: PanelUnit::UsDollars,
        limit: &registry::BUDGET_LIMIT_USD,
        used: &registry::BUDGET_USED_USD,
        reserved: &registry::BUDGET_RESERVED_USD,
        spent: &registry::BUDGET_SPENT_USD,
    },
    AmountPanel {
        name: "calls",
        titles: ["Calls", "Calls per hour"],
        descriptions: ["Limit, used and reserved number of calls.", "Calls per hour."],
        unit: PanelUnit::Count,
        limit: &registry::BUDGET_LIMIT_CALLS,
        used: &registry::BUDGET_USED_CALLS,
        reserved: &registry::BUDGET_RESERVED_CALLS,
        spent: &registry::BUDGET_SPENT_CALLS,
    },
    AmountPanel {
        name: "input tokens",
        titles: ["Input tokens", "Input tokens per hour"],
        descriptions: [
            "Limit, used and reserved amount of input tokens.",
            "Input tokens spent per hour.",
        ],
        unit: PanelUnit::Count,
        limit: &registry::BUDGET_LIMIT_INPUT,
        used: &registry::BUDGET_USED_INPUT,
        reserved: &registry::BUDGET_RESERVED_INPUT,
        spent: &registry::BUDGET_SPENT_INPUT,
    },
    AmountPanel {
        name: "output tokens",
        titles: ["Output tokens", "Output tokens per hour"],
        descriptions: [
            "Limit, used and reserved amount of output tokens.",
            "Output tokens spent per hour.",
        ],
        unit: PanelUnit::Count,
        limit: &registry::BUDGET_LIMIT_OUTPUT,
        used: &registry::BUDGET_USED_OUTPUT,
        reserved: &registry::BUDGET_RESERVED_OUTPUT,
        spent: &registry::BUDGET_SPENT_OUTPUT,
    },
];

pub fn board() -> Dashboard {
    let exhausted = (&registry::BUDGET_CONDITION, "condition=\"Exhausted\",status=\"true\"");
    let resets = select(&registry::BUDGET_RESETS);
    let reset_before = a_step_ago(BUDGET, &registry::BUDGET_RESETS, "");
    Dashboard {
        name: "budgets",
        title: "agentloop / Budgets",
        description: "What AgentBudgets allow, what is used and reserved, and when they will be exhausted. No data with \
                      `metrics.perObject: Disabled`.",
        variables: vec![
            DashboardVariable::namespace(&registry::BUDGET_CONDITION),
            DashboardVariable::in_namespace("budget", "Budget", &registry::BUDGET_CONDITION),
        ],
        annotations: vec![
            Annotation {
                name: "Budget exhausted",
                color: "red",
                query: begins(BUDGET, exhausted, &registry::BUDGET_CONDITION),
                title: "{{namespace}}/{{budget}} exhausted",
            },
            Annotation {
                name: "Window reset",
                color: "blue",
                query: format!("{resets} > {reset_before} and {reset_before} <= time()"),
                title: "{{namespace}}/{{budget}}: a new window",
            },
        ],
        rows: vec![
            ("Now", now()),
            ("Over time", over_time()),
            ("Amounts", amounts()),
            ("Ledger", ledger()),
        ],
    }
}

/// A query for each kind, named after the budget and the kind.
fn each_kind(query: impl Fn(&AmountPanel) -> String) -> Vec<PanelQuery> {
    let each = KINDS.iter().map(|kind| panel_query(query(kind), &legend(kind)));
    each.collect()
}

fn legend(kind: &AmountPanel) -> String {
    format!("{{{{namespace}}}}/{{{{budget}}}}: {}", kind.name)
}

fn share_used(kind: &AmountPanel) -> String {
    format!("{} / {}", select(kind.used), select(kind.limit))
}

fn now() -> Vec<DashboardPanel> {
    let condition = |name: &str| {
        let matchers = format!("condition=\"{name}\",status=\"true\"");
        let hold = total(&select_with(&registry::BUDGET_CONDITION, &matchers));
        or_zero(&hold, &registry::BUDGET_CONDITION)
    };
    let share = |kind: &AmountPanel| {
        format!(
            "({} + {}) / {}",
            select(kind.used),
            select(kind.reserved),
            select(kind.limit)
        )
    };
    vec![
        DashboardPanel::stat(
            "Budgets",
            PanelUnit::Count,
            "Number of AgentBudgets.",
            format!("count(max by ({BUDGET}) ({}))", select(&registry::BUDGET_CONDITION)),
        ),
        DashboardPanel::warning(
            "Near a limit",
            "AgentBudgets whose condition NearLimit holds.",
            condition("NearLimit"),
            1.0,
        ),
        DashboardPanel::warning(
            "Exhausted",
            "AgentBudgets without room for another call.",
            condition("Exhausted"),
            1.0,
        ),
        DashboardPanel::bars(
            "Used and reserved",
            "Share of each limit that is used in the current window, or reserved for calls.",
            each_kind(share),
        )
        .wide(12),
        DashboardPanel::table(
            "Windows and Agents",
            "When there is room again or the window ends, and how many Agents draw on each AgentBudget.",
            vec![
                TableColumn {
                    title: "Resets",
                    query: format!("{} * 1000", select(&registry::BUDGET_RESETS)),
                    unit: PanelUnit::Timestamp,
                },
                TableColumn {
                    title: "Agents",
                    query: select(&registry::BUDGET_AGENTS),
                    unit: PanelUnit::Count,
                },
                TableColumn {
                    title: "Created",
                    query: format!(
                        "max by (namespace, budget) ({}) * 1000",
                        select(&registry::BUDGET_CREATED)
                    ),
                    unit: PanelUnit::Timestamp,
                },
            ],
        ),
    ]
}

/// Seconds until the limit is used up, computed as `namespace_budget_unit:agentloop_budget_exhaustion_seconds:forecast1h`, of which
/// the alert is made. Not that series: the dashboards work without the rules.
///
/// In a calendar window, which has a time of its end, usage grows by what is spent. In other windows it grows by that without what
/// leaves the window, which is the difference to an hour ago. What there was then under the name of a younger budget may have been
/// another one's.
fn until_exhausted(kind: &AmountPanel) -> String {
    let (limit, used, before) = (select(kind.limit), select(kind.used), an_hour_ago(kind.used));
    let spent = sum_by(BUDGET, &increase_of_an_hour(kind.spent));
    let (resets, created) = (select(&registry::BUDGET_RESETS), select(&registry::BUDGET_CREATED));
    format!(
        "clamp_min({limit} - {used}, 0) * 3600 / \
         (({spent} and ({resets} or {created} > time() - 3600) or {used} - {before}) > 0)"
    )
}

fn over_time() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::lines(
            "Used",
            PanelUnit::Share,
            "Share of each limit that is used in the current window.",
            each_kind(share_used),
        )
        .wide(12),
        DashboardPanel::lines(
            "Time to exhaustion",
            PanelUnit::Seconds,
            "Time until a limit is used up if usage continues to grow as in the last hour, also beyond the end of the \
             window; 0 once it is. In a rolling or lifetime window, the growth is the difference of the usage to an hour \
             ago. Nothing is shown while usage does not grow.",
            each_kind(until_exhausted),
        )
        .wide(12),
    ]
}

fn amounts() -> Vec<DashboardPanel> {
    let series = |name: &str| format!("{{{{namespace}}}}/{{{{budget}}}}: {name}");
    let panels = KINDS.iter().flat_map(|kind| {
        let [amounts, pace] = kind.titles;
        let [of_amounts, of_pace] = kind.descriptions;
        let targets = vec![
            panel_query(select(kind.limit), &series("limit")),
            panel_query(select(kind.used), &series("used")),
            panel_query(select(kind.reserved), &series("reserved")),
        ];
        let per_hour = format!("{} * 3600", sum_by(BUDGET, &rate(kind.spent)));
        let per_hour = vec![panel_query(per_hour, "{{namespace}}/{{budget}}")];
        [
            DashboardPanel::lines(amounts, kind.unit, of_amounts, targets).wide(12),
            DashboardPanel::lines(pace, kind.unit, of_pace, per_hour).wide(12),
        ]
    });
    panels.collect()
}

fn ledger() -> Vec<DashboardPanel> {
    vec![
        DashboardPanel::lines(
            "Leases",
            PanelUnit::PerMinute,
            "Leases granted to gateways per minute.",
            vec![panel_query(
                per_minute(BUDGET, &registry::BUDGET_LEASES),
                "{{namespace}}/{{budget}}",
            )],
        )
        .wide(12),
        DashboardPanel::lines(
            "Writes of the ledger",
            PanelUnit::PerMinute,
            "Writes of the ledger to the status of each AgentBudget per minute.",
            vec![panel_query(
                per_minute(BUDGET, &registry::BUDGET_WRITES),
                "{{namespace}}/{{budget}}",
            )],
        )
        .wide(12),
    ]
}
