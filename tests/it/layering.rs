//! The modules of the source tree: which may depend on which, how large a file may be, and that each states its purpose.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// For each module, the modules that it may use. Nothing else is allowed; a new module has to be entered here.
const ALLOWED: &[(&str, &[&str])] = &[
    ("support", &[]),
    ("api", &[]),
    ("toolbox_protocol", &[]),
    ("engine", &["api", "support", "toolbox_protocol"]),
    ("ledger", &["api"]),
    ("provider", &["api", "engine", "ledger"]),
    ("mcp", &[]),
    ("egress", &[]),
    ("sensor_pipeline", &["api", "egress", "mcp", "support"]),
    ("link", &["api", "ledger", "sensor_pipeline", "support"]),
    ("history", &["link", "support"]),
    ("api_server", &["api", "support"]),
    ("toolbox", &["api", "egress", "support", "toolbox_protocol"]),
    ("otlp", &["support"]),
    ("telemetry", &["api", "otlp", "support"]),
    (
        "worker",
        &[
            "api",
            "engine",
            "link",
            "mcp",
            "otlp",
            "provider",
            "sensor_pipeline",
            "support",
            "telemetry",
            "toolbox_protocol",
        ],
    ),
    (
        "sensor_pod",
        &[
            "api",
            "egress",
            "link",
            "otlp",
            "sensor_pipeline",
            "support",
            "telemetry",
        ],
    ),
    (
        "gateway",
        &[
            "api",
            "egress",
            "engine",
            "ledger",
            "link",
            "otlp",
            "provider",
            "sensor_pipeline",
            "support",
            "telemetry",
        ],
    ),
    (
        "controller",
        &[
            "api",
            "history",
            "ledger",
            "link",
            "otlp",
            "page",
            "provider",
            "sensor_pipeline",
            "support",
            "telemetry",
        ],
    ),
    ("page", &["api", "link", "support"]),
    // One process with all roles: it wires them as a cluster does, and takes what they make public.
    (
        "local",
        &[
            "api",
            "api_server",
            "link",
            "page",
            "sensor_pipeline",
            "support",
            "telemetry",
            "worker",
            "sensor_pod",
            "gateway",
            "controller",
        ],
    ),
    // A client of the API server and of the link, like any other. `simulate` asks the rules of ledger and engine.
    ("plugin", &["api", "engine", "ledger", "link", "support"]),
    (
        "cli",
        &[
            "api",
            "egress",
            "engine",
            "history",
            "ledger",
            "provider",
            "sensor_pipeline",
            "link",
            "telemetry",
            "worker",
            "sensor_pod",
            "gateway",
            "controller",
            "page",
            "local",
            "plugin",
            "toolbox",
        ],
    ),
];
/// Most lines of a file under src/, its tests not counted.
const MAX_LINES: usize = 600;
/// The same of a file that holds tests only.
const MAX_TEST_LINES: usize = 700;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Every Rust file under a directory, with its text.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
    found.sort();
    found
}

/// The module a source file is in; `None` for `lib.rs` and `main.rs`, which only name the modules.
fn module(path: &Path) -> Option<String> {
    let inside = path.strip_prefix(repository("src")).unwrap();
    let mut parts = inside.iter();
    let first = parts.next()?.to_str()?.to_owned();
    parts.next().map(|_| first)
}

/// Whether a module has its own `Cargo.toml`.
fn is_crate(module: &str) -> bool {
    manifest(module).is_file()
}

fn manifest(module: &str) -> PathBuf {
    repository("src").join(module).join("Cargo.toml")
}

/// Modules that a text names after `crate::`, also in braces: `use crate::{api, link::pod}`. Comments do not count.
fn used_modules(text: &str) -> BTreeSet<String> {
    let code: Vec<_> = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let code = code.join("\n");
    let mut modules = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(group) => modules.extend(heads(group)),
            None => modules.extend([word(rest)]),
        }
    }
    modules.remove("");
    modules
}

/// The first word of each item of a `use` group, up to its closing brace.
fn heads(group: &str) -> Vec<String> {
    let (mut depth, mut heads, mut start) = (0_usize, Vec::new(), true);
    for (at, character) in group.char_indices() {
        match character {
            '}' if depth == 0 => break,
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => start = true,
            other if start && !other.is_whitespace() => {
                heads.push(word(&group[at..]));
                start = false;
            }
            _ => {}
        }
    }
    heads
}

fn word(text: &str) -> String {
    text.chars()
        .take_while(|character| character.is_alphanumeric() || *character == '_')
        .collect()
}

