//! `report`: reads what a bug report needs, redacts it, and writes an archive.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::json;

use super::reads;
use crate::plugin::arguments::ReportArgs;
use crate::plugin::failure::PluginError;
use crate::plugin::report::archive;
use crate::plugin::report::sources::{ReportSources, Unread};
use crate::plugin::screens::checks::PERMISSIONS;
use crate::plugin::session::{PluginSession, Screen};

pub(super) async fn report(
    session: &PluginSession,
    arguments: &ReportArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let path = arguments.file.clone().unwrap_or_else(|| {
        let time = session.now().strftime("%Y%m%dT%H%M%SZ");
        PathBuf::from(format!("agentloop-report-{time}.zip"))
    });
    if !arguments.dry_run && path.exists() {
        return Err(PluginError::Refused(format!(
            "{} exists already: choose another --file",
            path.display()
        )));
    }
    // A report in which nothing could be read tells nothing.
    reads::reach(session).await?;
    let mut sources = ReportSources::read(session).await;
    match reads::check_rows(session, &PERMISSIONS).await {
        Ok(rows) => sources.check = Some(json!(rows)),
        Err(_) => sources.missing.push(Unread {
            what: "result of check".into(),
            problem: "run kubectl agentloop check".into(),
        }),
    }
    let files = archive::files(&sources);
    if !arguments.dry_run {
        archive::write(&path, &files)?;
    }
    let mut text = String::new();
    for file in &files {
        let _ = writeln!(text, "{:>9}  {}", file.content.len(), file.name);
    }
    screen.result(&text)?;
    for missing in &sources.missing {
        screen.note(&format!("not included: {}: {}", missing.what, missing.problem));
    }
    if arguments.dry_run {
        screen.note("nothing was written (--dry-run)");
    } else {
        screen.note(&format!(
            "written to {}: look at it before you publish it",
            path.display()
        ));
    }
    Ok(())
}
