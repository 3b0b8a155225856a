//! Messages between worker and gateway on the pod's Unix socket.
//!
//! | route | does |
//! |---|---|
//! | `GET /v1/session` | [`WorkerSession`]; 503 until the gateway is attached |
//! | `POST /v1/chat/completions` | one model call; header [`CALL_HEADER`] identifies it, [`PURPOSE_HEADER`] gives its purpose |
//! | `POST /v1/messages` | the same for api `AnthropicMessages` |
//! | `POST /v1/responses` | the same for api `OpenAIResponses` |
//! | `POST /v1/calls/{id}/ack` | the outcome is in the journal: the gateway may delete it |
//! | `POST /v1/calls/{id}/cancel` | cut the call in flight |
//! | `POST`, `GET`, `DELETE /v1/mcp/{server}` | forwarded to that tool server of the spec, streaming; [`MCP_FAILURE_HEADER`] |
//! | `POST /v1/task-responses` | an [`OutgoingResponse`] for `spec.task.responses`, sent once: 200 with the status of the receiver, or 502 with a message |
//! | `PUT /v1/report` | a [`LoopReport`](super::messages::LoopReport), relayed upwards |
//! | `POST /v1/readings` | an [`EventsPage`](super::events::EventsPage) for a subscriber, relayed; 502: not now |
//! | `POST /v1/text` | a [`TextFragment`](super::text_fragments::TextFragment) for subscribers, relayed once; 502: not now |
//! | `POST /v1/history` | a [`HistoryBatch`](super::history::HistoryBatch), relayed; 502: not now |
//! | `GET /v1/events` | server-sent events, each a [`SocketEvent`]: at once, on change, and every 5 s |
//! | `GET /v1/deliveries` | waits for events of a sensor pod: 200 with a [`Delivery`](super::deliveries::Delivery), or 204 |
//! | `POST /v1/deliveries/ack` | a [`DeliveryAck`](super::deliveries::DeliveryAck): the events are on disk; 502 if it could not be relayed |
//! | `POST /v1/traces` | spans of the worker as an OTLP request in protobuf, to be exported; 204, whatever becomes of them. `?dropped=` is the number of those that the worker has dropped since its last request |
//! | `POST /v1/logs` | the same for lines of the worker's log |
//! | `GET /v1/healthz` | 200 while the gateway serves |
//!
//! A call is idempotent by its id: a repeated request joins the call in flight or gets the recorded answer byte for
//! byte, and never reaches the provider a second time. A failed call is answered with a status of 500 or above, the
//! header [`FAILURE_HEADER`] and a [`CallFailure`](agentloop_api::failure::CallFailure) as JSON; a stream that fails
//! after its start ends with an event named [`FAILURE_EVENT`] that contains the same JSON.
//!
//! The cost of an answer, if its price is known, is given in whole micro-dollars: in the header [`COST_HEADER`] of a
//! whole answer, or in an event named [`COST_EVENT`] at the end of a stream. The server's own bytes are unchanged.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::messages::{Directives, LoopTotals};

/// Request header: the call's id, such as `t12c1a1`.
pub const CALL_HEADER: &str = "x-agentloop-call";
/// Request header: the purpose of the call, a `CallPurpose` of the engine; absent: a turn.
pub const PURPOSE_HEADER: &str = "x-agentloop-purpose";
/// Response header of a failed call: its [`FailureKind`](agentloop_api::failure::FailureKind).
pub const FAILURE_HEADER: &str = "x-agentloop-failure";
/// Response header of a request that a tool server did not answer: `NotSent` if it certainly did not receive it,
/// otherwise `NoAnswer`. The body is a message for people. Answers of the server itself never have this header.
pub const MCP_FAILURE_HEADER: &str = "x-agentloop-mcp-failure";
/// The server certainly did not receive the request.
pub const NOT_SENT: &str = "NotSent";
/// The server may have received the request.
pub const NO_ANSWER: &str = "NoAnswer";
/// Name of the last event of a stream that failed after its start.
pub const FAILURE_EVENT: &str = "agentloop.failure";
/// Response header of a whole answer: its cost in micro-dollars. Absent: unknown.
pub const COST_HEADER: &str = "x-agentloop-cost-micro-usd";
/// Name of the last [`SocketEvent`] of a stream: its cost in micro-dollars.
pub const COST_EVENT: &str = "agentloop.cost-micro-usd";

/// What a worker must know before it starts its loop.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WorkerSession {
    /// The pod's epoch.
    pub epoch: i64,
    /// Totals from which a worker with a new journal continues.
    pub known: LoopTotals,
    /// Whether the gateway exports traces, so that spans are of use to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub traces: bool,
    /// Whether the spans of the worker may have texts of prompts, answers, arguments and results.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub content: bool,
    /// Whether the gateway exports logs, so that lines of the worker are of use to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub logs: bool,
}

/// The response to a task, for the server of `spec.task.responses`. The gateway adds which Agent it comes from.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct OutgoingResponse {
    /// Id of the task.
    pub id: String,
    /// What the server receives, opaque to the gateway.
    pub body: Map<String, Value>,
}

/// The gateway's state, as sent to the worker.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct SocketEvent {
    /// What the pod has to do.
    pub directives: Directives,
    /// Milliseconds since the last contact with the controller.
    pub link_age_milliseconds: u64,
    /// Time of this event by the wall clock, which worker and gateway share.
    #[serde(rename = "saidAt", skip_serializing_if = "Option::is_none")]
    pub sent_at: Option<jiff::Timestamp>,
    /// A newer pod has taken over; this one stops permanently.
    pub fenced: bool,
}
