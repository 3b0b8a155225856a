//! What `kubectl explain` says of each field, asked of a real API server.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::reader::Schema;
use super::server::Server;
use super::shape::EMBEDDED;
use crate::support::clusters;
use crate::support::kubectl::Kubectl;

const VERSION: &str = "agentloop.dev/v1alpha1";

/// The paths of the tree that `kubectl explain --recursive` prints, such as `spec.model.name`.
fn printed_paths(text: &str) -> Vec<String> {
    let tree = text.lines().skip_while(|line| !line.starts_with("FIELDS:")).skip(1);
    let mut parents: Vec<(usize, String)> = Vec::new();
    let mut paths = Vec::new();
    for line in tree {
        let name = line.trim_start();
        // A field has its type behind a tab; other lines list the values of an enumeration.
        let Some((field, _)) = name.split_once('\t') else {
            continue;
        };
        let indent = line.len() - name.len();
        while parents.last().is_some_and(|(of, _)| *of >= indent) {
            parents.pop();
        }
        let path = parents
            .last()
            .map_or_else(|| field.to_owned(), |(_, parent)| format!("{parent}.{field}"));
        parents.push((indent, path.clone()));
        paths.push(path);
    }
    paths
}

/// The fields of a kind and their descriptions, by paths as `kubectl explain` takes them.
fn fields(schema: &Schema) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    schema.walk(&mut |place, schema| {
        let is_field = !place.ends_with("[]") && !place.ends_with('*');
        let path = place.replace("[]", "").replace(".*", "");
        let is_ours = path.starts_with("spec") || path.starts_with("status");
        if is_field && is_ours {
            let description = schema["description"].as_str().unwrap_or_default();
            fields.insert(path, description.to_owned());
        }
        !EMBEDDED.contains(&place)
    });
    fields
}

/// The schema of a kind as the API server publishes it; the publication follows the definition after a moment.
async fn published(kubectl: &Kubectl, kind: &str) -> Value {
    for _ in 0..100 {
        let ended = kubectl.run(&["get", "--raw", &format!("/openapi/v3/apis/{VERSION}")]);
        let document: Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
        let schemas = document["components"]["schemas"]
            .as_object()
            .cloned()
            .unwrap_or_default();
        let found = schemas
            .into_iter()
            .find(|(_, schema)| schema["x-kubernetes-group-version-kind"][0]["kind"] == kind);
        if let Some((_, schema)) = found {
            return schema;
        }
        // There is no watch for it.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    panic!("the API server does not publish the schema of {kind}");
}

/// The published description of a field.
fn description<'a>(schema: &'a Value, path: &str) -> &'a str {
    let mut at = schema;
    for name in path.split('.') {
        while at["properties"][name].is_null() {
            at = if at["items"].is_object() {
                &at["items"]
            } else {
                &at["additionalProperties"]
            };
            assert!(at.is_object(), "{path} is not published");
        }
        at = &at["properties"][name];
    }
    at["description"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn kubectl_explains_every_field() {
    let Some(kubeconfig) = clusters::control_plane() else {
        return;
    };
    let server = Server::new(&kubeconfig, "explain").await;
    let kubectl = Kubectl::new(&kubeconfig, "");
    for (plural, kind) in [
        ("agents", "Agent"),
        ("agentbudgets", "AgentBudget"),
        ("sensors", "Sensor"),
    ] {
        let fields = fields(Schema::of_kind(kind));
        let schema = published(&kubectl, kind).await;
        for (path, expected) in &fields {
            assert_eq!(description(&schema, path), expected, "{kind}: {path}");
        }
        let tree = kubectl.ok(&["explain", plural, "--recursive", "--api-version", VERSION]);
        let printed = printed_paths(&tree);
        for path in fields.keys() {
            assert!(printed.contains(path), "kubectl explain {plural} does not show {path}");
        }
        // Of one field, the text as a user reads it: in lines of 80 characters.
        let (path, text) = fields.iter().max_by_key(|(path, _)| path.matches('.').count()).unwrap();
        let shown = kubectl.ok(&["explain", &format!("{plural}.{path}"), "--api-version", VERSION]);
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(&shown).contains(&words(text)), "{plural}.{path}: {shown}");
    }
    server.done().await;
}

#[test]
fn the_tree_of_fields_is_read_by_its_indentation() {
    let text = "GROUP: agentloop.dev\n\nFIELDS:\n  spec\t<Object> -required-\n    model\t<Object>\n      api\t<string>\n      enum: A, B\n  status\t<Object>\n";
    assert_eq!(printed_paths(text), ["spec", "spec.model", "spec.model.api", "status"]);
}
