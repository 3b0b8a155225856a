//! Completion in shells: a script for the program, and answers to kubectl, which completes its plugins itself.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use clap::builder::StyledStr;
use clap::{Arg, Command, Parser};
use clap_complete::{Shell, generate};
use kube::ResourceExt;

use super::arguments::{ConnectionArgs, PluginCli};
use super::failure::PluginError;
use super::session::PluginSession;
use super::{JournalExport, PROGRAM};

/// The last line of an answer to kubectl: complete nothing else, such as names of files.
const NO_FILES: &str = ":4";
/// Longest time in which names are read. A person waits for them.
const NAMES_TIMEOUT: Duration = Duration::from_secs(1);

/// The script that makes a shell complete the commands of `kubectl-agentloop`.
#[must_use]
pub fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    generate(shell, &mut super::command(), PROGRAM, &mut script);
    script
}

/// The objects that an argument names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedKind {
    /// Agents.
    Agent,
    /// AgentBudgets.
    AgentBudget,
}

/// The answer to kubectl, which runs `kubectl_complete-agentloop` with the words so far, the last one unfinished: a line
/// for each continuation. `names`: the objects of a kind with these flags of the connection, see [`names_of_objects`].
#[must_use]
pub fn answer(words: &[String], names: impl FnOnce(NamedKind, &[String]) -> Vec<String>) -> String {
    let (unfinished, before) = words
        .split_last()
        .map_or(("", words), |(last, before)| (last.as_str(), before));
    let mut command = super::command();
    command.build();
    let line = CommandLine::of(&command, before);
    let (beginning, candidates) = if let Some(flag) = line.unfinished {
        (unfinished, values(flag))
    } else if let Some((name, value)) = unfinished.split_once('=').filter(|(name, _)| name.starts_with('-')) {
        // The shell completes only what follows.
        let flag = named(line.command, name).map(|(flag, _)| flag);
        (value, flag.map(values).unwrap_or_default())
    } else if unfinished.starts_with('-') {
        (unfinished, flags(line.command))
    } else {
        let argument = line.argument();
        let mut candidates = commands(line.command);
        candidates.extend(argument.map(values).unwrap_or_default());
        if let Some(kind) = argument.and_then(|argument| line.kind(argument)) {
            candidates.extend(names(kind, &line.connection));
        }
        (unfinished, candidates)
    };
    let fitting = candidates.into_iter().filter(|line| line.starts_with(beginning));
    fitting
        .map(|line| line + "\n")
        .chain([format!("{NO_FILES}\n")])
        .collect()
}

/// The words before the unfinished one, as the parser would take them.
struct CommandLine<'a> {
    /// The command that they end in.
    command: &'a Command,
    /// Number of arguments of it that are not flags.
    arguments: usize,
    /// The flags of all commands, with their values.
    connection: Vec<String>,
    /// All flags.
    flags: Vec<&'a Arg>,
    /// The flag whose value follows.
    unfinished: Option<&'a Arg>,
}

impl<'a> CommandLine<'a> {
    fn of(command: &'a Command, words: &[String]) -> Self {
        let mut line = Self {
            command,
            arguments: 0,
            connection: Vec::new(),
            flags: Vec::new(),
            unfinished: None,
        };
        for word in words {
            line.add(word);
        }
        line
    }

    fn add(&mut self, word: &str) {
        if let Some(flag) = self.unfinished.take() {
            self.keep(flag, word);
        } else if word.starts_with('-') && word != "-" {
            let name = word.split('=').next().unwrap_or_default();
            let Some((flag, has_value)) = named(self.command, name) else {
                return;
            };
            self.keep(flag, word);
            self.flags.push(flag);
            let takes_value = flag.get_action().takes_values() && !flag.is_require_equals_set();
            if takes_value && !has_value && !word.contains('=') {
                self.unfinished = Some(flag);
            }
        } else if let Some(inner) = self.command.find_subcommand(word) {
            (self.command, self.arguments) = (inner, 0);
        } else {
            self.arguments += 1;
        }
    }

    fn keep(&mut self, flag: &Arg, word: &str) {
        if flag.is_global_set() {
            self.connection.push(word.to_owned());
        }
    }

