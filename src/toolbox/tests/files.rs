//! The file tools within the workspace.

use std::os::unix::fs::{PermissionsExt, symlink};

use pretty_assertions::assert_eq;
use serde_json::json;

use crate::harness::Server;

#[tokio::test]
async fn lines_of_a_file_are_read_in_parts_that_join_to_the_whole() {
    let server = Server::toolbox(&["--max-result-bytes", "1024"]).await;
    let client = server.client().await;
    let lines: Vec<_> = (1..=300).map(|number| format!("line {number}\n")).collect();
    let text = lines.concat();
    server.put("a.txt", &text);
    let (mut read, mut first, mut parts) = (String::new(), 1, 0);
    loop {
        let part = client
            .call("read_file", json!({"path": "a.txt", "first_line": first}))
            .await
            .ok();
        parts += 1;
        let Some((lines, note)) = part.split_once("[more follows: continue with first_line ") else {
            read.push_str(&part);
            break;
        };
        read.push_str(lines);
        first = note.trim_end_matches(']').parse().unwrap();
    }
    assert_eq!(read, text);
    assert!(parts > 2);
    let two = client
        .call("read_file", json!({"path": "a.txt", "first_line": 2, "max_lines": 2}))
        .await
        .ok();
    assert_eq!(two, "line 2\nline 3\n[more follows: continue with first_line 4]");
    let beyond = client
        .call("read_file", json!({"path": "a.txt", "first_line": 302}))
        .await
        .ok();
    assert_eq!(beyond, "[the file has 300 lines]");
    let last = client
        .call("read_file", json!({"path": "a.txt", "first_line": 300}))
        .await
        .ok();
    assert_eq!(last, "line 300\n");
}

#[tokio::test]
async fn empty_binary_and_long_lined_files_are_named_as_such() {
    let server = Server::toolbox(&["--max-result-bytes", "1024"]).await;
    let client = server.client().await;
    server.put("empty", "");
    server.put("binary", b"ELF\0\x01");
    server.put("long", "x".repeat(2000));
    assert_eq!(
        client.call("read_file", json!({"path": "empty"})).await.ok(),
        "[the file is empty]"
    );
    assert_eq!(
        client.call("read_file", json!({"path": "binary"})).await.error(),
        "binary: binary, 5 bytes; not shown"
    );
    let long = client.call("read_file", json!({"path": "long"})).await.ok();
    assert!(
        long.starts_with(&"x".repeat(1024))
            && long.ends_with("[line 1 is longer than a result; the rest of it is left out]")
    );
    // A file of 1 TiB without blocks.
    std::fs::File::create(server.workspace().join("sparse"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let sparse = client.call("read_file", json!({"path": "sparse"})).await.error();
    assert_eq!(sparse, "sparse: binary, 1099511627776 bytes; not shown");
    let huge = client
        .call("edit_file", json!({"path": "sparse", "old_text": "a", "new_text": "b"}))
        .await
        .error();
    assert_eq!(huge, "sparse: larger than 1 MiB, the most that this tool handles");
}

#[tokio::test]
async fn a_file_is_written_with_its_directories_and_keeps_its_permissions() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    let created = client
        .call("write_file", json!({"path": "a/b/c.txt", "content": "one"}))
        .await
        .ok();
    assert_eq!(
        (created.as_str(), server.get("a/b/c.txt").as_str()),
        ("created a/b/c.txt, 3 bytes", "one")
    );
    let path = server.workspace().join("a/b/c.txt");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o751)).unwrap();
    let absolute = path.to_str().unwrap();
    let replaced = client
        .call("write_file", json!({"path": absolute, "content": ""}))
        .await
        .ok();
    assert_eq!(replaced, "replaced a/b/c.txt, 0 bytes");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o751);
    let names: Vec<_> = path
        .parent()
        .unwrap()
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["c.txt"], "no unfinished file is left");
    let folder = client
        .call("write_file", json!({"path": "a/b", "content": "x"}))
        .await
        .error();
    assert_eq!(folder, "a/b: a directory, not a regular file");
    let below = client
        .call("write_file", json!({"path": "a/b/c.txt/d", "content": "x"}))
        .await
        .error();
    assert_eq!(below, "a/b/c.txt: not a directory");
    let bound = "x".repeat(1024 * 1024);
    client
        .call("write_file", json!({"path": "big", "content": bound}))
        .await
        .ok();
    let beyond = client
        .call("write_file", json!({"path": "big", "content": bound + "x"}))
        .await
        .error();
    assert_eq!(beyond, "big: larger than 1 MiB, the most that this tool handles");
}

