//! What the tests of streams share: a server on loopback whose answers they write byte by byte.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::http::SourceTarget;
use super::tls::TlsFiles;
use super::{ArrivalOutcome, SourceArrival, SourceFeed, SourceMessage};
use agentloop_egress::AddressPolicy;

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
        max_bytes: 20,
    }
}

/// Answers the next arrival.
pub async fn next(arrivals: &mut mpsc::Receiver<SourceArrival>, answer: ArrivalOutcome) -> SourceMessage {
    let arrival = timeout(Duration::from_secs(20), arrivals.recv());
    let SourceArrival {
        message, answer: to, ..
    } = arrival.await.unwrap().unwrap();
    to.send(answer).unwrap();
    message
}

/// Attempts at a check that a machine without a stall passes at once.
pub const ATTEMPTS: usize = 20;

/// Checks that a stream with an idle timeout stays open while it receives `data`, and that silence ends it. `head` is that
/// of its response; `run` runs it for a URL and the timeout.
pub async fn check_idle_timeout<Run>(head: &str, data: &str, run: impl Fn(&str, Duration, SourceFeed) -> Run)
where
    Run: Future<Output = ()> + Send + 'static,
{
    for _ in 0..ATTEMPTS {
        if ends_by_silence_only(head, data, &run).await {
            return;
        }
    }
    panic!("the machine stalled in each of {ATTEMPTS} attempts");
}

/// The same, once. False: the stream ended early, but the machine itself was silent for so long that it had to.
async fn ends_by_silence_only<Run>(head: &str, data: &str, run: &impl Fn(&str, Duration, SourceFeed) -> Run) -> bool
where
    Run: Future<Output = ()> + Send + 'static,
{
    let (url, mut connections) = server().await;
    let (feed, _arrivals) = SourceFeed::new();
    let mut condition = feed.condition();
    let idle = Duration::from_secs(1);
    let mut last = Instant::now();
    let task = tokio::spawn(run(&url, idle, feed));
    let (mut stream, _) = connections.recv().await.unwrap();
    // Writing fails if the stream has ended, which is seen below.
    let _ = stream.write_all(head.as_bytes()).await;
    let opened = condition.wait_for(|condition| condition.connected || condition.failures > 0);
    drop(opened.await.unwrap());
    let (begun, mut longest) = (Instant::now(), Duration::ZERO);
    // Longer than the timeout in total, but never without data for that long.
    while begun.elapsed() < idle * 2 {
        longest = longest.max(last.elapsed());
        last = Instant::now();
        sleep(idle / 8).await;
        let _ = stream.write_all(data.as_bytes()).await;
    }
    longest = longest.max(last.elapsed());
    if condition.borrow().failures > 0 {
        task.abort();
        assert!(
            longest > idle / 2,
            "it ended, but never was without data for longer than {longest:?}"
        );
        return false;
    }
    let failed = condition.wait_for(|condition| condition.failures == 1);
    let failed = timeout(Duration::from_secs(20), failed).await.unwrap().unwrap();
    assert_eq!(failed.failure.as_deref(), Some("silent for 1 s (idleTimeoutSeconds)"));
    drop(failed);
    task.abort();
    true
}
