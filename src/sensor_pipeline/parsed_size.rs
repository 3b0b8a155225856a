//! How much memory JSON takes once parsed: `[0,0,…]` grows to sixteen times its text, `[{"":0},…]` to a hundred times.
//! Measured without building the value.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Maximum number of bytes of a parsed payload. A pod of 128 MiB has room for six such values: the payload, the
/// previous one, copies of both for serialization, and both as expression values.
pub const MAX_BYTES: usize = 12 * 1024 * 1024;
/// A shorter text cannot exceed the bound.
const SHORT: usize = 64 * 1024;
/// Size of a value in place.
const VALUE: usize = 32;
/// Heap size of the first items of a list, beside their places.
const LIST: usize = 96;
/// Heap size of the first entries of an object, which is allocated at once.
const OBJECT: usize = 640;
/// Number of these first entries.
const FIRST_ENTRIES: usize = 11;
/// Size of each further entry.
const ENTRY: usize = 112;

/// Whether a JSON text takes more than [`MAX_BYTES`]. Text that is not JSON does not.
#[must_use]
pub fn is_too_large(text: &str) -> bool {
    if text.len() <= SHORT {
        return false;
    }
    let left = Cell::new(Some(MAX_BYTES));
    // A syntax error is reported by the actual parser.
    let _ = Measure(&left).deserialize(&mut serde_json::Deserializer::from_str(text));
    left.get().is_none()
}

#[derive(Clone, Copy)]
struct Measure<'a>(&'a Cell<Option<usize>>);

impl Measure<'_> {
    fn pay<E: Error>(self, bytes: usize) -> Result<(), E> {
        self.0.set(self.0.get().and_then(|left| left.checked_sub(bytes)));
        match self.0.get() {
            Some(_) => Ok(()),
            None => Err(E::custom("too large")),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Measure<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Measure<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.pay(VALUE)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.pay(VALUE)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.pay(VALUE)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.pay(VALUE)
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.pay(VALUE)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.pay(VALUE + text.len())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.pay(VALUE)?;
        if items.next_element_seed(self)?.is_some() {
            self.pay(LIST)?;
            while items.next_element_seed(self)?.is_some() {}
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        self.pay(VALUE)?;
        let mut count = 0_usize;
        // A key costs as much as a string.
        while entries.next_key_seed(self)?.is_some() {
            count += 1;
            match count {
                1 => self.pay(OBJECT)?,
                _ if count > FIRST_ENTRIES => self.pay(ENTRY)?,
                _ => {}
            }
            entries.next_value_seed(self)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(item: &str, bytes: usize) -> String {
        let count = (bytes - 2) / (item.len() + 1);
        format!("[{}]", vec![item; count].join(","))
    }

    #[test]
    fn a_text_above_the_bound_once_parsed_is_distinguished_from_one_below_it() {
        const MEBIBYTE: usize = 1024 * 1024;
        for item in ["0", "[0]", "{\"\":0}", "[[],[]]"] {
            assert!(is_too_large(&list(item, MEBIBYTE)), "{item}");
            assert!(!is_too_large(&list(item, SHORT)), "{item}");
        }
        let record = r#"{"id":123456,"name":"a name of some length","price":12.5,"tags":"a,b,c","at":"2026-01-05T08:00:00Z","x":1,"y":2}"#;
        assert!(!is_too_large(&list(record, MEBIBYTE)));
        assert!(!is_too_large(&format!("\"{}\"", "x".repeat(MEBIBYTE))));
        assert!(!is_too_large(&"[".repeat(MEBIBYTE)), "not JSON");
    }

    #[test]
    fn the_bound_is_exact() {
        let of = |items: usize| format!("[{}]", vec!["0"; items].join(","));
        let max = (MAX_BYTES - VALUE - LIST) / VALUE;
        assert!(!is_too_large(&of(max)));
        assert!(is_too_large(&of(max + 1)));
    }

    #[test]
    fn no_short_text_is_larger_than_the_bound() {
        for item in ["0", "{}", "[0]", "{\"\":0}", "[{}]"] {
            let left = Cell::new(Some(MAX_BYTES));
            let text = list(item, SHORT);
            assert!(
                Measure(&left)
                    .deserialize(&mut serde_json::Deserializer::from_str(&text))
                    .is_ok(),
                "{item}"
            );
        }
    }
}
