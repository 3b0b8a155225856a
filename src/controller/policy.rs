//! Settings of the platform for every Agent: prices, whether a budget is required, and what pods may request.

use std::collections::BTreeMap;

use crate::api::agent::PodSettings;
use crate::api::price::ModelPrice;
use crate::api::tools::ToolsSpec;

/// Prices by model name as in `spec.model.name`.
pub type PriceTable = BTreeMap<String, ModelPrice>;

/// Settings of the platform for every Agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlatformPolicy {
    /// Prices of models; they take precedence over an Agent's own price.
    pub prices: PriceTable,
    /// Requires a budget: an Agent that no AgentBudget selects and that names none makes no calls.
    pub require_budget: bool,
    /// Whether an Agent's own price is used if the table has none.
    pub agent_prices: AgentPrices,
    /// The output limit of a call is reduced to what remains of a limit, but not below this number of tokens.
    pub min_output_tokens: u32,
    /// What Agents may request for their pods.
    pub pods: PodPolicy,
}

/// Allows every value in an allow-list.
pub const ANY: &str = "*";
/// Prefix of the cluster's own priority classes, which [`ANY`] does not include.
const SYSTEM: &str = "system-";

/// What Agents may request for their pods with effects beyond the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPolicy {
    /// Allowed priority classes. [`ANY`]: all except the cluster's own.
    pub priority_classes: Vec<String>,
    /// Allowed prefixes of annotation keys. [`ANY`]: all.
    pub annotation_prefixes: Vec<String>,
    /// Allowed prefixes of images of containers of tools. [`ANY`]: all.
    pub tool_images: Vec<String>,
}

impl Default for PodPolicy {
    fn default() -> Self {
        Self {
            priority_classes: vec![ANY.into()],
            annotation_prefixes: vec![ANY.into()],
            tool_images: vec![ANY.into()],
        }
    }
}

impl PodPolicy {
    /// The first setting that is not allowed, with the field and the fix.
    #[must_use]
    pub fn problem(&self, pod: &PodSettings) -> Option<String> {
        let class = pod.priority_class_name.as_ref();
        if let Some(class) = class.filter(|class| !self.allows_class(class)) {
            return Some(format!(
                "spec.pod.priorityClassName {class} is not allowed: {}, or ask an administrator to add {class} to \
                 policy.allowedPriorityClasses in the chart",
                choice(
                    &self.priority_classes,
                    "remove it, or use a class without the prefix system-"
                )
            ));
        }
        let key = pod.annotations.keys().find(|key| !self.allows_annotation(key))?;
        Some(format!(
            "spec.pod.annotations has the key {key}, which is not allowed: {}, or ask an administrator to add its \
             prefix to policy.allowedAnnotationPrefixes in the chart",
            choice(&self.annotation_prefixes, "remove it")
        ))
    }

    /// The first image of a container of tools that is not allowed, with the field and the fix.
    #[must_use]
    pub fn image_problem(&self, tools: &ToolsSpec) -> Option<String> {
        let toolbox = tools.toolbox.iter().filter_map(|toolbox| toolbox.image.as_ref());
        let toolbox = toolbox.map(|image| ("spec.tools.toolbox.image".to_owned(), image));
        let servers = tools.servers.iter().filter_map(|server| {
            let field = format!("spec.tools.servers[{}].container.image", server.name);
            Some((field, &server.container.as_ref()?.image))
        });
        let (field, image) = toolbox.chain(servers).find(|(_, image)| !self.allows_image(image))?;
        Some(format!(
            "{field} {image} is not allowed: {}, or ask an administrator to add its prefix to policy.allowedToolImages in the chart",
            if self.tool_images.is_empty() {
                "remove it".to_owned()
            } else {
                format!("use an image that starts with {}", self.tool_images.join(" or "))
            }
        ))
    }

    fn allows_image(&self, image: &str) -> bool {
        let prefixes = &mut self.tool_images.iter();
        prefixes.any(|prefix| prefix == ANY || image.starts_with(prefix.as_str()))
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

/// The alternatives to suggest.
fn choice(allowed: &[String], without: &str) -> String {
    if allowed.is_empty() || allowed.iter().any(|one| one == ANY) {
        return without.into();
    }
    format!("remove it, or use one of {}", allowed.join(", "))
}

/// Whether `spec.model.price` is used for models without a price in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::EnumString, strum::Display)]
pub enum AgentPrices {
    /// It is used.
    #[default]
    Allow,
    /// It is ignored: such a model has no price.
    Deny,
}

/// Shorter answers are seldom useful.
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
            ..PodPolicy::default()
        };
        policy.problem(&serde_json::from_value(pod).unwrap())
    }

    #[rstest]
    #[case(&["*"], true)]
    #[case(&["registry.example.com/"], true)]
    #[case(&["registry.example.com/tools/mcp"], true)]
    #[case(&["registry.example.com/other/"], false)]
    #[case(&[], false)]
    fn an_image_of_tools_has_one_of_the_prefixes(#[case] allowed: &[&str], #[case] passes: bool) {
        let policy = PodPolicy {
            tool_images: allowed.iter().map(|&prefix| prefix.to_owned()).collect(),
            ..PodPolicy::default()
        };
        let image = "registry.example.com/tools/mcp:1";
        for (tools, field) in [
            (
                json!({"builtin": ["Shell"], "toolbox": {"image": image}}),
                "spec.tools.toolbox.image",
            ),
            (
                json!({"servers": [{"name": "a", "container": {"image": image, "command": ["x"]}}]}),
                "spec.tools.servers[a].container.image",
            ),
        ] {
            let problem = policy.image_problem(&serde_json::from_value(tools).unwrap());
            assert_eq!(problem.is_none(), passes, "{problem:?}");
            if let Some(problem) = problem {
                assert!(
                    problem.starts_with(&format!("{field} {image} is not allowed: ")),
                    "{problem}"
                );
            }
        }
        let own = serde_json::from_value(json!({"builtin": ["Files"]})).unwrap();
        assert_eq!(policy.image_problem(&own), None, "the image of the pod itself");
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
                problem.starts_with(&format!("spec.pod.priorityClassName {class} is not allowed: ")),
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
    fn a_refusal_names_the_allowed_values() {
        let message = problem(&["a", "b"], &["*"], json!({"priorityClassName": "c"})).unwrap();
        assert!(
            message.contains("remove it, or use one of a, b, or ask an administrator to add c"),
            "{message}"
        );
        assert_eq!(problem(&[], &[], json!({})), None);
    }
}
