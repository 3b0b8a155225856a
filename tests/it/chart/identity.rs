//! The admission policies of the pods' identity, on a real API server: only the controller creates pods that network
//! policies and the controller itself take for those of Agents and Sensors.

use serde_json::{Value, json};

use super::controller_policy::ONE;
use super::policies::{InstalledPolicies, expect_refusal as refused, wait_until};
use super::render::{Rendered, render};
use crate::support::clusters;
use crate::support::kubectl::Kubectl;

const CONTROLLER: &str = "system:serviceaccount:agentloop-system:agentloop";
const STATEFULSET_CONTROLLER: &str = "system:serviceaccount:kube-system:statefulset-controller";
/// The account that all controllers of Kubernetes share, unless each has its own.
const CONTROLLER_MANAGER: &str = "system:kube-controller-manager";
/// With `edit` in its namespace, as far as pods are concerned.
const TENANT: &str = "identity-tenant";

/// The chart's policies of the identity of pods, installed for one namespace.
struct Installed(InstalledPolicies);

impl Installed {
    fn new() -> Option<Self> {
        let tenant = format!("identity-{}", jiff::Timestamp::now().as_millisecond());
        let Rendered(mut objects) = render(&[&format!("watchNamespaces={{{tenant}}}")])?.unwrap();
        let cluster = Kubectl::new(&clusters::control_plane()?, &tenant);
        objects.retain(|object| {
            let name = object["metadata"]["name"].as_str().unwrap();
            object["kind"]
                .as_str()
                .unwrap()
                .starts_with("ValidatingAdmissionPolicy")
                && name.contains("-identity-")
        });
        assert_eq!(objects.len(), 4, "a policy and a binding for pods and for StatefulSets");
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        let role = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "pods"},
            "rules": [
                {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["*"]},
                {"apiGroups": ["apps"], "resources": ["statefulsets", "statefulsets/status"], "verbs": ["*"]},
            ],
        });
        let users = [CONTROLLER, STATEFULSET_CONTROLLER, CONTROLLER_MANAGER, TENANT];
        let subjects = users.map(|name| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}));
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "pods"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "pods"}, "subjects": subjects,
        });
        let needs = [account, role, binding];
        Some(Self(InstalledPolicies::install(
            &ONE,
            cluster,
            tenant,
            (&needs, objects),
        )))
    }

    fn answer(&self, user: &str, args: &[&str], input: Option<&Value>) -> String {
        self.0.answer(&["--as", user], args, input)
    }

    fn create(&self, user: &str, object: &Value) -> String {
        self.answer(user, &["create"], Some(object))
    }
}

fn pod(name: &str, labels: &Value, owners: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "ownerReferences": owners},
        "spec": {"containers": [{"name": "c", "image": "localhost/x:1"}]},
    })
}

fn set(labels: &Value, owners: &Value) -> Value {
    let mut labels = labels.clone();
    labels["app"] = json!("x");
    json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "x", "ownerReferences": owners},
        "spec": {
            "selector": {"matchLabels": {"app": "x"}}, "serviceName": "x",
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "localhost/x:1"}]}},
        },
    })
}

fn owned_by(api_version: &str, kind: &str) -> Value {
    json!([{
        "apiVersion": api_version, "kind": kind, "name": "coast", "uid": "2d1e4f4e-0f55-4f0b-8b44-0d7d3c1b0c11", "controller": true,
    }])
}

#[test]
fn only_the_controller_assigns_a_pod_the_identity_of_an_agent_or_a_sensor() {
    let Some(installed) = Installed::new() else { return };
    let (plain, free) = (json!({"app": "web"}), json!([]));
    let agent = json!({"agentloop.dev/agent": "coast"});
    let sensor = json!({"agentloop.dev/sensor": "page"});
    let of_agent = owned_by("agentloop.dev/v1alpha1", "Agent");
    let words = "is set, changed and removed";
    wait_until(|| {
        installed.create(TENANT, &pod("x", &agent, &free)).contains(words)
            && installed.create(TENANT, &set(&sensor, &free)).contains(words)
            && installed.create(TENANT, &pod("x", &plain, &free)).is_empty()
    });

    refused(
        installed.create(TENANT, &pod("x", &sensor, &free)),
        "the label agentloop.dev/sensor",
    );
    refused(
        installed.create(TENANT, &set(&agent, &free)),
        "the label agentloop.dev/agent",
    );
    refused(
        installed.create(TENANT, &pod("x", &plain, &of_agent)),
        "creates pods that belong to an Agent",
    );
    let of_sensor = owned_by("agentloop.dev/v1alpha1", "Sensor");
    refused(
        installed.create(TENANT, &set(&plain, &of_sensor)),
        "creates statefulsets that belong to an Agent",
    );

    // Network policies and the controller's watch select by the key of the label: an empty value is one.
    for key in ["agentloop.dev/agent", "agentloop.dev/sensor"] {
        let empty = json!({key: ""});
        let words = format!("the label {key}");
        refused(installed.create(TENANT, &pod("x", &empty, &free)), &words);
        refused(installed.create(TENANT, &set(&empty, &free)), &words);
    }

    // Near misses: pods of others, with others' labels and owners.
    let of_job = owned_by("batch/v1", "Job");
    assert_eq!(
        installed.create(TENANT, &pod("x", &json!({"agentloop.dev/other": "a"}), &of_job)),
        ""
    );
    assert_eq!(installed.create(TENANT, &set(&plain, &of_job)), "");
    let part = json!({"app.kubernetes.io/part-of": "agentloop"});
    assert_eq!(
        installed.create(TENANT, &pod("x", &part, &free)),
        "",
        "no policy selects it"
    );

    assert_eq!(installed.create(CONTROLLER, &pod("x", &agent, &of_agent)), "");
    assert_eq!(installed.create(CONTROLLER, &set(&sensor, &of_sensor)), "");
    let of_set = owned_by("apps/v1", "StatefulSet");
    assert_eq!(
        installed.create(STATEFULSET_CONTROLLER, &pod("x", &sensor, &of_set)),
        ""
    );
    refused(
        installed.create(STATEFULSET_CONTROLLER, &set(&sensor, &of_sensor)),
        "the label agentloop.dev/sensor",
    );
}

