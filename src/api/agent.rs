//! The `Agent` resource: one Agent is one loop, in at most one live pod.
//!
//! Doc comments here are the user's manual: they show in `kubectl explain`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, LocalObjectReference, ResourceRequirements, Toleration, TopologySpreadConstraint,
};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::status::AgentStatus;

/// An autonomous LLM agent: its instructions, its model, and the limits that hold whatever the model does.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "agentloop.dev",
    version = "v1alpha1",
    kind = "Agent",
    plural = "agents",
    shortname = "aloop",
    category = "agentloop",
    namespaced,
    status = "AgentStatus",
    derive = "PartialEq",
    selectable = ".spec.mode",
    selectable = ".spec.model.name"
)]
#[serde(rename_all = "camelCase")]
pub struct AgentSpec {
    /// How the loop is driven. Immutable. `Continuous`: the agent turns until it yields, and sets its own pace.
    #[serde(default)]
    pub mode: Mode,
    /// True stops the loop: the call in flight is cut, the journal is closed, the pod is deleted, the state is kept.
    #[serde(default)]
    pub suspend: bool,
    /// The system prompt, at most 32 KiB. Exactly one of `instructions` and `instructionsFrom`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
    /// Where the system prompt is kept instead; an edit there takes effect at the next turn, without a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions_from: Option<TextSource>,
    /// The model that thinks.
    pub model: Model,
    /// Pace and error handling of the loop.
    #[serde(default)]
    pub r#loop: Loop,
    /// Settings of mode `Continuous`.
    #[serde(default)]
    pub continuous: Continuous,
    /// Limits that the model cannot change.
    #[serde(default)]
    pub guardrails: Guardrails,
    /// Where the loop keeps its journal.
    #[serde(default)]
    pub storage: Storage,
    /// A safe subset of pod settings; nothing here lifts the `restricted` profile.
    #[serde(default)]
    pub pod: PodSettings,
}

/// How a loop is driven.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The agent turns until it yields, sleeps as long as it chose, and wakes.
    #[default]
    Continuous,
}

/// A text kept in a ConfigMap of the same namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TextSource {
    /// The ConfigMap and its key.
    pub config_map_key_ref: KeyRef,
}

/// One key of a ConfigMap or Secret in the Agent's own namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct KeyRef {
    /// Name of the object.
    pub name: String,
    /// Key in its data.
    pub key: String,
}

/// The wire format spoken, not the vendor.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelApi {
    /// OpenAI chat completions; any compatible server works (vLLM, Ollama, llama.cpp, …).
    OpenAIChat,
    /// The built-in deterministic model: answers come from a script in a ConfigMap. No key, no network.
    Scripted,
}

/// The model of an Agent.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// The wire format spoken.
    pub api: ModelApi,
    /// The model's name as the server knows it.
    pub name: String,
    /// Base address as the vendor's own SDK takes it, with `/v1` for OpenAI. Required for `OpenAIChat`.
    #[serde(default, rename = "baseURL", skip_serializing_if = "Option::is_none")]
    pub base_url: Option<String>,
    /// The API key. Absent: no Authorization header is sent, as local servers want it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<KeyRef>,
    /// Most tokens one answer may have; written into each request by the gateway.
    #[serde(default = "default_max_output_tokens")]
    pub max_output_tokens: u32,
    /// The context window in tokens. Whole oldest turns leave the prompt before it is full.
    #[serde(default = "default_context_tokens")]
    pub context_tokens: u32,
    /// Sampling temperature as a decimal string, such as "0.7". Absent: the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<String>,
    /// Whether answers are streamed from the server.
    #[serde(default = "default_true")]
    pub stream: bool,
    /// Longest time one call may take, in seconds.
    #[serde(default = "default_timeout_seconds")]
    pub timeout_seconds: u32,
    /// Longest silence within a streamed answer, in seconds.
    #[serde(default = "default_stream_idle_timeout_seconds")]
    pub stream_idle_timeout_seconds: u32,
    /// The script of api `Scripted`. Required for it, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scripted: Option<TextSource>,
}

