//! The examples of a goal, and of Sensors that listen in a pod of their own, run as their first lines say; on ports of the
//! test's own.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};

use super::process::{LocalHarness, Run, WAIT_TIMEOUT};
use super::sources::{said, until, updates};
use crate::support::clusters::has;
use crate::support::ports::free_port;
use crate::tools::everything::{self, Everything};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");

/// An example, with these changes, as `all.yaml`.
pub fn example(harness: &LocalHarness, name: &str, changes: &[(&str, String)]) -> String {
    let mut text = std::fs::read_to_string(format!("{EXAMPLES}/{name}")).unwrap();
    for (from, to) in changes {
        assert!(text.contains(from), "{name} has no {from}");
        text = text.replace(from, to);
    }
    std::fs::write(harness.path("all.yaml"), &text).unwrap();
    text
}

fn server(program: &str, args: &[&str]) -> Child {
    let mut command = Command::new(program);
    command
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    command.spawn().unwrap()
}

fn feed(port: u16) -> Child {
    server("python3", &[&format!("{EXAMPLES}/servers/feed.py"), &port.to_string()])
}

/// Waits until events wake a loop that sleeps for an hour.
async fn until_woken(run: &mut Run, agent: &str) {
    until(run, "woken", |run| {
        let completed = run.agent(agent)["turnsCompleted"].as_i64()?;
        (completed >= 2 && updates(run) > 0).then_some(())
    })
    .await;
    run.interrupt().await;
    assert_eq!(run.cause().await, "Interrupted");
    assert!(!run.out().contains("hot_state_refused"), "{}", run.out());
}

#[tokio::test]
async fn the_example_of_a_goal_reaches_it_in_its_second_step() {
    let mut harness = LocalHarness::new();
    example(&harness, "goal.yaml", &[]);
    let mut run = harness.run(&["--events"]);
    assert_eq!(run.cause().await, "NothingRuns");
    let agent = run.agent("counter");
    assert_eq!(
        (&agent["outcome"], &agent["turnsCompleted"]),
        (&"Completed".into(), &2.into())
    );
    let judged = run.out().matches("\"note\":\"Judge\"").count();
    assert_eq!(judged, 1, "{}", run.out());
}

#[tokio::test]
async fn the_example_of_a_page_wakes_its_agent_when_the_price_becomes_high() {
    if !has("python3") {
        return;
    }
    let (mut harness, port) = (LocalHarness::new(), free_port());
    let _feed = feed(port);
    example(&harness, "poll.yaml", &[(":8900", format!(":{port}"))]);
    let mut run = harness.run(&["--events"]);
    until_woken(&mut run, "poll").await;
}

#[tokio::test]
async fn the_example_of_a_stream_wakes_its_agent() {
    if !has("python3") {
        return;
    }
    let (mut harness, port) = (LocalHarness::new(), free_port());
    let _feed = feed(port);
    example(&harness, "stream.yaml", &[(":8900", format!(":{port}"))]);
    let mut run = harness.run(&["--events"]);
    until_woken(&mut run, "stream").await;
}

#[tokio::test]
async fn the_example_of_a_metric_wakes_its_agent_with_a_real_prometheus() {
    if !has("prometheus") {
        return;
    }
    let (mut harness, port) = (LocalHarness::new(), free_port());
    let scrape = format!(
        "{{global: {{scrape_interval: 1s}}, scrape_configs: [{{job_name: itself, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]}}"
    );
    let config = harness.path("prometheus.yaml");
    std::fs::write(&config, scrape).unwrap();
    let flags = [
        format!("--config.file={}", config.display()),
        format!("--storage.tsdb.path={}", harness.path("data").display()),
        format!("--web.listen-address=127.0.0.1:{port}"),
    ];
    let _prometheus = server("prometheus", &flags.each_ref().map(String::as_str));
    let changes = [
        (":9090", format!(":{port}")),
        ("intervalSeconds: 15", "intervalSeconds: 1".to_owned()),
    ];
    example(&harness, "prometheus.yaml", &changes);
    let mut run = harness.run(&["--events"]);
    until_woken(&mut run, "prometheus").await;
}

/// The lines of an example that sign and send a request, for this port.
pub fn sender(text: &str, port: &str) -> String {
    let lines = text.lines().filter_map(|line| line.strip_prefix("#   "));
    let starts = ["id=", "body=", "sum=", "curl "];
    let lines = lines.filter(|line| starts.iter().any(|start| line.starts_with(start)));
    let lines: Vec<&str> = lines.collect();
    lines.join("\n").replace(":8080", &format!(":{port}"))
}

