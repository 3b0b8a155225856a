//! Relays events from sensor pods to the gateways of their receivers, and acknowledgements back.
//!
//! Persists nothing: an event stays in the sensor pod's outbox until its receiver has it on disk. In memory, with
//! bounds, are the connected gateways and the requests that wait for an acknowledgement. The reconciler decides which
//! Sensor may deliver to which Agent.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout};

use crate::api::NamespacedName;
use crate::link::deliveries::{Delivery, DeliveryAck, DeliveryRequest, SensorDirectives, SensorPodReport};
use crate::link::messages::{PodRefusal, REPORT_SECONDS, RefusalCode};
use crate::link::server::PodIdentity;

/// Capacity of the queue of deliveries to one gateway; further ones are refused.
const QUEUE: usize = 4;

/// A sensor pod without contact for this long is silent: it has missed two reports.
pub const REPORT_TIMEOUT: Duration = Duration::from_secs(2 * REPORT_SECONDS);

/// What the relay knows of a sensor pod.
#[derive(Clone, Debug, PartialEq)]
pub struct SensorSession {
    pub pod_uid: String,
    pub last_report: Option<SensorPodReport>,
    /// No contact for [`REPORT_TIMEOUT`].
    pub silent: bool,
}

struct SensorPodSession {
    sensor: NamespacedName,
    directives: watch::Sender<SensorDirectives>,
    last_report: Option<SensorPodReport>,
    /// Time of the last contact, or of the registration.
    contact: Instant,
    /// Whether the reconciler has been notified of the silence.
    noticed: bool,
}

impl SensorPodSession {
    fn is_silent(&self) -> bool {
        self.contact.elapsed() >= REPORT_TIMEOUT
    }
}

struct GatewayChannel {
    deliveries: mpsc::Sender<Delivery>,
    revision: u64,
}

#[derive(Default)]
struct DeliveryRelayState {
    /// Sensor pods, by UID.
    pods: HashMap<String, SensorPodSession>,
    /// The connected gateways.
    lines: HashMap<NamespacedName, GatewayChannel>,
    /// The revision of the gateway that connected last.
    came: u64,
    /// Requests that wait for the acknowledgement of a receiver, by receiver and UID of the Sensor.
    waiting: HashMap<(NamespacedName, String), oneshot::Sender<DeliveryAck>>,
}

/// Relays events and their acknowledgements between sensor pods and gateways.
pub struct DeliveryRelay {
    table: Mutex<DeliveryRelayState>,
    changed: mpsc::UnboundedSender<NamespacedName>,
    wait: Duration,
}

impl DeliveryRelay {
    /// Creates a relay that waits this long for acknowledgements, and the stream of Sensors whose pods have sent a new
    /// report.
    #[must_use]
    pub fn new(wait: Duration) -> (Self, mpsc::UnboundedReceiver<NamespacedName>) {
        let (changed, stream) = mpsc::unbounded_channel();
        let relay = Self {
            table: Mutex::default(),
            changed,
            wait,
        };
        (relay, stream)
    }

    /// Registers the Sensor's pod and its directives. Idempotent; other pods of the Sensor are refused from then on.
    pub fn expect_pod(&self, sensor: &NamespacedName, pod_uid: &str, mut directives: SensorDirectives) {
        let mut table = self.lock();
        table.revise(sensor, &mut directives);
        table
            .pods
            .retain(|uid, entry| uid == pod_uid || entry.sensor != *sensor);
        if let Some(entry) = table.pods.get_mut(pod_uid) {
            entry.directives.send_if_modified(|old| {
                let new = *old != directives;
                *old = directives;
                new
            });
            return;
        }
        let entry = SensorPodSession {
            sensor: sensor.clone(),
            directives: watch::Sender::new(directives),
            last_report: None,
            contact: Instant::now(),
            noticed: false,
        };
        table.pods.insert(pod_uid.into(), entry);
    }

