//! The tables of the journal.

use rusqlite::{Connection, TransactionBehavior};

/// Version of the tables, kept in SQLite's `user_version`.
pub(super) const VERSION: i64 = 10;

/// Version 1. `journal`: one line per event, without text of prompts or answers. `messages`: the conversation; `live`
/// rows are the transcript that the engine still sends, the others are history. `kv`: the engine's snapshot and the
/// journal's owner.
const VERSION_1: &str = "
CREATE TABLE journal (
    seq INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    turn INTEGER NOT NULL,
    call TEXT,
    note TEXT NOT NULL
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    turn INTEGER NOT NULL,
    live INTEGER NOT NULL,
    json TEXT NOT NULL
);
CREATE INDEX messages_live ON messages (id) WHERE live = 1;
CREATE INDEX messages_turn ON messages (turn);
CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
";

/// Version 2: tool calls. A run is a line `ToolIntent` and, later, a line `ToolOutcome`.
const VERSION_2: &str = "
ALTER TABLE journal ADD COLUMN run TEXT;
ALTER TABLE journal ADD COLUMN tool TEXT;
ALTER TABLE journal ADD COLUMN effect TEXT;
ALTER TABLE journal ADD COLUMN key TEXT;
ALTER TABLE journal ADD COLUMN arguments TEXT;
ALTER TABLE journal ADD COLUMN outcome TEXT;
";

/// Version 3: the history of the Agent for users; docs/reference/journal.md documents each column. Cost is stored in
/// whole micro-dollars and shown as a decimal. Ids sort by turn and call, so that no other index is needed to find
/// them.
const VERSION_3: &str = "
CREATE TABLE agent_execution_history (
    id TEXT NOT NULL PRIMARY KEY,
    agent_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    project_id TEXT,
    turn INTEGER NOT NULL,
    started_at TEXT NOT NULL,
    completed_at TEXT,
    total_steps INTEGER NOT NULL,
    final_status TEXT,
    escalation_reason TEXT,
    total_cost_micro_usd INTEGER,
    total_cost_usd TEXT AS (CASE WHEN total_cost_micro_usd IS NOT NULL
        THEN printf('%d.%06d', total_cost_micro_usd / 1000000, total_cost_micro_usd % 1000000) END),
    total_tokens INTEGER,
    state_snapshot TEXT
);
CREATE TABLE agent_execution_steps (
    id TEXT NOT NULL PRIMARY KEY,
    execution_id TEXT NOT NULL REFERENCES agent_execution_history (id),
    step_number INTEGER NOT NULL,
    timestamp TEXT NOT NULL,
    call TEXT NOT NULL,
    purpose TEXT NOT NULL,
    reasoning TEXT,
    action TEXT NOT NULL,
    result TEXT NOT NULL,
    validation TEXT,
    success INTEGER,
    tokens_used INTEGER,
    cost_micro_usd INTEGER,
    cost_usd TEXT AS (CASE WHEN cost_micro_usd IS NOT NULL
        THEN printf('%d.%06d', cost_micro_usd / 1000000, cost_micro_usd % 1000000) END)
);
CREATE INDEX agent_execution_steps_execution ON agent_execution_steps (execution_id, step_number);
";

/// Version 4: the record of each Sensor. `seq` is the number of the last event that took effect, written together with
/// its effect. `memory` is JSON that only the worker reads.
const VERSION_4: &str = "
CREATE TABLE deliveries (
    sensor TEXT PRIMARY KEY,
    at TEXT NOT NULL,
    seq INTEGER NOT NULL,
    memory TEXT NOT NULL
) WITHOUT ROWID;
";

/// Version 5: the files that a Sensor has reported, with their size, time and hash at that moment.
const VERSION_5: &str = "
CREATE TABLE watched_files (
    sensor TEXT NOT NULL,
    path TEXT NOT NULL,
    size INTEGER NOT NULL,
    modified INTEGER NOT NULL,
    hash TEXT,
    PRIMARY KEY (sensor, path)
) WITHOUT ROWID;
";

/// Version 6: the member of the Agent that a row belongs to, so that the rows of several can be distinguished. 0 is the
/// agent itself, to which all earlier rows belong.
const VERSION_6: &str = "
ALTER TABLE journal ADD COLUMN member INTEGER NOT NULL DEFAULT 0;
ALTER TABLE messages ADD COLUMN member INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agent_execution_history ADD COLUMN member INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agent_execution_steps ADD COLUMN member INTEGER NOT NULL DEFAULT 0;
DROP INDEX messages_live;
CREATE INDEX messages_live ON messages (member, id) WHERE live = 1;
";

