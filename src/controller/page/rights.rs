//! What a user may see on the page: asked of the API server in a few questions, from all namespaces down to single objects.
//!
//! The answers are kept for a minute. What cannot be verified is not shown. The questions of one look are bounded, and those
//! of a session have pauses, whatever it looks at; what is not asked for is not shown either, and the page says so. All
//! questions of the page share a few requests at a time, so that no user keeps the API server busy.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::authorization::v1::ResourceAttributes;
use tokio::time::{Instant, timeout};

use super::session::PageSession;
use crate::api::NamespacedName;
use crate::controller::auth::access::ClientAuthorizer;
use crate::controller::event_subscriptions::unavailable;
use crate::link::events::ClientRefusal;

/// How long answers are kept.
const ANSWER_LIFETIME: Duration = Duration::from_mins(1);
/// Time limit for all questions of one look.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The shortest time between the questions of two looks of one session.
const PAUSE: Duration = Duration::from_secs(10);
/// How long a failure is the answer of a session.
const FAILED: Duration = Duration::from_secs(5);
/// Maximum number of questions of one look.
pub(super) const MAX_QUESTIONS: usize = 200;
/// Maximum number of questions of the page at a time.
pub(super) const AT_ONCE: usize = 8;
/// Maximum number of filters whose answers are kept for one session.
const MAX_FILTERS: usize = 4;

/// What the page shows of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ViewedResource {
    /// Rows of Agents.
    Agents,
    /// Their last turns and events.
    Events,
    Budgets,
    Sensors,
}

impl ViewedResource {
    const ALL: [Self; 4] = [Self::Agents, Self::Events, Self::Budgets, Self::Sensors];

    fn right(self, namespace: Option<&str>, name: Option<&str>) -> ResourceAttributes {
        let (resource, subresource) = match self {
            Self::Agents => ("agents", None),
            Self::Events => ("agents", Some("events")),
            Self::Budgets => ("agentbudgets", None),
            Self::Sensors => ("sensors", None),
        };
        ResourceAttributes {
            verb: Some("get".into()),
            group: Some("agentloop.dev".into()),
            resource: Some(resource.into()),
            subresource: subresource.map(Into::into),
            namespace: namespace.map(Into::into),
            name: name.map(Into::into),
            ..ResourceAttributes::default()
        }
    }
}

/// The objects that there are to see.
pub(super) type ViewedObjects = BTreeMap<ViewedResource, BTreeSet<NamespacedName>>;

/// What a user may see of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ResourceRights {
    everywhere: bool,
    namespaces: BTreeSet<String>,
    objects: BTreeSet<NamespacedName>,
}

/// What a user may see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ViewRights {
    resources: BTreeMap<ViewedResource, ResourceRights>,
    /// What was asked about another look, since it is too early to ask about this one.
    pub(super) is_pending: bool,
}

impl ViewRights {
    /// Whether the user may see all that there is.
    pub(super) fn are_complete(&self) -> bool {
        ViewedResource::ALL
            .iter()
            .all(|resource| self.resources.get(resource).is_some_and(|rights| rights.everywhere))
    }

    /// Whether the user may see this object.
    pub(super) fn include(&self, resource: ViewedResource, object: &NamespacedName) -> bool {
        self.resources.get(&resource).is_some_and(|rights| {
            rights.everywhere || rights.namespaces.contains(&object.namespace) || rights.objects.contains(object)
        })
    }
}

/// The answers about one user, by the namespace that the page was narrowed to.
#[derive(Default)]
pub(super) struct KnownRights {
    answers: BTreeMap<Option<String>, (Instant, Arc<ViewRights>)>,
    /// When the next questions may be asked.
    next: Option<Instant>,
    /// Why the last ones have no answers.
    failure: Option<ClientRefusal>,
}

impl KnownRights {
    fn keep(&mut self, filter: Option<String>, since: Instant, rights: Arc<ViewRights>) {
        if self.answers.len() >= MAX_FILTERS {
            let oldest = self.answers.iter().min_by_key(|(_, (since, _))| *since);
            if let Some(oldest) = oldest.map(|(filter, _)| filter.clone()) {
                self.answers.remove(&oldest);
            }
        }
        self.answers.insert(filter, (since, rights));
    }
}

/// That permissions cannot be asked for.
pub(super) fn unverified() -> ClientRefusal {
    unavailable("your permissions cannot be verified now; retry")
}

/// A permission of a user: a resource, in all namespaces or one, and one object or all.
type AskedRight = (ViewedResource, Option<NamespacedName>, Option<String>);

