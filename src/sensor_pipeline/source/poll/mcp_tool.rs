//! A read-only tool of an MCP server as a source. The connection is kept between calls.

use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response, StatusCode};
use rmcp::ClientHandler;
use rmcp::model::{CallToolRequestParams, CallToolResponse, CallToolResult, ClientConfig};
use rmcp::service::{RoleClient, RunningService};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::source::http::{SourceError, SourceTarget, refused, unreachable};
use crate::source::{RepeatRule, SourceCursor, SourceMessage};
use agentloop_api::polled_tool::PolledTool;
use agentloop_mcp::http::{McpHttpClient, McpTransport, McpTransportError};
use agentloop_mcp::{self as mcp, McpRequestError, text};

/// Age of a connection after which a new one is opened, which reads the tool's annotations again.
const REFRESH: Duration = Duration::from_mins(5);

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

/// Connects directly to the server, with the headers of the Secret.
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
    /// Calls the tool. A call that fails or is cancelled closes the connection.
    pub(super) async fn call_tool(
        &mut self,
        client: &Client,
        place: &SourceTarget,
        tool: &PolledTool,
    ) -> Result<SourceMessage, SourceError> {
        let known = self.0.take().filter(|session| session.made.elapsed() < REFRESH);
        if let Some(session) = known {
            match session.call(tool).await {
                // The server restarted and lost the session.
                Err(McpRequestError::NotSent(_)) => {}
                called => return self.end(session, called, place.max_bytes),
            }
        }
        let session = ToolSession::open(client, place, tool).await?;
        let called = session.call(tool).await;
        self.end(session, called, place.max_bytes)
    }

    fn end(
        &mut self,
        session: ToolSession,
        called: Result<CallToolResponse, McpRequestError>,
        max: usize,
    ) -> Result<SourceMessage, SourceError> {
        let response = called.map_err(|miss| failure(&miss))?;
        self.0 = Some(session);
        source_message(&response, max)
    }
}

impl ToolSession {
    /// Connects to a server and checks that it has the tool and that the tool is read-only.
    async fn open(client: &Client, place: &SourceTarget, tool: &PolledTool) -> Result<Self, SourceError> {
        let http = McpHttpClient::new(client.clone(), DirectTransport(place.clone()), CancellationToken::new());
        let connected = mcp::connect(PollClientHandler, http, place.url.to_string()).await;
        let service = connected.map_err(|miss| failure(&miss))?;
        let tools = mcp::tools(service.peer()).await.map_err(|miss| failure(&miss))?;
        let found = tools.into_iter().find(|found| found.name == tool.name);
        let found =
            found.ok_or_else(|| SourceError("the server has no such tool; check spec.source.poll.tool.name".into()))?;
        let hint = found.annotations.and_then(|hints| hints.read_only_hint);
        let changes_nothing = tool.read_only || (tool.server.trusted && hint == Some(true));
        if !changes_nothing {
            return Err(SourceError(
                "the tool may have side effects and is not called: if it has none, set \
                 spec.source.poll.tool.readOnly to true; if its annotations can be trusted, set server.trusted to true"
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

fn source_message(response: &CallToolResponse, max: usize) -> Result<SourceMessage, SourceError> {
    let tool_failure = |words: &str| SourceError(format!("the tool {words}; check spec.source.poll.tool"));
    match response {
        CallToolResponse::Complete(CallToolResult {
            is_error: Some(true), ..
        }) => Err(tool_failure("returned an error")),
        CallToolResponse::Complete(result) => {
            let mut payload = text::value(result).into_bytes();
            // One byte more than allowed marks it as too long.
            payload.truncate(max + 1);
            Ok(SourceMessage {
                id: None,
                payload,
                cursor: SourceCursor::default(),
                repeat: RepeatRule::SameAsLast,
            })
        }
        CallToolResponse::InputRequired(_) => Err(tool_failure("asks for user input, which is not available")),
        CallToolResponse::Task(_) | _ => Err(tool_failure("runs as a task, which is not supported")),
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
