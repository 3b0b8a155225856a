//! The reconciler as a whole: a real kube client and real watches against the in-process API server, in paused time.

use agentloop::api::status::{HandledRequests, LoopOutcome, LoopState, LoopUsage, PauseReason};
use agentloop::api_server::ApiVerb;
use agentloop::link::messages::{HeldReason, LoopReport, ModelReport, PodReport};
use serde_json::{Value, json};
use std::collections::BTreeSet;

use crate::support::harness::{AGENTS, ControllerHarness, NAMESPACE, agent_key, in_state};

fn usage(calls: i64) -> LoopUsage {
    LoopUsage {
        calls,
        input_tokens: calls * 100,
        ..LoopUsage::default()
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_is_running_after_four_writes() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("earlier", &json!({})).await;
    harness.server.take_calls();

    harness.apply("coast", &json!({}));
    harness.settle().await;
    let mut writes = harness.server.take_writes();
    // Pod and claim are made at the same time.
    writes.sort();
    assert_eq!(
        writes,
        [
            "create /persistentvolumeclaims",
            "create /pods",
            "patch agentloop.dev/agents/status"
        ]
    );
    assert_eq!(harness.state("coast"), LoopState::Starting);
    assert_eq!(harness.status("coast").r#loop.unwrap().epoch, 1);
    assert_eq!(harness.ready("coast"), ("False".into(), "Starting".into()));
    assert_eq!(harness.condition("coast", "Reconciling").unwrap().0, "True");

    harness.come_up("coast").await;
    assert_eq!(harness.server.take_writes(), ["patch agentloop.dev/agents/status"]);
    assert_eq!(harness.state("coast"), LoopState::Running);
    assert_eq!(harness.ready("coast"), ("True".into(), "LoopRunning".into()));
    assert_eq!(harness.condition("coast", "Reconciling"), None);
    assert_eq!(harness.status("coast").pod.unwrap().node.as_deref(), Some("node-1"));
}

#[tokio::test(start_paused = true)]
async fn the_first_pod_of_a_namespace_finds_its_account_and_the_ca_bundle() {
    let harness = ControllerHarness::start().await;
    harness.apply("coast", &json!({}));
    harness.settle().await;
    let account = harness
        .server
        .get("/serviceaccounts", NAMESPACE, "agentloop-agent")
        .unwrap();
    assert_eq!(account["automountServiceAccountToken"], false);
    let bundle = |harness: &ControllerHarness| {
        harness
            .server
            .get("/configmaps", NAMESPACE, "agentloop-link-ca")
            .unwrap()["data"]["ca.crt"]
            .clone()
    };
    assert_eq!(bundle(&harness), "CA one");

    harness.running().bundle.send("CA one and two".into()).unwrap();
    harness.settle().await;
    assert_eq!(bundle(&harness), "CA one and two");
}

#[tokio::test(start_paused = true)]
async fn the_pod_is_the_manifest_that_was_agreed() {
    let harness = ControllerHarness::start().await;
    harness.apply(
        "coast",
        &json!({
            "instructions": "Pay $(HOME) and $$5.",
            "model": { "apiKeySecretRef": { "name": "provider", "key": "token" } },
            "pod": {
                "labels": { "team": "a" }, "annotations": { "note": "x" },
                "nodeSelector": { "disk": "ssd" }, "tolerations": [{ "key": "spot", "operator": "Exists" }],
                "imagePullSecrets": [{ "name": "registry" }], "priorityClassName": "low", "runtimeClassName": "gvisor",
            },
        }),
    );
    put_secret(&harness);
    harness.pass(3).await;
    insta::assert_json_snapshot!("pod", harness.pod("coast").unwrap(), {
        ".metadata.creationTimestamp" => "[time]", ".metadata.resourceVersion" => "[version]", ".metadata.uid" => "[uid]",
        ".metadata.ownerReferences[].uid" => "[uid]", ".metadata.annotations[\"agentloop.dev/spec-hash\"]" => "[hash]",
        ".metadata.labels[\"app.kubernetes.io/version\"]" => "[version]",
        ".spec.**.env[0].value" => "[config]",
    });
    let pod = harness.pod("coast").unwrap();
    let config = |container: &serde_json::Value| -> agentloop::link::pod::PodConfig {
        let text = container["env"][0]["value"].as_str().unwrap();
        assert!(!text.contains('$'), "the kubelet would expand it");
        serde_json::from_str(text).unwrap()
    };
    let worker = config(&pod["spec"]["containers"][0]);
    assert_eq!(worker.spec.instructions.as_deref(), Some("Pay $(HOME) and $$5."));
    assert_eq!((worker.epoch, worker.name.as_str()), (1, "coast"));
    let gateway = config(&pod["spec"]["initContainers"][0]);
    assert_eq!(gateway.spec.instructions, None);
}

#[tokio::test(start_paused = true)]
async fn instructions_and_storage_decide_volumes() {
    let harness = ControllerHarness::start().await;
    harness.put_config_map("texts", "coast", "Watch the coast.");
    harness.apply(
        "coast",
        &json!({
            "instructions": null, "instructionsFrom": { "configMapKeyRef": { "name": "texts", "key": "coast" } },
            "storage": { "ephemeral": true, "size": "50Mi" },
        }),
    );
    harness.settle().await;
    let pod = harness.pod("coast").unwrap();
    let volume = |name: &str| {
        let volumes = pod["spec"]["volumes"].as_array().unwrap().clone();
        volumes.into_iter().find(|volume| volume["name"] == name).unwrap()
    };
    assert_eq!(volume("state")["emptyDir"]["sizeLimit"], "50Mi");
    assert_eq!(
        volume("instructions")["configMap"]["items"],
        json!([{ "key": "coast", "path": "text" }])
    );
    assert!(harness.server.list("/persistentvolumeclaims").is_empty());

    harness.apply("kept", &json!({ "storage": { "retentionPolicy": "Retain" } }));
    harness.apply("gone", &json!({}));
    harness.settle().await;
    harness.server.delete(AGENTS, NAMESPACE, "kept");
    harness.server.delete(AGENTS, NAMESPACE, "gone");
    harness.settle().await;
    let claims = harness.server.list("/persistentvolumeclaims");
    assert_eq!(claims.len(), 1, "only the retained claim stays");
    assert_eq!(claims[0]["metadata"]["name"], "kept-state");
}

#[tokio::test(start_paused = true)]
async fn twenty_idle_agents_cost_no_request_but_the_renewal_of_watches() {
    let harness = ControllerHarness::start().await;
    for n in 0..20 {
        harness.bring_up(&format!("agent-{n}"), &json!({})).await;
    }
    harness.pass(30).await;
    harness.server.take_calls();
    for _ in 0..4 {
        for n in 0..20 {
            harness.report(
                &format!("agent-{n}"),
                in_state(LoopState::Running),
                LoopUsage::default(),
            );
        }
        harness.pass(15).await;
    }
    let mut calls = harness.server.take_calls();
    calls.retain(|call| call.verb != ApiVerb::Watch);
    assert_eq!(calls, []);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_controller_writes_nothing_and_keeps_the_status() {
    let mut harness = ControllerHarness::start().await;
    for n in 0..5 {
        harness.bring_up(&format!("agent-{n}"), &json!({})).await;
    }
    harness.report("agent-0", in_state(LoopState::Sleeping), usage(7));
    harness.pass(20).await;
    let before = harness.status("agent-0");
    harness.shut_down().await;
    harness.server.take_calls();

    harness.boot().await;
    harness.pass(50).await;
    assert_eq!(harness.server.take_writes(), [""; 0]);
    assert_eq!(harness.status("agent-0"), before);
    harness.report("agent-0", in_state(LoopState::Sleeping), usage(7));
    harness.pass(5).await;
    assert_eq!(harness.server.take_writes(), [""; 0], "the same said again is no news");
}

fn put_secret(harness: &ControllerHarness) {
    harness.server.put(
        "/secrets",
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "provider", "namespace": NAMESPACE }, "data": { "token": "c2VjcmV0" } }),
    );
}

