//! The plugin reaches the controller by a port-forward through an API server: WebSocket, TLS and token, from end to end.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use agentloop::controller::tls::ca::CertificateAuthority;
use agentloop::controller::tls::certificates::server_config;
use agentloop::plugin::link::LinkRoute;
use agentloop::plugin::{ExitStatus, PluginSession, Screen, commands};
use axum::Router;
use axum::http::HeaderMap;
use axum::routing::get;
use axum_server::tls_rustls::RustlsConfig;
use futures::{SinkExt, StreamExt};
use jiff::Timestamp;
use kube::Config;
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_tungstenite::accept_hdr_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

use super::harness::{PluginHarness, TOKEN, parse};
use super::link::FakeController;
use super::program::{Program, text};

/// Port of the link, as the pod of the controller has it.
const PORT: u16 = 9443;

/// The token that the API server issues for a ServiceAccount.
const REQUESTED_TOKEN: &str = "token-of-loop-user";

/// A fake API server, which ends when it is dropped.
struct Api {
    address: SocketAddr,
    /// Lines and headers of requests.
    heads: Arc<Mutex<Vec<String>>>,
    server: JoinHandle<()>,
}

impl Drop for Api {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Api {
    /// With this CA bundle, and a pod of the controller that listens there, if there is one.
    async fn start(bundle: &str, controller: Option<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let map = json!({"metadata": {"name": "agentloop-link-ca"}, "data": {"ca.crt": bundle}});
        let pod = json!({"metadata": {"name": "agentloop-7"}, "spec": {"containers": [
            {"name": "controller", "ports": [{"name": "link", "containerPort": PORT}]}]}});
        let pods = json!({"metadata": {}, "items": controller.iter().map(|_| &pod).collect::<Vec<_>>()});
        let heads = Arc::default();
        let seen = Arc::clone(&heads);
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (map, pods, seen) = (map.clone(), pods.clone(), Arc::clone(&seen));
                tokio::spawn(async move { serve(stream, controller, (&map, &pods), &seen).await });
            }
        });
        Self { address, heads, server }
    }
}

async fn serve(
    mut stream: TcpStream,
    controller: Option<SocketAddr>,
    (map, pods): (&Value, &Value),
    seen: &Mutex<Vec<String>>,
) {
    let mut head = [0; 4096];
    let length = stream.peek(&mut head).await.unwrap();
    let head = String::from_utf8_lossy(&head[..length]).into_owned();
    seen.lock().unwrap().push(head.to_lowercase());
    if head.contains("/namespaces/agentloop-system/pods/agentloop-7/portforward?") {
        assert!(head.contains(&format!("ports={PORT}")), "{head}");
        return bridge(stream, controller.unwrap()).await;
    }
    let token = json!({"metadata": {}, "spec": {"audiences": []}, "status": {"token": REQUESTED_TOKEN, "expirationTimestamp":
        "2099-01-01T00:00:00Z"}});
    let body = if head.contains("/namespaces/team-a/configmaps/agentloop-link-ca") {
        map
    } else if head.contains("/namespaces/team-a/serviceaccounts/loop-user/token") {
        &token
    } else {
        pods
    };
    stream.read_exact(&mut vec![0; length]).await.unwrap();
    let body = body.to_string();
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await.unwrap();
}

