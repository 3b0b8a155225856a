//! Tools that run in containers of the pod: the built-in ones in an image of the user's, and third-party MCP servers.
//!
//! The image has busybox, Node.js and the MCP project's own test server (`hack/tools-image.sh`).

use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::agents::{Agent, condition, script, scripted};
use super::cluster::{AGENTS, Namespace, figure, shared};
use super::node;
use crate::support::kubectl::Kubectl;

const SERVER: &str = "/app/node_modules/@modelcontextprotocol/server-everything/dist/index.js";

pub fn image() -> String {
    std::env::var("AGENTLOOP_E2E_TOOLS_IMAGE").unwrap_or_else(|_| "localhost/agentloop-tools:dev".into())
}

fn call(tool: &str, arguments: &Value) -> Value {
    json!({"name": tool, "arguments": arguments})
}

pub fn shell(command: &str) -> Value {
    call("toolbox__shell", &json!({"command": command}))
}

fn read(path: &str) -> Value {
    call("toolbox__read_file", &json!({"path": path}))
}

pub fn write(path: &str, content: &str) -> Value {
    call("toolbox__write_file", &json!({"path": path, "content": content}))
}

/// The outcomes of the tool runs, in their order, from the worker's log.
fn outcomes(kubectl: &Kubectl, pod: &str) -> Vec<(String, String)> {
    let log = kubectl.ok(&["logs", pod, "-c", "worker"]);
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    lines
        .filter(|line| line["event"] == "tool:outcome")
        .map(|line| (text(&line["tool"]), text(&line["outcome"])))
        .collect()
}

/// Runs a command in a container of the Agent's pod; its output.
pub fn inside(agent: &Agent<'_>, container: &str, command: &str) -> String {
    agent
        .kubectl
        .ok(&["exec", &agent.name, "-c", container, "--", "/bin/sh", "-c", command])
}

/// The same, whatever comes of it.
fn try_inside(agent: &Agent<'_>, container: &str, command: &str) {
    agent
        .kubectl
        .run(&["exec", &agent.name, "-c", container, "--", "/bin/sh", "-c", command]);
}

fn asleep(agent: &Agent<'_>, turns: i64) -> Value {
    agent.until("a sleep", 180, |agent| {
        let state = &agent["status"]["loop"];
        (state["state"] == "Sleeping" && agent["status"]["usage"]["turns"] == turns).then(|| agent.clone())
    })
}

#[test]
fn built_in_tools_work_in_the_users_image_and_leave_neither_the_workspace_nor_processes_behind() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "toolbox");
    let turns = json!({"turns": [
        {"text": "I work.", "toolCalls": [
            write("notes/a.txt", "one\n"),
            shell("cat notes/a.txt > copy; id -u > uid; env > env; ls /proc/1/fd > fds 2>/dev/null; sleep 3333 & setsid sleep 4444 & exit 3"),
            shell("ln -s / out; ln -s /proc/self/root root; ln -s /etc/hostname name; exit 0"),
        ]},
        {"text": "I look outside.", "toolCalls": [
            read("copy"), read("out/etc/hostname"), read("../etc/hostname"), read("root/etc/hostname"), read("name"),
            read("/etc/hostname"), read("/proc/self/environ"), read(&"a/".repeat(2000)),
        ]},
        {"yield": {"sleep": 3600}},
        {"text": "I wait.", "toolCalls": [write("b.txt", "two"), shell("sleep 5555")]},
        {"yield": {"sleep": 3600}},
        {"text": "I race.", "toolCalls": vec![read("race/etc/hostname"); 31].into_iter().chain([read("hard")]).collect::<Vec<_>>()},
        {"yield": {"sleep": 3600}},
        {"text": "I wait again.", "toolCalls": [shell("sleep 6666")]},
        {"yield": {"sleep": 3600}},
    ]});
    namespace.kubectl.apply(&script("toolbox", &turns));
    let spec = json!({
        "tools": {
            "builtin": ["Shell", "Files"],
            "approval": {"default": "Never"},
            "toolbox": {"image": image()},
        },
        "workspace": {"size": "64Mi"},
    });
    let agent = Agent::apply(&namespace, "toolbox", &scripted("toolbox"), &spec);
    let ended = asleep(&agent, 1);
    assert_eq!(
        ended["status"]["usage"]["toolCalls"], 11,
        "{}",
        ended["status"]["usage"]
    );

    let of = |tool: &str, outcome: &str| (format!("toolbox__{tool}"), outcome.to_owned());
    let mut expected = vec![
        of("write_file", "Ok"),
        of("shell", "Ok"),
        of("shell", "Ok"),
        of("read_file", "Ok"),
    ];
    expected.extend(vec![of("read_file", "Error"); 7]);
    let mut seen = outcomes(&namespace.kubectl, &agent.name);
    // Reads run side by side.
    seen[3..].sort();
    expected[3..].sort();
    assert_eq!(seen, expected);

    assert_eq!(
        inside(&agent, "toolbox", "cat /workspace/copy /workspace/uid"),
        "one\n65534\n"
    );
    let environment = inside(&agent, "toolbox", "cat /workspace/env");
    assert!(
        !environment.contains("AGENTLOOP") && !environment.contains("SSL_CERT_FILE"),
        "{environment}"
    );
    assert_eq!(
        inside(&agent, "toolbox", "cat /workspace/fds"),
        "",
        "the first process is not readable"
    );
    let processes = inside(&agent, "toolbox", "ps -o args");
    assert!(!processes.contains("sleep"), "{processes}");
    assert!(processes.contains("/agentloop-bin/agentloop toolbox"), "{processes}");
    let volumes = inside(
        &agent,
        "toolbox",
        "ls -d /run/agentloop-mcp /run/agentloop /var/run/secrets /etc/agentloop 2>/dev/null; true",
    );
    assert_eq!(
        volumes, "/run/agentloop-mcp\n",
        "neither the gateway's files nor a token"
    );

    let memory = inside(&agent, "toolbox", "grep RssAnon /proc/1/status");
    let kibibytes: u32 = memory
        .split_whitespace()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .expect("its memory");
    figure("private memory of the toolbox after eleven calls", kibibytes, "KiB");
    assert!(kibibytes <= 4096, "{kibibytes} KiB");

    a_killed_toolbox_takes_its_command_with_it(&agent);
    no_link_leads_outside_even_while_it_changes(&agent);
    the_command_of_a_killed_worker_ends(&agent);
}

