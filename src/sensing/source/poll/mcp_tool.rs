//! A tool of an MCP server as a source: one connection, kept between calls, and a tool that changes nothing.

use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response, StatusCode};
use rmcp::ClientHandler;
use rmcp::model::{CallToolRequestParams, CallToolResponse, CallToolResult, ClientConfig};
use rmcp::service::{RoleClient, RunningService};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api::polled_tool::PolledTool;
use crate::mcp::http::{McpHttpClient, McpTransport, McpTransportError};
use crate::mcp::{self, McpRequestError, text};
use crate::sensing::source::http::{SourceError, SourceTarget, refused, unreachable};
use crate::sensing::source::{RepeatRule, SourceCursor, SourceMessage};

/// Time after which the server is asked anew what its tool may do.
const REFRESH: Duration = Duration::from_mins(5);

/// The connection to the server, if there is one.
#[derive(Default)]
pub(super) struct ToolConnection(Option<ToolSession>);

struct ToolSession {
    service: RunningService<RoleClient, PollClientHandler>,
    made: Instant,
}

struct PollClientHandler;

impl ClientHandler for PollClientHandler {
    fn get_info(&self) -> ClientConfig {
        mcp::own_config()
    }
}

/// Straight to the server, with the headers of the Secret.
#[derive(Clone)]
struct DirectTransport(SourceTarget);

impl McpTransport for DirectTransport {
    fn prepare(&self, request: RequestBuilder) -> Result<RequestBuilder, McpTransportError> {
        let headers = self
            .0
            .headers()
            .map_err(|failure| McpTransportError::NotSent(failure.0))?;
        Ok(request.headers(headers))
    }

    fn unanswered(&self, error: &reqwest::Error) -> McpTransportError {
        let words = unreachable(error).0;
        if error.is_connect() {
            McpTransportError::NotSent(words)
        } else {
            McpTransportError::NoAnswer(words)
        }
    }

    async fn judge(&self, response: Response) -> Result<Response, McpTransportError> {
        Ok(response)
    }
}

impl ToolConnection {
    /// Calls the tool. A call that fails or is given up ends the connection.
    pub(super) async fn call_tool(
        &mut self,
        client: &Client,
        place: &SourceTarget,
        tool: &PolledTool,
    ) -> Result<SourceMessage, SourceError> {
        let known = self.0.take().filter(|session| session.made.elapsed() < REFRESH);
        if let Some(session) = known {
            match session.call(tool).await {
                // It was made anew, and knows the connection no more.
                Err(McpRequestError::NotSent(_)) => {}
                called => return self.end(session, called, place.most_bytes),
            }
        }
        let session = ToolSession::open(client, place, tool).await?;
        let called = session.call(tool).await;
        self.end(session, called, place.most_bytes)
    }

    fn end(
        &mut self,
        session: ToolSession,
        called: Result<CallToolResponse, McpRequestError>,
        most: usize,
    ) -> Result<SourceMessage, SourceError> {
        let response = called.map_err(|miss| failure(&miss))?;
        self.0 = Some(session);
        heard(&response, most)
    }
}

impl ToolSession {
    /// A connection to a server that has this tool, which changes nothing.
    async fn open(client: &Client, place: &SourceTarget, tool: &PolledTool) -> Result<Self, SourceError> {
        let http = McpHttpClient::new(client.clone(), DirectTransport(place.clone()), CancellationToken::new());
        let connected = mcp::connect(PollClientHandler, http, place.url.to_string()).await;
        let service = connected.map_err(|miss| failure(&miss))?;
        let tools = mcp::tools(service.peer()).await.map_err(|miss| failure(&miss))?;
        let found = tools.into_iter().find(|found| found.name == tool.name);
        let found = found
            .ok_or_else(|| SourceError("the server has no such tool; look at spec.source.poll.tool.name".into()))?;
        let hint = found.annotations.and_then(|hints| hints.read_only_hint);
        let changes_nothing = tool.read_only || (tool.server.trusted && hint == Some(true));
        if !changes_nothing {
            return Err(SourceError(
                "the tool may change something, and is not called: if it changes nothing, set \
                 spec.source.poll.tool.readOnly to true; if the server is to be believed, set server.trusted to true"
                    .into(),
            ));
        }
        Ok(Self {
            service,
            made: Instant::now(),
        })
    }

    async fn call(&self, tool: &PolledTool) -> Result<CallToolResponse, McpRequestError> {
        let params = CallToolRequestParams::new(tool.name.clone()).with_arguments(tool.arguments.clone());
        let called = self.service.call_tool_once(params).await;
        called.map_err(|error| McpRequestError::from_service_error(&error))
    }
}

fn heard(response: &CallToolResponse, most: usize) -> Result<SourceMessage, SourceError> {
    let said = |words: &str| SourceError(format!("the tool {words}; look at spec.source.poll.tool"));
    match response {
        CallToolResponse::Complete(CallToolResult {
            is_error: Some(true), ..
        }) => Err(said("says that it failed")),
        CallToolResponse::Complete(result) => {
            let mut payload = text::value(result).into_bytes();
            // One byte more than allowed says that it is too long.
            payload.truncate(most + 1);
            Ok(SourceMessage {
                id: None,
                payload,
                cursor: SourceCursor::default(),
                repeat: RepeatRule::SameAsLast,
            })
        }
        CallToolResponse::InputRequired(_) => Err(said("asks a person for input, and there is none")),
        CallToolResponse::Task(_) | _ => Err(said("goes on by itself, and there is no way to learn how it ends")),
    }
}

fn failure(miss: &McpRequestError) -> SourceError {
    match miss {
        McpRequestError::Refused(status) => {
            StatusCode::from_u16(*status).map_or_else(|_| SourceError(miss.for_log()), refused)
        }
        McpRequestError::NotSent(_) | McpRequestError::NoAnswer(_) | McpRequestError::Said { .. } => {
            SourceError(miss.for_log())
        }
    }
}
