//! Converts JSON to CEL values and back.

// Only some of the library's kinds of values occur here.
#![allow(clippy::wildcard_enum_match_arm)]

use std::collections::HashMap;
use std::sync::Arc;

use cel::Value as Cel;
use cel::objects::Map;
use serde_json::{Number, Value};

/// Bytes of text that cost as much as one value.
pub(super) const TEXT_PER_COST: u64 = 32;

/// The approximate number of values in a value.
pub(super) fn size(value: &Cel) -> u64 {
    let text = |text: &str| 1 + u64::try_from(text.len()).unwrap_or(u64::MAX) / TEXT_PER_COST;
    match value {
        Cel::List(list) => list.iter().map(size).fold(1, u64::saturating_add),
        Cel::Map(map) => map
            .map
            .iter()
            .map(|(key, value)| text(&key.to_string()).saturating_add(size(value)))
            .fold(1, u64::saturating_add),
        Cel::String(found) => text(found),
        _ => 1,
    }
}

pub(super) fn to_cel(value: &Value) -> Cel {
    match value {
        Value::Null => Cel::Null,
        Value::Bool(value) => Cel::Bool(*value),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => Cel::Int(number),
            (None, number) => Cel::Float(number.unwrap_or(f64::NAN)),
        },
        Value::String(text) => text.clone().into(),
        Value::Array(items) => Cel::List(Arc::new(items.iter().map(to_cel).collect())),
        Value::Object(fields) => {
            let fields: HashMap<String, Cel> = fields.iter().map(|(key, value)| (key.clone(), to_cel(value))).collect();
            Cel::Map(Map::from(fields))
        }
    }
}

/// Sorts the keys of maps, so that equal values have equal text. `None`: the value has no JSON form.
pub(super) fn to_json(value: &Cel) -> Option<Value> {
    Some(match value {
        Cel::Null => Value::Null,
        Cel::Bool(value) => Value::Bool(*value),
        Cel::Int(number) => Value::from(*number),
        Cel::UInt(number) => Value::from(*number),
        Cel::Float(number) => Value::Number(Number::from_f64(*number)?),
        Cel::String(text) => Value::String(text.to_string()),
        Cel::List(items) => Value::Array(items.iter().map(to_json).collect::<Option<_>>()?),
        Cel::Map(map) => {
            let mut fields: Vec<_> = map.map.iter().map(|(key, value)| (key.to_string(), value)).collect();
            fields.sort_by(|one, other| one.0.cmp(&other.0));
            let fields = fields.into_iter().map(|(key, value)| Some((key, to_json(value)?)));
            Value::Object(fields.collect::<Option<_>>()?)
        }
        _ => return None,
    })
}
