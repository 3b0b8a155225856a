//! Binds the addresses that servers listen on.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

/// Binds an address, without blocking accepts.
///
/// `[::]` accepts connections over IPv6 and IPv4, so that one default serves clusters of either family and of both. Where the
/// kernel has no IPv6, it is `0.0.0.0`.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = bind_with(address, TcpListener::bind)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn bind_with<T>(address: SocketAddr, bind: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    match bind(address) {
        // Other errors mean that there is no IPv6: Linux says that it does not support the family, or has no such address.
        Err(error)
            if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
                && !matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied) =>
        {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        bound => bound,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    /// Binds as a kernel does that refuses each IPv6 address with this error.
    fn bound(address: &str, refusal: io::Error) -> Result<String, ErrorKind> {
        let refusal = std::cell::Cell::new(Some(refusal));
        let bound = bind_with(address.parse().unwrap(), |address: SocketAddr| match address {
            SocketAddr::V4(_) => Ok(address.to_string()),
            SocketAddr::V6(_) => Err(refusal.take().unwrap()),
        });
        bound.map_err(|error| error.kind())
    }

    #[test]
    fn without_ipv6_all_addresses_are_those_of_ipv4() {
        // EAFNOSUPPORT of Linux.
        let unsupported = || io::Error::from_raw_os_error(97);
        assert_eq!(bound("[::]:8443", unsupported()), Ok("0.0.0.0:8443".into()));
        let missing = io::Error::from(ErrorKind::AddrNotAvailable);
        assert_eq!(bound("[::]:8443", missing), Ok("0.0.0.0:8443".into()));
        assert!(bound("[::1]:8443", unsupported()).is_err(), "another address was meant");
    }

    #[test]
    fn a_port_in_use_or_not_permitted_is_an_error() {
        for kind in [ErrorKind::AddrInUse, ErrorKind::PermissionDenied] {
            assert_eq!(bound("[::]:80", io::Error::from(kind)), Err(kind));
        }
    }

    #[test]
    fn all_addresses_include_those_of_ipv4() {
        let listener = bind("[::]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
