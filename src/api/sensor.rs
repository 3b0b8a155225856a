//! The `Sensor` resource: something outside whose changes reach the loops of Agents.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds;
use super::source::{Poll, Storage, Stream, Webhook};

/// A DNS label: it is part of the names of events, such as `sensor/prices`.
const NAME: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// A field of `spec.hotState.fields`.
const FIELD: &str = "^[a-zA-Z][a-zA-Z0-9_]*$";

/// Which Agents hear of it, what it listens to, and what becomes of what it hears.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "agentloop.dev",
    version = "v1alpha1",
    kind = "Sensor",
    plural = "sensors",
    shortname = "asensor",
    category = "agentloop",
    doc = "Something outside whose events reach the hot state and the notifications of Agents, each exactly once.",
    namespaced,
    status = "SensorStatus",
    derive = "PartialEq",
    printcolumn(
        name = "READY",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "False: this Sensor needs a person"
    ),
    printcolumn(
        name = "TYPE",
        type_ = "string",
        json_path = ".status.type",
        description = "What it listens to"
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
        description = "Events accepted"
    ),
    printcolumn(
        name = "ERRORS",
        type_ = "integer",
        json_path = ".status.errors",
        description = "Failures to hear or to understand"
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
        "metadata.name of a Sensor with poll, stream or webhook must be at most 45 lower-case letters, digits and '-', a letter first: it names its pod and Service"
    )
)]
#[x_kube(
    validation = Rule::new("has(self.agentNames) && size(self.agentNames) > 0 || has(self.agentSelector)").message(
        "spec names no receiver: set spec.agentNames, or spec.agentSelector ({} is every Agent of the namespace)"
    ),
    validation = Rule::new("!has(self.task) || !has(self.notification)").message(
        "spec.task takes the place of spec.notification: remove one of them"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SensorSpec {
    /// Names of Agents in this namespace that receive its events, at most 64. One that is not there yet receives what
    /// comes once it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "set", "items" = {
        "description": "Name of an Agent.", "type": "string", "minLength": 1, "maxLength": 63, "pattern": NAME,
    }))]
    pub agent_names: Vec<String>,
    /// Agents of this namespace that receive its events too, by their labels; `{}`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = bounds::agent_selector)]
    pub agent_selector: Option<LabelSelector>,
    /// True: it does not listen, and says so in `Suspended`. What came before is still delivered.
    #[serde(default)]
    pub suspend: bool,
    /// What it listens to; exactly one.
    pub source: Source,
    /// Fields of the receivers' hot state that each accepted event writes, at most 16. A receiver without the field, or
    /// with one of another type, keeps what it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["field"]))]
    pub updates: Vec<Update>,
    /// What makes an event worth a notice, at most 16. With signals, a notification is given only by those that hold;
    /// without any, each accepted event gives one where `notification` or `task` is set or there are no `updates`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub signals: Vec<Signal>,
    /// What a notification says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notification: Option<Notification>,
    /// What the receivers are to do about an event, in place of `notification`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
    /// Bounds of what is accepted.
    #[serde(default)]
    pub limits: Limits,
    /// Where a pod of the Sensor's own keeps what its receivers do not have yet.
    #[serde(default)]
    pub storage: Storage,
}

/// What a Sensor listens to.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new(
    "[has(self.schedule), has(self.watch), has(self.poll), has(self.stream), has(self.webhook)].filter(one, one).size() == 1"
).message(
    "spec.source must have exactly one of schedule, watch, poll, stream and webhook, such as schedule: {cron: \"0 8 * * 1-5\"}"
))]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// A clock. It ticks in each receiver's own pod and costs no traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// Files of the receivers' workspaces (`spec.workspace` of the Agent). Each receiver's own pod looks at them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watch: Option<Watch>,
    /// A page or a query that is asked again and again, by a pod of the Sensor's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll: Option<Poll>,
    /// A connection that stays open, of a pod of the Sensor's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<Stream>,
    /// A place that others send to, in a pod of the Sensor's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub webhook: Option<Webhook>,
}

/// A clock that ticks by the calendar. Its events have the payload `{"scheduledTime": "<RFC 3339>"}`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Schedule {
    /// Minute, hour, day of month, month and day of week, as in cron: `0 8 * * 1-5`. A time that the change to summer
    /// time skips comes once, right after the gap; one that the change back repeats comes once. A schedule with `*` or a
    /// step as its minute or hour goes by the clock on the wall instead: not in the gap, and in both of the repeated hours.
    #[schemars(length(min = 9, max = 128))]
    #[x_kube(validation = Rule::new(
        "self.matches('^ *([0-9*][0-9*,/-]* +){2}[0-9*?L][0-9*?,/LW-]* +[0-9*A-Za-z][0-9A-Za-z*,/-]* +[0-9*?A-Za-z][0-9A-Za-z*?,/#-]* *$')"
    ).message(
        "spec.source.schedule.cron must be five fields: minute, hour, day of month, month and day of week, such as 0 8 * * 1-5"
    ))]
    pub cron: String,
    /// The IANA time zone of `cron`.
    #[serde(default = "utc")]
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$')").message(
        "spec.source.schedule.timeZone must be a name of the IANA time zone database, such as Europe/Berlin or UTC"
    ))]
    pub time_zone: String,
    /// What becomes of ticks that nobody could hear, because the receiver's pod or the Sensor did not run.
    #[serde(default)]
    pub missed: Missed,
}

