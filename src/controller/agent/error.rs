//! Why a reconcile could not be finished. Every error means «try again»; a user's mistake is never one.

use std::time::Duration;

use super::context::ErrorKind;

/// Longest time one request to the API server may take; the client retries within it.
const CALL: Duration = Duration::from_secs(10);

/// A reconcile that is to be tried again.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// No answer in time.
    #[error("{action}: no answer from the API server within {} s", .limit.as_secs())]
    Timeout {
        /// What was attempted.
        action: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// An answer that says no, or none at all.
    #[error("{action}: {source}")]
    Api {
        /// What was attempted.
        action: &'static str,
        /// What came back.
        #[source]
        source: Box<kube::Error>,
    },
}

impl Error {
    /// The kind, for metrics and logs.
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::Timeout { .. } => ErrorKind::Timeout,
            Self::Api { source, .. } => match source.as_ref() {
                kube::Error::Api(status) if status.code < 500 && status.code != 429 => ErrorKind::Refused,
                _ => ErrorKind::Unavailable,
            },
        }
    }
}

/// Runs one request under the time limit and names it in its error.
pub(super) async fn call<T>(
    action: &'static str,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(CALL, request).await {
        Ok(result) => result.map_err(|source| Error::Api {
            action,
            source: Box::new(source),
        }),
        Err(_) => Err(Error::Timeout { action, limit: CALL }),
    }
}

/// The same, with «not found» as `None`.
pub(super) async fn find<T>(
    action: &'static str,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<Option<T>, Error> {
    match call(action, request).await {
        Ok(found) => Ok(Some(found)),
        Err(Error::Api { source, .. }) if matches!(source.as_ref(), kube::Error::Api(s) if s.is_not_found()) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
