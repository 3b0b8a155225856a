//! Each setting that `simulate --set` accepts, against a loop that really runs under it: what stopped it, before which
//! call, until when, and what was used until then. The loops are Agents of two runs. Those that a limit holds for a minute
//! have a small run of their own, in which their scripts take less than that.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

use agentloop::plugin::simulation::past::{self, PastEvent, PastLoop};
use agentloop::plugin::simulation::report::{CallSum, SimulatedStop, SimulationReport};
use agentloop::plugin::simulation::{changes, replay, settings};
use agentloop::worker::journal::export;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::process::{LocalHarness, Run, agent, script};
use crate::support::ports::free_port;

/// Tokens of each call, and its cost with [`price`].
const INPUT: i64 = 1_500;
const OUTPUT: i64 = 100;
const TOKENS: i64 = INPUT + OUTPUT;
const COST: i64 = 4_000;
/// All calls of the script.
const CALLS: i64 = 9;
/// Less than any call can use, and more than the bound of one exceeds what it used: the gateway reserves the bound.
const SLACK: i64 = 1_400;
/// Output that each call may have, and what is left of it at the first call without room.
const MAX_OUTPUT: i64 = 150;
const LEFT_OUTPUT: i64 = 60;
/// A pause of this many seconds, or a window, ends while other loops still run.
const SHORT: i64 = 60;

fn price() -> Value {
    json!({"inputPerMillion": "2.00", "outputPerMillion": "10.00"})
}

/// What the calls of the script request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Script {
    /// A tool that is not there.
    Plain,
    /// A file is written.
    Acts,
    /// A file is read that is not there.
    Fails,
    /// Mode `Goal`: three results that its criterion refuses, and one that it accepts.
    Goal,
}

impl Script {
    const ALL: [Self; 4] = [Self::Plain, Self::Acts, Self::Fails, Self::Goal];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Acts => "acts",
            Self::Fails => "fails",
            Self::Goal => "goal",
        }
    }

    fn calls(self) -> u64 {
        match self {
            Self::Plain | Self::Acts | Self::Fails => CALLS.unsigned_abs(),
            Self::Goal => 4,
        }
    }

    /// Two turns of four calls, of which three request a tool, and the end. Of a goal, four turns of one call.
    fn turns(self) -> Value {
        let usage = json!({"inputTokens": INPUT, "outputTokens": OUTPUT});
        if self == Self::Goal {
            let finish = |result: &str| json!({"toolCalls": [{"name": "finish", "arguments": {"result": result}}], "usage": usage});
            return json!([finish("some"), finish("a few"), finish("many"), finish("12 stars")]);
        }
        let call = |n: u32| {
            let (tool, arguments) = match self {
                Self::Plain | Self::Goal => ("missing", json!({"n": n})),
                Self::Acts => ("files__write_file", json!({"path": format!("f{n}"), "content": "x"})),
                Self::Fails => ("files__read_file", json!({"path": format!("missing-{n}")})),
            };
            json!({"toolCalls": [{"name": tool, "arguments": arguments}], "usage": usage})
        };
        let text = |text: &str| json!({"text": text, "usage": usage});
        json!([
            call(1), call(2), call(3), text("one"), call(4), call(5), call(6), text("two"),
            {"yield": {"mode": "shutdown"}, "usage": usage},
        ])
    }
}

/// What a limit does to the loop.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// The first call that is not made, and the state, the reason and the window of the stop.
    Stops(i64, &'static str, &'static str, Until),
    /// The turn ends before this call, and the loop continues.
    EndsTurn(i64),
}

/// When a loop continues.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    Raised,
    /// Once usage has left a window of this many seconds, which is counted in pieces.
    Leaves(i64),
    /// This many seconds after what tripped.
    Rests(i64),
    /// At a moment of the calendar.
    Exactly,
}

impl Until {
    fn is_short(self) -> bool {
        matches!(self, Self::Leaves(SHORT) | Self::Rests(SHORT))
    }
}

