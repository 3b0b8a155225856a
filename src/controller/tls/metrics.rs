//! The certificate with which every replica serves /metrics if readers must present a token, and what they trust.
//!
//! It is signed by the authorities of the link. Only the leader creates and rotates those; a replica reads them. The leader
//! publishes their certificates, without the keys, in a ConfigMap of the namespace of the release.

use std::convert::Infallible;
use std::time::Duration;

use axum_server::tls_rustls::RustlsConfig;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::controller::process::retry;
use crate::controller::runtime::WallClock;
use crate::controller::runtime::namespace_objects::publish_bundle;
use crate::controller::tls::ca::{ServerCertificate, TrustedAuthorities};
use crate::controller::tls::certificates::{
    CA_SECRET, LinkCertificateError, RETRY_AFTER, read, server_config, signer, wait,
};

/// Name of the ConfigMap with the certificates of the authorities.
pub const METRICS_CA_CONFIGMAP: &str = "agentloop-metrics-ca";
/// Interval between two looks at the authorities: when the leader replaces a lost Secret, readers trust the new one at once.
const LOOK: Duration = Duration::from_mins(1);
/// The same while no leader has created them.
const FIRST_LOOK: Duration = Duration::from_secs(1);
/// Interval between two looks at the ConfigMap, which may be deleted.
const PUBLISH_AGAIN: Duration = Duration::from_mins(10);

/// The [`ServerCertificate`] of /metrics.
pub struct MetricsCertificate {
    secrets: Api<Secret>,
    hosts: Vec<String>,
    clock: WallClock,
    leaf: ServerCertificate,
    tls: RustlsConfig,
}

impl MetricsCertificate {
    /// Creates one for `hosts`, once there are authorities.
    pub async fn obtain(client: Client, namespace: &str, hosts: Vec<String>, clock: WallClock) -> Self {
        let secrets = Api::namespaced(client, namespace);
        loop {
            let leaf = retry("prepare the certificate of /metrics", async || {
                let Some(authorities) = authorities(&secrets).await? else {
                    return Ok(None);
                };
                let now = clock();
                let leaf = signer(&authorities, now)?.sign(&hosts, now)?;
                let config = server_config(&leaf)?;
                Ok::<_, LinkCertificateError>(Some((leaf, RustlsConfig::from_config(config))))
            });
            let leaf = leaf.await;
            if let Some((leaf, tls)) = leaf {
                return Self {
                    secrets,
                    hosts,
                    clock,
                    leaf,
                    tls,
                };
            }
            tokio::time::sleep(FIRST_LOOK).await;
        }
    }

    /// The TLS configuration. It is replaced in place when the certificate is renewed.
    #[must_use]
    pub fn tls(&self) -> RustlsConfig {
        self.tls.clone()
    }

    /// Renews the certificate before it expires, and when another authority signs.
    pub async fn maintain(mut self) -> Infallible {
        let (mut pause, clock) = (LOOK, self.clock.clone());
        loop {
            wait(pause, &clock).await;
            pause = match self.refresh().await {
                Ok(()) => LOOK,
                Err(error) => {
                    tracing::warn!(%error, "failed to check the certificate of /metrics; retrying in 30 s");
                    RETRY_AFTER
                }
            };
        }
    }

    /// One check. Without authorities, the certificate remains until the leader has created new ones.
    async fn refresh(&mut self) -> Result<(), LinkCertificateError> {
        let Some(authorities) = authorities(&self.secrets).await? else {
            return Ok(());
        };
        let now = (self.clock)();
        let signer = signer(&authorities, now)?;
        if self.leaf.is_due(signer, now) {
            self.leaf = signer.sign(&self.hosts, now)?;
            self.tls.reload_from_config(server_config(&self.leaf)?);
            tracing::info!("renewed the certificate of /metrics");
        }
        Ok(())
    }
}

async fn authorities(secrets: &Api<Secret>) -> Result<Option<TrustedAuthorities>, LinkCertificateError> {
    secrets.get_opt(CA_SECRET).await?.as_ref().map(read).transpose()
}

/// Publishes what readers of /metrics trust.
pub(in crate::controller) struct MetricsCaPublisher {
    pub(in crate::controller) client: Client,
    /// Namespace of the controller.
    pub(in crate::controller) namespace: String,
    pub(in crate::controller) bundle: watch::Receiver<String>,
    /// Receives the bundle that is published: no authority signs before.
    pub(in crate::controller) published: watch::Sender<String>,
}

impl MetricsCaPublisher {
    /// Publishes the bundle until `stop`: when it changes, and every 10 minutes in case it was deleted.
    pub(in crate::controller) async fn run(mut self, stop: CancellationToken) {
        while let Some(pause) = stop.run_until_cancelled(self.publish()).await {
            let changed = async {
                if self.bundle.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = changed => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Returns the time until the next attempt.
    async fn publish(&mut self) -> Duration {
        let bundle = self.bundle.borrow_and_update().clone();
        match publish_bundle(&self.client, (&self.namespace, METRICS_CA_CONFIGMAP), &bundle).await {
            Ok(None) => {
                self.published.send_replace(bundle);
                return PUBLISH_AGAIN;
            }
            Ok(Some(taken)) => tracing::warn!(taken, "failed to publish the CA of /metrics; retrying"),
            Err(error) => tracing::warn!(%error, "failed to publish the CA of /metrics; retrying"),
        }
        RETRY_AFTER
    }
}
