//! The one-node cluster, with the release installed once for the whole run, and who may use it when.
//!
//! Tests that only use the cluster share it; tests that break it (restart the node, stop the API server, kill the
//! controller, upgrade the release) have it alone. A namespace of its own for each test, held to `restricted`.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::node;
use super::turns::{Turn, Turns, Use};
use crate::support::{clusters, kubectl::Kubectl};

/// Namespace of the release.
pub const SYSTEM: &str = "agentloop-system";
/// Directory of the chart.
pub const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/agentloop");
/// Name of the release.
pub const RELEASE: &str = "agentloop";
/// The resource by its full name, since other products own `agents` too.
pub const AGENTS: &str = "agents.agentloop.dev";
/// The labels of all replicas.
pub const REPLICAS: &str = "app.kubernetes.io/name=agentloop,app.kubernetes.io/component=controller";
/// The label of the replica that leads.
pub const LEADER: &str = "agentloop.dev/leader=true";

static INSTALLED: OnceLock<Option<Kubectl>> = OnceLock::new();
static TURNS: Turns = Turns::new();

/// The cluster, used side by side with other tests.
pub struct SharedCluster {
    pub system: Kubectl,
    _turn: Turn<'static>,
}

/// The cluster, for this test alone.
pub struct ExclusiveCluster {
    pub system: Kubectl,
    _turn: Turn<'static>,
}

/// The next test finds a release at rest: no replica that still ends or waits to be restarted, and a leader.
impl Drop for ExclusiveCluster {
    fn drop(&mut self) {
        restore(|| {
            if self.system.get("deployment", RELEASE).is_some() {
                settled(&self.system);
                leader(&self.system);
            }
        });
    }
}

/// The cluster for a test that breaks nothing; `None` (said loudly) where there is none.
pub fn shared() -> Option<SharedCluster> {
    let place = TURNS.queue(Use::Shared);
    let system = installed()?;
    let turn = place.wait();
    Some(SharedCluster { system, _turn: turn })
}

/// The cluster for a test that breaks it; `None` (said loudly) where there is none.
pub fn alone() -> Option<ExclusiveCluster> {
    let place = TURNS.queue(Use::Exclusive);
    let system = installed()?;
    let turn = place.wait();
    Some(ExclusiveCluster { system, _turn: turn })
}

/// The cluster for a test that installs a release of its own choice; `None` (said loudly) where there is none.
pub fn without_release() -> Option<ExclusiveCluster> {
    let system = Kubectl::new(&clusters::node()?, SYSTEM);
    let turn = TURNS.queue(Use::Exclusive).wait();
    system.apply(&restricted(SYSTEM));
    Some(ExclusiveCluster { system, _turn: turn })
}

fn installed() -> Option<Kubectl> {
    INSTALLED
        .get_or_init(|| {
            let system = Kubectl::new(&clusters::node()?, SYSTEM);
            system.apply(&restricted(SYSTEM));
            install(&system, &[]);
            Some(system)
        })
        .clone()
}

/// A manifest of a namespace that rejects pods that are not `restricted`, and says so of what would create them.
fn restricted(name: &str) -> String {
    let labels = json!({
        "pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted",
    });
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}).to_string()
}

/// `helm upgrade --install --wait` of the chart with two replicas and the page; `extra` are further arguments.
pub fn install(system: &Kubectl, extra: &[&str]) {
    install_chart(system, CHART, extra);
}

/// The same with the chart in another directory.
pub fn install_chart(system: &Kubectl, chart: &str, extra: &[&str]) {
    let mut args = vec!["--set", "replicaCount=2", "--set", "page.enabled=true"];
    args.extend(extra);
    release(system, chart, &image(), &args);
}

/// `helm upgrade --install --wait` of a chart in the namespace of `kubectl`, with an image of the node. The API server
/// warns of nothing.
pub fn release(kubectl: &Kubectl, chart: &str, image: &str, extra: &[&str]) {
    let (repository, tag) = image.rsplit_once(':').expect("the image is repository:tag");
    let repository = format!("image.repository={repository}");
    let tag = format!("image.tag={tag}");
    let mut args = vec!["upgrade", "--install", RELEASE, chart, "--create-namespace", "--wait"];
    args.extend(["--timeout", "120s", "--set", &repository, "--set", &tag]);
    args.extend(["--set", "image.pullPolicy=Never"]);
    args.extend(extra);
    let warnings = kubectl.helm_with_warnings(&args).stderr;
    assert!(!warnings.contains("would violate PodSecurity"), "{warnings}");
}