#[tokio::test(start_paused = true)]
async fn a_missing_secret_is_named_and_heals_by_itself_when_it_appears() {
    let harness = ControllerHarness::start().await;
    harness.apply(
        "coast",
        &json!({ "model": { "apiKeySecretRef": { "name": "provider", "key": "token" } } }),
    );
    harness.pass(20).await;
    assert_eq!(harness.pod("coast"), None);
    assert_eq!(harness.ready("coast"), ("False".into(), "SecretNotFound".into()));
    assert_eq!(harness.condition("coast", "Stalled").unwrap().0, "True");
    assert_eq!(
        harness.condition("coast", "Accepted").unwrap(),
        ("False".into(), "SecretNotFound".into())
    );
    let message = harness
        .status("coast")
        .conditions
        .into_iter()
        .find(|c| c.type_ == "Accepted")
        .unwrap()
        .message;
    assert_eq!(
        message,
        "spec.model.apiKeySecretRef: Secret provider does not exist in this namespace: create it with the key token, or correct the name"
    );
    let writes = harness.server.take_writes();
    assert_eq!(writes, ["patch agentloop.dev/agents/status"], "said once");

    put_secret(&harness);
    harness.pass(31).await;
    harness.come_up("coast").await;
    harness.pass(5).await;
    assert_eq!(harness.ready("coast").0, "True");
    assert_eq!(harness.condition("coast", "Stalled"), None);
}

#[tokio::test(start_paused = true)]
async fn a_light_models_key_and_script_are_required_and_reach_the_gateway_alone() {
    let harness = ControllerHarness::start().await;
    let light = json!({ "api": "OpenAIChat", "name": "small", "baseURL": "http://small/v1",
        "apiKeySecretRef": { "name": "provider", "key": "token" } });
    harness.apply("coast", &json!({ "lightModel": light }));
    harness.pass(20).await;
    assert_eq!(harness.pod("coast"), None);
    assert_eq!(harness.ready("coast"), ("False".into(), "SecretNotFound".into()));
    let message = accepted(&harness, "coast");
    assert!(
        message.starts_with("spec.lightModel.apiKeySecretRef: Secret provider does not exist"),
        "{message}"
    );
    put_secret(&harness);
    harness.pass(31).await;
    harness.come_up("coast").await;
    let pod = harness.pod("coast").unwrap();
    let names = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().unwrap().clone();
        mounts
            .iter()
            .map(|mount| mount["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert!(names(&pod["spec"]["initContainers"][0]).contains(&"light-key".to_owned()));
    assert!(!names(&pod["spec"]["containers"][0]).contains(&"light-key".to_owned()));

    let script = json!({ "api": "Scripted", "name": "small",
        "scripted": { "configMapKeyRef": { "name": "answers", "key": "light" } } });
    harness.apply("shore", &json!({ "lightModel": script }));
    harness.pass(20).await;
    let message = accepted(&harness, "shore");
    assert!(
        message.starts_with("spec.lightModel.scripted.configMapKeyRef: ConfigMap answers does not"),
        "{message}"
    );
    harness.put_config_map("answers", "light", "turns: [{text: '{}'}]");
    harness.pass(31).await;
    harness.come_up("shore").await;
    let pod = harness.pod("shore").unwrap();
    assert!(names(&pod["spec"]["initContainers"][0]).contains(&"light-script".to_owned()));
}

fn accepted(harness: &ControllerHarness, name: &str) -> String {
    let conditions = harness.status(name).conditions;
    let accepted = conditions.into_iter().find(|condition| condition.type_ == "Accepted");
    accepted.map(|condition| condition.message).unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn a_pre_check_without_a_light_model_is_accepted_and_reported_as_ineffective() {
    let harness = ControllerHarness::start().await;
    let asked =
        json!({ "continuous": { "preCheck": {} }, "hotState": { "fields": [{ "name": "n", "type": "Number" }] } });
    harness.bring_up("coast", &asked).await;
    assert_eq!(harness.ready("coast").0, "True");
    assert_eq!(
        accepted(&harness, "coast"),
        "the spec and its references are valid; spec.continuous.preCheck has no effect because spec.lightModel is not set; \
         turns run without a pre-check"
    );
    let off = json!({ "continuous": { "preCheck": { "enabled": false } } });
    harness.bring_up("shore", &off).await;
    assert_eq!(accepted(&harness, "shore"), "the spec and its references are valid");
}

/// An Agent with a tool server whose headers are in the Secret `hub`.
fn with_tools() -> Value {
    json!({ "tools": { "servers": [
        { "name": "hub", "url": "https://hub.example.com/mcp", "headersSecretRef": { "name": "hub" } },
        { "name": "plain", "url": "http://plain/mcp" },
    ] } })
}

fn put_headers(harness: &ControllerHarness, data: &Value) {
    harness.server.put(
        "/secrets",
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "hub", "namespace": NAMESPACE }, "data": data }),
    );
}

