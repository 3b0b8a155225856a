//! The most that a call can cost, before it is made; and what it did cost, after (DESIGN 4).

/// What a server billed for one call, in disjoint kinds; reasoning is a part of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bill {
    /// Input that was neither read from nor written to a cache.
    pub input: i64,
    /// Input read from a cache.
    pub cache_read: i64,
    /// Input written to a cache for five minutes.
    pub cache_write: i64,
    /// Input written to a cache for an hour.
    pub cache_write_1h: i64,
    /// Output, reasoning included.
    pub output: i64,
    /// Output spent on reasoning.
    pub reasoning: i64,
}

impl Bill {
    /// All input, cached or not. `None`: it does not fit into 64 bits.
    #[must_use]
    pub fn all_input(&self) -> Option<i64> {
        self.input
            .checked_add(self.cache_read)?
            .checked_add(self.cache_write)?
            .checked_add(self.cache_write_1h)
    }
}
