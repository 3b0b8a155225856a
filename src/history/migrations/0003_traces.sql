-- The trace that an execution and a decision belong to: docs/reference/history.md. Only columns without a default, which no row
-- is read or written for: rows that do not change any more keep NULL, and there is no index. The page has the statements that
-- fill the column and make the index while others write.

ALTER TABLE agent_execution_history ADD COLUMN trace_id text;
ALTER TABLE agent_execution_audit ADD COLUMN trace_id text;
