//! Tool runs: their order, their results, and what a restart and a stop do to them.

use pretty_assertions::assert_eq;
use rstest::rstest;
use serde_json::json;

use super::*;
use crate::ToolLine;

/// Tools of every kind, and names of unknown tools.
pub(super) const NAMES: [&str; 8] = [
    "files__read",
    "files__list",
    "files__write",
    "mail__send",
    "db__put",
    "job__start",
    "nothing",
    "yield",
];

pub(super) fn tool(name: &str, effect: ToolEffect) -> ToolSpec {
    ToolSpec {
        name: name.into(),
        description: format!("does {name}"),
        parameters: json!({
            "type": "object",
            "properties": {"path": {"type": "string"}, "reasoning": {"type": "string"}},
            "additionalProperties": false,
        }),
        effect,
        idempotent: false,
        timeout: seconds(60),
        on_unknown: UnknownOutcomePolicy::TellModel,
        target: String::new(),
        needs_approval: false,
        approval_condition: None,
        needs_approval_after_untrusted: false,
        trusted: true,
        missing_grant: None,
        definition: None,
    }
}

pub(super) fn tools() -> Vec<ToolSpec> {
    vec![
        tool("files__read", ToolEffect::Read),
        tool("files__list", ToolEffect::Read),
        tool("files__write", ToolEffect::Write),
        tool("mail__send", ToolEffect::Destructive),
        ToolSpec {
            idempotent: true,
            ..tool("db__put", ToolEffect::Write)
        },
        ToolSpec {
            on_unknown: UnknownOutcomePolicy::Retry,
            ..tool("job__start", ToolEffect::Write)
        },
    ]
}

/// An answer that calls these tools, with ids `0`, `1` and so on.
pub(super) fn wants(names: &[&str]) -> ModelAnswer {
    let call = |(place, name): (usize, &&str)| ToolCall {
        id: place.to_string(),
        name: (*name).into(),
        arguments: "{}".into(),
    };
    ModelAnswer {
        text: Some("I had better look.".into()),
        tool_calls: names.iter().enumerate().map(call).collect(),
        finish: FinishReason::ToolCalls,
        ..ModelAnswer::default()
    }
}

impl Driver {
    pub(super) fn with_tools(settings: EngineSettings) -> Self {
        let mut driver = Self::fresh(settings);
        driver.offer(tools());
        driver.start(1);
        driver
    }

    /// The positions, from 1, of the calls whose tools run.
    pub(super) fn running(&self) -> Vec<u32> {
        self.running.keys().map(|run| run.index).collect()
    }

    pub(super) fn end(&mut self, index: u32, outcome: ToolOutcome) -> Vec<EngineEffect> {
        self.end_with(index, outcome, ResultArtifacts::default())
    }

    pub(super) fn end_stored(&mut self, index: u32, text: &str, artifacts: ResultArtifacts) -> Vec<EngineEffect> {
        self.end_with(index, ToolOutcome::Done { text: text.into() }, artifacts)
    }

    fn end_with(&mut self, index: u32, outcome: ToolOutcome, artifacts: ResultArtifacts) -> Vec<EngineEffect> {
        let run = *self.running.keys().find(|run| run.index == index).expect("such a run");
        self.feed(EngineInput::ToolFinished {
            run,
            outcome,
            artifacts,
        })
    }

    pub(super) fn done(&mut self, index: u32, text: &str) -> Vec<EngineEffect> {
        self.end(index, ToolOutcome::Done { text: text.into() })
    }

