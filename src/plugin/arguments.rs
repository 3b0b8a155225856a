//! Commands, flags and arguments of the plugin. The texts are its manual: `--help` and the reference show them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

/// The plugin as a program of its own, `kubectl-agentloop`.
#[derive(Parser, Debug)]
#[command(name = "kubectl-agentloop", bin_name = "kubectl agentloop", version)]
pub struct PluginCli {
    #[command(flatten)]
    pub(super) arguments: PluginArgs,
}

/// Inspect and control the Agents of a cluster.
#[derive(Args, Debug)]
pub struct PluginArgs {
    /// Flags of every command.
    #[command(flatten)]
    pub connection: ConnectionArgs,
    /// The command.
    #[command(subcommand)]
    pub command: PluginCommand,
}

/// Flags of every command.
#[derive(Args, Debug, Clone, Default)]
pub struct ConnectionArgs {
    /// Namespace. Defaults to that of the context.
    #[arg(short, long, global = true, value_name = "NAME", value_parser = object_name)]
    pub(super) namespace: Option<String>,
    /// All namespaces, for commands that list objects.
    #[arg(short = 'A', long, global = true, conflicts_with = "namespace")]
    pub(super) all_namespaces: bool,
    /// Context of the kubeconfig. Defaults to the current one.
    #[arg(long, global = true, value_name = "NAME")]
    pub(super) context: Option<String>,
    /// Kubeconfig. Defaults to $KUBECONFIG, then ~/.kube/config, then the service account of the pod.
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// The user in whose name requests to the API server are made.
    #[command(flatten)]
    pub(super) impersonation: ImpersonationArgs,
    /// Longest time to wait for a response of the API server, such as 1s, 2m or 3h; a number without a unit is of
    /// seconds, and 0 is no limit. Ends no stream, such as that of `logs --follow`.
    #[arg(long, global = true, value_name = "DURATION", default_value = "30s", value_parser = request_timeout)]
    pub(super) request_timeout: Duration,
    /// Format of the output. Defaults to a table or a text.
    #[arg(short, long, global = true, value_name = "FORMAT")]
    pub(super) output: Option<OutputFormat>,
    /// Namespace of the controller.
    #[arg(long, global = true, value_name = "NAME", default_value = "agentloop-system", value_parser = object_name)]
    pub(super) controller_namespace: String,
    /// ServiceAccount in the Agent's namespace whose token is requested for the controller. Needed with a kubeconfig
    /// that has a client certificate instead of a token.
    #[arg(long, global = true, value_name = "NAME", value_parser = object_name)]
    pub(super) service_account: Option<String>,
    /// URL of the controller's link, such as `https://agentloop-link.agentloop-system.svc:8443`. Defaults to a
    /// port-forward through the API server.
    #[arg(long, global = true, value_name = "URL")]
    pub(super) link_url: Option<String>,
}

/// Flags of kubectl that make requests to the API server as another user. Each is in the place of what the kubeconfig has.
#[derive(Args, Debug, Clone, Default)]
pub struct ImpersonationArgs {
    /// User to impersonate, such as `ann@example.com` or `system:serviceaccount:NAMESPACE:NAME`. Needs the verb
    /// `impersonate`.
    #[arg(id = "as", long = "as", global = true, value_name = "USER")]
    pub(super) user: Option<String>,
    /// Group to impersonate, together with a user. May be repeated, on one side of the name of the command.
    #[arg(id = "as-group", long = "as-group", global = true, value_name = "GROUP")]
    pub(super) groups: Vec<String>,
    /// UID to impersonate, together with a user.
    #[arg(id = "as-uid", long = "as-uid", global = true, value_name = "UID")]
    pub(super) uid: Option<String>,
}

/// A format for programs, or more columns.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// A table with more columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

