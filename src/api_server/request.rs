//! What a request asks for: verb, resource, object, and the parameters of its query. Pure.

use std::collections::BTreeMap;

use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, header};
use serde_json::Value;

use super::error::ApiError;
use super::object_key::ObjectKey;
use super::patch::ObjectPatch;

/// A verb, as RBAC names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::AsRefStr)]
#[strum(serialize_all = "lowercase")]
pub enum ApiVerb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
}

impl ApiVerb {
    #[must_use]
    pub fn is_write(self) -> bool {
        match self {
            Self::Get | Self::List | Self::Watch => false,
            Self::Create | Self::Update | Self::Patch | Self::Delete => true,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiRequest {
    pub verb: ApiVerb,
    /// Group and plural; the core group is empty.
    pub resource: String,
    /// Empty: all namespaces, or a kind without them.
    pub namespace: String,
    /// Empty for a list, a watch, and the creation of an object.
    pub name: String,
    /// Whether it is for the subresource `status`.
    pub status: bool,
    query: BTreeMap<String, String>,
}

impl ApiRequest {
    pub(super) fn of(parts: &Parts) -> Result<Self, ApiError> {
        let path = ResourcePath::of(parts.uri.path()).ok_or_else(|| ApiError::NotFound(parts.uri.path().into()))?;
        let query = pairs(parts.uri.query().unwrap_or_default());
        let watches = query.get("watch").is_some_and(|value| value == "true" || value == "1");
        let verb = match (parts.method.clone(), &path.name) {
            (Method::GET, None) if watches => ApiVerb::Watch,
            (Method::GET, None) => ApiVerb::List,
            (Method::GET, Some(_)) => ApiVerb::Get,
            (Method::POST, None) => ApiVerb::Create,
            (Method::PUT, Some(_)) => ApiVerb::Update,
            (Method::PATCH, Some(_)) => ApiVerb::Patch,
            (Method::DELETE, Some(_)) => ApiVerb::Delete,
            (method, _) => return Err(ApiError::Invalid(format!("{method} is not supported"))),
        };
        Ok(Self {
            verb,
            resource: path.resource,
            namespace: path.namespace,
            name: path.name.unwrap_or_default(),
            status: path.status,
            query,
        })
    }

    /// The object that it names.
    #[must_use]
    pub fn key(&self) -> ObjectKey {
        ObjectKey::new(&self.resource, &self.namespace, &self.name)
    }

    /// Who writes, for the owners of fields.
    pub(super) fn manager(&self) -> &str {
        self.query.get("fieldManager").map_or("unknown", String::as_str)
    }

    /// The version from which a watch continues.
    pub(super) fn version(&self) -> u64 {
        let version = self.query.get("resourceVersion");
        version.and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Whether its selector matches an object. The only form that the controller uses: the label exists.
    pub(super) fn selects(&self, object: &Value) -> bool {
        let label = self.query.get("labelSelector");
        label.is_none_or(|label| object["metadata"]["labels"].get(label).is_some())
    }
}

/// The kind of a patch, from its content type.
pub(super) fn patch_of(headers: &HeaderMap, body: Value) -> ObjectPatch {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.unwrap_or_default();
    if kind.contains("apply-patch") {
        ObjectPatch::Apply(body)
    } else if kind.contains("json-patch") {
        ObjectPatch::Json(body)
    } else {
        ObjectPatch::Merge(body)
    }
}

struct ResourcePath {
    resource: String,
    namespace: String,
    name: Option<String>,
    status: bool,
}

impl ResourcePath {
    fn of(path: &str) -> Option<Self> {
        let mut parts = path.trim_matches('/').split('/');
        let group = match parts.next()? {
            "api" => "",
            "apis" => parts.next()?,
            _ => return None,
        };
        let _version = parts.next()?;
        let (mut namespace, mut plural) = ("", parts.next()?);
        let mut name = parts.next();
        // The object of a namespace has the same beginning as the objects in it.
        if plural == "namespaces"
            && let Some(inner) = parts.next()
        {
            namespace = name.unwrap_or_default();
            (plural, name) = (inner, parts.next());
        }
        Some(Self {
            resource: format!("{group}/{plural}"),
            namespace: namespace.into(),
            name: name.map(Into::into),
            status: parts.next() == Some("status"),
        })
    }
}

fn pairs(query: &str) -> BTreeMap<String, String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.into(), value.replace("%2F", "/")))
        .collect()
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;

    use super::*;

    #[test]
    fn paths_name_kind_namespace_name_and_status() {
        let target = |path| ResourcePath::of(path).map(|t| (t.resource, t.namespace, t.name, t.status));
        let text = str::to_owned;
        assert_eq!(
            target("/apis/agentloop.dev/v1alpha1/namespaces/n/agents/a/status"),
            Some((text("agentloop.dev/agents"), text("n"), Some(text("a")), true))
        );
        assert_eq!(
            target("/api/v1/namespaces"),
            Some((text("/namespaces"), text(""), None, false))
        );
        assert_eq!(
            target("/api/v1/namespaces/n"),
            Some((text("/namespaces"), text(""), Some(text("n")), false))
        );
        assert_eq!(
            target("/api/v1/namespaces/n/pods"),
            Some((text("/pods"), text("n"), None, false))
        );
        assert_eq!(target("/version"), None);
    }
}
