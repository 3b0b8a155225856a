//! Names of model calls and tool runs, unique over the life of an Agent.
//!
//! Each names the member of the Agent that it belongs to. An Agent has one, [`MAIN`], whose number is not
//! written; higher numbers are reserved: `t12c1a1` is a call of the main member, `m3-t12c1a1` the call of the same
//! numbers of member 3.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The member that is the agent itself.
pub const MAIN: u16 = 0;

/// Identity of one attempt at one model call. Written as `t12c1a1`.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId {
    /// The member; [`MAIN`] is not written.
    #[serde(default, skip_serializing_if = "is_main")]
    pub member: u16,
    /// The turn, from 1.
    pub turn: i64,
    /// The call within the turn, from 1; 0 is a pre-check or a score before it.
    pub call: u32,
    /// The attempt at that call, from 1.
    pub attempt: u32,
}

impl CallId {
    /// Whether the call is `last` or an earlier one of the same member. Calls of two members have no order.
    #[must_use]
    pub fn is_up_to(self, last: Self) -> bool {
        self.member == last.member && self <= last
    }
}

/// Identity of one tool run. Written as `t12c1r1`.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ToolRunId {
    /// The member; [`MAIN`] is not written.
    #[serde(default, skip_serializing_if = "is_main")]
    pub member: u16,
    /// The turn, from 1.
    pub turn: i64,
    /// The model call within the turn whose answer requested it, from 1; 0 for a run before the turn, which fills
    /// the hot state or checks a criterion.
    pub call: u32,
    /// Its position among the tool calls of that answer, from 1.
    pub index: u32,
}

impl ToolRunId {
    /// Whether it precedes the turn: its result goes to the hot state or to the mode, and not to the model.
    #[must_use]
    pub fn is_refresh(self) -> bool {
        self.call == 0
    }
}

impl Display for CallId {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            turn, call, attempt, ..
        } = self;
        write!(f, "{}t{turn}c{call}a{attempt}", MemberPrefix(self.member))
    }
}

impl Display for ToolRunId {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { turn, call, index, .. } = self;
        write!(f, "{}t{turn}c{call}r{index}", MemberPrefix(self.member))
    }
}

/// A text is not a [`CallId`].
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
#[error("is not a call id such as t12c1a1")]
pub struct CallIdError;

impl FromStr for CallId {
    type Err = CallIdError;

    /// Accepts exactly what `Display` writes.
    fn from_str(text: &str) -> Result<Self, CallIdError> {
        let parts = || {
            let (member, turn, call, attempt) = numbers(text, 'a')?;
            Some(Self {
                member,
                turn,
                call,
                attempt,
            })
        };
        parts().filter(|id| id.to_string() == text).ok_or(CallIdError)
    }
}

/// A text is not the id of a tool run.
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
#[error("is not the id of a tool run such as t12c1r1")]
pub struct ToolRunIdError;

impl FromStr for ToolRunId {
    type Err = ToolRunIdError;

    /// Accepts exactly what `Display` writes.
    fn from_str(text: &str) -> Result<Self, ToolRunIdError> {
        let parts = || {
            let (member, turn, call, index) = numbers(text, 'r')?;
            Some(Self {
                member,
                turn,
                call,
                index,
            })
        };
        parts().filter(|id| id.to_string() == text).ok_or(ToolRunIdError)
    }
}

struct MemberPrefix(u16);

impl Display for MemberPrefix {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            MAIN => Ok(()),
            member => write!(f, "m{member}-"),
        }
    }
}

/// The numbers of an id whose last one follows the letter `last`. Also accepts forms that `Display` does not write,
/// such as `m0-t01c1a1`.
fn numbers(text: &str, last: char) -> Option<(u16, i64, u32, u32)> {
    let (member, rest) = match text.strip_prefix('m') {
        Some(rest) => {
            let (member, rest) = rest.split_once('-')?;
            (member.parse().ok()?, rest)
        }
        None => (MAIN, text),
    };
    let (turn, rest) = rest.strip_prefix('t')?.split_once('c')?;
    let (call, number) = rest.split_once(last)?;
    Some((member, turn.parse().ok()?, call.parse().ok()?, number.parse().ok()?))
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_main(member: &u16) -> bool {
    *member == MAIN
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[test]
    fn the_main_member_is_not_written() {
        let call = CallId {
            member: MAIN,
            turn: 12,
            call: 1,
            attempt: 2,
        };
        assert_eq!(call.to_string(), "t12c1a2");
        assert_eq!(CallId { member: 3, ..call }.to_string(), "m3-t12c1a2");
        let stored = r#"{"turn":12,"call":1,"attempt":2}"#;
        assert_eq!(serde_json::to_string(&call).unwrap(), stored);
        assert_eq!(serde_json::from_str::<CallId>(stored).unwrap(), call);
    }

    #[rstest]
    #[case("m0-t1c1a1")]
    #[case("m03-t1c1a1")]
    #[case("m-t1c1a1")]
    #[case("m65536-t1c1a1")]
    #[case("m3t1c1a1")]
    #[case("3-t1c1a1")]
    #[case("t01c1a1")]
    #[case("t1c1a+1")]
    #[case("t1c1r1")]
    #[case("")]
    fn no_other_text_is_a_call_id(#[case] text: &str) {
        assert_eq!(text.parse::<CallId>(), Err(CallIdError));
    }

    #[test]
    fn a_call_id_is_no_id_of_a_tool_run() {
        assert_eq!("t1c1a1".parse::<ToolRunId>(), Err(ToolRunIdError));
        assert_eq!("m0-t1c1r1".parse::<ToolRunId>(), Err(ToolRunIdError));
    }

    proptest! {
        #[test]
        fn ids_are_read_back_as_they_were_written(member: u16, turn in 0..=i64::MAX, call: u32, last: u32) {
            let id = CallId { member, turn, call, attempt: last };
            prop_assert_eq!(id.to_string().parse(), Ok(id));
            prop_assert_eq!(serde_json::from_str::<CallId>(&serde_json::to_string(&id).unwrap()).unwrap(), id);
            let id = ToolRunId { member, turn, call, index: last };
            prop_assert_eq!(id.to_string().parse(), Ok(id));
            prop_assert_eq!(serde_json::from_str::<ToolRunId>(&serde_json::to_string(&id).unwrap()).unwrap(), id);
        }

        #[test]
        fn calls_are_ordered_within_a_member_only(members: (u16, u16), turns in (1..9_i64, 1..9_i64)) {
            let id = |member, turn| CallId { member, turn, call: 1, attempt: 1 };
            let (first, last) = (id(members.0, turns.0), id(members.1, turns.1));
            prop_assert_eq!(first.is_up_to(last), members.0 == members.1 && turns.0 <= turns.1);
        }
    }
}
