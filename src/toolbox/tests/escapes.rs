//! Attempts to leave the workspace with the file tools.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use crate::harness::{Server, TestClient};

const SECRET: &str = "canary-outside";

/// A toolbox, and a directory beside its workspace with a secret.
async fn harness() -> (Server, TestClient) {
    let server = Server::toolbox(&[]).await;
    std::fs::create_dir(server.folder.path().join("outside")).unwrap();
    std::fs::write(secret(&server), SECRET).unwrap();
    let client = server.client().await;
    (server, client)
}

fn secret(server: &Server) -> std::path::PathBuf {
    server.folder.path().join("outside/secret")
}

/// Calls every file tool with a path, and returns their texts. None may succeed.
async fn all_refuse(client: &TestClient, path: &str) -> Vec<String> {
    let calls: [(&str, Value); 5] = [
        ("read_file", json!({"path": path})),
        ("write_file", json!({"path": path, "content": "overwritten"})),
        (
            "edit_file",
            json!({"path": path, "old_text": "canary", "new_text": "x"}),
        ),
        ("list_directory", json!({"path": path})),
        ("search_files", json!({"path": path, "pattern": "canary"})),
    ];
    let mut texts = Vec::new();
    for (tool, arguments) in calls {
        let answer = client.call(tool, arguments).await;
        assert!(
            answer.is_error() && !answer.text().contains(SECRET),
            "{tool} {path}: {}",
            answer.text()
        );
        texts.push(answer.text());
    }
    let found = client.call("list_directory", json!({"files": [path]})).await.ok();
    assert!(!found.contains("bytes"), "{path}: {found}");
    texts
}

