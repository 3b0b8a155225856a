//! Presents budgets: status, Events, and the holds of exhausted ones. Implements [`super::view::BudgetPresentation`],
//! the ledger's interface to it.

use kube::Resource;
use serde_json::{Map, Value};

use super::approval;
use super::events;
use super::status::{self, BudgetStatusInput};
use super::view::{BudgetHold, BudgetPresentation, BudgetView};
use crate::api::AgentBudget;
use crate::api::amount::Amount;
use crate::api::budget::{AgentBudgetStatus, OnExhausted};
use crate::api::condition::{ConditionType, find};
use crate::api::failure::{CallFailure, FailureKind};
use crate::controller::runtime::EventSink;
use crate::link::messages::LimitName;

pub struct BudgetPresenter {
    own_namespace: String,
    events: EventSink,
}

impl BudgetPresenter {
    #[must_use]
    pub fn new(own_namespace: &str, events: EventSink) -> Self {
        Self {
            own_namespace: own_namespace.into(),
            events,
        }
    }

    fn input<'a>(&'a self, view: &BudgetView<'a>, old: &'a AgentBudgetStatus) -> BudgetStatusInput<'a> {
        BudgetStatusInput {
            budget: view.budget,
            old,
            entry: view.entry,
            agents: view.agents,
            problem: view.problem,
            own_namespace: &self.own_namespace,
            now: view.now,
        }
    }
}

fn read(shown: &Map<String, Value>) -> AgentBudgetStatus {
    // A status that this version cannot parse is replaced as a whole.
    serde_json::from_value(Value::Object(shown.clone())).unwrap_or_default()
}

