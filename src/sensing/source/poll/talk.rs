//! A tool of an MCP server as a source: one connection, kept between calls, and a tool that changes nothing.

use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response, StatusCode};
use rmcp::ClientHandler;
use rmcp::model::{CallToolRequestParams, CallToolResponse, CallToolResult, ClientConfig};
use rmcp::service::{RoleClient, RunningService};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api::polled_tool::PolledTool;
use crate::mcp::http::{Http, Trouble, Way};
use crate::mcp::{self, Miss, text};
use crate::sensing::source::http::{Failure, Place, refused, unreachable};
use crate::sensing::source::{Cursor, Heard, Repeat};

/// Time after which the server is asked anew what its tool may do.
const REFRESH: Duration = Duration::from_mins(5);

/// The connection to the server, if there is one.
#[derive(Default)]
pub(super) struct Talk(Option<Session>);

struct Session {
    service: RunningService<RoleClient, Asker>,
    made: Instant,
}

struct Asker;

impl ClientHandler for Asker {
    fn get_info(&self) -> ClientConfig {
        mcp::own_config()
    }
}

/// Straight to the server, with the headers of the Secret.
#[derive(Clone)]
struct Direct(Place);

impl Way for Direct {
    fn prepare(&self, request: RequestBuilder) -> Result<RequestBuilder, Trouble> {
        let headers = self.0.headers().map_err(|failure| Trouble::NotSent(failure.0))?;
        Ok(request.headers(headers))
    }

    fn unanswered(&self, error: &reqwest::Error) -> Trouble {
        let words = unreachable(error).0;
        if error.is_connect() {
            Trouble::NotSent(words)
        } else {
            Trouble::NoAnswer(words)
        }
    }

    async fn judge(&self, response: Response) -> Result<Response, Trouble> {
        Ok(response)
    }
}

impl Talk {
    /// Calls the tool. A call that fails or is given up ends the connection.
    pub(super) async fn ask(&mut self, client: &Client, place: &Place, tool: &PolledTool) -> Result<Heard, Failure> {
        let known = self.0.take().filter(|session| session.made.elapsed() < REFRESH);
        if let Some(session) = known {
            match session.call(tool).await {
                // It was made anew, and knows the connection no more.
                Err(Miss::NotSent(_)) => {}
                called => return self.end(session, called, place.most_bytes),
            }
        }
        let session = Session::open(client, place, tool).await?;
        let called = session.call(tool).await;
        self.end(session, called, place.most_bytes)
    }

    fn end(&mut self, session: Session, called: Result<CallToolResponse, Miss>, most: usize) -> Result<Heard, Failure> {
        let response = called.map_err(|miss| failure(&miss))?;
        self.0 = Some(session);
        heard(&response, most)
    }
}

impl Session {
    /// A connection to a server that has this tool, which changes nothing.
    async fn open(client: &Client, place: &Place, tool: &PolledTool) -> Result<Self, Failure> {
        let http = Http::new(client.clone(), Direct(place.clone()), CancellationToken::new());
        let connected = mcp::connect(Asker, http, place.url.to_string()).await;
        let service = connected.map_err(|miss| failure(&miss))?;
        let tools = mcp::tools(service.peer()).await.map_err(|miss| failure(&miss))?;
        let found = tools.into_iter().find(|found| found.name == tool.name);
        let found =
            found.ok_or_else(|| Failure("the server has no such tool; look at spec.source.poll.tool.name".into()))?;
        let hint = found.annotations.and_then(|hints| hints.read_only_hint);
        let changes_nothing = tool.read_only || (tool.server.trusted && hint == Some(true));
        if !changes_nothing {
            return Err(Failure(
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

    async fn call(&self, tool: &PolledTool) -> Result<CallToolResponse, Miss> {
        let params = CallToolRequestParams::new(tool.name.clone()).with_arguments(tool.arguments.clone());
        let called = self.service.call_tool_once(params).await;
        called.map_err(|error| Miss::of(&error))
    }
}

fn heard(response: &CallToolResponse, most: usize) -> Result<Heard, Failure> {
    let said = |words: &str| Failure(format!("the tool {words}; look at spec.source.poll.tool"));
    match response {
        CallToolResponse::Complete(CallToolResult {
            is_error: Some(true), ..
        }) => Err(said("says that it failed")),
        CallToolResponse::Complete(result) => {
            let mut payload = text::value(result).into_bytes();
            // One byte more than allowed says that it is too long.
            payload.truncate(most + 1);
            Ok(Heard {
                id: None,
                payload,
                cursor: Cursor::default(),
                repeat: Repeat::SameAsLast,
            })
        }
        CallToolResponse::InputRequired(_) => Err(said("asks a person for input, and there is none")),
        CallToolResponse::Task(_) | _ => Err(said("goes on by itself, and there is no way to learn how it ends")),
    }
}

fn failure(miss: &Miss) -> Failure {
    match miss {
        Miss::Refused(status) => StatusCode::from_u16(*status).map_or_else(|_| Failure(miss.for_log()), refused),
        Miss::NotSent(_) | Miss::NoAnswer(_) | Miss::Said { .. } => Failure(miss.for_log()),
    }
}
