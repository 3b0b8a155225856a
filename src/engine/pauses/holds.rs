//! The pauses that hold a loop now: when each ends, and when its held call is tried again.
//!
//! A pause holds everything that a loop starts: turns, calls and tool runs. There is at most one for each reason, so the
//! reason identifies it. One more hold has no reason and is not shown: while the link is silent, only tool runs with side
//! effects wait. That is why callers ask about either with [`Pauses::free_from`] and [`Pauses::allow_actions`] and do not
//! look at the list.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::budget::{PROBE_INTERVAL, PROBE_TIMEOUT, ProbeState};
use crate::time_math;
use crate::view::ReportedPause;
use agentloop_api::pause::{PauseEnd, PauseReason};

/// The details of a reason that holds the loop.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ActivePause {
    /// When it clears without an input.
    until: Option<Timestamp>,
    /// What happened, and how to fix it.
    message: String,
    /// When the held call is probed although the reason still holds.
    #[serde(default)]
    probe: Option<ProbeState>,
}

impl ActivePause {
    /// When it clears without an input, as far as is known here.
    fn ends(&self) -> Option<Timestamp> {
        let let_through = match self.probe {
            Some(ProbeState::Sent(moment)) => Some(moment),
            Some(ProbeState::At(_)) | None => None,
        };
        [self.until, let_through].into_iter().flatten().min()
    }

    /// From when on the held call may be made: always while its probe is under way, never without a probe.
    fn allows_from(&self) -> Option<Timestamp> {
        match self.probe {
            Some(ProbeState::At(moment)) => Some(moment),
            Some(ProbeState::Sent(_)) => Some(Timestamp::MIN),
            None => None,
        }
    }

    #[cfg(test)]
    pub fn probe(&self) -> Option<ProbeState> {
        self.probe
    }
}

/// The pauses of a loop.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct Pauses {
    holds: BTreeMap<PauseReason, ActivePause>,
    /// No contact with the controller for half the run lease. The driver reports it to each process.
    #[serde(skip)]
    link_silent: bool,
}

impl Pauses {
    pub fn is_empty(&self) -> bool {
        self.holds.is_empty()
    }

    pub fn has(&self, reason: PauseReason) -> bool {
        self.holds.contains_key(&reason)
    }

    /// Whether the pause for this reason ends at a known time.
    pub fn has_end(&self, reason: PauseReason) -> bool {
        self.holds.get(&reason).is_some_and(|hold| hold.until.is_some())
    }

    #[cfg(test)]
    pub fn get(&self, reason: PauseReason) -> Option<&ActivePause> {
        self.holds.get(&reason)
    }

    /// Holds the loop until the reason clears. Replaces an earlier pause for the same reason.
    pub fn raise(&mut self, reason: PauseReason, until: Option<Timestamp>, message: String) {
        self.raise_probed(reason, until, message, None);
    }

    /// The same, with a time at which the held call is tried although the reason still holds.
    pub fn raise_probed(
        &mut self,
        reason: PauseReason,
        until: Option<Timestamp>,
        message: String,
        probe: Option<ProbeState>,
    ) {
        self.holds.insert(reason, ActivePause { until, message, probe });
    }

    /// Removes the pause for this reason. Returns whether there was one.
    pub fn remove(&mut self, reason: PauseReason) -> bool {
        self.holds.remove(&reason).is_some()
    }

    /// A call was refused for lack of room. If several limits refuse, only the latest is shown.
    pub fn remove_waits_for_room(&mut self) {
        self.holds.retain(|reason, _| !waits_for_room(*reason));
    }

    /// The reasons whose end has come.
    pub fn expired(&self, now: Timestamp) -> Vec<PauseReason> {
        self.reasons_of(|hold| hold.ends().is_some_and(|end| end <= now))
    }

    /// The reasons whose probe is under way.
    pub fn probed(&self) -> Vec<PauseReason> {
        self.reasons_of(|hold| matches!(hold.probe, Some(ProbeState::Sent(_))))
    }

