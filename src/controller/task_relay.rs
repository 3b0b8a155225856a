//! Relays tasks that users request to the gateways of their Agents, and the receipts back.
//!
//! Persists nothing: a task is the worker's once its receipt says so, and a client without an answer repeats its request. In
//! memory, with bounds, are the connected gateways and the requests that wait for a receipt. Authorization is decided before.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;

use super::event_subscriptions::unavailable;
use crate::api::NamespacedName;
use crate::link::events::{ClientRefusal, ClientRefusalCode};
use crate::link::task_requests::{
    AcceptedTask, AcceptedTaskState, ID_PREFIX, RequestedTask, TaskAck, TaskReceipt, TaskRefusal,
};
use crate::support::random::random_hex;

/// Tasks on their way to one gateway; further ones are refused.
const QUEUE: usize = 16;
/// Requests for one Agent that wait for its pod or a receipt; further ones are refused.
const MAX_WAITING: usize = 64;
/// The same for the Agents of one namespace.
const MAX_OF_NAMESPACE: usize = 128;
/// The same for all Agents.
const MAX_OF_ALL: usize = 512;

/// A request that waits for the receipt of its task.
struct WaitingRequest {
    agent: NamespacedName,
    task: String,
    user: String,
    receipt: oneshot::Sender<TaskAck>,
}

#[derive(Default)]
struct TaskRelayState {
    /// The connected gateways.
    gateways: HashMap<NamespacedName, mpsc::Sender<RequestedTask>>,
    waiting: Vec<WaitingRequest>,
    /// How many requests for each Agent have a place.
    places: HashMap<NamespacedName, usize>,
}

/// The place of one request among those that wait, until it is dropped.
pub struct RequestPlace<'a> {
    relay: &'a TaskRelay,
    agent: NamespacedName,
}

impl Drop for RequestPlace<'_> {
    fn drop(&mut self) {
        let mut table = self.relay.lock();
        if let Some(places) = table.places.get_mut(&self.agent) {
            *places -= 1;
            if *places == 0 {
                table.places.remove(&self.agent);
            }
        }
    }
}

/// Relays requested tasks and their receipts between clients and gateways.
pub struct TaskRelay {
    table: Mutex<TaskRelayState>,
    wait: Duration,
    /// A gateway has connected.
    connected: Notify,
}

impl TaskRelay {
    /// A relay that waits this long for receipts.
    #[must_use]
    pub fn new(wait: Duration) -> Self {
        Self {
            table: Mutex::default(),
            wait,
            connected: Notify::new(),
        }
    }

    /// Connects a gateway and replaces an earlier one of the same Agent.
    pub fn register_gateway(&self, agent: &NamespacedName) -> mpsc::Receiver<RequestedTask> {
        let (line, tasks) = mpsc::channel(QUEUE);
        let mut table = self.lock();
        table.gateways.retain(|_, gateway| !gateway.is_closed());
        table.gateways.insert(agent.clone(), line);
        // The previous gateway may never pass these on. A client repeats its request, now to this one.
        table.waiting.retain(|waiting| waiting.agent != *agent);
        self.connected.notify_waiters();
        tasks
    }

