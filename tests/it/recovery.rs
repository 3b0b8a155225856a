//! The reconciler where the cluster is not as it expects: claims of earlier Agents, watches that missed something, other
//! leaders, budgets that are not listed yet. In-process API server, paused time.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use agentloop::api::Agent;
use agentloop::api::status::{Gate, LoopState, LoopUsage};
use agentloop::controller::agent::{ReconcilerParts, ReconcilerSettings, run};
use agentloop::controller::delivery_relay::DeliveryRelay;
use agentloop::controller::gates::answers::GateAnswerRecorder;
use agentloop::controller::pod_sessions::PodSessions;
use agentloop::controller::runtime::{EventSink, WallClock};
use agentloop::link::answers::{GateAnswerBody, GateVerdict};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use kube::{Api, Client};
use pretty_assertions::assert_eq;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::sensors::on_a_real_server;
use crate::support::agents::{idle_ledger, idle_sensors};
use crate::support::harness::{AGENTS, ControllerHarness, Counting, NAMESPACE, agent_key, in_state, settings};

const CLAIMS: &str = "/persistentvolumeclaims";
const PODS: &str = "/pods";

fn usage(calls: i64) -> LoopUsage {
    LoopUsage {
        calls,
        ..LoopUsage::default()
    }
}

fn put_claim(harness: &ControllerHarness, name: &str, metadata: Value) {
    let mut whole = metadata;
    whole["name"] = json!(name);
    whole["namespace"] = json!(NAMESPACE);
    let object = json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": whole, "spec": {} });
    harness.server.put(CLAIMS, object);
}

fn owned_by(kind: &str, name: &str, uid: &str) -> Value {
    json!({ "ownerReferences": [{ "apiVersion": "v", "kind": kind, "name": name, "uid": uid, "controller": true }] })
}

/// Uid of the owner of the state's claim.
fn owner(harness: &ControllerHarness, name: &str) -> Option<String> {
    let claim = harness.server.get(CLAIMS, NAMESPACE, &format!("{name}-state"))?;
    Some(claim["metadata"]["ownerReferences"][0]["uid"].as_str()?.into())
}

fn pod_ready(harness: &ControllerHarness, name: &str) -> String {
    harness.condition(name, "PodReady").unwrap().1
}

/// No node takes the pod.
fn unschedulable(harness: &ControllerHarness, name: &str) {
    let why = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no claim" });
    let meta = json!({ "name": name, "namespace": NAMESPACE });
    harness.server.put(
        PODS,
        json!({ "metadata": meta, "status": { "phase": "Pending", "conditions": [why] } }),
    );
}

/// The pod ended for good.
fn evict(harness: &ControllerHarness, name: &str) {
    let meta = json!({ "name": name, "namespace": NAMESPACE });
    harness.server.put(
        PODS,
        json!({ "metadata": meta, "status": { "phase": "Failed", "reason": "Evicted", "conditions": [] } }),
    );
}

