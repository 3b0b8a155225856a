//! Whether a Sensor can be used, as far as admission could not see it. Pure.

use kube::core::Selector;

use crate::api::SensorSpec;
use crate::sensing;

/// Whom a spec selects by labels, and what is wrong with the spec, with field and fix. `name`: the Sensor's.
pub(super) fn validate(name: &str, spec: &SensorSpec) -> (Option<Selector>, Option<String>) {
    let selector = match spec.agent_selector.clone().map(Selector::try_from).transpose() {
        Ok(selector) => selector,
        Err(error) => {
            let problem = format!("spec.agentSelector.matchExpressions: {error}; In and NotIn need values");
            return (None, Some(problem));
        }
    };
    let problem = sensing::check(name, spec).err();
    (selector, problem.map(|invalid| invalid.to_string()))
}
