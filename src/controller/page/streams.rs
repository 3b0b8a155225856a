//! The open streams of the page: how many there may be, in all and per user, and which one ends to make room for the first
//! stream of another tenant.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// Streams at a time.
pub const MAX_READERS: usize = 32;
/// Streams of one user at a time, in all sessions.
pub const MAX_READERS_OF_ONE: usize = 4;

struct OpenStream {
    user: String,
    displaced: CancellationToken,
}

#[derive(Default)]
struct OpenStreams {
    /// By their numbers: the first is the oldest.
    streams: BTreeMap<u64, OpenStream>,
    last: u64,
}

/// Why there is no place for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StreamRefusal {
    #[error(
        "you have {MAX_READERS_OF_ONE} live pages already, which is the most for one user; close one and reload this page"
    )]
    OfUser,
    #[error("all {MAX_READERS} live pages are in use; reload this page to see the current state, or retry later")]
    InTotal,
}

/// Who shares a part of what all users of the page share: the service accounts of a namespace, of which it can have any number,
/// and every other user alone.
pub(super) fn tenant(user: &str) -> &str {
    const ACCOUNTS: &str = "system:serviceaccount:";
    let namespace = user.strip_prefix(ACCOUNTS).and_then(|account| account.split_once(':'));
    namespace.map_or(user, |(namespace, _)| {
        user.get(..ACCOUNTS.len() + namespace.len()).unwrap_or(user)
    })
}

/// All open streams.
#[derive(Default)]
pub(super) struct StreamTable(Mutex<OpenStreams>);

/// The place of one stream, until it is dropped.
pub(super) struct StreamPlace {
    table: Arc<StreamTable>,
    number: u64,
    /// Another tenant has the place now.
    pub(super) displaced: CancellationToken,
}

impl StreamTable {
    /// A place for a stream of this user. If all are taken, the tenant who has the most loses the oldest one, provided that the tenant of
    /// this user has fewer also with the new one: so no tenant can hold all places, and two never take them from each other in turn.
    pub(super) fn open(self: &Arc<Self>, user: &str) -> Result<StreamPlace, StreamRefusal> {
        let mut open = self.lock();
        let own = open.streams.values().filter(|stream| stream.user == user).count();
        if own >= MAX_READERS_OF_ONE {
            return Err(StreamRefusal::OfUser);
        }
        if open.streams.len() >= MAX_READERS {
            let same = |stream: &&OpenStream| tenant(&stream.user) == tenant(user);
            let own = open.streams.values().filter(same).count();
            let most = open.oldest_of_who_has_most();
            let (_, oldest) = most.filter(|(most, _)| *most > own + 1).ok_or(StreamRefusal::InTotal)?;
            if let Some(stream) = open.streams.remove(&oldest) {
                stream.displaced.cancel();
            }
        }
        open.last += 1;
        let (number, displaced) = (open.last, CancellationToken::new());
        let stream = OpenStream {
            user: user.to_owned(),
            displaced: displaced.clone(),
        };
        open.streams.insert(number, stream);
        Ok(StreamPlace {
            table: self.clone(),
            number,
            displaced,
        })
    }

