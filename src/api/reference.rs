//! The reference of the resources as a page of documentation, made of their definitions.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};

/// Fields of Kubernetes' own types, described there, and the controller's own notes: only named here. So is what
/// declares only fields that are refused.
const EMBEDDED: &[&str] = &[
    "spec.agentSelector",
    "spec.lightModel.extraBody",
    "spec.model.extraBody",
    "spec.namespaceSelector",
    "spec.pod.affinity",
    "spec.pod.imagePullSecrets",
    "spec.pod.resources",
    "spec.pod.tolerations",
    "spec.pod.topologySpreadConstraints",
    "spec.selector",
    "status.conditions",
    "status.ledger",
];

const HEAD: &str = "\
# API reference

<!-- Made by `make generate` from the types in src/api: change them there. -->

`kubectl explain` shows the same texts in a cluster.";

/// Fields and rules of every definition, as Markdown.
#[must_use]
pub fn markdown(definitions: &[CustomResourceDefinition]) -> String {
    let mut lines: Vec<String> = HEAD.lines().map(str::to_owned).collect();
    for definition in definitions {
        for version in &definition.spec.versions {
            let kind = &definition.spec.names.kind;
            let group = &definition.spec.group;
            lines.push(format!("\n## {kind} (`{group}/{}`)", version.name));
            let schema = version
                .schema
                .as_ref()
                .and_then(|schema| schema.open_api_v3_schema.as_ref());
            if let Some(schema) = schema {
                resource(&mut lines, schema);
            }
        }
    }
    lines.join("\n") + "\n"
}

fn resource(lines: &mut Vec<String>, schema: &JSONSchemaProps) {
    let mut rules = Vec::new();
    for part in ["spec", "status"] {
        lines.push(format!("\n### {part}\n\n| field | type | meaning |\n|---|---|---|"));
        let properties = schema.properties.as_ref();
        if let Some(field) = properties.and_then(|properties| properties.get(part)) {
            fields(lines, part, field);
            collect_rules(field, &mut rules);
        }
    }
    collect_own_rules(schema, &mut rules);
    lines.push("\n### Rules\n\nWhat breaks one is refused, with these words:\n".into());
    lines.extend(rules.into_iter().map(|rule| format!("- {rule}")));
}

/// One line for each field within `schema`.
fn fields(lines: &mut Vec<String>, path: &str, schema: &JSONSchemaProps) {
    for (name, field) in schema.properties.iter().flatten() {
        let path = format!("{path}.{name}");
        let required = schema.required.iter().flatten().any(|required| required == name);
        let suffix = if field.items.is_some() { "[]" } else { "" };
        let type_ = type_of(field, required);
        let meaning = cell(field.description.as_deref().unwrap_or_default());
        lines.push(format!("| `{path}{suffix}` | {type_} | {meaning} |"));
        if EMBEDDED.contains(&path.as_str()) {
            continue;
        }
        fields(lines, &path, field);
        if let Some(JSONSchemaPropsOrArray::Schema(items)) = &field.items {
            fields(lines, &format!("{path}[]"), items);
        }
    }
}

/// Type, bounds and default of a field, in words.
fn type_of(field: &JSONSchemaProps, required: bool) -> String {
    let mut words = vec![match (&field.enum_, &field.additional_properties) {
        (Some(values), _) => values
            .iter()
            .map(|value| format!("`{}`", text(&value.0)))
            .collect::<Vec<_>>()
            .join(", "),
        (None, Some(JSONSchemaPropsOrBool::Schema(_))) => "map".into(),
        (None, _) if field.format.as_deref() == Some("date-time") => "moment".into(),
        (None, _) => field.type_.clone().unwrap_or_default(),
    }];
    match (field.minimum, field.maximum) {
        (Some(minimum), Some(maximum)) => words.push(format!("{minimum} to {maximum}")),
        (Some(minimum), None) => words.push(format!("at least {minimum}")),
        (None, _) => {}
    }
    let most = field.max_length.map(|most| (most, "characters"));
    let most = most.or(field.max_items.map(|most| (most, "entries")));
    if let Some((most, what)) = most.or(field.max_properties.map(|most| (most, "entries"))) {
        words.push(format!("at most {most} {what}"));
    }
    match &field.default {
        _ if required => words.push("**required**".into()),
        Some(default) if !default.0.is_object() => words.push(format!("default `{}`", text(&default.0))),
        Some(_) | None => {}
    }
    words.join("; ")
}

fn text(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A text that does not end its table cell.
fn cell(text: &str) -> String {
    text.replace("\n\n", " ").replace('|', "\\|")
}

fn collect_rules(schema: &JSONSchemaProps, rules: &mut Vec<String>) {
    collect_own_rules(schema, rules);
    for field in schema.properties.iter().flat_map(|properties| properties.values()) {
        collect_rules(field, rules);
    }
}

fn collect_own_rules(schema: &JSONSchemaProps, rules: &mut Vec<String>) {
    let own = schema.x_kubernetes_validations.iter().flatten();
    rules.extend(own.filter_map(|rule| rule.message.clone()));
}
