//! `agentloop mcp-bridge`: streamable HTTP in front of an MCP server that uses standard input and output.
//!
//! Messages pass as they are, whatever their method: the bridge knows ids, sessions, progress and cancellation, and
//! nothing about tools. One process of the server serves all clients; for clients of the older revision it is a session,
//! which ends with it. Clients are the gateway, for one worker at a time.

mod child;
mod exchange;
mod front;
mod lines;
mod message;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::exchange::{AcceptedRequest, ServerExchange};
use self::message::RpcMessage;
use crate::flags::BridgeFlags;

/// How long a request waits for a server that is being started.
const START_TIME: Duration = Duration::from_secs(10);

/// The running process of the server.
#[derive(Clone)]
struct RunningServer {
    /// Lines for its standard input.
    input: mpsc::Sender<Vec<u8>>,
}

/// Why a request is not passed on.
enum BridgeRefusal {
    /// The server is not running.
    Down,
    /// The session is not that of the running server.
    UnknownSession,
    /// The server has sessions, and the request has none.
    NoSession,
    /// Too many requests are open.
    TooMany,
    /// The answer is known: that to `initialize`, which a server accepts once.
    Known(Box<RawValue>),
    /// The server would end if it were asked.
    NoDiscovery,
}

/// What the HTTP side and the process of the server share.
struct Bridge {
    running: watch::Sender<Option<RunningServer>>,
    exchange: Mutex<ServerExchange>,
    /// The server ended when it was asked for discovery: it is not asked again.
    has_no_discovery: AtomicBool,
}

impl Bridge {
    fn new() -> io::Result<Self> {
        Ok(Self {
            running: watch::Sender::new(None),
            exchange: Mutex::new(ServerExchange::new(new_session()?)),
            has_no_discovery: AtomicBool::new(false),
        })
    }

    fn exchange(&self) -> MutexGuard<'_, ServerExchange> {
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn started(&self, running: RunningServer) {
        self.running.send_replace(Some(running));
    }

    /// The server ended: all requests that it did not answer end, too.
    fn ended(&self) {
        self.running.send_replace(None);
        // Without randomness, sessions of the old process would be taken for the new one's: keep refusing them.
        let fresh = ServerExchange::new(new_session().unwrap_or_default());
        let before = std::mem::replace(&mut *self.exchange(), fresh);
        if before.ended_by_discovery() {
            self.has_no_discovery.store(true, Ordering::Relaxed);
        }
    }

    fn session(&self) -> Option<String> {
        let session = self.exchange().session.clone();
        (!session.is_empty()).then_some(session)
    }

    async fn running(&self) -> Result<RunningServer, BridgeRefusal> {
        let mut running = self.running.subscribe();
        let found = timeout(START_TIME, running.wait_for(Option::is_some)).await;
        let found = found.ok().and_then(Result::ok).and_then(|running| running.clone());
        found.ok_or(BridgeRefusal::Down)
    }

    /// Passes a request on.
    async fn request(&self, message: RpcMessage, session: Option<&str>) -> Result<AcceptedRequest, BridgeRefusal> {
        let running = self.running().await?;
        let accepted = {
            let mut exchange = self.exchange();
            self.check(&exchange, &message, session)?;
            exchange.request(message).ok_or(BridgeRefusal::TooMany)?
        };
        let line = accepted.line.clone();
        if running.input.send(line).await.is_err() {
            self.abandon(accepted.number);
            return Err(BridgeRefusal::Down);
        }
        Ok(accepted)
    }

    fn check(
        &self,
        exchange: &ServerExchange,
        message: &RpcMessage,
        session: Option<&str>,
    ) -> Result<(), BridgeRefusal> {
        match session {
            Some(session) if session == exchange.session && !session.is_empty() => return Ok(()),
            Some(_) => return Err(BridgeRefusal::UnknownSession),
            None => {}
        }
        if message.is("server/discover") && self.has_no_discovery.load(Ordering::Relaxed) {
            return Err(BridgeRefusal::NoDiscovery);
        }
        if message.is("initialize") {
            return match exchange.initialized() {
                Some(result) => Err(BridgeRefusal::Known(result.to_owned())),
                None if exchange.is_initializing() => Err(BridgeRefusal::TooMany),
                None => Ok(()),
            };
        }
        match exchange.initialized() {
            Some(_) if !message.is("server/discover") => Err(BridgeRefusal::NoSession),
            _ => Ok(()),
        }
    }

    /// Passes on a notification, or the answer to a request of the server.
    async fn notify(&self, message: RpcMessage, session: Option<&str>) -> Result<(), BridgeRefusal> {
        let running = self.running().await?;
        let line = {
            let mut exchange = self.exchange();
            self.check(&exchange, &message, session)?;
            exchange.notify(message)
        };
        match line {
            Some(line) => running.input.send(line).await.map_err(|_| BridgeRefusal::Down),
            None => Ok(()),
        }
    }

    async fn open_stream(&self, session: Option<&str>) -> Result<mpsc::Receiver<Vec<u8>>, BridgeRefusal> {
        self.running().await?;
        let mut exchange = self.exchange();
        match session {
            Some(session) if session == exchange.session => Ok(exchange.open_stream()),
            Some(_) => Err(BridgeRefusal::UnknownSession),
            None => Err(BridgeRefusal::NoSession),
        }
    }

    /// A client no longer waits for an answer.
    fn abandon(&self, number: u64) {
        let cancel = self.exchange().abandon(number);
        let running = self.running.borrow().clone();
        if let (Some(line), Some(running)) = (cancel, running) {
            // A server that does not read its input cannot be asked to stop.
            let _ = running.input.try_send(line);
        }
    }

    fn received(&self, message: RpcMessage) {
        let reply = self.exchange().receive(message);
        let running = self.running.borrow().clone();
        if let (Some(line), Some(running)) = (reply, running) {
            // The server waits for this reply; if it does not read its input, it cannot get it.
            let _ = running.input.try_send(line);
        }
    }

    fn received_too_long(&self, number: Option<u64>) {
        if let Some(number) = number {
            self.exchange().answer_too_long(number);
        }
    }
}

/// A name that cannot be guessed.
fn new_session() -> io::Result<String> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(agentloop_support::hash::hex(&bytes))
}

/// Runs the bridge until `end`.
pub(crate) async fn run(flags: BridgeFlags, end: CancellationToken) -> io::Result<()> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let bridge = Arc::new(Bridge::new()?);
    let stop = end.child_token();
    let router = front::router(Arc::clone(&bridge));
    let serving = async {
        let served = crate::listen::serve(&flags.listen, router, end).await;
        stop.cancel();
        served
    };
    let (served, ()) = tokio::join!(serving, child::keep_running(&bridge, &flags.command, &stop));
    served
}
