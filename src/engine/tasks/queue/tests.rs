//! Tests of the queue: its room, and which task is next.

use pretty_assertions::assert_eq;
use proptest::prelude::*;
use rstest::rstest;

use super::super::served::MAX_SERVED;
use super::*;

/// A queue with what was served before.
#[derive(Default)]
struct ServedQueue {
    queue: TaskQueue,
    served: ServedOrigins,
}

impl ServedQueue {
    /// A task of the user with this name arrives; its id begins with the name.
    fn arrives(&mut self, user: &str, number: usize) {
        self.queue.push(of_user(user, number), &self.served);
    }

    /// Starts the next task; its id.
    fn starts(&mut self) -> Option<String> {
        let first = self.queue.first(&self.served).cloned();
        let task = self.queue.pop(&mut self.served);
        assert_eq!(first, task, "what is announced is started");
        task.map(|task| task.id)
    }

    fn start_all(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.starts()).collect()
    }
}

fn of_user(user: &str, number: usize) -> TaskOffer {
    TaskOffer {
        id: format!("{user}{number}"),
        origin: TaskOrigin::Request(user.into()),
        prompt: String::new(),
        untrusted: None,
    }
}

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
    let mut served = ServedOrigins::default();
    let mut queue = TaskQueue::default();
    for id in 0..MAX_WAITING {
        assert!(queue.has_room(), "{id}");
        queue.push(task(id, 1), &served);
    }
    assert!(!queue.has_room());
    assert_eq!(queue.pop(&mut served).map(|task| task.id).as_deref(), Some("0"));
    assert!(queue.has_room());
}

#[test]
fn a_queue_has_room_up_to_its_bytes_and_again_when_a_task_leaves() {
    let mut served = ServedOrigins::default();
    let mut queue = TaskQueue::restored(vec![task(0, MAX_WAITING_BYTES - 1)], &served);
    assert!(queue.has_room());
    queue.push(task(1, 1), &served);
    assert!(!queue.has_room());
    queue.pop(&mut served);
    assert!(queue.has_room());
}

fn user(name: &str) -> TaskOrigin {
    TaskOrigin::Request(name.into())
}

#[rstest]
#[case::by_number(MAX_WAITING, 0)]
#[case::by_bytes(1, MAX_WAITING_BYTES)]
fn in_a_full_queue_an_origin_without_a_task_has_room_for_one(#[case] tasks: usize, #[case] bytes: usize) {
    let mut served = ServedOrigins::default();
    let mut queue = TaskQueue::default();
    for id in 0..tasks - 1 {
        queue.push(task(id, 0), &served);
    }
    assert!(queue.has_room_for(&TaskOrigin::Spec) && queue.has_room_for(&user("a")));
    queue.push(task(tasks, bytes), &served);
    assert!(!queue.has_room_for(&TaskOrigin::Spec), "its tasks fill the queue");
    assert!(queue.has_room_for(&user("a")));
    queue.push(of_user("a", 1), &served);
    assert!(!queue.has_room_for(&user("a")), "one waits");
    assert!(queue.has_room_for(&user("b")));
    let mut started = std::iter::from_fn(|| queue.pop(&mut served));
    assert!(started.any(|task| task.id == "a1"));
    assert!(queue.has_room_for(&user("a")));
}

#[test]
fn at_most_64_origins_have_a_task_beyond_a_full_queue() {
    let mut served = ServedOrigins::default();
    let mut queue = TaskQueue::default();
    for id in 0..MAX_WAITING {
        queue.push(task(id, 0), &served);
    }
    for number in 0..64 {
        let name = format!("user-{number}-");
        assert!(queue.has_room_beyond() && queue.has_room_for(&user(&name)), "{number}");
        queue.push(of_user(&name, 1), &served);
    }
    assert!(!queue.has_room_beyond() && !queue.has_room_for(&user("one more")));
    queue.pop(&mut served);
    assert!(queue.has_room_for(&user("one more")));
    assert!(!queue.has_room_for(&TaskOrigin::Spec));
}

#[test]
fn the_tasks_beyond_a_full_queue_have_at_most_the_bytes_of_64_of_the_largest_prompts() {
    const LARGEST: usize = 64 * 1024;
    let served = ServedOrigins::default();
    let mut queue = TaskQueue::restored(vec![task(0, MAX_WAITING_BYTES + 63 * LARGEST)], &served);
    queue.push(task(1, LARGEST - 1), &served);
    assert!(queue.has_room_for(&user("a")));
    queue.push(task(2, 1), &served);
    assert!(!queue.has_room_for(&user("a")));
}

#[test]
fn two_origins_alternate_and_each_keeps_its_order() {
    let mut queue = ServedQueue::default();
    for (user, number) in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2)] {
        queue.arrives(user, number);
    }
    assert_eq!(queue.start_all(), ["a1", "b1", "a2", "b2", "a3"]);
}

#[test]
fn a_burst_of_one_origin_delays_another_one_by_at_most_one_task() {
    let mut queue = ServedQueue::default();
    (0..100).for_each(|number| queue.arrives("burst", number));
    assert_eq!(queue.starts().as_deref(), Some("burst0"));
    for number in 0..10 {
        queue.arrives("other", number);
        let started = [queue.starts(), queue.starts()].map(Option::unwrap);
        assert!(started.contains(&format!("other{number}")), "{started:?}");
    }
}

