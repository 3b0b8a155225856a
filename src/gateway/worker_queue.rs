//! A short queue of what the link brings for the worker, which polls for it.
//!
//! In memory only: what is lost or dropped here is sent again by its sender.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

pub struct WorkerQueue<T> {
    waiting: Mutex<VecDeque<(Instant, T)>>,
    news: Notify,
    max: usize,
    longest: Option<Duration>,
}

impl<T> WorkerQueue<T> {
    /// A queue of at most this many items, each for at most `longest`.
    pub fn new(max: usize, longest: Option<Duration>) -> Self {
        Self {
            waiting: Mutex::default(),
            news: Notify::new(),
            max,
            longest,
        }
    }

    /// Adds an item in place of those that it replaces. Dropped if the queue is full.
    pub fn put(&self, item: T, replaces: impl Fn(&T) -> bool) {
        let mut waiting = self.lock();
        self.drop_old(&mut waiting);
        waiting.retain(|(_, old)| !replaces(old));
        if waiting.len() < self.max {
            waiting.push_back((Instant::now(), item));
            self.news.notify_one();
        }
    }

    /// The next item; waits up to `limit`.
    pub async fn next(&self, limit: Duration) -> Option<T> {
        timeout(limit, async {
            loop {
                let news = self.news.notified();
                if let Some(item) = self.take() {
                    return item;
                }
                news.await;
            }
        })
        .await
        .ok()
    }

    fn take(&self) -> Option<T> {
        let mut waiting = self.lock();
        self.drop_old(&mut waiting);
        waiting.pop_front().map(|(_, item)| item)
    }

    fn drop_old(&self, waiting: &mut VecDeque<(Instant, T)>) {
        if let Some(longest) = self.longest {
            waiting.retain(|(at, _)| at.elapsed() < longest);
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Instant, T)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
