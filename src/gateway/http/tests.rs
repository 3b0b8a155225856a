//! Tests with a TLS server on loopback and certificate authorities created by the tests.

use axum::Router;
use axum::routing::get;
use axum_server::tls_rustls::RustlsConfig;
use pretty_assertions::assert_eq;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::*;

struct TestAuthority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl TestAuthority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }
}

/// The URL of a server with a certificate of this authority.
async fn server(authority: &TestAuthority) -> Url {
    // Fails when another test was first; then it is there.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    let certificate = params.signed_by(&key, &authority.issuer).unwrap();
    let tls = RustlsConfig::from_pem(certificate.pem().into_bytes(), key.serialize_pem().into_bytes());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    let server = axum_server::from_tcp_rustls(listener, tls.await.unwrap()).unwrap();
    let app = Router::new().route("/", get(|| async { "hello" }));
    tokio::spawn(async move { server.serve(app.into_make_service()).await.unwrap() });
    url.parse().unwrap()
}

fn policy() -> Arc<AddressPolicy> {
    Arc::new(AddressPolicy::of_agents(
        vec!["127.0.0.0/8".parse().unwrap()],
        vec![],
        true,
    ))
}

/// A client that trusts the file `ca.crt` of the directory.
fn trusting(url: &Url, dir: &TempDir) -> ServerClient {
    let roots = MountedRoots::new(dir.path(), "spec.model");
    ServerClient::new(url, &policy(), Some(roots)).unwrap()
}

fn write(dir: &TempDir, pem: &str) {
    std::fs::write(dir.path().join("ca.crt"), pem).unwrap();
}

/// What a request leads to: the answer, or the cause. Its connection stays open, and the next request must not use it if the
/// certificates have changed. The authorities of the tests have the same name, so that the cause of a rejected certificate is
/// its signature; those of others have an unknown issuer.
async fn ask(client: &ServerClient, url: &Url) -> Result<String, String> {
    let answer = client
        .get()?
        .get(url.clone())
        .send()
        .await
        .map_err(|error| cause(&error))?;
    Ok(answer.text().await.unwrap())
}

const REJECTED: &str = "invalid peer certificate: BadSignature";

#[tokio::test]
async fn a_server_is_trusted_by_its_own_authority_only_and_a_changed_one_is_used_at_once() {
    let (right, wrong) = (TestAuthority::new(), TestAuthority::new());
    let url = server(&right).await;
    let dir = tempfile::tempdir().unwrap();
    let client = trusting(&url, &dir);
    for (pem, expected) in [
        (wrong.pem.clone(), Err(REJECTED.to_owned())),
        (right.pem.clone(), Ok("hello".to_owned())),
        (wrong.pem.clone(), Err(REJECTED.to_owned())),
        // Both, as during the rotation of an authority.
        (format!("{}{}", wrong.pem, right.pem), Ok("hello".to_owned())),
    ] {
        write(&dir, &pem);
        assert_eq!(ask(&client, &url).await, expected);
    }
}

#[tokio::test]
async fn unchanged_certificates_keep_the_client_and_its_connections() {
    let authority = TestAuthority::new();
    let url = server(&authority).await;
    let dir = tempfile::tempdir().unwrap();
    write(&dir, &authority.pem);
    let ServerClient::Trusting(client) = trusting(&url, &dir) else {
        panic!("a client without certificates");
    };
    let made_from = || client.made.lock().unwrap().as_ref().map(|(pem, _)| pem.as_ptr());
    client.get().unwrap();
    let first = made_from();
    client.get().unwrap();
    assert_eq!(made_from(), first, "no other client was made");
}

#[tokio::test]
async fn without_usable_certificates_no_request_is_sent_and_the_field_is_named() {
    let authority = TestAuthority::new();
    let url = server(&authority).await;
    let dir = tempfile::tempdir().unwrap();
    let client = trusting(&url, &dir);
    let secret = "the Secret of spec.model.tls.caSecretRef";
    let refused = |what: &str| Err(format!("{secret} {what}; correct the Secret"));
    assert_eq!(ask(&client, &url).await, refused("has no key ca.crt"));
    write(&dir, &authority.pem);
    assert_eq!(ask(&client, &url).await, Ok("hello".to_owned()));
    let not_a_certificate = "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n";
    for (pem, what) in [
        ("", "has no PEM certificate in ca.crt"),
        ("canary", "has no PEM certificate in ca.crt"),
        (not_a_certificate, "has a certificate in ca.crt that cannot be read"),
    ] {
        write(&dir, pem);
        assert_eq!(
            ask(&client, &url).await,
            refused(what),
            "the former client is not used instead"
        );
    }
}

#[test]
fn a_denied_address_is_denied_with_certificates_too() {
    let dir = tempfile::tempdir().unwrap();
    let roots = MountedRoots::new(dir.path(), "spec.model");
    let closed = Arc::new(AddressPolicy::of_agents(
        vec![],
        vec!["192.0.2.0/24".parse().unwrap()],
        true,
    ));
    let denied = ServerClient::new(&"https://192.0.2.1/".parse().unwrap(), &closed, Some(roots));
    assert!(denied.is_err());
}

#[test]
fn only_a_rejected_certificate_leads_to_the_field() {
    assert_eq!(
        tls_advice(REJECTED, "spec.lightModel"),
        "; check spec.lightModel.tls.caSecretRef"
    );
    assert_eq!(tls_advice("connection refused", "spec.model"), "");
}
