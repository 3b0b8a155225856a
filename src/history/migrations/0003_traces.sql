-- The trace that an execution and a decision belong to: docs/reference/history.md. Rows that do not change any more keep
-- NULL, so that no large table is rewritten; the page has the statement that fills them.

ALTER TABLE agent_execution_history ADD COLUMN trace_id text;
ALTER TABLE agent_execution_audit ADD COLUMN trace_id text;
CREATE INDEX agent_execution_history_trace ON agent_execution_history (trace_id) WHERE trace_id IS NOT NULL;
