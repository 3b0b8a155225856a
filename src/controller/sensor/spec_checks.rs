//! Checks the specs of Sensors beside the watches: one at a time, and one of each namespace in turn.
//!
//! A check takes up to a second of CPU time, and users who may write Sensors decide how many there are. They delay
//! further Sensors of the same namespace; a Sensor of another namespace waits for one check of each namespace that has
//! some waiting. Neither the watches nor the readiness of a new leader wait for checks.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::registry::SensorRegistry;
use super::validate::validate;
use crate::api::{NamespacedName, Sensor};

/// Sensors that wait for a check. Pure.
#[derive(Debug, Default)]
pub(super) struct SpecCheckQueue {
    waiting: HashMap<String, VecDeque<NamespacedName>>,
    /// Those in [`Self::waiting`]: each waits once.
    known: HashSet<NamespacedName>,
    /// Namespaces with waiting Sensors, in the order of their turns.
    turns: VecDeque<String>,
}

impl SpecCheckQueue {
    /// Adds a Sensor at the end of its namespace's queue, unless it is in it.
    pub(super) fn push(&mut self, key: NamespacedName) {
        if !self.known.insert(key.clone()) {
            return;
        }
        let of_namespace = self.waiting.entry(key.namespace.clone()).or_default();
        if of_namespace.is_empty() {
            self.turns.push_back(key.namespace.clone());
        }
        of_namespace.push_back(key);
    }

    /// The first Sensor of the namespace whose turn it is.
    pub(super) fn pop(&mut self) -> Option<NamespacedName> {
        let namespace = self.turns.pop_front()?;
        let of_namespace = self.waiting.get_mut(&namespace)?;
        let next = of_namespace.pop_front();
        if of_namespace.is_empty() {
            self.waiting.remove(&namespace);
        } else {
            self.turns.push_back(namespace);
        }
        next.inspect(|key| {
            self.known.remove(key);
        })
    }
}

impl SensorRegistry {
    /// Checks specs. Never returns.
    pub(super) async fn check_specs(&self) {
        loop {
            let Some(sensor) = self.next_unchecked() else {
                self.unchecked.notified().await;
                continue;
            };
            let checked = Arc::clone(&sensor);
            let problem = tokio::task::spawn_blocking(move || validate(&checked.spec)).await;
            // It is not awaited to its end only while this process stops: a release ends with a panic.
            let problem =
                problem.unwrap_or_else(|_| Some("spec: an expression could not be checked; make it simpler".into()));
            self.spec_checked(&sensor, problem);
        }
    }

    /// The next Sensor to check, as it was last seen. Those that are gone, or were checked meanwhile, take no turn.
    pub(super) fn next_unchecked(&self) -> Option<Arc<Sensor>> {
        let mut state = self.lock();
        while let Some(key) = state.checks.pop() {
            let known = state.index.sensor(&key).filter(|known| known.is_pending());
            if let Some(known) = known.filter(|known| known.object.metadata.deletion_timestamp.is_none()) {
                return Some(Arc::clone(&known.object));
            }
        }
        None
    }

    /// Takes the verdict on what [`Self::next_unchecked`] gave.
    pub(super) fn spec_checked(&self, sensor: &Arc<Sensor>, problem: Option<String>) {
        self.change(|index| index.sensor_checked(sensor, problem));
    }
}
