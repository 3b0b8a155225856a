//! What belongs to a release besides its objects: the chart's own description, the README, the notes, the test of a release, the
//! Kustomize base, and the release without objects outside namespaces.

use std::path::Path;
use std::process::Command;

use agentloop::api::crd;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::NAMESPACED;
use super::render::{Rendered, containers, helm, render, repository};
use crate::schema::reader::Schema;
use crate::support::clusters::skip;
use crate::support::kubectl::tool;

fn read(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap()
}

fn chart() -> Value {
    serde_yaml::from_str(&read("charts/agentloop/Chart.yaml")).unwrap()
}

/// An annotation of Chart.yaml that is YAML itself.
fn annotation(chart: &Value, name: &str) -> Vec<Value> {
    let text = chart["annotations"][format!("artifacthub.io/{name}")].as_str();
    serde_yaml::from_str(text.unwrap_or_else(|| panic!("no annotation {name}"))).unwrap()
}

/// The notes of a release with these settings.
fn notes(settings: &[&str]) -> Option<String> {
    let mut command = helm()?;
    command
        .args([
            "install",
            "agentloop",
            "--namespace",
            "agentloop-system",
            "--dry-run=client",
        ])
        .arg(repository("charts/agentloop"));
    for setting in settings {
        command.args(["--set", setting]);
    }
    let ended = command.output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let text = String::from_utf8(ended.stdout).unwrap();
    text.split_once("\nNOTES:\n").map(|(_, notes)| notes.to_owned())
}

/// Kinds that are outside namespaces.
fn outside(objects: &Rendered) -> Vec<&str> {
    let kinds = objects.0.iter().filter_map(|object| object["kind"].as_str());
    kinds
        .filter(|kind| {
            kind.starts_with("Cluster") || kind.starts_with("Validating") || *kind == "CustomResourceDefinition"
        })
        .collect()
}

#[test]
fn the_description_of_the_chart_is_of_this_version_and_lists_its_resources() {
    let chart = chart();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
    for part in ["keywords", "maintainers", "kubeVersion", "description"] {
        assert!(!chart[part].is_null(), "{part}");
    }
    for name in ["category", "license", "operator", "operatorCapabilities", "prerelease"] {
        let text = &chart["annotations"][format!("artifacthub.io/{name}")];
        assert!(text.is_string(), "annotations are texts: {name}: {text}");
    }
    for change in annotation(&chart, "changes") {
        let kinds = ["added", "changed", "deprecated", "removed", "fixed", "security"];
        assert!(kinds.contains(&change["kind"].as_str().unwrap()), "{change}");
        assert!(change["description"].is_string(), "{change}");
    }
    let listed: Vec<_> = annotation(&chart, "crds")
        .iter()
        .map(|crd| {
            let text = |key: &str| crd[key].as_str().unwrap().to_owned();
            assert!(!text("description").is_empty() && !text("displayName").is_empty());
            (text("name"), text("kind"), text("version"))
        })
        .collect();
    let defined: Vec<_> = agentloop::api::crd::all()
        .into_iter()
        .map(|crd| {
            let name = crd.metadata.name.unwrap();
            (name, crd.spec.names.kind, crd.spec.versions[0].name.clone())
        })
        .collect();
    for definition in &defined {
        assert!(listed.contains(definition), "{definition:?}");
    }
    assert_eq!(listed.len(), defined.len());
}

#[test]
fn the_examples_in_the_description_of_the_chart_are_valid() {
    let examples = annotation(&chart(), "crdsExamples");
    for kind in ["Agent", "AgentBudget", "Sensor"] {
        let example = examples.iter().find(|example| example["kind"] == kind);
        let example = example.unwrap_or_else(|| panic!("no example of {kind}"));
        let problems = Schema::of_kind(kind).problems(example, None);
        assert_eq!(problems, Vec::<String>::new(), "{kind}");
        assert_eq!(
            Schema::of_kind(kind).unknown_fields(example),
            Vec::<String>::new(),
            "{kind}"
        );
    }
}

