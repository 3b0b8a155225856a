//! Tests of the webhook on loopback, with requests signed by the real openssl.

use std::io::Write;
use std::process::{Command, Stdio};

use rstest::rstest;
use tempfile::NamedTempFile;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;
use crate::source::SourceArrival;
use agentloop_api::source::SignatureScheme;

const KEY: &str = "a key of twenty bytes";
/// Longest wait for room: less than [`READ_TIMEOUT`], after which slow senders give theirs back.
const SOON: Duration = Duration::from_secs(5);
/// How long room that there must not be is waited for.
const MOMENT: Duration = Duration::from_millis(500);

struct Hook {
    url: String,
    key: NamedTempFile,
    arrivals: mpsc::Receiver<SourceArrival>,
    condition: tokio::sync::watch::Receiver<crate::source::SourceCondition>,
    stop: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
}

impl Hook {
    async fn new(scheme: SignatureScheme, key: &str) -> Self {
        Self::sized(scheme, key, 100).await
    }

    async fn sized(scheme: SignatureScheme, key: &str, max_bytes: usize) -> Self {
        // Fails if another test installed a provider first, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut file = NamedTempFile::new().unwrap();
        write!(file, "{key}").unwrap();
        let receiver = WebhookReceiver {
            rule: SignatureRule {
                scheme,
                id_header: None,
            },
            key_file: file.path().into(),
            max_bytes,
            // One peer has ten of these.
            connections: 40,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let (feed, arrivals) = SourceFeed::new();
        let condition = feed.condition();
        let stop = CancellationToken::new();
        let task = tokio::spawn(receiver.run(listener, feed, stop.clone()));
        Self {
            url,
            key: file,
            arrivals,
            condition,
            stop,
            task,
        }
    }

    /// Sends a request; the arrival is answered with this outcome.
    async fn send(
        &mut self,
        headers: &[(&str, String)],
        body: String,
        taken: ArrivalOutcome,
    ) -> (u16, Option<SourceMessage>) {
        let client = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .build()
            .unwrap();
        let mut request = client.post(&self.url).body(body);
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let answer = tokio::spawn(request.send());
        let mut message = None;
        tokio::pin!(answer);
        let answer = loop {
            tokio::select! {
                answer = &mut answer => break answer.unwrap().unwrap(),
                Some(arrival) = self.arrivals.recv() => {
                    message = Some(arrival.message);
                    arrival.answer.send(taken).unwrap();
                }
            }
        };
        (answer.status().as_u16(), message)
    }

    /// The same, where the connection may be refused.
    async fn try_send(&mut self, headers: &[(&str, String)], body: &str) -> Option<u16> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .build()
            .unwrap();
        let mut request = client.post(&self.url).body(body.to_owned());
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let answer = tokio::spawn(request.send());
        tokio::pin!(answer);
        loop {
            tokio::select! {
                answer = &mut answer => return answer.unwrap().ok().map(|answer| answer.status().as_u16()),
                Some(arrival) = self.arrivals.recv() => arrival.answer.send(ArrivalOutcome::OnDisk).unwrap(),
            }
        }
    }

