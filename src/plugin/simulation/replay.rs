//! Replays histories in chronological order, and evaluates the limits for each call.

use std::collections::{BTreeMap, BTreeSet};

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use super::account::{BudgetStop, is_later};
use super::budgets::SimulatedAccounts;
use super::changes::SimulatedLimits;
use super::past::{HistoricalCall, PastEvent, PastLoop};
use super::report::{CallSum, SimulatedDay, SimulatedStop, SimulationReport};
use crate::api::amount::{Amount, AmountKind};
use crate::api::budget::{AgentBudgetSpec, OnExhausted};
use crate::api::status::PauseReason;
use crate::engine::OutcomeKind;
use crate::engine::replay::{GuardrailReplay, ReplayedPause};
use crate::plugin::failure::PluginError;

/// One loop during the simulation.
struct SimulatedLoop {
    name: String,
    guardrails: GuardrailReplay,
    own: SimulatedAccounts,
    /// Number of calls seen.
    seen: u64,
    /// The turn that is open, and its calls that were let through.
    turn: (i64, u32),
    /// A turn that a guardrail has ended.
    ended_turn: Option<i64>,
    /// Calls that were refused, by turn and number.
    refused: BTreeSet<(i64, u32)>,
    /// The stop that is under way, as a position in the list of all stops.
    open: Option<usize>,
}

/// Why a call is not made.
struct Refusal {
    limit: String,
    until: Option<Timestamp>,
    ends_turn_only: bool,
}

/// What a limit can be simulated on only if it is known of each call.
const MUST_BE_KNOWN: [(AmountKind, &str); 3] = [
    (AmountKind::InputTokens, "the input tokens"),
    (AmountKind::OutputTokens, "the output tokens"),
    (AmountKind::Cost, "the cost"),
];
/// Why calls have no input and output tokens, and what to do.
const ONLY_SINCE: &str = ": calls of earlier releases, calls whose lines the journal has removed, and calls \
                          whose usage was not reported have none; leave them out with --since";

/// A simulation under way.
struct ReplayState {
    shared: SimulatedAccounts,
    stops: Vec<SimulatedStop>,
    days: BTreeMap<jiff::civil::Date, (CallSum, CallSum)>,
    period: Option<(Timestamp, Timestamp)>,
}

/// What these limits would have done to these histories, each with the name of its Agent.
pub fn run(limits: &SimulatedLimits, histories: &[(String, PastLoop)]) -> Result<SimulationReport, PluginError> {
    let mut moments: Vec<(Timestamp, usize, &PastEvent)> = Vec::new();
    for (place, (name, history)) in histories.iter().enumerate() {
        if histories.iter().take(place).any(|(earlier, _)| earlier == name) {
            return Err(PluginError::Usage(format!(
                "two histories are of {name}: give each Agent once, and each file another name"
            )));
        }
        moments.extend(history.events.iter().map(|(at, event)| (*at, place, event)));
    }
    // Stable: the order within a history stays.
    moments.sort_by_key(|(at, place, _)| (*at, *place));
    let first = moments.first().map_or(Timestamp::UNIX_EPOCH, |(at, ..)| *at);
    let mut simulation = ReplayState {
        shared: SimulatedAccounts::shared(limits, histories.len(), first)?,
        stops: Vec::new(),
        days: BTreeMap::new(),
        period: None,
    };
    let mut loops = Vec::new();
    for (name, _) in histories {
        loops.push(SimulatedLoop {
            name: name.clone(),
            guardrails: GuardrailReplay::new(limits.settings.clone()),
            own: SimulatedAccounts::own(limits, first)?,
            seen: 0,
            turn: (0, 0),
            ended_turn: None,
            refused: BTreeSet::new(),
            open: None,
        });
    }
    let calls: Vec<&HistoricalCall> = calls(histories).collect();
    for (kind, amount) in MUST_BE_KNOWN {
        let is_limited = simulation.shared.have_limit(kind) || loops.iter().any(|held| held.own.have_limit(kind));
        let unknown = calls.iter().filter(|call| call.known(kind).is_none()).count();
        if is_limited && unknown > 0 {
            return Err(PluginError::Usage(format!(
                "a limit on {} cannot be simulated: the history does not have {amount} of {unknown} of {} calls{}",
                kind.limit_field(),
                calls.len(),
                if kind == AmountKind::Cost { "" } else { ONLY_SINCE },
            )));
        }
    }
    for (at, place, event) in moments {
        if let Some(held) = loops.get_mut(place) {
            simulation.step(held, at, event);
        }
    }
    Ok(simulation.report(limits, histories))
}

fn calls(histories: &[(String, PastLoop)]) -> impl Iterator<Item = &HistoricalCall> {
    let events = histories.iter().flat_map(|(_, history)| &history.events);
    events.filter_map(|(_, event)| match event {
        PastEvent::Call(call) => Some(call),
        PastEvent::Action { .. }
        | PastEvent::RunEnded { .. }
        | PastEvent::TurnEnded { .. }
        | PastEvent::Rested { .. } => None,
    })
}

