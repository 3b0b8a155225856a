//! Names under which models call tools. Pure.
//!
//! Models accept 1 to 64 of `a-z`, `A-Z`, `0-9`, `_` and `-`; servers allow more. A name that has to be changed ends in
//! a hash of the original, so that it does not depend on which other tools exist.

use crate::support::hash::sha256_hex;

/// Maximum number of characters that models accept.
const MAX_NAME_LEN: usize = 64;
const HASH_DIGITS: usize = 8;

/// Separates the server's name from the tool's. Names of servers contain no `_`.
const BETWEEN: &str = "__";

/// Returns the name under which models call a server's tool.
pub(super) fn of(server: &str, tool: &str) -> String {
    let spelt: String = tool.chars().map(valid).collect();
    let whole = format!("{server}{BETWEEN}{spelt}");
    if spelt == tool && whole.len() <= MAX_NAME_LEN {
        return whole;
    }
    let hash = sha256_hex(tool, HASH_DIGITS / 2);
    let kept = whole.len().min(MAX_NAME_LEN - HASH_DIGITS - 1);
    format!("{}_{hash}", &whole[..kept])
}

/// Returns the server that a name belongs to.
pub(super) fn server(name: &str) -> Option<&str> {
    name.split_once(BETWEEN).map(|(server, _)| server)
}

fn valid(character: char) -> char {
    let fits = character.is_ascii_alphanumeric() || character == '_' || character == '-';
    if fits { character } else { '_' }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_valid_for_models_is_unchanged() {
        assert_eq!(of("github", "create_issue"), "github__create_issue");
        assert_eq!(of("a-b", "X-9__z"), "a-b__X-9__z");
        assert_eq!(server("a-b__X-9__z"), Some("a-b"));
        assert_eq!(server("yield"), None);
        let longest = "t".repeat(64 - "github__".len());
        assert_eq!(of("github", &longest), format!("github__{longest}"));
    }

    #[test]
    fn names_that_differ_only_in_invalid_characters_stay_distinct() {
        let names = [of("db", "query.read"), of("db", "query/read"), of("db", "query_read")];
        assert_eq!(names[2], "db__query_read");
        assert!(names[0].starts_with("db__query_read_") && names[1].starts_with("db__query_read_"));
        assert_ne!(names[0], names[1]);
        let long = "t".repeat(80);
        assert_eq!(of("db", &long).len(), 64);
        assert_ne!(of("db", &format!("{long}a")), of("db", &format!("{long}b")));
    }

    proptest! {
        #[test]
        fn any_tool_has_a_name_valid_for_models(server_name in "[a-z]([-a-z0-9]{0,30}[a-z0-9])?", tool in "\\PC{0,200}") {
            let name = of(&server_name, &tool);
            prop_assert!(name.len() <= MAX_NAME_LEN && name.chars().all(|character| valid(character) == character), "{}", name);
            prop_assert_eq!(server(&name), Some(server_name.as_str()));
        }
    }
}
