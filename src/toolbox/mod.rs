//! Built-in tools as an MCP server, and the bridge to MCP servers that use standard input and output.
//!
//! Both are roles of the one binary, in containers of an Agent's pod: `agentloop toolbox` runs in the user's image, next
//! to the files and programs that the tools work with, and `agentloop mcp-bridge` in the image of an MCP server, whose
//! credentials only that container has. An init container copies the binary there. The worker uses both as it uses any
//! MCP server, through the gateway.
//!
//! # Contract
//!
//! - Both serve streamable HTTP at [`MCP_PATH`], and `GET /v1/healthz`, on a Unix socket (mode 0660) or on loopback.
//! - Clients do not authenticate: any process that reaches the socket may use the tools. A Unix socket in a volume that only the
//!   gateway shares keeps other containers of the pod out, a loopback address does not.
//! - The binary starts itself from `/proc/self/exe` as [`SUPERVISE`] and [`LAUNCH`], which are its first argument.
//! - Results carry [`DISK_WRITE_BYTES_META`](agentloop_toolbox_protocol::DISK_WRITE_BYTES_META) and
//!   [`BANDWIDTH_BYTES_META`](agentloop_toolbox_protocol::BANDWIDTH_BYTES_META) in `_meta`.
//! - A call ends when its request is dropped, or with `notifications/cancelled`.
//! - Owns the tools only. Which of them an Agent may use, and when, is decided by the engine and the gateway.

mod answer;
mod bridge;
mod definitions;
mod excerpt;
mod flags;
mod http;
mod install;
mod junit;
mod listen;
mod server;
mod shell;
mod workspace;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub use self::definitions::ToolGroup;
pub use self::flags::{BridgeFlags, HttpFlags, ShellFlags, ToolboxFlags};
pub use self::http::{AllowedHost, AllowedHostError};
use self::http::{Egress, HttpTool};
pub use self::install::install;
pub use self::listen::{ListenAddress, ListenAddressError, MCP_PATH};
use self::server::ToolboxTools;
pub use self::shell::{LAUNCH, ProcessLimits, SUPERVISE, launch, supervise};
use self::shell::{Shell, ShellSettings};
use self::workspace::Workspace;

/// Why a role cannot run.
#[derive(thiserror::Error, Debug)]
pub enum ToolboxError {
    #[error("cannot open the workspace {path}: {cause}; the toolbox needs a kernel and a sandbox that support openat2")]
    Workspace { path: String, cause: io::Error },
    #[error("cannot listen, or protect this process: {0}")]
    Io(#[from] io::Error),
    #[error("processes of a command cannot be killed")]
    Unkillable,
}

/// Runs the toolbox until `end`.
pub async fn run_toolbox(flags: ToolboxFlags, end: CancellationToken) -> Result<(), ToolboxError> {
    protect()?;
    let broken = CancellationToken::new();
    let toolbox = Arc::new(toolbox(&flags, broken.clone())?);
    let ended = end.child_token();
    let orphans = reap_orphans(Arc::clone(&toolbox))?;
    tokio::select! {
        served = server::serve(toolbox, &flags.listen, ended) => Ok(served?),
        () = orphans => Ok(()),
        () = broken.cancelled() => Err(ToolboxError::Unkillable),
    }
}

/// Runs the bridge to an MCP server until `end`.
pub async fn run_bridge(flags: BridgeFlags, end: CancellationToken) -> Result<(), ToolboxError> {
    Ok(bridge::run(flags, end).await?)
}

fn toolbox(flags: &ToolboxFlags, broken: CancellationToken) -> Result<ToolboxTools, ToolboxError> {
    let workspace = Workspace::open(&flags.root).map_err(|cause| ToolboxError::Workspace {
        path: flags.root.display().to_string(),
        cause,
    })?;
    let timeout = flags.shell.shell_timeout_seconds;
    let settings = ShellSettings {
        shell: flags.shell.shell.clone(),
        root: flags.root.clone(),
        timeout: Duration::from_secs(timeout.into()),
        variables: flags.shell.shell_variable.clone(),
        limits: ProcessLimits {
            cpu_seconds: flags.shell.shell_cpu_seconds,
            file_bytes: flags.shell.shell_file_bytes,
            open_files: Some(flags.shell.shell_open_files),
            memory_bytes: flags.shell.shell_memory_bytes,
            processes: flags.shell.shell_processes,
        },
    };
    let egress = Egress {
        allowed: flags.http.egress_allowed_cidr.clone(),
        denied: flags.http.egress_denied_cidr.clone(),
        private: !flags.http.egress_deny_private,
    };
    let http = HttpTool::new(flags.http.http_allowed_host.clone(), egress);
    let limit = usize::try_from(flags.max_result_bytes).unwrap_or(usize::MAX);
    // A tool that no call can use would only cost tokens.
    let can_send = !flags.http.http_allowed_host.is_empty();
    let groups = flags
        .tools
        .iter()
        .filter(|group| can_send || **group != ToolGroup::Http);
    let groups: Vec<_> = groups.copied().collect();
    Ok(ToolboxTools::new(Shell::new(settings, broken), workspace, http).offering(&groups, timeout.into(), limit))
}

/// Makes this process the parent of what loses its own, and its memory unreadable for commands, which have its user.
fn protect() -> io::Result<()> {
    use rustix::process::{DumpableBehavior, getpid, set_child_subreaper, set_dumpable_behavior};
    set_child_subreaper(Some(getpid()))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

/// Reaps processes that end without a parent, as the first process of a container must.
fn reap_orphans(toolbox: Arc<ToolboxTools>) -> io::Result<impl Future<Output = ()>> {
    let mut ended = signal(SignalKind::child())?;
    Ok(async move {
        while ended.recv().await.is_some() {
            toolbox.shell.reap_orphans();
        }
    })
}