#[test]
fn the_readme_of_the_chart_describes_every_value() {
    let written = Command::new("python3")
        .arg(repository("hack/chart-readme.py"))
        .arg(repository("charts/agentloop"))
        .output();
    let Ok(written) = written else {
        skip("python3 is missing; it writes the README of the chart");
        return;
    };
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let readme = read("charts/agentloop/README.md");
    assert!(
        String::from_utf8_lossy(&written.stdout) == readme,
        "run `make generate`"
    );
    for name in super::values::names() {
        // A value that is one thing has one row, whose name its parts begin with.
        let rows = readme
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let described = rows
            .into_iter()
            .any(|row| name == row || name.starts_with(&format!("{row}.")));
        assert!(described, "{name}");
    }
    for command in [
        "helm upgrade --install",
        "helm test",
        "helm uninstall",
        "--reset-then-reuse-values",
    ] {
        assert!(readme.contains(command), "{command}");
    }
}

#[test]
fn the_notes_name_what_the_settings_call_for() {
    let Some(plain) = notes(&[]) else { return };
    for text in [
        "rollout status deployment/agentloop",
        "helm test agentloop --namespace agentloop-system",
        "kubectl apply -f examples/quickstart.yaml",
        "metrics.serviceMonitor.enabled=true",
    ] {
        assert!(plain.contains(text), "{text}: {plain}");
    }
    assert!(!plain.contains("WARNING"), "{plain}");
    let rules = "metrics.prometheusRule.enabled=true";
    let base = "metrics.prometheusRule.runbookBaseURL";
    let pathless = notes(&[rules]).unwrap();
    assert!(pathless.contains(&format!("{base} to the URL")), "{pathless}");
    let given = format!("{base}=https://example.com/runbooks");
    for found in [&[][..], &[rules, &given]] {
        let notes = notes(found).unwrap();
        assert!(!notes.contains("runbook_url"), "{found:?}: {notes}");
    }
    let read = notes(&["metrics.authentication=Token", "watchNamespaces={team-a}"]).unwrap();
    assert!(
        read.contains("--clusterrole=agentloop-agentloop-system-metrics-reader "),
        "{read}"
    );
    assert!(
        read.contains("HTTPS, as agentloop-metrics.agentloop-system.svc")
            && read.contains("get configmap agentloop-metrics-ca "),
        "{read}"
    );
    let alone = notes(&["replicaCount=1", "crds.keep=false", "rbac.create=false"]).unwrap();
    assert_eq!(alone.matches("WARNING").count(), 2, "{alone}");
    assert!(!alone.contains("helm test"), "{alone}");
    let namespaced = notes(NAMESPACED).unwrap();
    for text in [
        "--clusterrole=system:auth-delegator --serviceaccount=agentloop-system:agentloop",
        "kubectl apply --server-side -f charts/agentloop/files/crds/",
        "not available without objects outside namespaces",
        "kubectl --namespace team-a apply -f examples/quickstart.yaml",
        "a helm test that sees custom resource definitions",
    ] {
        assert!(namespaced.contains(text), "{text}: {namespaced}");
    }
}

