//! `kubectl explain` shows the doc comment of the field, not that of its type.

use std::collections::{BTreeMap, BTreeSet};

use super::reader::{Schema, repository};
use super::shape::EMBEDDED;

/// Doc comments of all fields in `src/api`, by the name of the field in YAML.
fn field_docs() -> BTreeMap<String, BTreeSet<String>> {
    let mut docs: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in std::fs::read_dir(repository("src/api")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let mut doc = Vec::new();
        // Attributes are between the comment and the field; their continuation lines have no `pub`.
        for line in text.lines().map(str::trim) {
            if let Some(comment) = line.strip_prefix("///") {
                doc.push(comment.trim());
            } else if let Some(field) = field_name(line) {
                docs.entry(camel_case(field)).or_default().insert(paragraphs(&doc));
                doc.clear();
            } else if line.starts_with("pub ") || line.is_empty() {
                doc.clear();
            }
        }
    }
    docs
}

/// `pub name: Type,`
fn field_name(line: &str) -> Option<&str> {
    let (name, _) = line.strip_prefix("pub ")?.split_once(": ")?;
    let name = name.strip_prefix("r#").unwrap_or(name);
    name.chars()
        .all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
        .then_some(name)
}

fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |name, word| name + &word[..1].to_uppercase() + &word[1..])
}

fn paragraphs(lines: &[&str]) -> String {
    let text = lines.split(|line| line.is_empty()).map(|lines| lines.join(" "));
    text.collect::<Vec<_>>().join("\n\n")
}

#[test]
fn each_field_is_described_by_its_own_doc_comment() {
    let docs = field_docs();
    let mut checked = 0;
    for schema in Schema::all() {
        schema.walk(&mut |path, schema| {
            // Kubernetes' own types; and the texts of the light model are those of the model, adapted.
            let others =
                path == "spec.lightModel" || path.ends_with(".resources") || path.ends_with("matchExpressions[]");
            if others || EMBEDDED.contains(&path) {
                return false;
            }
            let name = path.rsplit('.').next().unwrap_or_default();
            let of_a_field = !name.ends_with("[]") && name != "*" && path.contains('.');
            if let (true, Some(known)) = (of_a_field, docs.get(name)) {
                let shown = schema["description"].as_str().unwrap_or_default();
                assert!(
                    known.contains(shown),
                    "{path} is described as «{shown}», not as one of {known:#?}"
                );
                checked += 1;
            }
            true
        });
    }
    assert!(checked > 250, "only {checked} fields were compared");
}