/// The controllers of Kubernetes create pods from templates that any user may write, except for those of StatefulSets.
#[test]
fn the_controllers_of_kubernetes_assign_an_identity_to_pods_of_stateful_sets_only() {
    let Some(installed) = Installed::new() else { return };
    let (plain, free) = (json!({"app": "web"}), json!([]));
    let (of_set, of_deployment) = (owned_by("apps/v1", "StatefulSet"), owned_by("apps/v1", "ReplicaSet"));
    let sensor = json!({"agentloop.dev/sensor": "page"});
    wait_until(|| {
        installed
            .create(TENANT, &pod("x", &sensor, &free))
            .contains("is set, changed and removed")
            && installed
                .create(CONTROLLER_MANAGER, &pod("x", &sensor, &of_set))
                .is_empty()
            && installed
                .create(STATEFULSET_CONTROLLER, &pod("x", &sensor, &of_set))
                .is_empty()
    });
    let of_other_set = owned_by("example.com/v1", "StatefulSet");
    for key in ["agentloop.dev/agent", "agentloop.dev/sensor"] {
        let (labels, words) = (json!({key: "a"}), format!("the label {key}"));
        for owners in [&of_deployment, &of_other_set, &free] {
            refused(installed.create(CONTROLLER_MANAGER, &pod("x", &labels, owners)), &words);
        }
    }
    assert_eq!(
        installed.create(CONTROLLER_MANAGER, &pod("x", &plain, &of_deployment)),
        ""
    );
    let tenant = installed.create(TENANT, &pod("x", &sensor, &of_set));
    refused(tenant, "the label agentloop.dev/sensor");
}

#[test]
fn the_identity_of_an_existing_pod_is_neither_added_nor_removed() {
    let Some(installed) = Installed::new() else { return };
    let (plain, free) = (json!({"app": "web"}), json!([]));
    let agent = json!({"agentloop.dev/agent": "coast"});
    installed.0.cluster.apply(&pod("web", &plain, &free).to_string());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), pod("coast", &agent, &free).to_string()).unwrap();
    wait_until(|| {
        let mut create = installed.0.cluster.command(&["create", "--as", CONTROLLER, "-f"]);
        create.arg(file.path()).output().unwrap().status.success()
    });
    let label = |pod: &str, label: &str| installed.answer(TENANT, &["label", "--overwrite", "pod", pod, label], None);
    let words = "is set, changed and removed";
    wait_until(|| label("web", "agentloop.dev/agent=coast").contains(words) && label("web", "tier=a").is_empty());
    for (pod, change) in [
        ("coast", "agentloop.dev/agent=other"),
        ("coast", "agentloop.dev/agent="),
        ("coast", "agentloop.dev/agent-"),
        ("coast", "agentloop.dev/sensor=page"),
        ("coast", "agentloop.dev/sensor="),
        ("web", "agentloop.dev/agent="),
        ("web", "agentloop.dev/sensor="),
    ] {
        let said = label(pod, change);
        assert!(said.contains(words), "{pod} {change}: {said}");
    }
    assert_eq!(label("coast", "tier=a"), "", "other labels are free");
    // The status of a pod is another way to its labels.
    let through_status = |label: &str| {
        let patch = json!({"metadata": {"labels": {label: ""}}}).to_string();
        installed.answer(
            TENANT,
            &["patch", "pod", "web", "--subresource=status", "-p", &patch],
            None,
        )
    };
    let said = through_status("agentloop.dev/agent");
    assert!(said.contains(words), "{said}");
    assert_eq!(through_status("tier"), "");
}

