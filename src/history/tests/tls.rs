//! Tests of the modes of TLS, with a real Postgres.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rstest::rstest;

use super::postgres::Postgres;
use super::{WATCHER, batch};
use crate::{HistoryError, HistoryStore};

/// Writes the certificate of a server for `localhost` and of its CA, and another CA.
fn certificates(dir: &Path) -> Vec<String> {
    let authority = |name: &str| {
        let mut of = rcgen::CertificateParams::new(Vec::new()).unwrap();
        of.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        of.distinguished_name.push(rcgen::DnType::CommonName, name);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = of.self_signed(&key).unwrap();
        std::fs::write(dir.join(format!("{name}.crt")), certificate.pem()).unwrap();
        rcgen::Issuer::new(of, key)
    };
    let ours = authority("ca");
    authority("other");
    let key = rcgen::KeyPair::generate().unwrap();
    let of = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = of.signed_by(&key, &ours).unwrap();
    std::fs::write(dir.join("server.crt"), certificate.pem()).unwrap();
    let key_file = dir.join("server.key");
    std::fs::write(&key_file, key.serialize_pem()).unwrap();
    std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let file = |name: &str| dir.join(name).display().to_string();
    vec![
        "ssl=on".into(),
        format!("ssl_cert_file={}", file("server.crt")),
        format!("ssl_key_file={}", file("server.key")),
    ]
}

async fn connect(postgres: &Postgres, host: &str, settings: &str, ca: Option<&str>) -> Result<(), HistoryError> {
    let file = postgres.file_with(settings);
    let text = std::fs::read_to_string(&file).unwrap().replace("localhost", host);
    std::fs::write(&file, text).unwrap();
    let store = HistoryStore::new(file, ca.map(|name| postgres.path().join(name)))?;
    store.store(&WATCHER, &batch(0, 4)).await.map(drop)
}

#[tokio::test]
async fn each_mode_verifies_what_it_promises() {
    let postgres = Postgres::with(certificates);
    // Mode, host, CA; what is said if it fails.
    let cases = [
        ("verify-full", "localhost", Some("ca.crt"), None),
        ("verify-full", "127.0.0.1", Some("ca.crt"), Some("not valid for name")),
        ("verify-full", "localhost", Some("other.crt"), Some("UnknownIssuer")),
        ("verify-ca", "127.0.0.1", Some("ca.crt"), None),
        ("verify-ca", "localhost", Some("other.crt"), Some("UnknownIssuer")),
        ("require", "127.0.0.1", None, None),
        ("require", "127.0.0.1", Some("ca.crt"), None),
        ("require", "localhost", Some("other.crt"), Some("UnknownIssuer")),
        ("prefer", "127.0.0.1", None, None),
        ("disable", "127.0.0.1", None, None),
    ];
    for (mode, host, ca, problem) in cases {
        let connected = connect(&postgres, host, &format!("sslmode={mode}"), ca).await;
        match problem {
            None => connected.unwrap_or_else(|error| panic!("{mode} {host} {ca:?}: {error}")),
            Some(words) => {
                let error = connected.unwrap_err().to_string();
                assert!(
                    error.contains(words) && !error.contains("canary"),
                    "{mode} {host} {ca:?}: {error}"
                );
            }
        }
    }
    let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl";
    let file = postgres.file_with("sslmode=require");
    let store = HistoryStore::new(file, None).unwrap();
    let _ = store.store(&WATCHER, &batch(0, 4)).await.unwrap();
    assert_eq!(postgres.number(encrypted).await, 1, "the idle connection of the store");
}

#[rstest]
#[case::prefer("prefer", None)]
#[case::require("require", Some("server does not support TLS"))]
#[case::channel_binding("prefer&channel_binding=require", Some("no TLS"))]
#[tokio::test]
async fn a_server_without_tls_is_used_only_if_the_mode_allows_it(#[case] mode: &str, #[case] problem: Option<&str>) {
    let postgres = Postgres::start();
    let connected = connect(&postgres, "127.0.0.1", &format!("sslmode={mode}"), None).await;
    match problem {
        None => connected.unwrap(),
        Some(words) => {
            let error = connected.unwrap_err().to_string();
            assert!(words == "no TLS" || error.contains(words), "{error}");
        }
    }
}

#[tokio::test]
async fn a_ca_file_without_a_certificate_is_noticed_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let (file, ca) = (dir.path().join("connection"), dir.path().join("ca.crt"));
    std::fs::write(&file, "host=localhost sslmode=verify-full").unwrap();
    for text in ["", "no certificate"] {
        std::fs::write(&ca, text).unwrap();
        let error = HistoryStore::new(file.clone(), Some(ca.clone()))
            .map(|_| ())
            .unwrap_err();
        assert!(error.to_string().contains("has no CA certificate"), "{error}");
    }
}
