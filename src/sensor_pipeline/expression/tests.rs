//! Tests of expressions.

use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

use super::*;

fn evaluated(text: &str, payload: &Value) -> Result<Value, ExpressionError> {
    let previous = json!({"change": 1});
    let now = "2026-01-05T07:00:00Z".parse().expect("a moment");
    let expression = Expression::compile(text, ExpressionScope::SensorEvent).expect("an expression");
    expression.evaluate(&ExpressionVariables::new(payload, Some(&previous), now))
}

#[rstest]
#[case("payload", json!({"change": 0.5, "items": [{"id": 1, "n": "a"}, {"id": 2, "n": "b"}], "text": "Grün"}))]
#[case("payload.change > 0.05", json!(true))]
#[case("payload.change > previous.change", json!(false))]
#[case("payload.items.slice(0, 1)", json!([{"id": 1, "n": "a"}]))]
#[case("payload.items.slice(1, 20)", json!([{"id": 2, "n": "b"}]))]
#[case("payload.text.slice(2, 9)", json!("ün"))]
#[case("payload.items.map(item, item.id)", json!([1, 2]))]
#[case("payload.items.map(item, item.id > 1, item.n)", json!(["b"]))]
#[case("payload.items.filter(item, item.id > 1)", json!([{"id": 2, "n": "b"}]))]
#[case("payload.items.exists(item, item.n == 'b')", json!(true))]
#[case("payload.items.all(item, item.n == 'b')", json!(false))]
#[case("payload.items.exists_one(item, item.id > 0)", json!(false))]
#[case("payload.items.filter(item, item.id > 1).map(item, item.n)", json!(["b"]))]
#[case("payload.all(key, key.matches('^[a-z]+$'))", json!(true))]
#[case("payload.items.map(item, item.id + int(payload.change * 4.0))", json!([3, 4]))]
#[case("'up by ' + string(payload.change)", json!("up by 0.5"))]
#[case("{'b': 1, 'a': payload.text}", json!({"a": "Grün", "b": 1}))]
#[case("has(payload.missing) ? 1 : max(1, 2)", json!(2))]
#[case("now - epochSeconds('2026-01-05T06:00:00Z')", json!(3600))]
#[case("payload.text.lowerAscii().startsWith('g')", json!(true))]
#[case("json(payload.items[0])", json!("{\"id\":1,\"n\":\"a\"}"))]
#[case("'id' in payload.items[0] && !('x' in payload.items[0])", json!(true))]
#[case("size(payload.items) == 2 && payload.items.size() == 2", json!(true))]
fn an_expression_has_its_cel_value(#[case] text: &str, #[case] expected: Value) {
    let payload = json!({"change": 0.5, "items": [{"id": 1, "n": "a"}, {"id": 2, "n": "b"}], "text": "Grün"});
    assert_eq!(evaluated(text, &payload).expect("a value"), expected);
}

#[rstest]
#[case("payload.", "is not a valid expression: line 1, column 9: unexpected end")]
#[case("payload.price >", "is not a valid expression: line 1, column 16: unexpected end")]
#[case("payload.price > > 1", "line 1, column 17: unexpected '>'")]
#[case("payload.a ==\n  'x' )", "line 2, column 7: unexpected ')'")]
#[case("payload.a # 1", "line 1, column 11: unexpected '#'; strings must be quoted")]
#[case("payload.a == 'x", "; strings must be quoted")]
#[case("(payload.a", "line 1, column 11: missing ')' at the end")]
#[case("payload.a > 99999999999999999999", "line 1, column 13: the number is too large")]
#[case("has(payload)", "has() takes a field, such as has(payload.price)")]
#[case("payload.items.all(item.id, true)", "must be a new name, such as item")]
#[case("playload.a", "refers to unknown variable playload")]
#[case("payload.items.map(item, item.id) + [item]", "refers to unknown variable item")]
#[case("size(payload, 2)", "passes 2 arguments to size, which takes 1")]
#[case("[1, 2].max()", "must call max as max(a, b)")]
#[case("timestamp('2026-01-05T06:00:00Z') < 1", "calls unknown function timestamp")]
#[case("Foo{a: 1}", "creates a typed object")]
#[case("b'abc' == b'abc'", "has a bytes literal")]
#[case("payload.a.matches(payload.b)", "a pattern that is not a literal")]
#[case("payload.a.matches('(')", "not a valid regular expression")]
#[case("payload.a.matches('(a{1000}){1000}')", "too large")]
#[case("payload.a.all(x, payload.b.all(y, x == y))", "in each other")]
fn an_invalid_expression_is_refused_with_a_message(#[case] text: &str, #[case] expected: &str) {
    let error = Expression::compile(text, ExpressionScope::SensorEvent).expect_err("an error");
    assert!(error.contains(expected), "{error}");
}

