//! Decides who may read an Agent's events: a TokenReview identifies the user, a `SubjectAccessReview` checks the
//! permission.
//!
//! Accepts any token with the audience of the API server. Caches nothing: a subscription is long, and a revoked
//! permission takes effect with the next one.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::timeout;

use super::event_subscriptions::unavailable;
use super::review_limiter::ReviewLimiter;
use crate::api::NamespacedName;
use crate::link::events::{ReadRefusal, ReadRefusalCode};

/// Time limit for both reviews together.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Most concurrent authorizations; further ones wait.
const MAX_QUESTIONS: usize = 8;

/// Authorizes readers.
pub struct ReadAuthorizer {
    tokens: Api<TokenReview>,
    rights: Api<SubjectAccessReview>,
    gate: ReviewLimiter,
}

impl ReadAuthorizer {
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            tokens: Api::all(client.clone()),
            rights: Api::all(client),
            gate: ReviewLimiter::new(MAX_QUESTIONS),
        }
    }

    /// Checks whether the user who presented `token` from `address` may `get` this subresource of the Agent.
    pub async fn check(
        &self,
        (token, address): (&str, IpAddr),
        agent: &NamespacedName,
        subresource: &str,
    ) -> Result<(), ReadRefusal> {
        timeout(ANSWER_TIMEOUT, self.authorize((token, address), agent, subresource))
            .await
            .unwrap_or_else(|_| {
                tracing::warn!("authorizing a reader timed out after {} s", ANSWER_TIMEOUT.as_secs());
                Err(cannot_check())
            })
    }

    async fn authorize(
        &self,
        (token, address): (&str, IpAddr),
        agent: &NamespacedName,
        subresource: &str,
    ) -> Result<(), ReadRefusal> {
        let _pass = self.gate.acquire(address).await.ok_or_else(|| {
            unavailable("too many tokens from this address are pending or invalid; retry in a few seconds")
        })?;
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.into()),
                // `None` means the audience of the API server itself.
                audiences: None,
            },
            ..TokenReview::default()
        };
        let answer = self.tokens.create(&PostParams::default(), &review).await;
        let user = token_user(answer.map_err(|error| failed(&error))?.status.unwrap_or_default())
            .inspect_err(|_| self.gate.record_failure(address))?;
        let name = user.username.clone().unwrap_or_default();
        let question = access_review(user, agent, subresource);
        let answer = self.rights.create(&PostParams::default(), &question).await;
        let allowed = answer
            .map_err(|error| failed(&error))?
            .status
            .is_some_and(|status| status.allowed && status.denied != Some(true));
        if allowed {
            return Ok(());
        }
        Err(ReadRefusal {
            code: ReadRefusalCode::Forbidden,
            message: format!(
                "{name} may not get agents/{subresource} of Agent {agent}; if the chart sets rbac.aggregate, \
                 the roles view, edit and admin grant agents/events, and edit and admin grant agents/messages"
            ),
        })
    }
}

/// The authenticated user.
fn token_user(status: TokenReviewStatus) -> Result<UserInfo, ReadRefusal> {
    status
        .user
        .filter(|user| {
            status.authenticated == Some(true) && user.username.as_ref().is_some_and(|name| !name.is_empty())
        })
        .ok_or_else(|| ReadRefusal {
            code: ReadRefusalCode::Unauthenticated,
            message: "the API server rejected the token: it has expired, or belongs to another cluster or audience"
                .into(),
        })
}

fn access_review(user: UserInfo, agent: &NamespacedName, subresource: &str) -> SubjectAccessReview {
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username,
            groups: user.groups,
            uid: user.uid,
            extra: user.extra.map(BTreeMap::from_iter),
            resource_attributes: Some(ResourceAttributes {
                verb: Some("get".into()),
                group: Some("agentloop.dev".into()),
                resource: Some("agents".into()),
                subresource: Some(subresource.into()),
                namespace: Some(agent.namespace.clone()),
                name: Some(agent.name.clone()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

fn failed(error: &kube::Error) -> ReadRefusal {
    tracing::warn!(%error, "failed to authorize a reader");
    cannot_check()
}

fn cannot_check() -> ReadRefusal {
    unavailable("the token cannot be verified now; retry")
}