    /// Results in the transcript: the id of the call, and the text.
    /// Results of tools, each with the position of its call in the answer.
    pub(super) fn results(&self) -> Vec<(&str, &str)> {
        // An id is the turn, the call and the position: 5, 2 and 2 digits.
        let place = |id: &'_ str| {
            id.len()
                - id.get(7..)
                    .map_or("", |place| place.strip_prefix('0').unwrap_or(place))
                    .len()
        };
        let results = self.transcript.iter().filter_map(|message| match &**message {
            Message::Tool { id, text, .. } => Some((&id[place(id)..], text.as_str())),
            Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => None,
        });
        results.collect()
    }

    pub(super) fn lines(&self, kind: RecordKind) -> Vec<&ToolLine> {
        let of_kind = self.journal.iter().filter(|record| record.kind == kind);
        of_kind.filter_map(|record| record.tool.as_ref()).collect()
    }

    /// The outcomes in the journal records.
    pub(super) fn outcomes(&self) -> Vec<&str> {
        let lines = self.lines(RecordKind::ToolOutcome);
        lines
            .iter()
            .map(|line| line.outcome.as_ref().map_or("", AsRef::as_ref))
            .collect()
    }
}

pub(super) fn unknown() -> ToolOutcome {
    ToolOutcome::Unknown { message: "cut".into() }
}

fn unavailable() -> ToolOutcome {
    ToolOutcome::Unavailable { message: "down".into() }
}

#[test]
fn a_call_is_journalled_before_it_is_run_and_its_result_is_returned_to_the_model() {
    let mut driver = Driver::with_tools(settings());
    assert_eq!(driver.offered[..3], ["yield", "files__read", "files__list"]);
    let mut answer = wants(&["files__write"]);
    answer.tool_calls[0].arguments = r#"{"reasoning": "because", "path": "a"}"#.into();
    let effects = driver.answer(answer);
    let mut kinds = Vec::new();
    for effect in &effects {
        if let EngineEffect::Record(record) = effect {
            kinds.push(record.kind.to_string());
        }
        if let EngineEffect::RunTool(run, timeout) = effect {
            kinds.push(format!("{} {} for {} s", run.id, run.name, timeout.as_secs()));
        }
    }
    assert_eq!(kinds, ["CallAnswered", "ToolIntent", "t1c1r1 files__write for 60 s"]);
    let line = driver.lines(RecordKind::ToolIntent)[0].clone();
    let run = driver.sent[0].clone();
    assert_eq!(line.tool.as_deref(), Some("files__write"));
    assert_eq!((line.effect, line.outcome), (Some(ToolEffect::Write), None));
    assert_eq!(line.key.as_deref(), Some(run.idempotency_key.as_str()));
    assert_eq!((run.idempotency_key.len(), line.arguments.unwrap().len()), (32, 32));
    assert_eq!(run.arguments["path"], "a");
    driver.done(1, "written");
    assert_eq!(driver.results(), [("0", "written")]);
    assert_eq!(driver.outcomes(), ["Ok"]);
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    assert_eq!(
        (
            driver.engine.view().counts.tool_calls,
            driver.engine.view().counts.actions
        ),
        (1, 1)
    );
}

#[test]
fn every_result_carries_the_reasoning_of_its_call_or_of_its_answer_and_no_line_does() {
    let mut driver = Driver::with_tools(settings());
    let mut answer = wants(&["files__read", "files__read", "nothing"]);
    answer.tool_calls[0].arguments = r#"{"reasoning": "to know"}"#.into();
    driver.answer(answer);
    driver.done(1, "a");
    driver.done(2, "b");
    let reasons: Vec<&str> = driver
        .transcript
        .iter()
        .filter_map(|message| match &**message {
            Message::Tool { reasoning, .. } => reasoning.as_deref(),
            Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => None,
        })
        .collect();
    assert_eq!(reasons, ["to know", "I had better look.", "I had better look."]);
    for record in &driver.journal {
        let line = format!("{} {:?}", record.note, record.tool);
        assert!(!line.contains("to know") && !line.contains("had better"), "{line}");
    }
}

