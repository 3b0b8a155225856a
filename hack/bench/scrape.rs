//! What a scrape of /metrics costs with many Agents: `cargo bench --bench scrape`, part of `make bench`.
//!
//! Time and size of the text, and the memory that the process needs at most beyond what it has with the Agents in its
//! cache.

#![allow(clippy::expect_used, reason = "a bench that cannot run ends")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use agentloop::api::Agent;
use agentloop::telemetry::agent_collector::{AgentCollector, GatewayCounts, TelemetryDrops};
use agentloop::telemetry::exposition::ExpositionFormat;
use agentloop::telemetry::families::{ObjectVisitor, PerObject};
use agentloop::telemetry::metrics::Metrics;
use agentloop::telemetry::namespace_totals::NamespaceTotals;

mod figures;

use figures::{figures, say};

const ROUNDS: usize = 20;

fn main() {
    for count in [1000, 5000] {
        let agents: Vec<Arc<Agent>> = (0..count).map(agent).collect();
        let metrics = metrics(&agents);
        for format in [ExpositionFormat::Text, ExpositionFormat::OpenMetrics] {
            let before = reset_peak();
            let mut bytes = 0;
            let mut times = Vec::new();
            for _ in 0..ROUNDS {
                let (took, size) = scrape(&metrics, format);
                times.push(took);
                bytes = size;
            }
            let name = format!("scrape_{count}_{format:?}").to_lowercase();
            figures(&name, times);
            say(&format!("FIGURE {name}_size {bytes} bytes"));
            say(&format!(
                "FIGURE {name}_memory {} KiB",
                kibibytes("VmHWM:").saturating_sub(before)
            ));
        }
    }
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

fn metrics(agents: &[Arc<Agent>]) -> Metrics {
    let metrics = Metrics::new().expect("the registry has no conflicts");
    let totals = NamespaceTotals::new(Box::new(|_, _| Some(1)));
    for agent in agents {
        totals.agent_seen(agent);
    }
    metrics.add(Arc::new(totals));
    let agents = agents.to_vec();
    let take = move || {
        let snapshot = agents.clone();
        Box::new(move |visit: &mut dyn FnMut(&Agent)| snapshot.iter().for_each(|agent| visit(agent)))
            as ObjectVisitor<Agent>
    };
    let gateways = GatewayCounts {
        refused: Box::new(|_, _| Some(1)),
        dropped: Box::new(|_, _| TelemetryDrops::default()),
    };
    let sampled = Box::new(|_: &[u8]| false);
    let collector = AgentCollector::new(Box::new(take), gateways, sampled, PerObject::Full);
    metrics.add(Arc::new(collector));
    metrics
}

/// A healthy Agent with one model that has used two tools.
fn agent(number: usize) -> Arc<Agent> {
    let mut agent: Agent = serde_json::from_str(include_str!("scrape-agent.json")).expect("an Agent");
    agent.metadata.namespace = Some(format!("team-{}", number % 20));
    agent.metadata.name = Some(format!("research-agent-{number}"));
    agent.metadata.uid = Some(format!("uid-{number}"));
    Arc::new(agent)
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
