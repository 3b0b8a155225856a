//! The reference of the commands, generated from their definition.

use std::fmt::Write as _;

use clap::{Arg, Command};

use super::failure::ExitStatus;
use super::report::redaction::MAX_DIGITS;
use super::report::sources::MAX_PREVIOUS_LOGS;
use super::screens::checks::PERMISSIONS;

/// The page as Markdown.
#[must_use]
pub fn markdown() -> String {
    let mut command = super::command();
    command.build();
    let mut page = format!("{HEAD}\n{USE}");
    let _ = write!(page, "\n## Common flags\n\n{}", flags(&command, Arg::is_global_set));
    let _ = writeln!(page, "\n## Commands");
    for sub in visible(&command) {
        let subs: Vec<&Command> = visible(sub).collect();
        if subs.is_empty() {
            section(&mut page, sub, "kubectl agentloop");
        }
        for inner in subs {
            section(&mut page, inner, &format!("kubectl agentloop {}", sub.get_name()));
        }
    }
    let _ = write!(page, "\n## Exit codes\n\n| code | |\n|---|---|\n");
    for status in ExitStatus::ALL {
        let _ = writeln!(page, "| {} | {} |", status.code(), status.meaning());
    }
    page.push_str(PERMISSION_HEAD);
    for permission in &PERMISSIONS {
        let place = if permission.in_controller_namespace {
            " in the controller's namespace"
        } else {
            ""
        };
        let resource = permission.resource_name();
        let _ = writeln!(
            page,
            "| `{}` on `{resource}`{place} | {} |",
            permission.verb, permission.commands
        );
    }
    let tail = TAIL.replace("MAX_DIGITS", &MAX_DIGITS.to_string());
    page.push_str(&tail.replace("MAX_PREVIOUS_LOGS", &MAX_PREVIOUS_LOGS.to_string()));
    page
}

/// The exit codes, for `--help`.
#[must_use]
pub fn exit_codes_text() -> String {
    let lines = ExitStatus::ALL.map(|status| format!("  {:<3} {}", status.code(), status.meaning()));
    format!("Exit codes:\n{}", lines.join("\n"))
}

const HEAD: &str = "# kubectl agentloop

This page is the reference of the kubectl plugin. It is generated from the definition of the commands.
";

const USE: &str = "The plugin is the same static binary as everything else, under another name:

    ln -s \"$PWD/agentloop\" ~/.local/bin/kubectl-agentloop            # kubectl agentloop status
    ln -s \"$PWD/agentloop\" ~/.local/bin/kubectl_complete-agentloop   # completion of kubectl agentloop, by kubectl's own completion

