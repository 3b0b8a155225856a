//! The reconciler as a whole: a real kube client and real watches against the in-process API server, in paused time.

use agentloop::api::status::{HandledRequests, LoopOutcome, LoopState, LoopUsage, PauseReason};
use agentloop::api_server::ApiVerb;
use agentloop::link::messages::{HeldReason, LoopReport, ModelReport, PodReport};
use serde_json::{Value, json};
use std::collections::BTreeSet;

use crate::support::rig::{AGENTS, NAMESPACE, Rig, agent_key, in_state};

fn usage(calls: i64) -> LoopUsage {
    LoopUsage {
        calls,
        input_tokens: calls * 100,
        ..LoopUsage::default()
    }
}

#[tokio::test(start_paused = true)]
async fn from_creation_to_running_takes_four_writes() {
    let rig = Rig::start().await;
    rig.bring_up("earlier", &json!({})).await;
    rig.server.take_calls();

    rig.apply("coast", &json!({}));
    rig.settle().await;
    let mut writes = rig.server.take_writes();
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
    assert_eq!(rig.state("coast"), LoopState::Starting);
    assert_eq!(rig.status("coast").r#loop.unwrap().epoch, 1);
    assert_eq!(rig.ready("coast"), ("False".into(), "Starting".into()));
    assert_eq!(rig.condition("coast", "Reconciling").unwrap().0, "True");

    rig.come_up("coast").await;
    assert_eq!(rig.server.take_writes(), ["patch agentloop.dev/agents/status"]);
    assert_eq!(rig.state("coast"), LoopState::Running);
    assert_eq!(rig.ready("coast"), ("True".into(), "LoopRunning".into()));
    assert_eq!(rig.condition("coast", "Reconciling"), None);
    assert_eq!(rig.status("coast").pod.unwrap().node.as_deref(), Some("node-1"));
}

#[tokio::test(start_paused = true)]
async fn the_first_pod_of_a_namespace_finds_its_account_and_the_ca_bundle() {
    let rig = Rig::start().await;
    rig.apply("coast", &json!({}));
    rig.settle().await;
    let account = rig
        .server
        .get("/serviceaccounts", NAMESPACE, "agentloop-agent")
        .unwrap();
    assert_eq!(account["automountServiceAccountToken"], false);
    let bundle =
        |rig: &Rig| rig.server.get("/configmaps", NAMESPACE, "agentloop-link-ca").unwrap()["data"]["ca.crt"].clone();
    assert_eq!(bundle(&rig), "CA one");

    rig.running().bundle.send("CA one and two".into()).unwrap();
    rig.settle().await;
    assert_eq!(bundle(&rig), "CA one and two");
}

#[tokio::test(start_paused = true)]
async fn the_pod_is_the_manifest_that_was_agreed() {
    let rig = Rig::start().await;
    rig.apply(
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
    put_secret(&rig);
    rig.pass(3).await;
    insta::assert_json_snapshot!("pod", rig.pod("coast").unwrap(), {
        ".metadata.creationTimestamp" => "[time]", ".metadata.resourceVersion" => "[version]", ".metadata.uid" => "[uid]",
        ".metadata.ownerReferences[].uid" => "[uid]", ".metadata.annotations[\"agentloop.dev/spec-hash\"]" => "[hash]",
        ".metadata.labels[\"app.kubernetes.io/version\"]" => "[version]",
        ".spec.**.env[0].value" => "[config]",
    });
    let pod = rig.pod("coast").unwrap();
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
    let rig = Rig::start().await;
    rig.put_config_map("texts", "coast", "Watch the coast.");
    rig.apply(
        "coast",
        &json!({
            "instructions": null, "instructionsFrom": { "configMapKeyRef": { "name": "texts", "key": "coast" } },
            "storage": { "ephemeral": true, "size": "50Mi" },
        }),
    );
    rig.settle().await;
    let pod = rig.pod("coast").unwrap();
    let volume = |name: &str| {
        let volumes = pod["spec"]["volumes"].as_array().unwrap().clone();
        volumes.into_iter().find(|volume| volume["name"] == name).unwrap()
    };
    assert_eq!(volume("state")["emptyDir"]["sizeLimit"], "50Mi");
    assert_eq!(
        volume("instructions")["configMap"]["items"],
        json!([{ "key": "coast", "path": "text" }])
    );
    assert!(rig.server.list("/persistentvolumeclaims").is_empty());

    rig.apply("kept", &json!({ "storage": { "retentionPolicy": "Retain" } }));
    rig.apply("gone", &json!({}));
    rig.settle().await;
    rig.server.delete(AGENTS, NAMESPACE, "kept");
    rig.server.delete(AGENTS, NAMESPACE, "gone");
    rig.settle().await;
    let claims = rig.server.list("/persistentvolumeclaims");
    assert_eq!(claims.len(), 1, "only the retained claim stays");
    assert_eq!(claims[0]["metadata"]["name"], "kept-state");
}

#[tokio::test(start_paused = true)]
async fn twenty_idle_agents_cost_no_request_but_the_renewal_of_watches() {
    let rig = Rig::start().await;
    for n in 0..20 {
        rig.bring_up(&format!("agent-{n}"), &json!({})).await;
    }
    rig.pass(30).await;
    rig.server.take_calls();
    for _ in 0..4 {
        for n in 0..20 {
            rig.report(
                &format!("agent-{n}"),
                in_state(LoopState::Running),
                LoopUsage::default(),
            );
        }
        rig.pass(15).await;
    }
    let mut calls = rig.server.take_calls();
    calls.retain(|call| call.verb != ApiVerb::Watch);
    assert_eq!(calls, []);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_controller_writes_nothing_and_keeps_what_status_says() {
    let mut rig = Rig::start().await;
    for n in 0..5 {
        rig.bring_up(&format!("agent-{n}"), &json!({})).await;
    }
    rig.report("agent-0", in_state(LoopState::Sleeping), usage(7));
    rig.pass(20).await;
    let before = rig.status("agent-0");
    rig.shut_down().await;
    rig.server.take_calls();

    rig.boot().await;
    rig.pass(50).await;
    assert_eq!(rig.server.take_writes(), [""; 0]);
    assert_eq!(rig.status("agent-0"), before);
    rig.report("agent-0", in_state(LoopState::Sleeping), usage(7));
    rig.pass(5).await;
    assert_eq!(rig.server.take_writes(), [""; 0], "the same said again is no news");
}

fn put_secret(rig: &Rig) {
    rig.server.put(
        "/secrets",
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "provider", "namespace": NAMESPACE }, "data": { "token": "c2VjcmV0" } }),
    );
}

