//! The `Sensor` resource: a source, rules, and the Agents that receive its events.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::{self, DNS_LABEL};
use super::source::{PollSource, SensorStorage, StreamSource, WebhookSource};

/// A field of `spec.hotState.fields`.
const FIELD: &str = "^[a-zA-Z][a-zA-Z0-9_]*$";

/// Desired state of a Sensor: its source, its receivers, and how events become updates and notifications.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "agentloop.dev",
    version = "v1alpha1",
    kind = "Sensor",
    plural = "sensors",
    shortname = "asensor",
    category = "agentloop",
    doc = "A source of events that are delivered exactly once to the hot state and the notifications of Agents.",
    namespaced,
    status = "SensorStatus",
    derive = "PartialEq",
    printcolumn(
        name = "READY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the Sensor is ready; if False, user action is required"
    ),
    printcolumn(
        name = "TYPE",
        type_ = "string",
        json_path = ".status.type",
        description = "Kind of the source"
    ),
    printcolumn(
        name = "LAST-EVENT",
        type_ = "date",
        json_path = ".status.lastEventTime",
        description = "Time since the last event"
    ),
    printcolumn(
        name = "EVENTS",
        type_ = "integer",
        json_path = ".status.events",
        description = "Number of accepted events"
    ),
    printcolumn(
        name = "ERRORS",
        type_ = "integer",
        json_path = ".status.errors",
        description = "Number of failures of the source or of expressions"
    ),
    printcolumn(
        name = "AGE",
        type_ = "date",
        json_path = ".metadata.creationTimestamp",
        description = "Time since creation"
    ),
    validation = Rule::new("self.metadata.name.size() <= 63").message(
        "metadata.name of a Sensor must be at most 63 characters: it names the Sensor in events and metrics"
    ),
    validation = Rule::new(
        "has(self.spec.source.schedule) || has(self.spec.source.watch) || self.metadata.name.matches('^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$')"
    ).message(
        "metadata.name of a Sensor with poll, stream or webhook must be at most 45 lower-case letters, digits and '-', and start with a letter: it names the pod and the Service"
    )
)]
#[x_kube(
    validation = Rule::new("has(self.agentNames) && size(self.agentNames) > 0 || has(self.agentSelector)").message(
        "spec has no receivers: set spec.agentNames, or spec.agentSelector ({} selects every Agent in the namespace)"
    ),
    validation = Rule::new("!has(self.task) || !has(self.notification)").message(
        "spec.task and spec.notification are mutually exclusive: remove one of them"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SensorSpec {
    /// Names of Agents in the Sensor's namespace that receive its events, at most 64. An Agent that does not exist yet
    /// receives events once it does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "set", "items" = {
        "description": "Name of an Agent.", "type": "string", "minLength": 1, "maxLength": 63, "pattern": DNS_LABEL,
    }))]
    pub agent_names: Vec<String>,
    /// Label selector of further Agents in the Sensor's namespace that receive its events. `{}` selects all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::agent_selector)]
    pub agent_selector: Option<LabelSelector>,
    /// If true, the Sensor receives no events, and `Suspended` is True. Events accepted before are still delivered.
    /// Defaults to false.
    #[serde(default)]
    pub suspend: bool,
    /// Source of the events. Set exactly one kind.
    pub source: SensorSource,
    /// Hot state fields that each accepted event writes, at most 16. A receiver without the field, or with a field of
    /// another type, keeps its value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["field"]))]
    pub updates: Vec<HotStateUpdate>,
    /// Named conditions on events, at most 16. With signals, only those that hold create a notification. Without signals,
    /// each accepted event creates one if `notification` or `task` is set or if there are no `updates`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub signals: Vec<SignalSpec>,
    /// Text of the notifications.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notification: Option<NotificationSpec>,
    /// Task for the receivers for each event. Mutually exclusive with `notification`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<EventTaskSpec>,
    /// Limits on accepted events.
    #[serde(default)]
    pub limits: SensorLimits,
    /// Storage of the outbox, in which a sensor pod keeps events until they are acknowledged. Immutable.
    #[serde(default)]
    pub storage: SensorStorage,
}

