//! What the owner of a server may observe and change: the requests, what they store, and what watches deliver.
//!
//! A local run answers reviews of tokens here; tests count requests and inject faults. The defaults change nothing.

use std::time::Duration;

use serde_json::Value;

use super::error::ApiError;
use super::object_store::ObjectChange;
use super::request::ApiRequest;

pub trait ServerHooks: Send + Sync {
    /// Called with every request, before anything else. An error is the answer.
    fn admit(&self, _request: &ApiRequest) -> Result<(), ApiError> {
        Ok(())
    }

    /// Answers a write of a kind that is not stored, such as a review; `None`: it is stored.
    fn answer(&self, _request: &ApiRequest, _body: &Value) -> Option<Value> {
        None
    }

    /// Changes an object before it is stored, as a mutating webhook does.
    fn mutate(&self, _request: &ApiRequest, _object: &mut Value) {}

    /// Time between the end of a request and its answer; watches deliver its changes immediately.
    fn delay(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether watches deliver a change.
    fn delivers(&self, _change: &ObjectChange) -> bool {
        true
    }
}
