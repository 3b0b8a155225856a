//! Tests with servers on loopback, some of which violate the protocol.

use std::sync::Arc;

use rstest::rstest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_tungstenite::accept_async;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::frame::{CloseFrame, Frame};

use super::*;
use crate::source::test_server::ATTEMPTS;
use crate::source::tls::TlsFiles;
use crate::source::{SourceArrival, SourceCondition};
use agentloop_egress::AddressPolicy;

const SOON: Duration = Duration::from_secs(20);
const LOOPBACK: &str = "127.0.0.0/8";
const MAX_MESSAGE_BYTES: usize = 20;

fn listener(url: &str, idle: Duration) -> WebSocketListener {
    // Fails if another test installed a provider first, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    WebSocketListener {
        place: SourceTarget {
            url: url.parse().unwrap(),
            headers_dir: None,
            tls: TlsFiles::default(),
            policy: Arc::new(AddressPolicy::new(vec![LOOPBACK.parse().unwrap()], vec![])),
            max_bytes: MAX_MESSAGE_BYTES,
        },
        subscribe: None,
        idle,
    }
}

/// A server that passes on its connections.
async fn server() -> (String, mpsc::Receiver<TcpStream>) {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", server.local_addr().unwrap());
    let (connections, taken) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let (stream, _) = server.accept().await.unwrap();
            if connections.send(stream).await.is_err() {
                return;
            }
        }
    });
    (url, taken)
}

/// A running listener and its channels.
struct Running {
    connections: mpsc::Receiver<TcpStream>,
    arrivals: mpsc::Receiver<SourceArrival>,
    condition: tokio::sync::watch::Receiver<SourceCondition>,
    task: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Running {
    async fn new(idle: Duration, adapt: impl FnOnce(&mut WebSocketListener)) -> Self {
        let (url, connections) = server().await;
        let mut listener = listener(&url, idle);
        adapt(&mut listener);
        let (feed, arrivals) = SourceFeed::new();
        let condition = feed.condition();
        let task = tokio::spawn(listener.run(feed));
        Self {
            connections,
            arrivals,
            condition,
            task,
        }
    }

    async fn connection(&mut self) -> WebSocketStream<TcpStream> {
        let stream = timeout(SOON, self.connections.recv()).await.unwrap().unwrap();
        accept_async(stream).await.unwrap()
    }

    /// The payload of the next arrival, which is answered with `answer`.
    async fn next(&mut self, answer: ArrivalOutcome) -> Vec<u8> {
        let arrival = timeout(SOON, self.arrivals.recv()).await.unwrap().unwrap();
        arrival.answer.send(answer).unwrap();
        arrival.message.payload
    }

    async fn failure(&mut self) -> String {
        let failed = self.condition.wait_for(|condition| condition.failure.is_some());
        let failed = timeout(SOON, failed).await.unwrap().unwrap();
        failed.failure.clone().unwrap()
    }
}

#[tokio::test]
async fn texts_and_bytes_are_events_and_each_connection_begins_with_headers_and_the_subscription() {
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("X-Token"), "t0ken\n").unwrap();
    let mut running = Running::new(SOON, |listener| {
        listener.subscribe = Some("news, please".into());
        listener.place.headers_dir = Some(secret.path().into());
    })
    .await;
    for _ in 0..2 {
        let stream = timeout(SOON, running.connections.recv()).await.unwrap().unwrap();
        let mut head = vec![0; 4096];
        let length = stream.peek(&mut head).await.unwrap();
        let head = String::from_utf8_lossy(&head[..length]).to_ascii_lowercase();
        assert!(head.contains("x-token: t0ken\r\n"), "{head}");
        let mut socket = accept_async(stream).await.unwrap();
        let first = socket.next().await.unwrap().unwrap();
        assert_eq!(first, Message::text("news, please"));
        socket.send(Message::text("{\"n\": 1}")).await.unwrap();
        socket.send(Message::binary(b"2".to_vec())).await.unwrap();
        assert_eq!(running.next(ArrivalOutcome::OnDisk).await, b"{\"n\": 1}");
        assert_eq!(running.next(ArrivalOutcome::Known).await, b"2");
        // A normal close is not a failure.
        socket.close(None).await.unwrap();
    }
    assert!(running.condition.borrow().connected);
    assert_eq!(running.condition.borrow().failures, 0);
}

