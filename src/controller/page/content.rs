//! What the page shows to one user: the Agents, AgentBudgets and Sensors that the user may get.
//!
//! Namespaces without such an object are not named, and not counted.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;

use super::PageSources;
use super::rights::{MAX_QUESTIONS, ViewRights, ViewedObjects, ViewedResource, rights};
use super::session::PageSession;
use super::turns::{MAX_FOLLOWED, MAX_WITH_TURNS, TurnFollower};
use crate::api::{Agent, AgentBudget, NamespacedName};
use crate::controller::agent::AgentsView;
use crate::link::events::ClientRefusal;
use crate::page::agent_rows::{StatusOrigin, row};
use crate::page::html::{MAX_AGENTS, MAX_ROWS};
use crate::page::sensor_rows::SensorRow;
use crate::page::view::{AgentView, BudgetRow, PageView};

/// What this user may see at this moment, in one namespace if there is a filter.
pub(super) async fn view(
    sources: &PageSources,
    agents: &AgentsView,
    turns: &TurnFollower,
    (session, filter): (&PageSession, Option<&String>),
) -> Result<PageView, ClientRefusal> {
    let is_asked = |object: &NamespacedName| filter.is_none_or(|namespace| *namespace == object.namespace);
    let mut found = BTreeSet::new();
    agents.for_each(|agent| {
        found.insert(NamespacedName::of(agent));
    });
    found.retain(is_asked);
    let budgets = objects(budgets(sources), is_asked);
    let sensors = objects(sources.sensors.all(), is_asked);
    let names = |keys: &[(NamespacedName, Arc<AgentBudget>)]| keys.iter().map(|(key, _)| key.clone()).collect();
    let viewed: ViewedObjects = [
        (ViewedResource::Agents, found.clone()),
        (ViewedResource::Events, found.clone()),
        (ViewedResource::Budgets, names(&budgets)),
        (
            ViewedResource::Sensors,
            sensors.iter().map(|(key, _)| key.clone()).collect(),
        ),
    ]
    .into_iter()
    .filter(|(_, objects): &(_, BTreeSet<_>)| !objects.is_empty())
    .collect();
    let rights = rights(&sources.access, session, filter, &viewed).await?;
    let mut notes = Vec::new();
    found.retain(|agent| rights.include(ViewedResource::Agents, agent));
    notes.extend(more(found.len(), MAX_AGENTS, "Agents"));
    let shown: BTreeSet<_> = found.into_iter().take(MAX_AGENTS).collect();
    let (rows, unfollowed) = agent_views(sources, agents, turns, (&shown, &rights));
    let without = rows
        .iter()
        .filter(|view| !rights.include(ViewedResource::Events, &key(view)))
        .count();
    if rows.is_empty() {
        notes.push(format!("There are no Agents here that {} may get.", session.name()));
    }
    if without > 0 {
        let (name, rule) = (
            session.name(),
            "needs the permission to get agents/events, which the role view grants",
        );
        notes.push(format!("Turns of {without} Agents: {name} {rule}."));
    }
    if rows.len() - without > MAX_WITH_TURNS {
        notes.push(format!(
            "Turns of more than {MAX_WITH_TURNS} Agents: choose a namespace."
        ));
    }
    if unfollowed > 0 {
        notes.push(format!(
            "Turns of {unfollowed} Agents: the pages of all users show those of {MAX_FOLLOWED} other Agents, which is the limit. \
             They appear once there is room."
        ));
    }
    // Shown in any case, so that neither note reveals how much the user may not see.
    if !rights.are_complete() {
        if rights.is_pending {
            notes.push("What was not checked yet: your permissions are checked again within 10 seconds.".into());
        }
        notes.push(format!(
            "What is beyond {MAX_QUESTIONS} checks of your permissions: if something is missing, choose its namespace."
        ));
    }
    let budgets = visible(budgets, &rights, ViewedResource::Budgets, (&mut notes, "AgentBudgets"));
    let sensors = visible(sensors, &rights, ViewedResource::Sensors, (&mut notes, "Sensors"));
    Ok(PageView {
        agents: rows,
        budgets: budgets.iter().map(|budget| BudgetRow::new(budget)).collect(),
        sensors: sensors.iter().map(|sensor| SensorRow::of(sensor)).collect(),
        notes,
    })
}

fn key(view: &AgentView) -> NamespacedName {
    NamespacedName::new(&view.row.namespace, &view.row.agent)
}

fn budgets(sources: &PageSources) -> Vec<Arc<AgentBudget>> {
    sources.budgets.inspect(|state| {
        let known = state.assignments.budgets().values();
        known.map(|facts| facts.object.clone()).collect()
    })
}

/// Objects with their keys, in the order of these.
fn objects<T: kube::Resource>(
    objects: Vec<Arc<T>>,
    is_asked: impl Fn(&NamespacedName) -> bool,
) -> Vec<(NamespacedName, Arc<T>)> {
    let keyed = objects.into_iter().map(|object| (NamespacedName::of(&*object), object));
    let mut keyed: Vec<_> = keyed.filter(|(key, _)| is_asked(key)).collect();
    keyed.sort_by(|(one, _), (other, _)| one.cmp(other));
    keyed
}

/// The first objects that the user may see.
fn visible<T>(
    objects: Vec<(NamespacedName, Arc<T>)>,
    rights: &ViewRights,
    resource: ViewedResource,
    (notes, what): (&mut Vec<String>, &str),
) -> Vec<Arc<T>> {
    let allowed = objects.into_iter().filter(|(key, _)| rights.include(resource, key));
    let mut allowed: Vec<_> = allowed.map(|(_, object)| object).collect();
    notes.extend(more(allowed.len(), MAX_ROWS, what));
    allowed.truncate(MAX_ROWS);
    allowed
}

fn more(count: usize, max: usize, what: &str) -> Option<String> {
    (count > max).then(|| format!("{} more {what}: choose a namespace.", count - max))
}

/// The rows of these Agents, and the turns of the first of them that the user may see. Also the number of these that
/// cannot be followed now.
fn agent_views(
    sources: &PageSources,
    agents: &AgentsView,
    turns: &TurnFollower,
    (shown, rights): (&BTreeSet<NamespacedName>, &ViewRights),
) -> (Vec<AgentView>, usize) {
    let mut views = Vec::with_capacity(shown.len());
    agents.for_each(|agent: &Agent| {
        let key = NamespacedName::of(agent);
        if shown.contains(&key) {
            let report = sources.loops.newest_report(&key);
            let row = row(agent, report.as_ref(), StatusOrigin::Present);
            let view = AgentView::new(agent, row, report.as_ref(), None);
            views.push((view, agent.uid().unwrap_or_default()));
        }
    });
    views.sort_by_key(|(view, _)| key(view));
    let followed = views
        .iter_mut()
        .filter(|(view, _)| rights.include(ViewedResource::Events, &key(view)))
        .take(MAX_WITH_TURNS);
    let mut unfollowed = 0;
    for (view, uid) in followed {
        view.history = turns.history(&key(view), uid);
        unfollowed += usize::from(view.history.is_none());
    }
    (views.into_iter().map(|(view, _)| view).collect(), unfollowed)
}
