-- The attempts at steps of goals, and what their checks found: docs/reference/history.md documents each column.
-- A worker chooses the JSON, so nothing is cast that a cast could refuse: one bad row would fail the queries of all.

CREATE VIEW agent_goal_steps AS
SELECT agent_id, namespace, agent_name, id AS execution_id, turn, member, started_at,
    CASE WHEN jsonb_typeof(v->'step') = 'number' THEN (v->'step')::numeric END AS goal_step,
    CASE WHEN jsonb_typeof(v->'attempt') = 'number' THEN (v->'attempt')::numeric END AS attempt_number,
    CASE WHEN jsonb_typeof(v->'durationMilliseconds') = 'number' THEN (v->'durationMilliseconds')::numeric END AS duration_milliseconds,
    CASE WHEN jsonb_typeof(v->'progressPercent') = 'number' THEN (v->'progressPercent')::numeric END AS progress_percent,
    v->>'progressSource' AS progress_source,
    v->'criteria' AS criteria,
    v->>'error' AS error
FROM (SELECT *, state_snapshot->'validation' AS v FROM agent_execution_history) AS execution
WHERE jsonb_typeof(v) = 'object';
