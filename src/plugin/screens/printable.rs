//! Text of others on a terminal: of models, tools, servers. Control characters could move its cursor or hide what is there.

/// As one line.
#[must_use]
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// With its lines and tabs.
#[must_use]
pub fn lines(text: &str) -> String {
    let shown = |c: char| !c.is_control() || c == '\n' || c == '\t';
    text.chars().map(|c| if shown(c) { c } else { ' ' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(one_line("a\u{1b}[2J\r\n\u{9b}é"), "a [2J   é");
        assert_eq!(lines("a\u{1b}[2J\r\n\té"), "a [2J \n\té");
    }
}
