//! Makes the objects of a Sensor with a pod of its own, says to the relay which pod may speak for it, and takes them away
//! from one without.
//!
//! Writes nothing that is there already: each object has the hash of what it was applied as. A set that differs only in what
//! comes from the controller (the image above all) waits for its turn, since its pod is replaced. What somebody changed is
//! applied again. What another made is not touched. Secrets are looked at before something is made: whether they have their keys, and whether that of a webhook can be
//! one; what they hold is dropped at once.

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
use super::pod::{self, EDIT, LONGEST_CONFIG, MANAGER, SpecEdit};
use super::registry::{ObservedSensor, SensorRegistry};
use super::secrets;
use crate::api::Sensor;
use crate::controller::agent::error::{ReconcileError, call, find};
use crate::controller::agent::pod_state::PodReason;
use crate::link::deliveries::{ReceiverTerms, SensorDirectives};
use crate::link::sensor_messages::SensorTerms;
use crate::sensing::source::webhook::signature::unusable;

/// Why there is no pod as the spec wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SensorObstacle {
    /// Reason of the condition.
    pub(super) reason: &'static str,
    /// What it is and what to do.
    pub(super) message: String,
    /// Whether a person has to correct the spec or what it refers to: `Accepted` is false then.
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

/// What became of it.
#[derive(Debug, Default)]
pub(super) struct ApplyOutcome {
    /// What stands in the way.
    pub(super) obstacle: Option<SensorObstacle>,
    /// In how long to look again at what has to wait.
    pub(super) again: Option<Duration>,
}

/// Whether an object is to be applied.
enum ApplyDecision<K> {
    /// It is there as it should be.
    No,
    /// It is not there, or was applied as another one.
    Other(K),
    /// Somebody changed it.
    Changed(K),
    /// Not before so much time has passed.
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

/// Brings the objects of a Sensor to what its spec wants. `children`: what there is.
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
    // What a spec that cannot be used was before goes on to deliver what it has.
    let applied = match observed.known.problem {
        Some(_) => ApplyOutcome::default(),
        None => Box::pin(work.make()).await?,
    };
    if let Some(uid) = work.speaking_pod() {
        sensors.setup.relay.expect_pod(key, uid, directives(observed));
    }
    Ok(applied)
}

/// What the pod is to do.
fn directives(observed: &ObservedSensor) -> SensorDirectives {
    let receivers = observed.receivers.iter().map(|receiver| ReceiverTerms {
        uid: receiver.facts.uid.clone(),
        name: receiver.name.clone(),
        // The relay's to say.
        revision: 0,
    });
    SensorDirectives {
        terms: Some(terms(observed)),
        receivers: Some(receivers.collect()),
    }
}

/// One that cannot be used hears nothing: without its rules, so that the pod can follow that.
fn terms(observed: &ObservedSensor) -> SensorTerms {
    let mut terms = pod::terms(&observed.known.object);
    if observed.known.problem.is_some() {
        terms.spec.suspend = true;
        terms.spec.updates.clear();
        terms.spec.signals.clear();
        terms.spec.notification = None;
        terms.spec.task = None;
    }
    terms
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

    /// Uid of the pod that may speak for the Sensor: that of the set that is the Sensor's.
    fn speaking_pod(&self) -> Option<&str> {
        let (set, pod) = (self.children.set.as_ref()?, self.children.pod.as_ref()?);
        (self.is_ours(set) && pod.owner.as_ref() == Some(&set.uid)).then_some(pod.uid.as_str())
    }

    /// Takes away what a source of another kind needed.
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

    /// The pod comes last: its network is closed before it is there.
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

    /// The object as it is to be applied, unless it is there as it should be.
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

    /// The set, when it may be applied. What somebody wrote into the Sensor or changed in the set is applied at once, and so is
    /// a set that is not there.
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

    /// Applies an object, unless one of that name is somebody else's.
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
                "{kind} {name} exists and belongs to something else: delete it, or make the Sensor under another name"
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
                let message = format!("the API server refuses {kind} {name}: {}", status.message);
                // The service account of the namespace may have been deleted: make sure of it next time.
                self.sensors.namespaces.forget(&self.key.namespace);
                Ok(Some(SensorObstacle::cluster(REFUSED, message)))
            }
        }
    }

    /// Deletes an object of ours.
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
            // Another object has that name by now: the one that was meant is gone.
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

    /// What admission could not see.
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
                    .map(|why| format!("{}: Secret {}: its key {why}", needed.field, needed.name))
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
            "spec has {bytes} bytes as JSON; a container takes at most {LONGEST_CONFIG}: shorten spec.updates, spec.signals \
             or the body of the request"
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
