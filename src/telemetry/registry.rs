//! The registry of metrics: every name, type, label and help text, as data.
//!
//! Instruments, collectors, the reference page and the tests are generated from it or checked against it; a metric that
//! is not listed here is not exported. Labels are bounded: names of objects, the model of a spec, and closed sets.

use std::collections::HashMap;
use std::fmt::Write as _;

use prometheus::Opts;
use prometheus::core::Desc;
use strum::IntoStaticStr;

/// Type of a metric, as Prometheus defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum MetricKind {
    /// Only increases. Resets to 0 at a restart, except for the sources `Agents`, `Budgets` and `Sensors`.
    Counter,
    Gauge,
    /// With buckets, sum and count.
    Histogram,
    /// With sum and count.
    Summary,
}

/// Where the values of a metric come from, which determines the replicas that export it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricSource {
    /// The Agents in the leader's cache, read at each scrape. Exported by the leader only.
    Agents,
    /// The AgentBudgets in the leader's cache, read at each scrape. Exported by the leader only.
    Budgets,
    /// The Sensors in the leader's cache, read at each scrape. Exported by the leader only.
    Sensors,
    /// The controller process. Exported by every replica.
    Controller,
    /// The operating system. Exported by every replica.
    Process,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    pub name: &'static str,
    pub kind: MetricKind,
    pub source: MetricSource,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

impl Metric {
    /// The options for an instrument.
    #[must_use]
    pub fn opts(&self) -> Opts {
        Opts::new(self.name, self.help)
    }

