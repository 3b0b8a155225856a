//! Keeps the link's authorities in a Secret and its server certificate fresh.
//!
//! The Secret is written by compare-and-set: of two controllers one wins, the other reads what the winner wrote. The
//! rules of change are in [`ca`](super::ca).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum_server::tls_rustls::RustlsConfig;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::agent::WallClock;
use super::ca::{CertificateAuthority, ServerCertificate, TrustedAuthorities};

/// Name of the Secret.
pub const CA_SECRET: &str = "agentloop-link-ca";
/// Key of the authorities, with their private keys.
const AUTHORITIES_KEY: &str = "authorities.json";
/// Key of the published bundle, for people to look at.
const BUNDLE_KEY: &str = "ca.crt";
/// How often the certificates are looked at.
const CHECK_EVERY: Duration = Duration::from_hours(1);
/// How soon after a failure.
const RETRY_AFTER: Duration = Duration::from_secs(30);
/// How often a write that lost a race is tried again at once.
const MAX_CONFLICTS: u32 = 5;

/// Why the certificates could not be looked after.
#[derive(thiserror::Error, Debug)]
pub enum LinkCertificateError {
    /// The API server refused, or did not answer.
    #[error("Secret {CA_SECRET}: {0}")]
    Api(#[from] kube::Error),
    /// Somebody changed the Secret.
    #[error(
        "Secret {CA_SECRET} cannot be read (key {AUTHORITIES_KEY}); delete it, and a new authority is made: pods then need up to two minutes to trust it"
    )]
    Unreadable,
    /// Others wrote it again and again.
    #[error("Secret {CA_SECRET}: {MAX_CONFLICTS} writes in a row lost a race")]
    Conflicts,
    /// A certificate could not be made.
    #[error("making a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// A certificate could not be used.
    #[error("using a certificate: {0}")]
    Tls(#[from] rustls::Error),
}

/// The link's certificates.
pub struct LinkCertificates {
    secrets: Api<Secret>,
    hosts: Vec<String>,
    clock: WallClock,
    leaf: ServerCertificate,
    tls: RustlsConfig,
    bundle: watch::Sender<String>,
}

impl LinkCertificates {
    /// Reads or makes the authorities, and makes a server certificate for `hosts`.
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

    /// The TLS configuration; it changes under its users when a certificate is renewed.
    #[must_use]
    pub fn tls(&self) -> RustlsConfig {
        self.tls.clone()
    }

    /// The bundle that pods must trust, now and later.
    #[must_use]
    pub fn bundle(&self) -> watch::Receiver<String> {
        self.bundle.subscribe()
    }

    /// Looks after the certificates until `stop`. `published`: the bundles that those have published who do so.
    pub async fn maintain(mut self, published: Vec<watch::Receiver<String>>, stop: CancellationToken) {
        let mut pause = Duration::ZERO;
        while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            pause = match self.refresh(&published).await {
                Ok(()) => CHECK_EVERY,
                Err(error) => {
                    tracing::warn!(%error, "the link's certificates could not be checked; trying again in 30 s");
                    RETRY_AFTER
                }
            };
        }
    }

    /// One look: authorities, bundle, note of its publication, server certificate.
    pub async fn refresh(&mut self, published: &[watch::Receiver<String>]) -> Result<(), LinkCertificateError> {
        let now = (self.clock)();
        let authorities = advance(&self.secrets, now).await?;
        let bundle = authorities.bundle();
        self.bundle.send_if_modified(|old| {
            let new = *old != bundle;
            old.clone_from(&bundle);
            new
        });
        // Noted only once every namespace has it, so that no pod meets a certificate that it cannot check.
        let everywhere = published.iter().all(|published| *published.borrow() == bundle);
        let authorities = update(&self.secrets, |authorities| {
            Ok(authorities.note_published(now, everywhere))
        })
        .await?;
        let signer = signer(&authorities, now)?;
        if self.leaf.is_due(signer, now) {
            self.leaf = signer.sign(&self.hosts, now)?;
            self.tls.reload_from_config(server_config(&self.leaf)?);
            tracing::info!("the link has a new server certificate");
        }
        Ok(())
    }
}

async fn advance(secrets: &Api<Secret>, now: Timestamp) -> Result<TrustedAuthorities, LinkCertificateError> {
    update(secrets, |authorities| {
        Ok(authorities.advance(now, CertificateAuthority::make)?)
    })
    .await
}

fn signer(authorities: &TrustedAuthorities, now: Timestamp) -> Result<&CertificateAuthority, LinkCertificateError> {
    authorities.signer(now).ok_or(LinkCertificateError::Unreadable)
}

/// Reads the authorities, applies `change`, and writes them when it says that something changed.
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

fn read(secret: &Secret) -> Result<TrustedAuthorities, LinkCertificateError> {
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

/// TLS 1.3 and HTTP/1.1 only: both ends are ours.
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
