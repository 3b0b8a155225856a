//! Reads what this process already has about a Sensor: the index, its child objects, the memory of the reconciler, the
//! session of its pod, the queue of replacements and the clocks. Sends no request and decides nothing.

use std::collections::BTreeSet;

use jiff::Timestamp;
use kube::ResourceExt;
use tokio::time::Instant;

use super::children::SensorChildren;
use super::index::{IndexedSensor, SensorReceiver};
use super::reconcile_state::SensorReconcileState;
use super::registry::SensorRegistry;
use super::rollout::ReplacementQueue;
use crate::api::NamespacedName;
use crate::api::sensor::SensorStatus;
use crate::controller::delivery_relay::SensorSession;
use crate::controller::runtime::status_writer::{LastStatus, last_status};

/// The first half of an observation.
pub(super) struct SensorSnapshot {
    pub(super) key: NamespacedName,
    pub(super) now: Timestamp,
    /// `now` on the monotonic clock.
    pub(super) at: Instant,
    pub(super) known: IndexedSensor,
    pub(super) receivers: Vec<SensorReceiver>,
    pub(super) absent: Vec<String>,
    pub(super) agents: BTreeSet<String>,
    pub(super) memory: SensorReconcileState,
    pub(super) last: LastStatus<SensorStatus>,
    /// Its child objects; `None` until all kinds have been listed.
    pub(super) children: Option<SensorChildren>,
    /// The session of its own pod.
    pub(super) session: Option<SensorSession>,
    /// The turns of running pods that wait to be replaced.
    pub(super) turns: ReplacementQueue,
}

impl SensorRegistry {
    /// `None` if the Sensor is gone or its namespace has not been listed completely.
    pub(super) fn snapshot(&self, key: &NamespacedName) -> Option<SensorSnapshot> {
        let (now, at) = ((self.setup.clock)(), Instant::now());
        let session = self.setup.relay.session(key);
        let mut state = self.lock();
        if !state.index.is_whole(&key.namespace) {
            return None;
        }
        let known = state.index.sensor(key)?.clone();
        let uid = known.object.uid().unwrap_or_default();
        let fresh = || SensorReconcileState::new(&uid, now, at);
        let memory = state.memory.entry(key.clone()).or_insert_with(fresh);
        // A Sensor that was recreated under the same name starts without state.
        if memory.uid != uid {
            *memory = fresh();
        }
        let memory = memory.clone();
        Some(SensorSnapshot {
            key: key.clone(),
            now,
            at,
            receivers: state.index.receivers(&known),
            absent: state.index.absent(&known),
            agents: state.index.agent_uids(&key.namespace),
            last: last_status(
                known.object.resource_version(),
                known.object.status.as_ref(),
                memory.written.as_ref(),
            ),
            children: state.children.of(key),
            session,
            turns: state.turns,
            known,
            memory,
        })
    }
}
