//! Where answers come from: a model server, or the script.

mod scripted;
mod server;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use jiff::Timestamp;

use super::in_flight::{InFlightCall, RequestMetadata};
use super::model_field::ModelField;
use super::request::{PromptPart, RequestError};
use crate::api::agent::{ImageInput, ModelApi, ModelSpec};
use crate::api::failure::{CallFailure, FailureKind};
use crate::egress::AddressPolicy;
use crate::engine::{CallId, CallPurpose};
use crate::ledger::bound::{CallBill, RequestOverhead};
use crate::provider::WireFormat;
use crate::provider::scripted::ModelScript;

pub const JSON: &str = "application/json";
pub const EVENT_STREAM: &str = "text/event-stream";

/// The upstreams by the [`CallPurpose`] of a call.
pub struct ModelUpstreams {
    /// `spec.model`.
    pub main: ModelUpstream,
    /// `spec.lightModel`.
    pub light: Option<ModelUpstream>,
}

impl ModelUpstreams {
    /// The upstream for calls of this [`CallPurpose`].
    pub fn of(&self, purpose: CallPurpose) -> Result<&ModelUpstream, CallFailure> {
        if !purpose.uses_light_model() {
            return Ok(&self.main);
        }
        let missing = || {
            CallFailure::new(
                FailureKind::BadResponse,
                "the call needs a light model, but the Agent has no spec.lightModel",
            )
        };
        self.light.as_ref().ok_or_else(missing)
    }
}

/// A source of answers, and how long an answer may take.
pub struct ModelUpstream {
    field: ModelField,
    source: UpstreamKind,
    timeout: Duration,
}

#[expect(clippy::large_enum_variant, reason = "a gateway has at most two")]
enum UpstreamKind {
    Server(server::ProviderServer),
    Scripted(ModelScript),
    /// The configuration is invalid; every call reports it.
    Broken(CallFailure),
}

/// A request that has been checked and may be sent.
pub enum PreparedRequest {
    Server(server::ProviderRequest),
    Scripted(scripted::ScriptedRequest),
}

impl PreparedRequest {
    /// Everything that the server may show the model, in order, as bytes on the wire.
    pub fn parts(&self) -> Vec<PromptPart<'_>> {
        match self {
            Self::Server(request) => request.checked.parts(),
            Self::Scripted(request) => request.parts(),
        }
    }

    /// Which images it may have.
    pub fn image_input(&self) -> Option<ImageInput> {
        match self {
            Self::Server(request) => request.checked.image_input(),
            Self::Scripted(_) => None,
        }
    }

    /// The exact [`CallBill`], where it is known in advance.
    pub fn exact_bill(&self) -> Option<CallBill> {
        match self {
            Self::Server(_) => None,
            Self::Scripted(request) => Some(request.bill()),
        }
    }

    /// What a server renders in addition to the request. Nothing for the [`ModelScript`], whose bill is known.
    pub fn overhead(&self) -> RequestOverhead {
        match self {
            Self::Server(request) => request.format.endpoint().overhead,
            Self::Scripted(_) => WireFormat::OpenAiChat.endpoint().overhead,
        }
    }

    /// Maximum number of output tokens that the server may bill.
    pub fn max_output(&self) -> u32 {
        match self {
            Self::Server(request) => request.checked.max_output(),
            Self::Scripted(request) => u32::try_from(request.bill().output).unwrap_or(u32::MAX),
        }
    }

    /// What it asks for. The [`ModelScript`] has no output limit.
    pub fn metadata(&self) -> RequestMetadata {
        match self {
            Self::Server(request) => RequestMetadata {
                max_output: Some(request.checked.max_output()),
                is_streamed: request.checked.is_streamed(),
            },
            Self::Scripted(request) => RequestMetadata {
                max_output: None,
                is_streamed: request.is_streamed(),
            },
        }
    }

    /// Lowers the output limit; never raises it. Has no effect on the [`ModelScript`].
    pub fn limit_output(&mut self, tokens: u32) {
        match self {
            Self::Server(request) => request.checked.limit_output(tokens),
            Self::Scripted(_) => {}
        }
    }
}

