//! Text of answers to requested tasks while it arrives, in fragments for subscribers who want it.
//!
//! Best effort and in memory only: nothing of it is journalled, logged, counted or sent twice, and the loop never waits for
//! it. While no subscription wants text, nothing is kept or sent.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::engine::CallId;
use crate::link::text_fragments::{MAX_FRAGMENT_BYTES, TextFragment};
use crate::support::text::first_bytes;

use super::gateway_client::GatewayClient;

/// Pause after each fragment; what arrives meanwhile is sent as one. About 6 a second.
const INTERVAL: Duration = Duration::from_millis(150);
/// Maximum number of bytes of text that wait to be sent; the oldest fragments are dropped.
const MAX_WAITING_BYTES: usize = 8 * MAX_FRAGMENT_BYTES;

/// Sends the text of answers while it is wanted.
pub struct AnswerTexts {
    queue: Arc<TextQueue>,
    gateway: GatewayClient,
    /// The task that sends, while text is wanted.
    sender: JoinSet<()>,
}

impl AnswerTexts {
    #[must_use]
    pub fn new(gateway: &GatewayClient) -> Self {
        Self {
            queue: Arc::default(),
            gateway: gateway.clone(),
            sender: JoinSet::new(),
        }
    }

    /// Whether a subscription wants text now.
    pub fn set_wanted(&mut self, wanted: bool) {
        if !self.queue.set_wanted(wanted) {
            return;
        }
        // Aborts a fragment on its way: it has no reader.
        self.sender = JoinSet::new();
        if wanted {
            let (queue, gateway) = (Arc::clone(&self.queue), self.gateway.clone());
            self.sender.spawn(async move {
                queue.send_each(|fragment| gateway.send_text(fragment)).await;
            });
        }
    }

    /// What watches a call for a task.
    #[must_use]
    pub fn tap(&self, task: &str, call: CallId) -> TextTap {
        TextTap {
            queue: Arc::clone(&self.queue),
            task: task.to_owned(),
            call,
            offset: 0,
        }
    }
}

/// Watches the text of one call's answer.
#[derive(Clone)]
pub struct TextTap {
    queue: Arc<TextQueue>,
    task: String,
    call: CallId,
    /// Bytes of the text so far.
    offset: u64,
}

impl TextTap {
    /// More text has arrived.
    pub fn push(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let start = self.offset;
        self.offset += text.len() as u64;
        self.queue.add(|| TextFragment {
            task: self.task.clone(),
            call: self.call.to_string(),
            attempt: self.call.attempt,
            offset: start,
            text: text.to_owned(),
        });
    }
}

/// The text that waits to be sent.
#[derive(Default)]
struct TextQueue {
    waiting: Mutex<WaitingText>,
    changed: Notify,
}

#[derive(Default)]
struct WaitingText {
    is_wanted: bool,
    fragments: VecDeque<TextFragment>,
}

impl TextQueue {
    /// Returns whether the value has changed.
    fn set_wanted(&self, wanted: bool) -> bool {
        let mut waiting = self.lock();
        let changed = std::mem::replace(&mut waiting.is_wanted, wanted) != wanted;
        if changed {
            waiting.fragments.clear();
        }
        changed
    }

    fn add(&self, fragment: impl FnOnce() -> TextFragment) {
        let mut waiting = self.lock();
        if waiting.is_wanted {
            waiting.add(fragment());
            drop(waiting);
            self.changed.notify_one();
        }
    }

