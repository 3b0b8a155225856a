//! The registry of metrics: every name, type, label and help text, as data.
//!
//! Instruments, the collector, the reference page and the tests are made from it or checked against it; a metric that
//! is not here is not exported. Labels are bounded: names of objects, the model of a spec, and closed sets.

use std::collections::HashMap;
use std::fmt::Write as _;

use prometheus::Opts;
use prometheus::core::Desc;
use strum::IntoStaticStr;

/// Type of a metric, as Prometheus names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Kind {
    /// Only goes up (a restart may begin at 0 again, but for `Source::Agents`, `Source::Budgets` and `Source::Sensors`).
    Counter,
    /// Goes up and down.
    Gauge,
    /// Buckets, sum and count.
    Histogram,
    /// Sum and count.
    Summary,
}

/// Where a metric's values come from, and so which replica has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The Agents in the leader's cache, read when scraped. Only the leader has it.
    Agents,
    /// The AgentBudgets in the leader's cache, read when scraped. Only the leader has it.
    Budgets,
    /// The Sensors in the leader's cache, read when scraped. Only the leader has it.
    Sensors,
    /// The controller itself. Every replica has it.
    Controller,
    /// The operating system. Every replica has it.
    Process,
}

/// One metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// Full name.
    pub name: &'static str,
    /// Type.
    pub kind: Kind,
    /// Where its values come from.
    pub source: Source,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What it says.
    pub help: &'static str,
}

impl Metric {
    /// The name and help of an instrument for it.
    #[must_use]
    pub fn opts(&self) -> Opts {
        Opts::new(self.name, self.help)
    }

    /// Its description for a collector.
    pub fn desc(&self) -> prometheus::Result<Desc> {
        let labels = self.labels.iter().map(ToString::to_string).collect();
        Desc::new(self.name.into(), self.help.into(), labels, HashMap::new())
    }
}

