//! What the gateway knows through the link: its session, its directives, and how long ago it last had contact.
//!
//! Decides whether a call may be sent at all. Closed, not open: without a session or after the run lease there is no call.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::failures::failure;
use crate::api::failure::{Failure, FailureKind};
use crate::link::messages::Directives;
use crate::link::socket::{Session, SocketEvent};

/// What is known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// Set once attached.
    pub session: Option<Session>,
    /// What the pod is to do.
    pub directives: Directives,
    /// A newer pod has taken over. For good.
    pub fenced: bool,
    /// Times that the controller accepted this pod: each may be another leader.
    pub attaches: u64,
}

impl View {
    /// Why calls, also the one in flight, must not go on.
    pub fn stop(&self) -> Option<Failure> {
        if self.fenced {
            return Some(failure(
                FailureKind::Fenced,
                "a newer pod runs this Agent's loop; this one makes no call any more",
            ));
        }
        self.directives.suspend.then(|| {
            failure(
                FailureKind::Cancelled,
                "the Agent is suspended; set spec.suspend to false",
            )
        })
    }
}

/// Why no new call may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The gateway has just started; the controller will answer, or the run lease ends.
    NotAttached,
    /// Suspended, or fenced.
    Stopped(Failure),
    /// The run lease is over.
    LinkLost(Failure),
}

/// The state of the link, shared by all parts of the gateway.
pub struct Contact {
    view: watch::Sender<View>,
    last: Mutex<Instant>,
    lease: Duration,
}

impl Contact {
    /// No contact yet. `lease`: how long calls go on without any.
    pub fn new(lease: Duration, now: Instant) -> Self {
        Self {
            view: watch::Sender::new(View::default()),
            last: Mutex::new(now),
            lease,
        }
    }

    /// The controller was heard.
    pub fn heard(&self, now: Instant) {
        let was_lost = self.age(now) >= self.lease;
        *self.last() = now;
        if was_lost {
            // The worker learns at once that the lease is back.
            self.view.send_modify(|_| {});
        }
    }

    /// The controller accepted this pod.
    pub fn attached(&self, session: Session, directives: Directives, now: Instant) {
        self.heard(now);
        self.view.send_modify(|view| {
            view.session = Some(session);
            view.attaches += 1;
            view.directives = directives;
        });
    }

    /// The controller says what to do.
    pub fn directed(&self, directives: Directives, now: Instant) {
        self.heard(now);
        self.view.send_if_modified(|view| {
            let new = view.directives != directives;
            view.directives = directives;
            new
        });
    }

    /// The controller says that a newer pod has taken over.
    pub fn fence(&self) {
        self.view
            .send_if_modified(|view| !std::mem::replace(&mut view.fenced, true));
    }

    /// Changes of what is known.
    pub fn subscribe(&self) -> watch::Receiver<View> {
        self.view.subscribe()
    }

    /// Why no new call may be sent now.
    pub fn refusal(&self, now: Instant) -> Option<Refusal> {
        let view = self.view.borrow();
        if let Some(stop) = view.stop() {
            return Some(Refusal::Stopped(stop));
        }
        let age = self.age(now);
        if age >= self.lease {
            let seconds = age.as_secs();
            return Some(Refusal::LinkLost(failure(
                FailureKind::LinkLost,
                format!("no contact with the controller for {seconds} s; calls go on when it is back"),
            )));
        }
        view.session.is_none().then_some(Refusal::NotAttached)
    }

    /// What the worker is told.
    pub fn event(&self, now: Instant) -> SocketEvent {
        let view = self.view.borrow();
        SocketEvent {
            directives: view.directives.clone(),
            link_age_milliseconds: u64::try_from(self.age(now).as_millis()).unwrap_or(u64::MAX),
            fenced: view.fenced,
        }
    }

    fn last(&self) -> MutexGuard<'_, Instant> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.last())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::messages::Known;

    const LEASE: Duration = Duration::from_mins(1);

    fn attached(now: Instant) -> Contact {
        let contact = Contact::new(LEASE, now);
        let session = Session {
            epoch: 1,
            known: Known::default(),
        };
        contact.attached(session, Directives::default(), now);
        contact
    }

    fn refused(contact: &Contact, now: Instant) -> Option<FailureKind> {
        match contact.refusal(now)? {
            Refusal::NotAttached => panic!("not attached"),
            Refusal::Stopped(failure) | Refusal::LinkLost(failure) => Some(failure.kind),
        }
    }

    #[test]
    fn no_call_is_made_before_the_controller_has_accepted_the_pod() {
        let start = Instant::now();
        let contact = Contact::new(LEASE, start);
        contact.heard(start);
        assert_eq!(contact.refusal(start), Some(Refusal::NotAttached));
        assert_eq!(refused(&contact, start + LEASE), Some(FailureKind::LinkLost));
    }

    #[test]
    fn the_run_lease_ends_at_its_second_and_comes_back_with_contact() {
        let start = Instant::now();
        let contact = attached(start);
        let mut changes = contact.subscribe();
        changes.mark_unchanged();
        let last_moment = start + LEASE.saturating_sub(Duration::from_millis(1));
        assert_eq!(refused(&contact, last_moment), None);
        assert_eq!(refused(&contact, start + LEASE), Some(FailureKind::LinkLost));
        assert_eq!(contact.event(start + LEASE).link_age_milliseconds, 60_000);
        assert!(!changes.has_changed().unwrap());
        contact.heard(start + LEASE);
        assert!(changes.has_changed().unwrap());
        assert_eq!(refused(&contact, start + LEASE), None);
    }

    #[test]
    fn suspend_is_a_level_and_only_its_own_end_lifts_it() {
        let start = Instant::now();
        let contact = attached(start);
        let suspend = Directives {
            suspend: true,
            ..Directives::default()
        };
        contact.directed(suspend, start);
        contact.heard(start);
        assert_eq!(refused(&contact, start), Some(FailureKind::Cancelled));
        contact.directed(Directives::default(), start);
        assert_eq!(refused(&contact, start), None);
    }

    #[test]
    fn a_fenced_pod_stays_fenced() {
        let start = Instant::now();
        let contact = attached(start);
        contact.fence();
        let session = Session {
            epoch: 1,
            known: Known::default(),
        };
        contact.attached(session, Directives::default(), start);
        assert_eq!(refused(&contact, start), Some(FailureKind::Fenced));
        assert!(contact.event(start).fenced);
    }
}
