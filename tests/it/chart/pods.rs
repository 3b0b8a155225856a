//! Settings of pods that the controller creates: what the chart renders is what the controller reads.

use agentloop::controller::sensor::pod::SensorPodTemplate;
use serde_json::Value;

use super::render::{render, variable};

/// A variable of the controller with these settings; null: it is not set. `None`: there is no helm.
fn rendered(settings: &[&str], name: &str) -> Option<Value> {
    let objects = render(settings)?.unwrap();
    let controller = &objects.one("Deployment", "agentloop")["spec"]["template"]["spec"]["containers"][0];
    let value = variable(controller, name).map(|variable| variable["value"].clone());
    Some(value.unwrap_or_default())
}

#[test]
fn the_controller_reads_all_that_the_chart_sets_on_sensor_pods() {
    let settings = [
        "sensor.imagePullSecrets[0].name=registry",
        "sensor.podAnnotations.note=$(POD_NAME)",
        "sensor.nodeSelector.pool=small",
        "sensor.tolerations[0].key=dedicated",
        "sensor.tolerations[0].tolerationSeconds=7",
        "sensor.affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=9",
        "sensor.affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.topologyKey=zone",
        "sensor.priorityClassName=low",
    ];
    let Some(text) = rendered(&settings, "AGENTLOOP_SENSOR_POD") else {
        return;
    };
    let text = text.as_str().unwrap();
    assert!(!text.contains('$'), "the kubelet would expand it: {text}");
    let template: SensorPodTemplate = serde_json::from_str(text).unwrap();
    assert_eq!(template.image_pull_secrets[0].name, "registry");
    assert_eq!(template.pod_annotations["note"], "$(POD_NAME)");
    assert_eq!(template.node_selector["pool"], "small");
    assert_eq!(template.tolerations[0].toleration_seconds, Some(7));
    let affinity: Value = serde_json::to_value(template.affinity).unwrap();
    let preferred = &affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"];
    assert_eq!(preferred[0]["podAffinityTerm"]["topologyKey"], "zone");
    assert_eq!(template.priority_class_name.as_deref(), Some("low"));
}

#[test]
fn without_settings_of_pods_the_controller_gets_no_variable_for_them() {
    for name in ["AGENTLOOP_SENSOR_POD", "AGENTLOOP_AGENT_IMAGE_PULL_SECRETS"] {
        let Some(variable) = rendered(&[], name) else { return };
        assert_eq!(variable, Value::Null, "{name}");
    }
}
