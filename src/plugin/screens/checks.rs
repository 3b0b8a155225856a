//! The results of `check`: what the cluster needs, and what the user may do.

use std::fmt::Write as _;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt;
use kube::api::{ApiResource, DynamicObject, ObjectMeta};
use serde::Serialize;
use serde_json::json;

use super::table::TextTable;
use crate::api::Agent;

/// The oldest version of Kubernetes that is supported.
const OLDEST_MINOR: u32 = 32;

/// How a check ended.
#[derive(Serialize, Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr)]
pub enum CheckOutcome {
    /// As it must be.
    Ok,
    /// Works, but not everything does; or it could not be checked.
    Warning,
    /// Agents cannot run.
    Failed,
}

/// One check.
#[derive(Serialize, Clone, Debug, PartialEq, Eq)]
pub struct CheckRow {
    /// What was checked.
    pub check: String,
    /// How it ended.
    pub result: CheckOutcome,
    /// What was found, and what to do.
    pub detail: String,
}

impl CheckRow {
    /// A row.
    pub fn new(check: impl Into<String>, result: CheckOutcome, detail: impl Into<String>) -> Self {
        Self {
            check: check.into(),
            result,
            detail: detail.into(),
        }
    }
}

/// The version of the API server, as it says itself: `1` and `33+`.
#[must_use]
pub fn version(major: &str, minor: &str) -> CheckRow {
    let digits: String = minor.chars().take_while(char::is_ascii_digit).collect();
    let name = "API server";
    let found = format!("Kubernetes {major}.{minor}");
    match (major, digits.parse::<u32>()) {
        ("1", Ok(minor)) if minor >= OLDEST_MINOR => CheckRow::new(name, CheckOutcome::Ok, found),
        ("1", Ok(_)) => {
            let fix = format!("{found}: 1.{OLDEST_MINOR} or newer is needed");
            CheckRow::new(name, CheckOutcome::Failed, fix)
        }
        _ => CheckRow::new(name, CheckOutcome::Warning, format!("{found}: unknown version")),
    }
}

/// A custom resource definition, compared with that of this version. `found`: `None` if it does not exist.
#[must_use]
pub fn definition(expected: &CustomResourceDefinition, found: Option<&CustomResourceDefinition>) -> CheckRow {
    let name = format!("CustomResourceDefinition {}", expected.name_any());
    let Some(found) = found else {
        return CheckRow::new(
            name,
            CheckOutcome::Failed,
            "does not exist: install the chart of agentloop",
        );
    };
    let conditions = found
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let established = conditions
        .into_iter()
        .any(|condition| condition.type_ == "Established" && condition.status == "True");
    if !established {
        return CheckRow::new(name, CheckOutcome::Failed, "is not established yet");
    }
    for version in &expected.spec.versions {
        let same = found.spec.versions.iter().find(|other| other.name == version.name);
        let Some(same) = same.filter(|same| same.served) else {
            let fix = format!("does not serve {}: install the CRDs of this version", version.name);
            return CheckRow::new(name, CheckOutcome::Failed, fix);
        };
        if same.schema != version.schema {
            let fix = format!(
                "the schema of {} differs from that of version {}: install the CRDs of this version, or use the plugin \
                 of the version that is installed",
                version.name,
                env!("CARGO_PKG_VERSION")
            );
            return CheckRow::new(name, CheckOutcome::Warning, fix);
        }
    }
    CheckRow::new(name, CheckOutcome::Ok, "installed, of this version")
}

