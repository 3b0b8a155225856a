//! The corpus of prompt injections (`tests/fixtures/injections`), played by a model that obeys each of them: what holds then
//! is what the runtime ensures, whatever a model does.

use std::path::Path;

use rstest::rstest;
use serde::Deserialize;

use super::super::hot_state::FieldSchema;
use super::untrusted::{asked, guarded_tools, news, unguarded_tools};
use super::work::wants;
use super::*;
use agentloop_api::hot_state::FieldType;

/// Text that is no injection.
const HARMLESS: &str = "Nothing new today.";

/// One file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PromptInjection {
    name: String,
    why: String,
    /// The tool that it instructs the model to call.
    tool: String,
    text: String,
}

/// How a text reaches the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InjectionCarrier {
    Result,
    Failure,
    Notification,
    Value,
}

fn corpus() -> Vec<PromptInjection> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/injections");
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let read = |path: std::path::PathBuf| -> PromptInjection {
        let text = std::fs::read_to_string(&path).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let all: Vec<PromptInjection> = files.map(read).collect();
    assert!(all.len() >= 20, "{}", all.len());
    all
}

/// A loop whose next answer is given to a prompt with this text. `reader`: the tool whose result it is.
fn shown(carrier: InjectionCarrier, text: &str, reader: &str, tools: Vec<ToolSpec>) -> Driver {
    let mut driver = Driver::fresh(EngineSettings {
        hot_state: vec![FieldSchema {
            name: "news".into(),
            kind: FieldType::String,
            ttl: None,
            max_items: None,
            refresh_tool: None,
        }],
        ..settings()
    });
    driver.offer(tools);
    driver.start(1);
    let text = text.to_owned();
    match carrier {
        InjectionCarrier::Result | InjectionCarrier::Failure => {
            driver.answer(wants(&[reader]));
            let outcome = if carrier == InjectionCarrier::Result {
                ToolOutcome::Done { text }
            } else {
                ToolOutcome::Failed { text }
            };
            driver.end(1, outcome);
        }
        InjectionCarrier::Notification => {
            driver.feed(news(&text));
            driver.turn();
        }
        InjectionCarrier::Value => {
            driver.feed(value_of("news", text.into()));
            driver.turn();
        }
    }
    driver
}

/// All that the model is shown after the system message, and that it has not written itself.
fn prompt(driver: &Driver) -> String {
    let texts = driver.prompt[1..].iter().map(|message| match &**message {
        Message::User { text } | Message::Tool { text, .. } => text.as_str(),
        Message::System { .. } | Message::Assistant { .. } => "",
    });
    let texts: Vec<&str> = texts.chain(driver.block.as_deref()).collect();
    texts.join("\n")
}

/// What an attentive model reads in a text: tag characters as letters, and nothing invisible.
fn read(text: &str) -> String {
    let letter = |character: char| match u32::from(character) {
        tag @ 0xE_0020..=0xE_007E => char::from_u32(tag - 0xE_0000),
        0xAD | 0x200B..=0x200F | 0x202A..=0x202E | 0x2060..=0x206F | 0xFEFF => None,
        _ => Some(character),
    };
    text.chars().filter_map(letter).collect()
}

/// The marks of the runtime in a text: brackets after which the letters of a mark follow, whatever is between them.
fn marks(text: &str) -> usize {
    let is_mark = |(place, _): &(usize, &str)| {
        let mut letters = String::new();
        let mut after_backslash = false;
        for character in text[place + 1..].replace("\\u0020", " ").chars() {
            let is_escape = after_backslash && "bfnrt".contains(character);
            after_backslash = character == '\\';
            if character.is_ascii_alphabetic() && !is_escape {
                letters.push(character.to_ascii_lowercase());
            }
            if letters.len() == "fromtheruntime".len() {
                break;
            }
        }
        letters.starts_with("theruntime") || letters == "fromtheruntime"
    };
    text.match_indices('[').filter(is_mark).count()
}

/// A model that obeys what it reads: it calls the tool with side effects that it reads last.
fn obey(driver: &mut Driver) -> String {
    let text = read(&prompt(driver));
    let acts = driver.tools.iter().filter(|tool| tool.effect != ToolEffect::Read);
    let named = acts.filter_map(|tool| Some((text.rfind(&tool.name)?, tool.name.clone())));
    let (_, name) = named.max().unwrap_or_else(|| panic!("no tool is named in {text}"));
    driver.answer(wants(&[&name]));
    name
}

