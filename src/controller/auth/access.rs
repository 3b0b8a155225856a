//! Decides who may read an Agent's events, answer its gates, request tasks, and what the page shows: a TokenReview identifies the
//! user, a `SubjectAccessReview` checks the permission.
//!
//! Accepts any token with the audience of the API server. Keeps no permission: a subscription is long, answers are rare, and a
//! revoked permission takes effect with the next request. A token that was rejected is refused for a moment without asking
//! again, so that those of strangers keep no user behind the same address out (ADR 0103).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::{Instant, timeout};

use crate::api::NamespacedName;
use crate::controller::auth::identity::is_pod_account;
use crate::controller::auth::review_limiter::{RejectedTokens, ReviewLimiter, ReviewPermit, SHARED_ROOM};
use crate::controller::event_subscriptions::unavailable;
use crate::link::events::{ClientRefusal, ClientRefusalCode};
use crate::support::hash;

/// Time limit for both reviews together.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The message about a token that the API server rejects.
pub(in crate::controller) const REJECTED_TOKEN: &str =
    "the API server rejected the token: it has expired, or belongs to another cluster or audience";
/// Maximum number of concurrent authorizations; further ones wait.
const MAX_QUESTIONS: usize = 8;

/// What a client may be permitted to do with an Agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAction {
    /// Read its events.
    ReadEvents,
    /// Read the texts of models and tools in them.
    ReadMessages,
    /// Answer its gates.
    Approve,
    /// Request that it works on tasks.
    RequestTasks,
}

impl ClientAction {
    fn verb(self) -> &'static str {
        match self {
            Self::ReadEvents | Self::ReadMessages => "get",
            Self::Approve => "approve",
            Self::RequestTasks => "create",
        }
    }

    fn subresource(self) -> Option<&'static str> {
        match self {
            Self::ReadEvents => Some("events"),
            Self::ReadMessages => Some("messages"),
            Self::Approve => None,
            Self::RequestTasks => Some("tasks"),
        }
    }

    /// The refusal of a user who lacks the permission.
    fn denial(self, user: &str, agent: &NamespacedName) -> String {
        match self.subresource() {
            Some("tasks") => format!(
                "{user} may not create agents/tasks of Agent {agent}; if the chart sets rbac.aggregate, the roles edit and admin \
                 grant it"
            ),
            Some(subresource) => format!(
                "{user} may not get agents/{subresource} of Agent {agent}; if the chart sets rbac.aggregate, \
                 the roles view, edit and admin grant agents/events, and edit and admin grant agents/messages"
            ),
            None => format!(
                "{user} may not answer gates of Agent {agent}: this needs the verb approve on agents.agentloop.dev, which the \
                 role admin and the chart's role for approvers grant if the chart sets rbac.aggregate"
            ),
        }
    }
}

/// Authorizes clients.
pub struct ClientAuthorizer {
    tokens: Api<TokenReview>,
    rights: Api<SubjectAccessReview>,
    gate: ReviewLimiter,
    rejected: RejectedTokens,
}

