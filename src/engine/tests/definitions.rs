//! Pinned definitions of tools: a server that changes or adds tools reaches no prompt with that before a person has approved it,
//! where its rule says so, and nothing else waits.

mod changes;

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::super::OpenGate;
use super::super::tool::{DeclaredDefinition, DefinitionParts};
use super::work::{tool, wants};
use super::*;
use agentloop_api::status::{GateKind, MAX_GATES};

/// A tool of a server whose changes and new tools wait for an approval.
fn asks(name: &str, text: &str) -> ToolSpec {
    ToolSpec {
        description: format!("{name}: {text}"),
        definition: Some(DeclaredDefinition {
            hash: format!("hash of {text}"),
            parts: DefinitionParts::default(),
            server: "at https://a".into(),
            holds_changes: true,
            holds_new: true,
        }),
        ..tool(name, ToolEffect::Write)
    }
}

fn with_definition(spec: ToolSpec, change: impl FnOnce(&mut DeclaredDefinition)) -> ToolSpec {
    let mut definition = spec.definition.clone().unwrap();
    change(&mut definition);
    ToolSpec {
        definition: Some(definition),
        ..spec
    }
}

/// The same tool of a server whose changes are only recorded.
fn allows(name: &str, text: &str) -> ToolSpec {
    with_definition(asks(name, text), |definition| {
        definition.holds_changes = false;
        definition.holds_new = false;
    })
}

/// The same tool, after an edit of the server's address.
fn moved(spec: ToolSpec) -> ToolSpec {
    with_definition(spec, |definition| definition.server = "at https://b".into())
}

/// The tools that random orders of inputs offer besides the usual ones, by the versions of the server's tools.
pub(super) fn changing(versions: [u8; 2], asked: bool) -> Vec<ToolSpec> {
    let spec = |name, version: u8| {
        let text = format!("version {version}");
        (version > 0).then(|| if asked { asks(name, &text) } else { allows(name, &text) })
    };
    let specs = [spec(NAMES[0], versions[0]), spec(NAMES[1], versions[1])];
    specs.into_iter().flatten().collect()
}

pub(super) const NAMES: [&str; 2] = ["plug__in", "plug__out"];

impl Driver {
    /// A loop whose server `files` has two tools.
    fn with_files() -> Self {
        let mut driver = Self::fresh(settings());
        driver.offer(vec![asks("files__read", "one"), asks("files__write", "one")]);
        driver.start(1);
        driver
    }

    /// The sources list these tools now, and the worker says so.
    fn lists(&mut self, tools: Vec<ToolSpec>) {
        assert_eq!(self.offer(tools), [], "a level without effects");
        self.feed(EngineInput::Timer);
    }

    fn open(&self) -> Vec<OpenGate> {
        self.engine.view().gates
    }

    fn open_ids(&self) -> Vec<String> {
        self.open().into_iter().map(|open| open.gate.id).collect()
    }

    fn decide(&mut self, approved: bool) {
        let open = self.open().remove(0);
        self.decide_on(&open.gate.id, &open.arguments, approved);
    }

    fn decide_on(&mut self, id: &str, hash: &str, approved: bool) {
        self.feed(EngineInput::GateAnswered(EngineGateAnswer {
            gate: id.into(),
            arguments: hash.into(),
            approved,
            by: Some(if approved { "ann" } else { "bob" }.into()),
        }));
    }

    /// The descriptions of the tools of the sources, as prompts have them now.
    fn descriptions(&self) -> Vec<String> {
        let offered = self.engine.offer.toolbox().offered();
        offered
            .iter()
            .skip(1)
            .map(|tool| tool.description.to_string())
            .collect()
    }

    /// Pins change only as the rules say, and no prompt has a definition that was never pinned.
    pub(super) fn check_definitions(&mut self, before: &Engine, input: &EngineInput) {
        let (old, new) = (pins(before), pins(&self.engine));
        for (name, hash) in &new {
            let spec = self.tools.iter().find(|spec| spec.name == *name);
            let declared = spec.and_then(|spec| spec.definition.as_ref());
            let is_moved = declared.is_some_and(|declared| declared.server != "at https://a");
            let is_asked = declared.is_some_and(|declared| declared.holds_changes) && !is_moved;
            let approves = matches!(input, EngineInput::GateAnswered(answer) if answer.approved);
            if old.get(name).is_some_and(|old| old != hash) && is_asked {
                assert!(approves, "{name} was pinned by {input:?}");
            }
            self.pinned.insert((name.clone(), hash.clone()));
        }
        let gates = self.open();
        assert!(gates.len() <= MAX_GATES, "{gates:?}");
    }