#[tokio::test(start_paused = true)]
async fn a_missing_secret_is_named_and_heals_by_itself_when_it_appears() {
    let rig = Rig::start().await;
    rig.apply(
        "coast",
        &json!({ "model": { "apiKeySecretRef": { "name": "provider", "key": "token" } } }),
    );
    rig.pass(20).await;
    assert_eq!(rig.pod("coast"), None);
    assert_eq!(rig.ready("coast"), ("False".into(), "SecretNotFound".into()));
    assert_eq!(rig.condition("coast", "Stalled").unwrap().0, "True");
    assert_eq!(
        rig.condition("coast", "Accepted").unwrap(),
        ("False".into(), "SecretNotFound".into())
    );
    let message = rig
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
    let writes = rig.server.take_writes();
    assert_eq!(writes, ["patch agentloop.dev/agents/status"], "said once");

    put_secret(&rig);
    rig.pass(31).await;
    rig.come_up("coast").await;
    rig.pass(5).await;
    assert_eq!(rig.ready("coast").0, "True");
    assert_eq!(rig.condition("coast", "Stalled"), None);
}

#[tokio::test(start_paused = true)]
async fn a_light_models_key_and_script_are_looked_for_and_reach_the_gateway_alone() {
    let rig = Rig::start().await;
    let light = json!({ "api": "OpenAIChat", "name": "small", "baseURL": "http://small/v1",
        "apiKeySecretRef": { "name": "provider", "key": "token" } });
    rig.apply("coast", &json!({ "lightModel": light }));
    rig.pass(20).await;
    assert_eq!(rig.pod("coast"), None);
    assert_eq!(rig.ready("coast"), ("False".into(), "SecretNotFound".into()));
    let message = accepted(&rig, "coast");
    assert!(
        message.starts_with("spec.lightModel.apiKeySecretRef: Secret provider does not exist"),
        "{message}"
    );
    put_secret(&rig);
    rig.pass(31).await;
    rig.come_up("coast").await;
    let pod = rig.pod("coast").unwrap();
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
    rig.apply("shore", &json!({ "lightModel": script }));
    rig.pass(20).await;
    let message = accepted(&rig, "shore");
    assert!(
        message.starts_with("spec.lightModel.scripted.configMapKeyRef: ConfigMap answers does not"),
        "{message}"
    );
    rig.put_config_map("answers", "light", "turns: [{text: '{}'}]");
    rig.pass(31).await;
    rig.come_up("shore").await;
    let pod = rig.pod("shore").unwrap();
    assert!(names(&pod["spec"]["initContainers"][0]).contains(&"light-script".to_owned()));
}

fn accepted(rig: &Rig, name: &str) -> String {
    let conditions = rig.status(name).conditions;
    let accepted = conditions.into_iter().find(|condition| condition.type_ == "Accepted");
    accepted.map(|condition| condition.message).unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn a_pre_check_without_a_light_model_is_accepted_and_said_to_have_no_effect() {
    let rig = Rig::start().await;
    let asked =
        json!({ "continuous": { "preCheck": {} }, "hotState": { "fields": [{ "name": "n", "type": "Number" }] } });
    rig.bring_up("coast", &asked).await;
    assert_eq!(rig.ready("coast").0, "True");
    assert_eq!(
        accepted(&rig, "coast"),
        "the spec and its references are valid; spec.continuous.preCheck has no effect because spec.lightModel is not set; \
         turns run without a pre-check"
    );
    let off = json!({ "continuous": { "preCheck": { "enabled": false } } });
    rig.bring_up("shore", &off).await;
    assert_eq!(accepted(&rig, "shore"), "the spec and its references are valid");
}

/// An Agent with a tool server whose headers are in the Secret `hub`.
fn with_tools() -> Value {
    json!({ "tools": { "servers": [
        { "name": "hub", "url": "https://hub.example.com/mcp", "headersSecretRef": { "name": "hub" } },
        { "name": "plain", "url": "http://plain/mcp" },
    ] } })
}

fn put_headers(rig: &Rig, data: &Value) {
    rig.server.put(
        "/secrets",
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "hub", "namespace": NAMESPACE }, "data": data }),
    );
}

