//! The route of text that arrives from the pods of Agents.
//!
//! Owns the HTTP side only: body and status codes. Who receives a fragment is up to
//! [`LinkHandler::text`](super::server::LinkHandler::text).

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::messages::{PodRefusal, RefusalCode};
use super::server::{LinkCaller, LinkHandler, LinkServer, PodKind, authenticate, read, refuse};
use super::text_fragments::{MOST_FRAGMENT_BYTES, RelayedTextFragment};

pub(super) async fn text<L: LinkHandler>(
    State(server): State<LinkServer<L>>,
    caller: LinkCaller,
    request: Request,
) -> Response {
    let answer = async {
        let pod = authenticate(&server, &caller, PodKind::Agent).await?;
        let relayed: RelayedTextFragment = read(request, server.limits.read_timeout).await?;
        if relayed.fragment.text.len() > MOST_FRAGMENT_BYTES {
            return Err(PodRefusal {
                code: RefusalCode::Malformed,
                message: format!("a fragment has at most {MOST_FRAGMENT_BYTES} bytes of text"),
            });
        }
        server.link.text(&pod, relayed)
    };
    match answer.await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(refusal) => refuse(&*server.link, &refusal),
    }
}
