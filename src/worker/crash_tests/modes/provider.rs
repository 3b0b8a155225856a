//! The model and the gateway's call store: what is asked for again has the answer that was paid for.
//!
//! Asserts while it runs: no call is paid for twice, and none is asked for whose outcome was acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::random::Random;
use super::schedule::{Criterion, GATED, NAMES, ScheduleSpec};
use crate::api::agent::AgentMode;
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::message::{FinishReason, Message, ModelAnswer, ToolCall};
use crate::engine::{CallId, CallPurpose};

pub(super) type CallResult = Result<ModelAnswer, CallFailure>;

#[derive(Clone, Debug)]
enum Recorded {
    /// It ends at this time, in this way.
    Open(Timestamp, CallResult),
    Ended(CallResult),
}

/// What is known about a call when it arrives.
pub(super) struct CallRequest<'a> {
    pub(super) id: CallId,
    pub(super) purpose: CallPurpose,
    pub(super) messages: &'a [Arc<Message>],
    pub(super) now: Timestamp,
    pub(super) schedule: &'a ScheduleSpec,
    /// Everything works.
    pub(super) calm: bool,
    /// No contact with the controller for the run lease.
    pub(super) lost: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Provider {
    record: BTreeMap<CallId, Recorded>,
    acknowledged: Option<CallId>,
    /// Calls that were answered, and thus paid for.
    pub(super) paid: BTreeSet<CallId>,
    /// Tokens and cost of each.
    pub(super) bills: BTreeMap<CallId, (u64, i64)>,
    /// Calls that were never sent: a limit refused them, or the link was lost.
    refused: BTreeSet<CallId>,
    /// Until when no server answers.
    pub(super) outage_until: Option<Timestamp>,
    /// Until when a budget has no room.
    pub(super) no_room_until: Option<Timestamp>,
    /// Numbers of answers, so that no two are equal.
    count: u32,
}

impl Provider {
    /// A call arrives, for the first time or again.
    pub(super) fn call(&mut self, asked: &CallRequest<'_>, random: &mut Random) {
        let id = asked.id;
        assert!(
            self.acknowledged.is_none_or(|last| id > last),
            "{id} is asked for after its outcome was acknowledged"
        );
        if self.record.contains_key(&id) {
            return;
        }
        assert!(!self.paid.contains(&id), "{id} would be paid for twice");
        let (takes, end) = self.draw(asked, random);
        if matches!(&end, Err(failure) if matches!(failure.kind, FailureKind::BudgetExhausted | FailureKind::LinkLost))
        {
            self.refused.insert(id);
        }
        let at = asked.now + SignedDuration::from_secs(takes);
        self.record.insert(id, Recorded::Open(at, end));
        self.pass(asked.now);
    }

    /// Calls end whether or not a worker waits for them.
    pub(super) fn pass(&mut self, now: Timestamp) {
        for (id, call) in &mut self.record {
            if let Recorded::Open(at, end) = call
                && *at <= now
            {
                if let Ok(answer) = end {
                    assert!(self.paid.insert(*id), "{id} was paid for twice");
                    let (tokens, cost) = (answer.tokens.unwrap_or(0), answer.cost.unwrap_or(0));
                    self.bills.insert(*id, (tokens, cost));
                }
                *call = Recorded::Ended(end.clone());
            }
        }
    }

    pub(super) fn ends_at(&self, id: CallId) -> Option<Timestamp> {
        match self.record.get(&id)? {
            Recorded::Open(at, _) => Some(*at),
            Recorded::Ended(_) => Some(Timestamp::MIN),
        }
    }

    pub(super) fn end_of(&mut self, id: CallId) -> Option<CallResult> {
        let Recorded::Ended(end) = self.record.get(&id)? else {
            return None;
        };
        let end = end.clone();
        // A call that was never sent is not recorded.
        if self.refused.remove(&id) {
            self.record.remove(&id);
        }
        Some(end)
    }

    pub(super) fn acknowledge(&mut self, id: CallId) {
        self.acknowledged = self.acknowledged.max(Some(id));
        self.record.retain(|other, _| *other > id);
    }

    /// The worker cuts a call: what the server wrote by then is counted as an estimate.
    pub(super) fn cancel(&mut self, id: CallId) {
        if let Some(call @ Recorded::Open(..)) = self.record.get_mut(&id) {
            *call = Recorded::Ended(Err(CallFailure::new(FailureKind::Cancelled, "cut")));
        }
    }