    /// What a prompt offers was accepted at some time.
    pub(super) fn check_offer(&self, offered: &[super::super::message::ToolDefinition]) {
        for tool in offered {
            let name = &*tool.name;
            let Some(text) = tool.description.strip_prefix(&format!("{name}: ")) else {
                continue;
            };
            let hash = format!("hash of {text}");
            let accepted = self.pinned.contains(&(name.to_owned(), hash.clone()))
                || pins(&self.engine).get(name) == Some(&hash)
                || self
                    .tools
                    .iter()
                    .any(|spec| spec.name == name && !spec.definition.as_ref().unwrap().holds_changes);
            assert!(accepted, "{name} was offered as {text}");
        }
    }
}

/// The pinned hashes, by the names of the tools.
fn pins(engine: &Engine) -> BTreeMap<String, String> {
    let stored = serde_json::to_value(&engine.state.definitions).unwrap();
    let servers = stored.as_object().unwrap().values();
    let pins = servers.flat_map(|pins| pins["tools"].as_object().unwrap().clone());
    pins.map(|(name, hash)| (name, hash.as_str().unwrap().to_owned()))
        .collect()
}

#[test]
fn the_first_definitions_of_a_server_are_accepted_and_pinned() {
    let driver = Driver::with_files();
    assert_eq!(driver.offered, ["yield", "files__read", "files__write"]);
    assert_eq!(driver.notes(RecordKind::ToolsPinned), ["files: 2 tools"]);
    assert_eq!(driver.open(), []);
    assert_eq!(pins(&driver.engine)["files__read"], "hash of one");
}

#[test]
fn a_server_that_answers_late_is_pinned_too_and_tools_without_a_declaration_are_not() {
    let mut driver = Driver::with_tools(settings());
    assert_eq!(
        (pins(&driver.engine).len(), driver.notes(RecordKind::ToolsPinned)),
        (0, vec![])
    );
    driver.lists(vec![tool("own__read", ToolEffect::Read), asks("files__read", "one")]);
    assert_eq!(driver.notes(RecordKind::ToolsPinned), ["files: 1 tool"]);
    assert_eq!(pins(&driver.engine).len(), 1);
}

