//! What the parser says of a text that is no expression, in words for who wrote it.

use cel::ParseErrors;

/// Most characters of a piece of the text that are shown.
const MOST_SHOWN: usize = 24;

/// The first error in a text, on one line.
pub(super) fn describe_errors(text: &str, errors: &ParseErrors) -> String {
    let first = errors.errors.iter().min_by_key(|error| error.pos);
    first.map_or_else(
        || "is no expression".into(),
        |error| {
            let (line, column) = error.pos;
            let words = if is_end(text, error.pos) {
                at_the_end(&error.msg)
            } else {
                describe_message(&error.msg)
            };
            format!("is no expression: line {line}, column {column}: {words}")
        },
    )
}

fn describe_message(message: &str) -> String {
    let message = message.strip_prefix("Syntax error: ").unwrap_or(message);
    if let Some(piece) = message.strip_prefix("token recognition error at: ") {
        return format!("{} is no part of expressions; texts stand in quotes", piece_of(piece));
    }
    if let Some((wanted, found)) = missing(message) {
        return format!("{} is missing before {}", piece_of(wanted), piece_of(found));
    }
    let inputs = [
        "mismatched input ",
        "extraneous input ",
        "no viable alternative at input ",
    ];
    if let Some(rest) = inputs.iter().find_map(|start| message.strip_prefix(start)) {
        let found = rest.split(" expecting ").next().unwrap_or(rest);
        return format!("{} cannot stand there", piece_of(found));
    }
    match message {
        "invalid int literal" | "invalid uint literal" | "invalid double literal" => "the number is too large".into(),
        "invalid argument to has() macro" => "has() takes a field, such as has(payload.price)".into(),
        "argument must be a simple name" => {
            "the first value of all, exists, exists_one, filter and map must be a new name, such as item".into()
        }
        _ => "it cannot be read from there on".into(),
    }
}

fn at_the_end(message: &str) -> String {
    let message = message.strip_prefix("Syntax error: ").unwrap_or(message);
    match missing(message) {
        Some((wanted, _)) => format!("{} is missing at its end", piece_of(wanted)),
        None => "it ends where something must follow".into(),
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

/// A piece in quotes, its beginning.
fn piece_of(quoted: &str) -> String {
    let inner = quoted.trim().trim_matches('\'');
    let shown: String = inner.chars().take(MOST_SHOWN).collect();
    let rest = if shown.len() < inner.len() { "…" } else { "" };
    format!("'{shown}{rest}'")
}
