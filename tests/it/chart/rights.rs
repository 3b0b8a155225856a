//! The controller's permissions: exactly what it was seen to do and what is named here, in each of the two ways to
//! install.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::render::{Rendered, render, repository};

/// «group resource name» → verbs.
type Rights = BTreeMap<String, BTreeSet<String>>;

/// What the reconciler was seen to do in its own tests; `nodes` are outside namespaces.
fn seen() -> (Rights, Rights) {
    let text = std::fs::read_to_string(repository("tests/fixtures/controller-verbs.json")).unwrap();
    let pairs: Vec<(String, String)> = serde_json::from_str(&text).unwrap();
    let named = |(what, verb): (String, String)| {
        let what = what.replace('/', " ").replace(" status", "/status");
        // What is applied is limited to its names.
        let names: &[&str] = match (what.trim(), verb.as_str()) {
            ("configmaps", "patch") => &[" agentloop-link-ca"],
            ("serviceaccounts", "patch") => &[" agentloop-agent", " agentloop-sensor"],
            _ => &[""],
        };
        names.iter().map(move |name| (format!("{what}{name}"), verb.clone()))
    };
    let (outside, inside): (Vec<_>, Vec<_>) = pairs
        .into_iter()
        .flat_map(named)
        .partition(|(what, _)| what.trim() == "nodes");
    (collect(inside), collect(outside))
}

/// What it needs besides in namespaces with Agents.
const WHERE_AGENTS_ARE: &[(&str, &str)] = &[
    // A patch that applies something new counts as its creation.
    ("configmaps agentloop-link-ca", "create"),
    ("serviceaccounts agentloop-agent", "create"),
    ("serviceaccounts agentloop-sensor", "create"),
    // When the last Agent and the last Sensor of a namespace are gone.
    ("configmaps agentloop-link-ca", "delete"),
    ("serviceaccounts agentloop-agent", "delete"),
    ("serviceaccounts agentloop-sensor", "delete"),
    // When a pod of that name is there already.
    ("pods", "get"),
    // The ledger: who draws on what, and its records.
    ("agentloop.dev agentbudgets", "list"),
    ("agentloop.dev agentbudgets", "watch"),
    ("agentloop.dev agentbudgets/status", "get"),
    ("agentloop.dev agentbudgets/status", "patch"),
    ("agentloop.dev agents/status", "get"),
    // The answers to gates that arrive over the link: an Agent is read, and its annotation written.
    ("agentloop.dev agents", "get"),
    ("agentloop.dev agents", "patch"),
    // Sensors, and what is said of them.
    ("agentloop.dev sensors", "list"),
    ("agentloop.dev sensors", "watch"),
    ("agentloop.dev sensors/status", "get"),
    ("agentloop.dev sensors/status", "patch"),
    // What a Sensor with a pod of its own is made of; `get` sees whether another has the name.
    ("apps statefulsets", "get"),
    ("apps statefulsets", "list"),
    ("apps statefulsets", "watch"),
    ("apps statefulsets", "create"),
    ("apps statefulsets", "patch"),
    ("apps statefulsets", "delete"),
    ("services", "get"),
    ("services", "list"),
    ("services", "watch"),
    ("services", "create"),
    ("services", "patch"),
    ("services", "delete"),
    ("networking.k8s.io networkpolicies", "get"),
    ("networking.k8s.io networkpolicies", "list"),
    ("networking.k8s.io networkpolicies", "watch"),
    ("networking.k8s.io networkpolicies", "create"),
    ("networking.k8s.io networkpolicies", "patch"),
    ("networking.k8s.io networkpolicies", "delete"),
];
/// What it does outside namespaces: the link asks who holds a token and what they may read, the ledger what labels namespaces have.
const OUTSIDE: &[(&str, &str)] = &[
    ("authentication.k8s.io tokenreviews", "create"),
    ("authorization.k8s.io subjectaccessreviews", "create"),
    ("namespaces", "list"),
    ("namespaces", "watch"),
];
/// What the process does in its own namespace: election, the leader's label, the link's authority.
const AT_HOME: &[(&str, &str)] = &[
    ("coordination.k8s.io leases", "create"),
    ("coordination.k8s.io leases agentloop-controller", "get"),
    ("coordination.k8s.io leases agentloop-controller", "list"),
    ("coordination.k8s.io leases agentloop-controller", "watch"),
    ("coordination.k8s.io leases agentloop-controller", "update"),
    ("pods", "patch"),
    ("secrets", "create"),
    ("secrets agentloop-link-ca", "get"),
    ("secrets agentloop-link-ca", "update"),
];

fn collect(pairs: impl IntoIterator<Item = (impl AsRef<str>, impl AsRef<str>)>) -> Rights {
    let mut rights = Rights::new();
    for (what, verb) in pairs {
        let verbs = rights.entry(what.as_ref().trim().to_owned()).or_default();
        verbs.insert(verb.as_ref().to_owned());
    }
    rights
}