/// The Deployments of the controller in a namespace.
#[must_use]
pub fn controller(namespace: &str, found: &[Deployment]) -> CheckRow {
    let name = format!("controller in namespace {namespace}");
    let Some(deployment) = found.first() else {
        let fix =
            "no Deployment of the controller: install the chart, or name its namespace with --controller-namespace";
        return CheckRow::new(name, CheckOutcome::Failed, fix);
    };
    let status = deployment.status.clone().unwrap_or_default();
    let ready = status.available_replicas.unwrap_or(0);
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let detail = format!(
        "Deployment {}: {ready} of {wanted} replicas are available",
        deployment.name_any()
    );
    let result = match ready {
        0 => CheckOutcome::Failed,
        ready if ready < wanted => CheckOutcome::Warning,
        _ => CheckOutcome::Ok,
    };
    CheckRow::new(name, result, detail)
}

/// Name of the check of the default storage class.
pub const DEFAULT_CLASS: &str = "default StorageClass";
/// Annotations that make a class the default: the second is older, and still honored.
const IS_DEFAULT: [&str; 2] = [
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
];

/// The storage classes of the cluster: the claim of an Agent that names no class stays pending without a default.
#[must_use]
pub fn default_class(found: &[StorageClass]) -> CheckRow {
    let defaults = found.iter().filter(|class| {
        let annotations = class.annotations();
        IS_DEFAULT
            .iter()
            .any(|name| annotations.get(*name).is_some_and(|value| value == "true"))
    });
    // Of several, Kubernetes takes the newest.
    match defaults.max_by_key(|class| class.creation_timestamp()) {
        Some(class) => CheckRow::new(DEFAULT_CLASS, CheckOutcome::Ok, class.name_any()),
        None => CheckRow::new(
            DEFAULT_CLASS,
            CheckOutcome::Warning,
            "none: set spec.storage.storageClassName of each Agent, or spec.storage.ephemeral",
        ),
    }
}

/// A permission of the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermissionCheck {
    /// The commands that need it.
    pub commands: &'static str,
    /// The verb.
    pub verb: &'static str,
    /// Group of the resource; empty for the core group.
    pub group: &'static str,
    /// The resource.
    pub resource: &'static str,
    /// The subresource; empty: none.
    pub subresource: &'static str,
    /// Whether it is asked for in the namespace of the controller instead of that of the command.
    pub in_controller_namespace: bool,
}

const fn agents(verb: &'static str, commands: &'static str) -> PermissionCheck {
    PermissionCheck {
        commands,
        verb,
        group: crate::api::GROUP,
        resource: "agents",
        subresource: "",
        in_controller_namespace: false,
    }
}

const fn budgets(verb: &'static str, commands: &'static str) -> PermissionCheck {
    PermissionCheck {
        resource: "agentbudgets",
        ..agents(verb, commands)
    }
}

const fn of_controller(verb: &'static str, resource: &'static str, subresource: &'static str) -> PermissionCheck {
    PermissionCheck {
        commands: "logs, events, history, cost --by model --since, run, chat (without --link-url)",
        verb,
        group: "",
        resource,
        subresource,
        in_controller_namespace: true,
    }
}

/// What the commands need, as the reference lists it.
pub const PERMISSIONS: [PermissionCheck; 15] = [
    agents("get", "all commands with the name of an Agent"),
    agents("list", "status, approvals, cost, report"),
    agents("patch", "approve, deny, pause, resume, wake, stop"),
    agents("approve", "approve, deny"),
    PermissionCheck {
        subresource: "events",
        ..agents("get", "logs, events, history, cost --by model --since, run, chat")
    },
    PermissionCheck {
        subresource: "messages",
        ..agents("get", "run, chat, events --messages")
    },
    PermissionCheck {
        subresource: "tasks",
        ..agents("create", "run, chat")
    },
    budgets("list", "approvals, budget top, cost --since, report"),
    budgets("get", "approve --budget, deny --budget, budget top-up"),
    budgets("patch", "approve --budget, deny --budget, budget top-up"),
    budgets("approve", "approve --budget, deny --budget"),
    PermissionCheck {
        group: "",
        resource: "configmaps",
        ..agents("get", "logs, events, history, cost --by model --since, run, chat")
    },
    PermissionCheck {
        group: "",
        resource: "pods",
        subresource: "exec",
        ..agents("create", "simulate AGENT")
    },
    of_controller("list", "pods", ""),
    of_controller("create", "pods", "portforward"),
];

