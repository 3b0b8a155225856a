//! Counts the requests of a Kubernetes client, as a tower layer.

use std::task::{Context, Poll};

use axum::http::{Request, Response};
use futures::FutureExt;
use futures::future::BoxFuture;
use prometheus::IntCounterVec;
use tower::{Layer, Service};

/// The `code` label of a request without a response.
const NO_ANSWER: &str = "<error>";

/// Counts requests by code, method and host.
#[derive(Clone)]
pub struct CountRequests {
    counter: IntCounterVec,
    host: String,
}

impl CountRequests {
    #[must_use]
    pub fn new(counter: IntCounterVec, host: String) -> Self {
        Self { counter, host }
    }
}

impl<S> Layer<S> for CountRequests {
    type Service = CountingService<S>;

    fn layer(&self, inner: S) -> CountingService<S> {
        CountingService {
            inner,
            layer: self.clone(),
        }
    }
}

#[derive(Clone)]
pub struct CountingService<S> {
    inner: S,
    layer: CountRequests,
}

impl<S, In, Out> Service<Request<In>> for CountingService<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    Out: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let method = request.method().clone();
        let CountRequests { counter, host } = self.layer.clone();
        let answer = self.inner.call(request);
        answer
            .inspect(move |result| {
                let code = result.as_ref().map(Response::status);
                let code = code.as_ref().map_or(NO_ANSWER, |code| code.as_str());
                counter.with_label_values(&[code, method.as_str(), &host]).inc();
            })
            .boxed()
    }
}