#[tokio::test(start_paused = true)]
async fn headers_of_a_tool_server_reach_the_gateway_alone() {
    let rig = Rig::start().await;
    put_headers(&rig, &json!({ "Authorization": "Y2FuYXJ5", "X-Team": "YQ==" }));
    rig.bring_up("coast", &with_tools()).await;
    let pod = rig.pod("coast").unwrap();
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
    assert!(!rig.agent("coast").status.is_none_or(|status| {
        let status = serde_json::to_string(&status).unwrap();
        status.contains("canary") || status.contains("Y2FuYXJ5")
    }));
}

#[tokio::test(start_paused = true)]
async fn a_missing_or_odd_secret_of_headers_is_named_and_heals_when_it_is_right() {
    let rig = Rig::start().await;
    let said = |reason: &str, words: &str| {
        assert_eq!(
            rig.condition("coast", "Accepted"),
            Some(("False".into(), reason.into()))
        );
        let conditions = rig.status("coast").conditions;
        let accepted = conditions
            .into_iter()
            .find(|condition| condition.type_ == "Accepted")
            .unwrap();
        assert_eq!(
            accepted.message,
            format!("spec.tools.servers[hub].headersSecretRef: Secret hub {words}")
        );
        assert_eq!(rig.pod("coast"), None);
    };
    rig.apply("coast", &with_tools());
    rig.pass(20).await;
    said(
        "SecretNotFound",
        "does not exist in this namespace: create it with a key for each header, such as Authorization, or correct the name",
    );
    put_headers(&rig, &json!({}));
    rig.pass(31).await;
    said(
        "SecretNotFound",
        "has no key: add one for each header, such as Authorization",
    );
    put_headers(&rig, &json!({ "Authorization": "YQ==", "Content-Length": "YQ==" }));
    rig.pass(31).await;
    said(
        "InvalidSpec",
        "has a key that is not an allowed header name, and each key is sent as a header: remove each key with other \
         characters than letters, digits, -, _ and ., and headers that are set automatically, such as Host, or reference \
         another Secret",
    );
    put_headers(&rig, &json!({ "Authorization": "YQ==", "Content-Length": null }));
    rig.pass(31).await;
    rig.come_up("coast").await;
    rig.pass(5).await;
    assert_eq!(rig.ready("coast").0, "True");
}

#[tokio::test(start_paused = true)]
async fn mistakes_in_references_have_their_own_words() {
    let rig = Rig::start().await;
    rig.apply(
        "no-key",
        &json!({ "model": { "scripted": { "configMapKeyRef": { "key": "other" } } } }),
    );
    rig.apply(
        "no-map",
        &json!({ "model": { "scripted": { "configMapKeyRef": { "name": "absent" } } } }),
    );
    rig.put_config_map("broken", "turns", "turns: 7");
    rig.apply(
        "broken",
        &json!({ "model": { "scripted": { "configMapKeyRef": { "name": "broken" } } } }),
    );
    let long = "a".repeat(64);
    rig.apply(&long, &json!({}));
    rig.apply(&long[..63], &json!({}));
    rig.settle().await;
    for (name, reason, words) in [
        ("no-key", "ConfigMapNotFound", "has no key other"),
        ("no-map", "ConfigMapNotFound", "ConfigMap absent does not exist"),
        ("broken", "InvalidSpec", "is not a valid script"),
        (&long, "InvalidSpec", "at most 63"),
    ] {
        let accepted = rig
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
        assert_eq!(rig.pod(name), None);
    }
    assert!(rig.pod(&long[..63]).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_workspace_has_a_claim_of_its_own_that_only_the_worker_mounts_and_cannot_write() {
    let rig = Rig::start().await;
    rig.apply("coast", &json!({}));
    rig.pass(3).await;
    assert_eq!(claim(&rig, "coast-workspace"), None);
    assert_eq!(workspace_of(&rig.pod("coast").unwrap()), None);
    // A known claim does not prevent the creation of the other one.
    rig.apply(
        "coast",
        &json!({ "workspace": { "size": "2Gi", "storageClassName": "fast" }, "pod": { "updateStrategy": "Immediate" } }),
    );
    rig.pass(3).await;
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(6).await;
    let claim = claim(&rig, "coast-workspace").unwrap();
    assert_eq!(claim["spec"]["resources"]["requests"]["storage"], "2Gi");
    assert_eq!(claim["spec"]["storageClassName"], "fast");
    assert_eq!(claim["metadata"]["ownerReferences"][0]["name"], "coast");
    assert_eq!(
        workspace_of(&rig.pod("coast").unwrap()).as_deref(),
        Some("coast-workspace")
    );
}

#[tokio::test(start_paused = true)]
async fn a_workspace_whose_claim_is_missing_has_no_pod_until_it_is_there() {
    let rig = Rig::start().await;
    rig.apply("coast", &json!({ "workspace": { "claimName": "shared" } }));
    rig.pass(3).await;
    let conditions = rig.status("coast").conditions;
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
    assert_eq!(rig.pod("coast"), None);
    rig.server.put(
        "/persistentvolumeclaims",
        json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {
            "name": "shared", "namespace": NAMESPACE, "labels": { "agentloop.dev/workspace": "true" },
        } }),
    );
    rig.pass(31).await;
    assert_eq!(workspace_of(&rig.pod("coast").unwrap()).as_deref(), Some("shared"));
    assert_eq!(claim(&rig, "coast-workspace"), None);
}

