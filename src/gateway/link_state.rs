//! The gateway's view of the link: its session, its directives, and the time of its last contact.
//!
//! Decides whether a call may be sent at all. Fails closed: without a session, or after the run lease, no call is made.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::api::failure::{CallFailure, FailureKind};
use crate::link::messages::Directives;
use crate::link::socket::{SocketEvent, WorkerSession};
use crate::support::clock::ClockReading;

/// The state received from the controller.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkView {
    /// Set once attached.
    pub session: Option<WorkerSession>,
    /// The directives last received from the controller.
    pub directives: Directives,
    /// A newer pod has taken over. Final.
    pub fenced: bool,
    /// Number of times that the controller accepted this pod; each time it may be another leader.
    pub attaches: u64,
}

impl LinkView {
    /// Why calls must stop, including the one in flight.
    pub fn stop(&self) -> Option<CallFailure> {
        if self.fenced {
            return Some(CallFailure::new(
                FailureKind::Fenced,
                "a newer pod runs this Agent's loop; this pod makes no more calls",
            ));
        }
        self.directives.suspend.then(|| {
            CallFailure::new(
                FailureKind::Cancelled,
                "the Agent is suspended; set spec.suspend to false",
            )
        })
    }
}

/// Why no new call may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkRefusal {
    /// The gateway has just started and has no answer from the controller yet.
    NotAttached,
    /// Suspended or fenced.
    Stopped(CallFailure),
    /// The run lease has expired.
    LinkLost(CallFailure),
}

/// The state of the link, shared by all parts of the gateway.
pub struct LinkState {
    view: watch::Sender<LinkView>,
    last: Mutex<ClockReading>,
    lease: Duration,
}

impl LinkState {
    /// `lease`: how long calls may continue without contact.
    pub fn new(lease: Duration, now: ClockReading) -> Self {
        Self {
            view: watch::Sender::new(LinkView::default()),
            last: Mutex::new(now),
            lease,
        }
    }

    /// The controller answered at `now` a request sent at `sent`. The contact counts from `sent`: an answer, or a
    /// pushed message even more so, may have sat in a buffer while this process was stopped.
    pub fn note_answer(&self, sent: ClockReading, now: ClockReading) {
        let was_lost = self.age(now) >= self.lease;
        {
            let mut last = self.last();
            if sent.instant > last.instant {
                *last = sent;
            }
        }
        if was_lost {
            // The worker learns at once that the lease is valid again.
            self.view.send_modify(|_| {});
        }
    }

    /// The controller accepted this pod.
    pub fn attached(&self, session: WorkerSession, directives: Directives, (sent, now): (ClockReading, ClockReading)) {
        self.note_answer(sent, now);
        self.view.send_modify(|view| {
            view.session = Some(session);
            view.attaches += 1;
            view.directives = directives;
        });
    }

    /// New [`Directives`]. A push does not count as contact.
    pub fn directed(&self, directives: Directives) {
        self.view.send_if_modified(|view| {
            let new = view.directives != directives;
            view.directives = directives;
            new
        });
    }

    /// How long calls may continue without contact.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// A newer pod has taken over, as the controller reports.
    pub fn fence(&self) {
        self.view
            .send_if_modified(|view| !std::mem::replace(&mut view.fenced, true));
    }

    pub fn subscribe(&self) -> watch::Receiver<LinkView> {
        self.view.subscribe()
    }

    /// Why no new call may be sent now.
    pub fn refusal(&self, now: ClockReading) -> Option<LinkRefusal> {
        let view = self.view.borrow();
        if let Some(stop) = view.stop() {
            return Some(LinkRefusal::Stopped(stop));
        }
        let age = self.age(now);
        if age >= self.lease {
            let seconds = age.as_secs();
            return Some(LinkRefusal::LinkLost(CallFailure::new(
                FailureKind::LinkLost,
                format!("no contact with the controller for {seconds} s; calls resume when contact is restored"),
            )));
        }
        view.session.is_none().then_some(LinkRefusal::NotAttached)
    }

    /// The state as sent to the worker.
    pub fn socket_event(&self, now: ClockReading) -> SocketEvent {
        let view = self.view.borrow();
        SocketEvent {
            directives: view.directives.clone(),
            link_age_milliseconds: u64::try_from(self.age(now).as_millis()).unwrap_or(u64::MAX),
            sent_at: Some(now.wall),
            fenced: view.fenced,
        }
    }

