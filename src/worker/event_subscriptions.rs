//! Sends events to readers over the link: from the journal, page by page, for as long as the directives request it.
//!
//! Owns one small task per subscription, which waits for its reader and never for the loop; the loop reads the journal
//! for it between two steps. Without readers, nothing is buffered or sent. The controller keeps the cursors.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

use crate::engine::{CallId, RecordKind};
use crate::link::events::{
    EventLine, EventSubscription, EventsPage, MAX_CALL_BYTES, MAX_MESSAGE_BYTES, MAX_RESPONSE_BYTES, PAGE_BYTES,
    PAGE_LINES, RECENT_MESSAGES,
};

use super::answer_text::{AnswerTexts, TextTap};
use super::events;
use super::gateway_client::{GatewayClient, RetryDelay};
use super::journal::{JournalError, JournalLine};
use super::journaled_engine::JournaledEngine;
use super::turn_context::line_ids;
use crate::support::text::{first_bytes, with_ellipsis};

/// Maximum number of concurrent subscriptions; the controller allows fewer.
const MAX_READINGS: usize = 16;
/// Maximum number of bytes of the texts of a line, as JSON: a page of one line is within the bound of the link,
/// whatever its texts contain.
const MAX_TEXT_BYTES: usize = 160 * 1024;
/// Approximate size of a line's names and numbers, in bytes.
const LINE_BYTES: usize = 300;
/// Pause before an [`EventsPage`] is resent to a reader whose buffer was full.
const NO_ROOM: Duration = Duration::from_millis(200);
/// How long a loop that has ended continues to send its last events.
const SHUTDOWN_EVENTS_TIMEOUT: Duration = Duration::from_millis(500);

/// The request of a subscription for its next [`EventsPage`].
pub struct PageRequest {
    reading: EventSubscription,
    after: i64,
    reply: oneshot::Sender<EventsPage>,
}

/// The [`EventSubscription`]s of one loop.
pub struct EventPublisher {
    gateway: GatewayClient,
    /// Uid of the Agent, if its traces are exported.
    traced: Option<String>,
    newest: watch::Sender<i64>,
    asks: (mpsc::Sender<PageRequest>, mpsc::Receiver<PageRequest>),
    /// The subscriptions in the directives, including those whose task has ended.
    known: BTreeMap<EventSubscription, AbortHandle>,
    tasks: JoinSet<()>,
    texts: AnswerTexts,
}

impl EventPublisher {
    #[must_use]
    pub fn new(gateway: &GatewayClient, traced: Option<String>) -> Self {
        Self {
            gateway: gateway.clone(),
            traced,
            newest: watch::Sender::new(0),
            asks: mpsc::channel(1),
            known: BTreeMap::new(),
            tasks: JoinSet::new(),
            texts: AnswerTexts::new(gateway),
        }
    }

    /// Replaces the subscriptions by `wanted`.
    pub fn set(&mut self, wanted: &[EventSubscription]) {
        while self.tasks.try_join_next().is_some() {}
        self.texts.set_wanted(wanted.iter().any(|reading| reading.text));
        self.known.retain(|reading, task| {
            let stays = wanted.contains(reading);
            if !stays {
                task.abort();
            }
            stays
        });
        for reading in wanted {
            if self.known.len() < MAX_READINGS && !self.known.contains_key(reading) {
                let sender = SubscriptionTask {
                    reading: *reading,
                    gateway: self.gateway.clone(),
                    asks: self.asks.0.clone(),
                    newest: self.newest.subscribe(),
                };
                self.known.insert(*reading, self.tasks.spawn(sender.run()));
            }
        }
    }

    /// What watches a call for a task, for the subscriptions that want text.
    #[must_use]
    pub fn tap(&self, task: &str, call: CallId) -> TextTap {
        self.texts.tap(task, call)
    }

    /// Wakes the subscriptions: these [`JournalLine`]s are on disk.
    pub fn announce_lines(&self, lines: &[JournalLine]) {
        if let Some(last) = lines.last() {
            self.newest.send_replace(last.seq);
        }
    }

    pub async fn next_request(&mut self) -> PageRequest {
        match self.asks.1.recv().await {
            Some(ask) => ask,
            // Unreachable: `self` holds a sender.
            None => std::future::pending().await,
        }
    }

    /// Reads the requested [`EventsPage`] from the journal.
    pub fn answer(&self, ask: PageRequest, steps: &JournaledEngine<'_>) -> Result<(), JournalError> {
        let found = steps.lines_after(ask.after, PAGE_LINES)?;
        let mut page = EventsPage {
            reading: ask.reading.id,
            after: ask.after,
            next: found.next,
            newest: found.newest,
            ..EventsPage::default()
        };
        let mut bytes = 0;
        for line in found.lines {
            let kind = line.kind;
            let trace_id = self.traced.as_deref().and_then(|agent| line_ids(agent, &line));
            let trace_id = trace_id.map(|ids| ids.trace);
            let mut line = events::from_line(line, trace_id);
            if ask.reading.messages {
                line.messages = messages_of(kind, &line, steps)?;
            }
            // As JSON for the link, which accepts twice as many, and in the memory of the controller.
            bytes += line.bytes().max(LINE_BYTES + size(&line));
            if bytes > PAGE_BYTES && !page.events.is_empty() {
                page.next = line.seq - 1;
                break;
            }
            page.events.push(line);
        }
        // The subscription may have ended in the meantime.
        let _ = ask.reply.send(page);
        Ok(())
    }

