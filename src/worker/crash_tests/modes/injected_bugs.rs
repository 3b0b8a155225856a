//! Broken rules. Each omits one rule, in the simulated environment or between it and the loop; the simulation must detect
//! every one of them.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// Calls and tool runs are sent before their records are on disk.
    ActsBeforeCommit,
    /// A response is sent before its record is on disk.
    RespondsBeforeCommit,
    /// A client gets its receipt before the request is on disk.
    ReceiptBeforeCommit,
    /// Events are acknowledged before they are on disk.
    AcknowledgesBeforeCommit,
    /// All users count as one, whose requests are begun in the order of their arrival.
    OrderOfArrival,
    /// Each request counts as that of another user, who was never served: tasks of the Sensor wait for all of them.
    StarvesOrigin,
    /// A restart forgets whose tasks were begun.
    ForgetsServed,
    /// A task that was begun still waits after a restart.
    KeepsStartedTask,
    /// The task that waits longest is lost in a restart.
    LosesTask,
    /// A response counts as delivered although its receiver has not accepted it.
    DropsResponse,
    /// Of two responses the later one is sent first.
    SwapsResponses,
    /// The last write of the memory is applied again after a restart.
    RepeatsNote,
    /// The memory is that of an earlier step after a restart.
    LosesNote,
    /// Criteria that were met in an earlier check count in this one.
    JoinsChecks,
    /// An edit of the criteria is ignored.
    KeepsCriteria,
    /// A goal is met without its artifacts.
    IgnoresArtifacts,
    /// A check continues in another pod, whose workspace is empty.
    KeepsCheck,
    /// A restart forgets which calls were denied.
    ForgetsDenials,
    /// A gate is approved although no person did so.
    ForgesApproval,
    /// A run is sent a second time.
    RepeatsRun,
    /// The gateway's call store does not outlive a worker.
    ForgetsCalls,
    /// A restart continues from an earlier state of the volume.
    LosesCommit,
    /// A count starts again at a restart.
    LosesCount,
    /// The timer is lost.
    LosesTimer,
    /// A request to stop counts as handled as soon as the loop receives it.
    ForgetsStop,
}

impl Broken {
    pub(super) const ALL: [Self; 25] = [
        Self::ActsBeforeCommit,
        Self::RespondsBeforeCommit,
        Self::ReceiptBeforeCommit,
        Self::AcknowledgesBeforeCommit,
        Self::OrderOfArrival,
        Self::StarvesOrigin,
        Self::ForgetsServed,
        Self::KeepsStartedTask,
        Self::LosesTask,
        Self::DropsResponse,
        Self::SwapsResponses,
        Self::RepeatsNote,
        Self::LosesNote,
        Self::JoinsChecks,
        Self::KeepsCriteria,
        Self::IgnoresArtifacts,
        Self::KeepsCheck,
        Self::ForgetsDenials,
        Self::ForgesApproval,
        Self::RepeatsRun,
        Self::ForgetsCalls,
        Self::LosesCommit,
        Self::LosesCount,
        Self::LosesTimer,
        Self::ForgetsStop,
    ];

    /// Where the search begins, so that a test run need not repeat it.
    pub(super) const fn first_seed(self) -> u64 {
        match self {
            Self::RespondsBeforeCommit => 318,
            Self::ReceiptBeforeCommit => 17,
            Self::AcknowledgesBeforeCommit => 16,
            Self::JoinsChecks => 25,
            Self::IgnoresArtifacts => 9,
            Self::KeepsCheck => 159,
            Self::ForgetsStop => 73,
            Self::ActsBeforeCommit
            | Self::OrderOfArrival
            | Self::StarvesOrigin
            | Self::ForgetsServed
            | Self::KeepsStartedTask
            | Self::LosesTask
            | Self::DropsResponse
            | Self::SwapsResponses
            | Self::RepeatsNote
            | Self::LosesNote
            | Self::KeepsCriteria
            | Self::ForgetsDenials
            | Self::ForgesApproval
            | Self::RepeatsRun
            | Self::ForgetsCalls
            | Self::LosesCommit
            | Self::LosesCount
            | Self::LosesTimer => 0,
        }
    }
}
