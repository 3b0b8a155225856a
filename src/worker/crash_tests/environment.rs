//! Everything that outlives a worker: the gateway and its record, the tool servers, the clock, and external events.
//!
//! Asserts while it runs: an answer that is paid for twice, or a tool run that is repeated against its rules, fails the
//! test.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use jiff::{SignedDuration, Timestamp};

use super::script::{self, APPROVED, Call, ExternalEvent, ExternalEventKind, FailedAttempt, Script, ScriptedOutcome};
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::budget::BudgetState;
use crate::engine::machine::LoopView;
use crate::engine::message::ModelAnswer;
use crate::engine::notifications::Notification;
use crate::engine::sensor_events::{SensedEvent, SensedNotification};
use crate::engine::tasks::{TaskOffer, TaskOrigin, TaskResponse};
use crate::engine::tool::{ToolOutcome, ToolRun, ToolRunId};
use crate::engine::{CallId, CallPurpose, EngineGateAnswer};
use crate::toolbox_protocol::file_report::{FileFinding, FileReport};
use crate::worker::journal::JournalLine;

/// Seconds until a person has answered a gate.
const UNTIL_ANSWERED: i64 = 40;

#[derive(Clone)]
pub(super) struct SimulatedEnvironment {
    pub(super) script: Rc<Script>,
    pub(super) now: Timestamp,
    pub(super) epoch: i64,
    /// The call store of the gateway.
    calls: BTreeMap<CallId, StoredCall>,
    /// The last call whose outcome the worker has acknowledged.
    acknowledged: Option<CallId>,
    /// Number of attempts at each call that have ended, or will by the script.
    made: BTreeMap<(i64, u32), usize>,
    pub(super) heartbeats: BTreeSet<i64>,
    /// Turns that answered requests beside the agent's own work.
    chats: BTreeSet<i64>,
    /// All requests so far: they are sent again to a new worker.
    pub(super) asked: Vec<TaskOffer>,
    /// Responses that their receiver has, by id, in order.
    received: Vec<TaskResponse>,
    /// Calls for summaries, which the script does not count.
    pub(super) summaries: BTreeSet<(i64, u32)>,
    /// Which attempt of the script each call is.
    planned: BTreeMap<CallId, usize>,
    /// Until when a budget refused an attempt.
    refused: BTreeMap<CallId, Timestamp>,
    pub(super) billed: BTreeSet<CallId>,
    /// Tool runs that reached their server, with their number.
    pub(super) ran: BTreeMap<String, (ToolRun, usize)>,
    seen: BTreeSet<usize>,
    coming: BTreeMap<(Timestamp, usize), ExternalEvent>,
    pub(super) wake: Option<String>,
    pub(super) resume: Option<String>,
    pub(super) stop: Option<String>,
    pub(super) budget: BudgetState,
    pub(super) link_lost: bool,
    /// All notifications so far: they are redelivered to a new worker.
    pub(super) notices: Vec<Notification>,
    /// The workspace: the content of each file, and the time of its last write.
    pub(super) files: BTreeMap<&'static str, (&'static str, Timestamp)>,
    /// Texts that Sensors sent, with the ids of their events.
    ticks: BTreeMap<String, String>,
    /// Calls for scores, with their data.
    questions: BTreeMap<CallId, String>,
    /// Turns that showed each text.
    pub(super) shown: BTreeMap<String, BTreeSet<i64>>,
    /// Sequence number of the last logged event.
    pub(super) told: i64,
    /// The answers to all gates so far, by gate, and when they were given: they stay on the object.
    answers: BTreeMap<String, (Timestamp, EngineGateAnswer)>,
}

#[derive(Clone, Debug, PartialEq)]
enum StoredCall {
    Open(Timestamp, Result<ModelAnswer, CallFailure>),
    Ended(Result<ModelAnswer, CallFailure>),
}

/// What would wake the driver.
#[derive(Clone, Debug)]
pub(super) enum DriverInput {
    Wake(String),
    Stop(String),
    Resume(String),
    Budget(BudgetState),
    Notice(Notification),
    Request(TaskOffer),
    LinkLost,
    LinkBack,
    NewPod,
    Files,
}

