//! The subscriptions to events of live loops: one cursor each, and a small buffer of pages.
//!
//! Kept in memory, only while someone is subscribed, and bounded in bytes. A page is accepted only if it begins at the cursor, so
//! that each line is delivered exactly once. A subscription whose reader takes nothing for too long is closed. Text of answers
//! that arrive has a buffer of its own, and is dropped when that is full. Authorization is decided elsewhere.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::stream::{self, StreamExt};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::pod_sessions::{LivePod, PodSessions};
use super::runtime::WallClock;
use crate::api::NamespacedName;
use crate::link::events::{
    ClientRefusal, ClientRefusalCode, EventLine, EventStream, EventStreamItem, EventSubscription, EventsPage,
    EventsResponse, LATEST, PAGE_BYTES, READ_FROM_START,
};
use crate::link::messages::PodRefusal;
use crate::link::text_fragments::TextFragment;

/// Maximum number of concurrent subscriptions to one Agent.
pub const READINGS_OF_ONE: usize = 8;
/// Maximum number of concurrent subscriptions in total. If all are taken, the namespace that has the most gives way.
pub const READINGS_OF_ALL: usize = 256;
/// Capacity of the buffer, in pages.
const ROOM: usize = 2;
/// Maximum number of bytes of the buffer and of the page that the reader is sent. A page with one long line takes the room of
/// several.
const ROOM_BYTES: usize = ROOM * PAGE_BYTES;
/// Maximum number of fragments of text that wait for a reader.
const ROOM_FOR_TEXT: usize = 16;
/// How long the pod may take to send the first page.
const FIRST_PAGE: Duration = Duration::from_secs(10);
/// How long a page waits for a slow reader, and how often it looks for room.
const ROOM_WAIT: Duration = Duration::from_secs(5);
const ROOM_LOOK: Duration = Duration::from_millis(100);
/// How long a reader may take nothing while the buffer is full.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest duration of a subscription. To continue, a reader must be authorized again.
const MAX_SUBSCRIPTION: Duration = Duration::from_hours(1);

/// The last message of a subscription that ends with its pod.
const POD_GONE: &str = "the pod of this Agent was deleted or replaced; reconnect with the last id";
const GIVES_WAY: &str = "its place was given to a reader of another namespace; reconnect with the last id";
const TOO_SLOW: &str = "too slow: nothing was read for 30 s; reconnect with the last id";
const TOO_LONG: &str = "the limit of one hour is reached; reconnect with the last id";

struct OpenSubscription {
    began: i64,
    messages: bool,
    cursor: i64,
    pages: mpsc::Sender<BufferedPage>,
    /// What is left of [`ROOM_BYTES`].
    bytes: Arc<Semaphore>,
    /// `None`: no text is wanted.
    text: Option<mpsc::Sender<Arc<TextFragment>>>,
    farewell: Arc<OnceLock<String>>,
    /// The cursor at which a subscription from [`LATEST`] began.
    start: Arc<OnceLock<i64>>,
    /// Since when the buffer is full.
    full: Option<Instant>,
    /// Held by the page that waits for room. A worker sends one at a time; what else a pod sends must not pile up.
    turn: Arc<Semaphore>,
}

/// The subscriptions to one pod.
#[derive(Default)]
pub(super) struct EventSubscriptions {
    open: BTreeMap<u64, OpenSubscription>,
}

impl OpenSubscription {
    /// Takes the lines of the page into the buffer, if there is room for them.
    fn pass_on(&self, page: &mut EventsPage) -> Result<(), TrySendError<()>> {
        let place = self.pages.try_reserve()?;
        // A longer one has all of the room.
        let bytes = u32::try_from(page.bytes().min(ROOM_BYTES)).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.bytes).try_acquire_many_owned(bytes);
        let room = room.map_err(|_| TrySendError::Full(()))?;
        place.send(BufferedPage {
            lines: std::mem::take(&mut page.events),
            room: Some(room),
        });
        Ok(())
    }
}

/// The lines of a page, and the room that they take.
#[derive(Default)]
struct BufferedPage {
    lines: Vec<EventLine>,
    room: Option<OwnedSemaphorePermit>,
}

/// The result of a page.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PageOutcome {
    /// The next page must begin here.
    Next(i64),
    /// The buffer is full: send the page that begins here again, later.
    Full(i64),
    /// The subscription has ended.
    Over,
}

