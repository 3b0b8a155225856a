//! `agentloop probe`: checks whether a process of this pod is healthy. It needs only the socket's path, which makes it
//! cheap enough for an exec probe.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args as ClapArgs;

use crate::link::pod::SOCKET_PATH;

const TIMEOUT: Duration = Duration::from_secs(1);
const REQUEST: &[u8] = b"GET /v1/healthz HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n";
const HEALTHY: &[u8] = b"HTTP/1.1 200 ";

/// Flags of `agentloop probe`.
#[derive(ClapArgs, Debug)]
pub(super) struct ProbeArgs {
    /// Socket of the process; a leading @ denotes the abstract namespace.
    #[arg(long, env = "AGENTLOOP_SOCKET", default_value = SOCKET_PATH)]
    socket: PathBuf,
}

impl ProbeArgs {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let socket = self.socket.display();
        let mut stream = connect(&self.socket).with_context(|| format!("cannot connect to {socket}"))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.write_all(REQUEST).context("cannot send the request")?;
        let mut answer = [0; HEALTHY.len()];
        stream.read_exact(&mut answer).context("no response from the process")?;
        if answer != HEALTHY {
            bail!("the process on {socket} is not healthy");
        }
        Ok(())
    }
}

fn connect(socket: &Path) -> std::io::Result<UnixStream> {
    match socket.to_str().and_then(|socket| socket.strip_prefix('@')) {
        Some(name) => UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?),
        None => UnixStream::connect(socket),
    }
}
