//! A role of the program as a process of a bench: its memory, and its end.

use std::ffi::OsString;
use std::process::{Child, Command, Stdio};

use agentloop::link::pod::CONFIG_ENV;
use serde_json::Value;

/// Runs until it is dropped.
pub struct Process(Child);

impl Process {
    /// Starts a role with this word of the controller and these variables, and no others.
    pub fn start<'a>(role: &str, config: &Value, variables: impl IntoIterator<Item = (&'a str, OsString)>) -> Self {
        let process = Command::new(env!("CARGO_BIN_EXE_agentloop"))
            .arg(role)
            .env_clear()
            .env(CONFIG_ENV, config.to_string())
            .envs(variables)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        Self(process)
    }

    /// A line of the system's word on its memory.
    pub fn kibibytes(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