#[test]
fn a_changed_tool_is_withheld_until_its_approval_and_the_loop_continues_without_it() {
    let mut driver = Driver::with_files();
    driver.answer(calls("yield", r#"{"sleep": 60}"#));
    driver.lists(vec![asks("files__read", "two"), asks("files__write", "one")]);
    let open = driver.open();
    let [gate] = &open[..] else { panic!("{open:?}") };
    assert_eq!((&*gate.gate.id, &*gate.tool), ("tools-files-e1-1", "files"));
    assert_eq!(
        (gate.gate.kind, gate.gate.expires_at),
        (GateKind::ToolDefinitionsChanged, None)
    );
    assert_eq!(
        driver.notes(RecordKind::GateOpened),
        ["tools-files-e1-1: changed files__read"]
    );
    assert_eq!((driver.state(), driver.reasons()), (LoopState::Sleeping, vec![]));
    driver.pass(seconds(60));
    assert_eq!(driver.offered, ["yield", "files__write"]);
    assert_eq!(driver.descriptions(), ["files__write: one"]);
    let block = driver.block.clone().unwrap_or_default();
    assert!(
        block.contains("not offered until a person has approved them: files."),
        "{block}"
    );
    driver.answer(wants(&["files__read"]));
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["DefinitionChanged"]);
    assert!(
        driver.result().contains("no person has approved that"),
        "{}",
        driver.result()
    );
    assert_eq!(
        driver.lines(RecordKind::ToolDenied)[0].tool.as_deref(),
        Some("files__read")
    );
    // The other tool is not concerned.
    driver.answer(wants(&["files__write"]));
    driver.done(1, "written");
    driver.decide(true);
    assert_eq!(driver.open(), []);
    assert_eq!(
        driver.notes(RecordKind::GateResolved),
        ["tools-files-e1-1 approved by ann"]
    );
    assert_eq!(
        driver.descriptions(),
        ["files__write: one"],
        "the list stays within a turn"
    );
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__read: two", "files__write: one"]);
    assert_eq!(driver.block, None);
    driver.answer(wants(&["files__read"]));
    assert_eq!(driver.sent.last().unwrap().definition, "hash of two");
}

#[test]
fn a_gate_for_definitions_neither_expires_nor_pauses() {
    let mut driver = Driver::with_files();
    driver.lists(vec![asks("files__read", "two"), asks("files__write", "one")]);
    for _ in 0..30 {
        driver.answer(calls("yield", r#"{"sleep": 3600}"#));
        driver.pass(seconds(3600));
    }
    assert_eq!(driver.open_ids(), ["tools-files-e1-1"]);
    assert_eq!(driver.state(), LoopState::Running);
}

#[test]
fn a_tool_that_changes_within_a_turn_is_still_listed_and_its_calls_are_denied() {
    let mut driver = Driver::with_files();
    driver.answer(wants(&["files__read"]));
    assert_eq!(driver.running(), [1], "before the change");
    driver.offer(vec![asks("files__read", "two"), asks("files__write", "one")]);
    driver.done(1, "read");
    assert_eq!(driver.descriptions(), ["files__read: one", "files__write: one"]);
    driver.answer(wants(&["files__read"]));
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["DefinitionChanged"]);
    // Approved within the turn: what the model was shown is still not what the tool is.
    driver.decide(true);
    driver.answer(wants(&["files__read"]));
    assert!(
        driver.result().contains("has changed since you were shown it"),
        "{}",
        driver.result()
    );
    driver.answer(wants(&["files__write"]));
    assert_eq!(driver.sent.len(), 2);
    driver.done(1, "written");
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__read: two", "files__write: one"]);
    driver.answer(wants(&["files__read"]));
    assert_eq!(driver.sent.len(), 3);
}

#[test]
fn an_allowed_change_is_recorded_once_and_offered_from_the_next_turn_on() {
    let mut driver = Driver::fresh(settings());
    driver.offer(vec![allows("files__read", "one")]);
    driver.start(1);
    for _ in 0..2 {
        driver.lists(vec![allows("files__read", "two"), allows("files__copy", "one")]);
    }
    let note = "files: changed files__read; new files__copy";
    assert_eq!(driver.notes(RecordKind::ToolsChanged), [note]);
    assert_eq!(driver.descriptions(), ["files__read: one"]);
    driver.answer(wants(&["files__read"]));
    assert_eq!(driver.running(), [1], "calls are not held");
    driver.done(1, "read");
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__read: two", "files__copy: one"]);
    assert_eq!(driver.open(), []);
    driver.restart(2);
    assert_eq!(driver.notes(RecordKind::ToolsChanged), [note]);
}

#[test]
fn a_new_tool_is_withheld_unless_a_person_has_named_it() {
    let old = || vec![asks("files__read", "one"), asks("files__write", "one")];
    let mut driver = Driver::with_files();
    driver.lists([old(), vec![asks("files__copy", "one")]].concat());
    assert_eq!(
        driver.notes(RecordKind::GateOpened),
        ["tools-files-e1-1: new files__copy"]
    );
    driver.turn();
    assert_eq!(driver.offered, ["yield", "files__read", "files__write"]);
    driver.answer(wants(&["files__copy"]));
    assert_eq!(driver.notes(RecordKind::ToolDenied), ["DefinitionChanged"]);

    let mut driver = Driver::with_files();
    let named = with_definition(asks("files__copy", "one"), |definition| definition.holds_new = false);
    driver.lists([old(), vec![named]].concat());
    assert_eq!(
        (driver.open(), driver.notes(RecordKind::ToolsChanged)),
        (vec![], vec!["files: new files__copy"])
    );
    driver.turn();
    assert_eq!(driver.offered, ["yield", "files__read", "files__write", "files__copy"]);
    // A change of it is one.
    let named = with_definition(asks("files__copy", "two"), |definition| definition.holds_new = false);
    driver.lists([old(), vec![named]].concat());
    assert_eq!(driver.open_ids(), ["tools-files-e1-1"]);
}

#[test]
fn a_server_that_renames_its_tools_has_new_ones() {
    let mut driver = Driver::with_files();
    driver.lists(vec![asks("files__read2", "one"), asks("files__write2", "one")]);
    driver.turn();
    assert_eq!(driver.offered, ["yield"]);
    assert_eq!(driver.open_ids(), ["tools-files-e1-1"]);
    // One with a similar name is another server, which is seen for the first time.
    driver.lists(vec![asks("files-2__read", "one")]);
    driver.turn();
    assert_eq!(driver.offered, ["yield", "files-2__read"]);
}

#[test]
fn a_removed_tool_keeps_its_pin() {
    for (text, offered) in [("one", 3), ("two", 2)] {
        let mut driver = Driver::with_files();
        driver.lists(vec![asks("files__write", "one")]);
        driver.turn();
        assert_eq!((driver.offered.len(), driver.open()), (2, vec![]));
        driver.lists(Vec::new());
        driver.restart(2);
        driver.lists(vec![asks("files__read", text), asks("files__write", "one")]);
        driver.turn();
        assert_eq!(driver.offered.len(), offered, "{text}");
    }
}

#[test]
fn denied_definitions_stay_withheld_without_a_gate_and_others_open_one() {
    let with = |text| vec![asks("files__read", text), asks("files__write", "one")];
    let mut driver = Driver::with_files();
    driver.lists(with("two"));
    driver.decide(false);
    assert_eq!(
        driver.notes(RecordKind::GateResolved),
        ["tools-files-e1-1 denied by bob"]
    );
    driver.restart(2);
    for text in ["two", "one", "two"] {
        driver.lists(with(text));
        driver.turn();
        assert_eq!(driver.offered.len(), if text == "one" { 3 } else { 2 });
        assert_eq!(driver.open(), [], "{text}");
    }
    driver.lists(with("three"));
    assert_eq!(driver.open_ids(), ["tools-files-e2-2"]);
    driver.decide(true);
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__read: three", "files__write: one"]);
}

#[test]
fn another_change_supersedes_a_gate_and_a_change_back_withdraws_it() {
    let with = |text| vec![asks("files__read", text), asks("files__write", "one")];
    let mut driver = Driver::with_files();
    driver.lists(with("two"));
    let first = driver.open().remove(0);
    driver.lists(with("three"));
    assert_eq!(driver.open_ids(), ["tools-files-e1-2"]);
    // What was shown before is not what would be accepted now.
    driver.decide_on("tools-files-e1-1", &first.arguments, true);
    driver.decide_on("tools-files-e1-2", &first.arguments, true);
    driver.decide_on("tools-files-e1-2", "", false);
    assert_eq!(driver.open_ids(), ["tools-files-e1-2"]);
    driver.lists(with("one"));
    assert_eq!(driver.open(), []);
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__read: one", "files__write: one"]);
    // The same definitions as before open another gate.
    driver.lists(with("two"));
    assert_eq!(driver.open_ids(), ["tools-files-e1-3"]);
    assert_eq!(
        driver.notes(RecordKind::GateResolved),
        ["tools-files-e1-1 superseded", "tools-files-e1-2 withdrawn"]
    );
}

#[test]
fn an_approval_is_of_what_was_shown_and_not_of_what_the_server_has_meanwhile() {
    let with = |text| vec![asks("files__read", text), asks("files__write", "one")];
    let mut driver = Driver::with_files();
    driver.lists(with("two"));
    // The list arrives, and the answer is the next input.
    driver.offer(with("three"));
    driver.decide(true);
    assert_eq!(driver.open_ids(), ["tools-files-e1-2"]);
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__write: one"]);
    driver.lists(with("two"));
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__read: two", "files__write: one"]);
}

#[test]
fn an_edit_of_the_address_of_a_server_pins_its_definitions_anew() {
    let mut driver = Driver::with_files();
    driver.lists(vec![asks("files__read", "two"), asks("files__write", "one")]);
    driver.lists(vec![
        moved(asks("files__read", "two")),
        moved(asks("files__copy", "one")),
    ]);
    assert_eq!(driver.open(), []);
    assert_eq!(
        driver.notes(RecordKind::ToolsPinned),
        ["files: 2 tools", "files: 2 tools"]
    );
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__read: two", "files__copy: one"]);
    driver.lists(vec![moved(asks("files__read", "three"))]);
    assert_eq!(driver.open_ids(), ["tools-files-e1-2"], "an id is not used again");
}

#[test]
fn an_edit_to_allow_releases_what_was_withheld() {
    let mut driver = Driver::with_files();
    driver.lists(vec![asks("files__read", "two"), asks("files__write", "one")]);
    driver.lists(vec![allows("files__read", "two"), allows("files__write", "one")]);
    assert_eq!(driver.notes(RecordKind::GateResolved), ["tools-files-e1-1 withdrawn"]);
    assert_eq!(driver.notes(RecordKind::ToolsChanged), ["files: changed files__read"]);
    driver.turn();
    assert_eq!(driver.descriptions(), ["files__read: two", "files__write: one"]);
    // And what was denied.
    driver.lists(vec![asks("files__read", "three"), asks("files__write", "one")]);
    driver.decide(false);
    driver.lists(vec![allows("files__read", "three"), allows("files__write", "one")]);
    driver.lists(vec![asks("files__read", "three"), asks("files__write", "one")]);
    driver.turn();
    assert_eq!((driver.descriptions().len(), driver.open()), (2, vec![]));
}

#[test]
fn a_gate_and_what_is_withheld_outlive_the_process_and_the_pod() {
    let mut driver = Driver::with_files();
    let changed = || vec![asks("files__read", "two"), asks("files__write", "one")];
    driver.lists(changed());
    let open = driver.open();
    driver.restart(2);
    assert_eq!(driver.open(), open);
    assert_eq!(driver.offered, ["yield", "files__write"]);
    driver.decide(true);
    driver.restart(3);
    driver.turn();
    assert_eq!(driver.descriptions().len(), 2);
    assert_eq!(driver.notes(RecordKind::ToolsPinned), ["files: 2 tools"], "once");
}

#[test]
fn a_change_while_no_process_ran_is_withheld_from_the_first_prompt() {
    let mut driver = Driver::with_files();
    driver.tools = vec![asks("files__read", "two"), asks("files__write", "one")];
    driver.restart(2);
    assert_eq!(driver.offered, ["yield", "files__write"]);
    assert_eq!(driver.open_ids(), ["tools-files-e2-1"]);
}

#[test]
fn the_gate_of_a_server_that_has_not_answered_stays_open_and_can_be_answered() {
    let mut driver = Driver::with_files();
    driver.lists(vec![asks("files__read", "two"), asks("files__write", "one")]);
    driver.tools.clear();
    let silent = |driver: &mut Driver, names: &[&str]| {
        driver.feed(EngineInput::ToolsChanged {
            tools: Vec::new(),
            silent: names.iter().map(|name| (*name).to_owned()).collect(),
        });
        driver.feed(EngineInput::Timer);
    };
    silent(&mut driver, &["files"]);
    assert_eq!(driver.open_ids(), ["tools-files-e1-1"]);
    driver.decide(true);
    driver.lists(vec![asks("files__read", "two"), asks("files__write", "one")]);
    assert_eq!(driver.open(), []);
    // One that has answered and lists nothing has nothing to approve.
    driver.lists(vec![asks("files__read", "three")]);
    driver.tools.clear();
    silent(&mut driver, &["mail"]);
    assert_eq!(driver.open(), []);
}

#[test]
fn definitions_are_not_settled_while_the_loop_is_not_up() {
    let mut driver = Driver::with_files();
    driver.feed(EngineInput::Stop {
        cause: StopCause::Suspend,
    });
    driver.lists(vec![asks("files__read", "two"), asks("files__write", "one")]);
    assert_eq!(driver.open(), []);
    driver.restart(1);
    assert_eq!(driver.open_ids(), ["tools-files-e1-1"]);
}

#[test]
fn gates_of_calls_and_for_definitions_are_at_most_20_and_one_place_is_kept_for_a_call() {
    let names = |count| (0..count).map(|number| format!("s{number:02}__t"));
    let list = |count, text: &str| -> Vec<ToolSpec> {
        let gated = ToolSpec {
            needs_approval: true,
            ..tool("repo__delete", ToolEffect::Destructive)
        };
        names(count).map(|name| asks(&name, text)).chain([gated]).collect()
    };
    for (servers, open, all) in [(17, 17, 19), (18, 18, 19), (19, 19, 20), (20, 19, 20), (25, 19, 20)] {
        let mut driver = Driver::fresh(settings());
        driver.offer(list(servers, "one"));
        driver.start(1);
        driver.lists(list(servers, "two"));
        assert_eq!(driver.open().len(), open);
        driver.answer(wants(&["repo__delete", "repo__delete", "repo__delete"]));
        assert_eq!(
            driver.open().len(),
            all,
            "the next call, and as many as there is room for"
        );
        assert_eq!(driver.open()[0].gate.kind, GateKind::ToolCallNeedsApproval);
        // A place that is free again is used.
        let definitions = |driver: &Driver| {
            let is_one = |open: &&OpenGate| open.gate.kind == GateKind::ToolDefinitionsChanged;
            driver.open().iter().filter(is_one).count()
        };
        for _ in 0..3 {
            driver.decide(true);
            driver.done(driver.running()[0], "gone");
        }
        let first = driver.open().remove(0);
        driver.decide_on(&first.gate.id, &first.arguments, true);
        assert_eq!(definitions(&driver), open.min(servers - 1));
    }
}

#[test]
fn a_record_names_ten_tools_of_each_kind() {
    let many = |count: usize, text: &str| -> Vec<ToolSpec> {
        (0..count)
            .map(|number| asks(&format!("files__t{number:02}"), text))
            .collect()
    };
    for (count, more) in [(10, None), (11, Some(" and 1 more"))] {
        let mut driver = Driver::fresh(settings());
        driver.offer(many(count, "one"));
        driver.start(1);
        driver.lists(many(count, "two"));
        let note = driver.notes(RecordKind::GateOpened)[0];
        assert!(note.contains("files__t09"), "{note}");
        assert_eq!(note.contains("files__t10"), false, "{note}");
        match more {
            Some(more) => assert!(note.ends_with(more), "{note}"),
            None => assert!(!note.contains("more"), "{note}"),
        }
    }
}

#[test]
fn pins_are_bounded_and_a_tool_without_one_is_new() {
    let batch = |from: usize| -> Vec<ToolSpec> {
        (from..from + 128)
            .map(|number| allows(&format!("files__t{number:03}"), "one"))
            .collect()
    };
    let mut driver = Driver::fresh(settings());
    driver.offer(batch(0));
    driver.start(1);
    driver.lists(batch(128));
    assert_eq!(pins(&driver.engine).len(), 256);
    driver.lists(batch(256));
    assert_eq!(pins(&driver.engine).len(), 128);
    driver.lists(vec![asks("files__t000", "one")]);
    assert_eq!(driver.open_ids(), ["tools-files-e1-1"]);
}

#[test]
fn servers_removed_from_the_spec_are_dropped_once_there_are_many() {
    let server = |number: usize| asks(&format!("s{number}__t"), "one");
    let mut driver = Driver::fresh(settings());
    driver.offer(vec![server(0)]);
    driver.start(1);
    for number in 1..32 {
        driver.lists(vec![server(number)]);
    }
    assert_eq!(pins(&driver.engine).len(), 32);
    driver.lists(vec![server(32), server(5)]);
    assert_eq!(
        pins(&driver.engine).into_keys().collect::<Vec<_>>(),
        ["s32__t", "s5__t"]
    );
}

#[test]
fn a_snapshot_of_a_version_without_pins_begins_with_the_first_definitions() {
    let mut driver = Driver::with_files();
    let mut stored: Value = serde_json::to_value(&driver.saved).unwrap();
    assert!(stored.as_object_mut().unwrap().remove("definitions").is_some());
    driver.saved = serde_json::from_value(stored).unwrap();
    driver.tools = vec![asks("files__read", "two")];
    driver.restart(2);
    assert_eq!((driver.open(), driver.offered.len()), (vec![], 2));
    assert_eq!(
        pins(&driver.engine),
        [("files__read".to_owned(), "hash of two".to_owned())].into()
    );
    assert_eq!(
        serde_json::to_value(&driver.saved).unwrap()["definitions"]["files"],
        json!({
            "server": "at https://a", "tools": {"files__read": "hash of two"}, "gates": 0,
            "parts": {"files__read": {"description": "", "annotations": "", "schema": ""}},
        })
    );
}

#[test]
fn a_plan_of_a_version_without_definitions_can_be_read() {
    let mut driver = Driver::with_files();
    driver.answer(wants(&["files__write"]));
    let stored = serde_json::to_string(&driver.saved).unwrap();
    assert_eq!(stored.matches(r#""definition":"hash of one""#).count(), 1);
    let before = stored.replace(r#""definition":"hash of one","#, "");
    driver.saved = serde_json::from_str(&before).unwrap();
    driver.restart(1);
    assert_eq!(driver.results().len(), 1, "it was interrupted");
}
