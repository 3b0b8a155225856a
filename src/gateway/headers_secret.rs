//! A mounted Secret whose keys are header names: the headers that a server outside the pod receives with each request.
//!
//! Read for each request, so that a rotated value is used at once. Messages contain neither its keys nor its values.

use std::path::PathBuf;

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::api::tools::is_tool_header;

/// Longest value of a header.
const MAX_HEADER_BYTES: usize = 16 * 1024;

/// The mounted Secret of a server.
pub(super) struct HeadersSecret {
    pub(super) dir: PathBuf,
    /// For messages.
    pub(super) field: String,
}

impl HeadersSecret {
    /// The headers, or why they cannot be sent.
    pub(super) fn read(&self) -> Result<HeaderMap, String> {
        let mut headers = HeaderMap::new();
        let secret = format!("the Secret of {}", self.field);
        let unreadable = |_| format!("{secret} cannot be read; it is mounted once it exists");
        for entry in std::fs::read_dir(&self.dir).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let key = entry.file_name().to_string_lossy().into_owned();
            // Links and directories of the kubelet.
            if key.starts_with("..") {
                continue;
            }
            if !is_tool_header(&key) {
                return Err(format!(
                    "one of the keys of {secret} is not an allowed header name: remove the key"
                ));
            }
            let value = std::fs::read(entry.path()).map_err(unreadable)?;
            let value = value.trim_ascii_end();
            let value = HeaderValue::from_bytes(value)
                .ok()
                .filter(|_| value.len() <= MAX_HEADER_BYTES);
            let (Ok(name), Some(mut value)) = (HeaderName::try_from(&key), value) else {
                return Err(format!(
                    "one of the values of {secret} is not a single short line of text: correct the value"
                ));
            };
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        Ok(headers)
    }
}
