//! A real Postgres on loopback, in a temporary directory, and what a test asks it.
//!
//! Postgres refuses to run as root: then it runs as the user that Debian's package has made for it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use super::ports::free_port;

/// Where Debian has its programs, which are not in the path.
const DEBIAN: &str = "/usr/lib/postgresql";

/// A server with an empty database.
pub struct Postgres {
    dir: tempfile::TempDir,
    bin: PathBuf,
    /// Uid and gid of its process, if not those of the test.
    user: Option<(u32, u32)>,
    port: u16,
    settings: Vec<String>,
    server: Option<Child>,
}

impl Postgres {
    pub fn start() -> Self {
        Self::with(|_| Vec::new())
    }

    /// With further settings; the function may write files for them into the directory.
    pub fn with(settings: impl FnOnce(&Path) -> Vec<String>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let is_root = dir.path().metadata().unwrap().uid() == 0;
        let mut postgres = Self {
            bin: programs(),
            user: is_root.then(unprivileged),
            port: free_port(),
            settings: Vec::new(),
            server: None,
            dir,
        };
        postgres.own(postgres.dir.path());
        let data = postgres.data();
        let init = postgres
            .command("initdb")
            .args([
                "--no-sync",
                "--no-locale",
                "-E",
                "UTF8",
                "-U",
                "agentloop",
                "-A",
                "trust",
                "-D",
            ])
            .arg(&data)
            .output()
            .unwrap();
        assert!(init.status.success(), "{}", String::from_utf8_lossy(&init.stderr));
        postgres.settings = settings(postgres.dir.path());
        for file in std::fs::read_dir(postgres.dir.path()).unwrap() {
            postgres.own(&file.unwrap().path());
        }
        postgres.up();
        postgres
    }

    /// Starts the server; returns once it accepts connections.
    pub fn up(&mut self) {
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).arg("-k").arg(self.dir.path());
        command.args(["-p", &self.port.to_string(), "-c", "listen_addresses=127.0.0.1"]);
        // The clients of other tests must not fill the machine's memory.
        command.args(["-c", "shared_buffers=16MB", "-c", "max_connections=20"]);
        for setting in &self.settings {
            command.args(["-c", setting]);
        }
        let mut server = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(server.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("ready to accept connections") {
            assert!(log.read_line(&mut said).unwrap() > 0, "the server ended: {said}");
        }
        // Its log is read until it ends, so that it never waits for a reader.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        self.server = Some(server);
    }

    /// Ends the server as a crash does.
    pub fn crash(&mut self) {
        let Some(mut server) = self.server.take() else { return };
        let data = self.data();
        let mut stop = self.command("pg_ctl");
        let stopped = stop
            .args(["stop", "-m", "immediate", "-s", "-D"])
            .arg(data)
            .status()
            .unwrap();
        assert!(stopped.success());
        server.wait().unwrap();
    }

    /// A file with the connection string of a user and a database, as a Secret has it.
    pub fn connection_file(&self) -> PathBuf {
        self.file_with("sslmode=disable")
    }

    /// The same with these settings.
    pub fn file_with(&self, settings: &str) -> PathBuf {
        let file = self.dir.path().join("connection");
        let text = format!(
            "postgresql://agentloop:canary@localhost:{}/postgres?{settings}\n",
            self.port
        );
        std::fs::write(&file, text).unwrap();
        file
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub async fn client(&self) -> Client {
        let text = format!("host=127.0.0.1 port={} user=agentloop dbname=postgres", self.port);
        let (client, connection) = tokio_postgres::connect(&text, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    /// Runs statements.
    pub async fn run(&self, sql: &str) {
        self.client().await.batch_execute(sql).await.unwrap();
    }

    /// The rows of a query, each as its columns with `|` between them.
    pub async fn rows(&self, sql: &str) -> Vec<String> {
        let messages = self.client().await.simple_query(sql).await.unwrap();
        let rows = messages.iter().filter_map(|message| {
            let SimpleQueryMessage::Row(row) = message else {
                return None;
            };
            Some(row)
        });
        let columns = rows.map(|row| {
            (0..row.len())
                .map(|column| row.get(column).unwrap_or("-"))
                .collect::<Vec<_>>()
        });
        columns.map(|columns| columns.join("|")).collect()
    }

    /// The number in the first row of a query.
    pub async fn number(&self, sql: &str) -> i64 {
        self.rows(sql).await[0].parse().unwrap()
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        command
    }

    fn own(&self, path: &Path) {
        if let Some((uid, gid)) = self.user {
            chown(path, Some(uid), Some(gid)).unwrap();
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return self.crash();
        }
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

fn programs() -> PathBuf {
    let versions = std::fs::read_dir(DEBIAN).into_iter().flatten().flatten();
    let mut found: Vec<_> = versions.map(|version| version.path().join("bin")).collect();
    found.sort();
    let found = found.into_iter().rfind(|bin| bin.join("initdb").is_file());
    found.expect("Postgres is not installed: run hack/packages.sh database")
}

/// Uid and gid of the user `postgres`.
fn unprivileged() -> (u32, u32) {
    let users = std::fs::read_to_string("/etc/passwd").unwrap();
    let user = users.lines().find(|line| line.starts_with("postgres:"));
    let fields: Vec<_> = user
        .expect("Debian's package makes the user postgres")
        .split(':')
        .collect();
    (fields[2].parse().unwrap(), fields[3].parse().unwrap())
}