    /// The description for a collector.
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
                kind: MetricKind::$kind,
                source: MetricSource::$source,
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
        "Total number of actions (tool runs with side effects) sent, as persisted in the status; part of agentloop_agent_tool_calls_total.";
    AGENT_CALLS = Agents Counter "agentloop_agent_calls_total" ["namespace", "agent", "model"]
        "Total number of model calls sent, as persisted in the status; each attempt counts.";
    AGENT_COST = Agents Counter "agentloop_agent_cost_usd_total" ["namespace", "agent", "model"]
        "Total cost in US dollars at the prices known when each call was made, as persisted in the status; 0 without prices.";
    AGENT_CREATED = Agents Gauge "agentloop_agent_created_timestamp_seconds" ["namespace", "agent"]
        "Time of creation of the Agent, in seconds since the Unix epoch.";
    AGENT_DENIED_TOOL_CALLS = Agents Counter "agentloop_agent_denied_tool_calls_total" ["namespace", "agent"]
        "Total number of tool calls of the model that were rejected and not run, such as unknown tools and invalid arguments, as persisted in the status.";
    AGENT_ESTIMATED_CALLS = Agents Counter "agentloop_agent_estimated_calls_total" ["namespace", "agent", "model"]
        "Total number of calls of unknown usage that are charged to the budgets with their bound.";
    AGENT_GUARDRAIL_TRIPS = Agents Counter "agentloop_agent_guardrail_trips_total" ["namespace", "agent", "guardrail", "action"]
        "Total number of times a limit was reached or loop detection took a step, as persisted in the status, by action: warn, deny, pause or kill; all series are always present.";
    AGENT_INFO = Agents Gauge "agentloop_agent_info" ["namespace", "agent", "api", "model"]
        "Information about the Agent's spec in labels; always 1.";
    AGENT_LOOP_DETECTED = Agents Gauge "agentloop_agent_loop_detected" ["namespace", "agent", "sign"]
        "Whether this sign of a loop is detected, by the loop itself or by the controller; every sign is always present.";
    AGENT_LOOP_PAUSED_REASON = Agents Gauge "agentloop_agent_loop_paused_reason" ["namespace", "agent", "reason"]
        "Whether the loop is paused for this reason; every reason is always present.";
    AGENT_LOOP_STATE = Agents Gauge "agentloop_agent_loop_state" ["namespace", "agent", "state"]
        "Current state of the loop: 1 for this state, 0 for the others; every state is always present, all 0 until the first report.";
    AGENT_GENERATION = Agents Gauge "agentloop_agent_metadata_generation" ["namespace", "agent"]
        "Generation of the Agent's spec.";
    AGENT_REASONING_TOKENS = Agents Counter "agentloop_agent_reasoning_tokens_total" ["namespace", "agent", "model"]
        "Total number of reasoning tokens; part of type output in agentloop_agent_tokens_total.";
    AGENT_REFUSED_CALLS = Agents Counter "agentloop_agent_refused_calls_total" ["namespace", "agent"]
        "Total number of calls refused by a limit, as last reported by the gateway; 0 until the first report.";
    AGENT_SUSPENDED = Agents Gauge "agentloop_agent_spec_suspended" ["namespace", "agent"]
        "Whether spec.suspend is true.";
    AGENT_CONDITION = Agents Gauge "agentloop_agent_status_condition" ["namespace", "agent", "condition", "status"]
        "Status of each condition of the Agent: 1 for the current status, 0 for the other two.";
    AGENT_OBSERVED_GENERATION = Agents Gauge "agentloop_agent_status_observed_generation" ["namespace", "agent"]
        "Generation of the spec that the status describes; 0 until there is a status.";
    AGENT_TASKS = Agents Counter "agentloop_agent_tasks_total" ["namespace", "agent", "outcome"]
        "Total number of tasks and requests that have ended, as persisted in the status, by outcome: Completed, Failed or LimitReached; absent for an Agent that is not in mode Task and has had none.";
    AGENT_TOKENS = Agents Counter "agentloop_agent_tokens_total" ["namespace", "agent", "model", "type"]
        "Total number of tokens billed by the provider, as persisted in the status; the types input, cache_read, cache_write and output are disjoint.";
    AGENT_TOOL_CALLS = Agents Counter "agentloop_agent_tool_calls_total" ["namespace", "agent"]
        "Total number of tool runs sent, as persisted in the status; a repetition after a restart does not count again.";
    AGENT_TOOL_SECONDS = Agents Summary "agentloop_agent_tool_call_duration_seconds" ["namespace", "agent", "tool"]
        "Duration in seconds of tool runs that ended while the same worker was running, as persisted in the status; tools beyond the first 19 are tool other, which is always present.";
    AGENT_TOOL_OUTCOMES = Agents Counter "agentloop_agent_tool_outcomes_total" ["namespace", "agent", "tool", "outcome"]
        "Total number of tool calls by outcome, as persisted in the status: ok, error, denied, unavailable (these two were not run) or unknown; tools beyond the first 19 and names that no server offers are tool other, which is always present.";
    AGENT_TURNS = Agents Counter "agentloop_agent_turns_total" ["namespace", "agent"]
        "Total number of completed turns, as persisted in the status.";
    AGENT_UNKNOWN_CALLS = Agents Counter "agentloop_agent_unknown_calls_total" ["namespace", "agent", "model"]
        "Total number of model calls whose usage the server never reported; their tokens are not in any other metric.";
    AGENT_WAITING_TASKS = Agents Gauge "agentloop_agent_waiting_tasks" ["namespace", "agent"]
        "Number of tasks and requests that wait, as of the status; absent for an Agent that is not in mode Task and has had none.";

