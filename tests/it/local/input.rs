//! What a run takes and refuses before it starts anything.

use serde_json::{Value, json};

use crate::gateway::authorities::PrivateServer;
use crate::gateway::provider::Provider;

use super::process::{CANARY, LocalHarness, agent, script, scripted};

/// The words of a run that must refuse its input: exit code 2, and no state was made.
async fn refused(harness: &mut LocalHarness, flags: &[&str]) -> String {
    let mut run = harness.run(flags);
    let status = run.ended().await;
    assert_eq!(status.code(), Some(2), "{}\n{}", run.out(), run.err());
    assert!(
        !harness.state().exists() && harness.left_over() == 0,
        "something was started"
    );
    assert_eq!(run.out(), "");
    let words = run.err();
    assert!(!words.contains(CANARY), "{words}");
    words
}

fn done() -> Value {
    json!([{ "yield": { "mode": "shutdown" } }])
}

#[tokio::test]
async fn a_mistake_is_named_with_file_document_field_and_fix() {
    let good = agent("a", &json!({}));
    for (spec, says) in [
        (json!({ "guardrail": {} }), "spec.guardrail: unknown field"),
        (
            json!({ "guardrails": { "maxCallsPerTurn": 0 } }),
            "spec.guardrails.maxCallsPerTurn",
        ),
        (
            json!({ "loop": { "minDelayMilliseconds": 20_000 } }),
            "spec.loop.minDelayMilliseconds (default 100) must not exceed",
        ),
        (
            json!({ "instructionsFrom": { "configMapKeyRef": { "name": "x", "key": "y" } } }),
            "keep exactly one",
        ),
        (
            json!({ "budgetRefs": [{ "name": "team" }] }),
            "AgentBudget team not found in these files",
        ),
        (
            json!({ "tools": { "builtin": ["Files"] } }),
            "spec.tools.builtin: agentloop run starts no containers",
        ),
        (
            json!({ "tools": { "servers": [{ "name": "hub", "container": { "image": "i", "port": 80 } }] } }),
            "spec.tools.servers[hub].container: agentloop run starts no containers",
        ),
    ] {
        let mut harness = LocalHarness::new();
        harness.write("all.yaml", &[script("a", &done()), agent("a", &spec)]);
        let words = refused(&mut harness, &[]).await;
        let place = format!("{}, document 2 (Agent a): ", harness.path("all.yaml").display());
        assert!(words.contains(&place) && words.contains(says), "{says}: {words}");
    }
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &[good]);
    let words = refused(&mut harness, &[]).await;
    assert!(words.contains("ConfigMap a does not exist"), "{words}");
}

#[tokio::test]
async fn every_mistake_of_all_files_is_shown_at_once() {
    let mut harness = LocalHarness::new();
    harness.write(
        "all.yaml",
        &[
            json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "d" } }),
            json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "s" }, "data": { "key": "not base64!" } }),
        ],
    );
    std::fs::write(harness.path("bad.yaml"), format!("a: [{CANARY}")).unwrap();
    let bad = harness.path("bad.yaml");
    let missing = harness.path("missing.yaml");
    let flags = ["-f", bad.to_str().unwrap(), "-f", missing.to_str().unwrap()];
    let words = refused(
        &mut harness,
        &[&flags[..], &["--secret-from-env", "s/k=NOT_SET_ANYWHERE"]].concat(),
    )
    .await;
    for says in [
        "all.yaml, document 1: apiVersion \"apps/v1\" with kind \"Deployment\" is not supported locally: use Agent",
        "Secret s: data.key is not valid base64: use stringData for plain text",
        "bad.yaml, document 1: invalid YAML",
        "missing.yaml: No such file",
        "environment variable NOT_SET_ANYWHERE is not set",
        "5 errors, nothing was started",
    ] {
        assert!(words.contains(says), "{says}: {words}");
    }
}

#[tokio::test]
async fn files_without_an_agent_and_one_object_twice_are_mistakes() {
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &[script("a", &done())]);
    assert!(refused(&mut harness, &[]).await.contains("no Agent in these files"));
    harness.write(
        "all.yaml",
        &[&scripted("a", &done())[..], &[agent("a", &json!({}))]].concat(),
    );
    let words = refused(&mut harness, &[]).await;
    assert!(
        words.contains("document 3 (Agent a): duplicate of the object in"),
        "{words}"
    );
}

#[tokio::test]
async fn fields_immutable_in_a_cluster_are_immutable_between_two_runs() {
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &scripted("a", &done()));
    assert_eq!(harness.run(&[]).cause().await, "NothingRuns");
    harness.write(
        "all.yaml",
        &[
            script("a", &done()),
            agent("a", &json!({ "storage": { "size": "1Gi" } })),
        ],
    );
    let mut run = harness.run(&[]);
    assert_eq!(run.ended().await.code(), Some(2));
    assert!(run.err().contains("spec.storage.size is immutable"), "{}", run.err());
}

