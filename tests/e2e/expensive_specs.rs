//! Specs that are short but expensive to check: only their own object reports a condition.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::agents::{Agent, condition, script, scripted};
use super::cluster::{self, Namespace, alone, figure};
use super::node::{self, Frozen};
use super::sensor_pods::SENSORS;
use crate::support::kubectl::{Watch, WatchEvent};

/// A long list and 420 aliases to it: each is one step for a reader, and another copy in memory.
fn aliases() -> String {
    let (value, aliases) = (vec!["0"; 40_000].join(","), vec!["*a"; 420].join(","));
    format!("turns: [{{toolCalls: [{{name: a, arguments: {{a: &a [{value}], b: [{aliases}]}}}}]}}]\n")
}

/// 33 expressions of 194 large patterns each.
fn patterns(name: &str) -> Value {
    let many = format!("[{}]", vec![r"matches('','\\w{5}')"; 194].join(","));
    let place = |field: &str| {
        let one =
            |number| json!({(field): format!("f{number}"), (if field == "field" { "value" } else { "when" }): many});
        (0..16).map(one).collect::<Vec<_>>()
    };
    json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": name}, "spec": {
        "agentNames": ["bystander"],
        "source": {"schedule": {"cron": "* * * * *"}},
        "updates": place("field"), "signals": place("name"), "notification": {"text": many},
    }})
}

#[test]
fn alias_and_pattern_bombs_affect_only_the_conditions_of_their_own_objects() {
    let Some(cluster) = alone() else { return };
    let (mine, theirs) = (
        Namespace::new(&cluster.system, "bombs"),
        Namespace::new(&cluster.system, "bystander"),
    );
    let before = processes(&cluster::settled(&cluster.system));
    let leader = cluster::leader(&cluster.system);
    let of_aliases = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "aliases"}, "data": {"script": aliases()}});
    mine.kubectl.apply(&of_aliases.to_string());
    let agents: Vec<_> = (0..8)
        .map(|number| Agent::apply(&mine, &format!("aliases-{number}"), &scripted("aliases"), &json!({})))
        .collect();
    for number in 0..8 {
        mine.kubectl.apply(&patterns(&format!("patterns-{number}")).to_string());
    }
    // All of this is still being read.
    theirs
        .kubectl
        .apply(&script("waits", &json!({"turns": [{"yield": {"sleep": 3600}}]})));
    let bystander = Agent::apply(&theirs, "bystander", &scripted("waits"), &json!({}));
    bystander.until_state("Sleeping", 120);
    for agent in &agents {
        let accepted = agent.until_condition("Accepted", "False", "InvalidSpec", 120);
        let message = accepted["message"].as_str().unwrap_or_default();
        assert!(message.contains("aliases"), "{message}");
    }
    for number in 0..8 {
        let name = format!("patterns-{number}");
        let message = mine.kubectl.until("Accepted=False", 240, SENSORS, &name, |sensor| {
            let accepted = condition(sensor, "Accepted")?;
            (accepted["status"] == "False").then(|| accepted["message"].as_str().unwrap_or_default().to_owned())
        });
        assert!(message.contains("spec.updates[0].value"), "{message}");
    }
    let replicas = cluster.system.list("pods", cluster::REPLICAS);
    let states: Vec<_> = replicas
        .iter()
        .map(|pod| &pod["status"]["containerStatuses"][0])
        .map(|container| json!({"state": container["state"], "lastState": container["lastState"]}))
        .collect();
    let after = processes(&replicas);
    assert_eq!(after, before, "no controller was restarted or replaced: {states:#?}");
    let leads = cluster::leader(&cluster.system);
    assert_eq!(leads["metadata"]["uid"], leader["metadata"]["uid"], "the same leader");
}

/// The process of each replica, by the uid of its pod: another one after each restart, whenever the kubelet reports it.
fn processes(replicas: &[Value]) -> BTreeMap<String, Option<u32>> {
    let process = |pod: &Value| (pod["metadata"]["uid"].to_string(), node::find(pod, "controller"));
    replicas.iter().map(process).collect()
}

const HEAVY: usize = 40;

