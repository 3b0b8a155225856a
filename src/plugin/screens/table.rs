//! Tables as `kubectl` prints them: columns that are separated by three spaces, without lines.

use std::fmt;

use super::printable::one_line;

/// Space between two columns.
const GAP: &str = "   ";
/// What a cell without a value shows.
pub const NONE: &str = "-";

/// A table for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextTable {
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    /// A table without rows.
    #[must_use]
    pub fn new(head: Vec<&'static str>) -> Self {
        Self { head, rows: Vec::new() }
    }

    /// Adds a row. An empty cell is shown as [`NONE`].
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells = |row: &Vec<String>| row.iter().map(|cell| shown(cell)).collect::<Vec<_>>();
        let head = self.head.iter().map(|name| (*name).to_owned()).collect();
        let lines: Vec<Vec<String>> = std::iter::once(head).chain(self.rows.iter().map(cells)).collect();
        let width = |column: usize| {
            let cells = lines.iter().filter_map(|line| line.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        for line in &lines {
            let padded = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
            writeln!(f, "{}", padded.collect::<Vec<_>>().join(GAP).trim_end())?;
        }
        Ok(())
    }
}

/// A cell in one line.
fn shown(cell: &str) -> String {
    if cell.is_empty() {
        return NONE.into();
    }
    one_line(cell)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_lines_have_no_space_at_their_end() {
        let mut table = TextTable::new(vec!["NAME", "WHY"]);
        assert!(table.is_empty());
        table.push(vec!["a".into(), "é\u{1b}[2J\nx".into()]);
        table.push(vec!["longer".into(), String::new()]);
        assert_eq!(table.to_string(), "NAME     WHY\na        é [2J x\nlonger   -\n");
    }
}
