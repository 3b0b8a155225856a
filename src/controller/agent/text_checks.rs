//! Validates texts that are long to parse, scripts of scripted models, approval conditions and schemas: outside the reconciler, one at
//! a time, and each text only once.
//!
//! The author of a text determines how long its check takes. It may delay checks of its namespace, and one of each other namespace,
//! but never the leader.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::goal_spec;
use super::validate::{approval_conditions, approval_conditions_text, response_schema, response_schema_text, script};
use crate::api::AgentSpec;
use crate::support::hash::sha256;

/// Limit of cached verdicts. When it is reached, all of the namespace that has had the most checked are dropped; the texts still in use
/// are then checked again once.
const MAX_VERDICTS: usize = 1024;

/// The first error of a text, if any.
pub(super) type TextVerdict = Result<(), String>;

/// What a text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextKind {
    /// A script of the scripted model.
    Script,
    /// The approval conditions of an Agent, see [`approval_conditions`].
    ApprovalConditions,
    /// `spec.task.responseSchema` as JSON.
    ResponseSchema,
    /// `spec.goal` as JSON.
    Goal,
}

impl TextKind {
    /// The texts of a spec itself that are checked, in the order in which their errors are reported.
    pub(super) fn of_spec(spec: &AgentSpec) -> impl Iterator<Item = (Self, String)> {
        let texts = [
            (Self::ApprovalConditions, approval_conditions_text(&spec.tools)),
            (Self::ResponseSchema, response_schema_text(spec)),
            (Self::Goal, goal_spec::text(spec)),
        ];
        texts.into_iter().filter_map(|(kind, text)| Some((kind, text?)))
    }

    /// Checks a text of this kind, which may take long.
    pub(super) fn verdict(self, text: &str) -> TextVerdict {
        match self {
            Self::Script => script(text),
            Self::ApprovalConditions => approval_conditions(text),
            Self::ResponseSchema => response_schema(text),
            Self::Goal => goal_spec::check(text),
        }
    }

    fn key(self, text: &str) -> [u8; 32] {
        match self {
            Self::Script => sha256(text),
            Self::ApprovalConditions => sha256(format!("approval conditions {text}")),
            Self::ResponseSchema => sha256(format!("response schema {text}")),
            Self::Goal => sha256(format!("goal {text}")),
        }
    }
}

/// The cached verdicts.
pub(super) struct TextChecker {
    verdicts: Mutex<HashMap<VerdictKey, KnownVerdict>>,
    /// Permits one check at a time.
    turn: Arc<Semaphore>,
    /// One lock for each namespace with checks: one check of a namespace at a time waits for the turn.
    namespaces: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

/// The SHA-256 of the text: a text that many namespaces have is checked and kept once.
type VerdictKey = [u8; 32];

struct KnownVerdict {
    verdict: TextVerdict,
    /// The namespace for which the text was checked; it counts for this one alone.
    namespace: String,
}

impl TextChecker {
    pub(super) fn new() -> Self {
        Self {
            verdicts: Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
            namespaces: Mutex::default(),
        }
    }

    /// Parses the text of an object in this namespace, or returns the cached verdict.
    pub(super) async fn check(&self, namespace: &str, kind: TextKind, text: String) -> TextVerdict {
        let key = kind.key(&text);
        if let Some(known) = self.known(&key) {
            return known;
        }
        let lock = self.lock_of(namespace);
        let _first = lock.lock().await;
        if let Some(known) = self.known(&key) {
            return known;
        }
        let turn = self.turn.clone().acquire_owned().await;
        if let Some(known) = self.known(&key) {
            return known;
        }
        // The blocking task owns the permit, so that a cancelled caller does not let a second check start.
        let check = spawn_blocking(move || {
            let verdict = kind.verdict(&text);
            drop(turn);
            verdict
        });
        let Ok(verdict) = check.await else {
            // Only during shutdown.
            return Err("the check was aborted".into());
        };
        let mut verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        if verdicts.len() >= MAX_VERDICTS {
            let most = namespace_with_most(&verdicts);
            verdicts.retain(|_, known| Some(&known.namespace) != most.as_ref());
        }
        let known = KnownVerdict {
            verdict: verdict.clone(),
            namespace: namespace.to_owned(),
        };
        verdicts.insert(key, known);
        verdict
    }

    fn lock_of(&self, namespace: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut namespaces = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        namespaces.retain(|_, lock| Arc::strong_count(lock) > 1);
        namespaces.entry(namespace.to_owned()).or_default().clone()
    }