#[tokio::test]
async fn a_changed_spec_starts_a_loop_again_that_had_ended() {
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &scripted("a", &done()));
    assert_eq!(harness.run(&[]).cause().await, "NothingRuns");
    let changed = agent("a", &json!({ "guardrails": { "maxCallsPerTurn": 3 } }));
    harness.write("all.yaml", &[script("a", &done()), changed]);
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns");
    assert_eq!(run.agent("a")["turnsCompleted"], 2);
}

#[tokio::test]
async fn a_directory_is_read_as_all_of_its_manifests() {
    let mut harness = LocalHarness::new();
    std::fs::create_dir(harness.path("all.yaml")).unwrap();
    harness.write("all.yaml/one.yaml", &[script("a", &done())]);
    harness.write("all.yaml/two.json", &[]);
    std::fs::write(harness.path("all.yaml/two.json"), agent("a", &json!({})).to_string()).unwrap();
    std::fs::write(harness.path("all.yaml/notes.txt"), "no manifest").unwrap();
    assert_eq!(harness.run(&[]).cause().await, "NothingRuns");
}

#[tokio::test]
async fn a_refusal_during_the_run_causes_exit_code_1() {
    let mut harness = LocalHarness::new();
    // A limit of money, for a model without a price.
    let unpriced = agent("a", &json!({ "guardrails": { "total": { "costUSD": "1.00" } } }));
    harness.write("all.yaml", &[script("a", &done()), unpriced]);
    let mut run = harness.run(&[]);
    assert_eq!(run.ended().await.code(), Some(1));
    assert!(run.err().contains("Agent a: PriceUnknown"), "{}", run.err());

    std::fs::write(
        harness.path("prices.json"),
        r#"{"scripted":{"inputPerMillion":"1.00","outputPerMillion":"2.00"}}"#,
    )
    .unwrap();
    let prices = harness.path("prices.json");
    let mut run = harness.run(&["--prices-file", prices.to_str().unwrap()]);
    assert_eq!(run.cause().await, "NothingRuns");
    assert_eq!(run.agent("a")["outcome"], "Completed");
}

#[tokio::test]
async fn manifests_come_from_standard_input_too() {
    let mut harness = LocalHarness::new();
    harness.write("input", &scripted("a", &done()));
    assert_eq!(harness.run_from_input(&[], "input").cause().await, "NothingRuns");
}

#[tokio::test]
async fn a_key_from_the_environment_reaches_the_model_server_and_stays_nowhere() {
    let provider = Provider::start().await;
    let mut harness = LocalHarness::new();
    let model = json!({
        "api": "OpenAIChat", "name": "m", "baseURL": format!("http://{}/v1", provider.address),
        "apiKeySecretRef": { "name": "openai", "key": "api-key" },
    });
    let whole = agent("a", &json!({ "model": model, "continuous": { "maxSleepSeconds": 60 } }));
    harness.write("all.yaml", &[whole]);
    let flags = ["--secret-from-env", "openai/api-key=TEST_KEY"];
    let mut run = harness.run_with(&flags, &[("TEST_KEY", CANARY)]);
    provider.until_asked(1).await;
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    let seen = provider.seen().remove(0);
    assert_eq!(seen.headers["authorization"], format!("Bearer {CANARY}"));
    assert!(!run.out().contains(CANARY) && !run.err().contains(CANARY));
    let objects = std::fs::read(harness.state().join("objects.sqlite")).unwrap();
    let log = std::fs::read(harness.state().join("objects.sqlite-wal")).unwrap_or_default();
    // The instructions stand there, as the canary in words; the key does not, in base64 neither.
    let text = String::from_utf8_lossy(&[objects, log].concat()).into_owned();
    assert!(!text.contains("Y2FuYXJ5") && !text.contains(&format!("\"{CANARY}\"")));
}

#[tokio::test]
async fn a_model_behind_a_private_authority_needs_its_secret_and_is_reached_with_it() {
    let server = PrivateServer::start().await;
    let mut harness = LocalHarness::new();
    let model = json!({
        "api": "OpenAIChat", "name": "m", "baseURL": format!("{}/v1", server.base),
        "tls": { "caSecretRef": { "name": "internal-ca" } },
    });
    let whole = agent("a", &json!({ "model": model, "continuous": { "maxSleepSeconds": 60 } }));
    harness.write("all.yaml", &[whole]);
    let mut refused = harness.run(&[]);
    assert!(!refused.ended().await.success());
    let says = "spec.model.tls.caSecretRef: Secret internal-ca does not exist in this namespace: create it with the key ca.crt";
    assert!(refused.err().contains(says), "{}", refused.err());
    let flags = ["--secret-from-env", "internal-ca/ca.crt=TEST_CA"];
    let mut run = harness.run_with(&flags, &[("TEST_CA", &server.ca)]);
    server.until_asked(1).await;
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
}

