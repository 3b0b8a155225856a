//! Every command and every manifest of the documentation, run against the real cluster.
//!
//! [`plan`] says how a command of a page is run here, and which ones are not run and why; [`stage`] creates what the pages
//! assume to be there. A command that fails is a mistake in its page.

mod plan;
mod stage;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use serde_json::Value;

use self::plan::{Plan, Program};
use self::stage::Stage;
use super::cluster::{figure, shared};
use crate::docs::{page_commands, page_manifests};
use crate::support::kubectl::Kubectl;

/// Commands that run at once.
const THREADS: usize = 4;
/// Fewer commands than this are a mistake in how they are found.
const MIN_COMMANDS: usize = 140;
/// The same for manifests.
const MIN_MANIFESTS: usize = 6;
/// A namespace where nothing is, so that a manifest creates what it names.
const EMPTY: &str = "default";

#[test]
fn every_command_of_the_pages_is_run_or_has_a_reason_why_not() {
    let plan = Plan::new(page_commands());
    let programs = [Program::Kubectl, Program::Plugin, Program::Helm];
    let counts = programs.map(|program| plan.steps.iter().filter(|step| step.program == program).count());
    assert!(counts.iter().sum::<usize>() >= MIN_COMMANDS, "only {counts:?}");
    assert!(counts.iter().all(|count| *count > 5), "{counts:?}");
    assert!(plan.stale.is_empty(), "no page has these any more: {:?}", plan.stale);
    assert!(plan.unknown.is_empty(), "{}", plan.unknown.join("\n"));
}

#[test]
fn commands_and_manifests_of_the_pages_work_on_a_real_cluster() {
    let Some(cluster) = shared() else { return };
    let began = Instant::now();
    let plan = Plan::new(page_commands());
    let stage = Stage::new(&cluster.system, &plan);
    figure("docs_stage", began.elapsed().as_secs(), "s");
    let mut failures = Vec::new();
    // Equal commands are run once.
    let mut reads = BTreeMap::new();
    for step in plan.steps.iter().filter(|step| !step.is_ordered) {
        reads
            .entry((step.program, &step.namespace, &step.words))
            .or_insert(step);
    }
    failures.extend(side_by_side(reads.into_values(), |step| stage.run(step)));
    figure("docs_reads", began.elapsed().as_secs(), "s");
    let ordered = plan.steps.iter().filter(|step| step.is_ordered);
    failures.extend(ordered.filter_map(|step| stage.run(step)));
    let fresh = cluster.system.in_namespace(EMPTY);
    let manifests = page_manifests();
    assert!(manifests.len() >= MIN_MANIFESTS, "only {} manifests", manifests.len());
    failures.extend(side_by_side(manifests, |manifest| {
        let said = dry_run(&fresh, manifest.object)?;
        Some(format!("{}: {said}", manifest.place))
    }));
    figure("docs_commands", plan.steps.len(), "commands");
    figure("docs_took", began.elapsed().as_secs(), "s");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Why the API server rejects a manifest; `None`: it does not.
fn dry_run(kubectl: &Kubectl, mut object: Value) -> Option<String> {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("namespace");
    }
    let ended = kubectl.try_apply_with(&object.to_string(), &["--dry-run=server"]);
    (!ended.success).then_some(ended.stderr)
}

/// What some of these say, found with several threads.
fn side_by_side<T: Send>(
    all: impl IntoIterator<Item = T, IntoIter: Send>,
    run: impl Fn(T) -> Option<String> + Sync,
) -> Vec<String> {
    let (left, said) = (Mutex::new(all.into_iter()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap().next();
                    let Some(next) = next else { break };
                    if let Some(found) = run(next) {
                        said.lock().unwrap().push(found);
                    }
                }
            });
        }
    });
    said.into_inner().unwrap()
}