impl EventSubscriptions {
    /// The subscriptions as the directives list them.
    pub(super) fn requested(&self) -> Vec<EventSubscription> {
        let open = self.open.iter();
        open.map(|(id, open)| EventSubscription {
            id: *id,
            after: open.began,
            messages: open.messages,
            text: open.text.is_some(),
        })
        .collect()
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Id of the oldest subscription.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.open.first_key_value().map(|(id, _)| *id)
    }

    /// Another reader takes the place of this subscription.
    pub(super) fn give_way(&mut self, id: u64) {
        self.end(id, GIVES_WAY.into());
    }

    pub(super) fn open(&mut self, reading: EventSubscription) -> PageReceiver {
        let (pages, queue) = mpsc::channel(ROOM);
        let (text, fragments) = reading.text.then(|| mpsc::channel(ROOM_FOR_TEXT)).unzip();
        let (farewell, start) = (Arc::default(), Arc::default());
        let open = OpenSubscription {
            began: reading.after,
            messages: reading.messages,
            cursor: reading.after,
            pages,
            bytes: Arc::new(Semaphore::new(ROOM_BYTES)),
            text,
            farewell: Arc::clone(&farewell),
            start: Arc::clone(&start),
            full: None,
            turn: Arc::new(Semaphore::new(1)),
        };
        self.open.insert(reading.id, open);
        PageReceiver {
            queue,
            fragments,
            farewell,
            start,
        }
    }

    /// Passes text on to the subscriptions that want it and have room for it.
    pub(super) fn pass_text(&self, fragment: &Arc<TextFragment>) {
        for text in self.open.values().filter_map(|open| open.text.as_ref()) {
            // A reader without room learns from the next offset that it missed this one.
            let _ = text.try_send(Arc::clone(fragment));
        }
    }

    pub(super) fn close(&mut self, id: u64) -> bool {
        self.open.remove(&id).is_some()
    }

    /// The right of a page to wait for room in the buffer; `None` while another one has it.
    pub(super) fn page_turn(&self, id: u64) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.open.get(&id)?.turn).try_acquire_owned().ok()
    }

    /// Accepts a page if it is the next one and the buffer has room, and takes its lines. Only this function moves a cursor.
    pub(super) fn accept_page(&mut self, page: &mut EventsPage, now: Instant) -> PageOutcome {
        let Some(open) = self.open.get_mut(&page.reading) else {
            return PageOutcome::Over;
        };
        if open.cursor == LATEST {
            // The first page says where the journal ends. An empty page tells the reader that the pod is connected.
            open.cursor = page.newest;
            let _ = open.start.set(page.newest);
            let _ = open.pages.try_send(BufferedPage::default());
            return PageOutcome::Next(open.cursor);
        }
        if open.cursor > page.newest {
            let word = format!(
                "event {} does not exist yet, the newest is {}: {READ_FROM_START}, the journal may have been recreated",
                open.cursor, page.newest
            );
            return self.end(page.reading, word);
        }
        // A duplicate, or sent by a worker that has just restarted.
        if page.after != open.cursor || page.next < page.after {
            return PageOutcome::Next(open.cursor);
        }
        match open.pass_on(page) {
            Ok(()) => {
                open.cursor = page.next;
                open.full = None;
                PageOutcome::Next(open.cursor)
            }
            Err(TrySendError::Closed(())) => {
                self.open.remove(&page.reading);
                PageOutcome::Over
            }
            Err(TrySendError::Full(())) if now.duration_since(*open.full.get_or_insert(now)) >= STALL_TIMEOUT => {
                self.end(page.reading, TOO_SLOW.into())
            }
            Err(TrySendError::Full(())) => PageOutcome::Full(open.cursor),
        }
    }

    fn end(&mut self, id: u64, word: String) -> PageOutcome {
        if let Some(open) = self.open.remove(&id) {
            // The only place that sets it.
            let _ = open.farewell.set(word);
        }
        PageOutcome::Over
    }
}

/// The reader's end of a subscription.
pub(super) struct PageReceiver {
    queue: mpsc::Receiver<BufferedPage>,
    fragments: Option<mpsc::Receiver<Arc<TextFragment>>>,
    farewell: Arc<OnceLock<String>>,
    start: Arc<OnceLock<i64>>,
}

