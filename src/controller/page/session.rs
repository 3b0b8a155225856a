//! The sessions of users who have signed in to the page: in memory, bounded, and without their tokens.
//!
//! A session is known by a random id, which only the user's browser has: the table has its hash. What a user may see is asked
//! again every minute, so a session keeps who the user is, and not the token.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::UserInfo;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::rights::{AT_ONCE, KnownRights};
use super::streams::tenant;
use crate::support::hash::{BYTES, sha256};
use crate::support::random::random_hex;

/// A session that is not used for this long has ended. An open page uses it.
pub const IDLE: Duration = Duration::from_mins(15);
/// The longest duration of a session. To continue, a user must be identified again, as for a stream of events.
pub const MAX_SESSION: Duration = Duration::from_hours(1);
/// Maximum number of sessions; beyond them, the oldest ends of a tenant who has the most.
pub const MAX_SESSIONS: usize = 64;
/// Maximum number of sessions of one user; beyond them, the user's oldest ends.
pub const MAX_SESSIONS_OF_ONE: usize = 4;

/// Why there is no new session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionRefusal {
    /// The token has expired since it was reviewed.
    Expired,
    /// No id could be drawn.
    NoRandom,
}

/// A user who has signed in.
pub(super) struct PageSession {
    pub(super) user: UserInfo,
    /// What the user may see, as it was asked last.
    pub(super) rights: tokio::sync::Mutex<KnownRights>,
    /// Questions that the page may ask at once, about all users.
    pub(super) questions: Arc<Semaphore>,
    /// Ends with the session, when it is removed before its time.
    pub(super) ended: CancellationToken,
    pub(super) ends: Instant,
    began: Instant,
    used: Mutex<Instant>,
}

impl PageSession {
    /// Name of the user.
    pub(super) fn name(&self) -> &str {
        self.user.username.as_deref().unwrap_or_default()
    }

    /// Records that the session is used.
    pub(super) fn touch(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn is_over(&self, now: Instant) -> bool {
        let used = *self.used.lock().unwrap_or_else(PoisonError::into_inner);
        now >= self.ends || now.duration_since(used) >= IDLE
    }
}

/// All sessions, by the hash of their ids.
type Sessions = HashMap<[u8; BYTES], Arc<PageSession>>;

pub(super) struct PageSessionTable {
    sessions: Mutex<Sessions>,
    questions: Arc<Semaphore>,
}

impl Default for PageSessionTable {
    fn default() -> Self {
        Self {
            sessions: Mutex::default(),
            questions: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }
}

impl PageSessionTable {
    /// Begins a session of a user who was identified by this token; returns its id. It replaces the sessions with these ids.
    pub(super) fn begin(
        &self,
        (user, token): (UserInfo, &str),
        replaced: &[String],
        now: Timestamp,
    ) -> Result<String, SessionRefusal> {
        let max = match token_end(token) {
            Some(end) => MAX_SESSION.min(Duration::try_from(end.duration_since(now)).unwrap_or(Duration::ZERO)),
            None => MAX_SESSION,
        };
        if max.is_zero() {
            return Err(SessionRefusal::Expired);
        }
        let id = random_hex::<32>().ok_or(SessionRefusal::NoRandom)?;
        let began = Instant::now();
        let name = user.username.clone().unwrap_or_default();
        let mut sessions = self.lock();
        remove_over(&mut sessions, began);
        for session in replaced.iter().filter_map(|id| sessions.remove(&sha256(id))) {
            session.ended.cancel();
        }
        let own = sessions.values().filter(|session| session.name() == name);
        if own.count() >= MAX_SESSIONS_OF_ONE {
            end_oldest(&mut sessions, |session| session.name() == name);
        }
        while sessions.len() >= MAX_SESSIONS {
            let most = tenant_with_most(&sessions);
            end_oldest(&mut sessions, |session| tenant(session.name()) == most);
        }
        let session = PageSession {
            user,
            rights: tokio::sync::Mutex::default(),
            questions: self.questions.clone(),
            ended: CancellationToken::new(),
            ends: began + max,
            began,
            used: Mutex::new(began),
        };
        sessions.insert(sha256(&id), Arc::new(session));
        Ok(id)
    }

