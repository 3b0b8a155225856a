//! Open gates of Agents and AgentBudgets, with the commands that answer them.

use jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;

use super::figures::{age, duration};
use super::table::TextTable;
use crate::api::budget::BudgetGate;
use crate::api::status::Gate;
use crate::api::{Agent, AgentBudget};

/// An open gate.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ApprovalListRow {
    /// `Agent` or `AgentBudget`.
    pub kind: &'static str,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// Id of the gate.
    pub gate: String,
    /// What the gate is for.
    pub reason: String,
    /// Tool of the call, the server, or `goal`; empty for a budget.
    pub tool: String,
    /// Hash of what is to be approved.
    pub arguments_hash: String,
    /// Time at which it was opened.
    pub opened_at: Timestamp,
    /// Time at which it expires, which denies it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// Source of the untrusted content because of which the call needs the approval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untrusted_content_source: Option<String>,
    /// The command that approves it.
    pub command: String,
}

/// The open gates of an Agent.
#[must_use]
pub fn of_agent(agent: &Agent) -> Vec<ApprovalListRow> {
    let gates = agent.status.iter().flat_map(|status| &status.gates);
    let (namespace, name) = (agent.namespace().unwrap_or_default(), agent.name_any());
    gates.map(|gate| open(gate, &namespace, &name)).collect()
}

fn open(gate: &Gate, namespace: &str, name: &str) -> ApprovalListRow {
    ApprovalListRow {
        kind: "Agent",
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        gate: gate.id.clone(),
        reason: gate.kind.to_string(),
        tool: gate.tool.clone(),
        arguments_hash: gate.arguments_hash.clone(),
        opened_at: gate.opened_at.0,
        expires_at: gate.expires_at.as_ref().map(|at| at.0),
        untrusted_content_source: gate.untrusted_content_source.clone(),
        command: format!("kubectl agentloop approve -n {namespace} {name} {}", gate.id),
    }
}

/// The open gates of an AgentBudget.
#[must_use]
pub fn of_budget(budget: &AgentBudget) -> Vec<ApprovalListRow> {
    let gates = budget.status.iter().flat_map(|status| &status.gates);
    let (namespace, name) = (budget.namespace().unwrap_or_default(), budget.name_any());
    gates.map(|gate| asked(gate, &namespace, &name)).collect()
}

fn asked(gate: &BudgetGate, namespace: &str, name: &str) -> ApprovalListRow {
    ApprovalListRow {
        kind: "AgentBudget",
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        gate: gate.id.clone(),
        reason: gate.kind.clone(),
        tool: String::new(),
        arguments_hash: gate.arguments_hash.clone(),
        opened_at: gate.opened_at.0,
        expires_at: None,
        untrusted_content_source: None,
        command: format!("kubectl agentloop approve --budget -n {namespace} {name} {}", gate.id),
    }
}

/// The table, and how to read what is to be approved.
#[must_use]
pub fn text(gates: &[ApprovalListRow], now: Timestamp) -> String {
    if gates.is_empty() {
        return "No gate is open.\n".into();
    }
    let mut table = TextTable::new(vec![
        "NAMESPACE",
        "NAME",
        "GATE",
        "REASON",
        "TOOL",
        "ARGUMENTS HASH",
        "OPEN FOR",
        "EXPIRES IN",
        "UNTRUSTED CONTENT",
        "APPROVE WITH",
    ]);
    for gate in gates {
        let opened = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(gate.opened_at);
        table.push(vec![
            gate.namespace.clone(),
            gate.name.clone(),
            gate.gate.clone(),
            gate.reason.clone(),
            gate.tool.clone(),
            gate.arguments_hash.clone(),
            age(Some(&opened), now),
            gate.expires_at
                .map_or_else(String::new, |at| duration(at.duration_since(now))),
            gate.untrusted_content_source.clone().unwrap_or_default(),
            gate.command.clone(),
        ]);
    }
    let agent = gates.iter().find(|gate| gate.kind == "Agent");
    let hint = agent.map_or_else(String::new, |gate| {
        format!(
            "\nTo read the arguments before you approve: kubectl agentloop events --messages -n {} {}\n",
            gate.namespace, gate.name
        )
    });
    format!("{table}{hint}")
}