    /// A place for a request to this Agent, from before it waits for anything.
    pub fn admit(&self, agent: &NamespacedName) -> Result<RequestPlace<'_>, ClientRefusal> {
        let mut table = self.lock();
        let taken = |of: &dyn Fn(&NamespacedName) -> bool| -> usize {
            let places = table.places.iter().filter(|(agent, _)| of(agent));
            places.map(|(_, places)| places).sum()
        };
        if taken(&|other| other == agent) >= MAX_WAITING {
            return Err(unavailable("too many requests for this Agent at a time; retry"));
        }
        if taken(&|other| other.namespace == agent.namespace) >= MAX_OF_NAMESPACE {
            return Err(unavailable(
                "too many requests for Agents of this namespace at a time; retry",
            ));
        }
        if taken(&|_| true) >= MAX_OF_ALL {
            return Err(unavailable("too many requests for Agents at a time; retry"));
        }
        *table.places.entry(agent.clone()).or_default() += 1;
        Ok(RequestPlace {
            relay: self,
            agent: agent.clone(),
        })
    }

    /// Waits until a gateway connects and this is so, for at most `limit`.
    pub async fn until_connected(&self, limit: Duration, is_ready: impl Fn() -> bool) {
        // A pod that takes longer is there when the client repeats its request.
        let _ = timeout(limit, async {
            loop {
                let connected = self.connected.notified();
                if is_ready() {
                    return;
                }
                connected.await;
            }
        })
        .await;
    }

    /// Whether the Agent's gateway is connected.
    #[must_use]
    pub fn is_connected(&self, agent: &NamespacedName) -> bool {
        let table = self.lock();
        table.gateways.get(agent).is_some_and(|gateway| !gateway.is_closed())
    }

    /// Passes the receipt of a worker to the requests that wait for it.
    pub fn acknowledged(&self, agent: &NamespacedName, ack: &TaskAck) {
        let mut table = self.lock();
        let is_of = |user: &String| ack.user.as_ref().is_none_or(|owner| owner == user);
        let is_for =
            |waiting: &mut WaitingRequest| waiting.agent == *agent && waiting.task == ack.id && is_of(&waiting.user);
        for waiting in table.waiting.extract_if(.., is_for) {
            let _ = waiting.receipt.send(ack.clone());
        }
    }

    /// Forwards a task and waits for the worker's receipt. The request has a place, see [`TaskRelay::admit`].
    pub async fn submit(&self, place: &RequestPlace<'_>, task: RequestedTask) -> Result<AcceptedTask, ClientRefusal> {
        let agent = &place.agent;
        let id = task.id.clone();
        let receipt = self.forward(agent, task)?;
        // It may have been accepted. The id is the one that the client chooses, without the prefix.
        let again = |why: &str| {
            let key = id.strip_prefix(ID_PREFIX).unwrap_or(&id);
            unavailable(&format!(
                "{why}; retry with the id {key}, since a request with a known id has no further effect"
            ))
        };
        let ack = match timeout(self.wait, receipt).await {
            Ok(Ok(ack)) => ack,
            Ok(Err(_)) => return Err(again("the Agent's pod was replaced")),
            Err(_) => return Err(again("the Agent's pod did not answer in time")),
        };
        if let Some(refusal) = ack.refusal.and_then(refusal_of) {
            return Err(refusal);
        }
        let state = match ack.receipt {
            TaskReceipt::Accepted => AcceptedTaskState::Accepted,
            TaskReceipt::Repeated => AcceptedTaskState::Repeated,
            TaskReceipt::QueueFull => {
                return Err(ClientRefusal {
                    code: ClientRefusalCode::TooManyTasks,
                    message: "too many tasks wait at this Agent; retry later".into(),
                });
            }
            TaskReceipt::Stopped => return Err(unavailable("the Agent's loop is stopping or has ended")),
        };
        Ok(AcceptedTask {
            id,
            state,
            after: ack.after,
        })
    }

    fn forward(
        &self,
        agent: &NamespacedName,
        task: RequestedTask,
    ) -> Result<oneshot::Receiver<TaskAck>, ClientRefusal> {
        let mut table = self.lock();
        table.waiting.retain(|waiting| !waiting.receipt.is_closed());
        let away =
            || unavailable("the Agent has no connected pod: it is starting, suspended, or its loop has ended; retry");
        let gateway = table.gateways.get(agent).ok_or_else(away)?;
        // Registered before the receipt can arrive, since the table is locked.
        let (id, user) = (task.id.clone(), task.user.clone());
        match gateway.try_send(task) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => return Err(unavailable("the Agent's pod is slow; retry")),
            Err(mpsc::error::TrySendError::Closed(_)) => {
                table.gateways.remove(agent);
                return Err(away());
            }
        }
        let (sender, receipt) = oneshot::channel();
        table.waiting.push(WaitingRequest {
            agent: agent.clone(),
            task: id,
            user,
            receipt: sender,
        });
        Ok(receipt)
    }

    fn lock(&self) -> MutexGuard<'_, TaskRelayState> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The response to a client whose request the worker refused; `None`: as its receipt says.
fn refusal_of(refusal: TaskRefusal) -> Option<ClientRefusal> {
    let (code, message) = match refusal {
        TaskRefusal::IdOfAnotherUser => (
            ClientRefusalCode::Conflict,
            "another user has requested a task with this id; choose another id",
        ),
        TaskRefusal::ResponsesWait => (
            ClientRefusalCode::TooManyTasks,
            "too many responses of this Agent wait to be delivered: check that the receiver of spec.task.responses accepts them; \
             retry later",
        ),
        TaskRefusal::Other => return None,
    };
    Some(ClientRefusal {
        code,
        message: message.to_owned(),
    })
}

