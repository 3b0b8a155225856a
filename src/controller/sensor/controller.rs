//! Watches Sensors and their child objects, and reconciles what the queue holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, future};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{self, ObjectRef, Store, store::Writer};
use kube::runtime::watcher::{self, Event, watcher};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::children::{self, ChildKind, ObservedChild};
use super::reconcile;
use super::registry::SensorRegistry;
use crate::api::{NamespacedName, SENSOR_LABEL, Sensor};
use crate::controller::connection::watching;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::guarded::{GuardedObject, InvalidObject};
use crate::controller::runtime::queue::Priority;
use crate::controller::runtime::watch::{follow, join, scoped_api, scopes};
use crate::controller::runtime::watch_backoff::WatchBackoff;
use crate::controller::runtime::watched_pod::WatchedPod;
use crate::controller::runtime::{self, ReconcileResult, Reconciler, Requeue};
use crate::telemetry::reconcile_traces::ReconcileTracer;

/// Interval of the check for silent pods.
const SWEEP: Duration = Duration::from_secs(5);

/// Reconciles the Sensors of the registry.
struct SensorReconciler {
    registry: Arc<SensorRegistry>,
    /// The Sensors of each scope.
    stores: Vec<Store<GuardedObject<Sensor>>>,
}

impl Reconciler for SensorReconciler {
    type Object = Sensor;
    type Key = NamespacedName;

    fn find(&self, key: &NamespacedName) -> Option<Arc<GuardedObject<Sensor>>> {
        let reference = ObjectRef::new(&key.name).within(&key.namespace);
        self.stores.iter().find_map(|store| store.get(&reference))
    }

    async fn reconcile(&self, sensor: &Sensor) -> Result<Requeue, ReconcileError> {
        reconcile::reconcile(&self.registry, &NamespacedName::of(sensor)).await
    }

    async fn report_unreadable(&self, object: &InvalidObject) -> Result<Requeue, ReconcileError> {
        reconcile::report_unreadable(&self.registry, object).await
    }

    fn count_failure(&self, key: &NamespacedName) -> u32 {
        self.registry.failed(key)
    }

    fn started(&self) {
        self.registry.setup.reconciles.started();
    }

    fn finished(&self, how: ReconcileResult, took: Duration) {
        self.registry.setup.reconciles.finished(how, took);
    }

    fn tracer(&self) -> ReconcileTracer {
        self.registry.setup.reconciles.tracer()
    }
}

impl SensorRegistry {
    /// Watches and reconciles until `stop`. `reported`: Sensors with new reports. Only the leader may run this, once.
    pub async fn run(self: Arc<Self>, reported: mpsc::UnboundedReceiver<NamespacedName>, stop: CancellationToken) {
        let (mut stores, mut watches) = (Vec::new(), JoinSet::new());
        for scope in scopes(&self.setup.watch_namespaces) {
            let (store, writer) = reflector::store();
            watches.spawn(self.clone().watch(scope.clone(), writer, store.clone()));
            watches.spawn(self.clone().watch_children(scope));
            stores.push(store);
        }
        let reconciler = Arc::new(SensorReconciler {
            registry: self.clone(),
            stores,
        });
        tokio::select! {
            () = runtime::run(reconciler, self.queue.clone(), self.setup.workers, stop) => {}
            () = join(watches) => {}
            () = self.route_reports(reported) => {}
            () = self.detect_silent_pods() => {}
            () = self.check_specs() => {}
            () = self.namespaces.maintain(|| self.pod_namespaces()) => {}
        }
    }

    /// Reports of sensor pods trigger a reconcile of their Sensor.
    async fn route_reports(&self, mut reported: mpsc::UnboundedReceiver<NamespacedName>) {
        while let Some(sensor) = reported.recv().await {
            self.queue.add(sensor, Priority::Low);
        }
        future::pending::<()>().await;
    }