#[test]
fn an_origin_that_was_never_served_is_first_and_of_several_the_one_that_came_first() {
    let mut queue = ServedQueue::default();
    queue.arrives("a", 1);
    queue.arrives("b", 1);
    queue.start_all();
    for user in ["a", "b", "d", "c"] {
        queue.arrives(user, 2);
    }
    assert_eq!(queue.start_all(), ["d2", "c2", "a2", "b2"]);
}

#[test]
fn without_a_task_an_origin_keeps_its_place() {
    let mut queue = ServedQueue::default();
    for user in ["a", "b", "c"] {
        queue.arrives(user, 1);
    }
    queue.start_all();
    queue.arrives("c", 2);
    queue.arrives("b", 2);
    assert_eq!(queue.starts().as_deref(), Some("b2"));
    queue.arrives("a", 2);
    assert_eq!(queue.start_all(), ["a2", "c2"]);
}

/// The user `old` was served, then `others` other users.
#[rstest]
#[case::as_many_as_are_kept(MAX_SERVED - 1, ["new1", "old2", "old3"])]
#[case::one_more(MAX_SERVED, ["old2", "new1", "old3"])]
fn an_origin_that_is_no_longer_kept_counts_as_never_served(#[case] others: usize, #[case] order: [&str; 3]) {
    let mut queue = ServedQueue::default();
    queue.arrives("old", 1);
    queue.start_all();
    (0..others).for_each(|number| queue.arrives(&format!("other-{number}-"), 1));
    queue.start_all();
    queue.arrives("old", 2);
    queue.arrives("old", 3);
    queue.arrives("new", 1);
    assert_eq!(queue.start_all(), order);
}

#[rstest]
#[case::as_many_as_are_kept(MAX_SERVED - 1)]
#[case::one_more(MAX_SERVED)]
#[case::many_more(3 * MAX_SERVED)]
fn no_number_of_other_origins_keeps_one_from_its_turn(#[case] others: usize) {
    let mut queue = ServedQueue::default();
    queue.arrives("old", 1);
    queue.arrives("old", 2);
    queue.starts();
    for round in 0..3 {
        (0..others).for_each(|number| queue.arrives(&format!("other-{number}-"), round));
    }
    let started = queue.start_all();
    let place = started.iter().position(|id| id == "old2").unwrap();
    assert!(place <= others, "after {place} others");
}

#[test]
fn newcomers_without_end_keep_no_origin_from_its_turn() {
    let mut queue = ServedQueue::default();
    queue.arrives("old", 1);
    queue.arrives("old", 2);
    queue.starts();
    let started = (0..2 * MAX_SERVED).map(|number| {
        queue.arrives(&format!("new-{number}-"), 1);
        queue.starts().unwrap()
    });
    let place = started.into_iter().position(|id| id == "old2");
    assert_eq!(place, Some(MAX_SERVED));
}

#[test]
fn all_tasks_leave_in_the_order_of_their_arrival_without_being_served() {
    let mut queue = ServedQueue::default();
    for (user, number) in [("a", 1), ("a", 2), ("b", 1), ("a", 3), ("b", 2)] {
        queue.arrives(user, number);
    }
    let ids: Vec<String> = queue.queue.drain().into_iter().map(|task| task.id).collect();
    assert_eq!(ids, ["a1", "a2", "b1", "a3", "b2"]);
    assert!(queue.queue.is_empty() && queue.queue.has_room() && queue.served.is_empty());
    assert_eq!(queue.starts(), None);
}

/// The rule in the simplest form: tasks in the order of arrival, and when each origin was served.
#[derive(Default)]
struct SimpleQueue {
    waiting: Vec<(usize, usize)>,
    served: Vec<usize>,
}

impl SimpleQueue {
    fn starts(&mut self) -> Option<(usize, usize)> {
        let staleness = |user: usize| self.served.iter().position(|served| *served == user);
        let next = (0..self.waiting.len()).min_by_key(|place| (staleness(self.waiting[*place].0), *place))?;
        let (user, number) = self.waiting.remove(next);
        self.served.retain(|served| *served != user);
        self.served.push(user);
        let surplus = self.served.len().saturating_sub(MAX_SERVED);
        self.served.drain(..surplus);
        Some((user, number))
    }
}

proptest! {
    /// With few and with more origins than are kept; a restart at any time changes nothing.
    #[test]
    fn the_order_is_that_of_the_rule(
        users in prop::sample::select(vec![3_usize, MAX_SERVED + 10]),
        steps in prop::collection::vec((0..5_u8, any::<prop::sample::Index>()), 1..400),
    ) {
        let (mut queue, mut simple) = (ServedQueue::default(), SimpleQueue::default());
        for (number, (step, user)) in steps.into_iter().enumerate() {
            match step {
                0 => {
                    let waiting = simple.waiting.iter().map(|(user, number)| of_user(&format!("{user}-"), *number));
                    let stored = serde_json::to_string(&queue.served).unwrap();
                    queue.served = serde_json::from_str(&stored).unwrap();
                    queue.queue = TaskQueue::restored(waiting.collect(), &queue.served);
                }
                1 | 2 => {
                    let expected = simple.starts().map(|(user, number)| format!("{user}-{number}"));
                    prop_assert_eq!(queue.starts(), expected);
                }
                _ => {
                    let user = user.index(users);
                    queue.arrives(&format!("{user}-"), number);
                    simple.waiting.push((user, number));
                }
            }
            prop_assert_eq!(queue.queue.count(), simple.waiting.len());
        }
    }
}
