//! Tests of the schema: what the API server will take, refuse and say.

use agentloop::api::crd;
use kube::ResourceExt;

fn repository(path: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn the_files_in_crds_are_what_the_code_says() {
    for definition in crd::all() {
        let path = repository(&format!("crds/{}.yaml", definition.name_any()));
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            text == crd::to_yaml(&definition).unwrap(),
            "{} is out of date: run `agentloop crds --dir crds`",
            path.display()
        );
    }
}
