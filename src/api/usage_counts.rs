//! What a loop counts over the life of its Agent, for `status.usage`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumIter, IntoEnumIterator, IntoStaticStr};

use super::amount::is_zero;
use super::first_elements::first_elements;
use super::pause::PauseReason;
use super::status::LoopOutcome;
use super::task::TaskOutcome;

/// Maximum number of tools that are counted by name, including the entry for all others.
pub const MAX_TOOLS: usize = 20;
/// Most entries of [`LoopCounts::guardrail_trips`], more than [`GuardrailTrip::all`] has.
const MAX_TRIPS: usize = 32;
/// Name of the entry for all other tools.
pub const OTHER_TOOLS: &str = "other";
/// Something that is counted as the trip of a limit, with the action taken. A closed set: labels of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardrailTrip {
    /// A limit paused the loop.
    Pause(PauseReason),
    /// `guardrails.maxCallsPerTurn` ended a turn.
    MaxCallsPerTurn,
    /// `guardrails.idleTimeoutSeconds` ended the loop.
    IdleTimeout,
    /// A detected loop led to a step: by its steps only, and not again by the pause or the end that a step brings.
    LoopDetected(TripAction),
}

/// Action taken when a limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum TripAction {
    /// The model was warned.
    Warn,
    /// A tool call, or further calls of the turn, were denied.
    Deny,
    /// The loop was paused.
    Pause,
    /// The loop was ended.
    Kill,
}

impl GuardrailTrip {
    /// Every trip that is counted.
    pub fn all() -> impl Iterator<Item = Self> {
        let pauses = PauseReason::iter().filter_map(Self::of_pause);
        let others = [Self::MaxCallsPerTurn, Self::IdleTimeout];
        pauses.chain(others).chain(TripAction::iter().map(Self::LoopDetected))
    }

    /// The trip of a pause that has begun; `None`: it is not counted here.
    #[must_use]
    pub fn of_pause(reason: PauseReason) -> Option<Self> {
        (reason.facts().is_guardrail && reason != PauseReason::LoopDetected).then_some(Self::Pause(reason))
    }

    /// The trip of a loop that has ended; `None`: it is not counted here.
    #[must_use]
    pub const fn of_outcome(outcome: LoopOutcome) -> Option<Self> {
        match outcome {
            LoopOutcome::Idle => Some(Self::IdleTimeout),
            LoopOutcome::Completed
            | LoopOutcome::Failed
            | LoopOutcome::Escalated
            | LoopOutcome::Cancelled
            | LoopOutcome::ScaledToZero => None,
        }
    }

    /// The labels `guardrail` and `action`.
    #[must_use]
    pub fn labels(self) -> (&'static str, &'static str) {
        let (guardrail, action) = match self {
            Self::Pause(reason) => (reason.into(), TripAction::Pause),
            Self::MaxCallsPerTurn => ("MaxCallsPerTurn", TripAction::Deny),
            Self::IdleTimeout => ("IdleTimeout", TripAction::Kill),
            Self::LoopDetected(action) => ("LoopDetected", action),
        };
        (guardrail, action.into())
    }
}

/// What a loop counts over the life of its Agent. The engine counts; its snapshot, the worker's report, the gateway's
/// totals and the status embed these counts, so that they outlive the worker, the pod and the controller. To add a
/// count, add its field and its line in [`LoopCounts::merge`].
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct LoopCounts {
    /// Number of completed turns.
    // Remove the alias with version 3 of the link.
    #[serde(alias = "turnsCompleted")]
    #[schemars(range(min = 0))]
    pub turns: i64,
    /// Number of turns that were given up after a failure.
    #[serde(skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub failed_turns: i64,
    /// Number of tool runs sent, as reported by the worker. A repetition after a restart does not count again.
    #[schemars(range(min = 0))]
    pub tool_calls: i64,
    /// Number of actions: tool runs with an effect other than `Read`.
    #[schemars(range(min = 0))]
    pub actions: i64,
    /// Number of tool calls of the model that were denied and not run: unknown tool, invalid arguments, a tool that was
    /// denied too often in the turn, a server that has not answered yet, or a call that was cut at the output limit.
    #[schemars(range(min = 0))]
    pub denied_tool_calls: i64,
    /// Tasks and requests that have ended, by outcome.
    #[serde(skip_serializing_if = "TaskCounts::is_empty")]
    pub tasks: TaskCounts,
    /// Outcomes of tool runs per tool, as reported by the worker, at most 20 entries, the last one for all other tools.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_TOOLS, _, _>"
    )]
    #[schemars(length(max = MAX_TOOLS), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["tool"]))]
    pub by_tool: Vec<ToolUsage>,
    /// How often limits were reached and loops were detected, as reported by the worker.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "first_elements::<MAX_TRIPS, _, _>"
    )]
    #[schemars(
        length(max = MAX_TRIPS),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["guardrail", "action"])
    )]
    pub guardrail_trips: Vec<GuardrailTrips>,
}

