//! The admission policies and permissions of the controller's own account, on a real API server: what it does is
//! allowed, and what an attacker with its token might try is not.

use std::sync::Mutex;

use serde_json::{Value, json};

use super::policies::{InstalledPolicies, expect_refusal as refused, wait_until};
use super::render::{Rendered, render};
use super::values::values_text;
use crate::support::clusters;
use crate::support::kubectl::Kubectl;

const ACCOUNT: &str = "system:serviceaccount:agentloop-system:agentloop";
const HOME: &str = "agentloop-system";
/// One installation at a time: they have the same names, and restrict the controller's account in every namespace.
pub(super) static ONE: Mutex<()> = Mutex::new(());
const MANAGED: &str = "app.kubernetes.io/managed-by";

/// The chart's permissions and policies of the controller, installed.
struct ControllerPolicy(InstalledPolicies);

impl ControllerPolicy {
    fn install() -> Option<Self> {
        let Rendered(mut objects) = render(&["metrics.authentication=Token"])?.unwrap();
        let cluster = Kubectl::new(&clusters::control_plane()?, "");
        let tenant = format!("fence-{}", jiff::Timestamp::now().as_millisecond());
        objects.retain(|object| {
            let (kind, name) = (
                object["kind"].as_str().unwrap(),
                object["metadata"]["name"].as_str().unwrap(),
            );
            let role =
                ["Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"].contains(&kind) && name == "agentloop";
            role || kind.starts_with("ValidatingAdmissionPolicy") && name.starts_with("agentloop-controller")
        });
        let needs = [
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOME}}),
            object("ServiceAccount", "agentloop-agent", &tenant, "agentloop-controller"),
        ];
        Some(Self(InstalledPolicies::install(
            &ONE,
            cluster,
            tenant,
            (&needs, objects),
        )))
    }

    /// What the API server answers to the controller's account; empty if it allows the request.
    fn answer(&self, args: &[&str], input: Option<&Value>) -> String {
        let user = ["--as", ACCOUNT, "--as-group", "system:serviceaccounts"];
        self.0.answer(&user, args, input)
    }

    fn applies(&self, object: &Value) -> String {
        self.answer(&["apply", "--server-side", "--force-conflicts"], Some(object))
    }

    fn creates(&self, object: &Value) -> String {
        self.answer(&["create"], Some(object))
    }

    /// An object in the namespace with Agents, labelled as the controller's.
    fn ours(&self, kind: &str, name: &str) -> Value {
        object(kind, name, &self.0.tenant, "agentloop-controller")
    }

    fn pod(&self, spec: Value) -> Value {
        let mut pod = self.ours("Pod", "x");
        pod["spec"] = spec;
        pod
    }

    #[expect(clippy::needless_pass_by_value, reason = "it is written in place")]
    fn set(&self, spec: Value) -> Value {
        let mut set = self.ours("StatefulSet", "x-sensor");
        set["apiVersion"] = json!("apps/v1");
        let labels = json!({"a": "b"});
        set["spec"] = json!({
            "selector": {"matchLabels": labels}, "serviceName": "x",
            "template": {"metadata": {"labels": labels}, "spec": spec},
        });
        set
    }
}

fn object(kind: &str, name: &str, namespace: &str, managed: &str) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace, "labels": {MANAGED: managed}}})
}

/// The spec of a pod like those of Agents.
fn pod_spec() -> Value {
    let context = json!({"runAsNonRoot": true, "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    json!({
        "serviceAccountName": "agentloop-agent",
        "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [{"name": "gateway", "image": "localhost/agentloop:0.1.0", "restartPolicy": "Always", "securityContext": context}],
        "containers": [{"name": "worker", "image": "localhost/agentloop:0.1.0", "securityContext": context}],
        "volumes": [{"name": "socket", "emptyDir": {"medium": "Memory"}}],
    })
}

