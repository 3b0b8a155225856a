//! Which Agent receives from which Sensor, by namespace. Pure.
//!
//! A change returns the Agents whose terms and the Sensors whose status it affects; nothing else is recomputed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

use super::pod;
use super::validate::{is_checked_alike, selector};
use crate::api::{Agent, NamespacedName, Sensor};
use crate::link::sensor_messages::{SensorReport, SensorTerms};

/// The properties of an Agent that matter to its Sensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReceiverFacts {
    pub(super) uid: String,
    pub(super) labels: BTreeMap<String, String>,
    /// `spec.suspend`: it has no pod, by design.
    pub(super) suspended: bool,
    /// `spec.storage.ephemeral`: the record of received events is lost with its pod.
    pub(super) ephemeral: bool,
    pub(super) scores: bool,
}

impl ReceiverFacts {
    pub(super) fn of(agent: &Agent) -> Self {
        Self {
            uid: agent.uid().unwrap_or_default(),
            labels: agent.labels().clone(),
            suspended: agent.spec.suspend,
            ephemeral: agent.spec.storage.ephemeral,
            scores: agent.spec.light_model.is_some(),
        }
    }
}

/// A Sensor as last read.
#[derive(Clone, Debug)]
pub(super) struct IndexedSensor {
    pub(super) object: Arc<Sensor>,
    /// The Agents that it selects by labels; `None`: none.
    pub(super) selector: Option<Selector>,
    /// The newest generation whose check has ended; `None`: there is none yet.
    pub(super) checked: Option<CheckedSensor>,
}

/// A generation of a Sensor, and what its check found.
#[derive(Clone, Debug)]
pub(super) struct CheckedSensor {
    pub(super) object: Arc<Sensor>,
    /// The problems of the spec, each with field and fix.
    pub(super) problem: Option<String>,
}

impl IndexedSensor {
    /// A Sensor, and what is known of an earlier state of it.
    pub(super) fn new(object: Arc<Sensor>, before: Option<&Self>) -> Self {
        let checked = before.and_then(|before| before.checked.clone());
        let mut checked = checked.filter(|checked| checked.object.metadata.uid == object.metadata.uid);
        if let Some(checked) = &mut checked {
            let generation = |sensor: &Sensor| sensor.metadata.generation;
            let is_same = generation(&object).is_some() && generation(&object) == generation(&checked.object);
            if is_same || is_checked_alike(&checked.object.spec, &object.spec) {
                checked.object = Arc::clone(&object);
            }
        }
        Self {
            selector: selector(&object.spec),
            object,
            checked,
        }
    }

    /// Whether its spec as last seen is still to be checked. Meanwhile pods go by the generation that was checked.
    pub(super) fn is_pending(&self) -> bool {
        let checked = self.checked.as_ref();
        checked.is_none_or(|checked| !Arc::ptr_eq(&checked.object, &self.object))
    }

    /// What is wrong with the generation that pods go by.
    pub(super) fn problem(&self) -> Option<&str> {
        self.checked.as_ref()?.problem.as_deref()
    }

    fn receives(&self, agent: &NamespacedName, facts: &ReceiverFacts) -> bool {
        self.object.namespace().as_deref() == Some(&agent.namespace)
            && (self.names(agent)
                || self
                    .selector
                    .as_ref()
                    .is_some_and(|selector| selector.matches(&facts.labels)))
    }

    fn names(&self, agent: &NamespacedName) -> bool {
        self.object.spec.agent_names.contains(&agent.name)
    }

    /// What pods go by. `None`: no generation has been checked yet.
    pub(super) fn terms(&self) -> Option<SensorTerms> {
        let checked = self.checked.as_ref()?;
        let mut terms = pod::terms(&checked.object);
        // An invalid Sensor is stopped, and keeps its state until it is corrected.
        terms.spec.suspend |= checked.problem.is_some();
        Some(terms)
    }

