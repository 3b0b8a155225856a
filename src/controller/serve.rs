//! What the controller answers pods: who they are by [`Identities`], what they may say by [`Loops`].
//!
//! A pod speaks for the Agent of its own namespace and name, and only while the reconciler expects that very pod.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use strum::IntoEnumIterator;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::access::Access;
use super::agent::{AgentsView, Clock};
use super::budget::Budgets;
use super::identity::Identities;
use super::loops::{AgentKey, LivePod, Loops};
use super::readings::{self, Taken};
use super::relay::Relay;
use crate::ledger::account::{AgentName, Who};
use crate::link::deliveries::{Deliver, Delivered, DeliveredTo, Delivery, SensorDirectives, SensorPodReport};
use crate::link::events::{EventsAnswer, EventsPage, ReadRefusal, ReadRefusalCode, ReadRequest, Telling};
use crate::link::messages::{
    Attach, Attached, Directives, Known, LeaseAnswer, LeaseRequest, Refusal, RefusalCode, Report,
};
use crate::link::server::{Link, PodIdentity};
use crate::telemetry::metrics::Metrics;

/// The subresource whose `get` allows to read events.
pub const EVENTS: &str = "events";
/// The one whose `get` allows to read words of models and tools with them.
pub const WORDS: &str = "words";
/// How long a page waits for room, and how often it looks.
const ROOM_WAIT: Duration = Duration::from_secs(5);
const ROOM_LOOK: Duration = Duration::from_millis(100);

/// The leader's side of the link.
pub struct ControllerLink {
    /// Tells pods apart.
    pub identities: Identities,
    /// Knows who may read.
    pub access: Access,
    /// The live loops, shared with the reconciler.
    pub loops: Arc<Loops>,
    /// Passes events of sensor pods on.
    pub relay: Arc<Relay>,
    /// The Agents, once the caches are filled; until then every pod is told to try again.
    pub agents: Arc<OnceLock<AgentsView>>,
    /// The ledger.
    pub budgets: Arc<Budgets>,
    /// Counts what is answered.
    pub metrics: Arc<Metrics>,
    /// The time.
    pub clock: Clock,
}

impl ControllerLink {
    /// A pod comes to speak: what is known of its loop, and its directives.
    fn enter(&self, pod: &PodIdentity, epoch: i64) -> Result<(Known, watch::Receiver<Directives>), Refusal> {
        let agent = self.agent_of(pod)?;
        self.loops.attach(&agent, &live(pod, epoch), (self.clock)())
    }

    fn agent_of(&self, pod: &PodIdentity) -> Result<AgentKey, Refusal> {
        let agent = AgentKey {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
        };
        if self.view()?.contains(&agent) {
            return Ok(agent);
        }
        Err(Refusal {
            code: RefusalCode::Unknown,
            message: format!("there is no Agent {}/{}", pod.namespace, pod.name),
        })
    }

    fn view(&self) -> Result<&AgentsView, Refusal> {
        self.agents.get().ok_or_else(|| Refusal {
            code: RefusalCode::NotLeading,
            message: "the controller has just started; try again".into(),
        })
    }
}

impl Link for ControllerLink {
    async fn authenticate(&self, token: &str, address: IpAddr) -> Result<PodIdentity, Refusal> {
        self.view()?;
        self.identities.of(token, address).await
    }

    fn attach(&self, pod: &PodIdentity, attach: &Attach) -> Result<Attached, Refusal> {
        let (known, directives) = self.enter(pod, attach.epoch)?;
        let agent = AgentKey {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
        };
        // Before its directives are read: they carry the prices of these models.
        self.budgets.models_seen(&agent, &attach.models);
        self.metrics.link_attaches.inc();
        tracing::info!(
            namespace = pod.namespace,
            agent = pod.name,
            epoch = attach.epoch,
            "pod attached"
        );
        let directives = directives.borrow().clone();
        Ok(Attached {
            protocol: attach.protocol,
            epoch: attach.epoch,
            known,
            directives,
        })
    }

    fn report(&self, pod: &PodIdentity, report: Report) -> Result<(), Refusal> {
        let agent = self.agent_of(pod)?;
        let speaker = live(pod, report.epoch);
        let (before, lost) = (self.loops.lost_leases(&agent), report.budget.lost_leases);
        self.loops.report(&agent, &speaker, report, (self.clock)())?;
        self.metrics.link_reports.inc();
        if let Ok(leases) = u64::try_from(lost.saturating_sub(before))
            && leases > 0
        {
            self.metrics.lost_leases.inc_by(leases);
            tracing::warn!(
                namespace = pod.namespace,
                agent = pod.name,
                leases,
                "the Agent's storage went back to an earlier state, such as a snapshot: all that was left of its leases \
                 counts as spent"
            );
        }
        Ok(())
    }