/// What is changed in a pod, and the words of its refusal.
fn worse_pods() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        (
            "/serviceAccountName",
            json!("default"),
            "have the service account agentloop-agent",
        ),
        ("/hostNetwork", json!(true), "share nothing with their node"),
        ("/hostPID", json!(true), "share nothing with their node"),
        ("/hostIPC", json!(true), "share nothing with their node"),
        (
            "/volumes",
            json!([{"name": "node", "hostPath": {"path": "/"}}]),
            "have no hostPath",
        ),
        ("/securityContext/runAsNonRoot", json!(false), "are restricted"),
        (
            "/initContainers/0/securityContext/allowPrivilegeEscalation",
            json!(true),
            "are restricted",
        ),
        // The init container that Istio adds without its CNI plugin.
        (
            "/initContainers/0/securityContext",
            json!({
                "runAsNonRoot": false, "runAsUser": 0, "privileged": false, "allowPrivilegeEscalation": false,
                "capabilities": {"add": ["NET_ADMIN", "NET_RAW"], "drop": ["ALL"]},
            }),
            "are restricted",
        ),
        (
            "/containers/0/securityContext/capabilities/add",
            json!(["NET_ADMIN"]),
            "are restricted",
        ),
        (
            "/containers/0/securityContext/capabilities/drop",
            json!([]),
            "are restricted",
        ),
        ("/containers/0/image", json!("docker.io/other:1"), "run its own image"),
        (
            "/initContainers/0/image",
            json!("localhost/agentloop-not:1"),
            "run its own image",
        ),
    ]
}

/// Sets a field, which may be absent.
fn with(mut spec: Value, path: &str, value: Value) -> Value {
    let (parent, key) = path.rsplit_once('/').unwrap();
    spec.pointer_mut(parent).unwrap()[key] = value;
    spec
}

#[test]
fn the_controllers_account_writes_its_own_objects_and_restricted_pods_only() {
    let Some(controller_policy) = ControllerPolicy::install() else {
        return;
    };
    wait_until(|| {
        controller_policy
            .creates(&controller_policy.pod(with(pod_spec(), "/hostPID", json!(true))))
            .contains("share nothing")
            && controller_policy
                .applies(&controller_policy.ours("ConfigMap", "agentloop-link-ca"))
                .is_empty()
    });

    assert_eq!(controller_policy.creates(&controller_policy.pod(pod_spec())), "");
    assert_eq!(controller_policy.creates(&controller_policy.set(pod_spec())), "");
    // Containers of tools have images of users, in the pods of Agents only.
    let mut with_tools = pod_spec();
    let mut tool = with_tools["initContainers"][0].clone();
    for (name, allowed) in [("tool", false), ("toolbox", true), ("mcp-github", true)] {
        tool["name"] = json!(name);
        tool["image"] = json!("docker.io/other:1");
        let list = with_tools["initContainers"].as_array_mut().unwrap();
        list.truncate(1);
        list.push(tool.clone());
        let answer = controller_policy.creates(&controller_policy.pod(with_tools.clone()));
        assert_eq!(answer.is_empty(), allowed, "{name}: {answer}");
    }
    refused(
        controller_policy.creates(&controller_policy.set(with_tools)),
        "run its own image",
    );
    for (path, value, words) in worse_pods() {
        let spec = with(pod_spec(), path, value);
        refused(controller_policy.creates(&controller_policy.pod(spec.clone())), words);
        refused(controller_policy.creates(&controller_policy.set(spec)), words);
    }

    // By name, as RBAC can say it of what is applied.
    for (kind, name) in [
        ("ServiceAccount", "agentloop-agent"),
        ("ServiceAccount", "agentloop-sensor"),
    ] {
        assert_eq!(controller_policy.applies(&controller_policy.ours(kind, name)), "");
    }
    refused(
        controller_policy.applies(&controller_policy.ours("ConfigMap", "coredns")),
        "cannot patch resource",
    );
    refused(
        controller_policy.applies(&controller_policy.ours("ServiceAccount", "default")),
        "cannot patch resource",
    );
    refused(
        controller_policy.creates(&controller_policy.ours("ConfigMap", "other")),
        "cannot create resource",
    );
    // What readers of metrics trust, in the namespace of the release alone.
    let authorities = ("ConfigMap", "agentloop-metrics-ca");
    let own = object(authorities.0, authorities.1, HOME, "agentloop-controller");
    assert_eq!(controller_policy.applies(&own), "");
    let foreign = controller_policy.ours(authorities.0, authorities.1);
    refused(controller_policy.applies(&foreign), "cannot patch resource");
    assert_eq!(
        controller_policy.creates(&object("Secret", "agentloop-link-ca", HOME, "x")),
        ""
    );
    refused(
        controller_policy.creates(&object("Secret", "token", HOME, "x")),
        "writes no Secret but agentloop-link-ca",
    );

    // Not where the cluster's own things are, not without the label, and nothing of others.
    let elsewhere = object("ConfigMap", "agentloop-link-ca", "kube-system", "agentloop-controller");
    refused(
        controller_policy.applies(&elsewhere),
        "writes nothing in the namespaces kube-*",
    );
    let mut unlabelled = controller_policy.ours("Service", "web");
    unlabelled["spec"] = json!({"ports": [{"port": 80}]});
    assert_eq!(controller_policy.creates(&unlabelled), "");
    unlabelled["metadata"]["labels"] = json!({MANAGED: "Helm"});
    refused(
        controller_policy.creates(&unlabelled),
        "has the label app.kubernetes.io/managed-by=agentloop-controller",
    );
    controller_policy.0.cluster.apply(&unlabelled.to_string());
    let words = "changes and deletes only what has the label";
    refused(
        controller_policy.answer(&["delete", "service", "web", "-n", &controller_policy.0.tenant], None),
        words,
    );
    let take = format!("{MANAGED}=agentloop-controller");
    let label = [
        "label",
        "--overwrite",
        "service",
        "web",
        "-n",
        &controller_policy.0.tenant,
        &take,
    ];
    refused(controller_policy.answer(&label, None), words);
}

