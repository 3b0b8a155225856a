//! The events of an Agent over any number of connections: each event once, in order.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::user_link::{EventFeed, FeedItem};
use super::{EventCursor, LinkFailure, UserLink};
use crate::api::NamespacedName;
use crate::link::events::{EventLine, READ_FROM_START};
use crate::link::text_fragments::TextFragment;

/// Delay before a connection is opened again; doubled with each failure in a row.
const FIRST_DELAY: Duration = Duration::from_millis(250);
const MAX_DELAY: Duration = Duration::from_secs(30);

/// The events of an Agent.
pub struct FollowedEvents<'a> {
    link: &'a UserLink<'a>,
    agent: NamespacedName,
    cursor: EventCursor,
    messages: bool,
    /// Receives text of answers that arrives. It loses what it has no room for.
    text: Option<mpsc::Sender<TextFragment>>,
    feed: Option<EventFeed>,
    delay: Duration,
    /// The reason for which the last connection ended, for the reader.
    interruption: Option<String>,
}

impl<'a> FollowedEvents<'a> {
    /// Connects. Fails if the first connection does: a retry would hide what is wrong.
    pub async fn open(
        link: &'a UserLink<'a>,
        agent: &NamespacedName,
        cursor: EventCursor,
        messages: bool,
    ) -> Result<Self, LinkFailure> {
        Self::resume(link, agent, cursor, messages).connected().await
    }

    /// Connects now. Fails if that does.
    pub async fn connected(mut self) -> Result<Self, LinkFailure> {
        self.connect().await?;
        Ok(self)
    }

    /// Also asks for text of answers that arrives, if there is a receiver.
    #[must_use]
    pub fn with_text(self, text: Option<mpsc::Sender<TextFragment>>) -> Self {
        Self { text, ..self }
    }

    /// Connects with the first event that is asked for, and again for as long as that may help.
    #[must_use]
    pub fn resume(link: &'a UserLink<'a>, agent: &NamespacedName, cursor: EventCursor, messages: bool) -> Self {
        Self {
            link,
            agent: agent.clone(),
            cursor,
            messages,
            text: None,
            feed: None,
            delay: FIRST_DELAY,
            interruption: None,
        }
    }

    /// The number of the last event that was read; the newest one after a start with [`EventCursor::Latest`].
    #[must_use]
    pub fn cursor(&self) -> i64 {
        match self.cursor {
            EventCursor::After(seq) => seq,
            EventCursor::Latest => 0,
        }
    }

    /// Takes the reason for which the last connection ended, once.
    pub fn take_interruption(&mut self) -> Option<String> {
        self.interruption.take()
    }

    /// The next event. Connects again when a connection ends, for as long as that may help.
    pub async fn next(&mut self) -> Result<EventLine, LinkFailure> {
        loop {
            // A wait without an end cannot be over.
            if let Some(event) = self.next_within(Duration::MAX).await? {
                return Ok(event);
            }
        }
    }

    /// The next event, as [`Self::next`]. `None`: a connection was open for this time without one, whatever text it received.
    /// The time without a connection does not count: a reader that stopped then would miss events that exist.
    pub async fn next_within(&mut self, quiet: Duration) -> Result<Option<EventLine>, LinkFailure> {
        let mut connected_since = Instant::now();
        loop {
            let Some(feed) = &mut self.feed else {
                sleep(self.delay).await;
                self.delay = (2 * self.delay).min(MAX_DELAY);
                match self.connect().await {
                    Err(failure) if failure.is_temporary() => self.interruption = Some(failure.to_string()),
                    connected => connected?,
                }
                connected_since = Instant::now();
                continue;
            };
            let Ok(item) = timeout(quiet.saturating_sub(connected_since.elapsed()), feed.next()).await else {
                return Ok(None);
            };
            match item {
                Some(Ok(FeedItem::Line(line))) => {
                    self.cursor = EventCursor::After(line.seq);
                    self.delay = FIRST_DELAY;
                    return Ok(Some(*line));
                }
                Some(Ok(FeedItem::Start(seq))) => self.cursor = EventCursor::After(seq),
                Some(Ok(FeedItem::Text(fragment))) => {
                    let _ = self.text.as_ref().map(|text| text.try_send(fragment));
                }
                Some(Ok(FeedItem::End(reason))) => self.end(reason),
                Some(Err(failure)) => return Err(failure),
                None => {
                    self.feed = None;
                    self.interruption = Some("the connection ended".into());
                }
            }
        }
    }

    fn end(&mut self, reason: String) {
        self.feed = None;
        if reason.contains(READ_FROM_START) {
            // Another journal: all of its events are new.
            self.cursor = EventCursor::After(0);
        }
        self.interruption = Some(reason);
    }

    /// Opens a connection; one from [`EventCursor::Latest`] begins by saying where that is.
    async fn connect(&mut self) -> Result<(), LinkFailure> {
        let texts = (self.messages, self.text.is_some());
        let mut feed = self.link.events(&self.agent, self.cursor, texts).await?;
        if self.cursor == EventCursor::Latest {
            match feed.next().await {
                Some(Ok(FeedItem::Start(seq))) => self.cursor = EventCursor::After(seq),
                Some(Ok(FeedItem::End(reason))) => return Err(LinkFailure::Ended(reason)),
                Some(Ok(FeedItem::Line(_) | FeedItem::Text(_))) => {
                    return Err(LinkFailure::Unreadable(
                        "a stream from the latest event has no start".into(),
                    ));
                }
                Some(Err(failure)) => return Err(failure),
                None => return Err(LinkFailure::Unreachable("the stream ended before it began".into())),
            }
        }
        self.feed = Some(feed);
        Ok(())
    }
}