/// Version 7: what was decided about each tool call, and what became of it, for users: a view of the lines about tools,
/// documented in docs/reference/journal.md. The note of a line about a gate begins with the gate's id; when the gate is
/// closed, the rest says how. Nothing writes to it, so it is as complete as the lines. Member and turn have at most one
/// execution of their own; the rows of questions about a turn are not it.
/// Spelled out again in version 10: a version that has been released is never edited.
const VERSION_7: &str = "
CREATE VIEW agent_execution_audit AS
WITH execution AS (
    SELECT turn, member, max(id) AS id FROM agent_execution_history
    WHERE task_id NOT IN ('Precheck', 'Signal', 'Judge', 'Confidence') GROUP BY turn, member
), line AS (
    SELECT *,
        CASE WHEN kind IN ('GateOpened', 'GateResolved') THEN substr(note, 1, instr(note || ' ', ' ') - 1) END AS word,
        CASE WHEN kind = 'GateResolved' THEN substr(note, instr(note || ' ', ' ') + 1) END AS closed
    FROM journal
    WHERE kind IN ('ToolDenied', 'GateOpened', 'GateResolved', 'ToolsPinned', 'ToolsChanged')
        OR (kind IN ('ToolIntent', 'ToolOutcome') AND run IS NOT NULL)
)
SELECT line.seq, line.at, execution.id AS execution_id, line.turn, line.member,
    substr(line.run, 1, instr(line.run, 'r') - 1) AS call, line.run, line.tool, line.effect,
    CASE
        WHEN kind = 'ToolIntent' THEN 'Allowed'
        WHEN kind = 'ToolDenied' THEN 'Denied'
        WHEN kind = 'GateOpened' THEN 'Asked'
        WHEN kind = 'ToolsPinned' THEN 'Pinned'
        WHEN kind = 'ToolsChanged' THEN 'Accepted'
        WHEN closed GLOB 'approved*' THEN 'Approved'
        WHEN closed GLOB 'denied*' THEN 'Rejected'
        WHEN closed GLOB 'expired*' THEN 'Expired'
        WHEN closed GLOB 'superseded*' THEN 'Superseded'
        WHEN closed GLOB 'withdrawn*' THEN 'Withdrawn'
    END AS decision,
    rtrim(line.word, ':') AS gate,
    CASE
        WHEN closed GLOB 'approved by *' THEN nullif(substr(closed, 13), 'an unknown user')
        WHEN closed GLOB 'denied by *' THEN substr(closed, 11)
    END AS decided_by,
    line.key AS idempotency_key, line.arguments AS arguments_hash, line.outcome, line.note
FROM line LEFT JOIN execution ON execution.turn = line.turn AND execution.member = line.member;
";

/// Version 8: the tasks of an Agent in mode `Task`. `state` is `Waiting`, `Running` or `Ended`; `offer` is the task as
/// JSON while it waits, `response` the response once it has ended.
const VERSION_8: &str = "
CREATE TABLE tasks (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    at TEXT NOT NULL,
    state TEXT NOT NULL,
    offer TEXT,
    response TEXT,
    undelivered INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX tasks_waiting ON tasks (seq) WHERE state = 'Waiting';
CREATE INDEX tasks_undelivered ON tasks (seq) WHERE undelivered = 1;
";

/// Version 9: which rows of the history have changed since they were uploaded, in the order of their last changes. A row
/// that is dropped before that leaves the table too, so it is never larger than the history. Triggers, so that no statement
/// can forget it. `DELETE` instead of `REPLACE`: the conflict clause of the statement that fires a trigger also applies
/// within it. Steps also have the time that the call took, the attempt that was answered, and a short error.
const VERSION_9: &str = "
ALTER TABLE agent_execution_steps ADD COLUMN attempt INTEGER;
ALTER TABLE agent_execution_steps ADD COLUMN duration_milliseconds INTEGER;
ALTER TABLE agent_execution_steps ADD COLUMN error TEXT;
CREATE TABLE history_changes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    record TEXT NOT NULL,
    row NOT NULL,
    UNIQUE (record, row)
);
CREATE TRIGGER execution_added AFTER INSERT ON agent_execution_history BEGIN
    DELETE FROM history_changes WHERE record = 'execution' AND row = NEW.id;
    INSERT INTO history_changes (record, row) VALUES ('execution', NEW.id);
END;
CREATE TRIGGER execution_changed AFTER UPDATE ON agent_execution_history BEGIN
    DELETE FROM history_changes WHERE record = 'execution' AND row = NEW.id;
    INSERT INTO history_changes (record, row) VALUES ('execution', NEW.id);
END;
CREATE TRIGGER execution_dropped AFTER DELETE ON agent_execution_history BEGIN
    DELETE FROM history_changes WHERE record = 'execution' AND row = OLD.id;
END;
CREATE TRIGGER step_added AFTER INSERT ON agent_execution_steps BEGIN
    DELETE FROM history_changes WHERE record = 'step' AND row = NEW.id;
    INSERT INTO history_changes (record, row) VALUES ('step', NEW.id);
END;
CREATE TRIGGER step_changed AFTER UPDATE ON agent_execution_steps BEGIN
    DELETE FROM history_changes WHERE record = 'step' AND row = NEW.id;
    INSERT INTO history_changes (record, row) VALUES ('step', NEW.id);
