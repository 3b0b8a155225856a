//! Items of several namespaces in line: first in, first out within a namespace, and the namespaces take turns. An item waits for
//! at most one of each other namespace before each of its own, however many those have.

use std::collections::{HashMap, VecDeque};

#[derive(Debug)]
pub(in crate::controller) struct FairLine<T> {
    /// None is empty.
    lines: HashMap<String, VecDeque<T>>,
    /// The namespaces with items, the next one first.
    turns: VecDeque<String>,
}

impl<T> FairLine<T> {
    pub(in crate::controller) fn new() -> Self {
        Self {
            lines: HashMap::new(),
            turns: VecDeque::new(),
        }
    }

    /// Adds an item to the end of its namespace's line.
    pub(in crate::controller) fn push(&mut self, namespace: &str, item: T) {
        if let Some(line) = self.lines.get_mut(namespace) {
            line.push_back(item);
            return;
        }
        self.lines.insert(namespace.to_owned(), VecDeque::from([item]));
        self.turns.push_back(namespace.to_owned());
    }

    /// The next item.
    pub(in crate::controller) fn front(&self) -> Option<&T> {
        self.lines.get(self.turns.front()?)?.front()
    }

    /// Gives the next turn to the first namespace whose next item is wanted. Returns whether there is one.
    pub(in crate::controller) fn advance_to(&mut self, is_wanted: impl Fn(&T) -> bool) -> bool {
        let next = |namespace: &String| self.lines.get(namespace).and_then(VecDeque::front);
        let position = self
            .turns
            .iter()
            .position(|namespace| next(namespace).is_some_and(&is_wanted));
        let Some(namespace) = position.and_then(|position| self.turns.remove(position)) else {
            return false;
        };
        self.turns.push_front(namespace);
        true
    }

    /// Takes the next item; its namespace goes to the end.
    pub(in crate::controller) fn pop(&mut self) -> Option<T> {
        let namespace = self.turns.pop_front()?;
        let line = self.lines.get_mut(&namespace)?;
        let item = line.pop_front();
        if line.is_empty() {
            self.lines.remove(&namespace);
        } else {
            self.turns.push_back(namespace);
        }
        item
    }

    /// Removes the next items for as long as this holds; their namespaces keep their turns.
    pub(in crate::controller) fn discard_while(&mut self, is_void: impl Fn(&T) -> bool) {
        while let Some(namespace) = self.turns.front() {
            let Some(line) = self.lines.get_mut(namespace) else {
                return;
            };
            while line.pop_front_if(|item| is_void(item)).is_some() {}
            if !line.is_empty() {
                return;
            }
            self.lines.remove(namespace);
            self.turns.pop_front();
        }
    }

    pub(in crate::controller) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Number of items of a namespace.
    pub(in crate::controller) fn len_of(&self, namespace: &str) -> usize {
        self.lines.get(namespace).map_or(0, VecDeque::len)
    }
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    fn line(items: &[(&'static str, u32)]) -> FairLine<(&'static str, u32)> {
        let mut line = FairLine::new();
        for item in items {
            line.push(item.0, *item);
        }
        line
    }

    #[test]
    fn namespaces_take_turns_and_items_of_one_keep_their_order() {
        let mut line = line(&[("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2)]);
        assert_eq!(
            (line.front(), line.len_of("a"), line.len_of("c")),
            (Some(&("a", 1)), 3, 0)
        );
        assert_eq!(line.pop(), Some(("a", 1)));
        line.push("c", ("c", 1));
        let rest: Vec<_> = std::iter::from_fn(|| line.pop()).collect();
        assert_eq!(rest, [("b", 1), ("a", 2), ("c", 1), ("b", 2), ("a", 3)]);
        assert!(line.is_empty() && line.lines.is_empty() && line.front().is_none());
    }

    #[test]
    fn a_namespace_whose_next_item_is_wanted_comes_first_and_the_others_keep_their_order() {
        let mut line = line(&[("a", 1), ("a", 3), ("b", 1), ("c", 2), ("c", 1), ("d", 2)]);
        assert!(
            !line.advance_to(|(_, number)| *number == 3),
            "not the next of its namespace"
        );
        assert!(line.advance_to(|(_, number)| *number == 2));
        let all: Vec<_> = std::iter::from_fn(|| line.pop()).collect();
        assert_eq!(all, [("c", 2), ("a", 1), ("b", 1), ("d", 2), ("c", 1), ("a", 3)]);
        assert!(!line.advance_to(|_| true));
    }

    #[test]
    fn discarded_items_cost_no_turn() {
        let mut line = line(&[("a", 0), ("b", 0), ("b", 1), ("c", 1), ("a", 1)]);
        line.discard_while(|(_, number)| *number == 0);
        assert_eq!(line.pop(), Some(("a", 1)));
        line.discard_while(|(_, number)| *number == 0);
        assert_eq!(line.pop(), Some(("b", 1)));
        line.discard_while(|_| true);
        assert!(line.is_empty() && line.lines.is_empty());
    }
}
