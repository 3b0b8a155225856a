//! Turns the parser's errors into messages for the author of an expression.

use cel::ParseErrors;

use agentloop_support::text::{first_chars, with_ellipsis};

/// Maximum number of characters of a quoted piece of the text.
const MAX_SHOWN: usize = 24;

/// The first error, on one line. `field`: an example of a field.
pub(super) fn describe_errors(text: &str, field: &str, errors: &ParseErrors) -> String {
    let first = errors.errors.iter().min_by_key(|error| error.pos);
    first.map_or_else(
        || "is not a valid expression".into(),
        |error| {
            let (line, column) = error.pos;
            let words = if is_end(text, error.pos) {
                at_the_end(&error.msg)
            } else {
                describe_message(&error.msg, field)
            };
            format!("is not a valid expression: line {line}, column {column}: {words}")
        },
    )
}

fn describe_message(message: &str, field: &str) -> String {
    let message = message.strip_prefix("Syntax error: ").unwrap_or(message);
    if let Some(piece) = message.strip_prefix("token recognition error at: ") {
        return format!("unexpected {}; strings must be quoted", piece_of(piece));
    }
    if let Some((wanted, found)) = missing(message) {
        return format!("missing {} before {}", piece_of(wanted), piece_of(found));
    }
    let inputs = [
        "mismatched input ",
        "extraneous input ",
        "no viable alternative at input ",
    ];
    if let Some(rest) = inputs.iter().find_map(|start| message.strip_prefix(start)) {
        let found = rest.split(" expecting ").next().unwrap_or(rest);
        return format!("unexpected {}", piece_of(found));
    }
    match message {
        "invalid int literal" | "invalid uint literal" | "invalid double literal" => "the number is too large".into(),
        "invalid argument to has() macro" => format!("has() takes a field, such as has({field})"),
        "argument must be a simple name" => {
            "the first argument of all, exists, exists_one, filter and map must be a new name, such as item".into()
        }
        _ => "syntax error".into(),
    }
}

fn at_the_end(message: &str) -> String {
    let message = message.strip_prefix("Syntax error: ").unwrap_or(message);
    match missing(message) {
        Some((wanted, _)) => format!("missing {} at the end", piece_of(wanted)),
        None => "unexpected end".into(),
    }
}

fn missing(message: &str) -> Option<(&str, &str)> {
    message.strip_prefix("missing ")?.split_once(" at ")
}

fn is_end(text: &str, (line, column): (isize, isize)) -> bool {
    let last = text.split('\n').next_back().unwrap_or_default();
    let (lines, columns) = (text.split('\n').count(), last.chars().count());
    usize::try_from(line).is_ok_and(|line| line == lines)
        && usize::try_from(column).is_ok_and(|column| column > columns)
}

/// A quoted piece, truncated.
fn piece_of(quoted: &str) -> String {
    let inner = quoted.trim().trim_matches('\'');
    format!("'{}'", with_ellipsis(first_chars(inner, MAX_SHOWN), inner))
}
