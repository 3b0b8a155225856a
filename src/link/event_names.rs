//! Names of the events that readers look for. The worker writes them, and the page and the plugin match them; docs/reference/events.md
//! lists all names.

/// A turn began.
pub const TURN_STARTED: &str = "autonomy:turn_started";
/// A turn ended.
pub const TURN_COMPLETED: &str = "autonomy:turn_completed";
/// A turn ended with a failure.
pub const TURN_FAILED: &str = "autonomy:turn_failed";
/// Old tool results were left out of the context.
pub const RESULTS_CLEARED: &str = "autonomy:context_results_cleared";
/// A tool run was recorded, before it was sent.
pub const TOOL_INTENT: &str = "tool:intent";
/// A tool run ended.
pub const TOOL_OUTCOME: &str = "tool:outcome";
/// A tool call was denied.
pub const TOOL_DENIED: &str = "tool:denied";
/// A gate opened.
pub const GATE_OPENED: &str = "gate:opened";
/// A task was accepted.
pub const TASK_ACCEPTED: &str = "task:accepted";
/// Work on a task began.
pub const TASK_STARTED: &str = "task:started";
/// A task ended.
pub const TASK_ENDED: &str = "task:ended";
/// A model call was answered.
pub const CALL_ANSWERED: &str = "model:call_answered";