/// What the dry run of a creation needs.
pub const CREATE_AGENTS: PermissionCheck = agents("create", "check");

/// An Agent that is valid everywhere. It is created as a dry run only, so nothing that it refers to has to exist.
#[must_use]
pub fn sample_agent(namespace: &str) -> DynamicObject {
    let mut agent = DynamicObject::new("", &ApiResource::erase::<Agent>(&()));
    agent.metadata = ObjectMeta {
        generate_name: Some("agentloop-check-".into()),
        namespace: Some(namespace.to_owned()),
        ..ObjectMeta::default()
    };
    let script = json!({"configMapKeyRef": {"name": "check", "key": "script.yaml"}});
    agent.data(json!({"spec": {
        "instructions": "Check the installation.",
        "model": {"api": "Scripted", "name": "check", "scripted": script},
    }}))
}

/// The dry run of the creation of an Agent; `refusal`: what the API server said against it.
#[must_use]
pub fn creation(namespace: &str, refusal: Option<&str>) -> CheckRow {
    let (result, detail) = match refusal {
        None => (CheckOutcome::Ok, "a valid Agent is accepted".to_owned()),
        Some(message) => (CheckOutcome::Failed, format!("a valid Agent is rejected: {message}")),
    };
    CheckRow::new(creation_name(namespace), result, detail)
}

/// The same, when the user may not create Agents.
#[must_use]
pub fn creation_not_tried(namespace: &str) -> CheckRow {
    let detail = "you may not create Agents, so it was not tried";
    CheckRow::new(creation_name(namespace), CheckOutcome::Warning, detail)
}

fn creation_name(namespace: &str) -> String {
    format!("create an Agent in {namespace} (dry run)")
}

impl PermissionCheck {
    /// The resource as rules of RBAC name it.
    #[must_use]
    pub fn resource_name(&self) -> String {
        let group = if self.group.is_empty() {
            String::new()
        } else {
            format!(".{}", self.group)
        };
        let slash = if self.subresource.is_empty() { "" } else { "/" };
        format!("{}{group}{slash}{}", self.resource, self.subresource)
    }

    /// The row, once the API server has decided. A missing permission is a warning: no user needs all of them.
    #[must_use]
    pub fn row(&self, namespace: &str, allowed: bool) -> CheckRow {
        let check = format!("{} {} in {namespace}", self.verb, self.resource_name());
        let result = if allowed {
            CheckOutcome::Ok
        } else {
            CheckOutcome::Warning
        };
        let word = if allowed { "allowed" } else { "not allowed" };
        CheckRow::new(check, result, format!("{word}; for {}", self.commands))
    }
}

/// The table, and the verdict.
#[must_use]
pub fn text(rows: &[CheckRow]) -> String {
    let mut table = TextTable::new(vec!["RESULT", "CHECK", "DETAIL"]);
    for row in rows {
        table.push(vec![
            row.result.as_ref().to_owned(),
            row.check.clone(),
            row.detail.clone(),
        ]);
    }
    let count = |result| rows.iter().filter(|row| row.result == result).count();
    let mut text = table.to_string();
    let (failed, warnings) = (count(CheckOutcome::Failed), count(CheckOutcome::Warning));
    let _ = writeln!(text, "\n{} checks, {failed} failed, {warnings} warnings", rows.len());
    text
}

