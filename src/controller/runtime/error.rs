//! Errors of a reconcile. Every error means "retry"; a user's mistake becomes a condition and never an error.

use std::time::Duration;

use kube::core::Status;

/// Limit for one request to the API server, including the client's own retries.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Kinds of [`ReconcileError`]s. A closed set, because it is a metric label and a log field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::AsRefStr, strum::IntoStaticStr, strum::EnumIter)]
pub enum ReconcileErrorKind {
    /// The API server did not respond in time, or the whole reconcile took too long.
    Timeout,
    /// The API server was unreachable or failed.
    Unavailable,
    /// The API server rejected a request of the controller.
    Refused,
}

#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(Debug, thiserror::Error)]
pub(in crate::controller) enum ReconcileError {
    /// The API server did not respond within the limit.
    #[error("failed to {action}: no response from the API server within {} s", .limit.as_secs())]
    Timeout {
        /// What was attempted, for example "get a Secret".
        action: &'static str,
        limit: Duration,
    },
    /// The API server rejected the request, or the connection failed.
    #[error("failed to {action}: {source}")]
    Api {
        /// What was attempted.
        action: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    /// Two requests that were sent at the same time failed.
    #[error("{first}; {second}")]
    Both {
        first: Box<ReconcileError>,
        second: Box<ReconcileError>,
    },
}

impl ReconcileError {
    /// The kind, as a label of metrics and logs. A 4xx status other than 429 is `Refused`.
    pub(in crate::controller) fn kind(&self) -> ReconcileErrorKind {
        match (self, self.answer()) {
            (Self::Timeout { .. }, _) => ReconcileErrorKind::Timeout,
            (Self::Api { .. }, Some(status)) if status.code < 500 && status.code != 429 => ReconcileErrorKind::Refused,
            (Self::Api { .. }, _) => ReconcileErrorKind::Unavailable,
            (Self::Both { first, .. }, _) => first.kind(),
        }
    }

    /// The status that the API server responded with, if it responded.
    pub(in crate::controller) fn answer(&self) -> Option<&Status> {
        if let Self::Api { source, .. } = self
            && let kube::Error::Api(status) = source.as_ref()
        {
            return Some(status);
        }
        None
    }

    /// Whether the API server responded with a status that matches.
    pub(in crate::controller) fn is(&self, sort: fn(&Status) -> bool) -> bool {
        self.answer().is_some_and(sort)
    }
}

/// The results of two requests that were sent at the same time. No error hides the other.
pub(in crate::controller) fn both<A, B>(
    first: Result<A, ReconcileError>,
    second: Result<B, ReconcileError>,
) -> Result<(A, B), ReconcileError> {
    match (first, second) {
        (Ok(first), Ok(second)) => Ok((first, second)),
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
        (Err(first), Err(second)) => Err(ReconcileError::Both {
            first: Box::new(first),
            second: Box::new(second),
        }),
    }
}

/// Runs one request with the time limit; `action` names it in the error.
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

/// Like [`call`], with a 404 as `None`.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn timeout(action: &'static str) -> ReconcileError {
        let limit = REQUEST_TIMEOUT;
        ReconcileError::Timeout { action, limit }
    }

    #[test]
    fn both_errors_are_reported_when_two_requests_fail() {
        let failed = both::<(), ()>(Err(timeout("create a pod")), Err(timeout("create a volume claim")));
        let error = failed.unwrap_err();
        assert_eq!(error.kind(), ReconcileErrorKind::Timeout);
        let text = error.to_string();
        assert!(
            text.contains("create a pod") && text.contains("create a volume claim"),
            "{text}"
        );
        let failed = both(Ok(1), Err::<(), _>(timeout("create a volume claim")));
        assert!(matches!(failed, Err(ReconcileError::Timeout { .. })));
        assert_eq!(both(Ok(1), Ok(2)).unwrap(), (1, 2));
    }
}
