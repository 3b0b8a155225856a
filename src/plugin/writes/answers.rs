//! Answers to gates, as annotations under the name of the user.

use std::collections::BTreeMap;

use serde_json::json;

use super::PlannedWrite;
use crate::api::annotations::{APPROVE, APPROVED_BY, DENY};
use crate::link::gate_annotations::{self, AnnotatedAnswer};
use crate::plugin::failure::PluginError;
use crate::plugin::screens::approvals::ApprovalListRow;

/// Which gates are answered, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerRequest {
    /// Whether they are approved; otherwise they are denied.
    pub approves: bool,
    /// Id of the gate. Absent: the only one that is open, or all.
    pub gate: Option<String>,
    /// All gates that are open.
    pub all: bool,
    /// The name of the user.
    pub user: String,
}

/// Id and hash of a gate.
pub type PinnedGate = (String, String);

/// The annotations to set. The first plan pins the gates that it chooses: after a conflict, the user's answer is for
/// these and no others. Earlier answers of the user to gates that are still open stay; an approval of another user
/// must not be taken back.
pub fn plan(
    target: &str,
    gates: &[ApprovalListRow],
    annotations: &BTreeMap<String, String>,
    request: &AnswerRequest,
    pinned: &mut Option<Vec<PinnedGate>>,
) -> Result<PlannedWrite, PluginError> {
    let chosen = match pinned {
        Some(pinned) => again(target, gates, pinned)?,
        None => choose(target, gates, request)?,
    };
    let pins = |gate: &&ApprovalListRow| (gate.gate.clone(), gate.arguments_hash.clone());
    pinned.get_or_insert_with(|| chosen.iter().map(pins).collect());
    let is_open = |token: &str| {
        gates
            .iter()
            .any(|gate| Some(gate.gate.as_str()) == token.split(':').next())
    };
    let is_chosen = |token: &str| {
        chosen
            .iter()
            .any(|gate| Some(gate.gate.as_str()) == token.split(':').next())
    };
    let tokens = |key: &str| {
        let value = annotations.get(key).map(String::as_str).unwrap_or_default();
        value
            .split_whitespace()
            .filter(|token| is_open(token))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let (key, mut value) = if request.approves {
        (APPROVE, tokens(APPROVE))
    } else {
        (DENY, tokens(DENY))
    };
    if request.approves {
        let is_denied = |gate: &&&ApprovalListRow| {
            let given = gate_annotations::answer(annotations, &gate.gate, &gate.arguments_hash);
            matches!(given, Some(AnnotatedAnswer::Denied { .. }))
        };
        if let Some(ApprovalListRow { gate, .. }) = chosen.iter().find(is_denied) {
            return Err(PluginError::Refused(format!(
                "{gate} of {target} was denied: a denial takes precedence"
            )));
        }
        let by = annotations.get(APPROVED_BY).filter(|by| **by != request.user);
        let others = value.iter().find(|token| !is_chosen(token));
        if let (Some(by), Some(other)) = (by, others) {
            return Err(PluginError::Refused(format!(
                "{by} has approved {other} of {target}, which the loop has not received yet, and your approval would \
                 replace it: repeat the command in a few seconds, or approve that gate too"
            )));
        }
    }
    value.retain(|token| !is_chosen(token));
    value.extend(
        chosen
            .iter()
            .map(|gate| format!("{}:{}", gate.gate, gate.arguments_hash)),
    );
    let mut set = json!({ key: value.join(" ") });
    if request.approves {
        set[APPROVED_BY] = request.user.clone().into();
    }
    let ids: Vec<&str> = chosen.iter().map(|gate| gate.gate.as_str()).collect();
    let word = if request.approves { "approved" } else { "denied" };
    Ok(PlannedWrite {
        patch: Some(json!({"metadata": {"annotations": set}})),
        message: format!("{target}: {word} {} as {}", ids.join(", "), request.user),
    })
}

/// The gates that a request is for. One that names none must be unambiguous.
fn choose<'a>(
    target: &str,
    gates: &'a [ApprovalListRow],
    request: &AnswerRequest,
) -> Result<Vec<&'a ApprovalListRow>, PluginError> {
    let ids = || {
        gates
            .iter()
            .map(|gate| gate.gate.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    match (&request.gate, gates) {
        (_, []) => Err(PluginError::Refused(format!("{target} has no open gate"))),
        (Some(id), _) => {
            let found = gates.iter().find(|gate| gate.gate == *id);
            let found = found
                .ok_or_else(|| PluginError::Refused(format!("gate {id} of {target} is not open; open: {}", ids())));
            Ok(vec![found?])
        }
        (None, _) if request.all => Ok(gates.iter().collect()),
        (None, [only]) => Ok(vec![only]),
        (None, _) => Err(PluginError::Usage(format!(
            "{target} has several open gates: name one, or use --all; open: {}",
            ids()
        ))),
    }
}

/// The gates that were chosen before, if all of them are still open and the same.
fn again<'a>(
    target: &str,
    gates: &'a [ApprovalListRow],
    pinned: &[PinnedGate],
) -> Result<Vec<&'a ApprovalListRow>, PluginError> {
    let found = pinned.iter().map(|(id, hash)| {
        let same = gates.iter().find(|gate| gate.gate == *id && gate.arguments_hash == *hash);
        same.ok_or_else(|| {
            PluginError::Refused(format!(
                "gate {id} of {target} has changed or is no longer open, and nothing was answered: see kubectl agentloop \
                 approvals"
            ))
        })
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::gate_annotations::ANSWERS;
    use crate::plugin::failure::ExitStatus;

    fn gate(id: &str, hash: &str) -> ApprovalListRow {
        ApprovalListRow {
            kind: "Agent",
            namespace: "team-a".into(),
            name: "helper".into(),
            gate: id.into(),
            reason: "ToolCallNeedsApproval".into(),
            tool: "bank__pay".into(),
            arguments_hash: hash.into(),
            opened_at: jiff::Timestamp::UNIX_EPOCH,
            expires_at: None,
            untrusted_content_source: None,
            command: String::new(),
        }
    }

    fn request(approves: bool, gate: Option<&str>, all: bool) -> AnswerRequest {
        AnswerRequest {
            approves,
            gate: gate.map(str::to_owned),
            all,
            user: "ann".into(),
        }
    }

    fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()))
            .collect()
    }

    /// The annotations that are set, or the refusal.
    fn set(before: &[(&str, &str)], request: &AnswerRequest) -> Result<serde_json::Value, PluginError> {
        let gates = [gate("g1", "aa"), gate("g2", "bb")];
        plan("helper", &gates, &annotations(before), request, &mut None).map(|planned| {
            let patch = planned.patch.unwrap();
            patch["metadata"]["annotations"].clone()
        })
    }

    #[test]
    fn an_approval_names_gate_hash_and_user_and_a_denial_names_the_gate() {
        let approved = set(&[], &request(true, Some("g2"), false)).unwrap();
        assert_eq!(approved, json!({APPROVE: "g2:bb", APPROVED_BY: "ann"}));
        assert_eq!(
            set(&[], &request(false, Some("g2"), false)).unwrap(),
            json!({DENY: "g2:bb"})
        );
        let all = set(&[], &request(true, None, true)).unwrap();
        assert_eq!(all, json!({APPROVE: "g1:aa g2:bb", APPROVED_BY: "ann"}));
    }

    #[test]
    fn without_a_gate_exactly_one_must_be_open() {
        let ambiguous = set(&[], &request(true, None, false)).unwrap_err();
        assert_eq!(ambiguous.exit_status(), ExitStatus::Usage);
        assert!(ambiguous.to_string().contains("open: g1, g2"), "{ambiguous}");
        let one = plan(
            "helper",
            &[gate("g1", "aa")],
            &BTreeMap::new(),
            &request(true, None, false),
            &mut None,
        );
        assert_eq!(one.unwrap().message, "helper: approved g1 as ann");
        let none = plan("helper", &[], &BTreeMap::new(), &request(true, None, true), &mut None)
            .err()
            .unwrap();
        assert_eq!(none.to_string(), "helper has no open gate");
        assert!(set(&[], &request(true, Some("g3"), false)).is_err());
    }

    #[test]
    fn after_a_conflict_the_answer_is_for_the_gates_that_were_chosen_first() {
        let none = BTreeMap::new();
        for (before, all) in [
            (vec![gate("g1", "aa")], false),
            (vec![gate("g1", "aa"), gate("g2", "bb")], true),
        ] {
            let request = request(true, None, all);
            let mut pinned = None;
            let again = |gates: &[ApprovalListRow], pinned: &mut Option<Vec<PinnedGate>>| {
                plan("helper", gates, &none, &request, pinned).map(|planned| planned.message)
            };
            let first = again(&before, &mut pinned).unwrap();
            let mut more = before.clone();
            more.push(gate("g3", "cc"));
            assert_eq!(
                again(&more, &mut pinned).unwrap(),
                first,
                "a gate that was added is not answered"
            );
            let gone = again(&[gate("g3", "cc")], &mut pinned).unwrap_err().to_string();
            assert!(
                gone.contains("gate g1 of helper has changed or is no longer open"),
                "{gone}"
            );
            more[0].arguments_hash = "dd".into();
            assert!(again(&more, &mut pinned).is_err(), "other arguments are another call");
            assert!(again(&[], &mut pinned).is_err());
        }
    }

    #[test]
    fn earlier_answers_of_the_user_to_open_gates_stay() {
        let before = [(APPROVE, "g1:aa old:cc"), (APPROVED_BY, "ann")];
        let approved = set(&before, &request(true, Some("g2"), false)).unwrap();
        assert_eq!(approved[APPROVE], "g1:aa g2:bb");
        let denied = set(&[(DENY, "g1 old")], &request(false, Some("g2"), false)).unwrap();
        assert_eq!(denied, json!({DENY: "g1 g2:bb"}));
    }

    #[test]
    fn an_approval_of_another_user_is_not_replaced_unless_it_is_repeated_too() {
        let before = [(APPROVE, "g1:aa"), (APPROVED_BY, "bob")];
        let refused = set(&before, &request(true, Some("g2"), false)).unwrap_err().to_string();
        assert!(refused.contains("bob has approved g1:aa"), "{refused}");
        assert_eq!(
            set(&before, &request(true, None, true)).unwrap()[APPROVE],
            "g1:aa g2:bb"
        );
        let past = [(APPROVE, "old:cc"), (APPROVED_BY, "bob")];
        assert_eq!(set(&past, &request(true, Some("g2"), false)).unwrap()[APPROVE], "g2:bb");
        assert!(
            set(&before, &request(false, Some("g2"), false)).is_ok(),
            "a denial has no name"
        );
    }

    #[test]
    fn a_denied_gate_is_not_approved() {
        for value in ["g2", "g2:bb"] {
            let refused = set(&[(DENY, value)], &request(true, Some("g2"), false)).unwrap_err();
            assert!(refused.to_string().contains("takes precedence"), "{refused}");
        }
        assert!(set(&[(DENY, "g1")], &request(true, Some("g2"), false)).is_ok());
    }

    #[test]
    fn a_gate_that_was_denied_over_the_link_is_not_approved() {
        let recorded = |answer: &str, hash: &str| {
            json!({"g2": {"answer": answer, "argumentsHash": hash, "by": "bob", "at": "2026-11-22T14:00:00Z"}})
                .to_string()
        };
        let approved = |recorded: &str| set(&[(ANSWERS, recorded)], &request(true, Some("g2"), false));
        let refused = approved(&recorded("Deny", "bb")).unwrap_err();
        assert!(refused.to_string().contains("takes precedence"), "{refused}");
        assert!(
            approved(&recorded("Deny", "other")).is_ok(),
            "an answer to other arguments"
        );
        assert!(approved(&recorded("Approve", "bb")).is_ok());
    }
}
