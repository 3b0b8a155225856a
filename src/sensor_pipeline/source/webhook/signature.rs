//! Verifies the signatures of the two webhook schemes, in constant time, and makes those of Standard Webhooks. Pure.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use ring::hmac;

use crate::source::RepeatRule;
use agentloop_api::source::SignatureScheme;

/// How far a sender's clock may be off; anything signed earlier is a replay.
pub const WINDOW: Duration = Duration::from_mins(5);
/// Shortest key for Standard Webhooks: a shorter one can be guessed, and a bare `whsec_` would be an empty key.
pub const MIN_KEY_BYTES: usize = 16;
/// Maximum number of signatures of one request that are checked: a sender that rotates its key sends two.
const MAX_SIGNATURES: usize = 8;
/// Longest id that is kept; deliveries with a longer one are identified by their text.
const MAX_ID: usize = 256;

const GITHUB_SIGNATURE: &str = "x-hub-signature-256";
const GITHUB_ID: &str = "x-github-delivery";
const STANDARD_ID: &str = "webhook-id";
const STANDARD_TIME: &str = "webhook-timestamp";
const STANDARD_SIGNATURE: &str = "webhook-signature";

/// Why a request is refused. Senders get only the detail that helps an honest one.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignatureError {
    /// A signature header is missing.
    #[error("the request is not signed")]
    Missing,
    /// The signature is for another text or from another key.
    #[error("the signature does not match the body and the key")]
    Wrong,
    /// Signed too long ago, or in the future.
    #[error("the request was signed more than 300 s before or after now")]
    Replayed,
    /// The key in the Secret is not valid for the scheme.
    #[error("the key in the Secret is not valid")]
    Key,
}

#[derive(Clone, Debug)]
pub struct SignatureRule {
    pub scheme: SignatureScheme,
    /// The header with the sender's id; `None`: the scheme's default.
    pub id_header: Option<String>,
}

/// Why a Secret's value is not a valid key for a scheme, as text that follows the field's name.
#[must_use]
pub fn unusable(scheme: SignatureScheme, secret: &[u8]) -> Option<String> {
    let secret = secret.trim_ascii();
    match scheme {
        SignatureScheme::GitHub => secret.is_empty().then(|| "is empty: set it to the webhook's secret".to_owned()),
        SignatureScheme::StandardWebhooks => standard_keys(secret).is_empty().then(|| {
            format!(
                "is not a Standard Webhooks key: it must be whsec_ and base64, or raw bytes, of at least {MIN_KEY_BYTES} \
                 bytes"
            )
        }),
    }
}

/// Signs requests as Standard Webhooks does; [`SignatureRule`] verifies them.
#[derive(Clone)]
pub struct WebhookSigner(hmac::Key);

impl std::fmt::Debug for WebhookSigner {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("WebhookSigner")
    }
}

impl WebhookSigner {
    /// With the key in a Secret: `whsec_` and base64, or raw bytes. The error is text that follows the field's name.
    pub fn new(secret: &[u8]) -> Result<Self, String> {
        if let Some(why) = unusable(SignatureScheme::StandardWebhooks, secret) {
            return Err(why);
        }
        // Without the prefix, the first one is the raw bytes.
        let key = standard_keys(secret.trim_ascii())
            .into_iter()
            .next()
            .unwrap_or_default();
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, &key)))
    }

    /// The headers of a request with this id and body that is sent now.
    #[must_use]
    pub fn headers(&self, id: &str, body: &[u8], now: Timestamp) -> [(&'static str, String); 3] {
        let time = now.as_second().to_string();
        let tag = hmac::sign(&self.0, &signed_text(id, &time, body));
        [
            (STANDARD_ID, id.to_owned()),
            (STANDARD_TIME, time),
            (STANDARD_SIGNATURE, format!("v1,{}", STANDARD.encode(tag))),
        ]
    }
}

/// The text that Standard Webhooks signs.
fn signed_text(id: &str, time: &str, body: &[u8]) -> Vec<u8> {
    [id.as_bytes(), b".", time.as_bytes(), b".", body].concat()
}