impl ReplayState {
    fn step(&mut self, held: &mut SimulatedLoop, at: Timestamp, event: &PastEvent) {
        match event {
            PastEvent::Call(call) => self.call(held, call),
            PastEvent::Action { of } if !held.refused.contains(of) => {
                let pause = held.guardrails.run_action(at);
                self.pause(held, at, pause);
            }
            PastEvent::RunEnded { of, tool, outcome } if !held.refused.contains(of) => {
                let outcome = match outcome.as_str() {
                    "Ok" => OutcomeKind::Ok,
                    "Error" => OutcomeKind::Error,
                    "Unavailable" => OutcomeKind::Unavailable,
                    _ => OutcomeKind::Unknown,
                };
                let pause = held.guardrails.end_tool_run(tool, outcome, at);
                self.pause(held, at, pause);
            }
            PastEvent::TurnEnded { turn, sleep } => self.turn_end(held, at, (*turn, *sleep)),
            PastEvent::Rested { .. } => self.shared.rest(&held.name, at),
            PastEvent::Action { .. } | PastEvent::RunEnded { .. } => {}
        }
    }

    fn call(&mut self, held: &mut SimulatedLoop, call: &HistoricalCall) {
        held.seen += 1;
        if held.turn.0 != call.turn {
            held.turn = (call.turn, 0);
        }
        let amount = call.amount();
        let Amount { tokens, cost, .. } = amount;
        let last = self.period.map_or(call.ends, |(_, last)| last.max(call.ends));
        self.period = Some((self.period.map_or(call.starts, |(first, _)| first), last));
        let day = self.days.entry(call.starts.to_zoned(TimeZone::UTC).date()).or_default();
        day.0.add(tokens, cost);
        if let Some(refusal) = self.refusal(held, call, &amount) {
            let day = self.days.entry(call.starts.to_zoned(TimeZone::UTC).date()).or_default();
            day.1.add(tokens, cost);
            held.refused.insert((call.turn, call.number));
            self.refuse(held, call, &refusal, (tokens, cost));
            return;
        }
        held.open = None;
        if call.is_of_turn {
            held.turn.1 += 1;
        }
        held.guardrails.count_call(call.starts);
        held.guardrails
            .count_tokens(u64::try_from(tokens).unwrap_or(0), call.ends);
        let time = (call.starts, call.ends);
        self.shared.begin(&held.name, &amount, time);
        held.own.begin(&held.name, &amount, time);
    }

    /// Why a call would not have been made, if so.
    fn refusal(&mut self, held: &mut SimulatedLoop, call: &HistoricalCall, amount: &Amount) -> Option<Refusal> {
        let is_over = held.ended_turn == Some(call.turn);
        if is_over || (call.is_of_turn && held.guardrails.ends_turn(held.turn.1)) {
            held.ended_turn = Some(call.turn);
            return Some(Refusal {
                limit: "guardrails.maxCallsPerTurn".into(),
                until: None,
                ends_turn_only: true,
            });
        }
        if let Some(pause) = held.guardrails.holds_call(call.starts) {
            self.shared.rest(&held.name, call.starts);
            return Some(of_pause(pause));
        }
        let shared = self.shared.refusal(&held.name, amount, call.starts);
        let own = held.own.refusal(&held.name, amount, call.starts);
        let stop = match (shared, own) {
            (Some(shared), Some(own)) if is_later(own.until, shared.until) => own,
            (Some(stop), _) | (None, Some(stop)) => stop,
            (None, None) => return None,
        };
        let BudgetStop { limit, until } = stop;
        Some(Refusal {
            limit,
            until,
            ends_turn_only: false,
        })
    }

    fn refuse(
        &mut self,
        held: &mut SimulatedLoop,
        call: &HistoricalCall,
        refusal: &Refusal,
        (tokens, cost): (i64, i64),
    ) {
        let same = |stop: &SimulatedStop| stop.limit == refusal.limit;
        let open = held.open.filter(|place| self.stops.get(*place).is_some_and(same));
        let place = open.unwrap_or_else(|| self.add_stop(held, call.starts, refusal));
        held.open = Some(place);
        let Some(stop) = self.stops.get_mut(place) else { return };
        if is_later(refusal.until, stop.until) {
            stop.until = refusal.until;
        }
        if stop.call.is_none() {
            (stop.call, stop.number) = (Some(call.name.clone()), Some(held.seen));
        }
        stop.refused.add(tokens, cost);
    }

    fn add_stop(&mut self, held: &SimulatedLoop, at: Timestamp, refusal: &Refusal) -> usize {
        self.stops.push(SimulatedStop {
            agent: held.name.clone(),
            limit: refusal.limit.clone(),
            call: None,
            number: None,
            at,
            until: refusal.until,
            ends_turn_only: refusal.ends_turn_only,
            refused: CallSum::default(),
        });
        self.stops.len() - 1
    }

