//! Namespace and name of an object.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;

/// Identifies an object among all of its kind. The order is by namespace, then by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespacedName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl NamespacedName {
    /// From the two parts.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// From an object of the API server.
    pub fn of(object: &impl Resource) -> Self {
        Self::of_metadata(object.meta())
    }

    /// From the metadata of an object. A missing part is empty.
    #[must_use]
    pub fn of_metadata(metadata: &ObjectMeta) -> Self {
        Self::new(
            metadata.namespace.clone().unwrap_or_default(),
            metadata.name.clone().unwrap_or_default(),
        )
    }

    /// The start of a range: sorts before every name in `namespace`.
    #[must_use]
    pub fn first_in(namespace: &str) -> Self {
        Self::new(namespace, "")
    }
}

impl fmt::Display for NamespacedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_a_namespace_starts_before_its_names_and_after_other_namespaces() {
        let before = NamespacedName::new("a", "z");
        let first = NamespacedName::first_in("b");
        let within = NamespacedName::new("b", "a");
        assert!(before < first && first < within);
        assert_eq!(within.to_string(), "b/a");
    }
}
