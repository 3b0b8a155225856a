//! Messages between worker and gateway on the pod's Unix socket.
//!
//! | route | does |
//! |---|---|
//! | `GET /v1/session` | [`WorkerSession`]; 503 until the gateway is attached |
//! | `POST /v1/chat/completions` | one model call; header [`CALL_HEADER`] names it, [`PURPOSE_HEADER`] says what it is for |
//! | `POST /v1/messages` | the same, of api `AnthropicMessages` |
//! | `POST /v1/calls/{id}/ack` | the journal has the answer: the gateway may forget it |
//! | `POST /v1/calls/{id}/cancel` | cut the call in flight |
//! | `POST`, `GET`, `DELETE /v1/mcp/{server}` | passed on to that tool server of the spec, streaming; [`MCP_FAILURE_HEADER`] |
//! | `PUT /v1/report` | a [`LoopReport`](super::messages::LoopReport), relayed upwards |
//! | `POST /v1/readings` | an [`EventsPage`](super::events::EventsPage) for one who reads, passed on; 502: not now |
//! | `GET /v1/events` | server-sent events, each a [`SocketEvent`]: at once, on change, and every 5 s |
//! | `GET /v1/deliveries` | waits for events of a Sensor's pod: 200 with a [`Delivery`](super::deliveries::Delivery), or 204 |
//! | `POST /v1/deliveries/ack` | a [`Delivered`](super::deliveries::DeliveryAck): they are on disk; 502 when nobody could be told |
//! | `GET /v1/healthz` | 200 while the gateway serves |
//!
//! A call is idempotent by its id: a repeat joins the call in flight, or gets the kept answer byte for byte,
//! and never reaches the provider a second time. A failed call answers with a status of 500 or above, the header
//! [`FAILURE_HEADER`] and a [`CallFailure`](crate::api::failure::CallFailure) as JSON; a stream that fails after its start
//! ends with an event named [`FAILURE_EVENT`] carrying the same JSON.
//!
//! What an answer cost, where its price is known, is said beside it in whole micro-dollars: of a whole answer in the header
//! [`COST_HEADER`], of a stream in an event named [`COST_EVENT`] after all others. The server's own bytes stay as they are.

use serde::{Deserialize, Serialize};

use super::messages::{Directives, LoopTotals};

/// Request header: the call's id, such as `t12c1a1`.
pub const CALL_HEADER: &str = "x-agentloop-call";
/// Request header: what the call is for, a [`CallPurpose`](crate::engine::CallPurpose); absent: a turn.
pub const PURPOSE_HEADER: &str = "x-agentloop-purpose";
/// Response header of a failed call: its [`FailureKind`](crate::api::failure::FailureKind).
pub const FAILURE_HEADER: &str = "x-agentloop-failure";
/// Response header of a request that a tool server did not answer: `NotSent` when it certainly did not get it, else
/// `NoAnswer`. The body says why, in words. An answer of the server itself never has this header.
pub const MCP_FAILURE_HEADER: &str = "x-agentloop-mcp-failure";
/// The server certainly did not get the request.
pub const NOT_SENT: &str = "NotSent";
/// The server may have got the request.
pub const NO_ANSWER: &str = "NoAnswer";
/// Name of the last event of a stream that failed after its start.
pub const FAILURE_EVENT: &str = "agentloop.failure";
/// Response header of a whole answer: what it cost in micro-dollars. Absent: nobody knows.
pub const COST_HEADER: &str = "x-agentloop-cost-micro-usd";
/// Name of the last event of a stream that says the same.
pub const COST_EVENT: &str = "agentloop.cost-micro-usd";

/// What a worker must know before it starts its loop.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WorkerSession {
    /// The pod's epoch.
    pub epoch: i64,
    /// Totals that a worker with a new journal goes on from.
    pub known: LoopTotals,
}

/// What the gateway tells the worker.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct SocketEvent {
    /// What the pod is to do.
    pub directives: Directives,
    /// Milliseconds since the last contact with the controller.
    pub link_age_milliseconds: u64,
    /// When this was said, by the wall clock that worker and gateway share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub said_at: Option<jiff::Timestamp>,
    /// True: a newer pod has taken over; this one stops for good.
    pub fenced: bool,
}
