//! The page of a run: [`crate::page`] with the loops of this process, for the user of the run only.
//!
//! Its address contains a random token. Shows what the run's own output shows. A run without `--page` has none of it.

pub mod server;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jiff::tz::TimeZone;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::api::NamespacedName;
use crate::page::html::{self, PagePart};
use crate::page::recent::{MAX_LINES, RecentEvents};
use crate::page::view::PageView;
use crate::worker::events::from_line;
use crate::worker::journal::last_lines;

/// How long the end of a run waits for readers to receive it.
const READER_SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);

/// What readers are sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageContent {
    pub parts: Arc<Vec<PagePart>>,
    /// Why the run ended, once it has.
    pub ended: Option<&'static str>,
}

/// The page of a run.
pub struct Page {
    listener: std::net::TcpListener,
    address: SocketAddr,
    token: String,
    zone: TimeZone,
    recent: Arc<RecentEvents>,
    content: watch::Sender<PageContent>,
}

impl Page {
    /// Takes the address. Nothing is served yet.
    pub fn bind(address: SocketAddr, token: String, zone: TimeZone) -> std::io::Result<Self> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            address: listener.local_addr()?,
            listener,
            token,
            zone,
            recent: Arc::default(),
            content: watch::Sender::default(),
        })
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where a browser finds it. Anyone who knows the URL can read the page.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}/{}/", self.address, self.token)
    }

    /// Where events of the loops are added.
    #[must_use]
    pub fn recent(&self) -> &Arc<RecentEvents> {
        &self.recent
    }

    /// Shows this, if it differs from what is shown.
    pub fn show(&self, view: &PageView) {
        let parts = html::parts(view, &self.zone);
        self.content.send_if_modified(|content| {
            let differs = *content.parts != parts;
            if differs {
                content.parts = Arc::new(parts);
            }
            differs
        });
    }

    /// Serves the page until the task is aborted.
    pub fn serve(&self) -> std::io::Result<JoinHandle<()>> {
        let listener = tokio::net::TcpListener::from_std(self.listener.try_clone()?)?;
        let router = server::router(&self.token, self.zone.clone(), self.content.clone());
        Ok(tokio::spawn(async move {
            crate::telemetry::http::serve(listener, router, server::LIMITS).await;
        }))
    }

    /// Tells readers why the run ended, and gives them a moment to receive it.
    pub async fn end(&self, why: &'static str) {
        self.content.send_modify(|content| content.ended = Some(why));
        // Each reader ends once it has received it.
        let _ = tokio::time::timeout(READER_SHUTDOWN_TIMEOUT, self.content.closed()).await;
    }
}

/// Adds the newest events of earlier runs, from a journal that no worker has open. A journal that does not exist or that
/// an earlier version wrote adds none.
pub fn add_journal(recent: &RecentEvents, agent: &NamespacedName, journal_dir: &Path) {
    for line in last_lines(journal_dir, MAX_LINES.into()).unwrap_or_default() {
        recent.add(agent.clone(), from_line(line, None));
    }
}
