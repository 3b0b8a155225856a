//! Tokens in the shape of a service account's, which say in words what a fake API server is to answer.

use agentloop::api::LINK_AUDIENCE;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::{Value, json};

/// The end of every token: in the year 2100, so that the same words are the same token whenever they are written.
const EXPIRES: i64 = 4_102_444_800;

/// A token whose signature is these words: audience, namespace, service account, pod, uid. Other words are a token
/// without any shape.
pub fn token(words: &str) -> String {
    let parts: Vec<&str> = words.split(' ').collect();
    let [audience, namespace, account, ..] = parts[..] else {
        return words.into();
    };
    forged(
        &json!([audience]),
        EXPIRES,
        &format!("system:serviceaccount:{namespace}:{account}"),
        words,
    )
}

/// A token with these claims, and these words in place of a signature.
pub fn forged(audiences: &Value, expires: i64, subject: &str, words: &str) -> String {
    let claims = json!({"aud": audiences, "exp": expires, "sub": subject}).to_string();
    let [claims, words] = [claims.as_str(), words].map(|part| BASE64_URL_SAFE_NO_PAD.encode(part));
    format!("e30.{claims}.{words}")
}

/// A token that is as good as those of the kubelet until it is reviewed.
pub fn unknown(number: usize) -> String {
    token(&format!("{LINK_AUDIENCE} a agentloop-agent x unknown {number}"))
}

/// The words of a token.
pub fn words(token: &str) -> String {
    let signature = token.rsplit('.').next().unwrap_or_default();
    let words = BASE64_URL_SAFE_NO_PAD.decode(signature).ok();
    words
        .and_then(|words| String::from_utf8(words).ok())
        .unwrap_or_else(|| token.into())
}
