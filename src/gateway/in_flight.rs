//! One call in flight: its bytes so far for all listeners, what is known of its cost, and how it can be cut.
//!
//! All listeners read the same bytes from the beginning. A call continues without listeners.

use std::sync::{Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use tokio::sync::watch;

use super::store::CallUsage;
use crate::api::failure::CallFailure;
use crate::ledger::bound::CallBill;
use crate::provider::meter::AnswerMetadata;

pub struct InFlightCall {
    progress: Mutex<CallProgress>,
    changed: watch::Sender<()>,
    cut: watch::Sender<Option<CallFailure>>,
}

#[derive(Default)]
struct CallProgress {
    sent: SendStatus,
    bill: Option<(CallBill, String)>,
    /// What was asked for, as far as it is known.
    request: Option<RequestMetadata>,
    /// What the answer says about itself.
    answered: AnswerMetadata,
    /// The outcome is known but not yet recorded.
    unrecorded: bool,
    content_type: Option<String>,
    cost: Option<i64>,
    chunks: Vec<Bytes>,
    end: Option<Result<(), CallFailure>>,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestMetadata {
    /// Maximum number of output tokens; `None` if the upstream has no limit.
    pub max_output: Option<u32>,
    /// Whether the answer is to be streamed.
    pub is_streamed: bool,
}

/// Progress of sending the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendStatus {
    /// It was not sent.
    #[default]
    No,
    /// It was sent, or may have been.
    Yes,
    /// The server answered with an HTTP error that means that it did nothing.
    Refused,
}

/// The next item for a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerItem {
    Chunk(Bytes),
    /// The answer is complete.
    End,
    /// The answer failed, or ended early.
    Failed(CallFailure),
    /// The outcome is known but not yet recorded: ask again.
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

    /// Cuts the call; the first reason is kept.
    pub fn cut(&self, why: CallFailure) {
        self.cut.send_if_modified(|cut| {
            let first = cut.is_none();
            if first {
                *cut = Some(why);
            }
            first
        });
    }

    pub async fn until_cut(&self) -> CallFailure {
        let mut cut = self.cut.subscribe();
        loop {
            if let Some(why) = cut.borrow_and_update().clone() {
                return why;
            }
            // The sender is owned by `self`, so it cannot be dropped.
            let _ = cut.changed().await;
        }
    }

    pub fn note_sent(&self, sent: SendStatus) {
        self.lock().sent = sent;
    }

    /// Records the [`CallBill`] as parsed and as reported; `None`: no credible one.
    pub fn note_bill(&self, bill: Option<(CallBill, String)>) {
        self.lock().bill = bill;
    }

    pub fn note_request(&self, request: RequestMetadata) {
        self.lock().request = Some(request);
    }

    /// What was asked for; `None` before it was decided.
    pub fn request(&self) -> Option<RequestMetadata> {
        self.lock().request
    }

    pub fn note_answered(&self, answered: &AnswerMetadata) {
        self.lock().answered.clone_from(answered);
    }

    /// What the answer said about itself.
    pub fn answered(&self) -> AnswerMetadata {
        self.lock().answered.clone()
    }

    /// Marks the outcome as waiting for the record. Listeners are asked to retry meanwhile.
    pub fn note_unrecorded(&self, unrecorded: bool) {
        self.lock().unrecorded = unrecorded;
        self.changed.send_replace(());
    }

    pub fn is_unrecorded(&self) -> bool {
        self.lock().unrecorded
    }

    /// Records the cost in micro-dollars; called before the last bytes are pushed.
    pub fn note_cost(&self, cost: Option<i64>) {
        self.lock().cost = cost;
    }

    /// The cost in micro-dollars, once the last bytes are pushed and if it is known.
    pub fn cost(&self) -> Option<i64> {
        self.lock().cost
    }

    /// Appends bytes of the answer.
    pub fn push(&self, content_type: &str, bytes: Bytes) {
        let mut progress = self.lock();
        progress.content_type.get_or_insert_with(|| content_type.into());
        if !bytes.is_empty() {
            progress.chunks.push(bytes);
        }
        drop(progress);
        self.changed.send_replace(());
    }

    /// The bytes so far, followed by `rest`.
    pub fn body_with(&self, rest: &Bytes) -> Bytes {
        let progress = self.lock();
        if progress.chunks.is_empty() {
            // An answer that was not streamed is in one piece, and may be long: it is not copied.
            return rest.clone();
        }
        let length = progress.chunks.iter().map(Bytes::len).sum::<usize>() + rest.len();
        let mut body = Vec::with_capacity(length);
        for piece in progress.chunks.iter().chain([rest]) {
            body.extend_from_slice(piece);
        }
        body.into()
    }

    /// Marks the end of the answer.
    pub fn end(&self, result: Result<(), CallFailure>) {
        self.lock().end.get_or_insert(result);
        self.changed.send_replace(());
    }

    /// What is known of the usage.
    pub fn metered(&self) -> CallUsage {
        let progress = self.lock();
        match (progress.sent, &progress.bill) {
            (SendStatus::No, _) => CallUsage::NotSent,
            (SendStatus::Refused, _) => CallUsage::Free,
            (SendStatus::Yes, None) => CallUsage::Unknown,
            (SendStatus::Yes, Some((bill, usage))) => CallUsage::Billed(*bill, usage.clone()),
        }
    }

    /// The content type, once the first bytes are there; the [`CallFailure`] if there are none; `None`: ask again.
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

    /// The item after the first `read` chunks.
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