/// Source of a Sensor's events.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new(
    "[has(self.schedule), has(self.watch), has(self.poll), has(self.stream), has(self.webhook)].filter(one, one).size() == 1"
).message(
    "spec.source must have exactly one of schedule, watch, poll, stream and webhook, such as schedule: {cron: \"0 8 * * 1-5\"}"
))]
#[serde(rename_all = "camelCase")]
pub struct SensorSource {
    /// A schedule. It runs in each receiver's pod and needs no network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleSource>,
    /// Files in the receivers' workspaces (`spec.workspace` of the Agent), watched by each receiver's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watch: Option<WatchSource>,
    /// A page, query or tool that is polled by a sensor pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll: Option<PollSource>,
    /// A persistent connection of a sensor pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<StreamSource>,
    /// An HTTP endpoint in a sensor pod that receives signed requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub webhook: Option<WebhookSource>,
}

/// A calendar schedule. Its events have the payload `{"scheduledTime": "<RFC 3339>"}`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleSource {
    /// Cron expression with five fields: minute, hour, day of month, month and day of week, such as `0 8 * * 1-5`. A
    /// time that is skipped when clocks are set forward fires once, right after the gap; a time that occurs twice when
    /// they are set back fires once. A schedule whose minute or hour is `*` or a step follows the wall clock instead:
    /// it does not fire in the gap, and fires in both of the repeated hours.
    #[schemars(length(min = 9, max = 128))]
    #[x_kube(validation = Rule::new(
        "self.matches('^ *([0-9*][0-9*,/-]* +){2}[0-9*?L][0-9*?,/LW-]* +[0-9*A-Za-z][0-9A-Za-z*,/-]* +[0-9*?A-Za-z][0-9A-Za-z*?,/#-]* *$')"
    ).message(
        "spec.source.schedule.cron must be five fields: minute, hour, day of month, month and day of week, such as 0 8 * * 1-5"
    ))]
    pub cron: String,
    /// IANA time zone of `cron`. Defaults to UTC.
    #[serde(default = "utc")]
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$')").message(
        "spec.source.schedule.timeZone must be a name of the IANA time zone database, such as Europe/Berlin or UTC"
    ))]
    pub time_zone: String,
    /// What happens to times that were missed because the receiver's pod or the Sensor was not running. `RunOnce`, the
    /// default: only the last one fires, late. `Skip`: none fires.
    #[serde(default)]
    pub missed: MissedTickPolicy,
}

fn utc() -> String {
    "UTC".into()
}

/// Files in a workspace. Each created, modified or removed file is an event once it has been unchanged for a second.
/// Changes made while the pod is not running are found when it starts; files that exist at first count as created. The
/// payload is `{"path", "kind": "Created"|"Modified"|"Removed", "size", "modified", "sha256", "content"}`: `path` is
/// relative to the workspace, and `content` is present if it is UTF-8 text that fits into `limits.maxPayloadBytes`.
/// Files above 64 MiB have no `sha256`. Files beyond `limits.perMinute` and `limits.minIntervalMilliseconds` wait and
/// are never dropped. Links are not followed.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct WatchSource {
    /// Directory or file, relative to the workspace, such as `inbox/`; `.` is the whole workspace. While it contains
    /// more than 10,000 files and directories, no events are produced and `Connected` is False.
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(validation = Rule::new("!self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')").message(
        "spec.source.watch.path must be relative to the workspace, without a leading / and without .., such as inbox/"
    ))]
    pub path: String,
    /// Whether files in subdirectories are included. Defaults to true.
    #[serde(default = "yes")]
    pub recursive: bool,
}

/// What happens to missed times of a schedule.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum MissedTickPolicy {
    /// Only the last one fires, late.
    #[default]
    RunOnce,
    /// None of them fires.
    Skip,
}

