//! Who receives what: the Sensors and Agents of this leader, by namespace. Pure.
//!
//! A change says which Agents must be told their Sensors anew, and which Sensors must be shown anew; nothing else is looked
//! at.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

use super::pod;
use crate::api::{Agent, Sensor};
pub(super) use crate::controller::delivery_relay::SensorKey;
use crate::controller::pod_sessions::AgentKey;
use crate::link::sensor_messages::{SensorReport, SensorTerms};

impl SensorKey {
    pub(super) fn of(object: &impl ResourceExt) -> Self {
        Self {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
        }
    }
}

/// What of an Agent matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReceiverFacts {
    pub(super) uid: String,
    pub(super) labels: BTreeMap<String, String>,
    /// `spec.suspend`: its pod is not there, by design.
    pub(super) suspended: bool,
    /// `spec.storage.ephemeral`: it forgets with its pod what it has received.
    pub(super) ephemeral: bool,
    /// It has a `spec.lightModel`.
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

/// A Sensor as it was last seen.
#[derive(Clone, Debug)]
pub(super) struct IndexedSensor {
    pub(super) object: Arc<Sensor>,
    /// Whom it selects by labels; `None`: nobody.
    pub(super) selector: Option<Selector>,
    /// What is wrong with its spec, with field and fix.
    pub(super) problem: Option<String>,
}

impl IndexedSensor {
    fn receives(&self, agent: &AgentKey, facts: &ReceiverFacts) -> bool {
        self.object.namespace().as_deref() == Some(&agent.namespace)
            && (self.names(agent)
                || self
                    .selector
                    .as_ref()
                    .is_some_and(|selector| selector.matches(&facts.labels)))
    }

    fn names(&self, agent: &AgentKey) -> bool {
        self.object.spec.agent_names.contains(&agent.name)
    }

    fn terms(&self) -> SensorTerms {
        let mut terms = pod::terms(&self.object);
        // What cannot be used does not listen, and what it did so far is kept until it is corrected.
        terms.spec.suspend |= self.problem.is_some();
        terms
    }
}

/// What a change asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct IndexChange {
    /// Agents whose Sensors are others now.
    pub(super) agents: BTreeSet<AgentKey>,
    /// Sensors of which something else is to be said.
    pub(super) sensors: BTreeSet<SensorKey>,
}

/// A receiver of a Sensor.
#[derive(Clone, Debug)]
pub(super) struct SensorReceiver {
    pub(super) name: String,
    pub(super) facts: ReceiverFacts,
    /// What its pod last said of the Sensor.
    pub(super) report: Option<SensorReport>,
}

/// All that is known.
#[derive(Default)]
pub(super) struct ReceiverIndex {
    agents: BTreeMap<AgentKey, ReceiverFacts>,
    sensors: BTreeMap<SensorKey, IndexedSensor>,
    reports: BTreeMap<AgentKey, Vec<SensorReport>>,
    /// Scopes (`None`: all namespaces) that have been listed once.
    agents_listed: BTreeSet<Option<String>>,
    sensors_listed: BTreeSet<Option<String>>,
}

impl ReceiverIndex {
    pub(super) fn sensor(&self, key: &SensorKey) -> Option<&IndexedSensor> {
        self.sensors.get(key)
    }

