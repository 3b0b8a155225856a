//! A JSON-RPC message. What the bridge does not have to know stays byte for byte as it was.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

/// Longest message in bytes, in both directions.
pub(super) const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
const SUBSCRIPTION_META: &str = "io.modelcontextprotocol/subscriptionId";

/// One message. A field that occurs twice is rejected: two parsers could disagree on which one counts.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(super) struct RpcMessage {
    pub(super) jsonrpc: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) method: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) params: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) result: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<Box<RawValue>>,
}

/// The fields of parameters that decide where a message goes.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct MessageRoute {
    pub(super) request_id: Option<Box<RawValue>>,
    pub(super) progress_token: Option<Value>,
    #[serde(rename = "_meta")]
    pub(super) meta: MessageRouteMeta,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct MessageRouteMeta {
    pub(super) progress_token: Option<Value>,
    #[serde(rename = "io.modelcontextprotocol/subscriptionId")]
    pub(super) subscription_id: Option<Value>,
}

impl RpcMessage {
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let message: Self = serde_json::from_slice(bytes).ok()?;
        let is_whole = message.method.is_some() || message.id.is_some();
        (message.jsonrpc == "2.0" && is_whole).then_some(message)
    }

    /// A request that this process makes or answers itself.
    pub(super) fn new() -> Self {
        Self {
            jsonrpc: "2.0".into(),
            ..Self::default()
        }
    }

    pub(super) fn is_request(&self) -> bool {
        self.method.is_some() && self.id.is_some()
    }

    pub(super) fn is_notification(&self) -> bool {
        self.method.is_some() && self.id.is_none()
    }

    pub(super) fn is(&self, method: &str) -> bool {
        self.method.as_deref() == Some(method)
    }

    pub(super) fn routing(&self) -> MessageRoute {
        let params = self.params.as_deref().map_or("{}", RawValue::get);
        // Parameters of another form decide nothing.
        serde_json::from_str(params).unwrap_or_default()
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        // Made of values that are JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn to_line(&self) -> Vec<u8> {
        let mut line = self.to_bytes();
        // A line end inside a message can only be white space.
        line.iter_mut()
            .filter(|byte| matches!(byte, b'\n' | b'\r'))
            .for_each(|byte| *byte = b' ');
        line.push(b'\n');
        line
    }

    /// Replaces the id of a subscription in parameters or a result.
    pub(super) fn set_subscription(&mut self, id: &RawValue) {
        let field = if self.method.is_some() {
            &mut self.params
        } else {
            &mut self.result
        };
        let Some(mut value) = field
            .as_ref()
            .and_then(|raw| serde_json::from_str::<Value>(raw.get()).ok())
        else {
            return;
        };
        let known = value.get_mut("_meta").and_then(|meta| meta.get_mut(SUBSCRIPTION_META));
        let (Some(known), Ok(id)) = (known, serde_json::from_str(id.get())) else {
            return;
        };
        *known = id;
        if let Ok(raw) = serde_json::value::to_raw_value(&value) {
            *field = Some(raw);
        }
    }
}

/// A number as the id of a message.
pub(super) fn number(id: u64) -> Option<Box<RawValue>> {
    RawValue::from_string(id.to_string()).ok()
}

/// An error that this process reports itself.
pub(super) fn error(id: Option<Box<RawValue>>, code: i32, text: &str) -> RpcMessage {
    let error = serde_json::json!({"code": code, "message": text});
    RpcMessage {
        id,
        error: serde_json::value::to_raw_value(&error).ok(),
        ..RpcMessage::new()
    }
}
