//! Where answers come from: a server, or the script.

mod scripted;
mod server;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use jiff::Timestamp;

use super::dialect::ProviderDialect;
use super::failures::failure;
use super::in_flight::InFlightCall;
use super::request::{PromptPart, RequestError};
use crate::api::agent::{ModelApi, ModelSpec};
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::{CallId, CallPurpose};
use crate::ledger::bound::{CallBill, RequestOverhead};
use crate::scripted::ModelScript;
use crate::sensing::address::AddressPolicy;

/// Content type of a whole answer.
pub const JSON: &str = "application/json";
/// Content type of a streamed answer.
pub const EVENT_STREAM: &str = "text/event-stream";

/// Where answers come from, by what they are for.
pub struct ModelUpstreams {
    /// `spec.model`.
    pub main: ModelUpstream,
    /// `spec.lightModel`.
    pub light: Option<ModelUpstream>,
}

impl ModelUpstreams {
    /// The one that serves calls of this purpose.
    pub fn of(&self, purpose: CallPurpose) -> Result<&ModelUpstream, CallFailure> {
        if !purpose.uses_light_model() {
            return Ok(&self.main);
        }
        let missing = || {
            failure(
                FailureKind::BadResponse,
                "there is no spec.lightModel, and a call needs it",
            )
        };
        self.light.as_ref().ok_or_else(missing)
    }
}

/// Where answers come from, and how long one may take.
pub struct ModelUpstream {
    source: UpstreamKind,
    timeout: Duration,
}

#[expect(clippy::large_enum_variant, reason = "there are two in a gateway at most")]
enum UpstreamKind {
    Server(server::ProviderServer),
    Scripted(ModelScript),
    /// The configuration is wrong. Each call says so.
    Broken(CallFailure),
}

/// A request that may be sent.
pub enum PreparedRequest {
    /// To a server.
    Server(server::ProviderRequest),
    /// To the script.
    Scripted(scripted::ScriptedRequest),
}

impl PreparedRequest {
    /// Everything that the server may show the model, in its order, as the bytes on the wire.
    pub fn parts(&self) -> Vec<PromptPart<'_>> {
        match self {
            Self::Server(request) => request.checked.parts(),
            Self::Scripted(request) => request.parts(),
        }
    }

    /// Exactly what it will be billed, where that is known beforehand.
    pub fn exact_bill(&self) -> Option<CallBill> {
        match self {
            Self::Server(_) => None,
            Self::Scripted(request) => Some(request.bill()),
        }
    }

    /// What a server renders beside it. The script renders nothing: its bill is known.
    pub fn overhead(&self) -> RequestOverhead {
        match self {
            Self::Server(request) => request.dialect.overhead(),
            Self::Scripted(_) => ProviderDialect::Chat.overhead(),
        }
    }

    /// Most output tokens that the server may bill.
    pub fn max_output(&self) -> u32 {
        match self {
            Self::Server(request) => request.checked.max_output(),
            Self::Scripted(request) => u32::try_from(request.bill().output).unwrap_or(u32::MAX),
        }
    }

    /// Lowers the output limit; it never rises. The script says what it says.
    pub fn limit_output(&mut self, tokens: u32) {
        match self {
            Self::Server(request) => request.checked.limit_output(tokens),
            Self::Scripted(_) => {}
        }
    }
}

/// The end of an answer, not yet passed on: the record comes first.
pub struct AnswerTail {
    /// Content type of the answer.
    pub content_type: &'static str,
    /// Its last bytes.
    pub rest: Bytes,
}

/// Who calls, for the headers of a request.
pub struct UpstreamConfig<'a> {
    /// Uid of the Agent.
    pub agent_uid: &'a str,
    /// `spec.model` or `spec.lightModel`.
    pub model: &'a ModelSpec,
    /// File of the key.
    pub key_file: &'a Path,
    /// File of the script.
    pub script_file: &'a Path,
    /// Which addresses may be connected to.
    pub policy: &'a Arc<AddressPolicy>,
}

impl ModelUpstream {
    /// The upstream of a model. Never fails: what is wrong is said with each call, where it becomes a condition.
    pub fn new(caller: &UpstreamConfig<'_>) -> Self {
        let broken = |message: String| UpstreamKind::Broken(failure(FailureKind::BadResponse, message));
        let source = match caller.model.api {
            ModelApi::OpenAIChat | ModelApi::AnthropicMessages => {
                server::ProviderServer::new(caller).map_or_else(broken, UpstreamKind::Server)
            }
            ModelApi::Scripted => scripted::read(caller.script_file).map_or_else(broken, UpstreamKind::Scripted),
        };
        Self {
            source,
            timeout: Duration::from_secs(caller.model.timeout_seconds.into()),
        }
    }

    /// Checks and changes a request. Nothing is sent. `taken`: turns of the script taken so far.
    pub fn prepare(&self, id: CallId, body: &[u8], taken: u64) -> Result<PreparedRequest, CallFailure> {
        match &self.source {
            UpstreamKind::Server(server) => server.prepare(id, body).map(PreparedRequest::Server),
            UpstreamKind::Scripted(script) => scripted::prepare(script, taken, body).map(PreparedRequest::Scripted),
            UpstreamKind::Broken(failure) => Err(failure.clone()),
        }
    }

    /// Sends it, passes the answer on as it comes, and gives its end.
    pub async fn run(&self, request: PreparedRequest, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        tokio::time::timeout(self.timeout, self.exchange(request, flight))
            .await
            .unwrap_or_else(|_| Err(timed_out(self.timeout)))
    }

    async fn exchange(&self, request: PreparedRequest, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        match (&self.source, request) {
            (UpstreamKind::Server(server), PreparedRequest::Server(request)) => server.run(request, flight).await,
            (UpstreamKind::Scripted(script), PreparedRequest::Scripted(request)) => {
                scripted::run(script, &request, flight, Timestamp::now()).await
            }
            (UpstreamKind::Broken(failure), _) => Err(failure.clone()),
            (UpstreamKind::Server(_) | UpstreamKind::Scripted(_), _) => Err(refused(&RequestError::NotAnObject)),
        }
    }

    /// Whether answers come from the script.
    pub fn is_scripted(&self) -> bool {
        matches!(self.source, UpstreamKind::Scripted(_))
    }
}

fn refused(error: &RequestError) -> CallFailure {
    let kind = if matches!(error, RequestError::TooLong { .. }) {
        FailureKind::ContextExceeded
    } else {
        FailureKind::BadResponse
    };
    failure(kind, format!("the gateway did not send the request: {error}"))
}

fn timed_out(timeout: Duration) -> CallFailure {
    let seconds = timeout.as_secs();
    failure(
        FailureKind::Timeout,
        format!("no whole answer within {seconds} s (spec.model.timeoutSeconds); raise it for a slow model"),
    )
}
