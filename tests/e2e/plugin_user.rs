//! People with a role in one namespace, who use the kubectl plugin as a program with a kubeconfig of their own.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::cluster::SYSTEM;
use crate::support::clusters;
use crate::support::kubectl::{Ended, Kubectl};

/// Longest wait until roles are aggregated and known to the API server.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// A service account of a namespace, with its token in a kubeconfig.
pub struct PluginUser {
    folder: TempDir,
    system: Kubectl,
    /// The role and binding in the namespace of the controller.
    access: String,
}

impl PluginUser {
    /// An account with these roles of the cluster in its namespace, and with what the reference asks for in the namespace of the
    /// controller: to find the leader's pod and to forward a port of it.
    pub fn new(system: &Kubectl, kubectl: &Kubectl, account: &str, roles: &[&str]) -> Self {
        let namespace = kubectl.namespace();
        kubectl.ok(&["create", "serviceaccount", account]);
        let subject = format!("--serviceaccount={namespace}:{account}");
        for role in roles {
            let binding = format!("{account}-{role}");
            let role = format!("--clusterrole={role}");
            kubectl.ok(&["create", "rolebinding", &binding, &role, &subject]);
        }
        let access = format!("{account}-{namespace}");
        let permissions = json!([
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "get"]},
            {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["create", "get"]},
        ]);
        system.apply(
            &json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": access}, "rules": permissions})
                .to_string(),
        );
        system.ok(&["create", "rolebinding", &access, &format!("--role={access}"), &subject]);
        let folder = tempfile::tempdir().unwrap();
        let token = kubectl.ok(&["create", "token", account, "--duration=3h"]);
        let admin = std::fs::read_to_string(clusters::node().unwrap()).unwrap();
        std::fs::write(
            folder.path().join("config"),
            kubeconfig(&admin, namespace, token.trim()),
        )
        .unwrap();
        Self {
            folder,
            system: system.clone(),
            access,
        }
    }

    /// Where its commands run.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a command of the plugin to its end.
    pub fn run(&self, args: &[&str]) -> Ended {
        self.run_with_input(args, "")
    }

    /// Runs a command, which must succeed; its standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let ended = self.run(args);
        let command = args.join(" ");
        assert!(ended.success, "{command}: {}{}", ended.stdout, ended.stderr);
        ended.stdout
    }

    /// Repeats a command until it succeeds: its user has new roles, and the pod may not answer yet. Its standard output.
    pub fn until_ok(&self, args: &[&str]) -> String {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let ended = self.run(args);
            if ended.success {
                return ended.stdout;
            }
            assert!(Instant::now() < deadline, "{}: {}", args.join(" "), ended.stderr);
            // Nothing announces when the API server knows a binding.
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Runs a command, which must fail; its standard error.
    pub fn refused(&self, args: &[&str]) -> String {
        let ended = self.run(args);
        assert!(!ended.success, "{}: {}", args.join(" "), ended.stdout);
        ended.stderr
    }

    /// The same with this standard input.
    pub fn run_with_input(&self, args: &[&str], input: &str) -> Ended {
        let mut child = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg("kubectl")
            .args(args)
            .env("KUBECONFIG", self.folder.path().join("config"))
            .current_dir(self.folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // A command that reads no input may have ended already.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        child.wait_with_output().unwrap().into()
    }

    /// The files of a report, by name.
    pub fn report(&self) -> Vec<(String, String)> {
        let path: PathBuf = self.folder.path().join("report.zip");
        self.ok(&["report", "--file", path.to_str().unwrap()]);
        let mut archive = zip::ZipArchive::new(std::fs::File::open(&path).unwrap()).unwrap();
        let count = archive.len();
        let files = (0..count).map(|index| {
            let mut file = archive.by_index(index).unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            (file.name().unwrap().into_owned(), text)
        });
        files.collect()
    }
}

impl Drop for PluginUser {
    fn drop(&mut self) {
        for kind in ["rolebinding", "role"] {
            let found = self
                .system
                .run(&["delete", kind, &self.access, "--ignore-not-found", "--wait=false"]);
            if !found.success {
                eprintln!("{kind} {} in {SYSTEM}: {}", self.access, found.stderr);
            }
        }
    }
}

/// The kubeconfig of the administrator with another user.
fn kubeconfig(admin: &str, namespace: &str, token: &str) -> String {
    let mut config: Value = serde_yaml::from_str(admin).unwrap();
    let cluster = config["clusters"][0]["name"].clone();
    config["users"] = json!([{"name": "person", "user": {"token": token}}]);
    config["contexts"] =
        json!([{"name": "person", "context": {"cluster": cluster, "user": "person", "namespace": namespace}}]);
    config["current-context"] = json!("person");
    config.to_string()
}