#[tokio::test(start_paused = true)]
async fn a_recreated_agent_waits_until_the_claim_of_its_predecessor_is_deleted() {
    let terminating = json!({ "deletionTimestamp": "2026-11-22T14:00:00Z" });
    for metadata in [owned_by("Agent", "coast", "earlier"), terminating] {
        let harness = ControllerHarness::start().await;
        put_claim(&harness, "coast-state", metadata);
        harness.apply("coast", &json!({}));
        harness.pass(5).await;
        assert_eq!(harness.pod("coast"), None, "it would start on the journal of another");
        assert_eq!(pod_ready(&harness, "coast"), "ClaimEnding");
        assert_eq!(harness.ready("coast"), ("False".into(), "ClaimEnding".into()));
        assert_eq!(harness.condition("coast", "Reconciling").unwrap().0, "True");
        harness.server.delete(CLAIMS, NAMESPACE, "coast-state");
        harness.pass(31).await;
        assert_eq!(owner(&harness, "coast"), harness.agent("coast").metadata.uid);
        harness.come_up("coast").await;
        assert_eq!(harness.ready("coast").0, "True");
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_of_something_else_needs_a_person_and_is_never_used() {
    let harness = ControllerHarness::start().await;
    put_claim(&harness, "coast-state", owned_by("StatefulSet", "database", "x"));
    put_claim(&harness, "plain-state", json!({}));
    put_claim(&harness, "database-state", json!({ "labels": { "app": "database" } }));
    harness.apply("coast", &json!({}));
    harness.apply("plain", &json!({}));
    harness.apply("database", &json!({ "storage": { "retentionPolicy": "Retain" } }));
    harness.pass(3).await;
    for name in ["coast", "plain", "database"] {
        assert_eq!(harness.pod(name), None);
        assert_eq!(pod_ready(&harness, name), "ClaimForeign");
        assert_eq!(harness.condition(name, "Stalled").unwrap().1, "ClaimForeign");
    }
    harness.server.delete(CLAIMS, NAMESPACE, "coast-state");
    harness.pass(31).await;
    assert_eq!(owner(&harness, "coast"), harness.agent("coast").metadata.uid);
    assert!(harness.pod("coast").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_retained_claim_is_adopted() {
    let harness = ControllerHarness::start().await;
    put_claim(
        &harness,
        "coast-state",
        json!({ "labels": { "agentloop.dev/agent": "coast" } }),
    );
    harness
        .bring_up("coast", &json!({ "storage": { "retentionPolicy": "Retain" } }))
        .await;
    assert_eq!(harness.ready("coast").0, "True");
    assert_eq!(harness.server.list(CLAIMS).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_pod_receives_a_new_claim_in_place_of_a_deleted_one() {
    let harness = ControllerHarness::start().await;
    harness.apply("coast", &json!({}));
    harness.settle().await;
    harness.server.delete(CLAIMS, NAMESPACE, "coast-state");
    unschedulable(&harness, "coast");
    harness.settle().await;
    assert_eq!(owner(&harness, "coast"), harness.agent("coast").metadata.uid);
    assert_eq!(harness.live_pod("coast").epoch, 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_pod_does_not_start_on_a_claim_that_became_another() {
    let harness = ControllerHarness::start().await;
    harness.apply("coast", &json!({}));
    harness.settle().await;
    harness.server.delete(CLAIMS, NAMESPACE, "coast-state");
    put_claim(&harness, "coast-state", owned_by("Agent", "coast", "earlier"));
    unschedulable(&harness, "coast");
    harness.pass(3).await;
    assert_eq!(harness.pod("coast"), None);
    assert_eq!(pod_ready(&harness, "coast"), "ClaimEnding");
    harness.server.delete(CLAIMS, NAMESPACE, "coast-state");
    harness.pass(31).await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
    assert_eq!(owner(&harness, "coast"), harness.agent("coast").metadata.uid);
}

#[tokio::test(start_paused = true)]
async fn a_workspace_is_no_claim_that_was_created_for_another_agent() {
    let harness = ControllerHarness::start().await;
    harness.apply("other", &json!({}));
    harness.settle().await;
    harness.apply("coast", &json!({ "workspace": { "claimName": "other-state" } }));
    harness.pass(6).await;
    assert_eq!(harness.pod("coast"), None);
    let found = harness.condition("coast", "Accepted").unwrap();
    assert_eq!(found, ("False".into(), "VolumeClaimInUse".into()));
}

/// A claim of a `StatefulSet` has no owner by default and looks like one that a user created.
#[tokio::test(start_paused = true)]
async fn a_workspace_claim_requires_the_label_for_agents_whoever_owns_it() {
    let harness = ControllerHarness::start().await;
    put_claim(&harness, "data-db-0", json!({ "labels": { "app": "db" } }));
    put_claim(&harness, "owned", owned_by("StatefulSet", "database", "x"));
    for claim in ["data-db-0", "owned"] {
        harness.apply("coast", &json!({ "workspace": { "claimName": claim } }));
        harness.pass(6).await;
        assert_eq!(harness.pod("coast"), None);
        let conditions = harness.status("coast").conditions;
        let accepted = conditions.into_iter().find(|c| c.type_ == "Accepted").unwrap();
        assert_eq!(
            (accepted.status.as_str(), accepted.reason.as_str()),
            ("False", "VolumeClaimNotLabelled")
        );
        let fix = format!("`kubectl label pvc {claim} agentloop.dev/workspace=true`");
        assert!(accepted.message.contains(&fix), "{}", accepted.message);
        assert!(
            accepted.message.starts_with("spec.workspace.claimName: "),
            "{}",
            accepted.message
        );
    }
    put_claim(
        &harness,
        "owned",
        json!({ "labels": { "agentloop.dev/workspace": "true" } }),
    );
    harness.pass(31).await;
    assert_eq!(harness.condition("coast", "Accepted").unwrap().0, "True");
    assert!(harness.pod("coast").is_some(), "the label is enough");
}

/// An API server's history of changes is short: a client that was cut off for longer must list again, and the list does not say
/// what was there before.
#[tokio::test(start_paused = true)]
async fn a_pod_deleted_during_a_broken_watch_is_recreated() {
    for ended in [true, false] {
        let harness = ControllerHarness::start().await;
        harness.bring_up("coast", &json!({})).await;
        harness.server.deafen_to_deletions(PODS);
        if ended {
            // The controller itself deletes the evicted pod, and gets no event of its end.
            evict(&harness, "coast");
        } else {
            harness.server.finish_pod(NAMESPACE, "coast");
        }
        harness.pass(1).await;
        assert_eq!(harness.pod("coast"), None);
        harness.server.expire(PODS);
        harness.pass(5).await;
        assert_eq!(harness.live_pod("coast").epoch, 2, "ended: {ended}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_of_a_pod_during_an_interrupted_watch_is_shown() {
    let harness = ControllerHarness::start().await;
    harness.apply("coast", &json!({}));
    harness.settle().await;
    harness.pass(16).await;
    harness.server.deafen(PODS);
    unschedulable(&harness, "coast");
    harness.pass(16).await;
    assert_eq!(pod_ready(&harness, "coast"), "Starting");
    harness.server.expire(PODS);
    harness.pass(16).await;
    assert_eq!(pod_ready(&harness, "coast"), "Unschedulable");
}

#[tokio::test(start_paused = true)]
async fn a_pod_deleted_before_its_creation_was_answered_is_recreated() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("earlier", &json!({})).await;
    harness.apply("coast", &json!({}));
    harness.server.set_slow(Duration::from_secs(2));
    while harness.pod("coast").is_none() {
        harness.settle().await;
    }
    harness.server.delete(PODS, NAMESPACE, "coast");
    harness.server.set_slow(Duration::ZERO);
    assert_eq!(harness.pod("coast"), None);
    harness.pass(10).await;
    assert_eq!(harness.live_pod("coast").epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn agents_are_shown_once_agents_and_pods_are_listed() {
    for resource in [AGENTS, PODS] {
        let mut harness = ControllerHarness::start().await;
        harness.bring_up("coast", &json!({})).await;
        harness.shut_down().await;
        harness.server.set_closed(resource, true);
        harness.boot().await;
        harness.pass(10).await;
        let shown = |harness: &ControllerHarness| {
            harness
                .running()
                .observer
                .view
                .lock()
                .unwrap()
                .contains(&agent_key("coast"))
        };
        assert!(!shown(&harness), "{resource}");
        harness.server.set_closed(resource, false);
        harness.pass(40).await;
        assert!(shown(&harness), "{resource}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_budget_status_is_kept_until_budgets_are_listed_and_a_suspension_takes_effect() {
    let mut harness = ControllerHarness::start().await;
    harness.server.put(
        "agentloop.dev/agentbudgets",
        json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
            "metadata": { "name": "team", "namespace": NAMESPACE },
            "spec": { "selector": {}, "window": { "rolling": { "seconds": 3600 } }, "limits": { "tokens": 1000 } },
        }),
    );
    harness
        .bring_up("coast", &json!({ "budgetRefs": [{ "name": "team" }] }))
        .await;
    harness.apply("lost", &json!({ "budgetRefs": [{ "name": "absent" }] }));
    harness.pass(20).await;
    let before = harness.status("coast");
    assert_eq!(before.budgets.len(), 1, "{before:?}");
    assert_eq!(harness.condition("lost", "Accepted").unwrap().1, "BudgetNotFound");
    harness.shut_down().await;

    harness.server.set_closed("agentloop.dev/agentbudgets", true);
    harness.boot().await;
    // The first pass waits so long for the budgets.
    harness.pass(20).await;
    harness.report("coast", in_state(LoopState::Running), LoopUsage::default());
    harness.pass(40).await;
    assert_eq!(harness.status("coast").budgets, before.budgets);
    assert_eq!(harness.condition("coast", "Accepted").unwrap().0, "True");
    assert_eq!(harness.condition("lost", "Accepted").unwrap().1, "BudgetNotFound");
    assert_eq!(harness.pod("lost"), None);
    harness.apply("coast", &json!({ "budgetRefs": [{ "name": "team" }], "suspend": true }));
    harness.pass(5).await;
    assert!(harness.pod("coast").unwrap()["metadata"]["deletionTimestamp"].is_string());

    harness.server.set_closed("agentloop.dev/agentbudgets", false);
    harness.apply("lost", &json!({ "budgetRefs": [{ "name": "team" }] }));
    harness.pass(40).await;
    assert!(harness.pod("lost").is_some());
}

/// A leader that was frozen long enough is replaced, and continues for a moment with what it knew.
#[tokio::test(start_paused = true)]
async fn a_leader_that_was_replaced_writes_nothing_over_what_its_successor_wrote() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.pass(20).await;
    harness.server.deafen(AGENTS);
    let meta = json!({ "name": "coast", "namespace": NAMESPACE });
    let newer = json!({ "metadata": meta, "status": { "usage": { "calls": 50 } } });
    harness.server.put(AGENTS, newer);
    harness.report("coast", in_state(LoopState::Paused), usage(7));
    harness.pass(20).await;
    assert_eq!(harness.status("coast").usage.unwrap().calls, 50);
    assert_eq!(harness.state("coast"), LoopState::Running, "nothing of it is written");
    // It was not replaced after all.
    harness.server.expire(AGENTS);
    harness.pass(20).await;
    assert_eq!(
        harness.status("coast").usage.unwrap().calls,
        50,
        "totals never step back"
    );
    assert_eq!(harness.state("coast"), LoopState::Paused);
}

#[tokio::test(start_paused = true)]
async fn an_open_gate_survives_a_killed_leader_and_its_answer_reaches_the_pod_through_the_next_one() {
    let mut harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    let gate = |id: &str| -> Gate {
        let gate = json!({
            "id": id, "kind": "ToolCallNeedsApproval", "tool": "bank__pay", "argumentsHash": format!("hash-of-{id}"),
            "openedAt": "2026-11-22T14:00:00Z", "expiresAt": "2026-11-22T15:00:00Z",
        });
        serde_json::from_value(gate).unwrap()
    };
    let mut waits = in_state(LoopState::Paused);
    waits.gates = vec![gate("first"), gate("second")];
    harness.report("coast", waits.clone(), LoopUsage::default());
    harness.pass(20).await;
    assert_eq!(harness.status("coast").gates, waits.gates);

    harness.kill().await;
    harness.annotate("coast", "agentloop.dev/deny", "second");
    harness.boot().await;
    harness.pass(20).await;
    assert_eq!(
        harness.status("coast").gates,
        waits.gates,
        "as long as the pod says nothing"
    );
    let body = GateAnswerBody {
        answer: GateVerdict::Approve,
        arguments_hash: "hash-of-first".into(),
    };
    let recorder = GateAnswerRecorder::new(harness.server.client());
    let answered = recorder
        .record(&agent_key("coast"), ("first", &body), "ann", (harness.clock)())
        .await;
    assert_eq!(answered.unwrap().by.as_deref(), Some("ann"));

    harness.report("coast", waits, LoopUsage::default());
    harness.settle().await;
    let given = || {
        let attached =
            harness
                .running()
                .loops
                .attach(&agent_key("coast"), &harness.live_pod("coast"), (harness.clock)());
        let directives = attached.unwrap().1;
        let answers = directives.borrow().gate_answers.clone();
        answers
            .into_iter()
            .map(|given| (given.id, given.arguments_hash, given.approved, given.by))
            .collect::<Vec<_>>()
    };
    let expected = [("first", true, Some("ann")), ("second", false, None)];
    let expected =
        expected.map(|(id, approved, by)| (id.to_owned(), format!("hash-of-{id}"), approved, by.map(str::to_owned)));
    assert_eq!(given(), expected);
    harness.report("coast", in_state(LoopState::Running), LoopUsage::default());
    harness.pass(20).await;
    assert_eq!(harness.status("coast").gates, []);
    // They leave with the next reconcile.
    harness.annotate("coast", "agentloop.dev/wake", "later");
    harness.settle().await;
    assert_eq!(given(), []);
}

#[tokio::test(start_paused = true)]
async fn a_field_that_the_api_server_prunes_is_not_written_repeatedly() {
    let harness = ControllerHarness::start().await;
    harness.bring_up("coast", &json!({})).await;
    harness.pass(20).await;
    harness.server.prune("usage");
    harness.server.take_calls();
    for _ in 0..8 {
        harness.report("coast", in_state(LoopState::Running), usage(7));
        harness.annotate("coast", "agentloop.dev/wake", &format!("{:?}", (harness.clock)()));
        harness.pass(20).await;
    }
    let writes = harness.server.take_writes().len();
    assert!(writes <= 2, "{writes} writes of the same");
}

#[tokio::test(start_paused = true)]
async fn an_agent_without_a_volume_reports_that_its_state_is_not_durable() {
    let harness = ControllerHarness::start().await;
    harness
        .bring_up("short", &json!({ "storage": { "ephemeral": true } }))
        .await;
    harness.bring_up("long", &json!({})).await;
    let said = harness.condition("short", "Durable");
    assert_eq!(said, Some(("False".into(), "Ephemeral".into())));
    assert_eq!(harness.condition("long", "Durable"), None);
    assert_eq!(harness.ready("short").0, "True", "nobody has to do anything about it");
}

#[tokio::test]
async fn an_agent_deleted_and_made_again_twenty_times_in_a_row_has_a_claim_of_its_own_and_keeps_it() {
    Box::pin(on_a_real_server(made_again_and_again)).await;
}

/// Garbage collection on a busy machine takes its time.
async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..600 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("not within 60 s: {what}");
}

async fn made_again_and_again(client: &Client, namespace: &str, stop: &CancellationToken) {
    let (loops, changed) = PodSessions::new();
    let loops = Arc::new(loops);
    let clock: WallClock = Arc::new(Timestamp::now);
    let (relay, _said) = DeliveryRelay::new(Duration::from_secs(5));
    let budgets = idle_ledger(client.clone(), &loops);
    tokio::spawn(budgets.clone().run(stop.clone()));
    let (_bundle, ca_bundle) = watch::channel("CA".to_owned());
    tokio::spawn(run(ReconcilerParts {
        client: client.clone(),
        settings: ReconcilerSettings {
            watch_namespaces: vec![namespace.into()],
            ..settings()
        },
        sensors: idle_sensors(
            client.clone(),
            "agentloop:test",
            (&loops, &Arc::new(relay)),
            clock.clone(),
        ),
        loops,
        budgets,
        changed,
        ca_bundle,
        published: watch::Sender::default(),
        observer: Arc::new(Counting::default()),
        metrics: Arc::new(agentloop::telemetry::metrics::Metrics::new().unwrap()),
        clock,
        events: EventSink::new().0,
        shutdown: stop.clone(),
    }));
    let agents: Api<Agent> = Api::namespaced(client.clone(), namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let scripts: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let script = json!({ "metadata": { "name": "script" }, "data": { "turns": "turns:\n- text: done\n" } });
    let script = serde_json::from_value(script).unwrap();
    scripts.create(&PostParams::default(), &script).await.unwrap();
    let model = json!({ "api": "Scripted", "name": "m", "scripted": { "configMapKeyRef": { "name": "script", "key": "turns" } } });
    let agent = json!({
        "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent", "metadata": { "name": "coast" },
        "spec": { "instructions": "i", "model": model },
    });
    let agent: Agent = serde_json::from_value(agent).unwrap();
    let mut life = agents.create(&PostParams::default(), &agent).await.unwrap();
    for round in 0..20 {
        // Sometimes before there is anything, sometimes when all is there.
        if round % 4 == 0 {
            until("a pod", async || pods.get_opt("coast").await.unwrap()).await;
        }
        agents.delete("coast", &DeleteParams::default()).await.unwrap();
        life = agents.create(&PostParams::default(), &agent).await.unwrap();
    }
    let uid = life.metadata.uid.unwrap();
    let of_this_life = |meta: &ObjectMeta| {
        let owners = meta.owner_references.iter().flatten();
        meta.deletion_timestamp.is_none() && owners.map(|owner| &owner.uid).eq([&uid])
    };
    let settled = async || {
        let claim = claims.get_opt("coast-state").await.unwrap()?;
        let pod = pods.get_opt("coast").await.unwrap()?;
        (of_this_life(&claim.metadata) && of_this_life(&pod.metadata)).then_some((claim, pod))
    };
    let (claim, pod) = until("a pod and a claim of this life", settled).await;
    // The garbage collector has long deleted by now what it was to delete.
    tokio::time::sleep(Duration::from_secs(3)).await;
    pods.delete("coast", &DeleteParams::default()).await.unwrap();
    let (kept, _) = until("the next pod", async || {
        settled()
            .await
            .filter(|(_, next)| next.metadata.uid != pod.metadata.uid)
    })
    .await;
    assert_eq!(kept.metadata.uid, claim.metadata.uid, "the claim of this life is kept");
    let policies: Api<NetworkPolicy> = Api::namespaced(client.clone(), namespace);
    let policy = policies.get("agentloop-agent").await.unwrap().spec.unwrap();
    assert_eq!(
        (policy.policy_types, policy.ingress),
        (Some(vec!["Ingress".into()]), None)
    );
}
