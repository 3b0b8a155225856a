//! Bounds that several fields share: patterns of Kubernetes names, and schema changes for embedded Kubernetes types.
//!
//! The embedded types come without bounds. Those added here reject at admission what would otherwise fail when the pod
//! is created.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// A DNS label, apart from its length.
pub(super) const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// A DNS subdomain, as names of most objects are.
pub(super) const DNS_SUBDOMAIN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// A key in the data of a ConfigMap or Secret.
pub(super) const KEY: &str = r"^[-._a-zA-Z0-9]+$";
/// A label's value; may be empty.
const LABEL_VALUE: &str = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$";
/// A quantity, as the API server itself writes it into schemas.
const QUANTITY: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";
/// Maximum number of entries in a map of labels, annotations or resources.
const MAX_ENTRIES: u64 = 32;

/// A free-form object.
pub(super) fn free_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true, "maxProperties": 64})
}

/// A map of labels, or of node labels.
pub(super) fn labels(schema: &mut Schema) {
    schema.insert("maxProperties".into(), MAX_ENTRIES.into());
    schema.insert(
        "additionalProperties".into(),
        json!({"type": "string", "maxLength": 63, "pattern": LABEL_VALUE}),
    );
}

/// A map of annotations.
pub(super) fn annotations(schema: &mut Schema) {
    schema.insert("maxProperties".into(), MAX_ENTRIES.into());
    schema.insert(
        "additionalProperties".into(),
        json!({"type": "string", "maxLength": 4096}),
    );
}

/// Container resources: quantities are checked, and device claims are removed, since the pod has none to refer to.
pub(super) fn resources(schema: &mut Schema) {
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    properties.remove("claims");
    for amounts in properties.values_mut() {
        amounts["maxProperties"] = MAX_ENTRIES.into();
        amounts["additionalProperties"] = json!({
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY,
            "maxLength": 32,
            "x-kubernetes-int-or-string": true,
        });
    }
}

/// Bounds of `spec.selector`.
pub(super) fn selector(schema: &mut Schema) {
    label_selector(schema, "spec.selector");
}

/// Bounds of `spec.agentSelector`.
pub(super) fn agent_selector(schema: &mut Schema) {
    label_selector(schema, "spec.agentSelector");
}

/// Bounds of `spec.namespaceSelector`.
pub(super) fn namespace_selector(schema: &mut Schema) {
    label_selector(schema, "spec.namespaceSelector");
}

/// A label selector; operators are spelled as in Kubernetes.
fn label_selector(schema: &mut Schema, field: &str) {
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    if let Some(labels) = properties.get_mut("matchLabels") {
        labels["maxProperties"] = MAX_ENTRIES.into();
        labels["additionalProperties"] = json!({"type": "string", "maxLength": 63, "pattern": LABEL_VALUE});
    }
    if let Some(expressions) = properties.get_mut("matchExpressions") {
        expressions["maxItems"] = MAX_ENTRIES.into();
        let fields = &mut expressions["items"]["properties"];
        fields["key"]["maxLength"] = 317.into();
        fields["key"]["minLength"] = 1.into();
        fields["operator"]["enum"] = json!(["In", "NotIn", "Exists", "DoesNotExist"]);
        fields["values"]["maxItems"] = 64.into();
        fields["values"]["items"]["maxLength"] = 63.into();
        expressions["items"]["x-kubernetes-validations"] = json!([{
            "rule": "self.operator in ['In', 'NotIn'] == (has(self.values) && size(self.values) > 0)",
            "message": format!(
                "{field}.matchExpressions[].values must have at least one value for In and NotIn, and none for Exists and \
                 DoesNotExist"
            ),
        }]);
    }
}
