//! Failed, refused and crashed turns in a row, and the cool-downs that follow from them.
//!
//! Each cool-down of one cause is twice as long as the one before, up to an hour, until a turn completes. After a cool-down
//! what led to it has to happen as often again: with a limit of five, five failed turns, a minute of rest, five failed turns,
//! two minutes. Refusals are the exception: each further one in a row brings the next cool-down.

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};

use super::{FIRST_COOLDOWN, LONGEST_COOLDOWN, MOST_REFUSALS};
use crate::time_math;
use agentloop_api::pause::CooldownCause;

#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(default)]
pub struct FailureStreaks {
    /// Failed turns in a row.
    errors: u32,
    /// Cool-downs after errors since the last completed turn.
    error_cooldowns: u32,
    /// Turns in a row that the model or its provider refused.
    refusals: u32,
    /// Cool-downs after crashes since the last completed turn.
    crash_cooldowns: u32,
}

impl FailureStreaks {
    /// Failed turns in a row.
    pub fn errors(&self) -> u32 {
        self.errors
    }

    pub fn turn_completed(&mut self) {
        *self = Self::default();
    }

    /// A turn failed. Returns how many did in a row.
    pub fn turn_failed(&mut self) -> u32 {
        self.errors = self.errors.saturating_add(1);
        self.errors
    }

    /// A turn was refused. Returns how many were in a row.
    pub fn turn_refused(&mut self) -> u32 {
        self.refusals = self.refusals.saturating_add(1);
        self.refusals
    }

    /// The cool-down after a failed turn, once there are as many as `limit`.
    pub(super) fn after_error(&mut self, limit: u32) -> Option<SignedDuration> {
        if self.errors < limit.max(1) {
            return None;
        }
        let wait = cooldown(self.error_cooldowns);
        self.error_cooldowns = self.error_cooldowns.saturating_add(1);
        Some(wait)
    }

    /// The cool-down after a refused turn, and how many were refused; from the second in a row on, since an immediate
    /// retry only costs money.
    pub(super) fn after_refusal(&self) -> Option<(u32, SignedDuration)> {
        let earlier = self.refusals.checked_sub(MOST_REFUSALS)?;
        Some((self.refusals, cooldown(earlier)))
    }

    /// The cool-down after too many crashes.
    pub(super) fn after_crashes(&mut self) -> SignedDuration {
        let wait = cooldown(self.crash_cooldowns);
        self.crash_cooldowns = self.crash_cooldowns.saturating_add(1);
        wait
    }

    /// A cool-down is over.
    pub(super) fn cooled_down(&mut self, cause: CooldownCause) {
        match cause {
            CooldownCause::Errors => self.errors = 0,
            // The turn counts its crashes.
            CooldownCause::Crashes | CooldownCause::Refusals => {}
        }
    }

    /// The next cool-down of this cause is as short as the first.
    pub(super) fn shorten(&mut self, cause: CooldownCause) {
        match cause {
            CooldownCause::Errors => self.error_cooldowns = 0,
            CooldownCause::Crashes => self.crash_cooldowns = 0,
            CooldownCause::Refusals => self.refusals = 0,
        }
    }
}

fn cooldown(earlier: u32) -> SignedDuration {
    time_math::doubled(FIRST_COOLDOWN, earlier, LONGEST_COOLDOWN)
}
