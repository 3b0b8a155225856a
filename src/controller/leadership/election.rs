//! Leader election: one replica at a time holds the Lease, and only the holder works.
//!
//! Each write of the Lease has the resource version that this replica has read as a precondition, so that of two
//! candidates one gets a conflict. A replica judges by its own clock whether the holder is alive: the Lease counts as
//! held as long as it changed within its duration (both as in client-go's `leaderelection`). The Lease is watched, and
//! read if the watch delivers nothing for two renewal intervals. A holder that cannot renew gives up before any other
//! replica may take over. A released Lease is acquired at once. The leader's pod has the label by which the link's
//! Service selects it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt, pin_mut};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until};

use crate::controller::runtime::watch_backoff::WatchBackoff;

/// Name of the Lease, in the controller's namespace.
pub const LEASE_NAME: &str = "agentloop-controller";
/// Label of the leader's pod.
pub const LEADER_LABEL: &str = "agentloop.dev/leader";
/// Delay after any failure.
const RETRY: Duration = Duration::from_secs(1);
/// How long before the end of the Lease a holder that could not renew gives up, as a margin for clocks that run at
/// different rates.
const SAFETY: Duration = Duration::from_secs(2);

/// Why the lead is lost if the Lease was deleted.
const GONE: &str = "the Lease was deleted";

/// The duration of a Lease and its renewal interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    valid: Duration,
    renew: Duration,
}

impl LeaseTimes {
    /// `valid_seconds` must be at least 3 and more than twice `renew_seconds`, which must be at least 1: a failed
    /// renewal then leaves time for a second attempt.
    pub fn new(valid_seconds: u32, renew_seconds: u32) -> Result<Self, String> {
        if valid_seconds < 3 || renew_seconds < 1 || renew_seconds.saturating_mul(2) >= valid_seconds {
            return Err(format!(
                "a Lease of {valid_seconds} s renewed every {renew_seconds} s is not safe: the duration must be at \
                 least 3 s and more than twice the renewal interval"
            ));
        }
        Ok(Self {
            valid: Duration::from_secs(valid_seconds.into()),
            renew: Duration::from_secs(renew_seconds.into()),
        })
    }

    /// How long after its last renewal a holder must stop.
    fn give_up(self) -> Duration {
        self.valid.saturating_sub(SAFETY.min(self.valid / 5))
    }
}

/// A replica that competes for the Lease.
pub struct LeaderCandidate {
    /// Client for watching the Lease.
    pub client: Client,
    /// Client for writing the Lease, with short timeouts.
    pub writer: Client,
    /// The controller's namespace.
    pub namespace: String,
    /// Unique among the replicas. A restarted replica reuses its identity and so keeps its Lease.
    pub identity: String,
    /// Duration and renewal interval of the Lease.
    pub times: LeaseTimes,
}

/// A candidate's view of the Lease.
#[derive(Debug, PartialEq, Eq)]
enum LeaseState {
    /// No holder, or held by this replica from before a restart.
    Free,
    /// Held by another replica; expires after this duration without a change.
    Held(Duration),
}

impl LeaderCandidate {
    /// Waits until this replica leads. Calls `following` once another replica is seen to lead.
    pub async fn win(self, following: impl Fn()) -> Leadership {
        let held = loop {
            if let Some(held) = self.compete(&following).await {
                break held;
            }
            sleep(RETRY).await;
        };
        tracing::info!(lease = LEASE_NAME, identity = self.identity, "leading");
        Leadership {
            leases: self.leases(&self.writer),
            identity: self.identity,
            times: self.times,
            held: Mutex::new(held),
        }
    }

    fn leases(&self, client: &Client) -> Api<Lease> {
        Api::namespaced(client.clone(), &self.namespace)
    }

