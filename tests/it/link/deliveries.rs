//! Events of a sensor pod on their way: the real routes, the real process of a sensor pod, and a receiver that loses and
//! repeats.

use std::path::Path;
use std::process::Stdio;

use agentloop::api::NamespacedName;
use agentloop::link::client::{DirectiveEvent, LinkClient};
use agentloop::link::deliveries::{
    Delivery, DeliveryAck, DeliveryRequest, ReceiverTerms, RelayedDeliveryAck, SensorDirectives, SensorPodReport,
};
use agentloop::link::pod::SensorPodConfig;
use agentloop::link::sensor_messages::SensorTerms;
use pretty_assertions::assert_eq;
use ring::hmac;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::*;
use crate::support::ports::free_port;

/// Longest wait for processes, which a busy machine starts slowly.
pub(super) const WAIT_TIMEOUT: Duration = Duration::from_mins(1);
/// A token that the API server takes for the pod of Sensor `s` in namespace `a`, uid `p1`.
pub(super) const SENSOR_TOKEN: &str = "agentloop.dev/link a agentloop-sensor s-sensor-0 p1";
const KEY: &str = "a key";

pub(super) fn sensor() -> NamespacedName {
    NamespacedName::new("a", "s")
}

pub(super) fn directives(source: &Value) -> SensorDirectives {
    let spec = json!({"agentNames": ["x"], "source": source});
    SensorDirectives {
        terms: Some(SensorTerms {
            uid: "s-uid".into(),
            name: "s".into(),
            generation: 3,
            spec: serde_json::from_value(spec).unwrap(),
        }),
        receivers: Some(vec![ReceiverTerms {
            uid: "x-uid".into(),
            name: "x".into(),
            revision: 0,
        }]),
    }
}

pub(super) fn webhook() -> Value {
    json!({"webhook": {"scheme": "GitHub", "secretKeyRef": {"name": "n", "key": "k"}}})
}

fn deliver() -> String {
    let deliver = DeliveryRequest {
        receiver: "x-uid".into(),
        delivery: Delivery {
            sensor: "s-uid".into(),
            name: "s".into(),
            events: vec![],
            ..Delivery::default()
        },
    };
    serde_json::to_string(&deliver).unwrap()
}

/// A directory with what a pod needs to speak to the controller.
pub(super) fn pod(harness: &LinkHarness, token: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ca.crt"), &harness.ca).unwrap();
    std::fs::write(dir.path().join("token"), token_of(token)).unwrap();
    dir
}

fn client(harness: &LinkHarness, dir: &Path) -> LinkClient {
    LinkClient::new(&harness.url(""), dir.join("ca.crt"), dir.join("token"))
}

#[rstest]
#[case::an_agent_delivers("/v1/deliver", TOKEN)]
#[case::an_agent_reports_as_a_sensor("/v1/sensor/report", TOKEN)]
#[case::a_sensor_attaches("/v1/attach", SENSOR_TOKEN)]
#[case::a_sensor_reports_as_an_agent("/v1/report", SENSOR_TOKEN)]
#[case::a_sensor_asks_for_leases("/v1/lease", SENSOR_TOKEN)]
#[case::a_sensor_takes_its_own_events("/v1/delivered", SENSOR_TOKEN)]
#[tokio::test]
async fn each_kind_of_pod_has_its_own_routes(#[case] path: &str, #[case] token: &str) {
    let harness = LinkHarness::start().await;
    harness.relay.expect_pod(&sensor(), "p1", directives(&webhook()));
    let (status, refusal) = refusal(harness.post(path, token, "{}").await).await;
    assert_eq!((status, refusal.code), (StatusCode::FORBIDDEN, RefusalCode::Unknown));
}

#[tokio::test]
async fn a_sensor_pod_unknown_to_the_reconciler_must_retry() {
    let harness = LinkHarness::start().await;
    let (status, refusal) = refusal(harness.post("/v1/deliver", SENSOR_TOKEN, deliver()).await).await;
    assert_eq!(
        (status, refusal.code),
        (StatusCode::SERVICE_UNAVAILABLE, RefusalCode::NotLeading)
    );
}

