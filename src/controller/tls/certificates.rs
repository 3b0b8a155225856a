//! Keeps the authorities of the link in a Secret, and renews its server certificate.
//!
//! The Secret is written with its resource version as a precondition: of two controllers one wins, and the other reads
//! what it wrote. The rules of the rotation are in [`ca`](crate::controller::tls::ca).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum_server::tls_rustls::RustlsConfig;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::controller::runtime::WallClock;
use crate::controller::tls::ca::{CertificateAuthority, ServerCertificate, TrustedAuthorities};

/// Name of the Secret with the authorities.
pub const CA_SECRET: &str = "agentloop-link-ca";
/// Key with the authorities and their private keys.
const AUTHORITIES_KEY: &str = "authorities.json";
/// Key with the published bundle, for users.
const BUNDLE_KEY: &str = "ca.crt";
/// Interval between two checks.
const CHECK_EVERY: Duration = Duration::from_hours(1);
/// How often the clock is looked at. Reads no API.
const CLOCK_LOOK: Duration = Duration::from_secs(30);
/// A clock that moved by this much more or less than the elapsed time was set: certificates are checked then.
const CLOCK_STEP: SignedDuration = SignedDuration::from_mins(5);
/// Delay after a failed check.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(30);
/// Maximum number of attempts to write after conflicts.
const MAX_CONFLICTS: u32 = 5;

/// Why the certificates could not be created, read or renewed.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Debug)]
pub enum LinkCertificateError {
    /// The API server rejected the request or did not respond.
    #[error("Secret {CA_SECRET}: {0}")]
    Api(#[from] kube::Error),
    /// The content of the Secret is invalid.
    #[error(
        "Secret {CA_SECRET} is invalid (key {AUTHORITIES_KEY}): delete it to create a new authority, which pods trust \
         within two minutes"
    )]
    Unreadable,
    /// Other writers changed the Secret during every attempt.
    #[error("Secret {CA_SECRET}: {MAX_CONFLICTS} consecutive writes had a conflict")]
    Conflicts,
    /// A certificate could not be created.
    #[error("failed to create a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// A certificate could not be loaded.
    #[error("failed to load a certificate: {0}")]
    Tls(#[from] rustls::Error),
}

/// The authorities and the [`ServerCertificate`] of the link.
pub struct LinkCertificates {
    secrets: Api<Secret>,
    hosts: Vec<String>,
    clock: WallClock,
    leaf: ServerCertificate,
    tls: RustlsConfig,
    bundle: watch::Sender<String>,
}

impl LinkCertificates {
    /// Reads or creates the authorities, and creates a [`ServerCertificate`] for `hosts`.
    pub async fn start(
        client: Client,
        namespace: &str,
        hosts: Vec<String>,
        clock: WallClock,
    ) -> Result<Self, LinkCertificateError> {
        let secrets = Api::namespaced(client, namespace);
        let now = clock();
        let authorities = advance(&secrets, now).await?;
        let leaf = signer(&authorities, now)?.sign(&hosts, now)?;
        Ok(Self {
            tls: RustlsConfig::from_config(server_config(&leaf)?),
            bundle: watch::Sender::new(authorities.bundle()),
            secrets,
            hosts,
            clock,
            leaf,
        })
    }

    /// The TLS configuration. It is replaced in place when the certificate is renewed.
    #[must_use]
    pub fn tls(&self) -> RustlsConfig {
        self.tls.clone()
    }

    /// The bundle that pods must trust, with its later changes.
    #[must_use]
    pub fn bundle(&self) -> watch::Receiver<String> {
        self.bundle.subscribe()
    }

    /// Checks the certificates every hour until `stop`. `published`: the bundle that each publisher has published
    /// everywhere.
    pub async fn maintain(mut self, published: Vec<watch::Receiver<String>>, stop: CancellationToken) {
        let (mut pause, clock) = (Duration::ZERO, self.clock.clone());
        while stop.run_until_cancelled(wait(pause, &clock)).await.is_some() {
            pause = match self.refresh(&published).await {
                Ok(()) => CHECK_EVERY,
                Err(error) => {
                    tracing::warn!(%error, "failed to check the link's certificates; retrying in 30 s");
                    RETRY_AFTER
                }
            };
        }
    }

    /// One check: authorities, bundle, record of the publication, [`ServerCertificate`].
    pub async fn refresh(&mut self, published: &[watch::Receiver<String>]) -> Result<(), LinkCertificateError> {
        let now = (self.clock)();
        let authorities = advance(&self.secrets, now).await?;
        let bundle = authorities.bundle();
        self.bundle.send_if_modified(|old| {
            let new = *old != bundle;
            old.clone_from(&bundle);
            new
        });
        // Recorded only after every namespace has the bundle, so that no pod meets a certificate that it cannot verify.
        let everywhere = published.iter().all(|published| *published.borrow() == bundle);
        let authorities = update(&self.secrets, |authorities| {
            Ok(authorities.note_published(now, everywhere))
        })
        .await?;
        let signer = signer(&authorities, now)?;
        if self.leaf.is_due(signer, now) {
            self.leaf = signer.sign(&self.hosts, now)?;
            self.tls.reload_from_config(server_config(&self.leaf)?);
            tracing::info!("renewed the server certificate of the link");
        }
        Ok(())
    }
}

