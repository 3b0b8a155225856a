//! The corpus of loops and of work (`tests/fixtures/loops`): every file is played through the engine by a model that
//! ignores its notes. The figures are those of `docs/concepts/loop-detection.md`.

use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::work::tool;
use super::*;

/// One file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Case {
    name: String,
    kind: Kind,
    why: String,
    /// How often the steps are played.
    rounds: usize,
    /// One answer of the model for each.
    steps: Vec<Script>,
    #[serde(default)]
    words: Vec<String>,
    #[serde(default)]
    exempt_tools: Vec<String>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Loop,
    Work,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Script {
    #[serde(default)]
    calls: Vec<Wanted>,
    say: Option<String>,
    r#yield: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    tool: String,
    arguments: Value,
    result: Option<String>,
    error: Option<String>,
    down: Option<String>,
}

/// When each thing first happened, in tool calls and turns without one.
#[derive(Debug, Default)]
struct Played {
    nudged: Option<(u32, String)>,
    denied: Option<u32>,
    paused: Option<u32>,
    failed: Option<u32>,
}

fn offered() -> Vec<ToolSpec> {
    let reads = [
        "files__read",
        "files__list",
        "files__search",
        "files__tail",
        "jobs__status",
        "jobs__wait",
        "web__get",
        "db__query",
        "mail__check",
    ];
    let writes = ["files__write", "files__edit", "mail__send", "shell__run"];
    let reads = reads.into_iter().map(|name| tool(name, ToolEffect::Read));
    let writes = writes.into_iter().map(|name| tool(name, ToolEffect::Write));
    let open = |spec: ToolSpec| ToolSpec {
        parameters: json!({"type": "object", "properties": {"path": {"type": "string"}}}),
        ..spec
    };
    reads.chain(writes).map(open).collect()
}

struct Player<'a> {
    case: &'a Case,
    driver: Driver,
    count: u32,
    played: Played,
}

impl<'a> Player<'a> {
    fn new(case: &'a Case) -> Self {
        let settings = EngineSettings {
            max_consecutive_turns: 10_000,
            idle_timeout: SignedDuration::from_hours(10_000),
            actions_per_minute: 600,
            loop_detection: LoopDetection {
                mode: DetectionMode::Enforce,
                exempt_tools: case.exempt_tools.clone(),
            },
            ..settings()
        };
        let mut driver = Driver::fresh(settings);
        driver.offer(offered());
        driver.start(1);
        Self {
            case,
            driver,
            count: 0,
            played: Played::default(),
        }
    }

    fn filled(&self, round: usize, text: &str) -> String {
        let words = &self.case.words;
        let word = words.get(round % words.len().max(1)).map_or("", String::as_str);
        text.replace("{i}", &round.to_string())
            .replace("{n}", &(1000 + self.count * 37).to_string())
            .replace("{w}", word)
            .replace("{m}", &format!("{:02}", round % 60))
            .replace("{h}", &format!("{round:04x}"))
    }

