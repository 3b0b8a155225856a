//! The bearer token with which a user authenticates to the controller.

use axum::http::{Request, Response};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::client::{Body, ConfigExt};
use kube::{Api, Client, Config};
use reqwest::header::AUTHORIZATION;
use tower::{BoxError, Layer, ServiceExt};

use super::LinkFailure;
use crate::plugin::cluster_errors::{cause, problem};
use crate::plugin::failure::{is_forbidden, is_not_found};

/// Life of a token that is requested. The events of an Agent are authorized again after an hour at the latest.
const TOKEN_SECONDS: i64 = 3_600;

/// Whose token is sent.
pub enum UserToken {
    /// That of the kubeconfig, or of the program that it names.
    Kubeconfig(Box<Config>),
    /// One that is requested for this ServiceAccount in the Agent's namespace.
    ServiceAccount(String),
}

impl UserToken {
    /// A token that is valid now, for requests about an Agent in `namespace`.
    pub(super) async fn obtain(&self, client: &Client, namespace: &str) -> Result<String, LinkFailure> {
        match self {
            Self::Kubeconfig(config) => of_config(config).await?.ok_or_else(|| {
                LinkFailure::Token(format!(
                    "the kubeconfig has no bearer token: it authenticates in another way, such as with a client \
                     certificate, which only the API server can verify. Name a ServiceAccount of namespace {namespace} \
                     that may do this with --service-account NAME: a token is then requested for it. To create one: \
                     kubectl create serviceaccount loop-user -n {namespace}; \
                     kubectl create rolebinding loop-user -n {namespace} --clusterrole=edit --serviceaccount={namespace}:loop-user"
                ))
            }),
            Self::ServiceAccount(name) => requested(client, namespace, name).await,
        }
    }
}

/// The token that a request to the API server would have; `None`: it would have none.
async fn of_config(config: &Config) -> Result<Option<String>, LinkFailure> {
    let wrong = |problem: String| LinkFailure::Token(format!("cannot get the token of the kubeconfig: {problem}"));
    let Some(layer) = config
        .auth_layer()
        .map_err(|error| wrong(cause(&error, Some(config))))?
    else {
        return Ok(None);
    };
    // The layer is asked for what it would send, so that each kind of authentication of kubeconfigs is covered.
    let capture = tower::service_fn(|request: Request<Body>| async move {
        let mut answer = Response::new(());
        *answer.headers_mut() = request.headers().clone();
        Ok::<_, BoxError>(answer)
    });
    let answer = layer.layer(capture).oneshot(Request::new(Body::empty())).await;
    let answer = answer.map_err(|error| wrong(cause(&*error, Some(config))))?;
    let header = answer.headers().get(AUTHORIZATION);
    let value = header.and_then(|value| value.to_str().ok());
    Ok(value.and_then(|value| value.strip_prefix("Bearer ")).map(str::to_owned))
}

async fn requested(client: &Client, namespace: &str, name: &str) -> Result<String, LinkFailure> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let request = TokenRequest {
        spec: TokenRequestSpec {
            expiration_seconds: Some(TOKEN_SECONDS),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let answer = accounts
        .create_token_request(name, &PostParams::default(), &request)
        .await;
    let answer = answer.map_err(|error| {
        let account = format!("ServiceAccount {name} of namespace {namespace}");
        LinkFailure::Token(if is_not_found(&error) {
            format!("{account} does not exist")
        } else if is_forbidden(&error) {
            format!("you may not request a token of {account}: it needs the verb create on serviceaccounts/token")
        } else {
            format!("cannot request a token of {account}: {}", problem(&error))
        })
    })?;
    let token = answer.status.map(|status| status.token);
    token.ok_or_else(|| LinkFailure::Token(format!("the API server returned no token of ServiceAccount {name}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(auth: serde_json::Value) -> Config {
        let mut config = Config::new(axum::http::Uri::from_static("https://example.com"));
        config.auth_info = serde_json::from_value(auth).unwrap();
        config
    }

    #[tokio::test]
    async fn the_token_is_that_of_the_kubeconfig_and_other_kinds_of_authentication_have_none() {
        let token = |auth| async { of_config(&config(auth)).await.unwrap() };
        assert_eq!(token(json!({"token": "abc"})).await.as_deref(), Some("abc"));
        assert_eq!(token(json!({})).await, None);
        assert_eq!(token(json!({"username": "ann", "password": "p"})).await, None);
    }

    #[tokio::test]
    async fn without_a_token_the_message_names_the_flag() {
        let client = Client::try_from(Config::new(axum::http::Uri::from_static("http://127.0.0.1:1"))).unwrap();
        let token = UserToken::Kubeconfig(Box::new(config(json!({}))));
        let problem = token.obtain(&client, "team-a").await.unwrap_err().to_string();
        for part in [
            "of namespace team-a",
            "--service-account NAME",
            "kubectl create serviceaccount loop-user -n team-a;",
            "--serviceaccount=team-a:loop-user",
        ] {
            assert!(problem.contains(part), "{problem}");
        }
    }
}
