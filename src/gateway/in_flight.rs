//! One call in flight: its bytes so far, for all who listen; what is known of its cost; and how it can be cut.
//!
//! Everybody who asks for the call reads the same bytes from the beginning. That nobody listens does not end it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use tokio::sync::watch;

use super::store::CallUsage;
use crate::api::failure::CallFailure;
use crate::ledger::bound::CallBill;

/// A call in flight.
pub struct InFlightCall {
    progress: Mutex<CallProgress>,
    changed: watch::Sender<()>,
    cut: watch::Sender<Option<CallFailure>>,
}

#[derive(Default)]
struct CallProgress {
    sent: SendStatus,
    bill: Option<(CallBill, String)>,
    /// The model that the answer names.
    answered: String,
    /// The outcome is known and cannot be written yet.
    unrecorded: bool,
    content_type: Option<String>,
    cost: Option<i64>,
    chunks: Vec<Bytes>,
    end: Option<Result<(), CallFailure>>,
}

/// How far the request came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendStatus {
    /// It has not left.
    #[default]
    No,
    /// It has left, or may have.
    Yes,
    /// The server answered with an HTTP error that says that it did nothing.
    Refused,
}

/// The next thing a listener gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerItem {
    /// Bytes.
    Chunk(Bytes),
    /// The end of the answer.
    End,
    /// There is no answer, or no more of it.
    Failed(CallFailure),
    /// Its end is there and cannot be recorded yet: ask again.
    NotYet,
}

impl InFlightCall {
    /// A call that has not been sent.
    pub fn new() -> Self {
        Self {
            progress: Mutex::default(),
            changed: watch::Sender::new(()),
            cut: watch::Sender::new(None),
        }
    }

    /// Cuts the call; the first reason given stays.
    pub fn cut(&self, why: CallFailure) {
        self.cut.send_if_modified(|cut| {
            let first = cut.is_none();
            if first {
                *cut = Some(why);
            }
            first
        });
    }

    /// Waits until the call is cut.
    pub async fn until_cut(&self) -> CallFailure {
        let mut cut = self.cut.subscribe();
        loop {
            if let Some(why) = cut.borrow_and_update().clone() {
                return why;
            }
            // The sender is ours: it cannot be gone.
            let _ = cut.changed().await;
        }
    }

    /// Notes how far the request came.
    pub fn note_sent(&self, sent: SendStatus) {
        self.lock().sent = sent;
    }

    /// Notes what the server says the call used, as read and as said; `None`: nothing that can be believed.
    pub fn note_bill(&self, bill: Option<(CallBill, String)>) {
        self.lock().bill = bill;
    }

    /// Notes which model answered.
    pub fn note_answered(&self, model: &str) {
        model.clone_into(&mut self.lock().answered);
    }

    /// The model that answered; empty: none is named.
    pub fn answered(&self) -> String {
        self.lock().answered.clone()
    }

    /// Notes whether the outcome waits for the record. Who listens meanwhile is told to ask again.
    pub fn note_unrecorded(&self, unrecorded: bool) {
        self.lock().unrecorded = unrecorded;
        self.changed.send_replace(());
    }

    /// Whether it does.
    pub fn is_unrecorded(&self) -> bool {
        self.lock().unrecorded
    }

    /// Notes what the answer cost in micro-dollars; before its last bytes.
    pub fn note_cost(&self, cost: Option<i64>) {
        self.lock().cost = cost;
    }

    /// What the answer cost, once its last bytes are there and where that is known.
    pub fn cost(&self) -> Option<i64> {
        self.lock().cost
    }

    /// The answer begins, or goes on.
    pub fn push(&self, content_type: &str, bytes: Bytes) {
        let mut progress = self.lock();
        progress.content_type.get_or_insert_with(|| content_type.into());
        if !bytes.is_empty() {
            progress.chunks.push(bytes);
        }
        drop(progress);
        self.changed.send_replace(());
    }

    /// The bytes so far, and these after them.
    pub fn body_with(&self, rest: &Bytes) -> Vec<u8> {
        let mut pieces = self.lock().chunks.clone();
        pieces.push(rest.clone());
        pieces.concat()
    }

    /// Nothing more comes.
    pub fn end(&self, result: Result<(), CallFailure>) {
        self.lock().end.get_or_insert(result);
        self.changed.send_replace(());
    }

    /// What is known of the cost.
    pub fn metered(&self) -> CallUsage {
        let progress = self.lock();
        match (progress.sent, &progress.bill) {
            (SendStatus::No, _) => CallUsage::NotSent,
            (SendStatus::Refused, _) => CallUsage::Free,
            (SendStatus::Yes, None) => CallUsage::Unknown,
            (SendStatus::Yes, Some((bill, said))) => CallUsage::Billed(*bill, said.clone()),
        }
    }

    /// The content type, once the first bytes are there; the failure, when none ever came; `None`: ask again.
    pub async fn head(&self) -> Option<Result<String, CallFailure>> {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            {
                let progress = self.lock();
                match (&progress.content_type, &progress.end) {
                    (Some(content_type), _) => return Some(Ok(content_type.clone())),
                    (None, Some(Err(failure))) => return Some(Err(failure.clone())),
                    (None, _) if progress.unrecorded => return None,
                    (None, _) => {}
                }
            }
            let _ = changed.changed().await;
        }
    }

    /// What follows the first `read` chunks.
    pub async fn next(&self, read: usize) -> AnswerItem {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            {
                let progress = self.lock();
                match (progress.chunks.get(read), &progress.end) {
                    (Some(chunk), _) => return AnswerItem::Chunk(chunk.clone()),
                    (None, Some(Ok(()))) => return AnswerItem::End,
                    (None, Some(Err(failure))) => return AnswerItem::Failed(failure.clone()),
                    (None, None) if progress.unrecorded => return AnswerItem::NotYet,
                    (None, None) => {}
                }
            }
            let _ = changed.changed().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, CallProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
