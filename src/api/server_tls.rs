//! TLS settings of the servers that an Agent connects to, and the Secrets that they name.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::agent::AgentSpec;
use super::tools::SecretRef;

/// TLS settings, for a server whose certificate is not signed by a system root.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ServerTls {
    /// A Secret with the key `ca.crt`: PEM certificates that are trusted instead of the system's roots. A changed Secret
    /// takes effect with the next request, without a restart.
    pub ca_secret_ref: SecretRef,
}

/// A Secret with the certificates that are trusted for one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaSecret<'a> {
    /// Directory of its key `ca.crt`, below that of all of them in the gateway.
    pub dir: String,
    /// The field of the spec that refers to it.
    pub field: String,
    /// Name of the Secret.
    pub secret: &'a str,
}

/// Directory of the certificates for `spec.model`.
pub const MODEL_CA: &str = "model";
/// Directory of the certificates for `spec.lightModel`.
pub const LIGHT_MODEL_CA: &str = "light-model";

/// Directory of the certificates for `spec.task.responses`.
pub const RESPONSES_CA: &str = "task.responses";

/// Directory of the certificates for a tool server.
#[must_use]
pub fn tool_server_ca(server: &str) -> String {
    format!("tools/{server}")
}

impl AgentSpec {
    /// The Secrets of `tls.caSecretRef` of all model servers and tool servers, and of the receiver of responses.
    #[must_use]
    pub fn ca_secrets(&self) -> Vec<CaSecret<'_>> {
        let models = [
            (MODEL_CA, "spec.model", Some(&self.model)),
            (LIGHT_MODEL_CA, "spec.lightModel", self.light_model.as_ref()),
        ];
        let models = models
            .into_iter()
            .filter_map(|(dir, path, model)| Some((dir.to_owned(), path.to_owned(), model?.tls.as_ref()?)));
        let servers = self.tools.servers.iter().filter_map(|server| {
            let path = format!("spec.tools.servers[{}]", server.name);
            Some((tool_server_ca(&server.name), path, server.tls.as_ref()?))
        });
        let responses = self.response_endpoint().and_then(|http| {
            let path = "spec.task.responses.http".to_owned();
            Some((RESPONSES_CA.to_owned(), path, http.tls.as_ref()?))
        });
        let all = models.chain(servers).chain(responses).map(|(dir, path, tls)| CaSecret {
            dir,
            field: format!("{path}.tls.caSecretRef"),
            secret: &tls.ca_secret_ref.name,
        });
        all.collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(tls: &Value) -> Value {
        let mut model = json!({"api": "OpenAIChat", "name": "m", "baseURL": "https://m/v1"});
        let mut server = json!({"name": "files", "url": "https://files/mcp", "trusted": false});
        let mut receiver = json!({"url": "https://receiver/"});
        if !tls.is_null() {
            model["tls"] = tls.clone();
            server["tls"] = tls.clone();
            receiver["tls"] = tls.clone();
        }
        json!({
            "model": model, "lightModel": model, "tools": {"servers": [server]},
            "task": {"responses": {"http": receiver}},
        })
    }

    fn read(value: Value) -> AgentSpec {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn each_server_with_an_authority_says_which_secret_it_is_and_where() {
        let spec = read(spec(&json!({"caSecretRef": {"name": "roots"}})));
        let found = spec.ca_secrets();
        let found: Vec<_> = found
            .iter()
            .map(|ca| (ca.dir.as_str(), ca.field.as_str(), ca.secret))
            .collect();
        assert_eq!(
            found,
            [
                ("model", "spec.model.tls.caSecretRef", "roots"),
                ("light-model", "spec.lightModel.tls.caSecretRef", "roots"),
                ("tools/files", "spec.tools.servers[files].tls.caSecretRef", "roots"),
                ("task.responses", "spec.task.responses.http.tls.caSecretRef", "roots"),
            ]
        );
        assert_eq!(
            serde_json::to_value(&spec).unwrap()["model"]["tls"],
            json!({"caSecretRef": {"name": "roots"}})
        );
    }

    #[test]
    fn a_spec_without_tls_is_serialized_as_before_the_field_existed() {
        let spec = read(spec(&Value::Null));
        assert_eq!(spec.ca_secrets(), []);
        let written = serde_json::to_value(&spec).unwrap();
        for part in [
            &written["model"],
            &written["lightModel"],
            &written["tools"]["servers"][0],
            &written["task"]["responses"]["http"],
        ] {
            assert!(part.is_object() && part.get("tls").is_none(), "{part}");
        }
    }
}
