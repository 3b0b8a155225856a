//! Words, texts and comments of an expression, as the lexer of the CEL library tells them apart.
//!
//! Only as far as needed to see which brackets and operators are code. A text that is never closed, or that has an escape that
//! there is not, ends where the lexer gives it up: what follows is code again.

/// The number of bytes of the word, text or comment at the beginning, in which no bracket and no operator counts. `None`: something
/// else is there.
pub(super) fn opaque_bytes(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let word = rest.bytes().take_while(is_word).count();
    let (prefix, text) = rest.split_at(word);
    if !text.starts_with(['"', '\'']) {
        return (word > 0).then_some(word);
    }
    let is_raw = match prefix {
        "" | "b" | "B" => false,
        "r" | "R" | "br" | "bR" | "Br" | "BR" => true,
        // A number ends before a letter that it cannot contain.
        number if number.starts_with(|first: char| first.is_ascii_digit()) => number.ends_with(['r', 'R']),
        // A name, and a text without a prefix.
        _ => return Some(word),
    };
    Some(word + text_bytes(text, is_raw))
}

/// The number of bytes of the text that begins with this quote.
fn text_bytes(text: &str, is_raw: bool) -> usize {
    let quote = if text.starts_with('"') { '"' } else { '\'' };
    let three = if quote == '"' { "\"\"\"" } else { "'''" };
    if text.starts_with(three) {
        // Never closed, it is an empty text, and a quote that opens another one.
        return long_text_bytes(text, three, is_raw).unwrap_or(2);
    }
    let mut at = 1;
    while let Some(rest) = text.get(at..)
        && let Some(next) = rest.chars().next()
    {
        match next {
            '\n' | '\r' => return at,
            '\\' if !is_raw => match escape_bytes(rest) {
                Some(bytes) => at += bytes,
                None => return at + 1,
            },
            next if next == quote => return at + 1,
            next => at += next.len_utf8(),
        }
    }
    text.len()
}

/// The number of bytes of a text between three quotes each; `None`: it is not closed, or has an escape that there is not.
fn long_text_bytes(text: &str, three: &str, is_raw: bool) -> Option<usize> {
    let mut at = three.len();
    loop {
        let rest = text.get(at..)?;
        if rest.starts_with(three) {
            return Some(at + three.len());
        }
        let next = rest.chars().next()?;
        at += if next == '\\' && !is_raw {
            escape_bytes(rest)?
        } else {
            next.len_utf8()
        };
    }
}

/// The number of bytes of the escape that begins with this backslash; `None`: there is no such escape.
fn escape_bytes(rest: &str) -> Option<usize> {
    let bytes = rest.as_bytes();
    let digits = |from: usize, count: usize, is_digit: fn(&u8) -> bool| {
        let digits = bytes.get(from..from + count)?;
        digits.iter().all(is_digit).then_some(from + count)
    };
    match bytes.get(1)? {
        b'a' | b'b' | b'f' | b'n' | b'r' | b't' | b'v' | b'"' | b'\'' | b'`' | b'\\' | b'?' => Some(2),
        b'x' | b'X' => digits(2, 2, u8::is_ascii_hexdigit),
        b'u' => digits(2, 4, u8::is_ascii_hexdigit),
        b'U' => digits(2, 8, u8::is_ascii_hexdigit),
        b'0'..=b'3' => digits(2, 2, |digit| (b'0'..=b'7').contains(digit)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::name("payload.a", Some("payload"))]
    #[case::number("12 + 3", Some("12"))]
    #[case::bracket("(a)", None)]
    #[case::operator("/ 2", None)]
    #[case::comment("//' (\n(", Some("//' ("))]
    #[case::comment_at_the_end("// (", Some("// ("))]
    #[case::text("'a(b' + (", Some("'a(b'"))]
    #[case::other_quote("\"it's (\" + (", Some("\"it's (\""))]
    #[case::empty("'' + (", Some("''"))]
    #[case::escaped_quote("'a\\'(' + (", Some("'a\\'('"))]
    #[case::escapes("'\\x41\\u00e9\\U0001f600\\101\\n(' + (", Some("'\\x41\\u00e9\\U0001f600\\101\\n('"))]
    #[case::no_such_escape("'\\q(((", Some("'\\"))]
    #[case::short_escape("'\\x4(((", Some("'\\"))]
    #[case::not_closed_in_the_line("'a\n[[[", Some("'a"))]
    #[case::not_closed("'a((", Some("'a(("))]
    #[case::raw("r'\\' + (", Some("r'\\'"))]
    #[case::raw_bytes("bR'\\' + (", Some("bR'\\'"))]
    #[case::bytes("b'\\'(' + (", Some("b'\\'('"))]
    #[case::a_name_before_a_text("bar'\\'(' + (", Some("bar"))]
    #[case::a_number_before_a_raw_text("1r'\\' + (", Some("1r'\\'"))]
    #[case::three_quotes("'''a'(\n''(''' + (", Some("'''a'(\n''('''"))]
    #[case::three_raw_quotes("r\"\"\"\\\"\"\" + (", Some("r\"\"\"\\\"\"\""))]
    #[case::three_quotes_that_are_not_closed("'''a\n((", Some("''"))]
    fn what_is_not_code_is_passed_over(#[case] text: &str, #[case] opaque: Option<&str>) {
        assert_eq!(opaque_bytes(text).map(|bytes| &text[..bytes]), opaque);
    }
}
