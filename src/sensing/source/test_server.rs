//! What the tests of streams share: a server on loopback whose answers they write byte by byte.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::http::SourceTarget;
use super::tls::TlsFiles;
use super::{ArrivalOutcome, SourceArrival, SourceMessage};
use crate::address::AddressPolicy;

/// A server that passes on its connections, each with the head of its request.
pub async fn server() -> (String, mpsc::Receiver<(TcpStream, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let (connections, taken) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4096];
            let length = stream.read(&mut head).await.unwrap();
            let head = String::from_utf8_lossy(&head[..length]).to_ascii_lowercase();
            if connections.send((stream, head)).await.is_err() {
                return;
            }
        }
    });
    (url, taken)
}

/// A target on loopback whose payloads have at most 20 bytes.
pub fn target(url: &str) -> SourceTarget {
    // Fails if another test installed a provider first, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    SourceTarget {
        url: url.parse().unwrap(),
        headers_dir: None,
        tls: TlsFiles::default(),
        policy: Arc::new(AddressPolicy::new(vec!["127.0.0.0/8".parse().unwrap()], vec![])),
        most_bytes: 20,
    }
}

/// Answers the next arrival.
pub async fn next(arrivals: &mut mpsc::Receiver<SourceArrival>, answer: ArrivalOutcome) -> SourceMessage {
    let arrival = tokio::time::timeout(Duration::from_secs(20), arrivals.recv());
    let SourceArrival {
        message, answer: to, ..
    } = arrival.await.unwrap().unwrap();
    to.send(answer).unwrap();
    message
}