    /// The gateway ends and starts again: the outcome of open calls is lost.
    pub(super) fn lose_gateway(&mut self) {
        for call in self.record.values_mut() {
            if let Recorded::Open(..) = call {
                *call = Recorded::Ended(Err(CallFailure::new(FailureKind::Interrupted, "the gateway ended")));
            }
        }
    }

    /// A broken rule: the record does not survive.
    pub(super) fn forget(&mut self) {
        self.record.clear();
    }

    /// How long a call takes, and how it ends.
    fn draw(&mut self, asked: &CallRequest<'_>, random: &mut Random) -> (i64, CallResult) {
        let now = asked.now;
        if asked.lost {
            return (0, Err(CallFailure::new(FailureKind::LinkLost, "no contact")));
        }
        if let Some(until) = self.no_room_until.filter(|until| *until > now) {
            let failure = CallFailure::new(FailureKind::BudgetExhausted, "spent");
            let resumes_at = random.percent(70).then_some(until);
            return (0, Err(CallFailure { resumes_at, ..failure }));
        }
        if self.outage_until.is_some_and(|until| until > now) {
            return (1, Err(CallFailure::new(FailureKind::Unreachable, "down")));
        }
        if !asked.calm && random.percent(18) {
            return (random.range(0, 40), Err(failure(random)));
        }
        let takes = match random.index(10) {
            0 => random.range(60, 1500),
            _ => random.range(0, 20),
        };
        let takes = if asked.calm { 1 } else { takes };
        (takes, Ok(self.answer(asked, random)))
    }

    fn answer(&mut self, asked: &CallRequest<'_>, random: &mut Random) -> ModelAnswer {
        self.count += 1;
        let answer = match asked.purpose {
            CallPurpose::Compaction => text("All was quiet.".into()),
            CallPurpose::Precheck => text(json!({"wake": true}).to_string()),
            CallPurpose::Signal => text(json!({"score": 50}).to_string()),
            CallPurpose::Judge | CallPurpose::LightJudge if !asked.calm && random.percent(10) => text("Hm.".into()),
            CallPurpose::Judge | CallPurpose::LightJudge => {
                text(json!({"met": asked.calm || random.percent(60)}).to_string())
            }
            CallPurpose::Confidence | CallPurpose::LightConfidence => {
                let percent = if asked.calm { 90 } else { random.range(30, 100) };
                text(json!({"confidence": percent}).to_string())
            }
            CallPurpose::Turn | CallPurpose::Heartbeat | CallPurpose::Chat => self.turn(asked, random),
        };
        ModelAnswer {
            tokens: Some(100 + u64::from(self.count)),
            cost: Some(7 + i64::from(self.count)),
            ..answer
        }
    }

    fn turn(&mut self, asked: &CallRequest<'_>, random: &mut Random) -> ModelAnswer {
        if !asked.calm && random.percent(4) {
            let finish = [FinishReason::Length, FinishReason::Refused][random.index(2)];
            let answer = self.calls(vec![self.tool(random)]);
            return ModelAnswer { finish, ..answer };
        }
        let works = !asked.calm && random.percent(55);
        if works {
            let count = 1 + random.index(3);
            let mut calls: Vec<_> = (0..count)
                .map(|_| {
                    if random.percent(25) {
                        self.note(random)
                    } else if asked.schedule.is_denied && random.percent(50) {
                        insist(random)
                    } else {
                        self.tool(random)
                    }
                })
                .collect();
            // Beside an end of the turn as well.
            if random.percent(10) {
                calls.extend(self.ending(asked, random).tool_calls.into_iter().map(|call| {
                    let arguments = serde_json::from_str(&call.arguments).unwrap_or_default();
                    (call.name, arguments)
                }));
            }
            return self.calls(calls);
        }
        self.ending(asked, random)
    }