#[derive(Subcommand, Debug)]
pub enum PluginCommand {
    /// Show Agents: state, what holds them, progress, open gates, usage.
    Status(StatusArgs),
    /// Explain why an Agent is not running, until when, and what to do.
    Explain(OneAgent),
    /// Show what an Agent does: a line for each turn, tool run, pause and gate.
    Logs(LogsArgs),
    /// Print the events of an Agent as JSON lines.
    Events(EventsArgs),
    /// Show the turns of an Agent: their duration, calls, tool runs and end.
    History(HistoryArgs),
    /// Show what waits for an approval, and the command that gives it.
    Approvals,
    /// Approve gates of an Agent, or of an AgentBudget.
    Approve(AnswerArgs),
    /// Deny gates of an Agent, or of an AgentBudget.
    Deny(AnswerArgs),
    /// Suspend Agents: interrupt their turns and delete their pods until they are resumed (spec.suspend).
    Pause(SomeAgents),
    /// Continue Agents that are suspended, in a cool-down, or paused until a person continues them.
    Resume(SomeAgents),
    /// End the sleep of Agents, or start loops again that have ended.
    Wake(SomeAgents),
    /// End the loops of Agents after their current turns, until they are woken or resumed, or their spec changes.
    Stop(StopArgs),
    /// Send a task to an Agent, and wait for its result.
    Run(RunArgs),
    /// Talk to an Agent: each line is a task that contains the conversation so far.
    Chat(ChatArgs),
    /// Show usage and cost since the Agents were created, or since a time.
    Cost(CostArgs),
    /// Show AgentBudgets, or add to their limits.
    #[command(subcommand)]
    Budget(BudgetCommand),
    /// Simulate the effect of changed limits on past calls of running Agents, or on histories in files.
    Simulate(SimulateArgs),
    /// Check that the cluster can run Agents and accepts a new one, and what you may do.
    Check(CheckArgs),
    /// Write an archive for a bug report, without texts of prompts, answers and events, and without secrets.
    Report(ReportArgs),
    /// Print a completion script.
    Completion(CompletionArgs),
    /// Print the reference of all commands as Markdown.
    #[command(hide = true)]
    Reference,
}

impl PluginCommand {
    /// Whether it lists objects, so that it can list those of all namespaces.
    #[must_use]
    pub fn lists_objects(&self) -> bool {
        if let Self::Status(arguments) = self {
            return arguments.names.is_empty();
        }
        matches!(self, Self::Approvals | Self::Cost(_) | Self::Budget(BudgetCommand::Top))
    }

    /// Whether it can print this format.
    #[must_use]
    pub fn prints(&self, format: OutputFormat) -> bool {
        let is_printed = matches!(
            self,
            Self::Status(_)
                | Self::Explain(_)
                | Self::Approvals
                | Self::Cost(_)
                | Self::Budget(BudgetCommand::Top)
                | Self::History(_)
                | Self::Run(_)
                | Self::Simulate(_)
                | Self::Check(_)
        );
        // Events are always JSON lines.
        let is_lines = matches!(self, Self::Events(_)) && format != OutputFormat::Yaml;
        is_printed || is_lines || format == OutputFormat::Wide
    }
}

#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Only the installation, not what you may do.
    #[arg(long)]
    pub(super) installation_only: bool,
}

#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Names of Agents. Defaults to all.
    #[arg(value_name = "AGENT", value_parser = object_name)]
    pub(super) names: Vec<String>,
    /// Label selector, such as team=a.
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "names")]
    pub(super) selector: Option<String>,
}

#[derive(Args, Debug)]
pub struct OneAgent {
    /// Name of the Agent.
    #[arg(value_name = "AGENT", value_parser = object_name)]
    pub(super) name: String,
}

#[derive(Args, Debug)]
pub struct SomeAgents {
    /// Names of the Agents.
    #[arg(value_name = "AGENT", required = true, value_parser = object_name)]
    pub(super) names: Vec<String>,
}

#[derive(Args, Debug)]
pub struct StopArgs {
    /// Names of the Agents.
    #[arg(value_name = "AGENT", required = true, value_parser = object_name)]
    pub(super) names: Vec<String>,
    /// Interrupt the current turns. Actions that were already sent are completed first.
    #[arg(long)]
    pub(super) now: bool,
}

