//! Tests of the documentation: what a page says exists does exist.
//!
//! A page has two kinds of code blocks that are checked. Fenced `yaml` blocks are checked against the schemas, and
//! indented blocks are commands of a shell, checked by name, subcommand and flag, as are fenced `sh` and `bash` blocks. A
//! block that cannot be checked is fenced and says so: `console` is a transcript with output, `text` is neither, and
//! `yaml unchecked` or `sh unchecked` is for another program.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod commands;
mod fields;
mod gitops;
mod links;
mod local_commands;
mod manifests;
mod matrix;
mod page;
mod prose;
mod reasons;
mod roles;
mod security;
mod shell;

pub(crate) use commands::{PageCommand, page_commands};
pub(crate) use manifests::page_manifests;