#[test]
fn read_only_runs_are_limited_to_four_and_results_are_joined_in_the_order_of_the_calls() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&[
        "files__read",
        "files__list",
        "nothing",
        "files__read",
        "files__read",
        "files__read",
    ]));
    assert_eq!(driver.running(), [1, 2, 4, 5]);
    driver.done(4, "fourth");
    assert_eq!(driver.running(), [1, 2, 5, 6]);
    driver.done(2, "second");
    assert_eq!(driver.results(), []);
    driver.done(1, "first");
    let ids = |driver: &Driver| {
        driver
            .results()
            .iter()
            .map(|(id, _)| (*id).to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(&driver), ["0", "1", "2", "3"]);
    driver.done(6, "sixth");
    assert_eq!(driver.in_flight, None);
    driver.done(5, "fifth");
    assert_eq!(ids(&driver), ["0", "1", "2", "3", "4", "5"]);
    assert_eq!((driver.results()[1].1, driver.results()[5].1), ("second", "sixth"));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    assert_eq!(
        (
            driver.engine.view().counts.tool_calls,
            driver.engine.view().counts.actions
        ),
        (5, 0)
    );
}

#[test]
fn tools_with_side_effects_run_alone_and_in_order() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&[
        "files__read",
        "files__write",
        "mail__send",
        "files__read",
        "files__list",
    ]));
    assert_eq!(driver.running(), [1]);
    driver.done(1, "a");
    assert_eq!(driver.running(), [2]);
    driver.done(2, "b");
    assert_eq!(driver.running(), [3]);
    driver.done(3, "c");
    assert_eq!(driver.running(), [4, 5]);
}

#[test]
fn a_yield_beside_tools_counts_once_they_are_done() {
    let mut driver = Driver::with_tools(settings());
    let mut answer = wants(&["yield", "files__write"]);
    answer.tool_calls[0].arguments = r#"{"sleep": 30}"#.into();
    driver.answer(answer);
    assert_eq!((driver.state(), driver.results().len()), (LoopState::Running, 0));
    driver.pass(seconds(100));
    driver.done(2, "written");
    assert_eq!(
        driver.results(),
        [
            ("0", "Sleeping for 30 s once the other calls of this answer are done."),
            ("1", "written")
        ]
    );
    assert_eq!(driver.state(), LoopState::Sleeping);
    assert_eq!(driver.engine.view().resumes_at, Some(driver.now + seconds(30)));
}

#[rstest]
#[case(r#"{"sleep": 3600}"#)]
#[case(r#"{"mode": "shutdown"}"#)]
fn a_yield_beside_a_failed_call_waits_until_the_model_has_received_the_result(#[case] pace: &str) {
    let failed = || ToolOutcome::Failed { text: "no".into() };
    for (beside, outcome) in [
        ("files__read", failed()),
        ("mail__send", unknown()),
        ("mail__send", unavailable()),
        ("nothing", failed()),
    ] {
        for first in [true, false] {
            let mut driver = Driver::with_tools(settings());
            let names = if first { ["yield", beside] } else { [beside, "yield"] };
            let mut answer = wants(&names);
            answer.tool_calls[usize::from(!first)].arguments = pace.into();
            driver.answer(answer);
            if beside != "nothing" {
                driver.restart(1);
                if !driver.running().is_empty() {
                    driver.end(if first { 2 } else { 1 }, outcome.clone());
                }
            }
            assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1", "{names:?}");
            let results = driver.results();
            assert!(results[usize::from(!first)].1.starts_with("Not yet"), "{results:?}");
            driver.answer(calls("yield", pace));
            assert_ne!(driver.state(), LoopState::Running, "the same alone counts");
        }
    }
}

#[test]
fn the_result_of_a_tool_that_failed_reads_as_an_error() {
    for (text, told) in [
        ("", "error: the tool failed without a message"),
        ("no such file", "error: no such file"),
        ("Error: no such file", "Error: no such file"),
    ] {
        let mut driver = Driver::with_tools(settings());
        driver.answer(wants(&["files__read"]));
        driver.end(1, ToolOutcome::Failed { text: text.into() });
        assert_eq!(driver.result(), told);
    }
}

