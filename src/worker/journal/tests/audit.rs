//! Tests of the audit: a real engine decides about calls, and the view and the export say what it decided.

use jiff::SignedDuration;
use serde_json::{Value, json};
use strum::IntoEnumIterator;

use super::history::rows;
use super::*;
use crate::api::AgentSpec;
use crate::engine::machine::Engine;
use crate::engine::message::{FinishReason, ModelAnswer, ToolCall};
use crate::engine::settings::EngineSettings;
use crate::engine::tool::{
    DeclaredDefinition, DefinitionParts, ResultArtifacts, ToolOutcome, ToolSpec, UnknownOutcomePolicy,
};
use crate::engine::{EngineEffect, EngineGateAnswer, EngineInput, GateCause, KnownTotals};
use crate::otlp::TurnName;
use crate::support::hash::hex;
use crate::worker::journaled_engine::JournaledEngine;

/// Stands in arguments, results, texts and names that the model makes up.
const CANARY: &str = "canary-5e1f";

fn settings() -> EngineSettings {
    let spec = json!({"model": {"api": "OpenAIChat", "baseURL": "http://model", "name": "m"}});
    let spec: AgentSpec = serde_json::from_value(spec).unwrap();
    EngineSettings::try_from(&spec).unwrap()
}

fn tool(name: &str, effect: ToolEffect) -> ToolSpec {
    ToolSpec {
        name: name.into(),
        description: String::new(),
        parameters: json!({"type": "object"}),
        effect,
        idempotent: false,
        timeout: SignedDuration::from_secs(60),
        on_unknown: UnknownOutcomePolicy::TellModel,
        target: String::new(),
        needs_approval: name.starts_with("mail__"),
        needs_approval_after_untrusted: false,
        approval_condition: None,
        trusted: true,
        missing_grant: (name == "vault__open").then(|| "vault".into()),
        definition: None,
    }
}

/// The tools, of which one has this definition.
fn tools(definition: &str) -> Vec<ToolSpec> {
    let declared = DeclaredDefinition {
        hash: definition.into(),
        parts: DefinitionParts::default(),
        server: "files".into(),
        holds_changes: false,
        holds_new: false,
    };
    vec![
        ToolSpec {
            definition: Some(declared),
            ..tool("files__read", ToolEffect::Read)
        },
        tool("db__put", ToolEffect::Write),
        tool("mail__send", ToolEffect::Destructive),
        tool("vault__open", ToolEffect::Read),
    ]
}

/// One life of a loop, without a driver.
struct Life<'a> {
    steps: JournaledEngine<'a>,
    now: Timestamp,
    call: Option<CallId>,
    runs: Vec<ToolRunId>,
}

impl<'a> Life<'a> {
    fn start(journal: &'a mut Journal, restored: RestoredJournal, now: Timestamp, definition: &str) -> Self {
        let engine = match restored.snapshot {
            Some(snapshot) => Engine::restore(settings(), snapshot, restored.transcript),
            None => Engine::new(settings()),
        };
        let mut life = Self {
            steps: JournaledEngine::new(engine, journal),
            now,
            call: None,
            runs: Vec::new(),
        };
        life.lists(definition);
        life.feed(EngineInput::Started {
            agent: "agent".into(),
            epoch: 1,
            known: KnownTotals::default(),
            budget: crate::engine::budget::BudgetState::default(),
            link_silent: false,
            open: crate::engine::OpenRequests::default(),
        });
        life
    }

    fn feed(&mut self, input: EngineInput) {
        let taken = self.steps.take(self.now, input);
        taken.result.unwrap();
        for action in taken.actions {
            if let EngineEffect::CallModel { call, .. } = action {
                self.call = Some(call);
            } else if let EngineEffect::RunTool(run, _) = action {
                self.runs.push(run.id);
            }
        }
    }

    fn lists(&mut self, definition: &str) {
        self.feed(EngineInput::ToolsChanged {
            tools: tools(definition),
            silent: Vec::new(),
        });
    }

    fn pass(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
        self.feed(EngineInput::Timer);
    }

