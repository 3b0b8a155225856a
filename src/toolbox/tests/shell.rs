//! Commands: their ends, and that nothing remains of them.

use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use agentloop_toolbox_protocol::DISK_WRITE_BYTES_META;
use pretty_assertions::assert_eq;
use serde_json::json;

use crate::harness::{Server, processes, until};

/// A command that starts three processes which are hard to find: in the background, in a session of its own, and
/// without a parent. They are recognized by the number of seconds that they sleep.
fn leaving(seconds: &str) -> String {
    format!(
        "sleep {seconds} & setsid sleep {seconds} & (setsid sh -c 'setsid sleep {seconds} & exec 1>&- 2>&- 0<&-' &) & \
         until [ $(pgrep -cf '^sleep {seconds}$') = 3 ]; do sleep 0.01; done"
    )
}

fn sleeping(seconds: &str) -> usize {
    processes(&format!("sleep\0{seconds}")).len()
}

async fn until_gone(seconds: &str) {
    until("the processes are gone", || (sleeping(seconds) == 0).then_some(())).await;
}

#[tokio::test]
async fn output_of_both_streams_is_in_order_with_the_exit_code() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    let run = |command: &str| {
        let arguments = json!({"command": command});
        let client = &client;
        async move { client.call("shell", arguments).await }
    };
    assert_eq!(
        run("echo one; echo two >&2; echo three").await.ok(),
        "exit code 0\none\ntwo\nthree\n"
    );
    assert_eq!(run("exit 3").await.ok(), "exit code 3\n[no output]");
    assert_eq!(
        run("kill -SEGV $$").await.ok(),
        "killed by signal 11 (SIGSEGV)\n[no output]"
    );
    assert_eq!(
        run("cat; echo end").await.ok(),
        "exit code 0\nend\n",
        "there is no input"
    );
    assert!(run("no-such-program").await.ok().starts_with("exit code 127\n"));
    assert!(run(" ").await.error().starts_with("command must have 1 to"));
    assert!(run("a\0b").await.error().starts_with("command must have 1 to"));
    let longest = format!("true {}", "x".repeat(64 * 1024 - 5));
    assert_eq!(run(&longest).await.ok(), "exit code 0\n[no output]");
    assert!(
        run(&format!("{longest}x"))
            .await
            .error()
            .starts_with("command must have 1 to")
    );
}

#[tokio::test]
async fn a_command_starts_in_a_directory_of_the_workspace_with_a_clean_environment() {
    let server = Server::toolbox_with(&["--shell-variable", "EXTRA"], |command| {
        command
            .env("SECRET_TOKEN", "canary")
            .env("EXTRA", "yes")
            .env("HOME", "/");
    })
    .await;
    server.put("sub/file", "");
    let environment = server
        .call("shell", json!({"command": "env | cut -d= -f1 | sort | xargs"}))
        .await
        .ok();
    let names: Vec<_> = environment.split_whitespace().collect();
    assert!(
        !names.contains(&"SECRET_TOKEN") && names.contains(&"EXTRA") && names.contains(&"PATH"),
        "{names:?}"
    );
    let home = server
        .call("shell", json!({"command": "echo $HOME; ls", "directory": "sub"}))
        .await
        .ok();
    assert_eq!(home, format!("exit code 0\n{}\nfile\n", server.workspace().display()));
    let outside = server
        .call("shell", json!({"command": "ls", "directory": "../"}))
        .await
        .error();
    assert_eq!(outside, "../: outside the workspace; use a path relative to it");
}

#[tokio::test]
async fn a_command_cannot_read_the_memory_or_the_environment_of_the_toolbox_or_its_supervisor() {
    let server = Server::toolbox_with(&[], |command| as_user(command.env("SECRET_TOKEN", "canary"), 61_235)).await;
    // The toolbox is the parent of the supervisor, which is the parent of the command.
    let command = "p=$(cut -d' ' -f4 /proc/$PPID/stat); for f in environ mem fd/0 io; do \
                   for q in $p $PPID; do head -c 1 /proc/$q/$f 2>&1 | grep -c Permission; done; done | xargs";
    assert_eq!(
        server.call("shell", json!({"command": command})).await.ok(),
        "exit code 0\n1 1 1 1 1 1 1 1\n"
    );
}

/// Limits and protections do not hold for root. No other process has this user.
fn as_user(command: &mut std::process::Command, user: u32) {
    if rustix::process::getuid().is_root() {
        command.uid(user).gid(user);
    }
}

