//! Persists the wallet. The wallet on disk always equals the one in memory.

use rusqlite::types::Type;
use rusqlite::{Row, Transaction, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::ledger::bound::RequestPart;
use crate::ledger::wallet::{self, Wallet};

/// Bytes of one part on disk: hash, length, whether it is unsteady, whether it is a message.
pub(super) const PART_BYTES: usize = 32 + 8 + 1 + 1;

pub(super) fn load(change: &Transaction<'_>) -> rusqlite::Result<Wallet> {
    let mut select = change.prepare("SELECT account, epoch FROM accounts")?;
    let epochs = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let epochs = epochs.collect::<Result<Vec<_>, _>>()?;
    let mut select = change.prepare("SELECT * FROM leases")?;
    let rows = select.query_map([], from_row)?.collect::<Result<Vec<_>, _>>()?;
    Ok(Wallet::restore(epochs, rows))
}

/// Writes the differences.
pub(super) fn write(change: &Transaction<'_>, old: &Wallet, new: &Wallet) -> rusqlite::Result<()> {
    let before: Vec<wallet::LeaseRow> = old.rows().collect();
    let after: Vec<wallet::LeaseRow> = new.rows().collect();
    let same = |a: &wallet::LeaseRow, b: &wallet::LeaseRow| a.account == b.account && a.lease == b.lease;
    for row in before.iter().filter(|row| !after.iter().any(|now| same(now, row))) {
        change.execute(
            "DELETE FROM leases WHERE account = ? AND lease = ?",
            params![row.account, row.lease],
        )?;
    }
    for row in after.iter().filter(|row| !before.contains(row)) {
        let mut insert = change.prepare_cached(
            "INSERT OR REPLACE INTO leases (account, lease, spent, returned, closed) VALUES (?, ?, ?, ?, ?)",
        )?;
        insert.execute(params![
            row.account,
            row.lease,
            to_json(&row.spent)?,
            to_json(&row.returned)?,
            row.closed
        ])?;
    }
    for (account, epoch) in new.epochs() {
        if !old.epochs().any(|known| known == (account, epoch)) {
            change.execute(
                "INSERT OR REPLACE INTO accounts (account, epoch) VALUES (?, ?)",
                params![account, epoch],
            )?;
        }
    }
    Ok(())
}

fn from_row(row: &Row<'_>) -> rusqlite::Result<wallet::LeaseRow> {
    Ok(wallet::LeaseRow {
        account: row.get("account")?,
        lease: row.get("lease")?,
        spent: from_json(&row.get::<_, String>("spent")?)?,
        returned: from_json(&row.get::<_, String>("returned")?)?,
        closed: row.get("closed")?,
    })
}

pub(super) fn part_bytes(part: &RequestPart) -> Vec<u8> {
    let mut bytes = part.hash.to_vec();
    bytes.extend(part.bytes.to_be_bytes());
    bytes.extend([u8::from(part.unsteady), u8::from(part.is_message)]);
    bytes
}

pub(super) fn part(bytes: &[u8]) -> Option<RequestPart> {
    Some(RequestPart {
        hash: bytes.get(..32)?.try_into().ok()?,
        bytes: i64::from_be_bytes(bytes.get(32..40)?.try_into().ok()?),
        unsteady: *bytes.get(40)? == 1,
        is_message: *bytes.get(41)? == 1,
    })
}

pub(super) fn to_json(value: &impl Serialize) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))
}

pub(super) fn from_json<T: DeserializeOwned>(text: &str) -> rusqlite::Result<T> {
    serde_json::from_str(text).map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, Type::Text, error.into()))
}
