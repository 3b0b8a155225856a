//! The errors of scripts, as users read them.

use super::ModelScript;
use super::script::ScriptError;

#[test]
fn the_errors_of_scripts() {
    let mut rows = variants!(
        "A script",
        [
            ScriptError::TooLong { bytes: 2_000_000 },
            ScriptError::TooLarge,
            ScriptError::Shape("missing field `turns` at line 1 column 1".into()),
            ScriptError::Field {
                path: "turns".into(),
                problem: "has 0 entries; write 1 to 1000".into(),
            },
        ]
    );
    for script in [
        "turns: []",
        "turns: [{}]",
        "turns: [{text: a, fail: {status: 500}}]",
        "turns: [{fail: {status: 200}}]",
        "turns: [{fail: {status: 429, retryAfterSeconds: 999999}}]",
        "turns: [{text: a, delayMilliseconds: 99999999}]",
        "turns: [{toolCalls: [{name: 'not a name'}]}]",
        "turns: [{text: a, usage: {inputTokens: 1, outputTokens: 1, reasoningTokens: 2}}]",
        "turns: [{text: a, usage: {inputTokens: 1, outputTokens: 99999999999}}]",
        "turns: [{unknown: a}]",
        "turns: {",
    ] {
        let error = ModelScript::parse(script).map(|_| ()).unwrap_err();
        rows.push(text!("Mistakes", script, error));
    }
    assert_texts!("scripted", "Errors of scripts", rows);
}