impl LoopCounts {
    /// Raises each count to the greater of both: totals never decrease, and merging the same twice adds nothing.
    pub fn merge(&mut self, new: &Self) {
        // Names every field, so that one without a line below does not compile.
        let Self {
            turns,
            failed_turns,
            tool_calls,
            actions,
            denied_tool_calls,
            tasks,
            by_tool,
            guardrail_trips,
        } = new;
        self.turns = self.turns.max(*turns);
        self.failed_turns = self.failed_turns.max(*failed_turns);
        self.tool_calls = self.tool_calls.max(*tool_calls);
        self.actions = self.actions.max(*actions);
        self.denied_tool_calls = self.denied_tool_calls.max(*denied_tool_calls);
        self.tasks.merge(tasks);
        merge_tools(&mut self.by_tool, by_tool);
        merge_trips(&mut self.guardrail_trips, guardrail_trips);
    }
}

/// How many tasks ended with each outcome.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct TaskCounts {
    /// With a response.
    #[schemars(range(min = 0))]
    pub completed: i64,
    /// With an error.
    #[schemars(range(min = 0))]
    pub failed: i64,
    /// By a limit.
    #[schemars(range(min = 0))]
    pub limit_reached: i64,
}

impl TaskCounts {
    /// Whether no task has ended.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// A task has ended.
    pub fn add(&mut self, outcome: TaskOutcome) {
        let count = match outcome {
            TaskOutcome::Completed => &mut self.completed,
            TaskOutcome::Failed => &mut self.failed,
            TaskOutcome::LimitReached => &mut self.limit_reached,
        };
        *count = count.saturating_add(1);
    }

    /// The number of tasks that ended so.
    #[must_use]
    pub const fn of(&self, outcome: TaskOutcome) -> i64 {
        match outcome {
            TaskOutcome::Completed => self.completed,
            TaskOutcome::Failed => self.failed,
            TaskOutcome::LimitReached => self.limit_reached,
        }
    }

    fn merge(&mut self, new: &Self) {
        self.completed = self.completed.max(new.completed);
        self.failed = self.failed.max(new.failed);
        self.limit_reached = self.limit_reached.max(new.limit_reached);
    }
}

/// How often a limit was reached.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("required" = ["guardrail", "action"]))]
pub struct GuardrailTrips {
    /// A pause reason, `MaxCallsPerTurn`, `IdleTimeout`, or `LoopDetected`.
    #[schemars(length(min = 1, max = 63))]
    pub guardrail: String,
    /// Action taken: `warn` (the model), `deny` (a tool call, or further calls of the turn), `pause` or `kill` (the
    /// loop).
    #[schemars(length(min = 1, max = 63))]
    pub action: String,
    /// Number of times.
    #[schemars(range(min = 0))]
    pub count: i64,
}

/// Outcomes and durations of the runs of one tool; each attempt counts.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("required" = ["tool"]))]
pub struct ToolUsage {
    /// Name of the tool as the model calls it; `other` for tools beyond the first 19 and for names that no server
    /// offers.
    #[schemars(length(min = 1, max = 64))]
    pub tool: String,
    /// Number of successful runs.
    #[schemars(range(min = 0))]
    pub ok: i64,
    /// Number of runs that returned an error.
    #[schemars(range(min = 0))]
    pub error: i64,
    /// Number of tool calls that were denied: not allowed, invalid arguments, or a repetition. Not run.
    #[schemars(range(min = 0))]
    pub denied: i64,
    /// Number of tool calls whose server was unavailable. Not run.
    #[schemars(range(min = 0))]
    pub unavailable: i64,
    /// Number of tool calls that were sent and not answered in time. They may have run.
    #[schemars(range(min = 0))]
    pub unknown: i64,
    /// Number of runs with a known duration: sent, and ended before the worker did.
    #[schemars(range(min = 0))]
    pub timed: i64,
    /// Total duration of the runs counted in `timed`, in milliseconds.
    #[schemars(range(min = 0))]
    pub milliseconds: i64,
}

/// Raises totals to the greater of both, count by count: totals never decrease.
#[macro_export]
macro_rules! raise {
    ($known:expr, $new:expr; $($count:ident),+ $(,)?) => {{
        $($known.$count = $known.$count.max($new.$count);)+
    }};
}
pub use raise;

/// The entry of a tool, or the one for all others if the list is full.
pub fn of_tool<'a>(tools: &'a mut Vec<ToolUsage>, name: &str) -> &'a mut ToolUsage {
    let named = |tools: &[ToolUsage], name: &str| tools.iter().position(|known| known.tool == name);
    let others = usize::from(named(tools, OTHER_TOOLS).is_some());
    let has_capacity = tools.len() - others < MAX_TOOLS - 1;
    let name = match named(tools, name) {
        None if !has_capacity => OTHER_TOOLS,
        _ => name,
    };
    let place = named(tools, name).unwrap_or_else(|| {
        tools.push(ToolUsage {
            tool: name.into(),
            ..ToolUsage::default()
        });
        tools.len() - 1
    });
    &mut tools[place]
}