    /// The argument that the unfinished word is.
    fn argument(&self) -> Option<&'a Arg> {
        let exact = self.command.get_positionals().nth(self.arguments);
        exact.or_else(|| self.command.get_positionals().last().filter(|last| is_list(last)))
    }

    /// What an argument names. The reference has the same words.
    fn kind(&self, argument: &Arg) -> Option<NamedKind> {
        let is_of_budget = self.flags.iter().any(|flag| flag.get_id() == "budget");
        match argument.get_value_names()?.first()?.as_str() {
            "BUDGET" => Some(NamedKind::AgentBudget),
            "NAME" if is_of_budget => Some(NamedKind::AgentBudget),
            "AGENT" | "NAME" => Some(NamedKind::Agent),
            _ => None,
        }
    }
}

/// A flag, by `--name` or by its letter, which may be behind those of others: `-An`. The second part: whether the rest of the
/// word is its value, as in `-nteam`.
fn named<'a>(command: &'a Command, word: &str) -> Option<(&'a Arg, bool)> {
    if let Some(long) = word.strip_prefix("--") {
        let flag = command.get_arguments().find(|flag| flag.get_long() == Some(long))?;
        return Some((flag, false));
    }
    let mut letters = word.strip_prefix('-')?.chars();
    loop {
        let letter = letters.next()?;
        let flag = command.get_arguments().find(|flag| flag.get_short() == Some(letter))?;
        let is_last = letters.as_str().is_empty();
        if is_last || flag.get_action().takes_values() {
            return Some((flag, !is_last));
        }
    }
}

/// Whether this is an argument for several words.
fn is_list(argument: &Arg) -> bool {
    argument.get_num_args().is_some_and(|range| range.max_values() > 1)
}

fn commands(command: &Command) -> Vec<String> {
    let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
    visible
        .map(|command| described(command.get_name(), command.get_about()))
        .collect()
}

fn flags(command: &Command) -> Vec<String> {
    let flags = command.get_arguments().filter(|flag| !flag.is_hide_set());
    flags
        .filter_map(|flag| Some(described(&format!("--{}", flag.get_long()?), flag.get_help())))
        .collect()
}

/// The values that a flag or an argument can have, if they are listed.
fn values(of: &Arg) -> Vec<String> {
    let values = of
        .get_possible_values()
        .into_iter()
        .filter(|value| !value.is_hide_set());
    values
        .map(|value| described(value.get_name(), value.get_help()))
        .collect()
}

/// A continuation and its description, as kubectl reads them.
fn described(name: &str, help: Option<&StyledStr>) -> String {
    let help = help.map(ToString::to_string).unwrap_or_default();
    help.lines()
        .next()
        .map_or_else(|| name.to_owned(), |first| format!("{name}\t{first}"))
}

/// The names of the objects of a kind, as far as they can be read in a short time. `flags`: those of every command.
#[must_use]
pub fn names_of_objects(kind: NamedKind, flags: &[String]) -> Vec<String> {
    // A command without arguments, of which only the flags are used.
    let words = [PROGRAM.to_owned(), "approvals".to_owned()];
    let Ok(cli) = PluginCli::try_parse_from(words.iter().chain(flags)) else {
        return Vec::new();
    };
    let mut connection = cli.arguments.connection;
    connection.request_timeout = NAMES_TIMEOUT;
    let (sender, receiver) = mpsc::channel();
    // A program that has credentials may block its thread, which ends with the process.
    thread::spawn(move || {
        let _ = sender.send(read_names(kind, &connection));
    });
    receiver.recv_timeout(NAMES_TIMEOUT).unwrap_or_default()
}