/// What this user may see of these objects, as it was known at most a minute ago.
pub(super) async fn rights(
    access: &ClientAuthorizer,
    session: &PageSession,
    filter: Option<&String>,
    objects: &ViewedObjects,
) -> Result<Arc<ViewRights>, ClientRefusal> {
    let mut known = session.rights.lock().await;
    let now = Instant::now();
    known
        .answers
        .retain(|_, (since, _)| now.duration_since(*since) < ANSWER_LIFETIME);
    if let Some((_, rights)) = known.answers.get(&filter.cloned()) {
        return Ok(rights.clone());
    }
    if known.next.is_some_and(|next| now < next) {
        if let Some(failure) = &known.failure {
            return Err(failure.clone());
        }
        // Answers about all namespaces are true of each.
        let wider = known
            .answers
            .get(&None::<String>)
            .map(|(_, rights)| ViewRights::clone(rights));
        return Ok(Arc::new(ViewRights {
            is_pending: true,
            ..wider.unwrap_or_default()
        }));
    }
    // Before the questions, which end without an answer when the browser is gone.
    (known.next, known.failure) = (Some(now + PAUSE), None);
    let asked = timeout(ANSWER_TIMEOUT, ask(access, session, objects)).await;
    match asked.unwrap_or_else(|_| Err(unverified())) {
        Ok(rights) => {
            let rights = Arc::new(rights);
            known.keep(filter.cloned(), now, rights.clone());
            Ok(rights)
        }
        Err(failure) => {
            (known.next, known.failure) = (Some(Instant::now() + FAILED), Some(failure.clone()));
            Err(failure)
        }
    }
}

async fn ask(
    access: &ClientAuthorizer,
    session: &PageSession,
    objects: &ViewedObjects,
) -> Result<ViewRights, ClientRefusal> {
    let mut questions = RightQuestions {
        access,
        session,
        left: MAX_QUESTIONS,
    };
    let mut rights = ViewRights::default();
    // Also of what there is none: only users who may see all learn that.
    let everywhere = ViewedResource::ALL.map(|resource| (resource, None, None)).into();
    for ((resource, ..), allowed) in questions.ask(everywhere).await? {
        rights.resources.entry(resource).or_default().everywhere = allowed;
    }
    let is_open = |rights: &ViewRights, resource, object: &NamespacedName| !rights.include(resource, object);
    let namespaces: BTreeSet<_> = objects
        .iter()
        .flat_map(|(resource, objects)| objects.iter().map(|object| (*resource, object)))
        .filter(|(resource, object)| is_open(&rights, *resource, object))
        .map(|(resource, object)| (resource, None, Some(object.namespace.clone())))
        .collect();
    for ((resource, _, namespace), allowed) in questions.ask(namespaces).await? {
        let rights = rights.resources.entry(resource).or_default();
        rights.namespaces.extend(namespace.filter(|_| allowed));
    }
    // A role may name objects.
    let single: BTreeSet<_> = objects
        .iter()
        .flat_map(|(resource, objects)| objects.iter().map(|object| (*resource, object)))
        .filter(|(resource, object)| is_open(&rights, *resource, object))
        .map(|(resource, object)| (resource, Some(object.clone()), None))
        .collect();
    for ((resource, object, _), allowed) in questions.ask(single).await? {
        let rights = rights.resources.entry(resource).or_default();
        rights.objects.extend(object.filter(|_| allowed));
    }
    Ok(rights)
}

/// The questions about one user that may still be asked.
struct RightQuestions<'a> {
    access: &'a ClientAuthorizer,
    session: &'a PageSession,
    left: usize,
}

impl RightQuestions<'_> {
    async fn ask(&mut self, rights: BTreeSet<AskedRight>) -> Result<Vec<(AskedRight, bool)>, ClientRefusal> {
        let asked: Vec<_> = rights.into_iter().take(self.left).collect();
        self.left -= asked.len();
        let (access, user, questions) = (self.access, &self.session.user, &self.session.questions);
        stream::iter(asked)
            .map(|asked| async move {
                let (resource, object, namespace) = &asked;
                let right = match object {
                    Some(object) => resource.right(Some(&object.namespace), Some(&object.name)),
                    None => resource.right(namespace.as_deref(), None),
                };
                let _permit = questions.acquire().await.map_err(|_| unverified())?;
                let allowed = access.allows(user.clone(), right).await?;
                Ok((asked, allowed))
            })
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await
    }
}

#[cfg(test)]
mod tests;
