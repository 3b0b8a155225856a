//! TLS settings of a source, from the files of its Secrets.

use std::path::{Path, PathBuf};

use reqwest::{Certificate, ClientBuilder, Identity};

use super::http::SourceError;
use agentloop_api::endpoint::{CERTIFICATE_KEY, PRIVATE_KEY_KEY, ROOTS_KEY, TlsSpec};

/// Where the Secrets that the spec's `tls` references are mounted; read for each connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Directory with `ca.crt`.
    pub ca_dir: Option<PathBuf>,
    /// Directory with `tls.crt` and `tls.key`.
    pub certificate_dir: Option<PathBuf>,
}

/// The contents of the files.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct TlsMaterial {
    roots: Option<Vec<u8>>,
    identity: Option<Vec<u8>>,
}

impl TlsFiles {
    /// The files for a spec whose Secrets are mounted in these directories.
    #[must_use]
    pub fn new(tls: Option<&TlsSpec>, ca_dir: &Path, certificate_dir: &Path) -> Self {
        let has_ca = tls.is_some_and(|tls| tls.ca_secret_ref.is_some());
        let has_certificate = tls.is_some_and(|tls| tls.client_certificate_secret_ref.is_some());
        Self {
            ca_dir: has_ca.then(|| ca_dir.to_owned()),
            certificate_dir: has_certificate.then(|| certificate_dir.to_owned()),
        }
    }

    pub(super) fn read(&self) -> Result<TlsMaterial, SourceError> {
        let roots = self.ca_dir.as_ref().map(|dir| read(dir, ROOTS_KEY, "caSecretRef"));
        let identity = self.certificate_dir.as_ref().map(|dir| {
            let certificate = read(dir, CERTIFICATE_KEY, "clientCertificateSecretRef")?;
            let key = read(dir, PRIVATE_KEY_KEY, "clientCertificateSecretRef")?;
            Ok([certificate, b"\n".to_vec(), key].concat())
        });
        Ok(TlsMaterial {
            roots: roots.transpose()?,
            identity: identity.transpose()?,
        })
    }
}

impl TlsMaterial {
    /// Configures TLS on a client builder.
    pub(super) fn apply(&self, builder: ClientBuilder, makes_tls: bool) -> Result<ClientBuilder, SourceError> {
        let builder = match &self.roots {
            Some(pem) => builder.tls_certs_only(roots(pem)?),
            // The system's roots, without which the client cannot be built.
            None if makes_tls => builder,
            None => builder.tls_certs_only([]),
        };
        let Some(pem) = &self.identity else {
            return Ok(builder);
        };
        let identity = Identity::from_pem(pem).map_err(|_| {
            wrong(
                "clientCertificateSecretRef",
                "has no certificate in tls.crt, or no key in tls.key",
            )
        })?;
        Ok(builder.identity(identity))
    }

    /// Whether a client certificate may be the reason that a client cannot be built.
    pub(super) fn has_identity(&self) -> bool {
        self.identity.is_some()
    }
}

/// The certificates of a PEM text; empty if there is none, or if the text is malformed.
#[must_use]
pub fn certificates(pem: &[u8]) -> Vec<Certificate> {
    Certificate::from_pem_bundle(pem).unwrap_or_default()
}

fn roots(pem: &[u8]) -> Result<Vec<Certificate>, SourceError> {
    let found = certificates(pem);
    if found.is_empty() {
        return Err(wrong("caSecretRef", "has no PEM certificate in ca.crt"));
    }
    Ok(found)
}

fn read(dir: &Path, file: &str, field: &str) -> Result<Vec<u8>, SourceError> {
    std::fs::read(dir.join(file)).map_err(|_| wrong(field, &format!("has no key {file}")))
}

fn wrong(field: &str, what: &str) -> SourceError {
    SourceError(format!("the Secret of tls.{field} {what}"))
}

#[cfg(test)]
mod tests;
