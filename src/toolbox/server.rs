//! The toolbox as an MCP server, of both generations of the protocol.

use std::io;
use std::sync::Arc;

use axum::Router;
use rmcp::ServerHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ErrorData, Implementation, JsonObject, ListToolsResult,
    PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::answer::ToolAnswer;
use crate::definitions::{self, ToolGroup};
use crate::http::{HttpRequest, HttpTool};
use crate::listen::{ListenAddress, MCP_PATH};
use crate::shell::{RunCommand, Shell};
use crate::workspace::{EditFile, FileError, ListDirectory, ReadFile, SearchFiles, Workspace, WriteFile};

/// Maximum number of file tools at a time; each may hold a result in memory.
const MAX_FILE_CALLS: usize = 4;

/// The tools, and the limits that they share.
pub(crate) struct ToolboxTools {
    pub(crate) tools: Vec<Tool>,
    pub(crate) shell: Shell,
    pub(crate) workspace: Arc<Workspace>,
    pub(crate) http: HttpTool,
    /// Longest result in bytes.
    pub(crate) limit: usize,
    pub(crate) file_calls: Semaphore,
    /// Held by a call that changes files: an edit reads, compares and replaces.
    pub(crate) changes: Semaphore,
}

impl ToolboxTools {
    pub(crate) fn new(shell: Shell, workspace: Workspace, http: HttpTool) -> Self {
        Self {
            tools: Vec::new(),
            shell,
            workspace: Arc::new(workspace),
            http,
            limit: 0,
            file_calls: Semaphore::new(MAX_FILE_CALLS),
            changes: Semaphore::new(1),
        }
    }

    /// Offers these groups of tools, with results of at most `limit` bytes.
    pub(crate) fn offering(mut self, groups: &[ToolGroup], timeout: u64, limit: usize) -> Self {
        self.tools = groups
            .iter()
            .flat_map(|group| definitions::tools(*group, timeout))
            .collect();
        self.limit = limit;
        self
    }

    /// Runs a tool. Cancelling the token ends it, with everything that it started.
    async fn call(&self, call: BuiltinCall, cancelled: CancellationToken) -> ToolAnswer {
        let limit = self.limit;
        match call {
            BuiltinCall::Shell(wanted) => self.shell.run(&wanted, &self.workspace, limit, &cancelled).await,
            BuiltinCall::Http(wanted) => self.http.run(&wanted, limit, &cancelled).await,
            BuiltinCall::Read(wanted) => {
                self.file(cancelled, move |files, token| files.read(&wanted, limit, token))
                    .await
            }
            BuiltinCall::List(wanted) => {
                self.file(cancelled, move |files, token| files.list(&wanted, token))
                    .await
            }
            BuiltinCall::Search(wanted) => {
                self.file(cancelled, move |files, token| files.search(&wanted, limit, token))
                    .await
            }
            BuiltinCall::Write(wanted) => {
                self.change(cancelled, move |files, token| files.write(&wanted, token))
                    .await
            }
            BuiltinCall::Edit(wanted) => {
                self.change(cancelled, move |files, token| files.edit(&wanted, token))
                    .await
            }
        }
    }

    async fn change<F>(&self, cancelled: CancellationToken, work: F) -> ToolAnswer
    where
        F: FnOnce(&Workspace, &CancellationToken) -> Result<ToolAnswer, FileError> + Send + 'static,
    {
        // Never closed.
        let _turn = self.changes.acquire().await;
        self.file(cancelled, work).await
    }

    async fn file<F>(&self, cancelled: CancellationToken, work: F) -> ToolAnswer
    where
        F: FnOnce(&Workspace, &CancellationToken) -> Result<ToolAnswer, FileError> + Send + 'static,
    {
        // Never closed.
        let _slot = self.file_calls.acquire().await;
        let workspace = Arc::clone(&self.workspace);
        let working = tokio::task::spawn_blocking(move || work(&workspace, &cancelled));
        match working.await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => ToolAnswer::error(error),
            Err(_) => ToolAnswer::error("the tool failed because of a bug"),
        }
    }
}

/// A call with its arguments.
enum BuiltinCall {
    Shell(RunCommand),
    Read(ReadFile),
    Write(WriteFile),
    Edit(EditFile),
    List(ListDirectory),
    Search(SearchFiles),
    Http(HttpRequest),
}

impl BuiltinCall {
    fn parse(name: &str, arguments: JsonObject) -> Result<Self, ToolCallError> {
        Ok(match name {
            "shell" => Self::Shell(parsed(arguments)?),
            "read_file" => Self::Read(parsed(arguments)?),
            "write_file" => Self::Write(parsed(arguments)?),
            "edit_file" => Self::Edit(parsed(arguments)?),
            "list_directory" => Self::List(parsed(arguments)?),
            "search_files" => Self::Search(parsed(arguments)?),
            "http_request" => Self::Http(parsed(arguments)?),
            _ => return Err(ToolCallError::UnknownTool),
        })
    }
}

/// Why a call is not run.
#[derive(thiserror::Error, Debug)]
pub(crate) enum ToolCallError {
    #[error("there is no tool of this name")]
    UnknownTool,
    #[error("invalid arguments: {0}")]
    Arguments(#[from] serde_json::Error),
}

fn parsed<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, serde_json::Error> {
    serde_json::from_value(Value::Object(arguments))
}

#[cfg(test)]
pub(crate) fn parses(name: &str, arguments: JsonObject) -> Result<(), ToolCallError> {
    BuiltinCall::parse(name, arguments).map(|_| ())
}

/// Handles the requests of one connection.
#[derive(Clone)]
struct ToolboxHandler(Arc<ToolboxTools>);

impl ServerHandler for ToolboxHandler {
    fn get_info(&self) -> ServerConfig {
        let own = Implementation::new("agentloop-toolbox", env!("CARGO_PKG_VERSION"));
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build()).with_server_info(own)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.0.tools.clone()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let unknown = || ErrorData::invalid_params(ToolCallError::UnknownTool.to_string(), None);
        if !self.0.tools.iter().any(|tool| tool.name == request.name) {
            return Err(unknown());
        }
        let answer = match BuiltinCall::parse(&request.name, request.arguments.unwrap_or_default()) {
            Ok(call) => self.0.call(call, context.ct).await,
            Err(ToolCallError::UnknownTool) => return Err(unknown()),
            // A result, not an error of the protocol: the model can correct it.
            Err(error @ ToolCallError::Arguments(_)) => ToolAnswer::error(error),
        };
        Ok(CallToolResponse::Complete(answer.into_result()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.0.tools.iter().find(|tool| tool.name == name).cloned()
    }
}

/// Serves the tools until `end`.
pub(crate) async fn serve(tools: Arc<ToolboxTools>, address: &ListenAddress, end: CancellationToken) -> io::Result<()> {
    let mut config = StreamableHttpServerConfig::default().with_cancellation_token(end.child_token());
    // A result in one piece; notifications are not sent.
    config.json_response = true;
    if matches!(address, ListenAddress::Unix(_)) {
        // The name in requests over a socket means nothing.
        config = config.disable_allowed_hosts();
    }
    let handler = ToolboxHandler(tools);
    let sessions = Arc::new(LocalSessionManager::default());
    let service = StreamableHttpService::new(move || Ok(handler.clone()), sessions, config);
    let router = Router::new().route_service(MCP_PATH, service);
    crate::listen::serve(address, router, end).await
}