#[tokio::test(start_paused = true)]
async fn headers_of_a_tool_server_reach_the_gateway_alone() {
    let harness = ControllerHarness::start().await;
    put_headers(&harness, &json!({ "Authorization": "Y2FuYXJ5", "X-Team": "YQ==" }));
    harness.bring_up("coast", &with_tools()).await;
    let pod = harness.pod("coast").unwrap();
    let mounts = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().unwrap().clone();
        mounts.into_iter().find(|mount| mount["name"] == "tool-hub")
    };
    let gateway = mounts(&pod["spec"]["initContainers"][0]).unwrap();
    assert_eq!(gateway["mountPath"], "/etc/agentloop/tools/hub");
    assert_eq!(gateway["readOnly"], true);
    assert_eq!(mounts(&pod["spec"]["containers"][0]), None);
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let secrets: Vec<_> = volumes.iter().filter(|volume| !volume["secret"].is_null()).collect();
    assert_eq!(secrets.len(), 1);
    assert_eq!(
        secrets[0]["secret"],
        json!({ "secretName": "hub", "defaultMode": 0o440 })
    );
    assert!(!harness.agent("coast").status.is_none_or(|status| {
        let status = serde_json::to_string(&status).unwrap();
        status.contains("canary") || status.contains("Y2FuYXJ5")
    }));
}

#[tokio::test(start_paused = true)]
async fn a_missing_or_odd_secret_of_headers_is_named_and_heals_when_it_is_right() {
    let harness = ControllerHarness::start().await;
    let said = |reason: &str, words: &str| {
        assert_eq!(
            harness.condition("coast", "Accepted"),
            Some(("False".into(), reason.into()))
        );
        let conditions = harness.status("coast").conditions;
        let accepted = conditions
            .into_iter()
            .find(|condition| condition.type_ == "Accepted")
            .unwrap();
        assert_eq!(
            accepted.message,
            format!("spec.tools.servers[hub].headersSecretRef: Secret hub {words}")
        );
        assert_eq!(harness.pod("coast"), None);
    };
    harness.apply("coast", &with_tools());
    harness.pass(20).await;
    said(
        "SecretNotFound",
        "does not exist in this namespace: create it with a key for each header, such as Authorization, or correct the name",
    );
    put_headers(&harness, &json!({}));
    harness.pass(31).await;
    said(
        "SecretNotFound",
        "has no key: add one for each header, such as Authorization",
    );
    put_headers(&harness, &json!({ "Authorization": "YQ==", "Content-Length": "YQ==" }));
    harness.pass(31).await;
    said(
        "InvalidSpec",
        "has a key that is not an allowed header name, and each key is sent as a header: remove each key with other \
         characters than letters, digits, -, _ and ., and headers that are set automatically, such as Host, or reference \
         another Secret",
    );
    put_headers(&harness, &json!({ "Authorization": "YQ==", "Content-Length": null }));
    harness.pass(31).await;
    harness.come_up("coast").await;
    harness.pass(5).await;
    assert_eq!(harness.ready("coast").0, "True");
}

#[tokio::test(start_paused = true)]
async fn each_invalid_reference_has_its_own_message() {
    let harness = ControllerHarness::start().await;
    harness.apply(
        "no-key",
        &json!({ "model": { "scripted": { "configMapKeyRef": { "key": "other" } } } }),
    );
    harness.apply(
        "no-map",
        &json!({ "model": { "scripted": { "configMapKeyRef": { "name": "absent" } } } }),
    );
    harness.put_config_map("broken", "turns", "turns: 7");
    harness.apply(
        "broken",
        &json!({ "model": { "scripted": { "configMapKeyRef": { "name": "broken" } } } }),
    );
    let long = "a".repeat(64);
    harness.apply(&long, &json!({}));
    harness.apply(&long[..63], &json!({}));
    harness.settle().await;
    for (name, reason, words) in [
        ("no-key", "ConfigMapNotFound", "has no key other"),
        ("no-map", "ConfigMapNotFound", "ConfigMap absent does not exist"),
        ("broken", "InvalidSpec", "is not a valid script"),
        (&long, "InvalidSpec", "at most 63"),
    ] {
        let accepted = harness
            .status(name)
            .conditions
            .into_iter()
            .find(|c| c.type_ == "Accepted")
            .unwrap();
        assert_eq!(
            (accepted.status.as_str(), accepted.reason.as_str()),
            ("False", reason),
            "{name}"
        );
        assert!(accepted.message.contains(words), "{}", accepted.message);
        assert_eq!(harness.pod(name), None);
    }
    assert!(harness.pod(&long[..63]).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_workspace_has_a_claim_of_its_own_that_only_the_worker_mounts_and_cannot_write() {
    let harness = ControllerHarness::start().await;
    harness.apply("coast", &json!({}));
    harness.pass(3).await;
    assert_eq!(claim(&harness, "coast-workspace"), None);
    assert_eq!(workspace_of(&harness.pod("coast").unwrap()), None);
    // A known claim does not prevent the creation of the other one.
    harness.apply(
        "coast",
        &json!({ "workspace": { "size": "2Gi", "storageClassName": "fast" }, "pod": { "updateStrategy": "Immediate" } }),
    );
    harness.pass(3).await;
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(6).await;
    let claim = claim(&harness, "coast-workspace").unwrap();
    assert_eq!(claim["spec"]["resources"]["requests"]["storage"], "2Gi");
    assert_eq!(claim["spec"]["storageClassName"], "fast");
    assert_eq!(claim["metadata"]["ownerReferences"][0]["name"], "coast");
    assert_eq!(
        workspace_of(&harness.pod("coast").unwrap()).as_deref(),
        Some("coast-workspace")
    );
}

#[tokio::test(start_paused = true)]
async fn a_workspace_whose_claim_is_missing_has_no_pod_until_it_is_there() {
    let harness = ControllerHarness::start().await;
    harness.apply("coast", &json!({ "workspace": { "claimName": "shared" } }));
    harness.pass(3).await;
    let conditions = harness.status("coast").conditions;
    let accepted = conditions.into_iter().find(|c| c.type_ == "Accepted").unwrap();
    assert_eq!(
        (accepted.status.as_str(), accepted.reason.as_str()),
        ("False", "VolumeClaimNotFound")
    );
    assert!(
        accepted
            .message
            .starts_with("spec.workspace.claimName: PersistentVolumeClaim shared does not exist"),
        "{}",
        accepted.message
    );
    assert_eq!(harness.pod("coast"), None);
    harness.server.put(
        "/persistentvolumeclaims",
        json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {
            "name": "shared", "namespace": NAMESPACE, "labels": { "agentloop.dev/workspace": "true" },
        } }),
    );
    harness.pass(31).await;
    assert_eq!(workspace_of(&harness.pod("coast").unwrap()).as_deref(), Some("shared"));
    assert_eq!(claim(&harness, "coast-workspace"), None);
}

