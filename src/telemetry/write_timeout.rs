//! A connection that fails when its peer reads nothing for too long, so that an unread response is not kept.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// A stream whose writes wait for the peer for a limited time.
pub(super) struct WriteTimeout<S> {
    stream: S,
    /// The longest wait for the peer to read anything.
    timeout: Duration,
    /// The end of the current wait; `None`: the peer has room.
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    pub(super) fn new(stream: S, timeout: Duration) -> Self {
        let until = None;
        Self { stream, timeout, until }
    }

    pub(super) fn get_ref(&self) -> &S {
        &self.stream
    }

    /// Passes on the outcome of a write, or fails once writes have waited for too long.
    fn checked<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.until = None;
            return written;
        }
        let timeout = self.timeout;
        let until = self
            .until
            .get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + timeout)));
        ready!(until.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.checked(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.checked(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    const MAX_UNREAD: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_write_fails_when_nothing_is_read_for_the_time_and_not_before() {
        let (ours, mut peer) = duplex(4);
        let mut ours = WriteTimeout::new(ours, MAX_UNREAD);
        let since = Instant::now();
        let slow = tokio::spawn(async move {
            for _ in 0..3 {
                tokio::time::sleep(MAX_UNREAD.checked_sub(Duration::from_millis(1)).unwrap()).await;
                peer.read_exact(&mut [0; 4]).await.unwrap();
            }
            peer
        });
        ours.write_all(&[1; 16]).await.unwrap();
        let peer = slow.await.unwrap();
        assert!(since.elapsed() > 2 * MAX_UNREAD, "each read gives it time again");
        let since = Instant::now();
        let failed = ours.write_all(&[1; 1]).await.unwrap_err();
        assert_eq!(
            (failed.kind(), since.elapsed() >= MAX_UNREAD),
            (io::ErrorKind::TimedOut, true)
        );
        drop(peer);
    }
}