    BUDGET_AGENTS = Budgets Gauge "agentloop_budget_agents" ["namespace", "budget"]
        "Number of Agents that draw on the AgentBudget.";
    BUDGET_BURN = Budgets Gauge "agentloop_budget_burn_per_hour" ["namespace", "budget", "kind"]
        "Amount settled in the last ten minutes (or since this replica became the leader), per hour.";
    BUDGET_EXHAUSTION = Budgets Gauge "agentloop_budget_exhaustion_seconds" ["namespace", "budget", "kind"]
        "Time until the remaining amount is spent at the rate of the last ten minutes, in seconds; absent while nothing is spent.";
    BUDGET_LEASES = Budgets Counter "agentloop_budget_leases_total" ["namespace", "budget"]
        "Total number of leases granted to gateways since the AgentBudget was created, as persisted in its status.";
    BUDGET_WRITES = Budgets Counter "agentloop_budget_ledger_writes_total" ["namespace", "budget"]
        "Total number of writes of the ledger to the status of the AgentBudget.";
    BUDGET_LIMIT = Budgets Gauge "agentloop_budget_limit" ["namespace", "budget", "kind"]
        "Limit of the current window, including top-ups; kinds are tokens, input_tokens, output_tokens, calls and cost_usd.";
    BUDGET_REMAINING = Budgets Gauge "agentloop_budget_remaining" ["namespace", "budget", "kind"]
        "Limit minus used and reserved amount.";
    BUDGET_RESERVED = Budgets Gauge "agentloop_budget_reserved" ["namespace", "budget", "kind"]
        "Amount leased to gateways and not yet settled.";
    BUDGET_CONDITION = Budgets Gauge "agentloop_budget_status_condition" ["namespace", "budget", "condition", "status"]
        "Status of each condition of the AgentBudget: 1 for the current status, 0 for the other two.";
    BUDGET_USED = Budgets Gauge "agentloop_budget_used" ["namespace", "budget", "kind"]
        "Amount settled in the current window, for limited kinds only.";
    BUDGET_RESETS = Budgets Gauge "agentloop_budget_window_reset_timestamp_seconds" ["namespace", "budget"]
        "Time at which there is room again or the window ends, in seconds since the Unix epoch; absent if unknown.";

    SENSOR_EVENTS = Sensors Counter "agentloop_sensor_events_total" ["namespace", "sensor", "outcome"]
        "Total number of received events by outcome, as persisted in the status: accepted, filtered (duplicate or unchanged), dropped (beyond spec.limits, or not delivered in time), refused (webhook request unsigned, too large, malformed or replayed) or error (of the source or an expression).";
    SENSOR_INFO = Sensors Gauge "agentloop_sensor_info" ["namespace", "sensor", "type"]
        "Information about the Sensor in labels; always 1. The type is empty until the first reconcile.";
    SENSOR_LAST_EVENT = Sensors Gauge "agentloop_sensor_last_event_timestamp_seconds" ["namespace", "sensor"]
        "Time of the last accepted event, in seconds since the Unix epoch; absent before the first one.";
    SENSOR_NOTIFICATIONS = Sensors Counter "agentloop_sensor_notifications_total" ["namespace", "sensor"]
        "Total number of notifications given, as persisted in the status.";
    SENSOR_PENDING = Sensors Gauge "agentloop_sensor_pending_deliveries" ["namespace", "sensor"]
        "Number of events in the outbox of a sensor pod that some receiver has not acknowledged, as persisted in the status; absent without a sensor pod.";
    SENSOR_SUSPENDED = Sensors Gauge "agentloop_sensor_spec_suspended" ["namespace", "sensor"]
        "Whether spec.suspend is true.";
    SENSOR_CONDITION = Sensors Gauge "agentloop_sensor_status_condition" ["namespace", "sensor", "condition", "status"]
        "Status of each condition of the Sensor: 1 for the current status, 0 for the other two.";
    SENSOR_UPDATES = Sensors Counter "agentloop_sensor_updates_total" ["namespace", "sensor"]
        "Total number of hot state fields written, as persisted in the status.";