fn inside() -> Rights {
    union(&seen().0, &collect(WHERE_AGENTS_ARE.iter().copied()))
}
fn outside() -> Rights {
    union(&seen().1, &collect(OUTSIDE.iter().copied()))
}
fn at_home() -> Rights {
    collect(AT_HOME.iter().copied())
}

fn words(list: &Value) -> Vec<&str> {
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

fn rights(role: &Value) -> Rights {
    let mut rights = Rights::new();
    for rule in role["rules"].as_array().unwrap() {
        let names = match words(&rule["resourceNames"]) {
            none if none.is_empty() => vec![""],
            some => some,
        };
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                for name in &names {
                    let key = format!("{group} {resource} {name}").trim().to_owned();
                    let verbs = words(&rule["verbs"]).into_iter().map(str::to_owned);
                    rights.entry(key).or_default().extend(verbs);
                }
            }
        }
    }
    rights
}

fn union(a: &Rights, b: &Rights) -> Rights {
    let mut both = a.clone();
    for (key, verbs) in b {
        both.entry(key.clone()).or_default().extend(verbs.clone());
    }
    both
}

/// The binding of that name gives the role of that name to the controller's service account only.
fn assert_bound(objects: &Rendered, kind: &str, name: &str) {
    let binding = objects.one(&format!("{kind}Binding"), name);
    assert_eq!(binding["roleRef"]["kind"], kind);
    assert_eq!(binding["roleRef"]["name"], name);
    let subjects = binding["subjects"].as_array().unwrap();
    assert_eq!(subjects.len(), 1);
    assert_eq!(subjects[0]["name"], "agentloop");
    assert_eq!(subjects[0]["namespace"], "agentloop-system");
}

#[test]
fn the_rights_of_a_whole_cluster_are_what_the_controller_does() {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    assert_eq!(
        rights(objects.one("ClusterRole", "agentloop")),
        union(&inside(), &outside())
    );
    assert_eq!(rights(objects.one("Role", "agentloop")), at_home());
    assert_bound(&objects, "ClusterRole", "agentloop");
    assert_bound(&objects, "Role", "agentloop");
}

#[test]
fn named_namespaces_have_a_role_each_and_the_cluster_role_has_no_access_to_them() {
    let Some(rendered) = render(&["watchNamespaces={team-a,team-b}"]) else {
        return;
    };
    let objects = rendered.unwrap();
    let cluster = objects.one("ClusterRole", "agentloop-agentloop-system");
    assert_eq!(rights(cluster), outside());
    assert_bound(&objects, "ClusterRole", "agentloop-agentloop-system");
    assert_bound(&objects, "Role", "agentloop-agentloop-system-agents");
    let home = rights(objects.one("Role", "agentloop"));
    assert_eq!(
        home["agentloop.dev agentbudgets"],
        BTreeSet::from(["list".to_owned(), "watch".to_owned()]),
        "platform budgets are there"
    );
    let roles: Vec<_> = objects
        .0
        .iter()
        .filter(|object| object["kind"] == "Role" && object["metadata"]["namespace"] != "agentloop-system")
        // The test of the release has a role of its own.
        .filter(|object| object["metadata"]["annotations"]["helm.sh/hook"].is_null())
        .collect();
    let namespaces: Vec<_> = roles
        .iter()
        .map(|role| role["metadata"]["namespace"].as_str().unwrap())
        .collect();
    assert_eq!(namespaces, ["team-a", "team-b"]);
    for role in roles {
        assert_eq!(rights(role), inside());
    }
}

#[test]
fn with_tokens_for_metrics_the_controller_also_publishes_their_authority_in_its_own_namespace() {
    for settings in [
        &["metrics.authentication=Token"][..],
        &["metrics.authentication=Token", "watchNamespaces={team-a}"],
    ] {
        let Some(rendered) = render(settings) else { return };
        let mut home = rights(rendered.unwrap().one("Role", "agentloop"));
        home.retain(|what, _| !what.starts_with("agentloop.dev"));
        let more = ["get", "create", "patch"].map(|verb| ("configmaps agentloop-metrics-ca", verb));
        assert_eq!(home, union(&at_home(), &collect(more)), "{settings:?}");
    }
}

#[test]
fn metrics_readers_have_a_role_whose_name_is_in_the_page_and_the_notes() {
    let page = std::fs::read_to_string(repository("docs/tasks/tenants.md")).unwrap();
    let token = "metrics.authentication=Token";
    for (settings, name, said) in [
        (vec![token], "agentloop-metrics-reader", "agentloop-metrics-reader"),
        (
            vec![token, "watchNamespaces={team-a}"],
            "agentloop-agentloop-system-metrics-reader",
            "agentloop-<release namespace>-metrics-reader",
        ),
    ] {
        let Some(rendered) = render(&settings) else { return };
        let role = rendered.unwrap().one("ClusterRole", name)["rules"].clone();
        assert_eq!(
            role,
            serde_json::json!([{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}])
        );
        assert!(page.contains(&format!("`{said}`")), "{said}");
    }
}

