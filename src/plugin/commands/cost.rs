//! The command `cost`: from the status of Agents, the records of AgentBudgets, or the events of loops.

use std::fmt::Display;

use jiff::Timestamp;

use super::streams::{EventReader, newest};
use crate::api::{Agent, NamespacedName};
use crate::plugin::arguments::{CostArgs, CostGroup};
use crate::plugin::failure::PluginError;
use crate::plugin::link::{LinkFailure, UserLink};
use crate::plugin::screens::calls_since::CallsSince;
use crate::plugin::screens::costs::{self, CostNotes, CostRow, CostSum, CostSums};
use crate::plugin::session::{PluginSession, Screen};

/// Events that are read first; each further step is several times as long.
const FIRST_EVENTS: i64 = 1_000;

pub(super) async fn cost(
    session: &PluginSession,
    arguments: &CostArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let by = match arguments.by {
        CostGroup::Agent => CostSum::Agent,
        CostGroup::Model => CostSum::Model,
        CostGroup::Namespace => CostSum::Namespace,
    };
    let agents = session.list_agents(None).await?;
    let mut is_partial = false;
    let (rows, unknown, source) = match arguments.since {
        None => (costs::of_agents(&agents, by), Vec::new(), ""),
        Some(since) if by == CostSum::Model => {
            let since = session.now().checked_sub(since);
            let since = since.map_err(|_| PluginError::Usage("--since is too long".into()))?;
            let (rows, unknown) = of_events(session, &agents, since, screen).await?;
            (rows, unknown, "event of the loop")
        }
        Some(since) => {
            let mut budgets = session.list_budgets().await?;
            let platform = session.list_platform_budgets().await?;
            is_partial = platform.is_none();
            budgets.extend(platform.unwrap_or_default());
            let namespace = (!session.all_namespaces).then_some(session.namespace.as_str());
            let (rows, unknown) = costs::of_budgets((&agents, &budgets), namespace, by, (since, session.now()));
            (rows, unknown, "AgentBudget")
        }
    };
    if is_partial && !unknown.is_empty() {
        screen.note(&format!(
            "warning: you may not list agentbudgets in namespace {}, where others may record the usage",
            session.controller_namespace
        ));
    }
    if !session.print_data(&rows, screen)? {
        let notes = CostNotes {
            source,
            unknown: &unknown,
            // Neither the status of Agents nor the events of loops outlive them.
            counts_deleted: arguments.since.is_some() && by != CostSum::Model,
        };
        write!(screen.out, "{}", costs::text(&rows, by, notes))?;
    } else if !unknown.is_empty() {
        screen.note(&format!(
            "warning: no {source} records the usage of: {}",
            unknown.join(", ")
        ));
    }
    Ok(())
}

/// Usage by model since a time, and the Agents whose events do not say it. Reads one Agent after the other, since each reader
/// takes one of the places that the controller has for all.
async fn of_events(
    session: &PluginSession,
    agents: &[Agent],
    since: Timestamp,
    screen: &mut Screen<'_>,
) -> Result<(Vec<CostRow>, Vec<String>), PluginError> {
    let mut sums = CostSums::default();
    let mut unknown = Vec::new();
    let mut agents: Vec<&Agent> = agents.iter().collect();
    agents.sort_by_cached_key(|agent| NamespacedName::of(*agent));
    for agents in agents.chunk_by(|a, b| a.metadata.namespace == b.metadata.namespace) {
        let Some(first) = agents.first() else { continue };
        let link = match UserLink::open(session, &NamespacedName::of(*first).namespace).await {
            Ok(link) => link,
            // Of several namespaces, some may be those of others.
            Err(error @ PluginError::Cluster { .. }) if session.all_namespaces => {
                unknown.extend(agents.iter().map(|agent| not_known(agent, &error)));
                continue;
            }
            Err(error) => return Err(error),
        };
        for agent in agents {
            match of_agent(&link, agent, since, screen).await? {
                Ok(rows) => rows.iter().for_each(|row| sums.add(row.of.clone(), row)),
                Err(_) if never_called(agent) => {}
                Err(why) => unknown.push(not_known(agent, &why)),
            }
        }
    }
    Ok((sums.sorted(), unknown))
}

fn not_known(agent: &Agent, why: &impl Display) -> String {
    format!("{} ({why})", NamespacedName::of(agent))
}

/// Whether an Agent that cannot be read has used nothing.
fn never_called(agent: &Agent) -> bool {
    let usage = agent.status.as_ref().and_then(|status| status.usage.as_ref());
    usage.is_none_or(|usage| usage.calls == 0)
}

/// Usage of one Agent by model, or why its events do not say it. Fails if no events of any Agent can be read.
async fn of_agent(
    link: &UserLink<'_>,
    agent: &Agent,
    since: Timestamp,
    screen: &mut Screen<'_>,
) -> Result<Result<Vec<CostRow>, String>, PluginError> {
    let name = NamespacedName::of(agent);
    let newest = match newest(link, &name).await {
        Ok(newest) => newest,
        Err(
            failure @ (LinkFailure::Refused { status: 401, .. } | LinkFailure::Token(_) | LinkFailure::Unreachable(_)),
        ) => {
            return Err(failure.into());
        }
        Err(failure) => return Ok(Err(failure.to_string())),
    };
    let mut calls = CallsSince::new(agent, since);
    let (mut to, mut step) = (newest, FIRST_EVENTS);
    while to > 0 && !calls.is_complete() {
        let from = to.saturating_sub(step).max(0);
        if let Err(error) = add_events(link, &name, (from, to), &mut calls, screen).await {
            return Ok(Err(error.to_string()));
        }
        (to, step) = (from, step.saturating_mul(8));
    }
    Ok(calls.rows().map_err(|gap| gap.to_string()))
}

/// Adds the events after one and up to another.
async fn add_events(
    link: &UserLink<'_>,
    name: &NamespacedName,
    (from, to): (i64, i64),
    calls: &mut CallsSince,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let mut reader = EventReader::open(link, name, (from, to), (false, false)).await?;
    let mut last = from;
    while let Some(event) = reader.next(screen).await? {
        // Lines of a later version are left out, so the last event may be beyond.
        if event.seq > to {
            return Ok(());
        }
        // Another journal begins again.
        if event.seq <= last {
            calls.interrupt();
            return Ok(());
        }
        last = event.seq;
        calls.add(&event);
    }
    // A pod that stops sending ends the events too.
    if last < to {
        calls.break_off();
    }
    Ok(())
}