#[rstest]
#[case("files__write", ToolOutcome::Done { text: "it is".into() }, "it is", "Ok")]
#[case("files__write", ToolOutcome::Done { text: " ".into() }, "[no text]", "Ok")]
#[case("files__write", ToolOutcome::Failed { text: "it is not".into() }, "it is not", "Error")]
#[case("files__write", unavailable(), "not run", "Unavailable")]
#[case("files__write", unknown(), "may or may not have happened: check first", "Unknown")]
#[case("db__put", unknown(), "may or may not have happened: check first", "Unknown")]
#[case("files__read", unknown(), "it changes nothing: call it again", "Unknown")]
fn the_outcome_of_a_run_is_reported_to_the_model(
    #[case] name: &str,
    #[case] outcome: ToolOutcome,
    #[case] text: &str,
    #[case] kind: &str,
) {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&[name]));
    driver.end(1, outcome);
    assert!(driver.result().contains(text), "{}", driver.result());
    assert_eq!(driver.outcomes(), [kind]);
    assert_eq!(driver.sent.len(), 1, "the engine repeats nothing on its own");
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
}

#[test]
fn a_result_is_cut_above_its_limit_between_characters_and_at_the_limit_it_is_not() {
    let mut driver = Driver::with_tools(EngineSettings {
        max_result_bytes: 10,
        ..settings()
    });
    driver.answer(wants(&["files__read", "files__read", "files__read"]));
    driver.done(1, "0123456789");
    driver.done(2, "0123456789a");
    driver.done(3, "012345678ää");
    let texts: Vec<&str> = driver.results().iter().map(|(_, text)| *text).collect();
    assert_eq!(
        texts,
        [
            "0123456789",
            "01234\n[left out: 1 of 11 bytes, in the middle]\n6789a",
            "01234\n[left out: 3 of 13 bytes, in the middle]\n8ää"
        ]
    );
}

#[test]
fn a_cut_result_names_the_artifact_that_has_all_of_it_and_a_whole_one_names_none() {
    let stored = |name: &str| ResultArtifacts {
        text: Some(name.into()),
        ..ResultArtifacts::default()
    };
    let mut driver = Driver::with_tools(EngineSettings {
        max_result_bytes: 10,
        ..settings()
    });
    driver.answer(wants(&["files__read", "files__read", "files__read"]));
    let asked: Vec<usize> = driver.running.values().map(|run| run.max_result_bytes).collect();
    assert_eq!(asked, [10, 10, 10], "the worker learns what is too long");
    // The second result waits for the first one, also across a restart.
    driver.end_stored(2, "0123456789a", stored("two.txt"));
    driver.restart(1);
    driver.end_stored(1, "0123456789", stored("one.txt"));
    driver.end_stored(3, "0123456789a", ResultArtifacts::default());
    let kept: Vec<&ResultArtifacts> = driver
        .transcript
        .iter()
        .filter_map(|message| artifacts(message))
        .collect();
    assert_eq!(
        kept,
        [
            &ResultArtifacts::default(),
            &stored("two.txt"),
            &ResultArtifacts::default()
        ]
    );
    let texts: Vec<&str> = driver.results().iter().map(|(_, text)| *text).collect();
    assert_eq!(
        texts,
        [
            "0123456789",
            "01234\n[left out: 1 of 11 bytes, in the middle; artifact two.txt has all 11, and the missing ones from offset \
             5]\n6789a",
            "01234\n[left out: 1 of 11 bytes, in the middle]\n6789a",
        ]
    );
}

/// What is stored of a result.
fn artifacts(message: &Message) -> Option<&ResultArtifacts> {
    match message {
        Message::Tool { artifacts, .. } => Some(artifacts),
        Message::System { .. } | Message::User { .. } | Message::Assistant { .. } => None,
    }
}

#[test]
fn a_message_without_artifacts_is_stored_as_in_earlier_journals() {
    let json = r#"{"role":"tool","id":"000010101","text":"seen"}"#;
    let message: Message = serde_json::from_str(json).unwrap();
    assert_eq!(artifacts(&message), Some(&ResultArtifacts::default()));
    assert_eq!(serde_json::to_string(&message).unwrap(), json);
}

