//! Reading of lists that another process writes: only so many elements take memory.
//!
//! A list may be as long as a body, and an element may take two bytes there and hundreds in memory. Cutting the list off after it
//! was read would be too late.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads the first `MAX_ELEMENTS` elements of a list; those after them are read over and take no memory.
///
/// # Errors
///
/// What is read is not a list, or one of the first elements is none.
pub fn first_elements<'de, const MAX_ELEMENTS: usize, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_seq(FirstElements::<T, MAX_ELEMENTS>(PhantomData))
}

struct FirstElements<T, const MAX_ELEMENTS: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX_ELEMENTS: usize> Visitor<'de> for FirstElements<T, MAX_ELEMENTS> {
    type Value = Vec<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut first = Vec::new();
        while first.len() < MAX_ELEMENTS
            && let Some(element) = list.next_element()?
        {
            first.push(element);
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Listed {
        #[serde(deserialize_with = "first_elements::<3, _, _>")]
        numbers: Vec<u64>,
        after: u64,
    }

    #[test]
    fn the_first_elements_are_kept_and_the_rest_takes_no_memory() {
        for (length, kept) in [(0, 0), (2, 2), (3, 3), (4, 3), (80_000, 3)] {
            let numbers = vec!["1"; length].join(",");
            let read: Listed = serde_json::from_str(&format!(r#"{{"numbers": [{numbers}], "after": 7}}"#)).unwrap();
            assert_eq!((read.numbers, read.after), (vec![1; kept], 7));
        }
        let many = vec!["1"; 80_000].join(",");
        let read: Listed = serde_json::from_str(&format!(r#"{{"numbers": [{many}], "after": 7}}"#)).unwrap();
        // The smallest that a vector grows to.
        assert!(read.numbers.capacity() <= 4);
    }

    #[test]
    fn what_is_no_list_and_what_is_no_element_is_refused() {
        for numbers in ["{}", "null", "1", "[-1]", "[1,2,\"3\"]", "[1,2,3,"] {
            let text = format!(r#"{{"numbers": {numbers}, "after": 7}}"#);
            assert!(serde_json::from_str::<Listed>(&text).is_err(), "{numbers}");
        }
    }
}
