//! Ids of traces and spans, derived from the names of turns, model calls and tool runs.

use agentloop_support::hash::sha256;

/// Bytes of a trace id.
const TRACE_BYTES: usize = 16;
/// Bytes of a span id.
const SPAN_BYTES: usize = 8;

/// A turn of an Agent, over all its pods and processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TurnName<'a> {
    /// Uid of the Agent: one that was deleted and created again has other traces.
    pub agent: &'a str,
    /// The member of the Agent; 0 is the agent itself.
    pub member: u16,
    /// Number of the turn, from 1.
    pub turn: i64,
}

impl TurnName<'_> {
    /// Id of the trace of this turn.
    #[must_use]
    pub fn trace_id(self) -> Vec<u8> {
        let Self { agent, member, turn } = self;
        sha256(format!("agentloop trace {agent} {member} {turn}"))[..TRACE_BYTES].to_vec()
    }

    /// Id of the span of the turn itself, the root of its trace.
    #[must_use]
    pub fn root_id(self) -> Vec<u8> {
        self.span_id("turn")
    }

    /// Id of the span of something within the turn, by a name that is unique there.
    #[must_use]
    pub fn span_id(self, name: &str) -> Vec<u8> {
        let Self { agent, member, turn } = self;
        sha256(format!("agentloop span {agent} {member} {turn} {name}"))[..SPAN_BYTES].to_vec()
    }
}

/// The member and the turn of the name of a call or a tool run, such as `t12c1a1` or `m3-t12c1r1`.
#[must_use]
pub fn turn_of(name: &str) -> Option<(u16, i64)> {
    let (member, rest) = match name.strip_prefix('m') {
        Some(rest) => {
            let (member, rest) = rest.split_once('-')?;
            (member.parse().ok()?, rest)
        }
        None => (0, name),
    };
    let (turn, _) = rest.strip_prefix('t')?.split_once('c')?;
    Some((member, turn.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use agentloop_support::hash::hex;
    use pretty_assertions::assert_eq;

    use super::*;

    const TURN: TurnName<'_> = TurnName {
        agent: "uid",
        member: 0,
        turn: 12,
    };

    /// A trace that is under way continues over an upgrade, so the ids may not change.
    #[test]
    fn ids_are_the_same_in_every_process_and_version() {
        assert_eq!(hex(&TURN.trace_id()), "3c7ab538e73a5da7a77d1c071ec3c9ad");
        assert_eq!(hex(&TURN.root_id()), "1dfee97bd311a451");
        assert_eq!(hex(&TURN.span_id("t12c1a1")), "7ef9200594e12ac0");
    }

    #[test]
    fn each_agent_member_turn_and_name_has_ids_of_its_own() {
        let others = [
            TurnName { agent: "uid2", ..TURN },
            TurnName { member: 1, ..TURN },
            TurnName { turn: 13, ..TURN },
        ];
        for other in others {
            assert_ne!(other.trace_id(), TURN.trace_id());
            assert_ne!(other.root_id(), TURN.root_id());
        }
        assert_ne!(TURN.span_id("t12c1a1"), TURN.span_id("t12c1a2"));
        assert_ne!(TURN.span_id("t12c1a1"), TURN.root_id());
    }

    #[test]
    fn the_turn_of_a_call_or_a_run_is_read_from_its_name() {
        assert_eq!(turn_of("t12c1a1"), Some((0, 12)));
        assert_eq!(turn_of("m3-t12c1r2"), Some((3, 12)));
        for wrong in ["", "12", "t12", "m-t1c1a1", "c1t1"] {
            assert_eq!(turn_of(wrong), None, "{wrong}");
        }
    }
}
