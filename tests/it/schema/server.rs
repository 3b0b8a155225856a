//! The same samples, and what only the API server checks, against a real API server.

use std::path::Path;

use agentloop::api::{Agent, AgentBudget, Sensor, crd};
use axum::http::{Method, Request};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::{conditions, wait::await_condition};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::{Value, json};

use super::budgets::spec as budget;
use super::reader::documents;
use super::samples::{self, openai, scripted, with};
use super::sensors::{source, spec as sensor};
use crate::support::clusters;

/// A namespace of its own on the server, gone again at the end.
pub(super) struct Server {
    client: Client,
    namespace: String,
}

impl Server {
    pub(super) async fn new(kubeconfig: &Path, namespace: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .unwrap();
        let client = Client::try_from(config).unwrap();
        install(&client).await;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let object = Namespace {
            metadata: kube::api::ObjectMeta {
                generate_name: Some(format!("{namespace}-")),
                ..Default::default()
            },
            ..Default::default()
        };
        let made = namespaces.create(&PostParams::default(), &object).await.unwrap();
        Self {
            client,
            namespace: made.name_any(),
        }
    }

    /// Sends an object to the door and no further (unless `keep`); what the server says to it.
    async fn send(&self, method: Method, object: &Value, keep: bool) -> Result<Value, String> {
        let plural = match object["kind"].as_str() {
            Some("AgentBudget") => "agentbudgets",
            Some("Sensor") => "sensors",
            _ => "agents",
        };
        let mut path = format!("/apis/agentloop.dev/v1alpha1/namespaces/{}/{plural}", self.namespace);
        if method == Method::PUT {
            path = format!("{path}/{}", object["metadata"]["name"].as_str().unwrap());
        }
        let dry_run = if keep { "" } else { "&dryRun=All" };
        let request = Request::builder()
            .method(method)
            .uri(format!("{path}?fieldValidation=Strict{dry_run}"))
            .header("content-type", "application/json")
            .body(object.to_string().into_bytes())
            .unwrap();
        self.client
            .request::<Value>(request)
            .await
            .map_err(|error| error.to_string())
    }

    async fn create(&self, object: &Value) -> Result<Value, String> {
        self.send(Method::POST, object, false).await
    }

