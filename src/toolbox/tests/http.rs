//! Requests to real servers on loopback.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use agentloop_toolbox_protocol::BANDWIDTH_BYTES_META;
use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use pretty_assertions::assert_eq;
use serde_json::json;

use crate::harness::Server;

/// A request that is open.
struct Open(Arc<AtomicUsize>);

impl Open {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Starts a web server. Returns its authority, and how many requests reached `/secret` or are open at `/hang`.
async fn web() -> (String, Arc<AtomicUsize>) {
    let reached = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&reached);
    let secret = move || {
        counter.fetch_add(1, Ordering::Relaxed);
        async { "secret" }
    };
    let counter = Arc::clone(&reached);
    let hang = move || async move {
        let _open = Open::new(counter);
        std::future::pending::<String>().await
    };
    let router = Router::new()
        .route("/hello", get(|| async { "hello" }))
        .route(
            "/redirect",
            get(|| async { (StatusCode::FOUND, [("location", "/secret")]) }),
        )
        .route("/secret", get(secret))
        .route("/long", get(|| async { "y".repeat(100_000) }))
        .route("/binary", get(|| async { vec![0_u8; 10] }))
        .route("/hang", get(hang))
        .route(
            "/echo",
            post(|headers: HeaderMap, body: String| async move {
                let token = headers["x-token"].to_str().unwrap().to_owned();
                (StatusCode::CREATED, format!("{token} {body}")).into_response()
            }),
        );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = format!("localhost:{}", listener.local_addr().unwrap().port());
    tokio::spawn(async move { axum::serve(listener, router).await });
    (authority, reached)
}

async fn toolbox(host: &str) -> Server {
    let loopback = "127.0.0.0/8,::1/128";
    Server::toolbox(&[
        "--tools",
        "http",
        "--http-allowed-host",
        host,
        "--egress-allowed-cidr",
        loopback,
    ])
    .await
}

#[tokio::test]
async fn an_allowed_host_is_reached_and_the_bytes_sent_are_counted() {
    let (web, _) = web().await;
    let server = toolbox(&web).await;
    let hello = server
        .call("http_request", json!({"url": format!("http://{web}/hello")}))
        .await;
    assert_eq!(
        hello.ok(),
        "status 200 OK\ncontent-type: text/plain; charset=utf-8\n\nhello"
    );
    let arguments = json!({"url": format!("http://{web}/echo"), "method": "POST", "headers": {"X-Token": "t"}, "body": "x".repeat(1000)});
    let echo = server.call("http_request", arguments).await;
    assert!(
        echo.ok().starts_with("status 201 Created\n") && echo.ok().ends_with(&format!("\n\nt {}", "x".repeat(1000)))
    );
    assert!(
        (1000..1200).contains(&echo.meta(BANDWIDTH_BYTES_META)),
        "{}",
        echo.meta(BANDWIDTH_BYTES_META)
    );
    let binary = server
        .call("http_request", json!({"url": format!("http://{web}/binary")}))
        .await
        .ok();
    assert!(binary.ends_with("[10 bytes of binary data]"), "{binary}");
}

#[tokio::test]
async fn other_hosts_and_ports_are_refused_before_a_connection() {
    let (web, reached) = web().await;
    let server = toolbox(&web).await;
    let port = web.rsplit_once(':').unwrap().1;
    for url in [
        format!("http://127.0.0.1:{port}/secret"),
        "http://localhost/".into(),
        format!("http://evil.{web}/"),
    ] {
        let answer = server.call("http_request", json!({"url": url})).await;
        assert!(
            answer.error().contains("is not in the list of allowed hosts"),
            "{}",
            answer.text()
        );
        assert_eq!(answer.meta(BANDWIDTH_BYTES_META), 0);
    }
    assert_eq!(reached.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn an_allowed_name_that_resolves_to_a_closed_address_is_refused() {
    let (web, reached) = web().await;
    let server = Server::toolbox(&["--tools", "http", "--http-allowed-host", &web]).await;
    let answer = server
        .call("http_request", json!({"url": format!("http://{web}/secret")}))
        .await
        .error();
    assert!(
        answer.contains("Agents may not connect to any address of the host"),
        "{answer}"
    );
    let metadata = Server::toolbox(&["--tools", "http", "--http-allowed-host", "*"]).await;
    let answer = metadata
        .call("http_request", json!({"url": "http://169.254.169.254/latest"}))
        .await
        .error();
    assert!(answer.contains("Agents may not connect to 169.254.169.254"), "{answer}");
    assert_eq!(reached.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_redirect_is_shown_and_not_followed() {
    let (web, reached) = web().await;
    let server = toolbox(&web).await;
    let answer = server
        .call("http_request", json!({"url": format!("http://{web}/redirect")}))
        .await
        .ok();
    assert_eq!(answer, "status 302 Found\nlocation: /secret\n\n[no body]");
    assert_eq!(reached.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_long_body_is_cut_in_the_middle() {
    let (web, _) = web().await;
    let server = toolbox(&web).await;
    let answer = server
        .call("http_request", json!({"url": format!("http://{web}/long")}))
        .await
        .ok();
    assert!(
        answer.contains(&format!("[... {} bytes left out ...]", 100_000 - 32 * 1024)),
        "{}",
        answer.len()
    );
    assert!(answer.len() < 33 * 1024);
}

#[tokio::test]
async fn a_cancelled_request_is_closed() {
    let (web, reached) = web().await;
    let server = toolbox(&web).await;
    let client = server.client().await;
    let call = client.try_call("http_request", json!({"url": format!("http://{web}/hang")}));
    let open = || reached.load(Ordering::Relaxed);
    let sent = crate::harness::until("it is sent", || (open() == 1).then_some(()));
    tokio::select! {
        _ = call => panic!("it ended"),
        () = sent => {}
    }
    crate::harness::until("it is closed", || (open() == 0).then_some(())).await;
}
