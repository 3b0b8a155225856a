//! What every response of a page forbids, and the script and the style of the page.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// The name of the script, beside the document.
pub const SCRIPT_NAME: &str = "page.js";
/// The name of the style, beside the document.
pub const STYLE_NAME: &str = "page.css";
const SCRIPT: &str = include_str!("page.js");
const STYLE: &str = include_str!("page.css");

/// The content security policy, with what forms may send to.
macro_rules! policy {
    ($forms:literal) => {
        concat!(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
             form-action ",
            $forms,
            "; frame-ancestors 'none'"
        )
    };
}
/// Whether a page has forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageForms {
    /// None. Its URL may be secret, so it is not sent to other sites.
    Absent,
    /// To the page itself. Its own requests name it as their origin, which distinguishes them from those of other sites.
    Own,
}

/// Forbids content and scripts that are not the page's own, other sites, and copies.
pub fn protect(headers: &mut HeaderMap, forms: PageForms) {
    let (policy, referrer) = match forms {
        PageForms::Absent => (policy!("'none'"), "no-referrer"),
        PageForms::Own => (policy!("'self'"), "same-origin"),
    };
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, referrer),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// The script or the style; `None` for another name.
#[must_use]
pub fn asset(name: &str) -> Option<Response> {
    let (kind, text) = match name {
        SCRIPT_NAME => ("text/javascript; charset=utf-8", SCRIPT),
        STYLE_NAME => ("text/css; charset=utf-8", STYLE),
        _ => return None,
    };
    Some(([(header::CONTENT_TYPE, kind)], text).into_response())
}
