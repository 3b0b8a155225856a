//! The connections to the database: few, made when needed, and none while it is unavailable.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use agentloop_support::backoff::{Backoff, jitter};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};
use tokio_postgres::Client;

use super::error::{HistoryError, TargetError};
use super::migrations;
use super::target::DatabaseTarget;
use super::tls::TlsConnector;

/// Connections at the same time.
const CONNECTIONS: usize = 2;
/// Requests that wait for a connection, each with one batch in memory.
const WAITING: usize = 64;
/// Time limit for a connection, migrations included: a database that accepts connections and does not answer is unavailable.
const CONNECT: Duration = Duration::from_secs(4);
/// Waits between two attempts to connect, during which requests are refused at once.
const OUTAGE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));

pub(crate) struct ConnectionPool {
    file: PathBuf,
    ca_file: Option<PathBuf>,
    waiting: Semaphore,
    permits: Semaphore,
    state: Mutex<PoolState>,
}

struct PoolState {
    idle: Vec<Client>,
    backoff: Backoff,
    /// The database could not be reached: not tried before this moment.
    away: Option<(Instant, String)>,
}

/// A connection in use. Dropped, it is closed, and with it an open transaction.
pub(crate) struct PooledConnection<'a> {
    pub(crate) client: Client,
    _permit: SemaphorePermit<'a>,
}

impl ConnectionPool {
    /// Reads the connection string, so that a malformed one is noticed at the start. Does not connect.
    pub(crate) fn new(file: PathBuf, ca_file: Option<PathBuf>) -> Result<Self, TargetError> {
        let target = DatabaseTarget::read(&file, ca_file.as_deref())?;
        TlsConnector::new(&target)?;
        Ok(Self {
            file,
            ca_file,
            waiting: Semaphore::new(WAITING),
            permits: Semaphore::new(CONNECTIONS),
            state: Mutex::new(PoolState {
                idle: Vec::new(),
                backoff: OUTAGE_BACKOFF,
                away: None,
            }),
        })
    }

    /// Waits for a connection.
    pub(crate) async fn checkout(&self) -> Result<PooledConnection<'_>, HistoryError> {
        let _place = self.waiting.try_acquire().map_err(|_| HistoryError::Busy)?;
        let permit = self.permits.acquire().await.map_err(|_| HistoryError::Busy)?;
        let idle = self.take_idle()?;
        let client = match idle {
            Some(client) => client,
            None => self.connect().await?,
        };
        Ok(PooledConnection {
            client,
            _permit: permit,
        })
    }

    /// Keeps a connection for the next request.
    pub(crate) fn put_back(&self, connection: PooledConnection<'_>) {
        self.lock().idle.push(connection.client);
    }

    /// An idle connection; an error while the database is unavailable.
    fn take_idle(&self) -> Result<Option<Client>, HistoryError> {
        let mut state = self.lock();
        while let Some(client) = state.idle.pop() {
            if !client.is_closed() {
                return Ok(Some(client));
            }
        }
        match &state.away {
            Some((until, why)) if Instant::now() < *until => Err(HistoryError::Unavailable(why.clone())),
            Some(_) | None => Ok(None),
        }
    }

    async fn connect(&self) -> Result<Client, HistoryError> {
        let connected = timeout(CONNECT, self.connect_once()).await;
        let late = || HistoryError::Unavailable(format!("no connection within {} s", CONNECT.as_secs()));
        let connected = connected.unwrap_or_else(|_| Err(late()));
        let mut state = self.lock();
        match &connected {
            Ok(_) => {
                state.away = None;
                state.backoff.reset();
            }
            Err(error) => {
                let wait = state.backoff.next_spread(jitter());
                let why = if let HistoryError::Unavailable(why) = error {
                    why.clone()
                } else {
                    error.to_string()
                };
                state.away = Some((Instant::now() + wait, why));
            }
        }
        connected
    }

    /// Reads the connection string again: its password may have been rotated.
    async fn connect_once(&self) -> Result<Client, HistoryError> {
        let target = DatabaseTarget::read(&self.file, self.ca_file.as_deref())?;
        let tls = TlsConnector::new(&target)?;
        let (client, connection) = target
            .config
            .connect(tls)
            .await
            .map_err(|error| HistoryError::of_connection(&error))?;
        // Ends when the client is dropped or the connection breaks; the client then reports why.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to the database of the history ended");
            }
        });
        migrations::apply(&client).await?;
        Ok(client)
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
