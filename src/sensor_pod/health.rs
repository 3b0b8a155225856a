//! Answers the kubelet's probes: whether the pod's main loop makes progress.
//!
//! Listens on an abstract socket, which only processes of this pod can reach and which needs no file. Outsiders cannot
//! fill its accept queue, as they could at the port of a webhook.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

/// A loop without an iteration for this long hangs; its own waits are a few seconds.
const HANGS: Duration = Duration::from_mins(1);
/// Longest time for one probe.
const QUESTION: Duration = Duration::from_secs(1);

/// When the loop last made an iteration.
#[derive(Clone, Debug)]
pub struct LoopLiveness {
    begun: Instant,
    /// Milliseconds from [`Self::begun`].
    last_iteration: Arc<AtomicU64>,
}

impl Default for LoopLiveness {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            last_iteration: Arc::default(),
        }
    }
}

impl LoopLiveness {
    pub fn record_iteration(&self) {
        self.last_iteration.store(self.now(), Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn is_alive(&self) -> bool {
        let since = self.now().saturating_sub(self.last_iteration.load(Ordering::Relaxed));
        Duration::from_millis(since) < HANGS
    }
}

/// Listens on the abstract socket of this name.
pub fn listen(name: &str) -> std::io::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(name)?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Answers probes until it is dropped.
pub async fn serve(listener: UnixListener, liveness: LoopLiveness) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(timeout(QUESTION, answer(stream, &liveness)).await),
            Err(error) => {
                tracing::debug!(%error, "failed to accept a probe connection");
                tokio::time::sleep(QUESTION).await;
            }
        }
    }
}

async fn answer(mut stream: UnixStream, liveness: &LoopLiveness) -> std::io::Result<()> {
    // There is only one request, and it fits into one read.
    let _ = stream.read(&mut [0; 1024]).await?;
    let status = if liveness.is_alive() {
        "200 OK"
    } else {
        "503 Service Unavailable"
    };
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    stream.write_all(answer.as_bytes()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ask(name: &str) -> String {
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let stream = std::os::unix::net::UnixStream::connect_addr(&address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut stream = UnixStream::from_std(stream).unwrap();
        stream.write_all(b"GET /v1/healthz HTTP/1.1\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer.lines().next().unwrap().to_owned()
    }

    #[tokio::test]
    async fn a_loop_that_turns_is_alive_and_one_that_stood_for_a_minute_is_not() {
        let name = format!("agentloop-health-test-{}", std::process::id());
        let hour = Duration::from_hours(1);
        let liveness = LoopLiveness {
            begun: Instant::now().checked_sub(hour).unwrap(),
            ..LoopLiveness::default()
        };
        let server = tokio::spawn(serve(listen(&name).unwrap(), liveness.clone()));
        assert_eq!(ask(&name).await, "HTTP/1.1 503 Service Unavailable");
        liveness.record_iteration();
        assert_eq!(ask(&name).await, "HTTP/1.1 200 OK");
        let before = |age: Duration| u64::try_from(hour.abs_diff(age).as_millis()).unwrap();
        liveness
            .last_iteration
            .store(before(Duration::from_secs(40)), Ordering::Relaxed);
        assert_eq!(ask(&name).await, "HTTP/1.1 200 OK");
        liveness.last_iteration.store(before(HANGS), Ordering::Relaxed);
        assert_eq!(ask(&name).await, "HTTP/1.1 503 Service Unavailable");
        server.abort();
    }
}
