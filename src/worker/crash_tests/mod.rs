//! Crash tests: a worker is killed at any moment, and the next one continues from the journal as if nothing had
//! happened.
//!
//! A run consists of a script (what the model, the tools and users do), an environment (everything that outlives a worker, in
//! virtual time) and consecutive workers on one real journal. Each of them keeps the order of the real worker: commit, then
//! act. Runs with kills are compared with the undisturbed run.

mod environment;
mod files;
mod folder;
mod goal;
mod history;
mod modes;
mod random;
mod requested;
mod schedules;
mod scored;
mod script;
mod stop;
mod tasks;
mod watched;
mod watched_files;
mod week;
mod worker_process;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use rusqlite::Connection;

use crate::engine::machine::LoopView;
use crate::engine::message::Message;
use crate::worker::journal::{Journal, JournalError, JournalOwner, RestoredJournal};
use environment::{SimulatedEnvironment, seconds};
use files::Files;
use history::History;
use script::Script;
use worker_process::{KillPoint, LifeEnd, LifeObserver};

/// The extent of a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KillScope {
    Worker,
    /// The worker, which restarts after this many seconds.
    Downtime(i64),
    /// The worker and the gateway, with the calls in flight.
    Both,
}

/// What a run leaves behind.
#[derive(Clone, Debug)]
struct RunResult {
    /// The final state of the loop; `None` if the run has not reached its end.
    view: Option<LoopView>,
    now: Timestamp,
    /// All messages except those of summaries: turn, whether it is in the live transcript, and the message.
    messages: Vec<(i64, bool, Message)>,
    /// Lines of the journal: kind, run, and outcome.
    lines: Vec<(String, Option<String>, Option<String>)>,
    billed: BTreeSet<crate::engine::CallId>,
    /// How often each request for a score was paid for.
    scores: BTreeMap<String, usize>,
    /// Calls for summaries that were paid for, and the turns whose summary was usable.
    summed_up: BTreeSet<crate::engine::CallId>,
    /// All calls for summaries, by turn and number.
    summary_calls: BTreeSet<(i64, u32)>,
    summaries: Vec<i64>,
    /// Turns that showed each notification, by its id, and turns that were committed.
    shown: BTreeMap<String, BTreeSet<i64>>,
    committed: BTreeSet<i64>,
    history: History,
    heartbeats: BTreeSet<i64>,
    /// Files that Sensors have reported, with their hashes.
    told_files: Vec<(String, Option<String>)>,
    /// Number of events that Sensors have counted.
    counted: i64,
    /// Tasks in the order of their ends, then those that have not ended: id, state and response.
    tasks: Vec<(String, String, Option<String>)>,
}

impl RunResult {
    /// The id of a tool call with the number of its model call in the script, which does not count summaries.
    fn scripted_id(&self, id: &str) -> String {
        let number = |digits: &str| u32::from_str_radix(digits, 36).expect("an id of a tool call");
        let (turn, call) = (i64::from(number(&id[..5])), number(&id[5..7]));
        let before = self.summary_calls.range((turn, 0)..(turn, call)).count();
        let call = call - u32::try_from(before).expect("a small number");
        format!("t{turn}c{call}-{}", &id[7..])
    }

    /// A message with such ids.
    fn scripted(&self, message: &Message) -> Message {
        let mut message = message.clone();
        match &mut message {
            Message::Assistant { tool_calls, .. } => {
                for call in tool_calls {
                    call.id = self.scripted_id(&call.id);
                }
            }
            Message::Tool { id, .. } => *id = self.scripted_id(id),
            Message::System { .. } | Message::User { .. } => {}
        }
        message
    }
}

