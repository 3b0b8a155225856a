//! The files of a report, and the archive that they are in.

use std::fs::{self, OpenOptions};
use std::io::{Cursor, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};
use zip::write::{SimpleFileOptions, ZipWriter};

use super::redaction::{Redaction, pod};
use super::sources::{ReportSources, Unread};
use crate::plugin::failure::PluginError;

/// What the index says about redaction.
const REDACTION: &str = "Texts are left out: prompts, answers, messages, values of labels, annotations and environment variables, and \
                         whatever else is not known to be harmless. Of messages, names of the API stay. Check the files before you \
                         publish them: names of objects, hosts and models stay.";

/// A file of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportFile {
    /// Its name in the archive.
    pub name: String,
    /// Its content.
    pub content: String,
}

/// The index.
#[derive(Serialize)]
struct ReportIndex<'a> {
    created: String,
    plugin: &'a str,
    versions: &'a Value,
    files: Vec<Value>,
    missing: &'a [Unread],
    redaction: &'a str,
}

/// The files of a report; the first one is the index of the others.
#[must_use]
pub fn files(sources: &ReportSources) -> Vec<ReportFile> {
    let redaction = Redaction::new();
    let mut files = Vec::new();
    let mut add = |name: &str, content: String| {
        files.push(ReportFile {
            name: name.to_owned(),
            content,
        });
    };
    for (name, objects) in [
        ("agents.json", &sources.agents),
        ("sensors.json", &sources.sensors),
        ("agentbudgets.json", &sources.budgets),
    ] {
        if let Some(objects) = objects {
            add(
                name,
                pretty(
                    &objects
                        .iter()
                        .map(|object| redaction.resource(object))
                        .collect::<Vec<_>>(),
                ),
            );
        }
    }
    if let Some(events) = &sources.events {
        add(
            "events.json",
            pretty(&events.iter().map(|event| redaction.event(event)).collect::<Vec<_>>()),
        );
    }
    if let Some(pods) = &sources.pods {
        add("pods.json", pretty(&pods.iter().map(pod).collect::<Vec<_>>()));
    }
    for (name, text) in &sources.logs {
        let lines = text.lines().map(|line| redaction.log_line(line) + "\n");
        add(&format!("logs/{name}.jsonl"), lines.collect());
    }
    if let Some(check) = &sources.check {
        // Details can quote the API server, and with it the webhooks of others.
        let mut rows = check.clone();
        for row in rows.as_array_mut().into_iter().flatten() {
            row["detail"] = redaction.message(row["detail"].as_str().unwrap_or_default()).into();
        }
        add(
            "check.json",
            serde_json::to_string_pretty(&rows).unwrap_or_default() + "\n",
        );
    }
    let index = ReportIndex {
        created: sources.now.to_string(),
        plugin: env!("CARGO_PKG_VERSION"),
        versions: &sources.versions,
        files: files
            .iter()
            .map(|file| json!({"name": file.name, "bytes": file.content.len()}))
            .collect(),
        missing: &sources.missing,
        redaction: REDACTION,
    };
    let index = ReportFile {
        name: "index.json".into(),
        content: serde_json::to_string_pretty(&index).unwrap_or_default() + "\n",
    };
    files.insert(0, index);
    files
}

fn pretty(objects: &[Value]) -> String {
    serde_json::to_string_pretty(objects).unwrap_or_default() + "\n"
}

/// Writes the archive, which must not exist. Nothing is left of one that cannot be written.
pub fn write(path: &Path, files: &[ReportFile]) -> Result<(), PluginError> {
    let packed = packed(files).map_err(|error| PluginError::Format(error.to_string()))?;
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = opened.map_err(|error| {
        PluginError::Refused(if error.kind() == ErrorKind::AlreadyExists {
            format!("{} exists already: choose another --file", path.display())
        } else {
            format!("cannot create {}: {error}", path.display())
        })
    })?;
    if let Err(error) = file.write_all(&packed).and_then(|()| file.sync_all()) {
        drop(file);
        let _ = fs::remove_file(path);
        return Err(error.into());
    }
    Ok(())
}

fn packed(files: &[ReportFile]) -> zip::result::ZipResult<Vec<u8>> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for file in files {
        archive.start_file(&*file.name, SimpleFileOptions::default())?;
        archive.write_all(file.content.as_bytes())?;
    }
    Ok(archive.finish()?.into_inner())
}
