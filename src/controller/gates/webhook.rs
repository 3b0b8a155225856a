//! The webhook that announces gates to a receiver of the platform, such as a bridge to a chat.
//!
//! Owns the requests: signature, time limits, concurrency. What is due is decided by
//! [`GateAnnouncements`]. It reads the cache of Agents and nothing else, so a
//! receiver that is slow or unavailable delays neither reconciles nor status writes. Follows no redirect, and logs neither the
//! path of the URL, which may be a secret, nor bodies.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use reqwest::header::CONTENT_TYPE;
use reqwest::{Client, Url};
use strum::IntoEnumIterator;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::controller::agent::AgentsView;
use crate::controller::gates::announcements::{DueAnnouncement, GateAnnouncements, GateChange, GateKey, open_gates};
use crate::controller::runtime::WallClock;
use crate::sensor_pipeline::source::webhook::signature::WebhookSigner;
use crate::support::backoff::jitter;
use crate::support::text::root_cause;
use crate::telemetry::metrics::Metrics;

/// Most requests in progress.
const MAX_REQUESTS: usize = 8;
/// Values of the label `result` of the metric.
const RESULTS: [&str; 2] = ["sent", "failed"];
const USER_AGENT: &str = concat!("agentloop/", env!("CARGO_PKG_VERSION"));

/// How often the open gates are looked at, and how long requests and the waits between them last.
#[derive(Clone, Copy, Debug)]
pub struct WebhookTimes {
    pub look: Duration,
    /// Time limit of one request.
    pub request: Duration,
    /// The first and the longest wait between two attempts.
    pub waits: (Duration, Duration),
}

impl Default for WebhookTimes {
    fn default() -> Self {
        Self {
            look: Duration::from_secs(1),
            request: Duration::from_secs(10),
            waits: (Duration::from_secs(1), Duration::from_mins(5)),
        }
    }
}

/// The receiver of announcements, and how they are signed.
#[derive(Clone)]
pub struct GateWebhook {
    url: Url,
    signer: WebhookSigner,
    client: Client,
    times: WebhookTimes,
}

impl std::fmt::Debug for GateWebhook {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "GateWebhook({})", self.receiver())
    }
}

impl GateWebhook {
    /// A webhook to this URL, signed with the key in `secret`; or what is wrong with them.
    pub fn new(url: &str, secret: &[u8], times: WebhookTimes) -> Result<Self, String> {
        let url: Url = url.parse().map_err(|_| "the URL is malformed".to_owned())?;
        if !["http", "https"].contains(&url.scheme()) || url.host_str().is_none() {
            return Err("the URL must start with https:// or http://".into());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the URL must not contain credentials: requests are signed".into());
        }
        let signer = WebhookSigner::new(secret).map_err(|why| format!("the secret {why}"))?;
        let client = Client::builder()
            .user_agent(USER_AGENT)
            .redirect(reqwest::redirect::Policy::none())
            .timeout(times.request);
        // Plain HTTP needs no roots, and none may be installed.
        let client = if url.scheme() == "https" {
            client
        } else {
            client.tls_certs_only([])
        };
        let client = client
            .build()
            .map_err(|error| format!("no client can be built: {}", root_cause(&error)))?;
        Ok(Self {
            url,
            signer,
            client,
            times,
        })
    }

    /// Announces gates until `stop`. Those that are open at the start are announced, since nothing says which of them a
    /// former leader has.
    pub async fn run(
        self,
        agents: Arc<OnceLock<AgentsView>>,
        metrics: Arc<Metrics>,
        clock: WallClock,
        stop: CancellationToken,
    ) {
        let mut announcements = GateAnnouncements::new(self.times.waits);
        let mut requests = FuturesUnordered::new();
        let mut look = interval(self.times.look);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some((key, sent)) = requests.next() => {
                    announcements.finish(&key, sent, jitter(), Instant::now(), clock());
                }
                _ = look.tick() => {
                    let Some(agents) = agents.get() else { continue };
                    let mut open = std::collections::BTreeMap::new();
                    agents.for_each(|agent| open.extend(open_gates(agent)));
                    announcements.observe(open, Instant::now(), clock());
                }
            }
            let free = MAX_REQUESTS.saturating_sub(requests.len());
            for due in announcements.take_due(free, Instant::now(), clock()) {
                requests.push(self.announce(due, &metrics, &clock));
            }
        }
    }

    async fn announce(&self, due: DueAnnouncement, metrics: &Metrics, clock: &WallClock) -> (GateKey, bool) {
        let failure = self.send(&due, clock).await.err();
        let result = RESULTS[usize::from(failure.is_some())];
        let change: &str = due.change.into();
        metrics.gate_webhooks.with_label_values(&[change, result]).inc();
        let receiver = self.receiver();
        match &failure {
            None => tracing::debug!(id = due.id, receiver, "sent a webhook about a gate"),
            Some(error) if due.attempts == 0 => {
                tracing::warn!(
                    id = due.id,
                    receiver,
                    error,
                    "failed to send a webhook about a gate; retrying"
                );
            }
            Some(error) => tracing::debug!(id = due.id, receiver, error, attempts = due.attempts, "failed again"),
        }
        (due.key, failure.is_none())
    }

    async fn send(&self, due: &DueAnnouncement, clock: &WallClock) -> Result<(), String> {
        let mut request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json");
        for (name, value) in self.signer.headers(&due.id, due.body.as_bytes(), clock()) {
            request = request.header(name, value);
        }
        let response = request.body(due.body.clone()).send().await;
        let status = response.map_err(|error| root_cause(&error.without_url()))?.status();
        if status.is_success() {
            return Ok(());
        }
        Err(format!("status {}", status.as_u16()))
    }

    /// The receiver, without what may be a secret in its URL.
    fn receiver(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }
}

/// Exports all series of the webhook with 0 before the first announcement.
pub fn initialize_webhook_metrics(metrics: &Metrics) {
    for change in GateChange::iter() {
        for result in RESULTS {
            let _ = metrics.gate_webhooks.with_label_values(&[change.into(), result]);
        }
    }
}
