//! Which origins of tasks were served, and in which order: what the choice of the next task depends on besides the queue.
//!
//! Part of the snapshot, which is written with each record: origins are kept as numbers, and only the latest ones.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::TaskOrigin;
use agentloop_support::hash::sha256_u64;

/// Maximum number of origins that are kept. Of more, the one that was served longest ago counts as never served.
pub const MAX_SERVED: usize = 64;

/// Identifies an origin, however long its name is.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[serde(transparent)]
pub struct OriginKey(u64);

impl From<&TaskOrigin> for OriginKey {
    fn from(origin: &TaskOrigin) -> Self {
        let name = match origin {
            TaskOrigin::Spec => "",
            TaskOrigin::Sensor(name) | TaskOrigin::Request(name) => name,
        };
        Self(sha256_u64(format!("{}/{name}", origin.kind())))
    }
}

/// The origins whose last tasks were started, the one that has waited longest since then first.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(transparent)]
pub struct ServedOrigins {
    stalest_first: VecDeque<OriginKey>,
}

impl ServedOrigins {
    pub fn is_empty(&self) -> bool {
        self.stalest_first.is_empty()
    }

    pub fn has(&self, origin: OriginKey) -> bool {
        self.stalest_first.contains(&origin)
    }

    pub fn stalest_first(&self) -> impl Iterator<Item = OriginKey> {
        self.stalest_first.iter().copied()
    }

    /// A task of this origin was started. Returns the origin that is no longer kept.
    pub fn note(&mut self, origin: OriginKey) -> Option<OriginKey> {
        self.stalest_first.retain(|known| *known != origin);
        self.stalest_first.push_back(origin);
        let is_full = self.stalest_first.len() > MAX_SERVED;
        is_full.then(|| self.stalest_first.pop_front())?
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn user(number: usize) -> OriginKey {
        OriginKey::from(&TaskOrigin::Request(number.to_string()))
    }

    #[test]
    fn origins_with_the_same_name_are_different_if_their_kinds_are() {
        let same = || "same".to_owned();
        let keys = [
            TaskOrigin::Spec,
            TaskOrigin::Sensor(same()),
            TaskOrigin::Request(same()),
        ];
        let keys = keys.each_ref().map(OriginKey::from);
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
        assert_eq!(keys[1], OriginKey::from(&TaskOrigin::Sensor(same())));
    }

    #[rstest]
    #[case::as_many_as_are_kept(MAX_SERVED, true)]
    #[case::one_more(MAX_SERVED + 1, false)]
    fn the_origin_served_longest_ago_is_evicted_above_the_limit(#[case] served: usize, #[case] kept: bool) {
        let mut origins = ServedOrigins::default();
        let forgotten: Vec<_> = (0..served).filter_map(|number| origins.note(user(number))).collect();
        assert_eq!(origins.has(user(0)), kept);
        assert_eq!(forgotten, if kept { vec![] } else { vec![user(0)] });
        assert_eq!(origins.stalest_first().count(), MAX_SERVED);
    }

    #[test]
    fn an_origin_that_is_served_again_is_no_further_one() {
        let mut origins = ServedOrigins::default();
        for number in (0..MAX_SERVED).chain([0]) {
            assert_eq!(origins.note(user(number)), None);
        }
        assert_eq!(origins.stalest_first().next(), Some(user(1)));
        assert_eq!(origins.stalest_first().last(), Some(user(0)));
    }

    #[test]
    fn the_snapshot_has_a_number_for_each() {
        let mut origins = ServedOrigins::default();
        origins.note(user(1));
        let stored = serde_json::to_string(&origins).unwrap();
        assert!(stored.len() <= 22, "{stored}");
        assert_eq!(serde_json::from_str::<ServedOrigins>(&stored).unwrap(), origins);
    }
}
