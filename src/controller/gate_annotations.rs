//! The annotations with which a person answers a gate, of an Agent or of an AgentBudget. Pure.
//!
//! An answer names the gate, and an approval also the hash of what was shown, so an annotation that stays on the object
//! answers no other gate. Who may set them is decided by the admission policy of the chart.

use std::collections::BTreeMap;

use crate::support::text::first_chars;

/// Annotation that approves gates: `<gate>:<argumentsHash>`, separated by spaces.
pub const APPROVE: &str = "agentloop.dev/approve";
/// Annotation with the name of the approver; the admission policy requires it to be the requesting user.
pub const APPROVED_BY: &str = "agentloop.dev/approved-by";
/// Annotation that denies gates: `<gate>` or `<gate>:<argumentsHash>`, separated by spaces.
pub const DENY: &str = "agentloop.dev/deny";
/// Longest annotation value that is kept, in characters.
const LONGEST: usize = 256;

/// The answer in the annotations of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnnotatedAnswer {
    Approved {
        /// Name of the approver.
        by: String,
        /// The part of the annotation's value that approves the gate.
        value: String,
    },
    Denied {
        /// The part of the annotation's value that denies the gate.
        value: String,
    },
}

/// The answer to the gate `id` with this hash of its arguments. A denial takes precedence. An approval without the name
/// of the approver or with another hash is none.
#[must_use]
pub fn answer(annotations: &BTreeMap<String, String>, id: &str, hash: &str) -> Option<AnnotatedAnswer> {
    let annotation = |key: &str| annotations.get(key).map(String::as_str);
    let tokens = |key| annotation(key).unwrap_or_default().split_whitespace();
    let denied = tokens(DENY).find(|token| token.split(':').next() == Some(id));
    if let Some(value) = denied {
        return Some(AnnotatedAnswer::Denied {
            value: first_chars(value, LONGEST).to_owned(),
        });
    }
    let by = annotation(APPROVED_BY).map(str::trim).filter(|by| !by.is_empty())?;
    let value = format!("{id}:{hash}");
    tokens(APPROVE)
        .any(|token| token == value)
        .then(|| AnnotatedAnswer::Approved {
            by: first_chars(by, LONGEST).to_owned(),
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
        let denied = |value: &str| Some(AnnotatedAnswer::Denied { value: value.into() });
        assert_eq!(read(&[(DENY, "e1-t2c1r1")]), denied("e1-t2c1r1"));
        let both = [(DENY, "e1-t2c1r1:zz"), (APPROVE, "e1-t2c1r1:ab"), (APPROVED_BY, "ann")];
        assert_eq!(read(&both), denied("e1-t2c1r1:zz"));
        assert_eq!(read(&[(DENY, "e1-t2c1r2")]), None);
    }
}
