//! Queues of limited length.

use std::collections::VecDeque;

/// Appends an item, and drops the oldest ones beyond `max`.
pub fn push_latest<T>(queue: &mut VecDeque<T>, item: T, max: usize) {
    queue.push_back(item);
    let surplus = queue.len().saturating_sub(max);
    queue.drain(..surplus);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_items_beyond_the_bound_are_dropped() {
        let mut queue = VecDeque::from([1, 2]);
        push_latest(&mut queue, 3, 3);
        assert_eq!(queue, [1, 2, 3]);
        push_latest(&mut queue, 4, 3);
        assert_eq!(queue, [2, 3, 4]);
        push_latest(&mut queue, 5, 1);
        assert_eq!(queue, [5]);
    }
}
