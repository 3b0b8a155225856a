//! Commands that show objects: status, explain, approvals, budget top, check.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::api::{Agent, GROUP, crd};
use crate::plugin::arguments::{CheckArgs, OutputFormat, StatusArgs};
use crate::plugin::cluster_errors::{answer, problem};
use crate::plugin::failure::{ExitStatus, PluginError, is_forbidden, is_not_found, unless_closed};
use crate::plugin::screens::checks::{self, CheckOutcome, CheckRow, PERMISSIONS, PermissionCheck};
use crate::plugin::screens::status::{self, StatusColumns};
use crate::plugin::screens::{approvals, budgets, explanation};
use crate::plugin::session::{PluginSession, Screen};

/// Labels of the controller's Deployment.
const CONTROLLER: &str = "app.kubernetes.io/part-of=agentloop,app.kubernetes.io/component=controller";

pub(super) async fn status(
    session: &PluginSession,
    arguments: &StatusArgs,
    screen: &mut Screen<'_>,
) -> Result<ExitStatus, PluginError> {
    let (agents, errors) = match &*arguments.names {
        [] => (session.list_agents(arguments.selector.as_deref()).await?, Vec::new()),
        [name] => (vec![session.agent(name).await?], Vec::new()),
        names => some_agents(session, names).await,
    };
    // What was found comes first, as in `kubectl get`.
    unless_closed(print_status(session, arguments, &agents, screen))?;
    for error in &errors {
        screen.note(&format!("error: {error}"));
    }
    Ok(if errors.is_empty() {
        ExitStatus::Success
    } else {
        ExitStatus::Failure
    })
}

/// The Agents with these names, and why there are no others.
async fn some_agents(session: &PluginSession, names: &[String]) -> (Vec<Agent>, Vec<PluginError>) {
    let (mut agents, mut errors) = (Vec::new(), Vec::new());
    for name in names {
        match session.agent(name).await {
            Ok(agent) => agents.push(agent),
            Err(error) => errors.push(error),
        }
    }
    (agents, errors)
}

fn print_status(
    session: &PluginSession,
    arguments: &StatusArgs,
    agents: &[Agent],
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    // As `kubectl get` prints them: one object, or a list.
    let printed = match (&*arguments.names, agents) {
        ([_], [agent]) => session.print_data(agent, screen)?,
        _ => session.print_data(&as_list(agents), screen)?,
    };
    if printed {
        return Ok(());
    }
    if agents.is_empty() && !arguments.names.is_empty() {
        return Ok(());
    }
    if agents.is_empty() {
        screen.note(&format!("No Agents were found{}.", place(session)));
        return Ok(());
    }
    let columns = StatusColumns {
        namespaces: session.all_namespaces,
        wide: session.format == Some(OutputFormat::Wide),
    };
    write!(screen.out, "{}", status::table(agents, columns, session.now()))?;
    Ok(())
}

fn as_list(agents: &[Agent]) -> Value {
    json!({"apiVersion": "v1", "kind": "List", "items": agents, "metadata": {}})
}

fn place(session: &PluginSession) -> String {
    if session.all_namespaces {
        String::new()
    } else {
        format!(" in namespace {}", session.namespace)
    }
}

pub(super) async fn explain(session: &PluginSession, name: &str, screen: &mut Screen<'_>) -> Result<(), PluginError> {
    let agent = session.agent(name).await?;
    let explanation = explanation::of(&agent, session.now());
    if !session.print_data(&explanation, screen)? {
        write!(screen.out, "{}", explanation.text(session.now()))?;
    }
    Ok(())
}

pub(super) async fn approvals(session: &PluginSession, screen: &mut Screen<'_>) -> Result<(), PluginError> {
    let agents = session.list_agents(None).await?;
    let mut gates: Vec<_> = agents.iter().flat_map(approvals::of_agent).collect();
    let mut is_complete = Ok(());
    match session.list_budgets().await {
        Ok(found) => gates.extend(found.iter().flat_map(approvals::of_budget)),
        // Who may approve tool calls need not be able to read budgets.
        Err(error @ PluginError::Cluster { is_forbidden: true, .. }) => screen.note(&format!("warning: {error}")),
        Err(error) => is_complete = Err(error),
    }
    if !session.print_data(&gates, screen)? {
        write!(screen.out, "{}", approvals::text(&gates, session.now()))?;
    }
    is_complete
}

pub(super) async fn budgets(session: &PluginSession, screen: &mut Screen<'_>) -> Result<(), PluginError> {
    let found = session.list_budgets().await?;
    let rows: Vec<_> = found.iter().flat_map(budgets::rows).collect();
    if !session.print_data(&rows, screen)? {
        write!(screen.out, "{}", budgets::text(&rows, session.now()))?;
    }
    Ok(())
}

pub(super) async fn check(
    session: &PluginSession,
    arguments: &CheckArgs,
    screen: &mut Screen<'_>,
) -> Result<ExitStatus, PluginError> {
    let permissions: &[PermissionCheck] = if arguments.installation_only { &[] } else { &PERMISSIONS };
    let rows = check_rows(session, permissions).await?;
    let shown = match session.print_data(&rows, screen) {
        Ok(false) => write!(screen.out, "{}", checks::text(&rows)).map_err(Into::into),
        shown => shown.map(|_| ()),
    };
    unless_closed(shown)?;
    Ok(if checks::any_failed(&rows) {
        ExitStatus::Failure
    } else {
        ExitStatus::Success
    })
}

