//! Serves the pods' requests on the link: [`PodAuthenticator`] identifies them, [`PodSessions`] authorizes them.
//!
//! A pod may act only for the Agent with its own namespace and name, and only while the reconciler expects exactly that
//! pod.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use strum::IntoEnumIterator;
use tokio::sync::{mpsc, watch};

use super::agent::{self, AgentsView};
use super::auth::access::{ClientAction, ClientAuthorizer};
use super::auth::identity::PodAuthenticator;
use super::budget::BudgetLedger;
use super::delivery_relay::{DeliveryRelay, receiver_away};
use super::event_subscriptions;
use super::gates::answers::GateAnswerRecorder;
use super::history::{self, HistoryReceiver};
use super::pod_sessions::{LivePod, PodSessions};
use super::runtime::{EventSink, WallClock};
use super::task_relay::{TaskRelay, random_id};
use crate::api::NamespacedName;
use crate::history::HistoryAgent;
use crate::ledger::account::LeaseHolder;
use crate::link::answers::{AnsweredGate, GateAnswerRequest};
use crate::link::deliveries::{
    Delivery, DeliveryAck, DeliveryRequest, RelayedDeliveryAck, SensorDirectives, SensorPodReport,
};
use crate::link::events::{
    ClientRefusal, ClientRefusalCode, EventStream, EventSubscription, EventsPage, EventsResponse, ReadRequest,
};
use crate::link::history::{HistoryAck, HistoryBatch};
use crate::link::messages::{
    AttachRequest, AttachResponse, Directives, LeaseRequest, LeaseResponse, LoopTotals, PodRefusal, PodReport,
    RefusalCode,
};
use crate::link::server::{LinkHandler, PodIdentity};
use crate::link::task_requests::{AcceptedTask, ID_PREFIX, RelayedTaskAck, RequestedTask, TaskRequest};
use crate::link::text_fragments::RelayedTextFragment;
use crate::telemetry::metrics::Metrics;

/// How long a request waits for the pod of an Agent that was scaled to zero.
const START_WAIT: Duration = Duration::from_secs(20);

pub struct ControllerLink {
    /// Identifies pods.
    pub identities: PodAuthenticator,
    /// Authorizes readers of events, and people who answer gates.
    pub access: ClientAuthorizer,
    /// Records the answers to gates.
    pub answers: GateAnswerRecorder,
    /// The sessions of the pods, shared with the reconciler.
    pub loops: Arc<PodSessions>,
    /// Relays the events of sensor pods.
    pub relay: Arc<DeliveryRelay>,
    /// Relays the tasks of users.
    pub tasks: Arc<TaskRelay>,
    /// The Agents, once the caches are filled. Until then, every request is refused with a retryable code.
    pub agents: Arc<OnceLock<AgentsView>>,
    /// The [`BudgetLedger`].
    pub budgets: Arc<BudgetLedger>,
    /// Stores the histories of Agents, if a database is configured.
    pub history: Option<HistoryReceiver>,
    /// Counts attaches, reports and refusals.
    pub metrics: Arc<Metrics>,
    pub events: EventSink,
    pub clock: WallClock,
}

impl ControllerLink {
    /// Attaches a pod: returns the known totals of its loop, and its [`Directives`].
    fn attach_pod(
        &self,
        pod: &PodIdentity,
        epoch: i64,
    ) -> Result<(LoopTotals, watch::Receiver<Directives>), PodRefusal> {
        let agent = self.agent_of(pod)?;
        self.loops.attach(&agent, &live_pod(pod, epoch), (self.clock)())
    }

    fn agent_of(&self, pod: &PodIdentity) -> Result<NamespacedName, PodRefusal> {
        let agent = NamespacedName::new(&pod.namespace, &pod.name);
        if self.view()?.contains(&agent) {
            return Ok(agent);
        }
        Err(superseded_refusal(&agent))
    }

    /// Requests the pod of an Agent that was scaled to zero. Whether it has none, or one that is about to go.
    fn starts_from_zero(&self, agents: &AgentsView, agent: &NamespacedName) -> bool {
        let is_going = self.loops.reports_scaled_to_zero(agent);
        let is_gone = agents.is_scaled_to_zero(agent) && !self.tasks.is_connected(agent);
        if is_going || is_gone {
            self.loops.want_pod(agent);
        }
        is_going || is_gone
    }

    fn view(&self) -> Result<&AgentsView, PodRefusal> {
        self.agents.get().ok_or_else(|| PodRefusal {
            code: RefusalCode::NotLeading,
            message: "the controller is starting; retry".into(),
        })
    }
}

impl LinkHandler for ControllerLink {
    async fn authenticate(&self, token: &str, address: IpAddr) -> Result<PodIdentity, PodRefusal> {
        self.view()?;
        self.identities.authenticate(token, address).await
    }