/// The image under test.
pub fn image() -> String {
    std::env::var("AGENTLOOP_E2E_IMAGE").unwrap_or_else(|_| "localhost/agentloop:dev".into())
}

/// The identity of the replica that leads, which is the name of its pod, if a Lease says so.
pub fn lease_holder(kubectl: &Kubectl) -> Option<String> {
    let lease = kubectl.get("lease", "agentloop-controller")?;
    lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
}

/// Installs in `drop`. While a test panics, a failure is not a second panic, which would end all other tests too.
pub fn restore(install: impl FnOnce()) {
    if std::thread::panicking() {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(install));
    } else {
        install();
    }
}

/// The release with other settings; the chart's own again with the end of the value.
pub struct SettingsGuard<'a>(&'a Kubectl);

impl<'a> SettingsGuard<'a> {
    /// `settings`: for `helm --set`.
    pub fn start(system: &'a Kubectl, settings: &str) -> Self {
        install(system, &["--set", settings]);
        leader(system);
        Self(system)
    }

    /// A Lease of `duration` seconds, renewed after `renew` seconds: so short that each killed leader is followed soon.
    pub fn short_lease(system: &'a Kubectl, (duration, renew): (u64, u64)) -> Self {
        let settings =
            format!("leaderElection.leaseDurationSeconds={duration},leaderElection.renewIntervalSeconds={renew}");
        Self::start(system, &settings)
    }
}

impl Drop for SettingsGuard<'_> {
    fn drop(&mut self) {
        restore(|| install(self.0, &[]));
        if std::thread::panicking() {
            show(self.0, &["get", AGENTS, "--all-namespaces", "-o", "wide"]);
            show(&self.0.in_namespace(SYSTEM), &["get", "pods"]);
        }
    }
}

/// A runtime for servers that a test without one of its own runs.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// The replica that leads, once it runs: the one that holds the Lease and has the label. The label alone stays on a replica that
/// was killed until its process runs again.
pub fn leader(system: &Kubectl) -> Value {
    let deadline = Instant::now() + Duration::from_secs(90);
    loop {
        let holder = lease_holder(system);
        let mut labelled = system.list("pods", LEADER);
        let leads = |pod: &Value| holder.is_some() && pod["metadata"]["name"].as_str() == holder.as_deref();
        let runs =
            |pod: &Value| pod["metadata"]["deletionTimestamp"].is_null() && node::find(pod, "controller").is_some();
        if let Some(found) = labelled.iter().position(|pod| leads(pod) && runs(pod)) {
            return labelled.swap_remove(found);
        }
        assert!(
            Instant::now() < deadline,
            "no leader within 90 s: {holder:?} holds the Lease, {labelled:#?}"
        );
        // A change of the Lease, of a label and of a process on the node: no single watch shows all three.
        std::thread::park_timeout(Duration::from_millis(500));
    }
}

/// The replicas, once the Deployment has as many as it wants and each runs and is ready. A container that other tests
/// killed several times is started again only after minutes.
pub fn settled(system: &Kubectl) -> Vec<Value> {
    let deadline = Instant::now() + Duration::from_mins(6);
    let mut last = Vec::new();
    while Instant::now() < deadline {
        let watch = system.watch("pods", &["-l", REPLICAS]);
        loop {
            let deployment = system.get("deployment", RELEASE).expect("the release is installed");
            let pods = system.list("pods", REPLICAS);
            let wanted = deployment["spec"]["replicas"].as_u64();
            if wanted == Some(pods.len() as u64) && is_rolled_out(&deployment) && pods.iter().all(is_settled) {
                return pods;
            }
            last = pods;
            let soon = Instant::now() + Duration::from_secs(2);
            if watch.next(soon.min(deadline)).is_none() {
                // Nothing happened, or the watch broke: look again, since the process and the Deployment may have changed.
                break;
            }
        }
    }
    panic!("the release did not settle within 6 min: {last:#?}");
}

/// Whether all replicas are those of the Deployment as it is now, and available.
fn is_rolled_out(deployment: &Value) -> bool {
    let (spec, status) = (&deployment["spec"], &deployment["status"]);
    status["observedGeneration"] == deployment["metadata"]["generation"]
        && status["updatedReplicas"] == spec["replicas"]
        && status["availableReplicas"] == spec["replicas"]
}