#[derive(Args, Debug)]
pub struct LogsArgs {
    /// Name of the Agent.
    #[arg(value_name = "AGENT", value_parser = object_name)]
    pub(super) name: String,
    /// Follow: print new events as they arrive.
    #[arg(short, long)]
    pub(super) follow: bool,
    /// Number of events to begin with, counted from the newest.
    #[arg(long, value_name = "NUMBER", default_value_t = 100, value_parser = clap::value_parser!(i64).range(0..))]
    pub(super) tail: i64,
}

#[derive(Args, Debug)]
pub struct EventsArgs {
    /// Name of the Agent.
    #[arg(value_name = "AGENT", value_parser = object_name)]
    pub(super) name: String,
    /// Follow: print new events as they arrive.
    #[arg(short, long)]
    pub(super) follow: bool,
    /// Begin after the event with this seq.
    #[arg(long, value_name = "SEQ", default_value_t = 0, value_parser = clap::value_parser!(i64).range(0..))]
    pub(super) after: i64,
    /// Also print texts: the calls that wait for an approval, and the last messages of a detected loop. Needs `get` on
    /// `agents/messages`.
    #[arg(long)]
    pub(super) messages: bool,
}

#[derive(Args, Debug)]
pub struct HistoryArgs {
    /// Name of the Agent.
    #[arg(value_name = "AGENT", value_parser = object_name)]
    pub(super) name: String,
    /// Number of turns, counted from the newest.
    #[arg(long, value_name = "NUMBER", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) turns: u32,
}

#[derive(Args, Debug)]
pub struct AnswerArgs {
    /// Name of the Agent, or with --budget of the AgentBudget.
    #[arg(value_name = "NAME", value_parser = object_name)]
    pub(super) name: String,
    /// Id of the gate. May be omitted if exactly one is open.
    #[arg(value_name = "GATE", conflicts_with = "all")]
    pub(super) gate: Option<String>,
    /// All gates that are open.
    #[arg(long)]
    pub(super) all: bool,
    /// The gate is that of an AgentBudget.
    #[arg(long)]
    pub(super) budget: bool,
}

#[derive(Args, Debug)]
pub struct RunArgs {
    /// Name of the Agent.
    #[arg(value_name = "AGENT", value_parser = object_name)]
    pub(super) name: String,
    /// The task, or `-` for standard input.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(super) prompt: String,
    /// Id of the request, so that a repetition is not another task. Defaults to a random one.
    #[arg(long, value_name = "ID", value_parser = request_id)]
    pub(super) id: Option<String>,
    /// Show tool runs on standard error.
    #[arg(short, long)]
    pub(super) verbose: bool,
    /// Show the text of the answer while the model writes it; `--stream=false` turns that off. Defaults to true on a terminal.
    /// Without effect if the output is JSON or YAML.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(super) stream: Option<bool>,
}

#[derive(Args, Debug)]
pub struct ChatArgs {
    /// Name of the Agent.
    #[arg(value_name = "AGENT", value_parser = object_name)]
    pub(super) name: String,
    /// Show tool runs on standard error.
    #[arg(short, long)]
    pub(super) verbose: bool,
    /// Show the text of the answer while the model writes it; `--stream=false` turns that off. Defaults to true on a terminal.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(super) stream: Option<bool>,
}

#[derive(Args, Debug)]
pub struct CostArgs {
    /// What each row sums.
    #[arg(long, value_name = "WHAT", default_value = "agent")]
    pub(super) by: CostGroup,
    /// Only the usage of approximately this period, such as 24h or 7d, as recorded in the windows of AgentBudgets, or with
    /// --by model in the events of the loops. Column FROM has the time from which on a row counts.
    #[arg(long, value_name = "DURATION", value_parser = since)]
    pub(super) since: Option<jiff::SignedDuration>,
}

