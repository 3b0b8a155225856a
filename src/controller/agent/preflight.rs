//! Validates an Agent without an API server. Pure.
//!
//! For callers that hold all objects in memory, such as `agentloop run`: the same checks and messages as in a
//! reconcile.

use std::collections::BTreeMap;

use super::context::ReconcilerSettings;
use super::server_authorities;
use super::text_checks::TextKind;
use super::validate::{AgentReferences, ModelReferences, ReferenceLookup, environment_references, script, validate};
use crate::api::Agent;
use crate::api::agent::{KeyRef, ModelSpec};

/// The kinds of objects that an Agent can reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceKind {
    /// Holds a script, instructions or a skill.
    ConfigMap,
    /// Holds an API key or headers. Only its keys are checked, never their values.
    Secret,
}

/// The first problem that prevents this Agent from running, with the field and the fix. `find` returns the data of an
/// object in the Agent's namespace.
pub fn find_problem(
    agent: &Agent,
    settings: &ReconcilerSettings,
    find: impl Fn(ReferenceKind, &str) -> Option<BTreeMap<String, String>>,
) -> Option<String> {
    let look = |kind: ReferenceKind, reference: &KeyRef| match find(kind, &reference.name) {
        None => ReferenceLookup::NoObject,
        Some(mut data) => data
            .remove(&reference.key)
            .map_or(ReferenceLookup::NoKey, ReferenceLookup::Found),
    };
    let spec = &agent.spec;
    let text = |reference: &KeyRef| look(ReferenceKind::ConfigMap, reference);
    let headers = spec.header_secrets().into_iter().map(|headers| {
        let keys = find(ReferenceKind::Secret, headers.secret).map(|data| data.into_keys().collect());
        (
            headers.dir.to_owned(),
            keys.map_or(ReferenceLookup::NoObject, ReferenceLookup::Found),
        )
    });
    let key = |reference: &KeyRef| match look(ReferenceKind::Secret, reference) {
        ReferenceLookup::NoObject => ReferenceLookup::NoObject,
        ReferenceLookup::NoKey => ReferenceLookup::NoKey,
        ReferenceLookup::Found(_) => ReferenceLookup::Found(()),
    };
    let authorities = spec.ca_secrets().into_iter().map(|authority| {
        let looked = key(&server_authorities::required_key(&authority));
        (authority.field, looked)
    });
    let of_model = |model: &ModelSpec| ModelReferences {
        key: model.api_key_secret_ref.as_ref().map(key),
        script: model
            .scripted
            .as_ref()
            .map(|source| match text(&source.config_map_key_ref) {
                ReferenceLookup::NoObject => ReferenceLookup::NoObject,
                ReferenceLookup::NoKey => ReferenceLookup::NoKey,
                ReferenceLookup::Found(text) => ReferenceLookup::Found(script(&text)),
            }),
    };
    let references = AgentReferences {
        model: of_model(&spec.model),
        light: spec.light_model.as_ref().map(of_model).unwrap_or_default(),
        instructions: spec
            .instructions_from
            .as_ref()
            .map(|source| text(&source.config_map_key_ref)),
        skills: spec
            .skills
            .iter()
            .map(|skill| text(&skill.config_map_key_ref))
            .collect(),
        // Without a cluster, every claim is assumed to exist.
        workspace: None,
        headers: headers.collect(),
        authorities: authorities.collect(),
        environment: environment_references(spec)
            .map(|(field, kind, name)| (field, find(kind, name).is_some()))
            .collect(),
        texts: TextKind::of_spec(spec).find_map(|(kind, text)| kind.verdict(&text).err()),
    };
    validate(agent, &references, settings)
        .err()
        .map(|invalid| invalid.message)
}