    /// Follows the Lease until this replica acquires it; `None`: the watch ended and must be restarted.
    async fn compete(&self, following: &impl Fn()) -> Option<RenewedLease> {
        let versions = watcher::watch_object(self.leases(&self.client), LEASE_NAME).backoff(WatchBackoff::default());
        // Local times: `since` is the last change of the Lease, `confirmed` the last confirmed read of it.
        pin_mut!(versions);
        let mut seen = next(&mut versions).await?;
        let (mut since, mut confirmed, mut told) = (Instant::now(), Instant::now(), false);
        // A live holder renews at least once in this time, so a watch that delivers nothing for so long may be dead.
        let quiet = self.times.renew * 2;
        loop {
            let standing = seen.as_ref().map_or(LeaseState::Free, |lease| self.lease_state(lease));
            if let LeaseState::Held(valid) = standing {
                if !std::mem::replace(&mut told, true) {
                    following();
                }
                let newer = tokio::select! {
                    newer = next(&mut versions) => Some(newer?),
                    () = sleep_until(since + valid) => None,
                    () = sleep_until(confirmed + quiet) => Some(self.read().await.unwrap_or_else(|| seen.clone())),
                };
                if let Some(newer) = newer {
                    confirmed = Instant::now();
                    if version(newer.as_ref()) != version(seen.as_ref()) {
                        since = confirmed;
                    }
                    seen = newer;
                    continue;
                }
            }
            match self.acquire(seen.as_ref()).await {
                Ok(held) => return Some(held),
                // Another replica was faster. The watch may be dead, so the current Lease is read.
                Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => match self.read().await {
                    Some(newer) => (seen, since, confirmed) = (newer, Instant::now(), Instant::now()),
                    None => sleep(RETRY).await,
                },
                Err(error) => {
                    tracing::warn!(%error, lease = LEASE_NAME, "failed to write the Lease; retrying");
                    sleep(RETRY).await;
                }
            }
        }
    }

    /// The current Lease; `Some(None)` if it does not exist, `None` if it cannot be read.
    async fn read(&self) -> Option<Option<Lease>> {
        match self.leases(&self.writer).get_opt(LEASE_NAME).await {
            Ok(lease) => Some(lease),
            Err(error) => {
                tracing::warn!(%error, lease = LEASE_NAME, "failed to read the Lease; retrying");
                None
            }
        }
    }

    fn lease_state(&self, lease: &Lease) -> LeaseState {
        match holder(lease) {
            None => LeaseState::Free,
            Some(holder) if holder == self.identity => LeaseState::Free,
            Some(_) => {
                let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
                let valid = seconds.and_then(|seconds| u64::try_from(seconds).ok());
                LeaseState::Held(valid.map_or(self.times.valid, Duration::from_secs))
            }
        }
    }

    /// Acquires the Lease, with the version of `over` as a precondition.
    async fn acquire(&self, over: Option<&Lease>) -> kube::Result<RenewedLease> {
        let now = MicroTime(Timestamp::now());
        let before = over.and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let anew = before.holder_identity.as_ref() != Some(&self.identity);
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.times.valid.as_secs()).ok(),
            acquire_time: before.acquire_time.filter(|_| !anew).or(Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(before.lease_transitions.unwrap_or(0).saturating_add(i32::from(anew))),
            ..LeaseSpec::default()
        };
        let named = || ObjectMeta {
            name: Some(LEASE_NAME.into()),
            ..ObjectMeta::default()
        };
        let lease = Lease {
            metadata: over.map_or_else(named, |lease| lease.metadata.clone()),
            spec: Some(spec),
        };
        // The time before the request: the Lease cannot expire earlier than its duration after that.
        let (leases, sent) = (self.leases(&self.writer), Instant::now());
        let lease = match over {
            Some(_) => leases.replace(LEASE_NAME, &PostParams::default(), &lease).await?,
            None => leases.create(&PostParams::default(), &lease).await?,
        };
        Ok(RenewedLease { lease, renewed: sent })
    }
}