/// What a row of `cost` sums.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CostGroup {
    /// An Agent.
    #[default]
    Agent,
    /// A model.
    Model,
    /// A namespace.
    Namespace,
}

#[derive(Subcommand, Debug)]
pub enum BudgetCommand {
    /// Show each limit with what is used and left, and the Agents that use most.
    Top,
    /// Add an amount to the limits of an AgentBudget, once, in its present window.
    TopUp(TopUpArgs),
}

#[derive(Args, Debug)]
pub struct TopUpArgs {
    /// Name of the AgentBudget.
    #[arg(value_name = "BUDGET", value_parser = object_name)]
    pub(super) name: String,
    #[command(flatten)]
    pub(super) amount: TopUpAmount,
    /// Id of the top-up: each id counts once. Defaults to one of the time and random digits.
    #[arg(long, value_name = "ID")]
    pub(super) id: Option<String>,
    /// Reason, for readers.
    #[arg(long, value_name = "TEXT")]
    pub(super) reason: Option<String>,
}

/// What is added; at least one kind.
#[derive(Args, Debug)]
#[group(required = true, multiple = true)]
pub struct TopUpAmount {
    /// Tokens: uncached input, cache writes and output.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i64).range(1..))]
    pub(super) tokens: Option<i64>,
    /// Input tokens.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i64).range(1..))]
    pub(super) input_tokens: Option<i64>,
    /// Output tokens.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i64).range(1..))]
    pub(super) output_tokens: Option<i64>,
    /// Model calls.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i64).range(1..))]
    pub(super) calls: Option<i64>,
    /// US dollars, such as 2.50.
    #[arg(long, value_name = "DOLLARS", value_parser = dollars)]
    pub(super) cost_usd: Option<String>,
}

#[derive(Args, Debug)]
#[command(group(ArgGroup::new("source").args(["names", "files"]).required(true).multiple(true)))]
pub struct SimulateArgs {
    /// Names of Agents that run; several share a budget. Their journals are copied out of their pods.
    #[arg(value_name = "AGENT", value_parser = object_name)]
    pub(super) names: Vec<String>,
    /// History of an Agent as JSON lines, as written by `agentloop history`. May be repeated, for Agents that share a
    /// budget. Needs no cluster.
    #[arg(long = "file", value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,
    /// Manifest of the AgentBudget to apply.
    #[arg(long, value_name = "FILE")]
    pub(super) budget: Option<PathBuf>,
    /// A limit, by its path in the spec of an AgentBudget or an Agent, and its value as YAML: limits.tokens=1000000,
    /// window.rolling.seconds=86400, guardrails.maxCallsPerTurn=10. Without --budget, a window never ends.
    #[arg(long, value_name = "PATH=VALUE")]
    pub(super) set: Vec<String>,
    /// Only calls made within this time before now, such as 24h or 3d.
    #[arg(long, value_name = "DURATION", value_parser = since)]
    pub(super) since: Option<jiff::SignedDuration>,
}

#[derive(Args, Debug)]
pub struct ReportArgs {
    /// The archive to write, which must not exist. Defaults to agentloop-report-TIME.zip.
    #[arg(long, value_name = "FILE")]
    pub(super) file: Option<PathBuf>,
    /// List what would be in the archive, and write nothing.
    #[arg(long)]
    pub(super) dry_run: bool,
}

#[derive(Args, Debug)]
pub struct CompletionArgs {
    /// Shell.
    #[arg(value_name = "SHELL")]
    pub(super) shell: Shell,
}

/// A name that is one part of a path: a kind before it or a subresource after it would be others.
fn object_name(text: &str) -> Result<String, String> {
    let is_alphanumeric = |c: char| c.is_ascii_alphanumeric();
    let fits = text.starts_with(is_alphanumeric) && text.ends_with(is_alphanumeric);
    if fits && text.chars().all(|c| is_alphanumeric(c) || ".-".contains(c)) {
        return Ok(text.to_owned());
    }
    Err("a name has letters, digits, '-' and '.', and no kind before it: helper, not agents/helper".into())
}