#[test]
fn a_run_of_unknown_outcome_is_sent_three_times_under_the_retry_policy() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["job__start"]));
    driver.end(1, unknown());
    driver.end(1, unknown());
    assert_eq!((driver.running(), driver.sent.len()), (vec![1], 3));
    driver.end(1, unknown());
    assert_eq!((driver.running(), driver.sent.len()), (vec![], 3));
    assert!(driver.result().contains("may or may not have happened"));
    assert_eq!(driver.notes(RecordKind::ToolIntent), ["", "repeated", "repeated"]);
    assert_eq!(driver.engine.view().counts.actions, 1, "a repeat is not a new action");
}

/// The restart rule: the same run again where that does no harm, otherwise an unknown outcome.
#[rstest]
#[case("files__read", true)]
#[case("db__put", true)]
#[case("job__start", true)]
#[case("files__write", false)]
#[case("mail__send", false)]
fn a_run_that_a_crash_cut_is_repeated_with_the_same_key_or_its_outcome_is_unknown(
    #[case] name: &str,
    #[case] repeated: bool,
    #[values(1, 2)] epoch: i64,
) {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&[name, "files__list"]));
    driver.restart(epoch);
    if repeated {
        assert_eq!(driver.running().first(), Some(&1), "the key is compared on every send");
        driver.done(1, "back");
        assert_eq!(driver.results()[0], ("0", "back"));
    } else {
        assert_eq!(driver.running(), [2]);
        assert!(
            driver.results()[0]
                .1
                .contains("it was interrupted before its outcome was known")
        );
        assert_eq!(driver.outcomes()[0], "Unknown");
    }
    driver.done(2, "listed");
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    assert_eq!(driver.engine.view().counts.tool_calls, 2);
}

#[test]
fn a_repetition_without_a_server_still_reports_an_unknown_outcome() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["db__put"]));
    driver.restart(1);
    driver.end(1, unavailable());
    assert!(driver.result().contains("may or may not have happened"));
    driver.answer(wants(&["files__read"]));
    driver.restart(1);
    driver.end(1, unavailable());
    assert!(driver.result().contains("not run"));
}

#[test]
fn a_restart_under_a_pause_settles_what_was_cut_and_sends_nothing() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send", "db__put"]));
    for _ in 0..3 {
        driver.restart(1);
    }
    assert_eq!(driver.reasons(), [PauseReason::CrashLoop]);
    assert_eq!(driver.outcomes(), ["Unknown"]);
    assert_eq!(driver.running(), [0_u32; 0]);
    driver.next_timer();
    assert_eq!(driver.running(), [2]);
}

#[test]
fn the_end_of_a_run_that_another_process_sent_means_nothing() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send"]));
    let run = driver.sent[0].id;
    driver.restart(1);
    let late = EngineInput::ToolFinished {
        run,
        outcome: ToolOutcome::Done { text: "late".into() },
        artifacts: ResultArtifacts::default(),
    };
    assert_eq!(driver.feed(late), []);
}

#[rstest]
#[case(StopCause::Drain)]
#[case(StopCause::Suspend)]
fn a_stop_cancels_read_only_runs_at_once_and_awaits_the_rest_until_the_drain_ends(#[case] cause: StopCause) {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["files__read", "files__list"]));
    driver.feed(EngineInput::Stop { cause });
    assert!(driver.stopped);
    assert_eq!(driver.cut.len(), 2);
    driver.restart(2);
    assert_eq!(driver.running(), [1, 2]);
    driver.done(1, "a");
    driver.done(2, "b");

    driver.answer(wants(&["mail__send", "files__read"]));
    driver.feed(EngineInput::Stop { cause });
    assert_eq!((driver.stopped, driver.running()), (false, vec![1]));
    assert_eq!(driver.state(), LoopState::Stopping);
    driver.done(1, "sent");
    assert!(driver.stopped, "nothing further is begun");
    driver.restart(3);
    assert_eq!(driver.running(), [2]);
    driver.done(2, "c");

    driver.answer(wants(&["mail__send"]));
    driver.feed(EngineInput::Stop { cause });
    driver.feed(EngineInput::DrainEnded);
    assert!(driver.stopped);
    assert_eq!(driver.cut.len(), 3);
    driver.restart(4);
    assert_eq!(driver.outcomes().last(), Some(&"Unknown"));
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c4a1");
}