/// Opens the journal of the previous life. Other tests of this process start programs, which share its locks for a moment.
fn reopened(dir: &Path, owner: &JournalOwner) -> (Journal, RestoredJournal) {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        match Journal::open(dir, owner) {
            Err(JournalError::Locked { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            opened => return opened.expect("a journal that opens"),
        }
    }
}

/// A watcher that never kills.
struct NoKills;

impl LifeObserver for NoKills {
    fn lives(&mut self, _: KillPoint, _: &SimulatedEnvironment, _: &Path) -> bool {
        true
    }
}

/// Runs lives on these files until the loop has ended or the watcher has seen enough. A watcher that kills provides the
/// files for the next life.
fn run(
    mut environment: SimulatedEnvironment,
    files: &Files,
    watcher: &mut dyn LifeObserver,
    next: &mut dyn FnMut(&mut SimulatedEnvironment) -> Files,
) -> RunResult {
    let mut dir = files.volume();
    loop {
        let view = match worker_process::live(&mut environment, dir.path(), watcher) {
            LifeEnd::Over(view) => Some(*view),
            LifeEnd::Seen => None,
            LifeEnd::Replaced => continue,
            LifeEnd::Killed => {
                dir = next(&mut environment).volume();
                continue;
            }
        };
        return left(view, &environment, dir.path());
    }
}

fn undisturbed(script: &Script, watcher: &mut dyn LifeObserver) -> RunResult {
    run(
        SimulatedEnvironment::new(script.clone()),
        &Files::default(),
        watcher,
        &mut |_| panic!("nobody kills"),
    )
}

fn left(view: Option<LoopView>, environment: &SimulatedEnvironment, dir: &Path) -> RunResult {
    let connection = Connection::open(dir.join("journal.sqlite")).expect("a journal");
    let mut select = connection
        .prepare("SELECT turn, live, json FROM messages ORDER BY id")
        .expect("a table");
    let messages = select
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get::<_, String>(2)?)))
        .and_then(Iterator::collect::<rusqlite::Result<Vec<_>>>)
        .expect("rows");
    let mut select = connection
        .prepare("SELECT kind, run, iif(kind = 'ToolDenied', note, outcome) FROM journal ORDER BY seq")
        .expect("a table");
    let lines = select
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .and_then(Iterator::collect)
        .expect("rows");
    let committed = connection
        .prepare("SELECT turn FROM journal WHERE kind = 'TurnCompleted'")
        .and_then(|mut select| select.query_map([], |row| row.get(0))?.collect())
        .expect("rows");
    let messages = messages
        .into_iter()
        .map(|(turn, live, json)| (turn, live, serde_json::from_str(&json).expect("a message")));
    let (messages, summaries) = apart(messages.collect());
    let billed = |id: &&crate::engine::CallId| !environment.summaries.contains(&(id.turn, id.call));
    let written: i64 = connection
        .query_row("SELECT max(seq) FROM journal", [], |row| row.get(0))
        .expect("a row");
    assert_eq!(environment.told, written, "each line was told");
    let (told_files, counted) = of_sensors(&connection);
    RunResult {
        view,
        now: environment.now,
        messages,
        lines,
        billed: environment.billed.iter().filter(billed).copied().collect(),
        scores: environment
            .paid_scores()
            .into_iter()
            .map(|(about, paid)| (about.to_owned(), paid))
            .collect(),
        summed_up: environment.billed.iter().filter(|id| !billed(id)).copied().collect(),
        summary_calls: environment.summaries.clone(),
        summaries,
        shown: environment.shown.clone(),
        committed,
        history: History::of(&connection),
        heartbeats: environment.heartbeats.clone(),
        told_files,
        counted,
        tasks: tasks(&connection),
    }
}

fn tasks(connection: &Connection) -> Vec<(String, String, Option<String>)> {
    connection
        .prepare("SELECT id, state, response FROM tasks ORDER BY state <> 'Ended', state = 'Waiting', seq")
        .and_then(|mut select| {
            let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
            rows.collect()
        })
        .expect("rows")
}

/// The records of Sensors: their files, and their number of events.
fn of_sensors(connection: &Connection) -> (Vec<(String, Option<String>)>, i64) {
    let files = connection
        .prepare("SELECT path, hash FROM watched_files ORDER BY path")
        .and_then(|mut select| select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect())
        .expect("rows");
    let events = "SELECT coalesce(sum(json_extract(memory, '$.rules.totals.events')), 0) FROM deliveries";
    let counted = connection.query_row(events, [], |row| row.get(0)).expect("a row");
    (files, counted)
}

