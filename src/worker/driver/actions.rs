//! What follows from a step of the loop: calls, runs of tools, reports and timers.
//!
//! Nothing here waits, and nothing decides: the engine said it, and its records are on disk.

use std::time::{Duration, Instant};

use jiff::SignedDuration;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::LoopDriver;
use crate::engine::EngineEffect;
use crate::engine::tool::{ToolOutcome, ToolRun};
use crate::worker::gateway_client::CallNotice;
use crate::worker::model::{ModelPrompt, WireFormat, cache};

/// What a source may take beyond a run's timeout to say that it is over.
const TIMEOUT_SLACK: Duration = Duration::from_secs(2);

impl LoopDriver<'_> {
    /// Does what follows from a step; its records are on disk.
    pub(super) fn perform(&mut self, effect: EngineEffect) {
        match effect {
            // Committed before.
            EngineEffect::Record(_) => {}
            EngineEffect::CallModel {
                call,
                purpose,
                messages,
                state,
                tools,
            } => {
                let light = self.light_model.filter(|_| purpose.uses_light_model());
                let model = light.unwrap_or(self.model);
                let format = WireFormat::of(model, &tools);
                let bytes = messages.iter().map(|message| message.bytes()).sum();
                let lifetime = match light {
                    Some(light) => cache::CachePolicy::of_single_calls(light),
                    None => self.cache.next(Instant::now(), bytes),
                };
                let prompt = ModelPrompt {
                    messages: &messages[..],
                    state: state.as_deref(),
                    tools: &tools,
                    lifetime,
                    cache_key: light.is_none().then_some(&*self.agent),
                };
                let body = format.body(model, &prompt);
                let gateway = self.gateway.clone();
                let (api, name) = (model.api, model.name.clone());
                self.in_flight = Some(call);
                self.calls.spawn(async move {
                    let answer = gateway.call((call, purpose), format, body).await;
                    (call, answer.map(|answer| answer.written_by(api, &name)))
                });
            }
            EngineEffect::CancelCall { .. } => self.cut_call(),
            EngineEffect::RunTool(run, limit) => self.run_tool(run, limit),
            EngineEffect::CancelTool(run) => {
                if let Some(task) = self.running.remove(&run) {
                    task.abort();
                }
            }
            EngineEffect::Acknowledge { call } => self.outbox.notify_call(CallNotice::Acknowledge(call)),
            EngineEffect::SetTimer(at) => self.timer = at,
            EngineEffect::Report => self.outbox.report(self.report()),
            EngineEffect::Stopped => {
                self.stopped = true;
                self.outbox.report(self.report());
            }
        }
    }

    fn run_tool(&mut self, run: ToolRun, limit: SignedDuration) {
        let id = run.id;
        let limit = Duration::try_from(limit).unwrap_or_default();
        let source = self.tools.clone();
        let task = self.runs.spawn(async move {
            let Some(source) = source else {
                return ToolOutcome::Unavailable {
                    message: "the Agent has no source of tools any more".into(),
                };
            };
            let ran = timeout(limit + TIMEOUT_SLACK, source.run(run, limit)).await;
            ran.unwrap_or_else(|_| ToolOutcome::Unknown {
                message: "no answer in time".into(),
            })
        });
        self.running.insert(id, task);
    }

    /// Cuts the call in flight, here and at the gateway.
    pub(super) fn cut_call(&mut self) {
        self.calls = JoinSet::new();
        if let Some(call) = self.in_flight.take() {
            self.outbox.notify_call(CallNotice::Cancel(call));
        }
    }
}