    /// Whether the generation that pods go by has a pod of its own.
    fn has_pod(&self) -> bool {
        let object = self.checked.as_ref().map_or(&self.object, |checked| &checked.object);
        pod::has_pod(&object.spec.source)
    }
}

/// What a change affects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct IndexChange {
    /// Agents whose Sensors changed.
    pub(super) agents: BTreeSet<NamespacedName>,
    /// Sensors whose status may have changed.
    pub(super) sensors: BTreeSet<NamespacedName>,
}

#[derive(Clone, Debug)]
pub(super) struct SensorReceiver {
    pub(super) name: String,
    pub(super) facts: ReceiverFacts,
    /// The latest report of its pod on the Sensor.
    pub(super) report: Option<SensorReport>,
}

/// All Agents, Sensors and reports.
#[derive(Default)]
pub(super) struct ReceiverIndex {
    agents: BTreeMap<NamespacedName, ReceiverFacts>,
    sensors: BTreeMap<NamespacedName, IndexedSensor>,
    reports: BTreeMap<NamespacedName, Vec<SensorReport>>,
    /// Scopes (`None`: all namespaces) that have been listed at least once.
    agents_listed: BTreeSet<Option<String>>,
    sensors_listed: BTreeSet<Option<String>>,
}

impl ReceiverIndex {
    pub(super) fn sensor(&self, key: &NamespacedName) -> Option<&IndexedSensor> {
        self.sensors.get(key)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Sensor>> {
        self.sensors.values().map(|known| &known.object)
    }

    /// Whether the Sensors and Agents of this namespace have been listed completely.
    pub(super) fn is_whole(&self, namespace: &str) -> bool {
        listed(&self.agents_listed, namespace) && listed(&self.sensors_listed, namespace)
    }

    pub(super) fn is_empty(&self, namespace: &str) -> bool {
        self.is_whole(namespace)
            && self.agents_of(namespace).next().is_none()
            && self.of_namespace(namespace).next().is_none()
    }

    /// The Sensors that an Agent's pod is to run: not those with a pod of their own. `None` while not all are known, or one
    /// has never been checked: the pod keeps those that it runs, which a former leader may have checked.
    pub(super) fn terms(&self, agent: &NamespacedName) -> Option<Vec<SensorTerms>> {
        let here = self.received(agent)?.filter(|(_, known)| !known.has_pod());
        here.map(|(_, known)| known.terms()).collect()
    }

    /// Names of the events that can wake an Agent's loop, in order. `None` until all Sensors have been listed.
    pub(super) fn wake_events(&self, agent: &NamespacedName) -> Option<Vec<String>> {
        let names = self.received(agent)?.flat_map(|(key, known)| {
            let signals = known.object.spec.signals.iter();
            let signals = signals.map(|signal| format!("signal/{}/{}", key.name, signal.name));
            std::iter::once(format!("sensor/{}", key.name)).chain(signals)
        });
        Some(names.collect())
    }

    /// The Sensors that an Agent receives from, except those being deleted. `None` until all Sensors have been listed.
    fn received<'a>(
        &'a self,
        agent: &'a NamespacedName,
    ) -> Option<impl Iterator<Item = (&'a NamespacedName, &'a IndexedSensor)>> {
        if !listed(&self.sensors_listed, &agent.namespace) {
            return None;
        }
        let facts = self.agents.get(agent)?;
        let stays = |known: &IndexedSensor| known.object.metadata.deletion_timestamp.is_none();
        let all = self.of_namespace(&agent.namespace);
        Some(all.filter(move |(_, known)| stays(known) && known.receives(agent, facts)))
    }

    /// Names of an Agent's Sensors, by uid.
    pub(super) fn names(&self, agent: &NamespacedName) -> BTreeMap<String, String> {
        let facts = self.agents.get(agent);
        let received = self
            .of_namespace(&agent.namespace)
            .filter(|(_, known)| facts.is_some_and(|facts| known.receives(agent, facts)));
        received
            .map(|(key, known)| (known.object.uid().unwrap_or_default(), key.name.clone()))
            .collect()
    }