/// An id for a task whose client chose none.
pub fn random_id() -> Result<String, ClientRefusal> {
    random_hex::<16>().ok_or_else(|| unavailable("no id could be drawn; choose one"))
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn agent(name: &str) -> NamespacedName {
        NamespacedName::new("ns", name)
    }

    fn task(id: &str) -> RequestedTask {
        RequestedTask {
            receiver: "uid".into(),
            id: id.into(),
            user: "ann".into(),
            prompt: "x".into(),
            untrusted_content: None,
        }
    }

    fn ack(id: &str, receipt: TaskReceipt) -> TaskAck {
        TaskAck {
            id: id.into(),
            receipt,
            after: 7,
            refusal: None,
            user: None,
        }
    }

    /// Submits a task whose worker answers with this.
    async fn answered(receipt: TaskReceipt) -> Result<AcceptedTask, ClientRefusal> {
        let relay = TaskRelay::new(Duration::from_mins(1));
        let mut gateway = relay.register_gateway(&agent("one"));
        let one = agent("one");
        let worker = async {
            let sent = gateway.recv().await.unwrap();
            // Those of others change nothing.
            relay.acknowledged(&agent("other"), &ack("a", TaskReceipt::Stopped));
            relay.acknowledged(&agent("one"), &ack("b", TaskReceipt::Stopped));
            relay.acknowledged(&agent("one"), &ack(&sent.id, receipt));
        };
        let place = relay.admit(&one).unwrap();
        tokio::join!(relay.submit(&place, task("a")), worker).0
    }

    #[tokio::test]
    async fn a_task_is_accepted_once_its_worker_confirms_it() {
        for (receipt, state) in [
            (TaskReceipt::Accepted, AcceptedTaskState::Accepted),
            (TaskReceipt::Repeated, AcceptedTaskState::Repeated),
        ] {
            let accepted = answered(receipt).await.unwrap();
            assert_eq!((&*accepted.id, accepted.state, accepted.after), ("a", state, 7));
        }
        for (receipt, code) in [
            (TaskReceipt::QueueFull, ClientRefusalCode::TooManyTasks),
            (TaskReceipt::Stopped, ClientRefusalCode::Unavailable),
        ] {
            assert_eq!(answered(receipt).await.unwrap_err().code, code);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_without_a_receipt_names_the_id_to_repeat() {
        let relay = TaskRelay::new(Duration::from_secs(5));
        let _gateway = relay.register_gateway(&agent("one"));
        let refusal = relay
            .submit(&relay.admit(&agent("one")).unwrap(), task("request-a"))
            .await
            .unwrap_err();
        let expected = "the Agent's pod did not answer in time; retry with the id a, since";
        assert!(refusal.message.starts_with(expected), "{}", refusal.message);
    }

    #[tokio::test]
    async fn without_a_gateway_and_after_its_replacement_a_request_is_refused_at_once() {
        let relay = TaskRelay::new(Duration::from_mins(1));
        let one = agent("one");
        let refusal = relay.submit(&relay.admit(&one).unwrap(), task("a")).await.unwrap_err();
        assert!(refusal.message.contains("no connected pod"), "{}", refusal.message);
        let mut old = relay.register_gateway(&one);
        let replaced = async {
            old.recv().await.unwrap();
            relay.register_gateway(&one)
        };
        let place = relay.admit(&one).unwrap();
        let (refused, _new) = tokio::join!(relay.submit(&place, task("a")), replaced);
        assert!(refused.unwrap_err().message.contains("was replaced"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_for_a_gateway_ends_once_it_is_connected_or_after_the_timeout() {
        let relay = TaskRelay::new(Duration::from_mins(1));
        let one = agent("one");
        let begun = tokio::time::Instant::now();
        relay
            .until_connected(Duration::from_secs(9), || relay.is_connected(&one))
            .await;
        assert_eq!(begun.elapsed(), Duration::from_secs(9));
        let connects = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let _other = relay.register_gateway(&agent("other"));
            tokio::time::sleep(Duration::from_secs(1)).await;
            relay.register_gateway(&one)
        };
        let ((), gateway) = tokio::join!(
            relay.until_connected(Duration::from_secs(9), || relay.is_connected(&one)),
            connects
        );
        assert_eq!(begun.elapsed(), Duration::from_secs(11));
        relay
            .until_connected(Duration::from_secs(9), || relay.is_connected(&one))
            .await;
        assert_eq!(begun.elapsed(), Duration::from_secs(11));
        drop(gateway);
        assert!(!relay.is_connected(&one));
    }

    #[test]
    fn tasks_on_their_way_to_a_gateway_are_bounded() {
        let relay = TaskRelay::new(Duration::from_mins(1));
        let one = agent("one");
        let mut gateway = relay.register_gateway(&one);
        let mut waiting = Vec::new();
        for number in 0..QUEUE {
            waiting.push(relay.forward(&one, task(&number.to_string())).unwrap());
        }
        let slow = relay.forward(&one, task("x")).unwrap_err();
        assert!(slow.message.contains("slow"), "{}", slow.message);
        gateway.try_recv().unwrap();
        waiting.push(relay.forward(&one, task("x")).unwrap());
    }

    #[test]
    fn requests_are_bounded_per_agent_per_namespace_and_in_total_and_an_ended_one_frees_its_slot() {
        let relay = TaskRelay::new(Duration::from_mins(1));
        let refused = |agent: &NamespacedName, why: &str| {
            let refusal = relay.admit(agent).err().expect("a refusal");
            assert_eq!(refusal.code, ClientRefusalCode::Unavailable);
            assert!(refusal.message.contains(why), "{}", refusal.message);
        };
        let fill =
            |agent: &NamespacedName, max: usize| -> Vec<_> { (0..max).map(|_| relay.admit(agent).unwrap()).collect() };
        let mut of_one = fill(&agent("one"), MAX_WAITING);
        refused(&agent("one"), "this Agent");
        of_one.pop();
        of_one.push(relay.admit(&agent("one")).unwrap());
        let mut held = vec![of_one, fill(&agent("two"), MAX_OF_NAMESPACE - MAX_WAITING)];
        refused(&agent("three"), "this namespace");
        for number in 1..MAX_OF_ALL / MAX_OF_NAMESPACE {
            for name in ["one", "two"] {
                let agent = NamespacedName::new(format!("ns-{number}"), name);
                held.push(fill(&agent, MAX_WAITING));
            }
        }
        let other = NamespacedName::new("other", "one");
        refused(&other, "for Agents at a time");
        held.pop();
        relay.admit(&other).unwrap();
        held.clear();
        assert!(relay.lock().places.is_empty());
    }

    #[tokio::test]
    async fn a_receipt_for_the_task_of_another_user_with_the_same_id_is_not_passed_on() {
        let relay = TaskRelay::new(Duration::from_mins(1));
        let one = agent("one");
        let mut gateway = relay.register_gateway(&one);
        let of = |user: &str| RequestedTask {
            user: user.into(),
            ..task("a")
        };
        let (ann, bob) = (relay.admit(&one).unwrap(), relay.admit(&one).unwrap());
        let worker = async {
            for _ in 0..2 {
                let sent = gateway.recv().await.unwrap();
                let is_first = sent.user == "ann";
                let receipt = if is_first {
                    TaskReceipt::Accepted
                } else {
                    TaskReceipt::Stopped
                };
                relay.acknowledged(
                    &one,
                    &TaskAck {
                        refusal: (!is_first).then_some(TaskRefusal::IdOfAnotherUser),
                        user: Some(sent.user),
                        ..ack("a", receipt)
                    },
                );
            }
        };
        let (first, second, ()) = tokio::join!(relay.submit(&ann, of("ann")), relay.submit(&bob, of("bob")), worker);
        assert_eq!(first.unwrap().state, AcceptedTaskState::Accepted);
        assert_eq!(second.unwrap_err().code, ClientRefusalCode::Conflict);
    }

    #[test]
    fn waiting_responses_are_reported_to_the_client_and_an_unknown_refusal_is_left_to_the_receipt() {
        let refusal = refusal_of(TaskRefusal::ResponsesWait).unwrap();
        assert_eq!(refusal.code, ClientRefusalCode::TooManyTasks);
        assert!(refusal.message.contains("spec.task.responses"), "{}", refusal.message);
        let later: TaskAck = serde_json::from_str(r#"{"id": "a", "receipt": "Stopped", "refusal": "Later"}"#).unwrap();
        assert_eq!(later.refusal, Some(TaskRefusal::Other));
        assert!(refusal_of(TaskRefusal::Other).is_none());
    }
}
