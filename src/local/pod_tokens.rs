//! The tokens of the pods of a local run, and what the API server answers about them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::api::LINK_AUDIENCE;
use crate::api_server::object_key::{EVENTS, TOKEN_REVIEWS};
use crate::api_server::{ApiRequest, ServerHooks};
use crate::link::pod::{SENSOR_SERVICE_ACCOUNT, SERVICE_ACCOUNT};
use crate::link::server::{PodIdentity, PodKind};

/// The lifetime that a token states: longer than any run. It ends with its pod.
const TOKEN_SECONDS: i64 = 10 * 366 * 86_400;

#[derive(Default)]
pub struct PodTokens(Mutex<HashMap<String, PodIdentity>>);

impl PodTokens {
    /// Issues a token to this pod: in the form of a cluster's, with `secret` in place of a signature.
    pub fn issue(&self, secret: &str, pod: PodIdentity) -> String {
        let claims = json!({
            "aud": [LINK_AUDIENCE],
            "exp": Timestamp::now().as_second() + TOKEN_SECONDS,
            "sub": format!("system:serviceaccount:{}:{}", pod.namespace, account(pod.kind)),
        });
        let token = format!("e30.{}.{secret}", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()));
        self.put(token.clone(), pod);
        token
    }

    fn put(&self, token: String, pod: PodIdentity) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(token, pod);
    }

    /// The pod has ended: revokes its token.
    pub fn remove(&self, pod_uid: &str) {
        let mut tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|_, pod| pod.uid != pod_uid);
    }

    fn get(&self, token: &str) -> Option<PodIdentity> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(token)
            .cloned()
    }

    /// The holder of a token.
    fn review(&self, mut review: Value) -> Value {
        let held = self.get(review["spec"]["token"].as_str().unwrap_or_default());
        review["status"] = match held {
            None => json!({ "authenticated": false }),
            Some(pod) => json!({
                "authenticated": true,
                "audiences": [LINK_AUDIENCE],
                "user": {
                    "username": format!("system:serviceaccount:{}:{}", pod.namespace, account(pod.kind)),
                    "extra": {
                        "authentication.kubernetes.io/pod-name": [pod.name],
                        "authentication.kubernetes.io/pod-uid": [pod.uid],
                    },
                },
            }),
        };
        review
    }
}

impl ServerHooks for PodTokens {
    /// Reviews tokens. Events are accepted and dropped: the output of a run shows the conditions.
    fn answer(&self, request: &ApiRequest, body: &Value) -> Option<Value> {
        match request.resource.as_str() {
            TOKEN_REVIEWS => Some(self.review(body.clone())),
            EVENTS => Some(body.clone()),
            _ => None,
        }
    }
}

/// The service account that identifies the kind of a pod.
fn account(kind: PodKind) -> &'static str {
    match kind {
        PodKind::Agent => SERVICE_ACCOUNT,
        PodKind::Sensor => SENSOR_SERVICE_ACCOUNT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_valid_for_its_pod_until_that_is_deleted() {
        let tokens = PodTokens::default();
        let pod = PodIdentity {
            namespace: "n".into(),
            name: "a".into(),
            uid: "u".into(),
            kind: PodKind::Sensor,
        };
        tokens.put("secret".into(), pod);
        let review = |token: &str| tokens.review(json!({ "spec": { "token": token } }));
        let held = review("secret");
        assert_eq!(held["status"]["authenticated"], true);
        assert_eq!(
            held["status"]["user"]["username"],
            "system:serviceaccount:n:agentloop-sensor"
        );
        assert_eq!(review("other")["status"]["authenticated"], false);
        tokens.remove("u");
        assert_eq!(review("secret")["status"]["authenticated"], false);
    }
}