/// A setting with a value that trips, and one that just does not.
struct Comparison {
    setting: &'static str,
    script: Script,
    /// `--set`, and the same with the value that does not trip.
    trips: Vec<String>,
    passes: Vec<String>,
    effect: Effect,
}

/// The AgentBudget with all shares that do not trip.
const SHARES: &str = "passes-shares";

impl Comparison {
    fn is_share(&self) -> bool {
        self.setting.starts_with("perAgent.")
    }

    fn is_short(&self) -> bool {
        matches!(self.effect, Effect::Stops(_, _, _, until) if until.is_short())
    }
}

fn words(set: &[&str]) -> Vec<String> {
    set.iter().map(|text| (*text).to_owned()).collect()
}

fn row(setting: &'static str, trips: &[&str], passes: &[&str], effect: Effect) -> Comparison {
    Comparison {
        setting,
        script: Script::Plain,
        trips: words(trips),
        passes: words(passes),
        effect,
    }
}

fn dollars(micro: i64) -> String {
    format!("0.{micro:06}")
}

/// The limits of an AgentBudget.
fn of_budgets() -> Vec<Comparison> {
    let stops = Effect::Stops(CALLS, "Paused", "BudgetExhausted", Until::Raised);
    let (nearly, all) = ((CALLS - 1) * TOKENS + SLACK, CALLS * TOKENS + SLACK);
    let (cheap, dear) = ((CALLS - 1) * COST + COST - 500, CALLS * COST + COST);
    let input = ((CALLS - 1) * INPUT + SLACK, CALLS * INPUT + SLACK);
    let output = ((CALLS - 1) * OUTPUT + LEFT_OUTPUT, CALLS * OUTPUT + MAX_OUTPUT);
    let mut rows = Vec::new();
    for (setting, trips, passes) in [
        ("limits.calls", 8.to_string(), 9.to_string()),
        ("limits.tokens", nearly.to_string(), all.to_string()),
        ("limits.inputTokens", input.0.to_string(), input.1.to_string()),
        ("limits.outputTokens", output.0.to_string(), output.1.to_string()),
        ("limits.costUSD", dollars(cheap), dollars(dear)),
    ] {
        let (trips, passes) = (format!("{setting}={trips}"), format!("{setting}={passes}"));
        rows.push(row(setting, &[&trips], &[&passes], stops));
    }
    for (setting, trips, passes) in [
        ("perAgent.calls", 8.to_string(), 9.to_string()),
        ("perAgent.tokens", nearly.to_string(), all.to_string()),
        ("perAgent.inputTokens", input.0.to_string(), input.1.to_string()),
        ("perAgent.outputTokens", output.0.to_string(), output.1.to_string()),
        ("perAgent.costUSD", dollars(cheap), dollars(dear)),
    ] {
        let (trips, passes) = (format!("{setting}={trips}"), format!("{setting}={passes}"));
        rows.push(row(
            setting,
            &["limits.calls=1000", &trips],
            &["limits.calls=1000", &passes],
            stops,
        ));
    }
    rows
}