impl SimulatedEnvironment {
    pub(super) fn new(script: Script) -> Self {
        Self {
            script: Rc::new(script),
            now: "2026-01-05T07:00:00Z".parse().expect("a moment"),
            epoch: 1,
            calls: BTreeMap::new(),
            acknowledged: None,
            made: BTreeMap::new(),
            heartbeats: BTreeSet::new(),
            chats: BTreeSet::new(),
            asked: Vec::new(),
            received: Vec::new(),
            summaries: BTreeSet::new(),
            planned: BTreeMap::new(),
            refused: BTreeMap::new(),
            billed: BTreeSet::new(),
            ran: BTreeMap::new(),
            seen: BTreeSet::new(),
            coming: BTreeMap::new(),
            wake: None,
            resume: None,
            stop: None,
            budget: BudgetState::default(),
            link_lost: false,
            notices: Vec::new(),
            files: BTreeMap::new(),
            ticks: BTreeMap::new(),
            questions: BTreeMap::new(),
            shown: BTreeMap::new(),
            told: 0,
            answers: BTreeMap::new(),
        }
    }

    /// Equal in two runs that continue in the same way, as far as the environment is concerned.
    pub(super) fn fingerprint(&self) -> String {
        let environment = (
            &self.made,
            &self.heartbeats,
            &self.seen,
            &self.coming,
            &self.wake,
            &self.resume,
            &self.stop,
            &self.notices,
            &self.files,
            &self.answers,
            &self.asked,
            &self.received,
        );
        format!("{environment:?} {:?} {} {}", self.budget, self.now, self.epoch)
    }

    /// Checks logged events: after a kill some are repeated, but none may be missing.
    pub(super) fn hear_told(&mut self, lines: &[JournalLine]) {
        for line in lines {
            assert!(line.seq <= self.told + 1, "event {} was never told", self.told + 1);
            self.told = self.told.max(line.seq);
        }
    }

    /// Advances time. Calls end whether or not a worker waits for them.
    pub(super) fn pass(&mut self, to: Timestamp) {
        self.now = self.now.max(to);
        for (id, call) in &mut self.calls {
            if let StoredCall::Open(at, end) = call
                && *at <= self.now
            {
                if end.is_ok() {
                    assert!(self.billed.insert(*id), "{id} was paid twice");
                }
                *call = StoredCall::Ended(end.clone());
            }
        }
    }

    /// Receives a call, or a repeat of the same one.
    pub(super) fn call(&mut self, id: CallId, purpose: CallPurpose) {
        assert!(
            self.acknowledged.is_none_or(|last| id > last),
            "{id} is asked for after its outcome was acknowledged"
        );
        if self.calls.contains_key(&id) {
            return;
        }
        assert!(!self.billed.contains(&id), "{id} would be paid twice");
        if purpose == CallPurpose::Compaction {
            self.summaries.insert((id.turn, id.call));
            let end = Ok(script::summary(id.turn));
            self.calls.insert(id, StoredCall::Open(self.now, end));
            self.pass(self.now);
            return;
        }
        if purpose == CallPurpose::Precheck {
            let end = Ok(script::pre_check(id.attempt));
            self.calls.insert(id, StoredCall::Open(self.now + seconds(5), end));
            return;
        }
        if purpose.is_of_mode() {
            self.calls
                .insert(id, StoredCall::Open(self.now + seconds(5), Ok(script::confidence())));
            return;
        }
        if purpose == CallPurpose::Heartbeat {
            self.heartbeats.insert(id.turn);
        }
        if purpose == CallPurpose::Chat {
            self.chats.insert(id.turn);
        }
        let number = self.scripted(id.turn, id.call);
        let call = self.planned(id.turn, number);
        let (takes, failures) = call.map_or((0, Vec::new()), |Call { takes, failures, .. }| (takes, failures));
        let made = &mut self.made;
        let place = *self.planned.entry(id).or_insert_with(|| {
            let made = made.entry((id.turn, id.call)).or_default();
            *made += 1;
            *made - 1
        });
        let end = match failures.get(place).copied() {
            None => Ok(self.answer(id.turn, number)),
            Some(FailedAttempt::Fails(kind)) => Err(failure(kind)),
            Some(FailedAttempt::Waits(seconds)) => Err(CallFailure {
                retry_after_milliseconds: Some(seconds * 1000),
                ..failure(FailureKind::RateLimited)
            }),
            Some(FailedAttempt::Refused(wait)) => Err(CallFailure {
                resumes_at: Some(*self.refused.entry(id).or_insert(self.now + seconds(wait))),
                ..failure(FailureKind::BudgetExhausted)
            }),
        };
        self.calls.insert(id, StoredCall::Open(self.now + seconds(takes), end));
        self.pass(self.now);
    }