#[test]
fn no_role_has_a_wildcard_or_a_right_to_more_rights() {
    let Some(rendered) = render(&[]) else { return };
    for object in rendered.unwrap().0 {
        if !["Role", "ClusterRole"].contains(&object["kind"].as_str().unwrap()) {
            continue;
        }
        for (what, verbs) in rights(&object) {
            assert!(!what.contains('*') && !verbs.contains("*"), "{object}");
            assert!(!what.contains("rbac.authorization.k8s.io"), "{object}");
            for verb in ["escalate", "bind", "impersonate"] {
                assert!(!verbs.contains(verb), "{object}");
            }
        }
    }
}

#[test]
fn the_clusters_own_roles_cover_agents_and_leave_their_status_to_the_controller() {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    for (role, writes) in [("admin", true), ("edit", true), ("view", false)] {
        let object = objects.one("ClusterRole", &format!("agentloop-{role}"));
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{role}");
        assert_eq!(object["metadata"]["labels"][label], "true");
        let rights = rights(object);
        for kind in ["agents", "sensors"] {
            let of = &rights[&format!("agentloop.dev {kind}")];
            assert_eq!((of.contains("create"), of.contains("watch")), (writes, true), "{role}");
            let status = &rights[&format!("agentloop.dev {kind}/status")];
            assert_eq!(*status, BTreeSet::from(["get".to_owned()]), "{role}");
        }
        assert_eq!(
            rights["agentloop.dev agents/events"],
            BTreeSet::from(["get".to_owned()]),
            "{role}"
        );
        assert_eq!(rights.contains_key("agentloop.dev agents/messages"), writes, "{role}");
        assert_eq!(rights.contains_key("agentloop.dev agents/tasks"), writes, "{role}");
        // Who is limited does not set the limit.
        let read = ["get", "list", "watch"].map(str::to_owned);
        assert_eq!(rights["agentloop.dev agentbudgets"], BTreeSet::from(read), "{role}");
    }
    let budgets = objects.one("ClusterRole", "agentloop-budget-admin");
    let labels = budgets["metadata"]["labels"].as_object().unwrap();
    let aggregated: Vec<_> = labels.keys().filter(|label| label.contains("aggregate-to")).collect();
    assert_eq!(aggregated, ["rbac.authorization.k8s.io/aggregate-to-admin"]);
    let writes = &rights(budgets)["agentloop.dev agentbudgets"];
    for verb in ["create", "update", "patch", "delete", "approve"] {
        assert!(writes.contains(verb), "{verb}");
    }
    let without = render(&["rbac.aggregate=false"]).unwrap().unwrap();
    assert!(!without.has("ClusterRole", "agentloop-admin"));
    assert!(!without.has("ClusterRole", "agentloop-budget-admin"));
}

#[test]
fn answers_to_a_budgets_question_are_held_to_a_verb_and_a_name() {
    let Some(rendered) = render(&[]) else { return };
    let objects = rendered.unwrap();
    let policy = objects.one("ValidatingAdmissionPolicy", "agentloop-approval");
    assert_eq!(policy["spec"]["failurePolicy"], "Fail");
    let rule = &policy["spec"]["matchConstraints"]["resourceRules"][0];
    assert_eq!(words(&rule["resources"]), ["agentbudgets", "agents"]);
    assert_eq!(words(&rule["operations"]), ["CREATE", "UPDATE"]);
    let binding = objects.one("ValidatingAdmissionPolicyBinding", "agentloop-approval");
    assert_eq!(binding["spec"]["policyName"], "agentloop-approval");
    assert_eq!(words(&binding["spec"]["validationActions"]), ["Deny"]);
    assert!(binding["spec"]["matchResources"].is_null(), "everywhere");
    // Another release, with its own controller, may serve other namespaces.
    let watched = render(&["watchNamespaces={team-a}"]).unwrap().unwrap();
    for policy in ["approval", "tool-rules"] {
        let binding = watched.one(
            "ValidatingAdmissionPolicyBinding",
            &format!("agentloop-agentloop-system-{policy}"),
        );
        let served = &binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"][0]["values"];
        assert_eq!(words(served), ["team-a", "agentloop-system"], "{policy}");
    }
    let without = render(&["rbac.approvalPolicy=false"]).unwrap().unwrap();
    assert!(!without.has("ValidatingAdmissionPolicy", "agentloop-approval"));
}
