//! Decodes custom resources that this version may be unable to parse, without ending the list or watch they are in.
//!
//! kube's `DeserializeGuard` does the same by way of a tree of values, of which it makes a copy. Here the text is decoded
//! once; `metadata.managedFields`, a third of a typical object, which nothing reads, is skipped.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::Resource;
use kube::core::object::{HasSpec, HasStatus};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::api::{Agent, AgentBudget, Sensor};

/// An object of a list or watch, parsed or not.
#[derive(Clone, Debug)]
pub struct GuardedObject<K>(pub Result<K, InvalidObject>);

/// An object that this version cannot parse.
#[derive(Clone, Debug)]
pub struct InvalidObject {
    /// The error; it quotes the object.
    pub error: String,
    pub metadata: ObjectMeta,
}

/// A custom resource that can be put together from its parts.
pub trait FromParts: Resource + HasSpec + HasStatus {
    fn from_parts(metadata: ObjectMeta, spec: Self::Spec, status: Option<Self::Status>) -> Self;
}

impl FromParts for Agent {
    fn from_parts(metadata: ObjectMeta, spec: Self::Spec, status: Option<Self::Status>) -> Self {
        Self { metadata, spec, status }
    }
}

impl FromParts for AgentBudget {
    fn from_parts(metadata: ObjectMeta, spec: Self::Spec, status: Option<Self::Status>) -> Self {
        Self { metadata, spec, status }
    }
}

impl FromParts for Sensor {
    fn from_parts(metadata: ObjectMeta, spec: Self::Spec, status: Option<Self::Status>) -> Self {
        Self { metadata, spec, status }
    }
}

#[derive(Deserialize)]
struct WireObject<S, T> {
    metadata: WireMeta,
    spec: S,
    status: Option<T>,
}

#[derive(Deserialize)]
struct MetadataOnly {
    #[serde(default)]
    metadata: WireMeta,
}

/// [`ObjectMeta`] without `managedFields`.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireMeta {
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_grace_period_seconds: Option<i64>,
    deletion_timestamp: Option<Time>,
    finalizers: Option<Vec<String>>,
    generate_name: Option<String>,
    generation: Option<i64>,
    labels: Option<BTreeMap<String, String>>,
    name: Option<String>,
    namespace: Option<String>,
    owner_references: Option<Vec<OwnerReference>>,
    resource_version: Option<String>,
    self_link: Option<String>,
    uid: Option<String>,
}

impl From<WireMeta> for ObjectMeta {
    fn from(wire: WireMeta) -> Self {
        Self {
            annotations: wire.annotations,
            creation_timestamp: wire.creation_timestamp,
            deletion_grace_period_seconds: wire.deletion_grace_period_seconds,
            deletion_timestamp: wire.deletion_timestamp,
            finalizers: wire.finalizers,
            generate_name: wire.generate_name,
            generation: wire.generation,
            labels: wire.labels,
            managed_fields: None,
            name: wire.name,
            namespace: wire.namespace,
            owner_references: wire.owner_references,
            resource_version: wire.resource_version,
            self_link: wire.self_link,
            uid: wire.uid,
        }
    }
}

impl<'de, K> Deserialize<'de> for GuardedObject<K>
where
    K: FromParts<Spec: DeserializeOwned, Status: DeserializeOwned>,
{
    /// Needs a deserializer of JSON. Within a watch event that holds only as long as `type` precedes `object`, as the
    /// API server writes it: otherwise serde reads the object before it knows what it is.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let object: Result<WireObject<K::Spec, K::Status>, _> = serde_json::from_str(text.get());
        Ok(Self(match object {
            Ok(object) => Ok(K::from_parts(object.metadata.into(), object.spec, object.status)),
            Err(error) => {
                let object: MetadataOnly = serde_json::from_str(text.get()).map_err(D::Error::custom)?;
                Err(InvalidObject {
                    error: without_position(&error),
                    metadata: object.metadata.into(),
                })
            }
        }))
    }
}

/// The message of an error without the line and column, which depend on how the object was written.
fn without_position(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    message.strip_suffix(&position).unwrap_or(&message).to_owned()
}