    fn lock(&self) -> MutexGuard<'_, OpenStreams> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenStreams {
    /// How many streams the user has who has the most, and the oldest of them; of several users, the one with the oldest stream.
    fn oldest_of_who_has_most(&self) -> Option<(usize, u64)> {
        let mut users: HashMap<&str, (usize, Reverse<u64>)> = HashMap::new();
        for (number, stream) in &self.streams {
            users.entry(tenant(&stream.user)).or_insert((0, Reverse(*number))).0 += 1;
        }
        let (count, Reverse(oldest)) = users.into_values().max()?;
        Some((count, oldest))
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        self.table.lock().streams.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Users who hold `each` places each.
    fn hold(table: &Arc<StreamTable>, users: usize, each: usize) -> Vec<Vec<StreamPlace>> {
        let of_user = |user: usize| {
            let name = format!("user-{user}");
            (0..each).map(|_| table.open(&name).unwrap()).collect()
        };
        (0..users).map(of_user).collect()
    }

    fn refusal(table: &Arc<StreamTable>, user: &str) -> StreamRefusal {
        table.open(user).map(|_| ()).unwrap_err()
    }

    fn displaced(places: &[StreamPlace]) -> Vec<bool> {
        places.iter().map(|place| place.displaced.is_cancelled()).collect()
    }

    #[test]
    fn streams_are_bounded_for_each_user_until_one_ends() {
        let table = Arc::default();
        let mut held = hold(&table, 1, MAX_READERS_OF_ONE - 1);
        held[0].push(table.open("user-0").unwrap());
        assert_eq!(refusal(&table, "user-0"), StreamRefusal::OfUser);
        assert!(table.open("another").is_ok());
        held[0].pop();
        let again = table.open("user-0").unwrap();
        assert_eq!(refusal(&table, "user-0"), StreamRefusal::OfUser);
        assert!(!again.displaced.is_cancelled());
    }

    #[test]
    fn with_one_free_slot_no_stream_is_closed_and_without_one_the_oldest_of_the_heaviest_user_is() {
        let table = Arc::default();
        let mut held = hold(&table, MAX_READERS / MAX_READERS_OF_ONE, MAX_READERS_OF_ONE);
        held[0].pop();
        let first = table.open("a").unwrap();
        assert!(held.iter().all(|places| displaced(places).iter().all(|is| !is)));
        // The first user has three now, so that one of the others who have four loses its oldest.
        let second = table.open("b").unwrap();
        assert_eq!(displaced(&held[0]), [false; 3]);
        assert_eq!(displaced(&held[1]), [true, false, false, false]);
        assert!(held[2..].iter().all(|places| displaced(places) == [false; 4]));
        assert!([&first, &second].iter().all(|place| !place.displaced.is_cancelled()));
        assert_eq!(
            refusal(&table, "user-1"),
            StreamRefusal::InTotal,
            "it is not taken back from who has one more"
        );
    }

    #[test]
    fn a_slot_is_reassigned_only_from_a_user_who_has_two_more() {
        let table = Arc::default();
        let held = hold(&table, MAX_READERS / 2, 2);
        let of_new = table.open("new").unwrap();
        assert_eq!(displaced(&held[0]), [true, false]);
        for (user, why) in [
            ("new", "the others have two, as this one would"),
            ("user-0", "nor is the lost one taken back"),
        ] {
            assert_eq!(refusal(&table, user), StreamRefusal::InTotal, "{why}");
        }
        let of_newer = table.open("newer").unwrap();
        assert_eq!(displaced(&held[1]), [true, false]);
        assert!([of_new, of_newer].iter().all(|place| !place.displaced.is_cancelled()));
    }

    #[test]
    fn service_accounts_of_a_namespace_share_its_part() {
        let table = Arc::<StreamTable>::default();
        let account = |number| format!("system:serviceaccount:team-a:robot-{number}");
        let mut held: Vec<_> = (0..MAX_READERS - 1)
            .map(|number| table.open(&account(number)).unwrap())
            .collect();
        held.push(table.open("ann").unwrap());
        assert_eq!(refusal(&table, &account(MAX_READERS)), StreamRefusal::InTotal);
        assert_eq!(
            refusal(&table, "system:serviceaccount:team-a:one-more"),
            StreamRefusal::InTotal
        );
        let _other = table.open("system:serviceaccount:team-b:robot-1").unwrap();
        assert!(held[0].displaced.is_cancelled() && !held[MAX_READERS - 1].displaced.is_cancelled());
        let names = [
            "ann",
            "system:serviceaccount:a",
            "system:serviceaccount:a:b",
            "system:serviceaccount:a:c",
        ];
        let tenants = names.map(tenant);
        assert_eq!(
            tenants,
            [
                "ann",
                "system:serviceaccount:a",
                "system:serviceaccount:a",
                "system:serviceaccount:a"
            ]
        );
    }

    #[test]
    fn users_with_one_stream_each_lose_none() {
        let table = Arc::default();
        let mut held = hold(&table, MAX_READERS, 1);
        assert_eq!(refusal(&table, "late"), StreamRefusal::InTotal);
        assert!(held.iter().all(|places| displaced(places) == [false]));
        held.pop();
        assert!(table.open("late").is_ok());
    }

    #[test]
    fn a_displaced_stream_that_ends_frees_no_place_of_another() {
        let table = Arc::default();
        let mut held = hold(&table, MAX_READERS / MAX_READERS_OF_ONE, MAX_READERS_OF_ONE);
        let _new = table.open("new").unwrap();
        assert_eq!(displaced(&held[0]), [true, false, false, false]);
        held[0].remove(0);
        assert_eq!(table.lock().streams.len(), MAX_READERS);
    }
}
