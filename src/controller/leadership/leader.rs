//! The tasks of a leader: certificates, link, ledger and reconcilers.
//!
//! They start and end together; if one of them ends unexpectedly, the process exits.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::api::amount::Amount;
use crate::api::{NamespacedName, Sensor};
use crate::controller::agent;
use crate::controller::auth::access::ClientAuthorizer;
use crate::controller::auth::identity::PodAuthenticator;
use crate::controller::auth::metrics_access::MetricsAuthentication;
use crate::controller::budget::accounts::DocumentPart;
use crate::controller::budget::ledger::LedgerState;
use crate::controller::budget::presenter::BudgetPresenter;
use crate::controller::budget::{BudgetLedger, LedgerSetup};
use crate::controller::delivery_relay::DeliveryRelay;
use crate::controller::gates::answers::GateAnswerRecorder;
use crate::controller::history::{self, HistoryReceiver};
use crate::controller::link_service::ControllerLink;
use crate::controller::page::{self, PageSources};
use crate::controller::pod_sessions::PodSessions;
use crate::controller::process::{ControllerError, ControllerOptions, listen, retry};
use crate::controller::reconcile_metrics::MetricsObserver;
use crate::controller::runtime::events::{EventRecorder, publish};
use crate::controller::runtime::{EventSink, GRACE, ReconcileMetrics, WallClock};
use crate::controller::sensor::{self, SensorRegistry};
use crate::controller::task_relay::TaskRelay;
use crate::controller::tls::certificates::LinkCertificates;
use crate::controller::tls::metrics::MetricsCaPublisher;
use crate::link::deliveries::DELIVERY_SECONDS;
use crate::link::server::{self, LinkLimits};
use crate::link::task_requests::ACCEPT_SECONDS;
use crate::telemetry::budget_collector::{BudgetCollector, SpentBudget};
use crate::telemetry::families::{ObjectVisitor, PerObject};
use crate::telemetry::http::Readiness;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::sensor_collector::SensorCollector;

/// Time limit for the tasks to finish after the signal: longer than that of running reconciles.
const DRAIN: Duration = GRACE.saturating_add(Duration::from_secs(1));

/// Resources that the caller may provide, to share them with the leader.
pub(in crate::controller) struct LeaderResources {
    /// The sessions of the pods, and the Agents whose pods have sent a new report.
    pub(in crate::controller) loops: (Arc<PodSessions>, mpsc::UnboundedReceiver<NamespacedName>),
    /// The listener of the link.
    pub(in crate::controller) listener: TcpListener,
    /// The listener of the page, if it is served.
    pub(in crate::controller) page: Option<TcpListener>,
}

impl LeaderResources {
    fn bind(options: &ControllerOptions) -> Result<Self, ControllerError> {
        let (loops, changed) = PodSessions::new();
        let address = options.link_address;
        Ok(Self {
            loops: (Arc::new(loops.with_history(options.history.is_some())), changed),
            listener: listen(address)?,
            page: options.page.as_ref().map(|page| listen(page.address)).transpose()?,
        })
    }
}

/// The CA bundle that pods must trust, and which version has reached the namespaces of each kind of pod.
struct CaBundle {
    now: watch::Receiver<String>,
    with_agents: watch::Sender<String>,
    with_sensors: watch::Sender<String>,
}

pub(in crate::controller) struct Leader {
    pub(in crate::controller) client: Client,
    pub(in crate::controller) metrics: Arc<Metrics>,
    pub(in crate::controller) readiness: Readiness,
    pub(in crate::controller) options: ControllerOptions,
}

impl Leader {
    /// Leads until `stop`, then waits for the tasks to finish and aborts those that do not. Its tasks have ended when
    /// it returns, so that the Lease can be released.
    pub(in crate::controller) async fn lead(
        &self,
        ground: Option<LeaderResources>,
        stop: &CancellationToken,
    ) -> Result<(), ControllerError> {
        let clock: WallClock = Arc::new(Timestamp::now);
        let namespace = &self.options.settings.controller_namespace;
        let certificates = retry("prepare the link's certificates", || {
            let page = self.options.page.iter().flat_map(|page| &page.hosts);
            let hosts = self.options.link_hosts.iter().chain(page).cloned().collect();
            LinkCertificates::start(self.client.clone(), namespace, hosts, clock.clone())
        });
        let Some(certificates) = stop.run_until_cancelled(certificates).await else {
            return Ok(());
        };
        let ground = ground.map_or_else(|| LeaderResources::bind(&self.options), Ok)?;
        let finished = CancellationToken::new();
        let mut parts = self.start(certificates, ground, &clock, (stop, &finished));
        let unexpected = tokio::select! {
            // `stop` is checked first: tasks that end because of it have not ended unexpectedly.
            biased;
            () = stop.cancelled() => None,
            Some(ended) = parts.join_next() => Some(ended.unwrap_or(ControllerError::PartEnded("a task"))),
        };
        if let Some(error) = unexpected {
            parts.shutdown().await;
            return Err(error);
        }
        tracing::info!("stopping");
        self.readiness.set(Some("shutdown to complete"));
        let ended = async {
            // The publisher of Events is the last, since the others may send some at their end.
            while parts.len() > 1 {
                parts.join_next().await;
            }
            finished.cancel();
            parts.join_next().await;
        };
        if timeout(DRAIN, ended).await.is_err() {
            tracing::warn!(
                "aborted the remaining tasks {} s after the stop signal",
                DRAIN.as_secs()
            );
            parts.shutdown().await;
        }
        Ok(())
    }