fn claim(rig: &Rig, name: &str) -> Option<serde_json::Value> {
    rig.server.get("/persistentvolumeclaims", NAMESPACE, name)
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
    let rig = Rig::start().await;
    let skill =
        |name: &str, map: &str, key: &str| json!({ "name": name, "configMapKeyRef": { "name": map, "key": key } });
    let skills = [
        skill("triage", "skills", "triage.md"),
        skill("answer", "more", "answer.md"),
    ];
    rig.apply("coast", &json!({ "skills": skills }));
    rig.pass(20).await;
    let said = |reason: &str, words: &str| {
        let conditions = rig.status("coast").conditions;
        let accepted = conditions.into_iter().find(|c| c.type_ == "Accepted").unwrap();
        assert_eq!((accepted.status.as_str(), accepted.reason.as_str()), ("False", reason));
        assert!(accepted.message.contains(words), "{}", accepted.message);
        assert_eq!(rig.pod("coast"), None);
    };
    said(
        "ConfigMapNotFound",
        "spec.skills[triage].configMapKeyRef: ConfigMap skills does not exist in this namespace: create it with the key triage.md",
    );
    rig.put_config_map("skills", "other.md", "Look.");
    rig.pass(31).await;
    said("ConfigMapNotFound", "ConfigMap skills has no key triage.md");
    rig.put_config_map("skills", "triage.md", &"x".repeat(131_072));
    rig.put_config_map("more", "answer.md", " ");
    rig.pass(31).await;
    said(
        "InvalidSpec",
        "spec.skills[answer].configMapKeyRef: key answer.md of ConfigMap more is empty",
    );
    rig.put_config_map("more", "answer.md", "y");
    rig.pass(31).await;
    said(
        "InvalidSpec",
        "spec.skills: the skills have 131073 bytes in total; the maximum is 131072",
    );
    rig.put_config_map("skills", "triage.md", &"x".repeat(131_071));
    rig.pass(31).await;
    let pod = rig.pod("coast").unwrap();
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
async fn suspend_tells_the_loop_first_then_ends_the_pod_and_keeps_ready() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.pass(20).await;
    let (_, directives) = rig
        .running()
        .loops
        .attach(&agent_key("coast"), &rig.live_pod("coast"), (rig.clock)())
        .unwrap();

    rig.apply("coast", &json!({ "suspend": true }));
    rig.settle().await;
    assert!(directives.borrow().suspend);
    assert!(
        rig.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_null(),
        "it may say goodbye first"
    );
    rig.report("coast", in_state(LoopState::Stopped), usage(3));
    rig.settle().await;
    assert!(rig.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(rig.condition("coast", "Suspended").unwrap().0, "True");

    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(6).await;
    let status = rig.status("coast");
    let loop_ = status.r#loop.clone().unwrap();
    assert_eq!(
        (loop_.state, loop_.reasons),
        (LoopState::Stopped, vec![PauseReason::SuspendedBySpec])
    );
    assert_eq!(status.usage.unwrap().calls, 3);
    assert_eq!(rig.ready("coast"), ("True".into(), "SuspendedBySpec".into()));
    assert_eq!(rig.condition("coast", "Reconciling"), None);
    assert_eq!(rig.pod("coast"), None);

    rig.apply("coast", &json!({ "suspend": false }));
    rig.settle().await;
    assert_eq!(rig.live_pod("coast").epoch, 2);
    rig.come_up("coast").await;
    rig.pass(10).await;
    assert_eq!(rig.state("coast"), LoopState::Running);
    assert_eq!(rig.condition("coast", "Suspended").unwrap().0, "False");
}

#[tokio::test(start_paused = true)]
async fn a_suspended_pod_that_does_not_answer_is_ended_after_three_seconds() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.apply("coast", &json!({ "suspend": true }));
    rig.pass(2).await;
    assert!(rig.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_null());
    rig.pass(2).await;
    assert!(rig.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());
}

#[tokio::test(start_paused = true)]
async fn a_new_spec_waits_for_an_idle_loop_unless_told_otherwise() {
    let rig = Rig::start().await;
    for (name, strategy) in [("idle", "WhenIdle"), ("now", "Immediate"), ("never", "OnDelete")] {
        rig.bring_up(name, &json!({ "pod": { "updateStrategy": strategy } }))
            .await;
        let changed = json!({ "instructions": "Watch the sky.", "pod": { "updateStrategy": strategy } });
        rig.apply(name, &changed);
    }
    rig.pass(6).await;
    let ending = |name: &str| rig.pod(name).unwrap()["metadata"]["deletionTimestamp"].is_string();
    assert_eq!(["idle", "now", "never"].map(ending), [false, true, false]);
    assert_eq!(rig.condition("idle", "Reconciling").unwrap().1, "UpdatePending");
    assert_eq!(rig.condition("never", "Reconciling"), None);

    for name in ["idle", "never"] {
        rig.report(name, in_state(LoopState::Sleeping), LoopUsage::default());
    }
    rig.pass(6).await;
    assert_eq!(["idle", "never"].map(ending), [true, false]);
    rig.server.finish_pod(NAMESPACE, "idle");
    rig.settle().await;
    assert_eq!(rig.live_pod("idle").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn a_new_controller_version_replaces_only_pods_that_ask_for_it() {
    let mut rig = Rig::start().await;
    rig.bring_up("idle", &json!({})).await;
    rig.bring_up("now", &json!({ "pod": { "updateStrategy": "Immediate" } }))
        .await;
    rig.shut_down().await;
    rig.settings.image = "agentloop:next".into();
    rig.boot().await;
    rig.report("idle", in_state(LoopState::Sleeping), LoopUsage::default());
    rig.pass(20).await;
    let ending = |name: &str| rig.pod(name).unwrap()["metadata"]["deletionTimestamp"].is_string();
    assert_eq!(["idle", "now"].map(ending), [false, true]);
}

#[tokio::test(start_paused = true)]
async fn a_new_spec_that_cannot_run_leaves_the_running_loop_alone() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({ "pod": { "updateStrategy": "Immediate" } }))
        .await;
    rig.apply(
        "coast",
        &json!({ "model": { "apiKeySecretRef": { "name": "provider", "key": "token" } }, "pod": { "updateStrategy": "Immediate" } }),
    );
    rig.pass(20).await;
    assert!(rig.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_null());
    assert_eq!(rig.ready("coast"), ("False".into(), "SecretNotFound".into()));
    assert_eq!(rig.state("coast"), LoopState::Running);
    put_secret(&rig);
    rig.pass(31).await;
    assert!(rig.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());
}