/// An id as the controller accepts it.
fn request_id(text: &str) -> Result<String, String> {
    let fits = (1..=63).contains(&text.len());
    if fits && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) {
        return Ok(text.to_owned());
    }
    Err("an id has 1 to 63 letters, digits, '.', '_' and '-'".into())
}

fn dollars(text: &str) -> Result<String, String> {
    crate::api::money::micro_usd(text).map_err(|problem| problem.to_string())?;
    Ok(text.to_owned())
}

/// A duration as kubectl's flag of this name has it, in whole units; zero is no limit.
fn request_timeout(text: &str) -> Result<Duration, String> {
    let wrong =
        || "a time limit is a number of seconds, or numbers with ms, s, m or h, such as 30s or 1m30s".to_owned();
    if let Ok(seconds) = text.parse::<u32>() {
        return Ok(Duration::from_secs(seconds.into()));
    }
    if text.is_empty() {
        return Err(wrong());
    }
    let (mut rest, mut sum) = (text, Duration::ZERO);
    while !rest.is_empty() {
        let (number, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?);
        let (unit, after) = after.split_at(after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len()));
        let milliseconds = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(wrong()),
        };
        let number: u32 = number.parse().map_err(|_| wrong())?;
        sum += Duration::from_millis(u64::from(number) * milliseconds);
        rest = after;
    }
    Ok(sum)
}

