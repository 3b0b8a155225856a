//! Broken rules. Each mutation omits one rule of the protocol, and the simulation must detect every one of them.

/// A rule that is broken on purpose, in the simulated glue or by tampering with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// All rules hold.
    None,
    /// A grant is sent to the gateway before it is written.
    TellBeforeWrite,
    /// A new leader treats the leases of gateways as free.
    IgnoreHolders,
    /// A new leader uses only its own clock, not the time of the record.
    DropWatermark,
    /// The lease of a silent gateway becomes free after some time.
    FreeByTime,
    /// A leader overwrites the record of another one.
    ForcedApply,
    /// A closed lease is forgotten before that is written.
    ForgetClosedEarly,
    /// A gateway believes a deposed leader.
    BelieveOlderEpoch,
    /// Spending counts at the time of the gateway's clock, which runs behind.
    ChargeAtGatewaysClock,
    /// A slice leaves a rolling window when its first moment has expired, not its last.
    FreeEarly,
    /// A gateway that starts again forgets the calls that were open.
    ForgetOpenCalls,
    /// A gateway acts on a reservation before it is on disk.
    SpendBeforeCommit,
    /// A gateway that is only silent counts as dead, and its lease as free.
    FreeTheDead,
    /// An answer covers only the accounts of the request, not leases that the gateway never learned of.
    AnswerOnlyWhatIsAsked,
    /// A budget that was deleted while there was no leader is never reported as gone.
    NeverMiss,
    /// A gateway whose disk was restored to an earlier state continues from that state.
    BelieveTheDisk,
    /// The final report of the pod of a deleted Agent is refused.
    RefuseLastWords,
    /// A ledger that was ahead of the clock stays ahead by the same time.
    NeverHeal,
    /// An error that may have been billed counts as free.
    ErrorsAreFree,
    /// The counts of an answer are charged although they contradict each other.
    BelieveTheCounts,
    /// A record that the API server definitively rejected counts as written.
    TakeRefusedForWritten,
    /// One refused call exhausts the budget, however much is left.
    OneRefusalExhausts,
    /// A call is charged at the price of the model in the spec, not of the model that its pod runs.
    PriceOfTheSpec,
}

impl Mutation {
    /// All mutations that break a rule.
    pub const ALL: [Self; 22] = [
        Self::TellBeforeWrite,
        Self::IgnoreHolders,
        Self::DropWatermark,
        Self::FreeByTime,
        Self::ForcedApply,
        Self::ForgetClosedEarly,
        Self::BelieveOlderEpoch,
        Self::ChargeAtGatewaysClock,
        Self::FreeEarly,
        Self::ForgetOpenCalls,
        Self::SpendBeforeCommit,
        Self::FreeTheDead,
        Self::AnswerOnlyWhatIsAsked,
        Self::NeverMiss,
        Self::BelieveTheDisk,
        Self::RefuseLastWords,
        Self::NeverHeal,
        Self::ErrorsAreFree,
        Self::BelieveTheCounts,
        Self::TakeRefusedForWritten,
        Self::OneRefusalExhausts,
        Self::PriceOfTheSpec,
    ];
}
