//! What identifies an object, and the kinds that the product uses.

/// Agents: group and plural.
pub const AGENTS: &str = "agentloop.dev/agents";
pub const BUDGETS: &str = "agentloop.dev/agentbudgets";
pub const SENSORS: &str = "agentloop.dev/sensors";
pub const PODS: &str = "/pods";
pub const CONFIG_MAPS: &str = "/configmaps";
pub const SECRETS: &str = "/secrets";
/// One for each Sensor that runs in its own pod.
pub const STATEFUL_SETS: &str = "apps/statefulsets";
pub const CLAIMS: &str = "/persistentvolumeclaims";
pub const NAMESPACES: &str = "/namespaces";
pub const EVENTS: &str = "events.k8s.io/events";
pub const TOKEN_REVIEWS: &str = "authentication.k8s.io/tokenreviews";

/// Identity of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Group and plural; the core group is empty.
    pub resource: String,
    /// Empty for kinds without namespaces.
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    #[must_use]
    pub fn new(resource: &str, namespace: &str, name: &str) -> Self {
        Self {
            resource: resource.into(),
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// The key of a namespace, which is not in a namespace.
    #[must_use]
    pub fn of_namespace(name: &str) -> Self {
        Self::new(NAMESPACES, "", name)
    }
}
