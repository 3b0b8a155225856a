//! The basis of the next request's bound, and how far it can be trusted.
//!
//! A bill predicts the next one only while the same server answers with the same model: another tokenizer may count a
//! third more for the same text. So both are stored with it, and after a bill above such a bound, no bill of that server is used
//! again.

use std::sync::Arc;

use rusqlite::{OptionalExtension, Transaction, params};

use super::wallet_table::{PART_BYTES, part, part_bytes};
use crate::ledger::bound::PreviousRequest;

/// The last request to a server, as a basis for the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BoundBasis {
    /// The model that its answer named; empty if none was named yet.
    pub answered: String,
    /// A bill exceeded the bound that rested on the previous one: bills of this server are not used any more.
    pub exceeded: bool,
    /// The request and its bill; `None`: the next bound is based on bytes alone.
    pub previous: Option<Arc<PreviousRequest>>,
}

impl BoundBasis {
    /// The basis after a bill. The first bill of another model is not used, because the next request may get the old
    /// model again.
    pub fn after(&self, answered: &str, previous: PreviousRequest) -> Self {
        let is_same = self.answered.is_empty() || self.answered == answered;
        Self {
            answered: answered.to_owned(),
            exceeded: self.exceeded,
            previous: (is_same && !self.exceeded).then(|| Arc::new(previous)),
        }
    }

    /// The basis after a bill that exceeded the bound resting on the previous one.
    pub fn misled(answered: &str) -> Self {
        Self {
            answered: answered.to_owned(),
            exceeded: true,
            previous: None,
        }
    }
}

/// The basis for requests to this server.
pub(super) fn load(change: &Transaction<'_>, server: &str) -> rusqlite::Result<BoundBasis> {
    let mut select = change.prepare("SELECT answered, loose, billed_input, parts FROM previous WHERE server = ?")?;
    let found = select.query_row([server], |row| {
        let billed_input: Option<i64> = row.get("billed_input")?;
        let parts: Vec<u8> = row.get("parts")?;
        let previous = billed_input.map(|billed_input| PreviousRequest {
            billed_input,
            parts: parts.chunks_exact(PART_BYTES).filter_map(part).collect(),
        });
        Ok(BoundBasis {
            answered: row.get("answered")?,
            exceeded: row.get("loose")?,
            previous: previous.map(Arc::new),
        })
    });
    Ok(found.optional()?.unwrap_or_default())
}

pub(super) fn write(change: &Transaction<'_>, server: &str, basis: &BoundBasis) -> rusqlite::Result<()> {
    let parts = basis.previous.iter().flat_map(|previous| &previous.parts);
    let parts: Vec<u8> = parts.flat_map(part_bytes).collect();
    change.prepare_cached("DELETE FROM previous")?.execute([])?;
    let mut insert = change
        .prepare_cached("INSERT INTO previous (server, answered, loose, billed_input, parts) VALUES (?, ?, ?, ?, ?)")?;
    let billed_input = basis.previous.as_ref().map(|previous| previous.billed_input);
    insert.execute(params![server, basis.answered, basis.exceeded, billed_input, parts])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bill(billed_input: i64) -> PreviousRequest {
        PreviousRequest {
            parts: Vec::new(),
            billed_input,
        }
    }

    fn measured(basis: &BoundBasis) -> Option<i64> {
        basis.previous.as_ref().map(|previous| previous.billed_input)
    }

    #[test]
    fn a_bill_measures_the_next_one_while_the_same_model_answers() {
        let first = BoundBasis::default().after("a", bill(1));
        assert_eq!(measured(&first), Some(1));
        assert_eq!(measured(&first.after("a", bill(2))), Some(2));
        let moved = first.after("b", bill(3));
        assert_eq!(measured(&moved), None);
        assert_eq!(measured(&moved.after("b", bill(4))), Some(4));
        assert_eq!(measured(&moved.after("a", bill(4))), None, "it alternates");
        let unnamed = BoundBasis::default().after("", bill(1)).after("", bill(2));
        assert_eq!(measured(&unnamed), Some(2));
    }

    #[test]
    fn a_misleading_measure_is_not_used_again() {
        let misled = BoundBasis::misled("a");
        assert_eq!(measured(&misled), None);
        assert_eq!(measured(&misled.after("a", bill(2)).after("a", bill(3))), None);
    }
}