#[test]
fn modules_use_only_the_modules_that_they_may() {
    let mut wrong = Vec::new();
    for (path, text) in sources(&repository("src")) {
        // In a separate crate, `crate::` names its own modules, and the compiler holds the arrows.
        let Some(module) = module(&path).filter(|module| !is_crate(module)) else {
            continue;
        };
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == module) else {
            wrong.push(format!(
                "{} is in a module that the table does not know",
                path.display()
            ));
            continue;
        };
        for used in used_modules(&text) {
            if used != module && !allowed.contains(&used.as_str()) {
                wrong.push(format!("{} uses {used}, which {module} may not", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn crates_depend_on_the_modules_that_they_may() {
    let crates = ALLOWED.iter().filter(|(module, _)| is_crate(module));
    let mut seen = 0;
    for (module, allowed) in crates {
        let text = std::fs::read_to_string(manifest(module)).unwrap();
        let product = text.split("[dev-dependencies]").next().unwrap_or_default();
        let used: Vec<_> = product
            .lines()
            .filter_map(|line| line.strip_prefix("agentloop-"))
            .map(|name| word(&name.replace('-', "_")))
            .collect();
        assert_eq!(used, *allowed, "src/{module}/Cargo.toml");
        seen += 1;
    }
    assert!(seen >= 9, "{seen} crates");
}

#[test]
fn the_gateway_uses_only_names_and_purposes_of_calls_of_the_engine() {
    for (path, text) in sources(&repository("src/gateway")) {
        for (line, code) in text
            .lines()
            .enumerate()
            .filter(|(_, code)| code.contains("crate::engine"))
        {
            let names = ["CallId;", "CallPurpose;", "{CallId, CallPurpose};"];
            let fine = names
                .iter()
                .any(|name| code.ends_with(&format!("use crate::engine::{name}")));
            assert!(fine, "{}:{}: {code}", path.display(), line + 1);
        }
    }
}

#[test]
fn the_table_of_modules_is_the_list_in_lib() {
    let lib = std::fs::read_to_string(repository("src/lib.rs")).unwrap();
    let declared: BTreeSet<_> = lib
        .lines()
        .filter_map(|line| {
            let own = line.strip_prefix("pub mod ").and_then(|name| name.strip_suffix(';'));
            let alias = || {
                line.strip_prefix("pub use agentloop_")?
                    .strip_suffix(';')?
                    .split_once(" as ")
            };
            own.or_else(|| alias().map(|(_, name)| name))
        })
        .collect();
    let table: BTreeSet<_> = ALLOWED.iter().map(|(name, _)| *name).collect();
    assert_eq!(declared, table);
}

#[test]
fn every_way_of_naming_a_module_is_seen() {
    let seen = |text| used_modules(text).into_iter().collect::<Vec<_>>();
    assert_eq!(seen("use crate::link::pod;"), ["link"]);
    assert_eq!(
        seen("use crate::{\n    api::{Agent, status},\n    engine,\n};"),
        ["api", "engine"]
    );
    assert_eq!(seen("fn f(x: &crate::worker::X) {}"), ["worker"]);
    assert_eq!(seen("pub(in crate::gateway) fn f() {}"), ["gateway"]);
    assert_eq!(
        seen("pub(crate) fn f() {}\n// crate::worker\n/// [`crate::cli`]"),
        Vec::<String>::new()
    );
}

/// Whether a file holds tests only, by its name.
fn is_test_file(path: &Path) -> bool {
    let name = path.to_string_lossy();
    let ends = ["_tests.rs", "/tests.rs"];
    let folders = ["/tests/", "_tests/"];
    ends.iter().any(|end| name.ends_with(end)) || folders.iter().any(|folder| name.contains(folder))
}

/// Names of the types that a text declares. Types of a trait's implementation are indented, and do not count.
fn declared_types(text: &str) -> Vec<String> {
    let declared = |line: &str| {
        let plain = line.trim_start();
        let rest = match plain.strip_prefix("pub") {
            Some(rest) if rest.starts_with('(') => rest.split_once(')')?.1.trim_start(),
            Some(rest) => rest.trim_start(),
            None => plain,
        };
        let (keyword, name) = rest.split_once(' ')?;
        let is_indented = plain.len() < line.len();
        let declares = ["struct", "enum", "trait", "union"].contains(&keyword) || keyword == "type" && !is_indented;
        declares.then(|| word(name))
    };
    text.lines().filter_map(declared).collect()
}

#[test]
fn no_two_types_share_a_name() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in sources(&repository("src")) {
        if is_test_file(&path) {
            continue;
        }
        let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for name in declared_types(product) {
            places.entry(name).or_default().push(path.display().to_string());
        }
    }
    assert!(places.len() > 1_000, "only {} types were found", places.len());
    let shared: Vec<_> = places
        .iter()
        .filter(|(_, places)| places.len() > 1)
        .map(|(name, places)| format!("{name} is declared in {}", places.join(", ")))
        .collect();
    assert!(shared.is_empty(), "{}", shared.join("\n"));
}

#[test]
fn every_declaration_of_a_type_is_seen() {
    let text = "pub struct A;\nenum B {\n    struct\n}\npub(in crate::x) trait C<T> {\n    type D: E;\n}\ntype F = u8;\n\
                fn g() {\n    struct H(u8);\n}\n// struct I\nlet structure = 1;\n";
    assert_eq!(declared_types(text), ["A", "B", "C", "F", "H"]);
}

#[test]
fn every_source_file_is_short_and_begins_with_its_purpose() {
    let folders = ["src", "tests"];
    let files: Vec<_> = folders.iter().flat_map(|folder| sources(&repository(folder))).collect();
    assert!(files.len() > 30, "only {} files were looked at", files.len());
    let mut wrong = Vec::new();
    for (path, text) in files {
        let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let lines = product.lines().count();
        let is_test = is_test_file(&path);
        let most = if is_test { MAX_TEST_LINES } else { MAX_LINES };
        if lines > most && path.starts_with(repository("src")) {
            wrong.push(format!("{} has {lines} lines: split it", path.display()));
        }
        let head = text.lines().next().unwrap_or_default();
        if !head.starts_with("//! ") || head.len() < 15 {
            wrong.push(format!("{} has no head comment (//!)", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
