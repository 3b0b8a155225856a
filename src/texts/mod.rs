//! Snapshots of the texts that users read, in `tests/texts`: one file for each kind of text, so that they can be reviewed
//! together. The tests are beside the code that writes the texts. It is a crate, since the tests of all
//! crates use it.

use std::fmt::{Debug, Display};
use std::mem::{Discriminant, discriminant};

pub use insta;
use strum::EnumCount;

/// Where the snapshots are.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/texts");

/// Section, name and text.
pub type TextRow = (String, String, String);
/// The rows of one file.
pub type TextRows = Vec<TextRow>;

/// Lists texts by section, each once.
#[must_use]
pub fn markdown(title: &str, rows: &[TextRow]) -> String {
    let mut sections: Vec<(&str, Vec<String>)> = Vec::new();
    for (section, name, text) in rows {
        let line = format!("- `{name}`: {text}\n");
        match sections.iter_mut().find(|(found, _)| found == section) {
            Some((_, lines)) if lines.contains(&line) => {}
            Some((_, lines)) => lines.push(line),
            None => sections.push((section, vec![line])),
        }
    }
    let sections = sections.into_iter();
    let sections = sections.map(|(section, lines)| format!("\n## {section}\n\n{}", lines.concat()));
    format!("# {title}\n{}", sections.collect::<String>())
}

/// A row for each example of an enum.
///
/// # Panics
///
/// If a variant has no example: it is called by tests only.
pub fn variants<T: Debug + Display + EnumCount>(section: &str, examples: &[T]) -> Vec<TextRow> {
    let mut kinds: Vec<Discriminant<T>> = Vec::new();
    for kind in examples.iter().map(discriminant) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    assert_eq!(kinds.len(), T::COUNT, "each variant of {section} needs an example");
    let name = |example: &T| {
        let text = format!("{example:?}");
        text.split(['(', '{', ' ']).next().unwrap_or_default().to_owned()
    };
    let row = |example: &T| (section.to_owned(), name(example), example.to_string());
    examples.iter().map(row).collect()
}

/// Compares rows with the file of that name in `tests/texts`.
#[macro_export]
macro_rules! assert_texts {
    ($file:literal, $title:literal, $rows:expr) => {{
        let texts = $crate::markdown($title, &$rows);
        $crate::insta::with_settings!({
            snapshot_path => $crate::FOLDER,
            prepend_module_to_snapshot => false,
            omit_expression => true,
        }, { $crate::insta::assert_snapshot!($file, texts) });
    }};
}

/// Rows for examples of an enum of errors, which must include each variant.
#[macro_export]
macro_rules! variants {
    ($section:literal, [$($example:expr),+ $(,)?]) => {
        $crate::variants($section, &[$($example),+])
    };
}

/// A row from anything that can be displayed.
#[macro_export]
macro_rules! text {
    ($section:expr, $name:expr, $text:expr) => {
        ($section.to_string(), $name.to_string(), $text.to_string())
    };
}
