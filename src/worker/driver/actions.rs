//! Carries out the effects of a step: calls, tool runs, reports and timers.
//!
//! Never waits and never decides: the engine decided, and its records are on disk.

use std::time::{Duration, Instant};

use jiff::SignedDuration;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::Instrument as _;

use super::LoopDriver;
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::tool::{ToolOutcome, ToolRun};
use crate::engine::{CallPurpose, EngineEffect, RecordKind};
use crate::provider::WireFormat;
use crate::provider::prompt::ModelPrompt;
use crate::support::clock::ClockReading;
use crate::worker::artifacts;
use crate::worker::gateway_client::CallMessage;
use crate::worker::journal::JournalLine;
use crate::worker::prompt_cache::CachePolicy;
use crate::worker::tool_source::FinishedToolRun;

/// Why nothing was sent.
const NO_CONTACT: &str = "no contact with the controller for the whole run lease: it was not sent";
/// Grace beyond a run's timeout for its source to report that the run timed out.
const TIMEOUT_SLACK: Duration = Duration::from_secs(2);

impl LoopDriver<'_> {
    /// Does what follows from a step; its records are on disk. `lost`: nothing new may be sent.
    pub(super) fn perform(&mut self, effect: EngineEffect, lost: bool) {
        match effect {
            // Already committed.
            EngineEffect::Record(_) => {}
            EngineEffect::CallModel {
                call,
                purpose,
                messages,
                state,
                tools,
                answer_schema,
            } => {
                let light = self.light_model.filter(|_| purpose.uses_light_model());
                let model = light.unwrap_or(self.model);
                let format = WireFormat::of(model, &tools);
                let bytes = messages.iter().map(|message| message.bytes()).sum();
                let lifetime = match light {
                    Some(light) => CachePolicy::of_single_calls(light),
                    None => self.cache.next(Instant::now(), bytes),
                };
                let images = model.image_input.filter(|_| light.is_none());
                let images = images.map(|input| artifacts::prompt_images(&self.artifacts, &messages, input));
                let prompt = ModelPrompt {
                    messages: &messages[..],
                    images: images.as_ref(),
                    state: state.as_deref(),
                    tools: &tools,
                    lifetime,
                    cache_key: light.is_none().then_some(&*self.agent),
                    answer_schema: answer_schema.as_deref(),
                };
                let body = format.body(model, &prompt);
                let gateway = self.gateway.clone();
                let (api, name) = (model.api, model.name.clone());
                let is_of_turn = matches!(purpose, CallPurpose::Turn | CallPurpose::Chat);
                let task = self.steps.requested_task().filter(|_| is_of_turn);
                let tap = task.map(|task| self.readings.tap(task, call));
                self.in_flight = Some(call);
                let calling = async move {
                    if lost {
                        return (call, Err(link_lost()));
                    }
                    let answer = gateway.call((call, purpose), format, body, tap).await;
                    (call, answer.map(|answer| answer.written_by(api, &name)))
                };
                self.calls.spawn(calling.in_current_span());
            }
            EngineEffect::CancelCall { .. } => self.cut_call(),
            EngineEffect::RunTool(run, limit) => self.run_tool(run, limit, lost),
            EngineEffect::CancelTool(run) => {
                if let Some(task) = self.running.remove(&run) {
                    task.abort();
                }
            }
            EngineEffect::Acknowledge { call } => self.outbox.notify_call(CallMessage::Acknowledge(call)),
            EngineEffect::SetTimer(at) => self.timer.set(at),
            EngineEffect::Report => self.outbox.report(self.report()),
            EngineEffect::Stopped => {
                self.stopped = true;
                self.outbox.report(self.report());
            }
        }
    }

    fn run_tool(&mut self, run: ToolRun, limit: SignedDuration, lost: bool) {
        let id = run.id;
        let limit = Duration::try_from(limit).unwrap_or_default();
        let source = self.tools.clone();
        let running = async move {
            if lost {
                return FinishedToolRun::from(ToolOutcome::Unavailable {
                    message: NO_CONTACT.into(),
                });
            }
            let Some(source) = source else {
                return ToolOutcome::Unavailable {
                    message: "the Agent no longer has a source of tools".into(),
                }
                .into();
            };
            let ran = timeout(limit + TIMEOUT_SLACK, source.run(run, limit)).await;
            ran.unwrap_or_else(|_| {
                ToolOutcome::Unknown {
                    message: "no answer in time".into(),
                }
                .into()
            })
        };
        let task = self.runs.spawn(running.in_current_span());
        self.running.insert(id, task);
    }

    /// Whether the run lease ran out after the engine decided on a call or a run. The engine knew the state of the link, but its
    /// records were written since, and a disk or a process can stand still for longer than the lease. A call of the process
    /// before is sent again in any case: the gateway may have its answer, and checks the lease itself.
    pub(super) fn is_lost_since(&self, lines: &[JournalLine]) -> bool {
        let is_new = |line: &JournalLine| matches!(line.kind, RecordKind::CallStarted | RecordKind::ToolIntent);
        lines.iter().any(is_new) && self.contact.is_lost(ClockReading::now())
    }

    /// Cancels the call in flight, here and at the gateway.
    pub(super) fn cut_call(&mut self) {
        self.calls = JoinSet::new();
        if let Some(call) = self.in_flight.take() {
            self.outbox.notify_call(CallMessage::Cancel(call));
        }
    }
}

/// A call that was not sent; the engine tries it again when contact is back.
fn link_lost() -> CallFailure {
    CallFailure::new(FailureKind::LinkLost, NO_CONTACT)
}