#[tokio::test]
async fn a_command_that_ends_leaves_no_process() {
    let server = Server::toolbox(&[]).await;
    let began = Instant::now();
    let answer = server.call("shell", json!({"command": leaving("1000.01")})).await;
    assert!(answer.ok().starts_with("exit code 0\n"));
    assert_eq!(sleeping("1000.01"), 0);
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn a_command_that_times_out_is_killed_with_everything_it_started() {
    let server = Server::toolbox(&["--shell-timeout-seconds", "30"]).await;
    let command = format!("echo begun; {}; sleep 1000.02", leaving("1000.02"));
    let answer = server
        .call("shell", json!({"command": command, "timeout_seconds": 2}))
        .await;
    assert_eq!(answer.error(), "timed out after 2 s, and killed\nbegun\n");
    assert_eq!(sleeping("1000.02"), 0);
}

#[tokio::test]
async fn a_time_above_the_limit_of_the_flags_is_cut_to_it() {
    let server = Server::toolbox(&["--shell-timeout-seconds", "1"]).await;
    let answer = server
        .call("shell", json!({"command": "sleep 1000.03", "timeout_seconds": 30}))
        .await;
    assert_eq!(answer.error(), "timed out after 1 s, and killed\n[no output]");
}

#[tokio::test]
async fn a_cancelled_call_kills_its_command_and_the_next_one_runs() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    let command = format!("{}; sleep 1000.04", leaving("1000.04"));
    let call = client.try_call("shell", json!({"command": command}));
    let running = until("it runs", || (sleeping("1000.04") == 4).then_some(()));
    tokio::select! {
        _ = call => panic!("it ended"),
        () = running => {}
    }
    // Dropping the call cancelled it.
    until_gone("1000.04").await;
    assert_eq!(
        client.call("shell", json!({"command": "echo next"})).await.ok(),
        "exit code 0\nnext\n"
    );
}

#[tokio::test]
async fn a_call_that_is_dropped_while_it_waits_for_another_one_never_runs() {
    let server = Server::toolbox(&[]).await;
    let (client, other) = (server.client().await, server.client().await);
    let first = client.try_call(
        "shell",
        json!({"command": "touch begun; until [ -e go ]; do sleep 0.01; done"}),
    );
    let (marker, begun) = (server.workspace().join("ran"), server.workspace().join("begun"));
    let second = other.try_call("shell", json!({"command": "touch ran"}));
    let mut first = std::pin::pin!(first);
    let third = async {
        until("the first one runs", || begun.exists().then_some(())).await;
        tokio::time::timeout(Duration::from_millis(300), second).await
    };
    let waited = tokio::select! {
        _ = &mut first => panic!("it ended"),
        waited = third => waited,
    };
    assert!(waited.is_err(), "one command at a time");
    server.put("go", "");
    first.await.unwrap();
    client.call("shell", json!({"command": "true"})).await.ok();
    assert!(!marker.exists());
}

#[tokio::test]
async fn a_toolbox_that_is_killed_leaves_no_process() {
    let mut server = Server::toolbox(&[]).await;
    let client = server.client().await;
    let command = format!("{}; sleep 1000.05", leaving("1000.05"));
    let call = client.try_call("shell", json!({"command": command}));
    let running = until("it runs", || (sleeping("1000.05") == 4).then_some(()));
    tokio::select! {
        _ = call => panic!("it ended"),
        () = running => {}
    }
    // Not cancelled first: the kill must be noticed.
    server.process.kill().unwrap();
    until_gone("1000.05").await;
}

#[tokio::test]
async fn a_toolbox_that_is_killed_within_a_call_leaves_no_process() {
    let mut server = Server::toolbox(&[]).await;
    let client = server.client().await;
    let command = format!("{}; sleep 1000.06", leaving("1000.06"));
    let call = async { client.try_call("shell", json!({"command": command})).await };
    let kill = async {
        until("it runs", || (sleeping("1000.06") == 4).then_some(())).await;
        server.process.kill().unwrap();
    };
    let (outcome, ()) = tokio::join!(call, kill);
    assert!(
        matches!(outcome, Err(agentloop_mcp::McpRequestError::NoAnswer(_))),
        "{outcome:?}"
    );
    until_gone("1000.06").await;
}

#[tokio::test]
async fn a_command_that_kills_its_supervisor_is_killed_too() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    let command = format!("{}; kill -9 $PPID; sleep 1000.07", leaving("1000.07"));
    let answer = client.call("shell", json!({"command": command})).await;
    assert_eq!(
        answer.error(),
        "killed together with the process that watched it\n[no output]"
    );
    assert_eq!(sleeping("1000.07"), 0);
    assert_eq!(
        client.call("shell", json!({"command": "echo next"})).await.ok(),
        "exit code 0\nnext\n"
    );
    let pid = server.process.id().to_string();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    assert_eq!(children, "", "no zombie is left");
}