END;
CREATE TRIGGER step_dropped AFTER DELETE ON agent_execution_steps BEGIN
    DELETE FROM history_changes WHERE record = 'step' AND row = OLD.id;
END;
CREATE TRIGGER line_added AFTER INSERT ON journal
WHEN NEW.kind IN ('ToolDenied', 'GateOpened', 'GateResolved', 'ToolsPinned', 'ToolsChanged')
    OR (NEW.kind IN ('ToolIntent', 'ToolOutcome') AND NEW.run IS NOT NULL)
BEGIN
    INSERT INTO history_changes (record, row) VALUES ('audit', NEW.seq);
END;
CREATE TRIGGER line_dropped AFTER DELETE ON journal BEGIN
    DELETE FROM history_changes WHERE record = 'audit' AND row = OLD.seq;
END;
";

/// Version 10: the attempts at steps of a goal, and what their checks found: a view of the executions, whose `state_snapshot`
/// has it. The view of the audit knows that questions to the light model about a turn are not the turn.
const VERSION_10: &str = "
DROP VIEW agent_execution_audit;
CREATE VIEW agent_execution_audit AS
WITH execution AS (
    SELECT turn, member, max(id) AS id FROM agent_execution_history
    WHERE task_id NOT IN ('Precheck', 'Signal', 'Judge', 'Confidence', 'LightJudge', 'LightConfidence') GROUP BY turn, member
), line AS (
    SELECT *,
        CASE WHEN kind IN ('GateOpened', 'GateResolved') THEN substr(note, 1, instr(note || ' ', ' ') - 1) END AS word,
        CASE WHEN kind = 'GateResolved' THEN substr(note, instr(note || ' ', ' ') + 1) END AS closed
    FROM journal
    WHERE kind IN ('ToolDenied', 'GateOpened', 'GateResolved', 'ToolsPinned', 'ToolsChanged')
        OR (kind IN ('ToolIntent', 'ToolOutcome') AND run IS NOT NULL)
)
SELECT line.seq, line.at, execution.id AS execution_id, line.turn, line.member,
    substr(line.run, 1, instr(line.run, 'r') - 1) AS call, line.run, line.tool, line.effect,
    CASE
        WHEN kind = 'ToolIntent' THEN 'Allowed'
        WHEN kind = 'ToolDenied' THEN 'Denied'
        WHEN kind = 'GateOpened' THEN 'Asked'
        WHEN kind = 'ToolsPinned' THEN 'Pinned'
        WHEN kind = 'ToolsChanged' THEN 'Accepted'
        WHEN closed GLOB 'approved*' THEN 'Approved'
        WHEN closed GLOB 'denied*' THEN 'Rejected'
        WHEN closed GLOB 'expired*' THEN 'Expired'
        WHEN closed GLOB 'superseded*' THEN 'Superseded'
        WHEN closed GLOB 'withdrawn*' THEN 'Withdrawn'
    END AS decision,
    rtrim(line.word, ':') AS gate,
    CASE
        WHEN closed GLOB 'approved by *' THEN nullif(substr(closed, 13), 'an unknown user')
        WHEN closed GLOB 'denied by *' THEN substr(closed, 11)
    END AS decided_by,
    line.key AS idempotency_key, line.arguments AS arguments_hash, line.outcome, line.note
FROM line LEFT JOIN execution ON execution.turn = line.turn AND execution.member = line.member;
CREATE VIEW agent_goal_steps AS
SELECT id AS execution_id, turn, member, started_at,
    json_extract(state_snapshot, '$.validation.step') AS goal_step,
    json_extract(state_snapshot, '$.validation.attempt') AS attempt_number,
    json_extract(state_snapshot, '$.validation.durationMilliseconds') AS duration_milliseconds,
    json_extract(state_snapshot, '$.validation.progressPercent') AS progress_percent,
    json_extract(state_snapshot, '$.validation.progressSource') AS progress_source,
    json_extract(state_snapshot, '$.validation.criteria') AS criteria,
    json_extract(state_snapshot, '$.validation.error') AS error
FROM agent_execution_history WHERE json_extract(state_snapshot, '$.validation') IS NOT NULL;
";

/// Step `n` migrates version `n` to version `n + 1`; version 0 is an empty file.
pub(super) const STEPS: [&str; 10] = [
    VERSION_1, VERSION_2, VERSION_3, VERSION_4, VERSION_5, VERSION_6, VERSION_7, VERSION_8, VERSION_9, VERSION_10,
];

/// Returns the version of the tables; 0 for an empty file.
pub(super) fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

/// Migrates tables of version `found` to [`VERSION`], completely or not at all.
pub(super) fn migrate(connection: &mut Connection, found: i64) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for step in STEPS.iter().skip(usize::try_from(found).unwrap_or(usize::MAX)) {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}
