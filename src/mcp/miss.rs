//! Why a tool server did not do what it was asked.

use rmcp::service::{ClientInitializeError, ServiceError};
use rmcp::transport::DynamicTransportError;
use rmcp::transport::streamable_http_client::StreamableHttpError;

use super::http::Trouble;

/// Why a request to a server led to nothing. The words are ours, but for `Said`.
#[derive(Debug, PartialEq, Eq)]
pub enum Miss {
    /// The server certainly did not get it.
    NotSent(String),
    /// It got it and did nothing: its status.
    Refused(u16),
    /// It may have got it.
    NoAnswer(String),
    /// It answered with an error, in its own words, which are for the model and for nobody else.
    Said {
        /// The error's code.
        code: i32,
        /// The server's words.
        words: String,
    },
}

impl Miss {
    /// For who runs it: never the server's words.
    #[must_use]
    pub fn for_log(&self) -> String {
        match self {
            Self::NotSent(words) | Self::NoAnswer(words) => words.clone(),
            Self::Refused(status) => format!("the server refused with status {status}"),
            Self::Said { code, .. } => format!("the server answered with error {code}"),
        }
    }

    /// Why a request was not answered as it should.
    #[must_use]
    pub fn of(error: &ServiceError) -> Self {
        match error {
            ServiceError::McpError(error) => Miss::Said {
                code: error.code.0,
                words: error.message.to_string(),
            },
            ServiceError::TransportSend(error) => transport_miss(error),
            ServiceError::TransportClosed => Miss::NoAnswer("the connection broke before an answer".into()),
            ServiceError::Cancelled { .. } => Miss::NoAnswer("the server cancelled it".into()),
            ServiceError::UnexpectedResponse
            | ServiceError::SubscriptionLagged { .. }
            | ServiceError::Timeout { .. }
            | ServiceError::InputRequiredRoundsExceeded { .. }
            | _ => Miss::NoAnswer("the server's answer is not of MCP".into()),
        }
    }
}

fn transport_miss(error: &DynamicTransportError) -> Miss {
    match error.error.downcast_ref::<StreamableHttpError<Trouble>>() {
        Some(StreamableHttpError::Client(Trouble::NotSent(words))) => Miss::NotSent(words.clone()),
        Some(StreamableHttpError::Client(Trouble::NoAnswer(words))) => Miss::NoAnswer(words.clone()),
        Some(StreamableHttpError::Client(Trouble::Refused(status))) => Miss::Refused(*status),
        Some(StreamableHttpError::SessionExpired) => Miss::NotSent("it has forgotten the session".into()),
        _ => Miss::NoAnswer("the connection broke before an answer".into()),
    }
}

/// Why there is no connection.
pub(super) fn unconnected(error: &ClientInitializeError) -> Miss {
    match error {
        ClientInitializeError::TransportError { error, .. } => transport_miss(error),
        ClientInitializeError::JsonRpcError(error) => Miss::Said {
            code: error.code.0,
            words: String::new(),
        },
        ClientInitializeError::NoCompatibleProtocolVersion { .. } => {
            Miss::NoAnswer("it speaks no version of MCP that is known here".into())
        }
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => unconnected(fallback),
        ClientInitializeError::ExpectedInitResponse(_)
        | ClientInitializeError::ExpectedInitResult(_)
        | ClientInitializeError::ConflictInitResponseId(..)
        | ClientInitializeError::UncorrelatedErrorResponse { .. }
        | ClientInitializeError::ConnectionClosed(_)
        | ClientInitializeError::NoPreferredProtocolVersion
        | ClientInitializeError::Cancelled
        | _ => Miss::NoAnswer("it does not speak MCP at this address".into()),
    }
}
