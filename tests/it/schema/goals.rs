//! Samples of `spec.goal`, and any valid one.

use std::collections::BTreeMap;

use agentloop::api::agent::{AcceptanceCriterion, CommandCriterion, ConfidenceSpec, GoalSpec};
use agentloop::api::goal::{GoalArtifact, QuestionModel};
use proptest::option;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::samples::{Row, row, scripted, with};

fn goal(change: &Value) -> Value {
    let goal = json!({"description": "Count.", "acceptanceCriteria": [{"name": "text", "regex": "^done"}]});
    with(
        with(scripted(), &json!({"spec": {"mode": "Goal", "goal": goal}})),
        &json!({"spec": {"goal": change}}),
    )
}

fn criterion(criterion: &Value) -> Value {
    goal(&json!({"acceptanceCriteria": [criterion]}))
}

fn files() -> Value {
    json!({"spec": {"tools": {"builtin": ["Files"], "toolbox": {"image": "debian:12"}}}})
}

fn artifact_rows() -> Vec<Row> {
    let artifacts = |artifacts: &Value| with(goal(&json!({ "artifacts": artifacts })), &files());
    let path = |path: &str| artifacts(&json!([{ "path": path }]));
    vec![
        row(
            "spec.goal.artifacts needs Files",
            vec![path("NOTES.md"), goal(&json!({"artifacts": []}))],
            vec![
                goal(&json!({"artifacts": [{"path": "NOTES.md"}]})),
                with(path("NOTES.md"), &json!({"spec": {"tools": {"builtin": ["Shell"]}}})),
            ],
        ),
        row(
            "spec.goal.artifacts[].path must be the path of one file",
            vec![
                path("dist/report.pdf"),
                path("a b/ä.txt"),
                path(".hidden/..name/...x"),
                path(&"x".repeat(256)),
                artifacts(&json!([{"path": "a", "minBytes": 0}, {"path": "b", "minBytes": 1_073_741_824}])),
            ],
            [
                "/etc/passwd",
                "..",
                "../a",
                "a/../../b",
                "a/..",
                ".",
                "./a",
                "a/./b",
                "a//b",
                "a/",
                "/",
                "a\nb",
                "a\u{7f}",
            ]
            .into_iter()
            .map(path)
            .collect(),
        ),
    ]
}

pub fn rows() -> Vec<Row> {
    let command = json!({"name": "tests", "command": {"run": "cargo test", "passRegex": "ok"}});
    let shell = json!({"spec": {"tools": {"builtin": ["Shell"], "toolbox": {"image": "debian:12"}}}});
    let light = json!({"spec": {"lightModel": scripted()["spec"]["model"]}});
    let mut rows = artifact_rows();
    rows.extend(vec![
        row(
            "spec.mode is Goal, which needs spec.goal",
            vec![goal(&json!({})), scripted()],
            vec![with(goal(&json!({})), &json!({"spec": {"goal": null}}))],
        ),
        row(
            "spec.goal has no effect without mode Goal",
            vec![goal(&json!({}))],
            vec![
                with(goal(&json!({})), &json!({"spec": {"mode": "Continuous"}})),
                with(goal(&json!({})), &json!({"spec": {"mode": null}})),
            ],
        ),
        row(
            "spec.goal.acceptanceCriteria has a command, which needs Shell",
            vec![with(criterion(&command), &shell)],
            vec![criterion(&command), with(criterion(&command), &files())],
        ),
        row(
            "each of spec.goal.acceptanceCriteria needs exactly one check",
            vec![
                criterion(&json!({"name": "a", "regex": "x"})),
                criterion(&json!({"name": "a", "jsonSchema": {"type": "object"}})),
                criterion(&json!({"name": "a", "judge": "Is it complete?"})),
                with(criterion(&command), &shell),
            ],
            vec![
                criterion(&json!({"name": "a"})),
                criterion(&json!({"name": "a", "regex": "x", "judge": "Is it complete?"})),
                criterion(&json!({"name": "a", "regex": "x", "jsonSchema": {}})),
            ],
        ),
        row(
            "spec.goal.acceptanceCriteria[].judgeModel has no effect without judge",
            vec![
                with(
                    criterion(&json!({"name": "a", "judge": "Is it?", "judgeModel": "Light"})),
                    &light,
                ),
                criterion(&json!({"name": "a", "judge": "Is it?", "judgeModel": "Main"})),
                criterion(&json!({"name": "a", "regex": "x", "judgeModel": "Main"})),
            ],
            vec![with(
                criterion(&json!({"name": "a", "regex": "x", "judgeModel": "Light"})),
                &light,
            )],
        ),
        row(
            "spec.goal uses the light model, and spec.lightModel is not set",
            vec![
                with(
                    criterion(&json!({"name": "a", "judge": "Is it?", "judgeModel": "Light"})),
                    &light,
                ),
                with(goal(&json!({"confidence": {"model": "Light"}})), &light),
                goal(&json!({"confidence": {"model": "Main"}})),
            ],
            vec![
                criterion(&json!({"name": "a", "judge": "Is it?", "judgeModel": "Light"})),
                goal(&json!({"confidence": {"model": "Light"}})),
            ],
        ),
        row(
            "spec.goal.maxCostUSD must be a decimal number",
            vec![goal(&json!({"maxCostUSD": "2.50"})), goal(&json!({"maxCostUSD": "3"}))],
            vec![
                goal(&json!({"maxCostUSD": "much"})),
                goal(&json!({"maxCostUSD": "-1"})),
                goal(&json!({"maxCostUSD": "0.0000001"})),
            ],
        ),
    ]);
    rows
}

