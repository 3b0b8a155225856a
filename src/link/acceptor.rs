//! Connections of the link's server: each needs a slot from before its handshake to its end, and is closed when it loses it.

use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::{Extension, Router};
use axum_server::accept::Accept;
use axum_server::tls_rustls::RustlsAcceptor;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::WaitForCancellationFutureOwned;

use agentloop_support::connections::ConnectionLimiter;

type TlsStream = <RustlsAcceptor as Accept<TcpStream, Router>>::Stream;

/// Accepts TLS connections that get a slot; their requests carry it as an extension.
#[derive(Clone)]
pub(super) struct SlotAcceptor {
    pub(super) tls: RustlsAcceptor,
    pub(super) slots: Arc<ConnectionLimiter>,
}

impl Accept<TcpStream, Router> for SlotAcceptor {
    type Stream = EvictableStream;
    type Service = Router;
    type Future = BoxFuture<'static, Result<(EvictableStream, Router)>>;

    fn accept(&self, stream: TcpStream, app: Router) -> Self::Future {
        let slot = stream
            .peer_addr()
            .ok()
            .and_then(|peer| self.slots.take(peer.ip().to_canonical()));
        let tls = self.tls.clone();
        Box::pin(async move {
            let slot = slot.ok_or_else(|| Error::other("no slot"))?;
            let (stream, app) = tokio::select! {
                accepted = tls.accept(stream, app) => accepted?,
                () = slot.evicted() => return Err(lost()),
            };
            let stream = EvictableStream {
                stream,
                evicted: Box::pin(slot.evicted()),
            };
            Ok((stream, app.layer(Extension(Arc::new(slot)))))
        })
    }
}

/// A connection that ends when it loses its slot.
pub(super) struct EvictableStream {
    stream: TlsStream,
    evicted: Pin<Box<WaitForCancellationFutureOwned>>,
}

fn lost() -> Error {
    Error::new(ErrorKind::ConnectionAborted, "another connection got its slot")
}

impl AsyncRead for EvictableStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        // An idle connection waits here for its next request.
        if self.evicted.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(lost()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for EvictableStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
