//! Refusals of lease requests.

use crate::link::messages::{PodRefusal, RefusalCode};

/// The request cannot be answered now; the gateway retries.
pub(super) fn try_later(message: &str) -> PodRefusal {
    PodRefusal {
        code: RefusalCode::NotLeading,
        message: message.into(),
    }
}

/// The request names a record that holds another Agent's leases.
pub(super) fn foreign_record() -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Unknown,
        message:
            "the gateway's call store belongs to another Agent: the volume is a copy of that Agent's volume; give \
                  this Agent an empty volume, or delete gateway/calls.db from it"
                .into(),
    }
}
