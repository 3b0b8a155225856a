//! Why a tool server did not do what it was asked.

use rmcp::service::{ClientInitializeError, ServiceError};
use rmcp::transport::DynamicTransportError;
use rmcp::transport::streamable_http_client::StreamableHttpError;

use super::http::McpTransportError;

/// Why a request to a server led to nothing. The words are ours, but for `Said`.
#[derive(Debug, PartialEq, Eq)]
pub enum McpRequestError {
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

impl McpRequestError {
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
    pub fn from_service_error(error: &ServiceError) -> Self {
        match error {
            ServiceError::McpError(error) => McpRequestError::Said {
                code: error.code.0,
                words: error.message.to_string(),
            },
            ServiceError::TransportSend(error) => from_transport_error(error),
            ServiceError::TransportClosed => McpRequestError::NoAnswer("the connection broke before an answer".into()),
            ServiceError::Cancelled { .. } => McpRequestError::NoAnswer("the server cancelled it".into()),
            ServiceError::UnexpectedResponse
            | ServiceError::SubscriptionLagged { .. }
            | ServiceError::Timeout { .. }
            | ServiceError::InputRequiredRoundsExceeded { .. }
            | _ => McpRequestError::NoAnswer("the server's answer is not of MCP".into()),
        }
    }
}

fn from_transport_error(error: &DynamicTransportError) -> McpRequestError {
    match error.error.downcast_ref::<StreamableHttpError<McpTransportError>>() {
        Some(StreamableHttpError::Client(McpTransportError::NotSent(words))) => McpRequestError::NotSent(words.clone()),
        Some(StreamableHttpError::Client(McpTransportError::NoAnswer(words))) => {
            McpRequestError::NoAnswer(words.clone())
        }
        Some(StreamableHttpError::Client(McpTransportError::Refused(status))) => McpRequestError::Refused(*status),
        Some(StreamableHttpError::SessionExpired) => McpRequestError::NotSent("it has forgotten the session".into()),
        _ => McpRequestError::NoAnswer("the connection broke before an answer".into()),
    }
}

/// Why there is no connection.
pub(super) fn unconnected(error: &ClientInitializeError) -> McpRequestError {
    match error {
        ClientInitializeError::TransportError { error, .. } => from_transport_error(error),
        ClientInitializeError::JsonRpcError(error) => McpRequestError::Said {
            code: error.code.0,
            words: String::new(),
        },
        ClientInitializeError::NoCompatibleProtocolVersion { .. } => {
            McpRequestError::NoAnswer("it speaks no version of MCP that is known here".into())
        }
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => unconnected(fallback),
        ClientInitializeError::ExpectedInitResponse(_)
        | ClientInitializeError::ExpectedInitResult(_)
        | ClientInitializeError::ConflictInitResponseId(..)
        | ClientInitializeError::UncorrelatedErrorResponse { .. }
        | ClientInitializeError::ConnectionClosed(_)
        | ClientInitializeError::NoPreferredProtocolVersion
        | ClientInitializeError::Cancelled
        | _ => McpRequestError::NoAnswer("it does not speak MCP at this address".into()),
    }
}
