//! The pod's main loop: handles arrivals, timers and directives, one at a time.

use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use super::deliverer::{self, SharedOutbox};
use super::health::LoopLiveness;
use super::ingest::EventIngester;
use super::outbox::OutboxError;
use super::source::{RunningSource, SourceContext, identity};
use crate::api::SensorSpec;
use crate::link::deliveries::{ReceiverTerms, SensorDirectives, SensorPodReport};
use crate::link::sensor_messages::{LastEvent, SensorReport, SensorTerms};
use crate::sensor_pipeline::rules::SensorRules;
use crate::sensor_pipeline::source::{ArrivalOutcome, SourceArrival, SourceCondition, SourceCursor, SourceFeed};

/// Longest wait of the loop: the number of pending deliveries may have changed.
const LOOK: Duration = Duration::from_secs(5);

pub struct SensorEventLoop {
    pub liveness: LoopLiveness,
    pub keeper: EventIngester,
    pub outbox: SharedOutbox,
    pub sources: SourceContext,
    pub terms: SensorTerms,
    pub directives: watch::Receiver<SensorDirectives>,
    pub receivers: watch::Sender<Option<Vec<ReceiverTerms>>>,
    pub report: watch::Sender<Option<SensorPodReport>>,
}

/// A [`RunningSource`] and its channels.
struct ActiveSource {
    _running: Option<RunningSource>,
    arrivals: mpsc::Receiver<SourceArrival>,
    condition: watch::Receiver<SourceCondition>,
    /// Keeps the channel open while there is no source.
    _feed: SourceFeed,
    /// Failures and refusals that are already in the totals.
    counted: (i64, i64),
}

impl SensorEventLoop {
    /// Runs until the outbox fails.
    pub async fn run(mut self) -> OutboxError {
        let cursor = self.keeper.cursor().clone();
        let mut ear = self.start_source(cursor);
        loop {
            self.liveness.record_iteration();
            let result = self
                .send_report(&mut ear)
                .and_then(|()| self.keeper.expire(Timestamp::now()));
            match result {
                Ok(()) | Err(OutboxError::Full { .. }) => {}
                Err(error) => return error,
            }
            let due = until(self.keeper.waits_until());
            let result = tokio::select! {
                Some(arrival) = ear.arrivals.recv() => self.handle_arrival(arrival),
                () = sleep(due) => self.keeper.release_held(Timestamp::now()),
                Ok(()) = self.directives.changed() => self.apply_directives(&mut ear),
                Ok(()) = ear.condition.changed() => Ok(()),
            };
            match result {
                Ok(()) => {}
                Err(error @ OutboxError::Full { .. }) => {
                    tracing::warn!(%error, "failed to store events; retrying");
                    sleep(Duration::from_secs(1)).await;
                }
                Err(error) => return error,
            }
        }
    }

    fn handle_arrival(&mut self, arrival: SourceArrival) -> Result<(), OutboxError> {
        if is_lost(&self.terms.spec, self.receivers.borrow().as_deref()) {
            let _ = arrival.answer.send(ArrivalOutcome::NotNow);
            return Ok(());
        }
        let result = self.keeper.ingest(&arrival.message, arrival.at);
        let taken = result.as_ref().copied().unwrap_or(ArrivalOutcome::NotNow);
        // The sender may be gone.
        let _ = arrival.answer.send(taken);
        result.map(drop)
    }

    /// Applies the latest [`SensorDirectives`].
    fn apply_directives(&mut self, ear: &mut ActiveSource) -> Result<(), OutboxError> {
        let directives = self.directives.borrow_and_update().clone();
        if let Some(receivers) = directives.receivers {
            // Store the receivers before anything more is accepted.
            let receives = self
                .outbox
                .lock()
                .set_receivers(&deliverer::receivers(&receivers), Timestamp::now());
            if let Err(error) = receives {
                // Directives are level-triggered: retry them once there is room, although they are not sent again.
                self.directives.mark_changed();
                return Err(error);
            }
            self.receivers.send_if_modified(|old| {
                let new = old.as_ref() != Some(&receivers);
                *old = Some(receivers);
                new
            });
        }
        self.apply_terms(directives.terms, ear)
    }