    fn reasons_of(&self, wanted: impl Fn(&ActivePause) -> bool) -> Vec<PauseReason> {
        let found = self.holds.iter().filter(|(_, hold)| wanted(hold));
        found.map(|(reason, _)| *reason).collect()
    }

    /// When the first of them ends without an input.
    pub fn first_end(&self) -> Option<Timestamp> {
        self.holds.values().filter_map(ActivePause::ends).min()
    }

    /// When all of them have ended, if every end is known.
    pub fn last_end(&self) -> Option<Timestamp> {
        let ends: Option<Vec<Timestamp>> = self.holds.values().map(|hold| hold.until).collect();
        ends?.into_iter().max()
    }

    /// The earliest time at which the pauses let the loop act: any time, the time of the next probe, or never (`None`).
    pub fn free_from(&self) -> Option<Timestamp> {
        // A reason without a probe holds the loop. Otherwise every probe must be due, so the latest one counts.
        self.holds
            .values()
            .try_fold(Timestamp::MIN, |latest, hold| Some(hold.allows_from()?.max(latest)))
    }

    /// Whether the loop may act now.
    pub fn are_free(&self, now: Timestamp) -> bool {
        self.free_from().is_some_and(|moment| moment <= now)
    }

    /// Whether it may act now, apart from pauses for these reasons.
    pub fn are_free_apart_from(&self, reasons: &[PauseReason], now: Timestamp) -> bool {
        let mut others = self.holds.iter().filter(|(reason, _)| !reasons.contains(reason));
        others.all(|(_, hold)| hold.allows_from().is_some_and(|from| from <= now))
    }

    /// Whether tool runs with side effects may start, as far as the link decides.
    pub fn allow_actions(&self) -> bool {
        !self.link_silent
    }

    pub fn set_link_silent(&mut self, silent: bool) {
        self.link_silent = silent;
    }

    /// Schedules a probe of the held calls at this time, unless one is under way.
    pub fn probe_at(&mut self, moment: Timestamp) {
        for (reason, hold) in &mut self.holds {
            if waits_for_room(*reason) && !matches!(hold.probe, Some(ProbeState::Sent(_))) {
                hold.probe = Some(ProbeState::At(moment));
            }
        }
    }

    /// An attempt is sent: it is the probe for every reason that has one scheduled.
    pub fn probes_sent(&mut self, now: Timestamp) {
        for hold in self.holds.values_mut() {
            if let Some(ProbeState::At(_)) = hold.probe {
                hold.probe = Some(ProbeState::Sent(time_math::after(now, PROBE_TIMEOUT)));
            }
        }
    }

    /// The call in flight ended before room was checked: probe again.
    pub fn reschedule_probes(&mut self, now: Timestamp) {
        for hold in self.holds.values_mut() {
            if let Some(ProbeState::Sent(_)) = hold.probe {
                hold.probe = Some(ProbeState::At(now));
            }
        }
    }

    /// The clock was set back: nothing lasts longer from now on than its own limit. `longest`: of each reason.
    pub fn clock_set_back(&mut self, now: Timestamp, longest: impl Fn(PauseReason) -> Option<SignedDuration>) {
        for (reason, hold) in &mut self.holds {
            let latest = longest(*reason).map(|longest| time_math::after(now, longest));
            hold.until = hold.until.map(|until| latest.map_or(until, |latest| until.min(latest)));
            hold.probe = hold.probe.map(|probe| match probe {
                ProbeState::At(moment) => ProbeState::At(moment.min(time_math::after(now, PROBE_INTERVAL))),
                ProbeState::Sent(moment) => ProbeState::Sent(moment.min(time_math::after(now, PROBE_TIMEOUT))),
            });
        }
    }

    /// As they are reported.
    pub fn reported(&self) -> impl Iterator<Item = ReportedPause> {
        self.holds.iter().map(|(reason, hold)| ReportedPause {
            reason: *reason,
            until: hold.until,
            message: hold.message.clone(),
        })
    }
}

/// Whether a reason clears when there is room. `BoundViolated` and `LoopDetected` need a person.
pub fn waits_for_room(reason: PauseReason) -> bool {
    matches!(reason.facts().end, PauseEnd::Room { .. })
}
