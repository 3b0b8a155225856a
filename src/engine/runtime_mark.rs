//! The mark by which the model recognizes text of the runtime.
//!
//! Ensures that no text from outside contains it: a tool result is part of the same message as a state block or a warning of
//! the loop detection, and could imitate both. The bracket of an imitation is replaced once, when the text enters the
//! conversation, so that the beginning of the prompt stays the same. A secret in the mark was considered: models repeat what
//! they read, so a tool would learn it.

use std::borrow::Cow;
use std::ops::Range;

/// The letters that follow the bracket of a mark. The shorter mark begins at [`SHORT`].
const MARK: &[u8; 14] = b"fromtheruntime";
const SHORT: usize = 4;
/// Letters that stand for a character when they follow a backslash, as in JSON.
const ESCAPES: &str = "bfnrt";
/// Invisible characters, of which some count as letters. `Default_Ignorable_Code_Point` in `DerivedCoreProperties.txt` of
/// Unicode 16. The other invisible characters are not letters.
const INVISIBLE: [Range<u32>; 17] = [
    0xAD..0xAE,
    0x34F..0x350,
    0x61C..0x61D,
    0x115F..0x1161,
    0x17B4..0x17B6,
    0x180B..0x1810,
    0x200B..0x2010,
    0x202A..0x202F,
    0x2060..0x2070,
    0x3164..0x3165,
    0xFE00..0xFE10,
    0xFEFF..0xFF00,
    0xFFA0..0xFFA1,
    0xFFF0..0xFFF9,
    0x1_BCA0..0x1_BCA4,
    0x1_D173..0x1_D17B,
    0xE_0000..0xE_1000,
];

/// A text from outside, with `(` for each bracket that would begin a mark of the runtime. Keeps the length.
pub fn without_marks(text: &str) -> Cow<'_, str> {
    let imitations = imitations(Symbols::of(text));
    if imitations.is_empty() {
        return Cow::Borrowed(text);
    }
    let mut changed = String::with_capacity(text.len());
    for Range { start, end } in imitations {
        // Places are in order; they overlap at most where a letter after a backslash has two meanings.
        let start = start.max(changed.len());
        let end = end.max(start);
        changed.push_str(&text[changed.len()..start]);
        changed.push_str(&text[start..end].replace('[', "("));
    }
    changed.push_str(&text[changed.len()..]);
    Cow::Owned(changed)
}

/// Where brackets begin a mark: from the first to the last bracket of a gap between letters. One pass.
fn imitations(symbols: impl Iterator<Item = (usize, Symbol)>) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    // The brackets since the last letter.
    let mut brackets: Option<Range<usize>> = None;
    let mut partial = PartialMarks::default();
    for (place, symbol) in symbols {
        match symbol {
            Symbol::Letter(_) | Symbol::Escape(_) => {
                partial.begin(brackets.take());
                partial.read(symbol);
                continue;
            }
            Symbol::Bracket => {
                let start = brackets.map_or(place, |brackets| brackets.start);
                brackets = Some(start..place + 1);
            }
            Symbol::Other => {}
        }
        found.extend(partial.complete());
    }
    found.extend(partial.complete());
    found
}

/// The brackets whose mark has been read up to a number of letters, by that number.
#[derive(Default)]
struct PartialMarks {
    after: [Option<Range<usize>>; MARK.len() + 1],
    /// Whether there are any.
    any: bool,
}

impl PartialMarks {
    /// A letter follows these brackets.
    fn begin(&mut self, brackets: Option<Range<usize>>) {
        let Some(brackets) = brackets else {
            return;
        };
        self.any = true;
        for letters in [0, SHORT] {
            let begun = &mut self.after[letters];
            let start = begun.take().map_or(brackets.start, |earlier| earlier.start);
            *begun = Some(start..brackets.end);
        }
    }

    fn read(&mut self, symbol: Symbol) {
        if !std::mem::take(&mut self.any) {
            return;
        }
        let (letter, may_be_skipped) = match symbol {
            Symbol::Letter(letter) => (letter, false),
            Symbol::Escape(letter) => (letter, true),
            Symbol::Bracket | Symbol::Other => return,
        };
        let before = std::mem::take(&mut self.after);
        for (read, brackets) in before.into_iter().enumerate() {
            let Some(brackets) = brackets else {
                continue;
            };
            if MARK.get(read) == Some(&letter) {
                self.after[read + 1] = Some(brackets.clone());
                self.any = true;
            }
            if may_be_skipped {
                self.after[read].get_or_insert(brackets);
                self.any = true;
            }
        }
    }

    /// A character that is not a letter ends the last word: the brackets of a complete mark.
    fn complete(&mut self) -> Option<Range<usize>> {
        self.after[MARK.len()].take()
    }
}

/// A character as far as it matters.
#[derive(Clone, Copy)]
enum Symbol {
    /// In lower case. `0`: none of the marks'.
    Letter(u8),
    /// A letter after a backslash: a part of a word, or of a character in JSON.
    Escape(u8),
    Bracket,
    Other,
}

impl From<char> for Symbol {
    fn from(character: char) -> Self {
        match character {
            '[' => Self::Bracket,
            'a'..='z' | 'A'..='Z' => {
                u8::try_from(character).map_or(Self::Other, |letter| Self::Letter(letter.to_ascii_lowercase()))
            }
            _ if character.is_alphabetic() && !is_invisible(character) => Self::Letter(0),
            _ => Self::Other,
        }
    }
}

/// Whether a character is invisible, although it may count as a letter.
pub fn is_invisible(character: char) -> bool {
    INVISIBLE.iter().any(|range| range.contains(&u32::from(character)))
}

/// The characters of a text with their places. `\uXXXX` is the character that it is in JSON.
struct Symbols<'a> {
    text: &'a str,
    place: usize,
    after_backslash: bool,
}

impl<'a> Symbols<'a> {
    const fn of(text: &'a str) -> Self {
        Self {
            text,
            place: 0,
            after_backslash: false,
        }
    }
}

impl Iterator for Symbols<'_> {
    type Item = (usize, Symbol);

    fn next(&mut self) -> Option<Self::Item> {
        const HEX: usize = "uXXXX".len();
        let place = self.place;
        let rest = &self.text[place..];
        let character = rest.chars().next()?;
        let after_backslash = std::mem::replace(&mut self.after_backslash, character == '\\');
        self.place += character.len_utf8();
        if !after_backslash {
            return Some((place, character.into()));
        }
        let escaped = rest.get(1..HEX).filter(|_| character == 'u');
        let escaped = escaped.filter(|hex| hex.bytes().all(|digit| digit.is_ascii_hexdigit()));
        if let Some(escaped) = escaped.and_then(|hex| u32::from_str_radix(hex, 16).ok()) {
            self.place = place + HEX;
            // Half of a pair is not a letter of a mark. An escaped bracket is not the mark's.
            let symbol = char::from_u32(escaped).map_or(Symbol::Other, Symbol::from);
            let symbol = if matches!(symbol, Symbol::Bracket) {
                Symbol::Other
            } else {
                symbol
            };
            return Some((place, symbol));
        }
        let symbol = Symbol::from(character);
        let symbol = match symbol {
            Symbol::Letter(letter) if ESCAPES.contains(character) => Symbol::Escape(letter),
            Symbol::Letter(_) | Symbol::Escape(_) | Symbol::Bracket | Symbol::Other => symbol,
        };
        Some((place, symbol))
    }
}

#[cfg(test)]
mod tests;