fn utc() -> String {
    "UTC".into()
}

/// Files of a workspace. Each file that is new, changed or gone is an event, once it has looked the same for a second; what
/// changed while the pod did not run is found when it does, and files that are there at first are new. The payload is
/// `{"path", "kind": "Created"|"Modified"|"Removed", "size", "modified", "sha256", "content"}`: the path below the workspace,
/// and the content where it is a text in UTF-8 that `limits.maxPayloadBytes` has room for. Files above 64 MiB have no
/// `sha256`. Files wait for `limits.perMinute` and `limits.minIntervalMilliseconds`, none is dropped. Links are not followed.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Watch {
    /// A folder or a file below the workspace, such as `inbox/`; `.` is all of it. While it holds more than 10,000 files and
    /// folders nothing is heard, and `Connected` says so.
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(validation = Rule::new("!self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')").message(
        "spec.source.watch.path must be a path below the workspace, without / at its start and without .., such as inbox/"
    ))]
    pub path: String,
    /// Whether files in folders of that folder count too.
    #[serde(default = "yes")]
    pub recursive: bool,
}

/// What becomes of missed ticks.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum Missed {
    /// The last one of them comes, late.
    #[default]
    RunOnce,
    /// None of them comes.
    Skip,
}

/// A field of the hot state and its new value.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Update {
    /// The field, as `spec.hotState.fields[].name` of the receivers has it.
    #[schemars(length(min = 1, max = 63), regex(pattern = FIELD))]
    pub field: String,
    /// Its value: an expression (CEL) over `payload`, the event's; `previous`, the last accepted event's payload or null;
    /// and `now`, in seconds since 1970. `payload` alone is the whole of it. Beside the operators and macros of CEL there
    /// are contains, startsWith, endsWith, matches, lowerAscii, size, min, max, slice(from, to), string, int, double, json and
    /// epochSeconds (of an RFC 3339 time).
    #[schemars(length(min = 1, max = 4096))]
    pub value: String,
}

/// What makes an event worth a notice.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.when) || has(self.model)").message(
    "spec.signals[] must have when, an expression, or model, which scores the event, or both"
))]
#[serde(rename_all = "camelCase")]
pub struct Signal {
    /// Its name; loops can wait for `signal/<sensor>/<name>`.
    #[schemars(length(min = 1, max = 63), regex(pattern = NAME))]
    pub name: String,
    /// When it holds: an expression (CEL) that is true or false, over `payload`, `previous` and `now`. With `model`: which
    /// events are scored at all; without `when`, each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub when: Option<String>,
    /// Has a small model say how far it holds. Each receiver asks its own `spec.lightModel`, once for each event that `when`
    /// lets through and that does not fall into the cooldown; the calls count in that Agent's budgets and rate limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<SignalModel>,
    /// What an event without it does not do: `Notify`: it gives no notification of this signal. `Update`: it writes no
    /// field, but notifies. `Both`: neither. An event writes fields when each signal that gates updates holds.
    #[serde(default)]
    pub gate: Gate,
    /// Whether it gives a notification. False: it only wakes loops that wait for it.
    #[serde(default = "yes")]
    pub notify: bool,
    /// How urgent the notification is; `High` ends a sleep.
    #[serde(default)]
    pub priority: Priority,
    /// Seconds, 0 to 86,400, after it held in which it does not hold again.
    #[serde(default)]
    #[schemars(range(min = 0, max = 86_400))]
    pub cooldown_seconds: u32,
}

fn yes() -> bool {
    true
}

/// How a small model scores an event.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SignalModel {
    /// What is to be scored, in words, such as `How likely is it that this message reports an outage?`; at most 2,048
    /// characters. The model is shown the payload after it, its first 8,192 bytes as JSON.
    #[schemars(length(min = 1, max = 2048))]
    pub prompt: String,
    /// The least score, 1 to 100, with which the signal holds.
    #[serde(default = "threshold")]
    #[schemars(range(min = 1, max = 100))]
    pub threshold_percent: u32,
}

fn threshold() -> u32 {
    80
}

