//! Why a request is rejected, and the `Status` object that says so.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Why a request is rejected.
#[derive(thiserror::Error, Debug)]
pub enum ApiError {
    #[error("{0} not found")]
    NotFound(String),
    #[error("{0} already exists")]
    AlreadyExists(String),
    /// The object differs from what the request expects.
    #[error("{0}")]
    Conflict(String),
    /// The request does not apply to the object.
    #[error("{0}")]
    Invalid(String),
    /// The history that a watch asks for is gone.
    #[error("too old resource version")]
    Expired,
    /// The server answers no requests at the moment.
    #[error("{0}")]
    Unavailable(String),
    /// The state directory cannot be written.
    #[error("cannot write the state: {0}")]
    Disk(#[from] rusqlite::Error),
    /// No random numbers for a new uid.
    #[error("cannot get random numbers from the system")]
    Random,
}

impl ApiError {
    fn code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NotFound(_) => (StatusCode::NOT_FOUND, "NotFound"),
            Self::AlreadyExists(_) => (StatusCode::CONFLICT, "AlreadyExists"),
            Self::Conflict(_) => (StatusCode::CONFLICT, "Conflict"),
            Self::Invalid(_) => (StatusCode::UNPROCESSABLE_ENTITY, "Invalid"),
            Self::Expired => (StatusCode::GONE, "Expired"),
            Self::Unavailable(_) => (StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable"),
            Self::Disk(_) | Self::Random => (StatusCode::INTERNAL_SERVER_ERROR, "InternalError"),
        }
    }

    /// The `Status` object of the answer.
    #[must_use]
    pub fn status(&self) -> Value {
        let (code, reason) = self.code();
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "reason": reason, "message": self.to_string(), "code": code.as_u16(),
        })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.code().0, Json(self.status())).into_response()
    }
}