/// What `check` finds about the installation, and about these permissions of the user.
pub(super) async fn check_rows(
    session: &PluginSession,
    permissions: &[PermissionCheck],
) -> Result<Vec<CheckRow>, PluginError> {
    let mut rows = Vec::new();
    let version = session.client.apiserver_version().await;
    let version = version.map_err(|error| no_version(session, &error))?;
    rows.push(checks::version(&version.major, &version.minor));
    let definitions: Api<CustomResourceDefinition> = Api::all(session.client.clone());
    for expected in crd::all() {
        let found = definitions.get_opt(&expected.name_any()).await;
        rows.push(match found {
            Ok(found) => checks::definition(&expected, found.as_ref()),
            Err(error) => unchecked(format!("CustomResourceDefinition {}", expected.name_any()), &error)?,
        });
    }
    let namespace = &session.controller_namespace;
    let deployments: Api<Deployment> = Api::namespaced(session.client.clone(), namespace);
    let found = deployments.list(&ListParams::default().labels(CONTROLLER)).await;
    rows.push(match found {
        Ok(found) => checks::controller(namespace, &found.items),
        Err(error) => unchecked(format!("controller in namespace {namespace}"), &error)?,
    });
    let classes: Api<StorageClass> = Api::all(session.client.clone());
    rows.push(match classes.list(&ListParams::default()).await {
        Ok(found) => checks::default_class(&found.items),
        Err(error) => unchecked(checks::DEFAULT_CLASS.to_owned(), &error)?,
    });
    for permission in permissions {
        let namespace = namespace_of(session, permission);
        rows.push(permission.row(namespace, may(session, permission).await?));
    }
    rows.push(creation(session).await?);
    Ok(rows)
}

/// Fails if there is no API server that knows the user. One that does not tell its version may answer other requests.
pub(super) async fn reach(session: &PluginSession) -> Result<(), PluginError> {
    match session.client.apiserver_version().await {
        Err(error) if !is_forbidden(&error) => Err(no_version(session, &error)),
        _ => Ok(()),
    }
}

/// Why the version of the API server is not known: the server of the kubeconfig may be another.
fn no_version(session: &PluginSession, error: &kube::Error) -> PluginError {
    const QUESTION: &str = "is it the URL of an API server?";
    let found = if let kube::Error::Api(status) = error {
        let found = format!("answered the request for its version with {}", answer(status));
        match status.code {
            401 => problem(error),
            404 => format!("{found}; {QUESTION}"),
            _ => found,
        }
    } else if matches!(error, kube::Error::SerdeError(_) | kube::Error::FromUtf8(_)) {
        format!("its version cannot be read: {QUESTION}")
    } else {
        return PluginError::cluster("reach the API server", error);
    };
    PluginError::Refused(format!("{} was reached, but {found}", session.address))
}

/// What the user may not read cannot be checked, which is no failure of the cluster.
fn unchecked(check: String, error: &kube::Error) -> Result<CheckRow, PluginError> {
    if is_forbidden(error) || is_not_found(error) {
        return Ok(CheckRow::new(
            check,
            CheckOutcome::Warning,
            "you may not read it, so it was not checked",
        ));
    }
    Err(PluginError::cluster(format!("check {check}"), error))
}

/// Has the API server check the creation of an Agent, which it does not store: a missing definition or an admission
/// policy that rejects every Agent shows.
async fn creation(session: &PluginSession) -> Result<CheckRow, PluginError> {
    if !may(session, &checks::CREATE_AGENTS).await? {
        return Ok(checks::creation_not_tried(&session.namespace));
    }
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let namespace = &session.namespace;
    let agents = Api::namespaced_with(session.client.clone(), namespace, &ApiResource::erase::<Agent>(&()));
    match agents.create(&dry_run, &checks::sample_agent(namespace)).await {
        Ok(_) => Ok(checks::creation(namespace, None)),
        Err(kube::Error::Api(status)) => Ok(checks::creation(namespace, Some(&status.message))),
        Err(error) => Err(PluginError::cluster("create an Agent (dry run)", &error)),
    }
}

fn namespace_of<'a>(session: &'a PluginSession, permission: &PermissionCheck) -> &'a str {
    if permission.in_controller_namespace {
        &session.controller_namespace
    } else {
        &session.namespace
    }
}

async fn may(session: &PluginSession, permission: &PermissionCheck) -> Result<bool, PluginError> {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                namespace: Some(namespace_of(session, permission).to_owned()),
                verb: Some(permission.verb.into()),
                group: Some(permission.group.into()),
                version: (permission.group == GROUP).then(|| "*".into()),
                resource: Some(permission.resource.into()),
                subresource: some(permission.subresource),
                ..ResourceAttributes::default()
            }),
            non_resource_attributes: None,
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(session.client.clone());
    let answer = reviews.create(&PostParams::default(), &review).await;
    let answer = answer.map_err(|error| PluginError::cluster("get your permissions", &error))?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}
