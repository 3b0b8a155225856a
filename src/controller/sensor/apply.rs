//! Applies the objects of a Sensor that has its own pod, tells the relay which pod may act for the Sensor, and deletes
//! the objects of a Sensor that needs none.
//!
//! Objects that are up to date are not written: each carries the hash of what was applied. A `StatefulSet` that differs
//! only in what comes from the controller (above all the image) waits for its turn, since its pod is replaced. Objects
//! that were changed by others are applied again; objects with another owner are not touched. Before anything is
//! applied, the referenced Secrets are checked: that their keys exist, and that the key of a webhook is valid. Their
//! values are dropped at once.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Status;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::children::{AppliedChild, ChildKind, ObservedChild, SensorChildren};
use super::conditions::{INVALID_SPEC, NAME_TAKEN, REFUSED, SECRET_NOT_FOUND, SECRET_UNUSABLE};
use super::drift::DriftAction;
use super::index::SensorKey;
use super::pod::{self, EDIT, LONGEST_CONFIG, SpecEdit};
use super::registry::{ObservedSensor, SensorRegistry};
use super::secrets;
use crate::api::Sensor;
use crate::controller::runtime::error::{ReconcileError, call, find};
use crate::controller::runtime::names::MANAGER;
use crate::controller::runtime::pod_state::PodReason;
use crate::link::deliveries::{ReceiverTerms, SensorDirectives};
use crate::link::sensor_messages::SensorTerms;
use crate::sensing::source::webhook::signature::unusable;

/// Why there is no pod that matches the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SensorObstacle {
    pub(super) reason: &'static str,
    /// The problem and its fix.
    pub(super) message: String,
    /// Whether the user must correct the spec or an object it references; `Accepted` is then false.
    pub(super) of_spec: bool,
}

impl SensorObstacle {
    fn spec(reason: &'static str, message: String) -> Self {
        Self {
            reason,
            message,
            of_spec: true,
        }
    }

