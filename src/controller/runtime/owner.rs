//! The controlling owner of an object. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Resource;

/// The uid of the controlling owner, if that is of this group and kind. The uid alone proves nothing: admission policies
/// protect only the references to our own group.
pub(in crate::controller) fn controlling<K: Resource<DynamicType = ()>>(owners: &[OwnerReference]) -> Option<&str> {
    let owner = owners.iter().find(|owner| owner.controller == Some(true))?;
    let (group, _) = owner.api_version.split_once('/').unwrap_or_default();
    (group == K::group(&()) && owner.kind == K::kind(&())).then_some(owner.uid.as_str())
}
