-- The history of executions: docs/reference/history.md documents each column.
-- Every row belongs to an Agent by its uid, which the controller knows from the identity of the pod. A worker chooses the
-- other part of a key, so no key can meet that of another Agent.

CREATE TABLE agent_execution_history (
    agent_id text NOT NULL,
    id uuid NOT NULL,
    namespace text NOT NULL,
    agent_name text NOT NULL,
    task_id text NOT NULL,
    project_id text,
    turn bigint NOT NULL,
    member integer NOT NULL,
    started_at timestamptz NOT NULL,
    completed_at timestamptz,
    duration_milliseconds bigint GENERATED ALWAYS AS ((extract(epoch FROM completed_at - started_at) * 1000)::bigint) STORED,
    total_steps bigint NOT NULL,
    final_status text,
    escalation_reason text,
    total_cost_micro_usd bigint,
    total_cost_usd numeric(20, 6) GENERATED ALWAYS AS (total_cost_micro_usd * 0.000001) STORED,
    total_tokens bigint,
    state_snapshot jsonb,
    PRIMARY KEY (agent_id, id)
);
CREATE INDEX agent_execution_history_started ON agent_execution_history (started_at);
CREATE INDEX agent_execution_history_agent ON agent_execution_history (namespace, agent_name, started_at);

CREATE TABLE agent_execution_steps (
    agent_id text NOT NULL,
    id uuid NOT NULL,
    execution_id uuid NOT NULL,
    step_number bigint NOT NULL,
    "timestamp" timestamptz NOT NULL,
    call text NOT NULL,
    purpose text NOT NULL,
    member integer NOT NULL,
    attempt bigint,
    duration_milliseconds bigint,
    reasoning text,
    action jsonb,
    result jsonb,
    validation jsonb,
    success boolean,
    error text,
    tokens_used bigint,
    cost_micro_usd bigint,
    cost_usd numeric(20, 6) GENERATED ALWAYS AS (cost_micro_usd * 0.000001) STORED,
    PRIMARY KEY (agent_id, id),
    FOREIGN KEY (agent_id, execution_id) REFERENCES agent_execution_history (agent_id, id) ON DELETE CASCADE
);
CREATE INDEX agent_execution_steps_execution ON agent_execution_steps (agent_id, execution_id, step_number);

-- A line of a journal is known by its number and its time: a journal from a backup uses numbers again.
CREATE TABLE agent_execution_audit (
    agent_id text NOT NULL,
    seq bigint NOT NULL,
    at timestamptz NOT NULL,
    namespace text NOT NULL,
    agent_name text NOT NULL,
    execution_id uuid,
    turn bigint NOT NULL,
    member integer NOT NULL,
    call text,
    run text,
    tool text,
    effect text,
    decision text,
    gate text,
    decided_by text,
    idempotency_key text,
    arguments_hash text,
    outcome text,
    note text NOT NULL,
    PRIMARY KEY (agent_id, seq, at)
);
CREATE INDEX agent_execution_audit_at ON agent_execution_audit (at);
CREATE INDEX agent_execution_audit_execution ON agent_execution_audit (agent_id, execution_id);

-- Up to which change each Agent's history is stored, and which process of its worker sent the last one.
CREATE TABLE agentloop_history_positions (
    agent_id text PRIMARY KEY,
    writer text NOT NULL,
    sequence bigint NOT NULL,
    updated_at timestamptz NOT NULL
);