    /// Removes the Sensor's pod.
    pub fn forget(&self, sensor: &NamespacedName) {
        self.lock().pods.retain(|_, entry| entry.sensor != *sensor);
    }

    /// The session of the Sensor's pod; `None` if it has no registered pod.
    #[must_use]
    pub fn session(&self, sensor: &NamespacedName) -> Option<SensorSession> {
        let table = self.lock();
        let (uid, entry) = table.pods.iter().find(|(_, entry)| entry.sensor == *sensor)?;
        Some(SensorSession {
            pod_uid: uid.clone(),
            last_report: entry.last_report.clone(),
            silent: entry.is_silent(),
        })
    }

    /// Notifies the reconciler of each pod whose silence began since the last sweep. The next contact notifies it of
    /// the end.
    pub fn detect_silent_pods(&self) {
        for entry in self.lock().pods.values_mut() {
            if entry.is_silent() && !entry.noticed {
                entry.noticed = true;
                let _ = self.changed.send(entry.sensor.clone());
            }
        }
    }

    /// Records contact with a sensor pod, and notifies the reconciler if it was silent.
    fn record_contact(&self, entry: &mut SensorPodSession) {
        entry.contact = Instant::now();
        if std::mem::take(&mut entry.noticed) {
            // Fails only during shutdown.
            let _ = self.changed.send(entry.sensor.clone());
        }
    }

