//! Counts and times the requests of a Kubernetes client, as a tower layer.

use std::task::{Context, Poll};

use axum::http::{Request, Response};
use futures::FutureExt;
use futures::future::BoxFuture;
use prometheus::{HistogramVec, IntCounterVec};
use tokio::time::Instant;
use tower::{Layer, Service};

use super::metrics::Metrics;

/// The `code` label of a request without a response.
const NO_ANSWER: &str = "<error>";

/// Counts requests by code, method and host, and the time until each response begins.
#[derive(Clone)]
pub struct CountRequests {
    counter: IntCounterVec,
    seconds: HistogramVec,
    host: String,
}

impl CountRequests {
    #[must_use]
    pub fn new(metrics: &Metrics, host: String) -> Self {
        Self {
            counter: metrics.requests.clone(),
            seconds: metrics.request_seconds.clone(),
            host,
        }
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
        let CountRequests { counter, seconds, host } = self.layer.clone();
        let start = Instant::now();
        let answer = self.inner.call(request);
        answer
            .inspect(move |result| {
                let code = result.as_ref().map(Response::status);
                let code = code.as_ref().map_or(NO_ANSWER, |code| code.as_str());
                counter.with_label_values(&[code, method.as_str(), &host]).inc();
                let took = start.elapsed().as_secs_f64();
                seconds.with_label_values(&[method.as_str(), &host]).observe(took);
            })
            .boxed()
    }
}
