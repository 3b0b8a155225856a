//! Links between pages, and to files of the repository: each has a target, and each anchor a heading.

use std::collections::BTreeSet;

use super::page::{Page, is_page, pages};
use crate::schema::reader::repository;

/// The targets of the links of a page, with their lines.
fn links(page: &Page) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in page.prose() {
        // Code in backticks can contain brackets.
        let text: String = line.split('`').step_by(2).collect::<Vec<_>>().join("x");
        for part in text.split("](").skip(1) {
            let target = part.split([')', ' ']).next().unwrap_or_default();
            found.push((number, target.to_owned()));
        }
    }
    found
}

/// Anchors of a page's headings, as GitHub makes them.
fn anchors(page: &Page) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in page.prose() {
        let title = line.trim_start_matches('#');
        if !title.starts_with(' ') || title.len() == line.len() {
            continue;
        }
        let kept = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
        let anchor = title
            .trim()
            .to_lowercase()
            .chars()
            .filter(kept)
            .collect::<String>()
            .replace(' ', "-");
        let count = anchors.iter().filter(|other: &&String| **other == anchor).count();
        anchors.insert(if count == 0 {
            anchor
        } else {
            format!("{anchor}-{count}")
        });
    }
    anchors
}

/// `docs/tasks/../a.md` as `docs/a.md`.
fn resolve(page: &str, target: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            ".." => {
                parts.pop();
            }
            "." | "" => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[test]
fn every_link_of_every_page_has_its_target_and_every_anchor_its_heading() {
    let mut broken = Vec::new();
    let mut count = 0;
    for page in pages() {
        for (line, target) in links(&page) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            count += 1;
            let (path, anchor) = target.split_once('#').unwrap_or((target.as_str(), ""));
            let path = if path.is_empty() {
                page.path.clone()
            } else {
                resolve(&page.path, path)
            };
            let exists = repository(&path).exists();
            let lands = anchor.is_empty() || is_page(&path) && anchors(&Page::read(&path)).contains(anchor);
            if !exists || !lands {
                broken.push(format!("{}:{line}: {target}", page.path));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(count > 100, "only {count} links were found");
}

#[test]
fn the_index_names_every_page() {
    let index = Page::read("docs/README.md");
    let named: BTreeSet<String> = links(&index)
        .iter()
        .map(|(_, target)| resolve(&index.path, target))
        .collect();
    for page in pages() {
        // Decisions and runbooks have indexes of their own.
        let has_own_index = |folder: &str| page.path.starts_with(folder) && !page.path.ends_with("/README.md");
        let is_elsewhere = has_own_index("docs/adr/") || has_own_index("docs/runbooks/");
        let is_listed = page.path.starts_with("docs/") && !is_elsewhere && page.path != index.path;
        assert!(
            !is_listed || named.contains(&page.path),
            "docs/README.md does not name {}",
            page.path
        );
    }
}

#[test]
fn the_index_of_decisions_has_one_row_for_each_with_its_number_and_title() {
    let index = Page::read("docs/adr/README.md");
    let rows: Vec<&str> = index.text.lines().filter(|line| line.starts_with("| [")).collect();
    let is_decision = |page: &Page| page.path.starts_with("docs/adr/") && page.path != index.path;
    let decisions: Vec<Page> = pages().into_iter().filter(is_decision).collect();
    for page in &decisions {
        let name = page.path.trim_start_matches("docs/adr/");
        let (number, title) = page
            .text
            .lines()
            .next()
            .and_then(|line| line.trim_start_matches("# ").split_once(". "))
            .unwrap_or_else(|| panic!("{name} does not begin with its number and title"));
        let row = format!("| [{number}]({name}) | {title} |");
        let count = rows.iter().filter(|line| **line == row).count();
        assert_eq!(count, 1, "docs/adr/README.md needs this row once: {row}");
        assert!(
            name.starts_with(&format!("{number:0>4}-")),
            "{name} is decision {number}"
        );
    }
    assert_eq!(rows.len(), decisions.len(), "rows without a decision");
}

#[test]
fn anchors_are_those_of_github() {
    let page = Page {
        path: "p".into(),
        text: "# A `b_c`: d, e\n## A life (`make x`)\n## Twice\n## Twice\n".into(),
    };
    let expected = ["a-b_c-d-e", "a-life-make-x", "twice", "twice-1"].map(str::to_owned);
    assert_eq!(anchors(&page), BTreeSet::from(expected));
    assert_eq!(resolve("docs/tasks/a.md", "../reference/b.md"), "docs/reference/b.md");
}
