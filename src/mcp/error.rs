//! Errors of requests to a tool server.

use rmcp::service::{ClientInitializeError, ServiceError};
use rmcp::transport::DynamicTransportError;
use rmcp::transport::streamable_http_client::StreamableHttpError;

use super::http::McpTransportError;

/// Why a request failed. The text is the runtime's own, except for [`Self::Said`].
#[derive(Debug, PartialEq, Eq)]
pub enum McpRequestError {
    /// The server certainly did not receive it.
    NotSent(String),
    /// The server received it and did nothing: its status.
    Refused(u16),
    /// The server may have received it.
    NoAnswer(String),
    /// It answered with an error. The text is the server's, for the model only.
    Said {
        code: i32,
        /// The server's text.
        words: String,
    },
}

impl McpRequestError {
    /// For operators: never the server's text.
    #[must_use]
    pub fn for_log(&self) -> String {
        match self {
            Self::NotSent(words) | Self::NoAnswer(words) => words.clone(),
            Self::Refused(status) => format!("the server rejected the request with status {status}"),
            Self::Said { code, .. } => format!("the server returned the error {code}"),
        }
    }

    /// Why a request has no valid answer.
    #[must_use]
    pub fn from_service_error(error: &ServiceError) -> Self {
        match error {
            ServiceError::McpError(error) => McpRequestError::Said {
                code: error.code.0,
                words: error.message.to_string(),
            },
            ServiceError::TransportSend(error) => from_transport_error(error),
            ServiceError::TransportClosed => {
                McpRequestError::NoAnswer("the connection was interrupted before a response".into())
            }
            ServiceError::Cancelled { .. } => McpRequestError::NoAnswer("the server cancelled the request".into()),
            ServiceError::UnexpectedResponse
            | ServiceError::SubscriptionLagged { .. }
            | ServiceError::Timeout { .. }
            | ServiceError::InputRequiredRoundsExceeded { .. }
            | _ => McpRequestError::NoAnswer("the response is not valid MCP".into()),
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
        Some(StreamableHttpError::SessionExpired) => McpRequestError::NotSent("the session has expired".into()),
        _ => McpRequestError::NoAnswer("the connection was interrupted before a response".into()),
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
            McpRequestError::NoAnswer("the server does not support a known version of MCP".into())
        }
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => unconnected(fallback),
        ClientInitializeError::ExpectedInitResponse(_)
        | ClientInitializeError::ExpectedInitResult(_)
        | ClientInitializeError::ConflictInitResponseId(..)
        | ClientInitializeError::UncorrelatedErrorResponse { .. }
        | ClientInitializeError::ConnectionClosed(_)
        | ClientInitializeError::NoPreferredProtocolVersion
        | ClientInitializeError::Cancelled
        | _ => McpRequestError::NoAnswer("the server does not speak MCP at this URL".into()),
    }
}
