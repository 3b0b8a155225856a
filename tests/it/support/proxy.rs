//! A TCP proxy on the loopback that can become a black hole: connections stay open, and nothing goes through any more.
#![allow(dead_code)]

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The proxy. It ends with this value.
pub struct Proxy {
    pub address: SocketAddr,
    holes: watch::Sender<u32>,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    /// Forwards to an address.
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let holes = watch::Sender::new(0);
        let sender = holes.clone();
        let task = tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let mut hole = sender.subscribe();
                tokio::spawn(async move {
                    let mut far = TcpStream::connect(target).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        // Both ends stay open, and the kernel acknowledges what arrives.
                        Ok(()) = hole.changed() => std::future::pending().await,
                    }
                });
            }
        });
        Self { address, holes, task }
    }

    /// What is connected now receives nothing any more; new connections work.
    pub fn swallow_connections(&self) {
        self.holes.send_modify(|count| *count += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}