fn completed() -> LoopReport {
    LoopReport {
        outcome: Some(LoopOutcome::Completed),
        ..in_state(LoopState::Stopped)
    }
}

#[tokio::test(start_paused = true)]
async fn a_loop_that_ended_itself_rests_until_a_new_request_or_spec() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.report("coast", completed(), usage(1));
    rig.pass(6).await;
    assert!(rig.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(20).await;
    assert_eq!(rig.pod("coast"), None);
    assert_eq!(rig.ready("coast"), ("True".into(), "Completed".into()));
    let status = rig.status("coast").r#loop.unwrap();
    assert_eq!(
        (status.state, status.outcome),
        (LoopState::Stopped, Some(LoopOutcome::Completed))
    );

    rig.annotate("coast", "agentloop.dev/wake", "monday");
    rig.settle().await;
    assert_eq!(rig.live_pod("coast").epoch, 2);
    assert_eq!(rig.status("coast").r#loop.unwrap().outcome, None);
    let handled = HandledRequests {
        wake: Some("monday".into()),
        ..HandledRequests::default()
    };
    assert_eq!(
        rig.status("coast").last_handled_requests,
        Some(handled),
        "each value starts it once"
    );

    rig.come_up("coast").await;
    rig.report("coast", completed(), usage(2));
    rig.pass(6).await;
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(20).await;
    assert_eq!(rig.pod("coast"), None);
    rig.apply("coast", &json!({ "instructions": "Watch the sky." }));
    rig.settle().await;
    assert_eq!(rig.live_pod("coast").epoch, 3);
}

#[tokio::test(start_paused = true)]
async fn an_idle_loop_that_was_ended_starts_again_for_a_wake_request_or_a_new_spec_and_has_nothing_to_resume() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    let idle = || LoopReport {
        outcome: Some(LoopOutcome::Idle),
        ..in_state(LoopState::Stopped)
    };
    rig.report("coast", idle(), usage(1));
    rig.pass(6).await;
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(20).await;
    assert_eq!(rig.ready("coast"), ("True".into(), "IdleTimeoutReached".into()));
    rig.annotate("coast", "agentloop.dev/resume", "monday");
    rig.pass(20).await;
    assert_eq!(rig.pod("coast"), None);
    rig.annotate("coast", "agentloop.dev/wake", "monday");
    rig.settle().await;
    assert_eq!(rig.live_pod("coast").epoch, 2);
    rig.come_up("coast").await;
    assert_eq!(rig.ready("coast"), ("True".into(), "LoopRunning".into()));

    rig.report("coast", idle(), usage(2));
    rig.pass(6).await;
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(20).await;
    rig.apply("coast", &json!({ "guardrails": { "idleTimeoutSeconds": 3600 } }));
    rig.settle().await;
    assert_eq!(rig.live_pod("coast").epoch, 3);
}

#[tokio::test(start_paused = true)]
async fn a_stopped_loop_rests_and_no_stop_request_outlives_its_end() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.annotate("coast", "agentloop.dev/stop", "monday");
    rig.settle().await;
    let (_, directives) = rig
        .running()
        .loops
        .attach(&agent_key("coast"), &rig.live_pod("coast"), (rig.clock)())
        .unwrap();
    assert_eq!(directives.borrow().stop.as_deref(), Some("monday"));
    let mut stopped = LoopReport {
        outcome: Some(LoopOutcome::Cancelled),
        ..in_state(LoopState::Stopped)
    };
    stopped.handled.stop = Some("monday".into());
    rig.report("coast", stopped, usage(1));
    rig.pass(6).await;
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(20).await;
    assert_eq!(rig.pod("coast"), None);
    assert_eq!(rig.ready("coast"), ("True".into(), "Cancelled".into()));

    // There is nothing to stop: the request must not end the loop when it is started.
    rig.annotate("coast", "agentloop.dev/stop", "tuesday");
    rig.settle().await;
    let handled = |rig: &Rig| rig.status("coast").last_handled_requests.unwrap().stop;
    assert_eq!(handled(&rig).as_deref(), Some("tuesday"));
    assert_eq!(rig.pod("coast"), None);
    rig.annotate("coast", "agentloop.dev/resume", "wednesday");
    rig.settle().await;
    assert_eq!(rig.live_pod("coast").epoch, 2);
    assert_eq!(rig.status("coast").r#loop.unwrap().outcome, None);
    assert_eq!(handled(&rig).as_deref(), Some("tuesday"));
}

