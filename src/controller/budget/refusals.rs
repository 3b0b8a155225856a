//! Words for a gateway whose question about leases is not answered.

use crate::link::messages::{PodRefusal, RefusalCode};

/// Not now: it tries again.
pub(super) fn try_later(message: &str) -> PodRefusal {
    PodRefusal {
        code: RefusalCode::NotLeading,
        message: message.into(),
    }
}

/// It names a record that holds another Agent's leases.
pub(super) fn foreign_record() -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Unknown,
        message: "the gateway's record is another Agent's: the volume is a copy of that Agent's; give this one an \
                  empty volume, or remove gateway/calls.db from it"
            .into(),
    }
}