/// The window of an AgentBudget, and what happens when it is exhausted.
fn of_windows(now: Timestamp) -> Vec<Comparison> {
    use Until::{Exactly, Leaves, Raised};
    let stops = |until| Effect::Stops(CALLS, "Paused", "BudgetExhausted", until);
    // No window may end during the run, since another would be simulated: each is in a zone whose midnight is hours away.
    let hour = now.to_zoned(TimeZone::UTC).hour();
    let zone = if (17..=18).contains(&hour) {
        "America/Caracas"
    } else {
        "Asia/Kathmandu"
    };
    let in_zone = |period: &str| format!("window.calendar={{period: {period}, timeZone: {zone}}}");
    let calendar = |period: &str| {
        if hour == 23 {
            in_zone(period)
        } else {
            format!("window.calendar.period={period}")
        }
    };
    let fixed = |text: &str| text.to_owned();
    let rows = [
        (
            "window.rolling.seconds",
            fixed("window.rolling.seconds=3600"),
            stops(Leaves(3_600)),
        ),
        ("window.lifetime", fixed("window.lifetime={}"), stops(Raised)),
        ("window.calendar.period Daily", calendar("Daily"), stops(Exactly)),
        ("window.calendar.period Weekly", calendar("Weekly"), stops(Exactly)),
        ("window.calendar.period Monthly", calendar("Monthly"), stops(Exactly)),
        ("window.calendar.timeZone", in_zone("Daily"), stops(Exactly)),
        (
            "onExhausted Stop",
            fixed("onExhausted=Stop"),
            Effect::Stops(CALLS, "Stopped", "BudgetExhausted", Raised),
        ),
        ("onExhausted Pause", fixed("onExhausted=Pause"), stops(Raised)),
        (
            "onExhausted Ask",
            fixed("onExhausted=Ask"),
            Effect::Stops(CALLS, "Paused", "BudgetAsk", Raised),
        ),
    ];
    let rows = rows.map(|(setting, window, effect)| {
        row(
            setting,
            &["limits.calls=8", &window],
            &["limits.calls=9", &window],
            effect,
        )
    });
    rows.into()
}

fn of_guardrails(now: Timestamp) -> Vec<Comparison> {
    use Until::{Exactly, Leaves, Raised, Rests};
    let (nearly, all) = ((CALLS - 1) * TOKENS + SLACK, CALLS * TOKENS + SLACK);
    let (cheap, dear) = ((CALLS - 1) * COST + COST - 500, CALLS * COST + COST);
    let stops = |call, reason, until| Effect::Stops(call, "Paused", reason, until);
    let rate = |resource: &str, amount: i64| {
        format!("guardrails.rateLimits=[{{resource: {resource}, amount: {amount}, windowSeconds: 3600}}]")
    };
    let one = |setting, trips: String, passes: String, effect| row(setting, &[&trips], &[&passes], effect);
    let simple = |setting, trips: i64, passes: i64, effect| {
        one(
            setting,
            format!("{setting}={trips}"),
            format!("{setting}={passes}"),
            effect,
        )
    };
    let hours = |from: i64, to: i64| {
        let at = |hours: i64| (now + SignedDuration::from_hours(hours)).strftime("%H:%M").to_string();
        format!(
            "guardrails.activeHours={{timeZone: UTC, start: '{}', end: '{}'}}",
            at(from),
            at(to)
        )
    };
    let acts = |row: Comparison| Comparison {
        script: Script::Acts,
        ..row
    };
    let fails = |row: Comparison| Comparison {
        script: Script::Fails,
        ..row
    };
    let cool_down = Effect::Stops(8, "Paused", "ConsecutiveToolFailures", Rests(SHORT));
    vec![
        simple(
            "guardrails.tokensPerHour",
            nearly,
            all,
            stops(CALLS, "TokensPerHour", Leaves(3_600)),
        ),
        simple(
            "guardrails.total.tokens",
            nearly,
            all,
            stops(CALLS, "TotalTokens", Raised),
        ),
        one(
            "guardrails.total.costUSD",
            format!("guardrails.total.costUSD={}", dollars(cheap)),
            format!("guardrails.total.costUSD={}", dollars(dear)),
            stops(CALLS, "TotalCost", Raised),
        ),
        simple("guardrails.maxCallsPerTurn", 3, 4, Effect::EndsTurn(4)),
        simple(
            "guardrails.maxConsecutiveTurns",
            2,
            3,
            stops(CALLS, "MaxConsecutiveTurns", Rests(SHORT)),
        ),
        one(
            "guardrails.activeHours",
            hours(2, 3),
            hours(-2, 2),
            stops(1, "OutsideActiveHours", Exactly),
        ),
        one(
            "guardrails.rateLimits LLMCalls",
            rate("LLMCalls", 8),
            rate("LLMCalls", 9),
            stops(CALLS, "RateWindow", Leaves(3_600)),
        ),
        one(
            "guardrails.rateLimits LLMTokens",
            rate("LLMTokens", 8 * TOKENS),
            rate("LLMTokens", 8 * TOKENS + 1),
            stops(CALLS, "RateWindow", Leaves(3_600)),
        ),
        acts(one(
            "guardrails.rateLimits Actions",
            rate("Actions", 5),
            rate("Actions", 6),
            stops(8, "RateWindow", Leaves(3_600)),
        )),
        acts(simple(
            "guardrails.actionsPerMinute",
            5,
            6,
            stops(8, "ActionsPerMinute", Leaves(SHORT)),
        )),
        fails(simple("guardrails.maxConsecutiveToolFailures", 6, 7, cool_down)),
    ]
}

