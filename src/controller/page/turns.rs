//! Follows the events of the loops that readers of the page look at, once for all readers.
//!
//! An Agent is followed while its turns are shown, and a little longer. The events are those of the link's event stream
//! without messages: names, numbers and short notes.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep};

use crate::api::NamespacedName;
use crate::controller::event_subscriptions;
use crate::controller::pod_sessions::PodSessions;
use crate::link::events::{ClientRefusal, EventStreamItem, EventSubscription, LATEST};
use crate::page::recent::{AgentHistory, MAX_LINES, RecentEvents};

/// Most Agents that are followed. Fewer than the link allows readers, so that others can read too.
pub const MAX_FOLLOWED: usize = 64;
/// Most Agents whose turns one page shows.
pub const MAX_WITH_TURNS: usize = 20;
/// How long an Agent is followed after its turns were shown last.
const LINGER: Duration = Duration::from_secs(30);
/// How long an Agent without a pod is left alone.
const PAUSE: Duration = Duration::from_secs(5);

#[derive(Default)]
struct FollowedLoops {
    tasks: JoinSet<()>,
    agents: HashMap<NamespacedName, FollowedLoop>,
}

struct FollowedLoop {
    shown: Instant,
    task: AbortHandle,
}

pub(super) struct TurnFollower {
    loops: Arc<PodSessions>,
    recent: Arc<RecentEvents>,
    followed: Mutex<FollowedLoops>,
}

impl TurnFollower {
    pub(super) fn new(loops: Arc<PodSessions>) -> Self {
        Self {
            loops,
            recent: Arc::default(),
            followed: Mutex::default(),
        }
    }

    /// What an Agent did last, as far as it is known by now; `None` if no more Agents can be followed.
    pub(super) fn history(&self, agent: &NamespacedName) -> Option<AgentHistory> {
        let now = Instant::now();
        let mut followed = self.lock();
        if let Some(entry) = followed.agents.get_mut(agent) {
            entry.shown = now;
            return Some(self.recent.of(agent));
        }
        if followed.agents.len() >= MAX_FOLLOWED {
            return None;
        }
        let follow = follow(self.loops.clone(), self.recent.clone(), agent.clone());
        let task = followed.tasks.spawn(follow);
        followed.agents.insert(agent.clone(), FollowedLoop { shown: now, task });
        Some(AgentHistory::default())
    }

    /// Ends, at intervals, what has no viewers any more.
    pub(super) async fn end_unread(&self) -> Infallible {
        loop {
            sleep(LINGER).await;
            let now = Instant::now();
            let mut followed = self.lock();
            // Ends of tasks that were aborted.
            while followed.tasks.try_join_next().is_some() {}
            followed.agents.retain(|agent, entry| {
                let stays = now.duration_since(entry.shown) < LINGER;
                if !stays {
                    entry.task.abort();
                    self.recent.forget(agent);
                }
                stays
            });
        }
    }

    fn lock(&self) -> MutexGuard<'_, FollowedLoops> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the events of an Agent until the task is aborted.
async fn follow(loops: Arc<PodSessions>, recent: Arc<RecentEvents>, agent: NamespacedName) {
    loop {
        // Without a pod, or with too many readers: what is known stays.
        let _ = read(&loops, &recent, &agent).await;
        sleep(PAUSE).await;
    }
}

async fn read(loops: &Arc<PodSessions>, recent: &RecentEvents, agent: &NamespacedName) -> Result<(), ClientRefusal> {
    let subscribe = |after| {
        let wanted = EventSubscription {
            after,
            ..EventSubscription::default()
        };
        event_subscriptions::subscribe(loops, agent, wanted)
    };
    let mut latest = subscribe(LATEST).await?;
    let Some(EventStreamItem::Start(newest)) = latest.next().await else {
        return Ok(());
    };
    drop(latest);
    let mut after = recent.newest(agent);
    let oldest = newest.saturating_sub(i64::from(MAX_LINES)).max(0);
    if !(oldest..=newest).contains(&after) {
        // A gap, or an Agent that was created again: its numbers begin again.
        recent.forget(agent);
        after = oldest;
    }
    let mut events = subscribe(after).await?;
    while let Some(item) = events.next().await {
        if let EventStreamItem::Line(line) = item {
            recent.add(agent.clone(), *line);
        }
    }
    Ok(())
}
