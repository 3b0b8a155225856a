//! Validates the scripts of scripted models: outside the reconciler, one at a time, and each text only once.
//!
//! The author of a ConfigMap determines how long such a check takes. It may delay other scripts, but never the leader.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::validate::script;
use crate::support::hash::sha256;

/// Limit of cached verdicts. When it is reached, all are dropped; scripts still in use are then checked again once.
const MAX_VERDICTS: usize = 1024;

/// The parse error of a script, if any.
pub(super) type ScriptVerdict = Result<(), String>;

/// The cached verdicts, by the SHA-256 of the script.
pub(super) struct ScriptChecker {
    verdicts: Mutex<HashMap<[u8; 32], ScriptVerdict>>,
    /// Permits one check at a time.
    turn: Arc<Semaphore>,
}

impl ScriptChecker {
    pub(super) fn new() -> Self {
        Self {
            verdicts: Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
        }
    }

    /// Parses the script, or returns the cached verdict.
    pub(super) async fn check(&self, text: String) -> ScriptVerdict {
        let key = sha256(&text);
        if let Some(known) = self.known(&key) {
            return known;
        }
        let turn = self.turn.clone().acquire_owned().await;
        if let Some(known) = self.known(&key) {
            return known;
        }
        // The blocking task owns the permit, so that a cancelled caller does not let a second check start.
        let check = spawn_blocking(move || {
            let verdict = script(&text);
            drop(turn);
            verdict
        });
        let Ok(verdict) = check.await else {
            // Only during shutdown.
            return Err("the check was aborted".into());
        };
        let mut verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        if verdicts.len() >= MAX_VERDICTS {
            verdicts.clear();
        }
        verdicts.insert(key, verdict.clone());
        verdict
    }

    fn known(&self, key: &[u8; 32]) -> Option<ScriptVerdict> {
        self.verdicts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_verdict_is_kept_by_the_text_and_the_store_is_bounded() {
        let scripts = ScriptChecker::new();
        let kept = || scripts.verdicts.lock().unwrap().len();
        let good = "turns: [{text: a}]";
        assert_eq!(scripts.check(good.into()).await, Ok(()));
        assert_eq!(scripts.check(good.into()).await, Ok(()));
        assert_eq!(kept(), 1);
        let bad = scripts.check("turns: []".into()).await.unwrap_err();
        assert!(bad.contains("turns: has 0 entries"), "{bad}");
        for number in kept()..MAX_VERDICTS {
            assert_eq!(scripts.check(format!("turns: [{{text: t{number}}}]")).await, Ok(()));
        }
        assert_eq!(kept(), MAX_VERDICTS);
        assert_eq!(scripts.check("turns: [{text: one more}]".into()).await, Ok(()));
        assert_eq!(kept(), 1);
    }

    #[tokio::test]
    async fn one_script_is_checked_at_a_time_and_known_ones_do_not_wait() {
        let scripts = ScriptChecker::new();
        let known = "turns: [{text: a}]".to_owned();
        scripts.check(known.clone()).await.unwrap();
        let turn = scripts.turn.clone().acquire_owned().await.unwrap();
        scripts.check(known).await.unwrap();
        let mut waiting = Box::pin(scripts.check("turns: [{text: b}]".into()));
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(turn);
        assert_eq!(waiting.await, Ok(()));
    }
}
