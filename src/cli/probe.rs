//! `agentloop probe`: asks the gateway of this pod whether it serves. Needs nothing but the socket's path, so that it
//! is cheap enough to be run as an exec probe.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
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
    /// The gateway's socket.
    #[arg(long, env = "AGENTLOOP_SOCKET", default_value = SOCKET_PATH)]
    socket: PathBuf,
}

impl Args {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let socket = self.socket.display();
        let mut stream =
            UnixStream::connect(&self.socket).with_context(|| format!("no gateway listens on {socket}"))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.write_all(REQUEST).context("the gateway took no question")?;
        let mut answer = [0; HEALTHY.len()];
        stream.read_exact(&mut answer).context("the gateway gave no answer")?;
        if answer != HEALTHY {
            bail!("the gateway on {socket} does not serve");
        }
        Ok(())
    }
}