/// In mode `Goal`, a turn counts whatever its criterion says.
fn of_goals() -> Comparison {
    Comparison {
        script: Script::Goal,
        ..row(
            "guardrails.maxConsecutiveTurns",
            &["guardrails.maxConsecutiveTurns=3"],
            &["guardrails.maxConsecutiveTurns=4"],
            Effect::Stops(4, "Paused", "MaxConsecutiveTurns", Until::Rests(SHORT)),
        )
    }
}

/// The same limits in manifests: the guardrails of an Agent, and an AgentBudget.
fn written(set: &[String]) -> (Value, Option<Value>) {
    let (mut guardrails, mut budget) = (json!({}), None);
    for change in set {
        let (path, text) = change.split_once('=').unwrap();
        let value: Value = if path.ends_with("costUSD") {
            text.into()
        } else {
            serde_yaml::from_str(text).unwrap()
        };
        let mut place = if path.starts_with("guardrails.") {
            &mut guardrails
        } else {
            budget.get_or_insert_with(|| json!({"limits": {}}))
        };
        for part in path.trim_start_matches("guardrails.").split('.') {
            place = &mut place[part];
        }
        *place = value;
    }
    if let Some(spec) = &mut budget
        && spec["window"].is_null()
    {
        spec["window"] = json!({"lifetime": {}});
    }
    (guardrails, budget)
}

/// An Agent with a script and limits.
fn limited(name: &str, script: Script, set: &[String], port: u16) -> Vec<Value> {
    let (guardrails, budget) = written(set);
    let budget = budget.map(|spec| (name.to_owned(), spec));
    under(name, (script, port), &guardrails, budget.into_iter().collect())
}

/// An Agent under all limits of a script that do not trip.
fn passing(rows: &[Comparison], script: Script, port: u16) -> Vec<Value> {
    let (mut guardrails, mut budgets) = (json!({}), Vec::<(String, Value)>::new());
    for (place, row) in rows.iter().enumerate().filter(|(_, row)| row.script == script) {
        let (more, budget) = written(&row.passes);
        join(&mut guardrails, &more);
        // An Agent has at most 16 budgets.
        match (budget, budgets.last_mut()) {
            (Some(spec), Some((name, known))) if row.is_share() && *name == SHARES => join(known, &spec),
            (Some(spec), _) if row.is_share() => budgets.push((SHARES.to_owned(), spec)),
            (Some(spec), _) => budgets.push((format!("passes-{place}"), spec)),
            (None, _) => {}
        }
    }
    under(
        &format!("passes-{}", script.name()),
        (script, port),
        &guardrails,
        budgets,
    )
}

/// Adds fields and items.
fn join(to: &mut Value, more: &Value) {
    match (more, to.as_array_mut()) {
        (Value::Object(fields), _) => fields.iter().for_each(|(name, value)| join(&mut to[name], value)),
        (Value::Array(more), Some(items)) => items.extend(more.iter().cloned()),
        _ => *to = more.clone(),
    }
}

