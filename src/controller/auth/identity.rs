//! Identifies the pod that presents a token, by a TokenReview whose result is cached while the token is valid.
//!
//! Accepts only tokens with the link's audience that are bound to a pod and belong to the service account of agent or
//! sensor pods. A token whose claims cannot match is rejected without a review. Whether the pod still exists is not
//! checked here: the tables of pod sessions and of sensor pods know each pod by its UID and reject the others. Caches
//! hashes of tokens, never tokens.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use serde::Deserialize;
use tokio::time::{Instant, timeout};

use crate::api::LINK_AUDIENCE;
use crate::controller::auth::review_limiter::{ReviewLimiter, TokenHash};
use crate::link::messages::{PodRefusal, RefusalCode};
use crate::link::pod::{SENSOR_SERVICE_ACCOUNT, SERVICE_ACCOUNT};
use crate::link::server::{PodIdentity, PodKind};
use crate::support::hash::sha256;

/// Minimum and maximum time for which a positive result is cached, whatever the token's expiry says, because clocks
/// differ.
const BELIEVED: (Duration, Duration) = (Duration::from_mins(1), Duration::from_hours(1));
/// How long a rejection is cached.
const REFUSED: Duration = Duration::from_secs(10);
/// Maximum number of cached results of each kind. The least recently used are evicted.
const MAX_REMEMBERED: usize = 32_768;
/// Time limit for one TokenReview.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent `TokenReview`s; further ones wait.
const MAX_REVIEWS: usize = 16;
/// Longest accepted token.
const MAX_TOKEN_BYTES: usize = 8 * 1024;
/// Tokens that expired more than this many seconds ago are rejected without a review. The margin allows for an API
/// server whose clock is behind.
const LONG_EXPIRED: i64 = 300;
/// Extra field of a token's user: the name of the pod that it is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
/// Extra field of a token's user: the UID of the pod that it is bound to.
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Identifies pods by their tokens.
pub struct PodAuthenticator {
    reviews: Api<TokenReview>,
    gate: ReviewLimiter,
    known: Mutex<TokenCache<PodIdentity>>,
    refused: Mutex<TokenCache<PodRefusal>>,
}

impl PodAuthenticator {
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            reviews: Api::all(client),
            gate: ReviewLimiter::new(MAX_REVIEWS),
            known: Mutex::default(),
            refused: Mutex::default(),
        }
    }

    /// The pod that presented `token` from `address`.
    pub async fn authenticate(&self, token: &str, address: IpAddr) -> Result<PodIdentity, PodRefusal> {
        let wall = Timestamp::now();
        let expires = token_expiry(token, wall)?;
        let hash = sha256(token);
        let asked = Instant::now();
        if let Some(pod) = lock(&self.known).get(&hash, asked) {
            return Ok(pod);
        }
        if let Some(refusal) = lock(&self.refused).get(&hash, asked) {
            return Err(refusal);
        }
        // Only verdicts of the API server are cached; its outages are not.
        let status = timeout(REVIEW_TIMEOUT, self.review(token, address))
            .await
            .map_err(|_| {
                tracing::warn!("a TokenReview timed out after {} s", REVIEW_TIMEOUT.as_secs());
                cannot_check()
            })??;
        match identify(&status) {
            Ok(pod) => {
                let left = Duration::try_from(expires.duration_since(wall)).unwrap_or_default();
                let believed = left.clamp(BELIEVED.0, BELIEVED.1);
                lock(&self.known).put(hash, pod.clone(), asked + believed);
                Ok(pod)
            }
            Err(refusal) => {
                self.gate.record_failure(address);
                lock(&self.refused).put(hash, refusal.clone(), asked + REFUSED);
                Err(refusal)
            }
        }
    }

    async fn review(&self, token: &str, address: IpAddr) -> Result<TokenReviewStatus, PodRefusal> {
        let Some(_pass) = self.gate.acquire(address).await else {
            return Err(PodRefusal {
                code: RefusalCode::NotLeading,
                message: "too many tokens from this address are pending or invalid; retry in a few seconds".into(),
            });
        };
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
                tracing::warn!(%error, "a TokenReview failed; the pod will retry");
                Err(cannot_check())
            }
        }
    }
}

