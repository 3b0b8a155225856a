//! The registry of metrics: every name, type, label and help text, as data.
//!
//! Instruments, collectors, the reference page and the tests are generated from it or checked against it; a metric that
//! is not listed here is not exported. Labels are bounded: names of objects, the model of a spec, and closed sets.

use std::fmt::Write as _;

use prometheus::Opts;
use strum::IntoStaticStr;

/// Type of a metric, as Prometheus defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum MetricKind {
    /// Only increases. Counters of the sources `Agents` and `Sensors` are totals from the status; others begin with the
    /// process.
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
    /// What all Agents of a namespace add up to, those that were deleted included. Exported by the leader only.
    Namespaces,
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

    /// Whether it is exported with the chart value `metrics.perObject: Minimal`.
    #[must_use]
    pub fn is_minimal(&self) -> bool {
        MINIMAL.contains(&self)
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
        "Total number of actions (tool runs with side effects) sent, as persisted in the status; part of agentloop_agent_tool_calls_total; absent at 0.";
    AGENT_CALLS = Agents Counter "agentloop_agent_calls_total" ["namespace", "agent", "model"]
        "Total number of model calls sent, as persisted in the status; each attempt counts.";
    AGENT_COST = Agents Counter "agentloop_agent_cost_usd_total" ["namespace", "agent", "model"]
        "Total estimated cost in US dollars, at the configured prices known when each call was made, as persisted in the status; 0 without prices.";
    AGENT_CREATED = Agents Gauge "agentloop_agent_created_timestamp_seconds" ["namespace", "agent"]
        "Time of creation of the Agent, in seconds since the Unix epoch.";
    AGENT_DENIED_TOOL_CALLS = Agents Counter "agentloop_agent_denied_tool_calls_total" ["namespace", "agent"]
        "Total number of tool calls of the model that were denied and not run, such as unknown tools and invalid arguments, as persisted in the status; absent at 0.";
    AGENT_DROPPED_TELEMETRY = Agents Counter "agentloop_agent_dropped_telemetry_total" ["namespace", "agent", "signal"]
        "Total number of spans (signal traces) and log lines (signal logs) of the Agent's pod that were not exported over OTLP, since the start of its gateway, as last reported by it; absent at 0.";
    AGENT_ESTIMATED_CALLS = Agents Counter "agentloop_agent_estimated_calls_total" ["namespace", "agent", "model"]
        "Total number of calls of unknown usage that are charged to the budgets with their bound; absent at 0.";
    AGENT_FAILED_TURNS = Agents Counter "agentloop_agent_failed_turns_total" ["namespace", "agent"]
        "Total number of turns that were given up after a failure, as persisted in the status; absent at 0.";
    AGENT_GUARDRAIL_TRIPS = Agents Counter "agentloop_agent_guardrail_trips_total" ["namespace", "agent", "guardrail", "action"]
        "Total number of times a limit was reached or loop detection took a step, as persisted in the status, by action (warn, deny, pause or kill); only series above 0.";
    AGENT_INFO = Agents Gauge "agentloop_agent_info" ["namespace", "agent", "api", "model", "mode"]
        "Information about the Agent's spec in labels; always 1.";
    AGENT_LAST_TURN = Agents Gauge "agentloop_agent_last_turn_timestamp_seconds" ["namespace", "agent"]
        "Time at which the controller learned of the start of the most recent turn, in seconds since the Unix epoch; absent before the first one.";
    AGENT_LOOP_DETECTED = Agents Gauge "agentloop_agent_loop_detected" ["namespace", "agent", "sign"]
        "Sign of a loop that is detected now, by the loop itself or by the controller; always 1, absent otherwise.";
    AGENT_LOOP_OUTCOME = Agents Gauge "agentloop_agent_loop_outcome" ["namespace", "agent", "outcome"]
        "How the loop ended: Completed, Idle, Failed, Escalated, Cancelled or ScaledToZero; always 1, absent unless it has ended.";
    AGENT_LOOP_PAUSED_REASON = Agents Gauge "agentloop_agent_loop_paused_reason" ["namespace", "agent", "reason"]
        "Reason why the loop is paused or stopped; always 1, one series for each reason that holds.";
    AGENT_LOOP_STATE = Agents Gauge "agentloop_agent_loop_state" ["namespace", "agent", "state"]
        "Current state of the loop; always 1, absent until the first report.";
    AGENT_GENERATION = Agents Gauge "agentloop_agent_metadata_generation" ["namespace", "agent"]
        "Generation of the Agent's spec.";
    AGENT_OLDEST_APPROVAL = Agents Gauge "agentloop_agent_oldest_pending_approval_timestamp_seconds" ["namespace", "agent"]
        "Time at which the oldest open gate was opened, in seconds since the Unix epoch; absent without an open gate.";
    AGENT_PENDING_APPROVALS = Agents Gauge "agentloop_agent_pending_approvals" ["namespace", "agent"]
        "Number of open gates, which wait for the approval of a person; absent at 0.";
    AGENT_REASONING_TOKENS = Agents Counter "agentloop_agent_reasoning_tokens_total" ["namespace", "agent", "model"]
        "Total number of reasoning tokens, part of type output in agentloop_agent_tokens_total; absent at 0.";
    AGENT_REFUSED_CALLS = Agents Counter "agentloop_agent_refused_calls_total" ["namespace", "agent"]
        "Total number of calls refused by a limit, as last reported by the gateway; absent until the first report.";
    AGENT_SUSPENDED = Agents Gauge "agentloop_agent_spec_suspended" ["namespace", "agent"]
        "Whether spec.suspend is true; always 1, absent otherwise.";
    AGENT_CONDITION = Agents Gauge "agentloop_agent_status_condition" ["namespace", "agent", "condition", "status"]
        "Status of a condition of the Agent: always 1, one series for each condition; those other than Ready are absent while they are False.";
    AGENT_OBSERVED_GENERATION = Agents Gauge "agentloop_agent_status_observed_generation" ["namespace", "agent"]
        "Generation of the spec that the status describes; 0 until there is a status.";
    AGENT_TASKS = Agents Counter "agentloop_agent_tasks_total" ["namespace", "agent", "outcome"]
        "Total number of tasks and requests that have ended, as persisted in the status, by outcome: Completed, Failed or LimitReached; absent for an Agent that is not in mode Task and has had none.";
    AGENT_TOKENS = Agents Counter "agentloop_agent_tokens_total" ["namespace", "agent", "model", "type"]
        "Total number of tokens billed by the provider, as persisted in the status; the types input, cache_read, cache_write and output are disjoint.";
    AGENT_TOOL_SECONDS = Agents Counter "agentloop_agent_tool_call_seconds_total" ["namespace", "agent", "tool"]
        "Total duration in seconds of tool runs that ended while the same worker was running, as persisted in the status; only tools that were used, those beyond the first 19 as tool other. The runs themselves are the outcomes ok, error and unknown of agentloop_agent_tool_outcomes_total.";
    AGENT_TOOL_CALLS = Agents Counter "agentloop_agent_tool_calls_total" ["namespace", "agent"]
        "Total number of tool runs sent, as persisted in the status; a repetition after a restart does not count again.";
    AGENT_TOOL_OUTCOMES = Agents Counter "agentloop_agent_tool_outcomes_total" ["namespace", "agent", "tool", "outcome"]
        "Total number of tool calls by outcome, as persisted in the status: ok, error, denied, unavailable (these two were not run) or unknown; only series above 0, tools beyond the first 19 and names that no server offers as tool other.";
    AGENT_TURNS = Agents Counter "agentloop_agent_turns_total" ["namespace", "agent"]
        "Total number of completed turns, as persisted in the status.";
    AGENT_UNKNOWN_CALLS = Agents Counter "agentloop_agent_unknown_calls_total" ["namespace", "agent", "model"]
        "Total number of model calls whose usage the server never reported, whose tokens are in no other metric; absent at 0.";
    AGENT_WAITING_TASKS = Agents Gauge "agentloop_agent_waiting_tasks" ["namespace", "agent"]
        "Number of tasks and requests that wait, as of the status; absent for an Agent that is not in mode Task and has had none.";

    NAMESPACE_AGENTS = Namespaces Gauge "agentloop_namespace_agents" ["namespace", "state"]
        "Number of Agents by state of the loop; None before the first report.";
    NAMESPACE_APPROVAL_SECONDS = Namespaces Histogram "agentloop_namespace_approval_wait_seconds" ["namespace", "decision"]
        "Time in seconds for which gates were open, by how they closed: Approved, Denied, Expired, Withdrawn (no longer needed) or Superseded (by another gate), as reported by the workers; present from the first gate of the namespace.";
    NAMESPACE_CALL_SECONDS = Namespaces Histogram "agentloop_namespace_call_duration_seconds" ["namespace", "model"]
        "Duration in seconds of answered model calls, from the request to the end of the answer, as reported by the gateways; models beyond the first 10 and those that no spec names as model other.";
    NAMESPACE_CALLS = Namespaces Counter "agentloop_namespace_calls_total" ["namespace"]
        "Total number of model calls sent by the Agents of the namespace; each attempt counts.";
    NAMESPACE_COST = Namespaces Counter "agentloop_namespace_cost_usd_total" ["namespace"]
        "Total estimated cost in US dollars, at the configured prices known when each call was made; 0 without prices.";
    NAMESPACE_TRIPS = Namespaces Counter "agentloop_namespace_guardrail_trips_total" ["namespace", "guardrail", "action"]
        "Total number of times a limit was reached or loop detection took a step, by action: warn, deny, pause or kill.";
    NAMESPACE_APPROVALS = Namespaces Gauge "agentloop_namespace_pending_approvals" ["namespace"]
        "Number of open gates, which wait for the approval of a person.";
    NAMESPACE_REFUSED = Namespaces Counter "agentloop_namespace_refused_calls_total" ["namespace"]
        "Total number of calls refused by a limit, as reported by the gateways to this leader.";
    NAMESPACE_TASKS = Namespaces Counter "agentloop_namespace_tasks_total" ["namespace", "outcome"]
        "Total number of tasks and requests that have ended, by outcome: Completed, Failed or LimitReached.";
    NAMESPACE_TOKENS = Namespaces Counter "agentloop_namespace_tokens_total" ["namespace", "type"]
        "Total number of tokens billed by the provider; the types input, cache_read, cache_write and output are disjoint.";
    NAMESPACE_TOOL_SECONDS = Namespaces Histogram "agentloop_namespace_tool_call_duration_seconds" ["namespace"]
        "Duration in seconds of tool runs that ended while the same worker was running, as reported by the workers.";
    NAMESPACE_OUTCOMES = Namespaces Counter "agentloop_namespace_tool_outcomes_total" ["namespace", "outcome"]
        "Total number of tool calls by outcome: ok, error, denied, unavailable (these two were not run) or unknown.";
    NAMESPACE_TURN_SECONDS = Namespaces Histogram "agentloop_namespace_turn_duration_seconds" ["namespace", "mode"]
        "Duration in seconds of completed turns from start to end, with the pauses and waits for approvals in them, as reported by the workers; only turns that ended while the same worker was running.";
    NAMESPACE_TURNS = Namespaces Counter "agentloop_namespace_turns_total" ["namespace", "outcome"]
        "Total number of turns that have ended, by outcome: Completed, or Failed if it was given up after a failure.";

    BUDGET_AGENTS = Budgets Gauge "agentloop_budget_agents" ["namespace", "budget"]
        "Number of Agents that draw on the AgentBudget.";
    BUDGET_CREATED = Budgets Gauge "agentloop_budget_created_timestamp_seconds" ["namespace", "budget"]
        "Time of creation of the AgentBudget, in seconds since the Unix epoch.";
    BUDGET_LEASES = Budgets Counter "agentloop_budget_leases_total" ["namespace", "budget"]
        "Total number of leases granted to gateways since the AgentBudget was created, as persisted in its status.";
    BUDGET_WRITES = Budgets Counter "agentloop_budget_ledger_writes_total" ["namespace", "budget"]
        "Total number of writes of the ledger to the status of the AgentBudget.";
    BUDGET_LIMIT_CALLS = Budgets Gauge "agentloop_budget_limit_calls" ["namespace", "budget"]
        "Limit of the current window in model calls, including top-ups; absent if not limited.";
    BUDGET_LIMIT_INPUT = Budgets Gauge "agentloop_budget_limit_input_tokens" ["namespace", "budget"]
        "Limit of the current window in input tokens, including top-ups; absent if not limited.";
    BUDGET_LIMIT_OUTPUT = Budgets Gauge "agentloop_budget_limit_output_tokens" ["namespace", "budget"]
        "Limit of the current window in output tokens, including top-ups; absent if not limited.";
    BUDGET_LIMIT_TOKENS = Budgets Gauge "agentloop_budget_limit_tokens" ["namespace", "budget"]
        "Limit of the current window in tokens, including top-ups; absent if not limited.";
    BUDGET_LIMIT_USD = Budgets Gauge "agentloop_budget_limit_usd" ["namespace", "budget"]
        "Limit of the current window in US dollars, including top-ups; absent if not limited.";
    BUDGET_RESERVED_CALLS = Budgets Gauge "agentloop_budget_reserved_calls" ["namespace", "budget"]
        "Amount in model calls that is leased to gateways and not yet settled; absent if not limited.";
    BUDGET_RESERVED_INPUT = Budgets Gauge "agentloop_budget_reserved_input_tokens" ["namespace", "budget"]
        "Amount in input tokens that is leased to gateways and not yet settled; absent if not limited.";
    BUDGET_RESERVED_OUTPUT = Budgets Gauge "agentloop_budget_reserved_output_tokens" ["namespace", "budget"]
        "Amount in output tokens that is leased to gateways and not yet settled; absent if not limited.";
    BUDGET_RESERVED_TOKENS = Budgets Gauge "agentloop_budget_reserved_tokens" ["namespace", "budget"]
        "Amount in tokens that is leased to gateways and not yet settled; absent if not limited.";
    BUDGET_RESERVED_USD = Budgets Gauge "agentloop_budget_reserved_usd" ["namespace", "budget"]
        "Amount in US dollars that is leased to gateways and not yet settled; absent if not limited.";
    BUDGET_SPENT_CALLS = Budgets Counter "agentloop_budget_spent_calls_total" ["namespace", "budget"]
        "Total amount in model calls settled since this replica became the leader; absent if not limited.";
    BUDGET_SPENT_INPUT = Budgets Counter "agentloop_budget_spent_input_tokens_total" ["namespace", "budget"]
        "Total amount in input tokens settled since this replica became the leader; absent if not limited.";
    BUDGET_SPENT_OUTPUT = Budgets Counter "agentloop_budget_spent_output_tokens_total" ["namespace", "budget"]
        "Total amount in output tokens settled since this replica became the leader; absent if not limited.";
    BUDGET_SPENT_TOKENS = Budgets Counter "agentloop_budget_spent_tokens_total" ["namespace", "budget"]
        "Total amount in tokens settled since this replica became the leader; absent if not limited.";
    BUDGET_SPENT_USD = Budgets Counter "agentloop_budget_spent_usd_total" ["namespace", "budget"]
        "Total amount in US dollars settled since this replica became the leader; absent if not limited.";
    BUDGET_CONDITION = Budgets Gauge "agentloop_budget_status_condition" ["namespace", "budget", "condition", "status"]
        "Status of a condition of the AgentBudget: always 1, one series for each condition; those other than Ready are absent while they are False.";
    BUDGET_USED_CALLS = Budgets Gauge "agentloop_budget_used_calls" ["namespace", "budget"]
        "Amount in model calls settled in the current window; absent if not limited.";
    BUDGET_USED_INPUT = Budgets Gauge "agentloop_budget_used_input_tokens" ["namespace", "budget"]
        "Amount in input tokens settled in the current window; absent if not limited.";
    BUDGET_USED_OUTPUT = Budgets Gauge "agentloop_budget_used_output_tokens" ["namespace", "budget"]
        "Amount in output tokens settled in the current window; absent if not limited.";
    BUDGET_USED_TOKENS = Budgets Gauge "agentloop_budget_used_tokens" ["namespace", "budget"]
        "Amount in tokens settled in the current window; absent if not limited.";
    BUDGET_USED_USD = Budgets Gauge "agentloop_budget_used_usd" ["namespace", "budget"]
        "Amount in US dollars settled in the current window; absent if not limited.";
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
        "Status of a condition of the Sensor: always 1, one series for each condition; those other than Ready are absent while they are False.";
    SENSOR_UPDATES = Sensors Counter "agentloop_sensor_updates_total" ["namespace", "sensor"]
        "Total number of hot state fields written, as persisted in the status.";

    BUILD_INFO = Controller Gauge "agentloop_build_info" ["version", "revision", "rustc"]
        "Information about the build in labels; always 1.";
    CACHES_FILLED = Controller Gauge "agentloop_controller_caches_filled" []
        "Whether this replica leads and has listed all objects, so that it exports the series of Agents, AgentBudgets, Sensors and namespaces; 0 on the other replicas.";
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
    KUBERNETES_EVENTS_DROPPED = Controller Counter "agentloop_kubernetes_events_dropped_total" []
        "Total number of Kubernetes Events that were not written because their object had too many of the same reason.";
    FORFEITED_CALLS = Controller Counter "agentloop_ledger_forfeited_calls_total" []
        "Total amount in model calls forfeited by lost gateways and charged to their budgets.";
    FORFEITED_INPUT = Controller Counter "agentloop_ledger_forfeited_input_tokens_total" []
        "Total amount in input tokens forfeited by lost gateways and charged to their budgets.";
    FORFEITED_OUTPUT = Controller Counter "agentloop_ledger_forfeited_output_tokens_total" []
        "Total amount in output tokens forfeited by lost gateways and charged to their budgets.";
    FORFEITED_TOKENS = Controller Counter "agentloop_ledger_forfeited_tokens_total" []
        "Total amount in tokens forfeited by lost gateways and charged to their budgets.";
    FORFEITED_USD = Controller Counter "agentloop_ledger_forfeited_usd_total" []
        "Total amount in US dollars forfeited by lost gateways and charged to their budgets.";
    LOST_LEASES = Controller Counter "agentloop_ledger_lost_leases_total" []
        "Total number of leases of which a gateway knew less than the ledger because its storage was reset to an earlier state; the rest of each is forfeited.";
    LINK_ATTACHES = Controller Counter "agentloop_link_attaches_total" []
        "Total number of times a pod attached to this controller.";
    LINK_REFUSALS = Controller Counter "agentloop_link_refusals_total" ["code"]
        "Total number of refused requests of pods, by error code.";
    LINK_REPORTS = Controller Counter "agentloop_link_reports_total" []
        "Total number of accepted reports of pods.";
    TELEMETRY_DROPPED = Controller Counter "agentloop_telemetry_dropped_total" ["signal"]
        "Total number of spans (signal traces), log lines (logs) and data points (metrics) of the controller that were not exported over OTLP, because the collector was unavailable or rejected them. The next export has the metrics again, as they are then.";
    RECONCILE_WORKERS = Controller Gauge "controller_runtime_active_workers" ["controller"]
        "Number of reconciles in progress.";
    RECONCILE_MAX = Controller Gauge "controller_runtime_max_concurrent_reconciles" ["controller"]
        "Maximum number of concurrent reconciles.";
    RECONCILE_ERRORS = Controller Counter "controller_runtime_reconcile_errors_total" ["controller"]
        "Total number of failed reconciles; each is retried.";
    RECONCILE_SECONDS = Controller Histogram "controller_runtime_reconcile_time_seconds" ["controller"]
        "Duration of reconciles in seconds.";
    RECONCILE_TIMEOUTS = Controller Counter "controller_runtime_reconcile_timeouts_total" ["controller"]
        "Total number of failed reconciles that took too long or waited too long for the Kubernetes API; part of controller_runtime_reconcile_errors_total.";
    RECONCILES = Controller Counter "controller_runtime_reconcile_total" ["controller", "result"]
        "Total number of reconciles by result: success, error, requeue or requeue_after.";
    LEADER = Controller Gauge "leader_election_master_status" ["name"]
        "Whether this replica holds the Lease of that name.";
    REQUEST_SECONDS = Controller Histogram "rest_client_request_duration_seconds" ["verb", "host"]
        "Duration of requests to the Kubernetes API until the head of the response, in seconds.";
    REQUESTS = Controller Counter "rest_client_requests_total" ["code", "method", "host"]
        "Total number of requests to the Kubernetes API by status code, method and host; code <error> means no response.";
    QUEUE_ADDS = Controller Counter "workqueue_adds_total" ["name", "controller"]
        "Total number of objects that were queued for a reconcile; one that waits already is not queued again.";
    QUEUE_DEPTH = Controller Gauge "workqueue_depth" ["name", "controller"]
        "Number of objects that wait for a reconcile.";
    QUEUE_LONGEST = Controller Gauge "workqueue_longest_running_processor_seconds" ["name", "controller"]
        "Duration of the longest reconcile in progress, in seconds.";
    QUEUE_WAIT = Controller Histogram "workqueue_queue_duration_seconds" ["name", "controller"]
        "Time that objects waited in the queue before their reconcile, in seconds.";
    QUEUE_RETRIES = Controller Counter "workqueue_retries_total" ["name", "controller"]
        "Total number of objects that were queued again after a failed reconcile.";
    QUEUE_UNFINISHED = Controller Gauge "workqueue_unfinished_work_seconds" ["name", "controller"]
        "Sum of the durations of the reconciles in progress, in seconds.";
    QUEUE_WORK = Controller Histogram "workqueue_work_duration_seconds" ["name", "controller"]
        "Duration of the reconciles of queued objects, in seconds.";

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

/// The metrics of single objects that are exported with the chart value `metrics.perObject: Minimal`.
const MINIMAL: &[&Metric] = &[
    &AGENT_INFO,
    &AGENT_LOOP_STATE,
    &AGENT_LOOP_OUTCOME,
    &AGENT_LOOP_PAUSED_REASON,
    &AGENT_CONDITION,
    &AGENT_SUSPENDED,
    &AGENT_TOKENS,
    &AGENT_COST,
    &AGENT_PENDING_APPROVALS,
    &BUDGET_LIMIT_CALLS,
    &BUDGET_LIMIT_INPUT,
    &BUDGET_LIMIT_OUTPUT,
    &BUDGET_LIMIT_TOKENS,
    &BUDGET_LIMIT_USD,
    &BUDGET_USED_CALLS,
    &BUDGET_USED_INPUT,
    &BUDGET_USED_OUTPUT,
    &BUDGET_USED_TOKENS,
    &BUDGET_USED_USD,
    &BUDGET_RESERVED_CALLS,
    &BUDGET_RESERVED_INPUT,
    &BUDGET_RESERVED_OUTPUT,
    &BUDGET_RESERVED_TOKENS,
    &BUDGET_RESERVED_USD,
    &BUDGET_CONDITION,
    &SENSOR_INFO,
    &SENSOR_CONDITION,
];

/// The reference page, generated from [`ALL`].
#[must_use]
pub fn reference() -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         Generated from the registry of metrics. The controller serves them at `/metrics` in the Prometheus\n\
         text format 0.0.4 or, if the scraper accepts it, in OpenMetrics 1.0,\n\
         compressed with gzip if the request accepts it (`Accept-Encoding`), as those of Prometheus do.\n\n\
         The chart value `metrics.perObject` decides which series of single Agents, AgentBudgets and Sensors are exported: `Full`\n\
         (all), `Minimal` (those marked with \u{2022}) or `Disabled` (none). The sums of namespaces are always exported.\n\n\
         Metrics with the label `namespace` keep it only if the scrape configuration sets `honor_labels: true`; otherwise\n\
         Prometheus renames it to `exported_namespace`.\n",
    );
    for (source, title, note) in [
        (
            MetricSource::Agents,
            "Agents",
            "One set of series per Agent, read from the leader's cache at each scrape and removed with the Agent. The counters \
             are the totals persisted in its status, so that they never decrease. Each leader exports the same ones: where the \
             leader may have changed, take the highest of the replicas before `increase()` or `rate()` \
             ([how to](../tasks/monitoring.md#totals-of-single-objects)). A series that is absent means 0 if \
             Agents are exported at all. In queries use `or 0 * count(agentloop_agent_info)`, or `agentloop_agent_created_timestamp_seconds` for \
             what is exported with `Full` only. Unlike `or vector(0)`, it has no value while no leader is scraped. \
             `increase()` and `rate()` miss the first count of a series that appears; the recording rules `*:increase1h` of the chart \
             count it.\n\n\
             A healthy Agent has 14 + 6 \u{d7} models + 2 \u{d7} tools series, of the models and tools that it has used: 30 with one model and \
             five tools, or with two models and two tools. An Agent without Sensors has one less, and one with tasks four more. \
             Each outcome of a tool other than `ok`, condition, pause reason, trip of a limit and other count that is not 0 adds one. \
             The status lists 10 models and 20 tools; the rest is in `other`. No Agent has more than 321 series. A scrape of \
             1,000 healthy Agents in 20 namespaces, each with one model and two tools, has less than 3 MB, with the sums and histograms of \
             the namespaces.",
        ),
        (
            MetricSource::Namespaces,
            "Namespaces",
            "One set of series per namespace with Agents: sums over its Agents, whatever `metrics.perObject` is. All series of \
             closed label sets are present. The counters add up how much the totals that the Agents persist in their status \
             have grown since a replica became the leader. Deleted Agents stay included. Each leader begins at 0, also one \
             that is the same container, started again. The totals themselves are those of the Agents. The histograms begin with the first durations after a replica became the leader and \
             end with the last Agent of the namespace. 1,000 namespaces have them; another gets them once nothing was measured \
             in one of these for 10 minutes. Sum over `instance`: `rate()` and `increase()` add up what each leader counted, and \
             miss what changed between its beginning and its first scrape. Exemplars are traces of turns.",
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
             runs in its receivers' pods, such as a schedule, counts once per receiver. The counters are totals from the status, as \
             those of Agents are.",
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
            let minimal = if metric.is_minimal() { " \u{2022}" } else { "" };
            let _ = writeln!(
                page,
                "| `{}`{minimal} | {kind} | {labels} | {} |",
                metric.name, metric.help
            );
        }
    }
    page
}
