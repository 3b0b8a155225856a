//! Texts of limited length, whose ends never split a character, and numbers in texts.

/// The beginning of a text that has at most `max` bytes.
#[must_use]
pub fn first_bytes(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// The first characters of a text.
#[must_use]
pub fn first_chars(text: &str, max: usize) -> &str {
    text.char_indices().nth(max).map_or(text, |(end, _)| &text[..end])
}

/// Shortens a text to `max` bytes.
pub fn truncate_bytes(text: &mut String, max: usize) {
    text.truncate(text.floor_char_boundary(max));
}

/// `beginning`, with an ellipsis if it is not the whole text.
#[must_use]
pub fn with_ellipsis(beginning: &str, text: &str) -> String {
    let ellipsis = if beginning.len() < text.len() { "…" } else { "" };
    format!("{beginning}{ellipsis}")
}

/// The innermost cause of an error, which is the most specific one. In errors of the HTTP client it contains no
/// header and no body.
#[must_use]
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// A number with its noun: `1 step`, `2 steps`.
#[must_use]
pub fn counted<N: Copy + PartialEq + From<u8> + std::fmt::Display>(number: N, one: &str, many: &str) -> String {
    let noun = if number == N::from(1) { one } else { many };
    format!("{number} {noun}")
}

/// Formats a number for a table column: `950`, `9.6k`, `96k`, `1.8M`. Truncated, never rounded up.
#[must_use]
pub fn short_number(number: i64) -> String {
    const UNITS: [(i64, &str); 4] = [
        (1_000_000_000_000, "T"),
        (1_000_000_000, "G"),
        (1_000_000, "M"),
        (1_000, "k"),
    ];
    for (size, unit) in UNITS {
        if number >= size {
            let (whole, tenth) = (number / size, number % size / (size / 10));
            return if whole < 10 && tenth > 0 {
                format!("{whole}.{tenth}{unit}")
            } else {
                format!("{whole}{unit}")
            };
        }
    }
    number.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_noun_is_singular_after_one_only() {
        let steps = |number: u32| counted(number, "step", "steps");
        assert_eq!([steps(0), steps(1), steps(2)], ["0 steps", "1 step", "2 steps"]);
    }

    #[test]
    fn short_numbers_read_as_in_the_column() {
        let cases = [
            (0, "0"),
            (999, "999"),
            (1_000, "1k"),
            (1_949, "1.9k"),
            (9_999, "9.9k"),
            (10_000, "10k"),
            (96_400, "96k"),
            (999_999, "999k"),
            (1_800_000, "1.8M"),
            (40_000_000, "40M"),
            (2_000_000_000, "2G"),
            (i64::MAX, "9223372T"),
        ];
        for (number, text) in cases {
            assert_eq!(short_number(number), text);
        }
    }

    #[test]
    fn no_character_is_split() {
        let text = "aäb";
        let bytes: Vec<&str> = (0..6).map(|max| first_bytes(text, max)).collect();
        assert_eq!(bytes, ["", "a", "a", "aä", "aäb", "aäb"]);
        let chars: Vec<&str> = (0..5).map(|max| first_chars(text, max)).collect();
        assert_eq!(chars, ["", "a", "aä", "aäb", "aäb"]);
        let mut shortened = text.to_owned();
        truncate_bytes(&mut shortened, 2);
        assert_eq!(shortened, "a");
    }

    #[test]
    fn only_a_shortened_text_has_an_ellipsis() {
        assert_eq!(with_ellipsis(first_chars("abc", 2), "abc"), "ab…");
        assert_eq!(with_ellipsis(first_chars("abc", 3), "abc"), "abc");
    }

    #[test]
    fn the_innermost_of_several_causes_is_shown() {
        let inner = std::io::Error::other("connection reset");
        assert_eq!(root_cause(&inner), "connection reset");
        let outer = std::io::Error::other(std::io::Error::other(inner));
        assert_eq!(root_cause(&outer), "connection reset");
    }
}