#[test]
fn an_existing_stateful_set_cannot_assume_the_identity_of_a_sensor() {
    let Some(installed) = Installed::new() else { return };
    let (plain, free) = (json!({"app": "web"}), json!([]));
    installed.0.cluster.apply(&set(&plain, &free).to_string());
    let patch = |label: &str, value: &str| {
        let patch = json!({"spec": {"template": {"metadata": {"labels": {label: value}}}}}).to_string();
        installed.answer(TENANT, &["patch", "statefulset", "x", "-p", &patch], None)
    };
    let words = "is set, changed and removed";
    wait_until(|| patch("agentloop.dev/sensor", "page").contains(words) && patch("tier", "a").is_empty());
    for label in ["agentloop.dev/agent", "agentloop.dev/sensor"] {
        let said = patch(label, "");
        assert!(said.contains(words), "{label}: {said}");
    }
}

#[test]
fn an_existing_object_cannot_be_assigned_to_an_agent_or_a_sensor() {
    let Some(installed) = Installed::new() else { return };
    let plain = json!({"app": "web"});
    // An owner that exists, or the garbage collector would delete the pod.
    let account = installed.0.cluster.get("serviceaccount", "default").unwrap();
    let uid = &account["metadata"]["uid"];
    let owners = json!([{"apiVersion": "v1", "kind": "ServiceAccount", "name": "default", "uid": uid}]);
    installed.0.cluster.apply(&pod("owned", &plain, &owners).to_string());
    installed.0.cluster.apply(&set(&plain, &owners).to_string());
    let give = |object: [&str; 2], owners: Value, further: &[&str]| {
        let patch = json!({"metadata": {"ownerReferences": owners}}).to_string();
        let mut args = vec!["patch", object[0], object[1], "-p", &patch];
        args.extend(further);
        installed.answer(TENANT, &args, None)
    };
    let owned = ["pod", "owned"];
    let words = "belong to an Agent or a Sensor";
    let of_agent = || owned_by("agentloop.dev/v1alpha1", "Agent");
    // Each kind is watched by the server on its own.
    wait_until(|| {
        give(owned, of_agent(), &[]).contains(words)
            && give(["statefulset", "x"], of_agent(), &["--dry-run=server"]).contains(words)
            && give(owned, owned_by("batch/v1", "Job"), &[]).is_empty()
    });
    // The uid is that of an owner that it has, which is of another kind.
    let same_uid = json!([{"apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "name": "coast", "uid": uid}]);
    let said = give(owned, same_uid.clone(), &[]);
    assert!(said.contains(words), "{said}");
    for further in [&[][..], &["--subresource=status"]] {
        let said = give(["statefulset", "x"], same_uid.clone(), further);
        assert!(said.contains(words), "{further:?}: {said}");
    }
}

#[test]
fn the_policies_of_identity_are_for_the_namespaces_that_are_served_and_can_be_left_out() {
    let Some(rendered) = render(&[]) else { return };
    let everywhere = rendered.unwrap();
    let named = render(&["watchNamespaces={team-a}"]).unwrap().unwrap();
    let without = render(&["rbac.identityPolicy=false"]).unwrap().unwrap();
    for kind in ["pods", "statefulsets"] {
        let name = format!("agentloop-identity-{kind}");
        let policy = everywhere.one("ValidatingAdmissionPolicy", &name);
        assert_eq!(policy["spec"]["failurePolicy"], "Fail");
        let others = policy["spec"]["matchConditions"][0]["expression"].as_str().unwrap();
        assert!(others.contains(CONTROLLER), "{others}");
        for words in [STATEFULSET_CONTROLLER, CONTROLLER_MANAGER, "o.kind == 'StatefulSet'"] {
            assert_eq!(others.contains(words), kind == "pods", "{others}");
        }
        let binding = everywhere.one("ValidatingAdmissionPolicyBinding", &name);
        assert!(binding["spec"]["matchResources"].is_null());
        let binding = named.one(
            "ValidatingAdmissionPolicyBinding",
            &format!("agentloop-agentloop-system-identity-{kind}"),
        );
        let expression = &binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"][0];
        assert_eq!(
            *expression,
            json!({"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]})
        );
        assert!(!without.has("ValidatingAdmissionPolicy", &name));
        assert!(!without.has("ValidatingAdmissionPolicyBinding", &name));
    }
}

#[test]
fn the_api_server_finds_nothing_wrong_with_the_expressions_of_identity() {
    let Some(installed) = Installed::new() else { return };
    for object in installed
        .0
        .objects
        .iter()
        .filter(|object| object["kind"] == "ValidatingAdmissionPolicy")
    {
        let name = object["metadata"]["name"].as_str().unwrap();
        assert_eq!(installed.0.expression_warnings(name), Value::Null, "{name}");
    }
}