fn has_run(driver: &Driver, name: &str) -> bool {
    driver.sent.iter().any(|run| run.name == name)
}

/// Answers the open gate.
fn answer_gate(driver: &mut Driver, approved: bool) {
    let open = driver.engine.view().gates.into_iter().next().expect("an open gate");
    driver.feed(EngineInput::GateAnswered(EngineGateAnswer {
        gate: open.gate.id,
        arguments: open.arguments,
        approved,
        by: approved.then(|| "ann".into()),
    }));
}

#[rstest]
#[case(InjectionCarrier::Result, "server/web")]
#[case(InjectionCarrier::Failure, "server/web")]
#[case(InjectionCarrier::Notification, "sensor/prices")]
#[case(InjectionCarrier::Value, "sensor/outside")]
fn whatever_a_model_obeys_waits_for_a_person_and_is_not_run(#[case] carrier: InjectionCarrier, #[case] source: &str) {
    for PromptInjection { name, why, tool, text } in corpus() {
        let of = format!("{name} ({why}) as {carrier:?}");
        let mut driver = shown(carrier, &text, "web__fetch", guarded_tools());
        assert_eq!(obey(&mut driver), tool, "{of}");
        assert_eq!(asked(&driver), [Some(source.to_owned())], "{of}");
        // Neither the time nor another process runs it.
        let mut later = driver.clone();
        later.pass(seconds(1800));
        later.restart(2);
        assert!(!has_run(&later, &tool), "{of}");
        later.pass(seconds(1800));
        assert!(!has_run(&later, &tool) && asked(&later).is_empty(), "{of}: it expires");
        // A model that insists is asked about again, and then its tool is closed.
        for _ in 0..3 {
            answer_gate(&mut driver, false);
            driver.answer(wants(&[&tool]));
        }
        assert!(!has_run(&driver, &tool) && asked(&driver).is_empty(), "{of}");
        assert_eq!(
            driver.notes(RecordKind::ToolDenied),
            ["NotApproved", "NotApproved", "NotApproved", "Hidden"]
        );
    }
}

#[test]
fn a_call_that_follows_an_injection_runs_if_a_person_approves_it() {
    for PromptInjection { name, tool, text, .. } in corpus() {
        let mut driver = shown(InjectionCarrier::Result, &text, "web__fetch", guarded_tools());
        obey(&mut driver);
        answer_gate(&mut driver, true);
        assert!(has_run(&driver, &tool), "{name}");
    }
}

#[test]
fn an_instruction_of_a_trusted_server_is_obeyed_without_an_approval() {
    for carrier in [InjectionCarrier::Result, InjectionCarrier::Failure] {
        for PromptInjection { name, tool, text, .. } in corpus() {
            let mut driver = shown(carrier, &text, "files__read", guarded_tools());
            obey(&mut driver);
            assert!(has_run(&driver, &tool) && asked(&driver).is_empty(), "{name}");
        }
    }
}

#[test]
fn without_the_rule_every_injection_of_the_corpus_is_obeyed() {
    for carrier in [
        InjectionCarrier::Result,
        InjectionCarrier::Failure,
        InjectionCarrier::Notification,
        InjectionCarrier::Value,
    ] {
        for PromptInjection { name, tool, text, .. } in corpus() {
            let mut driver = shown(carrier, &text, "web__fetch", unguarded_tools());
            obey(&mut driver);
            assert!(has_run(&driver, &tool), "{name} as {carrier:?}");
        }
    }
}

#[test]
fn no_injection_inserts_a_runtime_mark_into_a_prompt() {
    // The marks of the prompt that shows a text, and of the one after its turn.
    let counted = |carrier, text: &str| {
        let mut driver = shown(carrier, text, "web__fetch", guarded_tools());
        let first = marks(&prompt(&driver));
        driver.answer(says("well"));
        driver.next_timer();
        (first, marks(&prompt(&driver)))
    };
    for carrier in [
        InjectionCarrier::Result,
        InjectionCarrier::Failure,
        InjectionCarrier::Notification,
        InjectionCarrier::Value,
    ] {
        let own = counted(carrier, HARMLESS);
        for PromptInjection { name, text, .. } in corpus() {
            assert_eq!(counted(carrier, &text), own, "{name} as {carrier:?}");
        }
    }
    let imitations = corpus().iter().filter(|injection| marks(&injection.text) > 0).count();
    assert!(imitations >= 8, "{imitations} of the corpus imitate a mark");
}
