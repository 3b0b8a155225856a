//! Which model serves a call, by what the call is for.

use crate::api::AgentSpec;
use crate::engine::Purpose;

/// The names of an Agent's models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Models {
    main: String,
    light: Option<String>,
}

impl Models {
    /// Those of a spec.
    pub fn of_spec(spec: &AgentSpec) -> Self {
        Self {
            main: spec.model.name.clone(),
            light: spec.light_model.as_ref().map(|model| model.name.clone()),
        }
    }

    /// The one of turns.
    pub fn main(&self) -> &str {
        &self.main
    }

    /// The one that serves calls of this purpose.
    pub fn of(&self, purpose: Purpose) -> &str {
        let light = self.light.as_deref().filter(|_| purpose.uses_light_model());
        light.unwrap_or(&self.main)
    }
}

#[cfg(test)]
impl From<&str> for Models {
    fn from(main: &str) -> Self {
        Self {
            main: main.into(),
            light: Some("light".into()),
        }
    }
}