    /// The directives for a sensor pod, with their later changes.
    pub fn attach(&self, pod: &PodIdentity) -> Result<watch::Receiver<SensorDirectives>, PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table, pod)?;
        self.record_contact(entry);
        Ok(entry.directives.subscribe())
    }

    /// Stores the report of a sensor pod. Notifies the reconciler if the report differs from the last one.
    pub fn report(&self, pod: &PodIdentity, report: SensorPodReport) -> Result<(), PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table, pod)?;
        self.record_contact(entry);
        if entry.last_report.as_ref() != Some(&report) {
            entry.last_report = Some(report);
            // Fails only during shutdown.
            let _ = self.changed.send(entry.sensor.clone());
        }
        Ok(())
    }

    /// Connects a gateway and replaces an earlier one of the same Agent. Sensor pods that deliver to this Agent receive
    /// the new revision at once, so that they retry pending deliveries without waiting for their backoff.
    pub fn register_gateway(&self, agent: &NamespacedName) -> mpsc::Receiver<Delivery> {
        let (line, deliveries) = mpsc::channel(QUEUE);
        let mut table = self.lock();
        table.came += 1;
        let revision = table.came;
        let line = GatewayChannel {
            deliveries: line,
            revision,
        };
        table.lines.insert(agent.clone(), line);
        // Requests that wait for the previous gateway may never be acknowledged. Dropping them makes the sensor pods
        // send again, to this gateway.
        table.waiting.retain(|(receiver, _), _| receiver != agent);
        for entry in table.pods.values() {
            if entry.sensor.namespace == agent.namespace {
                entry.directives.send_if_modified(|directives| {
                    let receivers = directives.receivers.iter_mut().flatten();
                    let mut its = receivers.filter(|receiver| receiver.name == agent.name);
                    its.next().map(|receiver| receiver.revision = revision).is_some()
                });
            }
        }
        deliveries
    }

    /// Passes the acknowledgement of a receiver to the waiting request.
    pub fn delivered(&self, agent: &NamespacedName, delivered: DeliveryAck) {
        let waiting = self.lock().waiting.remove(&(agent.clone(), delivered.sensor.clone()));
        if let Some(waiting) = waiting {
            let _ = waiting.send(delivered);
        }
    }

    /// Forwards events and waits for the receiver's acknowledgement.
    pub async fn deliver(&self, pod: &PodIdentity, deliver: DeliveryRequest) -> Result<DeliveryAck, PodRefusal> {
        let ack = self.forward(pod, deliver)?;
        match timeout(self.wait, ack).await {
            Ok(Ok(delivered)) => Ok(delivered),
            Ok(Err(_)) => Err(receiver_away(
                "a newer request replaced this one, or the receiver's gateway was replaced",
            )),
            Err(_) => Err(receiver_away("the receiver did not acknowledge these events in time")),
        }
    }

    /// The receiver of this delivery, if it is one.
    #[must_use]
    pub fn receiver(&self, pod: &PodIdentity, deliver: &DeliveryRequest) -> Option<NamespacedName> {
        let mut table = self.lock();
        let directives = authorized_session(&mut table, pod).ok()?.directives.borrow();
        let mut receivers = directives.receivers.iter().flatten();
        let receiver = receivers.find(|receiver| receiver.uid == deliver.receiver)?;
        Some(NamespacedName::new(&pod.namespace, &receiver.name))
    }

    fn forward(
        &self,
        pod: &PodIdentity,
        mut deliver: DeliveryRequest,
    ) -> Result<oneshot::Receiver<DeliveryAck>, PodRefusal> {
        let mut table = self.lock();
        let entry = authorized_session(&mut table, pod)?;
        self.record_contact(entry);
        let directives = entry.directives.borrow();
        let terms = directives.terms.as_ref();
        let Some(terms) = terms.filter(|terms| terms.uid == deliver.delivery.sensor) else {
            return Err(unknown("these events do not belong to this pod's Sensor"));
        };
        // Overwrite the name and limit with those of the reconciler: receivers must not rely on what the pod claims.
        deliver.delivery.name.clone_from(&terms.name);
        deliver.delivery.per_minute = Some(terms.spec.limits.per_minute);
        let receivers = directives.receivers.as_deref().unwrap_or_default();
        let receiver = receivers.iter().find(|receiver| receiver.uid == deliver.receiver);
        let Some(receiver) = receiver else {
            return Err(unknown("this Agent does not receive events of this pod's Sensor"));
        };
        let agent = NamespacedName::new(&pod.namespace, &receiver.name);
        drop(directives);
        // The connected gateway may still belong to a deleted Agent with the same name. It compares this UID and does
        // not accept another Agent's events.
        deliver.delivery.receiver = deliver.receiver;
        // Created before sending, because the acknowledgement may arrive before this function returns.
        let (word, ack) = oneshot::channel();
        let key = (agent.clone(), deliver.delivery.sensor.clone());
        let sent = table
            .lines
            .get(&agent)
            .map(|line| line.deliveries.try_reserve().map(|place| place.send(deliver.delivery)));
        match sent {
            Some(Ok(())) => {}
            Some(Err(mpsc::error::TrySendError::Full(()))) => {
                return Err(receiver_away("the receiver is slow; retry"));
            }
            Some(Err(mpsc::error::TrySendError::Closed(()))) | None => {
                table.lines.remove(&agent);
                return Err(receiver_away("the receiver has no connected pod; retry"));
            }
        }
        table.waiting.retain(|_, word| !word.is_closed());
        table.waiting.insert(key, word);
        Ok(ack)
    }

    fn lock(&self) -> MutexGuard<'_, DeliveryRelayState> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeliveryRelayState {
    /// Sets the revision of each receiver to that of its connected gateway; 0 without one.
    fn revise(&self, sensor: &NamespacedName, directives: &mut SensorDirectives) {
        for receiver in directives.receivers.iter_mut().flatten() {
            let agent = NamespacedName::new(&sensor.namespace, &receiver.name);
            receiver.revision = self.lines.get(&agent).map_or(0, |line| line.revision);
        }
    }
}

fn authorized_session<'a>(
    table: &'a mut DeliveryRelayState,
    pod: &PodIdentity,
) -> Result<&'a mut SensorPodSession, PodRefusal> {
    let entry = table.pods.get_mut(&pod.uid);
    entry
        .filter(|entry| entry.sensor.namespace == pod.namespace)
        .ok_or_else(|| PodRefusal {
            code: RefusalCode::NotLeading,
            message: "the controller has not registered this pod yet, or another pod has replaced it".into(),
        })
}

