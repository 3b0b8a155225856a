//! The route of text that arrives from the pods of Agents.
//!
//! Owns the HTTP side only: body and status codes. Who receives a fragment is up to
//! [`LinkHandler::text`].

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::messages::{PodRefusal, RefusalCode};
use super::pod_route::{no_content, pod_post};
use super::server::{LinkCaller, LinkHandler, LinkServer, PodKind};
use super::text_fragments::{MAX_FRAGMENT_BYTES, RelayedTextFragment};

pub(super) async fn text<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    let handle = |link: Arc<L>, pod, relayed: RelayedTextFragment| async move {
        if relayed.fragment.text.len() > MAX_FRAGMENT_BYTES {
            return Err(PodRefusal {
                code: RefusalCode::Malformed,
                message: format!("a fragment has at most {MAX_FRAGMENT_BYTES} bytes of text"),
            });
        }
        link.text(&pod, relayed).map(no_content)
    };
    pod_post(&server, &caller, request, PodKind::Agent, handle).await
}