#[test]
fn the_leader_labels_its_own_pod_and_changes_nothing_else_of_it() {
    let Some(controller_policy) = ControllerPolicy::install() else {
        return;
    };
    let mut own = object("Pod", "fence-own", HOME, "Helm");
    for (key, value) in [
        ("name", "agentloop"),
        ("instance", "agentloop"),
        ("component", "controller"),
    ] {
        own["metadata"]["labels"][format!("app.kubernetes.io/{key}")] = json!(value);
    }
    own["spec"] = with(pod_spec(), "/serviceAccountName", json!("fence-own"));
    let account = object("ServiceAccount", "fence-own", HOME, "Helm");
    let mut other = own.clone();
    other["metadata"]["name"] = json!("fence-other");
    other["metadata"]["labels"] = json!({});
    for object in [&account, &own, &other] {
        controller_policy.0.cluster.apply(&object.to_string());
    }
    let label =
        |pod: &str| controller_policy.answer(&["label", "pod", pod, "-n", HOME, "agentloop.dev/leader=true"], None);
    wait_until(|| {
        label("fence-other").contains("has the label app.kubernetes.io/managed-by") && label("fence-own").is_empty()
    });
    let image = r#"{"spec":{"containers":[{"name":"worker","image":"docker.io/other:1"}]}}"#;
    // The API server begins with each policy at a time of its own.
    wait_until(|| {
        let patch = ["patch", "pod", "fence-own", "-n", HOME, "--dry-run=server", "-p", image];
        let said = controller_policy.answer(&patch, None);
        said.contains("run its own image") || said.contains("service account")
    });
    let said = controller_policy.answer(&["delete", "pod", "fence-own", "-n", HOME], None);
    assert!(said.contains("changes and deletes only what has the label"), "{said}");
    for pod in ["fence-own", "fence-other"] {
        controller_policy
            .0
            .cluster
            .run(&["delete", "pod", pod, "-n", HOME, "--grace-period=0", "--force"]);
    }
    controller_policy
        .0
        .cluster
        .run(&["delete", "serviceaccount", "fence-own", "-n", HOME]);
}

#[test]
fn the_api_server_finds_nothing_wrong_with_the_expressions() {
    let Some(controller_policy) = ControllerPolicy::install() else {
        return;
    };
    for kind in ["objects", "pods", "statefulsets"] {
        let name = format!("agentloop-controller-{kind}");
        assert_eq!(controller_policy.0.expression_warnings(&name), Value::Null, "{name}");
    }
}

#[test]
fn images_of_sidecars_are_named_and_the_policies_can_be_left_out() {
    let Some(rendered) = render(&["rbac.sidecarImages={docker.io/istio/}"]) else {
        return;
    };
    let objects = rendered.unwrap();
    let policy = objects
        .one("ValidatingAdmissionPolicy", "agentloop-controller-pods")
        .to_string();
    assert!(policy.contains("c.image.startsWith('docker.io/istio/')"), "{policy}");
    // Their images alone are not enough, which the example must say.
    assert!(
        policy.contains("and those that others add to its pods, are restricted"),
        "{policy}"
    );
    let text = values_text();
    let (comment, _) = text.split_once("\n  sidecarImages:").unwrap();
    let (_, comment) = comment.rsplit_once("\n  identityPolicy:").unwrap();
    assert!(comment.contains("istio-cni"), "{comment}");
    let without = render(&["rbac.controllerPolicy=false"]).unwrap().unwrap();
    assert!(!without.has("ValidatingAdmissionPolicy", "agentloop-controller-pods"));
    assert!(!without.has("ValidatingAdmissionPolicyBinding", "agentloop-controller-objects"));
}
