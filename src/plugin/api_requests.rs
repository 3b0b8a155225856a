//! Requests to the API server: how long they may take, and which server a failure is about.
//!
//! A layer around the Kubernetes client. It reads nothing of a request but whether its response is a stream.

use std::fmt;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::http::{Request, Response, StatusCode, Uri};
use futures::FutureExt;
use futures::future::BoxFuture;
use kube::Config;
use tower::{BoxError, Layer, Service};

use super::cluster_errors;
use super::retries::PostponedStatus;

/// Parameters of requests whose responses last as long as the client reads them.
const STREAM_PARAMETERS: [&str; 2] = ["watch=", "follow="];

/// The API server, as errors name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    url: String,
    proxy: Option<String>,
    context: Option<String>,
}

impl ServerAddress {
    /// The server of a configuration. `context`: that of the kubeconfig; `None`: the configuration is that of a pod.
    #[must_use]
    pub fn new(config: &Config, context: Option<String>) -> Self {
        Self {
            url: without_user(&config.cluster_url),
            proxy: config.proxy_url.as_ref().map(without_user),
            context,
        }
    }
}

/// A URL without the user and the password that it may have.
fn without_user(url: &Uri) -> String {
    let scheme = url.scheme_str().unwrap_or("https");
    let authority = url
        .authority()
        .map(axum::http::uri::Authority::as_str)
        .unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{scheme}://{host}{}", url.path().trim_end_matches('/'))
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.url)?;
        match &self.context {
            Some(context) => write!(formatter, " (context \"{context}\"")?,
            None => write!(formatter, " (service account of the pod")?,
        }
        if let Some(proxy) = &self.proxy {
            write!(formatter, ", proxy {proxy}")?;
        }
        write!(formatter, ")")
    }
}

/// Why a request has no response.
#[derive(thiserror::Error, Debug)]
#[error("the request to {address} failed")]
pub struct UnansweredRequest {
    address: ServerAddress,
    reason: UnansweredReason,
}

#[derive(Debug)]
enum UnansweredReason {
    /// The time limit.
    TimedOut(Duration),
    /// The time limit, while the server put the request off with this status.
    PutOff(Duration, u16),
    /// The connection, or the credentials.
    Failed(BoxError),
}

impl UnansweredRequest {
    /// The reason with the server, without values.
    #[must_use]
    pub fn problem(&self) -> String {
        let address = &self.address;
        match &self.reason {
            UnansweredReason::TimedOut(limit) => {
                format!("{address}: no response within {limit:?} (--request-timeout)")
            }
            UnansweredReason::PutOff(limit, status) => {
                format!("{address}: asked to try again later (status {status}) for {limit:?} (--request-timeout)")
            }
            // The request was not sent, so it is not about the server.
            UnansweredReason::Failed(error) if cluster_errors::is_of_credentials(&**error) => {
                cluster_errors::cause(&**error, None)
            }
            UnansweredReason::Failed(error) => format!("{address}: {}", cluster_errors::cause(&**error, None)),
        }
    }
}

/// Limits the time of each request, and adds the server to its failures. Streams are limited until they begin.
#[derive(Clone)]
pub struct LimitRequests {
    address: ServerAddress,
    /// `None`: no limit.
    limit: Option<Duration>,
}

impl LimitRequests {
    /// A limit of zero is none.
    #[must_use]
    pub fn new(address: ServerAddress, limit: Duration) -> Self {
        Self {
            address,
            limit: (!limit.is_zero()).then_some(limit),
        }
    }
}

impl<S> Layer<S> for LimitRequests {
    type Service = LimitedRequests<S>;

    fn layer(&self, inner: S) -> LimitedRequests<S> {
        LimitedRequests {
            inner,
            layer: self.clone(),
        }
    }
}

/// The service of [`LimitRequests`].
#[derive(Clone)]
pub struct LimitedRequests<S> {
    inner: S,
    layer: LimitRequests,
}

impl<S, In, Out> Service<Request<In>> for LimitedRequests<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    Out: HttpBody<Data = Bytes> + Send + 'static,
    Out::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Body>, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, mut request: Request<In>) -> Self::Future {
        let last = PostponedStatus::default();
        request.extensions_mut().insert(last.clone());
        let is_stream = is_stream(request.uri());
        let answer = self.inner.call(request);
        let complete = async move {
            let answer = answer.await.map_err(Into::into)?.map(Body::new);
            if is_stream || answer.status() == StatusCode::SWITCHING_PROTOCOLS {
                return Ok(answer);
            }
            // Within the limit too: a server may send headers and then nothing.
            let (head, body) = answer.into_parts();
            let bytes = to_bytes(body, usize::MAX).await?;
            Ok::<_, BoxError>(Response::from_parts(head, Body::from(bytes)))
        };
        let LimitRequests { address, limit } = self.layer.clone();
        async move {
            let reason = match limit {
                None => complete.await.map_err(UnansweredReason::Failed),
                Some(limit) => match tokio::time::timeout(limit, complete).await {
                    Ok(ended) => ended.map_err(UnansweredReason::Failed),
                    Err(_) => Err(last.get().map_or(UnansweredReason::TimedOut(limit), |status| {
                        UnansweredReason::PutOff(limit, status)
                    })),
                },
            };
            reason.map_err(|reason| UnansweredRequest { address, reason }.into())
        }
        .boxed()
    }
}