    fn apply_terms(&mut self, terms: Option<SensorTerms>, ear: &mut ActiveSource) -> Result<(), OutboxError> {
        let Some(terms) = terms.filter(|terms| *terms != self.terms) else {
            return Ok(());
        };
        let rules = match SensorRules::compile(&terms.name, &terms.spec) {
            Ok(rules) => rules,
            Err(invalid) => {
                // The controller compiles the rules too, and sends none that it rejects.
                tracing::warn!(%invalid, "failed to compile the new spec; keeping the old one");
                return Ok(());
            }
        };
        let (old, new) = (&self.terms.spec, &terms.spec);
        let same_source = old.source == new.source;
        let same_ear = same_source && old.suspend == new.suspend && old.limits == new.limits;
        if let Err(error) = self.keeper.set_source(&identity(&new.source)) {
            self.directives.mark_changed();
            return Err(error);
        }
        self.keeper.set_rules(rules);
        self.terms = terms;
        if !same_ear {
            self.count(ear);
            *ear = self.start_source(self.keeper.cursor().clone());
        }
        Ok(())
    }

    fn start_source(&self, cursor: SourceCursor) -> ActiveSource {
        let (feed, arrivals) = SourceFeed::new();
        let running = if self.terms.spec.suspend {
            None
        } else {
            let started = self.sources.start(&self.terms.spec, cursor, feed.clone());
            started.map_err(|failure| feed.failed(&failure.0, Duration::ZERO)).ok()
        };
        ActiveSource {
            _running: running,
            arrivals,
            condition: feed.condition(),
            _feed: feed,
            counted: (0, 0),
        }
    }

    fn count(&mut self, ear: &mut ActiveSource) {
        let (failures, refused) = {
            let condition = ear.condition.borrow_and_update();
            (condition.failures, condition.refused)
        };
        self.keeper.count_failures(failures - ear.counted.0);
        self.keeper.count_refused(refused - ear.counted.1);
        ear.counted = (failures, refused);
    }

    /// Updates the [`SensorPodReport`]; sends it only if it changed.
    fn send_report(&mut self, ear: &mut ActiveSource) -> Result<(), OutboxError> {
        self.count(ear);
        let pending = self.outbox.lock().pending()?;
        let condition = ear.condition.borrow().clone();
        let state = self.keeper.state();
        let (consecutive, failure) = match condition.failure {
            Some(failure) => (condition.consecutive_failures, Some(failure)),
            None => (state.consecutive_failures, state.failure.clone()),
        };
        let report = SensorPodReport {
            report: SensorReport {
                uid: self.terms.uid.clone(),
                generation: self.terms.generation,
                totals: state.totals,
                last: state.last.as_ref().map(|last| LastEvent {
                    at: last.at,
                    id: last.id.clone(),
                }),
                consecutive_failures: consecutive,
                failure,
                next_attempt_at: condition.next_attempt_at,
            },
            pending_deliveries: pending.values().sum(),
        };
        self.report.send_if_modified(|old| {
            let new = old.as_ref() != Some(&report);
            *old = Some(report);
            new
        });
        Ok(())
    }
}

/// Whether an arrival would be lost because its receivers are unknown or absent. The response to a webhook requests a
/// retry. What a page or a stream delivers while there are no receivers is dropped.
fn is_lost(spec: &SensorSpec, receivers: Option<&[ReceiverTerms]>) -> bool {
    receivers.is_none_or(|receivers| spec.source.webhook.is_some() && receivers.is_empty())
}

fn until(due: Option<Timestamp>) -> Duration {
    let wait = due.map(|due| Duration::try_from(due.duration_since(Timestamp::now())).unwrap_or_default());
    wait.unwrap_or(LOOK).min(LOOK)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_delivery_to_a_webhook_without_receivers_is_to_be_repeated_and_that_of_a_page_is_dropped() {
        let spec = |source| serde_json::from_value(json!({"agentNames": ["a"], "source": source})).expect("a spec");
        let webhook: SensorSpec = spec(json!({
            "webhook": {"scheme": "GitHub", "secretKeyRef": {"name": "s", "key": "k"}},
        }));
        let page: SensorSpec = spec(json!({"poll": {"http": {"url": "http://a"}}}));
        let one = [ReceiverTerms {
            uid: "u".into(),
            name: "a".into(),
            revision: 0,
        }];
        for (receivers, of_webhook, of_page) in [
            (None, true, true),
            (Some(&[][..]), true, false),
            (Some(&one[..]), false, false),
        ] {
            assert_eq!(
                (is_lost(&webhook, receivers), is_lost(&page, receivers)),
                (of_webhook, of_page)
            );
        }
    }
}
