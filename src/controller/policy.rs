//! What the platform decides for every Agent: prices, whether calls without a budget are made, what pods may ask for.

use std::collections::BTreeMap;

use crate::api::agent::PodSettings;
use crate::api::price::ModelPrice;

/// Prices by model, as the spec of an Agent names it.
pub type PriceTable = BTreeMap<String, ModelPrice>;

/// What the platform decides for every Agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlatformPolicy {
    /// What models cost; wins over an Agent's own price.
    pub prices: PriceTable,
    /// An Agent that no AgentBudget selects and that names none makes no call.
    pub require_budget: bool,
    /// Whether an Agent's own price counts where the table has none.
    pub agent_prices: AgentPrices,
    /// An answer is clipped to what is left of a limit, but not below so many tokens.
    pub min_output_tokens: u32,
    /// What Agents may ask for their pods.
    pub pods: PodPolicy,
}

/// What stands for every value of an allow-list.
pub const ANY: &str = "*";
/// Priority classes of the cluster itself; [`ANY`] does not stand for them.
const SYSTEM: &str = "system-";

/// What Agents may ask for their pods, as far as that reaches beyond the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPolicy {
    /// Names of priority classes. [`ANY`]: all but those of the cluster itself.
    pub priority_classes: Vec<String>,
    /// Beginnings of annotations. [`ANY`]: all.
    pub annotation_prefixes: Vec<String>,
}

impl Default for PodPolicy {
    fn default() -> Self {
        Self {
            priority_classes: vec![ANY.into()],
            annotation_prefixes: vec![ANY.into()],
        }
    }
}

impl PodPolicy {
    /// What in these settings is not allowed, with field and fix.
    #[must_use]
    pub fn problem(&self, pod: &PodSettings) -> Option<String> {
        let class = pod.priority_class_name.as_ref();
        if let Some(class) = class.filter(|class| !self.allows_class(class)) {
            return Some(format!(
                "spec.pod.priorityClassName {class} is not allowed here: {}, or have {class} added to \
                 policy.allowedPriorityClasses of the chart",
                choice(
                    &self.priority_classes,
                    "name none, or one that does not begin with system-"
                )
            ));
        }
        let key = pod.annotations.keys().find(|key| !self.allows_annotation(key))?;
        Some(format!(
            "spec.pod.annotations has the key {key}, which is not allowed here: {}, or have its beginning added to \
             policy.allowedAnnotationPrefixes of the chart",
            choice(&self.annotation_prefixes, "remove it")
        ))
    }

    fn allows_class(&self, class: &str) -> bool {
        let any = self.priority_classes.iter().any(|allowed| allowed == ANY);
        any && !class.starts_with(SYSTEM) || self.priority_classes.iter().any(|allowed| allowed == class)
    }

    fn allows_annotation(&self, key: &str) -> bool {
        let prefixes = &mut self.annotation_prefixes.iter();
        prefixes.any(|prefix| prefix == ANY || key.starts_with(prefix.as_str()))
    }
}

/// What else can be written.
fn choice(allowed: &[String], without: &str) -> String {
    if allowed.is_empty() || allowed.iter().any(|one| one == ANY) {
        return without.into();
    }
    format!("remove it, or use one of {}", allowed.join(", "))
}

/// Whether `spec.model.price` counts for models that the table does not price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString, strum::Display)]
pub enum AgentPrices {
    /// It does.
    #[default]
    Allow,
    /// It does not: such a model has no price.
    Deny,
}

/// An answer of fewer tokens is seldom of use.
pub const MIN_OUTPUT_TOKENS: u32 = 256;

impl Default for PlatformPolicy {
    fn default() -> Self {
        Self {
            prices: PriceTable::new(),
            require_budget: false,
            agent_prices: AgentPrices::Allow,
            min_output_tokens: MIN_OUTPUT_TOKENS,
            pods: PodPolicy::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn problem(classes: &[&str], prefixes: &[&str], pod: Value) -> Option<String> {
        let words = |list: &[&str]| list.iter().map(|&word| word.to_owned()).collect();
        let policy = PodPolicy {
            priority_classes: words(classes),
            annotation_prefixes: words(prefixes),
        };
        policy.problem(&serde_json::from_value(pod).unwrap())
    }

    #[rstest]
    #[case(&["*"], "batch", true)]
    #[case(&["*"], "system-node-critical", false)]
    #[case(&["*", "system-node-critical"], "system-node-critical", true)]
    #[case(&["batch"], "batch", true)]
    #[case(&["batch"], "batch-2", false)]
    #[case(&[], "batch", false)]
    fn a_priority_class_is_one_of_the_list(#[case] allowed: &[&str], #[case] class: &str, #[case] passes: bool) {
        let problem = problem(allowed, &["*"], json!({"priorityClassName": class}));
        assert_eq!(problem.is_none(), passes, "{problem:?}");
        if let Some(problem) = problem {
            assert!(
                problem.starts_with(&format!("spec.pod.priorityClassName {class} is not allowed here: ")),
                "{problem}"
            );
        }
    }

    #[rstest]
    #[case(&["*"], "k8s.v1.cni.cncf.io/networks", true)]
    #[case(&["example.com/"], "example.com/a", true)]
    #[case(&["example.com/", "team."], "team.org/a", true)]
    #[case(&["example.com/"], "k8s.v1.cni.cncf.io/networks", false)]
    #[case(&[], "a", false)]
    fn an_annotation_begins_with_one_of_the_list(#[case] allowed: &[&str], #[case] key: &str, #[case] passes: bool) {
        let problem = problem(&["*"], allowed, json!({"annotations": {key: "x"}}));
        assert_eq!(problem.is_none(), passes, "{problem:?}");
    }

    #[test]
    fn a_refusal_says_what_is_allowed() {
        let said = problem(&["a", "b"], &["*"], json!({"priorityClassName": "c"})).unwrap();
        assert!(
            said.contains("remove it, or use one of a, b, or have c added"),
            "{said}"
        );
        assert_eq!(problem(&[], &[], json!({})), None);
    }
}