    fn known(&self, key: &VerdictKey) -> Option<TextVerdict> {
        self.verdicts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .map(|known| known.verdict.clone())
    }
}

fn namespace_with_most(verdicts: &HashMap<VerdictKey, KnownVerdict>) -> Option<String> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for known in verdicts.values() {
        *counts.entry(&known.namespace).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    most.map(|(namespace, _)| namespace.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[tokio::test]
    async fn a_verdict_is_kept_by_the_text_and_the_store_is_bounded() {
        let scripts = TextChecker::new();
        let kept = || scripts.verdicts.lock().unwrap().len();
        let good = "turns: [{text: a}]";
        assert_eq!(scripts.check("ns", TextKind::Script, good.into()).await, Ok(()));
        assert_eq!(scripts.check("ns", TextKind::Script, good.into()).await, Ok(()));
        assert_eq!(kept(), 1);
        let bad = scripts
            .check("ns", TextKind::Script, "turns: []".into())
            .await
            .unwrap_err();
        assert!(bad.contains("turns: has 0 entries"), "{bad}");
        for number in kept()..MAX_VERDICTS {
            assert_eq!(
                scripts
                    .check("ns", TextKind::Script, format!("turns: [{{text: t{number}}}]"))
                    .await,
                Ok(())
            );
        }
        assert_eq!(kept(), MAX_VERDICTS);
        assert_eq!(
            scripts
                .check("ns", TextKind::Script, "turns: [{text: one more}]".into())
                .await,
            Ok(())
        );
        assert_eq!(kept(), 1);
    }

    #[tokio::test]
    async fn scripts_are_checked_one_at_a_time_and_known_ones_do_not_wait() {
        let scripts = TextChecker::new();
        let known = "turns: [{text: a}]".to_owned();
        scripts.check("ns", TextKind::Script, known.clone()).await.unwrap();
        let turn = scripts.turn.clone().acquire_owned().await.unwrap();
        scripts.check("ns", TextKind::Script, known).await.unwrap();
        let mut waiting = Box::pin(scripts.check("ns", TextKind::Script, "turns: [{text: b}]".into()));
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(turn);
        assert_eq!(waiting.await, Ok(()));
    }

    #[tokio::test]
    async fn many_texts_of_a_namespace_neither_delay_those_of_another_nor_displace_their_verdicts() {
        let checks = Arc::new(TextChecker::new());
        let script = |number: usize| format!("turns: [{{text: t{number}}}]");
        checks.check("quiet", TextKind::Script, script(0)).await.unwrap();
        for number in 1..=MAX_VERDICTS {
            checks.check("noisy", TextKind::Script, script(number)).await.unwrap();
        }
        let kept = |namespace: &str| {
            let verdicts = checks.verdicts.lock().unwrap();
            verdicts.values().filter(|known| known.namespace == namespace).count()
        };
        assert_eq!((kept("quiet"), kept("noisy")), (1, 1));
        // One check is being made, and one of a namespace waits for the next turn.
        let turn = checks.turn.clone().acquire_owned().await.unwrap();
        let mut noisy: Vec<_> = (0..10)
            .map(|number| Box::pin(checks.check("noisy", TextKind::Script, script(5_000 + number))))
            .collect();
        for waiting in &mut noisy {
            assert!(futures::poll!(waiting).is_pending());
        }
        let mut quiet = Box::pin(checks.check("quiet", TextKind::Script, script(9_000)));
        assert!(futures::poll!(&mut quiet).is_pending());
        drop(turn);
        noisy.remove(0).await.unwrap();
        quiet.await.unwrap();
        assert_eq!(
            (kept("quiet"), kept("noisy")),
            (2, 2),
            "before the others of the noisy one"
        );
    }

    #[tokio::test]
    async fn a_text_of_many_namespaces_is_parsed_once() {
        let checks = TextChecker::new();
        let text = "turns: [{text: shared}]";
        checks.check("ns-0", TextKind::Script, text.into()).await.unwrap();
        // No text can be parsed now.
        let _turn = checks.turn.clone().acquire_owned().await.unwrap();
        for _ in 0..2 {
            for number in 0..1_500 {
                let namespace = format!("ns-{number}");
                let mut check = Box::pin(checks.check(&namespace, TextKind::Script, text.into()));
                assert_eq!(
                    futures::poll!(&mut check),
                    std::task::Poll::Ready(Ok(())),
                    "{namespace}"
                );
            }
        }
        assert_eq!(checks.verdicts.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn approval_conditions_are_checked_together_and_the_first_error_names_its_field() {
        let checks = TextChecker::new();
        let check = |conditions: Value| checks.check("ns", TextKind::ApprovalConditions, conditions.to_string());
        let good = json!([["a", "arguments.amount > 100"], ["b", "arguments.to != 'me'"]]);
        assert_eq!(check(good).await, Ok(()));
        let bad = json!([["a", "arguments.amount > 100"], ["b", "payload.amount > 1"], ["c", ")"]]);
        assert_eq!(
            check(bad).await,
            Err("b refers to unknown variable payload: use arguments".into())
        );
        let pattern = |count: usize| vec!["arguments.text.matches('x')"; count].join(" || ");
        let shared = json!([["a", pattern(20)], ["b", pattern(13)]]);
        let error = check(shared).await.unwrap_err();
        assert!(error.starts_with("b calls matches too often"), "{error}");
        let many = |count: usize| Value::from(vec![json!(["a", "true"]); count]);
        assert_eq!(check(many(32)).await, Ok(()));
        let error = check(many(33)).await.unwrap_err();
        assert_eq!(
            error,
            "spec.tools has 33 approval conditions, and 32 are allowed: remove some, or join them with ||"
        );
    }
}
