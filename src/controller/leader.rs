//! What a leader runs: certificates, link, reconciler.
//!
//! Started together, ended together; one that ends by itself ends the process.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::access::ReadAuthorizer;
use super::agent::events::{EventSink, publish};
use super::agent::{self, WallClock};
use super::budget::presenter::BudgetPresenter;
use super::budget::{BudgetLedger, LedgerSetup};
use super::certificates::LinkCertificates;
use super::delivery_relay::DeliveryRelay;
use super::identity::PodAuthenticator;
use super::link_service::ControllerLink;
use super::pod_sessions::{AgentKey, PodSessions};
use super::process::{ControllerError, ControllerOptions, listen, retry};
use super::reconcile_metrics::{MetricsObserver, ReconcileMetrics};
use super::sensor::{self, SensorRegistry};
use crate::link::deliveries::DELIVERY_SECONDS;
use crate::link::server::{self, LinkLimits};
use crate::telemetry::budget_collector::BudgetCollector;
use crate::telemetry::http::Readiness;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::sensor_collector::SensorCollector;

/// How long work under way may go on after the signal.
const DRAIN: Duration = Duration::from_secs(5);

/// What a leader works with and its maker may hold on to.
pub(super) struct LeaderResources {
    /// The live loops, and which of them said something new.
    pub(super) loops: (Arc<PodSessions>, mpsc::UnboundedReceiver<AgentKey>),
    /// Where the link is served.
    pub(super) listener: TcpListener,
}

impl LeaderResources {
    fn bind(address: SocketAddr) -> Result<Self, ControllerError> {
        let (loops, changed) = PodSessions::new();
        Ok(Self {
            loops: (Arc::new(loops), changed),
            listener: listen(address)?,
        })
    }
}

/// What pods must trust, and what of it has reached the namespaces of each kind of pod.
struct CaBundle {
    now: watch::Receiver<String>,
    with_agents: watch::Sender<String>,
    with_sensors: watch::Sender<String>,
}

/// The leader's work.
pub(super) struct Leader {
    pub(super) client: Client,
    pub(super) metrics: Arc<Metrics>,
    pub(super) readiness: Readiness,
    pub(super) options: ControllerOptions,
}

impl Leader {
    /// Works until `stop`, then lets work under way finish. The tasks end with this future.
    pub(super) async fn lead(
        &self,
        ground: Option<LeaderResources>,
        stop: &CancellationToken,
    ) -> Result<(), ControllerError> {
        let clock: WallClock = Arc::new(Timestamp::now);
        let namespace = &self.options.settings.controller_namespace;
        let certificates = retry("prepare the link's certificates", || {
            let hosts = self.options.link_hosts.clone();
            LinkCertificates::start(self.client.clone(), namespace, hosts, clock.clone())
        });
        let Some(certificates) = stop.run_until_cancelled(certificates).await else {
            return Ok(());
        };
        let ground = ground.map_or_else(|| LeaderResources::bind(self.options.link_address), Ok)?;
        let mut parts = self.start(certificates, ground, &clock, stop);
        tokio::select! {
            // First: parts that end because of the stop have not ended by themselves.
            biased;
            () = stop.cancelled() => {}
            Some(ended) = parts.join_next() => return Err(ended.unwrap_or(ControllerError::PartEnded("a part that panicked"))),
        }
        tracing::info!("stopping");
        self.readiness.set(Some("its own end"));
        let ended = async { while parts.join_next().await.is_some() {} };
        if timeout(DRAIN, ended).await.is_err() {
            tracing::warn!("work under way was cut after {} s", DRAIN.as_secs());
        }
        Ok(())
    }

    fn start(
        &self,
        certificates: LinkCertificates,
        ground: LeaderResources,
        clock: &WallClock,
        stop: &CancellationToken,
    ) -> JoinSet<ControllerError> {
        let ((loops, changed), listener, agents) = (ground.loops, ground.listener, Arc::default());
        let bundle = CaBundle {
            now: certificates.bundle(),
            with_agents: watch::Sender::default(),
            with_sensors: watch::Sender::default(),
        };
        let published = vec![bundle.with_agents.subscribe(), bundle.with_sensors.subscribe()];
        let (events, queue) = EventSink::new();
        let budgets = self.budgets(&loops, events.clone(), clock);
        let (relay, said) = DeliveryRelay::new(Duration::from_secs(DELIVERY_SECONDS));
        let relay = Arc::new(relay);
        let sensors = self.sensors((&loops, &relay), &bundle, events, clock);
        let link = self.link((&loops, relay), &agents, &budgets, clock);
        let (tls, ends) = (certificates.tls(), stop.clone());

        let mut parts = JoinSet::new();
        parts.spawn(async move {
            if let Err(error) = server::serve(listener, tls, link, LinkLimits::default(), ends).await {
                tracing::error!(%error, "the link cannot be served");
            }
            ControllerError::PartEnded("the link")
        });
        let reconciler = self.reconciler(loops, changed, bundle, agents, (&budgets, &sensors), clock, stop);
        parts.spawn(async move {
            Box::pin(agent::run(reconciler)).await;
            ControllerError::PartEnded("the reconciler")
        });
        let recorder = agent::recorder(self.client.clone(), self.instance());
        parts.spawn(async move {
            publish(recorder, queue).await;
            ControllerError::PartEnded("the Events of budgets and Sensors")
        });
        let ends = stop.clone();
        parts.spawn(async move {
            Box::pin(sensors.run(said, ends)).await;
            ControllerError::PartEnded("the reconciler of Sensors")
        });
        let ends = stop.clone();
        parts.spawn(async move {
            match budgets.run(ends).await {
                Ok(()) => ControllerError::PartEnded("the ledger"),
                Err(conflict) => ControllerError::Deposed(conflict),
            }
        });
        let ends = stop.clone();
        parts.spawn(async move {
            certificates.maintain(published, ends).await;
            ControllerError::PartEnded("the care of certificates")
        });
        parts
    }