/// The channel protocol of port-forwards: the first byte of a message is its channel, 0 for data and 1 for errors.
async fn bridge(stream: TcpStream, controller: SocketAddr) {
    #[allow(clippy::result_large_err, clippy::unnecessary_wraps)]
    fn protocol(_: &Request, mut answer: Response) -> Result<Response, axum::http::Response<Option<String>>> {
        let name = "v4.channel.k8s.io".parse().unwrap();
        answer.headers_mut().insert("sec-websocket-protocol", name);
        Ok(answer)
    }
    let (mut sink, mut source) = accept_hdr_async(stream, protocol).await.unwrap().split();
    let [low, high] = PORT.to_le_bytes();
    for channel in [0, 1] {
        sink.send(Message::binary(vec![channel, low, high])).await.unwrap();
    }
    let (mut read, mut write) = TcpStream::connect(controller).await.unwrap().into_split();
    let to_client = async {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = read.read(&mut bytes).await {
            let message = [&[0], &bytes[..length]].concat();
            if sink.send(Message::binary(message)).await.is_err() {
                return;
            }
        }
    };
    let to_controller = async {
        while let Some(Ok(message)) = source.next().await {
            let bytes = message.into_data();
            if bytes.len() > 1 && write.write_all(&bytes[1..]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = to_client => {}
        () = to_controller => {}
    }
}

/// A controller with TLS, whose journal of each Agent has 7 lines that are too old to be kept.
fn controller(authority: &CertificateAuthority, token: &'static str) -> (SocketAddr, JoinHandle<()>) {
    let leaf = authority
        .sign(&["agentloop-link.agentloop-system.svc".into()], Timestamp::now())
        .unwrap();
    let tls = RustlsConfig::from_config(server_config(&leaf).unwrap());
    let events = async move |headers: HeaderMap| {
        assert_eq!(headers["authorization"], format!("Bearer {token}"));
        "event: start\nid: 0\ndata: {\"seq\":0}\n\n"
    };
    let router = Router::new().route("/v1/namespaces/team-a/agents/helper/events", get(events));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let server = axum_server::from_tcp_rustls(listener, tls).unwrap();
    let serving = tokio::spawn(async move { server.serve(router.into_make_service()).await.unwrap() });
    (address, serving)
}

/// Runs `events helper`; returns the status and the error.
async fn events(api: &Api) -> (ExitStatus, String) {
    let harness = PluginHarness::start();
    let mut config = Config::new(format!("http://{}", api.address).parse().unwrap());
    config.default_retry = false;
    let session = PluginSession {
        client: kube::Client::try_from(config).unwrap(),
        route: LinkRoute::PortForward,
        ..harness.session()
    };
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut screen = Screen {
        out: &mut out,
        err: &mut err,
    };
    let ended = commands::execute(&session, parse("events helper").command, &mut screen).await;
    match ended {
        Ok(status) => (status, String::new()),
        Err(error) => (error.exit_status(), error.to_string()),
    }
}

#[tokio::test]
async fn events_are_read_through_a_port_forward_to_the_leader_with_its_certificate() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let authority = CertificateAuthority::make(Timestamp::now()).unwrap();
    let (address, serving) = controller(&authority, TOKEN);
    let api = Api::start(&authority.certificate, Some(address)).await;
    assert_eq!(events(&api).await, (ExitStatus::Success, String::new()));
    // A pod with another certificate is not the controller.
    let other = CertificateAuthority::make(Timestamp::now()).unwrap();
    let api = Api::start(&other.certificate, Some(address)).await;
    let (status, error) = events(&api).await;
    assert_eq!(status, ExitStatus::Failure);
    assert!(
        error.contains("cannot be reached") && error.contains("certificate"),
        "{error}"
    );
    serving.abort();
}

#[tokio::test]
async fn an_impersonated_user_opens_the_port_forward_and_requests_the_token_of_the_service_account() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let authority = CertificateAuthority::make(Timestamp::now()).unwrap();
    let (address, serving) = controller(&authority, REQUESTED_TOKEN);
    let api = Api::start(&authority.certificate, Some(address)).await;
    let program = Program::with_server(
        FakeController::start(Vec::new()).await,
        api.address,
        &json!({"token": TOKEN}),
    );
    let arguments = "events helper --as bob --service-account loop-user";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let done = program.run("kubectl-agentloop", &arguments, "").await;
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let heads = api.heads.lock().unwrap().clone();
    for path in [
        "/configmaps/",
        "/pods?",
        "/portforward?",
        "/serviceaccounts/loop-user/token",
    ] {
        let found = heads.iter().find(|head| head.contains(path)).expect(path);
        assert!(found.contains("\r\nimpersonate-user: bob\r\n"), "{found}");
        assert!(found.contains(&format!("bearer {TOKEN}")), "{found}");
    }
    serving.abort();
}

#[tokio::test]
async fn without_a_leader_the_message_explains_what_to_do() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let authority = CertificateAuthority::make(Timestamp::now()).unwrap();
    let api = Api::start(&authority.certificate, None).await;
    let (status, error) = events(&api).await;
    assert_eq!(status, ExitStatus::Failure);
    assert!(
        error.contains("--controller-namespace") && error.contains("agentloop-system"),
        "{error}"
    );
}
