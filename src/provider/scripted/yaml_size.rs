//! The size of a YAML text once its aliases are followed, counted without building anything.
//!
//! A short text can expand to gigabytes: one list with an anchor, and an alias to it at each position of another list.
//! The YAML parser bounds how many aliases it follows, not their expansion.

use serde::de::{DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor};

/// Whether the text expands to at most `max` units: one for each node, and one for each byte of a string.
///
/// A text that is not valid YAML fits: the parser reports the mistake later.
pub(super) fn fits(text: &str, max: usize) -> bool {
    let mut left = Some(max);
    let _ = UnitCounter(&mut left).deserialize(serde_yaml::Deserializer::from_str(text));
    left.is_some()
}

/// Visits everything and keeps nothing. The remaining units become `None` when they do not suffice, which ends the
/// visit.
struct UnitCounter<'a>(&'a mut Option<usize>);

impl UnitCounter<'_> {
    fn take<E: Error>(&mut self, units: usize) -> Result<(), E> {
        *self.0 = self.0.and_then(|left| left.checked_sub(units));
        match self.0 {
            Some(_) => Ok(()),
            None => Err(E::custom("too large")),
        }
    }

    fn reborrow(&mut self) -> UnitCounter<'_> {
        UnitCounter(self.0)
    }
}

impl<'de> DeserializeSeed<'de> for UnitCounter<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UnitCounter<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("any YAML")
    }

    fn visit_bool<E: Error>(mut self, _: bool) -> Result<(), E> {
        self.take(1)
    }

    fn visit_i64<E: Error>(mut self, _: i64) -> Result<(), E> {
        self.take(1)
    }

    fn visit_i128<E: Error>(mut self, _: i128) -> Result<(), E> {
        self.take(1)
    }

    fn visit_u64<E: Error>(mut self, _: u64) -> Result<(), E> {
        self.take(1)
    }

    fn visit_u128<E: Error>(mut self, _: u128) -> Result<(), E> {
        self.take(1)
    }

    fn visit_f64<E: Error>(mut self, _: f64) -> Result<(), E> {
        self.take(1)
    }

    fn visit_unit<E: Error>(mut self) -> Result<(), E> {
        self.take(1)
    }

    fn visit_none<E: Error>(mut self) -> Result<(), E> {
        self.take(1)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_str<E: Error>(mut self, text: &str) -> Result<(), E> {
        self.take(1 + text.len())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        self.take(1)?;
        while items.next_element_seed(self.reborrow())?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        self.take(1)?;
        while entries.next_key_seed(self.reborrow())?.is_some() {
            entries.next_value_seed(self.reborrow())?;
        }
        Ok(())
    }

    /// A value with a tag.
    fn visit_enum<A: EnumAccess<'de>>(mut self, tagged: A) -> Result<(), A::Error> {
        self.take(1)?;
        let ((), value) = tagged.variant_seed(self.reborrow())?;
        value.newtype_variant_seed(self)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::scalars("[1, true, 1.5, ~, -3]", 6)]
    #[case::strings("[ab, 'c']", 1 + 3 + 2)]
    #[case::maps("{a: {b: 1}}", 1 + 2 + 1 + 2 + 1)]
    #[case::an_alias_counts_like_what_it_stands_for("[&x [1, 1], *x, *x]", 1 + 3 * 3)]
    #[case::tags("!t [1]", 1 + 2 + 2)]
    fn every_node_and_every_byte_of_text_is_one_unit(#[case] text: &str, #[case] units: usize) {
        assert!(fits(text, units), "{text}");
        assert!(!fits(text, units - 1), "{text}");
    }

    #[test]
    fn a_text_that_is_no_yaml_is_left_to_its_reader() {
        assert!(fits("[1", 9));
        assert!(fits("", 9));
    }
}
