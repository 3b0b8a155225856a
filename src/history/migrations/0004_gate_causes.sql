-- The rule that opened a gate: docs/reference/history.md. Only a column without a default, which no row is read or written for: rows
-- that are there keep NULL.

ALTER TABLE agent_execution_audit ADD COLUMN cause text;
