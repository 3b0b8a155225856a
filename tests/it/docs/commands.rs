//! Commands in pages: our own programs, targets of `make`, files of the repository, and what our kinds are asked through
//! kubectl and helm.

use std::collections::BTreeSet;

use agentloop::api::annotations;
use agentloop::api::condition::ConditionType;
use agentloop::cli::Cli;
use agentloop::plugin::PluginCli;
use clap::Parser as _;
use clap::error::ErrorKind;
use serde_json::{Value, json};

use super::manifests::unknown_values;
use super::page::{Block, Page, current_pages};
use super::shell;
use crate::schema::reader::{Schema, repository};

/// Pages with generated blocks, which have placeholders instead of arguments.
const GENERATED: [&str; 1] = ["docs/reference/kubectl-plugin.md"];

/// Whether a word stands for an argument, such as `AGENT...` or `[GATE]`.
fn is_placeholder(word: &str) -> bool {
    let name = word.trim_matches(['[', ']', '.']);
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase())
}

/// A command of a page.
pub(crate) struct PageCommand {
    /// `path:line` of its block.
    pub(crate) place: String,
    pub(crate) words: Vec<String>,
}

/// The commands of all pages that describe the product as it is, apart from those with placeholders of generated pages.
pub(crate) fn page_commands() -> Vec<PageCommand> {
    let mut all = Vec::new();
    for page in current_pages() {
        let is_generated = GENERATED.contains(&page.path.as_str());
        let found = commands(&page).into_iter();
        all.extend(found.filter(|command| !(is_generated && command.words.iter().any(|word| is_placeholder(word)))));
    }
    all
}

/// The blocks of a page that are commands of a shell.
pub(super) fn shell_blocks(page: &Page) -> impl Iterator<Item = Block> {
    let is_shell =
        |block: &Block| !block.is_unchecked && matches!(block.language.as_deref(), None | Some("bash" | "sh"));
    page.blocks().into_iter().filter(is_shell)
}

/// The commands of a page with their places.
fn commands(page: &Page) -> Vec<PageCommand> {
    shell_blocks(page)
        .flat_map(|block| {
            let place = block.place;
            shell::commands(&block.text).into_iter().map(move |words| PageCommand {
                place: place.clone(),
                words,
            })
        })
        .collect()
}

/// What is wrong with a command; `None`: nothing, or it is none of ours.
fn mistake(words: &[String]) -> Option<String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["kubectl", "agentloop", rest @ ..] | ["kubectl-agentloop", rest @ ..] => plugin(rest),
        ["kubectl", rest @ ..] => kubectl(rest),
        [
            "agentloop" | "/agentloop" | "target/debug/agentloop" | "target/release/agentloop",
            rest @ ..,
        ] => program(rest),
        ["make", rest @ ..] => make(rest),
        ["helm", rest @ ..] => helm(rest),
        ["cargo", rest @ ..] => cargo(rest),
        [program, ..] if program.contains('/') && !program.starts_with(['/', '~', '.']) => missing(program),
        _ => None,
    }
}

fn parse_error<T>(parsed: Result<T, clap::Error>) -> Option<String> {
    let shows_help = |error: &clap::Error| matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    parsed
        .err()
        .filter(|error| !shows_help(error))
        .map(|error| error.to_string())
}

fn plugin(arguments: &[&str]) -> Option<String> {
    parse_error(PluginCli::try_parse_from([&["kubectl-agentloop"], arguments].concat()))
}

fn program(arguments: &[&str]) -> Option<String> {
    let mistake = parse_error(Cli::try_parse_from([&["agentloop"], arguments].concat()));
    mistake.or_else(|| missing_file(arguments))
}

fn missing(path: &str) -> Option<String> {
    let absent = !repository(path).exists();
    // Directories of an example, and addresses, are not in the repository.
    let is_ours = ["hack/", "examples/", "charts/", "docs/", "deploy/", "src/", "crds/"];
    (absent && is_ours.iter().any(|folder| path.starts_with(folder))).then(|| format!("no file {path}"))
}

fn missing_file(arguments: &[&str]) -> Option<String> {
    arguments.iter().find_map(|argument| missing(argument))
}

fn make(arguments: &[&str]) -> Option<String> {
    let makefile = std::fs::read_to_string(repository("Makefile")).unwrap();
    let rules = makefile.lines().filter_map(|line| line.split_once(": ## "));
    let targets: BTreeSet<&str> = rules.map(|(name, _)| name).collect();
    let mut named = arguments.iter().filter(|word| !word.contains('='));
    named
        .find(|name| !targets.contains(**name))
        .map(|name| format!("no target {name}"))
}

fn cargo(arguments: &[&str]) -> Option<String> {
    let at = arguments.iter().position(|word| *word == "-p")?;
    let package = arguments.get(at + 1)?;
    let manifest = std::fs::read_to_string(repository("Cargo.toml")).unwrap();
    let is_member = *package == "agentloop" || manifest.contains(&format!("\n{package} = {{ path"));
    (!is_member).then(|| format!("no package {package}"))
}

