//! Messages that carry text of a model's answer to a requested task while it arrives, from the worker to subscribers.
//!
//! | hop | carries |
//! |---|---|
//! | worker → gateway | `POST /v1/text` on the socket, a [`TextFragment`] |
//! | gateway → controller | `POST /v1/text`, a [`RelayedTextFragment`] |
//! | controller → client | the event [`TEXT_EVENT`] of `GET /v1/namespaces/{namespace}/agents/{name}/events?text=true`, without an id |
//!
//! Best effort: nothing is sent unless [`EventSubscription::text`](super::events::EventSubscription::text) of a
//! subscription asks for it, no hop stores or repeats anything, and each may drop fragments. The response is in the event
//! `task:ended` in any case.

use serde::{Deserialize, Serialize};

/// Name of the event with a [`TextFragment`]. Has no id: it is no line of the journal, and moves no cursor.
pub const TEXT_EVENT: &str = "text";
/// Maximum number of bytes of [`TextFragment::text`].
pub const MAX_FRAGMENT_BYTES: usize = 4096;

/// A part of an answer's text.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct TextFragment {
    /// Id of the task that is answered.
    pub task: String,
    /// The model call, as in the events of the call: `t12c1a1` is attempt 1 at call 1 of turn 12.
    pub call: String,
    /// The attempt at the call. A higher one voids the text of those before it.
    pub attempt: u32,
    /// Bytes of the text of this attempt before the fragment. Higher than the end of the last fragment: some were lost. Lower:
    /// the text is sent again, since the worker has restarted.
    pub offset: u64,
    /// The text.
    pub text: String,
}

impl TextFragment {
    /// The offset of what follows it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.text.len() as u64)
    }

    /// The model call, whichever attempt it is.
    #[must_use]
    pub fn call_of_all_attempts(&self) -> &str {
        self.call.rsplit_once('a').map_or(&*self.call, |(call, _)| call)
    }
}

/// A fragment of a worker, relayed by its gateway.
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct RelayedTextFragment {
    /// Epoch of the pod.
    pub epoch: i64,
    /// The worker's fragment.
    pub fragment: TextFragment,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_attempts_at_a_call_are_of_one_call() {
        let of = |call: &str| TextFragment {
            call: call.into(),
            ..TextFragment::default()
        };
        for (call, expected) in [("t12c1a1", "t12c1"), ("t12c1a10", "t12c1"), ("", "")] {
            assert_eq!(of(call).call_of_all_attempts(), expected);
        }
    }

    #[test]
    fn offsets_count_bytes() {
        let fragment = TextFragment {
            offset: 3,
            text: "é!".into(),
            ..TextFragment::default()
        };
        assert_eq!(fragment.end(), 6);
        let last = TextFragment {
            offset: u64::MAX,
            ..fragment
        };
        assert_eq!(last.end(), u64::MAX);
    }
}
