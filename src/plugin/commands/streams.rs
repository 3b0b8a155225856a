//! Commands that read the events of an Agent: logs, events, history.

use std::time::Duration;

use tokio::time::timeout;

use crate::api::NamespacedName;
use crate::link::events::EventLine;
use crate::plugin::arguments::{EventsArgs, HistoryArgs, LogsArgs};
use crate::plugin::failure::PluginError;
use crate::plugin::link::{EventCursor, FollowedEvents, LinkFailure, UserLink};
use crate::plugin::screens::event_lines::{EventPrinter, total_line};
use crate::plugin::screens::turns;
use crate::plugin::session::{PluginSession, Screen};

/// How long the next kept event may take; a later version may write events that this one does not get.
const NEXT_EVENT: Duration = Duration::from_secs(5);
/// How long a command that does not follow connects again. It then fails, so that incomplete output is not taken for all.
const RECONNECT_TIMEOUT: Duration = Duration::from_mins(1);
/// Events of a turn, more or less: how far `history` reads back for each turn.
const EVENTS_OF_A_TURN: i64 = 100;

pub(super) async fn logs(
    session: &PluginSession,
    arguments: &LogsArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let usage = session
        .agent(&arguments.name)
        .await?
        .status
        .and_then(|status| status.usage);
    let total = total_line(&usage.unwrap_or_default(), session.now());
    let agent = session.named(&arguments.name);
    let link = UserLink::open(session, &agent.namespace).await?;
    let newest = newest(&link, &agent).await?;
    let from = (newest - arguments.tail).max(0);
    let mut reader = EventReader::open(&link, &agent, (from, newest), (arguments.follow, false)).await?;
    let mut printer = EventPrinter::default();
    while let Some(event) = reader.next(screen).await? {
        if let Some(line) = printer.line(&event) {
            writeln!(screen.out, "{line}")?;
        }
    }
    writeln!(screen.out, "{total}")?;
    Ok(())
}

pub(super) async fn events(
    session: &PluginSession,
    arguments: &EventsArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let agent = session.named(&arguments.name);
    let link = UserLink::open(session, &agent.namespace).await?;
    let newest = newest(&link, &agent).await?;
    let mode = (arguments.follow, arguments.messages);
    let mut reader = EventReader::open(&link, &agent, (arguments.after, newest), mode).await?;
    while let Some(event) = reader.next(screen).await? {
        let text = serde_json::to_string(&event).map_err(|error| PluginError::Format(error.to_string()))?;
        writeln!(screen.out, "{text}")?;
    }
    Ok(())
}

pub(super) async fn history(
    session: &PluginSession,
    arguments: &HistoryArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let agent = session.named(&arguments.name);
    let link = UserLink::open(session, &agent.namespace).await?;
    let newest = newest(&link, &agent).await?;
    let max = usize::try_from(arguments.turns).unwrap_or(usize::MAX);
    let mut back = i64::from(arguments.turns) * EVENTS_OF_A_TURN;
    // Turns differ in length: if these events are of fewer turns, more are read.
    let rows = loop {
        let from = (newest - back).max(0);
        let mut reader = EventReader::open(&link, &agent, (from, newest), (false, false)).await?;
        let mut events = Vec::new();
        while let Some(event) = reader.next(screen).await? {
            events.push(event);
        }
        let rows = turns::rows(&events, max);
        if rows.len() >= max || from == 0 {
            break rows;
        }
        back = back.saturating_mul(8);
    };
    if !session.print_data(&rows, screen)? {
        write!(screen.out, "{}", turns::table(&rows, session.now()))?;
    }
    Ok(())
}

/// The number of the newest event.
pub(super) async fn newest(link: &UserLink<'_>, agent: &NamespacedName) -> Result<i64, LinkFailure> {
    let events = FollowedEvents::open(link, agent, EventCursor::Latest, false).await?;
    Ok(events.cursor())
}

/// Events up to the newest one at the start, or without an end.
pub(super) struct EventReader<'a> {
    events: Option<FollowedEvents<'a>>,
    newest: i64,
    follow: bool,
}

impl<'a> EventReader<'a> {
    pub(super) async fn open(
        link: &'a UserLink<'a>,
        agent: &NamespacedName,
        (after, newest): (i64, i64),
        (follow, messages): (bool, bool),
    ) -> Result<Self, LinkFailure> {
        let is_empty = after >= newest && !follow;
        let events = if is_empty {
            None
        } else {
            let after = EventCursor::After(after);
            Some(FollowedEvents::open(link, agent, after, messages).await?)
        };
        Ok(Self { events, newest, follow })
    }

    /// The next event; `None`: there are no more.
    pub(super) async fn next(&mut self, screen: &mut Screen<'_>) -> Result<Option<EventLine>, PluginError> {
        let Some(events) = &mut self.events else {
            return Ok(None);
        };
        let event = if self.follow {
            events.next().await?
        } else {
            let Ok(event) = timeout(RECONNECT_TIMEOUT, events.next_within(NEXT_EVENT)).await else {
                let reason = events.take_interruption().unwrap_or_else(|| "no response".into());
                let seconds = RECONNECT_TIMEOUT.as_secs();
                let reason = format!("the output is not complete after {seconds} s; last problem: {reason}");
                return Err(LinkFailure::Unreachable(reason).into());
            };
            let Some(event) = event? else {
                return Ok(None);
            };
            event
        };
        if let Some(reason) = events.take_interruption() {
            screen.note(&format!("connected again: {reason}"));
        }
        if !self.follow && event.seq >= self.newest {
            self.events = None;
        }
        Ok(Some(event))
    }
}
