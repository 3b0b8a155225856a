//! Which pod holds a token: asks the API server (TokenReview) and remembers its answer for a short while.
//!
//! Only tokens of the link's audience, bound to a pod, of the service account of agent pods are taken. Keeps hashes of
//! tokens, never tokens.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use ring::digest::{SHA256, digest};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::api::LINK_AUDIENCE;
use crate::link::messages::{Refusal, RefusalCode};
use crate::link::pod::{SENSOR_SERVICE_ACCOUNT, SERVICE_ACCOUNT};
use crate::link::server::{PodIdentity, PodKind};

/// How long an answer is believed.
const REMEMBER: Duration = Duration::from_mins(1);
/// Most answers kept.
const MAX_REMEMBERED: usize = 20_000;
/// Longest time for one review of a token.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// Most reviews of tokens at once; the rest wait.
const MAX_REVIEWS: usize = 16;
/// Extra of a token's user: the name of the pod it is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
/// Extra of a token's user: the uid of the pod it is bound to.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Tells pods apart by their tokens.
pub struct Identities {
    reviews: Api<TokenReview>,
    slots: Semaphore,
    remembered: Mutex<Memory>,
}

impl Identities {
    /// Asks through `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            reviews: Api::all(client),
            slots: Semaphore::new(MAX_REVIEWS),
            remembered: Mutex::default(),
        }
    }

    /// The pod that holds `token`.
    pub async fn of(&self, token: &str) -> Result<PodIdentity, Refusal> {
        let hash = hash(token);
        if let Some(pod) = self.memory().get(&hash, Instant::now()) {
            return Ok(pod);
        }
        let asked = Instant::now();
        let status = timeout(REVIEW_TIMEOUT, self.review(token)).await.map_err(|_| {
            tracing::warn!("a TokenReview took longer than {} s", REVIEW_TIMEOUT.as_secs());
            cannot_check()
        })??;
        let pod = identify(&status)?;
        self.memory().put(hash, pod.clone(), asked);
        Ok(pod)
    }

    async fn review(&self, token: &str) -> Result<TokenReviewStatus, Refusal> {
        let _slot = self.slots.acquire().await.map_err(|_| cannot_check())?;
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.into()),
                audiences: Some(vec![LINK_AUDIENCE.into()]),
            },
            ..TokenReview::default()
        };
        match self.reviews.create(&PostParams::default(), &review).await {
            Ok(answer) => Ok(answer.status.unwrap_or_default()),
            Err(error) => {
                tracing::warn!(%error, "a TokenReview failed; the pod will try again");
                Err(cannot_check())
            }
        }
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the answer of the API server proves.
fn identify(status: &TokenReviewStatus) -> Result<PodIdentity, Refusal> {
    let audiences = status.audiences.iter().flatten();
    if status.authenticated != Some(true) || !audiences.into_iter().any(|audience| audience == LINK_AUDIENCE) {
        return Err(Refusal {
            code: RefusalCode::Unauthenticated,
            message: format!("the token is expired, or not of audience {LINK_AUDIENCE}"),
        });
    }
    let user = status.user.clone().unwrap_or_default();
    let account = user.username.as_deref().and_then(service_account);
    let extra = user.extra.unwrap_or_default();
    let pod = match (account, first(&extra, POD_NAME), first(&extra, POD_UID)) {
        (Some((namespace, account)), Some(name), Some(uid)) => kind(account).map(|kind| PodIdentity {
            namespace: namespace.into(),
            name,
            uid,
            kind,
        }),
        _ => None,
    };
    pod.ok_or_else(|| Refusal {
        code: RefusalCode::Unknown,
        message: format!(
            "the token is not one of a pod with service account {SERVICE_ACCOUNT} or {SENSOR_SERVICE_ACCOUNT}"
        ),
    })
}

fn kind(account: &str) -> Option<PodKind> {
    match account {
        SERVICE_ACCOUNT => Some(PodKind::Agent),
        SENSOR_SERVICE_ACCOUNT => Some(PodKind::Sensor),
        _ => None,
    }
}

/// Namespace and name in `system:serviceaccount:<namespace>:<name>`.
fn service_account(username: &str) -> Option<(&str, &str)> {
    username.strip_prefix("system:serviceaccount:")?.split_once(':')
}

fn first(extra: &BTreeMap<String, Vec<String>>, key: &str) -> Option<String> {
    extra.get(key)?.first().filter(|value| !value.is_empty()).cloned()
}

fn cannot_check() -> Refusal {
    Refusal {
        code: RefusalCode::NotLeading,
        message: "the token cannot be checked now; try again".into(),
    }
}

type Hash = [u8; 32];

fn hash(token: &str) -> Hash {
    let mut hash = Hash::default();
    hash.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    hash
}