    fn last(&self) -> MutexGuard<'_, ClockReading> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn age(&self, now: ClockReading) -> Duration {
        now.since(*self.last())
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::link::messages::LoopTotals;

    const LEASE: Duration = Duration::from_mins(1);

    fn session() -> WorkerSession {
        WorkerSession {
            traces: false,
            content: false,
            logs: false,
            epoch: 1,
            known: LoopTotals::default(),
        }
    }

    fn attached(now: ClockReading) -> LinkState {
        let contact = LinkState::new(LEASE, now);
        contact.attached(session(), Directives::default(), (now, now));
        contact
    }

    fn refused(contact: &LinkState, now: ClockReading) -> Option<FailureKind> {
        match contact.refusal(now)? {
            LinkRefusal::NotAttached => panic!("not attached"),
            LinkRefusal::Stopped(failure) | LinkRefusal::LinkLost(failure) => Some(failure.kind),
        }
    }

    #[test]
    fn no_call_is_made_before_the_controller_has_accepted_the_pod() {
        let start = ClockReading::now();
        let contact = LinkState::new(LEASE, start);
        contact.note_answer(start, start);
        assert_eq!(contact.refusal(start), Some(LinkRefusal::NotAttached));
        assert_eq!(
            refused(&contact, start.later(60_000, 60_000)),
            Some(FailureKind::LinkLost)
        );
    }

    #[test]
    fn the_run_lease_ends_at_its_second_by_either_clock_and_is_renewed_by_contact() {
        let start = ClockReading::now();
        for (last_moment, end) in [
            (start.later(59_999, 59_999), start.later(60_000, 60_000)),
            // The machine was suspended: its monotonic clock stopped.
            (start.later(10, 59_999), start.later(11, 60_000)),
            // The wall clock was set back.
            (start.later(59_999, -3_600_000), start.later(60_000, -3_600_000)),
        ] {
            let contact = attached(start);
            let mut changes = contact.subscribe();
            changes.mark_unchanged();
            assert_eq!(refused(&contact, last_moment), None);
            assert_eq!(refused(&contact, end), Some(FailureKind::LinkLost));
            assert_eq!(contact.socket_event(end).link_age_milliseconds, 60_000);
            assert!(!changes.has_changed().unwrap());
            contact.note_answer(end, end);
            assert!(changes.has_changed().unwrap());
            assert_eq!(refused(&contact, end), None);
        }
    }

    #[test]
    fn a_push_is_no_contact_and_an_answer_counts_from_the_time_of_its_request() {
        let start = ClockReading::now();
        let contact = attached(start);
        // The process was stopped, and now reads what was pushed long ago.
        let thaw = start.later(59_000, 59_000);
        contact.directed(Directives {
            wake: Some("x".into()),
            ..Directives::default()
        });
        assert_eq!(contact.socket_event(thaw).link_age_milliseconds, 59_000);
        // An answer may have been buffered as well.
        let sent = start.later(1_000, 1_000);
        contact.note_answer(sent, thaw);
        assert_eq!(contact.socket_event(thaw).link_age_milliseconds, 58_000);
        // An older contact does not replace a newer one.
        contact.note_answer(start, thaw);
        assert_eq!(contact.socket_event(thaw).link_age_milliseconds, 58_000);
        assert_eq!(contact.socket_event(thaw).sent_at, Some(thaw.wall));
    }

    #[test]
    fn suspend_is_a_level_and_only_its_own_end_lifts_it() {
        let start = ClockReading::now();
        let contact = attached(start);
        contact.directed(Directives {
            suspend: true,
            ..Directives::default()
        });
        contact.note_answer(start, start);
        assert_eq!(refused(&contact, start), Some(FailureKind::Cancelled));
        contact.directed(Directives::default());
        assert_eq!(refused(&contact, start), None);
    }

    #[test]
    fn a_fenced_pod_stays_fenced() {
        let start = ClockReading::now();
        let contact = attached(start);
        contact.fence();
        contact.attached(session(), Directives::default(), (start, start));
        assert_eq!(refused(&contact, start), Some(FailureKind::Fenced));
        assert!(contact.socket_event(start).fenced);
    }
}