    /// Receives a request for a score.
    pub(super) fn score(&mut self, id: CallId, about: &str) {
        assert!(
            self.acknowledged.is_none_or(|last| id > last),
            "{id} is asked for after its outcome was acknowledged"
        );
        if !self.calls.contains_key(&id) {
            assert!(!self.billed.contains(&id), "{id} would be paid twice");
            self.questions.insert(id, about.to_owned());
            let end = StoredCall::Open(self.now + seconds(2), Ok(script::score(about)));
            self.calls.insert(id, end);
        }
    }

    /// Returns how often each request for a score was paid for.
    pub(super) fn paid_scores(&self) -> BTreeMap<&str, usize> {
        let paid = self.questions.iter().filter(|(id, _)| self.billed.contains(id));
        paid.fold(BTreeMap::new(), |mut counts, (_, about)| {
            *counts.entry(&**about).or_default() += 1;
            counts
        })
    }

    /// Receives the event of a Sensor. After a kill the same event may come again.
    pub(super) fn tell(&mut self, event: &SensedEvent) {
        for notice in &event.notices {
            let before = self.ticks.insert(notice.text.clone(), event.id.clone());
            assert!(
                before.is_none_or(|before| before == event.id),
                "{} is two events",
                notice.text
            );
        }
    }

    /// Records which notifications a call shows.
    pub(super) fn show(&mut self, call: CallId, state: Option<&str>) {
        for tick in self.ticks.keys() {
            if state.is_some_and(|state| state.contains(tick)) {
                self.shown.entry(tick.clone()).or_default().insert(call.turn);
            }
        }
        for notice in &self.notices {
            if state.is_some_and(|state| state.contains(&notice.text)) {
                self.shown.entry(notice.id.clone()).or_default().insert(call.turn);
            }
        }
    }

    /// Returns the script's entry for a call of a turn, which may be a heartbeat.
    fn planned(&self, turn: i64, number: u32) -> Option<Call> {
        if self.heartbeats.contains(&turn) {
            let place = usize::try_from(number).ok()?.checked_sub(1)?;
            return self.script.heartbeat.calls.get(place).cloned();
        }
        if self.chats.contains(&turn) {
            return Some(script::request_call(number));
        }
        self.script.call(self.own(turn), number)
    }

    fn answer(&self, turn: i64, number: u32) -> ModelAnswer {
        if self.heartbeats.contains(&turn) {
            return script::of_heartbeat(turn, number, self.planned(turn, number).as_ref());
        }
        if self.chats.contains(&turn) {
            return script::of_request(turn, number);
        }
        self.script.answer(self.own(turn), number)
    }

    /// Returns the number of a turn, not counting heartbeats and requests.
    fn own(&self, turn: i64) -> i64 {
        let others = self.heartbeats.range(..turn).count() + self.chats.range(..turn).count();
        turn - i64::try_from(others).expect("a small number")
    }

    /// A response arrives, for the first time or again.
    pub(super) fn receive(&mut self, response: &TaskResponse) {
        match self.received.iter().find(|known| known.id == response.id) {
            Some(known) => assert_eq!(known, response, "one key, one response"),
            None => self.received.push(response.clone()),
        }
    }

    /// Returns the number of a call in the script.
    fn scripted(&self, turn: i64, call: u32) -> u32 {
        let before = self.summaries.range((turn, 0)..(turn, call));
        call - u32::try_from(before.count()).expect("a small number")
    }

