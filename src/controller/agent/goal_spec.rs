//! Checks of `spec.goal` that its schema cannot express: regular expressions and JSON schemas that can be used. Pure.

use regex::Regex;
use serde_json::Value;

use crate::api::AgentSpec;
use crate::api::goal::{AcceptanceCriterion, GoalSpec};
use crate::support::json_schema;

/// Maximum number of characters of a problem.
const MAX_PROBLEM: usize = 300;

/// The goal as a text; `None`: there is none.
pub(super) fn text(spec: &AgentSpec) -> Option<String> {
    serde_json::to_string(spec.goal.as_ref()?).ok()
}

/// Checks what [`text`] returned; the error is the message for the user.
pub(super) fn check(text: &str) -> Result<(), String> {
    let goal: GoalSpec = serde_json::from_str(text).map_err(|error| error.to_string())?;
    problem(&goal).map_or(Ok(()), Err)
}

/// The first field that cannot be used, and what is wrong with it.
fn problem(goal: &GoalSpec) -> Option<String> {
    goal.acceptance_criteria.iter().find_map(of_criterion)
}

fn of_criterion(criterion: &AcceptanceCriterion) -> Option<String> {
    let command = criterion.command.as_ref();
    let pass_regex = command.and_then(|command| command.pass_regex.as_deref());
    let unusable = [
        ("regex", criterion.regex.as_deref().and_then(of_regex)),
        ("command.passRegex", pass_regex.and_then(of_regex)),
        ("jsonSchema", criterion.json_schema.as_ref().and_then(of_schema)),
    ];
    let (field, problem) = unusable
        .into_iter()
        .find_map(|(field, problem)| Some((field, problem?)))?;
    let problem: String = problem.chars().take(MAX_PROBLEM).collect();
    let name = &criterion.name;
    Some(format!(
        "spec.goal.acceptanceCriteria[{name}].{field} cannot be used: {problem}"
    ))
}

fn of_regex(regex: &str) -> Option<String> {
    // The engine supports more than this, such as look-around.
    Regex::new(regex)
        .err()
        .map(|_| "it is not a regular expression in the syntax of RE2".to_owned())
}

fn of_schema(schema: &Value) -> Option<String> {
    json_schema::check(schema).err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_checks_that_can_be_used_pass() {
        let goal = |criterion: &Value| -> GoalSpec {
            serde_json::from_value(json!({"description": "Count.", "acceptanceCriteria": [criterion]})).unwrap()
        };
        for (criterion, field) in [
            (json!({"name": "a", "regex": "^[0-9]+ stars$"}), None),
            (json!({"name": "a", "regex": "("}), Some("[a].regex cannot")),
            (json!({"name": "a", "jsonSchema": {"type": "object"}}), None),
            (
                json!({"name": "a", "jsonSchema": {"type": "thing"}}),
                Some("[a].jsonSchema cannot"),
            ),
            (
                json!({"name": "a", "jsonSchema": {"$ref": "https://example.com/x.json"}}),
                Some("[a].jsonSchema cannot"),
            ),
            (json!({"name": "a", "command": {"run": "x", "passRegex": "ok"}}), None),
            (
                json!({"name": "a", "command": {"run": "x", "passRegex": "["}}),
                Some("[a].command.passRegex cannot"),
            ),
            (json!({"name": "a", "judge": "("}), None),
        ] {
            let found = problem(&goal(&criterion));
            assert_eq!(found.is_some(), field.is_some(), "{criterion}: {found:?}");
            assert!(
                found.unwrap_or_default().contains(field.unwrap_or_default()),
                "{criterion}"
            );
        }
    }
}
