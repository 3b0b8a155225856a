//! Mode `Task`: `spec.task` says how an Agent works on one task, and `status.recentActivations` how tasks ended.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::server_tls::ServerTls;
use super::tools::SecretRef;

/// Settings of mode `Task`: one activation for each task. Tasks of one origin keep their order, and origins take turns.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct TaskSpec {
    /// The Agent's own task, at most 32,768 characters. It runs once for each version of the spec, or repeatedly
    /// with `minIntervalSeconds`. `suspend` does not count as a change. Absent: the agent is purely reactive and waits
    /// for the tasks of Sensors.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32768))]
    pub prompt: Option<String>,
    /// If set, `prompt` runs again whenever no other task is waiting and this many seconds have passed since its last
    /// run ended, 1 to 31,536,000. Absent: it runs once for each version of the spec.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 31_536_000))]
    pub min_interval_seconds: Option<u32>,
    /// If set, the pod of an Agent without a task is deleted after this many seconds, 1 to 86,400. The next task of a
    /// Sensor with its own pod, or of a user, creates a pod again. Absent: the pod stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub idle_pod_seconds: Option<u32>,
    /// Maximum number of model calls for one task, 1 to 1,000. At the limit the task ends with outcome `LimitReached`
    /// and reason `MaxIterations`. `guardrails.maxCallsPerTurn` applies as well. Defaults to 10.
    #[schemars(range(min = 1, max = 1000))]
    pub max_iterations: u32,
    /// Number of tokens of one task, 1 to 1,000,000,000, from which on no further model call is made: uncached input, cache
    /// writes and output, as in budgets.
    /// The task then ends with outcome `LimitReached` and reason `MaxTokens`. Defaults to 100,000.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub max_tokens: u64,
    /// Maximum duration of one task in seconds, 1 to 86,400. Time in which the loop is paused, for example for an
    /// approval or a budget, does not count. At the limit the model call in flight is cancelled, tool runs in progress
    /// are completed, and the task ends with outcome `LimitReached` and reason `MaxDuration`. Defaults to 300.
    #[schemars(range(min = 1, max = 86_400))]
    pub max_duration_seconds: u32,
    /// Where the responses are sent. Absent: they are only kept in the journal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub responses: Option<TaskResponsesSpec>,
    /// JSON schema of the response, within the limits of docs/tasks/task-mode.md#limits-of-schemas. If set, a task completes only with a response that matches it: the arguments of the
    /// tool `finish`, or an answer that consists of such JSON. Any other answer is reported to the model, which
    /// continues, within the limits. References to other documents are not supported.
    #[serde(skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "response_schema")]
    pub response_schema: Map<String, Value>,
}

/// Where the responses to tasks are sent.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TaskResponsesSpec {
    /// A server that receives each response as an HTTP request.
    pub http: ResponseEndpoint,
}

/// A server that receives the response to each task, in the order in which tasks end, as `POST` with a JSON body: `agent`, `channel`
/// (`responses`, or `agent-errors` for a task that failed), `id`, `outcome`, `result` or `error`, `reason`, `iterations`
/// and `tokensUsed`. The header `Idempotency-Key` is the same each time a response is sent. Any status 2xx accepts it.
/// Other statuses and lost connections are retried with exponential backoff, up to 5 minutes apart; a response that the
/// server rejects for ten minutes with a status for an invalid request, such as 400 or 422, is dropped.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.tls) || self.url.startsWith('https://')").message(
        "spec.task.responses.http.tls requires a url that starts with https://"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct ResponseEndpoint {
    /// URL: http or https, a host, no user. Redirects are not followed.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(
        validation = Rule::new(r"self.matches('^https?://(\\[[0-9a-fA-F:.]+\\]|[-_.a-zA-Z0-9]+)(:[0-9]{1,5})?([/?][!-~]*)?$')").message(
            "spec.task.responses.http.url must be http(s)://host[:port][/path] without user and spaces, such as https://example.com/responses"
        ),
        validation = Rule::new("!self.contains('#')").message(
            "spec.task.responses.http.url must not have a fragment: remove everything from '#' on"
        )
    )]
    pub url: String,
    /// A Secret whose keys are header names, such as `Authorization`, and whose values are sent with each request. The
    /// model and the loop never see them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers_secret_ref: Option<SecretRef>,
    /// TLS settings of the server. Allowed only if `url` starts with https://.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ServerTls>,
}

/// Any JSON object; its size is bounded by that of the Agent.
fn response_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true, "maxProperties": 64})
}

impl TaskSpec {
    /// The schema of the response, if there is one.
    #[must_use]
    pub fn schema(&self) -> Option<Value> {
        (!self.response_schema.is_empty()).then(|| json!(self.response_schema))
    }
}

impl Default for TaskSpec {
    fn default() -> Self {
        Self {
            prompt: None,
            min_interval_seconds: None,
            idle_pod_seconds: None,
            max_iterations: 10,
            max_tokens: 100_000,
            max_duration_seconds: 300,
            responses: None,
            response_schema: Map::new(),
        }
    }
}

/// Maximum number of activations in a status.
pub const MAX_RECENT: usize = 10;

/// A task that the agent has worked on.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Activation {
    /// Id of the task: that of the event of a Sensor, `spec-` with a hash of the spec and a number, or `request-` with the id
    /// that the client gave.
    #[schemars(length(max = 253))]
    pub id: String,
    /// Where the task came from.
    pub kind: TaskKind,
    /// Time at which the agent began with it.
    pub started_at: Time,
    /// Time at which it ended.
    pub completed_at: Time,
    /// How it ended.
    pub outcome: TaskOutcome,
    /// Which limit ended it. Set only with outcome `LimitReached`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<TaskLimit>,
    /// Number of model calls.
    pub iterations: u32,
    /// Tokens of its model calls as far as the server reported them: uncached input, cache writes and output.
    #[schemars(range(min = 0))]
    pub tokens: i64,
    /// Cost of its model calls in micro-dollars, as far as prices are known.
    #[serde(rename = "costMicroUSD")]
    #[schemars(range(min = 0))]
    pub cost_micro_usd: i64,
}

/// Where a task came from.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    strum::AsRefStr,
    strum::Display,
    strum::EnumString,
)]
pub enum TaskKind {
    /// `spec.task.prompt`.
    Spec,
    /// An event of a Sensor.
    Sensor,
    /// A request to the API of the controller.
    Request,
}

/// How a task ended.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    strum::IntoStaticStr,
    strum::AsRefStr,
    strum::Display,
    strum::EnumString,
    strum::EnumIter,
)]
pub enum TaskOutcome {
    /// The agent has responded.
    Completed,
    /// A model call failed in a way that a retry does not fix, or the model refused to answer.
    Failed,
    /// A limit ended it.
    LimitReached,
}

/// A limit that ends a task.
#[derive(
    Serialize,
    Deserialize,
    JsonSchema,
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    strum::AsRefStr,
    strum::Display,
    strum::EnumString,
)]
pub enum TaskLimit {
    /// `spec.task.maxIterations`, or `spec.guardrails.maxCallsPerTurn` if that is lower.
    MaxIterations,
    /// `spec.task.maxTokens`.
    MaxTokens,
    /// `spec.task.maxDurationSeconds`.
    MaxDuration,
    /// `spec.guardrails.loopDetection`: the agent repeated itself after all warnings.
    LoopDetected,
}
