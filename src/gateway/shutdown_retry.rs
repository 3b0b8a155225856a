//! Retries of the last messages before the pod ends. What they carry would otherwise be known only once the Agent has a
//! pod again, which is worth more than one attempt.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::link::client::LinkError;

/// Delay between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Retries `attempt` for up to `limit`, unless the pod is fenced. `failed` and `late` are log messages.
pub(super) async fn retry_within<T, F: Future<Output = Result<T, LinkError>>>(
    limit: Duration,
    (failed, late): (&str, &str),
    attempt: impl Fn() -> F,
) {
    let attempts = async {
        while let Err(error) = attempt().await {
            tracing::warn!(%error, "{failed}");
            if error.is_fence() {
                return;
            }
            sleep(PAUSE).await;
        }
    };
    if timeout(limit, attempts).await.is_err() {
        tracing::warn!("{late}");
    }
}
