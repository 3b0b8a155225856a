//! The tasks that wait, in the order of their arrival.

use std::collections::VecDeque;

use super::TaskOffer;

/// Most tasks that wait; further ones stay where they come from.
pub const MOST_WAITING: usize = 1_000;
/// Most bytes of all their texts.
pub const MOST_WAITING_BYTES: usize = 4 * 1024 * 1024;

#[derive(Clone, Debug, Default)]
pub struct TaskQueue {
    waiting: VecDeque<TaskOffer>,
    bytes: usize,
}

impl From<Vec<TaskOffer>> for TaskQueue {
    fn from(waiting: Vec<TaskOffer>) -> Self {
        let bytes = waiting.iter().map(|task| task.prompt.len()).sum();
        Self {
            waiting: waiting.into(),
            bytes,
        }
    }
}

impl TaskQueue {
    /// Whether one more task fits, whatever its size.
    pub fn has_room(&self) -> bool {
        self.waiting.len() < MOST_WAITING && self.bytes < MOST_WAITING_BYTES
    }

    pub fn has(&self, id: &str) -> bool {
        self.waiting.iter().any(|task| task.id == id)
    }

    pub fn first(&self) -> Option<&TaskOffer> {
        self.waiting.front()
    }

    /// How many tasks wait.
    pub fn count(&self) -> usize {
        self.waiting.len()
    }

    pub fn push(&mut self, task: TaskOffer) {
        self.bytes = self.bytes.saturating_add(task.prompt.len());
        self.waiting.push_back(task);
    }

    pub fn pop(&mut self) -> Option<TaskOffer> {
        let task = self.waiting.pop_front()?;
        self.bytes = self.bytes.saturating_sub(task.prompt.len());
        Some(task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::TaskOrigin;

    fn task(id: usize, bytes: usize) -> TaskOffer {
        TaskOffer {
            id: id.to_string(),
            origin: TaskOrigin::Spec,
            prompt: "x".repeat(bytes),
            untrusted: None,
        }
    }

    #[test]
    fn a_queue_has_room_up_to_its_number_and_again_when_a_task_leaves() {
        let mut queue = TaskQueue::default();
        for id in 0..MOST_WAITING {
            assert!(queue.has_room(), "{id}");
            queue.push(task(id, 1));
        }
        assert!(!queue.has_room());
        assert_eq!(queue.pop().map(|task| task.id).as_deref(), Some("0"));
        assert!(queue.has_room());
    }

    #[test]
    fn a_queue_has_room_up_to_its_bytes_and_again_when_a_task_leaves() {
        let mut queue = TaskQueue::from(vec![task(0, MOST_WAITING_BYTES - 1)]);
        assert!(queue.has_room());
        queue.push(task(1, 1));
        assert!(!queue.has_room());
        queue.pop();
        assert!(queue.has_room());
    }
}
