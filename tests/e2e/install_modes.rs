//! Ways to install: in a namespace that is held to `restricted`, and for one namespace only, without any permission
//! outside it.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::agents::{Agent, STARTUP, condition, script, scripted};
use super::cluster::{self, AGENTS, CHART, Namespace, RELEASE, alone, shared};
use super::release::{turning, turns, uid};
use crate::support::kubectl::Kubectl;

/// Starts both new replicas at the same time, which is faster.
const AT_ONCE: &str = "strategy.rollingUpdate.maxSurge=2";

/// An Agent that makes one turn and sleeps.
fn sleeper(namespace: &Namespace) -> Agent<'_> {
    let turns = json!({"turns": [{"text": "I wait.", "yield": {"sleep": 3600}}]});
    namespace.kubectl.apply(&script("sleeper", &turns));
    Agent::apply(namespace, "sleeper", &scripted("sleeper"), &json!({}))
}

/// An administrator's binding for the tokens of pods; goes with its value.
struct TokenReviewer<'a> {
    kubectl: &'a Kubectl,
    name: String,
}

impl<'a> TokenReviewer<'a> {
    fn of(kubectl: &'a Kubectl) -> Self {
        let name = format!("{RELEASE}-{}", kubectl.namespace());
        let account = format!("--serviceaccount={}:{RELEASE}", kubectl.namespace());
        let role = "--clusterrole=system:auth-delegator";
        kubectl.ok(&["create", "clusterrolebinding", &name, role, &account]);
        Self { kubectl, name }
    }
}

impl Drop for TokenReviewer<'_> {
    fn drop(&mut self) {
        self.kubectl.run(&["delete", "clusterrolebinding", &self.name]);
    }
}

/// The release of the run serves one namespace only; all again with the end of the value.
struct SingleNamespaceInstall<'a>(&'a Kubectl);

impl<'a> SingleNamespaceInstall<'a> {
    fn to(system: &'a Kubectl, namespace: &str) -> Self {
        let narrowed = Self(system);
        cluster::install(
            system,
            &["--set", &format!("watchNamespaces={{{namespace}}}"), "--set", AT_ONCE],
        );
        narrowed
    }
}

impl Drop for SingleNamespaceInstall<'_> {
    fn drop(&mut self) {
        cluster::restore(|| {
            cluster::install(self.0, &["--set", AT_ONCE]);
            // Replaces no pod.
            cluster::install(self.0, &[]);
        });
    }
}

/// What `kubectl auth can-i` says of the account of the release in a namespace.
fn may(kubectl: &Kubectl, words: &[&str]) -> bool {
    let account = format!("--as=system:serviceaccount:{}:{RELEASE}", kubectl.namespace());
    let mut args = vec!["auth", "can-i", &account];
    args.extend(words);
    let said = kubectl.in_namespace("").run(&args);
    match said.stdout.trim() {
        "yes" => true,
        no if no.starts_with("no") => false,
        _ => panic!("kubectl {}: {}", args.join(" "), said.stderr),
    }
}

/// Kind and namespace of each object of a release.
fn objects(kubectl: &Kubectl) -> Vec<(String, String)> {
    let manifest = kubectl.helm(&["get", "manifest", RELEASE]);
    let documents = serde_yaml::Deserializer::from_str(&manifest);
    let documents = documents.map(|document| <Value as serde::Deserialize>::deserialize(document).unwrap());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    documents
        .filter(|object| !object.is_null())
        .map(|object| (text(&object["kind"]), text(&object["metadata"]["namespace"])))
        .collect()
}

/// The log filter of the controller, as its pods have it.
fn log_filter(leader: &Value) -> Option<String> {
    let environment = leader["spec"]["containers"][0]["env"].as_array()?;
    let filter = environment.iter().find(|variable| variable["name"] == "RUST_LOG")?;
    filter["value"].as_str().map(Into::into)
}

/// Its test succeeds, and an upgrade and its rollback replace the controller and nothing else: the loop goes on in its pod.
fn is_tested_upgraded_and_rolled_back(team: &Namespace, values: &[&str]) {
    let kubectl = &team.kubectl;
    let said = kubectl.helm(&["test", RELEASE, "--timeout", "120s"]);
    assert!(said.contains("Succeeded"), "{said}");
    assert!(kubectl.get("pod", "agentloop-test").is_none(), "its pod is left");

    let agent = turning(team);
    let pod = agent.until_pod(None, 60);
    agent.until_turns(3, 60);
    let first = cluster::leader(kubectl);
    let before = log_filter(&first);
    let assert_progress = |what: &str| {
        agent.until_turns(turns(&agent) + 10, 60);
        agent.until_condition("Ready", "True", "LoopRunning", 60);
        assert_eq!(uid(&agent.until_pod(None, 30)), uid(&pod), "{what} restarted a loop");
    };
    let changed = [values, &["--set", "logLevel=debug"]].concat();
    cluster::release(kubectl, CHART, &cluster::image(), &changed);
    let second = cluster::leader(kubectl);
    assert_ne!(uid(&first), uid(&second), "the upgrade replaced the controller");
    assert_eq!(log_filter(&second).as_deref(), Some("debug"));
    assert_progress("the upgrade");
    kubectl.helm(&["rollback", RELEASE, "--wait", "--timeout", "120s"]);
    let third = cluster::leader(kubectl);
    assert_ne!(uid(&second), uid(&third), "the rollback replaced the controller");
    assert_eq!(log_filter(&third), before);
    assert_progress("the rollback");
}

