//! Follows the events of the loops that readers of the page look at, once for all readers.
//!
//! An Agent is followed while its turns are shown, and a little longer. The events are those of the link's event stream
//! without messages: names, numbers and short notes. An Agent that was created again under its name is another one. If all
//! places are taken, the namespace that has the most gives way.

use std::cmp::Reverse;
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

/// Maximum number of Agents that are followed. Fewer than the link allows readers, so that others can read too.
pub const MAX_FOLLOWED: usize = 64;
/// Maximum number of Agents whose turns one page shows.
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
    /// Uid of the Agent.
    uid: String,
    shown: Instant,
    /// What it did, and nothing of another Agent.
    recent: Arc<RecentEvents>,
    task: AbortHandle,
}

impl Drop for FollowedLoop {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) struct TurnFollower {
    loops: Arc<PodSessions>,
    followed: Mutex<FollowedLoops>,
}

impl TurnFollower {
    pub(super) fn new(loops: Arc<PodSessions>) -> Self {
        Self {
            loops,
            followed: Mutex::default(),
        }
    }

    /// What the Agent with this uid did last, as far as it is known by now; `None` if no more Agents can be followed.
    pub(super) fn history(&self, agent: &NamespacedName, uid: &str) -> Option<AgentHistory> {
        let now = Instant::now();
        let mut followed = self.lock();
        let known = followed.agents.get_mut(agent);
        // Otherwise it takes the place of the earlier Agent of its name.
        let has_place = known.is_some();
        if let Some(entry) = known.filter(|entry| entry.uid == uid) {
            entry.shown = now;
            return Some(entry.recent.of(agent));
        }
        if !has_place && !followed.make_room(&agent.namespace) {
            return None;
        }
        let recent = Arc::<RecentEvents>::default();
        let follow = follow(self.loops.clone(), recent.clone(), (agent.clone(), uid.to_owned()));
        let entry = FollowedLoop {
            uid: uid.to_owned(),
            shown: now,
            recent,
            task: followed.tasks.spawn(follow),
        };
        followed.agents.insert(agent.clone(), entry);
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
            followed
                .agents
                .retain(|_, entry| now.duration_since(entry.shown) < LINGER);
        }
    }

    fn lock(&self) -> MutexGuard<'_, FollowedLoops> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number of followed Agents of a namespace, and the one of them that was shown longest ago.
type FollowedShare<'a> = (usize, Reverse<(Instant, &'a NamespacedName)>);

impl FollowedLoops {
    /// Whether an Agent of this namespace can be followed. If all places are taken, the namespace that has the most loses the
    /// Agent that was shown longest ago, provided that it has more than this one also with the new one: so the pages of one tenant
    /// cannot hold all places, and two never take them from each other in turn.
    fn make_room(&mut self, namespace: &str) -> bool {
        if self.agents.len() < MAX_FOLLOWED {
            return true;
        }
        let mut namespaces: HashMap<&str, FollowedShare<'_>> = HashMap::new();
        for (agent, entry) in &self.agents {
            let shown = Reverse((entry.shown, agent));
            let (count, oldest) = namespaces.entry(&agent.namespace).or_insert((0, shown));
            *count += 1;
            *oldest = (*oldest).max(shown);
        }
        let own = namespaces.get(namespace).map_or(0, |(count, _)| *count);
        let busiest = namespaces.into_values().max().filter(|(count, _)| *count > own + 1);
        let Some(gives_way) = busiest.map(|(_, Reverse((_, agent)))| agent.clone()) else {
            return false;
        };
        self.agents.remove(&gives_way);
        true
    }
}

/// Reads the events of an Agent until the task is aborted.
async fn follow(loops: Arc<PodSessions>, recent: Arc<RecentEvents>, agent: (NamespacedName, String)) {
    loop {
        // Without a pod, or with too many readers: what is known stays.
        let _ = read(&loops, &recent, (&agent.0, &agent.1)).await;
        sleep(PAUSE).await;
    }
}