fn claim(harness: &ControllerHarness, name: &str) -> Option<serde_json::Value> {
    harness.server.get("/persistentvolumeclaims", NAMESPACE, name)
}

/// The claim of a pod's workspace, which the worker may read and the gateway does not see.
fn workspace_of(pod: &serde_json::Value) -> Option<String> {
    let named = |list: &serde_json::Value| {
        let mut entries = list.as_array().into_iter().flatten();
        entries.find(|entry| entry["name"] == "workspace").cloned()
    };
    let volume = named(&pod["spec"]["volumes"]);
    let mount = json!({ "name": "workspace", "mountPath": "/workspace", "readOnly": true });
    let worker = named(&pod["spec"]["containers"][0]["volumeMounts"]);
    assert_eq!(worker, volume.as_ref().map(|_| mount));
    assert_eq!(named(&pod["spec"]["initContainers"][0]["volumeMounts"]), None);
    let claim = volume?["persistentVolumeClaim"]["claimName"].clone();
    claim.as_str().map(str::to_owned)
}

#[tokio::test(start_paused = true)]
async fn skills_are_mounted_together_once_all_of_them_are_there_and_not_too_large() {
    let harness = ControllerHarness::start().await;
    let skill =
        |name: &str, map: &str, key: &str| json!({ "name": name, "configMapKeyRef": { "name": map, "key": key } });
    let skills = [
        skill("triage", "skills", "triage.md"),
        skill("answer", "more", "answer.md"),
    ];
    harness.apply("coast", &json!({ "skills": skills }));
    harness.pass(20).await;
    let said = |reason: &str, words: &str| {
        let conditions = harness.status("coast").conditions;
        let accepted = conditions.into_iter().find(|c| c.type_ == "Accepted").unwrap();
        assert_eq!((accepted.status.as_str(), accepted.reason.as_str()), ("False", reason));
        assert!(accepted.message.contains(words), "{}", accepted.message);
        assert_eq!(harness.pod("coast"), None);
    };
    said(
        "ConfigMapNotFound",
        "spec.skills[triage].configMapKeyRef: ConfigMap skills does not exist in this namespace: create it with the key triage.md",
    );
    harness.put_config_map("skills", "other.md", "Look.");
    harness.pass(31).await;
    said("ConfigMapNotFound", "ConfigMap skills has no key triage.md");
    harness.put_config_map("skills", "triage.md", &"x".repeat(131_072));
    harness.put_config_map("more", "answer.md", " ");
    harness.pass(31).await;
    said(
        "InvalidSpec",
        "spec.skills[answer].configMapKeyRef: key answer.md of ConfigMap more is empty",
    );
    harness.put_config_map("more", "answer.md", "y");
    harness.pass(31).await;
    said(
        "InvalidSpec",
        "spec.skills: the skills have 131073 bytes in total; the maximum is 131072",
    );
    harness.put_config_map("skills", "triage.md", &"x".repeat(131_071));
    harness.pass(31).await;
    let pod = harness.pod("coast").unwrap();
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let volume = volumes.iter().find(|volume| volume["name"] == "skills").unwrap();
    let source = |map: &str, key: &str, path: &str| json!({ "configMap": { "name": map, "items": [{ "key": key, "path": path }] } });
    assert_eq!(
        volume["projected"]["sources"],
        json!([
            source("skills", "triage.md", "triage"),
            source("more", "answer.md", "answer")
        ])
    );
    let mounted = |container: &serde_json::Value| {
        let mounts = container["volumeMounts"].as_array().unwrap();
        mounts.iter().any(|mount| mount["mountPath"] == "/etc/agentloop/skills")
    };
    assert!(mounted(&pod["spec"]["containers"][0]));
    assert!(
        !mounted(&pod["spec"]["initContainers"][0]),
        "the gateway does not see them"
    );
}

#[tokio::test(start_paused = true)]
async fn a_suspension_notifies_the_loop_then_deletes_the_pod_and_keeps_ready() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.pass(20).await;
    let (_, directives) = harness
        .running()
        .loops
        .attach(&agent_key("coast"), &harness.live_pod("coast"), (harness.clock)())
        .unwrap();

    harness.apply("coast", &json!({ "suspend": true }));
    harness.settle().await;
    assert!(directives.borrow().suspend);
    assert!(
        harness.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_null(),
        "it may say goodbye first"
    );
    harness.report("coast", in_state(LoopState::Stopped), usage(3));
    harness.settle().await;
    assert!(harness.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(harness.condition("coast", "Suspended").unwrap().0, "True");

    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(6).await;
    let status = harness.status("coast");
    let loop_ = status.r#loop.clone().unwrap();
    assert_eq!(
        (loop_.state, loop_.reasons),
        (LoopState::Stopped, vec![PauseReason::SuspendedBySpec])
    );
    assert_eq!(status.usage.unwrap().calls, 3);
    assert_eq!(harness.ready("coast"), ("True".into(), "SuspendedBySpec".into()));
    assert_eq!(harness.condition("coast", "Reconciling"), None);
    assert_eq!(harness.pod("coast"), None);

    harness.apply("coast", &json!({ "suspend": false }));
    harness.settle().await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
    harness.come_up("coast").await;
    harness.pass(10).await;
    assert_eq!(harness.state("coast"), LoopState::Running);
    assert_eq!(harness.condition("coast", "Suspended").unwrap().0, "False");
}

#[tokio::test(start_paused = true)]
async fn a_suspended_pod_that_does_not_answer_is_ended_after_three_seconds() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.apply("coast", &json!({ "suspend": true }));
    harness.pass(2).await;
    assert!(harness.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_null());
    harness.pass(2).await;
    assert!(harness.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());
}