    /// An answer that ends the turn, if it is accepted.
    fn ending(&mut self, asked: &CallRequest<'_>, random: &mut Random) -> ModelAnswer {
        let schedule = asked.schedule;
        match (asked.purpose, schedule.mode) {
            (CallPurpose::Chat, _) | (_, AgentMode::Task) => {
                let answer = format!("answer to {}, {}", subject(asked.messages), self.count);
                let whole = if schedule.has_schema && asked.purpose != CallPurpose::Chat {
                    json!({"of": answer})
                } else {
                    answer.into()
                };
                let result = if asked.calm || random.percent(90) {
                    whole
                } else {
                    json!(7)
                };
                if asked.purpose != CallPurpose::Chat && random.percent(50) {
                    return self.calls(vec![("finish".into(), json!({"result": result}))]);
                }
                text(result.as_str().map_or_else(|| result.to_string(), str::to_owned))
            }
            (_, AgentMode::Goal) => match random.index(10) {
                0 if !asked.calm => text(format!("I have thought about it, {}.", self.count)),
                1 if !asked.calm => {
                    let reason = json!({"reason": format!("doubt {}", self.count)});
                    self.calls(vec![("request_confidence_check".into(), reason)])
                }
                _ => {
                    let regexes = schedule
                        .criteria
                        .iter()
                        .filter(|one| matches!(one, Criterion::Regex(_)));
                    let words = regexes
                        .filter(|_| asked.calm || random.percent(65))
                        .map(|one| one.word());
                    let result = format!("result {} {}", self.count, words.collect::<String>());
                    self.calls(vec![("finish".into(), json!({"result": result}))])
                }
            },
            (_, AgentMode::Continuous) => match random.index(20) {
                0 if !asked.calm => self.calls(vec![("yield".into(), json!({"mode": "shutdown"}))]),
                1..=3 if !asked.calm => text(format!("Nothing new, {}.", self.count)),
                _ => {
                    let sleep = [30, 90, 600, 7200][random.index(4)];
                    let arguments = json!({"sleep": sleep, "reason": format!("quiet, {}", self.count)});
                    self.calls(vec![("yield".into(), arguments)])
                }
            },
        }
    }

    fn tool(&self, random: &mut Random) -> (String, Value) {
        let name = NAMES[random.index(NAMES.len())];
        // Sometimes the same again.
        let number = if random.percent(10) { 0 } else { self.count };
        (name.into(), json!({"n": number, "m": random.index(1000)}))
    }

    /// A call of `memory`. A text has one bar, before which a replacement adds a sign: done twice, it is visible.
    fn note(&self, random: &mut Random) -> (String, Value) {
        let title = ["a", "b", "c"][random.index(3)];
        let arguments = match random.index(8) {
            0 | 1 => json!({"operation": "write", "title": title, "text": format!("{}|", self.count)}),
            2..=5 => json!({"operation": "replace", "title": title, "old": "|", "new": "+|"}),
            6 => json!({"operation": "delete", "title": title}),
            _ => json!({"operation": "view", "title": title}),
        };
        ("memory".into(), arguments)
    }

    fn calls(&self, calls: Vec<(String, Value)>) -> ModelAnswer {
        let call = |(place, (name, arguments)): (usize, (String, Value))| ToolCall {
            id: format!("a{}-{place}", self.count),
            name,
            arguments: arguments.to_string(),
        };
        ModelAnswer {
            text: Some(format!("I had better look, {}.", self.count)),
            tool_calls: calls.into_iter().enumerate().map(call).collect(),
            finish: FinishReason::ToolCalls,
            ..ModelAnswer::default()
        }
    }
}

/// A call that needs an approval, and one of few, so that it comes again.
fn insist(random: &mut Random) -> (String, Value) {
    (GATED[0].into(), json!({"m": random.index(20)}))
}

fn text(text: String) -> ModelAnswer {
    ModelAnswer {
        text: Some(text),
        ..ModelAnswer::default()
    }
}

fn failure(random: &mut Random) -> CallFailure {
    use FailureKind as Kind;
    let kinds = [
        Kind::Timeout,
        Kind::Unreachable,
        Kind::Unreachable,
        Kind::RateLimited,
        Kind::RateLimited,
        Kind::BadResponse,
        Kind::AuthenticationFailed,
        Kind::QuotaExceeded,
    ];
    let kind = kinds[random.index(kinds.len())];
    let wait = (kind == Kind::RateLimited).then(|| random.range(1, 120).unsigned_abs() * 1000);
    CallFailure {
        retry_after_milliseconds: wait,
        ..CallFailure::new(kind, "what to do")
    }
}

/// The word that names a task in its prompt.
fn subject(messages: &[Arc<Message>]) -> &str {
    let texts = messages.iter().rev().filter_map(|message| match &**message {
        Message::User { text } => Some(&**text),
        Message::System { .. } | Message::Assistant { .. } | Message::Tool { .. } => None,
    });
    let found = texts.filter_map(|text| text.split_once("task=")?.1.split_once(';'));
    found.map(|(word, _)| word).next().unwrap_or("nothing")
}