/// Waits for this long, or until the clock was set: what was made by a wrong clock is not to last until the next look.
pub(super) async fn wait(pause: Duration, clock: &WallClock) {
    let (start, began) = (Instant::now(), clock());
    while start.elapsed() < pause {
        tokio::time::sleep(CLOCK_LOOK.min(pause.saturating_sub(start.elapsed()))).await;
        let passed = SignedDuration::try_from(start.elapsed()).unwrap_or(SignedDuration::MAX);
        if clock().duration_since(began).saturating_sub(passed).abs() > CLOCK_STEP {
            return;
        }
    }
}

async fn advance(secrets: &Api<Secret>, now: Timestamp) -> Result<TrustedAuthorities, LinkCertificateError> {
    update(secrets, |authorities| {
        Ok(authorities.advance(now, CertificateAuthority::make)?)
    })
    .await
}

pub(super) fn signer(
    authorities: &TrustedAuthorities,
    now: Timestamp,
) -> Result<&CertificateAuthority, LinkCertificateError> {
    authorities.signer(now).ok_or(LinkCertificateError::Unreadable)
}

/// Reads the authorities, applies `change`, and writes them if `change` returns true. Retries after a conflict.
async fn update(
    secrets: &Api<Secret>,
    mut change: impl FnMut(&mut TrustedAuthorities) -> Result<bool, LinkCertificateError>,
) -> Result<TrustedAuthorities, LinkCertificateError> {
    for _ in 0..MAX_CONFLICTS {
        let stored = secrets.get_opt(CA_SECRET).await?;
        let mut authorities = stored
            .as_ref()
            .map_or_else(|| Ok(TrustedAuthorities::default()), read)?;
        if !change(&mut authorities)? {
            return Ok(authorities);
        }
        let version = stored.and_then(|secret| secret.metadata.resource_version);
        let secret = secret(&authorities, version.clone())?;
        let written = match version {
            None => secrets.create(&PostParams::default(), &secret).await,
            Some(_) => secrets.replace(CA_SECRET, &PostParams::default(), &secret).await,
        };
        match written {
            Ok(_) => return Ok(authorities),
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(LinkCertificateError::Conflicts)
}

pub(super) fn read(secret: &Secret) -> Result<TrustedAuthorities, LinkCertificateError> {
    let stored = secret.data.as_ref().and_then(|data| data.get(AUTHORITIES_KEY));
    stored
        .and_then(|bytes| serde_json::from_slice(&bytes.0).ok())
        .ok_or(LinkCertificateError::Unreadable)
}

fn secret(authorities: &TrustedAuthorities, resource_version: Option<String>) -> Result<Secret, LinkCertificateError> {
    let stored = serde_json::to_vec(authorities).map_err(|_| LinkCertificateError::Unreadable)?;
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(CA_SECRET.into()),
            resource_version,
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([
            (AUTHORITIES_KEY.into(), ByteString(stored)),
            (BUNDLE_KEY.into(), ByteString(authorities.bundle().into_bytes())),
        ])),
        ..Secret::default()
    })
}

/// TLS 1.3 and HTTP/1.1 only: gateways and sensor pods are part of agentloop, and browsers and Prometheus have had both for years.
pub fn server_config(leaf: &ServerCertificate) -> Result<Arc<ServerConfig>, rustls::Error> {
    let chain = vec![CertificateDer::from(leaf.certificate.clone())];
    let key = PrivatePkcs8KeyDer::from(leaf.key.clone());
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key.into())?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A clock that is ahead of the time that has passed by what is set.
    fn clock(offset: &Arc<Mutex<SignedDuration>>) -> WallClock {
        let (start, offset) = (Instant::now(), offset.clone());
        Arc::new(move || {
            let passed = SignedDuration::try_from(start.elapsed()).unwrap();
            Timestamp::constant(1_900_000_000, 0) + passed + *offset.lock().unwrap()
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_ends_the_wait_and_one_that_drifts_does_not() {
        for (step, waits) in [
            (SignedDuration::ZERO, true),
            (CLOCK_STEP, true),
            (-CLOCK_STEP, true),
            (CLOCK_STEP + SignedDuration::from_secs(1), false),
            (-CLOCK_STEP - SignedDuration::from_secs(1), false),
        ] {
            let offset = Arc::default();
            let clock = clock(&offset);
            let start = Instant::now();
            let set = async {
                tokio::time::sleep(Duration::from_secs(100)).await;
                *offset.lock().unwrap() = step;
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = wait(CHECK_EVERY, &clock) => {}
                () = set => {}
            }
            let expected = if waits { CHECK_EVERY } else { Duration::from_mins(2) };
            assert_eq!(start.elapsed(), expected, "{step}");
            // After a step the next wait is a whole one again.
            let start = Instant::now();
            wait(CHECK_EVERY, &clock).await;
            assert_eq!(start.elapsed(), CHECK_EVERY);
        }
    }
}