#[tokio::test]
async fn ten_mebibytes_of_output_are_cut_in_bounded_memory() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    let before = server.memory("RssAnon");
    let command = "echo first; head -c 10485760 /dev/zero | tr '\\0' x; echo; echo last";
    let text = client.call("shell", json!({"command": command})).await.ok();
    assert!(text.starts_with("exit code 0\nfirst\nxxx") && text.ends_with("xxx\nlast\n"));
    assert!(
        text.contains(&format!("[... {} bytes left out ...]", 10_485_760 + 12 - 32 * 1024)),
        "{}",
        text.len()
    );
    assert!(text.len() < 33 * 1024);
    let after = server.memory("VmHWM") - server.memory("VmRSS") + server.memory("RssAnon");
    assert!(after < before + 4096, "{before} KiB, then at most {after} KiB");
}

#[tokio::test]
async fn limits_of_processes_trip_at_their_value_and_not_below() {
    let server = Server::toolbox(&[
        "--shell-file-bytes",
        "65536",
        "--shell-open-files",
        "20",
        "--shell-memory-bytes",
        "200000000",
        "--shell-cpu-seconds",
        "1",
    ])
    .await;
    let client = server.client().await;
    let run = |command: &str| {
        let arguments = json!({"command": command});
        let client = &client;
        async move { client.call("shell", arguments).await.ok() }
    };
    assert!(run("head -c 65536 /dev/zero > a").await.starts_with("exit code 0"));
    assert_eq!(server.workspace().join("a").metadata().unwrap().len(), 65536);
    assert!(!run("head -c 65537 /dev/zero > b").await.starts_with("exit code 0"));
    assert_eq!(server.workspace().join("b").metadata().unwrap().len(), 65536);
    assert!(run("exec 9</dev/null").await.starts_with("exit code 0"));
    assert!(run("ulimit -n").await.contains("\n20\n"));
    let python = "import os\\nfor n in range(17): os.open(\"/dev/null\", 0)\\nprint(\"ok\")";
    let open = |count: u32| format!("printf '{}' | python3 -", python.replace("17", &count.to_string()));
    // 0, 1 and 2 are open, and Python keeps its own.
    let max = 20 - 3;
    assert!(run(&open(max + 1)).await.contains("Too many open files"));
    assert!(run(&open(max - 1)).await.contains("\nok\n"));
    let allocate = |bytes: u64| format!("python3 -c 'x = bytearray({bytes})' 2>&1");
    assert!(run(&allocate(200_000_000)).await.contains("MemoryError"));
    assert!(run(&allocate(50_000_000)).await.starts_with("exit code 0"));
    let spin = run("while :; do :; done").await;
    assert!(spin.starts_with("killed by signal 24 (SIGXCPU"), "{spin}");
}

#[tokio::test]
async fn a_lower_limit_of_the_container_stays() {
    let server = Server::toolbox_with(&["--shell-open-files", "2000"], |command| {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "ulimit -n 100 && exec \"$0\" \"$@\""]);
        *command = wrapped(shell, command);
        as_user(command, 61_236);
    })
    .await;
    let limits = server
        .call("shell", json!({"command": "ulimit -Hn; ulimit -n"}))
        .await
        .ok();
    assert_eq!(limits, "exit code 0\n100\n100\n");
}

/// A command that runs another one.
fn wrapped(mut outer: std::process::Command, inner: &std::process::Command) -> std::process::Command {
    outer.arg(inner.get_program()).args(inner.get_args());
    outer
}

/// How many processes a command can start at once under a limit.
async fn startable(limit: u32) -> usize {
    let server = Server::toolbox_with(&["--shell-processes", &limit.to_string()], |command| {
        as_user(command, 61_234);
    })
    .await;
    let mut passed = 0;
    for count in 0..8 {
        // They live until all are started, however slow the machine is.
        let sleeps = "sleep 30 & set -- \"$@\" $!; ".repeat(count);
        let text = server
            .call(
                "shell",
                json!({"command": format!("{sleeps} [ $# = 0 ] || kill \"$@\"; wait; echo end")}),
            )
            .await
            .text();
        if !text.starts_with("exit code 0") || text.contains("fork") {
            break;
        }
        passed = count;
    }
    passed
}

#[tokio::test]
async fn the_number_of_processes_trips_at_its_value_and_not_below() {
    let (fewer, more) = (startable(7).await, startable(8).await);
    assert!(fewer >= 1 && more == fewer + 1, "{fewer} {more}");
}