/// Whether any check failed.
#[must_use]
pub fn any_failed(rows: &[CheckRow]) -> bool {
    rows.iter().any(|row| row.result == CheckOutcome::Failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd;

    fn established() -> CustomResourceDefinition {
        let mut found = crd::all().remove(1);
        let status = json!({"acceptedNames": {"kind": "Agent", "plural": "agents"}, "storedVersions": [],
            "conditions": [{"type": "Established", "status": "True"}]});
        found.status = serde_json::from_value(status).unwrap();
        found
    }

    #[test]
    fn the_oldest_version_passes_and_the_one_before_fails() {
        assert_eq!(version("1", "32").result, CheckOutcome::Ok);
        assert_eq!(version("1", "33+").result, CheckOutcome::Ok);
        assert_eq!(version("1", "31").result, CheckOutcome::Failed);
        assert_eq!(version("2", "0").result, CheckOutcome::Warning);
        assert_eq!(version("1", "").result, CheckOutcome::Warning);
    }

    #[test]
    fn a_definition_is_of_this_version_if_its_schema_is_the_same() {
        let expected = &crd::all()[1];
        assert_eq!(definition(expected, Some(&established())).result, CheckOutcome::Ok);
        assert_eq!(definition(expected, None).result, CheckOutcome::Failed);
        let mut pending = established();
        pending.status = None;
        assert_eq!(definition(expected, Some(&pending)).result, CheckOutcome::Failed);
        let mut other = established();
        other.spec.versions[0].schema = None;
        assert_eq!(definition(expected, Some(&other)).result, CheckOutcome::Warning);
        other.spec.versions[0].served = false;
        assert_eq!(definition(expected, Some(&other)).result, CheckOutcome::Failed);
    }

    #[test]
    fn the_controller_is_available_with_all_replicas() {
        let deployment = |available| -> Deployment {
            serde_json::from_value(json!({"metadata": {"name": "agentloop"},
                "spec": {"replicas": 2, "selector": {}, "template": {}}, "status": {"availableReplicas": available}}))
            .unwrap()
        };
        let result = |available| controller("agentloop-system", &[deployment(available)]).result;
        assert_eq!(
            [0, 1, 2].map(result),
            [CheckOutcome::Failed, CheckOutcome::Warning, CheckOutcome::Ok]
        );
        assert_eq!(controller("x", &[]).result, CheckOutcome::Failed);
    }

    #[test]
    fn the_default_class_is_the_newest_of_those_that_are_marked() {
        let class = |name: &str, annotation: &str, value: &str, year: u16| -> StorageClass {
            serde_json::from_value(json!({"metadata": {"name": name, "annotations": {annotation: value},
                "creationTimestamp": format!("{year}-01-01T00:00:00Z")}, "provisioner": "x"}))
            .unwrap()
        };
        let [current, older] = IS_DEFAULT;
        let found = [
            class("marked", current, "true", 2024),
            class("newest", older, "true", 2025),
            class("another", current, "false", 2026),
        ];
        assert_eq!(default_class(&found).detail, "newest");
        assert_eq!(default_class(&found[..1]).detail, "marked");
        assert_eq!(default_class(&found[..1]).result, CheckOutcome::Ok);
        assert_eq!(default_class(&found[2..]).result, CheckOutcome::Warning);
        assert_eq!(default_class(&[]).result, CheckOutcome::Warning);
    }

    #[test]
    fn the_agent_of_the_dry_run_is_an_agent() {
        let sample = serde_json::to_value(sample_agent("team-a")).unwrap();
        let agent: Agent = serde_json::from_value(sample).unwrap();
        assert_eq!(agent.metadata.name, None, "its name is generated, and so is free");
        assert!(agent.spec.model.scripted.is_some());
    }

    #[test]
    fn the_screen_of_checks() {
        let rows = [
            version("1", "31"),
            definition(&crd::all()[1], Some(&established())),
            default_class(&[]),
            PERMISSIONS[0].row("team-a", true),
            PERMISSIONS[4].row("team-a", false),
            creation_not_tried("team-a"),
            creation("team-a", None),
            creation("team-a", Some("denied by a policy")),
        ];
        insta::assert_snapshot!(text(&rows));
        assert!(any_failed(&rows));
    }
}
