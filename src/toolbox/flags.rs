//! Flags of the roles. Every flag has an environment variable.

use std::ffi::OsString;
use std::path::PathBuf;

use agentloop_egress::Cidr;
use clap::Args;

use crate::definitions::ToolGroup;
use crate::http::AllowedHost;
use crate::listen::ListenAddress;

/// Flags of `agentloop toolbox`.
#[derive(Args, Clone, Debug)]
pub struct ToolboxFlags {
    /// Where to listen: `unix:/path`, or a loopback address with a port.
    #[arg(
        long,
        env = "AGENTLOOP_TOOLBOX_LISTEN",
        default_value = "unix:/run/agentloop-toolbox/toolbox.sock"
    )]
    pub listen: ListenAddress,
    /// The workspace: the file tools reach nothing else, and commands start there.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_ROOT", default_value = "/workspace")]
    pub root: PathBuf,
    /// Tools to offer.
    #[arg(
        long,
        env = "AGENTLOOP_TOOLBOX_TOOLS",
        value_delimiter = ',',
        default_value = "shell,files"
    )]
    pub tools: Vec<ToolGroup>,
    /// Most bytes of a result; of a longer one the middle is left out.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_MAX_RESULT_BYTES", default_value_t = 32 * 1024,
          value_parser = clap::value_parser!(u32).range(1024..=1024 * 1024))]
    pub max_result_bytes: u32,
    #[command(flatten)]
    pub shell: ShellFlags,
    #[command(flatten)]
    pub http: HttpFlags,
}

/// Flags of the tool `shell`.
#[derive(Args, Clone, Debug)]
pub struct ShellFlags {
    /// The shell, which is called with -c and the command.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_SHELL", default_value = "/bin/sh")]
    pub shell: PathBuf,
    /// Longest time of a command, which the model can shorten. Keep it below the time that the worker waits for the tool.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_SHELL_TIMEOUT_SECONDS", default_value_t = 50,
          value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub shell_timeout_seconds: u32,
    /// Variables that commands inherit in addition to PATH, HOME, USER, LOGNAME, LANG, `LC_ALL`, TZ and TMPDIR.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_SHELL_VARIABLES", value_delimiter = ',')]
    pub shell_variable: Vec<String>,
    /// Most CPU time of each process, in seconds.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_SHELL_CPU_SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub shell_cpu_seconds: Option<u64>,
    /// Most bytes of a file that a command writes.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_SHELL_FILE_BYTES")]
    pub shell_file_bytes: Option<u64>,
    /// Most open files of each process.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_SHELL_OPEN_FILES", default_value_t = 16_384,
          value_parser = clap::value_parser!(u64).range(8..))]
    pub shell_open_files: u64,
    /// Most bytes of address space of each process.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_SHELL_MEMORY_BYTES", value_parser = clap::value_parser!(u64).range(1024 * 1024..))]
    pub shell_memory_bytes: Option<u64>,
    /// Most processes of the container's user. The kernel counts those of other containers of the node with the same user
    /// too; the kubelet's limit per pod does not.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_SHELL_PROCESSES", value_parser = clap::value_parser!(u64).range(1..))]
    pub shell_processes: Option<u64>,
}

/// Flags of the tool `http_request`.
#[derive(Args, Clone, Debug)]
pub struct HttpFlags {
    /// Hosts that requests may go to: example.com, *.example.com, example.com:8443, or * for all.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_HTTP_ALLOWED_HOSTS", value_delimiter = ',')]
    pub http_allowed_host: Vec<AllowedHost>,
    /// Ranges that are open to requests although they are closed by default.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_EGRESS_ALLOWED_CIDRS", value_delimiter = ',')]
    pub egress_allowed_cidr: Vec<Cidr>,
    /// Ranges that are closed to requests.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_EGRESS_DENIED_CIDRS", value_delimiter = ',')]
    pub egress_denied_cidr: Vec<Cidr>,
    /// Close private networks to requests.
    #[arg(long, env = "AGENTLOOP_TOOLBOX_EGRESS_DENY_PRIVATE")]
    pub egress_deny_private: bool,
}

/// Flags of `agentloop mcp-bridge`.
#[derive(Args, Clone, Debug)]
pub struct BridgeFlags {
    /// Where to listen: `unix:/path`, or a loopback address with a port.
    #[arg(long, env = "AGENTLOOP_MCP_BRIDGE_LISTEN")]
    pub listen: ListenAddress,
    /// The MCP server, with its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}