#[tokio::test]
async fn a_message_of_the_maximum_length_is_accepted_and_a_longer_one_closes_the_connection() {
    let fragment = |text: &str, code, is_last| {
        Message::Frame(Frame::message(text.as_bytes().to_vec(), OpCode::Data(code), is_last))
    };
    let too_long = [
        vec![Message::text("x".repeat(MAX_MESSAGE_BYTES + 1))],
        vec![
            fragment("0123456789", Data::Text, false),
            fragment("01234567890", Data::Continue, true),
        ],
    ];
    for messages in too_long {
        let mut running = Running::new(SOON, |_| {}).await;
        let mut socket = running.connection().await;
        socket.send(Message::text("x".repeat(MAX_MESSAGE_BYTES))).await.unwrap();
        socket.send(fragment("0123456789", Data::Text, false)).await.unwrap();
        socket.send(fragment("0123456789", Data::Continue, true)).await.unwrap();
        assert_eq!(running.next(ArrivalOutcome::OnDisk).await.len(), MAX_MESSAGE_BYTES);
        assert_eq!(running.next(ArrivalOutcome::OnDisk).await, b"01234567890123456789");
        for message in messages {
            socket.send(message).await.unwrap();
        }
        assert_eq!(running.next(ArrivalOutcome::Dropped).await.len(), MAX_MESSAGE_BYTES + 1);
        let expected = "a message is longer than 20 bytes (spec.limits.maxPayloadBytes) and was dropped";
        assert_eq!(running.failure().await, expected);
        let mut socket = running.connection().await;
        socket.send(Message::text("again")).await.unwrap();
        assert_eq!(running.next(ArrivalOutcome::OnDisk).await, b"again");
        assert!(running.condition.borrow().connected);
    }
}

#[tokio::test]
async fn a_huge_message_is_refused_by_its_head_alone() {
    let mut running = Running::new(SOON, |_| {}).await;
    let mut socket = running.connection().await;
    // The header of a text message of 2^62 bytes, without the text.
    let head = [&[0x81, 127][..], &(1_u64 << 62).to_be_bytes()].concat();
    socket.get_mut().write_all(&head).await.unwrap();
    assert_eq!(running.next(ArrivalOutcome::Dropped).await.len(), MAX_MESSAGE_BYTES + 1);
}

#[tokio::test]
async fn silence_ends_a_connection_and_the_answer_to_a_ping_is_no_silence() {
    for _ in 0..ATTEMPTS {
        if ends_by_silence_only().await {
            return;
        }
    }
    panic!("the machine stalled in each of {ATTEMPTS} attempts");
}

/// False: the connection ended early, but the machine itself was silent for so long that it had to.
async fn ends_by_silence_only() -> bool {
    const IDLE: Duration = Duration::from_millis(1_500);
    let mut last = Instant::now();
    let mut running = Running::new(IDLE, |_| {}).await;
    let mut answers = running.connection().await;
    let begun = Instant::now();
    let (mut pings, mut longest) = (0, Duration::ZERO);
    // Reading answers pings.
    while begun.elapsed() < IDLE * 2 {
        let message = timeout(SOON, answers.next()).await.unwrap();
        longest = longest.max(last.elapsed());
        last = Instant::now();
        let Some(Ok(message)) = message else { break };
        assert!(message.is_ping(), "{message:?}");
        pings += 1;
    }
    if running.condition.borrow().failures > 0 {
        // A ping comes in each third of the time.
        assert!(
            longest > IDLE / 2,
            "it ended, but never was without a ping for longer than {longest:?}"
        );
        return false;
    }
    assert!(pings >= 3, "{pings}");
    // Nothing reads any more.
    assert_eq!(running.failure().await, "silent for 1 s (idleTimeoutSeconds)");
    drop(running.connection().await);
    true
}

#[tokio::test]
async fn a_server_that_never_answers_is_silent() {
    let mut running = Running::new(Duration::from_secs(1), |_| {}).await;
    let _stream = running.connections.recv().await.unwrap();
    assert_eq!(running.failure().await, "silent for 1 s (idleTimeoutSeconds)");
}

#[tokio::test]
async fn a_message_that_cannot_be_stored_is_offered_again_since_the_server_does_not_repeat_it() {
    let mut running = Running::new(SOON, |_| {}).await;
    let mut socket = running.connection().await;
    socket.send(Message::text("a")).await.unwrap();
    socket.send(Message::text("b")).await.unwrap();
    assert_eq!(running.next(ArrivalOutcome::NotNow).await, b"a");
    assert!(running.failure().await.contains("cannot store incoming events"));
    assert_eq!(running.next(ArrivalOutcome::NotNow).await, b"a");
    assert_eq!(running.next(ArrivalOutcome::OnDisk).await, b"a");
    assert_eq!(running.next(ArrivalOutcome::OnDisk).await, b"b");
    assert!(running.condition.borrow().connected);
    assert_eq!(running.condition.borrow().failures, 1);
}