fn lock<T>(memory: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The unverified claims of a service account token.
#[derive(Deserialize)]
struct TokenClaims {
    aud: TokenAudiences,
    exp: i64,
    sub: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenAudiences {
    One(String),
    Many(Vec<String>),
}

/// The expiry that the token claims; an error if its claims cannot be accepted, whatever its signature.
fn token_expiry(token: &str, now: Timestamp) -> Result<Timestamp, PodRefusal> {
    let claims = parse_claims(token).ok_or_else(|| PodRefusal {
        code: RefusalCode::Unauthenticated,
        message: "the token is not a service account token".into(),
    })?;
    let audiences = match &claims.aud {
        TokenAudiences::One(one) => std::slice::from_ref(one),
        TokenAudiences::Many(many) => many.as_slice(),
    };
    let expires = Timestamp::from_second(claims.exp).map_err(|_| not_valid())?;
    if !audiences.iter().any(|audience| audience == LINK_AUDIENCE) || now.as_second() - claims.exp > LONG_EXPIRED {
        return Err(not_valid());
    }
    let account = service_account(&claims.sub).and_then(|(_, account)| pod_kind(account));
    account.map(|_| expires).ok_or_else(other_account)
}

/// Decodes the payload of a JSON web token, without verifying its signature.
fn parse_claims(token: &str) -> Option<TokenClaims> {
    if token.len() > MAX_TOKEN_BYTES {
        return None;
    }
    let mut parts = token.split('.');
    let (Some(_), Some(claims), Some(signature), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    if signature.is_empty() {
        return None;
    }
    serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
}

fn not_valid() -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Unauthenticated,
        message: format!("the token has expired, or its audience is not {LINK_AUDIENCE}"),
    }
}

fn other_account() -> PodRefusal {
    PodRefusal {
        code: RefusalCode::Unknown,
        message: format!(
            "the token does not belong to a pod with service account {SERVICE_ACCOUNT} or {SENSOR_SERVICE_ACCOUNT}"
        ),
    }
}

/// The pod that the result of the TokenReview proves.
fn identify(status: &TokenReviewStatus) -> Result<PodIdentity, PodRefusal> {
    let audiences = status.audiences.iter().flatten();
    if status.authenticated != Some(true) || !audiences.into_iter().any(|audience| audience == LINK_AUDIENCE) {
        return Err(not_valid());
    }
    let user = status.user.clone().unwrap_or_default();
    let account = user.username.as_deref().and_then(service_account);
    let extra = user.extra.unwrap_or_default();
    let pod = match (account, first(&extra, POD_NAME), first(&extra, POD_UID)) {
        (Some((namespace, account)), Some(name), Some(uid)) => pod_kind(account).map(|kind| PodIdentity {
            namespace: namespace.into(),
            name,
            uid,
            kind,
        }),
        _ => None,
    };
    pod.ok_or_else(other_account)
}

fn pod_kind(account: &str) -> Option<PodKind> {
    match account {
        SERVICE_ACCOUNT => Some(PodKind::Agent),
        SENSOR_SERVICE_ACCOUNT => Some(PodKind::Sensor),
        _ => None,
    }
}

/// Whether this is the user of the pods of Agents or Sensors of any namespace.
pub(in crate::controller) fn is_pod_account(username: &str) -> bool {
    service_account(username).is_some_and(|(_, account)| pod_kind(account).is_some())
}

/// Splits `system:serviceaccount:<namespace>:<name>` into namespace and name.
fn service_account(username: &str) -> Option<(&str, &str)> {
    username.strip_prefix("system:serviceaccount:")?.split_once(':')
}

fn first(extra: &BTreeMap<String, Vec<String>>, key: &str) -> Option<String> {
    extra.get(key)?.first().filter(|value| !value.is_empty()).cloned()
}

fn cannot_check() -> PodRefusal {
    PodRefusal {
        code: RefusalCode::NotLeading,
        message: "the token cannot be verified now; retry".into(),
    }
}

/// Cached results by token hash, each with its expiry. Two generations approximate LRU eviction: when the young one is
/// full it becomes the old one, and the previous old one is dropped except for the entries used since.
struct TokenCache<T> {
    young: HashMap<TokenHash, (T, Instant)>,
    old: HashMap<TokenHash, (T, Instant)>,
}

impl<T> Default for TokenCache<T> {
    fn default() -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
        }
    }
}

impl<T: Clone> TokenCache<T> {
    fn get(&mut self, hash: &TokenHash, now: Instant) -> Option<T> {
        if let Some(aged) = self.old.remove(hash) {
            self.put(*hash, aged.0, aged.1);
        }
        let (answer, until) = self.young.get(hash)?;
        (now < *until).then(|| answer.clone())
    }

