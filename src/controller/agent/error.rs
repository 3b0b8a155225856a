//! Why a reconcile could not be finished. Every error means «try again»; a user's mistake is never one.

use std::time::Duration;

use kube::core::Status;

use super::context::ReconcileErrorKind;

/// Longest time one request to the API server may take; the client retries within it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A reconcile that is to be tried again.
#[derive(Debug, thiserror::Error)]
pub(in crate::controller) enum ReconcileError {
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

impl ReconcileError {
    /// The kind, for metrics and logs.
    pub(in crate::controller) fn kind(&self) -> ReconcileErrorKind {
        match (self, self.answer()) {
            (Self::Timeout { .. }, _) => ReconcileErrorKind::Timeout,
            (Self::Api { .. }, Some(status)) if status.code < 500 && status.code != 429 => ReconcileErrorKind::Refused,
            (Self::Api { .. }, _) => ReconcileErrorKind::Unavailable,
        }
    }

    /// What the API server answered, when it answered.
    pub(in crate::controller) fn answer(&self) -> Option<&Status> {
        if let Self::Api { source, .. } = self
            && let kube::Error::Api(status) = source.as_ref()
        {
            return Some(status);
        }
        None
    }

    /// Whether the answer was of this sort.
    pub(in crate::controller) fn is(&self, sort: fn(&Status) -> bool) -> bool {
        self.answer().is_some_and(sort)
    }
}

/// Runs one request under the time limit and names it in its error.
pub(in crate::controller) async fn call<T>(
    action: &'static str,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, ReconcileError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(result) => result.map_err(|source| ReconcileError::Api {
            action,
            source: Box::new(source),
        }),
        Err(_) => Err(ReconcileError::Timeout {
            action,
            limit: REQUEST_TIMEOUT,
        }),
    }
}

/// The same, with «not found» as `None`.
pub(in crate::controller) async fn find<T>(
    action: &'static str,
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<Option<T>, ReconcileError> {
    match call(action, request).await {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is(Status::is_not_found) => Ok(None),
        Err(error) => Err(error),
    }
}
