//! The tasks that wait. Those of one origin are begun in the order of their arrival; of several origins, the one whose last task
//! was started longest ago is next. So an origin with many tasks delays those of another one by one task.

use std::collections::{BTreeMap, VecDeque};

use super::served::{OriginKey, ServedOrigins};
use super::{TaskOffer, TaskOrigin};

/// Maximum number of tasks that wait; further ones stay where they come from.
pub const MAX_WAITING: usize = 1_000;
/// Maximum number of bytes of all their texts.
pub const MAX_WAITING_BYTES: usize = 4 * 1024 * 1024;
/// Maximum number of tasks that wait beyond them, of origins without another one: no origin keeps the others out.
pub const MAX_BEYOND: usize = 64;
/// Maximum number of bytes of their texts: of as many of the largest prompts.
pub const MAX_BYTES_BEYOND: usize = MAX_BEYOND * 64 * 1024;

/// What was served before is part of the snapshot, and given to each method that depends on it.
#[derive(Clone, Debug, Default)]
pub struct TaskQueue {
    /// Those of each origin; no line is empty.
    lines: BTreeMap<OriginKey, VecDeque<WaitingTask>>,
    /// The origins of lines that were never served, by the arrival of their first tasks.
    never_served: BTreeMap<u64, OriginKey>,
    arrivals: u64,
    count: usize,
    bytes: usize,
}

#[derive(Clone, Debug)]
struct WaitingTask {
    arrival: u64,
    offer: TaskOffer,
}

impl TaskQueue {
    /// A queue with the tasks that wait, in the order of their arrival.
    pub fn restored(waiting: Vec<TaskOffer>, served: &ServedOrigins) -> Self {
        let mut queue = Self::default();
        for task in waiting {
            queue.push(task, served);
        }
        queue
    }

    /// Whether one more task fits, whatever its size and its origin.
    pub fn has_room(&self) -> bool {
        self.count < MAX_WAITING && self.bytes < MAX_WAITING_BYTES
    }

    /// Whether one more task of this origin fits, whatever its size.
    pub fn has_room_for(&self, origin: &TaskOrigin) -> bool {
        self.has_room() || self.has_room_beyond() && !self.lines.contains_key(&OriginKey::from(origin))
    }

    /// Whether one more task fits of an origin of which none waits, whatever its size.
    pub fn has_room_beyond(&self) -> bool {
        self.count < MAX_WAITING + MAX_BEYOND && self.bytes < MAX_WAITING_BYTES + MAX_BYTES_BEYOND
    }

    pub fn has(&self, id: &str) -> bool {
        self.lines.values().flatten().any(|task| task.offer.id == id)
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many tasks wait.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The task that is next.
    pub fn first(&self, served: &ServedOrigins) -> Option<&TaskOffer> {
        let line = self.lines.get(&self.next_origin(served)?)?;
        line.front().map(|task| &task.offer)
    }

    pub fn push(&mut self, task: TaskOffer, served: &ServedOrigins) {
        let origin = OriginKey::from(&task.origin);
        let arrival = self.arrivals;
        self.arrivals += 1;
        self.count += 1;
        self.bytes = self.bytes.saturating_add(task.prompt.len());
        let line = self.lines.entry(origin).or_default();
        if line.is_empty() && !served.has(origin) {
            self.never_served.insert(arrival, origin);
        }
        line.push_back(WaitingTask { arrival, offer: task });
    }

    /// The task that is next is started: its origin is served, however the task ends.
    pub fn pop(&mut self, served: &mut ServedOrigins) -> Option<TaskOffer> {
        let origin = self.next_origin(served)?;
        let line = self.lines.get_mut(&origin)?;
        let WaitingTask { arrival, offer } = line.pop_front()?;
        if line.is_empty() {
            self.lines.remove(&origin);
        }
        self.count -= 1;
        self.bytes = self.bytes.saturating_sub(offer.prompt.len());
        self.never_served.remove(&arrival);
        if let Some(forgotten) = served.note(origin)
            && let Some(first) = self.lines.get(&forgotten).and_then(VecDeque::front)
        {
            self.never_served.insert(first.arrival, forgotten);
        }
        Some(offer)
    }

    /// All tasks, in the order of their arrival: none of them is started.
    pub fn drain(&mut self) -> Vec<TaskOffer> {
        let lines = std::mem::take(self).lines;
        let mut tasks: Vec<WaitingTask> = lines.into_values().flatten().collect();
        tasks.sort_by_key(|task| task.arrival);
        tasks.into_iter().map(|task| task.offer).collect()
    }

    fn next_origin(&self, served: &ServedOrigins) -> Option<OriginKey> {
        let never_served = self.never_served.first_key_value().map(|(_, origin)| *origin);
        never_served.or_else(|| served.stalest_first().find(|origin| self.lines.contains_key(origin)))
    }
}

#[cfg(test)]
mod tests;
