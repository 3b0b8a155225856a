//! Requests that the API server asks to repeat later, such as while it loads the objects of a new kind.
//!
//! As in kubectl, only a response that names a time is followed: any other 503 is shown at once. It may be that of a load
//! balancer without an API server behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use axum::http::header::RETRY_AFTER;
use axum::http::{Request, Response};
use kube::client::Body;
use kube::client::retry::RetryPolicy;
use tower::BoxError;
use tower::retry::Policy;

/// The status with which a request was put off last; 0: it was not.
#[derive(Clone, Default)]
pub struct PostponedStatus(Arc<AtomicU16>);

impl PostponedStatus {
    /// The status; `None`: the request was not put off.
    #[must_use]
    pub fn get(&self) -> Option<u16> {
        Some(self.0.load(Ordering::Relaxed)).filter(|status| *status > 0)
    }
}

/// Repeats requests that are put off, and notes this in their [`PostponedStatus`].
#[derive(Clone)]
pub struct FollowRetryAfter(RetryPolicy);

impl Default for FollowRetryAfter {
    fn default() -> Self {
        Self(RetryPolicy::server_retry())
    }
}

impl<Out> Policy<Request<Body>, Response<Out>, BoxError> for FollowRetryAfter {
    type Future = tokio::time::Sleep;

    fn retry(
        &mut self,
        request: &mut Request<Body>,
        result: &mut Result<Response<Out>, BoxError>,
    ) -> Option<Self::Future> {
        let response = result.as_ref().ok()?;
        if !response.headers().contains_key(RETRY_AFTER) {
            return None;
        }
        if let Some(last) = request.extensions().get::<PostponedStatus>() {
            last.0.store(response.status().as_u16(), Ordering::Relaxed);
        }
        self.0.retry(request, result)
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        Policy::<_, Response<Out>, BoxError>::clone_request(&mut self.0, request)
    }
}