#[test]
fn the_namespace_of_the_release_rejects_what_is_not_restricted() {
    let Some(cluster) = shared() else { return };
    // The installation has failed if it was warned of: this shows that it would have been.
    let create = ["create", "deployment", "loose", "--image=loose", "--dry-run=server"];
    let loose = cluster.system.run(&create);
    assert!(loose.stderr.contains("would violate PodSecurity"), "{}", loose.stderr);
    let run = ["run", "loose", "--image=loose", "--dry-run=server"];
    let loose = cluster.system.run(&run);
    assert!(
        !loose.success && loose.stderr.contains("restricted"),
        "{}",
        loose.stderr
    );
}

#[test]
fn a_release_of_one_namespace_has_no_right_outside_and_works_beside_another_release() {
    let Some(cluster) = alone() else { return };
    let system = &cluster.system;
    let [team, platform, other] = ["team", "platform", "other"].map(|name| Namespace::new(system, name));
    let kubectl = &team.kubectl;
    let _reviewer = TokenReviewer::of(kubectl);
    let watched = format!("watchNamespaces={{{}}}", kubectl.namespace());
    let local = [
        "rbac.clusterScoped=false",
        "crds.enabled=false",
        "replicaCount=1",
        &watched,
    ];
    let local: Vec<&str> = local.iter().flat_map(|value| ["--set", value]).collect();
    let narrowed = std::thread::scope(|scope| {
        // No Agent is there yet that both could serve.
        let narrowing = scope.spawn(|| SingleNamespaceInstall::to(system, platform.kubectl.namespace()));
        cluster::release(kubectl, CHART, &cluster::image(), &local);
        narrowing.join().unwrap()
    });

    let agents = [&team, &platform, &other].map(sleeper);
    for agent in &agents[..2] {
        agent.until_turns(1, STARTUP);
        agent.until_condition("Ready", "True", "LoopRunning", 60);
    }
    let alone = agents[2].object();
    let reason = condition(&alone, "Ready").map(|ready| &ready["reason"]);
    assert_eq!(reason, Some(&json!("Pending")), "no release serves it");
    assert!(other.kubectl.list("pods", "").is_empty());
    let pods = kubectl.list("pods", cluster::REPLICAS);
    let leader = cluster::lease_holder(kubectl).expect("a release has a leader");
    assert!(
        pods.iter()
            .any(|pod| leader.contains(pod["metadata"]["name"].as_str().unwrap())),
        "{leader} leads in {}",
        kubectl.namespace()
    );
    assert_ne!(
        Some(&leader),
        cluster::lease_holder(system).as_ref(),
        "each release has a leader of its own"
    );
    let events = kubectl.ok(&["get", "events", "--field-selector=type=Warning", "-o", "json"]);
    assert!(
        !events.contains("PodSecurity") && !events.contains("FailedCreate"),
        "{events}"
    );

    let (own, foreign) = (kubectl.namespace(), other.kubectl.namespace());
    for (kind, namespace) in objects(kubectl) {
        assert_eq!(namespace, own, "{kind}");
    }
    assert!(may(kubectl, &["list", AGENTS, "-n", own]) && may(kubectl, &["create", "pods", "-n", own]));
    assert!(may(kubectl, &["create", "tokenreviews.authentication.k8s.io"]));
    for denied in [
        &["list", AGENTS, "--all-namespaces"][..],
        &["list", AGENTS, "-n", foreign],
        &["get", "secrets", "-n", foreign],
        &["create", "pods", "-n", platform.kubectl.namespace()],
        &["get", "nodes"],
        &["list", "namespaces"],
        &["patch", "customresourcedefinitions"],
        &["create", "clusterroles"],
    ] {
        assert!(!may(kubectl, denied), "{denied:?}");
    }
    is_tested_upgraded_and_rolled_back(&team, &local);
    // Nothing but the missing release was in its way.
    kubectl.helm(&["uninstall", RELEASE]);
    drop(narrowed);
    agents[2].until_turns(1, STARTUP);
}
