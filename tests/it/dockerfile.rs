//! The Dockerfile: it copies what exists and what the build reads, and builds what Cargo.toml names, as `make image` does.
//! There is no Docker here; the soak runs what the image's build runs, on a copy of what the Dockerfile copies.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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

fn cargo_metadata(folder: &Path, flags: &[&str]) -> Output {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--offline", "--format-version", "1", "--manifest-path"]);
    cargo.arg(folder.join("Cargo.toml")).args(flags).output().unwrap()
}

/// The packages of the repository, as cargo reads them.
fn packages() -> Vec<Value> {
    let ended = cargo_metadata(root(), &["--no-deps"]);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let metadata: Value = serde_json::from_slice(&ended.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

fn metadata() -> Value {
    let product = packages().into_iter().find(|package| package["name"] == "agentloop");
    product.unwrap()
}

/// The files of the repository that the build reads: the modules of each package without tests and what they include, and
/// what cargo looks for in the packages.
fn needed() -> BTreeSet<PathBuf> {
    let mut needed = BTreeSet::from(["Cargo.lock", "rust-toolchain.toml"].map(PathBuf::from));
    for package in packages() {
        needed.insert(inside(Path::new(package["manifest_path"].as_str().unwrap())));
        for target in package["targets"].as_array().unwrap() {
            let source = PathBuf::from(target["src_path"].as_str().unwrap());
            if ["lib", "bin"].iter().any(|kind| target["kind"][0] == *kind) {
                add_module(&source, true, &mut needed);
            } else {
                needed.insert(inside(&source));
            }
        }
    }
    needed
}

/// A path of the repository, without its `..`.
fn inside(path: &Path) -> PathBuf {
    let path = path
        .canonicalize()
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path.strip_prefix(root()).unwrap().to_path_buf()
}

/// Adds the file of a module, what it includes, and its modules. Modules of tests are the last ones of a file.
fn add_module(file: &Path, is_root: bool, needed: &mut BTreeSet<PathBuf>) {
    needed.insert(inside(file));
    let folder = file.parent().unwrap();
    let modules = match file.file_stem().unwrap() {
        stem if is_root || stem == "mod" => folder.to_path_buf(),
        stem => folder.join(stem),
    };
    let (mut is_test, mut path) = (false, None);
    for line in std::fs::read_to_string(file).unwrap().lines().map(str::trim_start) {
        if let Some((_, included)) = line
            .split_once("include_str!(\"")
            .or_else(|| line.split_once("include_bytes!(\""))
        {
            needed.insert(inside(&folder.join(included.split('"').next().unwrap())));
        }
        if line.starts_with("#[cfg(test)]") {
            is_test = true;
        } else if let Some(named) = line.strip_prefix("#[path = \"") {
            path = Some(folder.join(named.split('"').next().unwrap()));
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            let declared = line
                .split_once("mod ")
                .filter(|(before, _)| before.is_empty() || before.starts_with("pub"));
            let name = declared.map(|(_, name)| name);
            if is_test && name.is_some_and(|name| name.ends_with('{')) {
                return;
            }
            if let Some(name) = name.and_then(|name| name.strip_suffix(';')).filter(|_| !is_test) {
                let files = [modules.join(format!("{name}.rs")), modules.join(name).join("mod.rs")];
                let found = path.take().or_else(|| files.into_iter().find(|file| file.exists()));
                add_module(
                    &found.unwrap_or_else(|| panic!("{}: mod {name}", file.display())),
                    false,
                    needed,
                );
            }
            (is_test, path) = (false, None);
        }
    }
}

/// Those of the files that are in none of the paths.
fn missing<'a>(needed: &'a BTreeSet<PathBuf>, paths: &[PathBuf]) -> Vec<&'a Path> {
    let is_in = |file: &Path| paths.iter().any(|path| file.starts_with(path));
    needed
        .iter()
        .map(PathBuf::as_path)
        .filter(|file| !is_in(file))
        .collect()
}