fn is_stream(uri: &Uri) -> bool {
    let parameters = uri.query().unwrap_or_default().split('&');
    let mut on = parameters.filter(|parameter| !parameter.ends_with("=false"));
    on.any(|parameter| STREAM_PARAMETERS.iter().any(|name| parameter.starts_with(name)))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::http::HeaderValue;
    use futures::stream;
    use tower::{ServiceExt, service_fn};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn address() -> ServerAddress {
        let config = Config::new(Uri::from_static("https://ann:secret@10.0.0.1:6443/"));
        ServerAddress::new(&config, Some("prod".into()))
    }

    /// A body of which a part arrives, and after `seconds` the rest.
    fn slow_body(seconds: u64) -> Body {
        let parts = stream::unfold(0, move |part| async move {
            if part == 1 {
                tokio::time::sleep(Duration::from_secs(seconds)).await;
            }
            (part < 2).then(|| (Ok::<_, Infallible>("part"), part + 1))
        });
        Body::from_stream(parts)
    }

    /// The response to a request to a server that takes this long for the rest of it.
    async fn answered(uri: &'static str, status: StatusCode, seconds: u64, limit: Duration) -> Result<usize, String> {
        let server = service_fn(move |_: Request<Body>| async move {
            let mut answer = Response::new(slow_body(seconds));
            *answer.status_mut() = status;
            answer.headers_mut().insert("kept", HeaderValue::from_static("yes"));
            Ok::<_, Infallible>(answer)
        });
        let request = Request::get(uri).body(Body::empty()).unwrap();
        let answer = LimitRequests::new(address(), limit)
            .layer(server)
            .oneshot(request)
            .await;
        let answer = answer.map_err(|error| error.downcast_ref::<UnansweredRequest>().unwrap().problem())?;
        assert_eq!(answer.status(), status);
        assert_eq!(answer.headers()["kept"], "yes");
        Ok(to_bytes(answer.into_body(), usize::MAX).await.unwrap().len())
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_is_complete_within_the_limit() {
        let list = "/apis/agentloop.dev/v1alpha1/agents?labelSelector=watch%3Dtrue&watch=false";
        assert_eq!(answered(list, StatusCode::OK, 29, LIMIT).await, Ok(8));
        assert_eq!(
            answered(list, StatusCode::OK, 31, LIMIT).await.unwrap_err(),
            "https://10.0.0.1:6443 (context \"prod\"): no response within 30s (--request-timeout)"
        );
        assert_eq!(answered(list, StatusCode::OK, 86_400, Duration::ZERO).await, Ok(8));
    }

    #[tokio::test(start_paused = true)]
    async fn streams_last_longer_than_the_limit() {
        for (uri, status) in [
            ("/api/v1/pods?limit=1&watch=true", StatusCode::OK),
            ("/api/v1/namespaces/a/pods/b/log?follow=true", StatusCode::OK),
            (
                "/api/v1/namespaces/a/pods/b/portforward?ports=1",
                StatusCode::SWITCHING_PROTOCOLS,
            ),
        ] {
            assert_eq!(answered(uri, status, 3_600, LIMIT).await, Ok(8), "{uri}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_begins_within_the_limit() {
        let server = service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>());
        let request = Request::get("/api/v1/pods?watch=true").body(Body::empty()).unwrap();
        let answer = LimitRequests::new(address(), LIMIT)
            .layer(server)
            .oneshot(request)
            .await;
        let problem = answer
            .unwrap_err()
            .downcast_ref::<UnansweredRequest>()
            .unwrap()
            .problem();
        assert!(
            problem.ends_with("no response within 30s (--request-timeout)"),
            "{problem}"
        );
    }

    #[test]
    fn an_address_names_the_context_and_the_proxy_and_no_password() {
        assert_eq!(address().to_string(), "https://10.0.0.1:6443 (context \"prod\")");
        let mut config = Config::new(Uri::from_static("https://rancher.example.com/k8s/c-1"));
        assert_eq!(
            ServerAddress::new(&config, None).to_string(),
            "https://rancher.example.com/k8s/c-1 (service account of the pod)"
        );
        config.proxy_url = Some(Uri::from_static("http://ann:secret@proxy:3128"));
        assert_eq!(
            ServerAddress::new(&config, Some("a".into())).to_string(),
            "https://rancher.example.com/k8s/c-1 (context \"a\", proxy http://proxy:3128)"
        );
    }
}
