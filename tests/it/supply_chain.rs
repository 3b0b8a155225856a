//! What is published beside an image and a chart: the list of what is linked, the statement of where it comes from, the index of
//! platforms, and the chart's archive. The scripts run as they are; the image is a small one, made here.
// Helpers fail a test by panicking; clippy knows that only of functions marked #[test].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use agentloop::support::hash::sha256_hex;
use serde_json::{Value, json};

use crate::support::clusters::skip;
use crate::support::kubectl::tool;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// What a script of hack/ says, or `None` after saying that python3 is missing.
fn python(script: &str, args: &[&str]) -> Option<Output> {
    python_with(&[], script, args)
}

/// The same with variables of the environment.
fn python_with(variables: &[(&str, &str)], script: &str, args: &[&str]) -> Option<Output> {
    let ended = Command::new("python3")
        .arg(format!("{ROOT}/hack/{script}"))
        .args(args)
        .env("CARGO", env!("CARGO"))
        .envs(variables.iter().copied())
        .output();
    if ended.is_err() {
        skip("python3 is missing; it runs the scripts of the image");
    }
    ended.ok()
}

fn json_of(ended: &Output) -> Value {
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    serde_json::from_slice(&ended.stdout).unwrap()
}

/// A Debian with three packages: one whose source has another name, a copy for another architecture, and one like its source.
const DPKG_QUERY: &str = r"#!/bin/sh
for name; do :; done
case $name in
  libc6-dev) printf '2.36-9+deb12u14\tamd64\tglibc\t2.36-9+deb12u14\t\n' ;;
  libc6-dev-*-cross) printf '2.36-8cross1\tall\tcross-toolchain-base\t66\tlinux (= 6.1.4-1), glibc (= 2.36-8)\n' ;;
  ca-certificates) printf '20230311+deb12u1\tall\tca-certificates\t20230311+deb12u1\t\n' ;;
esac
";