    /// Sends the last events to the readers, for at most [`SHUTDOWN_EVENTS_TIMEOUT`].
    pub async fn finish(&mut self, steps: &mut JournaledEngine<'_>) -> Result<(), JournalError> {
        // Closes the channel: a task that has sent everything then ends, since no more lines will follow.
        self.newest = watch::Sender::new(0);
        let deadline = Instant::now() + SHUTDOWN_EVENTS_TIMEOUT;
        while !self.tasks.is_empty() {
            tokio::select! {
                Some(ask) = self.asks.1.recv() => self.answer(ask, steps)?,
                _ = self.tasks.join_next() => {}
                () = sleep_until(deadline) => break,
            }
        }
        Ok(())
    }
}

/// The texts of an event, for subscribers who may read them.
fn messages_of(kind: RecordKind, line: &EventLine, steps: &JournaledEngine<'_>) -> Result<Vec<String>, JournalError> {
    if kind == RecordKind::LoopDetected {
        return steps.recent_messages(line.turn, (RECENT_MESSAGES, MAX_MESSAGE_BYTES));
    }
    if kind == RecordKind::TaskEnded {
        let id = line.note.rsplit_once(": ").map_or(&*line.note, |(id, _)| id);
        let mut max = MAX_RESPONSE_BYTES;
        let mut response = steps.task_response(id, max)?;
        // Shortened as a result, so that it stays JSON.
        while response.as_ref().is_some_and(|text| json_bytes(text) > MAX_TEXT_BYTES) {
            max /= 2;
            response = steps.task_response(id, max)?;
        }
        return Ok(response.into_iter().collect());
    }
    let gate = line.run.as_ref().filter(|_| kind == RecordKind::GateOpened);
    let run = gate.and_then(|run| run.parse().ok());
    let call = run.map(|run| steps.requested_call(run, MAX_CALL_BYTES)).transpose()?;
    let mut call = call.flatten();
    if let Some(text) = &mut call {
        while json_bytes(text) > MAX_TEXT_BYTES {
            *text = with_ellipsis(first_bytes(text, text.len() / 2), text);
        }
    }
    Ok(call.into_iter().collect())
}

/// The size of a text as JSON. Texts with many quotes or control characters become several times as long.
fn json_bytes(text: &str) -> usize {
    serde_json::to_string(text).map_or(usize::MAX, |text| text.len())
}

/// The size of a line's texts as JSON, in bytes.
fn size(line: &EventLine) -> usize {
    let texts = line
        .messages
        .iter()
        .chain(&line.tool)
        .chain(&line.model)
        .chain([&line.note]);
    texts.map(|text| json_bytes(text)).sum()
}

struct SubscriptionTask {
    reading: EventSubscription,
    gateway: GatewayClient,
    asks: mpsc::Sender<PageRequest>,
    newest: watch::Receiver<i64>,
}

impl SubscriptionTask {
    async fn run(mut self) {
        let mut retry = RetryDelay::default();
        let mut after = self.reading.after;
        let mut first = true;
        while let Some(page) = self.page(after).await {
            // The first page is sent even when it is empty: it tells the reader that the loop is running.
            if page.next == after && !first {
                if self.newest.wait_for(|newest| *newest > after).await.is_err() {
                    return;
                }
                continue;
            }
            match self.gateway.send_events(&page).await {
                Ok(answer) => {
                    let Some(next) = answer.after else { return };
                    // The reader's buffer was full, so it has accepted nothing: the same page is sent again.
                    if next == after && page.next > after {
                        sleep(NO_ROOM).await;
                    }
                    (after, first, retry) = (next, false, RetryDelay::default());
                }
                Err(detail) => retry.wait_after("failed to send events; retrying", &detail).await,
            }
        }
    }

    /// `None`: the loop has ended.
    async fn page(&self, after: i64) -> Option<EventsPage> {
        let (reply, page) = oneshot::channel();
        let ask = PageRequest {
            reading: self.reading,
            after,
            reply,
        };
        self.asks.send(ask).await.ok()?;
        page.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_line_is_that_of_its_json() {
        let line = EventLine {
            note: "\u{1}\"".repeat(10),
            messages: vec!["\\".repeat(1000)],
            ..EventLine::default()
        };
        let json = serde_json::to_string(&line).unwrap().len();
        assert!(
            (size(&line)..size(&line) + LINE_BYTES).contains(&json),
            "{json} {}",
            size(&line)
        );
    }
}