/// Settings, and whether the notes say that nothing scrapes the metrics, and that the alerts do not fit pushed ones.
#[test]
fn the_notes_know_scraped_metrics_from_pushed_ones() {
    let rules = "metrics.prometheusRule.enabled=true";
    let endpoint = "telemetry.otlp.endpoint=http://collector:4318";
    let pushed = "telemetry.otlp.metrics=true";
    let cases: [(&[&str], bool, bool); 8] = [
        (&[], true, false),
        (&[rules], true, false),
        (&[rules, endpoint], true, false),
        (&["metrics.podMonitor.enabled=true"], false, false),
        (&[endpoint, pushed], false, false),
        (&[rules, endpoint, pushed], false, true),
        (
            &[
                rules,
                endpoint,
                pushed,
                r#"metrics.prometheusRule.selector=job="agentloop""#,
            ],
            false,
            false,
        ),
        (
            &[rules, endpoint, pushed, "metrics.serviceMonitor.enabled=true"],
            false,
            false,
        ),
    ];
    for (settings, unscraped, unselected) in cases {
        let Some(notes) = notes(settings) else { return };
        assert_eq!(notes.contains("Nothing scrapes"), unscraped, "{settings:?}: {notes}");
        assert_eq!(notes.contains("WARNING: pushed metrics"), unselected, "{notes}");
        assert_eq!(notes.contains(r#"such as job="agentloop""#), unselected, "{notes}");
        assert_eq!(notes.matches("WARNING").count(), usize::from(unselected), "{notes}");
    }
}

#[test]
fn the_chart_accepts_the_settings_that_its_notes_suggest() {
    let token = "metrics.authentication=Token";
    let secret = "metrics.serviceMonitor.bearerTokenSecret.name=scraper";
    for (settings, asks) in [(&[][..], false), (&[token], true), (&[token, secret], false)] {
        let Some(notes) = notes(settings) else { return };
        let command = notes.lines().find(|line| line.contains("helm upgrade ")).unwrap();
        assert_eq!(
            notes.contains("SECRET: a Secret in namespace agentloop-system"),
            asks,
            "{notes}"
        );
        assert_eq!(command.contains("bearerTokenSecret.name=SECRET "), asks, "{command}");
        let suggested: Vec<String> = command
            .split(" --set ")
            .skip(1)
            .map(|setting| setting.replace("SECRET", "mine"))
            .collect();
        assert!(!suggested.is_empty(), "{command}");
        let next: Vec<&str> = settings
            .iter()
            .copied()
            .chain(suggested.iter().map(String::as_str))
            .collect();
        let rendered = render(&next).unwrap();
        assert!(rendered.is_ok(), "{next:?}: {rendered:?}");
    }
}

#[test]
fn a_namespaced_release_has_nothing_outside_namespaces_and_a_role_in_each() {
    let Some(rendered) = render(NAMESPACED) else { return };
    let objects = rendered.unwrap();
    assert_eq!(outside(&objects), Vec::<&str>::new());
    for object in &objects.0 {
        assert!(object["metadata"]["namespace"].is_string(), "{object}");
    }
    for namespace in ["team-a", "team-b"] {
        for kind in ["Role", "RoleBinding"] {
            let found = objects.0.iter().find(|object| {
                object["kind"] == kind
                    && object["metadata"]["namespace"] == namespace
                    && object["metadata"]["name"] == "agentloop-agentloop-system-agents"
            });
            assert!(found.is_some(), "{kind} in {namespace}");
        }
    }
    assert!(objects.has("Role", "agentloop"), "the election");
    // Without that value the policies and the right to verify tokens are there, whatever is watched.
    let watched = render(&["watchNamespaces={team-a}"]).unwrap().unwrap();
    let kinds = outside(&watched);
    for kind in [
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "CustomResourceDefinition",
    ] {
        assert!(kinds.contains(&kind), "{kind}");
    }
}

#[test]
fn the_release_test_is_a_hook_with_minimal_permissions() {
    let Some(rendered) = render(&["watchNamespaces={team-a}"]) else {
        return;
    };
    let objects = rendered.unwrap();
    let hooks: Vec<_> = objects
        .0
        .iter()
        .filter(|object| !object["metadata"]["annotations"]["helm.sh/hook"].is_null())
        .collect();
    let kinds: Vec<_> = hooks.iter().map(|object| object["kind"].as_str().unwrap()).collect();
    let count = |kind: &str| kinds.iter().filter(|other| **other == kind).count();
    assert_eq!(
        [
            "ServiceAccount",
            "Role",
            "RoleBinding",
            "ClusterRole",
            "ClusterRoleBinding",
            "Pod"
        ]
        .map(count),
        [1, 2, 2, 1, 1, 1],
        "{kinds:?}"
    );
    assert_eq!(kinds.len(), 8);
    let controller = &objects.one("Deployment", "agentloop")["spec"]["selector"]["matchLabels"];
    for hook in &hooks {
        let annotations = &hook["metadata"]["annotations"];
        assert_eq!(annotations["helm.sh/hook"], "test");
        assert_eq!(
            annotations["helm.sh/hook-delete-policy"],
            "before-hook-creation,hook-succeeded"
        );
        let component = &hook["metadata"]["labels"]["app.kubernetes.io/component"];
        assert_ne!(
            component, &controller["app.kubernetes.io/component"],
            "no Service and no policy of the controller selects it"
        );
    }
    let rules = |name: &str| objects.one("Role", name)["rules"].clone();
    let deployments = json!([{"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["list"]}]);
    assert_eq!(rules("agentloop-test"), deployments);
    let agents = json!([{"apiGroups": ["agentloop.dev"], "resources": ["agents"], "verbs": ["create"]}]);
    assert_eq!(rules("agentloop-test-agents"), agents);
    let role = objects.one("Role", "agentloop-test-agents");
    assert_eq!(role["metadata"]["namespace"], "team-a");
    let definitions = objects.one("ClusterRole", "agentloop-agentloop-system-test")["rules"].clone();
    let mut names: Vec<_> = crd::all().iter().map(ResourceExt::name_any).collect();
    names.sort();
    assert_eq!(
        definitions,
        json!([{"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"],
            "resourceNames": names, "verbs": ["get"]},
            {"apiGroups": ["storage.k8s.io"], "resources": ["storageclasses"], "verbs": ["list"]}])
    );
    let binding = objects.one("ClusterRoleBinding", "agentloop-agentloop-system-test");
    assert_eq!(binding["roleRef"]["name"], "agentloop-agentloop-system-test");
    assert_eq!(
        binding["subjects"],
        json!([{"kind": "ServiceAccount", "name": "agentloop-test", "namespace": "agentloop-system"}])
    );
    let pod = &objects.one("Pod", "agentloop-test")["spec"];
    assert_eq!(
        (&pod["restartPolicy"], &pod["serviceAccountName"]),
        (&json!("Never"), &json!("agentloop-test"))
    );
    let container = containers(pod).next().unwrap();
    let image = &containers(&objects.one("Deployment", "agentloop")["spec"]["template"]["spec"])
        .next()
        .unwrap()["image"];
    assert_eq!(&container["image"], image);
    let args: Vec<_> = container["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|arg| arg.as_str().unwrap())
        .collect();
    assert_eq!(
        args,
        [
            "kubectl",
            "check",
            "--installation-only",
            "--namespace",
            "team-a",
            "--controller-namespace",
            "agentloop-system"
        ]
    );
    // The binary knows these arguments: without a cluster it fails at the connection, with another exit code than for usage.
    let ended = Command::new(env!("CARGO_BIN_EXE_agentloop"))
        .args(&args)
        .env("KUBECONFIG", "/nonexistent")
        .env_remove("KUBERNETES_SERVICE_HOST")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && !said.contains("Usage"), "{said}");
    let without = render(&["rbac.create=false"]).unwrap().unwrap();
    assert!(!without.has("Pod", "agentloop-test"), "it could not have its rights");
}

#[test]
fn definitions_are_part_of_the_release_and_so_upgraded_with_it() {
    let crds = repository("charts/agentloop/crds");
    assert!(!crds.exists(), "Helm never upgrades what is in crds/");
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    for name in ["agents", "agentbudgets", "sensors"] {
        let definition = objects.one("CustomResourceDefinition", &format!("{name}.agentloop.dev"));
        let metadata = &definition["metadata"];
        assert_eq!(metadata["annotations"]["helm.sh/resource-policy"], "keep", "{name}");
        assert!(metadata["annotations"]["helm.sh/hook"].is_null(), "{name}");
    }
}

#[test]
fn the_kustomize_base_has_the_manifest_and_a_restricted_namespace() {
    let Some(built) = kustomized(&repository("deploy")) else {
        return;
    };
    let manifest = documents(&read("deploy/agentloop.yaml"));
    assert_eq!(built.len(), manifest.len() + 1);
    for object in &manifest {
        let same = built
            .iter()
            .find(|other| other["kind"] == object["kind"] && other["metadata"]["name"] == object["metadata"]["name"]);
        assert!(same.is_some(), "{} {}", object["kind"], object["metadata"]["name"]);
        assert!(
            object["metadata"]["annotations"]["helm.sh/hook"].is_null(),
            "hooks are Helm's"
        );
    }
    let namespace = built.iter().find(|object| object["kind"] == "Namespace").unwrap();
    assert_eq!(namespace["metadata"]["name"], "agentloop-system");
    assert_eq!(
        namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"],
        "restricted"
    );
}

/// The objects that Kustomize builds of a directory.
fn kustomized(directory: &Path) -> Option<Vec<Value>> {
    let program = tool("kubectl");
    let Ok(ended) = Command::new(&program).arg("kustomize").arg(directory).output() else {
        skip("kubectl is missing; `make test` builds it for this test");
        return None;
    };
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    Some(documents(&String::from_utf8(ended.stdout).unwrap()))
}

#[test]
fn the_overlay_of_the_page_sets_replicas_labels_and_nodes_and_keeps_the_names() {
    let page = read("docs/tasks/installing.md");
    let block = "```yaml unchecked\n# kustomization.yaml beside deploy/\n";
    let (_, rest) = page.split_once(block).expect("the page has an overlay");
    let (overlay, _) = rest.split_once("```").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("deploy");
    std::fs::create_dir(&base).unwrap();
    for file in ["kustomization.yaml", "namespace.yaml", "agentloop.yaml"] {
        std::fs::copy(repository("deploy").join(file), base.join(file)).unwrap();
    }
    std::fs::write(directory.path().join("kustomization.yaml"), overlay).unwrap();
    let (Some(plain), Some(built)) = (kustomized(&base), kustomized(directory.path())) else {
        return;
    };
    let names = |objects: &[Value]| -> Vec<String> {
        let name = |object: &Value| format!("{} {}", object["kind"], object["metadata"]["name"]);
        objects.iter().map(name).collect()
    };
    assert_eq!(names(&plain), names(&built));
    for object in &built {
        assert_eq!(object["metadata"]["labels"]["team"], "platform", "{object}");
    }
    let deployment = built.iter().find(|object| object["kind"] == "Deployment").unwrap();
    assert_eq!(deployment["spec"]["replicas"], 3);
    assert_eq!(
        deployment["spec"]["template"]["spec"]["nodeSelector"]["pool"],
        "control"
    );
}

fn documents(text: &str) -> Vec<Value> {
    use serde::Deserialize as _;
    serde_yaml::Deserializer::from_str(text)
        .map(|document| Value::deserialize(document).unwrap())
        .filter(|document| !document.is_null())
        .collect()
}

#[test]
fn overrides_of_names_are_consistent_between_objects() {
    let settings = [
        "nameOverride=loops",
        "fullnameOverride=ops",
        "namespaceOverride=elsewhere",
        "metrics.prometheusRule.enabled=true",
    ];
    let Some(rendered) = render(&settings) else { return };
    let objects = rendered.unwrap();
    let deployment = objects.one("Deployment", "ops");
    assert_eq!(deployment["metadata"]["namespace"], "elsewhere");
    let pod = &deployment["spec"]["template"];
    assert_eq!(pod["spec"]["serviceAccountName"], "ops");
    for (kind, name) in [
        ("Service", "agentloop-link"),
        ("Service", "ops-metrics"),
        ("NetworkPolicy", "ops"),
    ] {
        let object = objects.one(kind, name);
        assert_eq!(object["metadata"]["namespace"], "elsewhere");
        let selector = object
            .pointer("/spec/podSelector/matchLabels")
            .unwrap_or(&object["spec"]["selector"]);
        assert_eq!(selector["app.kubernetes.io/name"], "loops", "{name}");
        // The plugin finds the controller by these, which no value changes.
    }
    let labels = &pod["metadata"]["labels"];
    assert_eq!(labels["app.kubernetes.io/part-of"], "agentloop");
    assert_eq!(labels["app.kubernetes.io/component"], "controller");
    let url = super::render::variable(&pod["spec"]["containers"][0], "AGENTLOOP_LINK_URL").unwrap();
    assert_eq!(url["value"], "https://agentloop-link.elsewhere.svc:8443");
    let rule = objects.one("PrometheusRule", "ops");
    assert_eq!(rule["metadata"]["namespace"], "elsewhere");
    assert!(rule.to_string().contains("namespace=\\\"elsewhere\\\""), "{rule}");
    let binding = objects.one("ClusterRoleBinding", "ops");
    assert_eq!(
        binding["subjects"][0],
        json!({"kind": "ServiceAccount", "name": "ops", "namespace": "elsewhere"})
    );
    let policy = objects
        .one("ValidatingAdmissionPolicy", "ops-controller-objects")
        .to_string();
    assert!(policy.contains("system:serviceaccount:elsewhere:ops"), "{policy}");
    for object in &objects.0 {
        let text = object.to_string();
        assert!(
            !text.contains("agentloop-system"),
            "the release's namespace in {}",
            object["metadata"]
        );
    }
}