    /// The session with this id, which is used by asking for it.
    pub(super) fn get(&self, id: &str) -> Option<Arc<PageSession>> {
        let mut sessions = self.lock();
        remove_over(&mut sessions, Instant::now());
        let session = sessions.get(&sha256(id))?.clone();
        session.touch();
        Some(session)
    }

    /// Ends the session with this id.
    pub(super) fn end(&self, id: &str) {
        if let Some(session) = self.lock().remove(&sha256(id)) {
            session.ended.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The tenant who has the most sessions; of several, the one with the oldest session.
fn tenant_with_most(sessions: &Sessions) -> String {
    let mut counts: HashMap<&str, (usize, Reverse<Instant>)> = HashMap::new();
    for session in sessions.values() {
        let began = Reverse(session.began);
        let (count, oldest) = counts.entry(tenant(session.name())).or_insert((0, began));
        (*count, *oldest) = (*count + 1, began.max(*oldest));
    }
    let user = counts.into_iter().max_by_key(|(_, count)| *count);
    user.map(|(name, _)| name.to_owned()).unwrap_or_default()
}

fn end_oldest(sessions: &mut Sessions, is_of: impl Fn(&PageSession) -> bool) {
    let own = sessions.iter().filter(|(_, session)| is_of(session));
    let oldest = own.min_by_key(|(_, session)| session.began).map(|(key, _)| *key);
    if let Some(session) = oldest.and_then(|key| sessions.remove(&key)) {
        session.ended.cancel();
    }
}

fn remove_over(sessions: &mut Sessions, now: Instant) {
    sessions.retain(|_, session| {
        let is_over = session.is_over(now);
        if is_over {
            session.ended.cancel();
        }
        !is_over
    });
}

/// The expiry in the claims of a token that the API server has accepted; `None`: it has no such claims.
fn token_end(token: &str) -> Option<Timestamp> {
    #[derive(Deserialize)]
    struct ExpiryClaim {
        exp: i64,
    }
    let claims = token.split('.').nth(1)?;
    let claims = BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?;
    let claims: ExpiryClaim = serde_json::from_slice(&claims).ok()?;
    Timestamp::from_second(claims.exp).ok()
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use tokio::time::advance;

    use super::*;

    fn user(name: &str) -> UserInfo {
        UserInfo {
            username: Some(name.into()),
            ..UserInfo::default()
        }
    }

    fn begin(table: &PageSessionTable, name: &str) -> Result<String, SessionRefusal> {
        table.begin((user(name), "opaque"), &[], Timestamp::UNIX_EPOCH)
    }

    /// A token that claims to expire `end` seconds after 1970.
    fn token(end: i64) -> String {
        let claims = BASE64_URL_SAFE_NO_PAD.encode(format!(r#"{{"exp":{end}}}"#));
        format!("e30.{claims}.signature")
    }

    const MOMENT: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_session_ends_after_15_minutes_without_use_and_an_hour_with_it() {
        let table = PageSessionTable::default();
        let id = begin(&table, "ann").unwrap();
        advance(IDLE.saturating_sub(MOMENT)).await;
        let session = table.get(&id).unwrap();
        assert_eq!(session.name(), "ann");
        advance(IDLE.saturating_sub(MOMENT)).await;
        assert!(table.get(&id).is_some(), "it was used");
        advance(IDLE).await;
        assert!(table.get(&id).is_none() && session.ended.is_cancelled());
        let id = begin(&table, "ann").unwrap();
        let began = Instant::now();
        while began.elapsed() + Duration::from_mins(10) < MAX_SESSION {
            advance(Duration::from_mins(10)).await;
            assert!(table.get(&id).is_some());
        }
        advance(MAX_SESSION.saturating_sub(began.elapsed() + MOMENT)).await;
        assert!(table.get(&id).is_some());
        advance(MOMENT).await;
        assert!(table.get(&id).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_does_not_outlast_the_token() {
        let table = PageSessionTable::default();
        let begin = |end| table.begin((user("ann"), &token(end)), &[], Timestamp::UNIX_EPOCH);
        assert_eq!(begin(0), Err(SessionRefusal::Expired));
        let id = begin(60).unwrap();
        advance(Duration::from_secs(59)).await;
        assert!(table.get(&id).is_some());
        advance(MOMENT).await;
        assert!(table.get(&id).is_none());
    }

    #[tokio::test]
    async fn an_ended_session_and_an_unknown_id_are_nothing() {
        let table = PageSessionTable::default();
        let id = begin(&table, "ann").unwrap();
        let session = table.get(&id).unwrap();
        for wrong in ["", &id[1..], &id.replace(|_| true, "0")] {
            assert!(table.get(wrong).is_none());
        }
        table.end(&id);
        assert!(table.get(&id).is_none() && session.ended.is_cancelled());
        table.end(&id);
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_are_bounded_for_each_user_and_in_total() {
        let table = PageSessionTable::default();
        let mut own = Vec::new();
        for _ in 0..=MAX_SESSIONS_OF_ONE {
            own.push(begin(&table, "ann").unwrap());
            advance(MOMENT).await;
        }
        let open: Vec<_> = own.iter().map(|id| table.get(id).is_some()).collect();
        assert_eq!(open, [false, true, true, true, true], "the oldest gives way");
        for number in MAX_SESSIONS_OF_ONE..MAX_SESSIONS {
            begin(&table, &format!("user{number}")).unwrap();
        }
        assert_eq!(table.lock().len(), MAX_SESSIONS);
        assert!(own[1..].iter().all(|id| table.get(id).is_some()));
        begin(&table, "bob").unwrap();
        let open: Vec<_> = own.iter().map(|id| table.get(id).is_some()).collect();
        assert_eq!(open, [false, false, true, true, true], "who has the most gives way");
        assert_eq!(table.lock().len(), MAX_SESSIONS);
    }

    #[tokio::test(start_paused = true)]
    async fn many_service_accounts_of_a_namespace_end_the_session_of_no_other_user() {
        let table = PageSessionTable::default();
        let ann = begin(&table, "ann").unwrap();
        for number in 0..2 * MAX_SESSIONS {
            advance(MOMENT).await;
            begin(&table, &format!("system:serviceaccount:team-a:robot-{number}")).unwrap();
        }
        assert_eq!(table.lock().len(), MAX_SESSIONS);
        assert!(table.get(&ann).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn users_of_all_sessions_do_not_lock_out_others() {
        let table = PageSessionTable::default();
        let mut held = Vec::new();
        for number in 0..MAX_SESSIONS {
            held.push(begin(&table, &format!("user{}", number / MAX_SESSIONS_OF_ONE)).unwrap());
            advance(MOMENT).await;
        }
        let first = table.get(&held[0]).unwrap();
        let bob = begin(&table, "bob").unwrap();
        assert!(table.get(&bob).is_some() && first.ended.is_cancelled());
        let open = held.iter().filter(|id| table.get(id).is_some()).count();
        assert_eq!(open, MAX_SESSIONS - 1);
        let ann = begin(&table, "ann").unwrap();
        assert!(table.get(&ann).is_some() && table.get(&bob).is_some());
        assert!(table.get(&held[1]).is_some(), "its user has fewer than others now");
        assert!(table.get(&held[MAX_SESSIONS_OF_ONE]).is_none());
    }

    #[tokio::test]
    async fn a_session_ends_the_ones_that_it_replaces_and_only_if_it_begins() {
        let table = PageSessionTable::default();
        let old = [
            begin(&table, "ann").unwrap(),
            begin(&table, "bob").unwrap(),
            "unknown".into(),
        ];
        let sessions = [table.get(&old[0]).unwrap(), table.get(&old[1]).unwrap()];
        let replace = |token: &str| table.begin((user("ann"), token), &old, Timestamp::UNIX_EPOCH);
        assert_eq!(replace(&token(0)), Err(SessionRefusal::Expired));
        assert!(sessions.iter().all(|session| !session.ended.is_cancelled()));
        let new = replace("opaque").unwrap();
        assert!(sessions.iter().all(|session| session.ended.is_cancelled()));
        assert!(table.get(&new).is_some() && table.get(&old[0]).is_none() && table.get(&old[1]).is_none());
    }
}
