//! Checks the history tables of a run: no row is lost or duplicated, and they agree with those of the undisturbed run.

use std::collections::BTreeMap;

use rusqlite::Connection;

use super::without_moments;

/// A row of `agent_execution_history`, without times.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Execution {
    id: String,
    task: String,
    turn: i64,
    steps: i64,
    status: Option<String>,
    tokens: Option<i64>,
    cost: Option<i64>,
    state: Option<String>,
}

/// A row of `agent_execution_steps`, without times and without the attempt that was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    id: String,
    execution: String,
    number: i64,
    call: String,
    reasoning: Option<String>,
    action: String,
    result: String,
    success: Option<bool>,
    tokens: Option<i64>,
    cost: Option<i64>,
}

#[derive(Clone, Debug)]
pub(super) struct History {
    executions: Vec<Execution>,
    steps: Vec<Step>,
}

impl History {
    /// Reads the tables, and asserts that they agree with each other and with the lines of the journal.
    pub(super) fn of(connection: &Connection) -> Self {
        let history = Self {
            executions: executions(connection).expect("rows"),
            steps: steps(connection).expect("rows"),
        };
        history.agrees_with_itself();
        let answered = texts(
            connection,
            "SELECT call FROM journal WHERE kind = 'CallAnswered' ORDER BY call",
        );
        let kept = texts(connection, "SELECT call FROM agent_execution_steps ORDER BY call");
        assert_eq!(kept, answered, "each answered call is a step, once");
        let lines = texts(
            connection,
            "SELECT seq || '' FROM journal WHERE kind LIKE 'Gate%' OR kind = 'ToolDenied'
             OR (kind IN ('ToolIntent', 'ToolOutcome') AND run IS NOT NULL) ORDER BY seq",
        );
        // What runs between two turns has the number of the coming one. That turn may never begin: the loop has ended, or its
        // volume went back and it continued from a higher number that the controller knows.
        let audited = texts(
            connection,
            "SELECT seq || '' FROM agent_execution_audit
             WHERE (decision IS NULL) = (outcome IS NOT NULL)
                 AND (execution_id IS NULL) = (turn NOT IN (SELECT turn FROM journal WHERE kind = 'TurnStarted'))
             ORDER BY seq",
        );
        assert_eq!(audited, lines, "each line about a tool is a row of the audit, once");
        // The turn of a task that a limit ended has completed, and has not succeeded.
        let limited = "SELECT began.turn FROM journal began JOIN journal ended
             ON ended.kind = 'TaskEnded' AND ended.note LIKE began.note || ': LimitReached%'
             WHERE began.kind = 'TaskStarted'";
        // Nor has one after which a person has not let the loop continue.
        let escalated = "SELECT turn FROM agent_execution_history WHERE final_status = 'escalated'";
        for (kind, status, but) in [
            ("kind = 'TurnCompleted'", "success", "NOT"),
            ("kind = 'TurnFailed' OR kind = 'TurnCompleted'", "failed", ""),
        ] {
            let ended = format!(
                "SELECT turn || '' FROM journal
                 WHERE ({kind}) AND (kind = 'TurnFailed' OR turn {but} IN ({limited})) AND turn NOT IN ({escalated})
                 ORDER BY turn || ''"
            );
            let rows = format!(
                "SELECT turn || '' FROM agent_execution_history
                 WHERE task_id NOT IN ('Precheck', 'Signal', 'Judge', 'Confidence', 'LightJudge', 'LightConfidence') AND final_status = '{status}' ORDER BY turn || ''"
            );
            assert_eq!(texts(connection, &rows), texts(connection, &ended), "{kind}");
        }
        history
    }

