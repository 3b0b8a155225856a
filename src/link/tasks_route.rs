//! The routes of tasks that users request: for clients, and for the acknowledgements of pods.
//!
//! Owns the HTTP side only: body and status codes. Authorization and the way to the worker are up to
//! [`LinkHandler::request_task`].

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::events::{ClientRefusal, ClientRefusalCode};
use super::events_route::{no_token, refuse_client};
use super::pod_route::{no_content, pod_post};
use super::server::{LinkCaller, LinkHandler, LinkServer, PodKind, read_body};
use super::task_requests::{MAX_REQUEST_BYTES, TaskRequest, TaskRequestBody};

pub(super) async fn request_task<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    Path((namespace, name)): Path<(String, String)>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    let accepted = async {
        let (token, address) = caller.token().ok_or_else(no_token)?;
        let user = server.link.authorize_task(token, address, (&namespace, &name)).await?;
        caller.mark_authenticated(&namespace);
        let body = read_body::<TaskRequestBody>(request, server.limits.read_timeout, MAX_REQUEST_BYTES).await;
        let body = body.map_err(|message| malformed(format!(r#"{message}; send {{"prompt": "..."}}"#)))?;
        if let Some(problem) = body.problem() {
            return Err(malformed(problem));
        }
        let request = TaskRequest { namespace, name, body };
        server.link.request_task(&user, &request).await
    };
    match accepted.await {
        Ok(accepted) => (StatusCode::ACCEPTED, Json(accepted)).into_response(),
        Err(refusal) => refuse_client(refusal),
    }
}

fn malformed(message: String) -> ClientRefusal {
    ClientRefusal {
        code: ClientRefusalCode::Malformed,
        message,
    }
}

pub(super) async fn acknowledge<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    pod_post(&server, &caller, request, PodKind::Agent, |link, pod, ack| async move {
        link.task_acknowledged(&pod, ack).map(no_content)
    })
    .await
}