/// The conversation, and the turns in which it was summarized: each time a question and its answer, which are not kept.
fn apart(messages: Vec<(i64, bool, Message)>) -> (Vec<(i64, bool, Message)>, Vec<i64>) {
    let mut conversation = Vec::new();
    let mut summaries = Vec::new();
    let mut all = messages.into_iter();
    while let Some(message) = all.next() {
        match &message {
            (turn, live, Message::User { text }) if text.contains("Sum it up for yourself") => {
                let answer = all.next().expect("an answer");
                assert!(!live && !answer.1 && matches!(answer.2, Message::Assistant { .. }));
                summaries.push(*turn);
            }
            // What a turn was shown is kept after it; a downtime changes what a turn is shown.
            (_, _, Message::User { text }) if text.contains("the notifications that the turn before this message") => {}
            _ => conversation.push(message),
        }
    }
    (conversation, summaries)
}

fn die(death: KillScope, environment: &mut SimulatedEnvironment) {
    match death {
        KillScope::Worker => {}
        KillScope::Downtime(time) => {
            let back = environment.now + seconds(time);
            environment.pass(back);
        }
        KillScope::Both => environment.lose_gateway(),
    }
}

/// Asserts that each task that has ended did so as in the undisturbed run.
fn compare_ended_tasks(plain: &RunResult, found: &RunResult) {
    for (found, expected) in found.tasks.iter().zip(&plain.tasks) {
        assert!(
            found == expected || found.1 != "Ended",
            "{found:?} instead of {expected:?}"
        );
    }
}

/// Asserts the invariants of a run with `deaths`, compared with the undisturbed run.
fn compare(plain: &RunResult, found: &RunResult, deaths: &[KillScope]) {
    let slept = |death: &KillScope| matches!(death, KillScope::Downtime(_));
    // A call with side effects that has expired is not run, and the run diverges from there.
    let expired = |run: &RunResult| lines(run, "ToolDenied", Some("Outdated")).len();
    if expired(found) != expired(plain) {
        compare_notifications(plain, found);
        return;
    }
    let cut = compare_messages(plain, found, deaths.iter().any(slept));
    plain.history.compare(&found.history, found.view.is_some(), cut);
    let unknown = lines(found, "ToolOutcome", Some("Unknown")).len();
    let told = texts(found).filter(|text| text.contains("outcome unknown")).count();
    assert!(told <= unknown, "an unknown outcome is journalled: {told} of {unknown}");
    compare_notifications(plain, found);
    let (Some(view), Some(expected)) = (&found.view, &plain.view) else {
        return;
    };
    let totals = |view: &LoopView| {
        (
            view.outcome,
            view.turn,
            view.counts.turns,
            view.counts.tool_calls,
            view.counts.actions,
            view.counts.denied_tool_calls,
        )
    };
    assert_eq!(totals(view), totals(expected));
    assert!(
        view.untrusted.is_some() || expected.untrusted.is_none(),
        "untrusted content was forgotten"
    );
    let answers = |run: &RunResult| lines(run, "CallAnswered", None).len() - run.summed_up.len();
    assert_eq!(
        (answers(found), found.billed.len()),
        (answers(plain), plain.billed.len())
    );
    // Each run is counted once, however often it was sent.
    let runs: BTreeSet<_> = lines(found, "ToolIntent", None).into_iter().collect();
    assert_eq!(i64::try_from(runs.len()), Ok(view.counts.tool_calls));
    // No deadline was lost or restarted.
    let down: i64 = deaths
        .iter()
        .map(|death| {
            if let KillScope::Downtime(time) = death {
                *time
            } else {
                0
            }
        })
        .sum();
    let slack = seconds(120 * i64::try_from(deaths.len()).expect("few"));
    let latest = plain.now + seconds(down) + slack;
    assert!(found.now <= latest, "{} instead of {}", found.now, plain.now);
    assert!(
        found.now >= plain.now - slack - longest_cut(),
        "{} instead of {}",
        found.now,
        plain.now
    );
}

/// Asserts that no notification is lost, and that none is shown in two committed turns. One may still wait at the end of the
/// undisturbed run: the turn that showed it was refused, and the script ends with the next one, which shows none.
fn compare_notifications(plain: &RunResult, found: &RunResult) {
    let committed = |run: &RunResult, id: &String| {
        let turns = run.shown.get(id);
        turns.map_or(0, |turns| turns.intersection(&run.committed).count())
    };
    for (id, turns) in &found.shown {
        let times = committed(found, id);
        assert!(times <= 1, "notification {id} was shown in {turns:?}");
        let is_done = times == 1 || committed(plain, id) == 0;
        assert!(is_done || found.view.is_none(), "notification {id} was lost: {turns:?}");
    }
    let ids = |run: &RunResult| run.shown.keys().cloned().collect::<Vec<_>>();
    assert!(found.view.is_none() || ids(found) == ids(plain));
}