    fn attach(&self, pod: &PodIdentity, attach: &AttachRequest) -> Result<AttachResponse, PodRefusal> {
        let (known, directives) = self.attach_pod(pod, attach.epoch)?;
        let agent = NamespacedName::new(&pod.namespace, &pod.name);
        // Before its directives are read, because they include the prices of these models.
        self.budgets.models_seen(&agent, &attach.models);
        self.metrics.link_attaches.inc();
        tracing::info!(
            namespace = pod.namespace,
            agent = pod.name,
            epoch = attach.epoch,
            "pod attached"
        );
        let directives = directives.borrow().clone();
        Ok(AttachResponse {
            protocol: attach.protocol,
            epoch: attach.epoch,
            known,
            directives,
        })
    }

    fn report(&self, pod: &PodIdentity, report: PodReport) -> Result<(), PodRefusal> {
        let agent = self.agent_of(pod)?;
        let speaker = live_pod(pod, report.epoch);
        let leases = self.loops.report(&agent, &speaker, report, (self.clock)())?;
        self.metrics.link_reports.inc();
        if leases > 0 {
            self.metrics.lost_leases.inc_by(leases);
            tracing::warn!(
                namespace = pod.namespace,
                agent = pod.name,
                leases,
                "the Agent's storage was reset to an earlier state, for example from a snapshot: the rest of its \
                 leases is counted as spent"
            );
            if let Some(about) = self.view()?.reference(&agent) {
                self.events.send([agent::volume_restored(leases)], &about);
            }
        }
        Ok(())
    }

    async fn lease(&self, pod: &PodIdentity, request: LeaseRequest) -> Result<LeaseResponse, PodRefusal> {
        self.view()?;
        let who = LeaseHolder {
            record: request.record.clone(),
            agent: NamespacedName::new(&pod.namespace, &pod.name),
            pod_uid: pod.uid.clone(),
            epoch: request.epoch,
        };
        let entered = self.agent_of(pod).and_then(|agent| {
            self.loops
                .record_contact(&agent, &live_pod(pod, request.epoch), (self.clock)())
        });
        match entered {
            Ok(()) => self.budgets.lease(&who, &request).await,
            // Its Agent is gone or has another pod: this one may still return the leases that it holds.
            Err(refusal) => self.budgets.accept_returns(&who, &request).ok_or(refusal),
        }
    }

    fn directives(&self, pod: &PodIdentity, epoch: i64) -> Result<watch::Receiver<Directives>, PodRefusal> {
        self.attach_pod(pod, epoch).map(|(_, directives)| directives)
    }

    async fn events(&self, pod: &PodIdentity, page: EventsPage) -> Result<EventsResponse, PodRefusal> {
        let (agent, speaker) = (self.agent_of(pod)?, live_pod(pod, page.epoch));
        event_subscriptions::deliver_page(&self.loops, (&agent, &speaker), page, &self.clock).await
    }

    fn text(&self, pod: &PodIdentity, relayed: RelayedTextFragment) -> Result<(), PodRefusal> {
        let (agent, speaker) = (self.agent_of(pod)?, live_pod(pod, relayed.epoch));
        self.loops
            .receive_text(&agent, &speaker, relayed.fragment, (self.clock)())
    }

    async fn history(&self, pod: &PodIdentity, batch: HistoryBatch) -> Result<HistoryAck, PodRefusal> {
        let agent = self.agent_of(pod)?;
        let now = (self.clock)();
        // Not that of the Agent with this name: it may have been created again, and this is the pod of the one before.
        let uid = self.loops.owner_of(&agent, &live_pod(pod, batch.epoch), now)?;
        let history = self.history.as_ref().ok_or_else(history::not_configured)?;
        let agent = HistoryAgent {
            uid: &uid,
            namespace: &agent.namespace,
            name: &agent.name,
        };
        history.receive(&agent, &batch, now).await
    }

    async fn read(&self, token: &str, address: IpAddr, request: &ReadRequest) -> Result<EventStream, ClientRefusal> {
        let agents = self
            .view()
            .map_err(|refusal| event_subscriptions::unavailable(&refusal.message))?;
        let agent = NamespacedName::new(&request.namespace, &request.name);
        // Authorize first, so that an unauthorized caller cannot probe which Agents exist.
        self.access
            .check((token, address), &agent, ClientAction::ReadEvents)
            .await?;
        // The text of an answer before its end is what the response is after it.
        if request.messages || request.text {
            let action = ClientAction::ReadMessages;
            self.access.check((token, address), &agent, action).await?;
        }
        if !agents.contains(&agent) {
            return Err(no_agent(&agent));
        }
        let wanted = EventSubscription {
            id: 0,
            after: request.after,
            messages: request.messages,
            text: request.text,
        };
        event_subscriptions::subscribe(&self.loops, &agent, wanted).await
    }

    async fn answer(
        &self,
        token: &str,
        address: IpAddr,
        request: &GateAnswerRequest,
    ) -> Result<AnsweredGate, ClientRefusal> {
        let agents = self
            .view()
            .map_err(|refusal| event_subscriptions::unavailable(&refusal.message))?;
        let agent = NamespacedName::new(&request.namespace, &request.name);
        let action = ClientAction::Approve;
        let user = self.access.check((token, address), &agent, action).await?;
        // Before the API server is asked for it: the names in the path may be anything.
        if !agents.contains(&agent) {
            return Err(no_agent(&agent));
        }
        self.answers
            .record(&agent, (&request.gate, &request.body), &user, (self.clock)())
            .await
    }

