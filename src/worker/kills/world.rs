//! All that outlives a worker: the gateway and its record, the servers of tools, the clock, and what comes from outside.
//!
//! Judges while it plays: an answer that is paid for twice, or a run that may not be repeated and is, ends the test.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use jiff::{SignedDuration, Timestamp};

use super::script::{self, Attempt, Call, Ends, Happening, Script, What};
use crate::api::failure::{CallFailure, FailureKind};
use crate::engine::budget::BudgetState;
use crate::engine::machine::LoopView;
use crate::engine::message::ModelAnswer;
use crate::engine::notifications::Notification;
use crate::engine::sensor_events::{SensedEvent, SensedNotice};
use crate::engine::tool::{ToolOutcome, ToolRun, ToolRunId};
use crate::engine::{CallId, CallPurpose};
use crate::worker::journal::JournalLine;

#[derive(Clone)]
pub(super) struct World {
    pub(super) script: Rc<Script>,
    pub(super) now: Timestamp,
    pub(super) epoch: i64,
    /// The record of the gateway.
    calls: BTreeMap<CallId, Recorded>,
    /// Up to here the worker has said that it has the outcomes.
    acknowledged: Option<CallId>,
    /// Attempts at each call that ended, or will, as the script says.
    made: BTreeMap<(i64, u32), usize>,
    /// Turns that are heartbeats.
    pub(super) heartbeats: BTreeSet<i64>,
    /// Calls for a summary; the script does not count them.
    pub(super) summaries: BTreeSet<(i64, u32)>,
    /// Which attempt of the script each of them is.
    planned: BTreeMap<CallId, usize>,
    /// Until when a budget refused an attempt.
    refused: BTreeMap<CallId, Timestamp>,
    pub(super) billed: BTreeSet<CallId>,
    /// Runs that reached their server: how often, and what.
    pub(super) ran: BTreeMap<String, (ToolRun, usize)>,
    seen: BTreeSet<usize>,
    coming: BTreeMap<(Timestamp, usize), Happening>,
    pub(super) wake: Option<String>,
    pub(super) resume: Option<String>,
    pub(super) budget: BudgetState,
    pub(super) link_lost: bool,
    /// All notifications so far: whoever delivers them repeats them.
    pub(super) notices: Vec<Notification>,
    /// The workspace: what each file says, and since when.
    pub(super) files: BTreeMap<&'static str, (&'static str, Timestamp)>,
    /// What Sensors told, and the events that it is.
    ticks: BTreeMap<String, String>,
    /// Calls for scores, and what they were about.
    questions: BTreeMap<CallId, String>,
    /// Which turns showed them.
    pub(super) shown: BTreeMap<String, BTreeSet<i64>>,
    /// The number of the last event that was told.
    pub(super) told: i64,
}

#[derive(Clone, Debug, PartialEq)]
enum Recorded {
    Open(Timestamp, Result<ModelAnswer, CallFailure>),
    Ended(Result<ModelAnswer, CallFailure>),
}

/// What the driver would be woken by.
#[derive(Clone, Debug)]
pub(super) enum Word {
    Wake(String),
    Resume(String),
    Budget(BudgetState),
    Notice(Notification),
    LinkLost,
    LinkBack,
    NewPod,
    Files,
}

impl World {
    pub(super) fn new(script: Script) -> Self {
        Self {
            script: Rc::new(script),
            now: "2026-01-05T07:00:00Z".parse().expect("a moment"),
            epoch: 1,
            calls: BTreeMap::new(),
            acknowledged: None,
            made: BTreeMap::new(),
            heartbeats: BTreeSet::new(),
            summaries: BTreeSet::new(),
            planned: BTreeMap::new(),
            refused: BTreeMap::new(),
            billed: BTreeSet::new(),
            ran: BTreeMap::new(),
            seen: BTreeSet::new(),
            coming: BTreeMap::new(),
            wake: None,
            resume: None,
            budget: BudgetState::default(),
            link_lost: false,
            notices: Vec::new(),
            files: BTreeMap::new(),
            ticks: BTreeMap::new(),
            questions: BTreeMap::new(),
            shown: BTreeMap::new(),
            told: 0,
        }
    }

    /// Equal in two runs that go on in the same way, as far as the world is concerned.
    pub(super) fn fingerprint(&self) -> String {
        let world = (
            &self.made,
            &self.heartbeats,
            &self.seen,
            &self.coming,
            &self.wake,
            &self.resume,
            &self.notices,
            &self.files,
        );
        format!("{world:?} {:?} {} {}", self.budget, self.now, self.epoch)
    }

