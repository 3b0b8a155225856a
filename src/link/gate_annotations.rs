//! The annotations with which a person answers a gate, of an Agent or of an AgentBudget. Pure.
//!
//! An answer names the gate, and an approval also the hash of what was shown, so an annotation that stays on the object
//! answers no other gate. Who may set them is decided by the admission policies of the chart: people set theirs with their
//! own name, and the controller those that it received over the link's API, each with the name of its user.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::answers::GateVerdict;
pub use agentloop_api::annotations::{APPROVE, APPROVED_BY, DENY};
use agentloop_support::text::first_chars;

/// Annotation with the answers that the controller received over the link's API: [`RecordedAnswers`] as JSON. Only the
/// controller may set it. The other annotations have one name for all their gates, and an edit replaces them as a whole;
/// here each answer keeps its own name, and people who answer at once do not replace each other's.
pub const ANSWERS: &str = "agentloop.dev/answers";
/// Longest annotation value that is kept, in characters.
const MAX_VALUE_CHARS: usize = 256;
/// Maximum number of answers that are kept in [`ANSWERS`], those to open gates not counted.
const MAX_PAST_ANSWERS: usize = 20;

/// An answer in [`ANSWERS`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RecordedAnswer {
    /// What the person decided.
    pub answer: GateVerdict,
    /// Hash of the arguments that the person saw.
    pub arguments_hash: String,
    /// Name of the user.
    pub by: String,
    /// When the controller received it.
    pub at: Timestamp,
}

/// The answers in [`ANSWERS`], by the id of the gate.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct RecordedAnswers(BTreeMap<String, RecordedAnswer>);

impl RecordedAnswers {
    /// Those of an object; none if the annotation is absent or malformed.
    #[must_use]
    pub fn of(annotations: &BTreeMap<String, String>) -> Self {
        let value = annotations.get(ANSWERS);
        value
            .and_then(|json| serde_json::from_str(json).ok())
            .unwrap_or_default()
    }

    /// The value of the annotation after this answer to `gate`. Answers to gates that are open remain, and of the others
    /// the newest ones.
    #[must_use]
    pub fn with(mut self, gate: &str, answer: RecordedAnswer, is_open: impl Fn(&str) -> bool) -> String {
        let by = first_chars(&answer.by, MAX_VALUE_CHARS).to_owned();
        self.0.insert(gate.to_owned(), RecordedAnswer { by, ..answer });
        let past = self.0.iter().filter(|(id, _)| !is_open(id));
        let mut past: Vec<_> = past.map(|(id, answer)| (answer.at, id.clone())).collect();
        past.sort();
        let too_many = past.len().saturating_sub(MAX_PAST_ANSWERS);
        for (_, id) in past.drain(..too_many) {
            self.0.remove(&id);
        }
        // Strings and timestamps have a representation in JSON.
        serde_json::to_string(&self).unwrap_or_default()
    }
}

/// The answer in the annotations of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnnotatedAnswer {
    /// A person approved the call.
    Approved {
        /// Name of the approver.
        by: String,
        /// The part of the annotation's value that approves the gate.
        value: String,
    },
    /// A person denied the call.
    Denied {
        /// Name of the user; unknown for the annotation [`DENY`].
        by: Option<String>,
        /// The part of the annotation's value that denies the gate.
        value: String,
    },
}

/// The answer to the gate `id` with this hash of its arguments. A denial takes precedence. An approval without the name
/// of the approver or with another hash is none.
#[must_use]
pub fn answer(annotations: &BTreeMap<String, String>, id: &str, hash: &str) -> Option<AnnotatedAnswer> {
    let recorded = RecordedAnswers::of(annotations).0.remove(id);
    let recorded = recorded.filter(|answer| answer.arguments_hash == hash && !answer.by.is_empty());
    let value = format!("{id}:{hash}");
    match recorded.map(|answer| (answer.answer, answer.by)) {
        Some((GateVerdict::Deny, by)) => Some(AnnotatedAnswer::Denied { by: Some(by), value }),
        Some((GateVerdict::Approve, by)) => match own_answer(annotations, id, hash) {
            Some(AnnotatedAnswer::Denied { by, value }) => Some(AnnotatedAnswer::Denied { by, value }),
            Some(AnnotatedAnswer::Approved { .. }) | None => Some(AnnotatedAnswer::Approved { by, value }),
        },
        None => own_answer(annotations, id, hash),
    }
}

/// The answer in the annotations that people set themselves.
fn own_answer(annotations: &BTreeMap<String, String>, id: &str, hash: &str) -> Option<AnnotatedAnswer> {
    let annotation = |key: &str| annotations.get(key).map(String::as_str);
    let tokens = |key| annotation(key).unwrap_or_default().split_whitespace();
    let denied = tokens(DENY).find(|token| token.split(':').next() == Some(id));
    if let Some(value) = denied {
        return Some(AnnotatedAnswer::Denied {
            by: None,
            value: first_chars(value, MAX_VALUE_CHARS).to_owned(),
        });
    }
    let by = annotation(APPROVED_BY).map(str::trim).filter(|by| !by.is_empty())?;
    let value = format!("{id}:{hash}");
    tokens(APPROVE)
        .any(|token| token == value)
        .then(|| AnnotatedAnswer::Approved {
            by: first_chars(by, MAX_VALUE_CHARS).to_owned(),
            value,
        })
}

