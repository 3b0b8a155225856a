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
use crate::link::task_requests::{AcceptedTask, AcceptedTaskState, ID_PREFIX, RequestedTask, TaskAck, TaskReceipt};
use crate::support::random::random_hex;

/// Tasks on their way to one gateway; further ones are refused.
const QUEUE: usize = 16;
/// Requests for one Agent that wait for a receipt; further ones are refused.
const MOST_WAITING: usize = 64;

/// A request that waits for the receipt of its task.
struct WaitingRequest {
    agent: NamespacedName,
    task: String,
    receipt: oneshot::Sender<TaskAck>,
}

#[derive(Default)]
struct RelayTable {
    /// The connected gateways.
    gateways: HashMap<NamespacedName, mpsc::Sender<RequestedTask>>,
    waiting: Vec<WaitingRequest>,
}

/// Relays requested tasks and their receipts between clients and gateways.
pub struct TaskRelay {
    table: Mutex<RelayTable>,
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
        let is_for = |waiting: &mut WaitingRequest| waiting.agent == *agent && waiting.task == ack.id;
        for waiting in table.waiting.extract_if(.., is_for) {
            let _ = waiting.receipt.send(ack.clone());
        }
    }

    /// Forwards a task and waits for the worker's receipt.
    pub async fn submit(&self, agent: &NamespacedName, task: RequestedTask) -> Result<AcceptedTask, ClientRefusal> {
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
        if table.waiting.iter().filter(|waiting| waiting.agent == *agent).count() >= MOST_WAITING {
            return Err(unavailable("too many requests for this Agent at a time; retry"));
        }
        let away =
            || unavailable("the Agent has no connected pod: it is starting, suspended, or its loop has ended; retry");
        let gateway = table.gateways.get(agent).ok_or_else(away)?;
        // Registered before the receipt can arrive, since the table is locked.
        let id = task.id.clone();
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
            receipt: sender,
        });
        Ok(receipt)
    }

    fn lock(&self) -> MutexGuard<'_, RelayTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        tokio::join!(relay.submit(&one, task("a")), worker).0
    }

    #[tokio::test]
    async fn a_task_is_accepted_once_its_worker_says_so() {
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
    async fn a_request_without_a_receipt_says_which_id_to_repeat() {
        let relay = TaskRelay::new(Duration::from_secs(5));
        let _gateway = relay.register_gateway(&agent("one"));
        let refusal = relay.submit(&agent("one"), task("request-a")).await.unwrap_err();
        let expected = "the Agent's pod did not answer in time; retry with the id a, since";
        assert!(refusal.message.starts_with(expected), "{}", refusal.message);
    }

    #[tokio::test]
    async fn without_a_gateway_and_after_its_replacement_a_request_is_refused_at_once() {
        let relay = TaskRelay::new(Duration::from_mins(1));
        let one = agent("one");
        let refusal = relay.submit(&one, task("a")).await.unwrap_err();
        assert!(refusal.message.contains("no connected pod"), "{}", refusal.message);
        let mut old = relay.register_gateway(&one);
        let replaced = async {
            old.recv().await.unwrap();
            relay.register_gateway(&one)
        };
        let (refused, _new) = tokio::join!(relay.submit(&one, task("a")), replaced);
        assert!(refused.unwrap_err().message.contains("was replaced"));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_gateway_continues_once_it_is_connected_or_the_time_is_over() {
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

    #[tokio::test]
    async fn tasks_on_their_way_and_requests_that_wait_are_bounded() {
        let relay = TaskRelay::new(Duration::from_mins(1));
        let one = agent("one");
        let mut gateway = relay.register_gateway(&one);
        let mut waiting = Vec::new();
        for number in 0..QUEUE {
            waiting.push(relay.forward(&one, task(&number.to_string())).unwrap());
        }
        let slow = relay.forward(&one, task("x")).unwrap_err();
        assert!(slow.message.contains("slow"), "{}", slow.message);
        while waiting.len() < MOST_WAITING {
            gateway.recv().await.unwrap();
            waiting.push(relay.forward(&one, task("y")).unwrap());
        }
        gateway.recv().await.unwrap();
        let many = relay.forward(&one, task("z")).unwrap_err();
        assert!(many.message.contains("too many requests"), "{}", many.message);
        waiting.pop();
        relay.forward(&one, task("z")).unwrap();
    }
}
