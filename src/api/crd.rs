//! The custom resource definitions as they are installed.
//!
//! The derived schemas are made exact here: what Kubernetes does not know is removed, and every list states how
//! server-side apply merges it.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;
use kube::core::schema::{OptionalEnum, OptionalIntOrString, StructuralSchemaRewriter};
use schemars::generate::SchemaSettings;
use schemars::transform::{AddNullable, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde_json::Value;

use super::{Agent, AgentBudget, Sensor};

/// Every custom resource definition of this project, in the order of their names.
#[must_use]
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![finished::<AgentBudget>(), finished::<Agent>(), finished::<Sensor>()]
}

/// The definition as the YAML file that is installed, deterministic.
pub fn to_yaml(crd: &CustomResourceDefinition) -> Result<String, serde_yaml::Error> {
    let mut value = serde_json::to_value(crd).map_err(<serde_yaml::Error as serde::ser::Error>::custom)?;
    integers(&mut value);
    serde_yaml::to_string(&value)
}

/// Bounds are floating-point numbers in the typed schema; `minimum: 1.0` of an integer reads badly.
fn integers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let whole = number.as_f64().filter(|float| number.is_f64() && float.fract() == 0.0);
            if let Some(whole) = whole.and_then(|float| format!("{float:.0}").parse::<i64>().ok()) {
                *value = whole.into();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(integers),
        Value::Object(fields) => fields.values_mut().for_each(integers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

fn finished<K: CustomResourceExt + JsonSchema>() -> CustomResourceDefinition {
    let mut crd = K::crd();
    let schemas = crd
        .spec
        .versions
        .iter_mut()
        .filter_map(|version| version.schema.as_mut())
        .filter_map(|validation| validation.open_api_v3_schema.as_mut());
    for schema in schemas {
        if let Ok(described) = described::<K>() {
            *schema = described;
        }
        schema.title = None;
        visit(schema, &mut finish);
        let status = schema
            .properties
            .as_mut()
            .and_then(|properties| properties.get_mut("status"));
        for part in status.into_iter().filter_map(|status| status.properties.as_mut()) {
            // Defaults in a status would put words into the controller's mouth; the one of status itself stays. Rules
            // speak to people, who write no status.
            for field in part.values_mut() {
                visit(field, &mut |schema| {
                    schema.default = None;
                    schema.x_kubernetes_validations = None;
                });
            }
        }
    }
    crd
}

/// The schema as `kube` derives it, except that an optional enum is described by its field.
fn described<T: JsonSchema>() -> Result<JSONSchemaProps, serde_json::Error> {
    let settings = SchemaSettings::openapi3()
        .with(|settings| {
            settings.inline_subschemas = true;
            settings.meta_schema = None;
        })
        .with_transform(AddNullable::default())
        .with_transform(StructuralSchemaRewriter)
        .with_transform(describe_by_field)
        .with_transform(OptionalEnum)
        .with_transform(OptionalIntOrString);
    serde_json::from_value(settings.into_generator().into_root_schema_for::<T>().to_value())
}

/// [`OptionalEnum`] replaces `anyOf: [enum, null]` by the enum, and with it the field's description by the type's.
fn describe_by_field(schema: &mut Schema) {
    transform_subschemas(&mut describe_by_field, schema);
    if schema.get("description").is_none() {
        return;
    }
    let Some(Value::Array(choices)) = schema.get_mut("anyOf") else {
        return;
    };
    for choice in choices.iter_mut().filter_map(Value::as_object_mut) {
        choice.remove("description");
    }
}

/// Applies `change` to a schema and all schemas within it.
fn visit(schema: &mut JSONSchemaProps, change: &mut impl FnMut(&mut JSONSchemaProps)) {
    change(schema);
    for property in schema
        .properties
        .iter_mut()
        .flat_map(|properties| properties.values_mut())
    {
        visit(property, change);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        visit(values, change);
    }
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => visit(items, change),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(|items| visit(items, change)),
        None => {}
    }
}

fn finish(schema: &mut JSONSchemaProps) {
    // An explicit null is dropped by the API server, so that a rule's `has()` means that there is a value.
    schema.nullable = None;
    // The API server knows no unsigned formats and warns about them; the range is stated by minimum and maximum.
    if schema
        .format
        .as_deref()
        .is_some_and(|format| format.starts_with("uint"))
    {
        schema.format = None;
    }
    // A line break in a doc comment does not start a paragraph.
    if let Some(description) = &mut schema.description {
        let paragraphs: Vec<_> = description.split("\n\n").map(|text| text.replace('\n', " ")).collect();
        *description = paragraphs.join("\n\n");
    }
    // Lists are replaced as a whole unless the schema says otherwise. That is the default; stated explicitly for readers.
    if schema.type_.as_deref() == Some("array") {
        schema.x_kubernetes_list_type.get_or_insert_with(|| "atomic".into());
    }
}