    fn agrees_with_itself(&self) {
        let mut sums: BTreeMap<&str, (i64, Option<i64>, Option<i64>)> = BTreeMap::new();
        for step in &self.steps {
            let (steps, tokens, cost) = sums.entry(&step.execution).or_default();
            *steps += 1;
            assert_eq!(step.number, *steps, "{step:?}");
            *tokens = step.tokens.map_or(*tokens, |more| Some(tokens.unwrap_or(0) + more));
            *cost = step.cost.map_or(*cost, |more| Some(cost.unwrap_or(0) + more));
        }
        for execution in &self.executions {
            let found = sums.remove(execution.id.as_str()).unwrap_or_default();
            assert_eq!(
                (execution.steps, execution.tokens, execution.cost),
                found,
                "{execution:?}"
            );
        }
        assert!(sums.is_empty(), "{sums:?} belong to nothing");
    }

    /// `found` is of a run with kills. If `cut`, a tool run in it has an unknown outcome.
    pub(super) fn compare(&self, found: &Self, complete: bool, cut: bool) {
        let ends = |history: &Self| -> Vec<(i64, Option<String>)> {
            let own = history.executions.iter().filter(|execution| {
                ![
                    "Precheck",
                    "Signal",
                    "Judge",
                    "Confidence",
                    "LightJudge",
                    "LightConfidence",
                ]
                .contains(&&*execution.task)
            });
            own.map(|execution| (execution.turn, execution.status.clone()))
                .collect()
        };
        assert!(!complete || ends(self) == ends(found), "{found:?}");
        // Such a result has a different length, so another turn may need a summary.
        if cut {
            return;
        }
        assert!(!complete || self.executions.len() == found.executions.len());
        assert!(!complete || self.steps.len() == found.steps.len());
        for (expected, found) in self.steps.iter().zip(&found.steps) {
            assert_eq!(found, expected);
        }
        for (expected, found) in self.executions.iter().zip(&found.executions) {
            // The last execution may have continued in only one of the runs.
            let is_checked = |execution: &Execution| {
                execution
                    .state
                    .as_ref()
                    .is_some_and(|state| state.contains("validation"))
            };
            let in_check = !complete && is_checked(expected) && !is_checked(found);
            if found.status.is_some() && !in_check {
                assert_eq!(found, expected);
            }
        }
    }
}

fn executions(connection: &Connection) -> rusqlite::Result<Vec<Execution>> {
    let mut select = connection.prepare(
        "SELECT id, task_id, turn, total_steps, final_status, total_tokens, total_cost_micro_usd, json_remove(state_snapshot, '$.validation.durationMilliseconds')
         FROM agent_execution_history ORDER BY rowid",
    )?;
    let rows = select.query_map([], |row| {
        Ok(Execution {
            id: row.get(0)?,
            task: row.get(1)?,
            turn: row.get(2)?,
            steps: row.get(3)?,
            status: row.get(4)?,
            tokens: row.get(5)?,
            cost: row.get(6)?,
            state: row.get(7)?,
        })
    })?;
    rows.collect()
}

fn steps(connection: &Connection) -> rusqlite::Result<Vec<Step>> {
    let mut select = connection.prepare(
        "SELECT id, execution_id, step_number, call, reasoning, action, result, success, tokens_used, cost_micro_usd
         FROM agent_execution_steps ORDER BY rowid",
    )?;
    let rows = select.query_map([], |row| {
        let call: String = row.get(3)?;
        Ok(Step {
            id: row.get(0)?,
            execution: row.get(1)?,
            number: row.get(2)?,
            call: call.split('a').next().unwrap_or_default().to_owned(),
            reasoning: row.get(4)?,
            action: row.get(5)?,
            result: without_moments(&row.get::<_, String>(6)?),
            success: row.get(7)?,
            tokens: row.get(8)?,
            cost: row.get(9)?,
        })
    })?;
    rows.collect()
}

fn texts(connection: &Connection, sql: &str) -> Vec<String> {
    let mut select = connection.prepare(sql).expect("a query");
    let rows = select.query_map([], |row| row.get(0)).expect("rows");
    rows.collect::<rusqlite::Result<_>>().expect("rows")
}