#[tokio::test]
async fn a_receiver_that_does_not_listen_is_unavailable() {
    let harness = LinkHarness::start().await;
    harness.relay.expect_pod(&sensor(), "p1", directives(&webhook()));
    let away = || async { refusal(harness.post("/v1/deliver", SENSOR_TOKEN, deliver()).await).await };
    let (status, nobody) = away().await;
    assert_eq!(
        (status, nobody.code),
        (StatusCode::SERVICE_UNAVAILABLE, RefusalCode::Away)
    );
    // It listens, but says nothing: a frozen pod.
    let frozen = harness.listen(EPOCH).await;
    assert_eq!(away().await.1.code, RefusalCode::Away);
    drop(frozen);
}

#[tokio::test]
async fn a_sensor_pod_receives_directives_at_once_and_loses_its_stream_when_replaced() {
    let harness = LinkHarness::start().await;
    harness.relay.expect_pod(&sensor(), "p1", directives(&webhook()));
    let dir = pod(&harness, SENSOR_TOKEN);
    let stream = client(&harness, dir.path()).sensor().await.unwrap();
    tokio::pin!(stream);
    let first = timeout(SOON, stream.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(first, Some(directives(&webhook())));
    let changed = SensorDirectives {
        receivers: Some(vec![]),
        ..directives(&webhook())
    };
    harness.relay.expect_pod(&sensor(), "p1", changed.clone());
    let second = timeout(SOON, stream.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(second, Some(changed));
    harness.relay.expect_pod(&sensor(), "p2", directives(&webhook()));
    assert!(timeout(SOON, stream.next()).await.unwrap().is_none());
}

/// The process of a sensor pod with a webhook.
pub(super) struct SensorPod {
    dir: TempDir,
    address: SocketAddr,
    url: String,
    child: Child,
}

impl SensorPod {
    pub(super) fn start(harness: &LinkHarness) -> Self {
        let dir = pod(harness, SENSOR_TOKEN);
        std::fs::write(dir.path().join("key"), KEY).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let url = harness.url("");
        let child = run(dir.path(), address, &url);
        Self {
            dir,
            address,
            url,
            child,
        }
    }

    /// Kills it, and starts it again on its volume.
    pub(super) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
        self.child = run(self.dir.path(), self.address, &self.url);
    }

    /// Sends one request, as soon as it listens; again while it says 503, as senders do: it does not know yet who its
    /// receivers are.
    pub(super) async fn send(&self, id: &str, text: &str) -> StatusCode {
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, KEY.as_bytes()), text.as_bytes());
        let tag = tag
            .as_ref()
            .iter()
            .fold("sha256=".to_owned(), |tag, byte| format!("{tag}{byte:02x}"));
        let client = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .build()
            .unwrap();
        let request = || {
            client
                .post(format!("http://{}/", self.address))
                .header("x-hub-signature-256", &tag)
                .header("x-github-delivery", id)
                .body(text.to_owned())
                .send()
        };
        let answered = async {
            loop {
                match request().await {
                    Ok(answer) if answer.status() != StatusCode::SERVICE_UNAVAILABLE => return answer.status(),
                    Ok(_) | Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        timeout(WAIT_TIMEOUT, answered).await.unwrap()
    }
}

fn run(dir: &Path, address: SocketAddr, link: &str) -> Child {
    let config = SensorPodConfig {
        namespace: "a".into(),
        link_url: link.into(),
        terms: directives(&webhook()).terms.unwrap(),
        allowed_ranges: vec![],
        denied_ranges: vec![],
    };
    Command::new(env!("CARGO_BIN_EXE_agentloop"))
        .arg("sensor")
        .env("AGENTLOOP_POD", serde_json::to_string(&config).unwrap())
        .env("AGENTLOOP_OUTBOX_DIR", dir.join("outbox"))
        .env("AGENTLOOP_SENSOR_KEY_FILE", dir.join("key"))
        .env("AGENTLOOP_WEBHOOK_ADDRESS", address.to_string())
        .env("AGENTLOOP_LINK_TOKEN_FILE", dir.join("token"))
        .env("AGENTLOOP_LINK_CA_FILE", dir.join("ca.crt"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// What Agent `x` has on disk.
#[derive(Default)]
struct Journal {
    through: i64,
    texts: Vec<String>,
}

impl Journal {
    fn apply(&mut self, delivery: Delivery) -> DeliveryAck {
        for event in delivery.events {
            if event.seq > self.through {
                self.through = event.seq;
                self.texts
                    .extend(event.notifications.into_iter().map(|notice| notice.text));
            }
        }
        DeliveryAck {
            sensor: delivery.sensor,
            outbox: delivery.outbox,
            through: self.through,
        }
    }
}

/// Listens as the gateway of `x` until the journal has `texts` texts and its word is taken. Of its first words, `lost`
/// are lost.
async fn receive(harness: &LinkHarness, journal: &mut Journal, texts: usize, mut lost: u32) {
    let dir = pod(harness, TOKEN);
    let client = client(harness, dir.path());
    let stream = client.directives(EPOCH).await.unwrap();
    tokio::pin!(stream);
    let mut told = false;
    while journal.texts.len() < texts || !told {
        let event = timeout(WAIT_TIMEOUT, stream.next()).await.unwrap().unwrap();
        if let DirectiveEvent::Delivery(delivery) = event.unwrap() {
            let delivered = journal.apply(*delivery);
            if lost > 0 {
                lost -= 1;
                continue;
            }
            let word = RelayedDeliveryAck {
                epoch: EPOCH,
                delivered,
            };
            client.delivered(&word).await.unwrap();
            told = true;
        }
    }
}

fn last_report(harness: &LinkHarness) -> Option<SensorPodReport> {
    harness.relay.session(&sensor())?.last_report
}

pub(super) async fn until_reported(
    harness: &LinkHarness,
    what: &str,
    wanted: impl Fn(&SensorPodReport) -> bool,
) -> SensorPodReport {
    let reported = async {
        loop {
            match last_report(harness) {
                Some(report) if wanted(&report) => return report,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let found = timeout(WAIT_TIMEOUT, reported).await;
    found.unwrap_or_else(|_| panic!("no report of {what}: {:?}", last_report(harness)))
}

#[tokio::test]
async fn webhook_events_reach_the_receiver_once_despite_killed_pods_and_lost_answers() {
    let harness = LinkHarness::start().await;
    harness.relay.expect_pod(&sensor(), "p1", directives(&webhook()));
    let mut pod = SensorPod::start(&harness);
    assert_eq!(pod.send("1", "\"one\"").await, StatusCode::ACCEPTED);
    // Killed with an event that was not delivered: it is on disk, and so is its id.
    pod.kill().await;
    assert_eq!(pod.send("1", "\"one\"").await, StatusCode::OK);
    assert_eq!(pod.send("2", "\"two\"").await, StatusCode::ACCEPTED);
    let mut journal = Journal::default();
    receive(&harness, &mut journal, 2, 1).await;
    assert_eq!(journal.texts, ["\"one\"", "\"two\""]);
    let report = until_reported(&harness, "an empty outbox", |report| report.pending_deliveries == 0).await;
    assert_eq!(report.report.totals.events, 2);
    pod.kill().await;
    assert_eq!(pod.send("3", "\"three\"").await, StatusCode::ACCEPTED);
    receive(&harness, &mut journal, 3, 0).await;
    assert_eq!(journal.texts, ["\"one\"", "\"two\"", "\"three\""]);
}

#[tokio::test]
async fn a_suspended_sensor_does_not_listen_and_continues_on_resume() {
    let harness = LinkHarness::start().await;
    let mut suspended = directives(&webhook());
    if let Some(terms) = &mut suspended.terms {
        terms.spec.suspend = true;
        terms.generation = 4;
    }
    harness.relay.expect_pod(&sensor(), "p1", suspended);
    let pod = SensorPod::start(&harness);
    until_reported(&harness, "the new spec", |report| report.report.generation == 4).await;
    assert!(reqwest::get(format!("http://{}/healthz", pod.address)).await.is_err());
    harness.relay.expect_pod(&sensor(), "p1", directives(&webhook()));
    assert_eq!(pod.send("1", "1").await, StatusCode::ACCEPTED);
}