/// Pace and error handling of a loop.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Loop {
    /// Pause between two turns, in milliseconds; each failed turn in a row doubles it.
    pub min_delay_milliseconds: u32,
    /// Longest delay after failed turns, in milliseconds.
    pub max_delay_milliseconds: u32,
    /// Failed turns in a row until the loop pauses with `ErrorLimitReached`.
    pub max_consecutive_errors: u32,
}

impl Default for Loop {
    fn default() -> Self {
        Self {
            min_delay_milliseconds: 100,
            max_delay_milliseconds: 10_000,
            max_consecutive_errors: 5,
        }
    }
}

/// Settings of mode `Continuous`.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Continuous {
    /// Longest sleep the agent may choose, in seconds; a longer one is shortened to it.
    pub max_sleep_seconds: u32,
}

impl Default for Continuous {
    fn default() -> Self {
        Self {
            max_sleep_seconds: 3600,
        }
    }
}

/// Limits that the model cannot change.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Guardrails {
    /// Turns without a sleep until the loop is made to sleep (60 s, doubled each time, at most `maxSleepSeconds`).
    pub max_consecutive_turns: u32,
    /// Model calls in one turn; at the cap the turn ends and the model is told so in the next one.
    pub max_calls_per_turn: u32,
}

impl Default for Guardrails {
    fn default() -> Self {
        Self {
            max_consecutive_turns: 50,
            max_calls_per_turn: 25,
        }
    }
}

/// Where the loop keeps its journal and the gateway its records.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Storage {
    /// Size of the volume claim, as a Kubernetes quantity.
    pub size: String,
    /// Storage class of the claim. Absent: the cluster's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_class_name: Option<String>,
    /// Access mode of the claim.
    pub access_mode: AccessMode,
    /// What happens to the claim when the Agent is deleted.
    pub retention_policy: RetentionPolicy,
    /// True: no claim; the state dies with the pod.
    pub ephemeral: bool,
}

impl Default for Storage {
    fn default() -> Self {
        Self {
            size: "1Gi".into(),
            storage_class_name: None,
            access_mode: AccessMode::ReadWriteOnce,
            retention_policy: RetentionPolicy::Delete,
            ephemeral: false,
        }
    }
}

/// Access mode of the volume claim.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
pub enum AccessMode {
    /// One node at a time.
    ReadWriteOnce,
    /// One pod at a time; needs a CSI driver.
    ReadWriteOncePod,
}

/// What happens to the claim when the Agent is deleted.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetentionPolicy {
    /// The claim goes with the Agent.
    Delete,
    /// The claim stays; an Agent made again under the same name goes on where it stood.
    Retain,
}

/// A safe subset of pod settings.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSettings {
    /// Resources of the worker container. Requests and limits of the gateway are fixed by the chart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// Labels a node must have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints tolerated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// Scheduling affinity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Spreading over topology domains.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Runtime class, such as gVisor's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class_name: Option<String>,
    /// Priority class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Secrets for pulling the image.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Labels added to the pod; keys under `agentloop.dev/` and `app.kubernetes.io/` are refused.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations added to the pod; keys under `agentloop.dev/` are refused.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// When a changed spec or a new controller version replaces a running pod.
    pub update_strategy: UpdateStrategy,
}

/// When a running pod is replaced by one of the new spec.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdateStrategy {
    /// When the loop sleeps, is paused or stopped: never in the middle of a turn. A controller upgrade alone replaces nothing.
    #[default]
    WhenIdle,
    /// At once; the call in flight is finished or cancelled within the drain time.
    Immediate,
    /// Only when somebody deletes the pod.
    OnDelete,
}

fn default_max_output_tokens() -> u32 {
    4096
}
fn default_context_tokens() -> u32 {
    128_000
}
fn default_timeout_seconds() -> u32 {
    300
}
fn default_stream_idle_timeout_seconds() -> u32 {
    60
}
fn default_true() -> bool {
    true
}
