//! Carries out the plan for a Sensor, and returns the results.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Status;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::children::{AppliedChild, ChildKind, ObservedChild};
use super::conditions::{NAME_TAKEN, REFUSED};
use super::decide::{RelayStep, SensorObstacle, SensorPlan};
use super::objects::{ObjectDeletion, ObjectOwner, ObjectStep, ObjectSteps};
use super::registry::SensorRegistry;
use crate::api::NamespacedName;
use crate::controller::runtime::error::{ReconcileError, call, find};
use crate::controller::runtime::names::MANAGER;

/// The result of [`apply`].
#[derive(Debug, Default)]
pub(super) struct AppliedSteps {
    pub(super) obstacle: Option<SensorObstacle>,
    /// Time until a turn in the queue of replacements that another Sensor has taken first.
    pub(super) recheck: Option<Duration>,
    /// The objects that were applied.
    pub(super) objects: Vec<AppliedObject>,
    /// The request that failed. What was done before it is recorded all the same.
    pub(super) failure: Option<ReconcileError>,
}

/// An object as the API server returned it.
#[derive(Debug)]
pub(super) struct AppliedObject {
    pub(super) seen: ObservedChild,
    pub(super) corrects: bool,
}

pub(super) async fn apply(sensors: &SensorRegistry, key: &NamespacedName, plan: &SensorPlan) -> AppliedSteps {
    let relay = &sensors.setup.relay;
    if plan.relay == RelayStep::Forget {
        relay.forget(key);
    }
    if plan.objects.reserves_turn {
        sensors.reserve_turn(key);
    }
    let mut applied = AppliedSteps::default();
    let mut work = ObjectApplier {
        sensors,
        key,
        applied: &mut applied,
    };
    let result = work.all(&plan.objects).await;
    applied.failure = result.err();
    if applied.failure.is_none()
        && let RelayStep::Expect { pod_uid, directives } = &plan.relay
    {
        relay.expect_pod(key, pod_uid, directives.as_ref().clone());
    }
    applied
}

struct ObjectApplier<'a> {
    sensors: &'a SensorRegistry,
    key: &'a NamespacedName,
    applied: &'a mut AppliedSteps,
}

impl ObjectApplier<'_> {
    async fn all(&mut self, steps: &ObjectSteps) -> Result<(), ReconcileError> {
        for deletion in &steps.deletions {
            self.delete(deletion).await?;
        }
        if !steps.applies() {
            return Ok(());
        }
        if let Some(taken) = self.sensors.namespaces.ensure(&self.key.namespace).await? {
            self.applied.obstacle = Some(SensorObstacle::cluster(NAME_TAKEN, taken));
            return Ok(());
        }
        // The `StatefulSet` last: the network policy must exist before the pod does.
        self.put(steps.policy.as_ref(), ObservedChild::policy).await?;
        self.put(steps.service.as_ref(), ObservedChild::service).await?;
        if steps.takes_turn && self.applied.obstacle.is_none() {
            // Another Sensor may have taken the turn since the queue was read.
            if let Err(wait) = self.sensors.take_turn(self.key) {
                self.applied.recheck = Some(wait);
                return Ok(());
            }
        }
        self.put(steps.set.as_ref(), ObservedChild::set).await
    }

    /// Applies an object, unless an object of that name has another owner, or an earlier object has met an obstacle.
    async fn put<K>(
        &mut self,
        step: Option<&ObjectStep<K>>,
        seen: impl Fn(&K) -> ObservedChild,
    ) -> Result<(), ReconcileError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
    {
        let Some(step) = step.filter(|_| self.applied.obstacle.is_none()) else {
            return Ok(());
        };
        let api: Api<K> = self.api();
        let (kind, name) = (K::kind(&()), step.object.name_any());
        if !self.may_apply(&api, step).await? {
            let message = format!(
                "{kind} {name} exists and is not owned by this Sensor: delete it, or create the Sensor under another name"
            );
            self.applied.obstacle = Some(SensorObstacle::cluster(NAME_TAKEN, message));
            return Ok(());
        }
        let (params, patch) = (PatchParams::apply(MANAGER).force(), Patch::Apply(&step.object));
        match call("apply an object of a Sensor", api.patch(&name, &params, &patch)).await {
            Ok(object) => {
                let seen = seen(&object);
                self.sensors.child_seen(self.key, seen.clone());
                self.applied.objects.push(AppliedObject {
                    seen,
                    corrects: step.corrects,
                });
            }
            Err(error) => {
                let refusal = error
                    .answer()
                    .filter(|status| status.is_forbidden() || status.is_invalid() || status.code == 400);
                let Some(status) = refusal else { return Err(error) };
                let message = format!("the API server rejected {kind} {name}: {}", status.message);
                // The namespace's service account may have been deleted: ensure it on the next attempt.
                self.sensors.namespaces.forget(&self.key.namespace);
                self.applied.obstacle = Some(SensorObstacle::cluster(REFUSED, message));
            }
        }
        Ok(())
    }

    /// An object that the watch does not know is looked up just before it is applied by force: it may belong to another.
    async fn may_apply<K>(&self, api: &Api<K>, step: &ObjectStep<K>) -> Result<bool, ReconcileError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        match step.owner {
            ObjectOwner::Sensor => Ok(true),
            ObjectOwner::Other => Ok(false),
            ObjectOwner::Unknown => {
                let name = step.object.name_any();
                let found = find("get the metadata of an object of a Sensor", api.get_metadata(&name)).await?;
                let owner = step.object.owner_references().first().map(|owner| &owner.uid);
                Ok(found.is_none_or(|found| owner.is_some() && AppliedChild::of(&found).owner.as_ref() == owner))
            }
        }
    }

    async fn delete(&self, deletion: &ObjectDeletion) -> Result<(), ReconcileError> {
        match deletion.kind {
            ChildKind::Set => self.delete_as::<StatefulSet>(deletion).await,
            ChildKind::Policy => self.delete_as::<NetworkPolicy>(deletion).await,
            ChildKind::Service => self.delete_as::<Service>(deletion).await,
            // The pod is deleted with its `StatefulSet`.
            ChildKind::Pod => Ok(()),
        }
    }

    async fn delete_as<K>(&self, deletion: &ObjectDeletion) -> Result<(), ReconcileError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(deletion.uid.clone()),
                resource_version: None,
            }),
            ..DeleteParams::background()
        };
        let deleted = self.api::<K>();
        match find("delete an object of a Sensor", deleted.delete(&deletion.name, &params)).await {
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
}