`agentloop kubectl status` does the same without a link. For [Krew](https://krew.sigs.k8s.io), `hack/krew.sh` writes the archive and the manifest of a
release. `kubectl agentloop check` shows whether the cluster can run Agents, and what you may
do.

kubectl completes commands, flags, values such as those of `-o` and `--by`, and names of Agents and AgentBudgets. Names come from the API server, with
the flags of the command line, if it answers within a second. The scripts of `completion` have no names of objects.

The plugin has the rights of your kubeconfig, and does nothing that `kubectl` and the [API of the link](events.md#over-the-link) cannot do.
`logs`, `events`, `history`, `cost --by model --since`, `run` and `chat` reach the controller by a port-forward to its pod through the API server, verify it with the
CA in ConfigMap `agentloop-link-ca` of the Agent's namespace, and authenticate with the bearer token of the kubeconfig. A kubeconfig with a
client certificate, such as that of an administrator of kind or kubeadm, has none: name a ServiceAccount of that namespace with
`--service-account`, and a token is requested for it:

    kubectl create serviceaccount loop-user
    kubectl create rolebinding loop-user --clusterrole=edit --serviceaccount=default:loop-user
    kubectl agentloop logs quickstart --service-account loop-user

`--as`, `--as-group` and `--as-uid` are [those of kubectl](https://kubernetes.io/docs/reference/access-authn-authz/authentication/#user-impersonation):
requests to the API server are made as that user, and `approve` writes that user's name. Your own user needs the verb `impersonate`. They are
in the place of `as`, `as-groups` and `as-uid` in the kubeconfig. The controller knows users by their tokens, which cannot carry an
impersonation. Therefore commands that reach the controller are refused with `--as`, except with `--service-account`. The
impersonated user then opens the port-forward and requests the token, and the controller receives the request from the ServiceAccount.

## Pause, stop, delete

| | what ends | what stays | what starts it again |
|---|---|---|---|
| `pause` | the turn, at once, and the pod | the loop, which continues where it was | `resume` |
| `stop` | the loop, with outcome `Cancelled`: after the turn that runs, or with `--now` at once; then the pod | the state; a turn that was cut, and a request whose turn was cut with those that wait behind it, continue if the loop starts again | `wake`, `resume`, a change of the spec |
| `kubectl delete agents.agentloop.dev NAME` | everything | the volume, if `spec.storage` keeps it | |

`pause` is a state (`spec.suspend`), which a manifest in Git may have. `stop` is a request (annotation `agentloop.dev/stop`), which is handled once and
leaves the spec as it is. A turn that a pause holds is not waited for. In mode `Goal`, a loop that starts again begins with its first step. In mode
`Task`, the tasks that wait stay, and new ones are not accepted.
";

const PERMISSION_HEAD: &str = "
## Permissions

`admin` has all of these in its namespaces except for those in the controller's namespace, if the chart sets `rbac.aggregate`. `edit` does not
approve and does not write budgets; `view` reads.

| permission | for |
|---|---|
";

const TAIL: &str = "
`approve` and `deny` write under your own name, which the API server returns (SelfSubjectReview, which everyone may create). `--service-account`
needs `create` on `serviceaccounts/token` in the Agent's namespace. Port-forwards and commands in pods over WebSockets need `get` on
`pods/portforward` and `pods/exec` too. `pods/exec` is not in the chart's roles; Kubernetes' own `edit` and `admin` have it.
`check` and `report` also read the CustomResourceDefinitions, the StorageClasses and the Deployment of the controller, and create an Agent as a dry
run; what you may not do is a warning. `report` also reads Sensors, Events, pods and logs of pods in the namespace, and pods and their logs in the controller's
namespace, as far as you may.

## Tasks

`run` sends a [request](../tasks/requests.md) with an id and waits for its end, over any number of connections. The result goes to standard output, everything else to
standard error. If it is interrupted, the task continues; the same command with `--id` waits for it again and requests nothing twice.

Tasks of one Agent share no conversation. `chat` therefore sends the earlier conversation with each message, up to 48 KiB, and leaves out the oldest
messages.

## Simulate a limit

    kubectl agentloop simulate helper --since 3d --set limits.tokens=2000000 --set window.rolling.seconds=86400
    kubectl agentloop simulate helper watcher --budget team.yaml --set limits.costUSD=5
    kubectl exec helper -c worker -- /agentloop journal > helper.sqlite && agentloop history helper.sqlite > helper.jsonl
    kubectl agentloop simulate --file helper.jsonl --set 'guardrails.rateLimits=[{resource: LLMCalls, amount: 60, windowSeconds: 3600}]'

With the name of an Agent, the plugin runs `/agentloop journal` in its pod, as `kubectl exec` does. The copy of the [journal](journal.md#read-the-journal) has
prompts and answers: it is kept in memory only, and whoever may not run commands in the pod may not simulate. The pod must run, and must be of the
version of the plugin. A history in a file may be of an Agent that is gone; with files only, no cluster is needed.

The calls of a [history](journal.md) are put to the rules of the ledger and of the engine again, under other limits. The result is when the first of them would have been
refused, for how long, how many calls, tokens and dollars that is, and per day (UTC). The first line names the AgentBudget and all limits. The journal keeps the last 2,000 turns. With `--since`, earlier usage is not counted: windows start empty.

| limit | |
|---|---|
| `limits`, `perAgent`: `tokens`, `inputTokens`, `outputTokens`, `calls`, `costUSD`; `window`, `onExhausted` | of an AgentBudget |
| `guardrails`: `actionsPerMinute`, `activeHours`, `maxCallsPerTurn`, `maxConsecutiveToolFailures`, `maxConsecutiveTurns`, `rateLimits` (`LLMCalls`, `LLMTokens`, `Actions`), `tokensPerHour`, `total` | of an Agent; those that are not named limit nothing |
| `guardrails.idleTimeoutSeconds`, `guardrails.loopDetection`, `rateLimits` of bytes | rejected: a history does not record what they count |

Values are checked as an API server checks them, and a field that does not exist, or that is set twice, is an error. `topUps` of a manifest are added before the first
call. With `onExhausted: Stop`, an Agent that has used its `perAgent` share, or whose call alone does not fit, does not stop the others.

Calls keep their recorded times: a loop that was stopped would have continued later, with different calls. The first stop is therefore more exact than those after it: for
limits on calls, actions, turns, failures and hours it is the one of a loop that really runs under the limit. A limit on tokens or cost really stops a loop
earlier, by one call, or by several if calls use much less than they can. The gateway needs room for the most that a call can use, and shortens its output to
what is left; a history records only what the call used. For the same reason, a call that is larger than a whole limit is never made. `rateLimits` of `LLMTokens` count
what calls used, in both. `maxConsecutiveTurns` does not count tasks and heartbeats, and `maxCallsPerTurn` ends a task.

A limit on `costUSD`, `inputTokens` or `outputTokens` requires that value for every call. Input and output tokens are in the newest 50,000 lines of the journal only,
and a worker of an earlier release did not write them. Leave out calls that have none with `--since`.

## Reports

`report` writes what a bug report needs into an archive. It contains the Agents, Sensors and AgentBudgets of the namespace with their statuses, Events of these and of their
pods, the states of pods, logs, versions, and what `check` finds. `index.json` lists the files and what you may not read.

A log is the newest 2,000 lines. There is one of each pod of the controller, of up to four. After a restart of the controller, or of a container `worker`, `gateway` or
`sensor`, there is also the log of the run before it (`logs/POD.CONTAINER.previous.jsonl`), of up to MAX_PREVIOUS_LOGS containers. The present logs of Agents are not read: the
status of an Agent has its last error. Logs of tools are never read, since tools may write anything.

Texts are left out and replaced by their lengths: instructions, prompts, schemas, expressions, values of labels, annotations, headers and environment
variables, and any other text that is not known to be harmless. Of URLs, scheme, host and port stay. Of messages in statuses, Events and logs, the words
that are names in the API stay, and numbers of up to MAX_DIGITS digits. Keys, numbers, times, reasons, and the names of objects and models stay. Look at the
files before you publish them.

## Usage in a period

`cost` shows what the status of Agents counts since they were created. With `--since`, it shows what the AgentBudgets recorded for each Agent
in about that time: a budget with a rolling window keeps eight periods, one with a calendar window the present one. Column `FROM` has the time
from which on a row counts, which is at or before the one that was asked for. The AgentBudgets are those of the namespace and, if you may list
them, those in the controller's namespace. Agents without such a budget are named below the table; use the [metrics](metrics.md) for them.

Deleted Agents have no status and no events, so `cost` without `--since` and `cost --by model` do not count them. With `--since`, those that
an AgentBudget has recorded have rows such as `team-a/helper (deleted)`, with `deleted: true` in JSON, and are in the sums. Usage of an Agent that was deleted
and created again under its name is one row.

AgentBudgets do not record models. `cost --by model --since` therefore reads the [events](events.md#list-of-events) of the loops, from the newest one back to
that time, of one Agent after the other. It counts each answered call with the model that was asked, as of its time. An attempt that failed has no usage in
the events: the status counts it. Agents whose events do not say all of it are not in the sums. They are named below the table with the
reason: no pod runs, you may not `get` `agents/events`, the journal (50,000 lines) begins later, or an earlier version made calls.

## Usage of turns

`logs` shows tokens and cost at the end of each turn, and `history` in the columns `TOKENS` and `COST`: the sum over the answered calls of the turn, with the tokens
that were read from and written to a cache. `≥` means that the usage of some of these calls is not known, `-` that of none is. `logs` shows no
sum for a turn that began before its first line. A call outside of turns, such as a pre-check, a score or a judge, has a line of its own in `logs`. Failed attempts
are in none of these; the total in the last line of `logs` is that of the status, which has them.
";

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    let commands = command.get_subcommands();
    commands.filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

fn section(page: &mut String, command: &Command, parent: &str) {
    let name = command.get_name();
    let positional = command.get_positionals().map(placeholder).collect::<Vec<_>>().join(" ");
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let title = format!("{parent} {name}");
    let title = title.trim_start_matches("kubectl agentloop ");
    let _ = write!(page, "\n### {title}\n\n    {parent} {name} {positional}");
    page.truncate(page.trim_end().len());
    let _ = write!(page, "\n\n{}\n", sentence(&about));
    let table = flags(command, |flag| !flag.is_global_set() && flag.get_id() != "help");
    if !table.is_empty() {
        let _ = write!(page, "\n{table}");
    }
}

fn placeholder(argument: &Arg) -> String {
    let name = argument.get_value_names().and_then(|names| names.first());
    let name = name.map(ToString::to_string).unwrap_or_default();
    let many = if argument.get_action().takes_values()
        && argument.get_num_args().is_some_and(|range| range.max_values() > 1)
    {
        "..."
    } else {
        ""
    };
    if argument.is_required_set() {
        format!("{name}{many}")
    } else {
        format!("[{name}{many}]")
    }
}

fn flags(command: &Command, wanted: impl Fn(&Arg) -> bool) -> String {
    let rows = command
        .get_arguments()
        .filter(|flag| wanted(flag) && !flag.is_hide_set());
    let rows: Vec<String> = rows.map(flag_row).collect();
    if rows.is_empty() {
        return String::new();
    }
    format!("| flag | |\n|---|---|\n{}", rows.concat())
}

fn flag_row(flag: &Arg) -> String {
    let takes_value = flag.get_action().takes_values();
    let value = flag
        .get_value_names()
        .and_then(|names| names.first())
        .filter(|_| takes_value);
    let value = value.map(ToString::to_string).unwrap_or_default();
    let short = flag.get_short().map(|short| format!("-{short}"));
    let long = flag.get_long().map(|long| format!("--{long}"));
    let names: Vec<String> = short.into_iter().chain(long).collect();
    let name = if names.is_empty() {
        value
    } else {
        let space = if value.is_empty() { "" } else { " " };
        format!("{}{space}{value}", names.join(", "))
    };
    let help = flag
        .get_long_help()
        .or_else(|| flag.get_help())
        .map(ToString::to_string);
    let mut help = sentence(&help.unwrap_or_default());
    let choices: Vec<String> = flag
        .get_possible_values()
        .iter()
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if takes_value && !choices.is_empty() {
        let _ = write!(help, " One of {}.", choices.join(", "));
    }
    let defaults: Vec<_> = flag
        .get_default_values()
        .iter()
        .map(|value| value.to_string_lossy())
        .collect();
    if takes_value && !defaults.is_empty() {
        let _ = write!(help, " Defaults to `{}`.", defaults.join(" "));
    }
    format!("| `{name}` | {} |\n", help.replace('\n', " ").replace('|', "\\|"))
}

/// With the point at its end that clap removes.
fn sentence(text: &str) -> String {
    let text = text.trim();
    if text.is_empty() || text.ends_with('.') {
        text.to_owned()
    } else {
        format!("{text}.")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_page_is_as_generated() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/kubectl-plugin.md");
        assert!(
            std::fs::read_to_string(path).unwrap_or_default() == markdown(),
            "docs/reference/kubectl-plugin.md is not what would be written: run make generate"
        );
    }

    #[test]
    fn each_command_has_a_section_and_each_section_a_command() {
        let page = markdown();
        let headings = page.lines().filter_map(|line| line.strip_prefix("### "));
        let sections: BTreeSet<String> = headings.map(str::to_owned).collect();
        assert_eq!(sections, commands());
        assert!(!sections.contains("reference"), "hidden");
    }

    #[test]
    fn permissions_are_for_commands_and_each_command_on_the_cluster_has_one() {
        let known = commands();
        let mut named = BTreeSet::new();
        for uses in PERMISSIONS.iter().map(|permission| permission.commands) {
            let uses = uses.split(" (").next().unwrap_or_default();
            for one in uses.split(", ").filter(|one| !one.starts_with("all commands")) {
                let words = one.split(' ');
                let name: Vec<&str> = words
                    .take_while(|word| {
                        word.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !word.starts_with('-')
                    })
                    .collect();
                let name = name.join(" ");
                assert!(known.contains(&name), "{one}");
                named.insert(name);
            }
        }
        // These have the name of an Agent, read what everyone may, or need no cluster.
        let others = ["check", "completion", "explain"].map(str::to_owned);
        let without: BTreeSet<_> = known.difference(&named).cloned().collect();
        assert_eq!(without, BTreeSet::from(others));
    }

    /// The commands of the parser that users see, with those below others.
    fn commands() -> BTreeSet<String> {
        let command = crate::plugin::command();
        let of = |sub: &Command| -> Vec<String> {
            let inner: Vec<_> = visible(sub)
                .map(|inner| format!("{} {}", sub.get_name(), inner.get_name()))
                .collect();
            if inner.is_empty() {
                return vec![sub.get_name().to_owned()];
            }
            inner
        };
        visible(&command).flat_map(of).collect()
    }
}
