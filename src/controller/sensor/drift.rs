//! Detects whether objects that the controller applied were changed by others. Pure.
//!
//! The API server records in `managedFields` which manager owns which field; a field that another manager changes
//! leaves our entry. So only our own entry is compared, and no list of fields is kept here. The baseline is the API
//! server's answer to our last apply: what a mutating webhook changes during the apply is not drift.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use tokio::time::Instant;

use super::children::{AppliedChild, ChildKind};
use super::pod;
use crate::controller::runtime::names::MANAGER;

/// Shortest time between two corrections of one object, so that a conflict with another controller does not become a
/// hot loop.
const PAUSE: Duration = Duration::from_secs(30);

/// Who owns the fields of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FieldOwnership {
    /// Hash of the fields that we own; `None`: we own none.
    ours: Option<String>,
    /// Whether another manager may have changed something after our last apply.
    touched: bool,
}

impl FieldOwnership {
    pub(super) fn of(entries: &[ManagedFieldsEntry]) -> Self {
        // The status is not part of what is applied.
        let of_spec = |entry: &&ManagedFieldsEntry| entry.subresource.as_deref() != Some("status");
        let (ours, others): (Vec<_>, Vec<_>) = entries.iter().filter(of_spec).partition(|entry| is_ours(entry));
        let time = |entry: &&ManagedFieldsEntry| entry.time.as_ref().map(|time| time.0);
        let last = |entries: &[&ManagedFieldsEntry]| entries.iter().filter_map(time).max();
        // Times are whole seconds, so an equal time may be later.
        let touched = ours.is_empty() || last(&others).is_some_and(|time| Some(time) >= last(&ours));
        let fields: Vec<_> = ours
            .iter()
            .map(|entry| entry.fields_v1.as_ref().map(|fields| &fields.0))
            .collect();
        Self {
            ours: (!ours.is_empty()).then(|| pod::hash(&fields)),
            touched,
        }
    }
}

fn is_ours(entry: &ManagedFieldsEntry) -> bool {
    entry.manager.as_deref() == Some(MANAGER)
}

/// The API server's answers to our last applies of the objects of one Sensor.
#[derive(Clone, Debug, Default)]
pub(super) struct DriftBaselines(BTreeMap<ChildKind, DriftBaseline>);

#[derive(Clone, Debug)]
struct DriftBaseline {
    uid: String,
    ours: Option<String>,
    /// When it was last corrected.
    corrected: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriftAction {
    /// Nothing: the object is as applied.
    None,
    /// Apply the object again.
    Now,
    /// Apply the object again, but not before this time has passed.
    Later(Duration),
}

impl DriftBaselines {
    /// Checks an object. `current`: its hash annotation matches the desired object. A current object that this leader
    /// has not applied becomes the baseline, unless another manager may have changed it.
    pub(super) fn check(&mut self, kind: ChildKind, child: &AppliedChild, current: bool, now: Instant) -> DriftAction {
        let known = self.0.get(&kind).filter(|known| known.uid == child.uid);
        let Some(known) = known else {
            if !current {
                return DriftAction::None;
            }
            if child.fields.touched {
                return DriftAction::Now;
            }
            self.applied(kind, child, None);
            return DriftAction::None;
        };
        if known.ours == child.fields.ours {
            return DriftAction::None;
        }
        let left = known
            .corrected
            .map_or(Duration::ZERO, |at| (at + PAUSE).saturating_duration_since(now));
        if left.is_zero() {
            DriftAction::Now
        } else {
            DriftAction::Later(left)
        }
    }

    /// Records the answer to an apply. `corrected`: the time, if the apply corrected a drift.
    pub(super) fn applied(&mut self, kind: ChildKind, child: &AppliedChild, corrected: Option<Instant>) {
        let before = self.0.get(&kind).filter(|known| known.uid == child.uid);
        let baseline = DriftBaseline {
            uid: child.uid.clone(),
            ours: child.fields.ours.clone(),
            corrected: corrected.or(before.and_then(|known| known.corrected)),
        };
        self.0.insert(kind, baseline);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn entry(manager: &str, subresource: &str, fields: &Value, second: u32) -> Value {
        json!({
            "manager": manager, "operation": "Update", "subresource": subresource, "fieldsV1": fields,
            "time": format!("2026-11-22T14:00:{second:02}Z"),
        })
    }

    fn child(entries: &[Value]) -> AppliedChild {
        let entries: Vec<ManagedFieldsEntry> = serde_json::from_value(json!(entries)).unwrap();
        AppliedChild {
            uid: "u".into(),
            owner: None,
            hash: None,
            edit: None,
            fields: FieldOwnership::of(&entries),
        }
    }

    fn ours(fields: &Value) -> Value {
        entry(MANAGER, "", fields, 10)
    }

    #[test]
    fn a_takeover_of_an_owned_field_is_corrected_and_an_additional_field_is_kept() {
        let (whole, part) = (json!({"f:replicas": {}, "f:template": {}}), json!({"f:template": {}}));
        let now = Instant::now();
        let mut baselines = DriftBaselines::default();
        baselines.applied(ChildKind::Set, &child(&[ours(&whole)]), None);
        let mut look = |entries: &[Value], later: u64| {
            baselines.check(ChildKind::Set, &child(entries), true, now + Duration::from_secs(later))
        };
        let scaled = [ours(&part), entry("kubectl", "scale", &json!({"f:replicas": {}}), 20)];
        assert_eq!(look(&scaled, 0), DriftAction::Now);
        let status = entry("kube-controller-manager", "status", &json!({"f:status": {}}), 20);
        assert_eq!(look(&[ours(&whole), status], 0), DriftAction::None);
        let annotated = entry("kubectl", "", &json!({"f:annotations": {}}), 20);
        assert_eq!(look(&[ours(&whole), annotated], 0), DriftAction::None);
        assert_eq!(look(&[], 0), DriftAction::Now, "our entry is gone too");
    }

    #[test]
    fn conflicting_changes_are_corrected_slowly() {
        let now = Instant::now();
        let mut baselines = DriftBaselines::default();
        baselines.applied(ChildKind::Policy, &child(&[ours(&json!({"f:a": {}}))]), Some(now));
        let changed = child(&[ours(&json!({}))]);
        let soon = now + Duration::from_secs(1);
        let left = Duration::from_secs(29);
        assert_eq!(
            baselines.check(ChildKind::Policy, &changed, true, soon),
            DriftAction::Later(left)
        );
        assert_eq!(
            baselines.check(ChildKind::Policy, &changed, true, now + PAUSE),
            DriftAction::Now
        );
        // An apply for another reason is not a correction and leaves the pause unchanged.
        baselines.applied(ChildKind::Policy, &child(&[ours(&json!({"f:b": {}}))]), None);
        assert_eq!(
            baselines.check(ChildKind::Policy, &changed, true, soon),
            DriftAction::Later(left)
        );
    }

    #[test]
    fn a_new_leader_reapplies_only_objects_last_changed_by_others() {
        let now = Instant::now();
        let fields = json!({"f:a": {}});
        let look =
            |entries: &[Value], current| DriftBaselines::default().check(ChildKind::Set, &child(entries), current, now);
        assert_eq!(look(&[ours(&fields)], true), DriftAction::None);
        assert_eq!(
            look(&[ours(&fields), entry("x", "", &fields, 9)], true),
            DriftAction::None
        );
        let touched = [ours(&fields), entry("x", "", &fields, 10)];
        assert_eq!(look(&touched, true), DriftAction::Now);
        assert_eq!(
            look(&touched, false),
            DriftAction::None,
            "it is applied in its turn anyway"
        );
    }
}