    /// A log collector hears events: some again after a kill, and none too late.
    pub(super) fn hear_told(&mut self, lines: &[JournalLine]) {
        for line in lines {
            assert!(line.seq <= self.told + 1, "event {} was never told", self.told + 1);
            self.told = self.told.max(line.seq);
        }
    }

    /// Time passes: calls end whether or not anybody waits for them.
    pub(super) fn pass(&mut self, to: Timestamp) {
        self.now = self.now.max(to);
        for (id, call) in &mut self.calls {
            if let Recorded::Open(at, end) = call
                && *at <= self.now
            {
                if end.is_ok() {
                    assert!(self.billed.insert(*id), "{id} was paid twice");
                }
                *call = Recorded::Ended(end.clone());
            }
        }
    }

    /// The gateway is asked for a call, or for the same one again.
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
            self.calls.insert(id, Recorded::Open(self.now, end));
            self.pass(self.now);
            return;
        }
        if purpose == CallPurpose::Precheck {
            let end = Ok(script::pre_check(id.attempt));
            self.calls.insert(id, Recorded::Open(self.now + seconds(5), end));
            return;
        }
        if purpose == CallPurpose::Heartbeat {
            self.heartbeats.insert(id.turn);
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
            Some(Attempt::Fails(kind)) => Err(failure(kind)),
            Some(Attempt::Waits(seconds)) => Err(CallFailure {
                retry_after_milliseconds: Some(seconds * 1000),
                ..failure(FailureKind::RateLimited)
            }),
            Some(Attempt::Refused(wait)) => Err(CallFailure {
                resumes_at: Some(*self.refused.entry(id).or_insert(self.now + seconds(wait))),
                ..failure(FailureKind::BudgetExhausted)
            }),
        };
        self.calls.insert(id, Recorded::Open(self.now + seconds(takes), end));
        self.pass(self.now);
    }

    /// The small model is asked for a score.
    pub(super) fn score(&mut self, id: CallId, about: &str) {
        assert!(
            self.acknowledged.is_none_or(|last| id > last),
            "{id} is asked for after its outcome was acknowledged"
        );
        if !self.calls.contains_key(&id) {
            assert!(!self.billed.contains(&id), "{id} would be paid twice");
            self.questions.insert(id, about.to_owned());
            let end = Recorded::Open(self.now + seconds(2), Ok(script::score(about)));
            self.calls.insert(id, end);
        }
    }

    /// How often each question was paid for.
    pub(super) fn paid_scores(&self) -> BTreeMap<&str, usize> {
        let paid = self.questions.iter().filter(|(id, _)| self.billed.contains(id));
        paid.fold(BTreeMap::new(), |mut counts, (_, about)| {
            *counts.entry(&**about).or_default() += 1;
            counts
        })
    }

    /// A Sensor tells something; after a kill perhaps again, as the same event.
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

    /// What a call shows of the notifications.
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

    /// What the script has for a call of a turn, which may be a heartbeat.
    fn planned(&self, turn: i64, number: u32) -> Option<Call> {
        if self.heartbeats.contains(&turn) {
            let place = usize::try_from(number).ok()?.checked_sub(1)?;
            return self.script.heartbeat.calls.get(place).cloned();
        }
        self.script.call(self.own(turn), number)
    }

    fn answer(&self, turn: i64, number: u32) -> ModelAnswer {
        if self.heartbeats.contains(&turn) {
            return script::of_heartbeat(turn, number, self.planned(turn, number).as_ref());
        }
        self.script.answer(self.own(turn), number)
    }

    /// Number of a turn among those that are no heartbeats.
    fn own(&self, turn: i64) -> i64 {
        turn - i64::try_from(self.heartbeats.range(..turn).count()).expect("a small number")
    }

    /// Number of a call in the script.
    fn scripted(&self, turn: i64, call: u32) -> u32 {
        let before = self.summaries.range((turn, 0)..(turn, call));
        call - u32::try_from(before.count()).expect("a small number")
    }

    /// When the call that the worker waits for ends.
    pub(super) fn ends_at(&self, id: CallId) -> Timestamp {
        match self.calls.get(&id) {
            Some(Recorded::Open(at, _)) => *at,
            Some(Recorded::Ended(_)) | None => self.now,
        }
    }

    pub(super) fn end_of(&mut self, id: CallId) -> Option<Result<ModelAnswer, CallFailure>> {
        let end = match self.calls.get(&id)? {
            Recorded::Ended(end) => end.clone(),
            Recorded::Open(..) => return None,
        };
        // What was never sent is not recorded: who asks again asks anew.
        if self.refused.contains_key(&id) {
            self.calls.remove(&id);
        }
        Some(end)
    }

    pub(super) fn acknowledge(&mut self, id: CallId) {
        self.acknowledged = self.acknowledged.max(Some(id));
        self.calls.retain(|other, _| *other > id);
    }

    /// The gateway dies, and the next one finds calls in its record that have no end.
    pub(super) fn lose_gateway(&mut self) {
        for (id, call) in &mut self.calls {
            if let Recorded::Open(..) = call {
                *call = Recorded::Ended(Err(failure(FailureKind::Interrupted)));
                self.made.entry((id.turn, id.call)).and_modify(|made| *made -= 1);
            }
        }
    }

    /// A run reaches its server, and happens there whatever becomes of the worker. When it ends, and how.
    pub(super) fn run(&mut self, run: &ToolRun) -> (Timestamp, ToolOutcome) {
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
        let (first, times) = self
            .ran
            .entry(run.idempotency_key.clone())
            .or_insert_with(|| (run.clone(), 0));
        assert_eq!(first, run, "one key, one run");
        if want.ends != Ends::NotRun {
            *times += 1;
        }
        assert!(
            *times <= 1 || script::may_be_repeated(&run.name),
            "{} of {} ran twice",
            run.id,
            run.name
        );
        // As long as the result of a run of unknown outcome: a context that is full must not tell them apart.
        let text = format!("{:-<180}", format!("{id} of {}", run.name));
        let message = "the server is down".to_owned();
        let outcome = match want.ends {
            Ends::Well => ToolOutcome::Done { text },
            Ends::Badly => ToolOutcome::Failed { text },
            Ends::NotRun => ToolOutcome::Unavailable { message },
            // The repeat that its rule asks for is answered.
            Ends::Unknown if *times > 1 && run.name == "job__start" => ToolOutcome::Done { text },
            Ends::Unknown => ToolOutcome::Unknown { message },
        };
        (self.now + seconds(want.takes), outcome)
    }

    /// The loop is seen in this state: what the script has for it comes.
    pub(super) fn see(&mut self, view: &LoopView) {
        for (place, happening) in self.script.happenings.iter().enumerate() {
            if happening.turn == view.turn && happening.state == view.state && self.seen.insert(place) {
                self.coming
                    .insert((self.now + seconds(happening.after), place), *happening);
            }
        }
    }

    pub(super) fn next_happening(&self) -> Option<Timestamp> {
        self.coming.keys().next().map(|(at, _)| *at)
    }

    /// What has come by now. Each word is a level that a later worker hears too.
    pub(super) fn happen(&mut self) -> Option<Word> {
        let entry = self.coming.first_entry().filter(|entry| entry.key().0 <= self.now)?;
        let ((_, place), happening) = entry.remove_entry();
        let token = place.to_string();
        Some(match happening.what {
            What::Wake => {
                self.wake = Some(token.clone());
                Word::Wake(token)
            }
            What::Resume => {
                self.resume = Some(token.clone());
                Word::Resume(token)
            }
            What::TopUp => {
                self.budget.revision += 1;
                Word::Budget(self.budget.clone())
            }
            What::Notice(priority) => {
                let notice = Notification {
                    id: token,
                    source: "sensor/news".into(),
                    priority,
                    text: format!("notice {place}."),
                    at: self.now,
                };
                self.notices.push(notice.clone());
                Word::Notice(notice)
            }
            What::Outage => {
                self.link_lost = true;
                Word::LinkLost
            }
            What::LinkBack => {
                self.link_lost = false;
                Word::LinkBack
            }
            What::NewPod => {
                self.epoch += 1;
                Word::NewPod
            }
            What::Put(path, text) => {
                self.files.insert(path, (text, self.now));
                Word::Files
            }
            What::Remove(path) => {
                self.files.remove(path);
                Word::Files
            }
        })
    }
}

pub(super) fn seconds(seconds: i64) -> SignedDuration {
    SignedDuration::from_secs(seconds)
}

/// The event whose notification this is.
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
        notices: vec![SensedNotice { source, priority, text }],
        wakes: Vec::new(),
    }
}

fn failure(kind: FailureKind) -> CallFailure {
    CallFailure {
        kind,
        message: "what to do".into(),
        retry_after_milliseconds: None,
        resumes_at: None,
    }
}