#[tokio::test]
async fn a_receiver_behind_a_private_authority_needs_its_secret_and_is_sent_responses_with_it() {
    let server = PrivateServer::start().await;
    let mut harness = LocalHarness::new();
    let http = json!({
        "url": format!("{}/responses", server.base), "tls": { "caSecretRef": { "name": "internal-ca" } },
    });
    let task = json!({ "prompt": "Work.", "responses": { "http": http } });
    let whole = agent("a", &json!({ "mode": "Task", "task": task }));
    let turns = script("a", &json!([{ "text": "done" }]));
    harness.write("all.yaml", &[turns.clone(), whole.clone()]);
    let mut refused = harness.run(&[]);
    assert!(!refused.ended().await.success());
    let says = "spec.task.responses.http.tls.caSecretRef: Secret internal-ca does not exist in this namespace: create it \
                with the key ca.crt";
    assert!(refused.err().contains(says), "{}", refused.err());
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "internal-ca" },
        "stringData": { "ca.crt": server.ca },
    });
    harness.write("all.yaml", &[turns, secret, whole]);
    let mut run = harness.run(&[]);
    server.until_asked(1).await;
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
}

/// An Agent in block style, so that its text can be edited by line; `spec` is indented by two spaces.
fn agent_text(spec: &str) -> String {
    let whole = serde_yaml::to_string(&agent("a", &json!({}))).unwrap();
    format!(
        "{}\n---\n{whole}{spec}",
        serde_yaml::to_string(&script("a", &done())).unwrap()
    )
}

#[tokio::test]
async fn a_key_that_is_given_twice_is_refused_with_its_path_at_any_depth() {
    let mut harness = LocalHarness::new();
    let extra = "  tools:\n    servers:\n    - {name: hub, url: 'http://127.0.0.1', name: other}\n";
    let limits = "---\napiVersion: agentloop.dev/v1alpha1\nkind: AgentBudget\nmetadata: {name: team}\nspec: {limits: {}, limits: {}}\n";
    let whole = agent_text(extra).replace(
        "  guardrails:\n",
        "  guardrails:\n    maxConsecutiveTurns: -5\n    maxConsecutiveTurns: 3\n",
    );
    let whole = whole.replace(
        "  model:\n",
        &format!("  model:\n    extraBody: {{a: {{b: {CANARY}, b: {CANARY}}}}}\n"),
    );
    std::fs::write(harness.path("all.yaml"), format!("{whole}{limits}")).unwrap();
    let words = refused(&mut harness, &[]).await;
    let file = harness.path("all.yaml").display().to_string();
    for says in [
        "document 2: spec.guardrails: key \"maxConsecutiveTurns\" is given twice: remove one of them",
        "document 2: spec.model.extraBody.a: key \"b\" is given twice",
        "document 2: spec.tools.servers[0]: key \"name\" is given twice",
        "document 3: spec: key \"limits\" is given twice",
    ] {
        assert!(words.contains(&format!("{file}, {says}")), "{says}: {words}");
    }
    assert!(words.contains("4 errors, nothing was started"), "{words}");
}

#[tokio::test]
async fn merge_keys_are_resolved_before_anything_is_checked() {
    let mut harness = LocalHarness::new();
    let whole = agent_text("").replace(
        "  guardrails:\n",
        "  guardrails:\n    <<: {maxCallsPerTurn: 3, maxConsecutiveTurns: 1}\n    maxConsecutiveTurns: 5\n",
    );
    std::fs::write(harness.path("all.yaml"), &whole).unwrap();
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns", "{}", run.err());
    let refusing = whole.replace("maxCallsPerTurn: 3", "maxCallsPerTurn: 0");
    std::fs::write(harness.path("all.yaml"), refusing).unwrap();
    let mut run = harness.run(&[]);
    assert_eq!(run.ended().await.code(), Some(2));
    assert!(
        run.err()
            .contains("document 2 (Agent a): spec.guardrails.maxCallsPerTurn"),
        "{}",
        run.err()
    );
}

#[tokio::test]
async fn a_list_is_read_as_its_items_and_their_mistakes_name_the_item() {
    let list = |items: &[Value]| json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": items });
    let mut harness = LocalHarness::new();
    harness.write("all.yaml", &[list(&scripted("a", &done()))]);
    let mut run = harness.run(&[]);
    assert_eq!(run.cause().await, "NothingRuns", "{}", run.err());

    let mut harness = LocalHarness::new();
    let wrong = agent("a", &json!({ "guardrails": { "maxCallsPerTurn": 0 } }));
    harness.write(
        "all.yaml",
        &[script("b", &done()), list(&[script("a", &done()), wrong])],
    );
    let words = refused(&mut harness, &[]).await;
    let place = "document 2, item 2 (Agent a): spec.guardrails.maxCallsPerTurn";
    assert!(words.contains(place), "{words}");
}

#[tokio::test]
async fn a_syntax_error_is_named_with_line_column_and_reason() {
    let mut harness = LocalHarness::new();
    std::fs::write(harness.path("all.yaml"), format!("a: 1\nb: [{CANARY}\nc: 2\n")).unwrap();
    let words = refused(&mut harness, &[]).await;
    let says = "all.yaml, document 1: invalid YAML: did not find expected ',' or ']' at line 3 column 2, while parsing a \
                flow sequence at line 2 column 4; correct it, the rest of the file was not read";
    assert!(words.contains(says), "{words}");
}
