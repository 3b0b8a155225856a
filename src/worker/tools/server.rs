//! One tool server: connected while it answers, reconnected when it does not, and listed for its tools.
//!
//! Knows nothing about the loop. A server that is down costs a log line and a wait, never more.

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

use super::catalog::{AccessRules, ToolCatalog};
use super::gateway_transport::GatewayTransport;
use super::result;
use crate::api::tools::{DefinitionChanges, ServerEndpoint, ToolServer};
use crate::engine::tool::{ToolOutcome, ToolRun};
use crate::mcp::http::McpHttpClient;
use crate::mcp::{self, DISCOVERY_TIMEOUT, McpRequestError};
use crate::support::backoff::Backoff;
use crate::worker::artifacts::ArtifactStore;
use crate::worker::tool_source::FinishedToolRun;

/// Key of the idempotency key in `_meta` of a call. The value is the same for every repeat of one run.
pub const IDEMPOTENCY_META: &str = "agentloop.dev/idempotency-key";
/// First and longest wait before a server is reconnected.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// How long a run waits for a server that answered before and is down: about as long as a restart takes.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the list is read again in any case: not all servers announce changes.
const REFRESH: Duration = Duration::from_mins(5);
/// First and longest wait before the list is read again after a server announces a change. A server that announces
/// changes all the time must neither keep the worker busy nor change the prompt all the time. The wait doubles until
/// the server is quiet for longer than the longest wait.
const DEBOUNCE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// When a list that may have changed is read.
struct ListPace {
    listed: Instant,
    pauses: Backoff,
}

impl ListPace {
    fn new(listed: Instant) -> Self {
        Self {
            listed,
            pauses: Backoff::new(DEBOUNCE.0, DEBOUNCE.1),
        }
    }

    /// The server reported at `now` that its list has changed. Returns when to read it; a moment in the past: at once.
    fn due(&mut self, now: Instant) -> Instant {
        if now.duration_since(self.listed) > DEBOUNCE.1 {
            self.pauses.reset();
        }
        self.listed + self.pauses.next_wait()
    }

    fn note_listed(&mut self, now: Instant) {
        self.listed = now;
    }
}

pub(super) struct ToolServerClient {
    spec: ToolServer,
    access: Arc<AccessRules>,
    artifacts: Arc<ArtifactStore>,
    http: Client,
    /// The offered tools; kept while the server is down, so that prompts stay the same. `None` until it has answered
    /// once.
    catalog: watch::Sender<Option<Arc<ToolCatalog>>>,
    session: watch::Sender<Option<Arc<ServerSession>>>,
}

struct ServerSession {
    number: u64,
    service: RunningService<RoleClient, NotificationHandler>,
    lost: CancellationToken,
    changed: Arc<Notify>,
}