#[tokio::test]
async fn an_edit_needs_one_exact_match() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    server.put("a.rs", "fn a() {}\r\nfn b() {}\nfn a() {}\n");
    let edit = |old: &str, new: &str, all: bool| {
        let arguments = json!({"path": "a.rs", "old_text": old, "new_text": new, "replace_all": all});
        let client = &client;
        async move { client.call("edit_file", arguments).await }
    };
    let ambiguous = edit("fn a() {}", "x", false).await.error();
    assert_eq!(
        ambiguous,
        "a.rs: old_text occurs 2 times (lines 1, 3); add context to it, or set replace_all"
    );
    let missing = edit("fn  b", "x", false).await.error();
    assert_eq!(
        missing,
        "a.rs: old_text not found; it must match exactly, including spaces and line ends"
    );
    assert_eq!(
        edit("", "x", false).await.error(),
        "old_text is empty; use write_file for a new file"
    );
    assert_eq!(
        edit("fn", "fn", true).await.error(),
        "old_text and new_text are the same"
    );
    assert_eq!(server.get("a.rs"), "fn a() {}\r\nfn b() {}\nfn a() {}\n");
    assert_eq!(
        edit("fn b() {}", "fn c() {}", false).await.ok(),
        "changed 1 place of a.rs"
    );
    assert_eq!(edit("fn a", "fn d", true).await.ok(), "changed 2 places of a.rs");
    assert_eq!(server.get("a.rs"), "fn d() {}\r\nfn c() {}\nfn d() {}\n");
    let absent = client
        .call("edit_file", json!({"path": "b.rs", "old_text": "a", "new_text": "b"}))
        .await
        .error();
    assert_eq!(absent, "b.rs: not found");
}

#[tokio::test]
async fn edits_at_the_same_time_are_not_lost() {
    let server = Server::toolbox(&[]).await;
    let parts: Vec<_> = (0..20).map(|number| format!("<{number}>")).collect();
    let text = parts.concat();
    server.put("a", &text);
    let client = server.client().await;
    let edits = (0..20).map(|number| {
        let arguments = json!({"path": "a", "old_text": format!("<{number}>"), "new_text": format!("({number})")});
        client.call("edit_file", arguments)
    });
    for answer in futures::future::join_all(edits).await {
        answer.ok();
    }
    assert_eq!(server.get("a"), text.replace('<', "(").replace('>', ")"));
}

#[tokio::test]
async fn a_listing_is_sorted_distinguishes_kinds_and_is_cut_at_its_bound() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    server.put("b.txt", "12");
    server.put("a/x", "");
    symlink("b.txt", server.workspace().join("link")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, server.workspace().join("pipe"), 0o600.into()).unwrap();
    assert_eq!(
        client.call("list_directory", json!({})).await.ok(),
        "a/\nb.txt 2\nlink@\npipe (special)\n"
    );
    std::fs::create_dir(server.workspace().join("many")).unwrap();
    assert_eq!(
        client.call("list_directory", json!({"path": "many"})).await.ok(),
        "[the directory is empty]"
    );
    for number in 0..1000 {
        server.put(&format!("many/{number:04}"), "");
    }
    let all = client.call("list_directory", json!({"path": "many"})).await.ok();
    assert_eq!((all.lines().count(), all.lines().last()), (1000, Some("0999 0")));
    server.put("many/1000", "");
    let cut = client.call("list_directory", json!({"path": "many"})).await.ok();
    assert_eq!(
        (cut.lines().count(), cut.lines().last()),
        (1001, Some("[1 more entries are left out]"))
    );
    let file = client.call("list_directory", json!({"path": "b.txt"})).await.error();
    assert_eq!(file, "b.txt: not a directory");
}