fn question_model() -> impl Strategy<Value = QuestionModel> {
    prop_oneof![3 => Just(QuestionModel::Main), 1 => Just(QuestionModel::Light)]
}

/// Whether a model must be set that answers its questions.
pub fn uses_light_model(goal: &GoalSpec) -> bool {
    let mut criteria = goal.acceptance_criteria.iter();
    goal.confidence.model == QuestionModel::Light
        || criteria.any(|criterion| criterion.judge_model == QuestionModel::Light)
}

fn check() -> impl Strategy<Value = AcceptanceCriterion> {
    let none = AcceptanceCriterion {
        name: String::new(),
        regex: None,
        json_schema: None,
        judge: None,
        judge_model: QuestionModel::Main,
        command: None,
    };
    let (regex, schema, judge, command) = (none.clone(), none.clone(), none.clone(), none);
    prop_oneof![
        "[a-z]{1,20}".prop_map(move |text| AcceptanceCriterion {
            regex: Some(text),
            ..regex.clone()
        }),
        "[a-z]{1,20}".prop_map(move |kind| AcceptanceCriterion {
            json_schema: Some(json!({"type": kind, "properties": {"a": {"enum": [1, "b"]}}})),
            ..schema.clone()
        }),
        ("\\PC{1,80}", question_model()).prop_map(move |(question, judge_model)| AcceptanceCriterion {
            judge: Some(question),
            judge_model,
            ..judge.clone()
        }),
        ("\\PC{1,80}", option::of("[a-z]{1,20}"), option::of("[a-z/.]{1,20}")).prop_map(
            move |(run, pass_regex, junit)| AcceptanceCriterion {
                command: Some(CommandCriterion { run, pass_regex, junit }),
                ..command.clone()
            }
        ),
    ]
}

fn criteria() -> impl Strategy<Value = Vec<AcceptanceCriterion>> {
    let named = prop::collection::btree_map("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", check(), 1..=4);
    named.prop_map(|criteria| {
        let named = |(name, criterion)| AcceptanceCriterion { name, ..criterion };
        criteria.into_iter().map(named).collect()
    })
}

fn artifacts() -> impl Strategy<Value = Vec<GoalArtifact>> {
    let files = prop::collection::btree_map("[a-z]{1,20}(/[a-z .]{0,9}[a-z]){0,3}", 0_u32..=1_073_741_824, 0..=4);
    files.prop_map(|files| {
        let files = files.into_iter();
        files
            .map(|(path, min_bytes)| GoalArtifact { path, min_bytes })
            .collect()
    })
}

prop_compose! {
    /// Any goal.
    pub fn goals()(
        description in "\\PC{1,80}",
        (acceptance_criteria, artifacts) in (criteria(), artifacts()),
        constraints in prop::collection::btree_map("[a-z]{1,20}", "\\PC{0,80}", 0..=4),
        (max_steps, max_attempts, timeout_seconds) in (1_u32..=1000, 1_u32..=10, 1_u32..=2_592_000),
        max_cost_usd in option::of("[0-9]{1,9}(\\.[0-9]{1,6})?"),
        (every_steps, threshold_percent, model) in (1_u32..=1000, 0_u32..=100, question_model()),
    ) -> GoalSpec {
        let constraints: BTreeMap<String, String> = constraints;
        GoalSpec {
            description,
            acceptance_criteria,
            artifacts,
            constraints,
            max_steps,
            max_attempts,
            timeout_seconds,
            max_cost_usd,
            confidence: ConfidenceSpec { every_steps, threshold_percent, model },
        }
    }
}