    BUILD_INFO = Controller Gauge "agentloop_build_info" ["version", "revision"]
        "Information about the build in labels; always 1.";
    GATE_WEBHOOKS = Controller Counter "agentloop_gate_webhook_attempts_total" ["event", "result"]
        "Total number of requests to the webhook that announces gates (chart value approvals.webhook), by event (opened or closed) and result (sent or failed); each attempt counts.";
    HISTORY_BATCHES = Controller Counter "agentloop_history_batches_total" ["result"]
        "Total number of batches of histories from workers for the database (chart value history.postgres), by result: stored; repeated, whose rows were there; restarted, after which the worker sends all that it has; unavailable, as the database was; refused, since it did not accept the rows.";
    HISTORY_DELETED_ROWS = Controller Counter "agentloop_history_deleted_rows_total" ["record"]
        "Total number of rows of histories deleted from the database at the end of their retention, by record (execution, step or audit).";
    HISTORY_LAST_SUCCESS = Controller Gauge "agentloop_history_last_success_timestamp_seconds" []
        "Time at which the database last answered a batch of a history, as a Unix timestamp; 0: not since the start of this replica.";
    HISTORY_ROWS = Controller Counter "agentloop_history_rows_total" ["record"]
        "Total number of rows of histories written to the database, by record (execution, step or audit).";
    FORFEITED = Controller Counter "agentloop_ledger_forfeited_total" ["kind"]
        "Amount forfeited by lost gateways and charged to their budgets, by kind (tokens, input_tokens, output_tokens, calls, cost_usd).";
    LOST_LEASES = Controller Counter "agentloop_ledger_lost_leases_total" []
        "Total number of leases of which a gateway knew less than the ledger because its storage was reset to an earlier state; the rest of each is forfeited.";
    LINK_ATTACHES = Controller Counter "agentloop_link_attaches_total" []
        "Total number of times a pod attached to this controller.";
    LINK_REFUSALS = Controller Counter "agentloop_link_refusals_total" ["code"]
        "Total number of refused requests of pods, by error code.";
    LINK_REPORTS = Controller Counter "agentloop_link_reports_total" []
        "Total number of accepted reports of pods.";
    RECONCILE_WORKERS = Controller Gauge "controller_runtime_active_workers" ["controller"]
        "Number of reconciles in progress.";
    RECONCILE_MAX = Controller Gauge "controller_runtime_max_concurrent_reconciles" ["controller"]
        "Maximum number of concurrent reconciles.";
    RECONCILE_ERRORS = Controller Counter "controller_runtime_reconcile_errors_total" ["controller"]
        "Total number of failed reconciles; each is retried.";
    RECONCILE_SECONDS = Controller Histogram "controller_runtime_reconcile_time_seconds" ["controller"]
        "Duration of reconciles in seconds.";
    RECONCILES = Controller Counter "controller_runtime_reconcile_total" ["controller", "result"]
        "Total number of reconciles by result: success, error, requeue or requeue_after.";
    LEADER = Controller Gauge "leader_election_master_status" ["name"]
        "Whether this replica holds the Lease of that name.";
    REQUESTS = Controller Counter "rest_client_requests_total" ["code", "method", "host"]
        "Total number of requests to the Kubernetes API by status code, method and host; code <error> means no response.";

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
         Metrics with the label `namespace` keep it only if the scrape configuration sets `honor_labels: true`; otherwise\n\
         Prometheus renames it to `exported_namespace`.\n",
    );
    for (source, title, note) in [
        (
            MetricSource::Agents,
            "Agents",
            "One set of series per Agent, read from the leader's cache at each scrape and removed with the Agent. The counters \
             are the totals persisted in its status, so that they never decrease.",
        ),
        (
            MetricSource::Budgets,
            "Budgets",
            "One set of series per AgentBudget, read from the leader's cache at each scrape and removed with the AgentBudget.",
        ),
        (
            MetricSource::Sensors,
            "Sensors",
            "One set of series per Sensor, read from the leader's cache at each scrape and removed with the Sensor. A Sensor that \
             runs in its receivers' pods, such as a schedule, counts once per receiver.",
        ),
        (MetricSource::Controller, "Controller", "One set of series per replica."),
        (MetricSource::Process, "Process", "One set of series per replica."),
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