/// The next version of the Lease; `Some(None)` if it does not exist, `None` at the end of the watch. Skips errors.
async fn next(versions: &mut (impl Stream<Item = watcher::Result<Option<Lease>>> + Unpin)) -> Option<Option<Lease>> {
    loop {
        match versions.next().await? {
            Ok(lease) => return Some(lease),
            Err(error) => tracing::warn!(%error, lease = LEASE_NAME, "failed to watch the Lease; retrying"),
        }
    }
}

fn version(lease: Option<&Lease>) -> Option<&str> {
    lease?.metadata.resource_version.as_deref()
}

fn holder(lease: &Lease) -> Option<&str> {
    let holder = lease.spec.as_ref()?.holder_identity.as_deref()?;
    Some(holder).filter(|holder| !holder.is_empty())
}

/// The Lease as last written, and when that request was sent: it expires no earlier than its duration after that.
struct RenewedLease {
    lease: Lease,
    renewed: Instant,
}

/// A held Lease.
pub struct Leadership {
    leases: Api<Lease>,
    identity: String,
    times: LeaseTimes,
    held: Mutex<RenewedLease>,
}

impl Leadership {
    /// Renews the Lease until it is lost; returns the reason.
    pub async fn hold(&self) -> &'static str {
        let renewed = async {
            loop {
                sleep_until(self.renewed() + self.times.renew).await;
                match self.renew().await {
                    Ok(None) => {}
                    Ok(Some(lost)) => return lost,
                    Err(error) => {
                        tracing::warn!(%error, lease = LEASE_NAME, "failed to renew the Lease; retrying");
                        sleep(RETRY).await;
                    }
                }
            }
        };
        let late = async {
            loop {
                let end = self.renewed() + self.times.give_up();
                if Instant::now() >= end {
                    return "the Lease could not be renewed in time";
                }
                sleep_until(end).await;
            }
        };
        tokio::select! {
            lost = renewed => lost,
            late = late => late,
        }
    }

    /// Releases the Lease, so that another replica leads at once.
    pub async fn release(&self) -> kube::Result<()> {
        let free =
            |spec: &mut LeaseSpec| (spec.holder_identity, spec.renew_time, spec.acquire_time) = (None, None, None);
        self.write(free).await.map(drop)
    }

    async fn renew(&self) -> kube::Result<Option<&'static str>> {
        self.write(|spec| spec.renew_time = Some(MicroTime(Timestamp::now())))
            .await
    }

    /// Changes the Lease if this replica still holds it; returns the reason if it does not.
    async fn write(&self, change: impl Fn(&mut LeaseSpec)) -> kube::Result<Option<&'static str>> {
        let mut lease = self.lock().lease.clone();
        loop {
            lease.spec.as_mut().map(&change);
            let sent = Instant::now();
            match self.leases.replace(LEASE_NAME, &PostParams::default(), &lease).await {
                Ok(lease) => {
                    *self.lock() = RenewedLease { lease, renewed: sent };
                    return Ok(None);
                }
                // Written by another replica, or by an own request whose response was lost.
                Err(kube::Error::Api(status)) if status.code == 409 => match self.leases.get_opt(LEASE_NAME).await? {
                    Some(newer) if holder(&newer) == Some(&self.identity) => lease = newer,
                    Some(_) => return Ok(Some("another replica holds the Lease")),
                    None => return Ok(Some(GONE)),
                },
                Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Some(GONE)),
                Err(error) => return Err(error),
            }
        }
    }

    fn renewed(&self) -> Instant {
        self.lock().renewed
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RenewedLease> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sets or removes the leader label on this process's own pod.
pub async fn set_leader_label(pods: &Api<Pod>, pod: &str, leads: bool) -> kube::Result<()> {
    let value = leads.then_some("true");
    let patch = json!({"metadata": {"labels": {LEADER_LABEL: value}}});
    pods.patch_metadata(pod, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use axum::http::{Method, Request, Response};
    use kube::client::Body;
    use rstest::rstest;
    use serde_json::Value;

    use super::*;

    #[rstest]
    #[case::default(15, 5, true)]
    #[case::shortest(3, 1, true)]
    #[case::too_short(2, 1, false)]
    #[case::no_renewal(15, 0, false)]
    #[case::no_second_try(10, 5, false)]
    #[case::huge(u32::MAX, u32::MAX, false)]
    fn a_lease_leaves_time_for_a_second_try_to_renew_it(#[case] valid: u32, #[case] renew: u32, #[case] good: bool) {
        assert_eq!(LeaseTimes::new(valid, renew).is_ok(), good);
    }

    /// The holder of a Lease renewed now, on an API server with these answers.
    fn holder(answer: impl Fn(&Method) -> (u16, Value) + Clone + Send + Sync + 'static) -> Leadership {
        let service = tower::service_fn(move |request: Request<Body>| {
            let (status, body) = answer(request.method());
            let response = Response::builder()
                .status(status)
                .body(Body::from(body.to_string().into_bytes()));
            async move { Ok::<_, tower::BoxError>(response?) }
        });
        let lease = serde_json::from_value(lease("a")).unwrap();
        Leadership {
            leases: Api::namespaced(Client::new(service, "ns"), "ns"),
            identity: "a".into(),
            times: LeaseTimes::new(15, 5).unwrap(),
            held: Mutex::new(RenewedLease {
                lease,
                renewed: Instant::now(),
            }),
        }
    }

    fn lease(holder: &str) -> Value {
        let metadata = json!({"name": LEASE_NAME, "namespace": "ns", "resourceVersion": "1"});
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {"holderIdentity": holder}})
    }

    fn failed(code: u16) -> (u16, Value) {
        (
            code,
            json!({"kind": "Status", "status": "Failure", "message": "", "reason": if code == 404 { "NotFound" } else { "" }, "code": code}),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_resigns_before_its_lease_ends_unless_it_renewed_it() {
        // Renewals succeed for that long; then the server fails every request.
        for (renews_for, gave_up) in [(0, 13), (5, 18)] {
            let begun = Instant::now();
            let leadership = holder(move |_| {
                if begun.elapsed() <= Duration::from_secs(renews_for) {
                    (200, lease("a"))
                } else {
                    failed(500)
                }
            });
            assert_eq!(leadership.hold().await, "the Lease could not be renewed in time");
            assert_eq!(
                begun.elapsed(),
                Duration::from_secs(gave_up),
                "13 s after the last renewal, 2 s before others may take over"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_successful_writes_count_as_renewals() {
        for (status, counts) in [(500, false), (503, false), (200, true)] {
            let leadership = holder(move |_| {
                if status == 200 {
                    (200, lease("a"))
                } else {
                    failed(status)
                }
            });
            let before = leadership.renewed();
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(leadership.renew().await.is_ok(), counts, "{status}");
            assert_eq!(leadership.renewed() != before, counts, "{status}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_conflict_loses_the_lease_to_another_and_not_to_ones_own_write_whose_answer_was_lost() {
        let conflicts = |times: usize, found: (u16, Value)| {
            let left = Arc::new(AtomicUsize::new(times));
            let leadership = holder(move |method| match *method {
                Method::GET => found.clone(),
                _ if left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() => failed(409),
                _ => (200, lease("a")),
            });
            async move { leadership.renew().await.unwrap() }
        };
        assert_eq!(conflicts(1, (200, lease("a"))).await, None);
        assert_eq!(
            conflicts(1, (200, lease("b"))).await,
            Some("another replica holds the Lease")
        );
        assert_eq!(conflicts(1, failed(404)).await, Some(GONE));
        let gone = holder(|_| failed(404));
        assert_eq!(gone.renew().await.unwrap(), Some(GONE));
    }
}