#[tokio::test(start_paused = true)]
async fn a_request_to_stop_reaches_each_pod_until_an_end_is_reported() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.annotate("coast", "agentloop.dev/stop", "monday");
    rig.settle().await;
    let stop = || {
        let attached = rig
            .running()
            .loops
            .attach(&agent_key("coast"), &rig.live_pod("coast"), (rig.clock)());
        attached.unwrap().1.borrow().stop.clone()
    };
    assert_eq!(stop().as_deref(), Some("monday"));
    // The pod is lost with its last report.
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(20).await;
    rig.come_up("coast").await;
    assert_eq!(rig.live_pod("coast").epoch, 2);
    assert_eq!(stop().as_deref(), Some("monday"));
    let mut stopped = LoopReport {
        outcome: Some(LoopOutcome::Cancelled),
        ..in_state(LoopState::Stopped)
    };
    stopped.handled.stop = Some("monday".into());
    rig.report("coast", stopped, usage(1));
    rig.pass(6).await;
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(20).await;
    assert_eq!(rig.pod("coast"), None);

    // Of a wake request and a stop that are seen together, the stop counts.
    rig.annotate("coast", "agentloop.dev/stop", "tuesday");
    rig.annotate("coast", "agentloop.dev/wake", "tuesday");
    rig.settle().await;
    assert_eq!(rig.pod("coast"), None);
    let handled = rig.status("coast").last_handled_requests.unwrap();
    assert_eq!(
        (handled.wake.as_deref(), handled.stop.as_deref()),
        (Some("tuesday"), Some("tuesday"))
    );
    rig.annotate("coast", "agentloop.dev/wake", "wednesday");
    rig.settle().await;
    assert_eq!(rig.live_pod("coast").epoch, 3);
    assert_eq!(stop(), None);
}

#[tokio::test(start_paused = true)]
async fn a_request_reaches_the_loop_and_leaves_once_it_was_handled() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.annotate("coast", "agentloop.dev/resume", "now");
    rig.settle().await;
    let attach = || {
        rig.running()
            .loops
            .attach(&agent_key("coast"), &rig.live_pod("coast"), (rig.clock)())
            .unwrap()
            .1
    };
    assert_eq!(attach().borrow().resume.as_deref(), Some("now"));
    let mut report = in_state(LoopState::Running);
    report.handled.resume = Some("now".into());
    rig.report("coast", report, LoopUsage::default());
    rig.pass(6).await;
    assert_eq!(
        rig.status("coast").last_handled_requests.unwrap().resume.as_deref(),
        Some("now")
    );
    rig.annotate("coast", "agentloop.dev/wake", "later");
    rig.settle().await;
    assert_eq!(attach().borrow().resume, None);
    assert_eq!(attach().borrow().wake.as_deref(), Some("later"));
}

#[tokio::test(start_paused = true)]
async fn no_second_pod_is_made_while_the_first_is_ending() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    let first = rig.live_pod("coast");
    rig.server.delete("/pods", NAMESPACE, "coast");
    rig.server.take_calls();
    rig.pass(29).await;
    assert!(rig.server.take_calls().iter().all(|call| call.resource != "/pods"));
    assert_eq!(rig.live_pod("coast"), first);
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.settle().await;
    assert_eq!(rig.live_pod("coast").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn a_pod_on_a_silent_node_is_left_to_a_person_and_on_a_gone_node_forced_away() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    let node = |ready: &str| {
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node-1", "namespace": "" },
            "status": { "conditions": [{ "type": "Ready", "status": ready }] } })
    };
    rig.server.put("/nodes", node("Unknown"));
    rig.server.delete("/pods", NAMESPACE, "coast");
    rig.pass(120).await;
    assert!(rig.pod("coast").is_some());
    assert_eq!(
        rig.condition("coast", "PodReady").unwrap(),
        ("False".into(), "NodeLost".into())
    );
    assert_eq!(rig.condition("coast", "Stalled").unwrap().1, "NodeLost");
    let message = rig
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

    rig.server.delete("/nodes", "", "node-1");
    rig.pass(61).await;
    assert_eq!(rig.live_pod("coast").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_a_volume_on_a_silent_node_is_forced_away_once_it_can_act_no_more() {
    let rig = Rig::start().await;
    let tools = json!({"servers": [{"name": "hub", "url": "http://hub/mcp",
        "tools": [{"name": "build", "timeoutSeconds": 600}]}]});
    rig.bring_up("coast", &json!({"storage": {"ephemeral": true}, "tools": tools}))
        .await;
    rig.server.put(
        "/nodes",
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node-1", "namespace": "" },
            "status": { "conditions": [{ "type": "Ready", "status": "Unknown" }] } }),
    );
    rig.server.delete("/pods", NAMESPACE, "coast");
    // The run lease of 60 s and the longest run of 600 s; it spoke last when it came up.
    rig.pass(655).await;
    assert_eq!(rig.live_pod("coast").epoch, 1);
    assert_eq!(rig.condition("coast", "PodReady").unwrap().1, "NodeLost");
    rig.pass(70).await;
    assert_eq!(rig.live_pod("coast").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn an_evicted_pod_is_replaced_and_again_and_again_ever_more_slowly() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    let mut made = Vec::new();
    for _ in 0..4 {
        let pod = rig.pod("coast").unwrap();
        made.push(rig.live_pod("coast").epoch);
        rig.server.put(
            "/pods",
            json!({ "metadata": { "name": "coast", "namespace": NAMESPACE }, "spec": pod["spec"],
                "status": { "phase": "Failed", "reason": "Evicted", "message": "no disk", "conditions": [] } }),
        );
        rig.settle().await;
        rig.server.finish_pod(NAMESPACE, "coast");
        rig.settle().await;
        assert_eq!(rig.pod("coast"), None, "not at once");
        rig.pass(9).await;
    }
    assert_eq!(made, [1, 2, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_away_for_thirty_seconds_is_waited_for_and_nothing_is_lost() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.pass(20).await;
    rig.server.set_away(true);
    let mut report = in_state(LoopState::Paused);
    report.reasons = vec![HeldReason {
        reason: PauseReason::ConsecutiveErrors,
        until: Some((rig.clock)() + jiff::SignedDuration::from_mins(5)),
        message: "5 turns failed in a row".into(),
    }];
    rig.report("coast", report.clone(), usage(9));
    rig.apply("born-meanwhile", &json!({}));
    rig.pass(30).await;
    assert_eq!(rig.pod("born-meanwhile"), None);
    rig.server.set_away(false);
    // The link does not need the API server: the pod continues to report.
    rig.report("coast", report, usage(9));
    rig.pass(40).await;
    assert_eq!(rig.status("coast").usage.unwrap().calls, 9);
    assert_eq!(
        rig.condition("coast", "ErrorLimitReached").unwrap(),
        ("True".into(), "ConsecutiveErrors".into())
    );
    assert_eq!(rig.ready("coast"), ("True".into(), "ErrorLimitReached".into()));
    assert!(rig.pod("born-meanwhile").is_some());
    assert_eq!(rig.live_pod("coast").epoch, 1);
}

#[tokio::test(start_paused = true)]
async fn numbers_and_naps_are_written_every_fifteen_seconds_at_most() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.pass(30).await;
    rig.server.take_calls();
    for second in 0..60 {
        let state = if second % 2 == 0 {
            LoopState::Running
        } else {
            LoopState::Sleeping
        };
        rig.report("coast", in_state(state), usage(second));
        rig.pass(1).await;
    }
    let writes = rig.server.take_writes().len();
    assert!((3..=5).contains(&writes), "{writes} writes in a busy minute");
    rig.pass(16).await;
    assert_eq!(rig.status("coast").usage.unwrap().calls, 59, "the last word is written");
}

#[tokio::test(start_paused = true)]
async fn flapping_conditions_are_written_every_five_seconds_at_most() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.pass(30).await;
    rig.server.take_calls();
    for second in 0..60 {
        let failure = (second % 2 == 0).then_some(agentloop::api::failure::FailureKind::Unreachable);
        let model = ModelReport {
            failure,
            message: String::new(),
        };
        rig.say(
            "coast",
            PodReport {
                loop_: Some(in_state(LoopState::Running)),
                model: Some(model),
                ..PodReport::default()
            },
        );
        rig.pass(1).await;
    }
    let writes = rig.server.take_writes().len();
    assert!((11..=14).contains(&writes), "{writes} writes in a flapping minute");
}