#[rstest]
#[case("payload.missing", ExpressionError::Missing)]
#[case("payload.items[7]", ExpressionError::Missing)]
#[case("payload.n + 1.5", ExpressionError::Types)]
#[case("payload.secret > 1", ExpressionError::Types)]
#[case("payload.n / 0", ExpressionError::Other)]
#[case("9223372036854775807 + payload.n", ExpressionError::Other)]
#[case("1.0 / 0.0", ExpressionError::Types)]
#[case("epochSeconds(payload.secret)", ExpressionError::Types)]
#[case("payload.items.slice(2, 1)", ExpressionError::Missing)]
fn an_expression_without_a_value_fails_with_the_reason_and_nothing_of_the_payload(
    #[case] text: &str,
    #[case] expected: ExpressionError,
) {
    let payload = json!({"n": 1, "items": [1], "secret": "hunter2"});
    let failure = evaluated(text, &payload).expect_err("a failure");
    assert_eq!(failure, expected);
    assert!(!failure.to_string().contains("hunter2"));
}

#[test]
fn an_expression_may_have_4096_bytes_and_not_one_more() {
    let of = |bytes: usize| format!("'{}'", "a".repeat(bytes - 2));
    assert!(Expression::compile(&of(MAX_BYTES), ExpressionScope::SensorEvent).is_ok());
    let error = Expression::compile(&of(MAX_BYTES + 1), ExpressionScope::SensorEvent).expect_err("an error");
    assert!(error.contains("4096 bytes, and has 4097"), "{error}");
}

#[test]
fn all_expressions_of_a_sensor_may_have_32_patterns_and_not_one_more() {
    let of = |patterns: usize| format!("[{}]", vec!["payload.a.matches('a')"; patterns].join(","));
    let mut allowance = PatternAllowance::default();
    assert!(Expression::compile_within(&of(MAX_PATTERNS - 1), ExpressionScope::SensorEvent, &mut allowance).is_ok());
    assert!(Expression::compile_within(&of(1), ExpressionScope::SensorEvent, &mut allowance).is_ok());
    assert!(Expression::compile_within("payload.a", ExpressionScope::SensorEvent, &mut allowance).is_ok());
    let error = Expression::compile_within(&of(1), ExpressionScope::SensorEvent, &mut allowance).expect_err("an error");
    assert!(error.contains("32 patterns"), "{error}");
    // Another Sensor has its own allowance.
    assert!(Expression::compile(&of(MAX_PATTERNS), ExpressionScope::SensorEvent).is_ok());
}

#[test]
fn json_around_json_is_aborted_before_its_escapes_fill_the_memory() {
    let nested = |levels: usize| format!("size({}payload{})", "json(".repeat(levels), ")".repeat(levels));
    let payload = json!("\"".repeat(1_000));
    assert!(evaluated(&nested(5), &payload).is_ok());
    assert_eq!(evaluated(&nested(20), &payload), Err(ExpressionError::TooCostly));
    let exact = |bytes: usize| evaluated("size(json(payload))", &json!("a".repeat(bytes - 2)));
    assert_eq!(exact(MAX_JSON_BYTES), Ok(json!(MAX_JSON_BYTES)));
    assert_eq!(exact(MAX_JSON_BYTES + 1), Err(ExpressionError::TooCostly));
}

#[test]
fn a_pattern_costs_by_its_size_and_by_the_length_of_the_text() {
    let heavy = "payload.text.matches('\\\\w{5}!')";
    let light = "payload.text.matches('z+!')";
    let text = |kibibytes: usize| json!({"text": "a".repeat(kibibytes * 1024)});
    assert_eq!(evaluated(light, &text(1024)), Ok(json!(false)));
    assert_eq!(evaluated(heavy, &text(1)), Ok(json!(false)));
    assert_eq!(evaluated(heavy, &text(1024)), Err(ExpressionError::TooCostly));
    let again = |times: usize| format!("[{}].all(one, !one)", vec![light; times].join(","));
    assert_eq!(evaluated(&again(5), &text(1024)), Ok(json!(true)));
    assert_eq!(evaluated(&again(12), &text(1024)), Err(ExpressionError::TooCostly));
}

#[test]
fn a_pattern_may_have_512_bytes_and_not_one_more() {
    let of = |bytes: usize| format!("payload.a.matches('{}')", "a".repeat(bytes));
    assert!(Expression::compile(&of(MAX_PATTERN_BYTES), ExpressionScope::SensorEvent).is_ok());
    let error = Expression::compile(&of(MAX_PATTERN_BYTES + 1), ExpressionScope::SensorEvent).expect_err("an error");
    assert!(error.contains("513 bytes, and 512 are allowed"), "{error}");
}