#[tokio::test(start_paused = true)]
async fn a_new_spec_is_applied_when_the_loop_is_idle_unless_the_update_strategy_differs() {
    let harness = ControllerHarness::start().await;
    for (name, strategy) in [("idle", "WhenIdle"), ("now", "Immediate"), ("never", "OnDelete")] {
        harness
            .bring_up(name, &json!({ "pod": { "updateStrategy": strategy } }))
            .await;
        let changed = json!({ "instructions": "Watch the sky.", "pod": { "updateStrategy": strategy } });
        harness.apply(name, &changed);
    }
    harness.pass(6).await;
    let ending = |name: &str| harness.pod(name).unwrap()["metadata"]["deletionTimestamp"].is_string();
    assert_eq!(["idle", "now", "never"].map(ending), [false, true, false]);
    assert_eq!(harness.condition("idle", "Reconciling").unwrap().1, "UpdatePending");
    assert_eq!(harness.condition("never", "Reconciling"), None);

    for name in ["idle", "never"] {
        harness.report(name, in_state(LoopState::Sleeping), LoopUsage::default());
    }
    harness.pass(6).await;
    assert_eq!(["idle", "never"].map(ending), [true, false]);
    harness.server.finish_pod(NAMESPACE, "idle");
    harness.settle().await;
    assert_eq!(harness.live_pod("idle").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn a_new_controller_version_replaces_only_pods_with_the_immediate_strategy() {
    let mut harness = ControllerHarness::start().await;
    harness.bring_up("idle", &json!({})).await;
    harness
        .bring_up("now", &json!({ "pod": { "updateStrategy": "Immediate" } }))
        .await;
    harness.shut_down().await;
    harness.settings.image = "agentloop:next".into();
    harness.boot().await;
    harness.report("idle", in_state(LoopState::Sleeping), LoopUsage::default());
    harness.pass(20).await;
    let ending = |name: &str| harness.pod(name).unwrap()["metadata"]["deletionTimestamp"].is_string();
    assert_eq!(["idle", "now"].map(ending), [false, true]);
}

#[tokio::test(start_paused = true)]
async fn a_new_spec_that_cannot_run_leaves_the_running_loop_alone() {
    let harness = ControllerHarness::start().await;
    harness
        .bring_up("coast", &json!({ "pod": { "updateStrategy": "Immediate" } }))
        .await;
    harness.apply(
        "coast",
        &json!({ "model": { "apiKeySecretRef": { "name": "provider", "key": "token" } }, "pod": { "updateStrategy": "Immediate" } }),
    );
    harness.pass(20).await;
    assert!(harness.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_null());
    assert_eq!(harness.ready("coast"), ("False".into(), "SecretNotFound".into()));
    assert_eq!(harness.state("coast"), LoopState::Running);
    put_secret(&harness);
    harness.pass(31).await;
    assert!(harness.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());
}

fn completed() -> LoopReport {
    LoopReport {
        outcome: Some(LoopOutcome::Completed),
        ..in_state(LoopState::Stopped)
    }
}

#[tokio::test(start_paused = true)]
async fn a_loop_that_ended_itself_rests_until_a_new_request_or_spec() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.report("coast", completed(), usage(1));
    harness.pass(6).await;
    assert!(harness.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(20).await;
    assert_eq!(harness.pod("coast"), None);
    assert_eq!(harness.ready("coast"), ("True".into(), "Completed".into()));
    let status = harness.status("coast").r#loop.unwrap();
    assert_eq!(
        (status.state, status.outcome),
        (LoopState::Stopped, Some(LoopOutcome::Completed))
    );

    harness.annotate("coast", "agentloop.dev/wake", "monday");
    harness.settle().await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
    assert_eq!(harness.status("coast").r#loop.unwrap().outcome, None);
    let handled = HandledRequests {
        wake: Some("monday".into()),
        ..HandledRequests::default()
    };
    assert_eq!(
        harness.status("coast").last_handled_requests,
        Some(handled),
        "each value starts it once"
    );

    harness.come_up("coast").await;
    harness.report("coast", completed(), usage(2));
    harness.pass(6).await;
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(20).await;
    assert_eq!(harness.pod("coast"), None);
    harness.apply("coast", &json!({ "instructions": "Watch the sky." }));
    harness.settle().await;
    assert_eq!(harness.live_pod("coast").epoch, 3);
}

#[tokio::test(start_paused = true)]
async fn a_loop_ended_by_idleness_restarts_on_a_wake_request_or_new_spec_and_cannot_be_resumed() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    let idle = || LoopReport {
        outcome: Some(LoopOutcome::Idle),
        ..in_state(LoopState::Stopped)
    };
    harness.report("coast", idle(), usage(1));
    harness.pass(6).await;
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(20).await;
    assert_eq!(harness.ready("coast"), ("True".into(), "IdleTimeoutReached".into()));
    harness.annotate("coast", "agentloop.dev/resume", "monday");
    harness.pass(20).await;
    assert_eq!(harness.pod("coast"), None);
    harness.annotate("coast", "agentloop.dev/wake", "monday");
    harness.settle().await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
    harness.come_up("coast").await;
    assert_eq!(harness.ready("coast"), ("True".into(), "LoopRunning".into()));

    harness.report("coast", idle(), usage(2));
    harness.pass(6).await;
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(20).await;
    harness.apply("coast", &json!({ "guardrails": { "idleTimeoutSeconds": 3600 } }));
    harness.settle().await;
    assert_eq!(harness.live_pod("coast").epoch, 3);
}

#[tokio::test(start_paused = true)]
async fn a_stopped_loop_rests_and_no_stop_request_outlives_its_end() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.annotate("coast", "agentloop.dev/stop", "monday");
    harness.settle().await;
    let (_, directives) = harness
        .running()
        .loops
        .attach(&agent_key("coast"), &harness.live_pod("coast"), (harness.clock)())
        .unwrap();
    assert_eq!(directives.borrow().stop.as_deref(), Some("monday"));
    let mut stopped = LoopReport {
        outcome: Some(LoopOutcome::Cancelled),
        ..in_state(LoopState::Stopped)
    };
    stopped.handled.stop = Some("monday".into());
    harness.report("coast", stopped, usage(1));
    harness.pass(6).await;
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(20).await;
    assert_eq!(harness.pod("coast"), None);
    assert_eq!(harness.ready("coast"), ("True".into(), "Cancelled".into()));

    // There is nothing to stop: the request must not end the loop when it is started.
    harness.annotate("coast", "agentloop.dev/stop", "tuesday");
    harness.settle().await;
    let handled = |harness: &ControllerHarness| harness.status("coast").last_handled_requests.unwrap().stop;
    assert_eq!(handled(&harness).as_deref(), Some("tuesday"));
    assert_eq!(harness.pod("coast"), None);
    harness.annotate("coast", "agentloop.dev/resume", "wednesday");
    harness.settle().await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
    assert_eq!(harness.status("coast").r#loop.unwrap().outcome, None);
    assert_eq!(handled(&harness).as_deref(), Some("tuesday"));
}

#[tokio::test(start_paused = true)]
async fn a_request_to_stop_reaches_each_pod_until_an_end_is_reported() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.annotate("coast", "agentloop.dev/stop", "monday");
    harness.settle().await;
    let stop = || {
        let attached =
            harness
                .running()
                .loops
                .attach(&agent_key("coast"), &harness.live_pod("coast"), (harness.clock)());
        attached.unwrap().1.borrow().stop.clone()
    };
    assert_eq!(stop().as_deref(), Some("monday"));
    // The pod is lost with its last report.
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(20).await;
    harness.come_up("coast").await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
    assert_eq!(stop().as_deref(), Some("monday"));
    let mut stopped = LoopReport {
        outcome: Some(LoopOutcome::Cancelled),
        ..in_state(LoopState::Stopped)
    };
    stopped.handled.stop = Some("monday".into());
    harness.report("coast", stopped, usage(1));
    harness.pass(6).await;
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(20).await;
    assert_eq!(harness.pod("coast"), None);

    // Of a wake request and a stop that are seen together, the stop counts.
    harness.annotate("coast", "agentloop.dev/stop", "tuesday");
    harness.annotate("coast", "agentloop.dev/wake", "tuesday");
    harness.settle().await;
    assert_eq!(harness.pod("coast"), None);
    let handled = harness.status("coast").last_handled_requests.unwrap();
    assert_eq!(
        (handled.wake.as_deref(), handled.stop.as_deref()),
        (Some("tuesday"), Some("tuesday"))
    );
    harness.annotate("coast", "agentloop.dev/wake", "wednesday");
    harness.settle().await;
    assert_eq!(harness.live_pod("coast").epoch, 3);
    assert_eq!(stop(), None);
}

#[tokio::test(start_paused = true)]
async fn a_request_reaches_the_loop_and_leaves_once_it_was_handled() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.annotate("coast", "agentloop.dev/resume", "now");
    harness.settle().await;
    let attach = || {
        harness
            .running()
            .loops
            .attach(&agent_key("coast"), &harness.live_pod("coast"), (harness.clock)())
            .unwrap()
            .1
    };
    assert_eq!(attach().borrow().resume.as_deref(), Some("now"));
    let mut report = in_state(LoopState::Running);
    report.handled.resume = Some("now".into());
    harness.report("coast", report, LoopUsage::default());
    harness.pass(6).await;
    assert_eq!(
        harness.status("coast").last_handled_requests.unwrap().resume.as_deref(),
        Some("now")
    );
    harness.annotate("coast", "agentloop.dev/wake", "later");
    harness.settle().await;
    assert_eq!(attach().borrow().resume, None);
    assert_eq!(attach().borrow().wake.as_deref(), Some("later"));
}