    /// The Sensors with their own pods that an Agent receives from.
    pub(super) fn with_pod(&self, agent: &NamespacedName) -> impl Iterator<Item = &NamespacedName> {
        let facts = self.agents.get(agent);
        let received = self.of_namespace(&agent.namespace).filter(move |(_, known)| {
            pod::has_pod(&known.object.spec.source) && facts.is_some_and(|facts| known.receives(agent, facts))
        });
        received.map(|(key, _)| key)
    }

    /// The receivers of a Sensor, sorted by name.
    pub(super) fn receivers(&self, known: &IndexedSensor) -> Vec<SensorReceiver> {
        let uid = known.object.uid().unwrap_or_default();
        let report = |agent: &NamespacedName| {
            let reports = self.reports.get(agent)?;
            reports.iter().find(|report| report.uid == uid).cloned()
        };
        self.receiving_agents(known)
            .map(|(agent, facts)| SensorReceiver {
                name: agent.name.clone(),
                facts: facts.clone(),
                report: report(agent),
            })
            .collect()
    }

    /// Agents that a Sensor names and that do not exist.
    pub(super) fn absent(&self, known: &IndexedSensor) -> Vec<String> {
        let namespace = known.object.namespace().unwrap_or_default();
        let there = |name: &&String| {
            let agent = NamespacedName::new(&namespace, *name);
            !self.agents.contains_key(&agent)
        };
        known.object.spec.agent_names.iter().filter(there).cloned().collect()
    }

    /// Uids of the Agents of a namespace.
    pub(super) fn agent_uids(&self, namespace: &str) -> BTreeSet<String> {
        let agents = self.agents_of(namespace);
        agents.map(|(_, facts)| facts.uid.clone()).collect()
    }

    pub(super) fn sensor_seen(&mut self, known: IndexedSensor) -> IndexChange {
        let key = NamespacedName::of(known.object.as_ref());
        let mut change = IndexChange::default();
        if let Some(before) = self.sensors.get(&key) {
            let same = (known.object.uid(), known.object.metadata.generation)
                == (before.object.uid(), before.object.metadata.generation)
                && known.object.metadata.deletion_timestamp.is_some()
                    == before.object.metadata.deletion_timestamp.is_some();
            if same {
                self.sensors.insert(key, known);
                return change;
            }
            change
                .agents
                .extend(self.receiving_agents(before).map(|(agent, _)| agent.clone()));
        }
        change
            .agents
            .extend(self.receiving_agents(&known).map(|(agent, _)| agent.clone()));
        change.sensors.insert(key.clone());
        self.sensors.insert(key, known);
        change
    }

    /// The check of a Sensor has ended. A verdict on another generation than the one last seen is dropped.
    pub(super) fn sensor_checked(&mut self, object: &Arc<Sensor>, problem: Option<String>) -> IndexChange {
        let (key, mut change) = (NamespacedName::of(object.as_ref()), IndexChange::default());
        let of = |sensor: &Sensor| (sensor.metadata.uid.clone(), sensor.metadata.generation);
        let Some(known) = self
            .sensors
            .get_mut(&key)
            .filter(|known| of(&known.object) == of(object))
        else {
            return change;
        };
        known.checked = Some(CheckedSensor {
            object: Arc::clone(&known.object),
            problem,
        });
        let known = known.clone();
        let receivers = self.receiving_agents(&known).map(|(agent, _)| agent.clone());
        change.agents.extend(receivers);
        change.sensors.insert(key);
        change
    }

    pub(super) fn sensor_gone(&mut self, key: &NamespacedName) -> IndexChange {
        let mut change = IndexChange::default();
        if let Some(known) = self.sensors.remove(key) {
            change
                .agents
                .extend(self.receiving_agents(&known).map(|(agent, _)| agent.clone()));
        }
        change
    }

