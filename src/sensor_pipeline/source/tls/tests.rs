//! Tests with a TLS server on loopback and certificate authorities created by the tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::http::StatusCode;
use axum::response::Redirect;
use axum::routing::get;
use axum_server::tls_rustls::RustlsConfig;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::*;
use crate::source::http::{CachedClient, SourceTarget, unreachable};
use agentloop_egress::AddressPolicy;

struct Authority {
    pem: String,
    der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        Self {
            pem: certificate.pem(),
            der: certificate.der().clone(),
            issuer: Issuer::new(params, key),
        }
    }

    fn sign(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.into()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    /// The directory of a Secret with this authority.
    fn ca_dir(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.crt"), &self.pem).unwrap();
        dir
    }

    /// The directory of a Secret with a certificate of this authority.
    fn certificate_dir(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let (certificate, key) = self.sign("sensor");
        std::fs::write(dir.path().join("tls.crt"), certificate.pem()).unwrap();
        std::fs::write(dir.path().join("tls.key"), key.serialize_pem()).unwrap();
        dir
    }
}

struct Server {
    url: String,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves with a certificate of `own`; requires client certificates of `of_clients`, if given.
fn server(own: &Authority, of_clients: Option<&Authority>) -> Server {
    serve(own, of_clients, Router::new().route("/", get(StatusCode::OK)))
}

fn serve(own: &Authority, of_clients: Option<&Authority>, app: Router) -> Server {
    // Fails when another test was first; then it is there.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (certificate, key) = own.sign("127.0.0.1");
    let key = PrivatePkcs8KeyDer::from(key.serialize_der());
    let builder = match of_clients {
        None => ServerConfig::builder().with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(authority.der.clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
            ServerConfig::builder().with_client_cert_verifier(verifier)
        }
    };
    let config = builder
        .with_single_cert(vec![certificate.der().clone()], key.into())
        .unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    let server = axum_server::from_tcp_rustls(listener, RustlsConfig::from_config(Arc::new(config))).unwrap();
    let task = tokio::spawn(async move { server.serve(app.into_make_service()).await.unwrap() });
    Server { url, task }
}

fn place(server: &Server, ca_dir: Option<&TempDir>, certificate_dir: Option<&TempDir>) -> SourceTarget {
    let path = |dir: &TempDir| dir.path().to_owned();
    SourceTarget {
        url: server.url.parse().unwrap(),
        headers_dir: None,
        tls: TlsFiles {
            ca_dir: ca_dir.map(path),
            certificate_dir: certificate_dir.map(path),
        },
        policy: Arc::new(AddressPolicy::new(vec!["127.0.0.0/8".parse().unwrap()], vec![])),
        max_bytes: 100,
    }
}

/// Sends a request over a new connection; `None`: it was answered.
async fn failure(clients: &mut CachedClient<'_>, server: &Server) -> Option<String> {
    let client = match clients.get() {
        Ok(client) => client,
        Err(failure) => return Some(failure.0),
    };
    let request = client.get(&server.url).header("connection", "close");
    request.send().await.err().map(|error| unreachable(&error).0)
}

#[tokio::test]
async fn only_a_server_of_the_named_authority_is_trusted_and_a_new_secret_is_used_at_once() {
    let (right, wrong) = (Authority::new(), Authority::new());
    let server = server(&right, None);
    let dir = wrong.ca_dir();
    let place = place(&server, Some(&dir), None);
    for mut clients in [place.clients(), place.clients_to_upgrade()] {
        std::fs::write(dir.path().join("ca.crt"), &wrong.pem).unwrap();
        let failed = failure(&mut clients, &server).await.unwrap();
        assert!(failed.starts_with("no answer: invalid peer certificate: "), "{failed}");
        assert!(failed.ends_with("; check tls.caSecretRef"), "{failed}");
        // Both, as while an authority is rotated.
        std::fs::write(dir.path().join("ca.crt"), format!("{}\n{}", wrong.pem, right.pem)).unwrap();
        assert_eq!(failure(&mut clients, &server).await, None);
        std::fs::write(dir.path().join("ca.crt"), &wrong.pem).unwrap();
        assert!(failure(&mut clients, &server).await.is_some());
    }
}

#[tokio::test]
async fn without_a_named_authority_the_systems_do_not_trust_this_one() {
    let server = server(&Authority::new(), None);
    let place = place(&server, None, None);
    assert!(failure(&mut place.clients(), &server).await.is_some());
}

#[tokio::test]
async fn a_server_that_requires_a_certificate_receives_that_of_the_secret() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = server(&authority, Some(&authority));
    let ca = authority.ca_dir();
    let (right, wrong) = (authority.certificate_dir(), other.certificate_dir());
    let with = |certificate| place(&server, Some(&ca), certificate);
    for (certificate, answers) in [(None, false), (Some(&wrong), false), (Some(&right), true)] {
        let place = with(certificate);
        let failed = failure(&mut place.clients(), &server).await;
        assert_eq!(failed.is_none(), answers, "{failed:?}");
    }
}

