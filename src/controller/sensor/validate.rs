//! Whether a Sensor can be used, as far as admission could not see it. Pure.

use kube::core::Selector;

use crate::api::SensorSpec;
use crate::sensing;

/// Whom a spec selects by labels, and what is wrong with the spec, with field and fix. Takes up to a second of CPU time for
/// the worst spec that admission lets through, so it runs on a thread for blocking work, and once for each generation.
pub(super) fn validate(spec: &SensorSpec) -> (Option<Selector>, Option<String>) {
    let selector = spec.agent_selector.clone().map(Selector::try_from).transpose();
    let unselected = selector
        .as_ref()
        .err()
        .map(|error| format!("spec.agentSelector.matchExpressions: {error}; In and NotIn need values"));
    let mistakes = sensing::check(spec).err().map(|mistakes| mistakes.to_string());
    let problems: Vec<String> = unselected.into_iter().chain(mistakes).collect();
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    (selector.ok().flatten(), problem)
}
