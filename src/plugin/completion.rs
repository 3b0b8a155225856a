//! Completion in shells: a script for the program, and answers to kubectl, which completes its plugins itself.

use clap_complete::{Shell, generate};

use super::PROGRAM;

/// The last line of an answer to kubectl: complete nothing else, such as names of files.
const NO_FILES: &str = ":4";

/// The script that makes a shell complete the commands of `kubectl-agentloop`.
#[must_use]
pub fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    generate(shell, &mut super::command(), PROGRAM, &mut script);
    script
}

/// The answer to kubectl, which runs `kubectl_complete-agentloop` with the words so far, the last one unfinished: a line
/// for each continuation.
#[must_use]
pub fn answer(words: &[String]) -> String {
    let (unfinished, before) = words
        .split_last()
        .map_or(("", words), |(last, before)| (last.as_str(), before));
    let mut command = super::command();
    command.build();
    let mut at = &command;
    for word in before {
        at = at.find_subcommand(word).unwrap_or(at);
    }
    let visible = at.get_subcommands().filter(|command| !command.is_hide_set());
    let commands = visible.map(|command| described(command.get_name(), command.get_about()));
    let flags = at.get_arguments().filter(|flag| !flag.is_hide_set());
    let flags = flags.filter_map(|flag| Some(described(&format!("--{}", flag.get_long()?), flag.get_help())));
    let candidates = commands.chain(flags.filter(|_| unfinished.starts_with('-')));
    let fitting = candidates.filter(|line| line.starts_with(unfinished));
    fitting
        .map(|line| line + "\n")
        .chain([format!("{NO_FILES}\n")])
        .collect()
}

/// A continuation and its description, as kubectl reads them.
fn described(name: &str, help: Option<&clap::builder::StyledStr>) -> String {
    let help = help.map(ToString::to_string).unwrap_or_default();
    format!("{name}\t{}", help.lines().next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(words: &[&str]) -> Vec<String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let answer = answer(&words);
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
    fn each_shell_has_a_script() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::PowerShell] {
            let script = String::from_utf8(script(shell)).unwrap();
            assert!(script.contains("top-up"), "{shell}");
        }
    }
}
