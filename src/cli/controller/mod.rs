//! `agentloop controller`: starts the process, and ends it on a signal.

mod flags;
mod options;

use std::time::Duration;

use anyhow::Context;
use kube::Config;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub(super) use self::flags::ControllerArgs;
pub(super) use self::options::prices;
use crate::controller::process;
use crate::telemetry::log_export::ProcessLog;

/// Threads of the async runtime.
const THREADS: usize = 2;

impl ControllerArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let log = ProcessLog::init("controller");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .enable_all()
            .build()
            .context("cannot start the async runtime")?;
        let ended = runtime.block_on(async {
            let stop = CancellationToken::new();
            end_on_signals(&stop).context("cannot install signal handlers")?;
            let config = Config::infer()
                .await
                .context("cannot read a service account or a kubeconfig")?;
            let mut options = self.options(&config.default_namespace)?;
            options.telemetry.log = log;
            tracing::info!(
                version = env!("CARGO_PKG_VERSION"),
                election = options.election.is_some(),
                "starting the controller"
            );
            Box::pin(process::run(options, config, stop))
                .await
                .map_err(anyhow::Error::from)
        });
        // What still hangs on the API server may not keep the process alive.
        runtime.shutdown_timeout(Duration::ZERO);
        ended
    }
}

/// SIGTERM, and SIGINT at a terminal, request a graceful shutdown; a second one terminates at once.
fn end_on_signals(stop: &CancellationToken) -> std::io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = stop.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
            }
            if stop.is_cancelled() {
                std::process::exit(1);
            }
            stop.cancel();
        }
    });
    Ok(())
}