    async fn authorize_task(
        &self,
        token: &str,
        address: IpAddr,
        (namespace, name): (&str, &str),
    ) -> Result<String, ClientRefusal> {
        self.view()
            .map_err(|refusal| event_subscriptions::unavailable(&refusal.message))?;
        let agent = NamespacedName::new(namespace, name);
        let action = ClientAction::RequestTasks;
        self.access.check((token, address), &agent, action).await
    }

    async fn request_task(&self, user: &str, request: &TaskRequest) -> Result<AcceptedTask, ClientRefusal> {
        let agents = self
            .view()
            .map_err(|refusal| event_subscriptions::unavailable(&refusal.message))?;
        let agent = NamespacedName::new(&request.namespace, &request.name);
        let receiver = agents.reference(&agent).and_then(|reference| reference.uid);
        let receiver = receiver.ok_or_else(|| no_agent(&agent))?;
        let place = self.tasks.admit(&agent)?;
        let id = request.body.id.clone().map_or_else(random_id, Ok)?;
        let task = RequestedTask {
            receiver,
            id: format!("{ID_PREFIX}{id}"),
            user: user.to_owned(),
            prompt: request.body.prompt.clone(),
            untrusted_content: request.body.untrusted_content.clone(),
        };
        if self.starts_from_zero(agents, &agent) {
            let is_there = || self.tasks.is_connected(&agent) && !self.loops.reports_scaled_to_zero(&agent);
            self.tasks.until_connected(START_WAIT, is_there).await;
        }
        self.tasks.submit(&place, task).await
    }

    fn requested_tasks(&self, pod: &PodIdentity, epoch: i64) -> Result<mpsc::Receiver<RequestedTask>, PodRefusal> {
        self.attach_pod(pod, epoch)?;
        Ok(self.tasks.register_gateway(&self.agent_of(pod)?))
    }

    fn task_acknowledged(&self, pod: &PodIdentity, ack: RelayedTaskAck) -> Result<(), PodRefusal> {
        let agent = self.agent_of(pod)?;
        self.loops
            .record_contact(&agent, &live_pod(pod, ack.epoch), (self.clock)())?;
        self.tasks.acknowledged(&agent, &ack.ack);
        Ok(())
    }

    fn deliveries(&self, pod: &PodIdentity, epoch: i64) -> Result<mpsc::Receiver<Delivery>, PodRefusal> {
        self.attach_pod(pod, epoch)?;
        Ok(self.relay.register_gateway(&self.agent_of(pod)?))
    }

    fn delivered(&self, pod: &PodIdentity, delivered: RelayedDeliveryAck) -> Result<(), PodRefusal> {
        let agent = self.agent_of(pod)?;
        self.loops
            .record_contact(&agent, &live_pod(pod, delivered.epoch), (self.clock)())?;
        self.relay.delivered(&agent, delivered.delivered);
        Ok(())
    }

    fn sensor(&self, pod: &PodIdentity) -> Result<watch::Receiver<SensorDirectives>, PodRefusal> {
        self.relay.attach(pod)
    }

    fn sensor_report(&self, pod: &PodIdentity, report: SensorPodReport) -> Result<(), PodRefusal> {
        self.relay.report(pod, report)
    }

    async fn deliver(&self, pod: &PodIdentity, deliver: DeliveryRequest) -> Result<DeliveryAck, PodRefusal> {
        let receiver = self.relay.receiver(pod, &deliver);
        if receiver.is_some_and(|agent| self.view().is_ok_and(|agents| self.starts_from_zero(agents, &agent))) {
            return Err(receiver_away(
                "the receiver has no task and no pod; its pod is started; retry",
            ));
        }
        self.relay.deliver(pod, deliver).await
    }

    fn refused(&self, refusal: &PodRefusal) {
        self.metrics
            .link_refusals
            .with_label_values(&[refusal.code.as_ref()])
            .inc();
    }
}

fn superseded_refusal(agent: &NamespacedName) -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Unknown,
        message: format!("Agent {agent} does not exist"),
    }
}

/// Returned only to users who may read or approve it.
fn no_agent(agent: &NamespacedName) -> ClientRefusal {
    ClientRefusal {
        code: ClientRefusalCode::NotFound,
        message: format!("Agent {agent} does not exist"),
    }
}

fn live_pod(pod: &PodIdentity, epoch: i64) -> LivePod {
    LivePod {
        uid: pod.uid.clone(),
        epoch,
    }
}

/// Exports every [`RefusalCode`] with 0 before the first refusal.
pub fn initialize_refusal_metrics(metrics: &Metrics) {
    for code in RefusalCode::iter() {
        let _ = metrics.link_refusals.with_label_values(&[code.as_ref()]);
    }
}