/// A directory with the root of an image, whose files are small, and with that Debian's `dpkg-query`.
fn image_root() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let certificates = folder.path().join("root/etc/ssl/certs");
    std::fs::create_dir_all(&certificates).unwrap();
    std::fs::write(certificates.join("ca-certificates.crt"), "roots").unwrap();
    std::fs::write(folder.path().join("root/agentloop"), "binary").unwrap();
    let query = folder.path().join("dpkg-query");
    std::fs::write(&query, DPKG_QUERY).unwrap();
    std::fs::set_permissions(&query, std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// The bill of materials of that image, for a machine.
fn bill_of(folder: &Path, machine: &str) -> Option<Value> {
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let target = format!("{machine}-unknown-linux-gnu");
    let root = folder.join("root");
    let args = [target.as_str(), root.to_str().unwrap()];
    python_with(&[("PATH", path.as_str())], "sbom.py", &args).map(|ended| json_of(&ended))
}

#[test]
fn the_bill_of_materials_lists_what_is_linked_with_licenses_and_checksums() {
    let folder = image_root();
    let machine = std::env::consts::ARCH;
    let Some(bill) = bill_of(folder.path(), machine) else {
        return;
    };
    assert_eq!(
        (&bill["bomFormat"], &bill["specVersion"]),
        (&json!("CycloneDX"), &json!("1.5"))
    );
    let component = &bill["metadata"]["component"];
    assert_eq!(
        component["purl"],
        format!("pkg:cargo/agentloop@{}", env!("CARGO_PKG_VERSION"))
    );
    // A crate may be there in several versions.
    let components: Vec<(&str, &Value)> = bill["components"]
        .as_array()
        .unwrap()
        .iter()
        .map(|component| (component["name"].as_str().unwrap(), component))
        .collect();
    let has = |name: &str| components.iter().any(|(other, _)| *other == name);
    for linked in [
        "agentloop-engine",
        "ca-certificates",
        "kube",
        "libc6-dev",
        "ring",
        "rustls",
        "sqlite",
        "tokio",
    ] {
        assert!(has(linked), "{linked}");
    }
    // Of tests, of build scripts, and of the compiler.
    for other in ["insta", "proptest", "cc", "serde_derive"] {
        assert!(!has(other), "{other}");
    }
    for (name, component) in &components {
        assert!(component["licenses"][0].is_object(), "{name} has no license");
        let purl = component["purl"].as_str().unwrap();
        let published = purl.starts_with("pkg:cargo/") && !name.starts_with("agentloop") || *name == "ca-certificates";
        let checksum = component["hashes"][0]["content"].as_str();
        assert_eq!(checksum.is_some_and(|sum| sum.len() == 64), published, "{name}");
    }
    let known: BTreeSet<&str> = components
        .iter()
        .map(|(_, component)| *component)
        .chain([component])
        .map(|component| component["bom-ref"].as_str().unwrap())
        .collect();
    for edge in bill["dependencies"].as_array().unwrap() {
        let others = edge["dependsOn"].as_array().unwrap().iter();
        for end in others.chain([&edge["ref"]]) {
            assert!(known.contains(end.as_str().unwrap()), "{end}");
        }
    }
    let again = bill_of(folder.path(), machine).unwrap();
    assert!(again == bill, "two runs differ");
}

#[test]
fn the_bill_of_materials_has_the_names_by_which_scanners_know_c_code_and_packages() {
    let folder = image_root();
    let machine = std::env::consts::ARCH;
    let (other, cross) = match machine {
        "x86_64" => ("aarch64", "libc6-dev-arm64-cross"),
        _ => ("x86_64", "libc6-dev-amd64-cross"),
    };
    let Some(bill) = bill_of(folder.path(), machine) else {
        return;
    };
    let crossed = bill_of(folder.path(), other).unwrap();
    let component = |bill: &Value, name: &str| {
        let mut components = bill["components"].as_array().unwrap().iter();
        components
            .find(|component| component["name"] == name)
            .unwrap_or_else(|| panic!("no {name}"))
            .clone()
    };
    let sqlite = component(&bill, "sqlite");
    let version = sqlite["version"].as_str().unwrap();
    assert_eq!(
        sqlite["cpe"],
        format!("cpe:2.3:a:sqlite:sqlite:{version}:*:*:*:*:*:*:*")
    );
    for (bill, name, begin, end) in [
        (&bill, "libc6-dev", "2.36-9%2Bdeb12u14?arch=amd64", "glibc"),
        (&crossed, cross, "2.36-8cross1?arch=all", "glibc%402.36-8"),
        (
            &bill,
            "ca-certificates",
            "20230311%2Bdeb12u1?arch=all",
            "ca-certificates",
        ),
    ] {
        let component = component(bill, name);
        let purl = component["purl"].as_str().unwrap();
        assert_eq!(component["bom-ref"], purl);
        assert!(purl.starts_with("pkg:deb/"), "{purl}");
        assert!(purl.contains(&format!("/{name}@{begin}&distro=")), "{purl}");
        assert!(purl.ends_with(&format!("&upstream={end}")), "{purl}");
    }
    for one in bill["components"].as_array().unwrap() {
        let purl = one["purl"].as_str().unwrap();
        assert!(!purl.contains('+'), "a plus that is not %2B: {purl}");
    }
    let sum = |text: &str| json!([{"alg": "SHA-256", "content": sha256_hex(text, 32)}]);
    assert_eq!(bill["metadata"]["component"]["hashes"], sum("binary"));
    assert_eq!(component(&bill, "ca-certificates")["hashes"], sum("roots"));
}

/// Writes a blob of a layout, and returns its descriptor.
fn blob(layout: &Path, media: &str, content: &Value) -> Value {
    let bytes = content.to_string();
    let digest = sha256_hex(&bytes, 32);
    std::fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    std::fs::write(layout.join("blobs/sha256").join(&digest), &bytes).unwrap();
    json!({"mediaType": media, "digest": format!("sha256:{digest}"), "size": bytes.len()})
}

/// A layout with an image for each of two platforms, under the tags dev-amd64 and dev-arm64, as umoci writes it.
fn layout(folder: &Path) {
    let images = ["amd64", "arm64"].map(|architecture| {
        let config = json!({"os": "linux", "architecture": architecture});
        let config = blob(folder, "application/vnd.oci.image.config.v1+json", &config);
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": []});
        let mut image = blob(folder, "application/vnd.oci.image.manifest.v1+json", &manifest);
        image["annotations"] = json!({"org.opencontainers.image.ref.name": format!("dev-{architecture}")});
        image
    });
    let index = json!({"schemaVersion": 2, "manifests": images});
    std::fs::write(folder.join("index.json"), index.to_string()).unwrap();
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn images_of_two_platforms_become_one_index_and_the_provenance_names_all_digests() {
    let folder = tempfile::tempdir().unwrap();
    layout(folder.path());
    let place = folder.path().to_str().unwrap();
    let pairs = ["linux/amd64=dev-amd64", "linux/arm64=dev-arm64"];
    let wrong = ["linux/arm64=dev-amd64", pairs[1]];
    let Some(refused) = python("image-index.py", &[&[place, "dev"][..], &wrong].concat()) else {
        return;
    };
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("linux/amd64, not linux/arm64"),
        "{said}"
    );

    let single = read(&folder.path().join("index.json"));
    let ended = python("image-index.py", &[&[place, "dev"][..], &pairs].concat()).unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let top = read(&folder.path().join("index.json"));
    let entry = &top["manifests"][0];
    assert_eq!(top["manifests"].as_array().unwrap().len(), 1);
    assert_eq!(
        entry["annotations"],
        json!({"org.opencontainers.image.ref.name": "dev"})
    );
    let digest = |descriptor: &Value| descriptor["digest"].as_str().unwrap().to_owned();
    let file = folder.path().join("blobs").join(digest(entry).replace(':', "/"));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), entry["size"].as_u64().unwrap());
    let index = read(&file);
    for (number, architecture) in ["amd64", "arm64"].iter().enumerate() {
        let manifest = &index["manifests"][number];
        assert_eq!(
            manifest["platform"],
            json!({"os": "linux", "architecture": architecture})
        );
        assert_eq!(digest(manifest), digest(&single["manifests"][number]));
    }

    let started = "2026-01-02T03:04:05Z";
    let statement = json_of(&python("provenance.py", &[place, "registry.example/agentloop:dev", started]).unwrap());
    assert_eq!(statement["_type"], "https://in-toto.io/Statement/v1");
    assert_eq!(statement["predicateType"], "https://slsa.dev/provenance/v1");
    let subjects: BTreeSet<String> = statement["subject"]
        .as_array()
        .unwrap()
        .iter()
        .map(|subject| {
            assert_eq!(subject["name"], "registry.example/agentloop");
            format!("sha256:{}", subject["digest"]["sha256"].as_str().unwrap())
        })
        .collect();
    let expected = [entry, &index["manifests"][0], &index["manifests"][1]].map(digest);
    assert_eq!(subjects, BTreeSet::from(expected));
    let built = &statement["predicate"]["buildDefinition"];
    assert_eq!(
        built["externalParameters"]["platforms"],
        json!(["linux/amd64", "linux/arm64"])
    );
    let lock = std::fs::read_to_string(format!("{ROOT}/Cargo.lock")).unwrap();
    let lock = sha256_hex(&lock, 32);
    let materials = built["resolvedDependencies"].as_array().unwrap();
    assert!(
        materials.contains(&json!({"name": "Cargo.lock", "digest": {"sha256": lock}})),
        "{materials:?}"
    );
    assert_eq!(statement["predicate"]["runDetails"]["metadata"]["startedOn"], started);
    let unknown = python("provenance.py", &[place, "registry.example/agentloop:other", started]).unwrap();
    assert!(!unknown.status.success(), "no image has that tag");
}