#[test]
fn a_fenced_loop_cuts_every_run_and_writes_nothing() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send"]));
    let lines = driver.journal.len();
    driver.feed(EngineInput::Stop {
        cause: StopCause::Fenced,
    });
    assert!(driver.stopped);
    assert_eq!((driver.cut.len(), driver.journal.len()), (1, lines));
}

#[test]
fn a_stopping_budget_cancels_read_only_runs_and_continues_where_it_was() {
    let mut driver = Driver::with_tools(settings());
    let budget = |revision, stop: Option<&str>| EngineInput::BudgetChanged {
        budget: BudgetState {
            revision,
            held: stop.is_some(),
            stop: stop.map(Into::into),
            tokens: None,
            ..BudgetState::default()
        },
    };
    driver.answer(wants(&["files__read", "mail__send", "mail__send"]));
    driver.feed(budget(1, Some("add to it")));
    assert_eq!((driver.state(), driver.cut.len()), (LoopState::Stopped, 1));
    driver.pass(seconds(200));
    assert_eq!(driver.running(), [0_u32; 0]);
    driver.feed(budget(2, None));
    assert_eq!(driver.running(), [1]);
    driver.done(1, "read");
    assert_eq!(driver.running(), [2]);
    driver.feed(budget(3, Some("add to it")));
    assert_eq!((driver.state(), driver.running()), (LoopState::Stopped, vec![2]));
    driver.done(2, "sent");
    assert_eq!(
        driver.running(),
        [0_u32; 0],
        "its outcome is kept, and nothing else begins"
    );
    assert_eq!(driver.results().len(), 2);
    driver.feed(budget(4, None));
    driver.done(3, "sent too");
    assert_eq!(driver.in_flight.unwrap().to_string(), "t1c2a1");
    driver.answer(says("well"));
    assert_eq!(driver.reasons(), []);
}

#[test]
fn without_the_link_read_only_runs_continue_and_actions_wait() {
    let mut driver = Driver::with_tools(settings());
    driver.feed(EngineInput::LinkSilent);
    driver.answer(wants(&["files__read", "files__write", "files__read"]));
    driver.done(1, "read");
    assert_eq!((driver.running(), driver.state()), (vec![], LoopState::Running));
    driver.pass(seconds(20));
    driver.feed(EngineInput::LinkLost);
    assert_eq!(driver.reasons(), [PauseReason::LinkLost]);
    driver.pass(seconds(100));
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.running(), [2]);
    driver.feed(EngineInput::LinkSilent);
    driver.done(2, "written");
    assert_eq!(driver.running(), [3], "a read-only run needs no link");
    driver.feed(EngineInput::LinkLost);
    driver.done(3, "read");
    assert_eq!(driver.in_flight, None);
}

#[test]
fn a_restart_without_the_link_repeats_only_read_only_runs() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["db__put"]));
    driver.feed(EngineInput::LinkSilent);
    driver.restart(1);
    assert_eq!(driver.running(), [0_u32; 0]);
    driver.feed(EngineInput::LinkBack);
    assert_eq!(driver.running(), [1]);
}

#[test]
fn a_turn_that_has_changed_something_stays_for_good_when_it_fails() {
    let mut driver = Driver::with_tools(settings());
    driver.answer(wants(&["mail__send"]));
    driver.done(1, "sent");
    for _ in 0..3 {
        driver.failed_turn();
        assert_eq!(driver.results(), [("0", "sent")]);
        driver.next_timer();
    }
    assert!(
        driver.observed().contains("its tool calls and their results stand"),
        "{}",
        driver.observed()
    );
    assert_eq!(driver.in_flight.unwrap().to_string(), "t4c1a1");
}

#[test]
fn results_of_a_turn_that_was_ended_by_its_calls_join_before_the_next_one() {
    let mut driver = Driver::with_tools(EngineSettings {
        max_calls_per_turn: 1,
        ..settings()
    });
    driver.answer(wants(&["files__read"]));
    driver.done(1, "read");
    assert_eq!(driver.engine.view().counts.turns, 1);
    assert_eq!(driver.results().len(), 1);
}