/// Defines the metrics as constants, and [`ALL`] of them.
macro_rules! metrics {
    ($($constant:ident = $source:ident $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(
            #[doc = concat!("The metric `", $name, "`.")]
            pub const $constant: Metric = Metric {
                name: $name,
                kind: Kind::$kind,
                source: Source::$source,
                labels: &[$($label),*],
                help: $help,
            };
        )*
        /// Every metric, ordered by source and name.
        pub const ALL: &[Metric] = &[$($constant),*];
    };
}

metrics! {
    AGENT_ACTIONS = Agents Counter "agentloop_agent_actions_total" ["namespace", "agent"]
        "Runs of tools with side effects that were sent, as persisted in the status; a part of agentloop_agent_tool_calls_total.";
    AGENT_CALLS = Agents Counter "agentloop_agent_calls_total" ["namespace", "agent", "model"]
        "Model calls sent, each attempt for itself, as persisted in the status.";
    AGENT_COST = Agents Counter "agentloop_agent_cost_usd_total" ["namespace", "agent", "model"]
        "Cost in US dollars, of each call by the prices known when it was made, as persisted in the status; 0 without prices.";
    AGENT_CREATED = Agents Gauge "agentloop_agent_created_timestamp_seconds" ["namespace", "agent"]
        "When the Agent was created, in Unix time.";
    AGENT_ESTIMATED_CALLS = Agents Counter "agentloop_agent_estimated_calls_total" ["namespace", "agent", "model"]
        "Calls of unknown use that count in the budgets with all that was reserved for them.";
    AGENT_GUARDRAIL_TRIPS = Agents Counter "agentloop_agent_guardrail_trips_total" ["namespace", "agent", "guardrail", "action"]
        "Times a limit was reached or a detected loop went a step further, as persisted in the status, by what followed: warn, deny, pause or kill; all are always present.";
    AGENT_INFO = Agents Gauge "agentloop_agent_info" ["namespace", "agent", "api", "model"]
        "Always 1; the labels say what the spec asks for.";
    AGENT_LOOP_DETECTED = Agents Gauge "agentloop_agent_loop_detected" ["namespace", "agent", "sign"]
        "1 while the loop shows this sign of a repetition, or the controller sees it from outside; every sign is always present.";
    AGENT_LOOP_PAUSED_REASON = Agents Gauge "agentloop_agent_loop_paused_reason" ["namespace", "agent", "reason"]
        "1 while this reason holds the loop; every reason is always present.";
    AGENT_LOOP_STATE = Agents Gauge "agentloop_agent_loop_state" ["namespace", "agent", "state"]
        "1 for the state of the loop, 0 for the others; all states are always present, all 0 until the first is known.";
    AGENT_GENERATION = Agents Gauge "agentloop_agent_metadata_generation" ["namespace", "agent"]
        "Generation of the spec.";
    AGENT_REASONING_TOKENS = Agents Counter "agentloop_agent_reasoning_tokens_total" ["namespace", "agent", "model"]
        "Output tokens spent on reasoning, a part of type output in agentloop_agent_tokens_total.";
    AGENT_REFUSED_CALLS = Agents Counter "agentloop_agent_refused_calls_total" ["namespace", "agent"]
        "Calls that were not made because of a limit, as the gateway last reported; 0 until it has.";
    AGENT_SUSPENDED = Agents Gauge "agentloop_agent_spec_suspended" ["namespace", "agent"]
        "1 while spec.suspend is true.";
    AGENT_CONDITION = Agents Gauge "agentloop_agent_status_condition" ["namespace", "agent", "condition", "status"]
        "1 for the status of each condition in the status, 0 for the other two.";
    AGENT_OBSERVED_GENERATION = Agents Gauge "agentloop_agent_status_observed_generation" ["namespace", "agent"]
        "Generation of the spec that the status speaks of; 0 until there is one.";
    AGENT_TOKENS = Agents Counter "agentloop_agent_tokens_total" ["namespace", "agent", "model", "type"]
        "Tokens as the provider billed them and as persisted in the status; types input, cache_read, cache_write and output are disjoint.";
    AGENT_TOOL_CALLS = Agents Counter "agentloop_agent_tool_calls_total" ["namespace", "agent"]
        "Runs of tools that were sent, as persisted in the status; a repeat after a restart is no new one.";
    AGENT_TOOL_SECONDS = Agents Summary "agentloop_agent_tool_call_duration_seconds" ["namespace", "agent", "tool"]
        "How long runs of tools took that were sent and ended before the worker did, as persisted in the status; the 20th tool is among tool other, which is always present.";
    AGENT_TOOL_OUTCOMES = Agents Counter "agentloop_agent_tool_outcomes_total" ["namespace", "agent", "tool", "outcome"]
        "How tool calls ended, as persisted in the status: ok, error, denied, unavailable (neither was run) or unknown; the 20th tool and names that no server offers are tool other, which is always present.";
    AGENT_TURNS = Agents Counter "agentloop_agent_turns_total" ["namespace", "agent"]
        "Turns completed, as persisted in the status.";
    AGENT_UNKNOWN_CALLS = Agents Counter "agentloop_agent_unknown_calls_total" ["namespace", "agent", "model"]
        "Model calls of which the server never said what they used; their tokens are in no other metric.";

    BUDGET_AGENTS = Budgets Gauge "agentloop_budget_agents" ["namespace", "budget"]
        "Agents that draw on the AgentBudget.";
    BUDGET_BURN = Budgets Gauge "agentloop_budget_burn_per_hour" ["namespace", "budget", "kind"]
        "What was settled in the last ten minutes (less when this replica has led for less), as an amount per hour.";
    BUDGET_EXHAUSTION = Budgets Gauge "agentloop_budget_exhaustion_seconds" ["namespace", "budget", "kind"]
        "When what remains is spent at the burn of the last ten minutes; absent while nothing burns.";
    BUDGET_LEASES = Budgets Counter "agentloop_budget_leases_total" ["namespace", "budget"]
        "Leases granted to gateways since the AgentBudget was created, as persisted in its status.";
    BUDGET_WRITES = Budgets Counter "agentloop_budget_ledger_writes_total" ["namespace", "budget"]
        "Writes of the ledger to the status of the AgentBudget since it was created.";
    BUDGET_LIMIT = Budgets Gauge "agentloop_budget_limit" ["namespace", "budget", "kind"]
        "Limit of the window at hand, top-ups included; kinds tokens, input_tokens, output_tokens, calls, cost_usd.";
    BUDGET_REMAINING = Budgets Gauge "agentloop_budget_remaining" ["namespace", "budget", "kind"]
        "Limit less used and reserved.";
    BUDGET_RESERVED = Budgets Gauge "agentloop_budget_reserved" ["namespace", "budget", "kind"]
        "Held by gateways for calls that they make or may make.";
    BUDGET_CONDITION = Budgets Gauge "agentloop_budget_status_condition" ["namespace", "budget", "condition", "status"]
        "1 for the status of each condition in the status, 0 for the other two.";
    BUDGET_USED = Budgets Gauge "agentloop_budget_used" ["namespace", "budget", "kind"]
        "Settled in the window at hand; only of the kinds that are limited.";
    BUDGET_RESETS = Budgets Gauge "agentloop_budget_window_reset_timestamp_seconds" ["namespace", "budget"]
        "When there is room again or the window ends, in Unix time; absent where that is not known.";

    SENSOR_EVENTS = Sensors Counter "agentloop_sensor_events_total" ["namespace", "sensor", "outcome"]
        "What was heard, as persisted in the status: accepted, filtered (no news), dropped (beyond spec.limits), refused (a webhook's delivery that was not signed, too large, malformed or replayed), error (not understood).";
    SENSOR_INFO = Sensors Gauge "agentloop_sensor_info" ["namespace", "sensor", "type"]
        "Always 1; the label says what it listens to, empty until the controller has looked.";
    SENSOR_LAST_EVENT = Sensors Gauge "agentloop_sensor_last_event_timestamp_seconds" ["namespace", "sensor"]
        "When the last accepted event came, in Unix time; absent before the first.";
    SENSOR_NOTIFICATIONS = Sensors Counter "agentloop_sensor_notifications_total" ["namespace", "sensor"]
        "Notifications given, as persisted in the status.";
    SENSOR_PENDING = Sensors Gauge "agentloop_sensor_pending_deliveries" ["namespace", "sensor"]
        "Events in the outbox of a Sensor's own pod that some receiver does not have yet, as persisted in the status; absent for others.";
    SENSOR_SUSPENDED = Sensors Gauge "agentloop_sensor_spec_suspended" ["namespace", "sensor"]
        "1 while spec.suspend is true.";
    SENSOR_CONDITION = Sensors Gauge "agentloop_sensor_status_condition" ["namespace", "sensor", "condition", "status"]
        "1 for the status of each condition in the status, 0 for the other two.";
    SENSOR_UPDATES = Sensors Counter "agentloop_sensor_updates_total" ["namespace", "sensor"]
        "Fields of hot states written, as persisted in the status.";

    BUILD_INFO = Controller Gauge "agentloop_build_info" ["version", "revision"]
        "Always 1; the labels say which build this is.";
    BURIED = Controller Counter "agentloop_ledger_buried_total" ["kind"]
        "What gateways held when they were lost for good, which counts as spent: of each limit for itself, by kind (tokens, input_tokens, output_tokens, calls, cost_usd).";
    LOST_LEASES = Controller Counter "agentloop_ledger_lost_leases_total" []
        "Leases of which a gateway knew less than the ledger, since its storage went back to an earlier state; all that was left of each counts as spent.";
    LINK_ATTACHES = Controller Counter "agentloop_link_attaches_total" []
        "Pods that attached to this controller, each time counted.";
    LINK_REFUSALS = Controller Counter "agentloop_link_refusals_total" ["code"]
        "Requests of pods that were refused, by the code of the refusal.";
    LINK_REPORTS = Controller Counter "agentloop_link_reports_total" []
        "Reports of pods that were accepted.";
    RECONCILE_WORKERS = Controller Gauge "controller_runtime_active_workers" ["controller"]
        "Reconciles running now.";
    RECONCILE_MAX = Controller Gauge "controller_runtime_max_concurrent_reconciles" ["controller"]
        "Most reconciles that may run at once.";
    RECONCILE_ERRORS = Controller Counter "controller_runtime_reconcile_errors_total" ["controller"]
        "Reconciles that failed and will be tried again.";
    RECONCILE_SECONDS = Controller Histogram "controller_runtime_reconcile_time_seconds" ["controller"]
        "How long a reconcile took.";
    RECONCILES = Controller Counter "controller_runtime_reconcile_total" ["controller", "result"]
        "Reconciles by result: success, error, requeue or requeue_after.";
    LEADER = Controller Gauge "leader_election_master_status" ["name"]
        "1 while this replica holds the Lease of that name.";
    REQUESTS = Controller Counter "rest_client_requests_total" ["code", "method", "host"]
        "Requests to the Kubernetes API by status code, method and host; code <error> means that no answer came.";

    PROCESS_CPU = Process Counter "process_cpu_seconds_total" []
        "Total user and system CPU time spent in seconds.";
    PROCESS_MAX_FDS = Process Gauge "process_max_fds" []
        "Maximum number of open file descriptors.";
    PROCESS_OPEN_FDS = Process Gauge "process_open_fds" []
        "Number of open file descriptors.";
    PROCESS_RESIDENT = Process Gauge "process_resident_memory_bytes" []
        "Resident memory size in bytes.";
    PROCESS_START = Process Gauge "process_start_time_seconds" []
        "Start time of the process since unix epoch in seconds.";
    PROCESS_THREADS = Process Gauge "process_threads" []
        "Number of OS threads in the process.";
    PROCESS_VIRTUAL = Process Gauge "process_virtual_memory_bytes" []
        "Virtual memory size in bytes.";
}

/// The reference page, generated from [`ALL`].
#[must_use]
pub fn reference() -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         Generated from the registry of metrics. The controller serves them at `/metrics` in the Prometheus text format.\n\n\
         Metrics that carry `namespace` keep it only where the scrape sets `honor_labels: true`; else Prometheus renames it\n\
         to `exported_namespace`.\n",
    );
    for (source, title, note) in [
        (
            Source::Agents,
            "Agents",
            "One set of series an Agent, read from the leader's cache when scraped: gone with the Agent, and the counters \
             are the totals persisted in its status, so that they never step back.",
        ),
        (
            Source::Budgets,
            "Budgets",
            "One set of series an AgentBudget, read from the leader's cache when scraped: gone with the AgentBudget.",
        ),
        (
            Source::Sensors,
            "Sensors",
            "One set of series a Sensor, read from the leader's cache when scraped: gone with the Sensor. A Sensor that runs \
             in its receivers' pods, such as a schedule, counts for each of them.",
        ),
        (Source::Controller, "Controller", "Of each replica."),
        (Source::Process, "Process", "Of each replica."),
    ] {
        let _ = write!(
            page,
            "\n## {title}\n\n{note}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n"
        );
        for metric in ALL.iter().filter(|metric| metric.source == source) {
            let labels = metric.labels.iter().map(|label| format!("`{label}`"));
            let labels = labels.collect::<Vec<_>>().join(", ");
            let kind: &str = metric.kind.into();
            let _ = writeln!(page, "| `{}` | {kind} | {labels} | {} |", metric.name, metric.help);
        }
    }
    page
}