/// The end of an answer, withheld until the outcome is recorded.
pub struct AnswerTail {
    /// Content type of the answer.
    pub content_type: &'static str,
    pub rest: Bytes,
}

/// What a model's upstream is made from.
pub struct UpstreamConfig<'a> {
    pub field: ModelField,
    /// Uid of the Agent, for the headers of requests.
    pub agent_uid: &'a str,
    /// The model in that field.
    pub model: &'a ModelSpec,
    pub key_file: &'a Path,
    /// Directory of the certificates of `tls.caSecretRef`.
    pub ca_dir: &'a Path,
    pub script_file: &'a Path,
    /// Which addresses may be connected to.
    pub policy: &'a Arc<AddressPolicy>,
}

impl ModelUpstream {
    /// The upstream of a model. Never fails: a configuration error is reported by each call, and so becomes a
    /// condition.
    pub fn new(caller: &UpstreamConfig<'_>) -> Self {
        let broken = |message: String| UpstreamKind::Broken(CallFailure::new(FailureKind::BadResponse, message));
        let source = if caller.model.api == ModelApi::Scripted {
            scripted::read(caller.field, caller.script_file).map_or_else(broken, UpstreamKind::Scripted)
        } else {
            server::ProviderServer::new(caller).map_or_else(broken, UpstreamKind::Server)
        };
        Self {
            field: caller.field,
            source,
            timeout: Duration::from_secs(caller.model.timeout_seconds.into()),
        }
    }

    /// Checks and rewrites a request without sending it. `taken`: turns of the [`ModelScript`] used so far.
    pub fn prepare(&self, id: CallId, body: &[u8], taken: u64) -> Result<PreparedRequest, CallFailure> {
        match &self.source {
            UpstreamKind::Server(server) => server.prepare(id, body).map(PreparedRequest::Server),
            UpstreamKind::Scripted(script) => scripted::prepare(script, taken, body)
                .map(PreparedRequest::Scripted)
                .map_err(|error| refused(self.field, &error)),
            UpstreamKind::Broken(failure) => Err(failure.clone()),
        }
    }

    /// Sends the request, passes the answer on as it arrives, and returns its end.
    pub async fn run(&self, request: PreparedRequest, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        tokio::time::timeout(self.timeout, self.exchange(request, flight))
            .await
            .unwrap_or_else(|_| Err(self.timed_out()))
    }

    async fn exchange(&self, request: PreparedRequest, flight: &InFlightCall) -> Result<AnswerTail, CallFailure> {
        match (&self.source, request) {
            (UpstreamKind::Server(server), PreparedRequest::Server(request)) => server.run(request, flight).await,
            (UpstreamKind::Scripted(script), PreparedRequest::Scripted(request)) => {
                scripted::run((script, self.field), &request, flight, Timestamp::now()).await
            }
            (UpstreamKind::Broken(failure), _) => Err(failure.clone()),
            (UpstreamKind::Server(_) | UpstreamKind::Scripted(_), _) => {
                Err(refused(self.field, &RequestError::NotAnObject))
            }
        }
    }

    pub fn is_scripted(&self) -> bool {
        matches!(self.source, UpstreamKind::Scripted(_))
    }

    fn timed_out(&self) -> CallFailure {
        let (seconds, field) = (self.timeout.as_secs(), self.field);
        CallFailure::new(
            FailureKind::Timeout,
            format!("the answer was not complete within {seconds} s; raise {field}.timeoutSeconds for a slow model"),
        )
    }
}

fn refused(field: ModelField, error: &RequestError) -> CallFailure {
    let kind = if matches!(error, RequestError::TooLong { .. }) {
        FailureKind::ContextExceeded
    } else {
        FailureKind::BadResponse
    };
    let why = error.message(field);
    CallFailure::new(kind, format!("the gateway did not send the request: {why}"))
}
