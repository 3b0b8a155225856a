//! Tests of the objects in a file, before references and rules are checked.

use super::*;

fn parsed(text: &str) -> (Vec<ManifestObject>, Vec<String>) {
    let (mut manifests, mut mistakes) = (Vec::new(), Vec::new());
    documents("f.yaml", text, &mut manifests, &mut mistakes);
    (manifests, mistakes)
}

fn mistakes_in(text: &str) -> Vec<String> {
    let (manifests, mistakes) = parsed(text);
    // What is accepted is completed.
    assert_eq!(with_namespaces(manifests).is_empty(), !mistakes.is_empty());
    mistakes
}

#[test]
fn a_field_that_is_no_mapping_is_refused_by_its_name() {
    let secret = |fields: &str| format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: s}}\n{fields}");
    let config_map = |fields: &str| secret(fields).replace("kind: Secret", "kind: ConfigMap");
    let namespace = |metadata: &str| format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: n, {metadata}}}");
    let data = "data must be a mapping of keys to values";
    let labels = "metadata.labels of Namespace n must be a mapping of names to strings";
    for (text, told) in [
        (secret("data: []\nstringData: {a: b}"), format!("Secret s: {data}")),
        (secret("data: x"), format!("Secret s: {data}")),
        (
            secret("stringData: [a]"),
            "Secret s: stringData must be a mapping of keys to values".into(),
        ),
        (config_map("data: 1"), format!("ConfigMap s: {data}")),
        (namespace("labels: x"), labels.into()),
        (namespace("labels: [x]"), labels.into()),
        (namespace("annotations: 1"), labels.replace("labels", "annotations")),
    ] {
        assert_eq!(mistakes_in(&text), [format!("f.yaml, document 1: {told}")], "{text}");
    }
    for text in [
        secret("data:\nstringData: {a: b}"),
        secret("stringData: {}"),
        config_map("data: {a: b}"),
        namespace("labels: "),
        namespace("labels: {a: b}"),
    ] {
        assert_eq!(mistakes_in(&text), [""; 0], "{text}");
    }
}
const LIST: &str = "apiVersion: v1\nkind: List\n";

#[test]
fn items_of_a_list_are_checked_like_documents_and_counted_in_messages() {
    let item = |name: &str, fields: &str| {
        format!("- {{apiVersion: v1, kind: Namespace, metadata: {{name: {name}}}, {fields}}}\n")
    };
    let text = format!("{LIST}items:\n{}{}", item("a", ""), item("b", ""));
    let (manifests, mistakes) = parsed(&text);
    assert_eq!(mistakes, [""; 0]);
    let places: Vec<_> = manifests.iter().map(|manifest| manifest.place.as_str()).collect();
    let item_1 = "f.yaml, document 1, item 1";
    assert_eq!(
        places,
        [
            &format!("{item_1} (Namespace a)"),
            "f.yaml, document 1, item 2 (Namespace b)"
        ]
    );

    for (items, told) in [
        (
            item("a", "x: 1, x: 2"),
            format!("{item_1}: key \"x\" is given twice: remove one of them"),
        ),
        (
            item("a", "x: {y: 1, y: 2}"),
            format!("{item_1}: x: key \"y\" is given twice: remove one of them"),
        ),
        (
            item("A", ""),
            format!(
                "{item_1}: metadata.name of this Namespace must consist of 1 to 253 lower-case letters, digits, '-' and '.'"
            ),
        ),
    ] {
        assert_eq!(parsed(&format!("{LIST}items:\n{items}")).1, [told]);
    }
    let eleventh = format!(
        "{LIST}items:\n{}{}",
        item("a", "").repeat(10),
        item("a", "x: {y: 1, y: 2}")
    );
    let told = "f.yaml, document 1, item 11: x: key \"y\" is given twice: remove one of them";
    assert_eq!(parsed(&eleventh).1, [told]);
}

#[test]
fn a_list_without_items_is_a_mistake_and_an_empty_one_is_none() {
    let told = "f.yaml, document 1: items of a List must be a list of objects";
    for items in ["", "items:", "items: {}", "items: x"] {
        assert_eq!(mistakes_in(&format!("{LIST}{items}")), [told], "{items}");
    }
    let (manifests, mistakes) = parsed(&format!("{LIST}items: []"));
    assert!(manifests.is_empty() && mistakes.is_empty(), "{mistakes:?}");
    // As for kubectl, a List in a List is no object.
    let nested = mistakes_in(&format!(
        "{LIST}items: [null, {{apiVersion: v1, kind: List, items: []}}]"
    ));
    assert!(
        nested[0].starts_with("f.yaml, document 1, item 1: apiVersion \"\" with kind \"\" is not supported")
            && nested[1]
                .starts_with("f.yaml, document 1, item 2: apiVersion \"v1\" with kind \"List\" is not supported"),
        "{nested:?}"
    );
}

#[test]
fn every_document_with_a_repeated_key_is_reported() {
    let text = "apiVersion: v1\nkind: Secret\nmetadata: {name: s, name: t}\n---\nkind: A\nkind: B\n";
    let (_, mistakes) = parsed(text);
    assert_eq!(mistakes.len(), 3, "{mistakes:?}");
    assert_eq!(
        mistakes[0],
        "f.yaml, document 1: metadata: key \"name\" is given twice: remove one of them"
    );
    assert_eq!(
        mistakes[1],
        "f.yaml, document 2: key \"kind\" is given twice: remove one of them"
    );
}