#[tokio::test(start_paused = true)]
async fn a_silent_pod_is_named_after_sixty_seconds_and_cleared_when_it_speaks() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.pass(55).await;
    assert_eq!(rig.condition("coast", "LinkLost"), None);
    rig.pass(12).await;
    assert_eq!(rig.condition("coast", "LinkLost").unwrap().0, "True");
    assert_eq!(rig.state("coast"), LoopState::Paused);
    assert_eq!(rig.condition("coast", "Reconciling").unwrap().1, "LinkLost");
    assert_eq!(rig.live_pod("coast").epoch, 1, "no second pod beside it");
    rig.report("coast", in_state(LoopState::Running), LoopUsage::default());
    rig.pass(12).await;
    assert_eq!(rig.condition("coast", "LinkLost").unwrap().0, "False");
    assert_eq!(rig.ready("coast").0, "True");
}

#[tokio::test(start_paused = true)]
async fn what_a_pod_said_last_outlives_it_though_nobody_had_written_it() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({ "storage": { "ephemeral": true } }))
        .await;
    rig.report("coast", in_state(LoopState::Running), usage(5));
    rig.settle().await;
    assert_eq!(rig.status("coast").usage, None, "numbers wait");
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.settle().await;
    let pod = rig.live_pod("coast");
    let (known, _) = rig
        .running()
        .loops
        .attach(&agent_key("coast"), &pod, (rig.clock)())
        .unwrap();
    assert_eq!(known.usage.calls, 5);
    rig.pass(6).await;
    assert_eq!(rig.status("coast").usage.unwrap().calls, 5);
}

#[tokio::test(start_paused = true)]
async fn the_last_word_of_a_pod_counts_though_the_pod_is_gone_before_anybody_looked() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.apply("coast", &json!({ "suspend": true }));
    rig.pass(6).await;
    // The reconciler writes for a while what it saw before.
    rig.server.set_slow(std::time::Duration::from_secs(2));
    rig.report("coast", in_state(LoopState::Stopped), usage(6));
    rig.pass(1).await;
    rig.report("coast", in_state(LoopState::Stopped), usage(7));
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(20).await;
    assert_eq!(rig.pod("coast"), None);
    assert_eq!(rig.status("coast").usage.unwrap().calls, 7);
}

#[tokio::test(start_paused = true)]
async fn the_last_word_of_a_pod_is_not_that_of_a_later_agent_of_its_name() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    rig.report("coast", in_state(LoopState::Running), usage(7));
    rig.server.delete(AGENTS, NAMESPACE, "coast");
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.bring_up("coast", &json!({})).await;
    rig.pass(20).await;
    assert_eq!(rig.status("coast").usage, None);
}

