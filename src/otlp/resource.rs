//! The attributes of the origin of telemetry, and how attributes are encoded.

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;

use crate::spans::AgentIdentity;

/// The process that telemetry comes from: attributes of its resource that variables cannot replace.
#[derive(Clone, Debug, PartialEq)]
pub struct TelemetryOrigin(Vec<KeyValue>);

impl TelemetryOrigin {
    /// The pod of an Agent.
    #[must_use]
    pub fn agent(agent: &AgentIdentity) -> Self {
        Self(vec![
            version(),
            text("service.instance.id", &agent.uid),
            text("k8s.namespace.name", &agent.namespace),
            text("agentloop.agent.name", &agent.name),
            text("agentloop.agent.uid", &agent.uid),
        ])
    }

    /// The pod of a Sensor, by its namespace, name and uid.
    #[must_use]
    pub fn sensor((namespace, name, uid): (&str, &str, &str)) -> Self {
        Self(vec![
            version(),
            text("service.instance.id", uid),
            text("k8s.namespace.name", namespace),
            text("agentloop.sensor.name", name),
            text("agentloop.sensor.uid", uid),
        ])
    }

    /// A replica of the controller: its namespace, and its pod if it is in one.
    #[must_use]
    pub fn controller(namespace: &str, pod: Option<&str>) -> Self {
        let instance = pod.map_or_else(|| format!("process-{}", std::process::id()), str::to_owned);
        let mut own = vec![
            version(),
            text("service.instance.id", instance),
            text("k8s.namespace.name", namespace),
        ];
        own.extend(pod.map(|pod| text("k8s.pod.name", pod)));
        Self(own)
    }

    /// The resource, with the attributes that the variables give.
    pub(crate) fn resource(&self, given: &[(String, String)]) -> Resource {
        let Self(own) = self;
        let given = given.iter().filter(|(key, _)| own.iter().all(|own| own.key != *key));
        let given = given.map(|(key, value)| text(key, value));
        Resource {
            attributes: given.chain(own.iter().cloned()).collect(),
            ..Resource::default()
        }
    }
}

fn version() -> KeyValue {
    text("service.version", env!("CARGO_PKG_VERSION"))
}

/// What made the telemetry, within the process.
pub(crate) fn scope(name: impl Into<String>) -> InstrumentationScope {
    InstrumentationScope {
        name: name.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        ..InstrumentationScope::default()
    }
}

pub(crate) fn text(key: &str, value: impl Into<String>) -> KeyValue {
    attribute(key, Value::StringValue(value.into()))
}

pub(crate) fn int(key: &str, value: i64) -> KeyValue {
    attribute(key, Value::IntValue(value))
}

pub(crate) fn boolean(key: &str, value: bool) -> KeyValue {
    attribute(key, Value::BoolValue(value))
}

/// An array of strings.
pub(crate) fn texts<'a>(key: &str, values: impl IntoIterator<Item = &'a str>) -> KeyValue {
    let values = values.into_iter().map(|value| AnyValue {
        value: Some(Value::StringValue(value.to_owned())),
    });
    attribute(
        key,
        Value::ArrayValue(ArrayValue {
            values: values.collect(),
        }),
    )
}

pub(crate) fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.into(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spans::tests::{agent, attributes};

    #[test]
    fn variables_add_to_the_resource_and_do_not_replace_the_agent() {
        let given = [("service.name", "s"), ("k8s.namespace.name", "forged"), ("a", "b")];
        let given = given.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let resource = attributes(&TelemetryOrigin::agent(&agent()).resource(&given).attributes);
        let of = |key: &str| {
            let found = resource.iter().filter(|(known, _)| known == key);
            found.map(|(_, value)| value.as_str()).collect::<Vec<_>>()
        };
        assert_eq!((of("service.name"), of("a")), (vec!["s"], vec!["b"]));
        assert_eq!(of("k8s.namespace.name"), ["team-a"]);
        assert_eq!(of("agentloop.agent.name"), ["watcher"]);
    }

    #[test]
    fn a_replica_is_named_by_its_pod_or_its_process() {
        let named = |pod| attributes(&TelemetryOrigin::controller("system", pod).resource(&[]).attributes);
        let pod = named(Some("agentloop-1"));
        assert!(pod.contains(&("service.instance.id".into(), "agentloop-1".into())));
        assert!(pod.contains(&("k8s.pod.name".into(), "agentloop-1".into())));
        assert!(!named(None).iter().any(|(key, _)| key == "k8s.pod.name"));
    }
}