    /// The model calls these tools, each with other arguments.
    fn answer(&mut self, names: &[&str]) {
        let calls = names.iter().enumerate().map(|(place, name)| ToolCall {
            id: place.to_string(),
            name: (*name).into(),
            arguments: json!({"text": CANARY, "place": place}).to_string(),
        });
        let answer = ModelAnswer {
            text: Some(CANARY.into()),
            tool_calls: calls.collect(),
            finish: FinishReason::ToolCalls,
            ..ModelAnswer::default()
        };
        let call = self.call.take().expect("a call");
        self.feed(EngineInput::Answered { call, answer });
    }

    fn end_run(&mut self) {
        let run = self.runs.pop().expect("a run");
        self.feed(EngineInput::ToolFinished {
            run,
            outcome: ToolOutcome::Done { text: CANARY.into() },
            artifacts: ResultArtifacts::default(),
        });
    }

    fn decide(&mut self, gate: &str, approved: bool, by: &str) {
        let gates = self.steps.view().gates;
        let open = gates.into_iter().find(|open| open.gate.id == gate).expect("a gate");
        self.feed(EngineInput::GateAnswered(EngineGateAnswer {
            gate: gate.into(),
            arguments: open.arguments,
            approved,
            by: Some(by.into()),
        }));
    }
}

/// A loop in which each kind of decision is made once, and which is killed within its last run.
fn decided(dir: &Path) -> Journal {
    let (mut journal, restored) = open(dir, 1);
    let mut life = Life::start(&mut journal, restored, Timestamp::UNIX_EPOCH, "one");
    life.answer(&[
        "vault__open",
        CANARY,
        "files__read",
        "mail__send",
        "mail__send",
        "mail__send",
    ]);
    life.end_run();
    life.decide("e1-t1c1r4", true, "ann");
    life.end_run();
    life.decide("e1-t1c1r5", false, "bob");
    life.pass(3600);
    life.lists("two");
    life.pass(0);
    life.answer(&["db__put"]);
    assert_eq!(life.runs.len(), 1, "it is killed within this run");
    let now = life.now;
    drop(journal);
    let (mut journal, restored) = open(dir, 1);
    Life::start(&mut journal, restored, now, "two");
    journal
}

#[test]
fn each_decision_and_each_outcome_is_a_row_of_the_audit_once() {
    let dir = tempfile::tempdir().unwrap();
    let journal = decided(dir.path());
    let found = rows(
        &journal,
        "SELECT coalesce(decision, outcome), run, tool, effect, gate, decided_by, note FROM agent_execution_audit
         ORDER BY seq",
    );
    let expected = [
        json!(["Pinned", null, null, null, null, null, "files: 1 tool"]),
        json!(["Denied", "t1c1r1", "vault__open", "Read", null, null, "MissingGrant"]),
        json!(["Denied", "t1c1r2", null, null, null, null, "UnknownTool"]),
        json!([
            "Asked",
            "t1c1r4",
            "mail__send",
            "Destructive",
            "e1-t1c1r4",
            null,
            "e1-t1c1r4 ToolPolicy"
        ]),
        json!([
            "Asked",
            "t1c1r5",
            "mail__send",
            "Destructive",
            "e1-t1c1r5",
            null,
            "e1-t1c1r5 ToolPolicy"
        ]),
        json!([
            "Asked",
            "t1c1r6",
            "mail__send",
            "Destructive",
            "e1-t1c1r6",
            null,
            "e1-t1c1r6 ToolPolicy"
        ]),
        json!(["Allowed", "t1c1r3", "files__read", "Read", null, null, ""]),
        json!(["Ok", "t1c1r3", "files__read", "Read", null, null, ""]),
        json!([
            "Approved",
            "t1c1r4",
            "mail__send",
            "Destructive",
            "e1-t1c1r4",
            "ann",
            "e1-t1c1r4 approved by ann"
        ]),
        json!(["Allowed", "t1c1r4", "mail__send", "Destructive", null, null, ""]),
        json!(["Ok", "t1c1r4", "mail__send", "Destructive", null, null, ""]),
        json!([
            "Rejected",
            "t1c1r5",
            "mail__send",
            "Destructive",
            "e1-t1c1r5",
            "bob",
            "e1-t1c1r5 denied by bob"
        ]),
        json!([
            "Denied",
            "t1c1r5",
            "mail__send",
            "Destructive",
            null,
            null,
            "NotApproved"
        ]),
        json!([
            "Expired",
            "t1c1r6",
            "mail__send",
            "Destructive",
            "e1-t1c1r6",
            null,
            "e1-t1c1r6 expired"
        ]),
        json!([
            "Denied",
            "t1c1r6",
            "mail__send",
            "Destructive",
            null,
            null,
            "ApprovalExpired"
        ]),
        json!(["Accepted", null, null, null, null, null, "files: changed files__read"]),
        json!(["Allowed", "t1c2r1", "db__put", "Write", null, null, ""]),
        json!(["Unknown", "t1c2r1", "db__put", "Write", null, null, ""]),
    ];
    assert_eq!(found, expected);
    let of_other_turns = "SELECT count(*) FROM agent_execution_audit a LEFT JOIN agent_execution_history h
        ON h.id = a.execution_id WHERE a.run IS NOT NULL AND h.turn IS NOT a.turn";
    assert_eq!(count(&journal, of_other_turns), 0);
    // All rows about one call have its key and the hash of its arguments; one that was not run has no key of its own.
    let of_call =
        "SELECT count(DISTINCT idempotency_key) * 100 + count(DISTINCT arguments_hash) * 10 + count(arguments_hash)
        FROM agent_execution_audit WHERE run = 't1c1r4' AND call = 't1c1'";
    assert_eq!(count(&journal, of_call), 114);
}