async fn read(
    loops: &Arc<PodSessions>,
    recent: &RecentEvents,
    (agent, uid): (&NamespacedName, &str),
) -> Result<(), ClientRefusal> {
    // Before and after each subscription: a session is followed by those of later Agents of the name only.
    let is_of_agent = || loops.owner(agent).as_deref() == Some(uid);
    let subscribe = |after| {
        let wanted = EventSubscription {
            after,
            ..EventSubscription::default()
        };
        event_subscriptions::subscribe(loops, agent, wanted)
    };
    if !is_of_agent() {
        return Ok(());
    }
    let mut latest = subscribe(LATEST).await?;
    let Some(EventStreamItem::Start(newest)) = latest.next().await else {
        return Ok(());
    };
    drop(latest);
    let mut after = recent.newest(agent);
    let oldest = newest.saturating_sub(i64::from(MAX_LINES)).max(0);
    if !(oldest..=newest).contains(&after) {
        // A gap, or a journal that is a new one: its numbers begin again.
        recent.forget(agent);
        after = oldest;
    }
    let mut events = subscribe(after).await?;
    if !is_of_agent() {
        return Ok(());
    }
    while let Some(item) = events.next().await {
        if let EventStreamItem::Line(line) = item {
            recent.add(agent.clone(), *line);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use pretty_assertions::assert_eq;
    use tokio::sync::watch;

    use super::*;
    use crate::controller::pod_sessions::LivePod;
    use crate::link::events::{EventLine, EventsPage};
    use crate::link::messages::{Directives, LoopTotals};

    fn follower() -> TurnFollower {
        TurnFollower::new(Arc::new(PodSessions::new().0))
    }

    fn key(namespace: &str, number: usize) -> NamespacedName {
        NamespacedName::new(namespace, number.to_string())
    }

    fn count(follower: &TurnFollower, namespace: &str) -> usize {
        let loops = follower.lock();
        loops.agents.keys().filter(|agent| agent.namespace == namespace).count()
    }

    #[tokio::test(start_paused = true)]
    async fn the_pages_of_one_namespace_give_way_to_those_of_another() {
        let follower = follower();
        let seen = |namespace: &str, number| follower.history(&key(namespace, number), "uid").is_some();
        for number in 0..MAX_FOLLOWED - 1 {
            assert!(seen("team-a", number), "{number}");
        }
        assert!(seen("team-b", 0));
        assert_eq!(
            (count(&follower, "team-a"), count(&follower, "team-b")),
            (MAX_FOLLOWED - 1, 1),
            "no place is lost when the last one is taken"
        );
        assert!(!seen("team-a", MAX_FOLLOWED), "another one of the same namespace");
        tokio::time::advance(Duration::from_secs(1)).await;
        // All but one are shown again.
        for number in (0..MAX_FOLLOWED - 1).filter(|number| *number != 7) {
            assert!(seen("team-a", number), "{number}");
        }
        assert!(seen("team-c", 0));
        assert_eq!(count(&follower, "team-a"), MAX_FOLLOWED - 2);
        assert!(
            !seen("team-a", 7),
            "the one that was shown longest ago, and it is not taken back"
        );
        // Until others have as many.
        for number in 1..MAX_FOLLOWED {
            seen("team-c", number);
        }
        let counts = ["team-a", "team-b", "team-c"].map(|namespace| count(&follower, namespace));
        assert_eq!(counts, [32, 1, 31]);
    }

    /// A pod of an Agent, whose journal has one line.
    struct PodHarness {
        pod: LivePod,
        directives: watch::Receiver<Directives>,
        note: &'static str,
    }

    impl PodHarness {
        fn expect(loops: &PodSessions, agent: &NamespacedName, uid: &str, note: &'static str) -> Self {
            let pod = LivePod {
                uid: format!("pod of {uid}"),
                epoch: 1,
            };
            loops.expect_pod((agent, uid), pod.clone(), LoopTotals::default(), Directives::default());
            let (_, directives) = loops.attach(agent, &pod, Timestamp::UNIX_EPOCH).unwrap();
            Self { pod, directives, note }
        }

        /// Sends what the subscriptions ask for.
        fn serve(&self, loops: &PodSessions, agent: &NamespacedName) {
            let readings = self.directives.borrow().readings.clone();
            for reading in readings {
                let line = EventLine {
                    seq: 1,
                    event: "task:started".into(),
                    note: self.note.into(),
                    ..EventLine::default()
                };
                let is_latest = reading.after == LATEST;
                let mut page = EventsPage {
                    epoch: 1,
                    reading: reading.id,
                    after: reading.after,
                    next: if is_latest { LATEST } else { 1 },
                    newest: 1,
                    events: if is_latest { vec![] } else { vec![line] },
                };
                loops
                    .receive_page(agent, &self.pod, &mut page, Timestamp::UNIX_EPOCH)
                    .unwrap();
            }
        }
    }

    /// The notes that are known of an Agent after a while in which `pod` answers.
    async fn notes(follower: &TurnFollower, agent: &NamespacedName, uid: &str, pod: &PodHarness) -> Vec<String> {
        for _ in 0..100 {
            follower.history(agent, uid);
            pod.serve(&follower.loops, agent);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let known = follower.history(agent, uid).unwrap().events;
        known.into_iter().map(|event| event.note).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_was_created_again_under_its_name_has_turns_of_its_own() {
        let follower = follower();
        let agent = key("team-a", 1);
        let pod = PodHarness::expect(&follower.loops, &agent, "first", "of the first");
        assert_eq!(notes(&follower, &agent, "first", &pod).await, ["of the first"]);
        // The session is still that of the earlier pod.
        assert_eq!(notes(&follower, &agent, "second", &pod).await, [""; 0]);
        let pod = PodHarness::expect(&follower.loops, &agent, "second", "of the second");
        assert_eq!(notes(&follower, &agent, "second", &pod).await, ["of the second"]);
        assert_eq!(count(&follower, "team-a"), 1);
    }
}