/// SIGKILL of the toolbox in the middle of a command: the command ends, its outcome is unknown, and it is not repeated.
fn a_killed_toolbox_takes_its_command_with_it(agent: &Agent<'_>) {
    let of = |tool: &str, outcome: &str| (format!("toolbox__{tool}"), outcome.to_owned());
    let pid = "for p in /proc/[0-9]*; do grep -q [5]555 $p/cmdline 2>/dev/null && echo found; done; true";
    wake(agent, "wait");
    let deadline = Instant::now() + Duration::from_mins(1);
    while !inside(agent, "toolbox", pid).contains("found") {
        assert!(Instant::now() < deadline, "the command does not start");
    }
    assert_eq!(container_restarts(agent, "toolbox"), 0);
    let pod = || agent.kubectl.get("pod", &agent.name).expect("the pod exists");
    node::kill(&pod(), "toolbox");
    agent.kubectl.until("the restart", 60, "pod", &agent.name, |_| {
        (container_restarts(agent, "toolbox") == 1 && node::find(&pod(), "toolbox").is_some()).then_some(())
    });
    assert!(!inside(agent, "toolbox", pid).contains("found"));
    asleep(agent, 2);
    let last = outcomes(agent.kubectl, &agent.name);
    assert_eq!(
        last[11..],
        [of("write_file", "Ok"), of("shell", "Unknown")],
        "never repeated"
    );
    assert_eq!(
        inside(agent, "toolbox", "cat /workspace/b.txt"),
        "two",
        "the workspace outlives the container"
    );
}

/// A link that changes all the time between a directory of the workspace and `/`, and a hard link to a file outside, which
/// cannot be made.
fn no_link_leads_outside_even_while_it_changes(agent: &Agent<'_>) {
    let links = "cd /workspace; mkdir sub; ln /etc/hostname hard 2>/dev/null && echo made; \
                 (while [ ! -e stop ]; do ln -sfn / race; ln -sfn sub race; done) >/dev/null 2>&1 & true";
    assert_eq!(inside(agent, "toolbox", links), "");
    wake(agent, "race");
    asleep(agent, 3);
    inside(agent, "toolbox", "touch /workspace/stop");
    let seen = outcomes(agent.kubectl, &agent.name);
    let read = ("toolbox__read_file".to_owned(), "Error".to_owned());
    assert_eq!(seen[13..], vec![read; 32]);
}

/// SIGKILL of the worker in the middle of a command: the command ends, its outcome is unknown, and it is not repeated.
fn the_command_of_a_killed_worker_ends(agent: &Agent<'_>) {
    let running = "for p in /proc/[0-9]*; do grep -q [6]666 $p/cmdline 2>/dev/null && echo found; done; true";
    let until = |found: bool| {
        let deadline = Instant::now() + Duration::from_mins(1);
        while inside(agent, "toolbox", running).contains("found") != found {
            assert!(Instant::now() < deadline, "the command runs: {}", !found);
        }
    };
    wake(agent, "again");
    until(true);
    let pod = agent.kubectl.get("pod", &agent.name).expect("the pod exists");
    node::kill(&pod, "worker");
    until(false);
    asleep(agent, 4);
    // The log is that of the new container.
    let shell = ("toolbox__shell".to_owned(), "Unknown".to_owned());
    assert_eq!(outcomes(agent.kubectl, &agent.name), [shell]);
}

pub fn wake(agent: &Agent<'_>, token: &str) {
    let annotation = format!("agentloop.dev/wake={token}");
    agent
        .kubectl
        .ok(&["annotate", "--overwrite", AGENTS, &agent.name, &annotation]);
}