impl SignatureRule {
    /// Whether a request has the signature headers; otherwise its body need not be read.
    pub fn is_signed<'a>(&self, header: impl Fn(&str) -> Option<&'a str>) -> bool {
        let needed: &[&str] = match self.scheme {
            SignatureScheme::GitHub => &[GITHUB_SIGNATURE],
            SignatureScheme::StandardWebhooks => &[STANDARD_ID, STANDARD_TIME, STANDARD_SIGNATURE],
        };
        needed.iter().all(|name| header(name).is_some())
    }

    /// When a request is a repeat of an earlier one.
    #[must_use]
    pub fn repeat(&self) -> RepeatRule {
        match self.scheme {
            SignatureScheme::GitHub => RepeatRule::SignedText,
            SignatureScheme::StandardWebhooks => RepeatRule::Id,
        }
    }

    /// Verifies that the sender of `body` has the key; returns the sender's id of the delivery.
    pub fn check<'a>(
        &self,
        secret: &[u8],
        header: impl Fn(&str) -> Option<&'a str>,
        body: &[u8],
        now: Timestamp,
    ) -> Result<Option<String>, SignatureError> {
        let secret = secret.trim_ascii();
        if unusable(self.scheme, secret).is_some() {
            return Err(SignatureError::Key);
        }
        let id = match self.scheme {
            SignatureScheme::GitHub => {
                let signature = header(GITHUB_SIGNATURE).ok_or(SignatureError::Missing)?;
                github(secret, signature, body)?;
                header(self.id_header.as_deref().unwrap_or(GITHUB_ID))
            }
            SignatureScheme::StandardWebhooks => {
                let get = |name| header(name).ok_or(SignatureError::Missing);
                let id = get(STANDARD_ID)?;
                let signed = SignedHeaders {
                    id,
                    time: get(STANDARD_TIME)?,
                    signatures: get(STANDARD_SIGNATURE)?,
                };
                standard(secret, &signed, body, now)?;
                Some(id)
            }
        };
        Ok(id.filter(|id| (1..=MAX_ID).contains(&id.len())).map(str::to_owned))
    }
}

fn github(secret: &[u8], signature: &str, body: &[u8]) -> Result<(), SignatureError> {
    let digits = signature.strip_prefix("sha256=").ok_or(SignatureError::Wrong)?;
    let tag = hex(digits).ok_or(SignatureError::Wrong)?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    hmac::verify(&key, body, &tag).map_err(|_| SignatureError::Wrong)
}

struct SignedHeaders<'a> {
    id: &'a str,
    time: &'a str,
    signatures: &'a str,
}

fn standard(secret: &[u8], signed: &SignedHeaders<'_>, body: &[u8], now: Timestamp) -> Result<(), SignatureError> {
    let keys = standard_keys(secret).into_iter();
    let keys: Vec<_> = keys.map(|key| hmac::Key::new(hmac::HMAC_SHA256, &key)).collect();
    let text = signed_text(signed.id, signed.time, body);
    let mut tags = signed
        .signatures
        .split(' ')
        .take(MAX_SIGNATURES)
        .filter_map(|signature| STANDARD.decode(signature.strip_prefix("v1,")?).ok());
    if !tags.any(|tag| keys.iter().any(|key| hmac::verify(key, &text, &tag).is_ok())) {
        return Err(SignatureError::Wrong);
    }
    // Checked last: a sender without the key learns nothing about the clock.
    let time: i64 = signed.time.parse().map_err(|_| SignatureError::Replayed)?;
    let time = Timestamp::from_second(time).map_err(|_| SignatureError::Replayed)?;
    if now.duration_since(time).unsigned_abs() > WINDOW {
        return Err(SignatureError::Replayed);
    }
    Ok(())
}

/// The keys that a secret may mean. With the prefix it is base64; without, some senders mean the raw bytes and some
/// base64, so both are accepted.
fn standard_keys(secret: &[u8]) -> Vec<Vec<u8>> {
    let (raw, encoded) = match secret.strip_prefix(b"whsec_") {
        Some(encoded) => (None, encoded),
        None => (Some(secret.to_vec()), secret),
    };
    let decoded = STANDARD.decode(encoded).ok();
    let keys = raw.into_iter().chain(decoded);
    keys.filter(|key| key.len() >= MIN_KEY_BYTES).collect()
}