#[tokio::test]
async fn a_client_certificate_is_not_offered_where_a_redirect_leads_to_another_server() {
    let authority = Authority::new();
    let (ca, certificate) = (authority.ca_dir(), authority.certificate_dir());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let counted = get(move || {
        count.fetch_add(1, Ordering::SeqCst);
        async { StatusCode::OK }
    });
    let other = serve(&authority, None, Router::new().route("/", counted));
    let (there, here) = (other.url.clone(), Router::new().route("/here", get(StatusCode::OK)));
    let redirects = here
        .route("/", get(async || Redirect::temporary("/here")))
        .route("/away", get(async move || Redirect::temporary(&there)));
    let first = serve(&authority, None, redirects);
    let ask = async |certificate, path: &str| {
        let mut place = place(&first, Some(&ca), certificate);
        place.url = place.url.join(path).unwrap();
        let client = place.clients().get().unwrap();
        client
            .get(place.url.clone())
            .send()
            .await
            .err()
            .map(|error| unreachable(&error).0)
    };
    assert_eq!(ask(Some(&certificate), "/").await, None, "it leads to the same server");
    let failed = ask(Some(&certificate), "/away").await.unwrap();
    assert!(failed.contains("redirects to another host"), "{failed}");
    assert_eq!(asked.load(Ordering::SeqCst), 0);
    assert_eq!(ask(None, "/away").await, None, "there is nothing to give away");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_problem_with_a_secret_is_reported_with_its_field_and_recovers() {
    let authority = Authority::new();
    let server = server(&authority, None);
    let (ca, certificate) = (authority.ca_dir(), authority.certificate_dir());
    let place = place(&server, Some(&ca), Some(&certificate));
    let mut clients = place.clients();
    let key_of_another = KeyPair::generate().unwrap().serialize_pem();
    let cases = [
        (&ca, "ca.crt", None, "the Secret of tls.caSecretRef has no key ca.crt"),
        (
            &ca,
            "ca.crt",
            Some("hi"),
            "the Secret of tls.caSecretRef has no PEM certificate in ca.crt",
        ),
        (
            &certificate,
            "tls.key",
            None,
            "the Secret of tls.clientCertificateSecretRef has no key tls.key",
        ),
        (
            &certificate,
            "tls.key",
            Some("hi"),
            "the Secret of tls.clientCertificateSecretRef has no certificate in tls.crt, or no key in tls.key",
        ),
    ];
    for (dir, file, text, expected) in cases {
        let file = dir.path().join(file);
        let before = std::fs::read(&file).unwrap();
        match text {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        assert_eq!(failure(&mut clients, &server).await.as_deref(), Some(expected));
        std::fs::write(&file, before).unwrap();
        assert_eq!(failure(&mut clients, &server).await, None);
    }
    std::fs::write(certificate.path().join("tls.key"), key_of_another).unwrap();
    let failed = failure(&mut clients, &server).await.unwrap();
    assert!(failed.ends_with("; check tls.clientCertificateSecretRef"), "{failed}");
}

#[test]
fn only_what_a_spec_names_is_read() {
    let of = |tls: serde_json::Value| {
        let tls: Option<TlsSpec> = serde_json::from_value(tls).unwrap();
        TlsFiles::new(tls.as_ref(), Path::new("/ca"), Path::new("/certificate"))
    };
    let named = serde_json::json!({"name": "x"});
    assert_eq!(of(serde_json::Value::Null), TlsFiles::default());
    let both = of(serde_json::json!({"caSecretRef": named, "clientCertificateSecretRef": named}));
    assert_eq!(both.ca_dir.as_deref(), Some(Path::new("/ca")));
    assert_eq!(both.certificate_dir.as_deref(), Some(Path::new("/certificate")));
    let ca = of(serde_json::json!({"caSecretRef": named}));
    assert_eq!(ca.certificate_dir, None);
}
