//! Streams in, reconciles out: watches Sensors and their own objects, and works off the queue.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt, future};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::controller::{self, Action, ReconcileRequest, applier};
use kube::runtime::reflector::{self, ObjectRef, Store, store::Writer};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource, ResourceExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;

use super::children::{self, ChildKind, ObservedChild};
use super::index::SensorKey;
use super::publish;
use super::registry::SensorRegistry;
use crate::api::{SENSOR_LABEL, Sensor};
use crate::controller::agent::error::ReconcileError;
use crate::controller::agent::pod_state::trim;
use crate::controller::agent::{ReconcileErrorKind, ReconcileResult, backoff};
use crate::controller::connection::watching;

/// Longest time a whole reconcile may take.
const RECONCILE_TIMEOUT: Duration = Duration::from_mins(1);
/// Time for reconciles under way when the run ends.
const GRACE: Duration = Duration::from_secs(10);

pub(super) type GuardedSensor = DeserializeGuard<Sensor>;
/// Time between two sweeps for silent pods.
const SWEEP: Duration = Duration::from_secs(5);

type SensorQueue = mpsc::UnboundedSender<ObjectRef<GuardedSensor>>;

impl SensorRegistry {
    /// Watches and reconciles until `stop`; `said`: Sensors whose pods said something new. Only the leader may run this, once.
    pub async fn run(self: Arc<Self>, said: mpsc::UnboundedReceiver<SensorKey>, stop: CancellationToken) {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(asked) = asked else { return };
        let scopes: Vec<Option<String>> = match self.setup.watch_namespaces.as_slice() {
            [] => vec![None],
            some => some.iter().cloned().map(Some).collect(),
        };
        let (doors, served): (Vec<_>, Vec<_>) = scopes
            .into_iter()
            .map(|scope| {
                let (queue, requests) = mpsc::unbounded_channel();
                let served = self.clone().serve(scope.clone(), requests, stop.clone());
                ((scope, queue), served)
            })
            .unzip();
        tokio::select! {
            _ = future::join_all(served) => {}
            () = route(asked, &doors) => {}
            () = self.route_reports(said) => {}
            () = self.detect_silent_pods() => {}
            () = self.namespaces.maintain(|| self.pod_namespaces()) => {}
            // A list that never succeeded would hold the shutdown for ever.
            () = async { stop.cancelled().await; tokio::time::sleep(GRACE).await } => {}
        }
    }

    async fn serve(
        self: Arc<Self>,
        scope: Option<String>,
        requests: mpsc::UnboundedReceiver<ObjectRef<GuardedSensor>>,
        stop: CancellationToken,
    ) {
        let (sensors, writer) = reflector::store();
        let requests = UnboundedReceiverStream::new(requests)
            .map(|sensor| Ok::<_, Infallible>(ReconcileRequest::from(sensor)))
            .take_until(stop.cancelled_owned());
        let config = controller::Config::default().concurrency(self.setup.workers);
        let reconciles = applier(
            |sensor, context| Box::pin(reconcile(sensor, context)),
            |sensor: Arc<GuardedSensor>, error, context: Arc<Self>| -> Action { on_error(&sensor, error, &context) },
            self.clone(),
            sensors.clone(),
            requests,
            config,
        )
        // A Sensor that is gone by now is nothing to do; errors were logged by the error policy.
        .for_each(|_| future::ready(()));
        tokio::select! {
            () = self.watch(scope.as_deref(), writer, &sensors) => {}
            () = self.watch_children(scope.as_deref()) => {}
            () = reconciles => {}
        }
    }

    /// What sensor pods said wakes the reconciler of their Sensor.
    async fn route_reports(&self, mut said: mpsc::UnboundedReceiver<SensorKey>) {
        while let Some(sensor) = said.recv().await {
            self.request_reconcile(sensor);
        }
        future::pending::<()>().await;
    }

    /// Pods that fall silent wake the reconciler too: one sweep for all instead of a timer for each.
    async fn detect_silent_pods(&self) {
        loop {
            tokio::time::sleep(SWEEP).await;
            self.setup.relay.detect_silent_pods();
        }
    }

    /// Watches what was made for Sensors. Of pods little is kept, of the rest nothing but metadata is asked for.
    async fn watch_children(&self, scope: Option<&str>) {
        let config = || watching().labels(SENSOR_LABEL);
        let sets = watcher(self.api::<PartialObjectMeta<StatefulSet>>(scope), config()).default_backoff();
        let services = watcher(self.api::<PartialObjectMeta<Service>>(scope), config()).default_backoff();
        let policies = watcher(self.api::<PartialObjectMeta<NetworkPolicy>>(scope), config()).default_backoff();
        let pods = watcher(self.api::<Pod>(scope), config()).default_backoff().modify(trim);
        tokio::join!(
            self.follow_children((ChildKind::Set, scope), sets, ObservedChild::set),
            self.follow_children((ChildKind::Service, scope), services, ObservedChild::service),
            self.follow_children((ChildKind::Policy, scope), policies, ObservedChild::policy),
            self.follow_children((ChildKind::Pod, scope), pods, ObservedChild::pod),
        );
    }