fn hex(digits: &str) -> Option<Vec<u8>> {
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    digits
        .as_bytes()
        .chunks_exact(2)
        .map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?))
        .collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    // The example from GitHub's documentation.
    const SECRET: &[u8] = b"It's a Secret to Everybody";
    const BODY: &[u8] = b"Hello, World!";
    const TAG: &str = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
    // The example from the Standard Webhooks specification.
    const STANDARD_SECRET: &[u8] = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const STANDARD_BODY: &[u8] = br#"{"test": 2432232314}"#;
    const STANDARD_HEADERS: [(&str, &str); 3] = [
        (STANDARD_ID, "msg_p5jXN8AQM9LWM0D4loKWxJek"),
        (STANDARD_TIME, "1614265330"),
        (STANDARD_SIGNATURE, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
    ];
    const SIGNED_AT: i64 = 1_614_265_330;

    fn check(
        scheme: SignatureScheme,
        secret: &[u8],
        headers: &[(&str, &str)],
        body: &[u8],
        now: i64,
    ) -> Result<Option<String>, SignatureError> {
        let rule = SignatureRule {
            scheme,
            id_header: None,
        };
        let header = |name: &str| {
            headers
                .iter()
                .find(|(found, _)| *found == name)
                .map(|(_, value)| *value)
        };
        rule.check(secret, header, body, Timestamp::from_second(now).unwrap())
    }

    fn github_signed(signature: &str) -> Result<Option<String>, SignatureError> {
        let headers = [(GITHUB_SIGNATURE, signature), (GITHUB_ID, "72d3162e")];
        check(SignatureScheme::GitHub, SECRET, &headers, BODY, 0)
    }

    #[test]
    fn the_sample_of_github_is_signed() {
        let id = Some("72d3162e".to_owned());
        assert_eq!(github_signed(&format!("sha256={TAG}")), Ok(id));
    }

    #[rstest]
    #[case::another_algorithm(&format!("sha1={TAG}"))]
    #[case::no_algorithm(TAG)]
    #[case::cut(&format!("sha256={}", &TAG[..62]))]
    #[case::odd(&format!("sha256={}", &TAG[..63]))]
    #[case::longer(&format!("sha256={TAG}00"))]
    #[case::another_digit(&format!("sha256=0{}", &TAG[1..]))]
    #[case::no_digits("sha256=zz")]
    #[case::empty("sha256=")]
    fn any_other_signature_is_wrong(#[case] signature: &str) {
        assert_eq!(github_signed(signature), Err(SignatureError::Wrong));
    }

    #[test]
    fn another_text_or_key_is_wrong_and_no_signature_is_missing() {
        let headers = [(GITHUB_SIGNATURE, format!("sha256={TAG}"))];
        let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        let github = |secret, body| check(SignatureScheme::GitHub, secret, &headers, body, 0);
        assert_eq!(github(SECRET, BODY), Ok(None));
        assert_eq!(github(SECRET, b"Hello, World?"), Err(SignatureError::Wrong));
        assert_eq!(github(b"another", BODY), Err(SignatureError::Wrong));
        assert_eq!(github(b" \n", BODY), Err(SignatureError::Key));
        assert_eq!(
            check(SignatureScheme::GitHub, SECRET, &[], BODY, 0),
            Err(SignatureError::Missing)
        );
    }

    fn standard_at(now: i64) -> Result<Option<String>, SignatureError> {
        check(
            SignatureScheme::StandardWebhooks,
            STANDARD_SECRET,
            &STANDARD_HEADERS,
            STANDARD_BODY,
            now,
        )
    }

    #[test]
    fn the_sample_of_standard_webhooks_is_signed_for_300_seconds_either_way() {
        let id = Ok(Some("msg_p5jXN8AQM9LWM0D4loKWxJek".to_owned()));
        for now in [SIGNED_AT - 300, SIGNED_AT, SIGNED_AT + 300] {
            assert_eq!(standard_at(now), id);
        }
        for now in [SIGNED_AT - 301, SIGNED_AT + 301] {
            assert_eq!(standard_at(now), Err(SignatureError::Replayed));
        }
    }

    #[rstest]
    #[case::another_id(0, "msg_other", SignatureError::Wrong)]
    #[case::another_time(1, "1614265331", SignatureError::Wrong)]
    #[case::no_time(1, "now", SignatureError::Wrong)]
    #[case::another_version(2, "v2,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=", SignatureError::Wrong)]
    #[case::no_base64(2, "v1,???", SignatureError::Wrong)]
    fn a_changed_request_has_a_wrong_signature(
        #[case] which: usize,
        #[case] value: &'static str,
        #[case] why: SignatureError,
    ) {
        let mut headers = STANDARD_HEADERS;
        headers[which].1 = value;
        let checked = check(
            SignatureScheme::StandardWebhooks,
            STANDARD_SECRET,
            &headers,
            STANDARD_BODY,
            SIGNED_AT,
        );
        assert_eq!(checked, Err(why));
    }

    #[test]
    fn a_valid_signature_is_accepted_among_the_first_eight_only() {
        let right = STANDARD_HEADERS[2].1;
        let among = |before: usize| {
            let signatures = ["v1,AAAA "].repeat(before).concat() + right;
            let mut headers = STANDARD_HEADERS;
            headers[2].1 = &signatures;
            check(
                SignatureScheme::StandardWebhooks,
                STANDARD_SECRET,
                &headers,
                STANDARD_BODY,
                SIGNED_AT,
            )
            .is_ok()
        };
        assert!(among(7));
        assert!(!among(8));
    }

    #[rstest]
    #[case::nothing(b"whsec_", false)]
    #[case::an_unset_variable(b"whsec_$UNSET", false)]
    #[case::fifteen_bytes(b"whsec_MTIzNDU2Nzg5MDEyMzQ1", false)]
    #[case::sixteen_bytes(b"whsec_MTIzNDU2Nzg5MDEyMzQ1Ng==", true)]
    #[case::fifteen_raw_bytes(b"123456789-12345", false)]
    #[case::sixteen_raw_bytes(b"123456789-123456", true)]
    #[case::with_a_line_end(b"123456789-123456\n", true)]
    fn a_key_of_standard_webhooks_has_16_bytes_at_least(#[case] secret: &[u8], #[case] usable: bool) {
        assert_eq!(unusable(SignatureScheme::StandardWebhooks, secret).is_none(), usable);
        let checked = check(
            SignatureScheme::StandardWebhooks,
            secret,
            &STANDARD_HEADERS,
            STANDARD_BODY,
            SIGNED_AT,
        );
        let why = if usable {
            SignatureError::Wrong
        } else {
            SignatureError::Key
        };
        assert_eq!(checked, Err(why));
    }

    #[test]
    fn raw_bytes_are_a_key_and_so_is_base64_without_the_prefix() {
        let signed = |key: &[u8]| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, key);
            let tag = hmac::sign(&key, &[b"id.1614265330.", STANDARD_BODY].concat());
            format!("v1,{}", STANDARD.encode(tag))
        };
        // Valid as raw bytes and as base64: only the signature shows which one is meant.
        let secret = b"0123456789abcdef0123456789abcdef";
        for key in [secret.to_vec(), STANDARD.decode(secret).unwrap()] {
            let signature = signed(&key);
            let headers = [
                (STANDARD_ID, "id"),
                (STANDARD_TIME, "1614265330"),
                (STANDARD_SIGNATURE, &*signature),
            ];
            let checked = check(
                SignatureScheme::StandardWebhooks,
                secret,
                &headers,
                STANDARD_BODY,
                SIGNED_AT,
            );
            assert_eq!(checked, Ok(Some("id".to_owned())));
        }
    }

    #[test]
    fn the_sample_of_standard_webhooks_is_signed_as_in_the_specification() {
        let signer = WebhookSigner::new(STANDARD_SECRET).unwrap();
        let now = Timestamp::from_second(SIGNED_AT).unwrap();
        let headers = signer.headers(STANDARD_HEADERS[0].1, STANDARD_BODY, now);
        assert_eq!(
            headers.each_ref().map(|(name, value)| (*name, value.as_str())),
            STANDARD_HEADERS
        );
        assert_eq!(format!("{signer:?}"), "WebhookSigner");
    }

    #[rstest]
    #[case::with_the_prefix(b"whsec_MTIzNDU2Nzg5MDEyMzQ1Ng==")]
    #[case::raw(b"123456789-123456\n")]
    #[case::raw_and_also_base64(b"0123456789abcdef0123456789abcdef")]
    fn a_signature_is_verified_with_the_secret_that_made_it(#[case] secret: &[u8]) {
        let signer = WebhookSigner::new(secret).unwrap();
        let headers = signer.headers("id", BODY, Timestamp::from_second(9).unwrap());
        let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        let check = |body| check(SignatureScheme::StandardWebhooks, secret, &headers, body, 9);
        assert_eq!(check(BODY), Ok(Some("id".to_owned())));
        assert_eq!(check(b"another"), Err(SignatureError::Wrong));
    }

    #[test]
    fn a_secret_that_cannot_verify_cannot_sign_either() {
        for secret in [b"whsec_".as_slice(), b"whsec_MTIzNDU2Nzg5MDEyMzQ1", b"123456789-12345"] {
            let why = WebhookSigner::new(secret).unwrap_err();
            assert!(why.contains("is not a Standard Webhooks key"), "{why}");
        }
    }

    #[test]
    fn an_id_that_is_too_long_is_none() {
        let signature = format!("sha256={TAG}");
        let with = |id: &str| {
            let headers = [(GITHUB_SIGNATURE, signature.as_str()), (GITHUB_ID, id)];
            check(SignatureScheme::GitHub, SECRET, &headers, BODY, 0).unwrap()
        };
        assert_eq!(with(&"x".repeat(256)), Some("x".repeat(256)));
        assert_eq!(with(&"x".repeat(257)), None);
        assert_eq!(with(""), None);
    }
}
