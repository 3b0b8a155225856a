//! The driver's interface to tools: which are offered, and running them.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::api::agent::LimitedResource;
use crate::engine::tool::{ResultArtifacts, ToolOutcome, ToolRun, ToolSpec};

/// Longest wait for the tools before a loop's first turn. A starting node brings up tool servers and agents together,
/// and a model without tools concludes that it has nothing to do.
const FIRST_TOOLS_TIMEOUT: Duration = Duration::from_mins(1);
/// The same for a loop that resumes. It knows its earlier tools, and its prompt names the servers that have not
/// answered.
const TOOLS_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for the sources of tools of a loop that has begun this many turns.
pub(super) const fn tools_timeout(turns: i64) -> Duration {
    if turns == 0 { FIRST_TOOLS_TIMEOUT } else { TOOLS_TIMEOUT }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ListedTools {
    /// The tools, in the order of the prompt.
    pub specs: Arc<[ToolSpec]>,
    /// Names of the servers that have not answered yet: their tools are unknown.
    pub silent: Vec<String>,
}

/// The end of a tool run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedToolRun {
    pub outcome: ToolOutcome,
    /// Measured amounts, none of them 0.
    pub used: Vec<(LimitedResource, u64)>,
    /// What is stored of the result.
    pub artifacts: ResultArtifacts,
}

impl From<ToolOutcome> for FinishedToolRun {
    fn from(outcome: ToolOutcome) -> Self {
        Self {
            outcome,
            used: Vec::new(),
            artifacts: ResultArtifacts::default(),
        }
    }
}

/// A source of tools. Does not decide whether a tool may run: the engine's admission did before it requests a run.
pub trait ToolSource: Send + Sync {
    fn offered(&self) -> watch::Receiver<ListedTools>;

    /// Completes once every part of the source has reported its tools; never, while one has not.
    fn complete(&self) -> BoxFuture<'static, ()>;

    /// Runs a tool, within `limit`. Dropping the future cancels the run.
    fn run(&self, run: ToolRun, limit: Duration) -> BoxFuture<'static, FinishedToolRun>;
}

/// Waits at most `tools_timeout` for the sources of tools. Returns false if the process is to end.
pub(super) async fn wait_for_tools(
    tools: Option<Arc<dyn ToolSource>>,
    tools_timeout: Duration,
    terminate: &CancellationToken,
) -> bool {
    let Some(tools) = tools else {
        return true;
    };
    tokio::select! {
        met = timeout(tools_timeout, tools.complete()) => {
            if met.is_err() {
                tracing::warn!("starting the loop without all tools: a source has not answered yet");
            }
            true
        }
        () = terminate.cancelled() => false,
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::future;
    use tokio::time::{Instant, sleep};

    use super::*;

    /// A source that is complete after this long.
    struct Late(Duration);

    impl ToolSource for Late {
        fn offered(&self) -> watch::Receiver<ListedTools> {
            let specs = Arc::from([]);
            watch::channel(ListedTools {
                specs,
                silent: Vec::new(),
            })
            .1
        }

        fn complete(&self) -> BoxFuture<'static, ()> {
            sleep(self.0).boxed()
        }

        fn run(&self, _: ToolRun, _: Duration) -> BoxFuture<'static, FinishedToolRun> {
            future::pending().boxed()
        }
    }

    /// How long a loop that has begun this many turns waits for a source that takes this long.
    async fn waits(turns: i64, takes: Duration) -> Duration {
        let begun = Instant::now();
        let is_waiting_over = wait_for_tools(
            Some(Arc::new(Late(takes))),
            tools_timeout(turns),
            &CancellationToken::new(),
        )
        .await;
        assert!(is_waiting_over);
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_turn_waits_a_minute_for_its_tools_and_later_ones_five_seconds() {
        for (turns, longest) in [(0, 60_000), (1, 5_000), (1_000, 5_000)] {
            for takes in [0, 1, longest - 1, longest + 1, 3_600_000] {
                let waited = waits(turns, Duration::from_millis(takes)).await;
                let expected = Duration::from_millis(takes.min(longest));
                let late = waited.saturating_sub(expected);
                assert!(
                    waited >= expected && late <= Duration::from_millis(2),
                    "{turns} {takes}: {waited:?}"
                );
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_is_to_end_waits_for_no_tools_and_one_without_a_source_starts_at_once() {
        let ends = CancellationToken::new();
        ends.cancel();
        let begun = Instant::now();
        assert!(!wait_for_tools(Some(Arc::new(Late(FIRST_TOOLS_TIMEOUT))), FIRST_TOOLS_TIMEOUT, &ends).await);
        assert!(wait_for_tools(None, FIRST_TOOLS_TIMEOUT, &CancellationToken::new()).await);
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}
