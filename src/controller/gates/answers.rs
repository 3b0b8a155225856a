//! Records the answers of people that arrive over the link: each becomes an annotation of its Agent.
//!
//! From there it takes the path of every answer: the reconciler reads the annotation and sends it in the directives until
//! the loop reports that the gate is closed. An answer is therefore durable before it is confirmed, and outlives a change
//! of the leader. Authorization is decided before.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::api::status::Gate;
use crate::api::{Agent, NamespacedName};
use crate::controller::event_subscriptions::unavailable;
use crate::link::answers::{AnsweredGate, GateAnswerBody, GateVerdict};
use crate::link::events::{ClientRefusal, ClientRefusalCode};
use crate::link::gate_annotations::{self, ANSWERS, AnnotatedAnswer, RecordedAnswer, RecordedAnswers};
use crate::support::text::first_chars;

/// Time limit for one answer, all its attempts included.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);
/// Most attempts to write an answer while others write the same Agent.
const MAX_ATTEMPTS: u32 = 10;
/// Most answers to one Agent at a time: more than it can have open gates.
const MAX_AT_A_TIME: usize = 32;
/// Most characters of a gate's id in a message.
const MAX_ID: usize = 63;

/// Records answers to gates.
pub struct GateAnswerRecorder {
    client: Client,
    agents: AgentLocks,
}

/// One lock for each Agent that is being answered, held from the read to the write: answers to one Agent do not contend with
/// each other, only with other writers, and never wait for those to another Agent.
#[derive(Default)]
struct AgentLocks(std::sync::Mutex<HashMap<NamespacedName, Arc<Mutex<()>>>>);

impl AgentLocks {
    /// The lock of an Agent, unless too many answers to it wait already.
    fn of(&self, agent: &NamespacedName) -> Result<Arc<Mutex<()>>, ClientRefusal> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        let lock = locks.entry(agent.clone()).or_default();
        // One is the map's.
        if Arc::strong_count(lock) > MAX_AT_A_TIME {
            return Err(unavailable("too many answers to this Agent at a time; retry"));
        }
        Ok(Arc::clone(lock))
    }
}