    /// Returns when the call ends for which the worker waits.
    pub(super) fn ends_at(&self, id: CallId) -> Timestamp {
        match self.calls.get(&id) {
            Some(StoredCall::Open(at, _)) => *at,
            Some(StoredCall::Ended(_)) | None => self.now,
        }
    }

    pub(super) fn end_of(&mut self, id: CallId) -> Option<Result<ModelAnswer, CallFailure>> {
        let end = match self.calls.get(&id)? {
            StoredCall::Ended(end) => end.clone(),
            StoredCall::Open(..) => return None,
        };
        // A call that was never sent is not recorded: a repeat is a new attempt.
        if self.refused.contains_key(&id) {
            self.calls.remove(&id);
        }
        Some(end)
    }

    pub(super) fn acknowledge(&mut self, id: CallId) {
        self.acknowledged = self.acknowledged.max(Some(id));
        self.calls.retain(|other, _| *other > id);
    }

    /// Kills the gateway. The next one finds open calls in its record, whose outcome is lost.
    pub(super) fn lose_gateway(&mut self) {
        for (id, call) in &mut self.calls {
            if let StoredCall::Open(..) = call {
                *call = StoredCall::Ended(Err(failure(FailureKind::Interrupted)));
                self.made.entry((id.turn, id.call)).and_modify(|made| *made -= 1);
            }
        }
    }

    /// Receives a tool run, which takes effect even if the worker dies. Returns when and how it ends.
    pub(super) fn run(&mut self, run: &ToolRun) -> (Timestamp, ToolOutcome) {
        if run.name == script::LIST {
            let text = FileReport(vec![FileFinding::Bytes(10), FileFinding::Absent]).line();
            return (self.now + seconds(1), ToolOutcome::Done { text });
        }
        if run.id.is_refresh() {
            let text = (self.now.as_second() / 3600).to_string();
            return (self.now + seconds(1), ToolOutcome::Done { text });
        }
        let number = self.scripted(run.id.turn, run.id.call);
        let call = self.planned(run.id.turn, number).unwrap_or_default();
        let want = call.wants[usize::try_from(run.id.index).expect("a place") - 1];
        assert_eq!(want.tool, run.name);
        let id = ToolRunId {
            turn: self.own(run.id.turn),
            ..run.id
        };
        if script::GATED.contains(&want.tool) {
            let of_run =
                |answer: &EngineGateAnswer| answer.gate.split_once('-').map(|(_, of)| of) == Some(&run.id.to_string());
            let given = self.answers.values().filter(|(at, _)| *at <= self.now);
            let approved = given.filter(|(_, answer)| answer.approved && of_run(answer)).count();
            assert!(approved > 0, "{} of {} was not approved", run.id, run.name);
        }
        let (first, times) = self
            .ran
            .entry(run.idempotency_key.clone())
            .or_insert_with(|| (run.clone(), 0));
        assert_eq!(first, run, "one key, one run");
        if want.ends != ScriptedOutcome::NotRun {
            *times += 1;
        }
        assert!(
            *times <= 1 || script::may_be_repeated(&run.name),
            "{} of {} ran twice",
            run.id,
            run.name
        );
        // As long as the text of an unknown outcome, so that the context fills up in the same way.
        let text = format!("{:-<180}", format!("{id} of {}", run.name));
        let message = "the server is down".to_owned();
        let outcome = match want.ends {
            ScriptedOutcome::Ok => ToolOutcome::Done { text },
            ScriptedOutcome::Error => ToolOutcome::Failed { text },
            ScriptedOutcome::NotRun => ToolOutcome::Unavailable { message },
            // The repeat that the tool's rule requires is answered.
            ScriptedOutcome::Unknown if *times > 1 && run.name == "job__start" => ToolOutcome::Done { text },
            ScriptedOutcome::Unknown => ToolOutcome::Unknown { message },
        };
        (self.now + seconds(want.takes), outcome)
    }

    /// Observes the state of the loop, and schedules the script's external events for it.
    pub(super) fn see(&mut self, view: &LoopView) {
        self.see_gates(view);
        for (place, happening) in self.script.happenings.iter().enumerate() {
            if happening.turn == view.turn && happening.state == view.state && self.seen.insert(place) {
                self.coming
                    .insert((self.now + seconds(happening.after), place), *happening);
            }
        }
    }

