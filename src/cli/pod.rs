//! What the roles of a pod share: their configuration as JSON, one thread, and a graceful shutdown on a signal.

use anyhow::Context;
use serde::de::DeserializeOwned;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::link::pod::CONFIG_ENV;

/// Parses a configuration. The error contains the position but none of the content.
pub(super) fn configuration<T: DeserializeOwned>(json: &str, what: &str) -> anyhow::Result<T> {
    serde_json::from_str(json).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        anyhow::anyhow!("{CONFIG_ENV} is not {what} (line {line}, column {column})")
    })
}

/// Runs a role to its end. SIGTERM, and SIGINT at a terminal, cancel the token: they request a graceful shutdown.
pub(super) fn run(role: impl AsyncFnOnce(CancellationToken) -> anyhow::Result<()>) -> anyhow::Result<()> {
    // One thread is enough for one loop or one Sensor, and small.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    runtime.block_on(async {
        let end = CancellationToken::new();
        end_on_signals(&end).context("cannot install signal handlers")?;
        role(end).await
    })
}

fn end_on_signals(end: &CancellationToken) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let end = end.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        end.cancel();
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::pod::PodConfig;

    #[test]
    fn an_invalid_configuration_is_reported_by_its_position_and_not_quoted() {
        let error = configuration::<PodConfig>("{\"secret\": canary}", "a pod configuration").unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains(CONFIG_ENV) && text.contains("line 1, column 12"),
            "{text}"
        );
        assert!(!text.contains("canary"), "{text}");
    }
}