/// Answers by hash of the token, and when they were asked for.
#[derive(Default)]
struct Memory(HashMap<Hash, (PodIdentity, Instant)>);

impl Memory {
    fn get(&self, hash: &Hash, now: Instant) -> Option<PodIdentity> {
        let (pod, asked) = self.0.get(hash)?;
        (now.duration_since(*asked) < REMEMBER).then(|| pod.clone())
    }

    fn put(&mut self, hash: Hash, pod: PodIdentity, asked: Instant) {
        if self.0.len() >= MAX_REMEMBERED {
            self.0.retain(|_, (_, old)| asked.duration_since(*old) < REMEMBER);
        }
        if self.0.len() < MAX_REMEMBERED {
            self.0.insert(hash, (pod, asked));
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo;
    use rstest::rstest;

    use super::*;

    fn status(audience: &str, username: &str, extra: &[(&str, &str)]) -> TokenReviewStatus {
        TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(vec![audience.into()]),
            user: Some(UserInfo {
                username: Some(username.into()),
                extra: Some(
                    extra
                        .iter()
                        .map(|(key, value)| ((*key).into(), vec![(*value).into()]))
                        .collect(),
                ),
                ..UserInfo::default()
            }),
            ..TokenReviewStatus::default()
        }
    }

    const BOUND: &[(&str, &str)] = &[(POD_NAME, "x"), (POD_UID, "u1")];
    const ACCOUNT: &str = "system:serviceaccount:team-a:agentloop-agent";

    #[test]
    fn a_token_of_an_agent_pod_names_it() {
        let pod = PodIdentity {
            namespace: "team-a".into(),
            name: "x".into(),
            uid: "u1".into(),
            kind: PodKind::Agent,
        };
        assert_eq!(identify(&status(LINK_AUDIENCE, ACCOUNT, BOUND)), Ok(pod));
    }

    #[rstest]
    #[case::another_audience("https://kubernetes.default.svc", ACCOUNT, BOUND, RefusalCode::Unauthenticated)]
    #[case::another_account(LINK_AUDIENCE, "system:serviceaccount:team-a:default", BOUND, RefusalCode::Unknown)]
    #[case::a_person(LINK_AUDIENCE, "agentloop-agent", BOUND, RefusalCode::Unknown)]
    #[case::bound_to_no_pod(LINK_AUDIENCE, ACCOUNT, &[], RefusalCode::Unknown)]
    #[case::without_a_uid(LINK_AUDIENCE, ACCOUNT, &[(POD_NAME, "x"), (POD_UID, "")], RefusalCode::Unknown)]
    fn any_other_token_is_refused(
        #[case] audience: &str,
        #[case] username: &str,
        #[case] extra: &[(&str, &str)],
        #[case] code: RefusalCode,
    ) {
        assert_eq!(identify(&status(audience, username, extra)).unwrap_err().code, code);
    }

    #[test]
    fn an_answer_without_audiences_is_not_believed() {
        let mut silent = status(LINK_AUDIENCE, ACCOUNT, BOUND);
        silent.audiences = None;
        assert_eq!(identify(&silent).unwrap_err().code, RefusalCode::Unauthenticated);
    }

    #[test]
    fn a_token_that_is_not_authenticated_is_refused() {
        let mut refused = status(LINK_AUDIENCE, ACCOUNT, BOUND);
        refused.authenticated = Some(false);
        assert_eq!(identify(&refused).unwrap_err().code, RefusalCode::Unauthenticated);
    }

    #[test]
    fn an_answer_is_remembered_for_less_than_a_minute() {
        let pod = identify(&status(LINK_AUDIENCE, ACCOUNT, BOUND)).unwrap();
        let (mut memory, asked) = (Memory::default(), Instant::now());
        memory.put(hash("token"), pod.clone(), asked);
        let almost = asked + REMEMBER - Duration::from_millis(1);
        assert_eq!(memory.get(&hash("token"), almost), Some(pod));
        assert_eq!(memory.get(&hash("token"), asked + REMEMBER), None);
        assert_eq!(memory.get(&hash("tokem"), asked), None);
    }

    #[test]
    fn the_memory_is_bounded_and_old_answers_make_room() {
        let pod = identify(&status(LINK_AUDIENCE, ACCOUNT, BOUND)).unwrap();
        let (mut memory, asked) = (Memory::default(), Instant::now());
        for number in 0..=MAX_REMEMBERED {
            memory.put(hash(&number.to_string()), pod.clone(), asked);
        }
        assert_eq!(memory.0.len(), MAX_REMEMBERED);
        memory.put(hash("new"), pod, asked + REMEMBER);
        assert_eq!(memory.0.len(), 1);
    }
}