    fn start(
        &self,
        certificates: LinkCertificates,
        ground: LeaderResources,
        clock: &WallClock,
        (stop, finished): (&CancellationToken, &CancellationToken),
    ) -> JoinSet<ControllerError> {
        let ((loops, changed), listener, agents) = (ground.loops, ground.listener, Arc::default());
        let bundle = CaBundle {
            now: certificates.bundle(),
            with_agents: watch::Sender::default(),
            with_sensors: watch::Sender::default(),
        };
        let mut published = vec![bundle.with_agents.subscribe(), bundle.with_sensors.subscribe()];
        let (events, queue) = EventSink::new();
        let budgets = self.budgets(&loops, events.clone(), clock);
        let (relay, changed_sensors) = DeliveryRelay::new(Duration::from_secs(DELIVERY_SECONDS));
        let relay = Arc::new(relay);
        let sensors = self.sensors((&loops, &relay), &bundle, events.clone(), clock);
        let link = self.link((&loops, relay), &agents, (&budgets, events.clone()), clock);
        let (tls, ends) = (certificates.tls(), stop.clone());
        let sources = PageSources {
            access: ClientAuthorizer::new(self.client.clone()),
            agents: agents.clone(),
            loops: loops.clone(),
            budgets: budgets.clone(),
            sensors: sensors.clone(),
            clock: clock.clone(),
        };
        let page = ground
            .page
            .map(|listener| page::serve(listener, tls.clone(), sources, stop.clone()));
        let announced = agents.clone();

        // Every task runs until shutdown. One that returns earlier yields the error with which the process exits.
        let mut parts = JoinSet::new();
        published.extend(self.publish_metrics_ca(&bundle.now, &mut parts, stop));
        parts.spawn(async move {
            if let Err(error) = server::serve(listener, tls, link, LinkLimits::default(), ends).await {
                tracing::error!(%error, "failed to serve the link");
            }
            ControllerError::PartEnded("the link")
        });
        if let Some(page) = page {
            parts.spawn(async move {
                page.await;
                ControllerError::PartEnded("the page")
            });
        }
        let reconciler = self.reconciler(
            loops,
            changed,
            bundle,
            agents,
            (&budgets, &sensors, events),
            clock,
            stop,
        );
        parts.spawn(async move {
            Box::pin(agent::run(reconciler)).await;
            ControllerError::PartEnded("the reconciler")
        });
        if let Some(webhook) = self.options.gate_webhook.clone() {
            let (metrics, clock, ends) = (self.metrics.clone(), clock.clone(), stop.clone());
            parts.spawn(async move {
                webhook.run(announced, metrics, clock, ends).await;
                ControllerError::PartEnded("the webhook that announces gates")
            });
        }
        if let Some(history) = self.options.history.clone() {
            let (metrics, clock, ends) = (self.metrics.clone(), clock.clone(), stop.clone());
            parts.spawn(async move {
                history::delete_old_rows(history, (history::DELETE_EVERY, clock), metrics, ends).await;
                ControllerError::PartEnded("the deletion of old histories")
            });
        }
        // The collectors of metrics have sinks too, and outlive this leader.
        let recorder = EventRecorder::new(
            self.client.clone(),
            self.instance(),
            self.metrics.dropped_events.clone(),
        );
        let finished = finished.clone();
        parts.spawn(async move {
            publish(recorder, queue, finished).await;
            ControllerError::PartEnded("the publisher of Events")
        });
        let ends = stop.clone();
        parts.spawn(async move {
            Box::pin(sensors.run(changed_sensors, ends)).await;
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
            ControllerError::PartEnded("the certificate manager")
        });
        parts
    }

