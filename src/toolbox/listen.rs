//! Where the servers of this crate listen: on a Unix socket, or on a loopback address.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use agentloop_support::unix_socket;
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Path of the MCP endpoint.
pub const MCP_PATH: &str = "/mcp";
/// Path of the probe, as `agentloop probe` expects it.
const HEALTH_PATH: &str = "/v1/healthz";
/// How long open requests may take after the end was requested.
const DRAIN: Duration = Duration::from_secs(5);

/// `unix:/path`, or a loopback address with a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// A string is not an address to listen on.
#[derive(thiserror::Error, Clone, Debug, PartialEq, Eq)]
#[error(
    "'{0}' is not an address to listen on; write it as unix:/path, or as a loopback address such as 127.0.0.1:8080"
)]
pub struct ListenAddressError(String);

impl FromStr for ListenAddress {
    type Err = ListenAddressError;

    fn from_str(text: &str) -> Result<Self, ListenAddressError> {
        let wrong = || ListenAddressError(text.into());
        if let Some(path) = text.strip_prefix("unix:") {
            let path = Path::new(path);
            return path.is_absolute().then(|| Self::Unix(path.into())).ok_or_else(wrong);
        }
        let address: SocketAddr = text.parse().map_err(|_| wrong())?;
        address
            .ip()
            .is_loopback()
            .then_some(Self::Tcp(address))
            .ok_or_else(wrong)
    }
}

/// Serves the MCP endpoint and the probe until `end`. The port is logged.
pub(crate) async fn serve(address: &ListenAddress, mcp: Router, end: CancellationToken) -> io::Result<()> {
    let router = mcp.route(HEALTH_PATH, get(|| async { StatusCode::OK }));
    let ended = end.clone().cancelled_owned();
    let serving = async {
        match address {
            ListenAddress::Unix(path) => {
                let listener = unix_socket::bind(path)?;
                tracing::info!(address = %path.display(), "listening");
                axum::serve(listener, router).with_graceful_shutdown(ended).await
            }
            ListenAddress::Tcp(address) => {
                let listener = TcpListener::bind(address).await?;
                tracing::info!(address = %listener.local_addr()?, "listening");
                axum::serve(listener, router).with_graceful_shutdown(ended).await
            }
        }
    };
    let overdue = async {
        end.cancelled().await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        served = serving => served,
        () = overdue => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("unix:/run/a.sock", true)]
    #[case("unix:a.sock", false)]
    #[case("127.0.0.1:80", true)]
    #[case("[::1]:80", true)]
    #[case("0.0.0.0:80", false)]
    #[case("[::]:80", false)]
    #[case("10.0.0.1:80", false)]
    #[case("127.0.0.1", false)]
    #[case("localhost:80", false)]
    fn only_sockets_and_loopback_addresses_are_listened_on(#[case] text: &str, #[case] valid: bool) {
        assert_eq!(text.parse::<ListenAddress>().is_ok(), valid);
    }
}