/// Runs `hack/chart.sh`, which writes the archive of the chart into this directory.
fn package(out: &Path, version: &str, image: &str, reference: Option<&str>) -> Output {
    Command::new("bash")
        .arg(format!("{ROOT}/hack/chart.sh"))
        .args([version, "https://example.com/agentloop/", image])
        .args(reference)
        .env("CHART_DIR", out)
        .output()
        .unwrap()
}

/// What helm says about an archive.
fn helm(command: &[&str], archive: &Path, flags: &[&str]) -> String {
    let ended = Command::new(tool("helm"))
        .args(command)
        .arg(archive)
        .args(flags)
        .output()
        .unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    String::from_utf8(ended.stdout).unwrap()
}

fn is_helm_missing() -> bool {
    let is_missing = Command::new(tool("helm")).arg("version").output().is_err();
    if is_missing {
        skip("helm is missing; `make test` builds it for this test");
    }
    is_missing
}

#[test]
fn the_archive_of_the_chart_has_the_address_and_the_image_of_the_release() {
    if is_helm_missing() {
        return;
    }
    let digest = format!("sha256:{}", "a".repeat(64));
    let image = format!("registry.example/team/agentloop@{digest}");
    let version = env!("CARGO_PKG_VERSION");
    let out = tempfile::tempdir().unwrap();
    let ended = package(out.path(), version, &image, None);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let archive = out.path().join(format!("agentloop-{version}.tgz"));
    let show = |what: &str| helm(&["show", what], &archive, &[]);
    let chart: Value = serde_yaml::from_str(&show("chart")).unwrap();
    assert_eq!(chart["home"], "https://example.com/agentloop");
    assert_eq!(chart["sources"], json!(["https://example.com/agentloop"]));
    let text = |name: &str| {
        chart["annotations"][format!("artifacthub.io/{name}")]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert!(text("images").contains(&image));
    assert!(text("links").contains(&format!("https://example.com/agentloop/blob/v{version}/CHANGELOG.md")));
    assert!(text("crds").contains("agents.agentloop.dev"));
    let values: Value = serde_yaml::from_str(&show("values")).unwrap();
    assert_eq!(values["image"]["repository"], "registry.example/team/agentloop");
    assert_eq!(values["image"]["digest"], digest);
    let runbooks = format!("https://example.com/agentloop/blob/v{version}/docs/runbooks");
    assert_eq!(values["metrics"]["prometheusRule"]["runbookBaseURL"], runbooks);
    let readme = show("readme");
    assert!(readme.contains("| `image.repository` |") && readme.contains("`registry.example/team/agentloop` |"));
    assert!(
        !readme.contains("](../") && !readme.contains("No image is published"),
        "{readme}"
    );
    let other = package(out.path(), "9.9.9", &image, None);
    assert!(!other.status.success() && String::from_utf8_lossy(&other.stderr).contains("not of version 9.9.9"));
}

#[test]
fn the_texts_in_the_archive_of_the_chart_name_no_file_of_the_repository() {
    if is_helm_missing() {
        return;
    }
    let version = env!("CARGO_PKG_VERSION");
    let raw = format!("https://example.com/agentloop/raw/v{version}/");
    let out = tempfile::tempdir().unwrap();
    let archive = out.path().join(format!("agentloop-{version}.tgz"));
    let notes = |settings: &str| {
        let flags = ["--namespace", "agentloop-system", "--dry-run=client", "--set", settings];
        let text = helm(&["install", "agentloop"], &archive, &flags);
        text.split_once("\nNOTES:\n").unwrap().1.to_owned()
    };
    let published = "oci://registry.example/charts/agentloop";
    for (given, reference) in [(None, "oci://REGISTRY/charts/agentloop"), (Some(published), published)] {
        let ended = package(out.path(), version, "registry.example/team/agentloop:1", given);
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        let readme = helm(&["show", "readme"], &archive, &[]);
        let plain = notes("metrics.authentication=Token,page.enabled=true");
        let namespaced = notes("rbac.clusterScoped=false,crds.enabled=false,watchNamespaces={team-a}");
        for (text, expected) in [
            (
                &readme,
                format!("helm upgrade --install agentloop {reference} --version {version} "),
            ),
            (
                &plain,
                format!("helm upgrade agentloop {reference} --version {version} --namespace "),
            ),
            (&plain, format!("apply -f {raw}examples/quickstart.yaml")),
            (&namespaced, format!("apply -f {raw}examples/quickstart.yaml")),
            (&namespaced, format!(" -f {raw}crds/agents.agentloop.dev.yaml ")),
        ] {
            assert!(text.contains(&expected), "{expected}: {text}");
        }
        // The values of a release name its image, which the commands must not replace.
        assert!(!readme.contains("--set image."), "{readme}");
        for text in [&readme, &plain, &namespaced] {
            for word in text.split(|letter: char| letter.is_whitespace() || "(`'\"=".contains(letter)) {
                let local = ["charts/", "crds/", "docs/tasks/", "examples/"];
                assert!(!local.iter().any(|folder| word.starts_with(folder)), "{word}: {text}");
                if let Some(path) = word.strip_prefix(&raw) {
                    assert!(Path::new(ROOT).join(path).exists(), "{path}");
                }
            }
        }
    }
}

#[test]
fn the_krew_manifest_has_each_platform_with_the_digest_of_its_archive() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let version = env!("CARGO_PKG_VERSION");
    // Small programs that say the version: one for this machine, and the same as if it were for the other one, under an
    // emulator that is a script.
    std::fs::write(
        path("a.c"),
        format!("int puts(const char*);int main(){{puts(\"agentloop {version}\");return 0;}}"),
    )
    .unwrap();
    let built = Command::new("cc")
        .args(["-o", &path("own"), &path("a.c")])
        .status()
        .unwrap();
    assert!(built.success());
    let (of_own, machine, of_other) = match std::env::consts::ARCH {
        "x86_64" => ("amd64", 0xb7, ("arm64", "aarch64")),
        _ => ("arm64", 0x3e, ("amd64", "x86_64")),
    };
    let mut bytes = std::fs::read(path("own")).unwrap();
    bytes[18] = machine;
    std::fs::write(path("other"), bytes).unwrap();
    let emulator = path(&format!("qemu-{}-static", of_other.1));
    std::fs::write(&emulator, format!("#!/bin/sh\necho agentloop {version}\n")).unwrap();
    std::fs::set_permissions(&emulator, std::fs::Permissions::from_mode(0o755)).unwrap();
    let krew = |version: &str, binaries: &[&str]| {
        Command::new(format!("{ROOT}/hack/krew.sh"))
            .args([version, "https://example.com/agentloop/"])
            .args(binaries.iter().map(|name| path(name)))
            .env("OUT", path("out"))
            .env(
                "PATH",
                format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap()),
            )
            .output()
            .unwrap()
    };
    let done = krew(&format!("v{version}"), &["own", "other"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let text = std::fs::read_to_string(path("out/agentloop.yaml")).unwrap();
    assert!(!text.contains('@'), "{text}");
    let manifest: Value = serde_yaml::from_str(&text).unwrap();
    assert_eq!(manifest["spec"]["version"], format!("v{version}"));
    let platforms = manifest["spec"]["platforms"].as_array().unwrap();
    assert_eq!(platforms.len(), 2);
    for (platform, arch) in platforms.iter().zip([of_own, of_other.0]) {
        let archive = format!("agentloop-linux-{arch}.tar.gz");
        assert_eq!(
            platform["selector"]["matchLabels"],
            json!({"os": "linux", "arch": arch})
        );
        let uri = format!("https://example.com/agentloop/releases/download/v{version}/{archive}");
        assert_eq!(platform["uri"], uri);
        let bytes = std::fs::read(path(&format!("out/{archive}"))).unwrap();
        assert_eq!(platform["sha256"], sha256_hex(bytes, 32));
        assert_eq!(platform["bin"], "kubectl-agentloop");
    }
    for (version, binaries, says) in [
        ("9.9.9", &["own"][..], "is not of version 9.9.9"),
        ("9.9.9", &["other"], "is not of version 9.9.9"),
        (version, &["own", "own"], "two binaries are for linux/"),
        (version, &["a.c"], "is no binary for linux/amd64 or linux/arm64"),
        (version, &["none"], "does not exist"),
    ] {
        let refused = krew(version, binaries);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(says), "{binaries:?}: {said}");
    }
}