/// Whether a replica is there to stay: the kubelet says so, and its process runs, which the kubelet may learn late.
fn is_settled(pod: &Value) -> bool {
    let containers = pod["status"]["containerStatuses"].as_array();
    pod["metadata"]["deletionTimestamp"].is_null()
        && containers.is_some_and(|all| {
            all.iter()
                .all(|container| container["ready"] == true && container["state"]["running"].is_object())
        })
        && node::find(pod, "controller").is_some()
}

/// The leader's metrics page, as Prometheus would read it, once it shows all Agents.
pub fn metrics(system: &Kubectl) -> String {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let page = metrics_page(system);
        if series(&page, "agentloop_controller_caches_filled", &[]) == Some(1.0) {
            return page;
        }
        assert!(
            Instant::now() < deadline,
            "the caches of the leader are not filled: {page}"
        );
        // The page is the only place that says so.
        std::thread::park_timeout(Duration::from_millis(200));
    }
}

fn metrics_page(system: &Kubectl) -> String {
    let pod = leader(system);
    let name = pod["metadata"]["name"].as_str().expect("a pod has a name");
    system.raw(&format!(
        "/api/v1/namespaces/{SYSTEM}/pods/{name}:{}/proxy/metrics",
        metrics_port(&pod)
    ))
}

/// The port named `metrics` of a pod.
pub fn metrics_port(pod: &Value) -> u64 {
    pod["spec"]["containers"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|container| container["ports"].as_array().into_iter().flatten())
        .find(|port| port["name"] == "metrics")
        .and_then(|port| port["containerPort"].as_u64())
        .expect("the controller has a port named metrics")
}

/// The value of one series of a metrics page; labels must all be there.
pub fn series(page: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    page.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let (found, rest) = series.split_once('{').unwrap_or((series, ""));
        let fits = labels
            .iter()
            .all(|(key, value)| rest.contains(&format!("{key}=\"{value}\"")));
        (found == name && fits).then(|| value.parse().ok())?
    })
}

/// A namespace of a test, held to the `restricted` profile; goes with its value.
pub struct Namespace {
    pub kubectl: Kubectl,
}

impl Namespace {
    /// A new namespace, its name starting with `test`.
    pub fn new(system: &Kubectl, test: &str) -> Self {
        let stamp = std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_millis() % 100_000_000;
        let name = format!("{test}-{stamp}");
        system.apply(&restricted(&name));
        Self {
            kubectl: system.in_namespace(&name),
        }
    }

    /// All that helps to understand a failed test.
    fn dump(&self) {
        for args in [
            &["get", "agents.agentloop.dev,pods,persistentvolumeclaims", "-o", "wide"][..],
            &["describe", "agents.agentloop.dev"],
            // Specs of Sensors can be longer than all the rest.
            &["get", "sensors.agentloop.dev", "-o", STATUSES],
            &["describe", "pods"],
            &["get", "events", "--sort-by=.lastTimestamp"],
        ] {
            show(&self.kubectl, args);
        }
        logs(&self.kubectl, &[]);
        let system = self.kubectl.in_namespace(SYSTEM);
        // With the last state of each container, and the holder of the Lease.
        show(&system, &["describe", "pods"]);
        show(&system, &["get", "leases", "-o", "yaml"]);
        logs(&system, &["--previous"]);
        logs(&system, &[]);
    }
}

/// Each object's name and status.
const STATUSES: &str =
    r#"jsonpath={range .items[*]}{.metadata.name}: generation {.metadata.generation} {.status}{"\n"}{end}"#;

fn show(kubectl: &Kubectl, args: &[&str]) {
    let ended = kubectl.run(args);
    let namespace = kubectl.namespace();
    let command = args.join(" ");
    eprintln!("--- kubectl -n {namespace} {command}\n{}{}", ended.stdout, ended.stderr);
}

/// Prints the last log lines of all containers in a namespace.
fn logs(kubectl: &Kubectl, further: &[&str]) {
    for pod in kubectl.run(&["get", "pods", "-o", "name"]).stdout.lines() {
        let mut args = vec!["logs", pod, "--all-containers", "--prefix", "--tail=60"];
        args.extend(further);
        show(kubectl, &args);
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.dump();
        }
        self.kubectl
            .run(&["delete", "namespace", self.kubectl.namespace(), "--wait=false"]);
    }
}

/// Prints a measured figure in the one form that is searched for.
pub fn figure(name: &str, value: impl std::fmt::Display, unit: &str) {
    eprintln!("FIGURE {name} {value} {unit}");
}