/// A hot state field and its new value.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HotStateUpdate {
    /// Name of the field in the receivers' `spec.hotState.fields`.
    #[schemars(length(min = 1, max = 63), regex(pattern = FIELD))]
    pub field: String,
    /// CEL expression that returns the value, over `payload` (that of the event), `previous` (that of the last accepted
    /// event, or null) and `now` (seconds since 1970). `payload` alone is the whole payload. In addition to the
    /// operators and macros of CEL: contains, startsWith, endsWith, matches, lowerAscii, size, min, max, slice(from,
    /// to), string, int, double, json and epochSeconds (of an RFC 3339 time).
    #[schemars(length(min = 1, max = 4096))]
    pub value: String,
}

/// A named condition on events.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.when) || has(self.model)").message(
    "spec.signals[] must have when (an expression), model (which scores the event), or both"
))]
#[serde(rename_all = "camelCase")]
pub struct SignalSpec {
    /// Name of the signal. Loops can wait for `signal/<sensor>/<name>`.
    #[schemars(length(min = 1, max = 63), regex(pattern = DNS_LABEL))]
    pub name: String,
    /// CEL expression over `payload`, `previous` and `now` that is true when the signal holds. With `model`: whether an
    /// event is scored. Absent: every event is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub when: Option<String>,
    /// Has the event scored by the light model. Each receiver calls its own `spec.lightModel`, once for each event that
    /// passes `when` and is not within the cooldown. The calls count against that Agent's budgets and rate limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<SignalModel>,
    /// What is suppressed if the signal does not hold. `Notify`, the default: its notification. `Update`: the updates;
    /// the notification is still given. `Both`: both. Fields are written only if every signal with gate `Update` or
    /// `Both` holds.
    #[serde(default)]
    pub gate: SignalGate,
    /// Whether the signal creates a notification. If false, it only wakes loops that wait for it. Defaults to true.
    #[serde(default = "yes")]
    pub notify: bool,
    /// Priority of the notification. `Low`: shown last, dropped first. `Normal`, the default: shown in the next turn.
    /// `High`: ends a sleep.
    #[serde(default)]
    pub priority: SignalPriority,
    /// Time in seconds, 0 to 86,400, after the signal held, during which it does not hold again. Defaults to 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 86_400))]
    pub cooldown_seconds: u32,
}

fn yes() -> bool {
    true
}

/// Scoring of an event by the light model.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SignalModel {
    /// Question that the score answers, such as `How likely is it that this message reports an outage?`, at most 2,048
    /// characters. The payload is appended to it, truncated to 8,192 bytes of JSON.
    #[schemars(length(min = 1, max = 2048))]
    pub prompt: String,
    /// Minimum score at which the signal holds, 1 to 100. Defaults to 80.
    #[serde(default = "threshold")]
    #[schemars(range(min = 1, max = 100))]
    pub threshold_percent: u32,
}

fn threshold() -> u32 {
    80
}

/// What a signal gates.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum SignalGate {
    /// The notification of the signal.
    #[default]
    Notify,
    /// The updates.
    Update,
    /// Both.
    Both,
}

/// Priority of a notification.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum SignalPriority {
    /// Shown last, dropped first.
    Low,
    /// Shown in the next turn.
    #[default]
    Normal,
    /// Ends a sleep.
    High,
}

/// Text of the notifications.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NotificationSpec {
    /// CEL expression over `payload`, `previous` and `now` that returns the text. Without `notification` it is the
    /// payload as JSON, truncated to 2,048 bytes.
    #[schemars(length(min = 1, max = 4096))]
    pub text: String,
}

/// Task for the receivers.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EventTaskSpec {
    /// CEL expression over `payload`, `previous` and `now` that returns the text of the task, at most 2,048 bytes. One per
    /// event, however many signals hold. Without signals, each accepted event is a task. An agent in another mode than
    /// `Task` receives it as a notification that starts with `Task: `.
    #[schemars(length(min = 1, max = 4096))]
    pub prompt: String,
}