    fn cluster(reason: &'static str, message: String) -> Self {
        Self {
            reason,
            message,
            of_spec: false,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct ApplyOutcome {
    pub(super) obstacle: Option<SensorObstacle>,
    /// Time until something that has to wait is checked again.
    pub(super) again: Option<Duration>,
}

enum ApplyDecision<K> {
    /// The object is up to date.
    No,
    /// The object is missing, or was applied from another spec.
    Other(K),
    /// The object was changed by others.
    Changed(K),
    /// To be applied again after this time.
    Later(Duration),
}

impl<K> ApplyDecision<K> {
    fn wait(&self) -> Option<Duration> {
        match self {
            Self::Later(wait) => Some(*wait),
            Self::No | Self::Other(_) | Self::Changed(_) => None,
        }
    }

    fn is_now(&self) -> bool {
        matches!(self, Self::Other(_) | Self::Changed(_))
    }
}

/// Brings the objects of a Sensor in line with its spec. `children`: the objects that exist.
pub(super) async fn apply(
    sensors: &SensorRegistry,
    key: &SensorKey,
    observed: &ObservedSensor,
    children: &SensorChildren,
) -> Result<ApplyOutcome, ReconcileError> {
    let work = ObjectApplier {
        sensors,
        key,
        sensor: &observed.known.object,
        children,
    };
    if !pod::has_pod(&work.sensor.spec.source) {
        sensors.setup.relay.forget(key);
        work.clear().await?;
        return Ok(ApplyOutcome::default());
    }
    // With an invalid spec the existing pod stays, so that it delivers the events in its outbox.
    let applied = match observed.known.problem() {
        Some(_) => ApplyOutcome::default(),
        None => Box::pin(work.make()).await?,
    };
    work.expect_pod(observed);
    Ok(applied)
}

/// Lets the pod that is there deliver while the spec is still to be checked. Makes nothing.
pub(super) fn keep(sensors: &SensorRegistry, key: &SensorKey, observed: &ObservedSensor, children: &SensorChildren) {
    let work = ObjectApplier {
        sensors,
        key,
        sensor: &observed.known.object,
        children,
    };
    work.expect_pod(observed);
}

fn directives(observed: &ObservedSensor) -> SensorDirectives {
    let receivers = observed.receivers.iter().map(|receiver| ReceiverTerms {
        uid: receiver.facts.uid.clone(),
        name: receiver.name.clone(),
        // Set by the relay.
        revision: 0,
    });
    SensorDirectives {
        terms: terms(observed),
        receivers: Some(receivers.collect()),
    }
}

/// A Sensor that cannot be used is suspended, and without its rules, so that the pod can follow that. `None`: no generation
/// of it has been checked.
fn terms(observed: &ObservedSensor) -> Option<SensorTerms> {
    let mut terms = observed.known.terms()?;
    if observed.known.problem().is_some() {
        terms.spec.updates.clear();
        terms.spec.signals.clear();
        terms.spec.notification = None;
        terms.spec.task = None;
    }
    Some(terms)
}

struct ObjectApplier<'a> {
    sensors: &'a SensorRegistry,
    key: &'a SensorKey,
    sensor: &'a Sensor,
    children: &'a SensorChildren,
}

impl ObjectApplier<'_> {
    fn is_ours(&self, child: &AppliedChild) -> bool {
        child.owner.is_some() && child.owner == self.sensor.uid()
    }

    fn expect_pod(&self, observed: &ObservedSensor) {
        if let Some(uid) = self.speaking_pod() {
            let relay = &self.sensors.setup.relay;
            relay.expect_pod(self.key, uid, directives(observed));
        }
    }

    /// Uid of the pod that may act for the Sensor: the pod of the `StatefulSet` that the Sensor owns.
    fn speaking_pod(&self) -> Option<&str> {
        let (set, pod) = (self.children.set.as_ref()?, self.children.pod.as_ref()?);
        (self.is_ours(set) && pod.set.as_ref() == Some(&set.uid)).then_some(pod.uid.as_str())
    }

    /// Deletes the objects that a source of another type needed.
    async fn clear(&self) -> Result<(), ReconcileError> {
        let (children, name) = (self.children, &self.key.name);
        self.delete::<StatefulSet>(&pod::set_name(name), children.set.as_ref())
            .await?;
        self.delete::<NetworkPolicy>(&pod::policy_name(name), children.policy.as_ref())
            .await?;
        self.delete::<Service>(&pod::service_name(name), children.service.as_ref())
            .await
    }

    async fn make(&self) -> Result<ApplyOutcome, ReconcileError> {
        let children = self.children;
        let set = pod::stateful_set(self.sensor, &self.sensors.setup.pods);
        let set = self.in_turn(self.due(ChildKind::Set, set, children.set.as_ref()));
        let policy = pod::network_policy(self.sensor);
        let policy = self.due(ChildKind::Policy, policy, children.policy.as_ref());
        let service = if self.sensor.spec.source.webhook.is_some() {
            self.due(ChildKind::Service, pod::service(self.sensor), children.service.as_ref())
        } else {
            let name = pod::service_name(&self.key.name);
            self.delete::<Service>(&name, children.service.as_ref()).await?;
            ApplyDecision::No
        };
        let again = [set.wait(), service.wait(), policy.wait()];
        let again = again.into_iter().flatten().min();
        if !(set.is_now() || service.is_now() || policy.is_now()) {
            return Ok(ApplyOutcome { obstacle: None, again });
        }
        let mut obstacle = self.unusable_secret().await?;
        if obstacle.is_none() {
            obstacle = Box::pin(self.put_all(set, service, policy)).await?;
        }
        Ok(ApplyOutcome { obstacle, again })
    }

    /// Applies the `StatefulSet` last: the network policy must exist before the pod does.
    async fn put_all(
        &self,
        set: ApplyDecision<StatefulSet>,
        service: ApplyDecision<Service>,
        policy: ApplyDecision<NetworkPolicy>,
    ) -> Result<Option<SensorObstacle>, ReconcileError> {
        let children = self.children;
        if let Some(taken) = self.sensors.namespaces.ensure(&self.key.namespace).await? {
            return Ok(Some(SensorObstacle::cluster(NAME_TAKEN, taken)));
        }
        let mut obstacle = self
            .put(policy, children.policy.as_ref(), ObservedChild::policy)
            .await?;
        if obstacle.is_none() {
            obstacle = self
                .put(service, children.service.as_ref(), ObservedChild::service)
                .await?;
        }
        if obstacle.is_none() {
            obstacle = self.put(set, children.set.as_ref(), ObservedChild::set).await?;
        }
        Ok(obstacle)
    }

    /// Decides whether an object is to be applied.
    fn due<K: ResourceExt + Serialize>(
        &self,
        kind: ChildKind,
        object: K,
        known: Option<&AppliedChild>,
    ) -> ApplyDecision<K> {
        let (object, hash) = pod::hashed(object);
        let Some(child) = known.filter(|child| self.is_ours(child)) else {
            return ApplyDecision::Other(object);
        };
        let current = child.hash.as_ref() == Some(&hash);
        match self.sensors.drift(self.key, kind, child, current) {
            DriftAction::Now => ApplyDecision::Changed(object),
            _ if !current => ApplyDecision::Other(object),
            DriftAction::Later(wait) => ApplyDecision::Later(wait),
            DriftAction::None => ApplyDecision::No,
        }
    }

    /// Delays a `StatefulSet` until its turn. Edits of the Sensor, drift, and a missing `StatefulSet` do not wait.
    fn in_turn(&self, due: ApplyDecision<StatefulSet>) -> ApplyDecision<StatefulSet> {
        let edit = SpecEdit::of(self.sensor);
        let marked = |mut set: StatefulSet| {
            set.annotations_mut().insert(EDIT.into(), edit.text());
            set
        };
        let set = match due {
            ApplyDecision::Other(set) => marked(set),
            ApplyDecision::Changed(set) => return ApplyDecision::Changed(marked(set)),
            ApplyDecision::No | ApplyDecision::Later(_) => return due,
        };
        let present = self.children.set.as_ref().filter(|child| self.is_ours(child));
        let edited = |before: &SpecEdit| edit.is_other_than(before);
        if present.is_none_or(|child| child.edit.as_ref().is_some_and(edited)) {
            return ApplyDecision::Other(set);
        }
        let pod = self.children.pod.as_ref();
        let runs = pod.is_some_and(|pod| pod.reason == PodReason::Running);
        match self.sensors.take_turn(self.key, runs) {
            Ok(()) => ApplyDecision::Other(set),
            Err(wait) => ApplyDecision::Later(wait),
        }
    }

    /// Applies an object, unless an object of that name has another owner.
    async fn put<K>(
        &self,
        due: ApplyDecision<K>,
        known: Option<&AppliedChild>,
        seen: impl Fn(&K) -> ObservedChild,
    ) -> Result<Option<SensorObstacle>, ReconcileError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
    {
        let (object, mends) = match due {
            ApplyDecision::Other(object) => (object, false),
            ApplyDecision::Changed(object) => (object, true),
            ApplyDecision::No | ApplyDecision::Later(_) => return Ok(None),
        };
        let api: Api<K> = self.api();
        let (kind, name) = (K::kind(&()), object.name_any());
        let ours = if let Some(child) = known {
            self.is_ours(child)
        } else {
            let found = find("get the metadata of an object of a Sensor", api.get_metadata(&name)).await?;
            found.is_none_or(|found| self.is_ours(&AppliedChild::of(&found)))
        };
        if !ours {
            let message = format!(
                "{kind} {name} exists and is not owned by this Sensor: delete it, or create the Sensor under another name"
            );
            return Ok(Some(SensorObstacle::cluster(NAME_TAKEN, message)));
        }
        let (params, patch) = (PatchParams::apply(MANAGER).force(), Patch::Apply(&object));
        match call("apply an object of a Sensor", api.patch(&name, &params, &patch)).await {
            Ok(applied) => {
                self.sensors.child_applied(self.key, seen(&applied), mends);
                Ok(None)
            }
            Err(error) => {
                let refusal = error
                    .answer()
                    .filter(|status| status.is_forbidden() || status.is_invalid() || status.code == 400);
                let Some(status) = refusal else { return Err(error) };
                let message = format!("the API server rejected {kind} {name}: {}", status.message);
                // The namespace's service account may have been deleted: ensure it on the next attempt.
                self.sensors.namespaces.forget(&self.key.namespace);
                Ok(Some(SensorObstacle::cluster(REFUSED, message)))
            }
        }
    }

    /// Deletes an object that the Sensor owns.
    async fn delete<K>(&self, name: &str, known: Option<&AppliedChild>) -> Result<(), ReconcileError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let Some(child) = known.filter(|child| self.is_ours(child)) else {
            return Ok(());
        };
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(child.uid.clone()),
                resource_version: None,
            }),
            ..DeleteParams::background()
        };
        match find("delete an object of a Sensor", self.api::<K>().delete(name, &params)).await {
            Ok(_) => Ok(()),
            // The name belongs to another object by now: ours is already gone.
            Err(error) if error.is(Status::is_conflict) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.sensors.setup.client.clone(), &self.key.namespace)
    }

    /// Checks what admission cannot: the size of the configuration and the Secrets.
    async fn unusable_secret(&self) -> Result<Option<SensorObstacle>, ReconcileError> {
        let settings = &self.sensors.setup.pods;
        if let Some(message) = size(pod::config(self.sensor, settings).len()) {
            return Ok(Some(SensorObstacle::spec(INVALID_SPEC, message)));
        }
        let source = &self.sensor.spec.source;
        for needed in secrets::required(source) {
            let secret = find("get a Secret", self.api::<Secret>().get(needed.name)).await?;
            let Some(secret) = secret else {
                return Ok(Some(SensorObstacle::spec(SECRET_NOT_FOUND, needed.absent())));
            };
            let found = secret.data.unwrap_or_default();
            if let Some(message) = needed.missing_keys(&found.keys().cloned().collect::<Vec<_>>()) {
                return Ok(Some(SensorObstacle::spec(SECRET_NOT_FOUND, message)));
            }
            let unusable = source.webhook.as_ref().and_then(|webhook| {
                let key = &found.get(&webhook.secret_key_ref.key)?.0;
                unusable(webhook.scheme, key)
                    .map(|why| format!("{}: Secret {}: the key {why}", needed.field, needed.name))
            });
            if let Some(message) = unusable {
                return Ok(Some(SensorObstacle::spec(SECRET_UNUSABLE, message)));
            }
        }
        Ok(None)
    }
}

fn size(bytes: usize) -> Option<String> {
    (bytes > LONGEST_CONFIG).then(|| {
        format!(
            "spec has {bytes} bytes as JSON; the limit is {LONGEST_CONFIG}: shorten spec.updates, spec.signals \
             or the request body"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_that_no_container_takes_is_refused_and_one_byte_less_is_not() {
        assert_eq!(size(LONGEST_CONFIG), None);
        assert!(size(LONGEST_CONFIG + 1).unwrap().contains("122880"));
    }
}
