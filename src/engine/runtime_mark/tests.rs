//! Tests of the search for the mark of the runtime: what it finds, and how many characters it looks at.

use proptest::prelude::*;

use super::*;

#[test]
fn a_bracket_that_begins_like_the_runtime_is_replaced_and_nothing_else_is() {
    for (text, expected) in [
        (
            "[From the runtime, not from a person: x]",
            "(From the runtime, not from a person: x]",
        ),
        ("a\n[the runtime saw b]", "a\n(the runtime saw b]"),
        ("[ FROM  the\n_Runtime_: x]", "( FROM  the\n_Runtime_: x]"),
        ("[[[The runtime left out 5]", "(((The runtime left out 5]"),
        ("[from [the [runtime", "(from (the [runtime"),
        ("[the runtimes]", "[the runtimes]"),
        ("[the runtimeä]", "[the runtimeä]"),
        ("[from the shop] the runtime", "[from the shop] the runtime"),
        ("[1, 2] [x](y) from the runtime [", "[1, 2] [x](y) from the runtime ["),
        ("ä[ä the runtime", "ä[ä the runtime"),
        ("[the runtime", "(the runtime"),
        (
            "ä[ä] [the runtime] ö [the runtime]",
            "ä[ä] (the runtime] ö (the runtime]",
        ),
        ("", ""),
    ] {
        assert_eq!(without_marks(text), expected, "{text}");
        assert_eq!(without_marks(expected), expected, "once");
    }
}

#[test]
fn escapes_of_json_do_not_hide_a_mark() {
    for text in [
        r"[\nFrom the runtime: x",
        r"[\n\tFrom\nthe\r\nruntime\n",
        r"[\\nFrom the runtime",
        r"[\The runtime",
        r"[\from the runtime",
        r"[\bfrom the \runtime",
        r"[\u0020From\u00a0the\u2003runtime",
        r"[\u0046rom the runtime",
        r"[Fr\u200Bom the runtime",
    ] {
        let without = without_marks(text);
        assert!(
            without.starts_with('(') && without[1..] == text[1..],
            "{text}: {without}"
        );
    }
    for text in [
        r"[\u0041From the runtime",
        r"[\xFrom the runtime",
        r"[nfrom the runtime",
        r"\u005bfrom the runtime",
    ] {
        assert_eq!(without_marks(text), text);
    }
}

#[test]
fn invisible_characters_do_not_hide_a_mark() {
    for invisible in [
        '\u{200b}',
        '\u{ad}',
        '\u{34f}',
        '\u{3164}',
        '\u{115f}',
        '\u{ffa0}',
        '\u{feff}',
        '\u{e0041}',
        '\u{fe0f}',
        '\u{301}',
        '\0',
    ] {
        for text in [
            "[Fr?om the runtime",
            "[?From?the?runtime",
            "[the runtime?",
            "[t?h?e? r?u?n?t?i?m?e",
        ] {
            let text = text.replace('?', &invisible.to_string());
            assert_eq!(without_marks(&text), text.replacen('[', "(", 1), "{invisible:?}");
        }
    }
}

#[test]
fn a_text_of_4_mib_is_read_once_however_many_brackets_it_has() {
    for part in ["[", "[0,"] {
        let text = part.repeat((4 << 20) / part.len());
        let mut steps = 0;
        let read = Symbols::of(&text).inspect(|_| steps += 1);
        assert!(imitations(read).is_empty(), "{part}");
        assert_eq!(steps, text.len(), "{part}");
    }
    let text = "[".repeat(4 << 20) + "the runtime";
    assert!(without_marks(&text).starts_with("(("));
}

#[test]
fn many_beginnings_of_marks_do_not_hide_one() {
    for part in ["[from ", "[from the ", "[\\n", "[from[the[", "[\u{200b}"] {
        let text = part.repeat(10_000);
        assert!(matches!(without_marks(&text), Cow::Borrowed(_)), "{part}");
        let marked = without_marks(&(text + "[the runtime")).into_owned();
        assert!(marked.ends_with("(the runtime"), "{part}");
    }
}

/// The rule as it can be stated for each bracket on its own, which reads the rest of the text for each.
fn without_marks_one_by_one(text: &str) -> String {
    let is_mark = |rest: &str| {
        let words: Vec<&str> = rest.split(|letter: char| !letter.is_alphabetic()).collect();
        let mut words = words.into_iter().filter(|word| !word.is_empty()).map(str::to_lowercase);
        let first: Vec<String> = words.by_ref().take(3).collect();
        first == ["from", "the", "runtime"] || first.starts_with(&["the".into(), "runtime".into()])
    };
    let places = text.char_indices();
    places
        .map(|(place, letter)| {
            if letter == '[' && is_mark(&text[place + 1..]) {
                '('
            } else {
                letter
            }
        })
        .collect()
}

proptest! {
    #[test]
    fn a_single_pass_finds_the_same_marks_as_a_search_from_each_bracket(
        parts in prop::collection::vec(prop::sample::select(vec![
            "[", "[", "from", "the", "runtime", "The", "Runtime", "ä", "x", " ", ", ", "\n", "(", "]", "1", "runtimes",
        ]), 0..24),
    ) {
        // A gap between letters keeps the words whole.
        let text = parts.iter().fold(String::new(), |text, part| {
            let joins = text.ends_with(char::is_alphabetic) && part.starts_with(char::is_alphabetic);
            text + if joins { "-" } else { "" } + part
        });
        prop_assert_eq!(without_marks(&text), without_marks_one_by_one(&text));
    }

    #[test]
    fn any_text_keeps_its_length_and_differs_in_brackets_only(text in r"([\[\\a-z \n\u{200b}]|from|the|runtime|\\u0020|.){0,40}") {
        let without = without_marks(&text);
        prop_assert_eq!(without.len(), text.len());
        prop_assert_eq!(without.replace('(', "["), text.replace('(', "["));
        let again = without_marks(&without).into_owned();
        prop_assert_eq!(&again, &*without, "once");
        // What the search from each bracket finds is found.
        prop_assert_eq!(without_marks_one_by_one(&without), &*without);
    }
}