/// The longest tool run of a script: a run that was cut has ended by then.
fn longest_cut() -> SignedDuration {
    seconds(600)
}

/// Asserts that two conversations are equal, except for times and results with unknown outcome. If the loop `slept`,
/// the causes of turns may also differ. Returns true if there are unknown results.
fn compare_messages(plain: &RunResult, found: &RunResult, slept: bool) -> bool {
    let complete = found.view.is_some();
    let is_cut = |message: &Message, expected: &Message| match (message, expected) {
        (Message::Tool { id, text, .. }, Message::Tool { id: same, .. }) => {
            found.scripted_id(id) == plain.scripted_id(same) && text.contains("outcome unknown") && message != expected
        }
        _ => false,
    };
    let both = || found.messages.iter().zip(&plain.messages);
    // Such a result has a different length, so the context may be full in another turn. The summary there takes a call, and
    // the later calls of that turn have other numbers than in the undisturbed run.
    let cut = both().any(|(found, plain)| is_cut(&found.2, &plain.2));
    for (place, ((turn, live, message), (plain_turn, plain_live, expected))) in both().enumerate() {
        assert_eq!(turn, plain_turn, "message {place}: {message:?} instead of {expected:?}");
        assert!(!complete || cut || live == plain_live, "message {place} of turn {turn}");
        match (message, expected) {
            (Message::User { .. }, Message::User { .. }) if slept || cut => {}
            _ if is_cut(message, expected) => {}
            _ if cut => assert_eq!(
                timeless(&found.scripted(message)),
                timeless(&plain.scripted(expected)),
                "message {place} of turn {turn}"
            ),
            _ => assert_eq!(timeless(message), timeless(expected), "message {place} of turn {turn}"),
        }
    }
    assert!(!complete || cut || found.summaries == plain.summaries);
    let (all, expected) = (found.messages.len(), plain.messages.len());
    assert!(all <= expected, "{all} messages instead of {expected}");
    assert!(
        !complete || all == expected,
        "{all} messages instead of {expected}: {:?}",
        found.messages
    );
    cut
}

fn lines(run: &RunResult, kind: &str, outcome: Option<&str>) -> Vec<Option<String>> {
    let wanted = |line: &&(String, Option<String>, Option<String>)| {
        line.0 == kind && (outcome.is_none() || line.2.as_deref() == outcome)
    };
    run.lines.iter().filter(wanted).map(|line| line.1.clone()).collect()
}

fn texts(run: &RunResult) -> impl Iterator<Item = &str> {
    run.messages.iter().filter_map(|(_, _, message)| match message {
        Message::Tool { text, .. } => Some(text.as_str()),
        Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => None,
    })
}

fn timeless(message: &Message) -> String {
    without_moments(&serde_json::to_string(message).expect("a message"))
}

/// Replaces each timestamp in a text by `<moment>`.
fn without_moments(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('T') {
        let is_moment = at >= 10
            && rest.is_char_boundary(at - 10)
            && rest[at - 10..at].parse::<jiff::civil::Date>().is_ok()
            && rest[at + 1..].starts_with(|c: char| c.is_ascii_digit());
        if is_moment {
            shown.push_str(&rest[..at - 10]);
            shown.push_str("<moment>");
            rest = rest[at + 1..].trim_start_matches(|c: char| c.is_ascii_digit() || ":.Z".contains(c));
        } else {
            shown.push_str(&rest[..=at]);
            rest = &rest[at + 1..];
        }
    }
    shown + rest
}

#[test]
fn moments_are_left_out_of_a_comparison_and_nothing_else_is() {
    let of = |text: &str| timeless(&Message::User { text: text.into() });
    let first = of("Turn 1, 2026-01-05T07:00:00Z: the loop starts (2026-01-05T07:00:00.5Z). To do: T1");
    let second = of("Turn 1, 2027-11-25T17:10:09Z: the loop starts (2026-01-06T07:00:00Z). To do: T1");
    assert_eq!(first, second);
    assert_ne!(
        first,
        of("Turn 2, 2027-11-25T17:10:09Z: the loop starts (2026-01-06T07:00:00Z). To do: T1")
    );
}