#[tokio::test]
async fn the_sizes_of_named_files_are_listed_in_their_order_whatever_their_permissions() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    server.put("a/b.txt", "12");
    server.put("empty", "");
    server.put("locked", "123");
    std::fs::set_permissions(
        server.workspace().join("locked"),
        std::fs::Permissions::from_mode(0o000),
    )
    .unwrap();
    symlink("a/b.txt", server.workspace().join("link")).unwrap();
    symlink("gone", server.workspace().join("dangling")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, server.workspace().join("pipe"), 0o600.into()).unwrap();
    let files = [
        "empty", "a/b.txt", "locked", "link", "a", "a/", "pipe", "dangling", "gone", "empty/x", "",
    ];
    assert_eq!(
        client.call("list_directory", json!({ "files": files })).await.ok(),
        r#"Files: [{"bytes":0},{"bytes":2},{"bytes":3},{"bytes":2},"notRegular","notRegular","notRegular","absent","absent","absent","absent"]"#
    );
}

#[tokio::test]
async fn at_most_32_files_are_named_at_once_and_no_folder_with_them() {
    let server = Server::toolbox(&["--max-result-bytes", "1024"]).await;
    let client = server.client().await;
    server.put("a", "1");
    let named = |count: usize| json!({"files": vec!["a"; count]});
    let report = client.call("list_directory", named(32)).await.ok();
    assert_eq!(report.matches(r#"{"bytes":1}"#).count(), 32);
    for count in [0, 33] {
        let refused = client.call("list_directory", named(count)).await.error();
        assert_eq!(refused, "files must have 1 to 32 paths");
    }
    let both = client
        .call("list_directory", json!({"path": ".", "files": ["a"]}))
        .await
        .error();
    assert_eq!(both, "set either path or files");
}

#[tokio::test]
async fn a_search_finds_lines_and_skips_binaries_links_and_git() {
    let server = Server::toolbox(&[]).await;
    let client = server.client().await;
    server.put("src/a.rs", "let one = 1;\nlet two = 2;\n");
    server.put("src/b.py", "one = 1");
    server.put("c.txt", "none");
    server.put("binary", b"one = \0");
    server.put(".git/config", "one = 1");
    symlink("src", server.workspace().join("link")).unwrap();
    let search = |arguments| client.call("search_files", arguments);
    assert_eq!(
        search(json!({"pattern": "one = \\d"})).await.ok(),
        "src/a.rs:1:let one = 1;\nsrc/b.py:1:one = 1\n"
    );
    assert_eq!(
        search(json!({"pattern": "one", "file_name": "*.rs"})).await.ok(),
        "src/a.rs:1:let one = 1;\n"
    );
    assert_eq!(
        search(json!({"pattern": "2;$", "path": "src"})).await.ok(),
        "src/a.rs:2:let two = 2;\n"
    );
    assert_eq!(
        search(json!({"pattern": "one", "path": "src/b.py"})).await.ok(),
        "src/b.py:1:one = 1\n"
    );
    assert_eq!(search(json!({"pattern": "zero"})).await.ok(), "[no matches]");
    let cut = search(json!({"pattern": "let", "max_results": 1})).await.ok();
    assert_eq!(
        cut,
        "src/a.rs:1:let one = 1;\n[stopped after 1 matches: enough results; narrow the search]"
    );
    let wrong = search(json!({"pattern": "("})).await.error();
    assert!(
        wrong.starts_with("pattern is not a valid regular expression"),
        "{wrong}"
    );
    let large = search(json!({"pattern": "((a{100}){100}){100}"})).await.error();
    assert!(large.contains("size limit"), "{large}");
}