fn container_restarts(agent: &Agent<'_>, name: &str) -> i64 {
    let pod = agent.kubectl.get("pod", &agent.name).expect("the pod exists");
    let containers = pod["status"]["initContainerStatuses"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let found = containers.iter().find(|container| container["name"] == name);
    found
        .and_then(|container| container["restartCount"].as_i64())
        .unwrap_or(-1)
}

#[test]
fn bytes_that_built_in_tools_write_count_against_the_rate_limit() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "disk-limit");
    let bulk = "dd if=/dev/zero of=bulk bs=1M count=3 conv=fsync 2>/dev/null";
    let turns = json!({"turns": [
        {"toolCalls": [write("small", "a few bytes")]},
        {"toolCalls": [shell(bulk)]},
        {"toolCalls": [write("late", "once there is room")]},
        {"yield": {"sleep": 3600}},
    ]});
    namespace.kubectl.apply(&script("disk-limit", &turns));
    let spec = json!({
        "tools": {"builtin": ["Shell", "Files"], "approval": {"default": "Never"}, "toolbox": {"image": image()}},
        "guardrails": {"rateLimits": [{"resource": "DiskWriteBytes", "amount": 2_000_000, "windowSeconds": 30}]},
    });
    let agent = Agent::apply(&namespace, "disk-limit", &scripted("disk-limit"), &spec);
    let paused = agent.until("the pause", 180, |agent| {
        (agent["status"]["loop"]["reasons"] == json!(["RateWindow"])).then(|| agent.clone())
    });
    assert_eq!(
        paused["status"]["usage"]["toolCalls"], 2,
        "the small file does not count much: {paused}"
    );
    let said = condition(&paused, "RateLimited")
        .or_else(|| condition(&paused, "Ready"))
        .cloned()
        .unwrap_or_default();
    assert!(
        said["message"].as_str().unwrap_or_default().contains("DiskWriteBytes"),
        "{paused}"
    );
    let ended = asleep(&agent, 1);
    assert_eq!(ended["status"]["usage"]["toolCalls"], 3);
}

#[test]
fn servers_of_others_run_as_containers_over_standard_input_and_over_http() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "mcp-containers");
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}, "stringData": {"SERVER_TOKEN": "canary-server-token"},
    });
    namespace.kubectl.apply(&secret.to_string());
    let sum = |server: &str| call(&format!("{server}__get-sum"), &json!({"a": 2, "b": 40}));
    let turns = json!({"turns": [
        {"text": "I add.", "toolCalls": [sum("std"), sum("web")]},
        {"yield": {"sleep": 3600}},
        {"toolCalls": [sum("std"), sum("web")]},
        {"yield": {"sleep": 3600}},
    ]});
    namespace.kubectl.apply(&script("mcp", &turns));
    let spec = json!({"tools": {"servers": [
        {"name": "std", "trusted": true, "container": {
            "image": image(), "command": ["node", SERVER], "args": ["stdio"], "envFrom": [{"secretRef": {"name": "token"}}],
        }},
        {"name": "web", "trusted": true, "container": {
            "image": image(), "command": ["node", SERVER, "streamableHttp"], "port": 3001,
            "env": [{"name": "PORT", "value": "3001"}],
        }},
    ], "approval": {"default": "Never"}}});
    let agent = Agent::apply(&namespace, "mcp", &scripted("mcp"), &spec);
    asleep(&agent, 1);
    let done = |server: &str| (format!("{server}__get-sum"), "Ok".to_owned());
    let mut seen = outcomes(&namespace.kubectl, &agent.name);
    seen.sort();
    assert_eq!(seen, [done("std"), done("web")]);

    // Only the processes of the server have its credentials.
    let in_std = "grep -l canary-server-token /proc/[0-9]*/environ 2>/dev/null | wc -l";
    assert_ne!(inside(&agent, "mcp-std", in_std).trim(), "0");
    assert_eq!(inside(&agent, "mcp-web", in_std).trim(), "0");

    // The server behind the bridge dies: it is started again, and the container is not.
    inside(&agent, "mcp-std", "killall -9 node");
    // The command ends with the container that it ends.
    try_inside(&agent, "mcp-web", "kill -INT 1");
    agent.until_restarted("mcp-web", 1, 120);
    wake(&agent, "again");
    asleep(&agent, 2);
    let mut seen = outcomes(&namespace.kubectl, &agent.name);
    seen.sort();
    assert_eq!(seen, [done("std"), done("std"), done("web"), done("web")]);
    assert_eq!(
        (
            container_restarts(&agent, "mcp-std"),
            container_restarts(&agent, "mcp-web")
        ),
        (0, 1)
    );
    let all = agent.kubectl.ok(&["logs", &agent.name, "-c", "worker"])
        + &agent.kubectl.ok(&["logs", &agent.name, "-c", "gateway"]);
    assert!(!all.contains("canary") && !agent.object().to_string().contains("canary"));
}