/// Limits on accepted events. Events beyond them are counted in `status.dropped`; files of a `watch` wait instead.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct SensorLimits {
    /// Maximum size of a payload in bytes, 1 to 1,048,576. Larger payloads are dropped. Defaults to 65,536.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_payload_bytes: u32,
    /// Minimum time between two accepted events, in milliseconds, 0 to 3,600,000. Of the events within it, the latest
    /// one is accepted at its end. Defaults to 0.
    #[schemars(range(min = 0, max = 3_600_000))]
    pub min_interval_milliseconds: u32,
    /// Maximum number of accepted events in any 60 s, 1 to 60,000. Defaults to 60.
    #[schemars(range(min = 1, max = 60_000))]
    pub per_minute: u32,
}

impl Default for SensorLimits {
    fn default() -> Self {
        Self {
            max_payload_bytes: 65_536,
            min_interval_milliseconds: 0,
            per_minute: 60,
        }
    }
}

/// Observed state of a Sensor. Written by the controller only.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("default" = {"conditions": [{
    "type": "Ready",
    "status": "Unknown",
    "reason": "Pending",
    "message": "The controller has not reconciled this Sensor yet.",
    "lastTransitionTime": "1970-01-01T00:00:00Z",
}]}))]
pub struct SensorStatus {
    /// Generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, `Accepted`, `Suspended`, `Connected` and `Durable`; also `Reconciling` and `Stalled` while they apply.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Kind of the source: `Schedule`, `Watch`, `Poll`, `Stream` or `Webhook`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<SourceType>,
    /// Time of the last accepted event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_event_time: Option<jiff::Timestamp>,
    /// Id of the last accepted event.
    #[serde(rename = "lastDeliveryId", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub last_delivery_id: Option<String>,
    /// Totals over all receivers, including deleted ones.
    #[serde(flatten)]
    pub totals: SensorTotals,
    /// Share of each receiver in the totals, at most 100 receivers, so that nothing is counted twice after a restart of
    /// the controller. Further receivers count from the restart on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uid"]))]
    pub receivers: Vec<ReceiverStatus>,
    /// Number of failures since the last success.
    #[schemars(range(min = 0))]
    pub consecutive_failures: i64,
    /// Time of the next attempt after a failure, or of the next scheduled event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<jiff::Timestamp>,
    /// Number of events in the outbox of the sensor pod that some receiver has not acknowledged. Absent without a
    /// sensor pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub pending_deliveries: Option<i64>,
    /// Cluster-internal URL of the webhook's Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub url: Option<String>,
}

/// Totals of a Sensor; they never decrease. A Sensor that runs in its receivers' pods counts once per receiver, and so
/// do the results of scored signals of any Sensor.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct SensorTotals {
    /// Number of accepted events.
    #[schemars(range(min = 0))]
    pub events: i64,
    /// Number of fields written. After a scored signal: once per receiver.
    #[schemars(range(min = 0))]
    pub updates: i64,
    /// Number of notifications given. After a scored signal: once per receiver.
    #[schemars(range(min = 0))]
    pub notifications: i64,
    /// Number of events that were ignored as duplicates or as unchanged.
    #[schemars(range(min = 0))]
    pub filtered: i64,
    /// Number of events that exceeded `spec.limits` or waited too long for a receiver.
    #[schemars(range(min = 0))]
    pub dropped: i64,
    /// Number of webhook requests that were rejected: unsigned, too large, declared as JSON but invalid, or replayed
    /// under another id.
    #[schemars(range(min = 0))]
    pub refused: i64,
    /// Number of failures of the source or of expressions, and of signals without a score, the latter once per
    /// receiver.
    #[schemars(range(min = 0))]
    pub errors: i64,
}

/// A receiver and its share in the totals.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ReceiverStatus {
    /// UID of the Agent.
    #[schemars(length(max = 128))]
    pub uid: String,
    /// Name of the Agent.
    #[schemars(length(max = 63))]
    pub name: String,
    /// Totals as last reported by its pod.
    #[serde(flatten)]
    pub totals: SensorTotals,
}

/// The kinds of sources.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr, strum::Display)]
pub enum SourceType {
    /// A schedule.
    Schedule,
    /// Files in a workspace.
    Watch,
    /// A page, query or tool.
    Poll,
    /// A persistent connection.
    Stream,
    /// An HTTP endpoint.
    Webhook,
}