/// A positive duration of whole seconds, minutes, hours or days.
fn since(text: &str) -> Result<jiff::SignedDuration, String> {
    let wrong = || "a duration is a number with s, m, h or d, such as 24h".to_owned();
    let (number, size) = [("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400)]
        .into_iter()
        .find_map(|(unit, size)| Some((text.strip_suffix(unit)?, size)))
        .ok_or_else(wrong)?;
    let number: u32 = number.parse().map_err(|_| wrong())?;
    if number == 0 {
        return Err(wrong());
    }
    Ok(jiff::SignedDuration::from_secs(i64::from(number) * size))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parsed(line: &str) -> Result<PluginArgs, clap::Error> {
        let words = std::iter::once("kubectl-agentloop").chain(line.split(' '));
        PluginCli::try_parse_from(words).map(|cli| cli.arguments)
    }

    #[test]
    fn the_definition_of_the_commands_is_consistent() {
        PluginCli::command().debug_assert();
    }

    #[test]
    fn common_flags_may_stand_before_and_after_the_command() {
        for line in ["-n team-a status -o wide", "status -n team-a -o wide"] {
            let connection = parsed(line).unwrap().connection;
            assert_eq!(connection.namespace.as_deref(), Some("team-a"));
            assert_eq!(connection.output, Some(OutputFormat::Wide));
            assert_eq!(connection.controller_namespace, "agentloop-system");
        }
        assert!(parsed("status -A -n a").is_err());
    }

    #[test]
    fn a_user_and_groups_are_impersonated_as_in_kubectl() {
        for line in [
            "--as bob --as-group a,b --as-group=c --as-uid 7 status",
            "status --as bob --as-group a,b --as-group=c --as-uid 7",
            "budget top --as=bob --as-group a,b --as-group c --as-uid=7",
        ] {
            let asked = parsed(line).unwrap().connection.impersonation;
            assert_eq!(asked.user.as_deref(), Some("bob"), "{line}");
            assert_eq!(asked.groups, ["a,b", "c"], "{line}");
            assert_eq!(asked.uid.as_deref(), Some("7"), "{line}");
        }
    }

    #[test]
    fn a_name_is_no_path() {
        for line in [
            "status NAME",
            "pause helper NAME",
            "stop NAME",
            "logs NAME",
            "run NAME -p x",
            "approve NAME",
            "budget top-up NAME --calls 1",
            "simulate NAME",
            "status -n NAME",
            "status --controller-namespace NAME",
            "logs helper --service-account NAME",
        ] {
            for name in ["helper", "a.b-c2"] {
                assert!(parsed(&line.replace("NAME", name)).is_ok(), "{line}: {name}");
            }
            for name in ["agents/helper", "helper/status", "..", "a?b", "a%2e", "-a", "a-", ""] {
                assert!(parsed(&line.replace("NAME", name)).is_err(), "{line}: {name}");
            }
        }
    }

    #[test]
    fn a_gate_and_all_gates_exclude_each_other_and_a_top_up_has_an_amount() {
        assert!(parsed("approve helper e3-t1c1r1").is_ok());
        assert!(parsed("approve helper e3-t1c1r1 --all").is_err());
        assert!(parsed("budget top-up team-a").is_err());
        assert!(parsed("budget top-up team-a --tokens 0").is_err());
        assert!(parsed("budget top-up team-a --cost-usd 1.0000001").is_err());
        assert!(parsed("budget top-up team-a --tokens 1 --cost-usd 1.000001").is_ok());
    }

    #[test]
    fn only_lists_are_of_all_namespaces() {
        for line in ["status", "status -l team=a", "approvals", "cost", "budget top"] {
            assert!(parsed(line).unwrap().command.lists_objects(), "{line}");
        }
        for line in [
            "status helper",
            "explain helper",
            "pause helper",
            "approve helper",
            "budget top-up team --calls 1",
            "simulate --file a",
            "check",
            "report",
        ] {
            assert!(!parsed(line).unwrap().command.lists_objects(), "{line}");
        }
    }

    #[test]
    fn a_simulation_has_an_agent_or_a_file() {
        for (line, is_right) in [
            ("simulate helper --since 3d --set limits.calls=1", true),
            ("simulate helper watcher --file third.jsonl", true),
            ("simulate --file helper.jsonl", true),
            ("simulate --set limits.calls=1", false),
            ("simulate helper --since 3", false),
        ] {
            assert_eq!(parsed(line).is_ok(), is_right, "{line}");
        }
    }

    #[test]
    fn a_stream_may_be_turned_on_and_off() {
        let run = |line: &str| {
            let PluginCommand::Run(run) = parsed(line).unwrap().command else {
                panic!("{line}");
            };
            run.stream
        };
        assert_eq!(run("run helper -p x"), None);
        assert_eq!(run("run helper --stream -p x"), Some(true));
        assert_eq!(run("run helper -p x --stream=false"), Some(false));
        assert!(parsed("chat helper --stream=false").is_ok());
        assert!(parsed("chat helper --stream=some").is_err());
    }

    #[test]
    fn the_time_limit_of_requests_is_written_as_kubectls() {
        let limit = |line: &str| parsed(line).map(|parsed| parsed.connection.request_timeout);
        assert_eq!(limit("status").unwrap(), Duration::from_secs(30));
        for (text, expected) in [
            ("0", Duration::ZERO),
            ("0s", Duration::ZERO),
            ("5", Duration::from_secs(5)),
            ("1s", Duration::from_secs(1)),
            ("2m", Duration::from_mins(2)),
            ("3h", Duration::from_hours(3)),
            ("1m30s", Duration::from_secs(90)),
            ("250ms", Duration::from_millis(250)),
        ] {
            assert_eq!(
                limit(&format!("status --request-timeout={text}")).unwrap(),
                expected,
                "{text}"
            );
        }
        for wrong in ["", "s", "-1", "1d", "1.5", "1m30", "1 m", "99999999999", "99999999999s"] {
            assert!(request_timeout(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ids_and_durations_are_checked() {
        assert!(request_id(&"a".repeat(63)).is_ok());
        assert!(request_id(&"a".repeat(64)).is_err());
        assert!(request_id("").is_err() && request_id("a b").is_err());
        assert_eq!(since("90m").unwrap(), jiff::SignedDuration::from_mins(90));
        assert_eq!(since("7d").unwrap(), jiff::SignedDuration::from_hours(168));
        for wrong in ["", "h", "0h", "-1h", "1.5h", "5", "1w"] {
            assert!(since(wrong).is_err(), "{wrong}");
        }
    }
}