    /// A person sees the open gates, and will answer each of them once.
    fn see_gates(&mut self, view: &LoopView) {
        for open in &view.gates {
            let id = &open.gate.id;
            let approved = [APPROVED, script::GOAL].contains(&&*open.tool);
            let answer = EngineGateAnswer {
                gate: id.clone(),
                arguments: open.arguments.clone(),
                approved,
                by: approved.then(|| "ann".into()),
            };
            let at = self.now + seconds(UNTIL_ANSWERED);
            self.answers.entry(id.clone()).or_insert((at, answer));
        }
    }

    /// When the next answer is given of which the worker does not know.
    pub(super) fn next_answer(&self, known: &BTreeSet<String>) -> Option<Timestamp> {
        let open = self.answers.iter().filter(|(gate, _)| !known.contains(*gate));
        open.map(|(_, (at, _))| *at).min()
    }

    /// An answer that was given and of which the worker does not know.
    pub(super) fn answer_to_gate(&self, known: &BTreeSet<String>) -> Option<EngineGateAnswer> {
        let given = self.answers.values().filter(|(at, _)| *at <= self.now);
        let mut given = given.map(|(_, answer)| answer);
        given.find(|answer| !known.contains(&answer.gate)).cloned()
    }

    pub(super) fn next_happening(&self) -> Option<Timestamp> {
        self.coming.keys().next().map(|(at, _)| *at)
    }

    /// Returns what has happened by now. Each word is a level, so a later worker receives it too.
    pub(super) fn happen(&mut self) -> Option<DriverInput> {
        let entry = self.coming.first_entry().filter(|entry| entry.key().0 <= self.now)?;
        let ((_, place), happening) = entry.remove_entry();
        let token = place.to_string();
        Some(match happening.what {
            ExternalEventKind::Wake => {
                self.wake = Some(token.clone());
                DriverInput::Wake(token)
            }
            ExternalEventKind::Resume => {
                self.resume = Some(token.clone());
                DriverInput::Resume(token)
            }
            ExternalEventKind::Stop { at_once } => {
                let token = if at_once { format!("now:{token}") } else { token };
                self.stop = Some(token.clone());
                DriverInput::Stop(token)
            }
            ExternalEventKind::TopUp => {
                self.budget.revision += 1;
                DriverInput::Budget(self.budget.clone())
            }
            ExternalEventKind::Notice(priority) => {
                let notice = Notification {
                    id: token,
                    source: "sensor/news".into(),
                    priority,
                    text: format!("notice {place}."),
                    at: self.now,
                };
                self.notices.push(notice.clone());
                DriverInput::Notice(notice)
            }
            ExternalEventKind::Outage => {
                self.link_lost = true;
                DriverInput::LinkLost
            }
            ExternalEventKind::LinkBack => {
                self.link_lost = false;
                DriverInput::LinkBack
            }
            ExternalEventKind::Request(user) => {
                let offer = TaskOffer {
                    id: format!("request-{token}"),
                    origin: TaskOrigin::Request(user.into()),
                    prompt: "How are you?".into(),
                    untrusted: None,
                };
                self.asked.push(offer.clone());
                DriverInput::Request(offer)
            }
            ExternalEventKind::NewPod => {
                self.epoch += 1;
                DriverInput::NewPod
            }
            ExternalEventKind::Put(path, text) => {
                self.files.insert(path, (text, self.now));
                DriverInput::Files
            }
            ExternalEventKind::Remove(path) => {
                self.files.remove(path);
                DriverInput::Files
            }
        })
    }
}

pub(super) fn seconds(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds)
}

/// Builds the event with this notification.
pub(super) fn event(notification: Notification) -> SensedEvent {
    let Notification {
        id,
        source,
        priority,
        text,
        at,
    } = notification;
    SensedEvent {
        id,
        sensor: "news".into(),
        at,
        updates: Vec::new(),
        notices: vec![SensedNotification {
            source,
            priority,
            text,
            is_task: false,
        }],
        wakes: Vec::new(),
    }
}

fn failure(kind: FailureKind) -> CallFailure {
    CallFailure::new(kind, "what to do")
}