    /// What the server says to a change of `before` into `object`.
    async fn change(&self, before: &Value, object: &Value) -> Result<Value, String> {
        let made = self.send(Method::POST, before, true).await?;
        let version = json!({"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}});
        let answer = self.send(Method::PUT, &with(object.clone(), &version), false).await;
        let (name, delete) = (before["metadata"]["name"].as_str().unwrap(), DeleteParams::default());
        if before["kind"] == "AgentBudget" {
            let budgets: Api<AgentBudget> = Api::namespaced(self.client.clone(), &self.namespace);
            budgets.delete(name, &delete).await.unwrap();
        } else if before["kind"] == "Sensor" {
            let sensors: Api<Sensor> = Api::namespaced(self.client.clone(), &self.namespace);
            sensors.delete(name, &delete).await.unwrap();
        } else {
            let agents: Api<Agent> = Api::namespaced(self.client.clone(), &self.namespace);
            agents.delete(name, &delete).await.unwrap();
        }
        answer
    }

    async fn refused(&self, object: Value, says: &str) {
        let answer = self.create(&object).await;
        let error = answer.expect_err(says);
        assert!(error.contains(says), "expected «{says}», got: {error}");
    }

    pub(super) async fn done(self) {
        let namespaces: Api<Namespace> = Api::all(self.client);
        namespaces
            .delete(&self.namespace, &DeleteParams::default())
            .await
            .unwrap();
    }
}

/// Installs the definitions as `kubectl apply --server-side` does, and waits until they are served.
async fn install(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in crd::all() {
        let name = definition.name_any();
        let as_schema_tests = PatchParams::apply("agentloop-tests").force();
        definitions
            .patch(&name, &as_schema_tests, &Patch::Apply(&definition))
            .await
            .unwrap();
        await_condition(definitions.clone(), &name, conditions::is_crd_established())
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_real_api_server_judges_every_sample_as_the_local_rules_do() {
    let Some(kubeconfig) = clusters::control_plane() else {
        return;
    };
    let server = Server::new(&kubeconfig, "samples").await;
    for row in samples::rows() {
        for object in &row.passes {
            let answer = match &row.before {
                Some(before) => server.change(before, object).await,
                None => server.create(object).await,
            };
            assert!(answer.is_ok(), "{}: {answer:?} to {object}", row.says);
        }
        let says = row.server_says.unwrap_or(row.says);
        for object in row.fails.iter().chain(&row.server_fails) {
            let answer = match &row.before {
                Some(before) => server.change(before, object).await,
                None => server.create(object).await,
            };
            let error = answer.expect_err(says);
            assert!(error.contains(says), "expected «{says}», got: {error}");
        }
    }
    server.done().await;
}

/// Objects that no rule but the schema itself refuses, and what the server says to them.
#[allow(clippy::too_many_lines)] // A table.
fn refusals() -> Vec<(Value, &'static str)> {
    let spec = |change: Value| with(scripted(), &json!({"spec": change}));
    let model = |change: Value| with(openai(), &json!({"spec": {"model": change}}));
    vec![
        (
            spec(json!({"guardrails": {"maxCallPerTurn": 3}})),
            "unknown field \"spec.guardrails.maxCallPerTurn\"",
        ),
        (spec(json!({"budget": 3})), "unknown field \"spec.budget\""),
        (
            spec(json!({"pod": {"resources": {"claims": [{"name": "gpu"}]}}})),
            "unknown field \"spec.pod.resources.claims\"",
        ),
        (
            spec(json!({"guardrails": {"maxCallsPerTurn": 0}})),
            "spec.guardrails.maxCallsPerTurn: Invalid value: 0",
        ),
        (
            spec(json!({"guardrails": {"maxCallsPerTurn": 1001}})),
            "spec.guardrails.maxCallsPerTurn: Invalid value: 1001",
        ),
        (
            spec(json!({"guardrails": {"actionsPerMinute": 0}})),
            "spec.guardrails.actionsPerMinute: Invalid value: 0",
        ),
        (
            spec(json!({"guardrails": {"actionsPerMinute": 601}})),
            "spec.guardrails.actionsPerMinute: Invalid value: 601",
        ),
        (
            spec(json!({"guardrails": {"maxConsecutiveToolFailures": 0}})),
            "spec.guardrails.maxConsecutiveToolFailures: Invalid value: 0",
        ),
        (
            spec(json!({"guardrails": {"maxConsecutiveToolFailures": 1001}})),
            "spec.guardrails.maxConsecutiveToolFailures: Invalid value: 1001",
        ),
        (
            spec(json!({"guardrails": {"maxConsecutiveTurns": 10_001}})),
            "spec.guardrails.maxConsecutiveTurns: Invalid value",
        ),
        (
            spec(json!({"guardrails": {"rateLimits": [{"resource": "LLMCalls", "amount": 0, "windowSeconds": 60}]}})),
            "spec.guardrails.rateLimits[0].amount: Invalid value: 0",
        ),
        (
            spec(
                json!({"guardrails": {"rateLimits": [{"resource": "LLMCalls", "amount": 1, "windowSeconds": 86_401}]}}),
            ),
            "spec.guardrails.rateLimits[0].windowSeconds: Invalid value: 86401",
        ),
        (
            spec(json!({"guardrails": {"rateLimits": [{"resource": "Luck", "amount": 1, "windowSeconds": 60}]}})),
            "spec.guardrails.rateLimits[0].resource: Unsupported value: \"Luck\"",
        ),
        (
            spec(json!({"guardrails": {"rateLimits": [
                {"resource": "LLMCalls", "amount": 1, "windowSeconds": 60}, {"resource": "LLMCalls", "amount": 2, "windowSeconds": 60},
            ]}})),
            "spec.guardrails.rateLimits[1]: Duplicate value",
        ),
        (
            spec(json!({"guardrails": {"idleTimeoutSeconds": 0}})),
            "spec.guardrails.idleTimeoutSeconds: Invalid value: 0",
        ),
        (
            spec(json!({"guardrails": {"idleTimeoutSeconds": 2_592_001}})),
            "spec.guardrails.idleTimeoutSeconds: Invalid value: 2592001",
        ),
        (
            spec(json!({"guardrails": {"activeHours": {"start": 800, "end": "23:00"}}})),
            "spec.guardrails.activeHours.start: Invalid value: \"integer\"",
        ),
        (
            spec(json!({"guardrails": {"activeHours": {"start": "08:00", "end": "23:00", "days": ["Mon"]}}})),
            "spec.guardrails.activeHours.days[0]: Unsupported value: \"Mon\"",
        ),
        (
            spec(
                json!({"guardrails": {"activeHours": {"start": "08:00", "end": "23:00", "days": ["Monday", "Monday"]}}}),
            ),
            "spec.guardrails.activeHours.days[1]: Duplicate value",
        ),
        (
            spec(json!({"continuous": {"maxSleepSeconds": 2_592_001}})),
            "spec.continuous.maxSleepSeconds: Invalid value",
        ),
        (
            spec(json!({"loop": {"maxConsecutiveErrors": -1}})),
            "spec.loop.maxConsecutiveErrors: Invalid value: -1",
        ),
        (
            spec(json!({"loop": {"historyTokens": 999}})),
            "spec.loop.historyTokens: Invalid value: 999",
        ),
        (
            spec(json!({"memory": {"maxBytes": 1023}})),
            "spec.memory.maxBytes: Invalid value: 1023",
        ),
        (
            spec(json!({"memory": {"maxBytes": 65_537}})),
            "spec.memory.maxBytes: Invalid value: 65537",
        ),
        (
            spec(json!({"loop": {"maxDelayMilliseconds": 99_999_999_999_u64}})),
            "spec.loop.maxDelayMilliseconds: Invalid value",
        ),
        (
            model(json!({"maxOutputTokens": 0})),
            "spec.model.maxOutputTokens: Invalid value: 0",
        ),
        (
            model(json!({"timeoutSeconds": 1.5})),
            "spec.model.timeoutSeconds: Invalid value",
        ),
        (
            model(json!({"timeoutSeconds": "60"})),
            "spec.model.timeoutSeconds: Invalid value: \"string\"",
        ),
        (
            model(json!({"api": "Telepathy"})),
            "spec.model.api: Unsupported value: \"Telepathy\"",
        ),
        (model(json!({"name": ""})), "spec.model.name: Invalid value"),
        (model(json!({"name": " padded "})), "spec.model.name: Invalid value"),
        (
            model(json!({"temperature": 0.7})),
            "spec.model.temperature: Invalid value: \"number\"",
        ),
        (
            model(json!({"apiKeySecretRef": {"name": "No_Name", "key": "k"}})),
            "spec.model.apiKeySecretRef.name: Invalid value",
        ),
        (
            model(json!({"apiKeySecretRef": {"name": "a", "key": "../etc"}})),
            "spec.model.apiKeySecretRef.key: Invalid value",
        ),
        (spec(json!({"instructions": ""})), "spec.instructions: Invalid value"),
        (
            spec(json!({"instructions": "a".repeat(32_769)})),
            "spec.instructions: Too long",
        ),
        (spec(json!({"model": null})), "spec.model: Required value"),
        (
            spec(json!({"pod": {"resources": {"limits": {"memory": "lots"}}}})),
            "spec.pod.resources.limits.memory: Invalid value",
        ),
        (
            spec(json!({"pod": {"labels": {"team": "not a label"}}})),
            "spec.pod.labels.team: Invalid value",
        ),
        (
            spec(json!({"guardrails": {"loopDetection": {"mode": "Off"}}})),
            "spec.guardrails.loopDetection.mode: Unsupported value: \"Off\"",
        ),
        (
            spec(json!({"guardrails": {"loopDetection": {"exemptTools": ["wait for it"]}}})),
            "spec.guardrails.loopDetection.exemptTools[0]: Invalid value",
        ),
        (
            spec(json!({"guardrails": {"loopDetection": {"exemptTools": ["wait", "wait"]}}})),
            "spec.guardrails.loopDetection.exemptTools[1]: Duplicate value",
        ),
        (
            spec(json!({"guardrails": {"total": {"costUSD": 25}}})),
            "spec.guardrails.total.costUSD: Invalid value: \"integer\"",
        ),
        (
            spec(json!({"budgetRefs": [{"name": "a"}, {"name": "a"}]})),
            "spec.budgetRefs[1]: Duplicate value",
        ),
        (
            budget(&json!({"topUps": [{"id": "a", "tokens": 1}, {"id": "a", "tokens": 2}]})),
            "spec.topUps[1]: Duplicate value",
        ),
        (
            budget(&json!({"topUps": [{"tokens": 1}]})),
            "spec.topUps[0].id: Required value",
        ),
        (budget(&json!({"limits": null})), "spec.limits: Required value"),
        (
            budget(&json!({"limits": {"tokens": -1}})),
            "spec.limits.tokens: Invalid value: -1",
        ),
        (
            budget(&json!({"limits": {"token": 1}})),
            "unknown field \"spec.limits.token\"",
        ),
        (
            budget(&json!({"warnAtPercent": 0})),
            "spec.warnAtPercent: Invalid value: 0",
        ),
        (
            budget(&json!({"warnAtPercent": 101})),
            "spec.warnAtPercent: Invalid value: 101",
        ),
        (
            budget(&json!({"window": {"rolling": {"seconds": 0}}})),
            "spec.window.rolling.seconds: Invalid value: 0",
        ),
        (
            budget(&json!({"window": {"rolling": {"seconds": 31_622_401}}})),
            "spec.window.rolling.seconds: Invalid value",
        ),
        (
            budget(&json!({"onExhausted": "Explode"})),
            "spec.onExhausted: Unsupported value: \"Explode\"",
        ),
        (
            budget(&json!({"selector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}})),
            "spec.selector.matchExpressions[0].operator: Unsupported value: \"Is\"",
        ),
        (sensor(&json!({"source": null})), "spec.source: Required value"),
        (
            sensor(&json!({"source": {"schedule": {"cron": "0 8 * * 1-5", "every": "day"}}})),
            "unknown field \"spec.source.schedule.every\"",
        ),
        (
            sensor(&json!({"source": {"schedule": {"cron": "hourly"}}})),
            "spec.source.schedule.cron: Invalid value",
        ),
        (
            sensor(&json!({"source": {"schedule": {"cron": "0 8 * * 1-5", "missed": "All"}}})),
            "spec.source.schedule.missed: Unsupported value: \"All\"",
        ),
        (
            source(&json!({"poll": {"http": {"url": "https://example.com/"}, "intervalSeconds": 0}})),
            "spec.source.poll.intervalSeconds: Invalid value: 0",
        ),
        (
            source(&json!({"poll": {"http": {"url": "https://example.com/"}, "timeoutSeconds": 301}})),
            "spec.source.poll.timeoutSeconds: Invalid value: 301",
        ),
        (
            source(&json!({"stream": {"sse": {"url": "https://example.com/"}, "idleTimeoutSeconds": 0}})),
            "spec.source.stream.idleTimeoutSeconds: Invalid value: 0",
        ),
        (
            source(&json!({"poll": {"tool": {"server": {"url": "https://example.com/"}, "name": "two words"}}})),
            "spec.source.poll.tool.name: Invalid value",
        ),
        (
            source(
                &json!({"poll": {"tool": {"server": {"url": "https://example.com/"}, "name": "t", "arguments": [1]}}}),
            ),
            "spec.source.poll.tool.arguments: Invalid value",
        ),
        (
            source(&json!({"stream": {"webSocket": {"url": "wss://example.com/", "subscribe": ""}}})),
            "spec.source.stream.webSocket.subscribe: Invalid value",
        ),
        (
            source(&json!({"webhook": {"scheme": "None", "secretKeyRef": {"name": "n", "key": "k"}}})),
            "spec.source.webhook.scheme: Unsupported value: \"None\"",
        ),
        (
            source(&json!({"webhook": {"scheme": "GitHub"}})),
            "spec.source.webhook.secretKeyRef: Required value",
        ),
        (
            sensor(&json!({"agentNames": ["Not A Name"]})),
            "spec.agentNames[0]: Invalid value",
        ),
        (
            sensor(&json!({"agentNames": ["a", "a"]})),
            "spec.agentNames[1]: Duplicate value",
        ),
        (
            sensor(&json!({"updates": [{"field": "last prices", "value": "payload"}]})),
            "spec.updates[0].field: Invalid value",
        ),
        (
            sensor(&json!({"updates": [{"field": "a", "value": "1"}, {"field": "a", "value": "2"}]})),
            "spec.updates[1]: Duplicate value",
        ),
        (
            sensor(&json!({"signals": [{"name": "spike", "when": "true", "cooldownSeconds": 86_401}]})),
            "spec.signals[0].cooldownSeconds: Invalid value: 86401",
        ),
        (
            sensor(&json!({"signals": [{"name": "spike", "when": "true", "gate": "All"}]})),
            "spec.signals[0].gate: Unsupported value: \"All\"",
        ),
        (
            sensor(&json!({"limits": {"maxPayloadBytes": 0}})),
            "spec.limits.maxPayloadBytes: Invalid value: 0",
        ),
        (
            sensor(&json!({"limits": {"minIntervalMilliseconds": 3_600_001}})),
            "spec.limits.minIntervalMilliseconds: Invalid value: 3600001",
        ),
        (
            sensor(&json!({"limits": {"perMinute": 60_001}})),
            "spec.limits.perMinute: Invalid value: 60001",
        ),
        (
            spec(json!({"storage": {"accessMode": "ReadWriteMany"}})),
            "spec.storage.accessMode: Unsupported value",
        ),
    ]
}

#[tokio::test]
async fn a_real_api_server_names_misspelt_fields_and_numbers_out_of_bounds() {
    let Some(kubeconfig) = clusters::control_plane() else {
        return;
    };
    let server = Server::new(&kubeconfig, "bounds").await;
    for (object, says) in refusals() {
        server.refused(object, says).await;
    }
    let largest = json!({"spec": {
        "instructions": "é".repeat(32_768),
        "guardrails": {"maxCallsPerTurn": 1000, "maxConsecutiveTurns": 10_000, "actionsPerMinute": 600,
            "maxConsecutiveToolFailures": 1000, "idleTimeoutSeconds": 2_592_000},
        "continuous": {"maxSleepSeconds": 2_592_000},
        "memory": {"maxBytes": 65_536},
        "loop": {"maxDelayMilliseconds": 3_600_000, "maxConsecutiveErrors": 1000, "historyTokens": 10_000_000},
        "pod": {"resources": {"limits": {"memory": "1Gi", "cpu": 2}}},
    }});
    let largest = with(scripted(), &largest);
    assert!(
        server.create(&largest).await.is_ok(),
        "{:?}",
        server.create(&largest).await
    );
    server.done().await;
}

#[tokio::test]
async fn a_real_api_server_accepts_every_example_and_a_new_agent_is_not_ready() {
    let Some(kubeconfig) = clusters::control_plane() else {
        return;
    };
    let server = Server::new(&kubeconfig, "examples").await;
    for (path, mut document) in documents("examples") {
        let kind = document["kind"].as_str().unwrap_or_default();
        if !["Agent", "AgentBudget", "Sensor"].contains(&kind) {
            continue;
        }
        // The platform's budget names a namespace; here all go into that of the test.
        if let Some(metadata) = document["metadata"].as_object_mut() {
            metadata.remove("namespace");
        }
        let made = server
            .create(&document)
            .await
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        let ready = &made["status"]["conditions"][0];
        assert_eq!(
            (&ready["type"], &ready["status"]),
            (&json!("Ready"), &json!("Unknown")),
            "{path}"
        );
        // What the server has filled in is what the code believes the defaults are.
        if document["kind"] == "Agent" {
            let sent: Agent = serde_json::from_value(document).unwrap();
            let stored: Agent = serde_json::from_value(made).unwrap();
            assert_eq!(sent.spec, stored.spec, "{path}");
        } else if document["kind"] == "Sensor" {
            let sent: Sensor = serde_json::from_value(document).unwrap();
            let stored: Sensor = serde_json::from_value(made).unwrap();
            assert_eq!(sent.spec, stored.spec, "{path}");
        } else {
            let sent: AgentBudget = serde_json::from_value(document).unwrap();
            let stored: AgentBudget = serde_json::from_value(made).unwrap();
            assert_eq!(sent.spec, stored.spec, "{path}");
        }
    }
    server.done().await;
}
