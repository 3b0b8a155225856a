//! Text of others on a terminal: of models, tools, servers. Control characters could move its cursor, and others
//! reorder or hide what is there.

/// Control characters, those that change the direction of a text, and invisible ones.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// As one line.
#[must_use]
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if is_hidden(c) { ' ' } else { c }).collect()
}

/// With its lines and tabs.
#[must_use]
pub fn lines(text: &str) -> String {
    let shown = |c: char| !is_hidden(c) || c == '\n' || c == '\t';
    text.chars().map(|c| if shown(c) { c } else { ' ' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_reorder_or_hide_text_are_replaced() {
        assert_eq!(
            one_line("a\u{202e}b\u{2066}c\u{200b}d\u{feff}e\u{e0041}f"),
            "a b c d e f"
        );
        assert_eq!(lines("a\u{2028}b\u{ad}\nשלום"), "a b \nשלום");
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(one_line("a\u{1b}[2J\r\n\u{9b}é"), "a [2J   é");
        assert_eq!(lines("a\u{1b}[2J\r\n\té"), "a [2J \n\té");
    }
}
