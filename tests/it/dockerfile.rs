//! The Dockerfile, which no other test builds: it copies what exists, and builds what Cargo.toml names, as `make image` does.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Instructions and their words; continuation lines are joined.
fn instructions() -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(root().join("Dockerfile")).unwrap();
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let joined = lines.join("\n").replace("\\\n", " ");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    joined
        .lines()
        .map(words)
        .filter(|words: &Vec<_>| !words.is_empty())
        .collect()
}

/// The arguments of each instruction of one kind.
fn all(kind: &str) -> Vec<Vec<String>> {
    let found = instructions().into_iter().filter(|words| words[0] == kind);
    found.map(|words| words[1..].to_vec()).collect()
}

/// What is copied from the repository; an image that is built keeps each path.
fn copied() -> Vec<PathBuf> {
    let mut copied = Vec::new();
    for words in all("COPY") {
        if words[0].starts_with("--from=") {
            continue;
        }
        let (target, sources) = words.split_last().unwrap();
        for source in sources {
            assert!(target == "./" || target == source, "{source} is copied to {target}");
            copied.push(PathBuf::from(source));
        }
    }
    copied
}

fn metadata() -> Value {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "metadata",
        "--no-deps",
        "--offline",
        "--format-version",
        "1",
        "--manifest-path",
    ]);
    let ended = cargo.arg(root().join("Cargo.toml")).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let metadata: Value = serde_json::from_slice(&ended.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let product = packages.iter().find(|package| package["name"] == "agentloop");
    product.unwrap().clone()
}

#[test]
fn the_dockerfile_copies_paths_that_exist_and_the_root_of_every_target() {
    let copied = copied();
    assert!(copied.len() > 4, "{copied:?}");
    for path in &copied {
        assert!(root().join(path).exists(), "COPY {} does not exist", path.display());
    }
    let ignored = std::fs::read_to_string(root().join(".dockerignore")).unwrap();
    for line in ignored.lines() {
        let left_out = Path::new(line.trim_start_matches('/'));
        assert!(
            !copied.iter().any(|path| path.starts_with(left_out)),
            "{line} is ignored"
        );
    }
    for target in metadata()["targets"].as_array().unwrap() {
        let source = Path::new(target["src_path"].as_str().unwrap())
            .strip_prefix(root())
            .unwrap();
        assert!(
            copied.iter().any(|path| source.starts_with(path)),
            "Cargo.toml names {}, which the Dockerfile does not copy",
            source.display()
        );
    }
}

#[test]
fn the_dockerfile_builds_the_binary_as_make_image_does() {
    let [build] = &all("RUN")[..] else { panic!("one RUN") };
    let build = build.join(" ");
    let package = metadata();
    let targets = package["targets"].as_array().unwrap();
    let binaries: Vec<_> = targets.iter().filter(|target| target["kind"][0] == "bin").collect();
    let [binary] = &binaries[..] else { panic!("one binary") };
    let name = binary["name"].as_str().unwrap();
    assert!(build.contains(&format!(
        "cargo rustc --locked --release --target \"$target\" --bin {name} "
    )));
    assert!(
        build.ends_with(&format!("cp \"target/$target/release/{name}\" /agentloop")),
        "{build}"
    );
    // The same flags as the build of `make image`.
    let script = std::fs::read_to_string(root().join("hack/lib.sh")).unwrap();
    for flag in [
        "-C target-feature=+crt-static",
        "-C link-arg=-Wl,-z,pack-relative-relocs",
    ] {
        assert!(build.contains(flag) && script.contains(flag), "{flag}");
    }
    let toolchain = std::fs::read_to_string(root().join("rust-toolchain.toml")).unwrap();
    let images = all("FROM");
    let (compiler, _) = images[0][0].strip_prefix("rust:").unwrap().split_once('-').unwrap();
    assert!(
        toolchain.contains(&format!("channel = \"{compiler}.")),
        "FROM {}",
        images[0][0]
    );
    assert_eq!(package["rust_version"], compiler);
}

#[test]
fn the_image_of_the_dockerfile_is_empty_but_for_the_binary_and_the_roots() {
    let images = all("FROM");
    assert_eq!(images.last().unwrap()[0], "scratch");
    let from_build = all("COPY").into_iter().filter(|words| words[0] == "--from=build");
    let paths: Vec<_> = from_build.map(|words| words.last().unwrap().clone()).collect();
    assert_eq!(paths, ["/agentloop", "/etc/ssl/certs/ca-certificates.crt"]);
    assert_eq!(all("USER"), [["65532:65532"]]);
    assert_eq!(all("ENTRYPOINT"), [["[\"/agentloop\"]"]]);
}