    /// Pods that fall silent trigger a reconcile too: one sweep for all pods instead of a timer for each.
    async fn detect_silent_pods(&self) {
        loop {
            tokio::time::sleep(SWEEP).await;
            self.setup.relay.detect_silent_pods();
        }
    }

    /// Watches the child objects. Only metadata is requested, except for pods, of which little is kept.
    async fn watch_children(self: Arc<Self>, scope: Option<String>) {
        let (client, scope) = (&self.setup.client, scope.as_deref());
        let config = || watching().labels(SENSOR_LABEL);
        let sets = watcher(scoped_api::<PartialObjectMeta<StatefulSet>>(client, scope), config())
            .backoff(WatchBackoff::default());
        let services =
            watcher(scoped_api::<PartialObjectMeta<Service>>(client, scope), config()).backoff(WatchBackoff::default());
        let policies = watcher(scoped_api::<PartialObjectMeta<NetworkPolicy>>(client, scope), config())
            .backoff(WatchBackoff::default());
        let pods = watcher(scoped_api::<WatchedPod>(client, scope), config()).backoff(WatchBackoff::default());
        tokio::join!(
            self.follow_children((ChildKind::Set, scope), sets, ObservedChild::set),
            self.follow_children((ChildKind::Service, scope), services, ObservedChild::service),
            self.follow_children((ChildKind::Policy, scope), policies, ObservedChild::policy),
            self.follow_children((ChildKind::Pod, scope), pods, |pod: &WatchedPod| ObservedChild::pod(
                pod
            )),
        );
    }

    async fn follow_children<K: ResourceExt + 'static>(
        &self,
        (kind, scope): (ChildKind, Option<&str>),
        stream: impl Stream<Item = watcher::Result<Event<K>>> + Send,
        read: impl Fn(&K) -> ObservedChild + Send + Sync,
    ) {
        // A relist is collected until it is complete: objects deleted while the watch was down show only by their
        // absence.
        let mut present = BTreeMap::new();
        let handle = |event: Event<K>| match event {
            Event::Apply(object) => {
                if let Some(key) = children::key(&object, kind) {
                    self.child_seen(&key, read(&object));
                }
            }
            Event::Delete(object) => {
                if let Some(key) = children::key(&object, kind) {
                    self.child_gone(&key, kind);
                }
            }
            Event::Init => present.clear(),
            Event::InitApply(object) => {
                if let Some(key) = children::key(&object, kind) {
                    present.insert(key, read(&object));
                }
            }
            Event::InitDone => self.children_listed(kind, scope, std::mem::take(&mut present)),
        };
        follow(stream, "the objects of Sensors", handle).await;
    }

    async fn watch(
        self: Arc<Self>,
        scope: Option<String>,
        writer: Writer<GuardedObject<Sensor>>,
        store: Store<GuardedObject<Sensor>>,
    ) {
        let stream = watcher(scoped_api(&self.setup.client, scope.as_deref()), watching())
            .backoff(WatchBackoff::default())
            .reflect(writer);
        let handle = |event: Event<GuardedObject<Sensor>>| match event {
            Event::Apply(sensor) => self.sensor_applied(&sensor),
            Event::Delete(sensor) => self.remove_sensor(&NamespacedName::of(&sensor)),
            Event::InitDone => {
                let all = store.state();
                for sensor in &all {
                    self.sensor_applied(sensor);
                }
                let present: BTreeSet<NamespacedName> =
                    all.iter().map(|sensor| NamespacedName::of(sensor.as_ref())).collect();
                self.listed(scope.as_deref(), &present);
            }
            Event::Init | Event::InitApply(_) => {}
        };
        follow(stream, "Sensors", handle).await;
    }

    /// One that cannot be read stays as it was; its reconcile reports that.
    fn sensor_applied(&self, sensor: &GuardedObject<Sensor>) {
        match &sensor.0 {
            Ok(sensor) => self.seen(sensor.clone()),
            Err(_) => self.request_reconcile(NamespacedName::of(sensor)),
        }
    }
}
