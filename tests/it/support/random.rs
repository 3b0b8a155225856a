//! Random numbers of a test: all from one seed, the same on every machine.

/// `SplitMix64`: small, fast, and good enough to draw schedules.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of one seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// At least `from`, less than `to`.
    pub fn range(&mut self, from: i64, to: i64) -> i64 {
        from + (self.next() >> 1).cast_signed() % (to - from)
    }

    /// Less than `count`.
    pub fn index(&mut self, count: usize) -> usize {
        (self.next() >> 1) as usize % count
    }

    /// True in `chance` percent of the cases.
    pub fn percent(&mut self, chance: i64) -> bool {
        self.range(0, 100) < chance
    }
}