    fn budgets(&self, loops: &Arc<PodSessions>, events: EventSink, clock: &WallClock) -> Arc<BudgetLedger> {
        let settings = &self.options.settings;
        Arc::new(BudgetLedger::new(LedgerSetup {
            client: self.client.clone(),
            policy: settings.policy.clone(),
            namespace: settings.controller_namespace.clone(),
            watch_namespaces: settings.watch_namespaces.clone(),
            loops: loops.clone(),
            face: Arc::new(BudgetPresenter::new(&settings.controller_namespace, events)),
            metrics: self.metrics.clone(),
            wall: clock(),
        }))
    }

    fn sensors(
        &self,
        (loops, relay): (&Arc<PodSessions>, &Arc<DeliveryRelay>),
        bundle: &CaBundle,
        events: EventSink,
        clock: &WallClock,
    ) -> Arc<SensorRegistry> {
        let settings = &self.options.settings;
        Arc::new(SensorRegistry::new(sensor::SensorSetup {
            client: self.client.clone(),
            watch_namespaces: settings.watch_namespaces.clone(),
            workers: settings.workers,
            loops: loops.clone(),
            relay: relay.clone(),
            pods: self.options.sensor_pods.clone(),
            ca_bundle: bundle.now.clone(),
            published: bundle.with_sensors.clone(),
            events,
            reconciles: ReconcileMetrics::new(self.metrics.clone(), "sensor", settings.workers),
            clock: clock.clone(),
        }))
    }

    /// Name of this process in Events.
    fn instance(&self) -> String {
        self.options.pod_name.clone().unwrap_or_else(|| "agentloop".into())
    }

    fn link(
        &self,
        (loops, relay): (&Arc<PodSessions>, Arc<DeliveryRelay>),
        agents: &Arc<OnceLock<agent::AgentsView>>,
        budgets: &Arc<BudgetLedger>,
        clock: &WallClock,
    ) -> Arc<ControllerLink> {
        Arc::new(ControllerLink {
            identities: PodAuthenticator::new(self.client.clone()),
            access: ReadAuthorizer::new(self.client.clone()),
            loops: loops.clone(),
            relay,
            agents: agents.clone(),
            budgets: budgets.clone(),
            metrics: self.metrics.clone(),
            clock: clock.clone(),
        })
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of a leader, each made once and handed on here"
    )]
    fn reconciler(
        &self,
        loops: Arc<PodSessions>,
        changed: mpsc::UnboundedReceiver<AgentKey>,
        bundle: CaBundle,
        agents: Arc<OnceLock<agent::AgentsView>>,
        (budgets, sensors): (&Arc<BudgetLedger>, &Arc<SensorRegistry>),
        clock: &WallClock,
        stop: &CancellationToken,
    ) -> agent::ReconcilerParts {
        let settings = self.options.settings.clone();
        let (metrics, readiness) = (self.metrics.clone(), self.readiness.clone());
        register_budget_metrics(&metrics, budgets);
        register_sensor_metrics(&metrics, sensors);
        let report = MetricsObserver::new(metrics, agents, loops.clone(), readiness, settings.workers);
        let observer = Arc::new(report);
        agent::ReconcilerParts {
            client: self.client.clone(),
            loops,
            budgets: budgets.clone(),
            sensors: sensors.clone(),
            changed,
            ca_bundle: bundle.now,
            published: bundle.with_agents,
            observer,
            clock: clock.clone(),
            instance: self.instance(),
            shutdown: stop.clone(),
            settings,
        }
    }
}

/// Puts the Sensors on the metrics page.
fn register_sensor_metrics(metrics: &Metrics, sensors: &Arc<SensorRegistry>) {
    let sensors = sensors.clone();
    let collector = SensorCollector::new(move |visit| {
        for sensor in sensors.all() {
            visit(&sensor);
        }
    });
    if let Err(error) = collector.and_then(|collector| metrics.register(collector)) {
        tracing::error!(%error, "the metrics of Sensors are missing");
    }
}

/// Puts the AgentBudgets of the ledger on the metrics page.
fn register_budget_metrics(metrics: &Metrics, budgets: &Arc<BudgetLedger>) {
    let budgets = budgets.clone();
    let collector = BudgetCollector::new(move |visit| {
        let objects = budgets.inspect(|state| {
            let known = state.scope.budgets().values();
            known.map(|facts| facts.object.clone()).collect::<Vec<_>>()
        });
        for budget in &objects {
            visit(budget);
        }
    });
    if let Err(error) = collector.and_then(|collector| metrics.register(collector)) {
        tracing::error!(%error, "the metrics of AgentBudgets are missing");
    }
}
