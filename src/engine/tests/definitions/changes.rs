//! What a record says of changed definitions: which parts differ from those that were accepted.

use pretty_assertions::assert_eq;

use super::*;

/// A tool with this description and these parameters.
fn with_parts(spec: ToolSpec, text: &str, parameters: &Value) -> ToolSpec {
    let schema = json!({"type": "object", "properties": parameters});
    with_definition(spec, |definition| {
        definition.parts = DefinitionParts::of(text, schema.as_object().unwrap(), &Value::Null);
    })
}

/// The tool `files__read` of three versions.
fn versions() -> [ToolSpec; 3] {
    [
        with_parts(asks("files__read", "one"), "reads", &json!({"path": {}})),
        with_parts(asks("files__read", "two"), "reads it", &json!({"path": {}, "to": {}})),
        with_parts(
            asks("files__read", "three"),
            "reads it",
            &json!({"to": {"type": "string"}}),
        ),
    ]
}

#[test]
fn a_gate_for_definitions_names_the_changed_parts() {
    let [one, two, three] = versions();
    let mut driver = Driver::fresh(settings());
    driver.offer(vec![one.clone()]);
    driver.start(1);
    driver.lists(vec![three.clone(), asks("files__new", "one")]);
    driver.lists(vec![two.clone()]);
    driver.decide(true);
    // What was approved is what later changes are compared with, also after a restart and without the server in between.
    driver.restart(2);
    driver.lists(vec![three.clone()]);
    driver.decide(true);
    driver.lists(vec![with_definition(three, |definition| {
        definition.hash = "hash of what no part says".into();
    })]);
    driver.lists(vec![with_definition(one, |definition| {
        definition.holds_changes = false;
    })]);
    assert_eq!(
        driver.notes(RecordKind::GateOpened),
        [
            "tools-files-e1-1: changed files__read (description, parameters +to -path); new files__new",
            "tools-files-e1-2: changed files__read (description, parameters +to)",
            "tools-files-e2-3: changed files__read (parameters -path ~to)",
            "tools-files-e2-4: changed files__read",
        ]
    );
    assert_eq!(
        driver.notes(RecordKind::ToolsChanged),
        ["files: changed files__read (description, parameters +path -to)"]
    );
}

#[test]
fn an_approval_of_what_the_server_has_replaced_is_compared_with_nothing_else() {
    let [one, two, three] = versions();
    let mut driver = Driver::fresh(settings());
    driver.offer(vec![one]);
    driver.start(1);
    driver.lists(vec![two]);
    driver.tools.clear();
    driver.feed(EngineInput::ToolsChanged {
        tools: Vec::new(),
        silent: vec!["files".into()],
    });
    driver.decide(true);
    driver.lists(vec![three]);
    let note = *driver.notes(RecordKind::GateOpened).last().unwrap();
    assert_eq!(note, "tools-files-e1-2: changed files__read");
}

#[test]
fn pins_of_a_version_without_parts_are_completed_by_the_next_list() {
    let [one, two, _] = versions();
    for (seen_again, parts) in [(false, ""), (true, " (description, parameters +to)")] {
        let mut driver = Driver::fresh(settings());
        driver.offer(vec![one.clone()]);
        driver.start(1);
        let mut stored: Value = serde_json::to_value(&driver.saved).unwrap();
        let pins = stored["definitions"]["files"].as_object_mut().unwrap();
        assert!(pins.remove("parts").is_some());
        driver.saved = serde_json::from_value(stored).unwrap();
        if !seen_again {
            driver.tools = vec![two.clone()];
        }
        driver.restart(2);
        driver.lists(vec![two.clone()]);
        let opened = format!("tools-files-e2-1: changed files__read{parts}");
        assert_eq!(driver.notes(RecordKind::GateOpened), [opened]);
    }
}

#[test]
fn the_parts_of_a_server_with_more_than_512_parameters_are_not_kept_beyond_them() {
    let parameters = |count: usize| (0..count).map(|number| (format!("p{number}"), json!({}))).collect();
    let tools = |last: usize, text: &str| -> Vec<ToolSpec> {
        let of = |(number, count): (usize, usize)| {
            let parameters = Value::Object(parameters(count));
            with_parts(allows(&format!("files__t{number:02}"), text), text, &parameters)
        };
        (0..17)
            .map(|number| (number, if number < 16 { 31 } else { last }))
            .map(of)
            .collect()
    };
    for (last, is_kept) in [(16, true), (17, false)] {
        let mut driver = Driver::fresh(settings());
        driver.offer(tools(last, "one"));
        driver.start(1);
        driver.lists(tools(last, "two").split_off(16));
        let name = if is_kept {
            "files__t16 (description)"
        } else {
            "files__t16"
        };
        assert_eq!(
            driver.notes(RecordKind::ToolsChanged),
            [format!("files: changed {name}")]
        );
    }
}