/// The `kubectl` command that answers a gate of the object `resource` `name`.
#[must_use]
pub fn commands(resource: &str, (namespace, name): (&str, &str), (id, hash): (&str, &str)) -> String {
    format!(
        "kubectl annotate --overwrite {resource} -n {namespace} {name} {APPROVE}={id}:{hash} {APPROVED_BY}=<your user name>; \
         to deny: {DENY}={id}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Option<AnnotatedAnswer> {
        let annotations = pairs.iter().map(|(key, value)| ((*key).into(), (*value).into()));
        answer(&annotations.collect(), "e1-t2c1r1", "ab")
    }

    #[test]
    fn an_approval_names_the_gate_the_hash_and_the_approver() {
        let approved = Some(AnnotatedAnswer::Approved {
            by: "ann".into(),
            value: "e1-t2c1r1:ab".into(),
        });
        assert_eq!(read(&[(APPROVE, "x:1 e1-t2c1r1:ab"), (APPROVED_BY, " ann ")]), approved);
        assert_eq!(read(&[(APPROVE, "e1-t2c1r1:ac"), (APPROVED_BY, "ann")]), None);
        assert_eq!(read(&[(APPROVE, "e1-t2c1r1"), (APPROVED_BY, "ann")]), None);
        assert_eq!(read(&[(APPROVE, "e1-t2c1r11:ab"), (APPROVED_BY, "ann")]), None);
        assert_eq!(read(&[(APPROVE, "e1-t2c1r1:ab"), (APPROVED_BY, "")]), None);
        assert_eq!(read(&[(APPROVE, "e1-t2c1r1:ab")]), None);
    }

    #[test]
    fn a_denial_needs_no_hash_and_takes_precedence() {
        let denied = |value: &str| {
            Some(AnnotatedAnswer::Denied {
                by: None,
                value: value.into(),
            })
        };
        assert_eq!(read(&[(DENY, "e1-t2c1r1")]), denied("e1-t2c1r1"));
        let both = [(DENY, "e1-t2c1r1:zz"), (APPROVE, "e1-t2c1r1:ab"), (APPROVED_BY, "ann")];
        assert_eq!(read(&both), denied("e1-t2c1r1:zz"));
        assert_eq!(read(&[(DENY, "e1-t2c1r2")]), None);
    }

    fn recorded(answer: GateVerdict, hash: &str, by: &str, at: i64) -> RecordedAnswer {
        RecordedAnswer {
            answer,
            arguments_hash: hash.into(),
            by: by.into(),
            at: Timestamp::from_second(at).unwrap(),
        }
    }

    #[test]
    fn recorded_answers_keep_the_name_of_each_user_whatever_the_other_annotations_are() {
        let answers =
            RecordedAnswers::default().with("e1-t2c1r1", recorded(GateVerdict::Approve, "ab", "ann", 1), |_| true);
        let mut annotations: BTreeMap<String, String> = [(ANSWERS.into(), answers)].into();
        let answers = RecordedAnswers::of(&annotations);
        let answers = answers.with("e1-t2c1r2", recorded(GateVerdict::Deny, "cd", "bob", 2), |_| true);
        annotations.insert(ANSWERS.into(), answers);
        annotations.insert(APPROVE.into(), "e1-t2c1r1:ab e1-t2c1r2:cd e1-t2c1r3:ef".into());
        annotations.insert(APPROVED_BY.into(), "eve".into());
        let by = |id: &str, hash: &str| match answer(&annotations, id, hash)? {
            AnnotatedAnswer::Approved { by, .. } => Some((true, Some(by))),
            AnnotatedAnswer::Denied { by, .. } => Some((false, by)),
        };
        assert_eq!(by("e1-t2c1r1", "ab"), Some((true, Some("ann".into()))));
        assert_eq!(by("e1-t2c1r2", "cd"), Some((false, Some("bob".into()))));
        assert_eq!(by("e1-t2c1r3", "ef"), Some((true, Some("eve".into()))));
        assert_eq!(by("e1-t2c1r1", "zz"), None, "other arguments");
        annotations.insert(DENY.into(), "e1-t2c1r1".into());
        assert_eq!(
            read(&[(ANSWERS, &annotations[ANSWERS]), (DENY, "e1-t2c1r1")]),
            Some(AnnotatedAnswer::Denied {
                by: None,
                value: "e1-t2c1r1".into()
            }),
            "a denial takes precedence"
        );
    }

    #[test]
    fn a_malformed_record_and_one_without_a_name_are_no_answers() {
        for value in ["", "{", "[]", r#"{"e1-t2c1r1": "Approve"}"#] {
            assert_eq!(read(&[(ANSWERS, value)]), None, "{value}");
        }
        let nameless =
            RecordedAnswers::default().with("e1-t2c1r1", recorded(GateVerdict::Approve, "ab", "", 1), |_| true);
        assert_eq!(read(&[(ANSWERS, &nameless)]), None);
    }

    #[test]
    fn twenty_past_answers_are_kept_and_all_to_open_gates() {
        let record = |count: i64| {
            let mut annotations = BTreeMap::new();
            for number in 1..=count {
                let (gate, answer) = (format!("g{number}"), recorded(GateVerdict::Deny, "ab", "ann", number));
                let value = RecordedAnswers::of(&annotations).with(&gate, answer, |id| id == "g1");
                annotations.insert(ANSWERS.to_owned(), value);
            }
            RecordedAnswers::of(&annotations).0
        };
        assert_eq!(record(21).len(), 21, "20 past ones and an open one");
        let more = record(22);
        assert_eq!(more.len(), 21);
        assert!(more.contains_key("g1") && !more.contains_key("g2") && more.contains_key("g22"));
    }

    #[test]
    fn a_long_name_is_cut() {
        let long = "n".repeat(300);
        let value = RecordedAnswers::default().with("g", recorded(GateVerdict::Approve, "ab", &long, 1), |_| true);
        let answers = RecordedAnswers::of(&[(ANSWERS.to_owned(), value)].into());
        assert_eq!(answers.0["g"].by.len(), MAX_VALUE_CHARS);
    }
}