    /// Every Sensor.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Sensor>> {
        self.sensors.values().map(|known| &known.object)
    }

    /// Whether Sensors and Agents of this namespace have been listed, so that nothing is missing.
    pub(super) fn is_whole(&self, namespace: &str) -> bool {
        listed(&self.agents_listed, namespace) && listed(&self.sensors_listed, namespace)
    }

    /// Whether a namespace certainly has neither Agents nor Sensors.
    pub(super) fn is_empty(&self, namespace: &str) -> bool {
        self.is_whole(namespace)
            && self.agents_of(namespace).next().is_none()
            && self.of_namespace(namespace).next().is_none()
    }

    /// The Sensors that an Agent's pod is to run: not those with a pod of their own. `None` while not all are known.
    pub(super) fn terms(&self, agent: &AgentKey) -> Option<Vec<SensorTerms>> {
        let here = self
            .received(agent)?
            .filter(|(_, known)| !pod::has_pod(&known.object.spec.source));
        Some(here.map(|(_, known)| known.terms()).collect())
    }

    /// Names of the events that can wake an Agent's loop, in order. `None` while not all Sensors are known.
    pub(super) fn wake_events(&self, agent: &AgentKey) -> Option<Vec<String>> {
        let names = self.received(agent)?.flat_map(|(key, known)| {
            let signals = known.object.spec.signals.iter();
            let signals = signals.map(|signal| format!("signal/{}/{}", key.name, signal.name));
            std::iter::once(format!("sensor/{}", key.name)).chain(signals)
        });
        Some(names.collect())
    }

    /// The Sensors that an Agent receives from and that are to stay. `None` while not all are known.
    fn received<'a>(&'a self, agent: &'a AgentKey) -> Option<impl Iterator<Item = (&'a SensorKey, &'a IndexedSensor)>> {
        if !listed(&self.sensors_listed, &agent.namespace) {
            return None;
        }
        let facts = self.agents.get(agent)?;
        let stays = |known: &IndexedSensor| known.object.metadata.deletion_timestamp.is_none();
        let all = self.of_namespace(&agent.namespace);
        Some(all.filter(move |(_, known)| stays(known) && known.receives(agent, facts)))
    }

    /// Names of an Agent's Sensors, by uid.
    pub(super) fn names(&self, agent: &AgentKey) -> BTreeMap<String, String> {
        let facts = self.agents.get(agent);
        let received = self
            .of_namespace(&agent.namespace)
            .filter(|(_, known)| facts.is_some_and(|facts| known.receives(agent, facts)));
        received
            .map(|(key, known)| (known.object.uid().unwrap_or_default(), key.name.clone()))
            .collect()
    }

    /// The Sensors with a pod of their own that an Agent receives from.
    pub(super) fn with_pod(&self, agent: &AgentKey) -> impl Iterator<Item = &SensorKey> {
        let facts = self.agents.get(agent);
        let received = self.of_namespace(&agent.namespace).filter(move |(_, known)| {
            pod::has_pod(&known.object.spec.source) && facts.is_some_and(|facts| known.receives(agent, facts))
        });
        received.map(|(key, _)| key)
    }

    /// Those who receive from a Sensor, in the order of their names.
    pub(super) fn receivers(&self, known: &IndexedSensor) -> Vec<SensorReceiver> {
        let uid = known.object.uid().unwrap_or_default();
        let report = |agent: &AgentKey| {
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

    /// Agents that a Sensor names and that are not there.
    pub(super) fn absent(&self, known: &IndexedSensor) -> Vec<String> {
        let namespace = known.object.namespace().unwrap_or_default();
        let there = |name: &&String| {
            let agent = AgentKey {
                namespace: namespace.clone(),
                name: (*name).clone(),
            };
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
        let key = SensorKey::of(known.object.as_ref());
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

    pub(super) fn sensor_gone(&mut self, key: &SensorKey) -> IndexChange {
        let mut change = IndexChange::default();
        if let Some(known) = self.sensors.remove(key) {
            change
                .agents
                .extend(self.receiving_agents(&known).map(|(agent, _)| agent.clone()));
        }
        change
    }

    /// These are all Sensors of a scope: others are gone, and from now on it is known who receives what.
    pub(super) fn sensors_listed(&mut self, scope: Option<&str>, present: &BTreeSet<SensorKey>) -> IndexChange {
        let gone: Vec<SensorKey> = self
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

    pub(super) fn agent_seen(&mut self, agent: &AgentKey, facts: ReceiverFacts) -> IndexChange {
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

    /// The same of one that cannot be read: its metadata can, and the rest is as it was, if it is still the same.
    pub(super) fn agent_unreadable(&mut self, agent: &AgentKey, meta: &ObjectMeta) -> IndexChange {
        let uid = meta.uid.clone().unwrap_or_default();
        let before = self.agents.get(agent).filter(|before| before.uid == uid);
        let facts = before.cloned().unwrap_or_else(|| ReceiverFacts {
            // Of a light model nothing is known: that it is missing is not to be said.
            scores: true,
            ..ReceiverFacts::default()
        });
        let labels = meta.labels.clone().unwrap_or_default();
        self.agent_seen(agent, ReceiverFacts { uid, labels, ..facts })
    }

    pub(super) fn agent_gone(&mut self, agent: &AgentKey) -> IndexChange {
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

    /// These are all Agents of a scope.
    pub(super) fn agents_listed(&mut self, scope: Option<&str>, present: &BTreeSet<AgentKey>) -> IndexChange {
        let gone: Vec<AgentKey> = self
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
            let within = |key: &&SensorKey| scope.is_none_or(|scope| scope == key.namespace);
            change.sensors.extend(self.sensors.keys().filter(within).cloned());
        }
        change
    }

    /// A pod has spoken: the Sensors of which it says something new.
    pub(super) fn report_received(&mut self, agent: &AgentKey, reports: &[SensorReport]) -> IndexChange {
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

    fn receiving_agents(&self, known: &IndexedSensor) -> impl Iterator<Item = (&AgentKey, &ReceiverFacts)> {
        let namespace = known.object.namespace().unwrap_or_default();
        let agents = self.agents_of(&namespace);
        agents
            .filter(|(agent, facts)| known.receives(agent, facts))
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn agents_of(&self, namespace: &str) -> impl Iterator<Item = (&AgentKey, &ReceiverFacts)> {
        let first = AgentKey {
            namespace: namespace.to_owned(),
            name: String::new(),
        };
        let namespace = namespace.to_owned();
        let agents = self.agents.range(first..);
        agents.take_while(move |(agent, _)| agent.namespace == namespace)
    }

    fn agents_within(&self, scope: Option<&str>) -> impl Iterator<Item = AgentKey> {
        let within = |agent: &&AgentKey| scope.is_none_or(|scope| scope == agent.namespace);
        self.agents
            .keys()
            .filter(within)
            .cloned()
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn of_namespace(&self, namespace: &str) -> impl Iterator<Item = (&SensorKey, &IndexedSensor)> {
        let first = SensorKey {
            namespace: namespace.to_owned(),
            name: String::new(),
        };
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
    use crate::controller::sensor::validate::validate;

    fn agent(name: &str) -> AgentKey {
        AgentKey {
            namespace: "n".into(),
            name: name.into(),
        }
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
        let (selector, problem) = validate(&object.spec);
        IndexedSensor {
            object: Arc::new(object),
            selector,
            problem,
        }
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
    fn one_that_cannot_be_read_receives_by_its_name_and_labels() {
        let mut index = index();
        index.sensor_seen(sensor("s", 1, &json!({"agentNames": ["c"]})));
        index.sensor_seen(sensor(
            "t",
            1,
            &json!({"agentSelector": {"matchLabels": {"team": "red"}}}),
        ));
        let names = |index: &ReceiverIndex, sensor: &str| {
            let key = SensorKey {
                namespace: "n".into(),
                name: sensor.into(),
            };
            let receivers = index.receivers(index.sensor(&key).unwrap());
            receivers.into_iter().map(|receiver| receiver.name).collect::<Vec<_>>()
        };
        let meta = |labels: Value| serde_json::from_value::<ObjectMeta>(json!({"uid": "u", "labels": labels})).unwrap();
        // Seen for the first time, as after a change of the leader.
        index.agent_unreadable(&agent("c"), &meta(json!({})));
        assert_eq!(names(&index, "s"), ["c"]);
        // Known before: its labels still count.
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
            let known = index
                .sensor(&SensorKey {
                    namespace: "n".into(),
                    name: "s".into(),
                })
                .unwrap()
                .clone();
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
            index.sensor_gone(&SensorKey::of(known.object.as_ref()));
        }
        index.sensor_seen(sensor_in("elsewhere", "s", 1, &json!({"agentSelector": {}})));
        assert_eq!(run_by(&index, "a"), [""; 0]);
    }

    #[test]
    fn a_change_is_told_to_whom_it_concerns_and_a_repeat_to_nobody() {
        let mut index = index();
        let both = json!({"agentSelector": {}});
        assert_eq!(
            names(&index.sensor_seen(sensor("s", 1, &both))),
            (vec!["a", "b"], vec!["s"])
        );
        assert_eq!(names(&index.sensor_seen(sensor("s", 1, &both))), (vec![], vec![]));
        let only_b = json!({"agentNames": ["b"]});
        let change = index.sensor_seen(sensor("s", 2, &only_b));
        assert_eq!(names(&change), (vec!["a", "b"], vec!["s"]), "a receives no more");
        let change = index.sensor_seen(sensor("s", 3, &only_b));
        assert_eq!(names(&change), (vec!["b"], vec!["s"]));
        assert_eq!(
            (run_by(&index, "a"), run_by(&index, "b")),
            (vec![], vec!["s".to_owned()])
        );
        let gone = SensorKey {
            namespace: "n".into(),
            name: "s".into(),
        };
        assert_eq!(names(&index.sensor_gone(&gone)), (vec!["b"], vec![]));
        assert_eq!(run_by(&index, "b"), [""; 0]);
    }

    #[test]
    fn an_agent_that_comes_or_changes_its_labels_receives_what_selects_it() {
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
        assert_eq!(names(&change), (vec![], vec!["late"]), "its pod is told nothing else");
        assert_eq!(names(&index.agent_gone(&agent("c"))), (vec!["c"], vec!["late"]));
    }

    #[test]
    fn nothing_is_decided_before_all_are_known() {
        let mut index = ReceiverIndex::default();
        index.agent_seen(&agent("a"), facts("red"));
        index.sensor_seen(sensor("s", 1, &json!({"agentNames": ["a"]})));
        assert_eq!(index.terms(&agent("a")), None, "another may be on its way");
        let present = [SensorKey {
            namespace: "n".into(),
            name: "s".into(),
        }]
        .into();
        assert_eq!(names(&index.sensors_listed(Some("n"), &present)).0, ["a"]);
        assert_eq!(run_by(&index, "a"), ["s"]);
        assert!(!index.is_whole("n"), "nor is it said that an Agent is missing");
        assert_eq!(names(&index.agents_listed(Some("n"), &[agent("a")].into())).1, ["s"]);
        assert!(index.is_whole("n") && !index.is_whole("m"));
    }

    #[test]
    fn what_went_while_nobody_looked_is_gone_after_the_next_list() {
        let mut index = index();
        index.sensor_seen(sensor("s", 1, &json!({"agentNames": ["a"]})));
        assert_eq!(names(&index.sensors_listed(None, &BTreeSet::new())).0, ["a"]);
        assert_eq!(run_by(&index, "a"), [""; 0]);
        assert_eq!(names(&index.agents_listed(None, &[agent("b")].into())).0, ["a"]);
        assert_eq!(index.agent_uids("n").len(), 1);
    }

    #[test]
    fn what_cannot_be_used_does_not_listen_and_keeps_what_it_did() {
        let mut index = index();
        let mut broken = sensor("s", 1, &json!({"agentNames": ["a"]}));
        broken.problem = Some("spec.signals[0].when: why".into());
        index.sensor_seen(broken);
        let terms = index.terms(&agent("a")).unwrap();
        assert!(terms[0].spec.suspend);
        assert_eq!(
            terms[0].spec.agent_names, [""; 0],
            "a pod need not know who else receives"
        );
    }

    #[test]
    fn a_report_asks_for_the_sensors_of_which_it_says_something_new() {
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
        let known = index
            .sensor(&SensorKey {
                namespace: "n".into(),
                name: "t".into(),
            })
            .unwrap();
        assert_eq!(index.receivers(known)[0].report, Some(report("uid-of-t", 2)));
    }
}
