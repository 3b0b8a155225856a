//! Leader election: one replica at a time holds the Lease, and only that one works.
//!
//! Each write of the Lease replaces exactly the version that this replica has read, so that of two who want it one gets a
//! conflict. Whether a holder is still there is judged by this replica's own clock: as long as the Lease was changed within
//! its duration, somebody holds it (both as in client-go's `leaderelection`). A holder that cannot renew knows it before
//! anybody else may take over; a released Lease is taken at once; the leader's pod carries the label by which the link's
//! Service finds it.

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

/// Name of the Lease, in the controller's namespace.
pub const LEASE_NAME: &str = "agentloop-controller";
/// The label of the leader's pod.
pub const LEADER_LABEL: &str = "agentloop.dev/leader";
/// Pause after a failure of any kind.
const RETRY: Duration = Duration::from_secs(1);
/// How long before the Lease's end a holder that could not renew gives up, for clocks that differ.
const SAFETY: Duration = Duration::from_secs(2);

/// How long a Lease is valid, and how often it is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    valid: Duration,
    renew: Duration,
}

impl LeaseTimes {
    /// `valid_seconds` must be at least 3, and more than twice `renew_seconds`, which must be at least 1.
    pub fn new(valid_seconds: u32, renew_seconds: u32) -> Result<Self, String> {
        if valid_seconds < 3 || renew_seconds < 1 || renew_seconds.saturating_mul(2) >= valid_seconds {
            return Err(format!(
                "a Lease of {valid_seconds} s renewed every {renew_seconds} s is not safe: the duration must be at \
                 least 3 s and more than twice the renewal"
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

/// A replica that wants to lead.
pub struct Candidate {
    /// Watches the Lease.
    pub client: Client,
    /// Writes the Lease: with short timeouts.
    pub writer: Client,
    /// The controller's namespace.
    pub namespace: String,
    /// Unique among the replicas; a restarted one goes on under its own name.
    pub identity: String,
    /// How long the Lease is valid.
    pub times: LeaseTimes,
}

/// What a candidate makes of the Lease.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    /// Nobody holds it, or this replica's earlier life did.
    Free,
    /// Another holds it; without a change it is over after so long.
    Held(Duration),
}

impl Candidate {
    /// Waits until this replica leads. Calls `following` once it has seen that another does.
    pub async fn win(self, following: impl Fn()) -> Leadership {
        loop {
            match self.compete(&following).await {
                Ok(held) => {
                    tracing::info!(lease = LEASE_NAME, identity = self.identity, "leading");
                    return Leadership {
                        leases: self.leases(&self.writer),
                        identity: self.identity,
                        times: self.times,
                        held: Mutex::new(held),
                    };
                }
                Err(error) => {
                    tracing::warn!(%error, lease = LEASE_NAME, "the Lease cannot be read or written; trying again");
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn leases(&self, client: &Client) -> Api<Lease> {
        Api::namespaced(client.clone(), &self.namespace)
    }

    /// Follows the Lease until it is this replica's.
    async fn compete(&self, following: &impl Fn()) -> Result<Held, watcher::Error> {
        let versions = watcher::watch_object(self.leases(&self.client), LEASE_NAME).default_backoff();
        pin_mut!(versions);
        let mut seen = next(&mut versions).await?;
        let (mut since, mut told) = (Instant::now(), false);
        loop {
            let standing = seen.as_ref().map_or(Standing::Free, |lease| self.standing(lease));
            if let Standing::Held(valid) = standing {
                if !std::mem::replace(&mut told, true) {
                    following();
                }
                tokio::select! {
                    newer = next(&mut versions) => {
                        let newer = newer?;
                        if version(newer.as_ref()) != version(seen.as_ref()) {
                            since = Instant::now();
                        }
                        seen = newer;
                        continue;
                    }
                    () = sleep_until(since + valid) => {}
                }
            }
            match self.take(seen.as_ref()).await {
                Ok(held) => return Ok(held),
                // Somebody was faster. What they wrote comes with the watch.
                Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => {
                    seen = next(&mut versions).await?;
                    since = Instant::now();
                }
                Err(error) => {
                    tracing::warn!(%error, lease = LEASE_NAME, "the Lease cannot be written; trying again");
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn standing(&self, lease: &Lease) -> Standing {
        match holder(lease) {
            None => Standing::Free,
            Some(holder) if holder == self.identity => Standing::Free,
            Some(_) => {
                let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
                let valid = seconds.and_then(|seconds| u64::try_from(seconds).ok());
                Standing::Held(valid.map_or(self.times.valid, Duration::from_secs))
            }
        }
    }

    /// Takes the Lease in place of this version of it, and of no other.
    async fn take(&self, over: Option<&Lease>) -> kube::Result<Held> {
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
        let (leases, sent) = (self.leases(&self.writer), Instant::now());
        let lease = match over {
            Some(_) => leases.replace(LEASE_NAME, &PostParams::default(), &lease).await?,
            None => leases.create(&PostParams::default(), &lease).await?,
        };
        Ok(Held { lease, renewed: sent })
    }
}

/// The next version of the Lease; `None` when there is none. An error that asking again may mend is not one.
async fn next(
    versions: &mut (impl Stream<Item = watcher::Result<Option<Lease>>> + Unpin),
) -> Result<Option<Lease>, watcher::Error> {
    loop {
        match versions.next().await {
            Some(Ok(lease)) => return Ok(lease),
            Some(Err(error)) => tracing::warn!(%error, lease = LEASE_NAME, "the Lease cannot be watched; trying again"),
            None => return Err(watcher::Error::NoResourceVersion),
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

/// The Lease as last written, and when that was sent: it ends a duration after that at the earliest.
struct Held {
    lease: Lease,
    renewed: Instant,
}

/// The Lease in hand.
pub struct Leadership {
    leases: Api<Lease>,
    identity: String,
    times: LeaseTimes,
    held: Mutex<Held>,
}

impl Leadership {
    /// Renews the Lease. Ends when it is lost, and says how.
    pub async fn hold(&self) -> &'static str {
        let renewed = async {
            loop {
                sleep_until(self.renewed() + self.times.renew).await;
                match self.renew().await {
                    Ok(true) => {}
                    Ok(false) => return "another replica holds the Lease",
                    Err(error) => {
                        tracing::warn!(%error, lease = LEASE_NAME, "the Lease could not be renewed; trying again");
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

    /// Gives the Lease back, so that another replica leads at once.
    pub async fn release(&self) -> kube::Result<()> {
        let free =
            |spec: &mut LeaseSpec| (spec.holder_identity, spec.renew_time, spec.acquire_time) = (None, None, None);
        self.write(free).await.map(drop)
    }

    async fn renew(&self) -> kube::Result<bool> {
        self.write(|spec| spec.renew_time = Some(MicroTime(Timestamp::now())))
            .await
    }

    /// Changes the Lease as long as it is this replica's. False: it is not, or it is gone.
    async fn write(&self, change: impl Fn(&mut LeaseSpec)) -> kube::Result<bool> {
        let mut lease = self.lock().lease.clone();
        loop {
            lease.spec.as_mut().map(&change);
            let sent = Instant::now();
            match self.leases.replace(LEASE_NAME, &PostParams::default(), &lease).await {
                Ok(lease) => {
                    *self.lock() = Held { lease, renewed: sent };
                    return Ok(true);
                }
                // Written by another, or by an attempt of this one whose answer was lost.
                Err(kube::Error::Api(status)) if status.code == 409 => match self.leases.get_opt(LEASE_NAME).await? {
                    Some(newer) if holder(&newer) == Some(&self.identity) => lease = newer,
                    _ => return Ok(false),
                },
                Err(kube::Error::Api(status)) if status.code == 404 => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    fn renewed(&self) -> Instant {
        self.lock().renewed
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts the leader's label on this process's own pod, or takes it off.
pub async fn label(pods: &Api<Pod>, pod: &str, leads: bool) -> kube::Result<()> {
    let value = leads.then_some("true");
    let patch = json!({"metadata": {"labels": {LEADER_LABEL: value}}});
    pods.patch_metadata(pod, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map(drop)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

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
}