    /// A pause that begins between calls.
    fn pause(&mut self, held: &mut SimulatedLoop, at: Timestamp, pause: Option<ReplayedPause>) {
        if let Some(pause) = pause {
            self.shared.rest(&held.name, at);
            held.open = Some(self.add_stop(held, at, &of_pause(pause)));
        }
    }

    fn turn_end(&mut self, held: &mut SimulatedLoop, at: Timestamp, (turn, sleep): (i64, Option<SignedDuration>)) {
        let was_cut = held.ended_turn == Some(turn);
        if !was_cut && held.refused.range((turn, 0)..=(turn, u32::MAX)).next().is_some() {
            return;
        }
        // A turn that a guardrail ended has chosen no sleep.
        let pause = held.guardrails.complete_turn(sleep.filter(|_| !was_cut), at);
        self.pause(held, at, pause);
    }

    fn report(self, limits: &SimulatedLimits, histories: &[(String, PastLoop)]) -> SimulationReport {
        let mut made = CallSum::default();
        let mut refused = CallSum::default();
        let sum = |sum: &mut CallSum, more: CallSum| {
            sum.calls += more.calls;
            sum.tokens = sum.tokens.saturating_add(more.tokens);
            sum.cost = sum.cost.saturating_add(more.cost);
        };
        let days = self.days.into_iter().map(|(day, (all, less))| {
            sum(&mut made, all);
            sum(&mut refused, less);
            SimulatedDay {
                day,
                made: all,
                refused: less,
            }
        });
        let days = days.collect();
        SimulationReport {
            changes: limits.names.clone(),
            agents: histories.iter().map(|(name, _)| name.clone()).collect(),
            period: self.period,
            made,
            refused,
            stops: self.stops,
            days,
            approximations: approximations(limits, histories),
        }
    }
}

fn of_pause(pause: ReplayedPause) -> Refusal {
    let names = [
        (PauseReason::RateWindow, "rateLimits"),
        (PauseReason::OutsideActiveHours, "activeHours"),
        (PauseReason::MaxConsecutiveTurns, "maxConsecutiveTurns"),
        (PauseReason::ActionsPerMinute, "actionsPerMinute"),
        (PauseReason::ConsecutiveToolFailures, "maxConsecutiveToolFailures"),
    ];
    let name = names.iter().find(|(reason, _)| *reason == pause.reason);
    let limit = name.map_or_else(|| pause.reason.to_string(), |(_, name)| format!("guardrails.{name}"));
    Refusal {
        limit,
        until: Some(pause.until).filter(|until| *until < Timestamp::MAX),
        ends_turn_only: false,
    }
}

fn approximations(limits: &SimulatedLimits, histories: &[(String, PastLoop)]) -> Vec<String> {
    let mut list = vec![
        "Calls keep their recorded times. A loop that was stopped would have continued later, with different calls."
            .to_owned(),
        "Unanswered attempts at calls are not part of a history and are not counted.".to_owned(),
    ];
    for (name, history) in histories.iter().filter(|(_, history)| history.first_turn > 1) {
        list.push(format!(
            "The history of {name} begins with turn {}: what earlier turns used is not counted.",
            history.first_turn
        ));
    }
    let unknown = calls(histories).filter(|call| call.tokens.is_none()).count();
    if unknown > 0 {
        list.push(format!(
            "The tokens of {unknown} calls are not known and count as none; a budget counts their bound."
        ));
    }
    let own = &limits.own;
    if limits.budget.is_some() || own.tokens_per_hour.or(own.total_tokens).is_some() || own.total_cost.is_some() {
        list.push(
            "A call needs the room that it used. A gateway reserves what a call can use at most, which a history does not record, and \
             shortens its output to what is left. So a limit on tokens or cost really stops a loop earlier: by one call, or by several \
             if calls use much less than they can."
                .to_owned(),
        );
    }
    if limits
        .budget
        .as_ref()
        .is_some_and(|budget| budget.on_exhausted == OnExhausted::Ask)
    {
        list.push("Gates of onExhausted: Ask are treated as unanswered.".to_owned());
    }
    let holds_all = |budget: &AgentBudgetSpec| budget.on_exhausted != OnExhausted::Pause;
    if limits.budget.as_ref().is_some_and(holds_all) && histories.len() > 1 {
        list.push(
            "Once at most a quarter of a limit is left, onExhausted leaves out Agents that are not awake. A history does not \
             record pauses and suspensions: their Agents count as awake for up to 30 s too long. The leader must have run for 30 s."
                .to_owned(),
        );
    }
    if limits.budget.as_ref().is_some_and(|budget| !budget.top_ups.is_empty()) {
        list.push("All topUps are added before the first call, in the window at that time.".to_owned());
    }
    if limits.budget.is_some() {
        list.push(
            "The selector of the AgentBudget is not evaluated: it applies to all histories, and to nothing else."
                .to_owned(),
        );
    }
    list
}