/// What a signal gates.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum Gate {
    /// Its notification.
    #[default]
    Notify,
    /// The updates.
    Update,
    /// Both.
    Both,
}

/// How urgent a notification is.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, strum::AsRefStr)]
pub enum Priority {
    /// Shown last, dropped first.
    Low,
    /// Shown in the next turn.
    #[default]
    Normal,
    /// Ends a sleep.
    High,
}

/// What a notification says.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Notification {
    /// An expression (CEL) over `payload`, `previous` and `now` that is a text. Without `notification` it is the payload as
    /// JSON, of which the first 2,048 bytes are shown.
    #[schemars(length(min = 1, max = 4096))]
    pub text: String,
}

/// What receivers are to do.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Task {
    /// An expression (CEL) over `payload`, `previous` and `now` that is a text: what is to be done. A Continuous loop gets it
    /// as a notification that begins with `Task: `, one for each event, however many signals hold; without signals each
    /// accepted event is a task.
    #[schemars(length(min = 1, max = 4096))]
    pub prompt: String,
}

/// Bounds of what is accepted. What is beyond them is counted in `status.dropped`; files of a `watch` wait instead.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Limits {
    /// Most bytes of a payload, 1 to 1,048,576; a larger one is dropped.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_payload_bytes: u32,
    /// Milliseconds, 0 to 3,600,000, between two accepted events; of those in between the newest comes at their end.
    #[schemars(range(min = 0, max = 3_600_000))]
    pub min_interval_milliseconds: u32,
    /// Most accepted events in any 60 s, 1 to 60,000.
    #[schemars(range(min = 1, max = 60_000))]
    pub per_minute: u32,
}

impl Default for Limits {
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
    "message": "The controller has not looked at this Sensor yet.",
    "lastTransitionTime": "1970-01-01T00:00:00Z",
}]}))]
pub struct SensorStatus {
    /// The generation of the spec that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, `Accepted`, `Suspended`, `Connected`, `Durable`; `Reconciling` and `Stalled` while they hold.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// What it listens to: `Schedule`, `Watch`, `Poll`, `Stream` or `Webhook`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<SourceType>,
    /// When the last accepted event came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_event_time: Option<jiff::Timestamp>,
    /// The id of that event.
    #[serde(rename = "lastDeliveryId", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub last_delivery_id: Option<String>,
    /// Totals of all receivers, those that are gone included.
    #[serde(flatten)]
    pub totals: Totals,
    /// What each receiver's part of these totals is, so that nothing counts twice after a restart of the controller; the
    /// first 100 receivers. Further ones count from the restart on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uid"]))]
    pub receivers: Vec<Receiver>,
    /// Failures since the last success.
    #[schemars(range(min = 0))]
    pub consecutive_failures: i64,
    /// When it tries again after a failure, or ticks next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<jiff::Timestamp>,
    /// Events that some receiver does not have yet, of a Sensor with a pod of its own. They wait in its outbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub pending_deliveries: Option<i64>,
    /// Where a webhook is sent to from within the cluster: its Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub url: Option<String>,
}

/// What a Sensor has done so far; never steps back. A Sensor that runs in its receivers' pods counts for each of them, and so
/// does what comes of the scores of its signals, wherever it runs.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Totals {
    /// Events accepted.
    #[schemars(range(min = 0))]
    pub events: i64,
    /// Fields written; those that a score let through, once for each receiver.
    #[schemars(range(min = 0))]
    pub updates: i64,
    /// Notifications given; those that a score let through, once for each receiver.
    #[schemars(range(min = 0))]
    pub notifications: i64,
    /// Events that were no news: the same again.
    #[schemars(range(min = 0))]
    pub filtered: i64,
    /// Events beyond `spec.limits`, and those that waited too long for a receiver.
    #[schemars(range(min = 0))]
    pub dropped: i64,
    /// Deliveries to a webhook that were refused: not signed, too large, no JSON though they say so, or sent again under
    /// another id.
    #[schemars(range(min = 0))]
    pub refused: i64,
    /// Failures to hear or to understand; signals without a score, once for each receiver.
    #[schemars(range(min = 0))]
    pub errors: i64,
}

/// A receiver and what the Sensor did for it.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Receiver {
    /// Uid of the Agent.
    #[schemars(length(max = 128))]
    pub uid: String,
    /// Name of the Agent.
    #[schemars(length(max = 63))]
    pub name: String,
    /// As its pod last said.
    #[serde(flatten)]
    pub totals: Totals,
}

/// What a Sensor listens to.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr, strum::Display)]
pub enum SourceType {
    /// A clock.
    Schedule,
    /// Files.
    Watch,
    /// A page or a query.
    Poll,
    /// A connection that stays open.
    Stream,
    /// A place that others send to.
    Webhook,
}