    async fn follow_children<K: ResourceExt>(
        &self,
        (kind, scope): (ChildKind, Option<&str>),
        stream: impl Stream<Item = watcher::Result<Event<K>>>,
        read: impl Fn(&K) -> ObservedChild,
    ) {
        let mut present = BTreeMap::new();
        let mut stream = std::pin::pin!(stream);
        while let Some(event) = stream.next().await {
            match event {
                Ok(Event::Apply(object)) => {
                    if let Some(key) = children::key(&object, kind) {
                        self.child_seen(&key, read(&object));
                    }
                }
                Ok(Event::Delete(object)) => {
                    if let Some(key) = children::key(&object, kind) {
                        self.child_gone(&key, kind);
                    }
                }
                Ok(Event::Init) => present.clear(),
                Ok(Event::InitApply(object)) => {
                    if let Some(key) = children::key(&object, kind) {
                        present.insert(key, read(&object));
                    }
                }
                Ok(Event::InitDone) => self.children_listed(kind, scope, std::mem::take(&mut present)),
                Err(error) => {
                    tracing::warn!(%error, "a watch of the objects of Sensors was interrupted; it is resumed");
                }
            }
        }
    }

    fn api<K>(&self, scope: Option<&str>) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        let client = self.setup.client.clone();
        match scope {
            Some(namespace) => Api::namespaced(client, namespace),
            None => Api::all(client),
        }
    }

    async fn watch(&self, scope: Option<&str>, writer: Writer<GuardedSensor>, store: &Store<GuardedSensor>) {
        let stream = watcher(self.api::<GuardedSensor>(scope), watching())
            .default_backoff()
            .modify(|sensor| sensor.meta_mut().managed_fields = None)
            .reflect(writer);
        let mut stream = std::pin::pin!(stream);
        while let Some(event) = stream.next().await {
            match event {
                Ok(Event::Apply(sensor)) => self.sensor_applied(&sensor).await,
                Ok(Event::Delete(sensor)) => self.gone(&key(&sensor)),
                Ok(Event::InitDone) => {
                    let all = store.state();
                    for sensor in &all {
                        self.sensor_applied(sensor).await;
                    }
                    let present: BTreeSet<SensorKey> = all.iter().map(|sensor| key(sensor)).collect();
                    self.listed(scope, &present);
                }
                Ok(Event::Init | Event::InitApply(_)) => {}
                Err(error) => tracing::warn!(%error, "the watch of Sensors was interrupted; it is resumed"),
            }
        }
    }

    /// One that cannot be read goes on as it was; its reconcile says so.
    async fn sensor_applied(&self, sensor: &GuardedSensor) {
        match &sensor.0 {
            Ok(sensor) => self.seen(sensor.clone()).await,
            Err(_) => self.request_reconcile(key(sensor)),
        }
    }
}

/// Each Sensor goes to the queue of its scope.
async fn route(mut asked: mpsc::UnboundedReceiver<SensorKey>, doors: &[(Option<String>, SensorQueue)]) {
    while let Some(sensor) = asked.recv().await {
        let serves =
            |(scope, _): &&(Option<String>, SensorQueue)| scope.as_ref().is_none_or(|scope| *scope == sensor.namespace);
        if let Some((_, queue)) = doors.iter().find(serves) {
            // Closed only while the process ends.
            let _ = queue.send(ObjectRef::new(&sensor.name).within(&sensor.namespace));
        }
    }
    future::pending::<()>().await;
}

fn key(sensor: &GuardedSensor) -> SensorKey {
    let meta = sensor.meta();
    SensorKey {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
    }
}

async fn reconcile(guard: Arc<GuardedSensor>, sensors: Arc<SensorRegistry>) -> Result<Action, ReconcileError> {
    let reconciles = &sensors.setup.reconciles;
    reconciles.started();
    let start = tokio::time::Instant::now();
    let whole = async {
        match &guard.0 {
            Ok(_) => Box::pin(publish::reconcile(&sensors, &key(&guard))).await,
            Err(invalid) => publish::unreadable(&sensors, invalid).await,
        }
    };
    let result = tokio::time::timeout(RECONCILE_TIMEOUT, whole)
        .await
        .unwrap_or(Err(ReconcileError::Timeout {
            action: "reconcile a Sensor",
            limit: RECONCILE_TIMEOUT,
        }));
    let how = match &result {
        Ok(action) if *action == Action::await_change() => ReconcileResult::Success,
        Ok(_) => ReconcileResult::RequeueAfter,
        Err(error) => ReconcileResult::Error(error.kind()),
    };
    reconciles.finished(how, start.elapsed());
    result
}

fn on_error(guard: &GuardedSensor, error: &ReconcileError, sensors: &SensorRegistry) -> Action {
    let key = key(guard);
    let attempts = sensors.failed(&key);
    let delay = backoff::ERRORS.delay(attempts, guard.meta().uid.as_deref().unwrap_or_default());
    let kind: ReconcileErrorKind = error.kind();
    tracing::warn!(
        namespace = key.namespace,
        sensor = key.name,
        kind = kind.as_ref(),
        attempts,
        delay_seconds = delay.as_secs_f32(),
        %error,
        "reconcile of a Sensor failed; it is tried again"
    );
    Action::requeue(delay)
}
