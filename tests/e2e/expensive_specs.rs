//! Specs that are short to write and would cost much to read: their own author is told, and nobody else notices.

use serde_json::{Value, json};

use super::agents::{Agent, condition, script, scripted};
use super::cluster::{self, Namespace, alone, figure, shared};
use super::host;
use super::sensor_pods::SENSORS;

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
fn alias_and_pattern_bombs_are_conditions_of_their_own_objects_and_cost_no_other_tenant_anything() {
    let Some(cluster) = shared() else { return };
    let (mine, theirs) = (
        Namespace::new(&cluster.system, "bombs"),
        Namespace::new(&cluster.system, "bystander"),
    );
    let restarts = || {
        let pods = cluster.system.list("pods", "app.kubernetes.io/name=agentloop");
        let count = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_i64();
        pods.iter().filter_map(count).sum::<i64>()
    };
    let (leader, before) = (cluster::leader(&cluster.system), restarts());
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
    bystander.until_state("Sleeping", 60);
    for agent in &agents {
        let accepted = agent.until_condition("Accepted", "False", "InvalidSpec", 60);
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
    let after = cluster::leader(&cluster.system);
    assert_eq!(after["metadata"]["uid"], leader["metadata"]["uid"], "the same leader");
    assert_eq!(restarts(), before, "no container of the controller was restarted");
}

const HEAVY: usize = 40;

/// A Sensor that never has an event, with so many large patterns.
fn dormant(name: &str, patterns: usize, generation: usize) -> Value {
    let text = format!("[{generation}, {}]", vec![r"matches('','\\w{4}')"; patterns].join(","));
    json!({"apiVersion": "agentloop.dev/v1alpha1", "kind": "Sensor", "metadata": {"name": name}, "spec": {
        "agentNames": ["absent"],
        "source": {"schedule": {"cron": "0 0 1 1 *"}},
        "notification": {"text": if patterns == 0 { "'x'".to_owned() } else { text }},
    }})
}

/// All heavy Sensors in one request, so that none is checked before the last is there.
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

#[test]
fn heavy_sensors_of_one_namespace_do_not_delay_another_even_after_the_leader_was_replaced() {
    let Some(cluster) = alone() else { return };
    let (mine, theirs) = (
        Namespace::new(&cluster.system, "heavy"),
        Namespace::new(&cluster.system, "beside-heavy"),
    );
    let pending = || {
        let all = mine.kubectl.list(SENSORS, "");
        all.iter().filter(|sensor| !is_checked(sensor)).count()
    };
    apply_heavy(&mine, 1);
    theirs.kubectl.apply(&dormant("first", 0, 1).to_string());
    until_checked(&theirs, "first", 15);
    figure("heavy_sensors_pending_beside_another_tenants", pending(), "Sensors");

    let leader = cluster::leader(&cluster.system);
    host::kill(&leader, "controller");
    // All of them are another generation for the next leader.
    apply_heavy(&mine, 2);
    theirs.kubectl.apply(&dormant("second", 0, 1).to_string());
    until_checked(&theirs, "second", 150);
    let left = pending();
    figure("heavy_sensors_pending_after_the_leader_was_replaced", left, "Sensors");
    assert!(left > HEAVY / 4, "the other tenant's Sensor did not wait for these");
    for number in 0..HEAVY {
        until_checked(&mine, &format!("heavy-{number}"), 240);
    }
    cluster::leader(&cluster.system);
}
