//! A WebSocket that Python's own library serves.

use std::path::Path;
use std::time::Duration;

use agentloop::sensor_pipeline::source::SourceFeed;
use agentloop::sensor_pipeline::source::web_socket::WebSocketListener;
use pretty_assertions::assert_eq;
use serde_json::json;
use tokio::process::{Child, Command};

use super::{next, place};
use crate::support::clusters::has;
use crate::support::ports::free_port;
use crate::tools::python::interpreter;

/// Serves numbers to who asks with the right header, in texts, bytes and fragments, and breaks off after every third; each
/// connection continues where the one before ended, since who listens cannot say it.
const SERVER: &str = r#"
import asyncio, json, ssl, sys
from websockets.asyncio.server import serve
count = 0
async def numbers(socket):
    global count
    if socket.request.headers.get("X-Token") != "t0ken" or json.loads(await socket.recv()) != {"op": "subscribe"}:
        await socket.close(1008, "who are you")
        return
    for form in ("text", "bytes", "fragments"):
        count += 1
        message = json.dumps({"n": count})
        await socket.send({"text": message, "bytes": message.encode(), "fragments": list(message)}[form])
    if count % 2:
        await socket.close(1012)
    else:
        socket.transport.abort()
async def main():
    tls = None
    if len(sys.argv) > 2:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=sys.argv[2] + "/ca.crt")
        tls.load_cert_chain(sys.argv[2] + "/tls.crt", sys.argv[2] + "/tls.key")
        tls.verify_mode = ssl.CERT_REQUIRED
    async with serve(numbers, "127.0.0.1", int(sys.argv[1]), ping_interval=0.2, ssl=tls):
        await asyncio.get_running_loop().create_future()
asyncio.run(main())
"#;

/// With a directory it makes TLS, and knows clients by certificates of the same authority.
fn server(tls: Option<&Path>) -> (Child, u16) {
    let port = free_port();
    let server = Command::new(interpreter("websocket-server/requirements.txt"))
        .args(["-c", SERVER, &port.to_string()])
        .args(tls)
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    (server, port)
}

fn listener(port: u16) -> WebSocketListener {
    WebSocketListener {
        place: place(&format!("http://127.0.0.1:{port}/")),
        subscribe: Some(r#"{"op": "subscribe"}"#.into()),
        idle: Duration::from_secs(10),
    }
}

#[tokio::test]
async fn a_python_web_socket_is_read_in_order_however_it_sends_and_ends() {
    if !has("python3") {
        return;
    }
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("X-Token"), "t0ken").unwrap();
    let (_server, port) = server(None);
    let mut listener = listener(port);
    listener.place.headers_dir = Some(secret.path().into());
    let (feed, mut arrivals) = SourceFeed::new();
    let task = tokio::spawn(listener.run(feed));
    for n in 1..=7 {
        let payload: serde_json::Value = serde_json::from_slice(&next(&mut arrivals).await.payload).unwrap();
        assert_eq!(payload, json!({"n": n}));
    }
    task.abort();
}

#[tokio::test]
async fn a_refusing_python_web_socket_is_reported_without_its_text() {
    if !has("python3") {
        return;
    }
    let (_server, port) = server(None);
    let (feed, _arrivals) = SourceFeed::new();
    let mut condition = feed.condition();
    let task = tokio::spawn(listener(port).run(feed));
    let closed = |said: &str| said.starts_with("the server closed");
    let failed = condition.wait_for(|condition| condition.failure.as_deref().is_some_and(closed));
    let failed = tokio::time::timeout(super::SOON, failed).await.unwrap().unwrap();
    let said = "the server closed the WebSocket with code 1008: policy violation; check headersSecretRef and subscribe";
    assert_eq!(failed.failure.as_deref(), Some(said));
    drop(failed);
    task.abort();
}

/// An authority and a certificate of it, for server and client, as files of a directory.
fn certificates(dir: &Path) {
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::new(vec![]).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    // Of the same name as its authority a certificate would count as signed by itself.
    ca.distinguished_name
        .push(rcgen::DnType::CommonName, "authority of the tests");
    // Newer Pythons insist on these.
    ca.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    std::fs::write(dir.join("ca.crt"), ca.self_signed(&ca_key).unwrap().pem()).unwrap();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let mut both = rcgen::CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    both.use_authority_key_identifier_extension = true;
    let certificate = both.signed_by(&key, &issuer).unwrap().pem();
    std::fs::write(dir.join("tls.crt"), certificate).unwrap();
    std::fs::write(dir.join("tls.key"), key.serialize_pem()).unwrap();
}

#[tokio::test]
async fn a_python_web_socket_with_client_certificates_is_read_with_the_secrets_only() {
    if !has("python3") {
        return;
    }
    let (tls, headers) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    certificates(tls.path());
    std::fs::write(headers.path().join("X-Token"), "t0ken").unwrap();
    let (_server, port) = server(Some(tls.path()));
    let mut listener = listener(port);
    listener.place.url.set_scheme("https").unwrap();
    listener.place.headers_dir = Some(headers.path().into());
    listener.place.tls.ca_dir = Some(tls.path().into());
    let without = listener.clone();
    listener.place.tls.certificate_dir = Some(tls.path().into());
    let (feed, mut arrivals) = SourceFeed::new();
    let task = tokio::spawn(listener.run(feed));
    let payload: serde_json::Value = serde_json::from_slice(&next(&mut arrivals).await.payload).unwrap();
    assert_eq!(payload, json!({"n": 1}));
    task.abort();

    let (feed, mut arrivals) = SourceFeed::new();
    let mut condition = feed.condition();
    let task = tokio::spawn(without.run(feed));
    let failed = condition.wait_for(|condition| condition.consecutive_failures >= 2);
    drop(tokio::time::timeout(super::SOON, failed).await.unwrap().unwrap());
    assert!(arrivals.try_recv().is_err());
    task.abort();
}
