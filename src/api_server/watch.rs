//! One watch: the changes of a kind as lines, from a version on.

use std::convert::Infallible;
use std::fmt::Write as _;

use futures::{Stream, stream};
use serde_json::json;
use tokio::sync::watch;

use super::ApiServer;
use super::error::ApiError;
use super::object_store::ObjectChange;
use super::request::ApiRequest;

pub(super) struct ObjectWatch {
    pub(super) server: ApiServer,
    /// Versions of the store.
    pub(super) news: watch::Receiver<u64>,
    /// Changes when it is to end.
    pub(super) ended: watch::Receiver<()>,
    pub(super) request: ApiRequest,
    /// The version up to which it has delivered.
    pub(super) version: u64,
    pub(super) expired: bool,
}

impl ObjectWatch {
    pub(super) fn lines(self) -> impl Stream<Item = Result<String, Infallible>> {
        stream::unfold(self, |mut watch| async move {
            loop {
                if watch.expired || watch.ended.has_changed().unwrap_or(true) {
                    return None;
                }
                // Mark as seen before reading: a change in the meantime wakes this again.
                watch.news.mark_unchanged();
                let lines = watch.next();
                if !lines.is_empty() {
                    return Some((Ok(lines), watch));
                }
                tokio::select! {
                    changed = watch.news.changed() => changed.ok()?,
                    _ = watch.ended.changed() => return None,
                }
            }
        })
    }

    fn next(&mut self) -> String {
        let Some((version, changes)) = self.server.store.changes(&self.request.resource, self.version) else {
            self.expired = true;
            return format!("{}\n", json!({ "type": "ERROR", "object": ApiError::Expired.status() }));
        };
        self.version = version;
        let namespace = &self.request.namespace;
        let here = |change: &&ObjectChange| namespace.is_empty() || change.key.namespace == *namespace;
        let selected = changes
            .iter()
            .filter(here)
            .filter(|change| self.request.selects(&change.object) && self.server.hooks.delivers(change));
        selected.fold(String::new(), |mut lines, change| {
            let event = json!({ "type": change.kind.as_ref(), "object": change.object });
            let _ = writeln!(lines, "{event}");
            lines
        })
    }
}