/// The paths that `.dockerignore` leaves out.
fn left_out() -> Vec<PathBuf> {
    let ignored = std::fs::read_to_string(root().join(".dockerignore")).unwrap();
    let lines = ignored.lines().map(|line| PathBuf::from(line.trim_start_matches('/')));
    lines.collect()
}

/// Makes the directory what the image's build has in its own: what is copied, without what is left out.
fn copy_to(folder: &Path) {
    for path in copied() {
        let target = folder.join(&path);
        std::fs::create_dir_all(target.parent().unwrap()).unwrap();
        let mut copy = Command::new("cp");
        copy.args(["-r", "--preserve=timestamps"])
            .args([&root().join(path), &target]);
        assert!(copy.status().unwrap().success());
    }
    for path in left_out() {
        let mut remove = Command::new("rm");
        assert!(remove.arg("-rf").arg(folder.join(path)).status().unwrap().success());
    }
}

#[test]
fn the_dockerfile_copies_paths_that_exist_and_the_root_of_every_target() {
    let copied = copied();
    assert!(copied.len() > 4, "{copied:?}");
    for path in &copied {
        assert!(root().join(path).exists(), "COPY {} does not exist", path.display());
    }
    for ignored in left_out() {
        assert!(
            !copied.iter().any(|path| path.starts_with(&ignored)),
            "{} is ignored",
            ignored.display()
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
fn the_dockerfile_copies_all_that_the_build_reads_and_nothing_else() {
    let (needed, copied) = (needed(), copied());
    assert!(needed.len() > 300, "only {} files", needed.len());
    assert_eq!(missing(&needed, &copied), Vec::<&Path>::new());
    for (at, path) in copied.iter().enumerate() {
        let mut fewer = copied.clone();
        fewer.remove(at);
        assert!(!missing(&needed, &fewer).is_empty(), "{} is not read", path.display());
    }
}

#[test]
fn cargo_finds_all_packages_in_what_the_dockerfile_copies() {
    let folder = tempfile::tempdir().unwrap();
    copy_to(folder.path());
    for file in needed() {
        assert!(folder.path().join(&file).exists(), "{} is ignored", file.display());
    }
    let ended = cargo_metadata(folder.path(), &["--locked"]);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

/// With what it has built before, since the directory stays.
#[test]
#[ignore = "a release build"]
fn the_commands_of_the_dockerfile_build_the_binary() {
    let target = Path::new(env!("CARGO_BIN_EXE_agentloop")).ancestors().nth(2).unwrap();
    let folder = target.join("dockerfile");
    let (sources, binary) = (folder.join("src"), folder.join("agentloop"));
    for old in [&sources, &binary] {
        assert!(Command::new("rm").arg("-rf").arg(old).status().unwrap().success());
    }
    std::fs::create_dir_all(folder.join("target")).unwrap();
    copy_to(&sources);
    symlink(folder.join("target"), sources.join("target")).unwrap();
    let run = all("RUN")[0].join(" ");
    let build = run.strip_suffix(" /agentloop").unwrap();
    let mut shell = Command::new("sh");
    shell
        .arg("-c")
        .arg(format!("{build} \"$0\""))
        .arg(&binary)
        .current_dir(&sources);
    // As in an image, where none of these is set.
    for (name, _) in std::env::vars_os() {
        let set = name.to_string_lossy().into_owned();
        if set.starts_with("CARGO_") && set != "CARGO_HOME" || set == "RUSTFLAGS" || set == "RUSTUP_TOOLCHAIN" {
            shell.env_remove(name);
        }
    }
    assert!(shell.status().unwrap().success(), "{build}");
    let version = Command::new(&binary).arg("--version").output().unwrap();
    let said = String::from_utf8_lossy(&version.stdout);
    assert!(said.contains(metadata()["version"].as_str().unwrap()), "{said}");
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
