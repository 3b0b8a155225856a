//! One tool server: connected for as long as it answers, connected anew when it does not, asked for its tools.
//!
//! Knows nothing of the loop. A server that is down costs a log line and a wait, never more.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use rmcp::ClientHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientConfig, JsonObject, RequestMetaObject, SubscriptionFilter, Tool,
};
use rmcp::service::{NotificationContext, RoleClient, RunningService, Subscription};
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::catalog::ToolCatalog;
use super::gateway_transport::GatewayTransport;
use super::result;
use crate::api::tools::ToolServer;
use crate::engine::tool::{ToolOutcome, ToolRun};
use crate::mcp::http::McpHttpClient;
use crate::mcp::{self, McpRequestError, PATIENCE};

/// Key of the idempotency key in `_meta` of a call: the same for each repeat of one run.
pub const IDEMPOTENCY_META: &str = "agentloop.dev/idempotency-key";
/// First and longest wait before a server is connected again.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// How long a run waits for a server that answered before and is gone: a restart of it takes about as long.
const AWAY: Duration = Duration::from_secs(10);
/// Time after which the list is read again although the server did not say that it changed: not all say so.
const REFRESH: Duration = Duration::from_mins(5);
/// First and longest wait after a list before one that the server says has changed is read: a server that says so all the
/// time must not keep the worker busy, nor change the prompt all the time. The wait doubles until the server is quiet for
/// longer than the longest one.
const DEBOUNCE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// One server of the spec.
pub(super) struct ToolServerClient {
    spec: ToolServer,
    http: Client,
    /// What it offers; kept while it is down, so that prompts stay the same. `None` until it answered once.
    catalog: watch::Sender<Option<Arc<ToolCatalog>>>,
    session: watch::Sender<Option<Arc<ServerSession>>>,
}

/// One connection.
struct ServerSession {
    number: u64,
    service: RunningService<RoleClient, NotificationHandler>,
    lost: CancellationToken,
    changed: Arc<Notify>,
}

/// Hears what a server says by itself.
struct NotificationHandler {
    changed: Arc<Notify>,
}

impl ClientHandler for NotificationHandler {
    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.changed.notify_one();
    }

    fn get_info(&self) -> ClientConfig {
        mcp::own_config()
    }
}