    fn answer(&self, round: usize, step: &Script) -> ModelAnswer {
        let call = |id: String, name: &str, arguments: &Value| ToolCall {
            id,
            name: name.into(),
            arguments: self.filled(round, &arguments.to_string()),
        };
        let calls = step.calls.iter().enumerate();
        let mut tool_calls: Vec<ToolCall> = calls
            .map(|(place, wanted)| call(place.to_string(), &wanted.tool, &wanted.arguments))
            .collect();
        tool_calls.extend(step.r#yield.iter().map(|pace| call("y".into(), "yield", pace)));
        ModelAnswer {
            text: step.say.as_ref().map(|text| self.filled(round, text)),
            finish: if tool_calls.is_empty() {
                FinishReason::Stop
            } else {
                FinishReason::ToolCalls
            },
            tool_calls,
            tokens: Some(1),
            ..ModelAnswer::default()
        }
    }

    fn step(&mut self, round: usize, step: &Script) {
        while self.driver.in_flight.is_none() && !self.driver.stopped {
            self.driver.next_timer();
        }
        if self.driver.stopped {
            return;
        }
        let answer = self.answer(round, step);
        self.count += u32::try_from(step.calls.len().max(1)).unwrap();
        self.driver.answer(answer);
        while let Some((id, run)) = self.driver.running.first_key_value() {
            let (run_id, place) = (*id, usize::try_from(id.index).unwrap() - 1);
            let wanted = &step.calls[place];
            assert_eq!(run.name, wanted.tool);
            let fill = |text: &Option<String>| text.as_ref().map(|text| self.filled(round, text));
            let outcome = match (fill(&wanted.result), fill(&wanted.error), fill(&wanted.down)) {
                (Some(text), None, None) => ToolOutcome::Done { text },
                (None, Some(text), None) => ToolOutcome::Failed { text },
                (None, None, Some(message)) => ToolOutcome::Unavailable { message },
                _ => panic!("{}: one of result, error and down", self.case.name),
            };
            self.driver.feed(EngineInput::ToolFinished {
                run: run_id,
                outcome,
                artifacts: ResultArtifacts::default(),
            });
        }
        self.note();
    }

    fn note(&mut self) {
        let (count, played) = (self.count, &mut self.played);
        for note in self.driver.notes(RecordKind::LoopDetected) {
            let (sign, step) = note.split_once(": ").unwrap();
            match step {
                "Nudged" => {
                    played.nudged.get_or_insert((count, sign.to_owned()));
                }
                "Paused" => {
                    played.paused.get_or_insert(count);
                }
                "Failed" => {
                    played.failed.get_or_insert(count);
                }
                _ => assert_eq!(step, "Denied"),
            }
        }
        if self.driver.notes(RecordKind::ToolDenied).contains(&"Repeated") {
            played.denied.get_or_insert(count);
        }
    }
}

fn play(case: &Case) -> Played {
    let mut player = Player::new(case);
    for round in 0..case.rounds {
        for step in &case.steps {
            player.step(round, step);
        }
    }
    player.played
}

fn corpus() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/loops");
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let text = std::fs::read_to_string(path).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    paths.iter().map(read).collect()
}

fn table(rows: &[(&Case, Played)]) -> String {
    let mut table =
        String::from("| loop | sign | warned at | denied at | paused at | ended at |\n|---|---|---|---|---|---|\n");
    for (case, played) in rows {
        let at = |moment: Option<u32>| moment.map_or("-".to_owned(), |moment| moment.to_string());
        let (told, sign) = played.nudged.clone().unwrap_or_default();
        let _ = writeln!(
            table,
            "| {} | {sign} | {told} | {} | {} | {} |",
            case.why,
            at(played.denied),
            at(played.paused),
            at(played.failed)
        );
    }
    table
}

#[test]
fn the_corpus_yields_the_published_detection_figures_without_false_alarms() {
    let corpus = corpus();
    let played = |kind| -> Vec<(&Case, Played)> {
        let of_kind = corpus.iter().filter(|case| case.kind == kind);
        of_kind.map(|case| (case, play(case))).collect()
    };
    let (loops, work) = (played(Kind::Loop), played(Kind::Work));
    assert!(loops.len() >= 15 && work.len() >= 15);
    for (case, played) in &loops {
        assert!(
            played.nudged.is_some() && played.paused.is_some(),
            "{}: {played:?}",
            case.name
        );
    }
    for (case, played) in &work {
        assert!(played.nudged.is_none(), "{}: {played:?}", case.name);
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/concepts/loop-detection.md");
    let page = std::fs::read_to_string(page).unwrap();
    let figures = format!(
        "Detected: {} of {}. Work taken for a loop: 0 of {}.",
        loops.len(),
        loops.len(),
        work.len()
    );
    let table = table(&loops);
    assert!(
        page.contains(&figures) && page.contains(&table),
        "publish:\n{figures}\n\n{table}"
    );
}