impl ClientAuthorizer {
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            tokens: Api::all(client.clone()),
            rights: Api::all(client),
            gate: ReviewLimiter::new(MAX_QUESTIONS).with_shared_room(SHARED_ROOM),
            rejected: RejectedTokens::default(),
        }
    }

    /// The name of the user who presented `token` from `address`, if that user may do this with the Agent.
    pub async fn check(
        &self,
        (token, address): (&str, IpAddr),
        agent: &NamespacedName,
        action: ClientAction,
    ) -> Result<String, ClientRefusal> {
        timeout(ANSWER_TIMEOUT, self.authorize((token, address), agent, action))
            .await
            .unwrap_or_else(|_| {
                tracing::warn!("authorizing a client timed out after {} s", ANSWER_TIMEOUT.as_secs());
                Err(cannot_check())
            })
    }

    async fn authorize(
        &self,
        (token, address): (&str, IpAddr),
        agent: &NamespacedName,
        action: ClientAction,
    ) -> Result<String, ClientRefusal> {
        let _permit = self.permit((token, address)).await?;
        let user = self.user_of((token, address)).await?;
        let name = user.username.clone().unwrap_or_default();
        let denied = |message| ClientRefusal {
            code: ClientRefusalCode::Forbidden,
            message,
        };
        // A loop never approves its own calls, whatever its pod's account was given.
        if action == ClientAction::Approve && is_pod_account(&name) {
            return Err(denied(format!(
                "{name} is the account of pods of Agents or Sensors, which may not answer gates, whatever the verb approve \
                 on agents.agentloop.dev is granted to"
            )));
        }
        if self.allows(user, right(agent, action)).await? {
            return Ok(name);
        }
        Err(denied(action.denial(&name, agent)))
    }

    /// The user who presented `token` from `address`.
    pub async fn identify(&self, (token, address): (&str, IpAddr)) -> Result<UserInfo, ClientRefusal> {
        let identified = async {
            let _permit = self.permit((token, address)).await?;
            self.user_of((token, address)).await
        };
        timeout(ANSWER_TIMEOUT, identified).await.unwrap_or_else(|_| {
            tracing::warn!("identifying a client timed out after {} s", ANSWER_TIMEOUT.as_secs());
            Err(cannot_check())
        })
    }

    /// Permission to ask about a token from this address.
    async fn permit(&self, (token, address): (&str, IpAddr)) -> Result<ReviewPermit<'_>, ClientRefusal> {
        if self.rejected.contain(&hash::sha256(token)) {
            return Err(rejected());
        }
        self.gate.acquire(address).await.ok_or_else(|| {
            unavailable("too many tokens from this address are pending or invalid; retry in a few seconds")
        })
    }

    async fn user_of(&self, (token, address): (&str, IpAddr)) -> Result<UserInfo, ClientRefusal> {
        let since = Instant::now();
        let answer = self.tokens.create(&PostParams::default(), &token_review(token)).await;
        token_user(answer.map_err(|error| failed(&error))?.status.unwrap_or_default())
            .ok_or_else(rejected)
            .inspect_err(|_| {
                self.rejected.add(hash::sha256(token), since);
                self.gate.record_failure(address);
            })
    }

    /// Whether this user has this right.
    pub async fn allows(&self, user: UserInfo, right: ResourceAttributes) -> Result<bool, ClientRefusal> {
        let question = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                resource_attributes: Some(right),
                ..review_of(user)
            },
            ..SubjectAccessReview::default()
        };
        let answer = self.rights.create(&PostParams::default(), &question).await;
        let status = answer.map_err(|error| failed(&error))?.status;
        Ok(status.is_some_and(|status| status.allowed && status.denied != Some(true)))
    }
}

/// Asks whose token this is.
pub(in crate::controller) fn token_review(token: &str) -> TokenReview {
    TokenReview {
        spec: TokenReviewSpec {
            token: Some(token.into()),
            // `None` means the audience of the API server itself.
            audiences: None,
        },
        ..TokenReview::default()
    }
}

/// The authenticated user, if the token is valid.
pub(in crate::controller) fn token_user(status: TokenReviewStatus) -> Option<UserInfo> {
    status.user.filter(|user| {
        status.authenticated == Some(true) && user.username.as_ref().is_some_and(|name| !name.is_empty())
    })
}

fn rejected() -> ClientRefusal {
    ClientRefusal {
        code: ClientRefusalCode::Unauthenticated,
        message: REJECTED_TOKEN.into(),
    }
}

/// Asks about a permission of this user, which the caller adds.
pub(in crate::controller) fn review_of(user: UserInfo) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: user.username,
        groups: user.groups,
        uid: user.uid,
        extra: user.extra.map(BTreeMap::from_iter),
        ..SubjectAccessReviewSpec::default()
    }
}

/// The permission to do this with an Agent.
fn right(agent: &NamespacedName, action: ClientAction) -> ResourceAttributes {
    ResourceAttributes {
        verb: Some(action.verb().into()),
        group: Some("agentloop.dev".into()),
        resource: Some("agents".into()),
        subresource: action.subresource().map(Into::into),
        namespace: Some(agent.namespace.clone()),
        name: Some(agent.name.clone()),
        ..ResourceAttributes::default()
    }
}

fn failed(error: &kube::Error) -> ClientRefusal {
    tracing::warn!(%error, "failed to authorize a client");
    cannot_check()
}

fn cannot_check() -> ClientRefusal {
    unavailable("the token cannot be verified now; retry")
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::http::{Request, Response};
    use serde_json::{Value, json};

    use super::*;
    use crate::controller::auth::review_limiter::WINDOW;

    #[tokio::test(start_paused = true)]
    async fn a_rejected_token_is_reviewed_again_after_ten_seconds() {
        let reviews = Arc::<AtomicUsize>::default();
        let counted = reviews.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            counted.fetch_add(1, Ordering::SeqCst);
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                review["status"] = json!({ "authenticated": false });
                Ok::<_, Infallible>(Response::new(axum::body::Body::from(review.to_string())))
            }
        });
        let access = ClientAuthorizer::new(Client::new(service, "default"));
        let address = IpAddr::from([10, 0, 0, 1]);
        for expected in [1, 2] {
            for _ in 0..3 {
                let refusal = access.identify(("forged", address)).await.unwrap_err();
                assert_eq!(refusal.code, ClientRefusalCode::Unauthenticated);
                assert_eq!(reviews.load(Ordering::SeqCst), expected);
            }
            tokio::time::advance(WINDOW).await;
        }
    }
}