/// Sends it as soon as the webhook listens and knows its receivers.
pub async fn send(run: &Run, script: &str, expected: &str) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let sent = Command::new("sh").args(["-c", script]).output().await.unwrap();
        let answer = String::from_utf8_lossy(&sent.stdout).into_owned();
        let early = answer.is_empty() || answer.starts_with("HTTP/1.1 503");
        if !early {
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {expected}")),
                "{script}\n{answer}"
            );
            return;
        }
        assert!(Instant::now() < deadline, "{}\n{}", run.out(), run.err());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn the_example_of_a_tool_wakes_its_agent_with_the_mcp_projects_own_server() {
    if !everything::is_there() {
        return;
    }
    let (mut harness, mut server) = (LocalHarness::new(), Everything::start().await);
    // What it says in the first turn does not end the sleep after it.
    server.kill();
    let changes = [
        ("http://127.0.0.1:3001/mcp", server.url()),
        ("intervalSeconds: 30", "intervalSeconds: 1".to_owned()),
    ];
    example(&harness, "poll-tool.yaml", &changes);
    let mut run = harness.run(&["--events"]);
    until(&run, "asleep", |run| {
        (run.agent("poll-tool")["state"] == "Sleeping").then_some(())
    })
    .await;
    server.go().await;
    until_woken(&mut run, "poll-tool").await;
    // The weather of this server stays as it is, which is no event.
    assert_eq!(updates(&run), 1, "{}", run.out());
}

#[tokio::test]
async fn the_webhook_example_accepts_what_its_own_commands_sign_and_send() {
    if !has("openssl") || !has("curl") {
        return;
    }
    let (mut harness, port) = (LocalHarness::new(), free_port().to_string());
    let text = example(&harness, "webhook.yaml", &[]);
    let script = sender(&text, &port);
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    // What its first prompt shows would end no sleep.
    until(&run, "asleep", |run| {
        (run.agent("webhook")["state"] == "Sleeping").then_some(())
    })
    .await;
    for expected in ["202", "200"] {
        send(&run, &script, expected).await;
    }
    until_woken(&mut run, "webhook").await;
    assert_eq!(updates(&run), 1, "{}", run.out());
}

#[tokio::test]
async fn a_report_without_a_score_wakes_all_the_same_and_is_an_error_of_its_sensor_that_runs_elsewhere() {
    if !has("openssl") || !has("curl") {
        return;
    }
    let (mut harness, port) = (LocalHarness::new(), free_port().to_string());
    let changes = [(r#"'{"score": 20}'"#, "no idea".to_owned())];
    let script = sender(&example(&harness, "score.yaml", &changes), &port);
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    let asleep = |run: &Run| (run.agent("score")["state"] == "Sleeping").then_some(());
    until(&run, "asleep", asleep).await;
    send(&run, &script, "202").await;
    until(&run, "counted", |run| (said(run)["errors"] == 1).then_some(())).await;
    assert_eq!(said(&run)["events"], 1, "the pod's own part");
    until_woken(&mut run, "score").await;
}

/// The scores that were given so far, as the events say them.
fn scores(run: &Run) -> Vec<String> {
    let lines = run.lines().into_iter();
    let scored = lines.filter(|line| line["event"] == "autonomy:signal_scored");
    scored.map(|line| line["note"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn the_score_example_sleeps_through_a_low_score_and_runs_the_task_of_a_high_one() {
    if !has("openssl") || !has("curl") {
        return;
    }
    let (mut harness, port) = (LocalHarness::new(), free_port().to_string());
    let script = sender(&example(&harness, "score.yaml", &[]), &port);
    let mut run = harness.run(&["--events", "--webhook-port", &port]);
    let asleep = |run: &Run| (run.agent("score")["state"] == "Sleeping").then_some(());
    until(&run, "asleep", asleep).await;
    for (id, count) in [("id=1", 1), ("id=2", 2)] {
        send(&run, &script.replace("id=1", id), "202").await;
        until(&run, "scored", |run| (scores(run).len() == count).then_some(())).await;
    }
    until_woken(&mut run, "score").await;
    assert_eq!(scores(&run), ["signal/reports/urgent: 20", "signal/reports/urgent: 95"]);
    let journal = harness.journal("score");
    let count = |wanted: &str| journal.iter().filter(|(kind, ..)| kind == wanted).count();
    assert_eq!((count("TurnStarted"), count("Notified")), (2, 1), "{journal:?}");
}