#[must_use]
pub fn receiver_away(message: &str) -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Away,
        message: message.into(),
    }
}

fn unknown(message: &str) -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Unknown,
        message: message.into(),
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use pretty_assertions::assert_eq;
    use serde_json::json;

    use super::*;
    use crate::link::deliveries::{ReceiverTerms, SensorEvent};
    use crate::link::sensor_messages::{SensorReport, SensorTerms};
    use crate::link::server::PodKind;

    fn pod(uid: &str, namespace: &str) -> PodIdentity {
        PodIdentity {
            namespace: namespace.into(),
            name: "any".into(),
            uid: uid.into(),
            kind: PodKind::Sensor,
        }
    }

    fn sensor() -> NamespacedName {
        NamespacedName::new("a", "s")
    }

    fn agent() -> NamespacedName {
        NamespacedName::new("a", "x")
    }

    fn directives() -> SensorDirectives {
        let spec = json!({"agentNames": ["x"], "source": {}});
        SensorDirectives {
            terms: Some(SensorTerms {
                uid: "sensor-uid".into(),
                name: "s".into(),
                generation: 1,
                spec: serde_json::from_value(spec).unwrap(),
            }),
            receivers: Some(vec![ReceiverTerms {
                uid: "x-uid".into(),
                name: "x".into(),
                revision: 0,
            }]),
        }
    }

    fn deliver(sensor: &str, receiver: &str) -> DeliveryRequest {
        let event = SensorEvent {
            seq: 7,
            id: "id".into(),
            at: Timestamp::UNIX_EPOCH,
            ..SensorEvent::default()
        };
        DeliveryRequest {
            receiver: receiver.into(),
            delivery: Delivery {
                sensor: sensor.into(),
                name: "s".into(),
                receiver: receiver.into(),
                outbox: "o".into(),
                per_minute: None,
                events: vec![event],
            },
        }
    }

    fn relay() -> DeliveryRelay {
        let (relay, _) = DeliveryRelay::new(Duration::from_secs(5));
        relay.expect_pod(&sensor(), "p1", directives());
        relay
    }

    fn word(through: i64) -> DeliveryAck {
        DeliveryAck {
            sensor: "sensor-uid".into(),
            outbox: "o".into(),
            through,
        }
    }

    async fn code(relay: &DeliveryRelay, pod: PodIdentity, deliver: DeliveryRequest) -> RefusalCode {
        relay.deliver(&pod, deliver).await.unwrap_err().code
    }

    #[tokio::test(start_paused = true)]
    async fn events_are_answered_once_the_receiver_has_acknowledged_them() {
        let relay = relay();
        let mut gateway = relay.register_gateway(&agent());
        let pod = pod("p1", "a");
        let (answer, ()) = tokio::join!(relay.deliver(&pod, deliver("sensor-uid", "x-uid")), async {
            let delivery = gateway.recv().await.unwrap();
            let sent = Delivery {
                per_minute: Some(60),
                ..deliver("sensor-uid", "x-uid").delivery
            };
            assert_eq!(delivery, sent);
            // Acknowledgements for another Sensor and from another receiver must not complete the request.
            relay.delivered(
                &agent(),
                DeliveryAck {
                    sensor: "other".into(),
                    through: 9,
                    ..DeliveryAck::default()
                },
            );
            relay.delivered(&NamespacedName::new("a", "y"), word(8));
            relay.delivered(&agent(), word(7));
        });
        assert_eq!(answer, Ok(word(7)));
    }

    #[tokio::test(start_paused = true)]
    async fn name_and_limit_of_a_sensor_come_from_its_spec_and_not_from_its_pod() {
        let relay = relay();
        let mut gateway = relay.register_gateway(&agent());
        let mut lie = deliver("sensor-uid", "x-uid");
        (lie.delivery.name, lie.delivery.per_minute) = ("another".into(), Some(60_000));
        let _heard = relay.forward(&pod("p1", "a"), lie).unwrap();
        let delivery = gateway.recv().await.unwrap();
        assert_eq!((&*delivery.name, delivery.per_minute), ("s", Some(60)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_frozen_or_absent_receiver_is_reported_unavailable_within_bounded_time_and_memory() {
        let relay = relay();
        let of = || deliver("sensor-uid", "x-uid");
        assert_eq!(code(&relay, pod("p1", "a"), of()).await, RefusalCode::Away);
        let gateway = relay.register_gateway(&agent());
        for _ in 0..QUEUE + 2 {
            let begun = tokio::time::Instant::now();
            assert_eq!(code(&relay, pod("p1", "a"), of()).await, RefusalCode::Away);
            assert!(begun.elapsed() <= Duration::from_secs(5));
        }
        assert_eq!(gateway.len(), QUEUE);
        drop(gateway);
        assert_eq!(code(&relay, pod("p1", "a"), of()).await, RefusalCode::Away);
        assert!(relay.lock().lines.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_gateway_ends_the_wait_for_its_predecessor_and_no_other_wait() {
        let relay = relay();
        let _line = relay.register_gateway(&agent());
        let pod = pod("p1", "a");
        let begun = tokio::time::Instant::now();
        let (answer, _line) = tokio::join!(relay.deliver(&pod, deliver("sensor-uid", "x-uid")), async {
            relay.register_gateway(&agent())
        });
        assert_eq!(answer.unwrap_err().code, RefusalCode::Away);
        assert!(begun.elapsed().is_zero(), "{:?}", begun.elapsed());
        let (answer, ()) = tokio::join!(relay.deliver(&pod, deliver("sensor-uid", "x-uid")), async {
            let other = NamespacedName::new("a", "y");
            drop(relay.register_gateway(&other));
            relay.delivered(&agent(), word(7));
        });
        assert_eq!(answer, Ok(word(7)));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_pod_of_a_sensor_delivers_and_only_to_its_receivers() {
        let relay = relay();
        let _gateway = relay.register_gateway(&agent());
        let right = || deliver("sensor-uid", "x-uid");
        assert_eq!(code(&relay, pod("p2", "a"), right()).await, RefusalCode::NotLeading);
        assert_eq!(code(&relay, pod("p1", "b"), right()).await, RefusalCode::NotLeading);
        let foreign = deliver("another", "x-uid");
        assert_eq!(code(&relay, pod("p1", "a"), foreign).await, RefusalCode::Unknown);
        let nobody = deliver("sensor-uid", "y-uid");
        assert_eq!(code(&relay, pod("p1", "a"), nobody).await, RefusalCode::Unknown);
        // Another pod replaces it.
        relay.expect_pod(&sensor(), "p2", directives());
        assert_eq!(code(&relay, pod("p1", "a"), right()).await, RefusalCode::NotLeading);
        assert_eq!(code(&relay, pod("p2", "a"), right()).await, RefusalCode::Away);
        relay.forget(&sensor());
        assert_eq!(code(&relay, pod("p2", "a"), right()).await, RefusalCode::NotLeading);
    }

    #[tokio::test(start_paused = true)]
    async fn a_repeated_request_replaces_the_one_before_it() {
        let relay = relay();
        let mut gateway = relay.register_gateway(&agent());
        let pod = pod("p1", "a");
        let first = relay.deliver(&pod, deliver("sensor-uid", "x-uid"));
        let second = relay.deliver(&pod, deliver("sensor-uid", "x-uid"));
        let (first, second, ()) = tokio::join!(first, second, async {
            gateway.recv().await.unwrap();
            gateway.recv().await.unwrap();
            relay.delivered(&agent(), word(7));
        });
        assert_eq!(first.unwrap_err().code, RefusalCode::Away);
        assert_eq!(second, Ok(word(7)));
        assert!(relay.lock().waiting.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_without_reports_for_30_seconds_is_silent_until_it_reports() {
        let (relay, mut changed) = DeliveryRelay::new(Duration::ZERO);
        let silent = |relay: &DeliveryRelay| relay.session(&sensor()).map(|session| session.silent);
        assert_eq!(silent(&relay), None);
        relay.expect_pod(&sensor(), "p1", directives());
        let speak = || drop(relay.attach(&pod("p1", "a")).unwrap());
        for again in 0..2 {
            speak();
            tokio::time::advance(REPORT_TIMEOUT.checked_sub(Duration::from_millis(1)).unwrap()).await;
            relay.detect_silent_pods();
            assert_eq!(silent(&relay), Some(false));
            assert!(changed.try_recv().is_err(), "{again}");
            tokio::time::advance(Duration::from_millis(1)).await;
            relay.detect_silent_pods();
            relay.detect_silent_pods();
            assert_eq!(silent(&relay), Some(true));
            assert_eq!(changed.try_recv(), Ok(sensor()), "once");
            assert!(changed.try_recv().is_err());
            speak();
            assert_eq!(changed.try_recv(), Ok(sensor()), "contact again");
            assert_eq!(silent(&relay), Some(false));
        }
        // A pod that replaces it gets the full time again.
        tokio::time::advance(REPORT_TIMEOUT).await;
        relay.expect_pod(&sensor(), "p2", directives());
        assert_eq!(silent(&relay), Some(false));
    }

    #[tokio::test]
    async fn a_new_receiver_is_announced_at_once_to_its_sensor_pods_only() {
        let relay = relay();
        let mut level = relay.attach(&pod("p1", "a")).unwrap();
        let revision = |level: &mut watch::Receiver<SensorDirectives>| {
            let directives = level.borrow_and_update().clone();
            directives.receivers.unwrap()[0].revision
        };
        assert_eq!(revision(&mut level), 0);
        drop((
            relay.register_gateway(&NamespacedName::new("a", "y")),
            relay.register_gateway(&NamespacedName::new("b", "x")),
        ));
        assert!(!level.has_changed().unwrap());
        drop(relay.register_gateway(&agent()));
        assert!(level.has_changed().unwrap());
        let first = revision(&mut level);
        relay.expect_pod(&sensor(), "p1", directives());
        assert!(
            !level.has_changed().unwrap(),
            "the reconciler does not change the revision"
        );
        let _line = relay.register_gateway(&agent());
        assert_ne!(revision(&mut level), first);
    }

    #[tokio::test]
    async fn directives_are_level_triggered_and_each_new_report_wakes_the_reconciler_once() {
        let (relay, mut changed) = DeliveryRelay::new(Duration::ZERO);
        relay.expect_pod(&sensor(), "p1", directives());
        let mut level = relay.attach(&pod("p1", "a")).unwrap();
        level.mark_unchanged();
        relay.expect_pod(&sensor(), "p1", directives());
        assert!(!level.has_changed().unwrap());
        relay.expect_pod(&sensor(), "p1", SensorDirectives::default());
        assert!(level.has_changed().unwrap());
        level.mark_unchanged();
        let report = |pending| SensorPodReport {
            report: SensorReport {
                uid: "sensor-uid".into(),
                generation: 1,
                totals: crate::api::sensor::SensorTotals::default(),
                last: None,
                consecutive_failures: 0,
                failure: None,
                next_attempt_at: None,
            },
            pending_deliveries: pending,
        };
        for pending in [1, 1, 2] {
            relay.report(&pod("p1", "a"), report(pending)).unwrap();
        }
        assert_eq!(relay.session(&sensor()).unwrap().last_report, Some(report(2)));
        assert_eq!(changed.recv().await, Some(sensor()));
        assert_eq!(changed.recv().await, Some(sensor()));
        assert!(changed.try_recv().is_err());
        relay.forget(&sensor());
        assert!(level.changed().await.is_err());
    }
}