/// Receives the notifications of a server.
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
    pub(super) fn new(spec: ToolServer, access: Arc<AccessRules>, artifacts: Arc<ArtifactStore>, http: Client) -> Self {
        Self {
            spec,
            access,
            artifacts,
            http,
            catalog: watch::Sender::new(None),
            session: watch::Sender::new(None),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.spec.name
    }

    pub(super) fn catalog(&self) -> watch::Receiver<Option<Arc<ToolCatalog>>> {
        self.catalog.subscribe()
    }

    /// Keeps the server connected, forever. Logs an error once, until the server answers again.
    pub(super) async fn stay_connected(&self) {
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        let mut is_logged = false;
        for number in 1.. {
            let why = match self.connect(number).await {
                Ok(session) => {
                    let began = Instant::now();
                    is_logged = false;
                    let why = self.follow(&session).await;
                    self.session.send_replace(None);
                    if began.elapsed() > RETRY.1 {
                        backoff.reset();
                    }
                    why
                }
                Err(miss) => miss.for_log(),
            };
            if !std::mem::replace(&mut is_logged, true) {
                tracing::warn!(
                    server = self.spec.name,
                    why,
                    "a tool server is unreachable; reconnecting"
                );
            }
            sleep(backoff.next_wait()).await;
        }
    }

    /// Connects and reads the list of tools.
    async fn connect(&self, number: u64) -> Result<Arc<ServerSession>, McpRequestError> {
        let lost = CancellationToken::new();
        let changed = Arc::new(Notify::new());
        let uri = format!("http://gateway/v1/mcp/{}", self.spec.name);
        let http = McpHttpClient::new(self.http.clone(), GatewayTransport, lost.clone());
        let listener = NotificationHandler {
            changed: Arc::clone(&changed),
        };
        let connected = timeout(DISCOVERY_TIMEOUT, mcp::connect(listener, http, uri)).await;
        let service = connected.map_err(|_| McpRequestError::NoAnswer("the server does not respond".into()))??;
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
            "connected to a tool server"
        );
        self.offer(tools);
        let session = Arc::new(session);
        self.session.send_replace(Some(Arc::clone(&session)));
        Ok(session)
    }

    fn offer(&self, tools: Vec<Tool>) {
        let catalog = ToolCatalog::new(&self.spec, &self.access, tools);
        let mut lacked = false;
        let is_new = self.catalog.send_if_modified(|known| {
            let is_new = known.as_deref() != Some(&catalog);
            lacked = known.as_ref().is_some_and(|known| !known.left_out.is_empty());
            if is_new {
                *known = Some(Arc::new(catalog.clone()));
            }
            is_new
        });
        let (offered, left_out) = (catalog.specs.len(), catalog.left_out.len());
        match catalog.left_out_text().filter(|_| is_new) {
            Some(why) => tracing::warn!(
                server = self.spec.name,
                offered,
                left_out,
                why,
                "some tools of a server are left out"
            ),
            None if is_new && lacked => tracing::info!(
                server = self.spec.name,
                offered,
                "no tool of a server is left out any more"
            ),
            None => {}
        }
        if is_new && !catalog.absent.is_empty() {
            let absent = catalog.absent.join(", ");
            tracing::warn!(
                server = self.spec.name,
                absent,
                "spec.tools.servers[].only names tools that the server does not offer"
            );
        }
    }

    /// Reads the list again whenever it may have changed. Returns the reason when the connection is no longer usable.
    async fn follow(&self, session: &ServerSession) -> String {
        let mut subscription = session.subscribe().await;
        if subscription.is_some() {
            // The list may have changed before the subscription took effect: read it again.
            session.changed.notify_one();
        }
        let mut pace = ListPace::new(Instant::now());
        loop {
            tokio::select! {
                () = session.lost.cancelled() => return "the server closed the connection or lost the session".into(),
                () = session.changed.notified() => {}
                is_open = wait_for_change(&mut subscription) => if !is_open {
                    return "the stream of notifications ended".into();
                },
                () = sleep(REFRESH) => {}
            }
            let due = pace.due(Instant::now());
            tokio::select! {
                () = session.lost.cancelled() => return "the server closed the connection or lost the session".into(),
                () = sleep_until(due) => {}
            }
            match session.list().await {
                Ok(tools) => self.offer(tools),
                Err(miss) => return miss.for_log(),
            }
            pace.note_listed(Instant::now());
        }
    }

    /// Runs a tool until `deadline`. Tries once more, after a reconnect, if the server certainly did not receive the
    /// call. A call that the server may have received is never repeated here: its [`ToolOutcome`] is unknown, and the
    /// tool's rules decide.
    pub(super) async fn run(&self, run: ToolRun, deadline: Instant) -> FinishedToolRun {
        let mut seen = 0;
        let mut why = "it does not respond".to_owned();
        for _ in 0..2 {
            let Some(session) = self.session(seen, deadline).await else {
                break;
            };
            let catalog = self.catalog.borrow().clone().unwrap_or_default();
            let Some(tool) = catalog.own_names.get(&run.name) else {
                let message = format!("the server {} no longer offers this tool", self.spec.name);
                return ToolOutcome::Unavailable { message }.into();
            };
            if !run.target.is_empty() && run.target != self.access.target(&self.spec, tool) {
                let message = format!("the server {} was changed after the call was requested", self.spec.name);
                return ToolOutcome::Unavailable { message }.into();
            }
            // A definition that was not shown to the model may be that of another tool.
            let is_held = self.spec.definition_changes == DefinitionChanges::Ask && !run.definition.is_empty();
            if is_held && catalog.definition(&run.name) != Some(&run.definition) {
                let message = format!(
                    "the server {} changed the definition of this tool after the call was requested",
                    self.spec.name
                );
                return ToolOutcome::Unavailable { message }.into();
            }
            if let Some(grant) = self.access.missing_grant(&self.spec) {
                let message = format!("Missing grant {grant}: it was removed after the call was requested");
                return ToolOutcome::Unavailable { message }.into();
            }
            match session.call(tool, &run, deadline, &self.artifacts).await {
                Ok(finished) => return self.believed(finished),
                Err(McpRequestError::NotSent(words)) => why = words,
                Err(McpRequestError::Refused(status)) => {
                    let message = format!("the server {} rejected the call with status {status}", self.spec.name);
                    return ToolOutcome::Unavailable { message }.into();
                }
                Err(McpRequestError::NoAnswer(words)) => return ToolOutcome::Unknown { message: words }.into(),
                Err(McpRequestError::Said { code, words }) => {
                    let text = format!("error {code}: {words}");
                    return ToolOutcome::Failed { text }.into();
                }
            }
            seen = session.number;
            session.lost.cancel();
        }
        let message = format!("the server {} cannot be reached: {why}", self.spec.name);
        ToolOutcome::Unavailable { message }.into()
    }

    /// Only the toolbox measures: other servers cannot use up an Agent's limits.
    fn believed(&self, mut finished: FinishedToolRun) -> FinishedToolRun {
        if self.spec.endpoint() != ServerEndpoint::Toolbox {
            finished.used.clear();
        }
        finished
    }

    /// Waits for a connection later than `seen`: at most [`RECONNECT_TIMEOUT`], or until `deadline` if the server never answered
    /// before.
    async fn session(&self, seen: u64, deadline: Instant) -> Option<Arc<ServerSession>> {
        let is_known = self.catalog.borrow().is_some();
        let patience = if is_known {
            deadline.min(Instant::now() + RECONNECT_TIMEOUT)
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

    /// Subscribes to changes of the list, at servers of the newer protocol revision. `None`: unsupported, or the server
    /// announces changes through the session.
    async fn subscribe(&self) -> Option<Subscription> {
        let info = self.service.peer_info()?;
        if info.protocol_version.has_initialize() {
            return None;
        }
        let filter = SubscriptionFilter::builder().tools_list_changed().build();
        let asked = timeout(DISCOVERY_TIMEOUT, self.service.listen(filter)).await;
        asked.ok()?.ok()
    }

    async fn call(
        &self,
        tool: &str,
        run: &ToolRun,
        deadline: Instant,
        artifacts: &Arc<ArtifactStore>,
    ) -> Result<FinishedToolRun, McpRequestError> {
        let mut params = CallToolRequestParams::new(tool.to_owned()).with_arguments(run.arguments.clone());
        let mut meta = JsonObject::new();
        meta.insert(IDEMPOTENCY_META.into(), json!(run.idempotency_key));
        params.meta = Some(RequestMetaObject::from(meta));
        // Dropping this future cancels the call at the server.
        let answer = match timeout_at(deadline, self.service.call_tool_once(params)).await {
            Err(_) => return Err(McpRequestError::NoAnswer("the server did not respond in time".into())),
            Ok(answer) => answer.map_err(|error| McpRequestError::from_service_error(&error))?,
        };
        match answer {
            CallToolResponse::Complete(result) => {
                let (run, artifacts) = (run.clone(), Arc::clone(artifacts));
                let stored = tokio::task::spawn_blocking(move || result::finished(&result, &run, &artifacts));
                stored.await.map_err(|_| {
                    let words = "the worker failed while reading the result; this is a bug in agentloop";
                    McpRequestError::NoAnswer(words.into())
                })
            }
            CallToolResponse::InputRequired(_) => Ok(ToolOutcome::Failed {
                text: "the tool asks the user for input, which is not available: pass all required arguments".into(),
            }
            .into()),
            CallToolResponse::Task(_) | _ => Err(McpRequestError::NoAnswer(
                "the tool continues in the background, and its outcome cannot be determined".into(),
            )),
        }
    }
}

/// Waits for a notification; forever, without a subscription. Returns false if the subscription has ended.
async fn wait_for_change(subscription: &mut Option<Subscription>) -> bool {
    match subscription {
        Some(subscription) => matches!(subscription.next().await, Ok(Some(_))),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tools::ToolsSpec;
    use crate::telemetry::log_buffer::LogBuffer;
    use crate::worker::tools::gateway_transport;

    const SECOND: Duration = Duration::from_secs(1);

    /// Waits before each read of a list that changes again as soon as it was read.
    fn waits(pace: &mut ListPace, now: &mut Instant, reads: usize) -> Vec<u64> {
        let wait = |_| {
            let due = pace.due(*now).max(*now);
            let wait = due.duration_since(*now);
            *now = due;
            pace.note_listed(*now);
            wait.as_secs()
        };
        (0..reads).map(wait).collect()
    }

    /// The log of a client that is offered these lists.
    fn offered(lists: Vec<Vec<Tool>>) -> Vec<String> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let spec = serde_json::from_value(json!({"name": "s", "url": "http://s"})).unwrap();
        let access = Arc::new(AccessRules::new(&ToolsSpec::default()));
        let directory = tempfile::tempdir().unwrap();
        let artifacts = Arc::new(ArtifactStore::open(directory.path()));
        let http = gateway_transport::client(&directory.path().join("socket")).unwrap();
        let client = ToolServerClient::new(spec, access, artifacts, http);
        let buffer = LogBuffer::default();
        let writer = buffer.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || lists.into_iter().for_each(|tools| client.offer(tools)));
        buffer.text().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_schema_beyond_a_bound_is_reported_once_and_so_is_its_end() {
        let list = |levels: usize| {
            let schema = (1..levels).fold(json!({}), |inner, _| json!({"not": inner}));
            vec![serde_json::from_value(json!({"name": "write", "inputSchema": schema})).unwrap()]
        };
        let log = offered(vec![list(49), list(49), list(48), list(48)]);
        let [begin, end] = &log[..] else { panic!("{log:?}") };
        assert!(
            begin.contains("some tools of a server are left out") && begin.contains("left_out=1"),
            "{begin}"
        );
        assert!(begin.contains("s__write") && begin.contains("48 levels"), "{begin}");
        assert!(end.contains("no tool of a server is left out any more"), "{end}");
        assert_eq!(offered(vec![list(48)]), Vec::<String>::new());
    }

    #[test]
    fn a_list_that_changes_all_the_time_is_read_less_and_less_often_up_to_once_a_minute() {
        let mut now = Instant::now();
        let mut pace = ListPace::new(now);
        assert_eq!(waits(&mut pace, &mut now, 9), [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        now += DEBOUNCE.1;
        assert_eq!(
            waits(&mut pace, &mut now, 2),
            [0, 60],
            "quiet for a minute is not longer"
        );
        now += DEBOUNCE.1 + SECOND;
        assert_eq!(
            waits(&mut pace, &mut now, 3),
            [0, 2, 4],
            "a quiet server is read at once"
        );
    }

    #[test]
    fn a_change_right_after_a_list_waits_a_second_and_one_after_a_second_does_not() {
        for (quiet, wait) in [(0, 1000), (999, 1), (1000, 0), (5000, 0)] {
            let begun = Instant::now();
            let now = begun + Duration::from_millis(quiet);
            let due = ListPace::new(begun).due(now).max(now);
            assert_eq!(due.duration_since(now), Duration::from_millis(wait), "{quiet} ms");
        }
    }
}