#[test]
fn the_export_has_the_history_and_the_audit_and_the_audit_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let journal = decided(dir.path());
    let audited = count(&journal, "SELECT count(*) FROM agent_execution_audit");
    // Of a running loop, as a user gets it.
    let path = dir.path().join("copy");
    copy(dir.path(), &mut File::create(&path).unwrap()).unwrap();
    let mut bytes = Vec::new();
    export(&path, &mut bytes).unwrap();
    // A copy in memory has the same.
    let mut of_memory = Vec::new();
    export_bytes(&std::fs::read(&path).unwrap(), Path::new("copy"), &mut of_memory).unwrap();
    assert_eq!(of_memory, bytes);
    let lines: Vec<Value> = bytes
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect();
    let of = |record: &str| -> Vec<&Value> { lines.iter().filter(|line| line["record"] == record).collect() };
    let (executions, steps, audit) = (of("execution"), of("step"), of("audit"));
    assert_eq!((executions.len(), steps.len()), (1, 2));
    assert_eq!(i64::try_from(audit.len()).unwrap(), audited);
    assert_eq!(lines.len(), 3 + audit.len());
    assert_eq!(executions[0]["turn"], 1);
    assert_eq!(steps[0]["action"][0]["tool"], "vault__open");
    let last = audit.last().unwrap();
    assert_eq!((&last["outcome"], &last["decision"]), (&json!("Unknown"), &Value::Null));
    assert_eq!(last["execution_id"], executions[0]["id"]);
    // Every line has the trace of its turn.
    let turn = TurnName {
        agent: executions[0]["agent_id"].as_str().unwrap(),
        member: 0,
        turn: 1,
    };
    let trace = Value::String(hex(&turn.trace_id()));
    for line in [executions[0], steps[0], last] {
        assert_eq!(line["trace_id"], trace, "{line}");
    }
    let asked = audit.iter().filter(|line| line["decision"] == "Asked");
    let causes: Vec<&Value> = asked.map(|line| &line["cause"]).collect();
    assert_eq!(causes, ["ToolPolicy"; 3]);
    assert_eq!(last["cause"], Value::Null);
    let has_text = |lines: &[&Value]| lines.iter().any(|line| line.to_string().contains(CANARY));
    assert!(has_text(&steps) && !has_text(&audit));
    // The journal is the worker's, and as it was.
    assert_eq!(count(&journal, "SELECT count(*) FROM agent_execution_audit"), audited);
}

