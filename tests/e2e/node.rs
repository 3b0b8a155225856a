//! The node is this machine: processes of pods, their network and their volumes, seen from outside.
//!
//! The image has no shell, so that nothing can be killed or cut off from within.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::kubectl::Kubectl;

/// The process of a role (`worker`, `gateway`, `controller`) in the pod with this uid.
fn process(pod_uid: &str, role: &str) -> Option<u32> {
    let processes = std::fs::read_dir("/proc").expect("/proc can be read");
    processes.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let cgroup = std::fs::read_to_string(entry.path().join("cgroup")).ok()?;
        let command = std::fs::read(entry.path().join("cmdline")).ok()?;
        let mut words = command.split(|byte| *byte == 0);
        let is_ours = words.next()?.ends_with(b"agentloop") && words.next()? == role.as_bytes();
        (is_ours && in_pod(&cgroup, pod_uid)).then_some(pid)
    })
}

/// cgroup drivers write the uid with dashes or with underscores.
fn in_pod(cgroup: &str, uid: &str) -> bool {
    cgroup.contains(uid) || cgroup.contains(&uid.replace('-', "_"))
}

/// Sends a signal to one process, by its id.
pub fn signal(pid: u32, signal: &str) {
    let mut command = Command::new("kill");
    command.args([&format!("-{signal}"), &pid.to_string()]);
    assert!(
        command.status().expect("kill starts").success(),
        "SIG{signal} reaches process {pid}"
    );
}

/// The process of a role in a pod that runs.
pub fn pid(pod: &Value, role: &str) -> u32 {
    let uid = pod["metadata"]["uid"].as_str().expect("a pod has a uid");
    process(uid, role).unwrap_or_else(|| panic!("no {role} runs in pod {uid}"))
}

/// The process of a role in a pod, when it runs.
pub fn find(pod: &Value, role: &str) -> Option<u32> {
    process(pod["metadata"]["uid"].as_str()?, role)
}

/// SIGKILL to the process of a role in a pod.
pub fn kill(pod: &Value, role: &str) {
    signal(pid(pod, role), "KILL");
}

/// Sends a signal to the process of a role in a pod; its id, where there was one that it reached.
pub fn strike(pod: &Value, role: &str, signal: &str) -> Option<u32> {
    let pid = find(pod, role)?;
    let mut command = Command::new("kill");
    command.args([&format!("-{signal}"), &pid.to_string()]);
    // Between the two it may have ended.
    let reached = command.stderr(Stdio::null()).status().expect("kill starts").success();
    reached.then_some(pid)
}

/// Resident memory of a process in KiB.
pub fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("it has memory");
    line.split_whitespace()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .expect("a number")
}

/// A process that stands still; continues with the end of the value.
pub struct Frozen {
    pid: u32,
}

impl Frozen {
    pub fn start(pid: u32) -> Self {
        signal(pid, "STOP");
        Self { pid }
    }

    /// The process of a role in a pod, when it runs.
    pub fn of(pod: &Value, role: &str) -> Option<Self> {
        strike(pod, role, "STOP").map(|pid| Self { pid })
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // It may have been killed meanwhile, by a liveness probe for one.
        let mut command = Command::new("kill");
        let _ = command
            .args(["-CONT", &self.pid.to_string()])
            .stderr(Stdio::null())
            .status();
    }
}

/// A pod without one TCP port of the outside world; ends with its value.
pub struct CutOff {
    pid: u32,
    port: u16,
}

impl CutOff {
    /// Drops all packets between the pod and that port, inside the pod's own network namespace.
    pub fn start(pod: &Value, port: u16) -> Self {
        let cut = Self {
            pid: pid(pod, "gateway"),
            port,
        };
        cut.rules("-I");
        cut
    }

    fn rules(&self, change: &str) {
        for (chain, side) in [("OUTPUT", "--dport"), ("INPUT", "--sport")] {
            let mut command = Command::new("nsenter");
            command.args(["--target", &self.pid.to_string(), "--net", "iptables", change, chain]);
            command.args(["-p", "tcp", side, &self.port.to_string(), "-j", "DROP"]);
            let done = command.status().expect("nsenter starts").success();
            assert!(
                done || std::thread::panicking(),
                "iptables {change} in the pod's network"
            );
        }
    }
}

impl Drop for CutOff {
    fn drop(&mut self) {
        self.rules("-D");
    }
}

/// The directory on this machine behind the claim of an Agent's state.
pub fn volume(kubectl: &Kubectl, agent: &str) -> PathBuf {
    claim(kubectl, &format!("{agent}-state"))
}

/// The journal in the claim of an Agent's state. Its worker holds it while it runs.
pub fn journal(kubectl: &Kubectl, agent: &str) -> PathBuf {
    file_below(&volume(kubectl, agent), "journal.sqlite").expect("a journal")
}

/// The file of that name in a directory or one below it.
fn file_below(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries.flatten().map(|entry| entry.path()).find_map(|path| {
        if path.is_dir() {
            return file_below(&path, name);
        }
        path.file_name().is_some_and(|found| found == name).then_some(path)
    })
}

/// The directory on this machine behind a volume claim.
pub fn claim(kubectl: &Kubectl, name: &str) -> PathBuf {
    let claim = kubectl.get("persistentvolumeclaim", name).expect("the claim exists");
    let name = claim["spec"]["volumeName"].as_str().expect("the claim is bound");
    let volume = kubectl.get("persistentvolume", name).expect("its volume exists");
    let path = ["/spec/local/path", "/spec/hostPath/path"]
        .iter()
        .find_map(|at| volume.pointer(at)?.as_str());
    path.expect("the volume is a directory of the node").into()
}