impl PageReceiver {
    /// Another reader has taken its place.
    #[cfg(test)]
    pub(super) fn is_displaced(&self) -> bool {
        self.end_reason() == GIVES_WAY
    }

    fn end_reason(&self) -> String {
        self.farewell.get().cloned().unwrap_or_else(|| POD_GONE.into())
    }
}

/// The next fragment of text; `None` if none will come.
async fn next_fragment(fragments: &mut Option<mpsc::Receiver<Arc<TextFragment>>>) -> Option<Arc<TextFragment>> {
    fragments.as_mut()?.recv().await
}

/// Closes the subscription when its reader is dropped.
struct SubscriptionGuard {
    loops: Arc<PodSessions>,
    agent: NamespacedName,
    id: u64,
}

impl Drop for SubscriptionGuard {
    fn drop(&mut self) {
        self.loops.close_subscription(&self.agent, self.id);
    }
}

/// Subscribes to an Agent's events, as `wanted` says but for its id. Returns once its pod has sent the first page.
pub async fn subscribe(
    loops: &Arc<PodSessions>,
    agent: &NamespacedName,
    wanted: EventSubscription,
) -> Result<EventStream, ClientRefusal> {
    let (id, mut pages) = loops.open_subscription(agent, wanted)?;
    let guard = SubscriptionGuard {
        loops: Arc::clone(loops),
        agent: agent.clone(),
        id,
    };
    let deadline = Instant::now() + MAX_SUBSCRIPTION;
    let first = timeout(FIRST_PAGE, pages.queue.recv()).await;
    let first = first.map_err(|_| unavailable("the pod of this Agent does not respond; retry"))?;
    let Some(first) = first else {
        return Ok(stream::iter([EventStreamItem::End(pages.end_reason())]).boxed());
    };
    let start = pages.start.get().copied();
    // The stream owns the guard, so that dropping the stream closes the subscription. After an End item the state is
    // `None`, which ends the stream. It is asked for more once the reader has taken all lines, which frees their room.
    let rest = stream::unfold(Some((pages, guard, first.room)), move |state| async move {
        let (mut pages, guard, taken) = state?;
        drop(taken);
        let page = tokio::select! {
            biased;
            () = sleep_until(deadline) => return Some((vec![EventStreamItem::End(TOO_LONG.into())], None)),
            page = pages.queue.recv() => page,
            Some(fragment) = next_fragment(&mut pages.fragments) => {
                return Some((vec![EventStreamItem::Text(fragment)], Some((pages, guard, None))));
            }
        };
        Some(match page {
            Some(page) => (lines(page.lines), Some((pages, guard, page.room))),
            None => (vec![EventStreamItem::End(pages.end_reason())], None),
        })
    });
    let start = start.into_iter().map(EventStreamItem::Start).collect::<Vec<_>>();
    Ok(stream::iter([start, lines(first.lines)])
        .chain(rest)
        .flat_map(stream::iter)
        .boxed())
}

fn lines(page: Vec<EventLine>) -> Vec<EventStreamItem> {
    page.into_iter()
        .map(|line| EventStreamItem::Line(Box::new(line)))
        .collect()
}

/// Passes a page of a pod on to its reader, and says where the next one must begin. While the reader has no room, one page waits
/// for [`ROOM_WAIT`]; all others are answered at once, so that they are sent again.
pub(super) async fn deliver_page(
    loops: &PodSessions,
    (agent, pod): (&NamespacedName, &LivePod),
    mut page: EventsPage,
    clock: &WallClock,
) -> Result<EventsResponse, PodRefusal> {
    // The worker sends what follows with the next page.
    page.shorten();
    let since = Instant::now();
    let mut turn = None;
    loop {
        let after = match loops.receive_page(agent, pod, &mut page, clock())? {
            PageOutcome::Full(_) if since.elapsed() < ROOM_WAIT => {
                turn = turn.or_else(|| loops.page_turn(agent, page.reading));
                if turn.is_some() {
                    sleep(ROOM_LOOK).await;
                    continue;
                }
                Some(page.after)
            }
            PageOutcome::Next(after) | PageOutcome::Full(after) => Some(after),
            PageOutcome::Over => None,
        };
        return Ok(EventsResponse { after });
    }
}