fn under(name: &str, (script, port): (Script, u16), guardrails: &Value, budgets: Vec<(String, Value)>) -> Vec<Value> {
    let mut spec = json!({
        "instructions": "Be brief. ".repeat(200),
        "model": {
            "api": "Scripted", "name": "scripted", "maxOutputTokens": MAX_OUTPUT, "price": price(),
            "scripted": {"configMapKeyRef": {"name": script.name(), "key": "turns"}},
        },
        "guardrails": guardrails,
    });
    if script == Script::Goal {
        spec["mode"] = json!("Goal");
        spec["goal"] = json!({
            "description": "Count the stars.", "acceptanceCriteria": [{"name": "number", "regex": "[0-9]+ stars"}],
        });
    } else if script != Script::Plain {
        spec["tools"] = json!({
            "servers": [{"name": "files", "url": format!("http://127.0.0.1:{port}/mcp"), "tools": [
                {"name": "write_file", "effect": "Write"}, {"name": "read_file", "effect": "Read"},
            ]}],
            "approval": {"default": "Never"},
        });
    }
    let mut objects = Vec::new();
    for (budget, limits) in budgets {
        objects.push(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget", "metadata": {"name": budget}, "spec": limits,
        }));
        join(&mut spec, &json!({"budgetRefs": [{"name": budget}]}));
    }
    objects.push(agent(name, &spec));
    objects
}

/// The toolbox, as a server of the Agents.
async fn tool_server(harness: &LocalHarness, port: u16) -> Child {
    let root = harness.path("files");
    std::fs::create_dir(&root).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_agentloop"))
        .args(["toolbox", "--tools", "files", "--listen", &format!("127.0.0.1:{port}")])
        .arg("--root")
        .arg(root)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let connected = async {
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(super::process::WAIT_TIMEOUT, connected)
        .await
        .unwrap();
    child
}

pub(super) fn history(harness: &LocalHarness, name: &str) -> PastLoop {
    let journal = harness
        .state()
        .join(format!("volumes/default/{name}-state/worker/journal.sqlite"));
    let mut lines = Vec::new();
    export(&journal, &mut lines).unwrap();
    past::read(std::str::from_utf8(&lines).unwrap()).unwrap()
}

pub(super) fn sum(history: &PastLoop, turn: Option<i64>) -> CallSum {
    let mut sum = CallSum::default();
    for (_, event) in &history.events {
        if let PastEvent::Call(call) = event
            && turn.is_none_or(|turn| turn == call.turn)
        {
            sum.add(call.tokens.unwrap(), call.cost.unwrap());
        }
    }
    sum
}

pub(super) fn simulated(set: &[String], histories: &[(String, PastLoop)]) -> SimulationReport {
    let limits = changes::read(None, set).unwrap_or_else(|error| panic!("{set:?}: {error}"));
    replay::run(&limits, histories).unwrap_or_else(|error| panic!("{set:?}: {error}"))
}

/// What the report lets through.
pub(super) fn let_through(report: &SimulationReport) -> CallSum {
    CallSum {
        calls: report.made.calls - report.refused.calls,
        tokens: report.made.tokens - report.refused.tokens,
        cost: report.made.cost - report.refused.cost,
    }
}

/// The first stop that holds a call.
fn first_stop(report: &SimulationReport) -> Option<&SimulatedStop> {
    report.stops.iter().find(|stop| stop.refused.calls > 0)
}

fn time(line: &Value, field: &str) -> Option<Timestamp> {
    line[field].as_str().map(|text| text.parse().unwrap())
}

/// Waits until a loop is where its limit puts it.
async fn settled(run: &mut Run, name: &str, effect: Option<Effect>) -> Value {
    match effect {
        Some(Effect::Stops(_, state, reason, until)) => {
            let what = format!("{state} by {reason}");
            let is = |line: &Value| {
                let reasons = line["reasons"].as_array();
                line["state"] == state
                    && reasons.is_some_and(|reasons| reasons.contains(&json!(reason)))
                    && (until == Until::Raised || line["resumesAt"].is_string())
            };
            if until.is_short() {
                // It may be over by now, since others were waited for.
                run.until_once(name, &what, is).await
            } else {
                run.until(name, &what, is).await
            }
        }
        Some(Effect::EndsTurn(_)) | None => run.until(name, "at its end", |line| line["outcome"].is_string()).await,
    }
}

/// The reason of the pause that a limit of the simulation leads to.
fn reason_of(limit: &str) -> &str {
    match limit {
        "guardrails.total.tokens" => "TotalTokens",
        "guardrails.total.costUSD" => "TotalCost",
        "guardrails.tokensPerHour" => "TokensPerHour",
        "guardrails.maxConsecutiveTurns" => "MaxConsecutiveTurns",
        "guardrails.maxConsecutiveToolFailures" => "ConsecutiveToolFailures",
        "guardrails.activeHours" => "OutsideActiveHours",
        "guardrails.rateLimits" => "RateWindow",
        "guardrails.actionsPerMinute" => "ActionsPerMinute",
        other if other.starts_with("AgentBudget ") => "BudgetExhausted",
        other => other,
    }
}

/// Whether a message has the name of a field, if not as a whole, at the end where it is cut.
fn names_field(message: &str, field: &str) -> bool {
    let least = field.find('.').unwrap();
    // Long numbers leave no room for the name; the part of the spec and the unit are named before them.
    let unit = match &field[least + 1..] {
        "inputTokens" => "input tokens left",
        "outputTokens" => "output tokens left",
        _ => " left",
    };
    let names_part = |cut: &str| cut.contains(&field[..least]) && cut.contains(unit) && cut.contains(" raise");
    let ends = |cut: &str| names_part(cut) || (least..field.len()).any(|end| cut.ends_with(&field[..end]));
    message.contains(field) || message.strip_suffix('…').is_some_and(ends)
}

/// What a loop did until its pause was to end.
fn before(history: &PastLoop, end: Option<Timestamp>) -> PastLoop {
    let mut history = history.clone();
    history.events.retain(|(at, _)| end.is_none_or(|end| *at < end));
    history
}

/// When a loop first used what a window counts: an action in the script that acts, otherwise a call.
fn first_use(history: &PastLoop, script: Script) -> Timestamp {
    let counts = |event: &PastEvent| match script {
        Script::Acts => matches!(event, PastEvent::Action { .. }),
        Script::Plain | Script::Fails | Script::Goal => matches!(event, PastEvent::Call(_)),
    };
    let first = history.events.iter().find(|(_, event)| counts(event));
    first.unwrap().0
}

/// The most by which two pauses may differ: by a piece of the window, and because one loop makes its first calls more slowly
/// than another. Far less than half of the window, so that a wrong one is noticed.
fn most_apart(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds / 60 + (seconds / 4).min(60))
}