/// The entry of a limit and its action.
pub fn of_trip<'a>(trips: &'a mut Vec<GuardrailTrips>, guardrail: &str, action: &str) -> &'a mut GuardrailTrips {
    let known = trips
        .iter()
        .position(|trip| trip.guardrail == guardrail && trip.action == action);
    let place = known.unwrap_or_else(|| {
        trips.push(GuardrailTrips {
            guardrail: guardrail.into(),
            action: action.into(),
            count: 0,
        });
        trips.len() - 1
    });
    &mut trips[place]
}

/// Merges the counts of all tools.
fn merge_tools(known: &mut Vec<ToolUsage>, new: &[ToolUsage]) {
    for tool in new {
        let entry = of_tool(known, &tool.tool);
        raise!(entry, tool; ok, error, denied, unavailable, unknown, timed, milliseconds);
    }
}

/// The same for limits. Entries unknown to this version are ignored.
fn merge_trips(known: &mut Vec<GuardrailTrips>, new: &[GuardrailTrips]) {
    let known_labels = |trip: &&GuardrailTrips| {
        let labels = (trip.guardrail.as_str(), trip.action.as_str());
        GuardrailTrip::all().any(|known| known.labels() == labels)
    };
    for trip in new.iter().filter(known_labels) {
        let entry = of_trip(known, &trip.guardrail, &trip.action);
        raise!(entry, trip; count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counted_limit_has_labels_of_its_own_and_fits_into_the_status() {
        let labels: Vec<_> = GuardrailTrip::all().map(GuardrailTrip::labels).collect();
        let distinct: std::collections::BTreeSet<_> = labels.iter().collect();
        assert_eq!(distinct.len(), labels.len());
        assert!(labels.len() <= MAX_TRIPS);
        assert_eq!(
            GuardrailTrip::of_pause(PauseReason::LoopDetected),
            None,
            "counted by its steps"
        );
        assert_eq!(GuardrailTrip::of_pause(PauseReason::LinkLost), None, "no limit");
    }

    #[test]
    fn nineteen_tools_have_an_entry_of_their_own_and_the_twentieth_is_among_the_rest() {
        let mut tools = Vec::new();
        for number in 1..=22 {
            of_tool(&mut tools, &format!("t{number}")).ok += 1;
            of_tool(&mut tools, "t1").error += 1;
        }
        assert_eq!(tools.len(), MAX_TOOLS);
        assert_eq!((tools[18].tool.as_str(), tools[18].ok), ("t19", 1));
        assert_eq!((tools[19].tool.as_str(), tools[19].ok), (OTHER_TOOLS, 3));
        assert_eq!((tools[0].ok, tools[0].error), (1, 22));
    }

    /// Each field with a value.
    fn counted() -> LoopCounts {
        let mut counts = LoopCounts::default();
        of_tool(&mut counts.by_tool, "a").ok = 5;
        of_trip(&mut counts.guardrail_trips, "LoopDetected", "warn").count = 5;
        let mut value = serde_json::to_value(&counts).unwrap();
        for count in value
            .as_object_mut()
            .unwrap()
            .values_mut()
            .filter(|count| count.is_i64())
        {
            *count = 5.into();
        }
        // It is not written while it is 0.
        value["failedTurns"] = 5.into();
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn each_count_of_a_loop_is_merged_and_none_decreases() {
        let known = counted();
        let mut merged = LoopCounts::default();
        merged.merge(&known);
        assert_eq!(merged, known);
        merged.merge(&known);
        merged.merge(&LoopCounts::default());
        assert_eq!(merged, known);
    }

    #[test]
    fn merged_counts_never_step_back_and_a_repeat_adds_nothing() {
        let (mut tools, mut trips) = (Vec::new(), Vec::new());
        of_tool(&mut tools, "a").ok = 5;
        (tools[0].timed, tools[0].milliseconds) = (5, 900);
        of_trip(&mut trips, "LoopDetected", "warn").count = 3;
        let (old_tools, old_trips) = (tools.clone(), trips.clone());
        let mut new = Vec::new();
        of_tool(&mut new, "a").error = 2;
        merge_tools(&mut tools, &new);
        merge_tools(&mut tools, &old_tools);
        assert_eq!((tools[0].ok, tools[0].error), (5, 2));
        assert_eq!((tools[0].timed, tools[0].milliseconds), (5, 900));
        of_trip(&mut trips, "LoopDetected", "warn").count = 1;
        merge_trips(&mut trips, &old_trips);
        assert_eq!(trips[0].count, 3);
        let mut strange = old_trips.clone();
        strange[0].guardrail = "OfALaterVersion".into();
        merge_trips(&mut trips, &strange);
        assert_eq!(trips.len(), 1);
    }
}
