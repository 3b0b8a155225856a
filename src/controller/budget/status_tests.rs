//! A budget's status through its life: each condition trips at N, not at N-1, and recovers by its own rule.

mod texts;

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};

use super::accounts::{AccountBook, DocumentId, DocumentKind, DocumentPart};
use super::approval;
use super::facts::BudgetFacts;
use super::status::{BudgetStatusInput, compute, exhaustion, is_urgent};
use crate::api::amount::Amount;
use crate::api::budget::AgentBudgetStatus;
use crate::api::condition::{ConditionType, find};
use crate::api::{AgentBudget, NamespacedName};
use crate::ledger::account::{GrantRequest, LeaseHolder, LeaseStatement, LedgerTerms};
use crate::ledger::limits::limit_amounts;
use crate::ledger::window::WindowRule;
use crate::link::messages::{AccountRequest, LeaseRequest};

const START: Timestamp = Timestamp::constant(1_800_000_000, 0);
const HOME: &str = "agentloop-system";

fn at(seconds: i64) -> Timestamp {
    START + SignedDuration::from_secs(seconds)
}

fn tokens(tokens: i64) -> Amount {
    Amount { tokens, ..Amount::ZERO }
}

/// A budget with its account and the status as last written.
struct StatusHarness {
    budget: AgentBudget,
    book: AccountBook,
    status: AgentBudgetStatus,
}

impl StatusHarness {
    fn new(spec: &Value) -> Self {
        let mut all = json!({"limits": {"tokens": 1000}, "window": {"rolling": {"seconds": 3600}}});
        for (key, value) in spec.as_object().unwrap() {
            all[key] = value.clone();
        }
        let mut budget = AgentBudget::new("team", serde_json::from_value(all).unwrap());
        budget.metadata.namespace = Some("ns".into());
        budget.metadata.uid = Some("b".into());
        budget.metadata.generation = Some(1);
        let mut harness = Self {
            budget,
            book: AccountBook::default(),
            status: AgentBudgetStatus::default(),
        };
        let (document, terms) = (StatusHarness::document(), harness.terms());
        harness.book.load(&document, DocumentPart::Budget, terms, None, START);
        harness
    }

    fn document() -> DocumentId {
        DocumentId {
            kind: DocumentKind::Budget,
            object: NamespacedName::new("ns", "team"),
            uid: "b".into(),
        }
    }

    fn terms(&self) -> LedgerTerms {
        let spec = &self.budget.spec;
        LedgerTerms {
            limits: limit_amounts(&spec.limits).unwrap(),
            per_agent: spec
                .per_agent
                .as_ref()
                .map_or_else(Default::default, |limits| limit_amounts(limits).unwrap()),
            window: WindowRule::read(&spec.window).unwrap(),
        }
    }

