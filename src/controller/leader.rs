//! Leader election: one replica at a time holds the Lease, and only that one works.
//!
//! The crate `kube-lease-manager` speaks to the Lease. What it leaves open is added here: a holder that cannot renew
//! knows it before anybody else may take over, a released Lease is taken at once instead of at its expiry, and the
//! leader's pod carries the label by which the link's Service finds it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::{Method, Request, Response};
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use kube_lease_manager::{LeaseCreateMode, LeaseManager, LeaseManagerError, LeaseParams};
use serde_json::json;
use tokio::time::Instant;
use tower::{Layer, Service};

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
    /// Writes the Lease: a client with [`renewals`](Self::renewals) as a layer, and short timeouts.
    pub writer: Client,
    /// Knows when the Lease was last written.
    pub renewals: Renewals,
    /// The controller's namespace.
    pub namespace: String,
    /// Unique among the replicas; a restarted one goes on under its own name.
    pub identity: String,
    /// How long the Lease is valid.
    pub times: LeaseTimes,
}

impl Candidate {
    /// Waits until this replica leads. Calls `following` each time it has seen the Lease without getting it yet.
    pub async fn win(self, following: impl Fn()) -> Leadership {
        loop {
            match self.compete(&following).await {
                Ok(Some(manager)) => {
                    tracing::info!(lease = LEASE_NAME, identity = self.identity, "leading");
                    return Leadership {
                        manager,
                        renewals: self.renewals,
                        times: self.times,
                    };
                }
                Ok(None) => tracing::debug!("the Lease was released"),
                Err(error) => {
                    tracing::warn!(%error, lease = LEASE_NAME, "the Lease cannot be read or written; trying again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    /// One round: `None` when the Lease was released by its holder and is worth another look.
    async fn compete(&self, following: &impl Fn()) -> Result<Option<LeaseManager>, LeaseManagerError> {
        let grace = self.times.valid.saturating_sub(self.times.renew);
        let params = LeaseParams::new(&self.identity, self.times.valid.as_secs(), grace.as_secs());
        let manager = LeaseManager::new(
            self.writer.clone(),
            LEASE_NAME,
            &self.namespace,
            params,
            LeaseCreateMode::AutoCreate,
        )
        .await?;
        following();
        let released = self.released();
        tokio::select! {
            held = manager.changed() => held.map(|held| held.then_some(manager)),
            () = released => Ok(None),
        }
    }

    /// Ends when the Lease, held by another before, has no holder or is gone.
    async fn released(&self) {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        let held = AtomicBool::new(false);
        let released = |lease: Option<&Lease>| {
            let spec = lease.and_then(|lease| lease.spec.as_ref());
            match spec.and_then(|spec| spec.holder_identity.as_deref()) {
                None | Some("") => held.load(Ordering::Relaxed),
                Some(holder) => {
                    held.store(holder != self.identity, Ordering::Relaxed);
                    false
                }
            }
        };
        while let Err(error) = await_condition(leases.clone(), LEASE_NAME, released).await {
            // The Lease's expiry ends the wait in any case.
            tracing::debug!(%error, "the Lease cannot be watched; trying again");
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// The Lease in hand.
pub struct Leadership {
    manager: LeaseManager,
    renewals: Renewals,
    times: LeaseTimes,
}

impl Leadership {
    /// Renews the Lease. Ends when it is lost, and says how.
    pub async fn hold(&self) -> &'static str {
        let renewed = async {
            loop {
                match self.manager.changed().await {
                    Ok(true) => {}
                    Ok(false) => return "another replica holds the Lease",
                    Err(error) => {
                        tracing::warn!(%error, lease = LEASE_NAME, "the Lease could not be renewed; trying again");
                        tokio::time::sleep(RETRY).await;
                    }
                }
            }
        };
        tokio::select! {
            lost = renewed => lost,
            () = self.renewals.older_than(self.times.give_up()) => "the Lease could not be renewed in time",
        }
    }

    /// Gives the Lease back, so that another replica leads at once.
    pub async fn release(&self) -> Result<(), LeaseManagerError> {
        self.manager.release().await
    }
}

/// When the Lease was last written with success; a layer around the client that writes it.
#[derive(Clone)]
pub struct Renewals(Arc<Mutex<Instant>>);

impl Default for Renewals {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Renewals {
    fn last(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, sent: Instant) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *last = (*last).max(sent);
    }

    /// Ends when the last renewal is that old.
    async fn older_than(&self, age: Duration) {
        loop {
            let end = self.last() + age;
            if Instant::now() >= end {
                return;
            }
            tokio::time::sleep_until(end).await;
        }
    }
}

impl<S> Layer<S> for Renewals {
    type Service = Renewing<S>;

    fn layer(&self, inner: S) -> Renewing<S> {
        Renewing {
            inner,
            renewals: self.clone(),
        }
    }
}

/// A client whose successful writes are noted.
#[derive(Clone)]
pub struct Renewing<S> {
    inner: S,
    renewals: Renewals,
}

impl<S, In, Out> Service<Request<In>> for Renewing<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    Out: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let is_write = request.method() == Method::PATCH;
        let renewals = self.renewals.clone();
        // The moment of sending: the Lease ends that much after it at the earliest.
        let sent = Instant::now();
        let answer = self.inner.call(request);
        answer
            .inspect(move |answer| {
                if is_write && answer.as_ref().is_ok_and(|answer| answer.status().is_success()) {
                    renewals.note(sent);
                }
            })
            .boxed()
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

    #[tokio::test(start_paused = true)]
    async fn a_holder_gives_up_before_its_lease_ends_unless_it_renewed_it() {
        let times = LeaseTimes::new(15, 5).unwrap();
        let (renewals, start) = (Renewals::default(), Instant::now());
        tokio::time::advance(Duration::from_secs(8)).await;
        renewals.note(start + Duration::from_secs(5));
        renewals.older_than(times.give_up()).await;
        assert_eq!(
            start.elapsed(),
            Duration::from_secs(18),
            "13 s after the renewal, 2 s before others may take over"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn only_successful_writes_count_as_renewals() {
        let renewals = Renewals::default();
        let start = renewals.last();
        for (method, status, counts) in [
            (Method::GET, 200, false),
            (Method::PATCH, 409, false),
            (Method::PATCH, 200, true),
        ] {
            tokio::time::advance(Duration::from_secs(1)).await;
            let before = renewals.last();
            let answer = tower::service_fn(move |_: Request<()>| async move {
                Ok::<_, std::convert::Infallible>(Response::builder().status(status).body(()).unwrap())
            });
            let request = Request::builder().method(method).body(()).unwrap();
            renewals.layer(answer).call(request).await.unwrap();
            assert_eq!(renewals.last() != before, counts, "{status}");
        }
        assert_eq!(renewals.last() - start, Duration::from_secs(3));
    }
}
