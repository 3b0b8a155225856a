//! A JSON object whose values pass through byte for byte. What they mean is decided elsewhere.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

/// A JSON object whose values are kept as written, in their order. An object that has a field twice is rejected.
#[derive(Debug)]
pub(super) struct RawObject(pub(super) Vec<(String, Box<RawValue>)>);

impl RawObject {
    pub(super) fn get(&self, name: &str) -> Option<&RawValue> {
        let found = self.0.iter().find(|(field, _)| field == name);
        found.map(|(_, value)| &**value)
    }
}

impl<'de> Deserialize<'de> for RawObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RawObjectVisitor;
        impl<'de> Visitor<'de> for RawObjectVisitor {
            type Value = RawObject;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawObject, A::Error> {
                let mut fields: Vec<(String, Box<RawValue>)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, _>()? {
                    // A server might read another one of the duplicates than is checked here.
                    if fields.iter().any(|(field, _)| *field == name) {
                        return Err(serde::de::Error::custom("duplicate field"));
                    }
                    fields.push((name, value));
                }
                Ok(RawObject(fields))
            }
        }
        deserializer.deserialize_map(RawObjectVisitor)
    }
}

impl Serialize for RawObject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}