    fn put(&mut self, hash: TokenHash, answer: T, until: Instant) {
        if self.young.len() >= MAX_REMEMBERED / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(hash, (answer, until));
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
    fn an_answer_without_audiences_is_rejected() {
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

    fn token(claims: &serde_json::Value) -> String {
        format!("e30.{}.c2ln", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()))
    }

    #[rstest]
    #[case::of_an_agent_pod(
        r#"{"aud": ["agentloop.dev/link"], "exp": 2000, "sub": "system:serviceaccount:a:agentloop-agent"}"#,
        None
    )]
    #[case::of_a_sensor_pod(
        r#"{"aud": "agentloop.dev/link", "exp": 2000, "sub": "system:serviceaccount:a:agentloop-sensor"}"#,
        None
    )]
    #[case::just_expired(
        r#"{"aud": "agentloop.dev/link", "exp": 700, "sub": "system:serviceaccount:a:agentloop-agent"}"#,
        None
    )]
    #[case::expired(
        r#"{"aud": "agentloop.dev/link", "exp": 699, "sub": "system:serviceaccount:a:agentloop-agent"}"#,
        Some(RefusalCode::Unauthenticated)
    )]
    #[case::another_audience(
        r#"{"aud": ["x"], "exp": 2000, "sub": "system:serviceaccount:a:agentloop-agent"}"#,
        Some(RefusalCode::Unauthenticated)
    )]
    #[case::another_account(
        r#"{"aud": ["agentloop.dev/link"], "exp": 2000, "sub": "system:serviceaccount:a:default"}"#,
        Some(RefusalCode::Unknown)
    )]
    #[case::a_person(
        r#"{"aud": ["agentloop.dev/link"], "exp": 2000, "sub": "ann"}"#,
        Some(RefusalCode::Unknown)
    )]
    #[case::no_end(
        r#"{"aud": ["agentloop.dev/link"], "sub": "system:serviceaccount:a:agentloop-agent"}"#,
        Some(RefusalCode::Unauthenticated)
    )]
    fn the_claims_of_a_token_are_checked_first(#[case] claims: &str, #[case] refused: Option<RefusalCode>) {
        let now = Timestamp::from_second(1000).unwrap();
        let claimed = token_expiry(&token(&serde_json::from_str(claims).unwrap()), now);
        assert_eq!(claimed.err().map(|refusal| refusal.code), refused);
    }

    #[test]
    fn a_token_of_another_kind_than_a_service_account_is_refused() {
        let good = token(&serde_json::json!({"aud": LINK_AUDIENCE, "exp": 2000, "sub": ACCOUNT}));
        let now = Timestamp::from_second(1000).unwrap();
        assert!(token_expiry(&good, now).is_ok());
        let [unsigned, longer] = [good.trim_end_matches("c2ln").to_owned(), format!("{good}.x")];
        let large = format!("{good}{}", "x".repeat(MAX_TOKEN_BYTES));
        for bad in ["", "nonsense", "a.b.c", "..", &unsigned, &longer, &large] {
            assert_eq!(
                token_expiry(bad, now).unwrap_err().code,
                RefusalCode::Unauthenticated,
                "{bad:.40}"
            );
        }
        let largest = format!("{good}{}", "x".repeat(MAX_TOKEN_BYTES - good.len()));
        assert!(token_expiry(&largest, now).is_ok());
    }

    #[test]
    fn an_answer_is_good_until_its_end() {
        let (mut memory, until) = (TokenCache::default(), Instant::now());
        memory.put(sha256("token"), 1, until);
        assert_eq!(memory.get(&sha256("token"), until - Duration::from_millis(1)), Some(1));
        assert_eq!(memory.get(&sha256("token"), until), None);
        assert_eq!(memory.get(&sha256("tokem"), until - Duration::from_millis(1)), None);
    }

    #[test]
    fn the_memory_is_bounded_and_keeps_what_is_used() {
        let (mut memory, now) = (TokenCache::default(), Instant::now());
        let until = now + Duration::from_secs(1);
        for number in 0..3 * MAX_REMEMBERED {
            memory.put(sha256(number.to_string()), number, until);
            assert!(memory.young.len() + memory.old.len() <= MAX_REMEMBERED);
            if number % 1000 == 0 {
                assert_eq!(memory.get(&sha256("0"), now), Some(0));
            }
        }
        assert_eq!(memory.get(&sha256("1"), now), None);
    }
}