    /// Number of refused deliveries so far.
    fn refused(&self) -> i64 {
        self.condition.borrow().refused
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

/// Output of openssl with these options.
fn openssl(options: &[&str], text: &[u8]) -> Vec<u8> {
    let mut process = Command::new("openssl")
        .args(options)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("openssl");
    process.stdin.take().unwrap().write_all(text).unwrap();
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success());
    output.stdout
}

fn github(body: &str) -> Vec<(&'static str, String)> {
    let output = openssl(&["dgst", "-sha256", "-hmac", KEY, "-hex", "-r"], body.as_bytes());
    let tag = String::from_utf8(output).unwrap();
    let tag = tag.split_whitespace().next().unwrap();
    vec![
        ("X-Hub-Signature-256", format!("sha256={tag}")),
        ("X-GitHub-Delivery", "d-1".to_owned()),
    ]
}

fn standard(body: &str, at: i64) -> Vec<(&'static str, String)> {
    let signed = format!("m-1.{at}.{body}");
    let tag = openssl(&["dgst", "-sha256", "-hmac", KEY, "-binary"], signed.as_bytes());
    let tag = String::from_utf8(openssl(&["base64", "-A"], &tag)).unwrap();
    vec![
        ("webhook-id", "m-1".to_owned()),
        ("webhook-timestamp", at.to_string()),
        ("webhook-signature", format!("v1,{tag}")),
    ]
}

#[rstest]
#[case(ArrivalOutcome::OnDisk, 202)]
#[case(ArrivalOutcome::Known, 200)]
#[case(ArrivalOutcome::Dropped, 429)]
#[case(ArrivalOutcome::NotNow, 503)]
#[tokio::test]
async fn the_answer_reports_the_outcome_of_the_arrival(#[case] taken: ArrivalOutcome, #[case] status: u16) {
    let mut hook = Hook::new(SignatureScheme::GitHub, KEY).await;
    let body = r#"{"action":"opened"}"#;
    let (answer, message) = hook.send(&github(body), body.into(), taken).await;
    assert_eq!(answer, status);
    let message = message.unwrap();
    assert_eq!(
        (message.id.as_deref(), message.payload.as_slice()),
        (Some("d-1"), body.as_bytes())
    );
    hook.end().await;
}

#[tokio::test]
async fn standard_webhooks_are_accepted_once_their_signature_and_time_are_valid() {
    let key = String::from_utf8(openssl(&["base64", "-A"], KEY.as_bytes())).unwrap();
    let mut hook = Hook::new(SignatureScheme::StandardWebhooks, &format!("whsec_{key}\n")).await;
    let now = Timestamp::now().as_second();
    let (answer, message) = hook
        .send(&standard("{}", now), "{}".into(), ArrivalOutcome::OnDisk)
        .await;
    assert_eq!((answer, message.unwrap().id.as_deref()), (202, Some("m-1")));
    let (answer, message) = hook
        .send(&standard("{}", now - 400), "{}".into(), ArrivalOutcome::OnDisk)
        .await;
    assert_eq!((answer, message), (401, None));
    hook.end().await;
}

#[tokio::test]
async fn a_request_not_signed_with_the_key_is_refused_and_not_forwarded() {
    let mut hook = Hook::new(SignatureScheme::GitHub, KEY).await;
    let unsigned = hook.send(&[], "{}".into(), ArrivalOutcome::OnDisk).await;
    assert_eq!(unsigned, (401, None));
    let of_another_text = hook.send(&github("{ }"), "{}".into(), ArrivalOutcome::OnDisk).await;
    assert_eq!(of_another_text, (401, None));
    // The key is rotated: the old one is no longer accepted.
    std::fs::write(hook.key.path(), "a new key").unwrap();
    let with_the_old_key = hook.send(&github("{}"), "{}".into(), ArrivalOutcome::OnDisk).await;
    assert_eq!(with_the_old_key, (401, None));
    hook.end().await;
}

#[tokio::test]
async fn a_body_of_the_maximum_length_is_accepted_and_one_byte_more_is_not() {
    let mut hook = Hook::new(SignatureScheme::GitHub, KEY).await;
    let (exact, longer) = ("x".repeat(100), "x".repeat(101));
    assert_eq!(
        hook.send(&github(&exact), exact.clone(), ArrivalOutcome::OnDisk)
            .await
            .0,
        202
    );
    let too_long = hook
        .send(&github(&longer), longer.clone(), ArrivalOutcome::OnDisk)
        .await;
    assert_eq!(too_long, (413, None));
    hook.end().await;
}

#[tokio::test]
async fn without_a_key_nothing_is_accepted_and_the_sender_should_retry() {
    let mut hook = Hook::new(SignatureScheme::GitHub, "").await;
    assert_eq!(
        hook.send(&github("{}"), "{}".into(), ArrivalOutcome::OnDisk).await,
        (503, None)
    );
    std::fs::remove_file(hook.key.path()).unwrap();
    assert_eq!(
        hook.send(&github("{}"), "{}".into(), ArrivalOutcome::OnDisk).await,
        (503, None)
    );
    hook.end().await;
}

#[tokio::test]
async fn without_a_consumer_the_sender_should_retry() {
    let mut hook = Hook::new(SignatureScheme::GitHub, KEY).await;
    hook.arrivals.close();
    assert_eq!(
        hook.send(&github("{}"), "{}".into(), ArrivalOutcome::OnDisk).await,
        (503, None)
    );
    hook.end().await;
}

#[rstest]
#[case("application/json", "{", 400)]
#[case("application/json; charset=utf-8", "", 400)]
#[case("application/vnd.x+json", "no", 400)]
#[case("application/json", "[1]", 202)]
#[case("text/plain", "no", 202)]
#[tokio::test]
async fn a_body_declared_as_json_must_be_json(#[case] content: &str, #[case] body: &str, #[case] status: u16) {
    let mut hook = Hook::new(SignatureScheme::GitHub, KEY).await;
    let mut headers = github(body);
    headers.push(("Content-Type", content.to_owned()));
    let (answer, _) = hook.send(&headers, body.into(), ArrivalOutcome::OnDisk).await;
    assert_eq!((answer, hook.refused()), (status, i64::from(status == 400)));
    hook.end().await;
}

#[rstest]
#[case(ArrivalOutcome::TooDeep, 400)]
#[case(ArrivalOutcome::Replayed, 409)]
#[tokio::test]
async fn a_request_that_the_sender_must_change_is_refused_for_good_and_counted(
    #[case] taken: ArrivalOutcome,
    #[case] status: u16,
) {
    let mut hook = Hook::new(SignatureScheme::GitHub, KEY).await;
    assert_eq!(hook.send(&github("{}"), "{}".into(), taken).await.0, status);
    assert_eq!(hook.refused(), 1);
    assert_eq!(
        hook.send(&github("{}"), "{}".into(), ArrivalOutcome::Dropped).await.0,
        429
    );
    assert_eq!(hook.refused(), 1, "a rate-limited delivery counts as dropped");
    assert_eq!(hook.send(&[], "{}".into(), ArrivalOutcome::OnDisk).await.0, 401);
    assert_eq!(hook.refused(), 2);
    hook.end().await;
}

/// The status of the response to a request of which only the head is sent.
async fn head_only(url: &str, headers: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!("POST / HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read_exact(&mut answer));
    read.await.expect("an answer without a body").unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn without_a_signature_or_room_for_it_no_body_is_read() {
    let hook = Hook::new(SignatureScheme::GitHub, KEY).await;
    assert_eq!(head_only(&hook.url, "Content-Length: 50").await, "HTTP/1.1 401");
    let signed = "X-Hub-Signature-256: sha256=00\r\nContent-Length: ";
    assert_eq!(head_only(&hook.url, &format!("{signed}101")).await, "HTTP/1.1 413");
    assert_eq!(hook.refused(), 2);
    hook.end().await;
}

#[tokio::test]
async fn a_peer_has_at_most_a_quarter_of_the_connections() {
    let mut hook = Hook::new(SignatureScheme::GitHub, KEY).await;
    let address = hook.url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    let open = || tokio::net::TcpStream::connect(address.clone());
    let mut held = Vec::new();
    for _ in 0..10 {
        held.push(open().await.unwrap());
    }
    // One more connection of this peer is closed at once.
    let mut one_more = open().await.unwrap();
    let mut byte = [0];
    let end = tokio::io::AsyncReadExt::read(&mut one_more, &mut byte);
    let end = tokio::time::timeout(SOON, end).await.unwrap();
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    drop((held, one_more));
    // Once they are closed there is room again.
    let mut tries = 0;
    while hook.try_send(&github("{}"), "{}").await.is_none() {
        tries += 1;
        assert!(tries < 100);
        tokio::task::yield_now().await;
    }
    hook.end().await;
}

/// A connection from another address of this host that announces a body of this many bytes. It gets `100 Continue` once
/// there is room for that.
async fn slow_sender(address: &str, bytes: usize) -> tokio::net::TcpStream {
    use tokio::io::AsyncWriteExt;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut stream = socket.connect(address.parse().unwrap()).await.unwrap();
    let head = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nX-Hub-Signature-256: sha256=00\r\nContent-Length: {bytes}\r\nExpect: 100-continue\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_peer_without_the_key_does_not_exhaust_the_memory_for_all_bodies() {
    let max = BODIES_BYTES / PEERS;
    let mut hook = Hook::sized(SignatureScheme::GitHub, KEY, max).await;
    let address = hook.url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    let mut slow = vec![slow_sender(&address, max).await];
    assert!(has_room(&mut slow[0], SOON).await, "the share of one peer");
    for _ in 1..PEERS {
        let mut stream = slow_sender(&address, max).await;
        assert!(!has_room(&mut stream, MOMENT).await, "more than its share");
        slow.push(stream);
    }
    let signed = github("{}");
    let sent = hook.send(&signed, "{}".into(), ArrivalOutcome::OnDisk);
    let (status, _) = tokio::time::timeout(SOON, sent).await.expect("there is room");
    assert_eq!(status, 202);
    drop(slow);
    hook.end().await;
}

/// Whether a slow sender is asked for its body within this time.
async fn has_room(stream: &mut tokio::net::TcpStream, wait: Duration) -> bool {
    use tokio::io::AsyncReadExt;
    let mut answer = [0; 12];
    let read = tokio::time::timeout(wait, stream.read_exact(&mut answer));
    read.await.is_ok_and(|read| read.is_ok() && &answer == b"HTTP/1.1 100")
}

#[tokio::test]
async fn a_peer_has_its_exact_share_of_the_memory_and_releases_it() {
    let part = BODIES_BYTES / PEERS;
    let hook = Hook::sized(SignatureScheme::GitHub, KEY, part).await;
    let address = hook.url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    let mut one_byte_less = slow_sender(&address, part - 1).await;
    assert!(has_room(&mut one_byte_less, SOON).await);
    let mut the_last_byte = slow_sender(&address, 1).await;
    assert!(has_room(&mut the_last_byte, SOON).await);
    let mut one_more = slow_sender(&address, 1).await;
    assert!(!has_room(&mut one_more, MOMENT).await);
    drop(the_last_byte);
    assert!(has_room(&mut one_more, SOON).await, "the byte is not given back");
    drop((one_byte_less, one_more));
    hook.end().await;
}

#[tokio::test]
async fn an_invalid_key_is_reported_and_admits_nothing() {
    let mut hook = Hook::new(SignatureScheme::StandardWebhooks, "whsec_").await;
    let headers = standard("{}", Timestamp::now().as_second());
    assert_eq!(
        hook.send(&headers, "{}".into(), ArrivalOutcome::OnDisk).await,
        (503, None)
    );
    let failure = hook.condition.borrow().failure.clone().unwrap_or_default();
    assert!(failure.contains("at least 16 bytes"), "{failure}");
    hook.end().await;
}
