//! TLS to the database, with rustls: what the modes of libpq verify.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};

use super::error::TargetError;
use super::target::{DatabaseTarget, RootFile, TlsMode};

/// Makes TLS connections as a target requires.
#[derive(Clone)]
pub(crate) struct TlsConnector(Arc<ClientConfig>);

impl TlsConnector {
    /// Reads the CA of the target, which may have been replaced since the last connection.
    pub(crate) fn new(target: &DatabaseTarget) -> Result<Self, TargetError> {
        let provider = Arc::new(ring::default_provider());
        let roots = target.root.as_ref().map(roots).transpose()?;
        let verifier: Arc<dyn ServerCertVerifier> = match (target.tls, roots) {
            (TlsMode::VerifyFull, Some((roots, file))) => verifier(roots, &provider, file)?,
            // As for libpq, a CA turns `require` into `verify-ca`.
            (TlsMode::VerifyCa | TlsMode::Require, Some((roots, file))) => {
                Arc::new(AnyHost(verifier(roots, &provider, file)?))
            }
            (TlsMode::VerifyFull, None) => return Err(TargetError::NoRoot("verify-full")),
            (TlsMode::VerifyCa, None) => return Err(TargetError::NoRoot("verify-ca")),
            (TlsMode::Require, None) | (TlsMode::Prefer | TlsMode::Disable, _) => {
                Arc::new(AnyCertificate(provider.clone()))
            }
        };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| TargetError::Tls(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        Ok(Self(Arc::new(config)))
    }
}

fn roots(root: &RootFile) -> Result<(RootCertStore, &Path), TargetError> {
    let file = root.shown();
    let text = std::fs::read(&root.path).map_err(|error| TargetError::File {
        file: file.into(),
        error,
    })?;
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_slice_iter(&text).filter_map(Result::ok);
    if roots.add_parsable_certificates(certificates).0 == 0 {
        return Err(TargetError::NoCertificate(file.into()));
    }
    Ok((roots, file))
}

fn verifier(
    roots: RootCertStore,
    provider: &Arc<CryptoProvider>,
    file: &Path,
) -> Result<Arc<WebPkiServerVerifier>, TargetError> {
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|_| TargetError::NoCertificate(file.into()))
}

/// Accepts a certificate of the CA for any host: `verify-ca`.
#[derive(Debug)]
struct AnyHost(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyHost {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self
            .0
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match verified {
            // The name is checked last, once the chain is known to be valid.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Accepts any certificate whose key the server has: `prefer` and `require`, which protect from readers only.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// TLS to one host.
pub(crate) struct HostTls {
    connector: tokio_rustls::TlsConnector,
    host: ServerName<'static>,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for TlsConnector {
    type Stream = DatabaseStream<S>;
    type TlsConnect = HostTls;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<HostTls> {
        let host = ServerName::try_from(host.to_owned());
        Ok(HostTls {
            connector: self.0.clone().into(),
            host: host.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?,
        })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for HostTls {
    type Stream = DatabaseStream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<DatabaseStream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move { self.connector.connect(self.host, stream).await.map(DatabaseStream) })
    }
}

/// A TLS connection. Has no channel binding: `channel_binding=require` fails.
pub(crate) struct DatabaseStream<S>(tokio_rustls::client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for DatabaseStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for DatabaseStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for DatabaseStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
