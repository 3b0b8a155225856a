//! A few rules for the text of pages. Spelling is checked by `codespell` (`hack/check.sh`), and the house
//! style by `vale` (`hack/vale`).

use super::page::{current_pages, pages};

/// Words that say nothing or have a plain form, and what to write instead.
const AVOIDED: [(&str, &str); 11] = [
    ("in order to", "to"),
    ("utilize", "use"),
    ("leverage", "use"),
    ("e.g.", "such as"),
    ("i.e.", "that is"),
    ("etc.", "the whole list, or an example"),
    ("and/or", "one of the two, or both in words"),
    ("whitelist", "allow-list"),
    ("blacklist", "deny-list"),
    ("currently", "nothing: pages describe the present state"),
    ("click here", "a link with its subject"),
];
/// Whether the phrase is in the line, not as a part of a longer word.
fn has(line: &str, phrase: &str) -> bool {
    line.match_indices(phrase).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + phrase.len()..].chars().next();
        let is_letter = |letter: Option<char>| letter.is_some_and(char::is_alphanumeric);
        !is_letter(before) && !is_letter(after)
    })
}

/// The text of a line without code.
fn text(line: &str) -> String {
    line.split('`')
        .step_by(2)
        .collect::<Vec<_>>()
        .join("\u{0}")
        .to_lowercase()
}

/// A word that is there twice in a row.
fn doubled(line: &str) -> Option<&str> {
    let words: Vec<&str> = line.split(' ').collect();
    let twice = |pair: &[&str]| {
        pair[0] == pair[1] && pair[0].len() > 1 && pair[0].bytes().all(|byte| byte.is_ascii_alphabetic())
    };
    words.windows(2).find(|pair| twice(pair)).map(|pair| pair[0])
}

#[test]
fn pages_avoid_empty_phrases() {
    let mut found = Vec::new();
    for page in current_pages() {
        for (number, line) in page.prose().into_iter().filter(|(_, line)| !line.starts_with("    ")) {
            let line = text(line);
            let avoided = AVOIDED.iter().filter(|(phrase, _)| has(&line, phrase));
            found.extend(
                avoided.map(|(phrase, instead)| format!("{}:{number}: «{phrase}»: write {instead}", page.path)),
            );
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn lines_have_no_doubled_word_no_tab_and_no_space_at_the_end() {
    let mut found = Vec::new();
    for page in pages() {
        for (number, line) in page.prose() {
            let place = format!("{}:{number}", page.path);
            found.extend(doubled(&text(line)).map(|word| format!("{place}: «{word} {word}»")));
            if line.ends_with(' ') || line.contains('\t') {
                found.push(format!("{place}: a tab, or a space at the end"));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_page_begins_with_its_only_title() {
    for page in pages() {
        let titles: Vec<_> = page
            .prose()
            .into_iter()
            .filter(|(_, line)| line.starts_with("# "))
            .collect();
        assert!(titles.len() == 1 && titles[0].0 == 1, "{}: {titles:?}", page.path);
    }
}

#[test]
fn phrases_match_whole_words_only() {
    assert!(has("they leverage it", "leverage") && !has("leveraged", "leverage"));
    assert!(has("files, etc.", "etc.") && !has("utilized", "utilize"));
    assert_eq!(doubled("it is is so"), Some("is"));
    assert_eq!(doubled("a a 1 1"), None);
}
