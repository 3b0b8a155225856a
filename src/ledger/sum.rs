//! Running sums of amounts, with additions and subtractions: exact in 128 bits.

use strum::IntoEnumIterator;

use agentloop_api::amount::{Amount, AmountKind};

/// A running sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AmountSum {
    kinds: [i128; 5],
}

impl AmountSum {
    pub(super) fn add(&mut self, more: &Amount) {
        for (sum, kind) in self.kinds.iter_mut().zip(AmountKind::iter()) {
            *sum += i128::from(more.get(kind));
        }
    }

    pub(super) fn take(&mut self, less: &Amount) {
        for (sum, kind) in self.kinds.iter_mut().zip(AmountKind::iter()) {
            *sum -= i128::from(less.get(kind));
        }
    }

    /// The sum, saturated to 64 bits, where no limit has room for it.
    pub(super) fn amount(&self) -> Amount {
        let mut kinds = self.kinds.iter();
        Amount::from_fn(|_| {
            let sum = kinds.next().copied().unwrap_or_default();
            i64::try_from(sum.max(0)).unwrap_or(i64::MAX)
        })
    }

    pub(super) fn is_zero(&self) -> bool {
        self.kinds == [0; 5]
    }
}

/// The sum of two amounts, saturated to 64 bits, where no limit has room for it.
pub(super) fn saturating_sum(a: &Amount, b: &Amount) -> Amount {
    Amount::from_fn(|kind| a.get(kind).saturating_add(b.get(kind)))
}
