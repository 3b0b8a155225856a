//! What a scrape of /metrics costs with many Agents: `cargo bench --bench scrape`, part of `make bench`.
//!
//! Time and size of the text, and the memory that the process needs at most beyond what it has with the Agents in its
//! cache. Then the same on the wire, from the request until the end of the response over loopback: as plain text and
//! compressed, with the CPU time of both ends. The reader of the bench does not decompress.

#![allow(clippy::expect_used, reason = "a bench that cannot run ends")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::telemetry::exposition::ExpositionFormat;
use agentloop::telemetry::http::{self, HttpLimits};
use agentloop::telemetry::metrics::Metrics;
use rustix::time::{ClockId, clock_gettime};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

mod figures;
mod scrape_agents;

use figures::{figures, say};

const ROUNDS: usize = 20;

fn main() {
    let runtime = Runtime::new().expect("a runtime");
    for count in [1000, 5000] {
        let agents = scrape_agents::agents(count);
        let metrics = Arc::new(scrape_agents::metrics(&agents));
        for format in [ExpositionFormat::Text, ExpositionFormat::OpenMetrics] {
            let name = format!("scrape_{count}_{format:?}").to_lowercase();
            measure(&name, || scrape(&metrics, format));
        }
        let address = runtime.block_on(serve(metrics));
        for coding in ["identity", "gzip"] {
            measure(&format!("scrape_{count}_wire_{coding}"), || fetch(address, coding));
        }
    }
}

/// Measures what takes a time and has a size.
fn measure(name: &str, scrape: impl Fn() -> (Duration, usize)) {
    let (memory, cpu) = (reset_peak(), cpu());
    let mut bytes = 0;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let (took, size) = scrape();
        times.push(took);
        bytes = size;
    }
    let spent = self::cpu().saturating_sub(cpu) / u32::try_from(ROUNDS).expect("few");
    figures(name, times);
    say(&format!("FIGURE {name}_cpu {:.2} ms", spent.as_secs_f64() * 1e3));
    say(&format!("FIGURE {name}_size {bytes} bytes"));
    say(&format!(
        "FIGURE {name}_memory {} KiB",
        kibibytes("VmHWM:").saturating_sub(memory)
    ));
}

/// Serves scrapes as the controller does.
async fn serve(metrics: Arc<Metrics>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let router = http::metrics(metrics, http::SCRAPE_WAIT);
    tokio::spawn(http::serve(listener, router, HttpLimits::default()));
    address
}

/// One scrape over the wire: its time, and the bytes of the response.
fn fetch(address: SocketAddr, coding: &str) -> (Duration, usize) {
    let start = Instant::now();
    let mut connection = TcpStream::connect(address).expect("a server");
    let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: {coding}\r\n\r\n");
    connection.write_all(request.as_bytes()).expect("a server");
    let (mut buffer, mut bytes) = (vec![0; 64 * 1024], 0);
    loop {
        match connection.read(&mut buffer).expect("a response") {
            0 => return (start.elapsed(), bytes),
            read => bytes += read,
        }
    }
}

/// The CPU time of this process.
fn cpu() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().expect("a time")
}

fn scrape(metrics: &Metrics, format: ExpositionFormat) -> (Duration, usize) {
    let mut bytes = 0;
    let start = Instant::now();
    metrics.write(format, &mut |piece| {
        bytes += piece.len();
        true
    });
    (start.elapsed(), bytes)
}

/// Makes the highest memory the present one, and returns it.
fn reset_peak() -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux");
    kibibytes("VmRSS:")
}

fn kibibytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}
