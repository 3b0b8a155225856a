//! Runs a [`Reconciler`]: workers take objects from the queue, and every reconcile has a time limit, metrics and, if it
//! fails, a retry with backoff.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Resource;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::backoff;
use super::error::{ReconcileError, ReconcileErrorKind};
use super::guarded::{GuardedObject, InvalidObject};
use super::queue::{Priority, QueueKey, WorkQueue};
use super::watch::join;
use crate::telemetry::reconcile_traces::{ReconcileEnd, ReconcileTrace, ReconcileTracer};

/// Time limit of a whole reconcile.
const RECONCILE_TIMEOUT: Duration = Duration::from_mins(1);
/// Time limit for running reconciles at shutdown; those that take longer are aborted.
pub(in crate::controller) const GRACE: Duration = Duration::from_secs(4);

/// When an object is reconciled again without a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Requeue {
    AwaitChange,
    After(Duration, Priority),
}

impl Requeue {
    /// After a delay, if there is one.
    pub(in crate::controller) fn after(delay: Option<Duration>, priority: Priority) -> Self {
        delay.map_or(Self::AwaitChange, |delay| Self::After(delay, priority))
    }

    /// The sooner of both, with the higher priority.
    pub(in crate::controller) fn or_sooner(self, other: Self) -> Self {
        match (self, other) {
            (Self::AwaitChange, only) | (only, Self::AwaitChange) => only,
            (Self::After(one, high), Self::After(two, low)) => Self::After(one.min(two), high.min(low)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileResult {
    /// Done until something changes.
    Success,
    /// Done until a known time.
    RequeueAfter,
    /// Will be retried with backoff.
    Error(ReconcileErrorKind),
}

impl ReconcileResult {
    /// The value of the label `result`.
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::RequeueAfter => "requeue_after",
            Self::Error(_) => "error",
        }
    }

    fn of(result: &Result<Requeue, ReconcileError>) -> Self {
        match result {
            Ok(Requeue::AwaitChange) => Self::Success,
            Ok(Requeue::After(..)) => Self::RequeueAfter,
            Err(error) => Self::Error(error.kind()),
        }
    }
}

/// What a controller does with the objects of its kind.
pub(in crate::controller) trait Reconciler: Send + Sync + 'static {
    type Object: Resource<DynamicType = ()> + Send + Sync;
    /// The name of an object in the queue.
    type Key: QueueKey + Send + Sync;

    /// The object as last read; `None` if it does not exist.
    fn find(&self, key: &Self::Key) -> Option<Arc<GuardedObject<Self::Object>>>;

    fn reconcile(&self, object: &Self::Object) -> impl Future<Output = Result<Requeue, ReconcileError>> + Send;

    /// Reports an object that this version cannot parse.
    fn report_unreadable(&self, object: &InvalidObject)
    -> impl Future<Output = Result<Requeue, ReconcileError>> + Send;

    /// Counts a failed reconcile; returns the number of consecutive failures.
    fn count_failure(&self, key: &Self::Key) -> u32;

    /// A reconcile starts.
    fn started(&self);

    /// A reconcile has ended after `took`.
    fn finished(&self, how: ReconcileResult, took: Duration);

    /// Traces reconciles.
    fn tracer(&self) -> ReconcileTracer;
}

/// Serves the queue with `workers` tasks until `shutdown`, then waits for running reconciles. None outlives this
/// future, unless it is dropped.
pub(in crate::controller) async fn run<R: Reconciler>(
    reconciler: Arc<R>,
    queue: Arc<WorkQueue<R::Key>>,
    workers: u16,
    shutdown: CancellationToken,
) {
    let mut tasks = JoinSet::new();
    for _ in 0..workers {
        tasks.spawn(work(reconciler.clone(), queue.clone()));
    }
    let stopped = async {
        shutdown.cancelled().await;
        queue.shut_down();
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        () = join(&mut tasks) => {}
        () = stopped => {
            tracing::warn!("aborted the reconciles still running {} s after the stop signal", GRACE.as_secs());
            tasks.shutdown().await;
        }
    }
}

async fn work<R: Reconciler>(reconciler: Arc<R>, queue: Arc<WorkQueue<R::Key>>) {
    while let Some(key) = queue.next().await {
        let requeue = match reconciler.find(&key) {
            Some(object) => match reconcile(reconciler.as_ref(), &key, &object).await {
                Ok(requeue) => requeue,
                Err(retry) => {
                    queue.count_retry();
                    retry
                }
            },
            // Deleted meanwhile.
            None => Requeue::AwaitChange,
        };
        queue.finish(key, requeue);
    }
}

/// `Err`: it failed and is retried.
async fn reconcile<R: Reconciler>(
    reconciler: &R,
    key: &R::Key,
    object: &GuardedObject<R::Object>,
) -> Result<Requeue, Requeue> {
    reconciler.started();
    let start = Instant::now();
    let tracer = reconciler.tracer();
    let trace = tracer.begin(Timestamp::now());
    let whole = async {
        match &object.0 {
            Ok(object) => reconciler.reconcile(object).await,
            Err(invalid) => reconciler.report_unreadable(invalid).await,
        }
    };
    let log_span = ReconcileTrace::log_span(trace.as_ref());
    let result = tokio::time::timeout(RECONCILE_TIMEOUT, whole)
        .instrument(log_span.clone())
        .await
        .unwrap_or(Err(ReconcileError::Timeout {
            action: "reconcile",
            limit: RECONCILE_TIMEOUT,
        }));
    let (how, took) = (ReconcileResult::of(&result), start.elapsed());
    reconciler.finished(how, took);
    let meta = object.meta();
    let end = ReconcileEnd {
        object: (
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default(),
        ),
        result: how.label(),
        error: result.as_ref().err().map(|error| error.kind().into()),
        took,
    };
    tracer.end(trace, end);
    log_span.in_scope(|| result.map_err(|error| retry(reconciler, key, object, &error)))
}

/// The policy for errors: they are logged, and the object is reconciled again after a backoff.
fn retry<R: Reconciler>(
    reconciler: &R,
    key: &R::Key,
    object: &GuardedObject<R::Object>,
    error: &ReconcileError,
) -> Requeue {
    let meta = object.meta();
    let attempts = reconciler.count_failure(key);
    let delay = backoff::ERRORS.delay(attempts, meta.uid.as_deref().unwrap_or_default());
    tracing::warn!(
        object = %R::Object::kind(&()),
        namespace = meta.namespace.as_deref(),
        name = meta.name.as_deref(),
        kind = error.kind().as_ref(),
        attempts,
        delay_seconds = delay.as_secs_f32(),
        %error,
        "reconcile failed; retrying"
    );
    Requeue::After(delay, Priority::High)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::json;
    use tokio::sync::Notify;

    use super::*;
    use crate::api::Agent;
    use crate::telemetry::metrics::Metrics;

    /// Its first reconcile ends when it is released, all others never.
    #[derive(Default)]
    struct Slow {
        begun: Notify,
        release: Notify,
        running: AtomicUsize,
    }

    /// A reconcile that has neither ended nor been aborted.
    struct Running<'a>(&'a AtomicUsize);

