//! `agentloop probe`: asks a process of this pod whether it serves. Needs nothing but the socket's path, so that it is cheap
//! enough to be run as an exec probe.

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
pub(super) struct Args {
    /// The socket of the process; a leading @ means one in the abstract namespace.
    #[arg(long, env = "AGENTLOOP_SOCKET", default_value = SOCKET_PATH)]
    socket: PathBuf,
}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let socket = self.socket.display();
        let mut stream = connect(&self.socket).with_context(|| format!("nobody listens on {socket}"))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.write_all(REQUEST).context("the process took no question")?;
        let mut answer = [0; HEALTHY.len()];
        stream.read_exact(&mut answer).context("the process gave no answer")?;
        if answer != HEALTHY {
            bail!("the process on {socket} does not serve");
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