/// Compares until when a stop is simulated, and until when the loop really pauses.
fn compare_ends(
    (row, until): (&Comparison, Until),
    (stop, base): (&SimulatedStop, &PastLoop),
    (resumes, really): (Option<Timestamp>, &PastLoop),
) {
    let name = row.setting;
    // Neither loop started with the other: each pause is measured from the event in its own history that it depends on.
    let (simulated_from, from, seconds) = match until {
        Until::Raised => {
            assert_eq!((stop.until, resumes), (None, None), "{name}");
            return;
        }
        Until::Exactly => {
            assert_eq!(stop.until, resumes, "{name}");
            return;
        }
        Until::Leaves(seconds) => (first_use(base, row.script), first_use(really, row.script), seconds),
        Until::Rests(seconds) => (stop.at, really.events.last().unwrap().0, seconds),
    };
    let simulated = stop.until.unwrap().duration_since(simulated_from);
    let took = resumes.unwrap().duration_since(from);
    assert!(
        (simulated - took).abs() <= most_apart(seconds),
        "{name}: {simulated:?}, really {took:?}"
    );
}

fn compare(row: &Comparison, base: &PastLoop, line: &Value, really: &PastLoop) {
    let name = row.setting;
    let histories = [(row.script.name().to_owned(), base.clone())];
    let report = simulated(&row.trips, &histories);
    let stop = first_stop(&report).unwrap_or_else(|| panic!("{name}: nothing is refused: {report:?}"));
    // The reason: the message of the loop names the field that the simulation names.
    let field = stop.limit.trim_start_matches("AgentBudget ");
    match row.effect {
        Effect::EndsTurn(call) => {
            let made = sum(really, Some(1)).calls;
            assert_eq!(
                (stop.number, stop.ends_turn_only),
                (Some(call.unsigned_abs()), true),
                "{name}"
            );
            assert_eq!(
                (made + 1, field),
                (call.unsigned_abs(), "guardrails.maxCallsPerTurn"),
                "{name}"
            );
        }
        Effect::Stops(call, _, reason, until) => {
            let resumes = time(line, "resumesAt");
            let really = before(really, resumes);
            let made = sum(&really, None);
            assert_eq!(
                (stop.number, made.calls + 1),
                (Some(call.unsigned_abs()), call.unsigned_abs()),
                "{name}"
            );
            assert_eq!(let_through(&report), made, "{name}");
            if reason != "BudgetAsk" {
                assert_eq!(reason_of(&stop.limit), reason, "{name}");
                // With a time, the time is shown instead.
                let named = line["message"]
                    .as_str()
                    .is_none_or(|message| names_field(message, field));
                assert!(named, "{name}: {field} is not in: {line}");
            }
            compare_ends((row, until), (stop, base), (resumes, &really));
        }
    }
    let report = simulated(&row.passes, &histories);
    assert_eq!(
        (report.stops.len(), report.refused.calls),
        (0, 0),
        "{name} just passes: {report:?}"
    );
}