    impl Drop for Running<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl Reconciler for Slow {
        type Object = Agent;
        type Key = &'static str;

        fn find(&self, key: &&'static str) -> Option<Arc<GuardedObject<Agent>>> {
            let object = json!({
                "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": {"name": key},
                "spec": {"model": {"api": "Scripted", "name": "m"}},
            });
            Some(Arc::new(GuardedObject(Ok(serde_json::from_value(object).unwrap()))))
        }

        async fn reconcile(&self, agent: &Agent) -> Result<Requeue, ReconcileError> {
            self.running.fetch_add(1, Ordering::SeqCst);
            let _running = Running(&self.running);
            self.begun.notify_one();
            if agent.metadata.name.as_deref() == Some("ends") {
                self.release.notified().await;
                return Ok(Requeue::AwaitChange);
            }
            std::future::pending().await
        }

        async fn report_unreadable(&self, _: &InvalidObject) -> Result<Requeue, ReconcileError> {
            Ok(Requeue::AwaitChange)
        }

        fn count_failure(&self, _: &&'static str) -> u32 {
            1
        }

        fn started(&self) {}

        fn finished(&self, _: ReconcileResult, _: Duration) {}

        fn tracer(&self) -> ReconcileTracer {
            ReconcileTracer::default()
        }
    }

    /// How long a run takes after the stop signal, which comes during a reconcile of this Agent.
    async fn stopped_during(agent: &'static str) -> Duration {
        let (slow, queue, stop) = (
            Arc::new(Slow::default()),
            super::super::queue(&Metrics::new().unwrap(), "agent"),
            CancellationToken::new(),
        );
        queue.add(agent, Priority::High);
        let run = run(slow.clone(), queue, 2, stop.clone());
        let signal = async {
            slow.begun.notified().await;
            stop.cancel();
            slow.release.notify_one();
            Instant::now()
        };
        let ((), at) = tokio::join!(run, signal);
        assert_eq!(slow.running.load(Ordering::SeqCst), 0, "no reconcile outlives the run");
        at.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_waits_for_its_reconciles_and_aborts_those_beyond_the_grace_period() {
        assert_eq!(stopped_during("ends").await, Duration::ZERO);
        let took = stopped_during("hangs").await;
        assert!((GRACE..GRACE + Duration::from_millis(10)).contains(&took), "{took:?}");
    }
}
