//! Names of the annotations by which users send requests to an Agent or an AgentBudget.

/// Annotation on an Agent: ends a sleep, or starts a loop that has ended again; once per value.
pub const WAKE: &str = "agentloop.dev/wake";
/// Annotation on an Agent: ends a cool-down or a pause that needs a person; once per value.
pub const RESUME: &str = "agentloop.dev/resume";
/// Annotation on an Agent: ends its loop with outcome `Cancelled`, once per value. The turn that runs may end first, unless
/// the value begins with [`STOP_NOW`].
pub const STOP: &str = "agentloop.dev/stop";
/// Beginning of a value of [`STOP`] that cuts the turn.
pub const STOP_NOW: &str = "now:";
/// Annotation that approves gates: `<gate>:<argumentsHash>`, separated by spaces.
pub const APPROVE: &str = "agentloop.dev/approve";
/// Annotation with the name of the approver; the admission policy requires it to be the requesting user.
pub const APPROVED_BY: &str = "agentloop.dev/approved-by";
/// Annotation that denies gates: `<gate>` or `<gate>:<argumentsHash>`, separated by spaces.
pub const DENY: &str = "agentloop.dev/deny";
