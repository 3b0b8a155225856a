//! Tasks of users in transit to the worker, and its receipts back to the controller.
//!
//! Keeps few of them, in memory only: a client that gets no answer repeats its request.

use std::sync::Arc;
use std::time::Duration;

use super::worker_queue::WorkerQueue;
use crate::link::client::{LinkClient, LinkError};
use crate::link::task_requests::{ACCEPT_SECONDS, RelayedTaskAck, RequestedTask, TaskAck};

/// Tasks that wait for the worker; more are dropped.
const MAX_WAITING: usize = 16;
/// How long a task waits for the worker: as long as the controller waits for the receipt. The client of an older one has
/// received the answer that it was not accepted.
const MAX_WAIT: Duration = Duration::from_secs(ACCEPT_SECONDS);

pub struct RequestedTasks {
    waiting: WorkerQueue<RequestedTask>,
    client: Arc<LinkClient>,
    agent: String,
    epoch: i64,
}

impl RequestedTasks {
    /// An empty queue for the Agent with this uid; receipts are sent through `client`.
    pub fn new(client: Arc<LinkClient>, agent: &str, epoch: i64) -> Self {
        Self {
            waiting: WorkerQueue::new(MAX_WAITING, Some(MAX_WAIT)),
            client,
            agent: agent.into(),
            epoch,
        }
    }

    /// Queues a task for the worker. One for another Agent of the same name is dropped: its own gateway will get it.
    pub fn put(&self, task: RequestedTask) {
        if task.receiver != self.agent {
            return;
        }
        let id = task.id.clone();
        self.waiting.put(task, |old| old.id == id);
    }

    /// The next task for the worker; waits up to `limit`.
    pub async fn next(&self, limit: Duration) -> Option<RequestedTask> {
        self.waiting.next(limit).await
    }

    /// Relays the worker's receipt, once. If it is lost, the client repeats its request.
    pub async fn acknowledge(&self, ack: TaskAck) -> Result<(), LinkError> {
        let epoch = self.epoch;
        self.client.acknowledge_task(&RelayedTaskAck { epoch, ack }).await
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn queue() -> RequestedTasks {
        let client = LinkClient::new("https://localhost:1", "/nowhere/token".into(), "/nowhere/ca".into());
        RequestedTasks::new(Arc::new(client), "uid", 1)
    }

    fn task(id: &str, receiver: &str) -> RequestedTask {
        RequestedTask {
            receiver: receiver.into(),
            id: id.into(),
            user: "ann".into(),
            prompt: "x".into(),
            untrusted_content: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_worker_receives_the_tasks_of_its_agent_in_order_and_a_repeated_one_once() {
        let tasks = queue();
        for (id, receiver) in [("a", "uid"), ("b", "another"), ("c", "uid"), ("a", "uid")] {
            tasks.put(task(id, receiver));
        }
        let mut got = Vec::new();
        while let Some(task) = tasks.next(Duration::from_secs(1)).await {
            got.push(task.id);
        }
        assert_eq!(got, ["c", "a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_whose_client_was_refused_meanwhile_is_dropped() {
        let tasks = queue();
        tasks.put(task("old", "uid"));
        tokio::time::sleep(Duration::from_millis(ACCEPT_SECONDS * 1000 - 1)).await;
        tasks.put(task("new", "uid"));
        tokio::time::sleep(Duration::from_millis(1)).await;
        let next = tasks.next(Duration::from_secs(1)).await;
        assert_eq!(next.map(|task| task.id).as_deref(), Some("new"));
    }

    #[tokio::test(start_paused = true)]
    async fn few_wait_and_more_are_dropped() {
        let tasks = queue();
        for id in 0..=MAX_WAITING {
            tasks.put(task(&id.to_string(), "uid"));
        }
        let mut got = 0;
        while tasks.next(Duration::from_secs(1)).await.is_some() {
            got += 1;
        }
        assert_eq!(got, MAX_WAITING);
    }
}