    fn input(&self, seconds: i64) -> BudgetStatusInput<'_> {
        BudgetStatusInput {
            budget: &self.budget,
            old: &self.status,
            entry: Ok(self.book.entry("b").unwrap().1),
            agents: 2,
            problem: None,
            own_namespace: HOME,
            now: at(seconds),
        }
    }

    /// The status as it would be computed.
    fn look(&mut self, seconds: i64) -> AgentBudgetStatus {
        self.book.tick(at(seconds));
        compute(&self.input(seconds))
    }

    /// Writes the status with the records, as the record writer does.
    fn write(&mut self, seconds: i64) -> &AgentBudgetStatus {
        if let Some((id, amount)) = approval::approved(&self.budget, &self.status) {
            self.book.top_up("b", &id, amount, at(seconds));
        }
        let writes = self.book.compose(&Self::document(), at(seconds));
        let status = self.look(seconds);
        self.book.written(&Self::document(), &writes, at(seconds));
        self.status = status;
        &self.status
    }

    fn request(&mut self, agent: &str, part: AccountRequest, seconds: i64) -> bool {
        let holder = LeaseHolder {
            record: format!("record-of-{agent}"),
            agent: NamespacedName::new("ns", agent),
            pod_uid: agent.into(),
            epoch: 1,
        };
        let request = LeaseRequest {
            accounts: vec![part],
            ..LeaseRequest::default()
        };
        let pending = self.book.apply_request(&holder, |_| true, &request, at(seconds));
        self.book.response(&holder, &request, pending).accounts[0]
            .refused
            .is_none()
    }

    /// Requests room for a call. Returns whether there is room.
    fn ask(&mut self, agent: &str, least: i64, seconds: i64) -> bool {
        let ask = GrantRequest {
            lease: None,
            open: Amount::ZERO,
            least: tokens(least),
            full: tokens(least),
        };
        let part = AccountRequest {
            account: "b".into(),
            ask: Some(ask),
            ..AccountRequest::default()
        };
        self.request(agent, part, seconds)
    }

    /// Spends exactly this amount: requests, is granted, and closes its lease.
    fn spend(&mut self, agent: &str, lease: i64, amount: i64, seconds: i64) {
        assert!(self.ask(agent, amount, seconds), "there is room for {amount}");
        self.write(seconds);
        let statement = LeaseStatement {
            lease,
            spent: tokens(amount),
            returned: tokens(1_000_000),
            closed: true,
        };
        let part = AccountRequest {
            account: "b".into(),
            statements: vec![statement],
            ask: None,
        };
        self.request(agent, part, seconds);
        self.write(seconds);
    }

    fn edit(&mut self, change: &Value, seconds: i64) {
        let mut spec = serde_json::to_value(&self.budget.spec).unwrap();
        for (key, value) in change.as_object().unwrap() {
            spec[key] = value.clone();
        }
        self.budget.spec = serde_json::from_value(spec).unwrap();
        self.budget.metadata.generation = self.budget.metadata.generation.map(|generation| generation + 1);
        self.book.set_terms("b", self.terms(), at(seconds));
    }

    fn annotate(&mut self, annotations: &[(&str, &str)]) {
        let pairs = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        self.budget.metadata.annotations = Some(pairs.collect());
    }
}

fn condition(status: &AgentBudgetStatus, type_: ConditionType) -> &Condition {
    find(&status.conditions, type_).unwrap()
}

fn says(status: &AgentBudgetStatus, type_: ConditionType) -> (&str, &str) {
    // The condition of a limit that never applied is absent.
    find(&status.conditions, type_).map_or(("False", ""), |condition| (&condition.status, &condition.reason))
}

fn held(harness: &StatusHarness, seconds: i64) -> bool {
    exhaustion(&harness.input(seconds)).is_some_and(|spent| spent.held)
}

#[test]
fn a_fresh_budget_is_ready_and_shows_its_limits() {
    let mut harness = StatusHarness::new(&json!({"limits": {"tokens": 1000, "costUSD": "25.00"}}));
    let status = harness.write(0).clone();
    assert_eq!(says(&status, ConditionType::Ready), ("True", "Accepted"));
    assert_eq!(says(&status, ConditionType::Accepted), ("True", "Accepted"));
    assert!(find(&status.conditions, ConditionType::NearLimit).is_none());
    assert!(find(&status.conditions, ConditionType::Exhausted).is_none());
    assert!(find(&status.conditions, ConditionType::Stalled).is_none());
    let summary = status.summary.clone().unwrap();
    assert_eq!(
        (summary.window.as_str(), summary.limit.as_str(), summary.used.as_str()),
        ("1h", "1k tokens", "0")
    );
    assert_eq!((summary.used_percent.as_str(), summary.resets.as_str()), ("0%", ""));
    assert_eq!((status.observed_generation, status.agents), (Some(1), 2));
    assert_eq!(harness.look(1000), status, "nothing changed, so nothing is written");
}

#[test]
fn near_limit_trips_at_the_percentage_and_not_below() {
    let mut harness = StatusHarness::new(&json!({"warnAtPercent": 80}));
    harness.spend("a", 1, 799, 1);
    assert_eq!(says(&harness.status, ConditionType::NearLimit).0, "False");
    assert_eq!(harness.status.summary.clone().unwrap().used_percent, "79%");
    harness.spend("a", 2, 1, 2);
    assert_eq!(
        says(&harness.status, ConditionType::NearLimit),
        ("True", "WarnAtPercent")
    );
    assert_eq!(
        says(&harness.status, ConditionType::Ready).0,
        "True",
        "a warning needs no action yet"
    );
    let message = &condition(&harness.status, ConditionType::NearLimit).message;
    assert!(
        message.contains("800 tokens of 1000 tokens") && message.contains("kubectl patch"),
        "{message}"
    );
    harness.edit(&json!({"limits": {"tokens": 1001}}), 3);
    assert_eq!(
        says(harness.write(3), ConditionType::NearLimit).0,
        "False",
        "800 of 1001 are not 80 %"
    );
}