    /// Removes the Sensors of a scope that are not in `present`. After the first list it is known who receives what.
    pub(super) fn sensors_listed(&mut self, scope: Option<&str>, present: &BTreeSet<NamespacedName>) -> IndexChange {
        let gone: Vec<NamespacedName> = self
            .sensors
            .keys()
            .filter(|key| scope.is_none_or(|scope| scope == key.namespace) && !present.contains(*key))
            .cloned()
            .collect();
        let mut change = IndexChange::default();
        for key in gone {
            change.agents.extend(self.sensor_gone(&key).agents);
        }
        if self.sensors_listed.insert(scope.map(str::to_owned)) {
            change.agents.extend(self.agents_within(scope));
        }
        change.sensors.extend(present.iter().cloned());
        change
    }

    pub(super) fn agent_seen(&mut self, agent: &NamespacedName, facts: ReceiverFacts) -> IndexChange {
        let mut change = IndexChange::default();
        let before = self.agents.get(agent);
        if before == Some(&facts) {
            return change;
        }
        for (key, known) in self.of_namespace(&agent.namespace) {
            let received = before.is_some_and(|before| known.receives(agent, before));
            if received || known.receives(agent, &facts) {
                change.sensors.insert(key.clone());
            }
        }
        if before.is_none_or(|before| (&before.uid, &before.labels) != (&facts.uid, &facts.labels)) {
            change.agents.insert(agent.clone());
        }
        self.agents.insert(agent.clone(), facts);
        change
    }

    /// Records an Agent that cannot be parsed: its metadata is current, and the rest is as last read, if the uid is the
    /// same.
    pub(super) fn agent_unreadable(&mut self, agent: &NamespacedName, meta: &ObjectMeta) -> IndexChange {
        let uid = meta.uid.clone().unwrap_or_default();
        let before = self.agents.get(agent).filter(|before| before.uid == uid);
        let facts = before.cloned().unwrap_or_else(|| ReceiverFacts {
            // Unknown: do not report a missing light model.
            scores: true,
            ..ReceiverFacts::default()
        });
        let labels = meta.labels.clone().unwrap_or_default();
        self.agent_seen(agent, ReceiverFacts { uid, labels, ..facts })
    }

    pub(super) fn agent_gone(&mut self, agent: &NamespacedName) -> IndexChange {
        self.reports.remove(agent);
        let mut change = IndexChange::default();
        if let Some(facts) = self.agents.remove(agent) {
            let received = self.of_namespace(&agent.namespace);
            let received = received.filter(|(_, known)| known.receives(agent, &facts));
            change.sensors = received.map(|(key, _)| key.clone()).collect();
            change.agents.insert(agent.clone());
        }
        change
    }

    /// Removes the Agents of a scope that are not in `present`.
    pub(super) fn agents_listed(&mut self, scope: Option<&str>, present: &BTreeSet<NamespacedName>) -> IndexChange {
        let gone: Vec<NamespacedName> = self
            .agents_within(scope)
            .filter(|agent| !present.contains(agent))
            .collect();
        let mut change = IndexChange::default();
        for agent in gone {
            let gone = self.agent_gone(&agent);
            change.agents.extend(gone.agents);
            change.sensors.extend(gone.sensors);
        }
        if self.agents_listed.insert(scope.map(str::to_owned)) {
            let within = |key: &&NamespacedName| scope.is_none_or(|scope| scope == key.namespace);
            change.sensors.extend(self.sensors.keys().filter(within).cloned());
        }
        change
    }

    /// Records the reports of an Agent's pod; affects the Sensors whose report changed.
    pub(super) fn report_received(&mut self, agent: &NamespacedName, reports: &[SensorReport]) -> IndexChange {
        let mut change = IndexChange::default();
        let before = self.reports.get(agent).map_or(&[] as &[SensorReport], Vec::as_slice);
        if before == reports {
            return change;
        }
        let changed: BTreeSet<&str> = reports
            .iter()
            .filter(|report| !before.contains(report))
            .map(|report| report.uid.as_str())
            .collect();
        let of = self.of_namespace(&agent.namespace);
        let of = of.filter(|(_, known)| {
            known
                .object
                .metadata
                .uid
                .as_deref()
                .is_some_and(|uid| changed.contains(uid))
        });
        change.sensors = of.map(|(key, _)| key.clone()).collect();
        self.reports.insert(agent.clone(), reports.to_vec());
        change
    }