#[test]
fn a_file_that_is_no_copy_of_this_version_is_not_exported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("copy");
    let refusal = || export(&path, &mut Vec::new()).unwrap_err();
    assert!(matches!(refusal(), ExportError::Unreadable { .. }));
    assert!(!path.exists(), "nothing is created");
    std::fs::write(&path, "once upon a time".repeat(400)).unwrap();
    assert!(matches!(refusal(), ExportError::Unreadable { .. }));
    std::fs::remove_file(&path).unwrap();
    let connection = Connection::open(&path).unwrap();
    for version in [schema::VERSION - 1, schema::VERSION + 1] {
        connection.pragma_update(None, "user_version", version).unwrap();
        assert!(matches!(refusal(), ExportError::OtherVersion { found, .. } if found == version));
    }
    let older = std::fs::read(&path).unwrap();
    let of_memory = |bytes: &[u8]| export_bytes(bytes, Path::new("copy"), &mut Vec::new()).unwrap_err();
    assert!(matches!(of_memory(&older), ExportError::OtherVersion { found, .. } if found == schema::VERSION + 1));
    assert!(matches!(of_memory(&[]), ExportError::Unreadable { .. }));
    // The journal of a running worker.
    let (_journal, _) = open(dir.path(), 1);
    let error = export(&dir.path().join(FILE), &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("`agentloop journal` has written"), "{error}");
}

#[test]
fn the_lines_of_a_journal_of_version_6_are_kept_and_audited() {
    let dir = tempfile::tempdir().unwrap();
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    for step in &schema::STEPS[..6] {
        connection.execute_batch(step).unwrap();
    }
    let lines = "INSERT INTO journal (at, kind, turn, note, run, tool, outcome) VALUES
        ('2026-01-01T00:00:00Z', 'TurnStarted', 7, '', NULL, NULL, NULL),
        ('2026-01-01T00:00:01Z', 'GateOpened', 7, 'e1-t7c1r1', 't7c1r1', 'a__b', NULL),
        ('2026-01-01T00:00:02Z', 'GateResolved', 7, 'e1-t7c1r1 approved by an unknown user', 't7c1r1', 'a__b', NULL),
        ('2026-01-01T00:00:03Z', 'ToolIntent', 7, '', 't7c1r1', 'a__b', NULL),
        ('2026-01-01T00:00:04Z', 'ToolOutcome', 7, '', 't7c1r1', 'a__b', 'Ok'),
        ('2026-01-01T00:00:05Z', 'ToolOutcome', 7, '', NULL, NULL, NULL),
        ('2026-01-01T00:00:06Z', 'GateOpened', 8, 'tools-a-e1-1: changed a__b; new a__c', NULL, NULL, NULL),
        ('2026-01-01T00:00:07Z', 'GateResolved', 8, 'tools-a-e1-1 withdrawn', NULL, NULL, NULL),
        ('2026-01-01T00:00:08Z', 'GateResolved', 8, 'e1-t8c1r1 superseded', 't8c1r1', 'a__b', NULL);
        INSERT INTO agent_execution_history (id, agent_id, task_id, turn, started_at, total_steps) VALUES
        ('00000000-0007-8', 'agent', 'Turn', 7, '', 1), ('00000000-0007-9', 'agent', 'Precheck', 7, '', 1);
        PRAGMA user_version = 6;";
    connection.execute_batch(lines).unwrap();
    drop(connection);
    let (journal, _) = open(dir.path(), 2);
    assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
    assert_eq!(count(&journal, "SELECT count(*) FROM journal"), 9);
    assert_eq!(count(&journal, "SELECT count(*) FROM agent_execution_history"), 2);
    let found = rows(
        &journal,
        "SELECT seq, execution_id, coalesce(decision, outcome), gate, decided_by FROM agent_execution_audit ORDER BY seq",
    );
    let expected = [
        json!([2, "00000000-0007-8", "Asked", "e1-t7c1r1", null]),
        json!([3, "00000000-0007-8", "Approved", "e1-t7c1r1", null]),
        json!([4, "00000000-0007-8", "Allowed", null, null]),
        json!([5, "00000000-0007-8", "Ok", null, null]),
        json!([7, null, "Asked", "tools-a-e1-1", null]),
        json!([8, null, "Withdrawn", "tools-a-e1-1", null]),
        json!([9, null, "Superseded", "e1-t8c1r1", null]),
    ];
    assert_eq!(found, expected);
}

