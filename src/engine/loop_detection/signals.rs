//! Signals of a loop among the newest tool calls: which repetitions are a loop, and which are work. Pure; the
//! consequences are in `escalation`.
//!
//! What counts is whether a call brought something new. For a read-only tool that is a result that it did not return
//! recently; for a tool with side effects also arguments that it did not get recently: writing thirty files is thirty
//! pieces of work. Equal errors are never new, whatever the arguments.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::signature::{CallSignature, ResultSignature, ShortHash};
use agentloop_api::condition::LoopSign;

/// Calls that are remembered: what was seen before them is new again.
pub const REMEMBERED: usize = 32;
/// Equal errors in a row that are a loop.
pub const EQUAL_ERRORS: usize = 3;
/// Equal calls in a row with equal results that are a loop.
pub const EQUAL_CALLS: usize = 3;
/// Calls in a row that differ only in numbers, ids and times and bring nothing new, which are a loop.
pub const ALIKE_CALLS: usize = 5;
/// Lengths of the cycles that are detected.
pub const CYCLES: std::ops::RangeInclusive<usize> = 2..=4;
/// Repetitions of a cycle that are a loop.
pub const CYCLE_TIMES: usize = 3;
/// Calls in a row that bring nothing new, which are a loop whatever they are.
pub const FRUITLESS_CALLS: usize = 8;
/// Equal calls in a row whose results differ only in numbers: this many are a loop although each may be new, and even
/// if their tool is exempt.
pub const MAX_POLLS: u32 = 100;
/// The same for tools with side effects: sending one mail ten times is not ten pieces of work, even if each has a
/// number.
pub const MAX_EQUAL_ACTIONS: u32 = 10;

/// How a tool call ended.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolCallEnding {
    /// A read-only tool ran.
    Looked,
    /// A tool with side effects ran.
    Acted,
    /// It failed, was denied, or its outcome is unknown.
    Failed,
}

/// One tool call with its result. Persisted as [`PackedCall`], since it is written with every commit.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(from = "PackedCall", into = "PackedCall")]
struct ObservedCall {
    raw: ShortHash,
    masked: ShortHash,
    /// For an error, the masked hash.
    result: ShortHash,
    failed: bool,
    new: bool,
    /// Whether its tool is exempt.
    exempt: bool,
}

type PackedCall = (ShortHash, ShortHash, ShortHash, bool, bool, bool);

impl From<PackedCall> for ObservedCall {
    fn from((raw, masked, result, failed, new, exempt): PackedCall) -> Self {
        Self {
            raw,
            masked,
            result,
            failed,
            new,
            exempt,
        }
    }
}

impl From<ObservedCall> for PackedCall {
    fn from(entry: ObservedCall) -> Self {
        let ObservedCall {
            raw, masked, result, ..
        } = entry;
        (raw, masked, result, entry.failed, entry.new, entry.exempt)
    }
}

/// A loop that was found among the newest calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopSignal {
    pub sign: LoopSign,
    /// Description for the model and for people.
    pub words: String,
    /// Raw or masked hashes of the calls that repeat.
    pub calls: Vec<ShortHash>,
    /// Further calls of the same kind until the next escalation step.
    pub patience: u32,
}

/// The newest tool calls, oldest first.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct RecentCalls {
    entries: VecDeque<ObservedCall>,
    /// How many of the newest came since the agent last chose to sleep: older ones are not part of a repetition.
    awake: usize,
    /// The streak that the newest call belongs to.
    again: CallStreak,
}

/// Equal calls in a row whose results differ only in numbers.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(default)]
struct CallStreak {
    call: ShortHash,
    result: ShortHash,
    times: u32,
    /// This many are a loop.
    most: u32,
}

impl CallStreak {
    fn is_loop(self) -> bool {
        self.times > 0 && self.times >= self.most
    }
}

impl RecentCalls {
    /// Records a call that ended. Returns whether it made progress: something new that is not an error.
    pub fn add(&mut self, call: CallSignature, result: ResultSignature, ending: ToolCallEnding, exempt: bool) -> bool {
        let failed = ending == ToolCallEnding::Failed;
        let shown = if failed { result.masked } else { result.steady };
        let same_result = |entry: &ObservedCall| entry.failed == failed && entry.result == shown;
        let known_result = self.entries.iter().any(same_result);
        let known_call = self.entries.iter().any(|entry| !entry.failed && entry.raw == call.raw);
        // New is a result that was not seen recently or, for a tool with side effects, a call that did not succeed
        // recently.
        let new = !known_result || ending == ToolCallEnding::Acted && !known_call;
        let before = self.again;
        let equal = (before.call, before.result) == (call.raw, result.masked);
        self.again = CallStreak {
            call: call.raw,
            result: result.masked,
            times: if equal { before.times.saturating_add(1) } else { 1 },
            most: if ending == ToolCallEnding::Acted && !exempt {
                MAX_EQUAL_ACTIONS
            } else {
                MAX_POLLS
            },
        };
        if self.entries.len() >= REMEMBERED {
            self.entries.pop_front();
        }
        self.entries.push_back(ObservedCall {
            raw: call.raw,
            masked: call.masked,
            result: shown,
            failed,
            new,
            exempt,
        });
        self.awake = self.awake.saturating_add(1).min(self.entries.len());
        new && !failed && !self.again.is_loop()
    }