#[rstest]
#[case::normal(1000, None)]
#[case::going_away(1001, None)]
#[case::policy(1008, Some("policy violation; check headersSecretRef and subscribe"))]
#[case::its_error(1011, Some("internal error"))]
#[case::restart(1012, Some("service restart"))]
#[case::its_own(4001, Some("application-specific; see the server's documentation"))]
#[case::unknown(3999, Some("unknown code"))]
fn a_close_is_reported_without_the_text_of_the_server(#[case] code: u16, #[case] meaning: Option<&str>) {
    let close = CloseFrame {
        code: code.into(),
        reason: "the key is hunter2".into(),
    };
    let failure = closed(Some(&close)).err().map(|failure| failure.0);
    let expected = meaning.map(|meaning| format!("the server closed the WebSocket with code {code}: {meaning}"));
    assert_eq!(failure, expected);
    assert_eq!(closed(None), Ok(()));
}

#[tokio::test]
async fn a_close_with_a_reason_makes_the_next_connection_wait() {
    let mut running = Running::new(SOON, |_| {}).await;
    let mut socket = running.connection().await;
    let reason = CloseFrame {
        code: 1013.into(),
        reason: "".into(),
    };
    socket.close(Some(reason)).await.unwrap();
    assert!(running.failure().await.ends_with("code 1013: overloaded"));
    drop(running.connection().await);
}

const PLAIN: &str = "the server did not accept the WebSocket upgrade; check url";

#[rstest]
#[case::a_page("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", PLAIN)]
#[case::no_right(
    "HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n",
    "the server answers with status 401; check headersSecretRef"
)]
#[case::no_key("HTTP/1.1 101 Ok\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", PLAIN)]
#[case::another_key(
    "HTTP/1.1 101 Ok\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
    PLAIN
)]
#[tokio::test]
async fn an_answer_that_is_none_of_a_web_socket_is_reported(#[case] answer: &str, #[case] expected: &str) {
    let mut running = Running::new(SOON, |_| {}).await;
    let mut stream = running.connections.recv().await.unwrap();
    let mut head = vec![0; 4096];
    let _ = stream.read(&mut head).await.unwrap();
    stream.write_all(answer.as_bytes()).await.unwrap();
    assert_eq!(running.failure().await, expected);
}

#[rstest]
#[case::masked(&[0x81, 0x81, 1, 2, 3, 4, 5], "the server violated the WebSocket protocol: Received a masked frame from server")]
#[case::compressed(&[0xc1, 1, b'x'], "the server violated the WebSocket protocol: Reserved bits are non-zero")]
#[case::no_text(&[0x81, 1, 0xff], "the server sent text that is not UTF-8")]
#[case::no_beginning(&[0x80, 1, b'x'], "the server violated the WebSocket protocol: Continue frame but nothing to continue")]
#[case::broken_off(&[0x81, 20, b'x'], "the connection was interrupted")]
#[tokio::test]
async fn frames_that_are_wrong_end_the_connection_and_nothing_else(#[case] frames: &[u8], #[case] expected: &str) {
    let mut running = Running::new(SOON, |_| {}).await;
    let mut socket = running.connection().await;
    socket.get_mut().write_all(frames).await.unwrap();
    socket.get_mut().shutdown().await.unwrap();
    assert_eq!(running.failure().await, expected);
    let mut socket = running.connection().await;
    socket.send(Message::text("fine")).await.unwrap();
    assert_eq!(running.next(ArrivalOutcome::OnDisk).await, b"fine");
}

#[tokio::test]
async fn an_address_that_is_denied_is_not_connected_to_and_neither_is_one_it_redirects_to() {
    let denied = |address: &str| {
        format!(
            "Sensors may not connect to {address}: ask an administrator to add it to egress.allowedCIDRs in the chart"
        )
    };
    let mut running = Running::new(SOON, |listener| {
        listener.place.policy = Arc::new(AddressPolicy::new(vec![], vec![]));
    })
    .await;
    assert_eq!(running.failure().await, denied("127.0.0.1"));
    assert!(running.connections.try_recv().is_err());

    let mut running = Running::new(SOON, |_| {}).await;
    let mut stream = running.connections.recv().await.unwrap();
    let mut head = vec![0; 4096];
    let _ = stream.read(&mut head).await.unwrap();
    let redirect = "HTTP/1.1 307 There\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n";
    stream.write_all(redirect.as_bytes()).await.unwrap();
    assert_eq!(
        running.failure().await,
        format!("no answer: {}", denied("169.254.169.254"))
    );
}
