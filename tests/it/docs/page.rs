//! Reads the pages: their headings, links and code blocks.

use std::path::Path;

use crate::schema::reader::repository;

/// One page of the documentation.
pub(super) struct Page {
    /// Its path in the repository.
    pub(super) path: String,
    pub(super) text: String,
}

/// A code block.
#[derive(Debug)]
pub(super) struct Block {
    /// `path:line` of its first line, for messages.
    pub(super) place: String,
    /// The language after the fence; `None` for an indented block.
    pub(super) language: Option<String>,
    /// The fence says that the block is for another program.
    pub(super) is_unchecked: bool,
    pub(super) text: String,
}

/// Languages of fences. Each fence names one, so that it is known whether its block is checked.
const LANGUAGES: [&str; 10] = [
    "bash", "console", "json", "lua", "mermaid", "promql", "sh", "sql", "text", "yaml",
];
/// What a fence says after the language of a block that is not checked.
const UNCHECKED: &str = "unchecked";
/// Pages outside `docs/`.
const OUTSIDE: [&str; 5] = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "charts/agentloop/README.md",
];

/// Every page.
pub(super) fn pages() -> Vec<Page> {
    let mut paths: Vec<String> = OUTSIDE.map(Into::into).to_vec();
    collect("docs", &mut paths);
    paths.sort();
    paths.into_iter().map(|path| Page::read(&path)).collect()
}

/// Pages that describe the product as it is: all but decisions, which describe what was decided when, and the changes.
pub(super) fn current_pages() -> Vec<Page> {
    let is_current = |page: &Page| !page.path.starts_with("docs/adr/") && page.path != "CHANGELOG.md";
    pages().into_iter().filter(is_current).collect()
}

/// Whether the file at this path is a page.
pub(super) fn is_page(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "md")
}

fn collect(folder: &str, paths: &mut Vec<String>) {
    for entry in std::fs::read_dir(repository(folder)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let path = format!("{folder}/{name}");
        if repository(&path).is_dir() {
            collect(&path, paths);
        } else if is_page(&name) {
            paths.push(path);
        }
    }
}

impl Page {
    pub(super) fn read(path: &str) -> Self {
        let text = std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self {
            path: path.into(),
            text,
        }
    }

    /// Its lines outside fences, with their numbers.
    pub(super) fn prose(&self) -> Vec<(usize, &str)> {
        let mut fenced = false;
        let mut lines = Vec::new();
        for (number, line) in (1..).zip(self.text.lines()) {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
            } else if !fenced {
                lines.push((number, line));
            }
        }
        lines
    }

    /// Its code blocks in order.
    pub(super) fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let (mut inside, mut after_blank) = (Inside::Prose, true);
        for (number, line) in (1..).zip(self.text.lines()) {
            let fence = line.trim_start().strip_prefix("```");
            inside = match (inside, fence) {
                (Inside::Fence, Some(_)) => Inside::Prose,
                (Inside::Fence, None) => {
                    let text = &mut blocks.last_mut().unwrap().text;
                    text.push_str(line);
                    text.push('\n');
                    Inside::Fence
                }
                (_, Some(language)) => {
                    blocks.push(self.block(number + 1, Some(language)));
                    Inside::Fence
                }
                (Inside::Indented, None) if line.is_empty() || line.starts_with("    ") => {
                    let text = &mut blocks.last_mut().unwrap().text;
                    text.push_str(line.get(4..).unwrap_or_default());
                    text.push('\n');
                    Inside::Indented
                }
                (_, None) if after_blank && line.starts_with("    ") => {
                    blocks.push(self.block(number, None));
                    let text = &mut blocks.last_mut().unwrap().text;
                    text.push_str(&line[4..]);
                    text.push('\n');
                    Inside::Indented
                }
                (_, None) => Inside::Prose,
            };
            after_blank = line.trim().is_empty();
        }
        blocks
    }

    fn block(&self, line: usize, info: Option<&str>) -> Block {
        let place = format!("{}:{line}", self.path);
        let (language, rest) = info.map_or(("", ""), |info| {
            info.trim().split_once(' ').unwrap_or((info.trim(), ""))
        });
        assert!(["", UNCHECKED].contains(&rest), "{place}: «{rest}» is not known");
        Block {
            place,
            language: info.map(|_| language.to_owned()),
            is_unchecked: rest == UNCHECKED,
            text: String::new(),
        }
    }

    /// The text of the section with this heading, up to the next heading of the same or a higher level.
    pub(super) fn section(&self, heading: &str) -> String {
        let level = |line: &str| line.bytes().take_while(|byte| *byte == b'#').count();
        let mut lines = self.text.lines().skip_while(|line| *line != heading).peekable();
        assert!(lines.next().is_some(), "{} has no heading «{heading}»", self.path);
        let end = |line: &&str| !(1..=level(heading)).contains(&level(line));
        lines.take_while(end).collect::<Vec<_>>().join("\n")
    }
}

#[derive(Clone, Copy)]
enum Inside {
    Prose,
    Fence,
    Indented,
}

/// The texts in backticks of a line.
pub(super) fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The rows of the tables in a text, without headers: the cells of each.
pub(super) fn table_rows(text: &str) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for line in text.lines() {
        let Some(row) = line.strip_prefix('|') else { continue };
        let row = row.trim_end().trim_end_matches('|').replace("\\|", "\u{1}");
        let cells: Vec<String> = row.split('|').map(|cell| cell.trim().replace('\u{1}', "|")).collect();
        if cells.iter().all(|cell| cell.bytes().all(|byte| b"-: ".contains(&byte))) {
            // What is above the line is the header.
            if line.contains("--") {
                rows.pop();
            }
            continue;
        }
        rows.push(cells);
    }
    rows
}

#[test]
fn blocks_and_sections_of_a_page_are_found() {
    let text = "# A\n\nText\n    no block\n\n    make x\n\n    make y\n\n```yaml\na: 1\n```\n## B\nb\n# C\n";
    let page = Page {
        path: "p".into(),
        text: text.into(),
    };
    let blocks = page.blocks();
    let found: Vec<_> = blocks
        .iter()
        .map(|block| (block.language.as_deref(), block.text.trim()))
        .collect();
    assert_eq!(found, [(None, "make x\n\nmake y"), (Some("yaml"), "a: 1")]);
    assert_eq!(blocks[1].place, "p:11");
    assert_eq!(page.section("## B"), "b");
    assert!(page.section("# A").ends_with("## B\nb"));
    assert_eq!(table_rows("| a | b |\n|---|---|\n| 1 | `x\\|y` |\n"), [["1", "`x|y`"]]);
}

#[test]
fn every_fence_has_a_known_language() {
    for page in pages() {
        for block in page.blocks() {
            let known = block
                .language
                .as_deref()
                .is_none_or(|language| LANGUAGES.contains(&language));
            let language = block.language.unwrap_or_default();
            assert!(known, "{}: «{language}»: name one of {LANGUAGES:?}", block.place);
        }
    }
}