/// A Sensor that never has an event, with this many large patterns.
fn dormant(name: &str, patterns: usize, generation: usize) -> Value {
    let text = format!("[{generation}, {}]", vec![r"matches('','\\w{4}')"; patterns].join(","));
    json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": name}, "spec": {
        "agentNames": ["absent"],
        "source": {"schedule": {"cron": "0 0 1 1 *"}},
        "notification": {"text": if patterns == 0 { "'x'".to_owned() } else { text }},
    }})
}

/// A request for each heavy Sensor: a leader checks the first before the last is there.
fn apply_heavy(namespace: &Namespace, generation: usize) {
    let all: Vec<_> = (0..HEAVY)
        .map(|number| dormant(&format!("heavy-{number}"), 32, generation))
        .collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": all});
    namespace.kubectl.apply(&list.to_string());
}

/// Whether its spec as it is now has been checked.
fn is_checked(sensor: &Value) -> bool {
    let generation = &sensor["metadata"]["generation"];
    condition(sensor, "Accepted").is_some_and(|accepted| accepted["observedGeneration"] == *generation)
}

fn until_checked(namespace: &Namespace, name: &str, seconds: u64) {
    let checked = |sensor: &Value| is_checked(sensor).then_some(());
    namespace
        .kubectl
        .until("its spec is checked", seconds, SENSORS, name, checked);
}

/// The order in which this many Sensors got their verdicts: for each, the resource version that its generation of now was
/// first checked in. On one API server these grow with every write.
fn verdicts(changes: &Watch, sensors: usize, seconds: u64) -> BTreeMap<String, u64> {
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut found = BTreeMap::new();
    while found.len() < sensors {
        let Some(WatchEvent { object, .. }) = changes.next(deadline) else {
            panic!(
                "{} of {sensors} specs were checked within {seconds} s, or the watch broke",
                found.len()
            );
        };
        let name = object["metadata"]["name"].as_str().expect("a Sensor has a name");
        if is_checked(&object) {
            let version = object["metadata"]["resourceVersion"].as_str();
            let version = version.and_then(|version| version.parse().ok());
            found.entry(name.to_owned()).or_insert(version.expect("a number"));
        }
    }
    found
}

#[test]
fn heavy_sensors_of_one_namespace_do_not_delay_another_even_after_the_leader_was_replaced() {
    let Some(cluster) = alone() else { return };
    let (mine, theirs) = (
        Namespace::new(&cluster.system, "heavy"),
        Namespace::new(&cluster.system, "beside-heavy"),
    );
    let replicas = cluster::settled(&cluster.system);
    let pending = || {
        let all = mine.kubectl.list(SENSORS, "");
        all.iter().filter(|sensor| !is_checked(sensor)).count()
    };
    apply_heavy(&mine, 1);
    theirs.kubectl.apply(&dormant("first", 0, 1).to_string());
    until_checked(&theirs, "first", 60);
    figure("heavy_sensors_pending_beside_another_tenants", pending(), "Sensors");

    // No controller sees an edit before all of them are there, and for the next leader no spec is checked.
    let leader = cluster::leader(&cluster.system);
    let frozen: Vec<_> = replicas
        .iter()
        .filter_map(|pod| Frozen::of(pod, "controller"))
        .collect();
    apply_heavy(&mine, 2);
    theirs.kubectl.apply(&dormant("second", 0, 1).to_string());
    let (changes, changes_of_theirs) = (
        mine.kubectl.watch(SENSORS, &[]),
        theirs
            .kubectl
            .watch(SENSORS, &["--field-selector", "metadata.name=second"]),
    );
    // Unless its liveness probe was faster.
    node::strike(&leader, "controller", "KILL");
    drop(frozen);
    let second = verdicts(&changes_of_theirs, 1, 240)["second"];
    figure(
        "heavy_sensors_pending_after_the_leader_was_replaced",
        pending(),
        "Sensors",
    );
    let heavy = verdicts(&changes, HEAVY, 480);
    let earlier = heavy.values().filter(|verdict| **verdict < second).count();
    assert!(
        earlier < HEAVY / 2,
        "{earlier} of {HEAVY} heavy Sensors of another tenant were checked before this one"
    );
    cluster::leader(&cluster.system);
}
