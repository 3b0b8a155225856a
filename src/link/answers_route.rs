//! The route for clients that answers a gate.
//!
//! Owns the HTTP side only: body and status codes. Authorization and the record of the answer are up to
//! [`LinkHandler::answer`].

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::answers::{GateAnswerRequest, MAX_ANSWER_BYTES};
use super::events::{ClientRefusal, ClientRefusalCode};
use super::events_route::{no_token, refuse_client};
use super::server::{LinkCaller, LinkHandler, LinkServer, read_body};

pub(super) async fn answer<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    Path((namespace, name, gate)): Path<(String, String, String)>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    let answered = async {
        let (token, address) = caller.token().ok_or_else(no_token)?;
        let body = read_body(request, server.limits.read_timeout, MAX_ANSWER_BYTES).await;
        let body = body.map_err(|message| ClientRefusal {
            code: ClientRefusalCode::Malformed,
            message: format!(r#"{message}; send {{"answer": "Approve" or "Deny", "argumentsHash": "..."}}"#),
        })?;
        let request = GateAnswerRequest {
            namespace,
            name,
            gate,
            body,
        };
        let answered = server.link.answer(token, address, &request).await?;
        caller.mark_authenticated(&request.namespace);
        Ok::<_, ClientRefusal>(answered)
    };
    match answered.await {
        Ok(answered) => (StatusCode::ACCEPTED, Json(answered)).into_response(),
        Err(refusal) => refuse_client(refusal),
    }
}