#[tokio::test]
async fn bytes_that_a_command_and_its_children_wrote_are_counted() {
    let server = Server::toolbox(&[]).await;
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let target = folder.path().join("a").display().to_string();
    let command = format!("head -c 1000000 /dev/zero > {target}; sh -c 'head -c 500000 /dev/zero >> {target}'");
    let answer = server.call("shell", json!({"command": command})).await;
    answer.ok();
    let written = answer.meta(DISK_WRITE_BYTES_META);
    assert!((1_500_000..1_600_000).contains(&written), "{written}");
}

#[tokio::test]
async fn a_process_that_the_toolbox_inherited_is_reaped_when_it_ends() {
    let server = Server::toolbox_with(&[], |command| {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "sleep 60 & exec \"$0\" \"$@\""]);
        *command = wrapped(shell, command);
    })
    .await;
    let pid = server.process.id();
    let children = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let inherited = children();
    assert_ne!(inherited, "");
    let mut kill = std::process::Command::new("kill");
    assert!(kill.arg(inherited.trim()).status().unwrap().success());
    until("it is reaped", || children().is_empty().then_some(())).await;
}

const GREEN: &str = r#"<testsuite><testcase name="a"/><testcase name="b"/></testsuite>"#;

/// The second line of the result of a command that is asked for `report.xml`.
async fn reported(server: &Server, command: &str) -> String {
    reported_at(server, command, "report.xml").await
}

async fn reported_at(server: &Server, command: &str, path: &str) -> String {
    let answer = server.call("shell", json!({"command": command, "junit": path})).await;
    let text = answer.ok();
    let line = text.lines().nth(1).unwrap_or_default();
    line.strip_prefix("JUnit report: ").unwrap_or(line).to_owned()
}

#[tokio::test]
async fn a_report_that_the_command_has_written_precedes_its_output() {
    let server = Server::toolbox(&[]).await;
    let command = format!("echo out; echo '{GREEN}' > report.xml; exit 3");
    let arguments = json!({"command": command, "junit": "report.xml"});
    assert_eq!(
        server.call("shell", arguments).await.ok(),
        "exit code 3\nJUnit report: {\"passed\":2,\"failed\":0,\"skipped\":0}\nout\n"
    );
    assert_eq!(
        server.call("shell", json!({"command": "echo out"})).await.ok(),
        "exit code 0\nout\n"
    );
}

#[tokio::test]
async fn a_report_that_was_there_before_does_not_count_and_one_that_is_written_again_does() {
    let server = Server::toolbox(&[]).await;
    let stale = "it was there before the command, which has not written it";
    server.put("report.xml", GREEN);
    assert!(reported(&server, "true").await.contains(stale));
    // The same content again is a new report.
    let again = format!("echo '{GREEN}' > report.xml");
    assert!(reported(&server, &again).await.contains("\"passed\":2"));
    assert!(reported(&server, "true").await.contains(stale));
    // An old report under the name, by a rename or a copy that keeps its time.
    server.put("old.xml", GREEN);
    server.age("old.xml", Duration::from_secs(1));
    assert!(reported(&server, "cp -p old.xml report.xml").await.contains(stale));
    assert!(reported(&server, "mv old.xml report.xml").await.contains(stale));
    assert!(
        reported(&server, "rm report.xml")
            .await
            .contains("report.xml: not found")
    );
    // Never written to the place that the criterion names.
    assert!(
        reported(&server, &again.replace("report", "other"))
            .await
            .contains("not found")
    );
}

#[tokio::test]
async fn only_a_regular_file_of_the_workspace_is_a_report() {
    let server = Server::toolbox(&[]).await;
    std::fs::write(server.folder.path().join("outside.xml"), GREEN).unwrap();
    for (command, path, problem) in [
        ("true", "../outside.xml", "outside the workspace"),
        ("ln -sf ../outside.xml link.xml", "link.xml", "outside the workspace"),
        ("mkfifo pipe.xml", "pipe.xml", "a named pipe"),
        ("mkdir folder", "folder", "a directory"),
        ("truncate -s 8388609 large.xml", "large.xml", "more than 8388608 bytes"),
        ("truncate -s 8388608 zeros.xml", "zeros.xml", "not well-formed XML"),
        (
            "echo '<!DOCTYPE a [<!ENTITY e SYSTEM \"/etc/passwd\">]><testsuite/>' > entity.xml",
            "entity.xml",
            "document type declaration",
        ),
    ] {
        let told = reported_at(&server, command, path).await;
        assert!(told.contains(problem), "{path}: {told}");
    }
}