/// Settings of the chart in a helm command. Commands about other charts are not ours.
fn helm(arguments: &[&str]) -> Option<String> {
    if !arguments.iter().any(|word| word.ends_with("charts/agentloop")) {
        return None;
    }
    let text = std::fs::read_to_string(repository("charts/agentloop/values.yaml")).unwrap();
    let known: Value = serde_yaml::from_str(&text).unwrap();
    let flags = arguments.iter().zip(arguments.iter().skip(1));
    let settings = flags
        .filter(|(flag, _)| flag.starts_with("--set"))
        .map(|(_, setting)| setting);
    for setting in settings {
        let key = setting.split_once('=')?.0;
        let value = key.rsplit('.').fold(Value::Null, |value, part| {
            let name = part.split('[').next().unwrap_or_default();
            json!({ name: value })
        });
        let unknown = unknown_values("", &value, &known);
        if !unknown.is_empty() {
            return Some(format!("not in values.yaml: {unknown:?}"));
        }
    }
    missing_file(arguments)
}

/// What a kubectl command asks of our kinds: patches, conditions, annotations, paths of `explain`, files.
fn kubectl(arguments: &[&str]) -> Option<String> {
    if let Some(at) = arguments.iter().position(|word| *word == "/agentloop") {
        return program(&arguments[at + 1..]);
    }
    if let Some(path) = arguments.iter().find_map(|word| word.strip_prefix("--for=condition=")) {
        let name = path.split('=').next().unwrap_or_default();
        let of_others = ["Available", "Established", "Complete"];
        if !of_others.contains(&name) && name.parse::<ConditionType>().is_err() {
            return Some(format!("no condition {name}"));
        }
    }
    let kind = arguments.iter().find_map(|word| kind(word));
    if arguments.first() == Some(&"explain") {
        let path = arguments.iter().find(|word| word.contains(".agentloop.dev"))?;
        let (resource, field) = path.split_once(".agentloop.dev")?;
        let schema = Schema::of_kind(kind_of(resource)?);
        let field = field.trim_start_matches('.');
        return (!super::fields::has(schema, field)).then(|| format!("no field {field}"));
    }
    if let (Some(kind), Some("patch")) = (kind, arguments.first().copied()) {
        let at = arguments.iter().position(|word| *word == "-p")?;
        let patch: Value = serde_json::from_str(arguments.get(at + 1)?).ok()?;
        let unknown = Schema::of_kind(kind).unknown_fields(&patch);
        if !unknown.is_empty() {
            return Some(format!("not in the schema: {unknown:?}"));
        }
    }
    let known = [
        annotations::WAKE,
        annotations::RESUME,
        annotations::APPROVE,
        annotations::APPROVED_BY,
        annotations::DENY,
    ];
    if arguments.contains(&"annotate") && kind.is_some() {
        let ours = arguments.iter().filter(|word| word.starts_with("agentloop.dev/"));
        let names = ours.map(|word| word.split('=').next().unwrap_or_default().trim_end_matches('-'));
        if let Some(unknown) = names.into_iter().find(|name| !known.contains(name)) {
            return Some(format!("no annotation {unknown}"));
        }
    }
    missing_file(arguments)
}

/// The kind that a word of a command names, such as `agents.agentloop.dev/watcher`.
fn kind(word: &str) -> Option<&'static str> {
    kind_of(word.split_once(".agentloop.dev")?.0)
}

fn kind_of(plural: &str) -> Option<&'static str> {
    match plural {
        "agents" | "agent" => Some("Agent"),
        "agentbudgets" | "agentbudget" => Some("AgentBudget"),
        "sensors" | "sensor" => Some("Sensor"),
        _ => None,
    }
}

#[test]
fn every_command_in_a_page_exists_with_its_flags() {
    let commands = page_commands();
    let mistakes: Vec<String> = commands
        .iter()
        .filter_map(|PageCommand { place, words }| {
            mistake(words).map(|found| format!("{place}: {}: {found}", words.join(" ")))
        })
        .collect();
    let count = commands.len();
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    assert!(count > 60, "only {count} commands were found");
}

#[test]
fn mistakes_in_commands_are_found() {
    for (command, found) in [
        ("kubectl agentloop pause", "required"),
        ("kubectl agentloop status --everything", "--everything"),
        ("agentloop run --manifest x", "--manifest"),
        ("kubectl exec a -c worker -- /agentloop journals", "journals"),
        ("make tests", "no target tests"),
        (
            "helm upgrade a charts/agentloop --set policy.requireBudgets=true",
            "policy.requireBudgets",
        ),
        (
            "kubectl patch agents.agentloop.dev a -p '{\"spec\": {\"suspended\": true}}'",
            "spec.suspended",
        ),
        (
            "kubectl annotate agents.agentloop.dev a agentloop.dev/awake=1",
            "agentloop.dev/awake",
        ),
        (
            "kubectl wait --for=condition=Working agents.agentloop.dev/a",
            "no condition Working",
        ),
        ("kubectl explain agents.agentloop.dev.spec.guardrail", "spec.guardrail"),
        ("kubectl apply -f examples/none.yaml", "examples/none.yaml"),
        ("hack/none.sh", "hack/none.sh"),
        ("cargo test -p agentloop-none", "agentloop-none"),
    ] {
        let words = shell::commands(command).pop().unwrap();
        let mistake = mistake(&words).unwrap_or_else(|| panic!("{command}: nothing is found"));
        assert!(mistake.contains(found), "{command}: {mistake}");
    }
    for command in [
        "kubectl agentloop budget top-up -n team-a team-a --tokens 50000",
        "kubectl explain agents.agentloop.dev.spec --recursive",
        "helm upgrade a charts/agentloop --set prices.m.inputPerMillion=1 --set watchNamespaces={a}",
        "make demo CONTEXT=x IMAGE=y",
    ] {
        let words = shell::commands(command).pop().unwrap();
        assert_eq!(mistake(&words), None, "{command}");
    }
}
