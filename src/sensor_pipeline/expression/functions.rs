//! The functions of expressions: those of the library that cannot panic, ours, and the metered macros over lists.

// Only some of the library's kinds of values occur here.
#![allow(clippy::wildcard_enum_match_arm)]

use std::sync::Arc;

use cel::common::ast::{Expr, IdedExpr, LiteralValue};
use cel::extractors::This;
use cel::{Context, ExecutionError, FunctionContext, Value as Cel, functions};
use jiff::Timestamp;

use super::values::{size, to_json};
use super::{CostMeter, EvaluationCost, MAX_JSON_BYTES, Pattern};

/// Adds the functions to a context.
pub(super) fn offer(context: &mut Context<'_>, purse: &CostMeter, patterns: &Arc<[Pattern]>) {
    context.add_function("contains", functions::contains);
    context.add_function("size", functions::size);
    context.add_function("max", functions::max);
    context.add_function("min", functions::min);
    context.add_function("startsWith", functions::starts_with);
    context.add_function("endsWith", functions::ends_with);
    context.add_function("string", functions::string);
    context.add_function("double", functions::double);
    context.add_function("int", functions::int);
    context.add_function("slice", slice);
    context.add_function("epochSeconds", epoch_seconds);
    context.add_function("lowerAscii", |This(text): This<Arc<String>>| text.to_ascii_lowercase());
    let paid = purse.clone();
    context.add_function("json", move |This(value): This<Cel>| json(&value, &paid));
    let (patterns, paid) = (Arc::clone(patterns), purse.clone());
    context.add_function("matches", move |This(text): This<Arc<String>>, number: i64| {
        let pattern = usize::try_from(number).ok().and_then(|number| patterns.get(number));
        pattern.is_some_and(|pattern| paid.pay_for_text(text.len(), pattern.weight) && pattern.regex.is_match(&text))
    });
    for (name, goal) in [("@all", false), ("@exists", true)] {
        let purse = purse.clone();
        context.add_function(name, move |call: &FunctionContext| first(call, &purse, goal));
    }
    for name in ["@one", "@map", "@filter"] {
        let purse = purse.clone();
        context.add_function(name, move |call: &FunctionContext| collect(call, &purse, name));
    }
}

/// A value as JSON text.
fn json(value: &Cel, purse: &CostMeter) -> Result<Cel, ExecutionError> {
    if purse.is_empty() {
        return Err(ExecutionError::NoSuchOverload);
    }
    let json = to_json(value).ok_or(ExecutionError::NoSuchOverload)?.to_string();
    if json.len() > MAX_JSON_BYTES || !purse.pay_for_text(json.len(), 1) {
        purse.empty();
        return Err(ExecutionError::NoSuchOverload);
    }
    Ok(json.into())
}

/// Whether an item reaches the goal: `exists` looks for true, `all` for false.
fn first(call: &FunctionContext, purse: &CostMeter, goal: bool) -> Result<Cel, ExecutionError> {
    let mut failed = None;
    for item in items(call)? {
        match each(call, purse, &item, 2) {
            Ok(Cel::Bool(found)) if found == goal => return Ok(Cel::Bool(goal)),
            Ok(Cel::Bool(_)) => {}
            Ok(_) => failed = Some(ExecutionError::NoSuchOverload),
            Err(error) if purse.is_empty() => return Err(error),
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(Cel::Bool(!goal)), Err)
}

fn collect(call: &FunctionContext, purse: &CostMeter, name: &str) -> Result<Cel, ExecutionError> {
    let mut found = Vec::new();
    for item in items(call)? {
        let value = each(call, purse, &item, 2)?;
        match (name, value) {
            ("@map", value) => found.push(value),
            (_, Cel::Bool(false)) => {}
            ("@one", Cel::Bool(true)) => found.push(Cel::Bool(true)),
            (_, Cel::Bool(true)) => found.push(each(call, purse, &item, 3)?),
            _ => return Err(ExecutionError::NoSuchOverload),
        }
    }
    Ok(if name == "@one" {
        Cel::Bool(found.len() == 1)
    } else {
        Cel::List(Arc::new(found))
    })
}

/// The items that a macro iterates over: those of a list, or the keys of a map.
fn items(call: &FunctionContext) -> Result<Vec<Cel>, ExecutionError> {
    match call.ptx.resolve(&call.args[0])? {
        Cel::List(list) => Ok(list.to_vec()),
        Cel::Map(map) => {
            let mut keys: Vec<_> = map.map.keys().cloned().collect();
            keys.sort();
            Ok(keys.into_iter().map(Cel::from).collect())
        }
        _ => Err(ExecutionError::NoSuchOverload),
    }
}

/// Evaluates one argument of a macro for one item.
fn each(call: &FunctionContext, purse: &CostMeter, item: &Cel, argument: usize) -> Result<Cel, ExecutionError> {
    let [.., steps, large, joins] = call.args else {
        return Err(ExecutionError::NoSuchOverload);
    };
    let weight = EvaluationCost {
        steps: number(steps),
        large: number(large),
        joins: number(joins),
    };
    if !purse.pay(weight, size(item)) {
        return Err(call.error("cost"));
    }
    let Expr::Ident(name) = &call.args[1].expr else {
        return Err(ExecutionError::NoSuchOverload);
    };
    let mut context = call.ptx.new_inner_scope();
    context.add_variable_from_value(name, item.clone());
    context.resolve(&call.args[argument])
}

fn number(literal: &IdedExpr) -> u64 {
    match &literal.expr {
        Expr::Literal(LiteralValue::Int(number)) => u64::try_from(*number.inner()).unwrap_or(u64::MAX),
        _ => u64::MAX,
    }
}

/// The items from index `from` up to, excluding, `to`, of a list or of a string's characters; indexes beyond the end
/// are ignored.
fn slice(This(of): This<Cel>, from: i64, to: i64) -> Result<Cel, ExecutionError> {
    let (from, to) = match (usize::try_from(from), usize::try_from(to)) {
        (Ok(from), Ok(to)) if from <= to => (from, to),
        _ => return Err(ExecutionError::IndexOutOfBounds(from.into())),
    };
    match of {
        Cel::List(list) => Ok(Cel::List(Arc::new(
            list.iter().skip(from).take(to - from).cloned().collect(),
        ))),
        Cel::String(text) => Ok(text.chars().skip(from).take(to - from).collect::<String>().into()),
        _ => Err(ExecutionError::NoSuchOverload),
    }
}

/// Seconds since 1970 of an RFC 3339 timestamp.
fn epoch_seconds(This(text): This<Arc<String>>) -> Result<Cel, ExecutionError> {
    let moment: Timestamp = text.parse().map_err(|_| ExecutionError::NoSuchOverload)?;
    Ok(Cel::Int(moment.as_second()))
}