#[tokio::test]
async fn paths_that_lead_out_of_the_workspace_are_refused_by_every_tool() {
    let (server, client) = harness().await;
    server.put("a/b", "");
    let outside = secret(&server);
    let outside = outside.to_str().unwrap();
    let sibling = format!("{}-other/secret", server.workspace().display());
    let doubled = format!("{}//{outside}", server.workspace().display());
    let paths = [
        "../outside/secret",
        "a/../../outside/secret",
        "./a/./../../outside/secret",
        outside,
        &sibling,
        &format!("/proc/self/root{outside}"),
        "/etc/passwd",
        "/proc/self/environ",
    ];
    for path in paths {
        for text in all_refuse(&client, path).await {
            assert!(text.contains("outside the workspace"), "{path}: {text}");
        }
        let found = client.call("list_directory", json!({"files": [path]})).await.ok();
        assert_eq!(found, r#"Files: ["outside"]"#, "{path}");
    }
    // The rest of a path below the workspace stays below it.
    client
        .call("write_file", json!({"path": doubled, "content": "inside"}))
        .await
        .ok();
    for path in ["", "a\0b", &"x".repeat(5000)] {
        all_refuse(&client, path).await;
    }
    assert_eq!(std::fs::read_to_string(outside).unwrap(), SECRET);
}

#[tokio::test]
async fn links_that_lead_out_are_not_followed_and_links_within_are() {
    let (server, client) = harness().await;
    let workspace = server.workspace();
    server.put("in/file", "inside");
    symlink(secret(&server), workspace.join("absolute")).unwrap();
    symlink("../outside/secret", workspace.join("relative")).unwrap();
    symlink("../outside", workspace.join("folder")).unwrap();
    symlink("/proc/self/root", workspace.join("root")).unwrap();
    symlink("/proc/self/cwd", workspace.join("cwd")).unwrap();
    symlink("loop", workspace.join("loop")).unwrap();
    for path in [
        "absolute",
        "relative",
        "folder/secret",
        "root/etc/passwd",
        "cwd",
        "loop",
    ] {
        all_refuse(&client, path).await;
    }
    assert_eq!(std::fs::read_to_string(secret(&server)).unwrap(), SECRET);
    let found = client.call("search_files", json!({"pattern": "canary"})).await.ok();
    assert_eq!(found, "[no matches]");
    symlink("in", workspace.join("inner")).unwrap();
    assert_eq!(
        client.call("read_file", json!({"path": "inner/file"})).await.ok(),
        "inside"
    );
    client
        .call("write_file", json!({"path": "inner/new/file", "content": "x"}))
        .await
        .ok();
    assert_eq!(server.get("in/new/file"), "x");
    // A new file through a dangling link would be created at its target.
    symlink("../outside/new", workspace.join("dangling")).unwrap();
    all_refuse(&client, "dangling").await;
    assert!(!server.folder.path().join("outside/new").exists());
}

/// Swaps a directory and a link to the outside until `stop`, and counts that.
fn swap(workspace: &Path, stop: &AtomicBool, swaps: &AtomicU64) {
    let path = |name: &str| workspace.join(name);
    while !stop.load(Ordering::Relaxed) {
        let (one, other) = (path("swapped"), path("link"));
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(rustix::fs::CWD, &one, rustix::fs::CWD, &other, flags).unwrap();
        swaps.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_constantly_swapped_for_a_link_never_leads_outside() {
    let (server, client) = harness().await;
    let workspace = server.workspace();
    server.put("swapped/secret", "inside");
    symlink("../outside", workspace.join("link")).unwrap();
    let (stop, swaps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let swapping = {
        let (workspace, stop, swaps) = (workspace.clone(), Arc::clone(&stop), Arc::clone(&swaps));
        std::thread::spawn(move || swap(&workspace, &stop, &swaps))
    };
    let began = Instant::now();
    let (mut inside, mut refused, mut number) = (0, 0, 0);
    let is_enough = |inside: u32, refused: u32| swaps.load(Ordering::Relaxed) > 1000 && inside > 10 && refused > 10;
    while began.elapsed() < Duration::from_secs(3) || !is_enough(inside, refused) {
        assert!(
            began.elapsed() < Duration::from_mins(2),
            "{swaps:?} {inside} {refused}: one of them is rare"
        );
        number += 1;
        let path = "swapped/secret";
        let calls = [
            ("read_file", json!({"path": path})),
            ("search_files", json!({"pattern": "canary"})),
            (
                "write_file",
                json!({"path": path, "content": format!("inside {number}")}),
            ),
            (
                "edit_file",
                json!({"path": path, "old_text": "inside", "new_text": "inside "}),
            ),
            (
                "write_file",
                json!({"path": format!("swapped/new/{number}"), "content": "inside"}),
            ),
        ];
        for (tool, arguments) in calls {
            let answer = client.call(tool, arguments).await;
            assert!(!answer.text().contains(SECRET), "{tool} read the secret");
            if answer.is_error() {
                refused += 1;
            } else {
                inside += 1;
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    swapping.join().unwrap();
    println!("{swaps:?} swaps, {inside} calls inside, {refused} refused");
    assert_eq!(std::fs::read_to_string(secret(&server)).unwrap(), SECRET);
    let outside: Vec<_> = std::fs::read_dir(server.folder.path().join("outside"))
        .unwrap()
        .collect();
    assert_eq!(outside.len(), 1, "nothing was created outside: {outside:?}");
}

#[tokio::test]
async fn a_hard_link_is_a_file_of_the_workspace_and_writing_it_leaves_the_other_name_unchanged() {
    let (server, client) = harness().await;
    std::fs::hard_link(secret(&server), server.workspace().join("hard")).unwrap();
    // The creator of the link could read the file: the tools cannot distinguish the names.
    assert_eq!(client.call("read_file", json!({"path": "hard"})).await.ok(), SECRET);
    client
        .call(
            "edit_file",
            json!({"path": "hard", "old_text": "canary", "new_text": "x"}),
        )
        .await
        .ok();
    client
        .call("write_file", json!({"path": "hard", "content": "overwritten"}))
        .await
        .ok();
    assert_eq!(std::fs::read_to_string(secret(&server)).unwrap(), SECRET);
    assert_eq!(server.get("hard"), "overwritten");
}

#[tokio::test]
async fn pipes_sockets_and_devices_are_refused_without_blocking() {
    let (server, client) = harness().await;
    let workspace = server.workspace();
    rustix::fs::mkfifoat(rustix::fs::CWD, workspace.join("pipe"), 0o600.into()).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(workspace.join("sock")).unwrap();
    let mut special = vec![("pipe", "a named pipe"), ("sock", "a socket")];
    let device = rustix::fs::makedev(1, 5);
    let made = rustix::fs::mknodat(
        rustix::fs::CWD,
        workspace.join("zero"),
        rustix::fs::FileType::CharacterDevice,
        0o600.into(),
        device,
    );
    if made.is_ok() {
        special.push(("zero", "a device"));
    }
    let calls = async {
        for (path, kind) in special {
            let texts = all_refuse(&client, path).await;
            assert!(
                texts[..3]
                    .iter()
                    .all(|text| text == &format!("{path}: {kind}, not a regular file")),
                "{texts:?}"
            );
        }
        // A search passes them by.
        client.call("search_files", json!({"pattern": "x"})).await.ok();
    };
    tokio::time::timeout(Duration::from_secs(10), calls).await.unwrap();
}

#[tokio::test]
async fn a_tree_deeper_than_the_longest_path_is_searched_to_its_bound() {
    let (server, client) = harness().await;
    let name = "d".repeat(200);
    let flags = rustix::fs::OFlags::DIRECTORY;
    let mut at = rustix::fs::open(server.workspace(), flags, 0.into()).unwrap();
    for _ in 0..40 {
        rustix::fs::mkdirat(&at, &name, 0o755.into()).unwrap();
        at = rustix::fs::openat(&at, &name, flags, 0.into()).unwrap();
    }
    server.put(&format!("{name}/{name}/found"), "canary");
    let found = client.call("search_files", json!({"pattern": "canary"})).await.ok();
    assert_eq!(found, format!("{name}/{name}/found:1:canary\n"));
    let long = vec![name.as_str(); 21].join("/");
    let text = client.call("list_directory", json!({"path": long})).await.error();
    assert!(
        text.ends_with("the path is empty, too long or contains a zero byte"),
        "{text}"
    );
    let component = "x".repeat(256);
    let text = client
        .call("write_file", json!({"path": component, "content": ""}))
        .await
        .error();
    assert!(
        text.ends_with("the path is empty, too long or contains a zero byte"),
        "{text}"
    );
}