#[tokio::test(start_paused = true)]
async fn no_second_pod_is_made_while_the_first_is_ending() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    let first = harness.live_pod("coast");
    harness.server.delete("/pods", NAMESPACE, "coast");
    harness.server.take_calls();
    harness.pass(29).await;
    assert!(harness.server.take_calls().iter().all(|call| call.resource != "/pods"));
    assert_eq!(harness.live_pod("coast"), first);
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.settle().await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn a_pod_on_an_unresponsive_node_is_left_to_a_person_and_on_a_deleted_node_force_deleted() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    let node = |ready: &str| {
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node-1", "namespace": "" },
            "status": { "conditions": [{ "type": "Ready", "status": ready }] } })
    };
    harness.server.put("/nodes", node("Unknown"));
    harness.server.delete("/pods", NAMESPACE, "coast");
    harness.pass(120).await;
    assert!(harness.pod("coast").is_some());
    assert_eq!(
        harness.condition("coast", "PodReady").unwrap(),
        ("False".into(), "NodeLost".into())
    );
    assert_eq!(harness.condition("coast", "Stalled").unwrap().1, "NodeLost");
    let message = harness
        .status("coast")
        .conditions
        .into_iter()
        .find(|c| c.type_ == "PodReady")
        .unwrap()
        .message;
    assert!(
        message.contains("kubectl delete pod -n team-a coast --force --grace-period=0"),
        "{message}"
    );

    harness.server.delete("/nodes", "", "node-1");
    harness.pass(61).await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_a_volume_on_an_unresponsive_node_is_force_deleted_once_it_cannot_act() {
    let harness = ControllerHarness::start().await;
    let tools = json!({"servers": [{"name": "hub", "url": "http://hub/mcp",
        "tools": [{"name": "build", "timeoutSeconds": 600}]}]});
    harness
        .bring_up("coast", &json!({"storage": {"ephemeral": true}, "tools": tools}))
        .await;
    harness.server.put(
        "/nodes",
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node-1", "namespace": "" },
            "status": { "conditions": [{ "type": "Ready", "status": "Unknown" }] } }),
    );
    harness.server.delete("/pods", NAMESPACE, "coast");
    // The run lease of 60 s and the longest run of 600 s; it spoke last when it came up.
    harness.pass(655).await;
    assert_eq!(harness.live_pod("coast").epoch, 1);
    assert_eq!(harness.condition("coast", "PodReady").unwrap().1, "NodeLost");
    harness.pass(70).await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn an_evicted_pod_is_replaced_with_backoff() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    let mut made = Vec::new();
    for _ in 0..4 {
        let pod = harness.pod("coast").unwrap();
        made.push(harness.live_pod("coast").epoch);
        harness.server.put(
            "/pods",
            json!({ "metadata": { "name": "coast", "namespace": NAMESPACE }, "spec": pod["spec"],
                "status": { "phase": "Failed", "reason": "Evicted", "message": "no disk", "conditions": [] } }),
        );
        harness.settle().await;
        harness.server.finish_pod(NAMESPACE, "coast");
        harness.settle().await;
        assert_eq!(harness.pod("coast"), None, "not at once");
        harness.pass(9).await;
    }
    assert_eq!(made, [1, 2, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_outage_of_thirty_seconds_loses_nothing() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.pass(20).await;
    harness.server.set_away(true);
    let mut report = in_state(LoopState::Paused);
    report.reasons = vec![HeldReason {
        reason: PauseReason::ConsecutiveErrors,
        until: Some((harness.clock)() + jiff::SignedDuration::from_mins(5)),
        message: "5 turns failed in a row".into(),
    }];
    harness.report("coast", report.clone(), usage(9));
    harness.apply("born-meanwhile", &json!({}));
    harness.pass(30).await;
    assert_eq!(harness.pod("born-meanwhile"), None);
    harness.server.set_away(false);
    // The link does not need the API server: the pod continues to report.
    harness.report("coast", report, usage(9));
    harness.pass(40).await;
    assert_eq!(harness.status("coast").usage.unwrap().calls, 9);
    assert_eq!(
        harness.condition("coast", "ErrorLimitReached").unwrap(),
        ("True".into(), "ConsecutiveErrors".into())
    );
    assert_eq!(harness.ready("coast"), ("True".into(), "ErrorLimitReached".into()));
    assert!(harness.pod("born-meanwhile").is_some());
    assert_eq!(harness.live_pod("coast").epoch, 1);
}

#[tokio::test(start_paused = true)]
async fn numbers_and_naps_are_written_every_fifteen_seconds_at_most() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.pass(30).await;
    harness.server.take_calls();
    for second in 0..60 {
        let state = if second % 2 == 0 {
            LoopState::Running
        } else {
            LoopState::Sleeping
        };
        harness.report("coast", in_state(state), usage(second));
        harness.pass(1).await;
    }
    let writes = harness.server.take_writes().len();
    assert!((3..=5).contains(&writes), "{writes} writes in a busy minute");
    harness.pass(16).await;
    assert_eq!(
        harness.status("coast").usage.unwrap().calls,
        59,
        "the last word is written"
    );
}

