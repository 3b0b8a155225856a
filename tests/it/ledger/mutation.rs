//! Broken rules. Each is one promise of the protocol left out; the simulation must notice every one of them.

/// A rule that is broken on purpose, in the simulated glue or by tampering with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// All rules hold.
    None,
    /// Gateways are told of a grant before it is written.
    TellBeforeWrite,
    /// A new leader takes what is held for free.
    IgnoreHolders,
    /// A new leader goes by its own clock only, not by the time of the record.
    DropWatermark,
    /// What a silent gateway holds becomes free after a while.
    FreeByTime,
    /// A leader writes whatever another one wrote.
    ForcedApply,
    /// A closed lease is forgotten before that is written.
    ForgetClosedEarly,
    /// A gateway believes a deposed leader.
    BelieveOlderEpoch,
    /// Spending counts at the time of the gateway's clock, which runs behind.
    ChargeAtGatewaysClock,
    /// A piece of a rolling window leaves when its first moment is out, not its last.
    FreeEarly,
    /// A gateway that starts again forgets the calls that were open.
    ForgetOpenCalls,
    /// A gateway acts on a reservation before it is on disk.
    SpendBeforeCommit,
    /// A gateway that is only silent is taken for dead, and what it holds for free.
    FreeTheDead,
    /// A gateway is told only of the accounts that it speaks of, not of leases that it never heard of.
    AnswerOnlyWhatIsAsked,
    /// A budget that was deleted while nobody led is never said to be gone.
    NeverMiss,
    /// A gateway whose disk went back goes on from what it finds there.
    BelieveTheDisk,
    /// The pod of a deleted Agent is not heard.
    RefuseLastWords,
    /// A ledger that was ahead of the clock stays ahead by as much.
    NeverHeal,
    /// An error of which nobody knows whether it was billed counts as free.
    ErrorsAreFree,
    /// The counts of an answer are charged though they contradict each other.
    BelieveTheCounts,
    /// A record that the API server definitively refused is taken for written.
    TakeRefusedForWritten,
    /// One refused call exhausts the budget, whatever is left.
    OneRefusalExhausts,
    /// A call is charged at the price of the model that the spec names, whichever its pod runs.
    PriceOfTheSpec,
}

impl Mutation {
    /// All that break something.
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