impl GateAnswerRecorder {
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            client,
            agents: AgentLocks::default(),
        }
    }

    /// Records the answer of this user to an open gate of an Agent that exists. An equal answer is recorded once.
    pub async fn record(
        &self,
        agent: &NamespacedName,
        asked: (&str, &GateAnswerBody),
        user: &str,
        now: Timestamp,
    ) -> Result<AnsweredGate, ClientRefusal> {
        timeout(RECORD_TIMEOUT, self.write(agent, asked, user, now))
            .await
            .unwrap_or_else(|_| {
                tracing::warn!("recording an answer timed out after {} s", RECORD_TIMEOUT.as_secs());
                Err(cannot_write())
            })
    }

    async fn write(
        &self,
        agent: &NamespacedName,
        (gate, body): (&str, &GateAnswerBody),
        user: &str,
        now: Timestamp,
    ) -> Result<AnsweredGate, ClientRefusal> {
        let lock = self.agents.of(agent)?;
        let _held = lock.lock().await;
        let agents: Api<Agent> = Api::namespaced(self.client.clone(), &agent.namespace);
        for _ in 0..MAX_ATTEMPTS {
            let found = agents.get_opt(&agent.name).await.map_err(|error| failed(&error))?;
            let live = found.ok_or_else(|| not_found(format!("Agent {agent} does not exist")))?;
            let gates = live.status.as_ref().map(|status| status.gates.as_slice());
            let gates = gates.unwrap_or_default();
            if let Some(given) = given(&live, gates, gate, body)? {
                return Ok(given);
            }
            let answer = RecordedAnswer {
                answer: body.answer,
                arguments_hash: body.arguments_hash.clone(),
                by: user.to_owned(),
                at: now,
            };
            let is_open = |id: &str| gates.iter().any(|open| open.id == id);
            let value = RecordedAnswers::of(live.annotations()).with(gate, answer, is_open);
            // The version ensures that there was no other answer, and that no gate has closed, since it was read.
            let patch = json!({"metadata": {
                "resourceVersion": live.metadata.resource_version, "annotations": {ANSWERS: value},
            }});
            match agents
                .patch(&agent.name, &PatchParams::default(), &Patch::Merge(patch))
                .await
            {
                Ok(_) => {
                    tracing::info!(
                        namespace = agent.namespace,
                        agent = agent.name,
                        gate,
                        answer = %body.answer,
                        by = user,
                        "recorded the answer to a gate"
                    );
                    return Ok(AnsweredGate {
                        gate: gate.to_owned(),
                        answer: body.answer,
                        by: Some(user.to_owned()),
                    });
                }
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        Err(unavailable("the Agent is being changed by others; retry"))
    }
}

/// The equal answer that the Agent has already; `None` if this one is to be written, and a refusal if it may not be.
fn given(
    agent: &Agent,
    gates: &[Gate],
    gate: &str,
    body: &GateAnswerBody,
) -> Result<Option<AnsweredGate>, ClientRefusal> {
    let Some(open) = gates.iter().find(|open| open.id == gate) else {
        return Err(not_found(no_gate(gates, gate)));
    };
    if open.arguments_hash != body.arguments_hash {
        return Err(conflict(format!(
            "gate {gate} is for a call of {} with other arguments: their hash is {}; read the arguments again before you answer",
            open.tool, open.arguments_hash
        )));
    }
    let before = gate_annotations::answer(agent.annotations(), gate, &open.arguments_hash);
    let given = match before {
        None => return Ok(None),
        Some(AnnotatedAnswer::Approved { by, .. }) => (GateVerdict::Approve, Some(by)),
        Some(AnnotatedAnswer::Denied { by, .. }) => (GateVerdict::Deny, by),
    };
    match (given, body.answer) {
        ((GateVerdict::Deny, by), GateVerdict::Approve) => {
            let by = by.map(|by| format!(" by {by}")).unwrap_or_default();
            Err(conflict(format!(
                "gate {gate} was denied{by} already, and a denial takes precedence"
            )))
        }
        // Counts if the loop has not seen the approval yet.
        ((GateVerdict::Approve, _), GateVerdict::Deny) => Ok(None),
        ((answer, by), _) => Ok(Some(AnsweredGate {
            gate: gate.to_owned(),
            answer,
            by,
        })),
    }
}

fn no_gate(gates: &[Gate], asked: &str) -> String {
    let asked = first_chars(asked, MAX_ID);
    if gates.is_empty() {
        return format!("gate {asked} is not open, and no other one is");
    }
    let open: Vec<&str> = gates.iter().map(|gate| gate.id.as_str()).collect();
    format!("gate {asked} is not open; open gates: {}", open.join(", "))
}

fn not_found(message: String) -> ClientRefusal {
    ClientRefusal {
        code: ClientRefusalCode::NotFound,
        message,
    }
}

fn conflict(message: String) -> ClientRefusal {
    ClientRefusal {
        code: ClientRefusalCode::Conflict,
        message,
    }
}

fn failed(error: &kube::Error) -> ClientRefusal {
    tracing::warn!(%error, "failed to record an answer");
    cannot_write()
}

fn cannot_write() -> ClientRefusal {
    unavailable("the answer could not be recorded; retry, since an equal answer is recorded once")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_two_answers_to_an_agent_wait_at_a_time_and_none_waits_for_another_agent() {
        let locks = AgentLocks::default();
        let (one, other) = (NamespacedName::new("ns", "one"), NamespacedName::new("ns", "other"));
        let mut held: Vec<_> = (0..MAX_AT_A_TIME).map(|_| locks.of(&one).unwrap()).collect();
        assert!(locks.of(&one).is_err());
        let free = locks.of(&other).unwrap();
        let first = held[0].try_lock().unwrap();
        assert!(held[1].try_lock().is_err() && free.try_lock().is_ok());
        drop(first);
        held.pop();
        assert!(locks.of(&one).is_ok());
        drop(held);
        locks.of(&other).unwrap();
        assert_eq!(
            locks.0.lock().unwrap().len(),
            1,
            "no lock is kept for longer than it is used"
        );
    }
}