impl BudgetPresentation for BudgetPresenter {
    fn status(&self, view: &BudgetView<'_>) -> Map<String, Value> {
        let old = read(view.shown);
        let new = status::compute(&self.input(view, &old));
        match serde_json::to_value(&new) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) | Err(_) => view.shown.clone(),
        }
    }

    fn is_urgent(&self, view: &BudgetView<'_>) -> bool {
        let old = read(view.shown);
        status::is_urgent(&old, &status::compute(&self.input(view, &old)))
    }

    fn approved(&self, view: &BudgetView<'_>) -> Option<(String, Amount)> {
        (view.budget.spec.on_exhausted == OnExhausted::Ask)
            .then(|| approval::approved(view.budget, &read(view.shown)))
            .flatten()
    }

    fn hold(&self, view: &BudgetView<'_>, name: &LimitName) -> Option<BudgetHold> {
        if view.budget.spec.on_exhausted == OnExhausted::Pause {
            return None;
        }
        let old = read(view.shown);
        let spent = status::exhaustion(&self.input(view, &old))?;
        let name = match name {
            LimitName::Budget(name) => name.as_str(),
            LimitName::TokensPerHour | LimitName::Total => return None,
        };
        if spent.held {
            let message = format!(
                "AgentBudget {name} is exhausted and its onExhausted is Stop: raise its spec.limits or append to its \
                 spec.topUps"
            );
            return Some(BudgetHold {
                failure: CallFailure::new(FailureKind::BudgetExhausted, message),
                cut: true,
            });
        }
        let gate = old.gates.first()?;
        let message = format!(
            "AgentBudget {name} is exhausted and asks for a top-up: answer its gate {} (see kubectl describe \
             agentbudgets.agentloop.dev)",
            gate.id
        );
        Some(BudgetHold {
            failure: CallFailure {
                resumes_at: spent.resets_at,
                ..CallFailure::new(FailureKind::BudgetAsk, message)
            },
            cut: false,
        })
    }

    fn written(&self, budget: &AgentBudget, before: &Map<String, Value>, after: &Map<String, Value>) {
        let (before, after) = (read(before), read(after));
        let notices = events::from_status(budget, &before, &after);
        if let Some(first) = notices.first() {
            let exhausted =
                find(&after.conditions, ConditionType::Exhausted).map(|condition| condition.status.as_str());
            tracing::info!(
                namespace = budget.metadata.namespace,
                budget = budget.metadata.name,
                reason = first.reason,
                exhausted,
                "budget state changed"
            );
        }
        self.events.send(notices, &budget.object_ref(&()));
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::api::NamespacedName;
    use crate::api::amount::LimitAmounts;
    use crate::controller::budget::accounts::{AccountBook, DocumentId, DocumentKind, DocumentPart};
    use crate::controller::budget::maintenance_tests::asking_for;
    use crate::controller::runtime::EventQueue;
    use crate::ledger::account::{LeaseHolder, LedgerTerms};
    use crate::ledger::window::WindowRule;

    const NOW: Timestamp = Timestamp::constant(1_800_000_000, 0);

    struct PresenterHarness {
        presenter: BudgetPresenter,
        events: EventQueue,
        budget: AgentBudget,
        book: AccountBook,
        shown: Map<String, Value>,
    }

    impl PresenterHarness {
        /// A budget of 10 tokens; `spent`: 9 are used and a call of 5 was refused.
        fn new(on_exhausted: &str, spent: bool) -> Self {
            let (sink, events) = EventSink::new();
            let spec = json!({"limits": {"tokens": 10}, "window": {"lifetime": {}}, "onExhausted": on_exhausted});
            let mut budget = AgentBudget::new("team", serde_json::from_value(spec).unwrap());
            budget.metadata.namespace = Some("ns".into());
            budget.metadata.uid = Some("b".into());
            let mut harness = Self {
                presenter: BudgetPresenter::new("system", sink),
                events,
                budget,
                book: AccountBook::default(),
                shown: Map::new(),
            };
            let document = DocumentId {
                kind: DocumentKind::Budget,
                object: NamespacedName::new("ns", "team"),
                uid: "b".into(),
            };
            let limits = |tokens| LimitAmounts {
                tokens: Some(tokens),
                ..LimitAmounts::default()
            };
            let terms = LedgerTerms {
                limits: limits(10),
                per_agent: LimitAmounts::default(),
                window: WindowRule::Lifetime,
            };
            harness.book.load(&document, DocumentPart::Budget, terms, None, NOW);
            if spent {
                harness.ask("one", 9);
                harness.book.forfeit("b", "one", NOW);
                harness.ask("two", 5);
            }
            harness
        }

        fn ask(&mut self, record: &str, tokens: i64) {
            let request = asking_for(Amount { tokens, ..Amount::ZERO });
            let holder = LeaseHolder {
                record: record.into(),
                ..LeaseHolder::default()
            };
            self.book.apply_request(&holder, |_| true, &request, NOW);
        }

        fn view(&self) -> BudgetView<'_> {
            BudgetView {
                budget: &self.budget,
                shown: &self.shown,
                entry: Ok(self.book.entry("b").unwrap().1),
                agents: 1,
                problem: None,
                now: NOW,
            }
        }

        fn write(&mut self) -> Map<String, Value> {
            let after = self.presenter.status(&self.view());
            std::mem::replace(&mut self.shown, after)
        }

        fn held(&self, name: &LimitName) -> Option<BudgetHold> {
            self.presenter.hold(&self.view(), name)
        }
    }

    fn team() -> LimitName {
        LimitName::Budget("team".into())
    }

    #[test]
    fn a_pause_holds_nothing_since_the_account_itself_refuses() {
        let mut harness = PresenterHarness::new("Pause", true);
        harness.write();
        assert_eq!(harness.held(&team()), None);
    }

    #[test]
    fn a_stop_holds_and_cuts_from_the_moment_it_is_spent() {
        assert_eq!(PresenterHarness::new("Stop", false).held(&team()), None);
        let harness = PresenterHarness::new("Stop", true);
        let held = harness.held(&team()).unwrap();
        assert!(held.cut, "holds even before the status is written");
        assert_eq!(
            (held.failure.kind, held.failure.resumes_at),
            (FailureKind::BudgetExhausted, None)
        );
        assert!(
            held.failure
                .message
                .starts_with("AgentBudget team is exhausted and its onExhausted is Stop")
        );
        assert_eq!(
            harness.held(&LimitName::Total),
            None,
            "the Agent's own limits are never held"
        );
    }

    #[test]
    fn a_question_holds_once_it_can_be_answered_and_names_its_gate() {
        let mut harness = PresenterHarness::new("Ask", true);
        assert_eq!(
            harness.held(&team()),
            None,
            "a gate cannot be answered before it is written"
        );
        harness.write();
        let held = harness.held(&team()).unwrap();
        assert_eq!((held.cut, held.failure.kind), (false, FailureKind::BudgetAsk));
        let gate = read(&harness.shown).gates[0].clone();
        assert!(held.failure.message.contains(&format!("answer its gate {}", gate.id)));
        assert_eq!(harness.presenter.approved(&harness.view()), None);
        let value = format!("{}:{}", gate.id, gate.arguments_hash);
        let annotations = [(approval::APPROVE, value.as_str()), (approval::APPROVED_BY, "ann")];
        let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned()));
        harness.budget.metadata.annotations = Some(annotations.into());
        let (id, amount) = harness.presenter.approved(&harness.view()).unwrap();
        assert_eq!((id, amount.tokens), (format!("gate/{}", gate.id), 3), "a quarter of 10");
        harness.budget.spec.on_exhausted = OnExhausted::Pause;
        assert_eq!(
            harness.presenter.approved(&harness.view()),
            None,
            "the budget no longer asks"
        );
    }

    #[test]
    fn a_status_is_urgent_only_if_more_than_counters_changed() {
        let mut harness = PresenterHarness::new("Pause", false);
        assert!(
            harness.presenter.is_urgent(&harness.view()),
            "no status was written yet"
        );
        harness.write();
        assert!(!harness.presenter.is_urgent(&harness.view()));
        harness.ask("one", 9);
        assert_eq!(
            harness.presenter.status(&harness.view())["reserved"],
            json!({"tokens": 9})
        );
        assert!(
            !harness.presenter.is_urgent(&harness.view()),
            "counters alone are not urgent"
        );
        harness.ask("two", 11);
        harness.book.forfeit("b", "one", NOW);
        harness.ask("two", 5);
        assert!(harness.presenter.is_urgent(&harness.view()), "exhaustion is urgent");
    }

    #[test]
    fn an_unreadable_status_is_rewritten() {
        let mut harness = PresenterHarness::new("Pause", false);
        let fresh = harness.presenter.status(&harness.view());
        harness.shown.insert("conditions".into(), json!("of another version"));
        assert_eq!(harness.presenter.status(&harness.view()), fresh);
    }

    #[test]
    fn a_written_status_causes_events_about_the_budget() {
        let mut harness = PresenterHarness::new("Pause", true);
        let before = harness.write();
        harness.presenter.written(&harness.budget, &before, &harness.shown);
        let mut told = Vec::new();
        while let Some((notice, about)) = harness.events.try_recv() {
            assert_eq!(
                (about.kind.as_deref(), about.name.as_deref()),
                (Some("AgentBudget"), Some("team"))
            );
            told.push(notice.reason);
        }
        assert_eq!(told, ["NearLimit", "Exhausted"]);
        harness
            .presenter
            .written(&harness.budget, &harness.shown, &harness.shown);
        assert!(harness.events.try_recv().is_none());
    }
}