    /// The agent chose to sleep: its next calls repeat nothing.
    pub fn reset_after_sleep(&mut self) {
        self.awake = 0;
        self.again = CallStreak::default();
    }

    /// The strongest signal that the newest call gives.
    pub fn signal(&self) -> Option<LoopSignal> {
        let start = self.entries.len().saturating_sub(self.awake);
        let newest_first: Vec<&ObservedCall> = self.entries.range(start..).rev().collect();
        let last = *newest_first.first()?;
        let awake = CallsSinceSleep {
            newest_first: &newest_first,
            last,
        };
        awake
            .equal_errors()
            .or_else(|| self.endless(last))
            .or_else(|| awake.equal_calls())
            .or_else(|| awake.cycle())
            .or_else(|| awake.alike_calls())
            .or_else(|| awake.fruitless_calls())
    }

    fn endless(&self, last: &ObservedCall) -> Option<LoopSignal> {
        self.again.is_loop().then(|| LoopSignal {
            sign: LoopSign::RepeatedCall,
            words: format!(
                "the same call {} times in a row, with results that differ only in numbers",
                self.again.times
            ),
            calls: vec![last.raw],
            patience: 1,
        })
    }
}

/// The calls since the last sleep.
struct CallsSinceSleep<'a> {
    newest_first: &'a [&'a ObservedCall],
    last: &'a ObservedCall,
}

impl CallsSinceSleep<'_> {
    /// How many of the newest calls in a row match.
    fn run(&self, is_so: impl Fn(&ObservedCall) -> bool) -> usize {
        self.newest_first.iter().take_while(|entry| is_so(entry)).count()
    }

    fn equal_errors(&self) -> Option<LoopSignal> {
        let last = self.last;
        let times = self.run(|entry| entry.failed && entry.result == last.result);
        (last.failed && times >= EQUAL_ERRORS).then(|| LoopSignal {
            sign: LoopSign::RepeatedError,
            words: format!("the same error {times} times in a row"),
            calls: vec![last.raw],
            patience: 1,
        })
    }

    fn equal_calls(&self) -> Option<LoopSignal> {
        let last = self.last;
        let times = self.run(|entry| entry.raw == last.raw && entry.result == last.result);
        (!last.exempt && times >= EQUAL_CALLS).then(|| LoopSignal {
            sign: LoopSign::RepeatedCall,
            words: format!("the same call with the same result {times} times in a row"),
            calls: vec![last.raw],
            patience: 1,
        })
    }

    /// Calls that repeat in the same order, and brought something new in the first round at most.
    fn cycle(&self) -> Option<LoopSignal> {
        let comes_again = |length: usize| {
            let whole = length * CYCLE_TIMES;
            let calls = self.newest_first.get(..whole)?;
            // The oldest round may bring something new; the later ones must not.
            let repeats = calls[..whole - length].iter().all(|entry| !entry.new);
            let same = (length..whole).all(|place| calls[place].masked == calls[place - length].masked);
            let period = &calls[..length];
            // One repeated call is not a cycle, and neither are exempt tools alone.
            let varied = period.iter().any(|entry| entry.masked != self.last.masked);
            let counts = period.iter().any(|entry| !entry.exempt);
            (repeats && same && varied && counts).then_some(period)
        };
        let period = CYCLES.into_iter().find_map(comes_again)?;
        let length = period.len();
        Some(LoopSignal {
            sign: LoopSign::Cycle,
            words: format!("the same {length} calls {CYCLE_TIMES} times in the same order, with nothing new"),
            calls: period.iter().map(|entry| entry.raw).collect(),
            patience: u32::try_from(length).unwrap_or(1),
        })
    }

    fn alike_calls(&self) -> Option<LoopSignal> {
        let last = self.last;
        let alike = |entry: &ObservedCall| entry.masked == last.masked;
        let fruitless = self.run(|entry| alike(entry) && !entry.new);
        // The call before them may have brought what they repeat.
        let first = self.newest_first.get(fruitless).is_some_and(|entry| alike(entry));
        let times = fruitless + usize::from(first);
        (!last.exempt && fruitless > 0 && times >= ALIKE_CALLS).then(|| LoopSignal {
            sign: LoopSign::RepeatedCall,
            words: format!("{times} calls in a row that differ only in numbers, with nothing new"),
            calls: vec![last.masked],
            patience: u32::try_from(ALIKE_CALLS).unwrap_or(1),
        })
    }

    fn fruitless_calls(&self) -> Option<LoopSignal> {
        let fruitless = self.newest_first.iter().take_while(|entry| !entry.new);
        let counted: Vec<ShortHash> = fruitless.filter(|entry| !entry.exempt).map(|entry| entry.raw).collect();
        (!self.last.exempt && counted.len() >= FRUITLESS_CALLS).then(|| LoopSignal {
            sign: LoopSign::NoProgress,
            words: format!("{} calls in a row that brought nothing new", counted.len()),
            calls: counted.into_iter().take(FRUITLESS_CALLS).collect(),
            patience: u32::try_from(FRUITLESS_CALLS).unwrap_or(1),
        })
    }
}