#[tokio::test(start_paused = true)]
async fn transitions_are_told_once_and_never_quote_a_prompt() {
    let rig = Rig::start().await;
    rig.apply(
        "coast",
        &json!({ "model": { "scripted": { "configMapKeyRef": { "name": "late" } } } }),
    );
    rig.pass(20).await;
    rig.put_config_map("late", "turns", "turns: [{text: done}]");
    rig.pass(31).await;
    rig.come_up("coast").await;
    rig.pass(6).await;
    let mut paused = held_back();
    rig.report("coast", paused.clone(), LoopUsage::default());
    rig.pass(6).await;
    paused.reasons.clear();
    rig.report("coast", paused, LoopUsage::default());
    rig.pass(6).await;
    rig.apply("coast", &json!({ "suspend": true }));
    rig.pass(6).await;
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.pass(6).await;
    rig.apply("coast", &json!({ "suspend": false }));
    rig.pass(6).await;
    let events = rig.server.list("events.k8s.io/events");
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
async fn an_event_says_what_is_true_now_though_its_reason_was_told_minutes_ago() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    let mut paused = held_back();
    for message in ["first", "second", "first"] {
        paused.reasons = vec![HeldReason {
            message: message.into(),
            ..held_back().reasons.remove(0)
        }];
        rig.report("coast", paused.clone(), LoopUsage::default());
        rig.pass(6).await;
        rig.report("coast", in_state(LoopState::Running), LoopUsage::default());
        rig.pass(6).await;
    }
    let events = rig.server.list("events.k8s.io/events");
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
    let rig = Rig::start().await;
    let foreign = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "coast", "namespace": NAMESPACE },
        "spec": { "containers": [] } });
    let foreign = rig.server.put("/pods", foreign);
    rig.apply("coast", &json!({}));
    rig.pass(3).await;
    assert_eq!(rig.pod("coast"), Some(foreign));
    assert_eq!(rig.ready("coast"), ("False".into(), "PodNameTaken".into()));
    rig.server.delete("/pods", NAMESPACE, "coast");
    rig.pass(31).await;
    assert_eq!(rig.live_pod("coast").epoch, 1);
}

#[tokio::test(start_paused = true)]
async fn an_agent_made_again_waits_for_the_pod_of_the_one_before() {
    let rig = Rig::start().await;
    rig.bring_up("coast", &json!({})).await;
    let first = rig.live_pod("coast");
    rig.server.delete(AGENTS, NAMESPACE, "coast");
    rig.apply("coast", &json!({}));
    rig.settle().await;
    assert_eq!(rig.live_pod("coast"), first);
    rig.server.finish_pod(NAMESPACE, "coast");
    rig.settle().await;
    assert_ne!(rig.live_pod("coast").uid, first.uid);
}

#[tokio::test(start_paused = true)]
async fn one_namespace_is_served_without_looking_at_the_others() {
    let mut rig = Rig::without_controller();
    rig.settings.watch_namespaces = vec!["team-b".into()];
    rig.boot().await;
    rig.apply("coast", &json!({}));
    rig.pass(5).await;
    assert_eq!(rig.pod("coast"), None);
    rig.shut_down().await;
    rig.settings.watch_namespaces = vec!["team-b".into(), NAMESPACE.into()];
    rig.boot().await;
    rig.settle().await;
    assert!(rig.pod("coast").is_some());
    rig.come_up("coast").await;
    assert_eq!(rig.state("coast"), LoopState::Running);
}

#[tokio::test(start_paused = true)]
async fn one_unreadable_object_stops_nobody_else_and_says_so() {
    let rig = Rig::start().await;
    rig.apply("odd", &json!({ "mode": "FromTheFuture" }));
    rig.bring_up("coast", &json!({})).await;
    assert_eq!(rig.state("coast"), LoopState::Running);
    let odd = rig.server.get(AGENTS, NAMESPACE, "odd").unwrap();
    assert_eq!(odd["status"]["conditions"][0]["reason"], "InvalidSpec");
}

#[tokio::test(start_paused = true)]
async fn a_controller_that_never_reached_the_server_still_ends() {
    let mut rig = Rig::without_controller();
    rig.server.set_away(true);
    rig.boot().await;
    let ended = tokio::time::timeout(std::time::Duration::from_secs(15), rig.shut_down()).await;
    assert!(ended.is_ok());
}

/// The chart's rules are compared with the same file: rights are no wider than what is used.
#[tokio::test(start_paused = true)]
async fn the_controller_uses_the_verbs_of_the_list_and_no_others() {
    let rig = Rig::start().await;
    put_secret(&rig);
    rig.put_config_map("texts", "coast", "Watch the coast.");
    rig.bring_up(
        "coast",
        &json!({
            "instructions": null, "instructionsFrom": { "configMapKeyRef": { "name": "texts", "key": "coast" } },
            "model": { "apiKeySecretRef": { "name": "provider", "key": "token" } },
        }),
    )
    .await;
    rig.server.delete("/pods", NAMESPACE, "coast");
    rig.pass(90).await;
    rig.server.finish_pod(NAMESPACE, "coast");
    // A pod that waits for its claim although the controller that made it is gone: the claim is looked for.
    rig.settle().await;
    let mut rig = rig;
    rig.shut_down().await;
    rig.boot().await;
    rig.apply(
        "coast",
        &json!({ "suspend": true, "instructions": "x", "instructionsFrom": null }),
    );
    rig.pass(10).await;
    // The same twice within six minutes: the Event becomes a series.
    for suspend in [false, true] {
        rig.apply("coast", &json!({ "suspend": suspend }));
        rig.pass(20).await;
    }
    let used: BTreeSet<(String, String)> = rig
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