#[test]
fn an_expression_may_be_64_steps_deep_and_not_one_more() {
    let of = |steps: usize| vec!["1"; steps].join("+");
    assert_eq!(evaluated(&of(MAX_DEPTH), &json!(1)), Ok(json!(MAX_DEPTH)));
    let error = Expression::compile(&of(MAX_DEPTH + 1), ExpressionScope::SensorEvent).expect_err("an error");
    assert!(error.contains("deeper than 64"), "{error}");
}

#[test]
fn an_expression_that_would_overflow_the_stack_is_refused_before_it_is_parsed() {
    let brackets = |count: usize| format!("{}1{}", "(".repeat(count), ")".repeat(count));
    assert!(Expression::compile(&brackets(MAX_BRACKETS), ExpressionScope::SensorEvent).is_ok());
    assert!(Expression::compile(&brackets(MAX_BRACKETS + 1), ExpressionScope::SensorEvent).is_err());
    let joined = |count: usize| vec!["1"; count + 1].join("+");
    let deep = Expression::compile(&joined(MAX_OPERATORS), ExpressionScope::SensorEvent).expect_err("an error");
    assert!(deep.contains("deeper than"), "{deep}");
    let many = Expression::compile(&joined(MAX_OPERATORS + 1), ExpressionScope::SensorEvent).expect_err("an error");
    assert!(many.contains("operators"), "{many}");
    for text in ["!", "-", "(", "[", "{", "a.", "a?", "1+", "a&&", "'a'=="] {
        assert!(Expression::compile(&text.repeat(MAX_BYTES / text.len()), ExpressionScope::SensorEvent).is_err());
    }
    // Nor where only the lexer of the parser sees code.
    for before in ["//'\n", "'\n", "r'\\' + ", "'''\n", "'\\q"] {
        let text = format!("{before}{}", brackets(MAX_BRACKETS + 1));
        let error = Expression::compile(&text, ExpressionScope::SensorEvent).expect_err("an error");
        assert!(error.contains("nested brackets"), "{text}: {error}");
    }
    // In a string literal they do not count.
    assert!(
        Expression::compile(
            &format!("'{}' + \"{}\"", "(\\'".repeat(300), "!+".repeat(300)),
            ExpressionScope::SensorEvent
        )
        .is_ok()
    );
}

#[test]
fn a_too_costly_expression_is_aborted_and_the_next_one_has_its_own_budget() {
    // Each item costs 3 nodes of 2; before that the list is visited once, in 2 nodes, and `previous`, which is null.
    let text = "payload.all(item, item > 0)";
    let cost = |items: u64| items * 3 * 2 + 2 + (items + 2);
    let max = (MAX_COST - 5) / 7;
    assert!(cost(max) < MAX_COST && cost(max + 1) >= MAX_COST);
    let of = |items: u64| Value::Array((0..items).map(|_| json!(1)).collect());
    let variables = |items| ExpressionVariables::new(&of(items), None, Timestamp::UNIX_EPOCH);
    let expression = Expression::compile(text, ExpressionScope::SensorEvent).expect("an expression");
    let (fits, too_many) = (variables(max), variables(max + 1));
    assert_eq!(expression.evaluate(&fits), Ok(json!(true)));
    assert_eq!(expression.evaluate(&too_many), Err(ExpressionError::TooCostly));
    assert_eq!(expression.evaluate(&fits), Ok(json!(true)));
}

#[test]
fn an_expression_that_would_run_for_minutes_is_aborted_quickly() {
    let words: Vec<String> = (0..20_000).map(|n| format!("word {n}")).collect();
    let payload = json!({"a": words, "b": words});
    let started = std::time::Instant::now();
    for text in [
        "payload.a.all(x, payload.b.contains(x))",
        "payload.a.map(x, payload.b)",
        &format!("[{}]", vec!["payload"; 500].join(",")),
        &vec!["payload.a"; 60].join("+"),
        "payload.a.all(x, payload.b.contains(x)) || true",
    ] {
        assert_eq!(evaluated(text, &payload), Err(ExpressionError::TooCostly), "{text}");
    }
    assert!(
        started.elapsed() < std::time::Duration::from_mins(1),
        "{:?}",
        started.elapsed()
    );
    // Just below the limit: one pass over a long list.
    assert_eq!(evaluated("'word 7' in payload.b", &payload), Ok(json!(true)));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-1e9..1e9f64).prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-c]{1,2}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_payload_yields_a_value_or_a_failure(payload in any_json(), place in 0..12usize) {
        let texts = [
            "payload.a.b", "payload[0]", "payload.filter(x, x > 1)", "payload.map(x, x.a)", "-payload.a", "payload + payload",
            "payload.a - previous.change", "payload == previous", "max(payload, 1)", "payload.slice(0, 2)",
            "payload.a.matches('a+') || payload.b in payload.c", "payload[payload]",
        ];
        prop_assume!(!payload.to_string().contains("-9223372036854775808"));
        let _ = evaluated(texts[place], &payload);
    }
}