/// The definition of the view in the journal.
fn view(journal: &Journal) -> String {
    let sql = "SELECT sql FROM sqlite_master WHERE name = 'agent_execution_audit'";
    journal.connection.query_row(sql, [], |row| row.get(0)).unwrap()
}

#[test]
fn the_view_has_the_cause_of_each_gate_as_the_export_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let journal = decided(dir.path());
    let of_view =
        "SELECT seq, cause FROM agent_execution_audit WHERE decision = 'Asked' OR cause IS NOT NULL ORDER BY seq";
    let asked: Vec<Value> = rows(&journal, of_view);
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert!(asked.iter().all(|row| row[1] == "ToolPolicy"), "{asked:?}");
    let mut notes: Vec<String> = GateCause::iter()
        .map(|cause| format!("e1-t9c1r1 {}", cause.as_ref()))
        .collect();
    notes.extend(
        [
            "tools-a-e1-1: changed a__b; new a__c",
            "tools-a-e1-1:",
            "e1-t7c1r1",
            "e1-t7c1r1 ALaterCause",
            "e1-t7c1r1 toolpolicy",
            "e1-t7c1r1 ToolPolicy and more",
        ]
        .map(str::to_owned),
    );
    for note in &notes {
        let insert = "INSERT INTO journal (at, kind, turn, note) VALUES ('2026-01-01T00:00:00Z', 'GateOpened', 9, ?1)";
        journal.connection.execute(insert, [note]).unwrap();
    }
    let found = rows(
        &journal,
        "SELECT note, cause FROM agent_execution_audit WHERE turn = 9 ORDER BY seq",
    );
    let expected: Vec<Value> = notes
        .iter()
        .map(|note| json!([note, GateCause::of_note(note).map(|cause| cause.to_string())]))
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn a_journal_of_an_earlier_release_gets_the_view_without_a_new_version_and_keeps_it() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path());
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    // Releases before the column cause, with tables of the same version.
    let view_of_version_10 = schema::STEPS[9].split("CREATE VIEW agent_goal_steps").next().unwrap();
    connection.execute_batch(view_of_version_10).unwrap();
    let opened = "INSERT INTO journal (at, kind, turn, note) VALUES
        ('2026-01-01T00:00:00Z', 'GateOpened', 9, 'e1-t9c1r1 ApprovalCondition')";
    connection.execute(opened, []).unwrap();
    connection.close().unwrap();
    let (journal, _) = open(dir.path(), 2);
    let causes = rows(
        &journal,
        "SELECT cause FROM agent_execution_audit WHERE decision = 'Asked'",
    );
    assert_eq!(causes, [json!(["ApprovalCondition"])]);
    assert_eq!(count(&journal, "PRAGMA user_version"), schema::VERSION);
    let (changes, current) = (count(&journal, "PRAGMA schema_version"), view(&journal));
    journal.close(&owner(2)).unwrap();
    let (journal, _) = open(dir.path(), 3);
    assert_eq!(
        count(&journal, "PRAGMA schema_version"),
        changes,
        "it is not replaced again"
    );
    assert_eq!(view(&journal), current);
    journal.close(&owner(3)).unwrap();
    // An earlier release finds all columns that it knows, in their places.
    let connection = Connection::open(dir.path().join(FILE)).unwrap();
    let columns = |connection: &Connection| -> Vec<String> {
        let select = connection.prepare("SELECT * FROM agent_execution_audit").unwrap();
        select.column_names().map(str::to_owned).collect()
    };
    let new = columns(&connection);
    connection.execute_batch(view_of_version_10).unwrap();
    let known = columns(&connection);
    assert_eq!(new, [known, vec!["cause".to_owned()]].concat());
}