#[tokio::test(start_paused = true)]
async fn flapping_conditions_are_written_every_five_seconds_at_most() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.pass(30).await;
    harness.server.take_calls();
    for second in 0..60 {
        let failure = (second % 2 == 0).then_some(agentloop::api::failure::FailureKind::Unreachable);
        let model = ModelReport {
            failure,
            message: String::new(),
        };
        harness.say(
            "coast",
            PodReport {
                loop_: Some(in_state(LoopState::Running)),
                model: Some(model),
                ..PodReport::default()
            },
        );
        harness.pass(1).await;
    }
    let writes = harness.server.take_writes().len();
    assert!((11..=14).contains(&writes), "{writes} writes in a flapping minute");
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_contact_is_reported_after_sixty_seconds_and_cleared_at_its_next_report() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.pass(55).await;
    assert_eq!(harness.condition("coast", "LinkLost"), None);
    harness.pass(12).await;
    assert_eq!(harness.condition("coast", "LinkLost").unwrap().0, "True");
    assert_eq!(harness.state("coast"), LoopState::Paused);
    assert_eq!(harness.condition("coast", "Reconciling").unwrap().1, "LinkLost");
    assert_eq!(harness.live_pod("coast").epoch, 1, "no second pod beside it");
    harness.report("coast", in_state(LoopState::Running), LoopUsage::default());
    harness.pass(12).await;
    assert_eq!(harness.condition("coast", "LinkLost").unwrap().0, "False");
    assert_eq!(harness.ready("coast").0, "True");
}

#[tokio::test(start_paused = true)]
async fn the_last_unwritten_report_of_a_pod_outlives_it() {
    let harness = ControllerHarness::start().await;
    harness
        .bring_up("coast", &json!({ "storage": { "ephemeral": true } }))
        .await;
    harness.report("coast", in_state(LoopState::Running), usage(5));
    harness.settle().await;
    assert_eq!(harness.status("coast").usage, None, "numbers wait");
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.settle().await;
    let pod = harness.live_pod("coast");
    let (known, _) = harness
        .running()
        .loops
        .attach(&agent_key("coast"), &pod, (harness.clock)())
        .unwrap();
    assert_eq!(known.usage.calls, 5);
    harness.pass(6).await;
    assert_eq!(harness.status("coast").usage.unwrap().calls, 5);
}

#[tokio::test(start_paused = true)]
async fn the_last_report_of_a_pod_counts_even_if_the_pod_is_gone_before_it_is_processed() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.apply("coast", &json!({ "suspend": true }));
    harness.pass(6).await;
    // The reconciler writes for a while what it saw before.
    harness.server.set_slow(std::time::Duration::from_secs(2));
    harness.report("coast", in_state(LoopState::Stopped), usage(6));
    harness.pass(1).await;
    harness.report("coast", in_state(LoopState::Stopped), usage(7));
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(20).await;
    assert_eq!(harness.pod("coast"), None);
    assert_eq!(harness.status("coast").usage.unwrap().calls, 7);
}

#[tokio::test(start_paused = true)]
async fn the_last_report_of_a_pod_is_not_assigned_to_a_later_agent_of_the_same_name() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.report("coast", in_state(LoopState::Running), usage(7));
    harness.server.delete(AGENTS, NAMESPACE, "coast");
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.bring_up("coast", &json!({})).await;
    harness.pass(20).await;
    assert_eq!(harness.status("coast").usage, None);
}

#[tokio::test(start_paused = true)]
async fn each_transition_causes_one_event_and_no_event_contains_a_prompt() {
    let harness = ControllerHarness::start().await;
    harness.apply(
        "coast",
        &json!({ "model": { "scripted": { "configMapKeyRef": { "name": "late" } } } }),
    );
    harness.pass(20).await;
    harness.put_config_map("late", "turns", "turns: [{text: done}]");
    harness.pass(31).await;
    harness.come_up("coast").await;
    harness.pass(6).await;
    let mut paused = held_back();
    harness.report("coast", paused.clone(), LoopUsage::default());
    harness.pass(6).await;
    paused.reasons.clear();
    harness.report("coast", paused, LoopUsage::default());
    harness.pass(6).await;
    harness.apply("coast", &json!({ "suspend": true }));
    harness.pass(6).await;
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.pass(6).await;
    harness.apply("coast", &json!({ "suspend": false }));
    harness.pass(6).await;
    let events = harness.server.list("events.k8s.io/events");
    let mut told: Vec<(String, String)> = Vec::new();
    for event in &events {
        let text = |key: &str| event[key].as_str().unwrap().to_owned();
        assert!(!event.to_string().contains("Watch the coast"));
        assert_eq!(event["regarding"]["name"], "coast");
        told.push((text("type"), text("reason")));
    }
    told.sort();
    let expected = [
        ("Normal", "LoopStarted"),
        ("Normal", "PodCreated"),
        ("Normal", "Resumed"),
        ("Normal", "Suspended"),
        ("Warning", "ConfigMapNotFound"),
        ("Warning", "RateLimited"),
    ];
    assert_eq!(
        told,
        expected.map(|(type_, reason)| (type_.to_owned(), reason.to_owned()))
    );
}

