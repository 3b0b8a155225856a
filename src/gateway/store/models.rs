//! Maps the purpose of a call to the model that serves it.

use crate::api::AgentSpec;
use crate::engine::CallPurpose;

/// The names of an Agent's models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelNames {
    main: String,
    light: Option<String>,
    server: String,
}

impl ModelNames {
    pub fn from_spec(spec: &AgentSpec) -> Self {
        let model = &spec.model;
        let address = model.base_url.as_deref().unwrap_or_default();
        Self {
            main: model.name.clone(),
            server: format!("{:?} {address} {}", model.api, model.name),
            light: spec.light_model.as_ref().map(|model| model.name.clone()),
        }
    }

    /// Identifies where calls of turns go: wire format, base URL and model name.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// All models, each once.
    pub fn all(&self) -> Vec<&str> {
        let light = self.light.as_deref().filter(|light| *light != self.main);
        [Some(self.main.as_str()), light].into_iter().flatten().collect()
    }

    /// The model for calls of this [`CallPurpose`].
    pub fn of(&self, purpose: CallPurpose) -> &str {
        let light = self.light.as_deref().filter(|_| purpose.uses_light_model());
        light.unwrap_or(&self.main)
    }
}

#[cfg(test)]
impl From<&str> for ModelNames {
    fn from(main: &str) -> Self {
        Self {
            main: main.into(),
            server: main.into(),
            light: Some("light".into()),
        }
    }
}