    /// Sends what waits, fragment by fragment. What fails is lost. Never returns.
    async fn send_each<S>(&self, send: impl Fn(TextFragment) -> S)
    where
        S: Future<Output = Result<(), String>>,
    {
        loop {
            let next = self.lock().fragments.pop_front();
            let Some(fragment) = next else {
                self.changed.notified().await;
                continue;
            };
            if let Err(detail) = send(fragment).await {
                tracing::debug!(detail, "failed to send text of an answer that arrives");
            }
            sleep(INTERVAL).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, WaitingText> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitingText {
    /// Adds text to the last fragment if it continues it, and begins others as needed.
    fn add(&mut self, mut fragment: TextFragment) {
        let mut rest = std::mem::take(&mut fragment.text);
        let last = self.fragments.back_mut();
        let continued = last.filter(|last| last.call == fragment.call && last.end() == fragment.offset);
        if let Some(last) = continued {
            let fits = first_bytes(&rest, MAX_FRAGMENT_BYTES - last.text.len()).len();
            last.text.push_str(&rest[..fits]);
            rest.drain(..fits);
            fragment.offset += fits as u64;
        }
        while !rest.is_empty() {
            let text = first_bytes(&rest, MAX_FRAGMENT_BYTES).to_owned();
            rest.drain(..text.len());
            let next = TextFragment {
                text,
                ..fragment.clone()
            };
            fragment.offset = next.end();
            self.fragments.push_back(next);
        }
        while self.bytes() > MAX_WAITING_BYTES {
            self.fragments.pop_front();
        }
    }

    fn bytes(&self) -> usize {
        self.fragments.iter().map(|fragment| fragment.text.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use pretty_assertions::assert_eq;
    use tokio::time::Instant;

    use super::*;

    fn queue() -> Arc<TextQueue> {
        let queue = Arc::<TextQueue>::default();
        assert!(queue.set_wanted(true));
        queue
    }

    fn tap(queue: &Arc<TextQueue>, call: &str) -> TextTap {
        TextTap {
            queue: Arc::clone(queue),
            task: "request-a".into(),
            call: call.parse().unwrap(),
            offset: 0,
        }
    }

    /// What waits: call, offset and text.
    fn waiting(queue: &TextQueue) -> Vec<(String, u64, String)> {
        let fragments = std::mem::take(&mut queue.lock().fragments);
        let parts = |fragment: TextFragment| (fragment.call, fragment.offset, fragment.text);
        fragments.into_iter().map(parts).collect()
    }

    fn of(call: &str, offset: u64, text: &str) -> (String, u64, String) {
        (call.into(), offset, text.into())
    }

    #[test]
    fn text_that_waits_is_one_fragment_of_each_call_and_offsets_count_what_was_sent() {
        let queue = queue();
        let mut first = tap(&queue, "t1c1a1");
        first.push("he");
        first.push("");
        first.push("llé");
        let mut second = tap(&queue, "t1c1a2");
        second.push("again");
        assert_eq!(waiting(&queue), [of("t1c1a1", 0, "hellé"), of("t1c1a2", 0, "again")]);
        second.push("!");
        assert_eq!(waiting(&queue), [of("t1c1a2", 5, "!")]);
        // The same call is read again from its beginning.
        tap(&queue, "t1c1a2").push("again");
        assert_eq!(waiting(&queue), [of("t1c1a2", 0, "again")]);
        second.push("?");
        let fragment = queue.lock().fragments[0].clone();
        assert_eq!((fragment.task.as_str(), fragment.attempt), ("request-a", 2));
    }

    #[test]
    fn a_fragment_has_at_most_4_kib_and_ends_between_characters() {
        let queue = queue();
        tap(&queue, "t1c1a1").push(&"x".repeat(MAX_FRAGMENT_BYTES));
        assert_eq!(waiting(&queue).len(), 1);
        let mut tap = tap(&queue, "t1c1a1");
        tap.push(&"x".repeat(MAX_FRAGMENT_BYTES - 1));
        tap.push("éy");
        let sizes: Vec<_> = waiting(&queue)
            .into_iter()
            .map(|(_, at, text)| (at, text.len()))
            .collect();
        assert_eq!(sizes, [(0, 4095), (4095, 3)]);
        tap.push(&"x".repeat(2 * MAX_FRAGMENT_BYTES + 1));
        let sizes: Vec<_> = waiting(&queue)
            .into_iter()
            .map(|(_, at, text)| (at, text.len()))
            .collect();
        assert_eq!(sizes, [(4098, 4096), (8194, 4096), (12_290, 1)]);
    }

    #[test]
    fn the_oldest_fragments_are_dropped_when_too_much_text_waits() {
        let queue = queue();
        let mut tap = tap(&queue, "t1c1a1");
        tap.push(&"x".repeat(MAX_WAITING_BYTES));
        assert_eq!(waiting(&queue)[0].1, 0, "all of it may wait");
        tap.push(&"x".repeat(MAX_WAITING_BYTES + 1));
        let rest = waiting(&queue);
        assert_eq!(
            (rest[0].1, rest.len()),
            ((MAX_WAITING_BYTES + MAX_FRAGMENT_BYTES) as u64, 8)
        );
    }

    #[test]
    fn nothing_is_buffered_without_a_reader_and_a_late_reader_sees_what_is_missing() {
        let queue = Arc::<TextQueue>::default();
        let mut tap = tap(&queue, "t1c1a1");
        tap.push("before ");
        assert_eq!(waiting(&queue), []);
        assert!(queue.set_wanted(true));
        tap.push("now");
        assert!(!queue.set_wanted(true), "no change");
        tap.push(" on");
        assert_eq!(waiting(&queue), [of("t1c1a1", 7, "now on")]);
        tap.push("x");
        assert!(queue.set_wanted(false));
        assert_eq!(waiting(&queue), [], "dropped with its reader");
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_text_is_sent_at_once_and_text_in_the_pause_after_it_as_one_fragment() {
        let queue = queue();
        let sent = Arc::new(Mutex::new(Vec::new()));
        let start = Instant::now();
        let sender = {
            let (queue, sent) = (Arc::clone(&queue), Arc::clone(&sent));
            tokio::spawn(async move {
                let note = |fragment: TextFragment| {
                    sent.lock().unwrap().push((start.elapsed(), fragment.text));
                    std::future::ready(Ok(()))
                };
                queue.send_each(note).await;
            })
        };
        let mut tap = tap(&queue, "t1c1a1");
        for word in ["a", "b", "c", "d"] {
            tap.push(word);
            sleep(Duration::from_millis(60)).await;
        }
        sleep(Duration::from_secs(1)).await;
        let at = Duration::from_millis;
        let expected = [(at(0), "a"), (at(150), "bc"), (at(300), "d")];
        assert_eq!(*sent.lock().unwrap(), expected.map(|(at, text)| (at, text.to_owned())));
        sender.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_fragment_that_cannot_be_sent_is_lost_and_the_next_one_is_tried() {
        let queue = queue();
        let tries = AtomicUsize::new(0);
        let mut tap = tap(&queue, "t1c1a1");
        let send = |_| {
            tries.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Err("status 502".to_owned()))
        };
        let feed = async {
            for _ in 0..3 {
                tap.push("x");
                sleep(INTERVAL).await;
            }
        };
        tokio::select! {
            () = queue.send_each(send) => {}
            () = feed => {}
        }
        assert_eq!(tries.load(Ordering::Relaxed), 3);
    }
}