    /// Publishes the CA bundle for readers of /metrics, if they connect over TLS. Returns what is published.
    fn publish_metrics_ca(
        &self,
        bundle: &watch::Receiver<String>,
        parts: &mut JoinSet<ControllerError>,
        stop: &CancellationToken,
    ) -> Option<watch::Receiver<String>> {
        if self.options.metrics_authentication == MetricsAuthentication::None {
            return None;
        }
        let (published, receiver) = watch::channel(String::new());
        let part = MetricsCaPublisher {
            client: self.client.clone(),
            namespace: self.options.settings.controller_namespace.clone(),
            bundle: bundle.clone(),
            published,
        };
        let ends = stop.clone();
        parts.spawn(async move {
            part.run(ends).await;
            ControllerError::PartEnded("the publisher of the CA of /metrics")
        });
        Some(receiver)
    }

    fn budgets(&self, loops: &Arc<PodSessions>, events: EventSink, clock: &WallClock) -> Arc<BudgetLedger> {
        let settings = &self.options.settings;
        Arc::new(BudgetLedger::new(LedgerSetup {
            client: self.client.clone(),
            policy: settings.policy.clone(),
            namespace: settings.controller_namespace.clone(),
            watch_namespaces: settings.watch_namespaces.clone(),
            loops: loops.clone(),
            presentation: Arc::new(BudgetPresenter::new(&settings.controller_namespace, events)),
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

    /// Reporting instance of Events.
    fn instance(&self) -> String {
        self.options.pod_name.clone().unwrap_or_else(|| "agentloop".into())
    }

    fn link(
        &self,
        (loops, relay): (&Arc<PodSessions>, Arc<DeliveryRelay>),
        agents: &Arc<OnceLock<agent::AgentsView>>,
        (budgets, events): (&Arc<BudgetLedger>, EventSink),
        clock: &WallClock,
    ) -> Arc<ControllerLink> {
        Arc::new(ControllerLink {
            identities: PodAuthenticator::new(self.client.clone()),
            access: ClientAuthorizer::new(self.client.clone()),
            answers: GateAnswerRecorder::new(self.client.clone()),
            loops: loops.clone(),
            relay,
            tasks: Arc::new(TaskRelay::new(Duration::from_secs(ACCEPT_SECONDS))),
            history: self
                .options
                .history
                .as_ref()
                .map(|history| HistoryReceiver::new(history.store.clone(), self.metrics.clone())),
            agents: agents.clone(),
            budgets: budgets.clone(),
            metrics: self.metrics.clone(),
            events,
            clock: clock.clone(),
        })
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the components of a leader, each built once and passed on here"
    )]
    fn reconciler(
        &self,
        loops: Arc<PodSessions>,
        changed: mpsc::UnboundedReceiver<NamespacedName>,
        bundle: CaBundle,
        agents: Arc<OnceLock<agent::AgentsView>>,
        (budgets, sensors, events): (&Arc<BudgetLedger>, &Arc<SensorRegistry>, EventSink),
        clock: &WallClock,
        stop: &CancellationToken,
    ) -> agent::ReconcilerParts {
        let settings = self.options.settings.clone();
        let (metrics, readiness) = (self.metrics.clone(), self.readiness.clone());
        let level = self.options.per_object;
        metrics.add(Arc::new(budget_metrics(budgets, level)));
        metrics.add(Arc::new(sensor_metrics(sensors, level)));
        let report = MetricsObserver::new(metrics, agents, loops.clone(), readiness, settings.workers, level);
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
            metrics: self.metrics.clone(),
            clock: clock.clone(),
            events,
            shutdown: stop.clone(),
            settings,
        }
    }
}

fn sensor_metrics(sensors: &Arc<SensorRegistry>, level: PerObject) -> SensorCollector {
    let sensors = sensors.clone();
    let take = move || {
        let snapshot = sensors.all();
        let visit = move |visit: &mut dyn FnMut(&Sensor)| snapshot.iter().for_each(|sensor| visit(sensor));
        Box::new(visit) as ObjectVisitor<Sensor>
    };
    SensorCollector::new(Box::new(take), level)
}

/// The metrics of the ledger's AgentBudgets.
fn budget_metrics(budgets: &Arc<BudgetLedger>, level: PerObject) -> BudgetCollector {
    let budgets = budgets.clone();
    let take = move || {
        let snapshot = budgets.inspect(spent_budgets);
        let visit = move |visit: &mut dyn FnMut(&SpentBudget)| snapshot.iter().for_each(visit);
        Box::new(visit) as ObjectVisitor<SpentBudget>
    };
    BudgetCollector::new(Box::new(take), level)
}

/// Every AgentBudget, and what was spent of it since this process has its account.
fn spent_budgets(state: &LedgerState) -> Vec<SpentBudget> {
    let known = state.assignments.budgets().values();
    known
        .map(|facts| {
            let document = state.book.document(&facts.document);
            let entry = document.and_then(|document| document.part(DocumentPart::Budget));
            SpentBudget {
                object: facts.object.clone(),
                spent: entry.map_or(Amount::ZERO, |entry| entry.account().charged()),
            }
        })
        .collect()
}
