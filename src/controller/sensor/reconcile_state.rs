//! What the reconciler remembers of a Sensor between two reconciles. A cache: losing it costs a few writes.

use std::collections::BTreeMap;

use jiff::Timestamp;
use tokio::time::Instant;

use super::apply::AppliedSteps;
use super::decide::SensorPlan;
use super::drift::DriftBaselines;
use super::publish::{Publication, PublishedSensorStatus};
use crate::api::sensor::{SensorStatus, SensorTotals};
use crate::controller::runtime::status_throttle::StatusThrottle;

#[derive(Clone, Debug)]
pub(super) struct SensorReconcileState {
    /// Uid of the Sensor; a new one of the same name starts with an empty memory.
    pub(super) uid: String,
    /// When it was first observed.
    pub(super) since: Instant,
    /// The status last written and its resource version, until the watch has caught up.
    pub(super) written: Option<(String, SensorStatus)>,
    /// Totals, as last counted, of receivers for which status has no room.
    pub(super) beyond: BTreeMap<String, SensorTotals>,
    pub(super) pace: StatusThrottle,
    /// Consecutive failed reconciles.
    pub(super) errors: u32,
    pub(super) pod_health: PodHealth,
    /// Consecutive reconciles that found an obstacle.
    pub(super) obstructed: u32,
    /// Its place in the [`ReplacementQueue`](super::rollout::ReplacementQueue).
    pub(super) place: Option<Instant>,
    /// The [`DriftBaselines`] of its child objects.
    pub(super) baselines: DriftBaselines,
}

/// Whether a Sensor's own pod works, as its receivers show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum PodHealth {
    /// Not computed yet.
    #[default]
    Unknown,
    /// It works, or the Sensor has none.
    Healthy,
    /// The message of the failure.
    Failing(String),
}

impl SensorReconcileState {
    pub(super) fn new(uid: &str, now: Timestamp, at: Instant) -> Self {
        Self {
            uid: uid.into(),
            since: at,
            written: None,
            beyond: BTreeMap::new(),
            pace: StatusThrottle::new(now),
            errors: 0,
            pod_health: PodHealth::Unknown,
            obstructed: 0,
            place: None,
            baselines: DriftBaselines::default(),
        }
    }

    /// Before the plan is carried out.
    pub(super) fn record_plan(&mut self, plan: &SensorPlan) {
        self.baselines.clone_from(&plan.objects.baselines);
    }

    /// After the plan was carried out, also if that failed halfway. `at`: the time of the reconcile.
    pub(super) fn record_applied(&mut self, applied: &AppliedSteps, at: Instant) {
        for object in &applied.objects {
            if let Some((kind, child)) = object.seen.child() {
                self.baselines.applied(kind, child, object.corrects.then_some(at));
            }
        }
    }

    /// Before the receivers are requested: their reconciles read [`Self::pod_health`].
    pub(super) fn record_status(&mut self, publication: &Publication) {
        self.obstructed = publication.obstructed;
        self.pod_health.clone_from(&publication.pod_health);
    }

    /// After the last step of a reconcile that has succeeded.
    pub(super) fn record_published(&mut self, published: PublishedSensorStatus, now: Timestamp) {
        self.errors = 0;
        let Some((version, computed)) = published.written else {
            return;
        };
        self.pace.record_write(now);
        self.beyond = computed.beyond;
        self.written = version.map(|version| (version, computed.status));
    }
}
