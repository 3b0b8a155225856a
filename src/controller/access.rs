//! Who may read an Agent's events: asks the API server whose a token is (TokenReview) and what they may do
//! (`SubjectAccessReview`).
//!
//! Any token that the API server takes is taken, and none of another audience. Remembers nothing: a reading is long, and a
//! right that was taken away counts from the next one on.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::timeout;

use super::event_subscriptions::unavailable;
use super::pod_sessions::AgentKey;
use super::review_limiter::ReviewLimiter;
use crate::link::events::{ReadRefusal, ReadRefusalCode};

/// Longest time for both questions.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Most readers that are asked about at once; the rest wait.
const MAX_QUESTIONS: usize = 8;

/// Asks who may read.
pub struct ReadAuthorizer {
    tokens: Api<TokenReview>,
    rights: Api<SubjectAccessReview>,
    gate: ReviewLimiter,
}

impl ReadAuthorizer {
    /// Asks through `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            tokens: Api::all(client.clone()),
            rights: Api::all(client),
            gate: ReviewLimiter::new(MAX_QUESTIONS),
        }
    }

    /// Whether who holds `token`, which came from `address`, may `get` this subresource of the Agent.
    pub async fn check(
        &self,
        (token, address): (&str, IpAddr),
        agent: &AgentKey,
        subresource: &str,
    ) -> Result<(), ReadRefusal> {
        timeout(ANSWER_TIMEOUT, self.authorize((token, address), agent, subresource))
            .await
            .unwrap_or_else(|_| {
                tracing::warn!(
                    "a question about a reader took longer than {} s",
                    ANSWER_TIMEOUT.as_secs()
                );
                Err(cannot_check())
            })
    }

    async fn authorize(
        &self,
        (token, address): (&str, IpAddr),
        agent: &AgentKey,
        subresource: &str,
    ) -> Result<(), ReadRefusal> {
        let _pass = self.gate.acquire(address).await.ok_or_else(|| {
            unavailable("too many tokens of this address were to be checked, or were wrong; try again in some seconds")
        })?;
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.into()),
                // The API server's own.
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
        let AgentKey { namespace, name: of } = agent;
        Err(ReadRefusal {
            code: ReadRefusalCode::Forbidden,
            message: format!(
                "{name} may not get agents/{subresource} of Agent {namespace}/{of}; where the chart sets rbac.aggregate, \
                 the roles admin and edit may get agents/words, and view too agents/events"
            ),
        })
    }
}

/// Whose token it is.
fn token_user(status: TokenReviewStatus) -> Result<UserInfo, ReadRefusal> {
    status
        .user
        .filter(|user| {
            status.authenticated == Some(true) && user.username.as_ref().is_some_and(|name| !name.is_empty())
        })
        .ok_or_else(|| ReadRefusal {
            code: ReadRefusalCode::Unauthenticated,
            message: "the API server does not take this token: it is expired, or of another cluster or audience".into(),
        })
}

fn access_review(user: UserInfo, agent: &AgentKey, subresource: &str) -> SubjectAccessReview {
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
    tracing::warn!(%error, "a question about a reader failed");
    cannot_check()
}

fn cannot_check() -> ReadRefusal {
    unavailable("whose token it is cannot be checked now; try again")
}
