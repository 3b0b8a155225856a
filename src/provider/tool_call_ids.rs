//! Ids of tool calls in a request.
//!
//! The engine gives each call an id that every server accepts. The journal of an earlier version may hold ids of
//! servers: they may contain characters that another server refuses, and two answers may share one.

use std::collections::{HashMap, HashSet};

/// Maximum length of an id.
const MAX_ID_CHARS: usize = 40;

/// The ids of one request. Call the methods in the order of its messages.
#[derive(Default)]
pub struct ToolCallIds<'a> {
    used: HashSet<String>,
    /// Ids of the last answer: as stored, and as sent.
    open: HashMap<&'a str, String>,
}

impl<'a> ToolCallIds<'a> {
    /// Starts an answer: following results belong to its calls.
    pub fn answer(&mut self) {
        self.open.clear();
    }

    /// Returns the id to send for a call.
    pub fn call(&mut self, id: &'a str) -> String {
        let known = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
        let plain: String = id
            .chars()
            .map(|letter| if known(letter) { letter } else { '_' })
            .take(MAX_ID_CHARS)
            .collect();
        let mut sent = plain.clone();
        let mut number = 1_u32;
        while sent.is_empty() || self.used.contains(&sent) {
            number += 1;
            let end = format!("-{number}");
            sent = plain.chars().take(MAX_ID_CHARS - end.len()).collect::<String>() + &end;
        }
        self.used.insert(sent.clone());
        self.open.insert(id, sent.clone());
        sent
    }

    /// Returns the id to send for a result.
    pub fn result(&self, id: &str) -> String {
        self.open.get(id).cloned().unwrap_or_else(|| id.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_ids_are_kept_and_all_others_are_made_valid_and_unique() {
        let mut ids = ToolCallIds::default();
        let long = "x".repeat(60);
        for (given, sent) in [
            (vec!["00001010a", "00001010b"], vec!["00001010a", "00001010b"]),
            (vec!["call_1", "a.1", "a_1"], vec!["call_1", "a_1", "a_1-2"]),
            (vec!["call_1", "", &long], vec!["call_1-2", "-2", &long[..40]]),
        ] {
            ids.answer();
            let calls: Vec<String> = given.iter().map(|id| ids.call(id)).collect();
            assert_eq!(calls, sent);
            let results: Vec<String> = given.iter().map(|id| ids.result(id)).collect();
            assert_eq!(results, sent);
        }
        ids.answer();
        assert_eq!(ids.call(&long), format!("{}-2", "x".repeat(38)));
    }
}