    fn receiving_agents(&self, known: &IndexedSensor) -> impl Iterator<Item = (&NamespacedName, &ReceiverFacts)> {
        let namespace = known.object.namespace().unwrap_or_default();
        let agents = self.agents_of(&namespace);
        agents
            .filter(|(agent, facts)| known.receives(agent, facts))
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn agents_of(&self, namespace: &str) -> impl Iterator<Item = (&NamespacedName, &ReceiverFacts)> {
        let first = NamespacedName::first_in(namespace);
        let namespace = namespace.to_owned();
        let agents = self.agents.range(first..);
        agents.take_while(move |(agent, _)| agent.namespace == namespace)
    }

    fn agents_within(&self, scope: Option<&str>) -> impl Iterator<Item = NamespacedName> {
        let within = |agent: &&NamespacedName| scope.is_none_or(|scope| scope == agent.namespace);
        self.agents
            .keys()
            .filter(within)
            .cloned()
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn of_namespace(&self, namespace: &str) -> impl Iterator<Item = (&NamespacedName, &IndexedSensor)> {
        let first = NamespacedName::first_in(namespace);
        let namespace = namespace.to_owned();
        let sensors = self.sensors.range(first..);
        sensors.take_while(move |(key, _)| key.namespace == namespace)
    }
}

fn listed(scopes: &BTreeSet<Option<String>>, namespace: &str) -> bool {
    scopes.contains(&None) || scopes.contains(&Some(namespace.to_owned()))
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::{Value, json};

    use super::*;
    use crate::api::sensor::SensorTotals;

    fn agent(name: &str) -> NamespacedName {
        NamespacedName::new("n", name)
    }

    fn facts(team: &str) -> ReceiverFacts {
        ReceiverFacts {
            uid: "u".into(),
            labels: [("team".to_owned(), team.to_owned())].into(),
            ..ReceiverFacts::default()
        }
    }

    fn sensor_in(namespace: &str, name: &str, generation: i64, receivers: &Value) -> IndexedSensor {
        let mut spec = json!({"source": {"schedule": {"cron": "* * * * *"}}});
        for (field, value) in receivers.as_object().unwrap() {
            spec[field] = value.clone();
        }
        let object: Sensor = serde_json::from_value(json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor",
            "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-of-{name}"), "generation": generation},
            "spec": spec,
        }))
        .unwrap();
        let mut sensor = IndexedSensor::new(Arc::new(object), None);
        sensor.checked = Some(CheckedSensor {
            object: Arc::clone(&sensor.object),
            problem: None,
        });
        sensor
    }

    fn sensor(name: &str, generation: i64, receivers: &Value) -> IndexedSensor {
        sensor_in("n", name, generation, receivers)
    }

    fn names(change: &IndexChange) -> (Vec<&str>, Vec<&str>) {
        (
            change.agents.iter().map(|agent| agent.name.as_str()).collect(),
            change.sensors.iter().map(|sensor| sensor.name.as_str()).collect(),
        )
    }

    fn run_by(index: &ReceiverIndex, name: &str) -> Vec<String> {
        let terms = index.terms(&agent(name)).unwrap_or_default();
        terms.into_iter().map(|terms| terms.name).collect()
    }

    /// Two Agents: a of team red, b of team blue.
    fn index() -> ReceiverIndex {
        let mut index = ReceiverIndex::default();
        index.agent_seen(&agent("a"), facts("red"));
        index.agent_seen(&agent("b"), facts("blue"));
        index.agents_listed(None, &[agent("a"), agent("b")].into());
        index.sensors_listed(None, &BTreeSet::new());
        index
    }

    #[test]
    fn an_unreadable_agent_receives_by_its_name_and_labels() {
        let mut index = index();
        index.sensor_seen(sensor("s", 1, &json!({"agentNames": ["c"]})));
        index.sensor_seen(sensor(
            "t",
            1,
            &json!({"agentSelector": {"matchLabels": {"team": "red"}}}),
        ));
        let names = |index: &ReceiverIndex, sensor: &str| {
            let key = NamespacedName::new("n", sensor);
            let receivers = index.receivers(index.sensor(&key).unwrap());
            receivers.into_iter().map(|receiver| receiver.name).collect::<Vec<_>>()
        };
        let meta = |labels: Value| serde_json::from_value::<ObjectMeta>(json!({"uid": "u", "labels": labels})).unwrap();
        // First seen, as after a change of the leader.
        index.agent_unreadable(&agent("c"), &meta(json!({})));
        assert_eq!(names(&index, "s"), ["c"]);
        // Read before: its labels still count.
        index.agent_unreadable(&agent("b"), &meta(json!({"team": "red"})));
        assert_eq!(names(&index, "t"), ["a", "b"]);
    }

    #[test]
    fn receivers_are_those_named_and_those_selected_of_its_own_namespace() {
        let mut index = index();
        for (receivers, expected) in [
            (json!({"agentNames": ["a"]}), [true, false]),
            (
                json!({"agentSelector": {"matchLabels": {"team": "blue"}}}),
                [false, true],
            ),
            (json!({"agentSelector": {}}), [true, true]),
            (
                json!({"agentNames": ["b"], "agentSelector": {"matchLabels": {"team": "red"}}}),
                [true, true],
            ),
            (json!({"agentNames": ["gone"]}), [false, false]),
        ] {
            index.sensor_seen(sensor("s", 1, &receivers));
            let known = index.sensor(&NamespacedName::new("n", "s")).unwrap().clone();
            let found: Vec<_> = index
                .receivers(&known)
                .into_iter()
                .map(|receiver| receiver.name)
                .collect();
            assert_eq!(
                ["a", "b"].map(|name| found.contains(&name.to_owned())),
                expected,
                "{receivers}"
            );
            index.sensor_gone(&NamespacedName::of(known.object.as_ref()));
        }
        index.sensor_seen(sensor_in("elsewhere", "s", 1, &json!({"agentSelector": {}})));
        assert_eq!(run_by(&index, "a"), [""; 0]);
    }

    #[test]
    fn a_change_notifies_the_affected_receivers_once() {
        let mut index = index();
        let both = json!({"agentSelector": {}});
        assert_eq!(
            names(&index.sensor_seen(sensor("s", 1, &both))),
            (vec!["a", "b"], vec!["s"])
        );
        assert_eq!(names(&index.sensor_seen(sensor("s", 1, &both))), (vec![], vec![]));
        let only_b = json!({"agentNames": ["b"]});
        let change = index.sensor_seen(sensor("s", 2, &only_b));
        assert_eq!(names(&change), (vec!["a", "b"], vec!["s"]), "a is no longer a receiver");
        let change = index.sensor_seen(sensor("s", 3, &only_b));
        assert_eq!(names(&change), (vec!["b"], vec!["s"]));
        assert_eq!(
            (run_by(&index, "a"), run_by(&index, "b")),
            (vec![], vec!["s".to_owned()])
        );
        let gone = NamespacedName::new("n", "s");
        assert_eq!(names(&index.sensor_gone(&gone)), (vec!["b"], vec![]));
        assert_eq!(run_by(&index, "b"), [""; 0]);
    }

    #[test]
    fn an_agent_that_is_created_or_relabelled_receives_from_the_sensors_that_select_it() {
        let mut index = index();
        index.sensor_seen(sensor(
            "red",
            1,
            &json!({"agentSelector": {"matchLabels": {"team": "red"}}}),
        ));
        index.sensor_seen(sensor("late", 1, &json!({"agentNames": ["c"]})));
        let change = index.agent_seen(&agent("b"), facts("red"));
        assert_eq!(names(&change), (vec!["b"], vec!["red"]));
        assert_eq!(names(&index.agent_seen(&agent("b"), facts("red"))), (vec![], vec![]));
        let change = index.agent_seen(&agent("c"), facts("green"));
        assert_eq!(names(&change), (vec!["c"], vec!["late"]));
        assert_eq!(run_by(&index, "c"), ["late"]);
        let mut suspended = facts("green");
        suspended.suspended = true;
        let change = index.agent_seen(&agent("c"), suspended);
        assert_eq!(
            names(&change),
            (vec![], vec!["late"]),
            "the terms of its pod are unchanged"
        );
        assert_eq!(names(&index.agent_gone(&agent("c"))), (vec!["c"], vec!["late"]));
    }

    #[test]
    fn nothing_is_decided_before_all_are_known() {
        let mut index = ReceiverIndex::default();
        index.agent_seen(&agent("a"), facts("red"));
        index.sensor_seen(sensor("s", 1, &json!({"agentNames": ["a"]})));
        assert_eq!(index.terms(&agent("a")), None, "there may be more Sensors");
        let present = [NamespacedName::new("n", "s")].into();
        assert_eq!(names(&index.sensors_listed(Some("n"), &present)).0, ["a"]);
        assert_eq!(run_by(&index, "a"), ["s"]);
        assert!(!index.is_whole("n"), "an unlisted Agent is not reported as missing");
        assert_eq!(names(&index.agents_listed(Some("n"), &[agent("a")].into())).1, ["s"]);
        assert!(index.is_whole("n") && !index.is_whole("m"));
    }

    #[test]
    fn objects_deleted_in_the_meantime_are_removed_by_the_next_list() {
        let mut index = index();
        index.sensor_seen(sensor("s", 1, &json!({"agentNames": ["a"]})));
        assert_eq!(names(&index.sensors_listed(None, &BTreeSet::new())).0, ["a"]);
        assert_eq!(run_by(&index, "a"), [""; 0]);
        assert_eq!(names(&index.agents_listed(None, &[agent("b")].into())).0, ["a"]);
        assert_eq!(index.agent_uids("n").len(), 1);
    }

    #[test]
    fn an_unusable_sensor_is_suspended_for_its_receivers() {
        let mut index = index();
        let mut broken = sensor("s", 1, &json!({"agentNames": ["a"]}));
        broken.checked.as_mut().unwrap().problem = Some("spec.signals[0].when: why".into());
        index.sensor_seen(broken);
        let terms = index.terms(&agent("a")).unwrap();
        assert!(terms[0].spec.suspend);
        assert_eq!(
            terms[0].spec.agent_names, [""; 0],
            "a pod does not learn who else receives"
        );
    }

    #[test]
    fn a_report_enqueues_only_the_sensors_with_new_data() {
        let mut index = index();
        for name in ["s", "t"] {
            index.sensor_seen(sensor(name, 1, &json!({"agentNames": ["a"]})));
        }
        let report = |uid: &str, events| SensorReport {
            uid: uid.into(),
            generation: 1,
            totals: SensorTotals {
                events,
                ..SensorTotals::default()
            },
            last: None,
            consecutive_failures: 0,
            failure: None,
            next_attempt_at: None,
        };
        let first = [report("uid-of-s", 1), report("uid-of-t", 1)];
        assert_eq!(names(&index.report_received(&agent("a"), &first)).1, ["s", "t"]);
        assert_eq!(names(&index.report_received(&agent("a"), &first)).1, [""; 0]);
        let second = [report("uid-of-s", 1), report("uid-of-t", 2)];
        assert_eq!(names(&index.report_received(&agent("a"), &second)).1, ["t"]);
        let known = index.sensor(&NamespacedName::new("n", "t")).unwrap();
        assert_eq!(index.receivers(known)[0].report, Some(report("uid-of-t", 2)));
    }
}