    async fn lease(&self, pod: &PodIdentity, request: LeaseRequest) -> Result<LeaseAnswer, Refusal> {
        self.view()?;
        let who = Who {
            record: request.record.clone(),
            agent: AgentName {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
            },
            pod_uid: pod.uid.clone(),
            epoch: request.epoch,
        };
        let entered = self
            .agent_of(pod)
            .and_then(|agent| self.loops.enter(&agent, &live(pod, request.epoch), (self.clock)()));
        match entered {
            Ok(()) => self.budgets.lease(&who, &request).await,
            // Its Agent is gone, or has another pod: what this one holds comes back all the same.
            Err(refusal) => self.budgets.take_back(&who, &request).ok_or(refusal),
        }
    }

    fn directives(&self, pod: &PodIdentity, epoch: i64) -> Result<watch::Receiver<Directives>, Refusal> {
        self.enter(pod, epoch).map(|(_, directives)| directives)
    }

    async fn events(&self, pod: &PodIdentity, page: EventsPage) -> Result<EventsAnswer, Refusal> {
        let (agent, speaker) = (self.agent_of(pod)?, live(pod, page.epoch));
        let since = Instant::now();
        loop {
            let after = match self.loops.events(&agent, &speaker, page.clone(), (self.clock)())? {
                Taken::Full(_) if since.elapsed() < ROOM_WAIT => {
                    sleep(ROOM_LOOK).await;
                    continue;
                }
                Taken::Next(after) | Taken::Full(after) => Some(after),
                Taken::Over => None,
            };
            return Ok(EventsAnswer { after });
        }
    }

    async fn read(&self, token: &str, address: IpAddr, request: &ReadRequest) -> Result<Telling, ReadRefusal> {
        let agents = self.view().map_err(|refusal| readings::unavailable(&refusal.message))?;
        let agent = AgentKey {
            namespace: request.namespace.clone(),
            name: request.name.clone(),
        };
        // First, so that who may not read learns nothing of what there is.
        self.access.check((token, address), &agent, EVENTS).await?;
        if request.words {
            self.access.check((token, address), &agent, WORDS).await?;
        }
        if !agents.contains(&agent) {
            return Err(ReadRefusal {
                code: ReadRefusalCode::NotFound,
                message: format!("there is no Agent {}/{}", agent.namespace, agent.name),
            });
        }
        readings::read(&self.loops, &agent, (request.after, request.words)).await
    }

    fn deliveries(&self, pod: &PodIdentity, epoch: i64) -> Result<mpsc::Receiver<Delivery>, Refusal> {
        self.enter(pod, epoch)?;
        Ok(self.relay.listen(&self.agent_of(pod)?))
    }

    fn delivered(&self, pod: &PodIdentity, delivered: DeliveredTo) -> Result<(), Refusal> {
        let agent = self.agent_of(pod)?;
        self.loops.enter(&agent, &live(pod, delivered.epoch), (self.clock)())?;
        self.relay.delivered(&agent, delivered.delivered);
        Ok(())
    }

    fn sensor(&self, pod: &PodIdentity) -> Result<watch::Receiver<SensorDirectives>, Refusal> {
        self.relay.attach(pod)
    }

    fn sensor_report(&self, pod: &PodIdentity, report: SensorPodReport) -> Result<(), Refusal> {
        self.relay.report(pod, report)
    }

    async fn deliver(&self, pod: &PodIdentity, deliver: Deliver) -> Result<Delivered, Refusal> {
        self.relay.deliver(pod, deliver).await
    }

    fn refused(&self, refusal: &Refusal) {
        self.metrics
            .link_refusals
            .with_label_values(&[refusal.code.as_ref()])
            .inc();
    }
}

fn live(pod: &PodIdentity, epoch: i64) -> LivePod {
    LivePod {
        uid: pod.uid.clone(),
        epoch,
    }
}

/// Shows every refusal code at 0 before the first refusal.
pub fn show_codes(metrics: &Metrics) {
    for code in RefusalCode::iter() {
        let _ = metrics.link_refusals.with_label_values(&[code.as_ref()]);
    }
}