/// Reading is impossible at the moment.
pub(super) fn unavailable(message: &str) -> ClientRefusal {
    ClientRefusal {
        code: ClientRefusalCode::Unavailable,
        message: message.into(),
    }
}

/// The limit of subscriptions is reached.
pub(super) fn too_many(message: String) -> ClientRefusal {
    ClientRefusal {
        code: ClientRefusalCode::TooManyReaders,
        message,
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use jiff::Timestamp;

    use super::*;
    use crate::link::messages::{Directives, LoopTotals};
    use crate::link::server::MAX_BODY_BYTES;

    fn page(after: i64, next: i64) -> EventsPage {
        EventsPage {
            reading: 1,
            after,
            next,
            newest: 100,
            events: (after + 1..=next)
                .map(|seq| EventLine {
                    seq,
                    ..EventLine::default()
                })
                .collect(),
            ..EventsPage::default()
        }
    }

    fn reading(after: i64) -> (EventSubscriptions, PageReceiver) {
        let mut readings = EventSubscriptions::default();
        let pages = readings.open(EventSubscription {
            id: 1,
            after,
            ..EventSubscription::default()
        });
        (readings, pages)
    }

    #[test]
    fn a_page_is_accepted_once_and_only_at_the_cursor() {
        let (mut readings, mut pages) = reading(5);
        let now = Instant::now();
        // A restarted worker begins where the subscription began.
        assert_eq!(readings.accept_page(&mut page(0, 4), now), PageOutcome::Next(5));
        assert_eq!(readings.accept_page(&mut page(5, 7), now), PageOutcome::Next(7));
        assert_eq!(
            readings.accept_page(&mut page(5, 7), now),
            PageOutcome::Next(7),
            "a repeat"
        );
        assert_eq!(
            readings.accept_page(&mut page(8, 9), now),
            PageOutcome::Next(7),
            "a gap"
        );
        assert_eq!(pages.queue.try_recv().unwrap().lines.len(), 2);
        assert!(pages.queue.try_recv().is_err());
        assert_eq!(
            readings.requested(),
            [EventSubscription {
                id: 1,
                after: 5,
                ..EventSubscription::default()
            }],
            "the requested start stays the same"
        );
    }

    #[test]
    fn a_cursor_that_the_journal_has_not_reached_ends_the_reading_and_the_newest_itself_does_not() {
        let (mut readings, pages) = reading(101);
        assert_eq!(
            readings.accept_page(&mut page(101, 101), Instant::now()),
            PageOutcome::Over
        );
        assert!(
            pages
                .end_reason()
                .contains("event 101 does not exist yet, the newest is 100")
        );
        let (mut readings, _pages) = reading(100);
        assert_eq!(
            readings.accept_page(&mut page(100, 100), Instant::now()),
            PageOutcome::Next(100)
        );
    }

    #[test]
    fn a_reading_from_the_latest_line_begins_at_the_end_of_the_journal_and_stays_there_over_a_restart() {
        let at_latest = |newest| EventsPage {
            reading: 1,
            after: LATEST,
            next: LATEST,
            newest,
            ..EventsPage::default()
        };
        let (mut readings, mut pages) = reading(LATEST);
        assert_eq!(
            readings.accept_page(&mut at_latest(100), Instant::now()),
            PageOutcome::Next(100)
        );
        assert_eq!(
            pages.queue.try_recv().unwrap().lines,
            [],
            "the reader learns that the pod is connected"
        );
        assert_eq!(pages.start.get(), Some(&100));
        let mut next = EventsPage {
            newest: 102,
            ..page(100, 102)
        };
        assert_eq!(readings.accept_page(&mut next, Instant::now()), PageOutcome::Next(102));
        // A restarted worker begins where the subscription began.
        let mut again = at_latest(102);
        assert_eq!(readings.accept_page(&mut again, Instant::now()), PageOutcome::Next(102));
        assert_eq!(pages.queue.try_recv().unwrap().lines.len(), 2);
    }

    #[test]
    fn a_reader_that_is_idle_for_30_s_is_disconnected_with_a_reason() {
        let start = Instant::now();
        let almost = start + STALL_TIMEOUT.saturating_sub(Duration::from_millis(1));
        let (mut readings, mut pages) = reading(0);
        assert_eq!(readings.accept_page(&mut page(0, 1), start), PageOutcome::Next(1));
        assert_eq!(readings.accept_page(&mut page(1, 2), start), PageOutcome::Next(2));
        assert_eq!(
            readings.accept_page(&mut page(2, 3), start),
            PageOutcome::Full(2),
            "two pages wait"
        );
        assert_eq!(readings.accept_page(&mut page(2, 3), almost), PageOutcome::Full(2));
        pages.queue.try_recv().unwrap();
        assert_eq!(
            readings.accept_page(&mut page(2, 3), start + STALL_TIMEOUT),
            PageOutcome::Next(3)
        );
        let full = start + STALL_TIMEOUT;
        assert_eq!(readings.accept_page(&mut page(3, 4), full), PageOutcome::Full(3));
        assert_eq!(
            readings.accept_page(&mut page(3, 4), full + STALL_TIMEOUT),
            PageOutcome::Over
        );
        assert_eq!(pages.end_reason(), TOO_SLOW);
        assert_eq!(
            pages.queue.try_recv().unwrap().lines[0].seq,
            2,
            "buffered pages are still delivered"
        );
        assert_eq!(readings.len(), 0);
    }

    #[test]
    fn a_page_for_a_reader_that_left_ends_the_reading() {
        let (mut readings, pages) = reading(0);
        drop(pages);
        assert_eq!(readings.accept_page(&mut page(0, 1), Instant::now()), PageOutcome::Over);
        assert_eq!(readings.accept_page(&mut page(0, 1), Instant::now()), PageOutcome::Over);
    }

    /// Sessions that expect a pod of an Agent.
    fn with_pod() -> (PodSessions, NamespacedName, LivePod) {
        let (loops, _changed) = PodSessions::new();
        let agent = NamespacedName::new("ns", "a");
        let pod = LivePod {
            uid: "p".into(),
            epoch: 1,
        };
        loops.expect_pod(
            (&agent, "uid"),
            pod.clone(),
            LoopTotals::default(),
            Directives::default(),
        );
        (loops, agent, pod)
    }

    #[tokio::test(start_paused = true)]
    async fn of_all_pages_that_a_pod_sends_to_a_slow_reader_one_waits() {
        let (loops, agent, pod) = with_pod();
        let (reading, mut pages) = loops.open_subscription(&agent, EventSubscription::default()).unwrap();
        let clock: WallClock = Arc::new(|| Timestamp::UNIX_EPOCH);
        let send = |after| {
            let page = EventsPage {
                reading,
                ..page(after, after + 1)
            };
            Box::pin(deliver_page(&loops, (&agent, &pod), page, &clock))
        };
        let next = |answer: Result<EventsResponse, PodRefusal>| answer.unwrap().after;
        let room = i64::try_from(ROOM).unwrap();
        for after in 0..room {
            assert_eq!(next(send(after).await), Some(after + 1));
        }
        let mut waiting = Vec::new();
        for _ in 0..100 {
            let mut attempt = send(room);
            match futures::poll!(&mut attempt) {
                Poll::Pending => waiting.push(attempt),
                Poll::Ready(answer) => assert_eq!(next(answer), Some(room), "to be sent again"),
            }
        }
        assert_eq!(waiting.len(), 1);
        pages.queue.recv().await.unwrap();
        assert_eq!(next(waiting.remove(0).await), Some(room + 1), "there was room for it");
        // One that is no longer wanted gives its place to the next.
        let mut first = send(room + 1);
        assert!(futures::poll!(&mut first).is_pending());
        assert!(futures::poll!(send(room + 1)).is_ready());
        drop(first);
        let began = Instant::now();
        assert_eq!(next(send(room + 1).await), Some(room + 1));
        assert!((ROOM_WAIT..ROOM_WAIT + 2 * ROOM_LOOK).contains(&began.elapsed()));
    }

    /// A page of one line with a note of this many bytes.
    fn long_page(after: i64, bytes: usize) -> EventsPage {
        let mut page = page(after, after + 1);
        page.events[0].note = "x".repeat(bytes);
        page
    }

    /// Passes on pages of one line each until there is no room; the bytes that wait then.
    fn bytes_that_wait(bytes: usize) -> usize {
        let (mut readings, mut pages) = reading(0);
        let mut waiting = (0..).map(|after| long_page(after, bytes));
        let refused = waiting.find_map(|mut page| {
            let outcome = readings.accept_page(&mut page, Instant::now());
            matches!(outcome, PageOutcome::Full(_)).then_some(page)
        });
        let queue = std::iter::from_fn(|| pages.queue.try_recv().ok());
        let held = queue.map(|page| page.lines.iter().map(EventLine::bytes).sum::<usize>());
        // The page that waits for room, too.
        held.sum::<usize>() + refused.unwrap().bytes()
    }

    #[test]
    fn what_all_subscriptions_hold_is_bounded_whatever_pods_send() {
        let bare = EventLine::default().bytes();
        let most = [1, PAGE_BYTES - bare, PAGE_BYTES, MAX_BODY_BYTES].map(bytes_that_wait);
        assert!(most[1] > 3 * PAGE_BYTES - 100, "three pages: {most:?}");
        let one = most.into_iter().max().unwrap();
        assert!(one <= ROOM_BYTES + MAX_BODY_BYTES + 2 * bare, "{most:?}");
        assert!(READINGS_OF_ALL * one <= 129 * 1024 * 1024, "{}", READINGS_OF_ALL * one);
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_that_is_too_long_is_accepted_in_parts_and_keeps_its_room_until_the_reader_has_all_of_it() {
        let (loops, agent, pod) = with_pod();
        let loops = Arc::new(loops);
        let clock: WallClock = Arc::new(|| Timestamp::UNIX_EPOCH);
        let send = async |reading, after| {
            // Two of its lines are a page.
            let mut page = EventsPage {
                reading,
                ..page(after, after + 3)
            };
            let half = PAGE_BYTES / 2 - EventLine::default().bytes();
            page.events.iter_mut().for_each(|line| line.note = "x".repeat(half));
            deliver_page(&loops, (&agent, &pod), page, &clock).await.unwrap().after
        };
        let reading = EventSubscription::default();
        let (opened, first) = tokio::join!(subscribe(&loops, &agent, reading), send(1, 0));
        let mut events = opened.unwrap();
        assert_eq!(first, Some(2));
        assert_eq!(send(1, 2).await, Some(4));
        assert_eq!(send(1, 4).await, Some(4), "no room");
        let mut next = async || match events.next().await {
            Some(EventStreamItem::Line(line)) => line.seq,
            other => panic!("{other:?}"),
        };
        assert_eq!((next().await, next().await), (1, 2));
        assert_eq!(
            send(1, 4).await,
            Some(4),
            "the reader may not have written the last line yet"
        );
        assert_eq!(next().await, 3);
        assert_eq!(send(1, 4).await, Some(6));
    }

    fn fragment(offset: u64) -> Arc<TextFragment> {
        Arc::new(TextFragment {
            offset,
            text: "x".into(),
            ..TextFragment::default()
        })
    }

    #[test]
    fn a_slow_reader_loses_text_but_no_page_and_a_reader_without_text_receives_none() {
        let (mut readings, mut without) = reading(0);
        let mut slow = readings.open(EventSubscription {
            id: 2,
            text: true,
            ..EventSubscription::default()
        });
        assert_eq!(
            readings.requested().iter().map(|one| one.text).collect::<Vec<_>>(),
            [false, true]
        );
        for offset in 0..20 {
            readings.pass_text(&fragment(offset));
        }
        let mut to_slow = EventsPage {
            reading: 2,
            ..page(0, 1)
        };
        assert_eq!(readings.accept_page(&mut to_slow, Instant::now()), PageOutcome::Next(1));
        assert_eq!(slow.queue.try_recv().unwrap().lines.len(), 1);
        let fragments = slow.fragments.as_mut().unwrap();
        let got = std::iter::from_fn(|| fragments.try_recv().ok()).map(|fragment| fragment.offset);
        assert_eq!(got.collect::<Vec<_>>(), (0..16).collect::<Vec<_>>(), "16 wait");
        readings.pass_text(&fragment(20));
        assert_eq!(fragments.try_recv().unwrap().offset, 20, "and there is room again");
        assert!(without.fragments.is_none());
        assert!(without.queue.try_recv().is_err());
    }
}
