//! What a gateway has to say before its pod ends. What is not said then is known only once the Agent has a pod again: worth
//! more than one attempt.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::link::client::LinkError;

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Tries for so long, unless another pod has taken this one's place. `failed` and `late` are for the log.
pub(super) async fn retry_within<T, F: Future<Output = Result<T, LinkError>>>(
    limit: Duration,
    (failed, late): (&str, &str),
    attempt: impl Fn() -> F,
) {
    let said = async {
        while let Err(error) = attempt().await {
            tracing::warn!(%error, "{failed}");
            if error.is_fence() {
                return;
            }
            sleep(PAUSE).await;
        }
    };
    if timeout(limit, said).await.is_err() {
        tracing::warn!("{late}");
    }
}
