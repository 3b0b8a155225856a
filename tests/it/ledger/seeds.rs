//! Seeds that found a mistake; they are run before all others. Where the simulation itself was changed since, a seed
//! draws another schedule than the one that found it.

/// A seed, and what it found.
pub const FOUND: [(u64, &str); 9] = [
    (5_697, "the number of a lease was told before it was written"),
    (
        35_484,
        "a bill above its bound took what another call of the same lease held",
    ),
    (81_648, "room was kept for a gateway that had stopped asking"),
    (22_897, "gateways kept leases of windows that were over: no progress"),
    (
        74_182,
        "a lease that its gateway did not speak of was said to last beyond its window",
    ),
    (
        700_350_966,
        "the simulation: more than 20 answers at once displaced the outcome of a write while nothing may be lost",
    ),
    (
        5_328_248_664,
        "the simulation: the answer to a process whose disk went back afterwards reached the next one",
    ),
    (
        70_976,
        "the simulation: the answer to a process that started while its disk went back was dropped",
    ),
    (
        700_485_137,
        "a wait that ended before the account was advanced again counted until then",
    ),
];
