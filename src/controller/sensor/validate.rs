//! Whether a Sensor can be used, as far as admission could not see it. Pure.

use kube::core::Selector;

use crate::api::SensorSpec;

/// Whom a spec selects by labels, and what is wrong with the spec, with field and fix.
pub(super) fn validate(spec: &SensorSpec) -> (Option<Selector>, Option<String>) {
    let selector = spec.agent_selector.clone().map(Selector::try_from).transpose();
    match selector {
        Ok(selector) => (selector, None),
        Err(error) => {
            let problem = format!("spec.agentSelector.matchExpressions: {error}; In and NotIn need values");
            (None, Some(problem))
        }
    }
}
