//! A gateway for benches: a process as in a pod, attached to a leader of its own.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agentloop::link::messages::BudgetTerms;
use agentloop::link::pod::CONFIG_ENV;
use reqwest::Client;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::leader;

/// Ends with its value.
pub struct GatewayProcess {
    pub process: Child,
    /// Of its record and its socket.
    pub directory: TempDir,
    /// Connects to its socket.
    pub client: Client,
}

impl GatewayProcess {
    /// A gateway of an Agent with this spec and these limits, attached.
    pub async fn start(spec: Value, directory: TempDir, terms: BudgetTerms) -> Self {
        let path = |name: &str| directory.path().join(name);
        let (link, _) = leader::start(terms, None);
        std::fs::write(path("ca.crt"), link.ca).expect("the CA is written");
        std::fs::write(path("token"), "token").expect("the token is written");
        let config = json!({
            "namespace": "ns", "name": "a", "uid": "agent-uid", "epoch": 1, "linkUrl": format!("https://{}", link.address),
            "spec": spec,
        });
        let process = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg("gateway")
            .env_clear()
            .env(CONFIG_ENV, config.to_string())
            .env("AGENTLOOP_SOCKET", path("socket"))
            .env("AGENTLOOP_RECORD_DIR", directory.path())
            .env("AGENTLOOP_LINK_TOKEN_FILE", path("token"))
            .env("AGENTLOOP_LINK_CA_FILE", path("ca.crt"))
            .stdout(Stdio::null())
            .spawn()
            .expect("a gateway starts");
        let client = Client::builder()
            .unix_socket(path("socket"))
            .no_proxy()
            .tls_certs_only([]);
        let gateway = Self {
            process,
            directory,
            client: client.build().expect("a client needs nothing"),
        };
        gateway.attached().await;
        gateway
    }

    async fn attached(&self) {
        let session = || self.client.get("http://gateway/v1/session").send();
        let start = Instant::now();
        while !session().await.is_ok_and(|response| response.status().is_success()) {
            assert!(start.elapsed() < Duration::from_secs(10), "the gateway does not attach");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