impl ToolServerClient {
    pub(super) fn new(spec: ToolServer, http: Client) -> Self {
        Self {
            spec,
            http,
            catalog: watch::Sender::new(None),
            session: watch::Sender::new(None),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.spec.name
    }

    /// What it offers.
    pub(super) fn catalog(&self) -> watch::Receiver<Option<Arc<ToolCatalog>>> {
        self.catalog.subscribe()
    }

    /// Keeps the server connected, for ever. An error is said once, until the server answers again.
    pub(super) async fn stay_connected(&self) {
        let mut wait = RETRY.0;
        let mut is_said = false;
        for number in 1.. {
            let why = match self.connect(number).await {
                Ok(session) => {
                    let began = Instant::now();
                    is_said = false;
                    let why = self.follow(&session).await;
                    self.session.send_replace(None);
                    if began.elapsed() > RETRY.1 {
                        wait = RETRY.0;
                    }
                    why
                }
                Err(miss) => miss.for_log(),
            };
            if !std::mem::replace(&mut is_said, true) {
                tracing::warn!(server = self.spec.name, why, "a tool server is away; connecting again");
            }
            sleep(wait).await;
            wait = (wait * 2).min(RETRY.1);
        }
    }

    /// A connection whose tools are known.
    async fn connect(&self, number: u64) -> Result<Arc<ServerSession>, McpRequestError> {
        let lost = CancellationToken::new();
        let changed = Arc::new(Notify::new());
        let uri = format!("http://gateway/v1/mcp/{}", self.spec.name);
        let http = McpHttpClient::new(self.http.clone(), GatewayTransport, lost.clone());
        let listener = NotificationHandler {
            changed: Arc::clone(&changed),
        };
        let connected = timeout(PATIENCE, mcp::connect(listener, http, uri)).await;
        let service = connected.map_err(|_| McpRequestError::NoAnswer("it does not answer".into()))??;
        let session = ServerSession {
            number,
            service,
            lost,
            changed,
        };
        let tools = session.list().await?;
        let version = session
            .service
            .peer_info()
            .map(|info| info.protocol_version.to_string());
        tracing::info!(
            server = self.spec.name,
            tools = tools.len(),
            version,
            "a tool server answers"
        );
        self.offer(tools);
        let session = Arc::new(session);
        self.session.send_replace(Some(Arc::clone(&session)));
        Ok(session)
    }

    fn offer(&self, tools: Vec<Tool>) {
        let catalog = ToolCatalog::new(&self.spec, tools);
        let is_new = self.catalog.send_if_modified(|known| {
            let is_new = known.as_deref() != Some(&catalog);
            if is_new {
                *known = Some(Arc::new(catalog.clone()));
            }
            is_new
        });
        if is_new && catalog.left_out > 0 {
            let (offered, left_out) = (catalog.specs.len(), catalog.left_out);
            tracing::warn!(
                server = self.spec.name,
                offered,
                left_out,
                "a tool server offers too much; the rest is left out"
            );
        }
        if is_new && !catalog.absent.is_empty() {
            let absent = catalog.absent.join(", ");
            tracing::warn!(
                server = self.spec.name,
                absent,
                "spec.tools.servers[].only names tools that the server does not have"
            );
        }
    }

    /// Reads the list again whenever it may have changed; returns, with the reason, when the connection is of no use.
    async fn follow(&self, session: &ServerSession) -> String {
        let mut subscription = session.subscribe().await;
        if subscription.is_some() {
            // What changed before the subscription.
            session.changed.notify_one();
        }
        let (mut listed, mut pause) = (Instant::now(), DEBOUNCE.0);
        loop {
            tokio::select! {
                () = session.lost.cancelled() => return "it is gone, or has forgotten the session".into(),
                () = session.changed.notified() => {}
                heard = wait_for_change(&mut subscription) => if !heard {
                    return "its stream of notifications ended".into();
                },
                () = sleep(REFRESH) => {}
            }
            if listed.elapsed() > DEBOUNCE.1 {
                pause = DEBOUNCE.0;
            }
            tokio::select! {
                () = session.lost.cancelled() => return "it is gone, or has forgotten the session".into(),
                () = sleep_until(listed + pause) => {}
            }
            pause = (pause * 2).min(DEBOUNCE.1);
            match session.list().await {
                Ok(tools) => self.offer(tools),
                Err(miss) => return miss.for_log(),
            }
            listed = Instant::now();
        }
    }

    /// Does one run; `deadline` is its own. A server that certainly did not get it is tried once more when it is back.
    pub(super) async fn run(&self, run: ToolRun, deadline: Instant) -> ToolOutcome {
        let mut seen = 0;
        let mut why = "it does not answer".to_owned();
        for _ in 0..2 {
            let Some(session) = self.session(seen, deadline).await else {
                break;
            };
            let catalog = self.catalog.borrow().clone().unwrap_or_default();
            let Some(tool) = catalog.own_names.get(&run.name) else {
                let message = format!("the server {} has no such tool any more", self.spec.name);
                return ToolOutcome::Unavailable { message };
            };
            match session.call(tool, &run, deadline).await {
                Ok(outcome) => return outcome,
                Err(McpRequestError::NotSent(words)) => why = words,
                Err(McpRequestError::Refused(status)) => {
                    let message = format!("the server {} refused the call with status {status}", self.spec.name);
                    return ToolOutcome::Unavailable { message };
                }
                Err(McpRequestError::NoAnswer(words)) => return ToolOutcome::Unknown { message: words },
                Err(McpRequestError::Said { code, words }) => {
                    let text = format!("error {code}: {words}");
                    return ToolOutcome::Failed { text };
                }
            }
            seen = session.number;
            session.lost.cancel();
        }
        let message = format!("the server {} cannot be reached: {why}", self.spec.name);
        ToolOutcome::Unavailable { message }
    }

    /// A connection later than `seen`. A server that never answered is waited for until `deadline`.
    async fn session(&self, seen: u64, deadline: Instant) -> Option<Arc<ServerSession>> {
        let is_known = self.catalog.borrow().is_some();
        let patience = if is_known {
            deadline.min(Instant::now() + AWAY)
        } else {
            deadline
        };
        let mut sessions = self.session.subscribe();
        let is_later =
            |session: &Option<Arc<ServerSession>>| session.as_ref().is_some_and(|session| session.number > seen);
        let found = timeout_at(patience, sessions.wait_for(is_later)).await.ok()?.ok()?;
        found.clone()
    }
}

impl ServerSession {
    async fn list(&self) -> Result<Vec<Tool>, McpRequestError> {
        mcp::tools(self.service.peer()).await
    }

    /// Servers of the newer revision tell of changes to those who ask. `None`: it does not, or by another way.
    async fn subscribe(&self) -> Option<Subscription> {
        let info = self.service.peer_info()?;
        if info.protocol_version.has_initialize() {
            return None;
        }
        let filter = SubscriptionFilter::builder().tools_list_changed().build();
        let asked = timeout(PATIENCE, self.service.listen(filter)).await;
        asked.ok()?.ok()
    }

    async fn call(&self, tool: &str, run: &ToolRun, deadline: Instant) -> Result<ToolOutcome, McpRequestError> {
        let mut params = CallToolRequestParams::new(tool.to_owned()).with_arguments(run.arguments.clone());
        let mut meta = JsonObject::new();
        meta.insert(IDEMPOTENCY_META.into(), json!(run.idempotency_key));
        params.meta = Some(RequestMetaObject::from(meta));
        // A call that is dropped, here or with the run, is cancelled at the server.
        let answer = match timeout_at(deadline, self.service.call_tool_once(params)).await {
            Err(_) => return Err(McpRequestError::NoAnswer("it did not answer in time".into())),
            Ok(answer) => answer.map_err(|error| McpRequestError::from_service_error(&error))?,
        };
        match answer {
            CallToolResponse::Complete(result) if run.id.is_refresh() => Ok(result::value(&result)),
            CallToolResponse::Complete(result) => Ok(result::outcome(&result)),
            CallToolResponse::InputRequired(_) => Ok(ToolOutcome::Failed {
                text: "it asks a person for input, and there is none: call it with all that it needs".into(),
            }),
            CallToolResponse::Task(_) | _ => Err(McpRequestError::NoAnswer(
                "it goes on by itself, and there is no way to learn how it ends".into(),
            )),
        }
    }
}

/// Whether the server said something; never ends without a subscription. False: there is none any more.
async fn wait_for_change(subscription: &mut Option<Subscription>) -> bool {
    match subscription {
        Some(subscription) => matches!(subscription.next().await, Ok(Some(_))),
        None => std::future::pending().await,
    }
}