#[tokio::test(start_paused = true)]
async fn an_event_has_the_current_message_even_if_its_reason_was_published_minutes_ago() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    let mut paused = held_back();
    for message in ["first", "second", "first"] {
        paused.reasons = vec![HeldReason {
            message: message.into(),
            ..held_back().reasons.remove(0)
        }];
        harness.report("coast", paused.clone(), LoopUsage::default());
        harness.pass(6).await;
        harness.report("coast", in_state(LoopState::Running), LoopUsage::default());
        harness.pass(6).await;
    }
    let events = harness.server.list("events.k8s.io/events");
    let limited = events.iter().filter(|event| event["reason"] == "RateLimited");
    let mut told: Vec<(bool, Option<i64>)> = limited
        .map(|event| {
            let is_first = event["note"].as_str().unwrap().contains("first");
            (is_first, event["series"]["count"].as_i64())
        })
        .collect();
    told.sort();
    assert_eq!(told, [(false, None), (true, Some(2))], "{events:?}");
}

fn held_back() -> LoopReport {
    LoopReport {
        reasons: vec![HeldReason {
            reason: PauseReason::ProviderRateLimit,
            until: None,
            message: "the provider asked to wait".into(),
        }],
        ..in_state(LoopState::Paused)
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_not_ours_is_never_touched() {
    let harness = ControllerHarness::start().await;
    let foreign = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "coast", "namespace": NAMESPACE },
        "spec": { "containers": [] } });
    let foreign = harness.server.put("/pods", foreign);
    harness.apply("coast", &json!({}));
    harness.pass(3).await;
    assert_eq!(harness.pod("coast"), Some(foreign));
    assert_eq!(harness.ready("coast"), ("False".into(), "PodNameTaken".into()));
    harness.server.delete("/pods", NAMESPACE, "coast");
    harness.pass(31).await;
    assert_eq!(harness.live_pod("coast").epoch, 1);
}

#[tokio::test(start_paused = true)]
async fn an_agent_made_again_waits_for_the_pod_of_the_one_before() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    let first = harness.live_pod("coast");
    harness.server.delete(AGENTS, NAMESPACE, "coast");
    harness.apply("coast", &json!({}));
    harness.settle().await;
    assert_eq!(harness.live_pod("coast"), first);
    harness.server.finish_pod(NAMESPACE, "coast");
    harness.settle().await;
    assert_ne!(harness.live_pod("coast").uid, first.uid);
}

#[tokio::test(start_paused = true)]
async fn a_controller_of_one_namespace_ignores_the_others() {
    let mut harness = ControllerHarness::without_controller();
    harness.settings.watch_namespaces = vec!["team-b".into()];
    harness.boot().await;
    harness.apply("coast", &json!({}));
    harness.pass(5).await;
    assert_eq!(harness.pod("coast"), None);
    harness.shut_down().await;
    harness.settings.watch_namespaces = vec!["team-b".into(), NAMESPACE.into()];
    harness.boot().await;
    harness.settle().await;
    assert!(harness.pod("coast").is_some());
    harness.come_up("coast").await;
    assert_eq!(harness.state("coast"), LoopState::Running);
}

#[tokio::test(start_paused = true)]
async fn an_unparseable_object_is_reported_and_does_not_affect_others() {
    let harness = ControllerHarness::start().await;
    harness.apply("odd", &json!({ "mode": "FromTheFuture" }));
    harness.bring_up("coast", &json!({})).await;
    assert_eq!(harness.state("coast"), LoopState::Running);
    let odd = harness.server.get(AGENTS, NAMESPACE, "odd").unwrap();
    assert_eq!(odd["status"]["conditions"][0]["reason"], "InvalidSpec");
}

#[tokio::test(start_paused = true)]
async fn a_controller_that_never_reached_the_server_still_ends() {
    let mut harness = ControllerHarness::without_controller();
    harness.server.set_away(true);
    harness.boot().await;
    let ended = tokio::time::timeout(std::time::Duration::from_secs(15), harness.shut_down()).await;
    assert!(ended.is_ok());
}

/// The chart's rules are compared with the same file: permissions are no wider than what is used.
#[tokio::test(start_paused = true)]
async fn the_controller_uses_the_verbs_of_the_list_and_no_others() {
    let harness = ControllerHarness::start().await;
    put_secret(&harness);
    harness.put_config_map("texts", "coast", "Watch the coast.");
    harness
        .bring_up(
            "coast",
            &json!({
                "instructions": null, "instructionsFrom": { "configMapKeyRef": { "name": "texts", "key": "coast" } },
                "model": { "apiKeySecretRef": { "name": "provider", "key": "token" } },
            }),
        )
        .await;
    harness.server.delete("/pods", NAMESPACE, "coast");
    harness.pass(90).await;
    harness.server.finish_pod(NAMESPACE, "coast");
    // A pod that waits for its claim although the controller that made it is gone: the claim is looked for.
    harness.settle().await;
    let mut harness = harness;
    harness.shut_down().await;
    harness.boot().await;
    harness.apply(
        "coast",
        &json!({ "suspend": true, "instructions": "x", "instructionsFrom": null }),
    );
    harness.pass(10).await;
    // The same twice within six minutes: the Event becomes a series.
    for suspend in [false, true] {
        harness.apply("coast", &json!({ "suspend": suspend }));
        harness.pass(20).await;
    }
    let used: BTreeSet<(String, String)> = harness
        .server
        .take_calls()
        .into_iter()
        // What the ledger reads is listed with the chart.
        .filter(|call| !["agentloop.dev/agentbudgets", "/namespaces"].contains(&call.resource.as_str()))
        .map(|call| (call.resource, call.verb.as_ref().to_owned()))
        .collect();
    let listed: BTreeSet<(String, String)> =
        serde_json::from_str(include_str!("../fixtures/controller-verbs.json")).unwrap();
    assert_eq!(used, listed);
}