fn read_names(kind: NamedKind, connection: &ConnectionArgs) -> Vec<String> {
    // No history is read.
    let export: JournalExport = |_, _| Ok(String::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else {
        return Vec::new();
    };
    let names: Result<Vec<String>, PluginError> = runtime.block_on(async {
        let session = PluginSession::connect(connection, export).await?;
        Ok(match kind {
            NamedKind::Agent => session
                .list_agents(None)
                .await?
                .iter()
                .map(ResourceExt::name_any)
                .collect(),
            NamedKind::AgentBudget => session
                .list_budgets()
                .await?
                .iter()
                .map(ResourceExt::name_any)
                .collect(),
        })
    });
    // The names must not wait for what is left of the connection.
    runtime.shutdown_background();
    names.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the continuations. Each kind has an object, whose name has the flags that it is read with.
    fn names(words: &[&str]) -> Vec<String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let answer = answer(&words, |kind, flags| vec![format!("{kind:?} {}", flags.join(" "))]);
        let lines = answer
            .lines()
            .map(|line| line.split('\t').next().unwrap_or_default().to_owned());
        lines.collect()
    }

    #[test]
    fn commands_and_flags_are_continued_where_they_are_allowed() {
        assert_eq!(names(&["ap"]), ["approvals", "approve", ":4"]);
        assert_eq!(names(&["budget", ""]), ["top", "top-up", "help", ":4"]);
        assert_eq!(names(&["budget", "top-up", "team", "--tok"]), ["--tokens", ":4"]);
        assert_eq!(names(&["status", "--as"]), ["--as", "--as-group", "--as-uid", ":4"]);
        assert_eq!(names(&["-n", "a", "reference-of-nothing"]), [":4"]);
        assert!(!names(&[""]).contains(&"reference".to_owned()), "hidden");
    }

    #[test]
    fn values_of_flags_and_arguments_are_continued() {
        let formats = ["wide", "json", "yaml", ":4"];
        for words in [
            &["status", "-o", ""][..],
            &["-o", ""],
            &["status", "--output", ""],
            &["status", "-n", "a", "--output="],
            &["status", "-A", "-o="],
            &["-Ao", ""],
        ] {
            assert_eq!(names(words), formats, "{words:?}");
        }
        assert_eq!(names(&["status", "-o", "j"]), ["json", ":4"]);
        assert_eq!(names(&["status", "--output=j"]), ["json", ":4"]);
        assert_eq!(names(&["cost", "--by", "m"]), ["model", ":4"]);
        assert_eq!(names(&["completion", "z"]), ["zsh", ":4"]);
        assert_eq!(names(&["status", "-n", ""]), [":4"]);
        assert_eq!(names(&["status", "--nonsense="]), [":4"]);
        let described = answer(&["-o".to_owned(), "j".to_owned()], |_, _| Vec::new());
        assert_eq!(described, "json\tJSON\n:4\n");
    }

    #[test]
    fn the_value_of_a_flag_is_no_command() {
        for words in [
            &["-n", "status", "lo"][..],
            &["--namespace", "budget", "lo"],
            &["-An", "status", "lo"],
            &["--context", "status", "lo"],
        ] {
            assert_eq!(names(words), ["logs", ":4"], "{words:?}");
        }
        // These have their values, or none.
        for words in [
            &["-nteam", "budget", "top-"][..],
            &["-nadmin", "budget", "top-"],
            &["-n=team", "budget", "top-"],
            &["--namespace=team", "budget", "top-"],
            &["-A", "budget", "top-"],
            &["--nonsense", "budget", "top-"],
        ] {
            assert_eq!(names(words), ["top-up", ":4"], "{words:?}");
        }
    }

    #[test]
    fn arguments_that_name_objects_are_continued_with_the_flags_of_the_connection() {
        for (words, expected) in [
            (&["status", "A"][..], "Agent "),
            (&["status", "one", "A"], "Agent "),
            (
                &["-n", "team", "logs", "-f", "--tail", "3", "--as=bob", "A"],
                "Agent -n team --as=bob",
            ),
            (&["budget", "top-up", "A"], "AgentBudget "),
            (&["approve", "A"], "Agent "),
            (&["approve", "--budget", "A"], "AgentBudget "),
        ] {
            assert_eq!(names(words), [expected, ":4"], "{words:?}");
        }
        for words in [
            &["logs", "one", "A"][..],
            &["approve", "one", "A"],
            &["approvals", "A"],
            &["logs", "-A"],
        ] {
            assert!(!names(words).iter().any(|name| name.starts_with("Agent")), "{words:?}");
        }
    }

    #[test]
    fn names_are_left_out_if_the_flags_or_the_kubeconfig_are_wrong() {
        let words = |words: &[&str]| -> Vec<String> { words.iter().map(|word| (*word).to_owned()).collect() };
        for flags in [&["-n", "a/b"][..], &["--kubeconfig", "/nonexistent"]] {
            assert_eq!(names_of_objects(NamedKind::Agent, &words(flags)), Vec::<String>::new());
        }
    }

    #[test]
    fn each_shell_has_a_script() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::PowerShell] {
            let script = String::from_utf8(script(shell)).unwrap();
            assert!(script.contains("top-up"), "{shell}");
        }
    }
}