impl<K: Resource> Resource for GuardedObject<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic)
    }

    fn group(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::group(dynamic)
    }

    fn version(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::version(dynamic)
    }

    fn plural(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.as_ref().map_or_else(|invalid| &invalid.metadata, K::meta)
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0
            .as_mut()
            .map_or_else(|invalid| &mut invalid.metadata, K::meta_mut)
    }
}

#[cfg(test)]
mod tests {
    use kube::core::{DeserializeGuard, ObjectList, WatchEvent};
    use pretty_assertions::assert_eq;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::api::unreadable::describe;

    fn agent(spec: &Value) -> Value {
        json!({
            "apiVersion": "agentloop.dev/v1alpha1",
            "kind": "Agent",
            "metadata": {
                "name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7", "generation": 2,
                "creationTimestamp": "2026-01-02T03:04:05Z", "deletionTimestamp": "2026-01-02T03:04:06Z",
                "deletionGracePeriodSeconds": 30, "finalizers": ["f"], "generateName": "g", "selfLink": "/x",
                "labels": {"team": "x"}, "annotations": {"agentloop.dev/wake": "1"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": "ou"}],
                "managedFields": [{"manager": "kubectl", "operation": "Update", "fieldsType": "FieldsV1",
                                   "fieldsV1": {"f:spec": {"f:suspend": {}}}}],
            },
            "spec": spec,
            "status": {"observedGeneration": 1, "conditions": []},
        })
    }

    fn valid() -> Value {
        agent(&json!({"model": {"api": "Scripted", "name": "demo"}, "instructions": "Work."}))
    }

    fn decode(object: &Value) -> GuardedObject<Agent> {
        serde_json::from_str(&object.to_string()).unwrap()
    }

    #[test]
    fn an_object_is_decoded_as_by_kube_but_without_managed_fields() {
        let object = valid();
        let mut expected: DeserializeGuard<Agent> = serde_json::from_value(object.clone()).unwrap();
        assert!(expected.meta_mut().managed_fields.take().is_some());
        assert_eq!(decode(&object).0.unwrap(), expected.0.unwrap());
    }

    #[rstest]
    #[case(json!({"model": "canary"}), "invalid type: string, expected ")]
    #[case(json!({"model": {"api": "canary"}}), "unknown variant, expected ")]
    #[case(json!({"suspend": 7}), "invalid type: integer, expected a boolean")]
    #[case(json!({}), "missing field `model`")]
    #[case(json!(null), "invalid type: null, expected ")]
    fn an_unparseable_object_keeps_its_metadata_and_its_error(#[case] spec: Value, #[case] why: &str) {
        let mut object = agent(&spec);
        let invalid = decode(&object).0.unwrap_err();
        let message = describe(&invalid.error);
        assert!(message.starts_with(why) && !message.contains("canary"), "{message}");
        let expected: DeserializeGuard<Agent> = serde_json::from_value(object.clone()).unwrap();
        let mut expected = expected.0.unwrap_err().metadata;
        expected.managed_fields = None;
        assert_eq!(invalid.metadata, expected);
        // The text may be printed in any way.
        object["metadata"]["labels"] = json!({"canary": "a\nb"});
        let printed = serde_json::to_string_pretty(&object).unwrap();
        let printed: GuardedObject<Agent> = serde_json::from_str(&printed).unwrap();
        assert_eq!(printed.0.unwrap_err().error, invalid.error);
    }

    #[test]
    fn an_unparseable_object_ends_neither_a_list_nor_a_watch() {
        let (good, bad) = (valid(), agent(&json!({"suspend": 7})));
        let list = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentList",
            "metadata": {"resourceVersion": "9"}, "items": [good, bad],
        });
        let list: ObjectList<GuardedObject<Agent>> = serde_json::from_str(&list.to_string()).unwrap();
        let parsed: Vec<_> = list.items.iter().map(|item| item.0.is_ok()).collect();
        assert_eq!(parsed, [true, false]);
        for (object, parses) in [(good, true), (bad, false)] {
            let event = json!({"type": "MODIFIED", "object": object});
            let event: WatchEvent<GuardedObject<Agent>> = serde_json::from_str(&event.to_string()).unwrap();
            assert!(matches!(event, WatchEvent::Modified(agent) if agent.0.is_ok() == parses));
        }
    }
}
