//! Who may use the one cluster when: first the tests that break it, one after the other, then the others side by side.
//!
//! All tests begin at once and wait here, so that none that breaks the cluster has to wait for the end of others that are
//! in the middle. With fewer threads than tests they still never meet; it takes longer.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The most tests that share the cluster at a time: each waits more than it computes, but the node has two processors.
const SIDE_BY_SIDE: usize = 8;

/// The turns of tests at one cluster.
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The tests that wait, in the order of their names.
    waiting: BTreeMap<Ticket, Use>,
    next: u64,
    /// How many tests share the cluster now.
    shared: usize,
    exclusive: bool,
}

/// The name of a test, and a number that no other test has.
type Ticket = (String, u64);

/// How a test uses the cluster.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Beside other tests.
    Shared,
    /// Alone.
    Exclusive,
}

impl State {
    /// Whether it is the turn of this test: tests that need the cluster alone go first, and each kind in its order.
    fn may_begin(&self, ticket: &Ticket, wanted: Use) -> bool {
        let first = |wanted| self.waiting.iter().find(|(_, other)| **other == wanted);
        let is_first = first(wanted).is_some_and(|(first, _)| first == ticket);
        let is_free = match wanted {
            Use::Exclusive => self.shared == 0,
            Use::Shared => self.shared < SIDE_BY_SIDE && first(Use::Exclusive).is_none(),
        };
        is_first && is_free && !self.exclusive
    }
}

/// A place in the queue. It is left, if the test ends before its turn.
pub struct Place<'a> {
    turns: &'a Turns,
    ticket: Ticket,
    wanted: Use,
}

/// The turn of a test, until it is dropped.
pub struct Turn<'a> {
    turns: &'a Turns,
    used: Use,
    since: Instant,
}

impl Turns {
    pub const fn new() -> Self {
        Self {
            state: Mutex::new(State {
                waiting: BTreeMap::new(),
                next: 0,
                shared: 0,
                exclusive: false,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the queue.
    pub fn queue(&self, wanted: Use) -> Place<'_> {
        let mut state = self.lock();
        let ticket = (name(), state.next);
        state.next += 1;
        state.waiting.insert(ticket.clone(), wanted);
        Place {
            turns: self,
            ticket,
            wanted,
        }
    }
}

impl<'a> Place<'a> {
    /// Waits for the turn.
    pub fn wait(self) -> Turn<'a> {
        let turns = self.turns;
        let mut state = turns.lock();
        while !state.may_begin(&self.ticket, self.wanted) {
            state = turns.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match self.wanted {
            Use::Shared => state.shared += 1,
            Use::Exclusive => state.exclusive = true,
        }
        drop(state);
        say("begins");
        // It leaves the queue when its place is dropped.
        Turn {
            turns,
            used: self.wanted,
            since: Instant::now(),
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.turns.lock().waiting.remove(&self.ticket);
        self.turns.changed.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        say(&format!("ends after {} s", self.since.elapsed().as_secs()));
        let mut state = self.turns.lock();
        match self.used {
            Use::Shared => state.shared -= 1,
            Use::Exclusive => state.exclusive = false,
        }
        drop(state);
        self.turns.changed.notify_all();
    }
}

/// The name of the test, which is that of its thread.
fn name() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}

/// Adds a line to the file of this variable, if it is set: a run that hangs names all tests that wait, not the one that has its
/// turn. Standard output and error are those of the names and results of tests.
fn say(what: &str) {
    let Some(path) = std::env::var_os("AGENTLOOP_E2E_TURNS") else {
        return;
    };
    let file = OpenOptions::new().create(true).append(true).open(path);
    let _ = file.and_then(|mut file| file.write_all(format!("{} {what}\n", name()).as_bytes()));
}

#[test]
fn tests_that_break_the_cluster_go_first_and_the_others_side_by_side() {
    let turns = Turns::new();
    let may_begin = |place: &Place<'_>| turns.lock().may_begin(&place.ticket, place.wanted);
    let first = turns.queue(Use::Shared);
    let [alone, alone_too] = [Use::Exclusive; 2].map(|wanted| turns.queue(wanted));
    assert!(!may_begin(&first), "others need the cluster alone");
    assert!(!may_begin(&alone_too), "it is the second");
    let turn = alone.wait();
    assert!(!may_begin(&first) && !may_begin(&alone_too), "one has it alone");
    drop(turn);
    assert!(!may_begin(&first), "the second needs it alone");
    // A test that fails before its turn holds up no other.
    drop(alone_too);
    let mut running = vec![first.wait()];
    running.extend((1..SIDE_BY_SIDE).map(|_| turns.queue(Use::Shared).wait()));
    let one_more = turns.queue(Use::Shared);
    assert!(!may_begin(&one_more), "enough share it");
    running.pop();
    assert!(may_begin(&one_more));
    let late = turns.queue(Use::Exclusive);
    assert!(
        !may_begin(&one_more) && !may_begin(&late),
        "first those that share it end"
    );
    running.clear();
    assert!(may_begin(&late));
    drop(late.wait());
    assert!(may_begin(&one_more));
}