/// Two Agents that share a budget with `onExhausted: Stop`, and the state in which both end.
fn pairs() -> [(&'static str, Vec<String>); 2] {
    [
        (
            "share",
            words(&["limits.calls=1000", "perAgent.calls=8", "onExhausted=Stop"]),
        ),
        ("all", words(&["limits.calls=12", "onExhausted=Stop"])),
    ]
}

fn members(name: &str) -> [String; 2] {
    ["one", "two"].map(|member| format!("{name}-{member}"))
}

/// Both Agents, and the budget of the first.
fn limited_pair(name: &str, set: &[String]) -> Vec<Value> {
    let [one, two] = members(name);
    let mut objects = limited(&one, Script::Plain, set, 0);
    let mut second = limited(&two, Script::Plain, &[], 0);
    second[0]["spec"]["budgetRefs"] = json!([{"name": one}]);
    objects.append(&mut second);
    objects
}

async fn settled_pairs(run: &mut Run) -> Vec<Value> {
    let mut states = Vec::new();
    for (name, _) in pairs() {
        let state = if name == "share" { "Paused" } else { "Stopped" };
        for member in members(name) {
            let stops = Effect::Stops(0, state, "BudgetExhausted", Until::Raised);
            states.push(settled(run, &member, Some(stops)).await["state"].clone());
        }
    }
    states
}

/// An exhausted share stops its Agent only; an exhausted budget stops both, wherever they are.
fn compare_pairs(harness: &LocalHarness, states: &[Value]) {
    assert_eq!(states, ["Paused", "Paused", "Stopped", "Stopped"]);
    let base = history(harness, Script::Plain.name());
    for (name, set) in pairs() {
        let histories = members(name).map(|member| (member, base.clone()));
        let report = simulated(&set, &histories);
        let calls = |member: &String| sum(&history(harness, member), None).calls;
        let really = members(name).iter().map(calls).sum::<u64>();
        assert_eq!(let_through(&report).calls, really, "{name}: {report:?}");
        let stopped: BTreeSet<&str> = report.stops.iter().map(|stop| stop.agent.as_str()).collect();
        assert_eq!(stopped.len(), 2, "{name}: {report:?}");
        assert!(
            report.stops.iter().all(|stop| stop.until.is_none()),
            "{name}: {report:?}"
        );
    }
}

/// What must have a comparison: each setting, with each value of those that are one of a few.
fn required() -> BTreeSet<String> {
    let values = |setting: &str| match setting {
        "guardrails.rateLimits" => vec!["LLMCalls", "LLMTokens", "Actions"],
        "window.calendar.period" => vec!["Daily", "Weekly", "Monthly"],
        "onExhausted" => vec!["Pause", "Ask", "Stop"],
        _ => Vec::new(),
    };
    let each = settings::SETTINGS.iter().flat_map(|setting| {
        let values = values(setting);
        if values.is_empty() {
            vec![(*setting).to_owned()]
        } else {
            values.iter().map(|value| format!("{setting} {value}")).collect()
        }
    });
    each.collect()
}

/// The Agent that trips in the comparison at this place. Its name is short, since messages that contain it are cut.
fn tripping(place: usize) -> String {
    format!("trips-{place}")
}

/// Starts the loops of comparisons, those of their scripts without limits, and others. Returns the run, and for each
/// comparison the line that tells of its stop.
async fn stopped(
    harness: &mut LocalHarness,
    rows: &[&Comparison],
    (others, port): (Vec<Value>, u16),
) -> (Run, Vec<Value>) {
    let mut objects = others;
    objects.extend(Script::ALL.map(|kind| script(kind.name(), &kind.turns())));
    let is_used = |kind: &Script| rows.iter().any(|row| row.script == *kind);
    let scripts: Vec<Script> = Script::ALL.into_iter().filter(is_used).collect();
    for kind in &scripts {
        objects.extend(limited(kind.name(), *kind, &[], port));
    }
    for (place, row) in rows.iter().enumerate() {
        objects.extend(limited(&tripping(place), row.script, &row.trips, port));
    }
    harness.write("all.yaml", &objects);
    let mut run = harness.run(&[]);
    for kind in scripts {
        settled(&mut run, kind.name(), None).await;
    }
    let mut lines = Vec::new();
    for (place, row) in rows.iter().enumerate() {
        lines.push(settled(&mut run, &tripping(place), Some(row.effect)).await);
    }
    (run, lines)
}

fn compare_all(harness: &LocalHarness, rows: &[&Comparison], lines: &[Value]) {
    for (place, (row, line)) in rows.iter().zip(lines).enumerate() {
        let base = history(harness, row.script.name());
        compare(row, &base, line, &history(harness, &tripping(place)));
    }
}

#[tokio::test]
async fn each_setting_does_to_a_real_loop_what_its_simulation_says() {
    let now = Timestamp::now();
    let rows: Vec<Comparison> = of_budgets()
        .into_iter()
        .chain(of_windows(now))
        .chain(of_guardrails(now))
        .chain([of_goals()])
        .collect();
    let compared: BTreeSet<String> = rows.iter().map(|row| row.setting.to_owned()).collect();
    assert_eq!(required(), compared, "each setting has a comparison");
    let (short, long): (Vec<&Comparison>, Vec<&Comparison>) = rows.iter().partition(|row| row.is_short());

    let (mut brief, port) = (LocalHarness::new(), free_port());
    let _tools = tool_server(&brief, port).await;
    let (mut run, lines) = stopped(&mut brief, &short, (Vec::new(), port)).await;
    run.end().await;
    compare_all(&brief, &short, &lines);

    let mut harness = LocalHarness::new();
    let mut others: Vec<Value> = pairs().iter().flat_map(|(name, set)| limited_pair(name, set)).collect();
    for kind in Script::ALL {
        others.extend(passing(&rows, kind, port));
    }
    let (mut run, lines) = stopped(&mut harness, &long, (others, port)).await;
    for kind in Script::ALL {
        settled(&mut run, &format!("passes-{}", kind.name()), None).await;
    }
    let pairs = settled_pairs(&mut run).await;
    run.end().await;
    compare_all(&harness, &long, &lines);
    compare_pairs(&harness, &pairs);
    for kind in Script::ALL {
        let base = sum(&history(&brief, kind.name()), None);
        let passed = sum(&history(&harness, &format!("passes-{}", kind.name())), None);
        assert_eq!((base.calls, passed), (kind.calls(), base), "{}", kind.name());
    }
}