#[test]
fn exhausted_is_set_when_all_is_used_and_cleared_when_the_window_has_room() {
    let mut harness = StatusHarness::new(&json!({}));
    harness.spend("a", 1, 999, 1);
    assert_eq!(
        says(&harness.status, ConditionType::Exhausted).0,
        "False",
        "one token is left"
    );
    harness.spend("b", 2, 1, 2);
    let status = harness.status.clone();
    assert_eq!(says(&status, ConditionType::Exhausted), ("True", "NoRoom"));
    assert_eq!(
        says(&status, ConditionType::Ready),
        ("True", "Exhausted"),
        "the window frees room"
    );
    let message = &condition(&status, ConditionType::Exhausted).message;
    for part in [
        "1000 tokens of 1000 tokens used",
        "ns/a (999)",
        "Room is available again at 2027-01-15T",
        "kubectl patch agentbudgets.agentloop.dev -n ns team --type=json -p \
         '[{\"op\":\"add\",\"path\":\"/spec/topUps\",\"value\":[{\"id\":\"more-1\",\"tokens\":250}]}]'",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let top = status.top_agents.first().unwrap();
    assert_eq!((top.name.as_str(), top.tokens), ("a", 999));
    let resets = status.window.as_ref().unwrap().resets_at.clone().unwrap().0;
    let before = (resets - SignedDuration::from_secs(1)).duration_since(START).as_secs();
    harness.book.set_terms("b", harness.terms(), at(before));
    assert_eq!(says(&harness.look(before), ConditionType::Exhausted).0, "True");
    harness.book.set_terms("b", harness.terms(), at(before + 1));
    let status = harness.write(before + 1);
    assert_eq!(says(status, ConditionType::Exhausted).0, "False");
}

#[test]
fn a_refused_call_exhausts_what_is_left_until_there_is_room_for_it() {
    let mut harness = StatusHarness::new(&json!({}));
    harness.spend("a", 1, 950, 1);
    assert!(!harness.ask("b", 100, 2));
    let status = harness.write(2).clone();
    assert_eq!(says(&status, ConditionType::Exhausted).0, "True");
    assert!(is_urgent(&AgentBudgetStatus::default(), &status));
    harness.edit(&json!({"limits": {"tokens": 1049}}), 3);
    assert_eq!(
        says(&harness.look(3), ConditionType::Exhausted).0,
        "True",
        "99 are not 100"
    );
    harness.edit(&json!({"limits": {"tokens": 1050}}), 4);
    assert_eq!(says(harness.write(4), ConditionType::Exhausted).0, "False");
}

#[test]
fn a_condition_keeps_its_moment_until_it_turns() {
    let mut harness = StatusHarness::new(&json!({}));
    harness.spend("a", 1, 1000, 1);
    let since = condition(&harness.status, ConditionType::Exhausted)
        .last_transition_time
        .clone();
    let later = harness.look(100);
    assert_eq!(condition(&later, ConditionType::Exhausted).last_transition_time, since);
    assert!(!is_urgent(&harness.status, &later));
}

#[test]
fn the_next_leader_does_not_call_a_spent_budget_free_before_its_moment() {
    let mut harness = StatusHarness::new(&json!({}));
    harness.spend("a", 1, 950, 1);
    harness.ask("b", 100, 2);
    let record = harness.book.compose(&StatusHarness::document(), at(2)).remove(0).record;
    harness.status = harness.look(2);
    let resets = harness.status.window.clone().unwrap().resets_at.unwrap().0;
    let mut next = AccountBook::default();
    next.load(
        &StatusHarness::document(),
        DocumentPart::Budget,
        harness.terms(),
        Some(&record),
        at(3),
    );
    harness.book = next;
    assert_eq!(says(&harness.look(3), ConditionType::Exhausted).0, "True");
    let moment = resets.duration_since(START).as_secs();
    assert_eq!(says(&harness.look(moment), ConditionType::Exhausted).0, "False");
}

#[test]
fn a_lifetime_that_is_spent_needs_a_person() {
    let mut harness = StatusHarness::new(&json!({"window": {"lifetime": {}}}));
    harness.spend("a", 1, 1000, 1);
    let status = harness.status.clone();
    assert_eq!(says(&status, ConditionType::Ready), ("False", "Exhausted"));
    assert_eq!(says(&status, ConditionType::Stalled), ("True", "Exhausted"));
    assert_eq!(status.window.as_ref().unwrap().resets_at, None);
    let message = &condition(&status, ConditionType::Ready).message;
    assert!(message.contains("The budget does not reset"), "{message}");
    harness.book.top_up("b", "fire", tokens(1), at(2));
    let status = harness.write(2);
    assert_eq!(says(status, ConditionType::Ready).0, "True");
    assert!(find(&status.conditions, ConditionType::Stalled).is_none());
    assert_eq!(status.limits.unwrap().tokens, Some(1001));
}

#[test]
fn stop_holds_through_its_window_and_a_failover_until_more_is_added() {
    let mut harness = StatusHarness::new(&json!({"onExhausted": "Stop"}));
    assert!(!held(&harness, 0));
    harness.spend("a", 1, 1000, 1);
    assert!(held(&harness, 2));
    assert_eq!(says(&harness.status, ConditionType::Ready), ("False", "Exhausted"));
    assert_eq!(says(&harness.status, ConditionType::Exhausted).1, "Stopped");
    let record = harness.book.compose(&StatusHarness::document(), at(3)).remove(0).record;
    let mut next = AccountBook::default();
    next.load(
        &StatusHarness::document(),
        DocumentPart::Budget,
        harness.terms(),
        Some(&record),
        at(100_000),
    );
    harness.book = next;
    assert!(held(&harness, 100_000), "the window has ended and the stop still holds");
    harness.write(100_000);
    harness.edit(&json!({"limits": {"tokens": 900}}), 100_001);
    assert!(held(&harness, 100_001), "a lowered limit adds no room");
    harness.write(100_001);
    harness.edit(&json!({"limits": {"tokens": 901}}), 100_002);
    assert!(!held(&harness, 100_002), "a raise ends the stop");
    assert_eq!(says(harness.write(100_002), ConditionType::Exhausted).0, "False");
    assert!(!held(&harness, 100_003));
}

#[test]
fn on_exhausted_ask_opens_one_gate_and_its_approval_adds_once() {
    let mut harness = StatusHarness::new(&json!({"onExhausted": "Ask", "ask": {"topUp": {"tokens": 50}}}));
    harness.spend("a", 1, 1000, 1);
    let gate = harness.status.gates[0].clone();
    assert_eq!(gate.kind, "BudgetAsk");
    assert_eq!(
        says(&harness.status, ConditionType::Ready),
        ("True", "AwaitingApproval")
    );
    let message = condition(&harness.status, ConditionType::Exhausted).message.clone();
    let words = format!("agentloop.dev/approve={}:{}", gate.id, gate.arguments_hash);
    assert!(
        message.contains(&words) && message.contains("adds 50 tokens"),
        "{message}"
    );
    assert_eq!(
        harness.write(2).gates,
        std::slice::from_ref(&gate),
        "the gate stays the same"
    );
    let value = format!("{}:{}", gate.id, gate.arguments_hash);
    harness.annotate(&[(approval::APPROVE, &value)]);
    assert_eq!(
        approval::approved(&harness.budget, &harness.status),
        None,
        "the approver is missing"
    );
    harness.annotate(&[(approval::APPROVE, &value), (approval::APPROVED_BY, "ann")]);
    let status = harness.write(3).clone();
    assert_eq!(status.limits.unwrap().tokens, Some(1050));
    assert_eq!(status.gates, []);
    let handled = status.last_handled_requests.clone().unwrap();
    assert_eq!(
        (handled.approve.as_deref(), handled.approved_by.as_deref()),
        (Some(value.as_str()), Some("ann"))
    );
    assert_eq!(says(&status, ConditionType::Exhausted).0, "False");
    assert_eq!(
        harness.write(4).limits.unwrap().tokens,
        Some(1050),
        "the annotation is still there"
    );
    harness.spend("a", 2, 50, 5);
    let second = harness.status.gates[0].clone();
    assert_ne!(second.id, gate.id, "a new gate, which the old answer does not apply to");
    assert_eq!(harness.write(6).limits.unwrap().tokens, Some(1050));
}

#[test]
fn an_approval_of_other_terms_is_none() {
    let mut harness = StatusHarness::new(&json!({"onExhausted": "Ask", "ask": {"topUp": {"tokens": 50}}}));
    harness.spend("a", 1, 1000, 1);
    let gate = harness.status.gates[0].clone();
    let value = format!("{}:{}", gate.id, gate.arguments_hash);
    harness.annotate(&[(approval::APPROVE, &value), (approval::APPROVED_BY, "ann")]);
    harness.edit(&json!({"ask": {"topUp": {"tokens": 1_000_000}}}), 2);
    let status = harness.write(2);
    assert_eq!(status.limits.unwrap().tokens, Some(1000));
    assert_ne!(
        status.gates[0].arguments_hash, gate.arguments_hash,
        "a new gate is opened"
    );
    harness.annotate(&[(approval::APPROVE, "ask-0:0000"), (approval::APPROVED_BY, "ann")]);
    assert_eq!(harness.write(3).limits.unwrap().tokens, Some(1000));
}

#[test]
fn a_denied_gate_waits_for_its_window_and_reopens_only_at_the_next_exhaustion() {
    let mut harness = StatusHarness::new(&json!({"onExhausted": "Ask"}));
    harness.spend("a", 1, 1000, 1);
    let gate = harness.status.gates[0].clone();
    harness.annotate(&[(approval::DENY, &gate.id)]);
    let status = harness.write(2).clone();
    assert_eq!(status.gates, []);
    assert_eq!(
        status.last_handled_requests.unwrap().deny.as_deref(),
        Some(gate.id.as_str())
    );
    assert_eq!(status.limits.unwrap().tokens, Some(1000));
    assert_eq!(says(&harness.status, ConditionType::Ready), ("True", "Exhausted"));
    assert_eq!(harness.write(3).gates, [], "it does not ask again");
    harness.edit(&json!({"limits": {"tokens": 1010}}), 4);
    harness.write(4);
    harness.spend("a", 2, 10, 5);
    assert_eq!(harness.status.gates.len(), 1, "exhausted again, it asks again");
}

#[test]
fn the_default_top_up_offer_is_a_quarter_of_the_limit() {
    let harness = StatusHarness::new(&json!({"onExhausted": "Ask", "limits": {"tokens": 1000, "costUSD": "2.00"}}));
    let offer = approval::offer(&harness.budget);
    assert_eq!((offer.tokens, offer.cost, offer.calls), (250, 500_000, 0));
}

#[test]
fn a_platform_budget_outside_the_controllers_namespace_is_refused_and_selects_no_agent() {
    let spec = json!({"selector": {}, "namespaceSelector": {}});
    let mut harness = StatusHarness::new(&spec);
    let status = harness.write(0).clone();
    assert_eq!(
        says(&status, ConditionType::Accepted),
        ("False", "NamespaceSelectorRefused")
    );
    assert_eq!(says(&status, ConditionType::Stalled).0, "True");
    harness.budget.metadata.namespace = Some(HOME.into());
    let status = compute(&harness.input(1));
    assert_eq!(says(&status, ConditionType::Accepted).0, "True");
    assert!(find(&status.conditions, ConditionType::Stalled).is_none());
}

#[test]
fn an_invalid_spec_is_reported_and_shows_no_figures() {
    let harness = StatusHarness::new(&json!({}));
    let input = BudgetStatusInput {
        entry: Err(
            "spec.window.calendar.timeZone Mars/Base is not an IANA time zone: use for example Europe/Berlin or UTC",
        ),
        ..harness.input(0)
    };
    let status = compute(&input);
    assert_eq!(says(&status, ConditionType::Accepted), ("False", "InvalidSpec"));
    assert_eq!(says(&status, ConditionType::Ready), ("False", "InvalidSpec"));
    assert!(condition(&status, ConditionType::Ready).message.contains("Mars/Base"));
    assert_eq!((status.limits, status.summary), (None, None));
}

#[test]
fn a_limit_of_zero_reports_that_it_blocks_everything_until_it_is_raised() {
    for action in ["Pause", "Ask", "Stop"] {
        let mut harness = StatusHarness::new(&json!({"limits": {"calls": 5, "tokens": 0}, "onExhausted": action}));
        let status = harness.write(0).clone();
        assert_eq!(says(&status, ConditionType::Exhausted), ("True", "BlocksEverything"));
        assert_eq!(says(&status, ConditionType::Ready), ("False", "BlocksEverything"));
        assert_eq!(says(&status, ConditionType::NearLimit).0, "False");
        assert_eq!((status.gates.len(), held(&harness, 1)), (0, false), "{action}");
        let message = &condition(&status, ConditionType::Exhausted).message;
        assert!(
            message.starts_with("spec.limits.tokens is 0, which blocks every call: raise it, or remove it")
                && message.contains("\"tokens\":1}"),
            "{message}"
        );
        harness.edit(&json!({"limits": {"calls": 5, "tokens": 1}}), 1);
        assert_eq!(
            says(harness.write(1), ConditionType::Ready),
            ("True", "Accepted"),
            "{action}"
        );
        harness.edit(&json!({"perAgent": {"costUSD": "0"}}), 2);
        let message = condition(harness.write(2), ConditionType::Ready).message.clone();
        assert!(
            message.starts_with("spec.perAgent.costUSD is 0, which blocks every call of every Agent"),
            "{message}"
        );
        harness.edit(&json!({"perAgent": null}), 3);
        assert_eq!(
            says(harness.write(3), ConditionType::Ready),
            ("True", "Accepted"),
            "{action}"
        );
    }
}

#[test]
fn a_top_up_of_an_unlimited_kind_is_reported_to_add_nothing() {
    let mut harness =
        StatusHarness::new(&json!({"topUps": [{"id": "a", "tokens": 1}, {"id": "b", "tokens": 1, "costUSD": "1"}]}));
    let message = |status: &AgentBudgetStatus| condition(status, ConditionType::Accepted).message.clone();
    assert_eq!(
        message(harness.write(0)),
        "the spec is valid. spec.topUps[b].costUSD adds nothing: spec.limits has no costUSD"
    );
    harness.edit(&json!({"limits": {"tokens": 1000, "costUSD": "0.50"}}), 1);
    assert_eq!(message(harness.write(1)), "the spec is valid");
}

#[test]
fn an_unparseable_selector_is_reported_on_the_budget() {
    let broken = json!({"matchExpressions": [{"key": "team", "operator": "In"}]});
    let harness = StatusHarness::new(&json!({"selector": broken}));
    let facts = BudgetFacts::of(&Arc::new(harness.budget.clone()));
    let input = BudgetStatusInput {
        entry: Err(facts.problem().unwrap()),
        ..harness.input(0)
    };
    let status = compute(&input);
    assert_eq!(says(&status, ConditionType::Ready), ("False", "InvalidSpec"));
    let message = &condition(&status, ConditionType::Accepted).message;
    assert!(
        message.starts_with("spec.selector.matchExpressions: ") && message.contains("need values"),
        "{message}"
    );
}

#[test]
fn a_second_top_up_is_appended() {
    let mut harness = StatusHarness::new(&json!({"topUps": [{"id": "more-2", "tokens": 5}]}));
    harness.spend("a", 1, 1000, 1);
    let message = &condition(&harness.status, ConditionType::Exhausted).message;
    assert!(
        message.contains("\"path\":\"/spec/topUps/-\",\"value\":{\"id\":\"more-3\""),
        "{message}"
    );
}

#[test]
fn a_refused_record_is_reported_until_one_is_written() {
    let mut harness = StatusHarness::new(&json!({}));
    harness.write(0);
    let message = "admission webhook \"policy\" denied the request";
    let input = BudgetStatusInput {
        problem: Some(message),
        ..harness.input(1)
    };
    let status = compute(&input);
    for (type_, holds) in [(ConditionType::Ready, "False"), (ConditionType::Stalled, "True")] {
        assert_eq!(says(&status, type_), (holds, "RecordRefused"));
        assert!(condition(&status, type_).message.contains(message));
    }
    harness.status = status;
    assert_eq!(says(harness.write(2), ConditionType::Ready), ("True", "Accepted"));
}
