//! The field of the spec with the model of a call, as messages name it.

use std::fmt;

use crate::engine::CallPurpose;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelField {
    /// `spec.model`.
    Main,
    /// `spec.lightModel`.
    Light,
}

impl ModelField {
    /// The field with the model that serves calls of this [`CallPurpose`].
    pub fn of(purpose: CallPurpose) -> Self {
        if purpose.uses_light_model() {
            Self::Light
        } else {
            Self::Main
        }
    }
}

impl fmt::Display for ModelField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Main => "spec.model",
            Self::Light => "spec.lightModel",
        })
    }
}
