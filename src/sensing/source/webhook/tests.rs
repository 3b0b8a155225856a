//! The webhook on loopback, with requests that the real openssl signed.

use std::io::Write;
use std::process::{Command, Stdio};

use rstest::rstest;
use tempfile::NamedTempFile;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;
use crate::api::source::Scheme;
use crate::sensing::source::Arrival;

const KEY: &str = "a key";

struct Hook {
    url: String,
    key: NamedTempFile,
    arrivals: mpsc::Receiver<Arrival>,
    stop: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
}

impl Hook {
    async fn new(scheme: Scheme, key: &str) -> Self {
        // Fails when another test was first; then it is there.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut file = NamedTempFile::new().unwrap();
        write!(file, "{key}").unwrap();
        let receiver = Receiver {
            rule: Rule {
                scheme,
                id_header: None,
            },
            key_file: file.path().into(),
            most_bytes: 100,
            connections: 8,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let (feed, arrivals) = Feed::new();
        let stop = CancellationToken::new();
        let task = tokio::spawn(receiver.run(listener, feed, stop.clone()));
        Self {
            url,
            key: file,
            arrivals,
            stop,
            task,
        }
    }

    /// Sends; what arrives is answered so.
    async fn send(&mut self, headers: &[(&str, String)], body: String, taken: Taken) -> (u16, Option<Heard>) {
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
        let mut heard = None;
        tokio::pin!(answer);
        let answer = loop {
            tokio::select! {
                answer = &mut answer => break answer.unwrap().unwrap(),
                Some(arrival) = self.arrivals.recv() => {
                    heard = Some(arrival.heard);
                    arrival.answer.send(taken).unwrap();
                }
            }
        };
        (answer.status().as_u16(), heard)
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

/// What openssl says, with its options.
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
#[case(Taken::OnDisk, 202)]
#[case(Taken::Known, 200)]
#[case(Taken::Dropped, 429)]
#[case(Taken::NotNow, 503)]
#[tokio::test]
async fn the_answer_says_what_became_of_it(#[case] taken: Taken, #[case] status: u16) {
    let mut hook = Hook::new(Scheme::GitHub, KEY).await;
    let body = r#"{"action":"opened"}"#;
    let (answer, heard) = hook.send(&github(body), body.into(), taken).await;
    assert_eq!(answer, status);
    let heard = heard.unwrap();
    assert_eq!(
        (heard.id.as_deref(), heard.payload.as_slice()),
        (Some("d-1"), body.as_bytes())
    );
    hook.end().await;
}

#[tokio::test]
async fn standard_webhooks_are_taken_once_their_signature_and_time_are_right() {
    let key = String::from_utf8(openssl(&["base64", "-A"], KEY.as_bytes())).unwrap();
    let mut hook = Hook::new(Scheme::StandardWebhooks, &format!("whsec_{key}\n")).await;
    let now = Timestamp::now().as_second();
    let (answer, heard) = hook.send(&standard("{}", now), "{}".into(), Taken::OnDisk).await;
    assert_eq!((answer, heard.unwrap().id.as_deref()), (202, Some("m-1")));
    let (answer, heard) = hook.send(&standard("{}", now - 400), "{}".into(), Taken::OnDisk).await;
    assert_eq!((answer, heard), (401, None));
    hook.end().await;
}

#[tokio::test]
async fn what_is_not_signed_with_the_key_is_refused_and_reaches_nobody() {
    let mut hook = Hook::new(Scheme::GitHub, KEY).await;
    let unsigned = hook.send(&[], "{}".into(), Taken::OnDisk).await;
    assert_eq!(unsigned, (401, None));
    let of_another_text = hook.send(&github("{ }"), "{}".into(), Taken::OnDisk).await;
    assert_eq!(of_another_text, (401, None));
    // The key is changed: the old one opens nothing any more.
    std::fs::write(hook.key.path(), "a new key").unwrap();
    let with_the_old_key = hook.send(&github("{}"), "{}".into(), Taken::OnDisk).await;
    assert_eq!(with_the_old_key, (401, None));
    hook.end().await;
}

#[tokio::test]
async fn a_body_of_the_allowed_length_is_taken_and_one_byte_more_is_not() {
    let mut hook = Hook::new(Scheme::GitHub, KEY).await;
    let (exact, longer) = ("x".repeat(100), "x".repeat(101));
    assert_eq!(hook.send(&github(&exact), exact.clone(), Taken::OnDisk).await.0, 202);
    let too_long = hook.send(&github(&longer), longer.clone(), Taken::OnDisk).await;
    assert_eq!(too_long, (413, None));
    hook.end().await;
}

#[tokio::test]
async fn without_a_key_nothing_is_taken_and_the_sender_is_told_to_come_again() {
    let mut hook = Hook::new(Scheme::GitHub, "").await;
    assert_eq!(hook.send(&github("{}"), "{}".into(), Taken::OnDisk).await, (503, None));
    std::fs::remove_file(hook.key.path()).unwrap();
    assert_eq!(hook.send(&github("{}"), "{}".into(), Taken::OnDisk).await, (503, None));
    hook.end().await;
}

#[tokio::test]
async fn when_nobody_keeps_what_comes_the_sender_is_told_to_come_again() {
    let mut hook = Hook::new(Scheme::GitHub, KEY).await;
    hook.arrivals.close();
    assert_eq!(hook.send(&github("{}"), "{}".into(), Taken::OnDisk).await, (503, None));
    hook.end().await;
}
